// The daemons of the development cluster on Kubernetes, in one program: the name by which it is
// called selects one. One program is an eighth of the size of eight, since most packages are
// shared.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func command(name string) *cobra.Command {
	switch name {
	case "kube-apiserver":
		return apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		return controllers.NewControllerManagerCommand()
	case "kube-scheduler":
		return scheduler.NewSchedulerCommand()
	case "kubelet":
		return kubelet.NewKubeletCommand(context.Background())
	case "kubectl":
		return kubectl.NewDefaultKubectlCommand()
	}
	return nil
}

func main() {
	name := filepath.Base(os.Args[0])
	switch name {
	case "etcd":
		etcdmain.Main(os.Args)
		return
	case "gpu-device-plugin":
		if err := servePlugin(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, name+":", err)
			os.Exit(1)
		}
		return
	}
	selected := command(name)
	if selected == nil {
		fmt.Fprintln(os.Stderr, "no daemon has this name:", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(selected))
}

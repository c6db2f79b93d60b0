// The first process of each pod of the development cluster: it holds the pod's namespaces until a
// signal ends it.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	<-ended
}

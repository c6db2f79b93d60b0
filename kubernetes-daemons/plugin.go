package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// What a node offers, as the file that is the plugin's only argument describes it.
type offer struct {
	Resource string            `json:"resource"`
	Devices  []string          `json:"devices"`
	Mounts   map[string]string `json:"mounts"`
	Environ  map[string]string `json:"environ"`
}

// A device plugin of simulated GPUs. A container gets the devices in NVIDIA_VISIBLE_DEVICES, as of
// NVIDIA's plugin, and files of the node, as of NVIDIA's container toolkit.
type plugin struct {
	api.UnimplementedDevicePluginServer
	offer offer
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (p *plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	var devices []*api.Device
	for _, id := range p.offer.Devices {
		devices = append(devices, &api.Device{ID: id, Health: api.Healthy})
	}
	if err := stream.Send(&api.ListAndWatchResponse{Devices: devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		environ := map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(container.DevicesIds, ",")}
		for name, value := range p.offer.Environ {
			environ[name] = value
		}
		var mounts []*api.Mount
		for inside, outside := range p.offer.Mounts {
			mounts = append(mounts, &api.Mount{ContainerPath: inside, HostPath: outside, ReadOnly: true})
		}
		response.ContainerResponses = append(
			response.ContainerResponses,
			&api.ContainerAllocateResponse{Envs: environ, Mounts: mounts},
		)
	}
	return response, nil
}

// servePlugin registers with the kubelet, and again after each restart of the kubelet, which
// removes the plugin's socket.
func servePlugin(arguments []string) error {
	if len(arguments) != 1 {
		return fmt.Errorf("usage: gpu-device-plugin FILE")
	}
	content, err := os.ReadFile(arguments[0])
	if err != nil {
		return err
	}
	served := &plugin{}
	if err := json.Unmarshal(content, &served.offer); err != nil {
		return err
	}
	socket := filepath.Join(api.DevicePluginPath, "hopsgpu.sock")
	for {
		if err := serveOnce(served, socket); err != nil {
			return err
		}
	}
}

func serveOnce(served *plugin, socket string) error {
	if err := os.MkdirAll(api.DevicePluginPath, 0o750); err != nil {
		return err
	}
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, served)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	defer server.Stop()
	// The kubelet connects to the socket while it registers the plugin.
	for register(served.offer.Resource, filepath.Base(socket)) != nil {
		if isGone(socket) {
			return nil
		}
		time.Sleep(500 * time.Millisecond)
	}
	fmt.Println("registered", served.offer.Resource, len(served.offer.Devices))
	for {
		select {
		case err := <-ended:
			return err
		case <-time.After(time.Second):
			if isGone(socket) {
				return nil
			}
		}
	}
}

// isGone returns whether a kubelet that started has removed the socket.
func isGone(socket string) bool {
	_, err := os.Stat(socket)
	return os.IsNotExist(err)
}

func register(resource, endpoint string) error {
	connection, err := grpc.NewClient(
		"unix://"+api.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()),
	)
	if err != nil {
		return err
	}
	defer connection.Close()
	request := &api.RegisterRequest{Version: api.Version, Endpoint: endpoint, ResourceName: resource}
	limited, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err = api.NewRegistrationClient(connection).Register(limited, request)
	return err
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/test/internal/cri"
	"github.com/sluice-net/sluice/test/internal/oci"
	"github.com/sluice-net/sluice/test/internal/pod"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// TestKernelPodsTalkThroughTheDatapath proves INV-20: two pods that the shim connected exchange packets of every
// protocol, and the counters prove that the eBPF path carried them.
func TestKernelPodsTalkThroughTheDatapath(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "web", "client")
	before := n.counters(t)
	exchange(t, pods[0], pods[1])
	after := n.counters(t)
	if delivered := after[deliveredLocal] - before[deliveredLocal]; delivered < 20 {
		t.Errorf("%s grew by %d packets, want the 20 of the exchange or more: the eBPF path did not carry them",
			deliveredLocal, delivered)
	}
	for _, p := range pods {
		n.del(t, p)
	}
	n.wantNothingHeld(t)
}

// TestKernelContainerdRunsPods drives a real containerd over CRI, as kubelet
// does.
func TestKernelContainerdRunsPods(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()

	// The path is short, because containerd creates sockets below it.
	dir := filepath.Join("/run", name(t, "slcri"))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	image := oci.Image{Name: "sluice.test/pause:1", Binary: filepath.Join(dir, "pause"), Entrypoint: "/pause"}
	cmd := run(ctx, t, "env", "CGO_ENABLED=0", "go", "build", "-trimpath", "-ldflags=-s -w", "-o", image.Binary,
		"../pause")
	if cmd != "" {
		t.Logf("build pause: %s", cmd)
	}
	archive := filepath.Join(dir, "pause.tar")
	if err := oci.WriteArchive(archive, image); err != nil {
		t.Fatal(err)
	}
	runtime, err := cri.Start(ctx, cri.Options{
		Dir: dir, CNIPlugins: []string{n.Plugin()}, CNIConfig: n.CNIConflist(), PauseImage: archive,
		PauseImageName: image.Name,
	})
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	t.Cleanup(func() {
		if !closed {
			if err := runtime.Close(); err != nil {
				t.Error(err)
			}
		}
	})

	var pods []pod.Pod
	for _, app := range []string{"web", "client"} {
		sandbox, err := runtime.RunPod(ctx, "demo", app, map[string]string{"sluice.io/labels": "app=" + app + ",tier=front"})
		if err != nil {
			t.Fatal(err)
		}
		p := pod.Pod{Name: sandbox.Name, Netns: sandbox.Netns}.WithAddresses(parseAll(t, sandbox.IPs))
		pods = append(pods, p)

		got, err := n.datapath.GetEndpoint(ctx, &datapathv1.GetEndpointRequest{Owner: owner(sandbox.ID)})
		if err != nil {
			t.Fatalf("endpoint of sandbox %s: %v", app, err)
		}
		want := []string{
			"k8s:app=" + app, "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=demo",
			"k8s:io.kubernetes.pod.namespace=demo", "k8s:tier=front",
		}
		if labels := labelTexts(got.GetEndpoint().GetLabels()); !slices.Equal(labels, want) {
			t.Errorf("labels of %s: got %v, want %v", app, labels, want)
		}
		if number := got.GetEndpoint().GetIdentity(); number < 256 || number > 65535 {
			t.Errorf("identity of %s is %d, want one of the cluster's, 256 to 65535", app, number)
		}
	}
	exchange(t, pods[0], pods[1])

	closed = true
	if err := runtime.Close(); err != nil {
		t.Errorf("close the runtime: %v", err)
	}
	n.wantNothingHeld(t)
}

func parseAll(t *testing.T, texts []string) []netip.Addr {
	t.Helper()
	addresses, err := pod.ParseAddresses(texts)
	if err != nil {
		t.Fatal(err)
	}
	return addresses
}

func owner(containerID string) *workloadv1.Owner {
	return &workloadv1.Owner{ContainerId: containerID, InterfaceName: "eth0"}
}

func labelTexts(labels []*workloadv1.Label) []string {
	var texts []string
	for _, l := range labels {
		texts = append(texts, strings.Join([]string{l.GetSource() + ":" + l.GetKey(), l.GetValue()}, "="))
	}
	slices.Sort(texts)
	return texts
}

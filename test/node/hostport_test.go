// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// withPorts returns a runtime's configuration of a container with these ports.
func (n *testNode) withPorts(t *testing.T, ports ...map[string]any) []byte {
	t.Helper()
	return n.config(t, "1.0.0", map[string]any{"runtimeConfig": map[string]any{"portMappings": ports}})
}

// TestHostPortsLeadToTheirContainer: from ADD to DEL, the host ports of a container are reachable from the node and
// from pods, with each protocol and family. Meanwhile no other container gets these ports.
func TestHostPortsLeadToTheirContainer(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	client := n.addPods(t, "client")[0]
	host := pod.Pod{Name: "host", Netns: n.Netns()}
	config := n.withPorts(t,
		map[string]any{"hostPort": 9080, "containerPort": backendPort, "protocol": "TCP"},
		map[string]any{"hostPort": 9080, "containerPort": backendPort, "protocol": "udp", "hostIP": ""},
		map[string]any{"hostPort": 0, "containerPort": 1},
		map[string]any{"hostPort": 9081, "containerPort": backendPort, "protocol": "TCP", "hostIP": "127.0.0.1"},
	)
	web := n.add(t, newPod(t, "web"), config)
	serveName(t, web)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	const port = 9080
	node4 := netip.AddrPortFrom(hostAddress(web), port)
	node6 := netip.AddrPortFrom(netip.PrefixFrom(web.IPv6, 64).Masked().Addr().Next(), port)
	local := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)
	for from, addresses := range map[pod.Pod][]netip.AddrPort{host: {node4, node6, local}, client: {node4, node6}} {
		for _, to := range addresses {
			for protocol, ask := range asks {
				if name, err := ask(ctx, from, to); err != nil || name != web.Name {
					t.Errorf("%s asks %s by %s: %q, %v, want %s", from.Name, to, protocol, name, err, web.Name)
				}
			}
		}
	}
	// A host port of a loopback address is only for the node.
	loopback := netip.AddrPortFrom(local.Addr(), port+1)
	if name, err := askTCP(ctx, host, loopback); err != nil || name != web.Name {
		t.Errorf("the node asks %s: %q, %v, want %s", loopback, name, err, web.Name)
	}
	for _, at := range []netip.AddrPort{loopback, netip.AddrPortFrom(node4.Addr(), port+1)} {
		if name, err := askTCP(ctx, client, at); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("a pod asks %s: %q, %v, want ECONNREFUSED", at, name, err)
		}
	}
	out := n.sluice(t, 0, "", "endpoint", "get", web.Name)
	const ports = "Host ports 9080=8080/tcp 9080=8080/udp 127.0.0.1:9081=8080/tcp"
	if !strings.Contains(strings.Join(strings.Fields(out), " "), ports) {
		t.Errorf("the endpoint is\n%s", out)
	}

	other := newPod(t, "other")
	const tryAgain = 11
	var failure *cni.Error
	_, err := n.call(ctx, "ADD", other, config)
	if !errors.As(err, &failure) || failure.Code != tryAgain ||
		!strings.Contains(failure.Message, "in use by endpoint "+web.Name) {
		t.Errorf("ADD of another container with its ports: %v, want code %d that names %s", err, tryAgain, web.Name)
	}
	n.del(t, web)
	if name, err := askTCP(ctx, host, node4); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("after DEL %s answers: %q, %v, want ECONNREFUSED", node4, name, err)
	}
	other = n.add(t, other, config)
	serveName(t, other)
	if name, err := askTCP(ctx, client, node4); err != nil || name != other.Name {
		t.Errorf("at %s %q answers, %v, want %s", node4, name, err, other.Name)
	}
}

// TestOutsideReachesANode, on a node without traffic between nodes: a container's host port and a service's node port
// are reachable from the start, across a restart of the datapath, and until they are removed. The container of the node
// port sees the client's address.
func TestOutsideReachesANode(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(o *devnode.Options) {
		o.Args = map[string][]string{devnode.Datapath: {"--underlay-devices=world"}}
	})
	world := n.outside(t)
	web := n.add(t, newPod(t, "web"), n.withPorts(t,
		map[string]any{"hostPort": 9080, "containerPort": backendPort, "protocol": "TCP"},
		map[string]any{"hostPort": 9080, "containerPort": backendPort, "protocol": "UDP"},
		map[string]any{"hostPort": 9081, "containerPort": backendPort, "protocol": "TCP", "hostIP": "127.0.0.1"},
	))
	serveName(t, web)
	manifests := strings.NewReplacer(
		"  clusterIP:", "  type: NodePort\n  clusterIP:",
		"protocol: TCP, port: 80,", "protocol: TCP, port: 80, nodePort: 30080,",
		"protocol: UDP, port: 80,", "protocol: UDP, port: 80, nodePort: 30080,",
	).Replace(serviceManifests(web))
	n.sluice(t, 0, manifests, "service", "apply", "-f", "-")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	works := func(when string) {
		t.Helper()
		for _, gateway := range worldGateways {
			for _, port := range []uint16{9080, 30080} {
				to := netip.AddrPortFrom(gateway.Addr(), port)
				for protocol, ask := range asks {
					if name, err := ask(ctx, world, to); err != nil || name != web.Name {
						t.Errorf("%s, %s by %s: %q, %v, want %s", when, to, protocol, name, err, web.Name)
					}
				}
			}
		}
	}
	servicetest.Eventually(t, "the uplink leads to the container", func() bool {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := askTCP(ctx, world, netip.AddrPortFrom(worldGateways[0].Addr(), 9080))
		return err == nil
	})
	works("at first")
	to := netip.AddrPortFrom(worldGateways[0].Addr(), 9081)
	if name, err := askTCP(ctx, world, to); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("at %s, which is for the node, %q answers, %v, want ECONNREFUSED", to, name, err)
	}
	if err := n.Restart(ctx, devnode.Datapath); err != nil {
		t.Fatal(err)
	}
	works("after a restart")
	n.del(t, web)
	for _, port := range []uint16{9080, 30080} {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		to := netip.AddrPortFrom(worldGateways[0].Addr(), port)
		if name, err := askTCP(ctx, world, to); err == nil {
			t.Errorf("after DEL %q answers at %s", name, to)
		}
		cancel()
	}
}

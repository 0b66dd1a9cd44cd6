// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// referencePlugins is the directory of Debian's containernetworking-plugins.
const referencePlugins = "/usr/lib/cni"

// network is a CNI plugin with its configuration, executed in the network namespace of a node.
type network struct {
	name string
	// node is the Sluice node; nil for a reference network.
	node   *devnode.Node
	plugin string
	config []byte
	// args are CNI_ARGS.
	args string
	// netns is the node's namespace; empty for the benchmark's own.
	netns string
	// divisor reduces the number of pods: only 1/divisor of them are attached to this network.
	divisor int
}

// reference returns a network of a reference plugin with host-local IPAM. With IPv6, ptp waits more than a second for
// duplicate address detection, so only a tenth of the pods are attached to a network of both families.
func reference(kind, netns, dataDir string, ranges ...string) network {
	extra := ""
	if kind == "bridge" {
		extra = `"bridge":"bench0","isGateway":true,`
	}
	n := network{name: kind + " + host-local", plugin: filepath.Join(referencePlugins, kind), netns: netns, divisor: 1}
	if len(ranges) > 1 {
		n.name += ", both families"
		n.divisor = 10
	}
	subnets := ""
	for i, r := range ranges {
		if i > 0 {
			subnets += ","
		}
		subnets += fmt.Sprintf(`[{"subnet":%q}]`, r)
	}
	n.config = fmt.Appendf(nil, `{"cniVersion":"1.0.0","name":"bench-%s-%d","type":%q,%s`+
		`"ipam":{"type":"host-local","ranges":[%s],"dataDir":%q}}`,
		kind, len(ranges), kind, extra, subnets, dataDir)
	return n
}

// call executes the plugin. It returns the plugin's result, and the processor time of the plugin and its child
// processes.
func (n network) call(ctx context.Context, command, id, netns string) (result []byte, cpu time.Duration, err error) {
	run := func() error {
		result, err = cni.Run(ctx, cni.Call{
			Plugin: n.plugin, Command: command, ContainerID: id, Netns: netns, IfName: "eth0",
			Args: n.args, Path: referencePlugins, Config: n.config, CPU: &cpu,
		})
		return err
	}
	if n.netns == "" {
		err = run()
		return result, cpu, err
	}
	err = pod.In(n.netns, run)
	return result, cpu, err
}

// connect makes a pod's namespace and connects the pod.
func (n network) connect(ctx context.Context, id string) (pod.Pod, error) {
	p := pod.Pod{Name: id, Netns: pod.NetnsPath(id)}
	if err := pod.NewNetns(p.Netns); err != nil {
		return pod.Pod{}, err
	}
	result, _, err := n.call(ctx, "ADD", id, p.Netns)
	if err != nil {
		return pod.Pod{}, errors.Join(fmt.Errorf("%s: ADD: %w", n.name, err), pod.DeleteNetns(p.Netns))
	}
	addresses, err := cni.Addresses(result)
	if err != nil {
		return pod.Pod{}, err
	}
	return p.WithAddresses(addresses), nil
}

// disconnect executes DEL and removes the namespace.
func (n network) disconnect(ctx context.Context, p pod.Pod) error {
	_, _, err := n.call(ctx, "DEL", p.Name, p.Netns)
	return errors.Join(err, pod.DeleteNetns(p.Netns))
}

// Addresses of the pairs that the benchmark configures itself.
var (
	bareFrom = netip.MustParseAddr("192.0.2.1")
	bareTo   = netip.MustParseAddr("192.0.2.2")
)

// barePair joins two new namespaces by one veth pair. It is the floor for every network.
func barePair(prefix string) (path, func() error, error) {
	from := pod.Pod{Name: prefix + "-a", Netns: pod.NetnsPath(prefix + "-a"), IPv4: bareFrom}
	to := pod.Pod{Name: prefix + "-b", Netns: pod.NetnsPath(prefix + "-b"), IPv4: bareTo}
	remove := func() error { return errors.Join(pod.DeleteNetns(from.Netns), pod.DeleteNetns(to.Netns)) }
	for _, p := range []pod.Pod{from, to} {
		if err := pod.NewNetns(p.Netns); err != nil {
			return path{}, nil, errors.Join(err, remove())
		}
	}
	err := func() error {
		peer, err := os.Open(to.Netns)
		if err != nil {
			return err
		}
		defer peer.Close()
		err = pod.In(from.Netns, func() error {
			attributes := netlink.NewLinkAttrs()
			attributes.Name = "eth0"
			pair := &netlink.Veth{LinkAttrs: attributes, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(peer.Fd()))}
			if err := netlink.LinkAdd(pair); err != nil {
				return fmt.Errorf("make bare veth pair: %w", err)
			}
			return configure(from.IPv4)
		})
		if err != nil {
			return err
		}
		return pod.In(to.Netns, func() error { return configure(to.IPv4) })
	}()
	if err != nil {
		return path{}, nil, errors.Join(err, remove())
	}
	return path{name: "bare veth pair", from: from, to: to}, remove, nil
}

// configure adds an address in a /30 to eth0 in the current namespace and sets the device up.
func configure(address netip.Addr) error {
	_, err := addressed("eth0", netip.PrefixFrom(address, 30))
	return err
}

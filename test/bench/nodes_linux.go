// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/devnode"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// Positions of the paths between two nodes. The bare pair precedes them.
const (
	linuxRouted = bare + 1 + iota
	linuxTunnelled
	native
	nativeGuarded
	overlay
	overlayGuarded
	byDevice
	byDeviceGuarded
)

// twoNodes is a cluster of two nodes.
type twoNodes struct {
	name  string // its routing mode and settings
	nodes []*devnode.Node
}

// nodes measures between pods of two nodes. It also measures the cost for an ADD of making the pod known to other
// nodes.
func (b *bench) nodes(ctx context.Context) (err error) {
	var made undo
	defer func() { err = errors.Join(err, made.all()) }()
	var clusters []twoNodes
	start := func(name, routing string, args ...string) error {
		c, err := devnode.UpCluster(ctx, devnode.ClusterOptions{Nodes: 2, Routing: routing, Options: devnode.Options{
			Instance: fmt.Sprintf("%s%s%d", b.prefix, routing[:2], len(clusters)), BinDir: b.binDir,
			Args: map[string][]string{devnode.IPAM: {"--quarantine=1s"}, devnode.Datapath: args},
		}})
		if err != nil {
			return err
		}
		made.add(func() error { return c.Down(context.WithoutCancel(ctx)) })
		nodes, err := c.Nodes()
		clusters = append(clusters, twoNodes{name, nodes})
		return err
	}
	for _, routing := range []string{"native", "overlay"} {
		if err := start(routing, routing); err != nil {
			return err
		}
	}
	if err := start("overlay by the tunnel device", "overlay", "--routing-shortcut=off"); err != nil {
		return err
	}
	if err := b.trafficOfNodes(ctx, clusters); err != nil {
		return err
	}
	clusters = clusters[:2]
	if err := start("none", "none"); err != nil {
		return err
	}
	return b.addsOfNodes(ctx, clusters)
}

// trafficOfNodes measures traffic between pods of two nodes, in each routing mode.
func (b *bench) trafficOfNodes(ctx context.Context, clusters []twoNodes) (err error) {
	paths, remove, err := b.pathsOfNodes(ctx, clusters)
	defer func() { err = errors.Join(err, remove()) }()
	if err != nil {
		return err
	}
	before, err := forwardedByStack(clusters)
	if err != nil {
		return err
	}
	deviceBefore, err := byTunnelDevices(clusters[1])
	if err != nil {
		return err
	}
	all, err := b.compare(paths, func(p path) (float64, error) { return stream(p, b.sizes.streamed) })
	if err != nil {
		return err
	}
	deviceAfter, err := byTunnelDevices(clusters[1])
	if err != nil {
		return err
	}
	after, err := forwardedByStack(clusters)
	if err != nil {
		return err
	}
	fmt.Fprintf(b.out,
		"TCP over IPv4, one byte each way, %d exchanges and %d connections, and one stream of %d MiB, of each path in each "+
			"of %d rounds. Ratios are to the bare pair in the same round, the median over the rounds.\n\n",
		b.sizes.exchanges, b.sizes.connects, b.sizes.streamed>>20, b.sizes.rounds)
	fmt.Fprintln(b.out,
		"| path | round trip p5 | p50 | p5 ratio | p50 ratio | connects/s | ratio | stream, Gbit/s | ratio |")
	fmt.Fprintln(b.out, "|---|---|---|---|---|---|---|---|---|")
	for i, p := range paths {
		m := all[i]
		fmt.Fprintf(b.out, "| %s | %s | %s | %.3f | %.3f | %.0f | %.3f | %.1f | %.3f |\n", p.name,
			microseconds(m.times.quantile(0.05)), microseconds(m.times.quantile(0.5)), median(m.p5), median(m.p50),
			median(m.connects), median(m.connectRatio), median(m.rates)*8/1e9, median(m.rateRatio))
	}
	fmt.Fprintln(b.out)
	for _, pair := range []struct {
		of, to int
		want   float64
	}{
		{native, linuxRouted, 1},
		{nativeGuarded, linuxRouted, 0.95},
		{overlay, linuxTunnelled, 0.82},
		{overlayGuarded, linuxTunnelled, 0.82},
		{byDevice, linuxTunnelled, 1},
		{byDeviceGuarded, linuxTunnelled, 1},
		{overlay, byDevice, 1},
		{overlayGuarded, byDeviceGuarded, 1},
	} {
		b.wantRatio(fmt.Sprintf("request/response p5 to %s: %s", paths[pair.to].name, paths[pair.of].name), pair.want,
			median(inTurn(all[pair.of].p5, all[pair.to].p5)))
	}
	b.wantAtLeast("connects/s to the bare pair: "+paths[overlay].name, 0.62, median(all[overlay].connectRatio))
	b.wantAtLeast("stream to Linux VXLAN: "+paths[overlay].name, 1,
		median(inTurn(all[overlay].rates, all[linuxTunnelled].rates)))
	// If the tunnel device passed the packets, the figures would show its performance.
	b.wantCount("packets that passed the tunnel devices of sluice overlay", 1000, deviceAfter-deviceBefore)
	// If the stack forwarded packets, the figures of Sluice would show the performance of Linux.
	b.wantCount("packets that the nodes' stacks forwarded", 1000, after-before)
	return nil
}

// pathsOfNodes makes pods and the paths between them, in the order of the constants above. The returned function
// removes them, also after an error.
func (b *bench) pathsOfNodes(ctx context.Context, clusters []twoNodes) (paths []path, remove func() error, err error) {
	var made undo
	for _, pair := range []func() (path, func() error, error){
		func() (path, func() error, error) { return barePair(b.prefix + "-nbare") },
		func() (path, func() error, error) { return linuxNodes(b.prefix+"-lr", false) },
		func() (path, func() error, error) { return linuxNodes(b.prefix+"-lv", true) },
	} {
		p, undo, err := pair()
		if err != nil {
			return nil, made.all, err
		}
		made.add(undo)
		paths = append(paths, p)
	}
	for _, c := range clusters {
		if err := b.guardNodes(ctx, c); err != nil {
			return nil, made.all, err
		}
		for _, way := range []struct{ name, from, to string }{
			{"sluice " + c.name + ", no policy", "plain", "plain"},
			{"sluice " + c.name + ", policies on both sides", "client", "server"},
		} {
			from, err := labelledOn(c.nodes[0], way.name, "role", way.from)
			if err != nil {
				return nil, made.all, err
			}
			to, err := labelledOn(c.nodes[1], way.name, "role", way.to)
			if err != nil {
				return nil, made.all, err
			}
			p := path{name: way.name}
			for _, end := range []struct {
				network network
				pod     *pod.Pod
			}{{from, &p.from}, {to, &p.to}} {
				if *end.pod, err = end.network.connect(ctx, fmt.Sprintf("%s-n-%d", b.prefix, len(made))); err != nil {
					return nil, made.all, err
				}
				made.add(func() error { return end.network.disconnect(context.WithoutCancel(ctx), *end.pod) })
			}
			paths = append(paths, p)
		}
	}
	for _, p := range paths {
		if err := reachable(ctx, p); err != nil {
			return nil, made.all, err
		}
	}
	// Without this check, unenforced policies would appear to cost nothing.
	for _, pair := range [][2]int{{native, nativeGuarded}, {overlay, overlayGuarded}} {
		denied := path{from: paths[pair[0]].from, to: paths[pair[1]].to}
		attempt, cancel := context.WithTimeout(ctx, time.Second)
		err := pod.ExchangeTCP(attempt, denied.from, denied.to, denied.to.IPv4, []byte("hello"))
		cancel()
		if err == nil {
			return nil, made.all, fmt.Errorf("%s: they do not hold", paths[pair[1]].name)
		}
	}
	return paths, made.all, nil
}

// guardNodes applies policies to the guarded pods of each node.
func (b *bench) guardNodes(ctx context.Context, c twoNodes) error {
	for _, n := range c.nodes {
		conn, err := b.dialTo(n, devnode.Policy)
		if err != nil {
			return err
		}
		if _, err := (policies{policyv1.NewPolicyServiceClient(conn)}).upsert(ctx, guardManifests); err != nil {
			return err
		}
	}
	return nil
}

// reachable waits until one end of a path reaches the other: the nodes may not have learned the pods' addresses yet.
func reachable(ctx context.Context, p path) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		attempt, stop := context.WithTimeout(ctx, time.Second)
		err := pod.ExchangeTCP(attempt, p.from, p.to, p.to.IPv4, []byte("hello"))
		stop()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: the pods do not reach each other: %w", p.name, err)
		case <-time.After(10 * time.Millisecond): // retry interval
		}
	}
}

// byTunnelDevices returns the number of packets that the tunnel devices of the nodes have sent and received.
func byTunnelDevices(c twoNodes) (sum int, err error) {
	for _, n := range c.nodes {
		err := pod.In(n.Netns(), func() error {
			links, err := netlink.LinkList()
			for _, l := range links {
				if s := l.Attrs().Statistics; l.Type() == "vxlan" && s != nil {
					sum += int(s.TxPackets + s.RxPackets) //nolint:gosec // small
				}
			}
			return err
		})
		if err != nil {
			return 0, err
		}
	}
	return sum, nil
}

// forwardedByStack returns the number of IPv4 packets that the stacks of the nodes have forwarded. It does not
// include packets that programs redirected.
func forwardedByStack(clusters []twoNodes) (sum int, err error) {
	for _, c := range clusters {
		for _, n := range c.nodes {
			err := pod.In(n.Netns(), func() error {
				content, err := os.ReadFile("/proc/thread-self/net/snmp")
				if err != nil {
					return err
				}
				count, err := forwDatagrams(string(content))
				sum += count
				return err
			})
			if err != nil {
				return 0, err
			}
		}
	}
	return sum, nil
}

// forwDatagrams reads the counter from the two IPv4 lines of /proc/net/snmp, one with names and one with values.
func forwDatagrams(snmp string) (int, error) {
	var names []string
	for line := range strings.Lines(snmp) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != "Ip:" {
			continue
		}
		if names == nil {
			names = fields
			continue
		}
		for i, name := range names {
			if name == "ForwDatagrams" && i < len(fields) {
				return strconv.Atoi(fields[i])
			}
		}
	}
	return 0, errors.New("no ForwDatagrams in /proc/net/snmp")
}

// addsOfNodes compares ADDs by routing mode.
func (b *bench) addsOfNodes(ctx context.Context, clusters []twoNodes) (err error) {
	times := map[string]samples{}
	var networks []network
	for _, c := range clusters {
		n, err := labelledOn(c.nodes[0], c.name, "role", "plain")
		if err != nil {
			return err
		}
		networks = append(networks, n)
	}
	release, err := b.hold(ctx, networks)
	defer func() { err = errors.Join(err, release()) }()
	if err != nil {
		return err
	}
	measured, err := b.addsInTurn(ctx, networks)
	if err != nil {
		return err
	}
	for i, n := range networks {
		times[n.name] = measured[i]
	}
	fmt.Fprintf(b.out, "ADD on a node of two with a label set that the node holds, one at a time, interleaved in %d "+
		"rounds, by `routing.mode`:\n\n", b.sizes.rounds)
	printTimes(b.out, rowsOf(networks, measured))
	for _, mode := range []struct {
		name  string
		above time.Duration
	}{{"native", 5 * time.Millisecond}, {"overlay", 300 * time.Microsecond}} {
		b.wantTime(fmt.Sprintf("ADD p50 with routing %s minus the p50 without routing", mode.name), mode.above,
			times[mode.name].quantile(0.5)-times["none"].quantile(0.5))
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// A pod answers at two ports. Each port has a node port.
const (
	echoPort    = 8080 // returns bytes and datagrams
	echoAt      = 30080
	connectPort = firstAnswer
	connectAt   = 30081
)

// Positions of the paths from outside to a pod of a node.
const (
	outsideRouted = iota
	outsideTracked
	outsideNft
	outsideNftMasquerade
	outsideDirect
	outsideNodePort
)

// outsidePath is a path from outside of a node to a pod on it.
type outsidePath struct {
	path
	echo, connect netip.AddrPort // destinations of the sender outside
	// TCP, UDP and connect, in this order
	figures [3]outsideFigure
}

type outsideFigure struct {
	times  samples
	p5     []float64 // of each round, in nanoseconds
	routed []float64 // ratio to the p5 of Linux routing
}

// nodePorts measures the cost of a node port for a sender outside.
func (b *bench) nodePorts(ctx context.Context) (err error) {
	paths, remove, err := b.outsidePaths(ctx)
	defer func() { err = errors.Join(err, remove()) }()
	if err != nil {
		return err
	}
	for round := range b.sizes.rounds {
		times := make([][3]samples, len(paths))
		for k := range paths {
			i := (k + round) % len(paths) // a different one begins each round
			if times[i], err = paths[i].measure(b.sizes); err != nil {
				return fmt.Errorf("%s: %w", paths[i].name, err)
			}
		}
		for i := range paths {
			for k := range paths[i].figures {
				f, p5 := &paths[i].figures[k], times[i][k].quantile(0.05)
				f.times = append(f.times, times[i][k]...)
				f.p5 = append(f.p5, float64(p5))
				f.routed = append(f.routed, ratio(p5, times[outsideRouted][k].quantile(0.05)))
			}
		}
	}
	fmt.Fprintf(b.out, "From outside of a node to a pod of it, over IPv4: %d exchanges of one byte by TCP and of %d "+
		"bytes by UDP, and %d calls of connect(), of each path in each of %d rounds. Ratios are of the p5 to the p5 of "+
		"Linux routing in the same round, the median over the rounds.\n\n",
		b.sizes.exchanges, datagramSize, b.sizes.connects, b.sizes.rounds)
	fmt.Fprintln(b.out, "| path | TCP p5 | p50 | ratio | UDP p5 | p50 | ratio | connect p5 | p50 | ratio |")
	fmt.Fprintln(b.out, "|---|---|---|---|---|---|---|---|---|---|")
	for _, p := range paths {
		fmt.Fprintf(b.out, "| %s |", p.name)
		for _, f := range p.figures {
			fmt.Fprintf(b.out, " %s | %s | %.3f |", microseconds(f.times.quantile(0.05)), microseconds(f.times.quantile(0.5)),
				median(f.routed))
		}
		fmt.Fprintln(b.out)
	}
	fmt.Fprintln(b.out)
	for k, what := range []string{"TCP request/response", "UDP request/response", "connect"} {
		for _, to := range []int{outsideNft, outsideNftMasquerade} {
			b.wantRatio(fmt.Sprintf("node port, %s p5 to %s", what, paths[to].name), 1,
				median(inTurn(paths[outsideNodePort].figures[k].p5, paths[to].figures[k].p5)))
		}
	}
	return nil
}

// measure measures a path once.
func (p outsidePath) measure(s sizes) (times [3]samples, err error) {
	listener, _, err := listenIn(p.to, echoPort)
	if err != nil {
		return times, err
	}
	defer unix.Close(listener)
	if times[0], err = exchanges(p.path, listener, p.echo, s.exchanges); err != nil {
		return times, err
	}
	if times[1], err = datagramExchanges(p.path, echoPort, p.echo, s.exchanges); err != nil {
		return times, err
	}
	c := connectPath{path: p.path, targets: []netip.AddrPort{p.connect}}
	times[2], err = c.connect(s.connects)
	return times, err
}

// datagramSize is the size of the exchanged datagrams.
const datagramSize = 64

// datagramExchanges sends n datagrams, one after the other, from one end of a path to an address that leads to a port
// of the other end, which returns each of them.
func datagramExchanges(p path, port uint16, at netip.AddrPort, n int) (samples, error) {
	server, err := datagramSocketIn(p.to, port)
	if err != nil {
		return nil, err
	}
	defer unix.Close(server)
	client, err := datagramSocketIn(p.from, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(client)
	if err := unix.Connect(client, sockaddr(at)); err != nil {
		return nil, err
	}
	served := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		served <- returnDatagrams(server, n)
	}()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	buf := make([]byte, datagramSize)
	times := make(samples, 0, n)
	for i := range n {
		start := time.Now()
		_, err := unix.Write(client, buf)
		if err == nil {
			err = readDatagram(client, buf)
		}
		if err != nil {
			return nil, fmt.Errorf("datagram %d of %d: %w", i+1, n, err)
		}
		times = append(times, time.Since(start))
	}
	return times, <-served
}

// returnDatagrams returns n datagrams to the sender of the first.
func returnDatagrams(fd, n int) error {
	buf := make([]byte, datagramSize)
	_, from, err := unix.Recvfrom(fd, buf, unix.MSG_PEEK)
	for errors.Is(err, unix.EINTR) {
		_, from, err = unix.Recvfrom(fd, buf, unix.MSG_PEEK)
	}
	if err == nil {
		err = unix.Connect(fd, from)
	}
	for range n {
		if err == nil {
			err = readDatagram(fd, buf)
		}
		if err == nil {
			_, err = unix.Write(fd, buf)
		}
	}
	return err
}

// outsidePaths makes nodes of the same shape, each with a pod and a network outside, in the order of the constants
// above. The returned function removes them, also after an error.
func (b *bench) outsidePaths(ctx context.Context) (paths []outsidePath, remove func() error, err error) {
	var made undo
	add := func(p path, name string, at netip.Addr) {
		p.name = name
		o := outsidePath{path: p, echo: netip.AddrPortFrom(at, echoAt), connect: netip.AddrPortFrom(at, connectAt)}
		if at == p.to.IPv4 {
			o.echo, o.connect = netip.AddrPortFrom(at, echoPort), netip.AddrPortFrom(at, connectPort)
		}
		paths = append(paths, o)
	}
	var routed [3]routedPath // without rules, with node ports of policy Local, and with node ports of policy Cluster
	for i := range routed {
		r, undo, err := routedPair(fmt.Sprintf("%s-o%d", b.prefix, i))
		if err != nil {
			return nil, made.all, err
		}
		made.add(undo)
		routed[i] = r
		if i > 0 {
			if err := r.load(ctx, nftablesNodePorts(r.outsideAddress(), r.to.IPv4, i == 2), "nft", "-f", "-"); err != nil {
				return nil, made.all, err
			}
		}
	}
	sluice, node, undo, err := b.outsideOfNode(ctx)
	made.add(undo)
	if err != nil {
		return nil, made.all, err
	}
	add(routed[0].path, "Linux routing, direct", routed[0].to.IPv4)
	add(routed[1].path, "nftables, direct", routed[1].to.IPv4)
	add(routed[1].path, "nftables, node port", routed[1].outsideAddress())
	add(routed[2].path, "nftables, node port with masquerade", routed[2].outsideAddress())
	add(sluice, "sluice, direct", sluice.to.IPv4)
	add(sluice, "sluice, node port", node)
	for _, p := range []path{routed[0].path, routed[1].path, routed[2].path, sluice} {
		stop, err := answer(p.to)
		if err != nil {
			return nil, made.all, err
		}
		made.add(stop)
	}
	for _, p := range paths {
		if err := p.reached(ctx); err != nil {
			return nil, made.all, err
		}
	}
	return paths, made.all, nil
}

// reached waits until the sender reaches the pod: the datapath may not have found the device and the address outside
// yet.
func (p outsidePath) reached(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		attempt, stop := context.WithTimeout(ctx, time.Second)
		c, err := p.from.Dial(attempt, p.connect)
		stop()
		if err == nil {
			return c.Close()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: no answer from %s: %w", p.name, p.connect, err)
		case <-time.After(10 * time.Millisecond): // retry interval
		}
	}
}

// outsideAddress returns the node's address towards the first pod, which plays the sender outside.
func (r routedPath) outsideAddress() netip.Addr { return r.from.IPv4.Prev() }

// outsideOfNode makes a node with a pod, its service, and a network outside as in routedPair. It returns the path
// between them and the node's address outside.
func (b *bench) outsideOfNode(ctx context.Context) (p path, node netip.Addr, remove func() error, err error) {
	var made undo
	out := b.prefix + "-out"
	p.from = pod.Pod{Name: out, Netns: pod.NetnsPath(out), IPv4: netip.MustParseAddr("10.8.1.2")}
	node = p.from.IPv4.Prev()
	if err := pod.NewNetns(p.from.Netns); err != nil {
		return p, node, made.all, err
	}
	made.add(func() error { return pod.DeleteNetns(p.from.Netns) })
	n, err := devnode.Up(ctx, devnode.Options{Instance: b.prefix + "o", BinDir: b.binDir})
	if err != nil {
		return p, node, made.all, err
	}
	made.add(func() error { return n.Down(context.WithoutCancel(ctx)) })
	err = pod.In(n.Netns(), func() error {
		if _, err := hostEnd("outside", p.from.Netns, nil); err != nil {
			return err
		}
		_, err := addressed("outside", netip.PrefixFrom(node, 24))
		return err
	})
	if err == nil {
		err = pod.In(p.from.Netns, func() error {
			if _, err := addressed("eth0", netip.PrefixFrom(p.from.IPv4, 24)); err != nil {
				return err
			}
			return netlink.RouteAdd(&netlink.Route{Gw: node.AsSlice()})
		})
	}
	if err != nil {
		return p, node, made.all, fmt.Errorf("make a network outside: %w", err)
	}
	// Otherwise, the datapath takes the device of the default route, which leads to the caller, as the uplink.
	err = errors.Join(n.SetArgs(devnode.Datapath, "--underlay-devices=outside"), n.Restart(ctx, devnode.Datapath))
	if err != nil {
		return p, node, made.all, err
	}
	pods, err := labelledOn(n, "sluice", "role", "plain")
	if err != nil {
		return p, node, made.all, err
	}
	if p.to, err = pods.connect(ctx, b.prefix+"-np"); err != nil {
		return p, node, made.all, err
	}
	made.add(func() error { return pods.disconnect(context.WithoutCancel(ctx), p.to) })
	s, err := b.servicesOf(n, false)
	if err != nil {
		return p, node, made.all, err
	}
	revision, err := s.upsert(ctx, nodePortTexts(p.to.IPv4))
	if err != nil {
		return p, node, made.all, err
	}
	return p, node, made.all, s.wait(ctx, revision, true)
}

// nodePortTexts returns the Service of the node ports and its only endpoint, as JSON.
func nodePortTexts(backend netip.Addr) []string {
	port := func(name, protocol string, nodePort int) string {
		return fmt.Sprintf(`{"name":%q,"protocol":%q,"port":%d,"nodePort":%d}`, name, protocol, nodePort, nodePort)
	}
	endpoint := func(name, protocol string, port int) string {
		return fmt.Sprintf(`{"name":%q,"protocol":%q,"port":%d}`, name, protocol, port)
	}
	return []string{
		fmt.Sprintf(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"outside","namespace":"bench"},"spec":{`+
			`"type":"NodePort","clusterIP":%q,"ports":[%s,%s,%s]}}`, clusterIP(0), port("echo", "TCP", echoAt),
			port("echo-udp", "UDP", echoAt), port("connect", "TCP", connectAt)),
		fmt.Sprintf(`{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"outside",`+
			`"namespace":"bench","labels":{"kubernetes.io/service-name":"outside"}},"addressType":"IPv4","ports":[%s,%s,%s],`+
			`"endpoints":[{"addresses":[%q],"conditions":{"ready":true}}]}`, endpoint("echo", "TCP", echoPort),
			endpoint("echo-udp", "UDP", echoPort), endpoint("connect", "TCP", connectPort), backend),
	}
}

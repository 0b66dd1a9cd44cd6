// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/test/internal/pod"
)

// A server listens on this many ports from the first one on: enough for each of 10,000 services to have another pair
// of ports as backends. One listener per backend would slow down the kernel's listener lookup.
const (
	firstAnswer = 20000
	answers     = 142
)

// pairedBackends gives each service two listening ports of one pod as backends. The first 10,011 services have
// different pairs.
func pairedBackends(server netip.Addr) backendsOf {
	pairs := make([][2]uint16, 0, answers*(answers-1)/2)
	for i := range uint16(answers) {
		for k := range i {
			pairs = append(pairs, [2]uint16{firstAnswer + k, firstAnswer + i})
		}
	}
	return func(service, _ int) []netip.AddrPort {
		pair := pairs[service%len(pairs)]
		return []netip.AddrPort{netip.AddrPortFrom(server, pair[0]), netip.AddrPortFrom(server, pair[1])}
	}
}

// connectPath is a path for connect(), with its results.
type connectPath struct {
	path
	targets []netip.AddrPort // connected to in turn
	next    int
	direct  int // position of the path to the same ports without a service, by Sluice or by Linux
	times   samples
	// ratios of each round, to the bare pair and to direct
	bare5, bare50, direct5, direct50 []float64
}

// Positions of the connect paths.
const (
	connectBare = iota
	connectRouted
	connectRoutedAll
	connectNftDirect
	connectNftHot
	connectNftCold
	connectOneRule
	connectRules
	connectDirect
	connectDirectAll
	connectHot
	connectCold
)

// connections measures connect() with and without services.
func (s *crowdedServices) connections(ctx context.Context) (err error) {
	b := s.bench
	paths, remove, err := s.connectPaths(ctx)
	defer func() { err = errors.Join(err, remove()) }()
	if err != nil {
		return err
	}
	for round := range b.sizes.rounds {
		times := make([]samples, len(paths))
		for k := range paths {
			i := (k + round) % len(paths) // a different one begins each round
			if times[i], err = paths[i].connect(b.sizes.connects); err != nil {
				return err
			}
		}
		for i := range paths {
			p := &paths[i]
			p.times = append(p.times, times[i]...)
			for _, r := range []struct {
				to      int
				p5, p50 *[]float64
			}{{connectBare, &p.bare5, &p.bare50}, {p.direct, &p.direct5, &p.direct50}} {
				*r.p5 = append(*r.p5, ratio(times[i].quantile(0.05), times[r.to].quantile(0.05)))
				*r.p50 = append(*r.p50, ratio(times[i].quantile(0.5), times[r.to].quantile(0.5)))
			}
		}
	}
	fmt.Fprintf(b.out, "connect() of TCP over IPv4, %d of each path in each of %d rounds. Ratios are of the same "+
		"round, the median over the rounds: to the bare pair, and to Linux routing or Sluice without a service, to the same "+
		"ports.\n\n", b.sizes.connects, b.sizes.rounds)
	fmt.Fprintln(b.out, "| path | p5 | p50 | p5 to bare | p50 to bare | p5 to direct | p50 to direct |")
	fmt.Fprintln(b.out, "|---|---|---|---|---|---|---|")
	for i, p := range paths {
		fmt.Fprintf(b.out, "| %s | %s | %s | %.3f | %.3f |", p.name, microseconds(p.times.quantile(0.05)),
			microseconds(p.times.quantile(0.5)), median(p.bare5), median(p.bare50))
		if p.direct == i {
			fmt.Fprintln(b.out, " – | – |")
			continue
		}
		fmt.Fprintf(b.out, " %.3f | %.3f |\n", median(p.direct5), median(p.direct50))
	}
	fmt.Fprintln(b.out)
	b.wantRatio("connect through one service, p5 to direct", 1.06, median(paths[connectHot].direct5))
	b.wantRatio(fmt.Sprintf("connect through %d services in turn, p5 to direct", b.sizes.services), 1.12,
		median(paths[connectCold].direct5))
	for _, way := range []struct {
		name    string
		of, to5 int
	}{
		{"one service, p5 to nftables", connectHot, connectNftHot},
		{"services in turn, p5 to nftables", connectCold, connectNftCold},
		{"one service, p5 to iptables without other services", connectHot, connectOneRule},
		{"services in turn, p5 to iptables", connectCold, connectRules},
	} {
		b.wantRatio("connect through "+way.name, 1, median(inTurn(paths[way.of].bare5, paths[way.to5].bare5)))
	}
	return nil
}

// connect opens and aborts n connections, and returns the duration of each call of connect().
func (p *connectPath) connect(n int) (times samples, err error) {
	err = pod.In(p.from.Netns, func() error {
		for range n {
			to := p.targets[p.next%len(p.targets)]
			p.next++
			address := sockaddr(to)
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			// Abort instead of closing: this avoids TIME_WAIT, so ports do not run out.
			if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
				return errors.Join(err, unix.Close(fd))
			}
			start := time.Now()
			err = unix.Connect(fd, address)
			times = append(times, time.Since(start))
			if err = errors.Join(err, unix.Close(fd)); err != nil {
				return fmt.Errorf("%s: connect to %s: %w", p.name, to, err)
			}
		}
		return nil
	})
	return times, err
}

// connectPaths makes the pods, rules and services of the measurement, in the order of the constants above. The
// returned function removes them, also after an error.
func (s *crowdedServices) connectPaths(ctx context.Context) (paths []connectPath, remove func() error, err error) {
	b := s.bench
	var made undo
	add := func(p path, name string, direct int, targets []netip.AddrPort) {
		p.name = name
		paths = append(paths, connectPath{path: p, direct: direct, targets: targets})
	}
	// One service has two ports as backends, all services together have every port.
	const two = 2
	ports := func(p path, n int) (all []netip.AddrPort) {
		for i := range n {
			all = append(all, netip.AddrPortFrom(p.to.IPv4, uint16(firstAnswer+i)))
		}
		return all
	}
	// Not in sequence: neighbouring services share a port, whose listener would stay in the processor's caches.
	const stride = 4099
	virtual := func(services int) (all []netip.AddrPort) {
		for i := range services {
			all = append(all, netip.AddrPortFrom(clusterIP(i*stride%services), clusterPort))
		}
		return all
	}
	many := b.sizes.services
	bare, undo, err := barePair(b.prefix + "-cbare")
	if err != nil {
		return nil, made.all, err
	}
	made.add(undo)
	add(bare, "bare veth pair", connectBare, ports(bare, two))
	var routed [4]path // without rules, nftables, iptables with one service, iptables with many
	for i := range routed {
		r, undo, err := routedPair(fmt.Sprintf("%s-c%d", b.prefix, i))
		if err != nil {
			return nil, made.all, err
		}
		made.add(undo)
		routed[i] = r.path
		switch {
		case i == 1:
			err = r.load(ctx, nftablesRules(many, pairedBackends(r.to.IPv4)), "nft", "-f", "-")
		case i == 2:
			err = r.load(ctx, iptablesRules(1, pairedBackends(r.to.IPv4)), "iptables-restore")
		case i == 3:
			err = r.load(ctx, iptablesRules(many, pairedBackends(r.to.IPv4)), "iptables-restore")
		}
		if err != nil {
			return nil, made.all, err
		}
	}
	spread := fmt.Sprintf("direct to %d ports", answers)
	one, turns := fmt.Sprintf("one of %d services", many), fmt.Sprintf("%d services in turn", many)
	add(routed[0], "Linux routing, direct", connectRouted, ports(routed[0], two))
	add(routed[0], "Linux routing, "+spread, connectRoutedAll, ports(routed[0], answers))
	add(routed[1], "nftables, direct", connectRouted, ports(routed[1], two))
	add(routed[1], "nftables, "+one, connectRouted, virtual(1))
	add(routed[1], "nftables, "+turns, connectRoutedAll, virtual(many))
	add(routed[2], "iptables, the only service", connectRouted, virtual(1))
	add(routed[3], "iptables, "+turns, connectRoutedAll, virtual(many))
	sluice, undo, err := s.podsBehindServices(ctx)
	made.add(undo)
	if err != nil {
		return nil, made.all, err
	}
	add(sluice, "sluice, direct", connectDirect, ports(sluice, two))
	add(sluice, "sluice, "+spread, connectDirectAll, ports(sluice, answers))
	add(sluice, "sluice, "+one, connectDirect, virtual(1))
	add(sluice, "sluice, "+turns, connectDirectAll, virtual(many))
	for _, p := range append([]path{bare, sluice}, routed[:]...) {
		stop, err := answer(p.to)
		if err != nil {
			return nil, made.all, err
		}
		made.add(stop)
	}
	return paths, made.all, nil
}

// podsBehindServices makes two pods, and makes one of them the backend of all services.
func (s *crowdedServices) podsBehindServices(ctx context.Context) (p path, remove func() error, err error) {
	var made undo
	network, err := labelledOn(s.node, "sluice", "role", "plain")
	if err != nil {
		return p, made.all, err
	}
	for i, end := range []*pod.Pod{&p.from, &p.to} {
		if *end, err = network.connect(ctx, fmt.Sprintf("%s-cs-%d", s.bench.prefix, i)); err != nil {
			return p, made.all, err
		}
		made.add(func() error { return network.disconnect(context.WithoutCancel(ctx), *end) })
	}
	revision, err := s.fill(ctx, s.bench.sizes.services, pairedBackends(p.to.IPv4))
	if err == nil {
		err = s.wait(ctx, revision, true)
	}
	return p, made.all, err
}

// answer accepts and closes connections to a pod until stop is called.
func answer(p pod.Pod) (stop func() error, err error) {
	var listeners []int
	closeAll := func() error {
		var errs []error
		for _, fd := range listeners {
			errs = append(errs, unix.Close(fd))
		}
		return errors.Join(errs...)
	}
	poll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	// stop writes to this eventfd.
	end, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return nil, errors.Join(err, unix.Close(poll))
	}
	err = pod.In(p.Netns, func() error {
		for i := range answers {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
			if err != nil {
				return err
			}
			listeners = append(listeners, fd)
			at := &unix.SockaddrInet4{Addr: p.IPv4.As4(), Port: firstAnswer + i}
			if err := errors.Join(unix.Bind(fd, at), unix.Listen(fd, 4096)); err != nil {
				return fmt.Errorf("listen at %s:%d: %w", p.IPv4, at.Port, err)
			}
		}
		return nil
	})
	for _, fd := range append([]int{end}, listeners...) {
		event := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}
		err = errors.Join(err, unix.EpollCtl(poll, unix.EPOLL_CTL_ADD, fd, &event))
	}
	if err != nil {
		return nil, errors.Join(err, closeAll(), unix.Close(poll), unix.Close(end))
	}
	done := make(chan error, 1)
	go func() { done <- acceptAll(poll, end) }()
	return func() error {
		_, err := unix.Write(end, []byte{1, 0, 0, 0, 0, 0, 0, 0})
		return errors.Join(err, <-done, closeAll(), unix.Close(poll), unix.Close(end))
	}, nil
}

// acceptAll accepts and closes connections until end is readable.
func acceptAll(poll, end int) error {
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := unix.EpollWait(poll, events, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		for _, e := range events[:max(n, 0)] {
			if int(e.Fd) == end {
				return nil
			}
			for {
				conn, _, err := unix.Accept4(int(e.Fd), unix.SOCK_CLOEXEC)
				if err != nil {
					break // no pending connection, or it was aborted
				}
				_ = unix.Close(conn)
			}
		}
	}
}

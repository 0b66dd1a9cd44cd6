// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
)

// measured contains the results of one path in all rounds.
type measured struct {
	times           samples
	connects, rates []float64 // per second and round
	p5, p50         []float64 // ratios to the bare pair of the same round
	connectRatio    []float64
	rateRatio       []float64
}

// compare measures the round trip, the connection rate, and a one-way rate of each path, alternating between the
// paths in each round. The first path must be the bare pair.
func (b *bench) compare(paths []path, rate func(path) (float64, error)) ([]measured, error) {
	all := make([]measured, len(paths))
	for round := range b.sizes.rounds {
		times := make([]samples, len(paths))
		connected := make([]float64, len(paths))
		rates := make([]float64, len(paths))
		for k := range paths {
			i := (k + round) % len(paths) // a different one begins each round
			var err error
			if times[i], err = requestResponse(paths[i], b.sizes.exchanges); err != nil {
				return nil, err
			}
			if connected[i], err = connects(paths[i], b.sizes.connects); err != nil {
				return nil, err
			}
			if rates[i], err = rate(paths[i]); err != nil {
				return nil, err
			}
		}
		for i := range paths {
			m := &all[i]
			m.times = append(m.times, times[i]...)
			m.connects = append(m.connects, connected[i])
			m.rates = append(m.rates, rates[i])
			m.p5 = append(m.p5, float64(times[i].quantile(0.05))/float64(times[bare].quantile(0.05)))
			m.p50 = append(m.p50, float64(times[i].quantile(0.5))/float64(times[bare].quantile(0.5)))
			m.connectRatio = append(m.connectRatio, connected[i]/connected[bare])
			m.rateRatio = append(m.rateRatio, rates[i]/rates[bare])
		}
	}
	return all, nil
}

// inTurn returns the ratios of values of the same round.
func inTurn(of, to []float64) []float64 {
	ratios := make([]float64, len(of))
	for round := range of {
		ratios[round] = of[round] / to[round]
	}
	return ratios
}

// traffic measures the traffic between two pods of each network.
func (b *bench) traffic(ctx context.Context) (err error) {
	paths, remove, err := b.paths(ctx)
	defer func() { err = errors.Join(err, remove()) }()
	if err != nil {
		return err
	}
	all, err := b.compare(paths, func(p path) (float64, error) { return packetRate(p, b.sizes.datagrams) })
	if err != nil {
		return err
	}
	fmt.Fprintf(b.out,
		"TCP over IPv4, one byte each way, %d exchanges and %d connections, and %d datagrams of 64 bytes one way, "+
			"of each path in each of %d rounds. Ratios are to the bare pair in the same round, the median over the "+
			"rounds.\n\n",
		b.sizes.exchanges, b.sizes.connects, b.sizes.datagrams, b.sizes.rounds)
	fmt.Fprintln(b.out,
		"| path | round trip p5 | p50 | p5 ratio | p50 ratio | connects/s | ratio | datagrams/s | ratio |")
	fmt.Fprintln(b.out, "|---|---|---|---|---|---|---|---|---|")
	for i, p := range paths {
		m := all[i]
		fmt.Fprintf(b.out, "| %s | %s | %s | %.3f | %.3f | %.0f | %.3f | %.0f | %.3f |\n", p.name,
			microseconds(m.times.quantile(0.05)), microseconds(m.times.quantile(0.5)), median(m.p5), median(m.p50),
			median(m.connects), median(m.connectRatio), median(m.rates), median(m.rateRatio))
	}
	fmt.Fprintln(b.out)
	b.wantRatio("request/response p5 to a bare veth pair, policies on both sides", 1.08, median(all[guarded].p5))
	b.wantRatio("request/response p5 to ptp", 1, median(all[guarded].p5)/median(all[ptp].p5))
	b.wantAtLeast("connect rate to a bare veth pair, policies on both sides", 0.95, median(all[guarded].connectRatio))
	b.wantAtLeast("connect rate to a bare veth pair with programs that only pass", 0.95,
		median(inTurn(all[guarded].connects, all[passing].connects)))
	b.wantAtLeast("datagram rate to a bare veth pair, policies on both sides", 0.92, median(all[guarded].rateRatio))
	return nil
}

// Positions in the result of paths.
const (
	bare = iota
	passing
	redirected
	plain
	guarded
	ptp
)

// paths makes pods and the paths between them. The returned function removes the pods, also after an error.
func (b *bench) paths(ctx context.Context) (paths []path, remove func() error, err error) {
	var made []func() error
	remove = func() error {
		var errs []error
		for i := len(made) - 1; i >= 0; i-- {
			errs = append(errs, made[i]())
		}
		return errors.Join(errs...)
	}
	for _, pair := range []struct {
		prefix string
		make   func(prefix string) (path, func() error, error)
	}{{"bare", barePair}, {"pass", passingPair}, {"redir", redirectedPair}} {
		p, undo, err := pair.make(b.prefix + "-" + pair.prefix)
		if err != nil {
			return nil, remove, err
		}
		made = append(made, undo)
		paths = append(paths, p)
	}

	client, err := b.labelled("sluice", "role", "client")
	if err != nil {
		return nil, remove, err
	}
	server, err := b.labelled("sluice", "role", "server")
	if err != nil {
		return nil, remove, err
	}
	undo, err := b.guard(ctx)
	if err != nil {
		return nil, remove, err
	}
	made = append(made, undo)
	// Same order as the constants above.
	for i, way := range []struct {
		name     string
		from, to network
	}{
		{"sluice, no policy", b.sluice, b.sluice},
		{"sluice, policies on both sides", client, server},
		{b.peers[0].name, b.peers[0], b.peers[0]},
		{b.peers[1].name, b.peers[1], b.peers[1]},
	} {
		p := path{name: way.name}
		if p.from, err = way.from.connect(ctx, fmt.Sprintf("%s-from-%d", b.prefix, i)); err != nil {
			return nil, remove, err
		}
		made = append(made, func() error { return way.from.disconnect(context.WithoutCancel(ctx), p.from) })
		if p.to, err = way.to.connect(ctx, fmt.Sprintf("%s-to-%d", b.prefix, i)); err != nil {
			return nil, remove, err
		}
		made = append(made, func() error { return way.to.disconnect(context.WithoutCancel(ctx), p.to) })
		paths = append(paths, p)
	}
	return paths, remove, nil
}

// guardManifests are a policy for each side of the guarded pods, typical of hand-written ones: named peers, one or
// two ports.
const guardManifests = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: bench-server, namespace: bench}
spec:
  podSelector: {matchLabels: {role: server}}
  policyTypes: [Ingress]
  ingress:
  - from: [{podSelector: {matchLabels: {role: client}}}]
    ports: [{protocol: TCP, port: 1, endPort: 65535}, {protocol: UDP, port: 1, endPort: 65535}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: bench-client, namespace: bench}
spec:
  podSelector: {matchLabels: {role: client}}
  policyTypes: [Egress]
  egress:
  - to: [{podSelector: {matchLabels: {role: server}}}]
    ports: [{protocol: TCP, port: 1, endPort: 65535}, {protocol: UDP, port: 1, endPort: 65535}]
`

// guard applies policies to the guarded pods.
func (b *bench) guard(ctx context.Context) (remove func() error, err error) {
	if _, err := b.policies.upsert(ctx, guardManifests); err != nil {
		return nil, err
	}
	return func() error {
		return b.policies.remove(context.WithoutCancel(ctx), "bench-server", "bench-client")
	}, nil
}

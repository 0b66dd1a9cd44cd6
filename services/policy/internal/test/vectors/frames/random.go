// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/identity"
	vectorv1 "github.com/sluice-net/sluice/proto/gen/sluice/policyvector/v1"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/test/scenario"
)

// Structure of a random stream: the number of queries for each state, and the number of consecutive changes of a
// state before a new state is generated.
const (
	questionsPerState = 20
	statesPerView     = 10
)

// configs are the engine settings for the random states. The first one is the usual one.
var configs = []engine.Config{
	{Cluster: scenario.Cluster, AllowHost: true},
	{Cluster: scenario.Cluster},
	{Cluster: scenario.Cluster, AllowHost: true, Enforcement: engine.EnforceAlways},
	{Cluster: scenario.Cluster, Enforcement: engine.EnforceNever},
}

// Random writes pairs of random policies and a random packet. The content and order depend only on the seed.
func Random(out io.Writer, pairs int, seed uint64) (Figures, error) {
	w := newWriter(out)
	world := scenario.NewWorld(rand.New(rand.NewPCG(seed, 71)))
	for n := 0; w.figures.Questions < pairs && w.err == nil; n++ {
		if err := w.randomView(world, pairs, fmt.Sprintf("seed %d, view %d", seed, n)); err != nil {
			return w.figures, err
		}
	}
	return w.end()
}

// randomView writes states until the view is full or there are enough pairs. A state without subjects adds no
// queries.
func (w *writer) randomView(world *scenario.World, pairs int, name string) error {
	config := configs[0]
	if world.Chance(25) {
		config = scenario.Pick(world, configs...)
	}
	config.Events = w.event
	e := engine.New(config)
	have, want := scenario.NewState(), world.Draw()
	for step := range statesPerView {
		if step > 0 {
			want = have.Clone()
			for range 1 + world.IntN(3) {
				world.Mutate(want)
			}
		}
		text := fmt.Sprintf("%s, state %d, %+v:\n%s", name, step, settings(config), want)
		if step == 0 {
			w.view(&vectorv1.View{File: "random", Case: name, Node: "node", Text: text})
			text = ""
		}
		if err := e.Apply(change(scenario.Diff(have, want))); err != nil {
			return fmt.Errorf("%s, state %d: %w", name, step, err)
		}
		w.barrier()
		have = want
		for i := 0; i < questionsPerState && w.figures.Questions < pairs; i++ {
			q, ok := world.Question(have)
			if !ok {
				break
			}
			q.Point = fit(q.Point, q.Addr)
			verdict, err := e.Lookup(q.Subject, q.Direction, q.Peer, q.Addr, q.Point)
			if err != nil {
				return fmt.Errorf("%s, state %d: %w", name, step, err)
			}
			bound, _ := e.Bound(q.Subject, q.Direction)
			w.question(question{
				name: fmt.Sprintf("%s, state %d, question %d", name, step, i), text: text,
				subject: q.Subject, subjectAddr: addressOf(world, q.Subject, q.Addr.Is6()),
				pod:       have.Identities[q.Subject].Kind != identity.KindHost,
				direction: q.Direction, peer: q.Peer, addr: q.Addr, point: q.Point,
				enforced: bound.Table != nil, verdict: verdict,
			})
			text = ""
		}
	}
	return nil
}

func settings(c engine.Config) string {
	return fmt.Sprintf("enforcement %d, allow host %t", c.Enforcement, c.AllowHost)
}

// fit converts a point to a point that is possible in a packet from or to the address.
func fit(q port.Point, a netip.Addr) port.Point {
	switch proto := port.Protocol(q >> 16); {
	case proto == port.ICMP && a.Is6():
		return port.At(port.ICMPv6, uint16(q))
	case proto == port.ICMPv6 && a.Is4():
		return port.At(port.ICMP, uint16(q))
	case !proto.HasPorts() && proto != port.ICMP && proto != port.ICMPv6:
		return port.At(proto, 0)
	}
	return q
}

// addressOf returns an address of a subject, of the requested family.
func addressOf(world *scenario.World, n identity.Numeric, v6 bool) netip.Addr {
	for _, a := range world.Addrs[n] {
		if a.Is6() == v6 {
			return a
		}
	}
	panic(fmt.Sprintf("subject %d has no address (IPv6 %t)", n, v6)) // every subject has both
}

func change(d scenario.Delta) engine.Change {
	c := engine.Change{
		DeletePolicies: d.DeletePolicies, UpsertPolicies: d.UpsertPolicies,
		RemoveIdentities: d.RemoveIdentities, AddIdentities: d.AddIdentities,
		RemoveSubjects: d.RemoveSubjects, AddSubjects: d.AddSubjects, Vacate: d.Vacate,
	}
	for _, n := range d.Forget {
		c.Forget = append(c.Forget, engine.Name{Name: dnsname.ForAll(n.Name), Addrs: n.Addrs})
	}
	for _, n := range d.Learn {
		c.Learn = append(c.Learn, engine.Name{Name: dnsname.ForAll(n.Name), Addrs: n.Addrs})
	}
	for _, l := range d.Locate {
		c.Locate = append(c.Locate, engine.Location(l))
	}
	return c
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/test/model"
)

// plan lists the events of a round. It depends on the seed and the round only.
type plan struct {
	g *model.Generator
	// pods that get other labels before the first batch of questions, and between the two batches
	before, between []int
	audited         []int // pods that enter or leave audit mode
	moved           int   // a pod that is recreated on a random node; -1 for none
	// services of a node that are down during the first batch
	node   int
	killed []string
	// store stops etcd during the first batch. deleted adds a third node before the first batch and deletes it after it.
	store, deleted bool
}

// A pod moves in every sixth round, and every twentieth round deletes a node. A cluster of devnode has up to 16 nodes,
// with the deleted ones.
const (
	moveEvery   = 6
	deleteEvery = 20
	mostDeleted = 12
)

// plan generates the events of the round.
func (r *modelRun) plan() *plan {
	g := model.NewGenerator(r.o.seed, 1<<41+r.round)
	p := &plan{g: g, moved: -1, node: g.IntN(2)}
	const pods = 6
	for range g.IntN(2) {
		p.before = append(p.before, g.IntN(pods))
	}
	if g.IntN(2) == 0 {
		p.between = append(p.between, g.IntN(pods))
	}
	for range g.IntN(3) {
		if i := g.IntN(pods); !slices.Contains(p.audited, i) {
			p.audited = append(p.audited, i)
		}
	}
	if r.round%moveEvery == moveEvery-1 {
		p.moved = g.IntN(pods)
	}
	switch g.IntN(5) {
	case 0, 1:
		all := []string{devnode.Identity, devnode.IPAM, devnode.Policy, devnode.LoadBalancer, devnode.Datapath}
		g.Shuffle(len(all), func(i, k int) { all[i], all[k] = all[k], all[i] })
		p.killed = all[:1+g.IntN(len(all))]
	case 2:
		p.store = true
	}
	if r.round%deleteEvery == deleteEvery-2 && r.round/deleteEvery < mostDeleted {
		p.deleted, p.store, p.killed = true, false, nil
	}
	return p
}

// change is a new label of a pod.
type change struct {
	pod        *model.Pod
	key, value string
}

// changes generates new labels and writes them to the model.
func (r *modelRun) changes(p *plan, pods []int) (all []change) {
	for _, i := range pods {
		c := change{pod: r.world.Pods[i]}
		c.key, c.value = p.g.Relabel(c.pod)
		all = append(all, c)
	}
	return all
}

// settle applies the events before the first batch to the model.
func (r *modelRun) settle(p *plan) (relabelled []change, audited []*model.Pod, moved *model.Pod) {
	relabelled = r.changes(p, p.before)
	for _, i := range p.audited {
		audited = append(audited, r.world.Pods[i])
		r.world.Pods[i].Audited = !r.world.Pods[i].Audited
	}
	if p.moved >= 0 {
		moved = r.world.Pods[p.moved]
		if moved.Node = r.world.Nodes[0]; p.g.IntN(2) == 0 {
			moved.Node = r.world.Nodes[1]
		}
		moved.Audited = false // the mode ends with the endpoint
	}
	return relabelled, audited, moved
}

// skip applies the events of a round to the model only.
func (r *modelRun) skip(p *plan) {
	r.settle(p)
	r.changes(p, p.between)
}

// playRound runs a round, and returns the number of its questions.
func (r *modelRun) playRound(p *plan) (questions int) {
	was := map[*model.Pod]*model.Node{}
	for _, m := range r.world.Pods {
		was[m] = m.Node
	}
	relabelled, audited, moved := r.settle(p)
	if moved != nil {
		r.nodeOf(was[moved]).del(r.t, r.agents[moved.Name].Pod)
		r.addForModel(moved) // with its new labels
	}
	for _, c := range relabelled {
		if c.pod != moved {
			r.relabel(c.pod, c.key, c.value)
		}
	}
	for _, a := range audited {
		if a != moved {
			r.audit(a)
		}
	}
	g := model.NewGenerator(r.o.seed, r.round)
	if p.deleted {
		r.arrive(g)
	}
	r.world.Policies = g.NewPolicies(r.world)
	r.world.Services = g.NewServices(r.world)
	r.apply()

	repair := r.harm(p)
	r.batch(g, questionsOfRound/2)
	repair()
	if p.deleted {
		r.leave()
	}
	for _, c := range r.changes(p, p.between) {
		r.relabel(c.pod, c.key, c.value)
	}
	for _, s := range r.world.Services {
		if p.deleted || g.IntN(2) == 0 {
			g.MoveEndpoints(r.world, s)
		}
	}
	r.applyServices()
	r.batch(g, questionsOfRound-questionsOfRound/2)
	r.passedLate()
	r.world.Gone = nil
	return questionsOfRound
}

// harm kills the services of the plan. The function that it returns starts them again.
func (r *modelRun) harm(p *plan) (repair func()) {
	ctx := r.t.Context()
	n, services := r.nodes[p.node].Node, p.killed
	if p.store {
		n, services = r.Hub(), []string{devnode.Etcd}
	}
	r.away = map[string]bool{}
	for _, s := range services {
		if err := n.Kill(ctx, s); err != nil {
			r.t.Fatal(err)
		}
		if s == devnode.Datapath {
			r.away[n.Name()] = true
		}
	}
	return func() {
		// in the order of a node's start
		for _, s := range devnode.Services() {
			if !slices.Contains(services, s) {
				continue
			}
			if err := n.Start(ctx, s); err != nil {
				r.t.Fatal(err)
			}
		}
		r.away = map[string]bool{}
	}
}

// arrive adds a third node with a pod.
func (r *modelRun) arrive(g *model.Generator) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	added, err := r.AddNode(ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	n := connect(r.t, added)
	r.nodes = append(r.nodes, n)
	for _, have := range r.nodes {
		have.knows(r.t, len(r.nodes))
	}
	m := r.addNode(n)
	for f, a := range m.Addresses {
		r.routeTo(r.agents[r.world.Outsider.Name].Pod, m.Range[f], a)
	}
	for _, p := range r.world.Pods {
		own, live := r.nodeOf(p.Node), r.agents[p.Name].Pod
		n.kernelHas(r.t, entries(live, n.identityOf(r.t, live, own), own)...)
	}
	p := &model.Pod{
		Name: "pod-of-third", Namespace: model.Namespaces[0], Labels: g.Labels(), Ports: g.NamedPorts(), Node: m,
	}
	r.world.Pods = append(r.world.Pods, p)
	r.addForModel(p)
}

// leave deletes the third node with its pod. Later questions use the pod's addresses as forged sources.
func (r *modelRun) leave() {
	r.t.Helper()
	last := len(r.world.Pods) - 1
	r.world.Gone = r.world.Pods[last]
	r.world.Pods, r.world.Nodes = r.world.Pods[:last], r.world.Nodes[:2]
	gone := r.nodes[2]
	r.neverAgain(gone)
	live := r.agents[r.world.Gone.Name].Pod
	gone.del(r.t, live)
	r.forget(gone)
	for _, n := range r.nodes {
		n.forgets(r.t, live)
		n.knows(r.t, len(r.nodes))
	}
}

// neverAgain adds routes to the pod CIDRs of a deleted node, so that devnode gives them to no other node. They are in
// quarantine for 15 minutes.
func (r *modelRun) neverAgain(gone *node) {
	r.t.Helper()
	for _, p := range gone.PodCIDRs() {
		route := &netlink.Route{Type: unix.RTN_BLACKHOLE, Dst: &net.IPNet{
			IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen()),
		}}
		r.t.Cleanup(func() { _ = netlink.RouteDel(route) })
		if err := netlink.RouteReplace(route); err != nil {
			r.t.Fatalf("route to %s: %v", p, err)
		}
	}
}

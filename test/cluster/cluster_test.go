// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// shownAddress is the output of `sluice ip get -o json`.
type shownAddress struct {
	Mapping *struct {
		Identity uint32   `json:"identity"`
		Labels   []string `json:"labels"`
		Node     string   `json:"node"`
	} `json:"mapping"`
	Range     string `json:"range"`
	RangeNode string `json:"rangeNode"`
}

// shownNode is an item of the output of `sluice node list -o json`.
type shownNode struct {
	Node struct {
		Name     string `json:"name"`
		Underlay struct {
			Addresses []string `json:"addresses"`
		} `json:"underlay"`
		PodRanges []string `json:"podRanges"`
	} `json:"node"`
	State    string `json:"state"`
	Mappings uint32 `json:"mappingCount"`
	Local    bool   `json:"local"`
}

// TestNodesAgreeOnIdentitiesAndAddresses: nodes that see new label sets at the same moment use the same identity
// numbers, and each node knows the pods of the others.
func TestNodesAgreeOnIdentitiesAndAddresses(t *testing.T) {
	t.Parallel()
	c := newCluster(t, devnode.ClusterOptions{Nodes: 3})
	const sets = 4
	pods := make([][sets]pod.Pod, len(c.nodes))
	group, ctx := errgroup.WithContext(t.Context())
	for i, n := range c.nodes {
		for k := range sets {
			p := newPod(t)
			group.Go(func() (err error) {
				pods[i][k], err = n.tryAdd(ctx, p, fmt.Sprint("set-", k))
				return err
			})
		}
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	numbers := map[uint32]int{} // label set by number
	for i, on := range c.nodes {
		for k, p := range pods[i] {
			for _, n := range c.nodes {
				number := n.identityOf(t, p, on)
				if set, ok := numbers[number]; ok && set != k {
					t.Errorf("identity %d is of set %d and of set %d", number, set, k)
				}
				numbers[number] = k
				n.kernelHas(t, entries(p, number, on)...)
			}
		}
	}
	if len(numbers) != sets {
		t.Errorf("%d label sets have %d identities: %v", sets, len(numbers), numbers)
	}

	// The output of commands on another node.
	p := pods[0][1]
	for _, a := range p.Addresses() {
		var shown shownAddress
		c.nodes[1].sluice(t, &shown, "ip", "get", a.String())
		name := c.nodes[0].Name()
		in := slices.ContainsFunc(c.nodes[0].PodCIDRs(), func(r netip.Prefix) bool { return r.String() == shown.Range })
		if m := shown.Mapping; m == nil || !slices.Contains(m.Labels, "k8s:app=set-1") || m.Node != name ||
			shown.RangeNode != name || !in {
			t.Errorf("sluice ip get %s: %+v, mapping %+v", a, shown, m)
		}
	}
	c.nodes[0].del(t, p)
	for _, n := range c.nodes {
		n.forgets(t, p)
	}
	servicetest.EventuallyNil(t, "sluice node list", func() error {
		var nodes []shownNode
		if err := c.nodes[1].trySluice(t.Context(), &nodes, "node", "list"); err != nil {
			return err
		}
		for i, n := range c.nodes {
			want := shownNode{Local: i == 1, State: "alive", Mappings: 2 * sets}
			want.Node.Name = n.Name()
			if i == 0 {
				want.Mappings -= 2 // the removed pod
			}
			for _, a := range n.Addresses() {
				want.Node.Underlay.Addresses = append(want.Node.Underlay.Addresses, a.String())
			}
			for _, p := range n.PodCIDRs() {
				want.Node.PodRanges = append(want.Node.PodRanges, p.String())
			}
			if len(nodes) != len(c.nodes) || fmt.Sprint(nodes[i]) != fmt.Sprint(want) {
				return fmt.Errorf("%+v, want as element %d %+v", nodes, i, want)
			}
		}
		return nil
	})
}

// remoteNode is the identity of other nodes' addresses.
const remoteNode = 6

// stateOf returns the state of a node in another node's view.
func (n *node) stateOf(t *testing.T, other *node) string {
	t.Helper()
	all, err := receiveAll(n.cluster.ListNodes(t.Context(), &identityv1.ListNodesRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if m.GetNode().GetName() == other.Name() {
			return m.GetState().String()
		}
	}
	return "not registered"
}

// TestSilentNodeKeepsItsAddressesUntilItIsForgotten: a node without a sign of life becomes silent and keeps its
// addresses. Forgetting the node removes its addresses, and they return with the node.
func TestSilentNodeKeepsItsAddressesUntilItIsForgotten(t *testing.T) {
	t.Parallel()
	c := newCluster(t, devnode.ClusterOptions{Nodes: 3, Options: devnode.Options{
		Args: map[string][]string{devnode.Identity: {"--etcd-alive-ttl=5s"}},
	}})
	here, there := c.nodes[0], c.nodes[2]
	p := there.add(t, "web")
	number := here.identityOf(t, p, there)
	var forgotten struct {
		Mappings uint32 `json:"mappingCount"`
	}
	err := here.trySluice(t.Context(), &forgotten, "node", "forget", there.Name())
	if err == nil || !strings.Contains(err.Error(), "--force") || !strings.Contains(err.Error(), "NODE_ALIVE") {
		t.Errorf("forget a node that is alive: %v", err)
	}
	if err := there.Kill(t.Context(), devnode.Identity); err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "the node is silent", func() bool { return here.stateOf(t, there) == "NODE_STATE_SILENT" })
	if got := here.identityOf(t, p, there); got != number {
		t.Errorf("the pod of the silent node has identity %d, before %d", got, number)
	}
	here.kernelHas(t, entries(p, number, there)...)
	here.sluice(t, &forgotten, "node", "forget", there.Name(), "--dry-run")
	if got, _, err := here.mapping(t.Context(), p.IPv4); err != nil || got != number || forgotten.Mappings != 2 {
		t.Errorf("after --dry-run, which listed %d mappings: identity %d, %v", forgotten.Mappings, got, err)
	}
	here.sluice(t, &forgotten, "node", "forget", there.Name())
	if forgotten.Mappings != 2 {
		t.Errorf("%d mappings were forgotten, want 2", forgotten.Mappings)
	}
	for _, n := range c.nodes[:2] {
		n.forgets(t, p)
		n.knows(t, 2)
	}
	if err := there.Start(t.Context(), devnode.Identity); err != nil {
		t.Fatal(err)
	}
	for _, n := range c.nodes {
		n.knows(t, 3)
		if got := n.identityOf(t, p, there); got != number {
			t.Errorf("after the return of its node the pod has identity %d at %s, before %d", got, n.Name(), number)
		}
		n.kernelHas(t, entries(p, number, there)...)
	}
}

// TestJoiningNodeIsKnownToAllOthers: once a joining node is registered, all other nodes know it, and it knows all other
// nodes.
func TestJoiningNodeIsKnownToAllOthers(t *testing.T) {
	t.Parallel()
	c := newCluster(t, devnode.ClusterOptions{Nodes: 3})
	old := c.nodes[1].add(t, "web")
	number := c.nodes[0].identityOf(t, old, c.nodes[1])
	added, err := c.AddNode(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	fourth := connect(t, added)
	for _, n := range append(slices.Clone(c.nodes), fourth) {
		n.knows(t, 4)
	}
	for _, n := range c.nodes {
		for _, a := range added.Addresses() {
			n.kernelHas(t, entry{a, remoteNode, fourth})
		}
	}
	fourth.kernelHas(t, entries(old, number, c.nodes[1])...)
	if got := fourth.identityOf(t, old, c.nodes[1]); got != number {
		t.Errorf("the fourth node gives the pod identity %d, the others %d", got, number)
	}
	p := fourth.add(t, "web")
	for _, n := range append(slices.Clone(c.nodes), fourth) {
		if got := n.identityOf(t, p, fourth); got != number {
			t.Errorf("identity %d at %s, want the identity of the same labels, %d", got, n.Name(), number)
		}
		n.kernelHas(t, entries(p, number, fourth)...)
	}
}

// TestNodesConvergeAfterEtcdWasAway: without etcd, nodes keep working with their last state. When etcd is available
// again, all changes made meanwhile reach every node, even if all processes were restarted.
func TestNodesConvergeAfterEtcdWasAway(t *testing.T) {
	t.Parallel()
	c := newCluster(t, devnode.ClusterOptions{Nodes: 3})
	first, second, third := c.nodes[0], c.nodes[1], c.nodes[2]
	web, other := first.add(t, "web"), second.add(t, "other")
	number := third.identityOf(t, web, first)
	third.identityOf(t, other, second)
	if err := c.Hub().Stop(t.Context(), devnode.Etcd); err != nil {
		t.Fatal(err)
	}
	more := first.add(t, "web")
	second.del(t, other)
	for _, n := range []*node{first, third} {
		if err := n.Restart(t.Context(), devnode.Identity); err != nil {
			t.Fatal(err)
		}
	}
	evenMore := first.add(t, "web")
	for _, n := range []*node{second, third} {
		n.kernelHas(t, entries(web, number, first)...)
	}
	if got := second.identityOf(t, web, first); got != number {
		t.Errorf("without etcd, the pod has identity %d, before %d", got, number)
	}
	var status struct {
		Identity struct {
			Cluster struct {
				Pending uint32 `json:"pendingPublications"`
			} `json:"cluster"`
		} `json:"identity"`
	}
	if err := first.trySluice(t.Context(), &status, "status"); err == nil {
		t.Error("sluice status has exit code 0 while etcd is down")
	}
	if err := c.Hub().Start(t.Context(), devnode.Etcd); err != nil {
		t.Fatal(err)
	}
	for _, n := range c.nodes {
		n.knows(t, 3)
		for _, p := range []pod.Pod{web, more, evenMore} {
			if got := n.identityOf(t, p, first); got != number {
				t.Errorf("%s gives pod %s identity %d, want %d", n.Name(), p.Name, got, number)
			}
			n.kernelHas(t, entries(p, number, first)...)
		}
		n.forgets(t, other)
	}
	servicetest.EventuallyNil(t, "no change waits for etcd", func() error {
		if err := first.trySluice(t.Context(), &status, "status"); err != nil {
			return err
		}
		if status.Identity.Cluster.Pending > 0 {
			return fmt.Errorf("%+v", status)
		}
		return nil
	})
}

// TestPodsAreCreatedWhileMembersOfEtcdAreKilled kills the members of etcd one after the other, so that the leader is
// killed, too. Meanwhile, every node creates and deletes pods.
func TestPodsAreCreatedWhileMembersOfEtcdAreKilled(t *testing.T) {
	t.Parallel()
	c := newCluster(t, devnode.ClusterOptions{Nodes: 3, EtcdMembers: 3, Options: devnode.Options{
		Args: map[string][]string{devnode.IPAM: {"--quarantine=1s"}},
	}})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	const kept = 40 // pods of each node; older ones are deleted
	type labelled struct {
		pod.Pod
		app string
	}
	made := make([][]labelled, len(c.nodes))
	var count atomic.Int32
	group, groupCtx := errgroup.WithContext(t.Context())
	for i, n := range c.nodes {
		group.Go(func() error {
			for k := 0; ctx.Err() == nil; k++ {
				// A label set that only this node has, and a label set that all nodes have.
				for _, app := range []string{fmt.Sprintf("own-%d-%d", i, k), fmt.Sprintf("all-%d", k)} {
					p, err := makePod(t)
					if err == nil {
						p, err = n.tryAdd(groupCtx, p, app)
					}
					if err != nil {
						return err
					}
					made[i] = append(made[i], labelled{p, app})
					count.Add(1)
					if len(made[i]) <= kept {
						continue
					}
					if _, err := n.call(groupCtx, "DEL", made[i][0].Pod, ""); err != nil {
						return fmt.Errorf("DEL %s at %s: %w", made[i][0].Name, n.Name(), err)
					}
					made[i] = made[i][1:]
				}
			}
			return nil
		})
	}
	for _, member := range c.Hub().Services() {
		before := count.Load()
		if err := c.Hub().Kill(t.Context(), member); err != nil {
			t.Fatal(err)
		}
		servicetest.Eventually(t, "pods are created without "+member, func() bool {
			return count.Load() >= before+6 || groupCtx.Err() != nil
		})
		if err := c.Hub().Start(t.Context(), member); err != nil {
			t.Fatal(err)
		}
		before = count.Load()
		servicetest.Eventually(t, "pods are created with "+member, func() bool {
			return count.Load() >= before+6 || groupCtx.Err() != nil
		})
	}
	stop()
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	shared := map[string]uint32{}
	var all []entry
	for i, on := range c.nodes {
		for _, p := range made[i] {
			number := on.identityOf(t, p.Pod, on)
			all = append(all, entries(p.Pod, number, on)...)
			for _, n := range c.nodes {
				if got := n.identityOf(t, p.Pod, on); got != number {
					t.Errorf("%s: pod %s of %s has identity %d, on its node %d", n.Name(), p.Name, on.Name(), got, number)
				}
			}
			if before, ok := shared[p.app]; ok && before != number {
				t.Errorf("the label set of app=%s has the identities %d and %d", p.app, before, number)
			}
			shared[p.app] = number
		}
	}
	for _, n := range c.nodes {
		n.kernelHas(t, all...)
	}
}

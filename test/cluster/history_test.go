// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// blockLength is the prefix length of the pool's blocks in the tests of histories.
const blockLength = 28

// newPoolCluster starts three nodes that take blocks of one pool.
func newPoolCluster(t *testing.T, etcdMembers int, args ...string) *testCluster {
	t.Helper()
	return newCluster(t, devnode.ClusterOptions{Nodes: 3, EtcdMembers: etcdMembers, Options: devnode.Options{
		Args: map[string][]string{devnode.IPAM: append([]string{
			"--mode=pool", "--cluster-pool-prefixes=10.197.0.0/24",
			fmt.Sprint("--cluster-pool-ipv4-block=", blockLength), "--quarantine=0s",
		}, args...)},
	}})
}

// use is an operation of a node's client: the allocation or the release of an address.
type use struct {
	gave    bool
	address netip.Addr
	owner   string
	node    string
}

// block returns the node's block that contains the address.
func (u use) block() netip.Prefix { return netip.PrefixFrom(u.address, blockLength).Masked() }

// uses records operations with their start and end times; each takes effect between them.
type uses struct {
	start time.Time
	mu    sync.Mutex
	all   []porcupine.Operation // guarded by mu
}

func (h *uses) now() int64 { return time.Since(h.start).Nanoseconds() }

func (h *uses) add(client int, u use, call int64) {
	ended := h.now()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, porcupine.Operation{ClientId: client, Input: u, Call: call, Output: u, Return: ended})
}

func (h *uses) count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.all)
}

// inHands is the state of an address or block: its holder, and the number of addresses in use.
type inHands struct {
	holder string
	used   int
}

// exclusive returns the model of objects that have one holder while they are in use.
func exclusive(thing, holder func(use) string) porcupine.Model {
	return porcupine.Model{
		Partition: func(all []porcupine.Operation) (parts [][]porcupine.Operation) {
			at := map[string]int{}
			for _, o := range all {
				key := thing(o.Input.(use))
				i, ok := at[key]
				if !ok {
					i = len(parts)
					at[key], parts = i, append(parts, nil)
				}
				parts[i] = append(parts[i], o)
			}
			return parts
		},
		Init: func() any { return inHands{} },
		Step: func(state, input, _ any) (bool, any) {
			s, u := state.(inHands), input.(use)
			if u.gave {
				return s.used > 0 && s.holder == holder(u), inHands{s.holder, s.used - 1}
			}
			return s.used == 0 || s.holder == holder(u), inHands{holder(u), s.used + 1}
		},
	}
}

// models returns the models that every history must satisfy.
func models() map[string]porcupine.Model {
	// An owner has one address, so a second holder of an address is another owner.
	owner := func(u use) string { return u.owner }
	address := func(u use) string { return u.address.String() }
	return map[string]porcupine.Model{
		"an address has one owner": exclusive(address, owner),
		"the addresses of a block are one node's": exclusive(func(u use) string { return u.block().String() },
			func(u use) string { return u.node }),
	}
}

// wrong returns the names of the models that the history violates.
func (h *uses) wrong() (names []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for what, m := range models() {
		if r := porcupine.CheckOperationsTimeout(m, h.all, 2*time.Minute); r != porcupine.Ok {
			names = append(names, fmt.Sprintf("%s: %s", what, r))
		}
	}
	slices.Sort(names)
	return names
}

// TestHistoriesWithAnAddressInTwoHandsAreFound: the checker detects violations.
func TestHistoriesWithAnAddressInTwoHandsAreFound(t *testing.T) {
	a, b := netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("10.1.0.2")
	for name, c := range map[string]struct {
		uses  []use
		wrong string
	}{
		"one after the other":   {[]use{{false, a, "x", "n1"}, {true, a, "x", "n1"}, {false, a, "y", "n2"}}, ""},
		"two addresses":         {[]use{{false, a, "x", "n1"}, {false, b, "y", "n1"}}, ""},
		"two owners":            {[]use{{false, a, "x", "n1"}, {false, a, "y", "n1"}}, "one owner"},
		"two nodes":             {[]use{{false, a, "x", "n1"}, {false, b, "y", "n2"}}, "one node"},
		"given back by another": {[]use{{false, a, "x", "n1"}, {true, a, "y", "n1"}}, "one owner"},
	} {
		h := &uses{start: time.Now()}
		for i, u := range c.uses {
			h.all = append(h.all, porcupine.Operation{Input: u, Output: u, Call: int64(2 * i), Return: int64(2*i + 1)})
		}
		if got := strings.Join(h.wrong(), "; "); (c.wrong == "") != (got == "") || !strings.Contains(got, c.wrong) {
			t.Errorf("%s: %q is found, want %q", name, got, c.wrong)
		}
	}
}

// renter allocates addresses from a node's ipam and releases them.
type renter struct {
	node   *node
	ipam   ipamv1.IPAMServiceClient
	number int
	uses   *uses
}

// take retries, across restarts of the processes, until an owner has an address.
func (r *renter) take(ctx context.Context, owner string) (address netip.Addr, ok bool) {
	begun := r.uses.now()
	o := &workloadv1.Owner{ContainerId: owner, InterfaceName: "eth0"}
	for ctx.Err() == nil {
		got, err := r.ipam.Allocate(ctx, &ipamv1.AllocateRequest{
			Owner: o, Manager: "test", Families: []ipamv1.Family{ipamv1.Family_FAMILY_IPV4},
		})
		if err != nil {
			continue
		}
		text := got.GetAllocation().GetAddresses()[0].GetAddress()
		if address, err = netip.ParseAddr(text); err != nil {
			continue
		}
		if _, err := r.ipam.ConfirmAllocation(ctx, &ipamv1.ConfirmAllocationRequest{
			Owner: o, Addresses: []string{text},
		}); err == nil {
			r.uses.add(r.number, use{false, address, owner, r.node.Name()}, begun)
			return address, true
		}
	}
	return address, false
}

func (r *renter) give(ctx context.Context, owner string, address netip.Addr) bool {
	begun := r.uses.now()
	o := &workloadv1.Owner{ContainerId: owner, InterfaceName: "eth0"}
	for ctx.Err() == nil {
		if _, err := r.ipam.Release(ctx, &ipamv1.ReleaseRequest{Owner: o}); err == nil {
			r.uses.add(r.number, use{true, address, owner, r.node.Name()}, begun)
			return true
		}
	}
	return false
}

// run allocates and releases addresses until ctx is done, with at most this number at a time.
func (r *renter) run(ctx context.Context, most int) {
	type rented struct {
		owner   string
		address netip.Addr
	}
	var have []rented
	for k := 0; ctx.Err() == nil; k++ {
		if len(have) == most {
			if !r.give(ctx, have[0].owner, have[0].address) {
				return
			}
			have = have[1:]
		}
		owner := fmt.Sprintf("renter-%d-%d", r.number, k)
		address, ok := r.take(ctx, owner)
		if !ok {
			return
		}
		have = append(have, rented{owner, address})
	}
}

// TestFaultNoAddressOrBlockInTwoHands: clients on three nodes allocate and release addresses of the cluster's pool,
// whose blocks the nodes claim. Meanwhile, processes of the nodes and members of etcd are killed. In the recorded
// history, no address and no block has two holders at a time.
func TestFaultNoAddressOrBlockInTwoHands(t *testing.T) {
	t.Parallel()
	c := newPoolCluster(t, 3)
	h := &uses{start: time.Now()}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var group errgroup.Group
	for i, n := range c.nodes {
		ipam := ipamv1.NewIPAMServiceClient(dial(t, n.Node, devnode.IPAM))
		for k := range 4 {
			r := &renter{node: n, ipam: ipam, number: 4*i + k, uses: h}
			// Each node needs more than one block, but not all of them.
			group.Go(func() error { r.run(ctx, 7); return nil })
		}
	}
	progress := func(what string) {
		t.Helper()
		want := h.count() + 60
		servicetest.Eventually(t, "more operations "+what, func() bool { return h.count() >= want })
	}
	again := func(n *devnode.Node, service string) func() {
		return func() {
			if err := n.Kill(ctx, service); err != nil {
				t.Fatal(err)
			}
			if err := n.Start(ctx, service); err != nil {
				t.Fatal(err)
			}
		}
	}
	members := c.Hub().Services()
	faults := []struct {
		what string
		play func()
	}{
		{"after ipam was killed", again(c.nodes[0].Node, devnode.IPAM)},
		{"after identity was killed", again(c.nodes[1].Node, devnode.Identity)},
		{"after a member of etcd was killed", again(c.Hub(), members[0])},
		{"after all of etcd was killed, and ipam and identity meanwhile", func() {
			for _, m := range members {
				if err := c.Hub().Kill(ctx, m); err != nil {
					t.Fatal(err)
				}
			}
			again(c.nodes[2].Node, devnode.IPAM)()
			again(c.nodes[2].Node, devnode.Identity)()
			again(c.nodes[0].Node, devnode.Identity)()
			for _, m := range members {
				if err := c.Hub().Start(ctx, m); err != nil {
					t.Fatal(err)
				}
			}
		}},
		{"after another member was killed", again(c.Hub(), members[1])},
	}
	rounds := 1
	if allFaults() {
		rounds = 10
	}
	progress("at first")
	for range rounds {
		for _, f := range faults {
			f.play()
			progress(f.what)
		}
	}
	stop()
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if wrong := h.wrong(); len(wrong) > 0 {
		t.Errorf("the history of %d operations: %v", h.count(), wrong)
	}
	blocks := map[netip.Prefix]bool{}
	for _, o := range h.all {
		blocks[o.Input.(use).block()] = true
	}
	if len(blocks) <= len(c.nodes) {
		t.Errorf("the addresses were of %d blocks, so no node claimed a second one", len(blocks))
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// fromPool makes a node claim blocks of a pool in its own etcd.
func fromPool(block int, quarantine string) func(*devnode.Options) {
	return func(o *devnode.Options) {
		o.Args = map[string][]string{devnode.IPAM: {
			"--mode=pool", "--cluster-pool-prefixes=10.197.0.0/18,fd00:197::/48",
			fmt.Sprintf("--cluster-pool-ipv4-block=%d", block),
			"--quarantine=" + quarantine,
		}}
	}
}

// blocks returns the serving ranges of ipam, in their order of use.
func (n *testNode) blocks(t *testing.T) (serving []netip.Prefix) {
	t.Helper()
	pools, err := n.ipam.ListPools(servicetest.Context(t), &ipamv1.ListPoolsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pools.GetPools() {
		if p.GetState() != ipamv1.RangeState_RANGE_STATE_SERVING {
			t.Fatalf("%v", p)
		}
		serving = append(serving, netip.MustParsePrefix(p.GetPrefix()))
	}
	return serving
}

// take allocates an IPv4 address to an owner without an endpoint.
func (n *testNode) take(ctx context.Context, id string) (string, error) {
	o := &workloadv1.Owner{ContainerId: id, InterfaceName: "eth0"}
	got, err := n.ipam.Allocate(ctx, &ipamv1.AllocateRequest{
		Owner: o, Manager: "test", Families: []ipamv1.Family{ipamv1.Family_FAMILY_IPV4},
	})
	if err != nil {
		return "", err
	}
	address := got.GetAllocation().GetAddresses()[0].GetAddress()
	_, err = n.ipam.ConfirmAllocation(ctx, &ipamv1.ConfirmAllocationRequest{Owner: o, Addresses: []string{address}})
	return address, err
}

func (n *testNode) giveUp(t *testing.T, id string) {
	t.Helper()
	o := &workloadv1.Owner{ContainerId: id, InterfaceName: "eth0"}
	if _, err := n.ipam.Release(servicetest.Context(t), &ipamv1.ReleaseRequest{Owner: o}); err != nil {
		t.Fatal(err)
	}
}

// inKernel reports whether the node's namespace has the route of a range.
func (n *testNode) inKernel(t *testing.T, p netip.Prefix) bool {
	t.Helper()
	out := run(t.Context(), t, "ip", "-netns", n.netnsName(), "route", "show", "table", "all")
	return strings.Contains(out, p.String())
}

// TestKernelBlocksComeAndGoWhilePodsRun proves INV-19 and INV-85: a second block of the cluster's pool is claimed,
// used and returned while pods exchange data.
func TestKernelBlocksComeAndGoWhilePodsRun(t *testing.T) {
	t.Parallel()
	n := newNode(t, fromPool(28, "0s"))
	first := n.blocks(t)
	if len(first) != 2 || !first[0].Addr().Is4() {
		t.Fatalf("the node's initial blocks are %v", first)
	}
	old := n.addPods(t, "server", "client")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	_, wait := converse(ctx, t, old[1], old[0], 0, 2)
	for i := range 11 { // with the pods' addresses, all addresses of the block
		if _, err := n.take(servicetest.Context(t), fmt.Sprint("o", i)); err != nil {
			t.Fatal(err)
		}
	}
	var both []netip.Prefix
	servicetest.Eventually(t, "the second block", func() bool { both = n.blocks(t); return len(both) == 3 })
	n.wantRanges(t, both, nil)
	second := both[2]
	if !n.inKernel(t, second) {
		t.Errorf("there is no route of %s", second)
	}
	fresh := n.addPods(t, "fresh", "newcomer")
	for _, p := range fresh {
		if !inRanges(p, both[1:]) {
			t.Errorf("%s has %v, want an address of %s", p.Name, p.Addresses(), second)
		}
	}
	exchange(t, fresh[0], fresh[1])
	exchange(t, fresh[0], old[0])
	exchange(t, old[1], fresh[1])
	// A node that starts again without etcd has both blocks.
	if err := n.Kill(t.Context(), devnode.Etcd); err != nil {
		t.Fatal(err)
	}
	for _, service := range []string{devnode.IPAM, devnode.Datapath} {
		n.restart(t, service)
		n.wantRanges(t, both, nil)
	}
	exchange(t, fresh[0], old[0])
	if err := n.Start(t.Context(), devnode.Etcd); err != nil {
		t.Fatal(err)
	}
	n.del(t, fresh[0])
	n.del(t, fresh[1])
	for i := range 11 {
		n.giveUp(t, fmt.Sprint("o", i))
	}
	n.wantRanges(t, first, nil)
	if n.inKernel(t, second) {
		t.Errorf("a route of %s is left", second)
	}
	stop()
	if err := wait(); err != nil {
		t.Errorf("connections in the first block: %v", err)
	}
}

// TestFaultBurstOverAGrowingPool allocates addresses to 1,000 owners while ipam, identity and etcd are killed at each
// step of a claim. No address is allocated twice, and etcd and ipam agree.
func TestFaultBurstOverAGrowingPool(t *testing.T) {
	n := newNode(t, fromPool(24, "1m"))
	const owners = 1000
	var (
		mu   sync.Mutex
		held = map[string]string{} // guarded by mu
		wg   sync.WaitGroup
	)
	for w := range 4 {
		wg.Go(func() {
			for i := range owners / 4 {
				id := fmt.Sprintf("burst-%d-%d", w, i)
				var address string
				servicetest.EventuallyNil(t, "allocation", func() (err error) {
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					address, err = n.take(ctx, id)
					return err
				})
				mu.Lock()
				if other, ok := held[address]; ok {
					t.Errorf("%s has %s, and so has %s", id, address, other)
				}
				held[address] = id
				mu.Unlock()
			}
		})
	}
	for _, k := range []struct{ service, point string }{
		{devnode.IPAM, "ipam/claim/answered"},
		{devnode.Identity, "identity/claim/after-txn"},
		{devnode.IPAM, "ipam/claim/stored"},
		{devnode.Identity, "identity/claim/before-answer"},
	} {
		if err := n.Kill(t.Context(), k.service); err != nil {
			t.Fatal(err)
		}
		controller, files := newController(t)
		if err := n.Start(t.Context(), k.service, files...); err != nil {
			t.Fatal(err)
		}
		controller.Started()
		controller.KillAt(k.point, 0)
		hit, cancel := context.WithTimeout(t.Context(), patience)
		err := controller.WaitHits(hit, k.point, 1)
		cancel()
		mu.Lock()
		done := len(held) == owners
		mu.Unlock()
		if err != nil && !done {
			t.Errorf("%s: %v", k.point, err)
		}
		n.restart(t, k.service)
		if done {
			break
		}
	}
	wg.Wait()
	if len(held) != owners {
		t.Errorf("%d addresses were given, want %d", len(held), owners)
	}
	n.wantRegistered(t)
	for _, id := range held {
		n.giveUp(t, id)
	}
}

// wantRegistered waits until the cluster assigns to the node exactly ipam's blocks.
func (n *testNode) wantRegistered(t *testing.T) {
	t.Helper()
	nodes := identityv1.NewClusterServiceClient(dial(t, n.Node, devnode.Identity))
	servicetest.EventuallyNil(t, "the registration", func() error {
		stream, err := nodes.ListNodes(servicetest.Context(t), &identityv1.ListNodesRequest{})
		if err != nil {
			return err
		}
		got, err := stream.Recv()
		if err != nil {
			return err
		}
		want := texts(n.blocks(t))
		slices.Sort(want)
		have := slices.Sorted(slices.Values(got.GetNode().GetPodRanges()))
		if !got.GetLocal() || !slices.Equal(have, want) {
			return fmt.Errorf("the cluster has %v, ipam %v", got, want)
		}
		return nil
	})
}

// TestKernelStaticRangesAreRegistered: a node whose ipam mode differs from the cluster's reports both modes. It serves
// again once it has the cluster's mode.
func TestKernelStaticRangesAreRegistered(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.wantRegistered(t)
	if err := errors.Join(
		n.SetArgs(devnode.IPAM, "--mode=pool", "--cluster-pool-prefixes=10.197.0.0/18"), n.Kill(t.Context(), devnode.IPAM),
	); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { n.Start(ctx, devnode.IPAM) }) //nolint:errcheck // ipam does not serve
	want := "this node's ipam has mode pool with 10.197.0.0/18 in blocks of /24, " +
		"the cluster (/sluice/v1/identity/ipam) mode static"
	servicetest.EventuallyNil(t, "the problem by name", func() error {
		st, err := n.ipam.GetStatus(servicetest.Context(t), &ipamv1.GetStatusRequest{})
		if err == nil && !strings.Contains(st.String(), want) {
			err = fmt.Errorf("status is %v", st)
		}
		return err
	})
	cancel()
	wg.Wait()
	if err := n.SetArgs(devnode.IPAM); err != nil {
		t.Fatal(err)
	}
	n.restart(t, devnode.IPAM)
	n.wantRegistered(t)
}

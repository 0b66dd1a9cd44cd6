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
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// further are ranges that no node has initially.
var further = []netip.Prefix{netip.MustParsePrefix("10.199.7.0/24"), netip.MustParsePrefix("fd00:199:7::/64")}

func texts(ranges []netip.Prefix) (out []string) {
	for _, p := range ranges {
		out = append(out, p.String())
	}
	return out
}

// setPools restarts ipam with other pools.
func (n *testNode) setPools(t *testing.T, ranges ...netip.Prefix) {
	t.Helper()
	if err := n.SetArgs(devnode.IPAM, "--pools="+strings.Join(texts(ranges), ",")); err != nil {
		t.Fatal(err)
	}
	n.restart(t, devnode.IPAM)
}

// restart kills a service and starts it again.
func (n *testNode) restart(t *testing.T, service string) {
	t.Helper()
	if err := errors.Join(n.Kill(t.Context(), service), n.Start(t.Context(), service)); err != nil {
		t.Fatal(err)
	}
}

// wantRanges waits until ipam and the datapath have these ranges, and the kernel has rules of no others.
func (n *testNode) wantRanges(t *testing.T, serving, draining []netip.Prefix) {
	t.Helper()
	servicetest.EventuallyNil(t, "ranges", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		pools, err := n.ipam.ListPools(ctx, &ipamv1.ListPoolsRequest{})
		if err != nil {
			return err
		}
		states := map[ipamv1.RangeState][]string{}
		for _, p := range pools.GetPools() {
			states[p.GetState()] = append(states[p.GetState()], p.GetPrefix())
		}
		status, err := n.datapath.GetStatus(ctx, &datapathv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		all := texts(slices.Concat(serving, draining))
		have := status.GetPodPrefixes()
		var rules []string
		for _, family := range []string{"-4", "-6"} {
			out := run(ctx, t, "ip", "-netns", n.netnsName(), family, "rule", "show", "pref", "9")
			for line := range strings.Lines(out) {
				rules = append(rules, strings.Fields(line)[2])
			}
		}
		for _, list := range [][]string{all, have, rules, states[ipamv1.RangeState_RANGE_STATE_DRAINING]} {
			slices.Sort(list)
		}
		want := texts(draining)
		slices.Sort(want)
		if !slices.Equal(states[ipamv1.RangeState_RANGE_STATE_SERVING], texts(serving)) ||
			!slices.Equal(states[ipamv1.RangeState_RANGE_STATE_DRAINING], want) {
			return fmt.Errorf("ipam has %v", states)
		}
		if !slices.Equal(have, all) || !slices.Equal(rules, all) {
			return fmt.Errorf("the datapath has %v, the kernel has rules for %v, want %v", have, rules, all)
		}
		if !status.GetAddReady() && !status.GetKnownAddReady() { // only known label sets, because etcd is down
			return fmt.Errorf("not ready: %v", status.GetService().GetProblems())
		}
		return nil
	})
}

func (n *testNode) netnsName() string { return strings.TrimPrefix(n.Netns(), "/run/netns/") }

func inRanges(p pod.Pod, ranges []netip.Prefix) bool {
	return !slices.ContainsFunc(p.Addresses(), func(a netip.Addr) bool {
		return !slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(a) })
	})
}

// TestKernelRangesChangeWhilePodsRun proves INV-16, INV-19 and INV-23: ranges are added and drained while connections
// between pods continue and each process is killed.
func TestKernelRangesChangeWhilePodsRun(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	first := n.PodCIDRs()
	old := n.addPods(t, "server", "client")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	_, wait := converse(ctx, t, old[1], old[0], 0, 4)

	n.setPools(t, slices.Concat(first, further)...)
	n.wantRanges(t, slices.Concat(first, further), nil)
	n.restart(t, devnode.Datapath)
	n.wantRanges(t, slices.Concat(first, further), nil)

	n.setPools(t, further...)
	n.wantRanges(t, further, first)
	fresh := n.addPods(t, "fresh", "newcomer")
	for _, p := range fresh {
		if !inRanges(p, further) {
			t.Errorf("%s has %v, want addresses of %v", p.Name, p.Addresses(), further)
		}
	}
	exchange(t, fresh[0], fresh[1])
	exchange(t, fresh[0], old[0])
	for _, service := range []string{devnode.IPAM, devnode.Datapath, devnode.Identity, devnode.Policy} {
		n.restart(t, service)
		n.wantRanges(t, further, first)
	}
	exchange(t, old[1], fresh[1])

	// The datapath starts while ipam is down: running pods do not notice, and a deletion works without other
	// services.
	if err := errors.Join(n.Kill(t.Context(), devnode.IPAM), n.Kill(t.Context(), devnode.Datapath),
		n.Start(t.Context(), devnode.Datapath)); err != nil {
		t.Fatal(err)
	}
	exchange(t, old[0], fresh[0])
	n.del(t, fresh[1])
	if err := n.Start(t.Context(), devnode.IPAM); err != nil {
		t.Fatal(err)
	}
	n.wantRanges(t, further, first)

	stop()
	if err := wait(); err != nil {
		t.Errorf("connections in the draining ranges: %v", err)
	}
	n.del(t, old[1])
	n.wantRanges(t, further, first)
	n.del(t, old[0])
	n.wantRanges(t, further, nil)
	exchange(t, fresh[0], n.addPods(t, "last")[0])
}

// TestFaultKillTheDatapathWhileARangeComesOrGoes kills the datapath at each step of a change of ranges. The next
// process finishes the change, without an effect on pods.
func TestFaultKillTheDatapathWhileARangeComesOrGoes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	first := n.PodCIDRs()
	pods := n.addPods(t, "server", "client")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	_, wait := converse(ctx, t, pods[1], pods[0], 0, 4)
	points := slices.DeleteFunc(n.faultPoints(t, devnode.Datapath), func(point string) bool {
		return !strings.HasPrefix(point, "datapath/ranges/")
	})
	if len(points) == 0 {
		t.Fatal("the datapath has no such points")
	}
	for i, point := range points {
		for skip := range further {
			if !allFaults() && skip != i%len(further) {
				continue
			}
			t.Run(fmt.Sprintf("%s.%d", strings.ReplaceAll(point, "/", "."), skip), func(t *testing.T) {
				before, after := first, slices.Concat(first, further)
				if !strings.Contains(point, "/add-") {
					before, after = after, before
				}
				n.setPools(t, before...)
				n.wantRanges(t, before, nil)
				if err := n.Kill(t.Context(), devnode.Datapath); err != nil {
					t.Fatal(err)
				}
				controller, files := newController(t)
				if err := n.Start(t.Context(), devnode.Datapath, files...); err != nil {
					t.Fatal(err)
				}
				controller.Started()
				controller.KillAt(point, skip)
				n.setPools(t, after...)
				hit, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				if err := controller.WaitHits(hit, point, 1+skip); err != nil {
					t.Fatal(err)
				}
				n.restart(t, devnode.Datapath)
				n.wantRanges(t, after, nil)
			})
		}
	}
	stop()
	if err := wait(); err != nil {
		t.Errorf("connections: %v", err)
	}
}

// TestBurstAcrossAChangeOfRanges confirms 1,000 addresses while ipam is killed and started with other pools, which ends
// all leases. No address is confirmed twice, and none is lost. The addresses belong to no endpoints, so the datapath
// ignores them.
func TestBurstAcrossAChangeOfRanges(t *testing.T) {
	n := newNode(t, func(o *devnode.Options) {
		o.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.196.0.0/22")}
	})
	sets := [][]netip.Prefix{
		n.PodCIDRs(), {netip.MustParsePrefix("10.200.0.0/22")}, {netip.MustParsePrefix("10.204.0.0/22")},
	}
	var (
		mu   sync.Mutex
		held = map[string]string{} // guarded by mu
		wg   sync.WaitGroup
	)
	for w := range 4 {
		wg.Go(func() {
			for i := range 250 {
				o := &workloadv1.Owner{ContainerId: fmt.Sprintf("burst-%d-%d", w, i), InterfaceName: "eth0"}
				var address string
				servicetest.EventuallyNil(t, "allocation", func() error {
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					got, err := n.ipam.Allocate(ctx, &ipamv1.AllocateRequest{Owner: o, Manager: "test"})
					if err != nil {
						return err
					}
					address = got.GetAllocation().GetAddresses()[0].GetAddress()
					confirm := &ipamv1.ConfirmAllocationRequest{Owner: o, Addresses: []string{address}}
					_, err = n.ipam.ConfirmAllocation(ctx, confirm)
					return err
				})
				mu.Lock()
				if other, ok := held[address]; ok {
					t.Errorf("%s has %s, and so has %s", o.GetContainerId(), address, other)
				}
				held[address] = o.GetContainerId()
				mu.Unlock()
			}
		})
	}
	for i := range 6 {
		n.setPools(t, sets[(i+1)%len(sets)]...)
	}
	wg.Wait()
	if len(held) != 1000 {
		t.Errorf("%d addresses were given, want 1000", len(held))
	}
	pools, err := n.ipam.ListPools(t.Context(), &ipamv1.ListPoolsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	sum := uint64(0)
	for _, p := range pools.GetPools() {
		sum += p.GetConfirmedCount()
	}
	if sum != 1000 {
		t.Errorf("the pools count %d confirmed addresses, want 1000: %v", sum, pools)
	}
	for _, o := range held {
		release := &ipamv1.ReleaseRequest{Owner: &workloadv1.Owner{ContainerId: o, InterfaceName: "eth0"}}
		if _, err := n.ipam.Release(t.Context(), release); err != nil {
			t.Fatal(err)
		}
	}
	n.wantRanges(t, sets[0], nil)
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/fault/faulttest"
	"github.com/sluice-net/sluice/kit/servicetest"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
)

// moreThanABlock is a number of addresses that does not fit into one block.
const moreThanABlock = 14

// blockPoints are the services and the families of fault points that a node reaches while it claims and returns a
// block.
var blockPoints = []struct {
	service  string
	families []string
}{
	{devnode.IPAM, []string{"ipam/claim/", "ipam/ranges/", "ipam/return/"}},
	{devnode.Identity, []string{"identity/claim/", "identity/return/", "identity/register/"}},
}

// armed restarts a service of the node with a controller of its fault points.
func (n *node) armed(t *testing.T, service string) *faulttest.Controller {
	t.Helper()
	if err := n.Kill(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	var carrier exec.Cmd
	controller := faulttest.New(t, &carrier)
	if err := n.Start(t.Context(), service, carrier.ExtraFiles...); err != nil {
		t.Fatal(err)
	}
	controller.Started()
	return controller
}

// pointsOf returns the fault points of a service in the families: all of them, or one of each family. It leaves out
// fault points that are reached only in the first registration, which tests of identity cover.
func (n *node) pointsOf(t *testing.T, service string, families []string) (points []string) {
	t.Helper()
	all, err := n.armed(t, service).Names(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(all)
	first := []string{"identity/register/before-save", "identity/register/before-answer"}
	for _, family := range families {
		of := slices.DeleteFunc(slices.Clone(all), func(point string) bool {
			return !strings.HasPrefix(point, family) || slices.Contains(first, point)
		})
		if len(of) == 0 {
			t.Fatalf("%s has no fault points of %s", service, family)
		}
		if !allFaults() {
			of = of[:1]
		}
		points = append(points, of...)
	}
	return points
}

// blocks returns the blocks in ipam's file.
func (r *renter) blocks(ctx context.Context) (ranges []string, err error) {
	pools, err := r.ipam.ListPools(ctx, &ipamv1.ListPoolsRequest{})
	for _, p := range pools.GetPools() {
		ranges = append(ranges, p.GetPrefix())
	}
	slices.Sort(ranges)
	return ranges, err
}

// agreed waits until ipam's file has this number of blocks, every node lists exactly these blocks for the renter's
// node, and no block belongs to two nodes.
func (c *testCluster) agreed(t *testing.T, r *renter, blocks int) {
	t.Helper()
	servicetest.EventuallyNil(t, fmt.Sprintf("%d blocks of %s", blocks, r.node.Name()), func() error {
		file, err := r.blocks(t.Context())
		if err != nil {
			return err
		}
		for _, n := range c.nodes {
			all, err := receiveAll(n.cluster.ListNodes(t.Context(), &identityv1.ListNodesRequest{}))
			if err != nil {
				return err
			}
			holders := map[string]string{}
			var known []string
			for _, m := range all {
				name, ranges := m.GetNode().GetName(), m.GetNode().GetPodRanges()
				if name == r.node.Name() {
					known = slices.Sorted(slices.Values(ranges))
				}
				if refused := m.GetNode().GetRefusedRanges(); len(refused) > 0 {
					return fmt.Errorf("%s is refused %v", name, refused)
				}
				for _, p := range ranges {
					if other, ok := holders[p]; ok {
						return fmt.Errorf("%s is the block of %s and of %s", p, name, other)
					}
					holders[p] = name
				}
			}
			if len(file) != blocks || !slices.Equal(file, known) {
				return fmt.Errorf("ipam's file has %v, %s knows %v", file, n.Name(), known)
			}
		}
		return nil
	})
}

// growAndShrink allocates more addresses than a block has and releases them.
func (r *renter) growAndShrink(ctx context.Context, what string) error {
	taken := map[string]netip.Addr{}
	for i := range moreThanABlock {
		owner := fmt.Sprintf("%s-%d-%d", what, r.number, i)
		address, ok := r.take(ctx, owner)
		if !ok {
			return fmt.Errorf("%s has no address: %w", owner, ctx.Err())
		}
		taken[owner] = address
	}
	for owner, address := range taken {
		if !r.give(ctx, owner, address) {
			return fmt.Errorf("%s cannot give %s back: %w", owner, address, ctx.Err())
		}
	}
	return nil
}

// TestFaultKillAnywhereWhileABlockComesOrGoes proves INV-85 with real processes: it kills ipam and identity of a node
// at each step of claiming and returning a block, while other nodes allocate addresses of the same pool. The node
// still gets its addresses, and ends with its initial block only, in etcd and in its file. In the recorded history,
// no address and no block has two owners at a time.
func TestFaultKillAnywhereWhileABlockComesOrGoes(t *testing.T) {
	t.Parallel()
	c := newPoolCluster(t, 1)
	h := &uses{start: time.Now()}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var renters []*renter
	var group errgroup.Group
	for i, n := range c.nodes {
		r := &renter{node: n, ipam: ipamv1.NewIPAMServiceClient(dial(t, n.Node, devnode.IPAM)), number: i, uses: h}
		renters = append(renters, r)
		if i > 0 {
			group.Go(func() error {
				for k := 0; ctx.Err() == nil; k++ {
					if err := r.growAndShrink(ctx, fmt.Sprint("other", k)); err != nil && ctx.Err() == nil {
						return err
					}
				}
				return nil
			})
		}
	}
	n, r := c.nodes[0], renters[0]
	c.agreed(t, r, 1)
	for _, s := range blockPoints {
		for _, point := range n.pointsOf(t, s.service, s.families) {
			ok := t.Run(strings.ReplaceAll(point, "/", "."), func(t *testing.T) {
				controller := n.armed(t, s.service)
				controller.KillAt(point, 0)
				patient, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				var again errgroup.Group
				again.Go(func() error {
					if err := controller.WaitHits(patient, point, 1); err != nil {
						return err
					}
					if err := n.Kill(patient, s.service); err != nil { // the process may be ending already
						return err
					}
					return n.Start(patient, s.service)
				})
				if err := r.growAndShrink(patient, "at-"+strings.ReplaceAll(point, "/", ".")); err != nil {
					t.Error(err)
				}
				if err := again.Wait(); err != nil {
					t.Fatal(err)
				}
				c.agreed(t, r, 1)
			})
			if !ok {
				t.FailNow()
			}
		}
	}
	if err := r.growAndShrink(ctx, "after-all"); err != nil {
		t.Error(err)
	}
	stop()
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if wrong := h.wrong(); len(wrong) > 0 {
		t.Errorf("the history of %d operations: %v", h.count(), wrong)
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/servicetest"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
)

// registry is the cluster as an identity service shows it: the blocks of
// 10.9.0.0/22, which it gives away in their order, and who has them.
type registry struct {
	identityv1.UnimplementedClusterServiceServer

	mu       sync.Mutex
	holders  map[string]string // guarded by mu; by block; quarantined: in quarantine
	order    []string          // of the blocks
	away     bool              // guarded by mu; etcd does not answer
	claims   int               // guarded by mu
	settings string            // guarded by mu; of the cluster, if they are not the node's
}

// serveRegistry serves at a socket until the test ends.
func serveRegistry(t *testing.T, socket string) *registry {
	t.Helper()
	r := &registry{holders: map[string]string{}}
	for i := range 4 {
		r.order = append(r.order, fmt.Sprintf("10.9.%d.0/28", i))
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	identityv1.RegisterClusterServiceServer(s, r)
	var wg sync.WaitGroup
	wg.Go(func() { s.Serve(l) }) //nolint:errcheck // it ends with the test
	t.Cleanup(func() { s.Stop(); wg.Wait() })
	return r
}

func (r *registry) set(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

func (r *registry) has(holder string) (blocks []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for b, h := range r.holders {
		if h == holder {
			blocks = append(blocks, b)
		}
	}
	slices.Sort(blocks)
	return blocks
}

// RegisterNode implements the service.
func (r *registry) RegisterNode(
	_ context.Context, req *identityv1.RegisterNodeRequest,
) (*identityv1.RegisterNodeResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	resp := &identityv1.RegisterNodeResponse{Node: &identityv1.Node{}, Registered: !r.away, StoreConnected: !r.away}
	if r.away {
		return resp, nil
	}
	ranges := req.GetPodRanges().GetPrefixes()
	refuse := func(p, holder, reason string) {
		refused := &identityv1.RefusedRange{Prefix: p, Holder: holder, Reason: reason}
		resp.Node.RefusedRanges = append(resp.Node.RefusedRanges, refused)
	}
	for b, h := range r.holders {
		if h == "me" && !slices.Contains(ranges, b) {
			r.holders[b] = "quarantined"
		}
	}
	for _, p := range ranges {
		switch h := r.holders[p]; {
		case r.settings != "":
			refuse(p, "", r.settings)
		case h == "" || h == "me" || h == "quarantined":
			r.holders[p] = "me"
		default:
			refuse(p, h, "node "+h+" has it and is alive")
		}
	}
	return resp, nil
}

// ClaimRange implements the service.
func (r *registry) ClaimRange(
	_ context.Context, req *identityv1.ClaimRangeRequest,
) (*identityv1.ClaimRangeResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.claims++
	if r.away {
		return nil, status.Error(codes.Unavailable, "etcd is unavailable")
	}
	for _, lost := range []bool{true, false} {
		for _, b := range r.order {
			if h := r.holders[b]; lost && h == "me" && !slices.Contains(req.GetKnownRanges(), b) || !lost && h == "" {
				r.holders[b] = "me"
				return &identityv1.ClaimRangeResponse{Range: b}, nil
			}
		}
	}
	return nil, status.Error(codes.ResourceExhausted, "10.9.0.0/22 has 4 blocks of /28, of which nodes have 4")
}

// ReturnRange implements the service.
func (r *registry) ReturnRange(
	_ context.Context, req *identityv1.ReturnRangeRequest,
) (*identityv1.ReturnRangeResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.away {
		return nil, status.Error(codes.Unavailable, "etcd is unavailable")
	}
	if r.holders[req.GetRange()] == "me" {
		r.holders[req.GetRange()] = "quarantined"
	}
	return &identityv1.ReturnRangeResponse{}, nil
}

// newPoolNode is a node that takes its blocks from the registry's pool.
func newPoolNode(t *testing.T, flags ...string) (*node, *registry) {
	t.Helper()
	n := newNode(t)
	socket := filepath.Join(n.dir, "identity.sock")
	n.flags = append([]string{
		"--mode", "pool", "--identity", socket, "--quarantine", "0s", "--cluster-pool-prefixes", "10.9.0.0/22",
		"--cluster-pool-ipv4-block", "28", "--cluster-pool-max-blocks", "3",
	}, flags...)
	return n, serveRegistry(t, socket)
}

// pools are the ranges of the node with their states.
func (n *node) pools() (ranges []string) {
	n.t.Helper()
	resp, err := n.ipam.ListPools(n.t.Context(), &ipamv1.ListPoolsRequest{})
	if err != nil {
		n.t.Fatal(err)
	}
	for _, p := range resp.GetPools() {
		state := strings.TrimPrefix(p.GetState().String(), "RANGE_STATE_")
		ranges = append(ranges, p.GetPrefix()+" "+strings.ToLower(state))
	}
	return ranges
}

func (n *node) problems() (texts string) {
	n.t.Helper()
	st, err := n.ipam.GetStatus(n.t.Context(), &ipamv1.GetStatusRequest{})
	if err != nil {
		n.t.Fatal(err)
	}
	for _, p := range st.GetService().GetProblems() {
		texts += p.GetText() + "\n"
	}
	return texts
}

// fill confirms addresses for owners of a name until there are that many.
func (n *node) fill(name string, from, to int) {
	n.t.Helper()
	for i := from; i < to; i++ {
		id := fmt.Sprintf("%s%d", name, i)
		got, err := n.allocate(id)
		if err == nil {
			err = n.confirm(id, list(got))
		}
		if err != nil {
			n.t.Fatalf("%s: %v", id, err)
		}
	}
}

func (n *node) release(name string, from, to int) {
	n.t.Helper()
	for i := from; i < to; i++ {
		o := owner(fmt.Sprintf("%s%d", name, i))
		if _, err := n.ipam.Release(n.t.Context(), &ipamv1.ReleaseRequest{Owner: o}); err != nil {
			n.t.Fatal(err)
		}
	}
}

// sameAs waits until the registry gives the node what its file has.
func (n *node) sameAs(r *registry, blocks ...string) {
	n.t.Helper()
	servicetest.EventuallyNil(n.t, "the blocks", func() error {
		var mine []string
		for _, p := range n.pools() {
			mine = append(mine, strings.TrimSuffix(p, " serving"))
		}
		slices.Sort(mine)
		if has := r.has("me"); !slices.Equal(mine, blocks) || !slices.Equal(has, blocks) {
			return fmt.Errorf("the file has %v, the registry %v, want %v", mine, has, blocks)
		}
		return nil
	})
}

// says whether an error has a code and names something.
func says(err error, code codes.Code, what string) bool {
	return status.Code(err) == code && strings.Contains(err.Error(), what)
}

const (
	poolName = "cluster pool 10.9.0.0/22"

	block0, block1, block2 = "10.9.0.0/28", "10.9.1.0/28", "10.9.2.0/28"
	perBlock               = 13 // addresses of a block
)

func TestPoolGrowsUnderABurstAndShrinks(t *testing.T) {
	n, r := newPoolNode(t)
	n.start()
	n.sameAs(r, block0)
	// There are more callers than addresses in the 3 blocks that the node may have: each caller gets an address, from a
	// new block if necessary, or RESOURCE_EXHAUSTED.
	var wg sync.WaitGroup
	var mu sync.Mutex
	addresses, failed := map[string]bool{}, map[codes.Code]int{}
	for i := range 4 * perBlock {
		wg.Go(func() {
			id := fmt.Sprint("burst", i)
			got, err := n.allocate(id)
			if err == nil {
				err = n.confirm(id, list(got))
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed[status.Code(err)]++
				if !says(err, codes.ResourceExhausted, poolName+": the node has its maximum number of blocks: 3") {
					t.Error(err)
				}
				return
			}
			addresses[list(got)[0]] = true
		})
	}
	wg.Wait()
	if len(addresses) != 3*perBlock || failed[codes.ResourceExhausted] != perBlock {
		t.Errorf("%d addresses were given, and failed %v", len(addresses), failed)
	}
	n.sameAs(r, block0, block1, block2)
	for i := range 4 * perBlock {
		n.release("burst", i, i+1)
	}
	n.sameAs(r, block0) // the first stays
	if rest := r.has("quarantined"); !slices.Equal(rest, []string{block1, block2}) {
		t.Errorf("returned are %v", rest)
	}
}

func TestPoolWithoutAFreeBlockIsNamedAndRecovers(t *testing.T) {
	n, r := newPoolNode(t)
	r.set(func() { r.holders[block1], r.holders[block2], r.holders["10.9.3.0/28"] = "b", "b", "c" })
	n.start()
	n.fill("o", 0, perBlock)
	_, err := n.allocate("more")
	if !says(err, codes.ResourceExhausted, poolName) || !says(err, codes.ResourceExhausted, "10.9.0.0/22 has 4 blocks") {
		t.Fatalf("an address beyond the pool: %v", err)
	}
	if p := n.problems(); !strings.Contains(p, "cluster pool 10.9.0.0/22") {
		t.Errorf("problems: %s", p)
	}
	r.set(func() { delete(r.holders, block2) })
	more := func() error { _, err := n.allocate("more"); return err }
	servicetest.EventuallyNil(t, "an address of the block that came back", more)
	n.sameAs(r, block0, block2)
	if p := n.problems(); p != "" {
		t.Errorf("problems: %s", p)
	}
}

func TestPoolServesItsFileWhileTheClusterIsAway(t *testing.T) {
	n, r := newPoolNode(t)
	r.set(func() { r.away = true })
	n.flags = append(n.flags, servicetest.ProbeFlags...)
	n.startWaiting()
	if _, err := n.allocate("a"); status.Code(err) != codes.Unavailable {
		t.Errorf("an address before the first block: %v", err)
	}
	n.WantProbes(503, "no block of cluster pool 10.9.0.0/22")
	r.set(func() { r.away = false })
	n.Serving()
	n.fill("o", 0, 5)
	r.set(func() { r.away = true })
	n.Kill()
	n.Process = nil
	n.start()
	n.fill("o", 5, perBlock) // what it has, it has
	_, err := n.allocate("more")
	if !says(err, codes.Unavailable, poolName+": the cluster's pool is unreachable") {
		t.Errorf("an address beyond the block: %v", err)
	}
	r.set(func() { r.away = false })
	more := func() error { _, err := n.allocate("more"); return err }
	servicetest.EventuallyNil(t, "an address of the next block", more)
	n.sameAs(r, block0, block1)
}

// TestForgottenNodeIsNotBelieved proves INV-86: a block that another node got
// while this one was unavailable gives no address, also while the cluster is unavailable again.
func TestForgottenNodeIsNotBelieved(t *testing.T) {
	n, r := newPoolNode(t)
	n.start()
	n.fill("o", 0, 2)
	n.Kill()
	n.Process = nil
	r.set(func() { r.holders[block0] = "b" })
	n.start()
	for i := range 2 {
		got, err := n.allocate(fmt.Sprint("new", i))
		if err != nil || !netip.MustParsePrefix(block1).Contains(netip.MustParseAddr(list(got)[0])) {
			t.Fatalf("a new owner has %v, %v", got, err)
		}
		r.set(func() { r.away = true })
		n.Kill()
		n.Process = nil
		n.start()
	}
	if got := n.pools(); !slices.Equal(got, []string{block1 + " serving", block0 + " draining"}) {
		t.Errorf("the pools are %v", got)
	}
}

// TestRangesThatTheClusterRefusesAreClosed: in mode static, ranges that the cluster refuses are closed; they open once
// the cluster grants them.
func TestRangesThatTheClusterRefusesAreClosed(t *testing.T) {
	n := newNode(t)
	socket := filepath.Join(n.dir, "identity.sock")
	n.flags = append([]string{"--identity", socket, "--pools", "10.9.0.0/28"}, servicetest.ProbeFlags...)
	r := serveRegistry(t, socket)
	r.set(func() { r.settings = "this node's ipam has mode static, the cluster mode pool" })
	n.startWaiting()
	n.WantProbes(503, "10.9.0.0/28: this node's ipam has mode static, the cluster mode pool")
	if _, err := n.allocate("a"); !says(err, codes.Unavailable, "mode static, the cluster mode pool") {
		t.Errorf("an address of a refused range: %v", err)
	}
	problems := n.problems()
	if got := n.pools(); !slices.Equal(got, []string{block0 + " refused"}) || !strings.Contains(problems, "mode static") {
		t.Errorf("the pools are %v, the problems %s", got, problems)
	}
	r.set(func() { r.settings = ""; r.holders[block0] = "b" })
	servicetest.Eventually(t, "the other reason", func() bool {
		return strings.Contains(n.problems(), "node b has it and is alive")
	})
	r.set(func() { delete(r.holders, block0) })
	n.Serving()
	if _, err := n.allocate("a"); err != nil {
		t.Error(err)
	}
}

// TestKillWhileABlockComesOrGoesLeaksNone proves INV-85.
func TestKillWhileABlockComesOrGoesLeaksNone(t *testing.T) {
	stored := []string{"ipam/ranges/before-commit", "ipam/ranges/after-commit"}
	for _, point := range append([]string{"ipam/claim/before-ask", "ipam/claim/answered", "ipam/claim/stored"}, stored...) {
		t.Run(strings.ReplaceAll(point, "/", "."), func(t *testing.T) {
			n, r := newPoolNode(t)
			n.start()
			n.sameAs(r, block0)
			n.Faults.KillAt(point, 0)
			for i := range perBlock { // which claims the next block
				id := fmt.Sprint("o", i)
				if got, err := n.allocate(id); err != nil || n.confirm(id, list(got)) != nil {
					break
				}
			}
			n.dead()
			n.start()
			n.fill("o", 0, perBlock+1)
			servicetest.EventuallyNil(t, "one block more", func() error {
				mine := r.has("me")
				if got := len(n.pools()); got != 2 || len(mine) != 2 {
					return fmt.Errorf("the file has %v, the registry %v", n.pools(), mine)
				}
				return nil
			})
			n.sameAs(r, r.has("me")...)
		})
	}
	for _, point := range append([]string{"ipam/return/stored", "ipam/return/answered"}, stored...) {
		t.Run("return/"+strings.ReplaceAll(point, "/", "."), func(t *testing.T) {
			n, r := newPoolNode(t)
			n.start()
			n.fill("o", 0, perBlock+1)
			n.sameAs(r, block0, block1)
			n.Faults.KillAt(point, 0)
			n.release("o", 4, perBlock+1)
			n.dead()
			n.start()
			n.sameAs(r, block0)
		})
	}
}

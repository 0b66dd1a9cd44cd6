// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
)

// blocks returns the settings of a pool with that many IPv4 blocks, a power of two.
func blocks(n int) registry.IPAM {
	bits := 24
	for ; n > 1; n /= 2 {
		bits--
	}
	p := netip.PrefixFrom(netip.MustParseAddr("10.128.0.0"), bits)
	return registry.IPAM{Mode: registry.IPAMPool, Pool: []netip.Prefix{p}, IPv4Block: 24, MaxBlocks: 32}
}

// inMemory keeps a registration as long as the process.
type inMemory struct{}

func (inMemory) SaveRegistration(registry.Registration) error { return nil }
func (inMemory) SavePins([]registry.Pin) error                { return nil }

// silent publishes to no reader.
type silent struct{}

func (silent) Upsert(registry.Key, registry.Item) uint64 { return 0 }
func (silent) Delete(registry.Key) bool                  { return false }
func (silent) Get(registry.Key) (registry.Item, bool)    { return registry.Item{}, false }
func (silent) Keys() []registry.Key                      { return nil }
func (silent) Reach(uint64, int64)                       {}
func (silent) Loaded()                                   {}

// claimer returns a node without identities and without a watch.
func claimer(t *testing.T, endpoint, name string) *registry.Registry {
	t.Helper()
	sess, err := session.Open(session.Config{
		Client: session.Client{Endpoints: strings.Split(endpoint, ",")}, Prefix: testPrefix, Node: name, TTL: time.Hour,
		AliveTTL:    time.Hour,
		Incarnation: "of-" + name, Boot: "b", Timeout: time.Minute, Listen: time.Hour, Log: log.Discard(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sess.Close() })
	nodes := NewNodes(sess)
	patiently(t, func() error {
		_, err := New(sess, nodes, Readers{}).Join(t.Context())
		return err
	})
	r := registry.New(registry.Config{
		Node: name, Incarnation: "of-" + name, Version: "test", Timeout: time.Minute,
		Log: log.Discard(),
	},
		nodes, inMemory{}, silent{}, registry.Registration{})
	r.Observe(registry.Update{Complete: true})
	return r
}

// patiently calls f, like a node, until etcd serves it: with many clients, etcd may be too slow. It returns the number
// of calls that etcd did not serve.
func patiently(t *testing.T, f func() error) (again int) {
	t.Helper()
	for ; ; again++ {
		err := f()
		lost := errors.Is(err, allocator.ErrUnavailable) || errors.Is(err, allocator.ErrSessionLost)
		if lost && again < 20 {
			continue
		}
		if err != nil {
			t.Error(err)
		}
		return again
	}
}

// requests returns the number of transactions and reads that etcd has answered.
func requests(t *testing.T, s *etcdtest.Server) (n int) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn,
		error,
	) {
		return new(net.Dialer).DialContext(ctx, "unix", strings.TrimPrefix(s.Endpoint, "unix://"))
	}}}
	defer client.CloseIdleConnections()
	resp, err := client.Get("http://etcd/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), "} ")
		if strings.HasPrefix(name, "grpc_server_handled_total{") && strings.Contains(name,
			`grpc_service="etcdserverpb.KV"`) {
			count, err := strconv.Atoi(value)
			if err != nil {
				t.Fatal(err)
			}
			n += count
		}
	}
	return n
}

// heldRanges returns the ranges in etcd by their node; ranges in quarantine are listed under "quarantined".
func heldRanges(t *testing.T, admin *clientv3.Client) map[string]string {
	t.Helper()
	out := map[string]string{}
	for p, value := range keysBelow(t, admin, "/range/default/") {
		out[p] = strings.Split(value, `"`)[3]
		if strings.Contains(value, "quarantine") {
			out[p] = "quarantined"
		}
	}
	return out
}

// oneHand checks that the ranges in the nodes' records and the ranges' keys agree with each other.
func oneHand(t *testing.T, admin *clientv3.Client) {
	t.Helper()
	held := heldRanges(t, admin)
	for key, value := range keysBelow(t, admin, "/ip/") {
		node, isRecord := strings.CutSuffix(key, "/node")
		if !isRecord {
			continue
		}
		for p, holder := range held {
			if has := strings.Contains(value, `"`+p+`"`); has != (holder == node) {
				t.Errorf("%s is held by %q, and the record of %s is %s", p, holder, node, value)
			}
		}
	}
}

func TestFiveHundredNodesClaimRanges(t *testing.T) {
	const nodes = 500
	for _, size := range []int{1024, 512} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			s := etcdtest.Start(t)
			settings := blocks(size)
			var all [nodes]*registry.Registry
			each := func(f func(i int, r *registry.Registry)) {
				var wg sync.WaitGroup
				for i, r := range all {
					wg.Go(func() { f(i, r) })
				}
				wg.Wait()
			}
			each(func(i int, _ *registry.Registry) {
				r := claimer(t, s.Endpoint, fmt.Sprint("node", i))
				patiently(t, func() error {
					_, _, err := r.Register(t.Context(), registry.Registration{Ranges: &[]netip.Prefix{}, IPAM: &settings}, false)
					return err
				})
				patiently(t, func() error { // which registers
					_, err := r.ReturnRange(t.Context(), blocks(1).Pool[0], false)
					return err
				})
				all[i] = r
			})
			before := requests(t, s)
			var got [nodes]netip.Prefix
			var again atomic.Int64
			each(func(i int, r *registry.Registry) {
				again.Add(int64(patiently(t, func() (err error) {
					got[i], err = r.ClaimRange(t.Context(), settings, false, nil)
					return err
				})))
			})
			n := requests(t, s) - before
			t.Logf("%d requests of %d nodes for %d blocks, %d calls again", n, nodes, size, again.Load())
			if n > 2*(nodes+int(again.Load())) || n < nodes {
				t.Errorf("%d nodes claimed with %d requests", nodes, n)
			}
			held := heldRanges(t, s.Client())
			for i, p := range got {
				if holder := held[p.String()]; holder != fmt.Sprint("node", i) {
					t.Errorf("%s was given to node%d and is held by %s", p, i, holder)
				}
			}
			if len(held) != nodes {
				t.Errorf("%d ranges are held", len(held))
			}
			oneHand(t, s.Client())
		})
	}
}

// refusedRanges waits until the node is registered in etcd, and returns the node's refused ranges.
func (n *node) refusedRanges() (refused []registry.Refusal) {
	n.t.Helper()
	servicetest.Eventually(n.t, "the registration", func() bool {
		known, registered, err := n.reg.Register(n.t.Context(), registry.Registration{}, false)
		refused = known.Refused
		return err == nil && registered
	})
	return refused
}

func (n *node) claim(settings registry.IPAM, known ...netip.Prefix) netip.Prefix {
	n.t.Helper()
	n.connected()
	p, err := n.reg.ClaimRange(n.t.Context(), settings, false, known)
	if err != nil {
		n.t.Fatal(err)
	}
	return p
}

// TestPoolWithoutAFreeBlockRecovers: a pool assigns each block once and reports when it has no free block. After a
// block was returned and its quarantine is over, the pool assigns it again.
func TestPoolWithoutAFreeBlockRecovers(t *testing.T) {
	t.Parallel()
	s := etcdtest.Start(t)
	settings := blocks(4)
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	var known []netip.Prefix
	for range 3 {
		known = append(known, a.claim(settings, known...))
	}
	other := b.claim(settings)
	if slices.Contains(known, other) {
		t.Fatalf("%s has two holders", other)
	}
	_, err := b.reg.ClaimRange(t.Context(), settings, false, []netip.Prefix{other})
	var full *registry.FullError
	if !errors.As(err, &full) || full.Blocks != 4 || full.Held != 4 || !strings.Contains(err.Error(),
		"10.128.0.0/22 has 4 blocks of /24, of which nodes have 4 and 0 are in quarantine") {
		t.Fatalf("a claim of a pool without a free block: %v", err)
	}
	admin := s.Client()
	oneHand(t, admin)
	gone := known[1]
	for _, want := range []bool{true, false} { // a return may be repeated
		if returned, err := a.reg.ReturnRange(t.Context(), gone, false); err != nil || returned != want {
			t.Fatalf("return: %v, %v", returned, err)
		}
	}
	if got := heldRanges(t, admin)[gone.String()]; got != "quarantined" {
		t.Errorf("the returned block is held by %q", got)
	}
	// Until the quarantine is over, only its last node can get it.
	servicetest.EventuallyNil(t, "the other node sees the return", func() error {
		_, err := b.reg.ClaimRange(t.Context(), settings, false, []netip.Prefix{other})
		if !errors.As(err, &full) || full.Resting != 1 || full.Held != 3 {
			return fmt.Errorf("a claim of a block in quarantine: %w", err)
		}
		return nil
	})
	known = slices.DeleteFunc(known, func(p netip.Prefix) bool { return p == gone })
	if got := a.claim(settings, known...); got != gone {
		t.Errorf("the node that returned %s gets %s", gone, got)
	}
	if _, err := a.reg.ReturnRange(t.Context(), gone, false); err != nil {
		t.Fatal(err)
	}
	resp, err := admin.Get(t.Context(), testPrefix+"/range/default/"+gone.String())
	if err != nil {
		t.Fatal(err)
	}
	lease, err := admin.TimeToLive(t.Context(), clientv3.LeaseID(resp.Kvs[0].Lease))
	if err != nil || lease.GrantedTTL != int64(RangeQuarantine/time.Second) {
		t.Fatalf("the quarantine is %+v, %v", lease, err)
	}
	if _, err := admin.Revoke(t.Context(), lease.ID); err != nil { // it is over
		t.Fatal(err)
	}
	if got := b.claim(settings, other); got != gone {
		t.Errorf("the free block is %s, the claim got %s", gone, got)
	}
	oneHand(t, admin)
	for _, p := range known[:1] {
		if _, err := a.reg.ReturnRange(t.Context(), p, false); err != nil {
			t.Error(err)
		}
	}
	if _, err := a.reg.ReturnRange(t.Context(), known[1], false); !errors.Is(err, registry.ErrLastRange) {
		t.Errorf("the last block is returned: %v", err)
	}
}

// TestNodeWithOtherSettingsGetsNoRange: every kind of claim fails, and the error contains both settings.
func TestNodeWithOtherSettingsGetsNoRange(t *testing.T) {
	t.Parallel()
	s := etcdtest.Start(t)
	first := blocks(4)
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	mine := a.claim(first)
	for _, c := range []struct {
		other registry.IPAM
		want  string
	}{
		{
			registry.IPAM{Mode: registry.IPAMStatic},
			"this node's ipam has mode static, the cluster (" + testPrefix +
				"/ipam) mode pool with 10.128.0.0/22 in blocks of /24, 32 for a node",
		},
		{registry.IPAM{Mode: registry.IPAMKubernetes}, "mode kubernetes, the cluster"},
		{blocks(8), "mode pool with 10.128.0.0/21 in blocks of /24, 32 for a node, the cluster"},
	} {
		b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
		said := registry.Registration{Ranges: &[]netip.Prefix{prefix(1)}, IPAM: &c.other}
		if _, _, err := b.reg.Register(t.Context(), said, false); err != nil {
			t.Fatal(err)
		}
		if r := b.refusedRanges(); len(r) != 1 || r[0].Range != prefix(1) || !strings.Contains(r[0].Reason, c.want) {
			t.Errorf("%s: refused are %v", c.other, r)
		}
		b.connected()
		if c.other.Mode == registry.IPAMPool {
			if _, err := b.reg.ClaimRange(t.Context(), c.other, false, nil); !errors.Is(err,
				registry.ErrIPAMDiffers) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v", c.other, err)
			}
		}
		if held := heldRanges(t, s.Client()); len(held) != 1 || held[mine.String()] != "a" {
			t.Errorf("%s: held are %v", c.other, held)
		}
		b.stop()
		if _, err := s.Client().Delete(t.Context(), testPrefix+"/alive/b"); err != nil { // it is switched off for good
			t.Fatal(err)
		}
	}
	// A cluster whose settings are lost gets them again from its nodes.
	if _, err := s.Client().Delete(t.Context(), testPrefix+"/ipam"); err != nil {
		t.Fatal(err)
	}
	a.claim(first, mine)
	var got registry.IPAM
	if err := json.Unmarshal([]byte(keysBelow(t, s.Client(), "/ipam")[""]), &got); err != nil || !got.Equal(first) {
		t.Errorf("the settings of the cluster are %s: %v", got, err)
	}
}

// TestForgottenNodeDoesNotGetItsBlockBack: the claim of a forgotten node for its former block is refused if another
// node has claimed the block in the meantime.
func TestForgottenNodeDoesNotGetItsBlockBack(t *testing.T) {
	t.Parallel()
	s := etcdtest.Start(t)
	settings := blocks(2)
	cfg := quick()
	cfg.aliveTTL = time.Second
	dir := t.TempDir()
	a := startNode(t, s.Endpoint, "a", dir, cfg)
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	lost, kept := a.claim(settings), b.claim(settings)
	a.stop()
	servicetest.Eventually(t, "the silence of a", func() bool {
		alive, err := b.reg.Alive(t.Context())
		return err == nil && !alive["a"]
	})
	// A node that is only silent keeps its blocks.
	if _, err := b.reg.ClaimRange(t.Context(), settings, false, []netip.Prefix{kept}); !errors.Is(err,
		registry.ErrNoFreeRange) {
		t.Fatalf("a block of a silent node is given away: %v", err)
	}
	b.seesNode("a", true)
	if _, err := b.reg.Forget(t.Context(), "a", false, false); err != nil {
		t.Fatal(err)
	}
	if _, err := b.reg.ClaimRange(t.Context(), settings, false, []netip.Prefix{kept}); !errors.Is(err,
		registry.ErrNoFreeRange) {
		t.Fatalf("a block in quarantine is given away: %v", err)
	}
	admin := s.Client()
	resp, err := admin.Get(t.Context(), testPrefix+"/range/default/"+lost.String())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := admin.Revoke(t.Context(), clientv3.LeaseID(resp.Kvs[0].Lease)); err != nil {
		t.Fatal(err)
	}
	if got := b.claim(settings, kept); got != lost {
		t.Fatalf("b gets %s", got)
	}
	a = startNode(t, s.Endpoint, "a", dir, cfg)
	if r := a.refusedRanges(); len(r) != 1 || r[0].Range != lost || r[0].Holder != "b" {
		t.Errorf("a is refused %v", r)
	}
	oneHand(t, admin)
}

// TestKubernetesTakesRangesOver: Kubernetes assigns a range of a deleted node to another node at once. The other node
// gets the range although it is in quarantine, as soon as the former node is silent.
func TestKubernetesTakesRangesOver(t *testing.T) {
	t.Parallel()
	s := etcdtest.Start(t)
	settings := registry.IPAM{Mode: registry.IPAMKubernetes}
	cfg := quick()
	cfg.aliveTTL = time.Second
	a := startNode(t, s.Endpoint, "a", t.TempDir(), cfg)
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	has := func(n *node, ranges ...netip.Prefix) {
		t.Helper()
		if _, _, err := n.reg.Register(t.Context(), registry.Registration{Ranges: &ranges, IPAM: &settings}, false); err != nil {
			t.Fatal(err)
		}
		n.refusedRanges()
	}
	has(a, prefix(1), prefix(2))
	has(a, prefix(2))
	has(b, prefix(3), prefix(1)) // in quarantine
	if held := heldRanges(t, s.Client()); held[prefix(1).String()] != "b" {
		t.Errorf("held are %v", held)
	}
	has(b, prefix(3), prefix(1), prefix(2))
	if r := b.refusedRanges(); len(r) != 1 || r[0].Holder != "a" || r[0].Reason != "node a has it and is alive" {
		t.Errorf("b is refused %v", r)
	}
	a.stop()
	servicetest.Eventually(t, "the range of a silent node", func() bool { return len(b.refusedRanges()) == 0 })
	oneHand(t, s.Client())
}

// TestNodeLearnsThatItsRangeIsTaken: the watch of a running node reports it.
func TestNodeLearnsThatItsRangeIsTaken(t *testing.T) {
	t.Parallel()
	s := etcdtest.Start(t)
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	a.register(1, prefix(1))
	a.published()
	a.seesOwn(1)
	admin := s.Client()
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	b.register(2, prefix(1))
	servicetest.Eventually(t, "the take-over", func() bool {
		if _, err := admin.Delete(t.Context(), testPrefix+"/alive/a"); err != nil { // a claims it again
			t.Fatal(err)
		}
		return heldRanges(t, admin)[prefix(1).String()] == "b"
	})
	servicetest.Eventually(t, "the refusal", func() bool {
		r := a.refusedRanges()
		return len(r) == 1 && r[0].Range == prefix(1) && r[0].Holder == "b"
	})
	oneHand(t, admin)
}

// seesOwn waits until the watch has delivered the node's own record with that many ranges.
func (n *node) seesOwn(ranges int) {
	n.t.Helper()
	servicetest.Eventually(n.t, "its own record", func() bool {
		for _, k := range n.reg.Nodes() {
			if len(k.Node.Record.Ranges) == ranges {
				return true
			}
		}
		return false
	})
}

// TestNoBlockInTwoHands claims and returns blocks concurrently in a pool that is nearly full, while endpoints in the
// blocks are published. Each block has one holder at any time, and no block is lost.
func TestNoBlockInTwoHands(t *testing.T) {
	t.Parallel()
	const nodes, rounds = 6, 12
	s := etcdtest.Start(t)
	settings := blocks(8)
	admin := s.Client()
	var wg sync.WaitGroup
	for i := range nodes {
		n := startNode(t, s.Endpoint, fmt.Sprint("node", i), t.TempDir(), quick())
		n.connected()
		wg.Go(func() {
			var known []netip.Prefix
			for round := range rounds {
				p, err := n.reg.ClaimRange(t.Context(), settings, false, known)
				if err != nil && !errors.Is(err, registry.ErrNoFreeRange) && !errors.Is(err, allocator.ErrUnavailable) {
					t.Error(err)
					return
				}
				if err == nil {
					known = append(known, p)
				}
				n.endpoint(fmt.Sprint("c", round), "web", address(i, round))
				if len(known) < 2 {
					continue
				}
				if _, err := n.reg.ReturnRange(t.Context(), known[0], false); err != nil {
					t.Error(err)
					return
				}
				known = known[1:]
			}
		})
	}
	wg.Wait()
	oneHand(t, admin)
	if held := heldRanges(t, admin); len(held) > 8 {
		t.Errorf("held are %v", held)
	}
}

func TestBlocksOfPools(t *testing.T) {
	prefixes := func(texts ...string) (out []netip.Prefix) {
		for _, text := range texts {
			out = append(out, netip.MustParsePrefix(text))
		}
		return out
	}
	p := registry.IPAM{
		Mode: registry.IPAMPool, Pool: prefixes("10.1.0.0/23", "10.9.0.0/22", "fd00:1::/48"),
		IPv4Block: 24, IPv6Block: 64, MaxBlocks: 1,
	}
	if p.Blocks(false) != 6 || p.Blocks(true) != 65_536 {
		t.Errorf("%d and %d blocks", p.Blocks(false), p.Blocks(true))
	}
	var got []netip.Prefix
	for i := range p.Blocks(false) {
		got = append(got, p.Block(false, i))
	}
	if want := prefixes("10.1.0.0/24", "10.1.1.0/24", "10.9.0.0/24", "10.9.1.0/24", "10.9.2.0/24",
		"10.9.3.0/24"); !slices.Equal(got, want) {
		t.Errorf("the blocks are %v", got)
	}
	if got := p.Block(true, 0x1234); got != netip.MustParsePrefix("fd00:1:0:1234::/64") {
		t.Errorf("a block of IPv6 is %s", got)
	}
	for text, want := range map[string]bool{
		"10.9.3.0/24": true, "10.9.4.0/24": false, "10.9.2.0/23": false,
		"10.1.0.0/25": false, "fd00:1:0:ffff::/64": false,
	} {
		if got := p.Has(false, netip.MustParsePrefix(text)); got != want {
			t.Errorf("%s is a block: %v", text, got)
		}
	}
}

// TestNumberOfBlocksIsTheClusters: a node whose limit differs from the cluster's, for example a node of another
// version, keeps its ranges and gets more ranges up to the cluster's limit.
func TestNumberOfBlocksIsTheClusters(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.Start(t)
	settings := blocks(64)
	settings.MaxBlocks = 2
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	a.connected()
	a.claim(settings, nil...)
	for _, most := range []int{1, 16} {
		name := fmt.Sprint("b", most)
		b := startNode(t, s.Endpoint, name, t.TempDir(), quick())
		b.connected()
		other := settings
		other.MaxBlocks = most
		var known []netip.Prefix
		for range 2 {
			known = append(known, b.claim(other, known...))
		}
		if _, err := b.reg.ClaimRange(t.Context(), other, false, known); !errors.Is(err, registry.ErrMaxRanges) {
			t.Errorf("a third block with a limit of %d: %v", most, err)
		}
		if st := b.reg.Status(); len(st.Ranges) > 0 {
			t.Errorf("with a limit of %d: %+v", most, st.Ranges)
		}
	}
}

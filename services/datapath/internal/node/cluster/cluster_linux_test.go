// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// source is a hub that can be unavailable, and restart.
type source struct {
	mu   sync.Mutex
	hub  *watch.Hub[cluster.Key, cluster.Item]
	away bool
}

func newSource() *source { s := &source{}; s.anew(); return s }

// anew discards all state, as a restarted service does.
func (s *source) anew() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hub != nil {
		s.hub.Close()
	}
	s.hub = watch.NewHub[cluster.Key](watch.Options[cluster.Item]{Loading: true})
	s.away = false
}

func (s *source) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hub.Close()
	s.away = true
}

func (s *source) now() *watch.Hub[cluster.Key, cluster.Item] {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hub
}

func (s *source) Watch(ctx context.Context, token []byte) iter.Seq2[watch.Event[cluster.Key, cluster.Item], error] {
	return func(yield func(watch.Event[cluster.Key, cluster.Item], error) bool) {
		s.mu.Lock()
		hub, away := s.hub, s.away
		s.mu.Unlock()
		if away {
			yield(watch.Event[cluster.Key, cluster.Item]{}, errors.New("the source is unavailable"))
			return
		}
		sub, err := hub.Subscribe(token)
		if err == nil {
			defer sub.Close()
		}
		for err == nil {
			var e watch.Event[cluster.Key, cluster.Item]
			if e, err = sub.Next(ctx); err == nil && !yield(e, nil) {
				return
			}
		}
		yield(watch.Event[cluster.Key, cluster.Item]{}, err)
	}
}

var ownRange = netip.MustParsePrefix("10.244.0.0/24")

// process is the part of the datapath that follows the cluster.
type process struct {
	t        testing.TB
	kernel   *kernel.Kernel
	numbers  *cluster.Numbers
	opened   error // error of the node IDs' file when they were opened
	follower *cluster.Follower
	stop     func()
}

func start(t testing.TB, dir place, s *source, now func() time.Time, prepare ...func(*cluster.FollowerOptions)) *process {
	t.Helper()
	k, err := kernel.Open(t.Context(), kernel.Options{Dir: dir.bpffs, PodCIDRs: []netip.Prefix{ownRange}})
	must(t, err)
	found, err := k.NodeNumbers()
	must(t, err)
	p := &process{t: t, kernel: k}
	p.numbers = cluster.OpenNumbers(cluster.NumbersOptions{
		Path: filepath.Join(dir.state, "nodes.json"), BootID: "boot-1", InUse: k.IPCache.InUse, Found: found, Now: now,
	})
	p.opened = p.numbers.Err()
	o := cluster.FollowerOptions{Source: s, Entries: k.IPCache, Numbers: p.numbers, Log: log.Discard()}
	for _, f := range prepare {
		f(&o)
	}
	p.follower = cluster.NewFollower(o)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- p.follower.Run(ctx) }()
	p.stop = sync.OnceFunc(func() {
		cancel()
		if err := errors.Join(<-done, k.Close()); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(p.stop)
	return p
}

// place has the directories in which a process keeps its state for the next one.
type place struct{ bpffs, state string }

func newDir(t testing.TB) place { return place{kerneltest.NewBPFFS(t), t.TempDir()} }

// remote returns the ipcache entries of other nodes and external addresses.
func (p *process) remote() map[netip.Prefix]ipmap.Info {
	p.t.Helper()
	entries, err := p.kernel.Addresses.List()
	must(p.t, err)
	out := map[netip.Prefix]ipmap.Info{}
	for _, e := range entries {
		if e.Prefix != ownRange {
			out[e.Prefix] = e.Info
		}
	}
	return out
}

// wait waits until the ipcache has the wanted entries.
func (p *process) wait(what string, want func() map[netip.Prefix]ipmap.Info) {
	p.t.Helper()
	servicetest.EventuallyNil(p.t, what, func() error {
		if s := p.follower.State(); !s.Complete {
			return fmt.Errorf("not complete: %w", s.Err)
		}
		if got := p.remote(); !maps.Equal(got, want()) {
			return fmt.Errorf("the ipcache has %v, want %v", got, want())
		}
		return nil
	})
}

func node(incarnation, address string, ranges ...string) cluster.Item {
	n := &cluster.Node{Incarnation: incarnation, Addresses: []netip.Addr{netip.MustParseAddr(address)}}
	for _, r := range ranges {
		n.Ranges = append(n.Ranges, netip.MustParsePrefix(r))
	}
	return cluster.Item{Node: n}
}

func key(text string) cluster.Key {
	if p, err := netip.ParsePrefix(text); err == nil {
		return cluster.Key{Prefix: p}
	}
	return cluster.Key{Node: text}
}

// expected computes the desired ipcache entries in the simplest way.
func (p *process) expected(set map[cluster.Key]cluster.Item) func() map[netip.Prefix]ipmap.Info {
	return func() map[netip.Prefix]ipmap.Info {
		out := map[netip.Prefix]ipmap.Info{}
		numbers := p.numbers.Names()
		ranges := map[string][]netip.Prefix{}
		for k, item := range set {
			if item.Node == nil {
				continue
			}
			ranges[k.Node] = item.Node.Ranges
			for _, r := range item.Node.Ranges {
				out[r] = ipmap.Info{Identity: identity.UnknownInCluster, Node: numbers[k.Node]}
			}
		}
		for k, item := range set {
			switch {
			case item.Node != nil:
			case item.On == "":
				out[k.Prefix] = ipmap.Info{Identity: item.Identity, Flags: ipmap.Outside}
			default:
				info := ipmap.Info{Identity: item.Identity, Node: numbers[item.On]}
				overlay := slices.ContainsFunc(ranges[item.On], func(r netip.Prefix) bool { return r.Contains(k.Prefix.Addr()) })
				if (info.Identity == identity.RemoteNode || info.Identity == identity.KubeAPIServer) && !overlay {
					info.Flags = ipmap.OfDevice
				}
				out[k.Prefix] = info
			}
		}
		maps.DeleteFunc(out, func(q netip.Prefix, _ ipmap.Info) bool { return ownRange.Contains(q.Addr()) })
		return out
	}
}

func say(h *watch.Hub[cluster.Key, cluster.Item], set map[cluster.Key]cluster.Item) {
	for _, nodes := range []bool{true, false} {
		for k, item := range set {
			if (item.Node != nil) == nodes {
				h.Upsert(k, item)
			}
		}
	}
	h.Loaded()
}

func twoNodes() map[cluster.Key]cluster.Item {
	return map[cluster.Key]cluster.Item{
		key("b"):              node("1", "192.0.2.2", "10.244.1.0/24", "fd00:244:1::/64"),
		key("c"):              node("1", "192.0.2.3", "10.244.2.0/24"),
		key("192.0.2.2/32"):   {On: "b", Identity: identity.RemoteNode},
		key("192.0.2.3/32"):   {On: "c", Identity: identity.KubeAPIServer},
		key("10.244.1.1/32"):  {On: "b", Identity: identity.RemoteNode},
		key("10.244.1.5/32"):  {On: "b", Identity: 300},
		key("10.244.2.5/32"):  {On: "c", Identity: 301},
		key("10.244.0.9/32"):  {On: "c", Identity: 301}, // an address in this node's range
		key("203.0.113.1/32"): {Identity: identity.MinNodeLocal},
	}
}

// TestKernelLeaseLossChangesNoKernel proves INV-82: the source fails, restarts empty, and is unavailable during a
// restart of the process. The kernel does not change until a complete snapshot lacks an entry.
func TestKernelLeaseLossChangesNoKernel(t *testing.T) {
	dir, s, set := newDir(t), newSource(), twoNodes()
	p := start(t, dir, s, time.Now)
	say(s.now(), set)
	p.wait("everything", p.expected(set))
	before, numbers := p.remote(), p.numbers.Names()

	stays := func(what string) {
		t.Helper()
		servicetest.EventuallyNil(t, what, func() error {
			if st := p.follower.State(); st.Complete || st.Err == nil {
				return errors.New("the follower considers the source complete")
			}
			return nil
		})
		if got := p.remote(); !maps.Equal(got, before) {
			t.Errorf("%s: the ipcache has %v, want %v", what, got, before)
		}
	}
	s.leave()
	stays("the source is unavailable")
	p.stop()
	p = start(t, dir, s, time.Now)
	stays("the source is unavailable over a start")
	if got := p.numbers.Names(); !maps.Equal(got, numbers) {
		t.Errorf("numbers after a start: %v, want %v", got, numbers)
	}
	s.anew() // has no state, and no complete snapshot
	s.now().Upsert(key("b"), set[key("b")])
	s.now().Upsert(key("10.244.1.77/32"), cluster.Item{On: "b", Identity: 400})
	servicetest.EventuallyNil(t, "the listed entries", func() error {
		if got := p.remote(); len(got) != len(before)+1 {
			return fmt.Errorf("the ipcache has %d prefixes, want one more than %d", len(got), len(before))
		}
		return nil
	})
	delete(set, key("c"))
	delete(set, key("10.244.2.5/32"))
	delete(set, key("192.0.2.3/32"))
	delete(set, key("10.244.0.9/32"))
	set[key("10.244.1.77/32")] = cluster.Item{On: "b", Identity: 400}
	say(s.now(), set)
	p.wait("the snapshot without node c", p.expected(set))
	if got := p.numbers.Names(); got["b"] != numbers["b"] || len(got) != 1 {
		t.Errorf("numbers after the snapshot: %v, want b as in %v", got, numbers)
	}
}

// TestKernelFollowedClusterIsTheFinalState makes random changes, with restarts of either side, and compares the ipcache
// with the final state.
func TestKernelFollowedClusterIsTheFinalState(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	dir, s := newDir(t), newSource()
	p := start(t, dir, s, time.Now)
	set := map[cluster.Key]cluster.Item{}
	s.now().Loaded()
	names := []string{"b", "c", "d", "e"}
	for step := range 600 {
		h := s.now()
		name := names[r.IntN(len(names))]
		at := slices.Index(names, name) + 1
		address := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(at), byte(r.IntN(8))}), 32)
		switch r.IntN(8) {
		case 0, 1: // it registers, possibly with another installation, tunnel or range
			item := node(fmt.Sprint(r.IntN(2)), fmt.Sprintf("192.0.2.%d", at+100*r.IntN(2)), fmt.Sprintf("10.244.%d.0/24", at))
			if r.IntN(2) == 0 {
				item.Node.Ranges = append(item.Node.Ranges, netip.MustParsePrefix(fmt.Sprintf("fd00:%d::/64", at)))
			}
			h.Upsert(key(name), item)
			set[key(name)] = item
		case 2, 3, 4:
			if _, ok := set[key(name)]; !ok {
				continue
			}
			item := cluster.Item{On: name, Identity: identity.Numeric(300 + r.IntN(3))}
			h.Upsert(cluster.Key{Prefix: address}, item)
			set[cluster.Key{Prefix: address}] = item
		case 5:
			h.Delete(cluster.Key{Prefix: address})
			delete(set, cluster.Key{Prefix: address})
		case 6: // it is removed
			for k, item := range set {
				if item.On == name {
					h.Delete(k)
					delete(set, k)
				}
			}
			h.Delete(key(name))
			delete(set, key(name))
		case 7:
			if r.IntN(8) > 0 {
				continue
			}
			if r.IntN(2) == 0 {
				s.anew()
				say(s.now(), set)
			} else {
				p.stop()
				p = start(t, dir, s, time.Now)
			}
		}
		if step%20 == 0 {
			p.wait(fmt.Sprintf("step %d", step), p.expected(set))
			taken := map[uint16]string{}
			for name, n := range p.numbers.Names() {
				if taken[n] != "" || n == 0 {
					t.Fatalf("step %d: number %d belongs to %s and %s", step, n, taken[n], name)
				}
				taken[n] = name
			}
		}
	}
	p.wait("the end", p.expected(set))
}

// TestKernelNodeNumberRests shows that the node ID of a removed node is only reused after the grace period and a pass
// of the collector that found no connection with it.
func TestKernelNodeNumberRests(t *testing.T) {
	dir, s, set := newDir(t), newSource(), twoNodes()
	now := time.Now()
	var mu sync.Mutex
	clock := func() time.Time { mu.Lock(); defer mu.Unlock(); return now }
	p := start(t, dir, s, clock)
	say(s.now(), set)
	p.wait("everything", p.expected(set))
	first, _ := p.numbers.Of("c")

	tuple := conntrack.Tuple{
		Initiator: netip.MustParseAddrPort("10.244.0.7:1"), Responder: netip.MustParseAddrPort("10.244.2.5:2"), Protocol: 17,
	}
	ct, k4 := p.kernel.Pins.Map(bpf.MapsMapSlCt4), tuple.Key4()
	put := func() {
		must(t, ct.Put(&k4, &bpf.MapsSlCt{Node: first, LastS: conntrack.MonotonicSeconds(), Where: 0xffff_ffff << 32}))
	}
	put()
	collect := func(p *process) {
		t.Helper()
		c, err := p.kernel.Connections.NewCollector(conntrack.CollectorOptions{
			Passed: func(_ time.Time, pass conntrack.Pass) { p.numbers.Passed(clock(), pass.Nodes) },
		})
		must(t, err)
		_, err = c.Collect(t.Context())
		must(t, err)
	}
	advance := func(d time.Duration) { mu.Lock(); defer mu.Unlock(); now = now.Add(d) }
	// used reports whether the node ID is not assigned when all free node IDs are.
	used := func(p *process) bool {
		t.Helper()
		all := map[string]cluster.Installation{}
		for i := range cluster.MaxNumber + 1 {
			all[fmt.Sprintf("x%d", i)] = cluster.Installation{Incarnation: "1"}
		}
		p.numbers.Set(all)
		defer func() {
			for name := range all {
				p.numbers.Remove(name)
			}
			p.numbers.Passed(clock().Add(2*cluster.NumberGrace), map[uint16]struct{}{first: {}}) // node IDs of the test
		}()
		for name, n := range p.numbers.Names() {
			if n == first && name != "c" {
				return true
			}
		}
		return false
	}
	collect(p)
	if used(p) {
		t.Fatal("the node ID of an existing node was reassigned")
	}
	h := s.now()
	for k, item := range set {
		if item.On == "c" {
			h.Delete(k)
			delete(set, k)
		}
	}
	h.Delete(key("c"))
	delete(set, key("c"))
	p.wait("c is forgotten", p.expected(set))
	advance(2 * cluster.NumberGrace)
	collect(p)
	if p.numbers.Resting() == 0 || used(p) {
		t.Fatal("the node ID is free although a connection has it")
	}
	if got := p.numbers.Name(first); got != "c" {
		t.Errorf("the node ID in quarantine is of %q, want c", got)
	}
	// The same after a start without the file.
	p.stop()
	must(t, os.WriteFile(filepath.Join(dir.state, "nodes.json"), []byte("damaged"), 0o600))
	p = start(t, dir, s, clock)
	if p.opened == nil { // until the follower writes it again
		t.Error("a corrupt file is not reported")
	}
	p.wait("after a start", p.expected(set))
	advance(2 * cluster.NumberGrace)
	collect(p)
	if used(p) {
		t.Fatal("after a start without the file the node ID is free although a connection has it")
	}
	ct = p.kernel.Pins.Map(bpf.MapsMapSlCt4)
	must(t, ct.Delete(&k4))
	if used(p) {
		t.Fatal("the node ID is free before a pass found no connection with it")
	}
	collect(p)
	if !used(p) {
		t.Error("the unused node ID is not free")
	}
}

// TestKernelAnotherTunnelIsAnotherNumber changes the address of a node. The node must get another node ID.
func TestKernelAnotherTunnelIsAnotherNumber(t *testing.T) {
	s, set := newSource(), twoNodes()
	p := start(t, newDir(t), s, time.Now)
	say(s.now(), set)
	p.wait("everything", p.expected(set))
	was, _ := p.numbers.Of("b")
	for _, item := range []cluster.Item{
		node("1", "192.0.2.99", "10.244.1.0/24"),
		node("2", "192.0.2.99", "10.244.1.0/24"),
	} {
		set[key("b")] = item
		s.now().Upsert(key("b"), item)
		servicetest.EventuallyNil(t, "another number", func() error {
			if n, _ := p.numbers.Of("b"); n == was {
				return fmt.Errorf("b still has number %d", n)
			}
			return nil
		})
		p.wait("all entries have it", p.expected(set))
		was, _ = p.numbers.Of("b")
	}
}

// TestKernelInvalidNodesAndMappingsAreRefused sends invalid nodes and mappings.
func TestKernelInvalidNodesAndMappingsAreRefused(t *testing.T) {
	s, set := newSource(), twoNodes()
	p := start(t, newDir(t), s, time.Now)
	bad := map[cluster.Key]cluster.Item{
		key("10.244.1.8/32"):  {On: "b", Identity: identity.Host},
		key("10.244.1.9/32"):  {On: "b", Identity: identity.World},
		key("10.244.1.16/28"): {On: "b", Identity: 300},
		key("0.0.0.0/0"):      {On: "b", Identity: 300},
		key("e"):              node("1", "192.0.2.5", "127.0.0.0/8", "0.0.0.0/0", "10.244.5.0/24"),
	}
	all := maps.Clone(set)
	maps.Copy(all, bad)
	say(s.now(), all)
	set[key("e")] = node("1", "192.0.2.5", "10.244.5.0/24")
	p.wait("what can be", p.expected(set))
	if got := p.follower.State(); len(got.Refused) != 5 {
		t.Errorf("refused %q, want 5", got.Refused)
	}
	for k := range bad {
		s.now().Delete(k)
	}
	delete(set, key("e"))
	p.wait("without it", p.expected(set))
	servicetest.EventuallyNil(t, "nothing is refused", func() error { // the changes arrive one by one
		if got := p.follower.State(); len(got.Refused) != 0 {
			return fmt.Errorf("refused %q, want nothing", got.Refused)
		}
		return nil
	})
}

// BenchmarkCluster applies 50,000 mappings of 500 nodes to an empty ipcache.
func BenchmarkCluster(b *testing.B) {
	set := map[cluster.Key]cluster.Item{}
	for n := range 500 {
		name := fmt.Sprintf("node-%d", n)
		set[key(name)] = node("1", fmt.Sprintf("192.0.%d.%d", n/250, n%250), fmt.Sprintf("10.%d.%d.0/24", 1+n/250, n%250))
		for i := range 100 {
			p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(1 + n/250), byte(n % 250), byte(2 + i)}), 32)
			set[cluster.Key{Prefix: p}] = cluster.Item{On: name, Identity: identity.Numeric(256 + (n*100+i)%2000)}
		}
	}
	for b.Loop() {
		s := newSource()
		say(s.now(), set)
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		began := time.Now()
		p := start(b, newDir(b), s, time.Now)
		opened := time.Since(began)
		servicetest.Eventually(b, "complete", func() bool { return p.follower.State().Complete })
		b.ReportMetric(float64(time.Since(began)-opened)/1e6, "ms/complete")
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/1e6, "MB/heap")
		began = time.Now()
		if n := len(p.remote()); n != 50_500 {
			b.Fatalf("the ipcache has %d prefixes of the cluster, want 50,500", n)
		}
		b.ReportMetric(float64(time.Since(began))/1e6, "ms/list")
		p.stop()
	}
}

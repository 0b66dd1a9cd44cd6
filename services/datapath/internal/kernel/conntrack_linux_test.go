// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// put writes a connection as a program would, and updates the counters.
func (k *Kernel) put(t testing.TB, c conntrack.Connection) {
	t.Helper()
	m, key := k.Connections.Map(c.Tuple)
	v := conntrack.ValueOf(c)
	if err := m.Update(key, &v, ebpf.UpdateAny); err != nil {
		t.Fatalf("write connection %v: %v", c.Tuple, err)
	}
}

// putAll writes many connections at once.
func (k *Kernel) putAll(t testing.TB, cs []conntrack.Connection) {
	t.Helper()
	var keys4 []bpf.MapsSlCtKey4
	var keys6 []bpf.MapsSlCtKey6
	var values4, values6 []bpf.MapsSlCt
	for _, c := range cs {
		if c.Initiator.Addr().Is4() {
			keys4, values4 = append(keys4, c.Key4()), append(values4, conntrack.ValueOf(c))
		} else {
			keys6, values6 = append(keys6, c.Key6()), append(values6, conntrack.ValueOf(c))
		}
	}
	if len(keys4) > 0 {
		if _, err := k.Pins.Map(bpf.MapsMapSlCt4).BatchUpdate(keys4, values4, nil); err != nil {
			t.Fatalf("write %d connections: %v", len(keys4), err)
		}
	}
	if len(keys6) > 0 {
		if _, err := k.Pins.Map(bpf.MapsMapSlCt6).BatchUpdate(keys6, values6, nil); err != nil {
			t.Fatalf("write %d connections: %v", len(keys6), err)
		}
	}
	k.addStat(t, uint32(bpf.MapsSlCtStatSL_CT_STAT_CREATED), len(cs))
}

func (k *Kernel) addStat(t testing.TB, stat uint32, n int) {
	t.Helper()
	m := k.Pins.Map(bpf.MapsMapSlCtStats)
	var perCPU []uint64
	if err := m.Lookup(stat, &perCPU); err != nil {
		t.Fatal(err)
	}
	perCPU[len(perCPU)-1] += uint64(n)
	if err := m.Put(stat, perCPU); err != nil {
		t.Fatal(err)
	}
}

// clock is a collector's clock, in seconds.
type clock struct{ now atomic.Uint32 }

func newCollector(t testing.TB, k *Kernel, o conntrack.CollectorOptions) (*conntrack.Collector, *clock) {
	t.Helper()
	cl := &clock{}
	cl.now.Store(100_000)
	o.Now = cl.now.Load
	c, err := k.Connections.NewCollector(o)
	if err != nil {
		t.Fatalf("NewCollector: %v", err)
	}
	return c, cl
}

func collect(t testing.TB, c *conntrack.Collector) conntrack.Pass {
	t.Helper()
	p, err := c.Collect(t.Context())
	if err != nil {
		t.Fatalf("Collect: %v", err)
	}
	return p
}

func (k *Kernel) tracked(t testing.TB) map[conntrack.Tuple]conntrack.Connection {
	t.Helper()
	all := map[conntrack.Tuple]conntrack.Connection{}
	err := k.Connections.Each(func(cs []conntrack.Connection) error {
		for _, c := range cs {
			if _, twice := all[c.Tuple]; twice {
				t.Errorf("%v is listed twice", c.Tuple)
			}
			all[c.Tuple] = c
		}
		return nil
	})
	if err != nil {
		t.Fatalf("Connections: %v", err)
	}
	return all
}

// remotes returns connections from outside to endpoint e, with consecutive numbers.
func remotes(
	e endpointmap.Endpoint, proto uint8, from, n int, flags conntrack.Flags, last uint32,
) []conntrack.Connection {
	cs := make([]conntrack.Connection, 0, n)
	for i := from; i < from+n; i++ {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], 0xc0000000+uint32(i))
		cs = append(cs, conntrack.Connection{
			Tuple: conntrack.Tuple{Initiator: netip.AddrPortFrom(netip.AddrFrom4(a), uint16(i)), Responder: netip.AddrPortFrom(e.IPv4, 80), Protocol: proto},
			From:  conntrack.End{Slot: endpointmap.NoID, Identity: identity.WorldIPv4}, To: conntrack.End{Slot: e.Slot, Epoch: e.Policy.Epoch, Identity: e.Identity},
			LastSeen: last, Flags: flags,
		})
	}
	return cs
}

// begun reverses them: from the endpoint to outside.
func begun(cs []conntrack.Connection) []conntrack.Connection {
	for i, c := range cs {
		cs[i].Initiator, cs[i].Responder, cs[i].From, cs[i].To = c.Responder, c.Initiator, c.To, c.From
	}
	return cs
}

func TestKernelConnectionIsFoundFromBothEnds(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	for _, tu := range []conntrack.Tuple{
		tuple(6, "10.244.0.10:40000", "10.244.0.20:80"), tuple(6, "10.244.0.20:40000", "10.244.0.10:80"),
		tuple(17, "[fd00::2]:53", "[fd00::1]:53"),
	} {
		want := conntrack.Connection{Tuple: tu, From: conntrack.End{Slot: 1, Epoch: 2, AddressEpoch: 3, Identity: 4}, To: conntrack.End{Slot: 5, Epoch: 6, AddressEpoch: 7, Identity: 8}, LastSeen: 9, Flags: conntrack.SeenReply, EgressRule: 1, IngressRule: 2}
		k.put(t, want)
		for _, asked := range []conntrack.Tuple{tu, {Initiator: tu.Responder, Responder: tu.Initiator, Protocol: tu.Protocol}} {
			got, found, err := k.Connections.Lookup(asked)
			if err != nil || !found || got.Tuple != tu || got.From != want.From || got.To != want.To || got.EgressRule != 1 || got.IngressRule != 2 {
				t.Errorf("Connection(%v): %+v, %v, %v", asked, got, found, err)
			}
		}
		other := tu
		other.Protocol = 132
		if _, found, err := k.Connections.Lookup(other); found || err != nil {
			t.Errorf("another protocol: %v, %v", found, err)
		}
	}
	if _, _, err := k.Connections.Lookup(tuple(6, "10.0.0.1:1", "[fd00::1]:1")); !errors.Is(err, pin.ErrInvalid) {
		t.Errorf("two families: %v", err)
	}
}

func TestKernelConnectionThatChangedIsNotDeleted(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	tu := tuple(6, "10.244.0.10:40000", "192.0.2.1:80")
	k.put(t, conntrack.Connection{Tuple: tu, LastSeen: 5})
	old, _, err := k.Connections.Lookup(tu)
	if err != nil {
		t.Fatal(err)
	}
	k.put(t, conntrack.Connection{Tuple: tu, LastSeen: 6})
	if deleted, err := k.Connections.Remove(old); deleted != 0 || err != nil {
		t.Errorf("seen since: %v, %v", deleted, err)
	}
	now, found, err := k.Connections.Lookup(tu)
	if err != nil || !found {
		t.Fatalf("afterwards: %v, %v", found, err)
	}
	if deleted, err := k.Connections.Remove(now); deleted != 1 || err != nil {
		t.Errorf("as it was read: %v, %v", deleted, err)
	}
	if deleted, err := k.Connections.Remove(now); deleted != 0 || err != nil {
		t.Errorf("a second time: %v, %v", deleted, err)
	}
}

func TestKernelRemoveTakesThoseThatAreAsTheyWereRead(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	e := publish(t, k, a)
	// Any changed word of the value counts, including the last flag and the first epoch.
	changes := []func(*bpf.MapsSlCt){
		func(v *bpf.MapsSlCt) { v.Epochs++ },
		func(v *bpf.MapsSlCt) { v.Where++ },
		func(v *bpf.MapsSlCt) { v.IdResp++ },
		func(v *bpf.MapsSlCt) { v.RuleEg++ },
		func(v *bpf.MapsSlCt) { v.NatPort++ },
		func(v *bpf.MapsSlCt) { v.LastS++ },
		func(v *bpf.MapsSlCt) { v.Flags |= uint32(conntrack.Reset) },
	}
	for _, family := range []int{4, 6} {
		for _, n := range []int{1, 2, 31, conntrack.RemoveAtOnce} {
			cs := remotes(e, 6, 0, n, conntrack.SeenReply, 5)
			if family == 6 {
				for i := range cs {
					cs[i].Initiator = netip.AddrPortFrom(netip.AddrFrom16([16]byte{0x20, 1, 15: byte(i)}), 1)
					cs[i].Responder = netip.AddrPortFrom(e.IPv6, 80)
				}
			}
			k.putAll(t, cs)
			for i := range cs {
				cs[i], _, _ = k.Connections.Lookup(cs[i].Tuple)
			}
			var want uint32
			for i, c := range cs {
				m, key := k.Connections.Map(c.Tuple)
				switch v := c.Value; i % 3 {
				case 0: // as it was read
					want |= 1 << i
				case 1:
					changes[i/3%len(changes)](&v)
					must(t, "change", m.Update(key, &v, ebpf.UpdateExist))
				case 2:
					must(t, "delete", m.Delete(key))
				}
			}
			deleted, err := k.Connections.Remove(cs...)
			if err != nil || deleted != want {
				t.Errorf("IPv%d, %d connections: deleted %#b, %v, want %#b", family, n, deleted, err, want)
			}
			for i, c := range cs {
				if _, found, err := k.Connections.Lookup(c.Tuple); found != (i%3 == 1) || err != nil {
					t.Errorf("IPv%d, connection %d of %d afterwards: %v, %v", family, i, n, found, err)
				}
				m, key := k.Connections.Map(c.Tuple)
				_ = m.Delete(key)
			}
		}
	}
	four := remotes(e, 6, 0, 1, 0, 5)[0]
	six := four
	six.Initiator, six.Responder = netip.MustParseAddrPort("[2001::1]:1"), netip.MustParseAddrPort("[2001::2]:1")
	for name, cs := range map[string][]conntrack.Connection{
		"none": nil, "two families": {four, six},
		"too many": slices.Repeat([]conntrack.Connection{four}, conntrack.RemoveAtOnce+1),
	} {
		if _, err := k.Connections.Remove(cs...); !errors.Is(err, pin.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestKernelCollectorRemovesExactlyWhatIsOver compares the collector with a model that states the rules plainly, over
// random connections: after each pass the map has the contents of the model.
func TestKernelCollectorRemovesExactlyWhatIsOver(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	first, second := publish(t, k, a), publish(t, k, b)
	col, cl := newCollector(t, k, conntrack.CollectorOptions{})
	rng := rand.New(rand.NewPCG(1, 2))

	type life struct {
		c    conntrack.Connection
		dead bool // an end was removed
	}
	model := map[conntrack.Tuple]*life{}
	order := []conntrack.Tuple{} // the order of a map is not reproducible
	created, expired, orphaned := 0, 0, 0
	limit := func(c conntrack.Connection) uint32 { // in seconds, from the documentation
		closed := c.Flags&conntrack.Reset != 0 || c.Flags&conntrack.InitiatorFinished != 0 && c.Flags&conntrack.ResponderFinished != 0
		switch {
		case (c.Protocol == 6 || c.Protocol == 132) && closed:
			return 10
		case (c.Protocol == 6 || c.Protocol == 132) && c.Flags&(conntrack.Established|conntrack.Terminated) == 0:
			return 60
		case c.Protocol == 6 || c.Protocol == 132:
			return 8000
		case c.Protocol == 17 && c.Flags&conntrack.SeenReply != 0:
			return 120
		case c.Protocol == 17:
			return 30
		case c.Protocol == 1:
			return 60
		}
		return 600
	}
	ends := []endpointmap.Endpoint{first, second}
	for step := range 60 {
		for range 200 {
			e := ends[rng.IntN(len(ends))]
			local, peer := netip.AddrPortFrom(e.IPv4, uint16(rng.IntN(40))), netip.AddrPort{}
			other := conntrack.End{Slot: endpointmap.NoID}
			switch rng.IntN(3) {
			case 0:
				peer = netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(rng.IntN(8))}), 80)
			case 1:
				o := ends[rng.IntN(len(ends))]
				peer, other = netip.AddrPortFrom(o.IPv4, 80), conntrack.End{Slot: o.Slot, Epoch: o.Policy.Epoch}
			case 2:
				local, peer = netip.AddrPortFrom(e.IPv6, uint16(rng.IntN(40))), netip.AddrPortFrom(world6, 80)
			}
			c := conntrack.Connection{
				Tuple: conntrack.Tuple{Initiator: local, Responder: peer, Protocol: []uint8{6, 17, 1, 132, 47}[rng.IntN(5)]},
				From:  conntrack.End{Slot: e.Slot, Epoch: e.Policy.Epoch}, To: other, LastSeen: cl.now.Load(),
				Flags: conntrack.Flags(rng.IntN(0x4000)) &^ (conntrack.OriginLow | conntrack.ByResponder),
			}
			if rng.IntN(2) == 0 {
				c.Initiator, c.Responder, c.From, c.To = c.Responder, c.Initiator, c.To, c.From
			}
			// a key has one entry
			back := conntrack.Tuple{Initiator: c.Responder, Responder: c.Initiator, Protocol: c.Protocol}
			_, there := model[c.Tuple]
			_, reverse := model[back]
			if reverse && back != c.Tuple {
				continue
			}
			if !there {
				order = append(order, c.Tuple)
				created++
			}
			model[c.Tuple] = &life{c: c}
			k.put(t, c)
		}
		if step%10 == 9 {
			// the second endpoint is removed, and another one gets its endpoint ID or its address
			gone := ends[1]
			if err := k.Endpoints.Unpublish(gone.Slot); err != nil {
				t.Fatal(err)
			}
			for _, l := range model {
				if l.c.From.Slot == gone.Slot || l.c.To.Slot == gone.Slot {
					l.dead = true
				}
			}
			next := b
			if step%20 == 9 {
				next = testEndpoint(1002, 21+byte(step))
			}
			if err := k.Endpoints.Barrier(t.Context()); err != nil {
				t.Fatal(err)
			}
			ends[1] = publish(t, k, next)
			if ends[1].Slot == gone.Slot && ends[1].IPv4 == gone.IPv4 {
				for _, l := range model {
					l.dead = false // the epochs distinguish them, not the collector
				}
			}
		}
		cl.now.Add(uint32(rng.IntN(90)))
		p := collect(t, col)
		wantExpired, wantOrphaned := 0, 0
		order = slices.DeleteFunc(order, func(tu conntrack.Tuple) bool {
			l := model[tu]
			switch {
			case cl.now.Load()-l.c.LastSeen >= limit(l.c):
				wantExpired++
			case l.dead:
				wantOrphaned++
			default:
				return false
			}
			delete(model, tu)
			return true
		})
		expired, orphaned = expired+wantExpired, orphaned+wantOrphaned
		if p.Expired != wantExpired || p.Orphaned != wantOrphaned || p.Kept != 0 || p.Live[0]+p.Live[1] != len(model) {
			t.Fatalf("step %d: %+v, want %d expired, %d orphaned, %d live", step, p, wantExpired, wantOrphaned, len(model))
		}
		have := k.tracked(t)
		for tu, l := range model {
			if c, ok := have[tu]; !ok || c.LastSeen != l.c.LastSeen {
				t.Fatalf("step %d: %v is live and was removed, or changed: %+v", step, tu, c)
			}
		}
		if len(have) != len(model) {
			t.Fatalf("step %d: %d entries, want %d", step, len(have), len(model))
		}
	}
	if expired == 0 || orphaned == 0 || len(model) == 0 {
		t.Errorf("the run covers too little: %d expired, %d orphaned, %d live", expired, orphaned, len(model))
	}
	cs, err := k.Connections.Counters()
	if err != nil || cs.Expired != uint64(expired+orphaned) {
		t.Errorf("counted %d removed, %v, want %d", cs.Expired, err, expired+orphaned)
	}
}

func TestKernelCollectorFindsConnectionsToAddresses(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	e := publish(t, k, a)
	at := func(last byte) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, last}), 443)
	}
	world := netip.AddrPortFrom(world6, 443)
	wanted := map[netip.Addr]struct{}{world.Addr(): {}}
	for last := byte(1); last <= 6; last++ {
		wanted[at(last).Addr()] = struct{}{}
	}
	var found []netip.Addr
	col, cl := newCollector(t, k, conntrack.CollectorOptions{
		Wanted: func() (map[netip.Addr]struct{}, func([]netip.Addr)) {
			return wanted, func(inUse []netip.Addr) { found = inUse }
		},
	})
	put := func(local netip.Addr, port uint16, peer netip.AddrPort, flags conntrack.Flags, idle uint32, inbound bool) {
		c := conntrack.Connection{
			Tuple: conntrack.Tuple{Initiator: netip.AddrPortFrom(local, port), Responder: peer, Protocol: 6},
			From:  conntrack.End{Slot: e.Slot, Epoch: e.Policy.Epoch}, To: conntrack.End{Slot: endpointmap.NoID},
			LastSeen: cl.now.Load() - idle, Flags: flags,
		}
		if inbound {
			c.Initiator, c.Responder, c.From, c.To = c.Responder, c.Initiator, c.To, c.From
		}
		k.put(t, c)
	}
	open := conntrack.Established | conntrack.SeenReply
	put(e.IPv4, 1, at(1), open, 100, false)
	put(e.IPv4, 2, at(1), open, 0, false)
	put(e.IPv4, 3, at(2), open|conntrack.Reset, 0, false)      // closed
	put(e.IPv4, 4, at(3), open|conntrack.Terminated, 0, false) // terminated by a policy
	put(e.IPv4, 5, at(4), open, 9000, false)                   // idle for too long
	put(e.IPv4, 6, at(5), open, 0, true)
	put(e.IPv6, 7, world, open, 0, false)
	put(e.IPv4, 8, at(9), open, 0, false) // not requested
	if _, err := col.Collect(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []netip.Addr{at(1).Addr(), at(5).Addr(), world.Addr()}
	if slices.SortFunc(found, netip.Addr.Compare); !slices.Equal(found, want) {
		t.Errorf("connections to %v, want %v", found, want)
	}
}

func TestKernelCollectorReadsManyByBatches(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	e := publish(t, k, a)
	col, cl := newCollector(t, k, conntrack.CollectorOptions{})
	const n = 100_000
	now := cl.now.Load()
	k.putAll(t, remotes(e, 6, 0, n/2, conntrack.SeenReply, now))
	k.putAll(t, remotes(e, 17, n/2, n/2, 0, now-61))
	before := k.tracked(t)
	p := collect(t, col)
	t.Logf("%d entries: %d batches, %s, %d removed", n, p.Batches, p.Took, p.Expired)
	// two maps, and the last batch of each is short
	if most := n/pin.BatchSize*2 + 4; p.Batches < n/pin.BatchSize || p.Batches > most {
		t.Errorf("%d batches for %d entries, want <= %d", p.Batches, n, most)
	}
	idle := 0
	for _, c := range before {
		if c.Protocol == 17 {
			idle++
		}
	}
	if p.Expired != idle || p.Live[0] != len(before)-idle {
		t.Errorf("%d expired and %d live, want %d and %d", p.Expired, p.Live[0], idle, len(before)-idle)
	}
	// An LRU map evicts before it is full, because each CPU has a reserve.
	if want := uint64(n - len(before)); p.Evicted != want {
		t.Errorf("%d evicted, want %d", p.Evicted, want)
	}
	p = collect(t, col)
	t.Logf("half of them left: %d batches, %s", p.Batches, p.Took)
}

func TestKernelEvictedConnectionsAreCounted(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	e := publish(t, k, a)
	col, cl := newCollector(t, k, conntrack.CollectorOptions{})
	total := 0
	for range 4 {
		k.putAll(t, remotes(e, 6, total, 50_000, conntrack.SeenReply, cl.now.Load()))
		total += 50_000
		p := collect(t, col)
		if live := len(k.tracked(t)); p.Evicted != uint64(total-live) || p.Live[0] != live {
			t.Errorf("%d begun, %d there: %d evicted", total, live, p.Evicted)
		}
	}
	if p := col.Last(); p.EvictedAt.IsZero() {
		t.Error("the pass does not say when it found them")
	}
	if p := col.Last(); p.Evicted < uint64(total-131072) {
		t.Errorf("%d evicted of %d, and 131,072 fit", p.Evicted, total)
	}
	// deletions by a program and by the collector are not evictions
	evicted := col.Last().Evicted
	gone := 0
	for _, c := range k.tracked(t) {
		if gone == 1000 {
			break
		}
		if deleted, err := k.Connections.Remove(c); err != nil || deleted != 1 {
			t.Fatalf("delete: %v, %v", deleted, err)
		}
		gone++
	}
	k.addStat(t, uint32(bpf.MapsSlCtStatSL_CT_STAT_DELETED), gone)
	cl.now.Add(9000)
	if p := collect(t, col); p.Evicted != evicted || p.Live[0] != 0 {
		t.Errorf("after removals %d evicted and %d live, want %d and 0", p.Evicted, p.Live[0], evicted)
	}
	// the count survives the process
	again, _ := newCollector(t, k, conntrack.CollectorOptions{})
	if p := collect(t, again); p.Evicted != evicted {
		t.Errorf("another collector counts %d evicted, want %d", p.Evicted, evicted)
	}
}

func TestKernelCollectorDuringTrafficLosesNoFlow(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	e := publish(t, k, a)
	col, cl := newCollector(t, k, conntrack.CollectorOptions{})
	busy := remotes(e, 17, 0, 500, conntrack.SeenReply, cl.now.Load())
	k.putAll(t, busy)

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	done := make(chan error, 2)
	// flows in use: a packet at least every 100 s, with a timeout of 120 s
	ticked := make(chan struct{})
	go func() {
		m := k.Pins.Map(bpf.MapsMapSlCt4)
		for ctx.Err() == nil {
			now := cl.now.Load()
			for _, c := range busy {
				c.LastSeen = now
				key, v := c.Key4(), conntrack.ValueOf(c)
				if err := m.Update(&key, &v, ebpf.UpdateExist); err != nil {
					done <- fmt.Errorf("flow %v is lost: %w", c.Tuple, err)
					return
				}
			}
			select {
			case ticked <- struct{}{}:
			case <-ctx.Done():
			}
		}
		done <- nil
	}()
	// other flows begin and stay idle
	go func() {
		for i := 1000; ctx.Err() == nil; i += 100 {
			m := k.Pins.Map(bpf.MapsMapSlCt4)
			for _, c := range remotes(e, 17, i%60000+1000, 100, 0, cl.now.Load()) {
				key, v := c.Key4(), conntrack.ValueOf(c)
				if err := m.Update(&key, &v, ebpf.UpdateAny); err != nil {
					done <- err
					return
				}
			}
		}
		done <- nil
	}()
	expired := 0
	for range 60 {
		select {
		case <-ticked:
		case err := <-done:
			t.Fatal(err)
		}
		p := collect(t, col)
		expired += p.Expired
		cl.now.Add(50)
	}
	stop()
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	all := k.tracked(t)
	for _, c := range busy {
		if _, ok := all[c.Tuple]; !ok {
			t.Errorf("flow %v is lost", c.Tuple)
		}
	}
	if expired == 0 {
		t.Error("nothing else was collected meanwhile")
	}
}

const (
	room4 = 131072 - 131072/8
	room6 = 65536 - 65536/8
)

func TestKernelBudgetShrinksForWhoHasMuch(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	greedy, modest := publish(t, k, a), publish(t, k, b)
	col, cl := newCollector(t, k, conntrack.CollectorOptions{})
	collect(t, col)
	for family, room := range []uint64{room4, room6} {
		for _, s := range []endpointmap.ID{greedy.Slot, modest.Slot, endpointmap.MaxEndpoints, conntrack.Outside} {
			if used, limit := col.Budget(s, family); used != 0 || limit != room {
				t.Errorf("without connections: slot %d has used %d of %d, want 0 of %d", s, used, limit, room)
			}
		}
		if used, limit := col.Budget(endpointmap.HostID, family); used != 0 || limit != 0 {
			t.Errorf("the host has used %d of %d, want no limit", used, limit)
		}
	}
	// connections from outside belong to no endpoint
	k.putAll(t, remotes(greedy, 17, 200_000, 10, 0, cl.now.Load()))
	if p := collect(t, col); p.Endpoints != 0 {
		t.Errorf("%d endpoints have begun connections, want none", p.Endpoints)
	}
	cl.now.Add(1000)
	collect(t, col)
	// the greedy endpoint uses all of its share
	k.putAll(t, begun(remotes(greedy, 17, 0, room4, 0, cl.now.Load())))
	k.putAll(t, begun(remotes(modest, 17, room4, 10, 0, cl.now.Load())))
	used, _ := budgetCell(k, int(greedy.Slot))
	atomic.StoreUint64(used, 30_000)
	if !col.Pressed() {
		t.Error("a quarter of a budget is used, and no pass is due")
	}
	p := collect(t, col)
	if p.Endpoints != 2 {
		t.Errorf("%d endpoints with connections, want 2", p.Endpoints)
	}
	if used, limit := col.Budget(greedy.Slot, 0); used != 0 || limit != conntrack.LeastBudget {
		t.Errorf("the greedy endpoint has used %d of %d, want 0 of %d", used, limit, conntrack.LeastBudget)
	}
	if _, limit := col.Budget(modest.Slot, 0); limit < room4/2-10 {
		t.Errorf("the modest endpoint may begin %d, want %d or more", limit, room4/2-10)
	}
	// closed connections do not count: they are removed when capacity is needed
	cl.now.Add(100)
	collect(t, col)
	k.putAll(t, begun(remotes(greedy, 6, 0, 50_000, conntrack.SeenReply|conntrack.Reset, cl.now.Load())))
	collect(t, col)
	if _, limit := col.Budget(greedy.Slot, 0); limit != room4 {
		t.Errorf("with closed connections only it may begin %d, want %d", limit, room4)
	}
}

// TestKernelAFloodOfOneFamilyLeavesTheOther: connections of one family are not charged to the other.
func TestKernelAFloodOfOneFamilyLeavesTheOther(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	flooder, idle := publish(t, k, a), publish(t, k, b)
	col, cl := newCollector(t, k, conntrack.CollectorOptions{})
	flood := remotes(flooder, 17, 0, room6, 0, cl.now.Load())
	for i := range flood {
		// the same ends in IPv6
		six := func(ap netip.AddrPort) netip.AddrPort {
			if ap.Addr() == flooder.IPv4 {
				return netip.AddrPortFrom(flooder.IPv6, ap.Port())
			}
			b, v4 := world6.As16(), ap.Addr().As4()
			copy(b[8:], v4[:])
			return netip.AddrPortFrom(netip.AddrFrom16(b), ap.Port())
		}
		flood[i].Initiator, flood[i].Responder = six(flood[i].Initiator), six(flood[i].Responder)
	}
	k.putAll(t, begun(flood))
	p := collect(t, col)
	if p.Live[1] < room6*9/10 {
		t.Fatalf("%d IPv6 connections, want about %d", p.Live[1], room6)
	}
	if _, limit := col.Budget(idle.Slot, 0); limit != room4 {
		t.Errorf("an idle endpoint may begin %d IPv4 connections, want %d", limit, room4)
	}
	if _, limit := col.Budget(flooder.Slot, 1); limit > 2000 {
		t.Errorf("the flooding endpoint may begin %d IPv6 connections", limit)
	}
}

// TestKernelWhatComesFromOutsideHasABudget: connections from outside, also with an address of the host, have a budget
// of their own and leave half of the map to the endpoints. TCP, UDP and ICMP echo have rings instead.
func TestKernelWhatComesFromOutsideHasABudget(t *testing.T) {
	th := newTheatre(t, false)
	col, cl := newCollector(t, th.k, conntrack.CollectorOptions{})
	set := func(limit uint64) {
		begun, cell := budgetCell(th.k, conntrack.Outside)
		atomic.StoreUint64(begun, 0)
		atomic.StoreUint64(cell, limit)
	}
	cl.now.Store(conntrack.MonotonicSeconds())
	if at := collect(t, col).OutsideSpent; !at.IsZero() {
		t.Errorf("the budget was used up at %s, before anything was sent", at)
	}
	began := time.Now()
	set(2)
	th.expect(t, say("world", "a", chunk(1, 80, sctpInit), event.ForwardedFromStack))
	th.expect(t, say("host", "a", chunk(1, 80, sctpInit), event.ForwardedFromStack).forwarded())
	th.expect(t, say("world", "a", chunk(2, 80, sctpInit), event.ConnectionBudget))
	th.expect(t, say("host", "a", chunk(2, 80, sctpInit), event.ConnectionBudget).forwarded())
	th.expect(t, say("router", "b", chunk(2, 80, sctpInit), event.ConnectionBudget))
	th.expect(t, say("world", "a", chunk(1, 80, sctpInit), event.ForwardedFromStack))
	th.expect(t, say("host", "a", chunk(2, 80, sctpInit), event.ForwardedFromStack))
	th.expect(t, say("world", "a", datagram(1, 53), event.ForwardedFromStack))
	th.expect(t, say("world", "a", ping(false, 1), event.ForwardedFromStack))
	th.expect(t, say("router", "b", segment(2, 53, flagSYN), event.ForwardedFromStack))
	th.expect(t, say("a", "world", datagram(2, 53), event.ForwardedOutside))
	cl.now.Store(conntrack.MonotonicSeconds())
	const second = time.Second // the programs store whole seconds
	spent := collect(t, col).OutsideSpent
	if spent.Before(began.Add(-second)) || spent.After(time.Now().Add(second)) {
		t.Errorf("the budget was used up at %s, want after %s", spent, began)
	}
	if again := collect(t, col).OutsideSpent; again != spent {
		t.Errorf("the budget was used up at %s, and a pass later at %s", spent, again)
	}
	set(0)

	e := th.pods["a"]
	th.k.putAll(t, remotes(e, 17, 0, room4, 0, cl.now.Load()))
	collect(t, col)
	if _, limit := col.Budget(conntrack.Outside, 0); limit != conntrack.LeastBudget {
		t.Errorf("outside has %d connections and may begin %d more", room4, limit)
	}
	for _, s := range []endpointmap.ID{e.Slot, th.pods["b"].Slot} {
		if _, limit := col.Budget(s, 0); limit < room4/2-2 {
			t.Errorf("slot %d may begin %d, want %d", s, limit, room4/2)
		}
	}
}

// TestKernelBudgetsOutliveACollectorThatIsClosed: a clean stop keeps the limits: without limits, one endpoint could
// evict the connections of all others during an upgrade.
func TestKernelBudgetsOutliveACollectorThatIsClosed(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	col, err := k.Connections.NewCollector(conntrack.CollectorOptions{})
	must(t, "NewCollector", err)
	collect(t, col)
	var b bpf.MapsSlBudget
	for at, want := range map[uint32]uint64{0: 0, 1: 0, 2: room4, 3: room6, endpointmap.MaxEndpoints << 1: room4, conntrack.Outside<<1 | 1: room6} {
		if err := k.Pins.Map(bpf.MapsMapSlBudget).Lookup(at, &b); err != nil || b.Limit != want {
			t.Errorf("cell %d: %+v, %v, want a limit of %d", at, b, err, want)
		}
	}
}

func TestKernelCollectorRunsUntilItIsStopped(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	e := publish(t, k, a)
	col, cl := newCollector(t, k, conntrack.CollectorOptions{MinInterval: time.Millisecond, MaxInterval: 5 * time.Millisecond})
	k.putAll(t, remotes(e, 17, 0, 10, 0, cl.now.Load()))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- col.Run(ctx) }()
	wait(t, func() bool { return col.Last().Live[0] == 10 })
	cl.now.Add(60)
	wait(t, func() bool { return col.Last().Live[0] == 0 })
	stop()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Run: %v", err)
	}
}

// wait waits until the condition holds.
func wait(t testing.TB, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal("the test ended before the condition held")
		}
	}
}

func TestKernelCollectorRefusesTimesThatMakeNoSense(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	bad := conntrack.DefaultTimeouts()
	bad.ICMP = time.Millisecond
	for name, o := range map[string]conntrack.CollectorOptions{
		"Timeouts.ICMP": {Timeouts: bad},
		"MaxInterval":   {MinInterval: time.Minute, MaxInterval: time.Second},
	} {
		if _, err := k.Connections.NewCollector(o); !errors.Is(err, pin.ErrInvalid) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// budgetCell returns the IPv4 budget of an endpoint ID or of Outside, in mapped memory.
func budgetCell(k *Kernel, slot int) (begun, limit *uint64) {
	var b bpf.MapsSlBudget
	mem := k.Pins.Memory(bpf.MapsMapSlBudget)
	at := (slot << 1) * int(unsafe.Sizeof(b))
	return pin.Word(mem, at), pin.Word(mem, at+int(unsafe.Offsetof(b.Limit)))
}

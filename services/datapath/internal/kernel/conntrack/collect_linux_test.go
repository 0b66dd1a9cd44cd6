// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/count"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// NewBPFFS mounts a bpffs. It is set by main_linux_test.go of a package that imports this one.
var NewBPFFS func(testing.TB) string

// began is the time at which these tests begin, in seconds.
const began = 1_000_000

// Capacities of the maps.
const (
	capacity4, capacity6 = 131072, 65536
	room4, room6         = capacity4 - capacity4/8, capacity6 - capacity6/8
)

// instance contains the connection maps, and a collector with a test clock.
type instance struct {
	*Connections
	testing.TB
	*Collector
	now uint32
	pod endpointmap.Endpoint
}

func open(t testing.TB, o CollectorOptions) *instance {
	t.Helper()
	spec, err := bpf.LoadMaps()
	must(t, "load", err)
	log := slog.New(slog.DiscardHandler)
	pins, err := pin.Open(pin.Options{Dir: NewBPFFS(t), Log: log}, spec)
	must(t, "open the pins", err)
	t.Cleanup(func() { must(t, "close the pins", pins.Close()) })
	endpoints := endpointmap.Open(pins, ipcache.New(ipmap.Open(pins), log), endpointmap.Options{Log: log})
	must(t, "settle the endpoints", endpoints.Initialise())
	i := &instance{TB: t, now: began, pod: endpointmap.Endpoint{
		Ifindex: 10, Identity: 1000, MTU: 1500, Deliver: endpointmap.DeliverPeer,
		IPv4: netip.MustParseAddr("10.0.0.10"), IPv6: netip.MustParseAddr("fd00::10"),
		MAC: [6]byte{2, 0, 0, 0, 0, 1}, HostMAC: [6]byte{2, 0, 0, 0, 0, 2},
	}}
	i.pod.Slot, err = endpoints.Publish(t.Context(), i.pod)
	must(t, "publish", err)
	i.Connections, err = Open(pins, Options{
		Endpoints: endpoints, Bounds: bound.Open(pins),
		Worlds: [2]identity.Numeric{identity.WorldIPv4, identity.WorldIPv6}, Log: log,
	})
	must(t, "open", err)
	t.Cleanup(func() { must(t, "close", i.Connections.Close()) })
	o.Now = func() uint32 { return i.now }
	i.Collector, err = i.NewCollector(o)
	must(t, "make the collector", err)
	return i
}

func must(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func (i *instance) collect() Pass {
	i.Helper()
	p, err := i.Collect(i.Context())
	must(i, "collect", err)
	return p
}

// put writes connections as programs do; some of them began with a service.
func (i *instance) put(cs ...Connection) {
	i.Helper()
	var keys4 []bpf.MapsSlCtKey4
	var keys6 []bpf.MapsSlCtKey6
	var values [2][]bpf.MapsSlCt
	for _, c := range cs {
		v := ValueOf(c)
		v.Front, v.Node = c.Value.Front, c.Value.Node
		f := c.family()
		if values[f] = append(values[f], v); f == 0 {
			keys4 = append(keys4, c.Key4())
		} else {
			keys6 = append(keys6, c.Key6())
		}
	}
	if len(keys4) > 0 {
		_, err := i.pins.Map(bpf.MapsMapSlCt4).BatchUpdate(keys4, values[0], nil)
		must(i, "write", err)
	}
	if len(keys6) > 0 {
		_, err := i.pins.Map(bpf.MapsMapSlCt6).BatchUpdate(keys6, values[1], nil)
		must(i, "write", err)
	}
}

// have returns all connections.
func (i *instance) have() map[Tuple]Connection {
	i.Helper()
	all := map[Tuple]Connection{}
	must(i, "list", i.Each(func(cs []Connection) error {
		for _, c := range cs {
			all[c.Tuple] = c
		}
		return nil
	}))
	return all
}

// count adds to a counter of the programs.
func (i *instance) count(stat uint32, n int64) {
	i.Helper()
	m := i.pins.Map(bpf.MapsMapSlCtStats)
	var perCPU []uint64
	must(i, "read a counter", m.Lookup(stat, &perCPU))
	perCPU[0] += uint64(n)
	must(i, "write a counter", m.Put(stat, perCPU))
}

// fromPod returns a connection that the pod has begun and last used idle seconds ago.
func (i *instance) fromPod(proto uint8, port uint16, peer string, flags Flags, idle uint32) Connection {
	c := Connection{
		Tuple: Tuple{Responder: netip.MustParseAddrPort(peer), Protocol: proto},
		From:  End{Slot: i.pod.Slot, Epoch: 1, Identity: i.pod.Identity}, To: End{Slot: endpointmap.NoID},
		Flags: flags, LastSeen: i.now - idle,
	}
	c.Initiator = netip.AddrPortFrom(i.pod.IPv4, port)
	if c.Responder.Addr().Is6() {
		c.Initiator = netip.AddrPortFrom(i.pod.IPv6, port)
	}
	return c
}

// fromOutside returns a connection that began outside.
func (i *instance) fromOutside(proto uint8, port uint16, peer string, flags Flags, idle uint32) Connection {
	c := i.fromPod(proto, port, peer, flags, idle)
	c.Initiator, c.Responder, c.From, c.To = c.Responder, c.Initiator, c.To, c.From
	return c
}

// TestKernelPassRemovesWhatIsOver: a pass removes connections that were idle for their timeout, and connections
// with a removed endpoint, and reports the numbers.
func TestKernelPassRemovesWhatIsOver(t *testing.T) {
	const established = SeenReply | Established
	peer4, peer6 := "198.51.100.1:80", "[2001:db8::1]:80"
	var inUse []netip.Addr
	i := open(t, CollectorOptions{Wanted: func() (map[netip.Addr]struct{}, func([]netip.Addr)) {
		return map[netip.Addr]struct{}{
			netip.MustParseAddr("198.51.100.1"): {}, netip.MustParseAddr("2001:db8::1"): {},
			netip.MustParseAddr("198.51.100.2"): {}, netip.MustParseAddr("198.51.100.3"): {},
		}, func(found []netip.Addr) { inUse = found }
	}})
	with := func(c Connection, change func(*Connection)) Connection { change(&c); return c }
	byService := func(c *Connection) { c.Value.Front, c.Value.Node = 1, 7 }
	stay := []Connection{
		i.fromPod(6, 1, peer4, established, 7999),
		i.fromPod(6, 2, peer6, established, 7999),
		i.fromPod(17, 3, peer4, 0, 29),
		with(i.fromPod(17, 4, peer6, SeenReply, 119), byService),
		i.fromOutside(17, 5, peer4, SeenReply, 0),
		i.fromPod(6, 6, "198.51.100.2:80", established|Terminated, 100), // no longer in use
		i.fromPod(6, 7, "198.51.100.3:80", established|Reset, 5),        // likewise
		// the host is never removed
		with(i.fromPod(6, 8, peer4, established, 0), func(c *Connection) { c.From.Slot = endpointmap.HostID }),
	}
	expire := []Connection{
		i.fromPod(6, 21, peer4, established, 8000),
		with(i.fromPod(6, 22, peer6, established, 8000), byService),
		i.fromPod(17, 23, peer4, 0, 30),
		i.fromOutside(6, 24, peer4, established|Reset, 10),
	}
	other := i.pod.Slot + 1 // not published
	orphan := []Connection{
		with(i.fromPod(6, 31, peer4, established, 0), func(c *Connection) { c.From.Slot = other }),
		with(i.fromOutside(6, 32, peer6, established, 0), func(c *Connection) { c.To.Slot = other; byService(c) }),
		// the endpoint ID now has another address
		with(i.fromPod(6, 33, peer4, established, 0), func(c *Connection) {
			c.Initiator = netip.MustParseAddrPort("10.0.0.11:33")
		}),
		with(i.fromOutside(6, 34, peer6, established, 0), func(c *Connection) {
			c.Responder = netip.MustParseAddrPort("[fd00::11]:34")
		}),
	}
	i.put(slices.Concat(stay, expire, orphan)...)
	p := i.collect()
	if p.Batches != 2 { // one batch for each address family
		t.Errorf("%d batches were read, want 2", p.Batches)
	}
	if p.Live != [2]int{6, 2} || p.Expired != len(expire) || p.Orphaned != len(orphan) || p.Kept != 0 || p.Ended != 0 {
		t.Errorf("the pass: %+v", p)
	}
	if _, ok := p.Nodes[7]; !ok || len(p.Nodes) != 1 {
		t.Errorf("nodes %v, want number 7", p.Nodes)
	}
	if p.Endpoints != 1 {
		t.Errorf("%d endpoints with connections, want 1", p.Endpoints)
	}
	have := i.have()
	for _, c := range stay {
		if _, ok := have[c.Tuple]; !ok {
			t.Errorf("%v is not there", c.Tuple)
		}
	}
	if len(have) != len(stay) {
		t.Errorf("%d connections, want %d", len(have), len(stay))
	}
	slices.SortFunc(inUse, netip.Addr.Compare)
	if want := []netip.Addr{stay[0].Responder.Addr(), stay[1].Responder.Addr()}; !slices.Equal(inUse, want) {
		t.Errorf("connections to %v, want %v", inUse, want)
	}
	if c, err := i.Counters(); err != nil || c.Expired != uint64(len(expire)+len(orphan)) {
		t.Errorf("counters %+v, %v", c, err)
	}
	ended := i.TakeEnded()
	for _, c := range []Connection{expire[1], orphan[1]} {
		if !ended.Has(c.Tuple) {
			t.Errorf("the end of %v, which began with a service, is not reported", c.Tuple)
		}
	}
	if len(ended) != 2 {
		t.Errorf("%d ended connections by services, want 2: %v", len(ended), ended)
	}
	if again := i.TakeEnded(); len(again) != 0 {
		t.Errorf("reported again: %v", again)
	}
}

// TestKernelOutsideHasHalfOfTheRoom: connections from outside get half of the capacity if both outside and
// endpoints have connections; the endpoints share the rest.
func TestKernelOutsideHasHalfOfTheRoom(t *testing.T) {
	i := open(t, CollectorOptions{})
	other := i.pod.Slot + 1
	want := func(when string, pod, free, outside [2]uint64) {
		t.Helper()
		i.collect()
		for f := range 2 {
			for slot, want := range map[endpointmap.ID]uint64{
				i.pod.Slot: pod[f], other: free[f], Outside: outside[f], endpointmap.HostID: 0,
			} {
				if begun, limit := i.Budget(slot, f); begun != 0 || limit != want {
					t.Errorf("%s: slot %d has begun %d of %d in family %d, want 0 of %d", when, slot, begun, limit, f, want)
				}
			}
		}
	}
	all := [2]uint64{room4, room6}
	want("nobody has connections", all, all, all)
	i.put(i.fromOutside(17, 1, "198.51.100.1:80", 0, 0))
	half4 := [2]uint64{room4 / 2, room6}
	want("outside has one", half4, half4, [2]uint64{room4 - 1, room6})
	i.put(i.fromPod(17, 2, "198.51.100.2:80", 0, 0))
	want("the pod has one, too", [2]uint64{room4/2 - 1, room6}, half4, [2]uint64{room4/2 - 1, room6})
	i.put(i.fromPod(17, 3, "[2001:db8::1]:80", 0, 0))
	want("the pod alone has one of IPv6",
		[2]uint64{room4/2 - 1, room6 - 1}, [2]uint64{room4 / 2, room6}, [2]uint64{room4/2 - 1, room6 / 2})
}

// TestKernelPressureIsAQuarterOfABudget: there is pressure once any endpoint has begun a quarter of its budget, in
// either family.
func TestKernelPressureIsAQuarterOfABudget(t *testing.T) {
	i := open(t, CollectorOptions{})
	i.collect()
	if i.Pressed() {
		t.Error("pressed without connections")
	}
	for _, slot := range []int{int(i.pod.Slot), endpointmap.MaxEndpoints, Outside} {
		for f, room := range []uint64{room4, room6} {
			begun, limit := i.cell(slot, f)
			*begun = room/4 - 1
			if i.Pressed() {
				t.Errorf("slot %d, family %d: pressed below a quarter", slot, f)
			}
			*begun = room / 4
			if !i.Pressed() {
				t.Errorf("slot %d, family %d: not pressed with a quarter", slot, f)
			}
			*begun, *limit = 100, 0 // the host has no limit
			if i.Pressed() {
				t.Errorf("slot %d, family %d: pressed without a limit", slot, f)
			}
			*begun = 0
		}
	}
}

// TestKernelEvictionsOfThisProcessHaveATime: evictions under earlier processes are only counted, and the count
// never decreases.
func TestKernelEvictionsOfThisProcessHaveATime(t *testing.T) {
	i := open(t, CollectorOptions{})
	const created = uint32(bpf.MapsSlCtStatSL_CT_STAT_CREATED)
	i.put(
		i.fromPod(17, 1, "198.51.100.1:80", 0, 0), i.fromPod(17, 2, "198.51.100.1:80", 0, 0),
		i.fromPod(17, 3, "[2001:db8::1]:80", 0, 0), i.fromPod(17, 4, "198.51.100.1:80", 0, 1000),
	)
	i.count(created, 4+5) // one of the four is idle
	i.count(uint32(bpf.MapsSlCtStatSL_CT_STAT_DELETED), 2)
	if p := i.collect(); p.Evicted != 3 || !p.EvictedAt.IsZero() {
		t.Errorf("the first pass: %d evicted, at %v, want 3 without a time", p.Evicted, p.EvictedAt)
	}
	if p := i.collect(); p.Evicted != 3 || !p.EvictedAt.IsZero() {
		t.Errorf("nothing new: %d evicted, at %v", p.Evicted, p.EvictedAt)
	}
	i.count(created, 1)
	at := i.collect().EvictedAt
	if at.IsZero() {
		t.Error("one more was evicted, without a time")
	}
	i.count(uint32(bpf.MapsSlCtStatSL_CT_STAT_DELETED), 4)
	if p := i.collect(); p.Evicted != 4 || !p.EvictedAt.Equal(at) {
		t.Errorf("more were deleted: %d evicted, at %v, want 4 at %v", p.Evicted, p.EvictedAt, at)
	}
}

// TestKernelProvenConnectionsFromOutsideHaveAPart: a part of the map of outside connections is for proven connections.
// When it is almost used up, surplus connections are removed, the longest idle first, and the counters are corrected.
func TestKernelProvenConnectionsFromOutsideHaveAPart(t *testing.T) {
	i := open(t, CollectorOptions{})
	counts := i.counts
	const keep, more = capacity6/4 - capacity6/64, 40
	var cs []Connection
	for n := range uint16(keep + more) {
		c := i.fromOutside(6, 80, "[2001:db8::1]:80", SeenReply|Established, 0)
		c.Initiator = netip.AddrPortFrom(c.Initiator.Addr(), n+1)
		c.LastSeen -= uint32(n) % 1000
		cs = append(cs, c)
	}
	sender := cs[0].Initiator.Addr()
	// none of these counts as proven
	others := []Connection{
		i.fromOutside(6, 80, "[2001:db8::2]:1", SeenReply, 0),
		i.fromOutside(6, 80, "[2001:db8::2]:2", SeenReply|Established|InRing, 0),
		i.fromOutside(17, 80, "[2001:db8::2]:3", SeenReply|Established, 0),
		i.fromPod(6, 81, "[2001:db8::2]:4", SeenReply|Established, 0),
	}
	i.put(append(cs, others...)...)
	want := func(when string, n uint32) {
		t.Helper()
		all, bucket := counts.Proven(1, sender)
		if a, b := counts.Get(all), counts.Get(bucket); a != n || b != n {
			t.Errorf("%s: %d connections are counted, %d of the sender, want %d", when, a, b, n)
		}
		if n := counts.Get(count.ProvenOf(0)); n != 0 {
			t.Errorf("%s: %d of IPv4 are counted", when, n)
		}
	}
	// the programs have counted none of them, so the pass assumes free capacity, and corrects the counters
	if p := i.collect(); p.Ended != 0 || p.Live[1] != len(cs)+len(others) {
		t.Errorf("before the count is known: %d ended, %d live", p.Ended, p.Live[1])
	}
	want("after one pass", keep+more)
	if p := i.collect(); p.Ended != more || p.Live[1] != keep+len(others) {
		t.Errorf("%d ended, want %d, and %d live", p.Ended, more, p.Live[1])
	}
	want("after two passes", keep)
	have := i.have()
	longest := uint32(0)
	for _, c := range have {
		longest = max(longest, i.now-c.LastSeen)
	}
	// each of the thousand idle times has 15 or 16 connections
	if len(have) != keep+len(others) || longest != 997 {
		t.Errorf("%d connections, of which one was idle for %d s, want 997", len(have), longest)
	}
	if c, err := i.Counters(); err != nil || c.Expired != more {
		t.Errorf("counters %+v, %v, want %d expired", c, err, more)
	}
	if p := i.collect(); p.Ended != 0 {
		t.Errorf("%d more ended", p.Ended)
	}
}

// TestKernelRevokedConnectionsAreRememberedForALife: the record of a revoked connection is kept for the lifetime of a
// connection, IPv4 and IPv6.
func TestKernelRevokedConnectionsAreRememberedForALife(t *testing.T) {
	i := open(t, CollectorOptions{})
	life := uint32(DefaultTimeouts().TCPEstablished / time.Second)
	for n, idle := range []uint32{0, life - 1, life, life + 1} {
		for _, c := range []Connection{
			i.fromPod(6, uint16(n+1), "198.51.100.1:80", 0, idle), i.fromPod(6, uint16(n+1), "[2001:db8::1]:80", 0, idle),
		} {
			_, key := i.Map(c.Tuple)
			name := []string{bpf.MapsMapSlRevoked4, bpf.MapsMapSlRevoked6}[c.family()]
			must(t, "write", i.pins.Map(name).Put(key, &bpf.MapsSlRevoked{LastS: c.LastSeen}))
		}
	}
	if p := i.collect(); p.Revoked != [2]int{2, 2} {
		t.Errorf("%v are remembered, want 2 of each family", p.Revoked)
	}
	for _, name := range []string{bpf.MapsMapSlRevoked4, bpf.MapsMapSlRevoked6} {
		if n, err := i.countRevoked(name); err != nil || n != 2 {
			t.Errorf("%s has %d records, %v, want 2", name, n, err)
		}
	}
}

// TestKernelPickUpResumesALifeAfterTheLastForgottenOne: the time begins at the start of the collector, or with
// the last connection that could not be recorded.
func TestKernelPickUpResumesALifeAfterTheLastForgottenOne(t *testing.T) {
	i := open(t, CollectorOptions{})
	life := uint32(DefaultTimeouts().TCPEstablished / time.Second)
	i.endpoints.StopPickUp()
	want := func(when string, stopped int) {
		t.Helper()
		i.collect()
		if n, err := i.endpoints.PickUpStopped(); err != nil || n != stopped {
			t.Errorf("%s: stopped for %d endpoints, %v, want %d", when, n, err, stopped)
		}
	}
	want("at the begin", 1)
	i.now = began + life - 1
	want("before a life", 1)
	i.count(uint32(bpf.MapsSlCtStatSL_CT_STAT_UNREMEMBERED), 1)
	want("with one more", 1)
	i.now = began + life + life - 2
	want("before a life since that", 1)
	i.now++
	want("after it", 0)
	i.endpoints.StopPickUp()
	want("by what a program has not counted", 1)
	i.count(uint32(bpf.MapsSlCtStatSL_CT_STAT_UNREMEMBERED), 1)
	want("counted", 1)
	i.now += life
	want("a life later", 0)
}

// TestKernelOutsideTellsWhenItHadNoBudget: the pass reports when outside connections had no budget, even after passes
// in which they had some.
func TestKernelOutsideTellsWhenItHadNoBudget(t *testing.T) {
	i := open(t, CollectorOptions{})
	if at := i.collect().OutsideSpent; !at.IsZero() {
		t.Errorf("spent at %v before anything was sent", at)
	}
	i.now += 100
	for _, slot := range []int{int(i.pod.Slot), Outside} {
		begun, _ := i.cell(slot, 1)
		*begun = uint64(i.now-40)<<32 | 7
		before := time.Now()
		at := i.collect().OutsideSpent
		if slot != Outside {
			if !at.IsZero() {
				t.Errorf("spent at %v by a pod", at)
			}
			continue
		}
		if earliest := before.Add(-40 * time.Second); at.Before(earliest) || at.After(time.Now().Add(-40*time.Second)) {
			t.Errorf("spent at %v, want 40 s ago", at)
		}
		if again := i.collect().OutsideSpent; !again.Equal(at) {
			t.Errorf("spent at %v, and a pass later at %v", at, again)
		}
	}
}

// TestKernelFlushRemembersDirections: a flush records the directions of connections that may have further segments,
// while half of the map of records is free.
func TestKernelFlushRemembersDirections(t *testing.T) {
	const established = SeenReply | Established
	i := open(t, CollectorOptions{})
	with := func(c Connection, change func(*Connection)) Connection { change(&c); return c }
	peer4, peer6 := "198.51.100.1:80", "[2001:db8::1]:80"
	remembered := []Connection{
		i.fromPod(6, 1, peer4, established|ViaStack, 0), i.fromOutside(6, 2, peer6, established, 0),
		i.fromPod(6, 3, peer4, PickedUp, 0), i.fromPod(6, 4, peer4, SeenReply, 0),
		i.fromPod(6, 5, peer4, established|InitiatorFinished, 0),
	}
	forgotten := []Connection{
		i.fromPod(6, 11, peer4, 0, 0), i.fromPod(6, 12, peer4, established|Reset, 0), i.fromPod(17, 13, peer6, SeenReply, 0),
		with(i.fromOutside(6, 14, peer4, established, 0), func(c *Connection) { c.Transit = true }),
	}
	terminated := i.fromPod(6, 21, peer4, established|Terminated, 0)
	left := i.fromPod(6, 31, "198.51.100.2:80", established, 0)
	i.put(append(slices.Concat(remembered, forgotten), terminated, left)...)
	filter := Filter{Prefixes: []netip.Prefix{
		netip.MustParsePrefix("198.51.100.1/32"), netip.MustParsePrefix("2001:db8::/64"),
	}}
	wanted := Flushed{Removed: len(remembered) + len(forgotten), Terminated: 1}
	for _, validate := range []bool{true, false} {
		got, err := i.Flush(t.Context(), filter, validate)
		if err != nil || got != wanted {
			t.Errorf("validate %t: %+v, %v, want %+v", validate, got, err, wanted)
		}
		rest := 2
		if validate {
			rest += wanted.Removed
		}
		if have := i.have(); len(have) != rest {
			t.Errorf("validate %t: %d connections are left, want %d", validate, len(have), rest)
		}
	}
	records := 0
	for _, c := range slices.Concat(remembered, forgotten) {
		var r bpf.MapsSlRevoked
		_, key := i.Map(c.Tuple)
		err := i.pins.Map([]string{bpf.MapsMapSlRevoked4, bpf.MapsMapSlRevoked6}[c.family()]).Lookup(key, &r)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			continue
		}
		must(t, "look up", err)
		records++
		v := ValueOf(c)
		if want := v.Flags & uint32(OriginLow|Unoriented|ViaStack); r.Flags != want {
			t.Errorf("%v is remembered with the flags %#x, want %#x", c.Tuple, r.Flags, want)
		}
	}
	if records != len(remembered) {
		t.Errorf("%d directions are remembered, want %d", records, len(remembered))
	}
	if c, err := i.Counters(); err != nil || c.Expired != uint64(wanted.Removed) {
		t.Errorf("counters %+v, %v", c, err)
	}

	// all but one of the half are used
	m := i.pins.Map(bpf.MapsMapSlRevoked4)
	half := m.MaxEntries() / 2
	for n := uint32(0); ; n++ {
		used, err := i.countRevoked(bpf.MapsMapSlRevoked4)
		must(t, "count", err)
		if used >= int(half)-1 {
			break
		}
		var keys []bpf.MapsSlCtKey4
		for len(keys) < int(half)-1-used {
			keys = append(keys, bpf.MapsSlCtKey4{Lo: uint32(len(keys)), Hi: n, Proto: 6})
		}
		_, err = m.BatchUpdate(keys, make([]bpf.MapsSlRevoked, len(keys)), nil)
		must(t, "fill", err)
	}
	i.put(remembered...)
	got, err := i.Flush(t.Context(), filter, false)
	if want := (Flushed{Removed: 2, Terminated: 1, Unremembered: 3}); err != nil || got != want {
		t.Errorf("with a full map of IPv4 records: %+v, %v, want %+v", got, err, want)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := i.Flush(ctx, filter, false); !errors.Is(err, context.Canceled) {
		t.Errorf("with a cancelled context: %v", err)
	}
}

// TestKernelOpenConnectionsAreCountedByResponder: the counts are sorted, and exclude connections of removed endpoints.
func TestKernelOpenConnectionsAreCountedByResponder(t *testing.T) {
	i := open(t, CollectorOptions{})
	now := MonotonicSeconds()
	i.now = now
	orphan := i.fromPod(17, 9, "198.51.100.1:80", 0, 0)
	orphan.Initiator = netip.MustParseAddrPort("10.0.0.11:9")
	asked := i.fromPod(17, 10, "198.51.100.1:80", 0, 0)
	asked.Asked = true
	i.put(
		i.fromPod(17, 1, "198.51.100.1:80", 0, 0), i.fromPod(17, 2, "198.51.100.1:80", 0, 0),
		i.fromPod(6, 3, "198.51.100.1:80", SeenReply|Established, 0), i.fromPod(6, 4, "198.51.100.1:80", SeenReply, 0),
		i.fromPod(17, 5, "198.51.100.1:81", 0, 0), i.fromPod(17, 6, "[2001:db8::1]:80", 0, 0), orphan, asked,
		i.fromPod(17, 7, "198.51.100.2:80", 0, 0),
	)
	got, err := i.CountByResponder(t.Context(), DefaultTimeouts(), func(r Responder) bool {
		return r.Addr() != netip.MustParseAddr("198.51.100.2")
	})
	at := func(text string, proto uint8) Responder { return Responder{netip.MustParseAddrPort(text), proto} }
	want := []Count{
		{at("198.51.100.1:80", 6), 1},
		{at("198.51.100.1:80", 17), 2},
		{at("198.51.100.1:81", 17), 1},
		{at("[2001:db8::1]:80", 17), 1},
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
}

// TestKernelEpochsOfAllConnectionsAreVisited: EachEpoch visits the epochs of both ends of every connection, IPv4 and
// IPv6.
func TestKernelEpochsOfAllConnectionsAreVisited(t *testing.T) {
	i := open(t, CollectorOptions{})
	four, six := i.fromPod(6, 1, "198.51.100.1:80", 0, 0), i.fromOutside(6, 2, "[2001:db8::1]:80", 0, 0)
	four.From.Epoch, four.To.Epoch, six.From.Epoch, six.To.Epoch = 11, 12, 21, 22
	i.put(four, six)
	var got []uint32
	must(t, "visit", i.EachEpoch(func(e uint32) { got = append(got, e) }))
	if slices.Sort(got); !slices.Equal(got, []uint32{11, 12, 21, 22}) {
		t.Errorf("epochs %v", got)
	}
}

// TestKernelCollectorRefusesTimesItCannotKeep: timeouts must be at least a second, and the intervals in order.
func TestKernelCollectorRefusesTimesItCannotKeep(t *testing.T) {
	i := open(t, CollectorOptions{})
	second := Timeouts{
		TCPOpening: time.Second, TCPEstablished: time.Second, TCPClosing: time.Second, UDPUnanswered: time.Second,
		UDPAnswered: time.Second, ICMP: time.Second, Other: time.Second,
	}
	shorter := second
	shorter.ICMP--
	for name, c := range map[string]struct {
		o       CollectorOptions
		refused bool
	}{
		"nothing":                {CollectorOptions{}, false},
		"a second each":          {CollectorOptions{Timeouts: second}, false},
		"less than a second":     {CollectorOptions{Timeouts: shorter}, true},
		"one interval":           {CollectorOptions{MinInterval: time.Hour, MaxInterval: time.Hour}, false},
		"intervals out of order": {CollectorOptions{MinInterval: time.Minute + 1}, true},
		"a negative interval":    {CollectorOptions{MinInterval: -1}, true},
	} {
		if _, err := i.NewCollector(c.o); errors.Is(err, pin.ErrInvalid) != c.refused || err != nil && !c.refused {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestKernelRunPassesAtOnceAndUnderPressure: Run makes a pass at its start and under pressure. It logs errors and
// continues, until its context ends.
func TestKernelRunPassesAtOnceAndUnderPressure(t *testing.T) {
	passes := make(chan Pass)
	said := make(messages, 1)
	i := open(t, CollectorOptions{
		MinInterval: time.Millisecond, MaxInterval: time.Hour, Log: slog.New(said),
		Passed: func(_ time.Time, p Pass) { passes <- p },
	})
	i.interval = time.Hour // as after many passes without removals
	i.put(i.fromPod(17, 1, "198.51.100.1:80", 0, 100))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- i.Run(ctx) }()
	if p := <-passes; p.Expired != 1 {
		t.Errorf("the first pass: %+v, want one that was idle", p)
	}
	// only pressure causes another pass within the hour
	for range 2 {
		begun, _ := i.cell(int(i.pod.Slot), 0)
		atomic.StoreUint64(begun, room4/4)
		if p := <-passes; p.Live != [2]int{} {
			t.Errorf("a pass under pressure: %+v", p)
		}
	}
	must(t, "close", i.Connections.Close())
	begun, _ := i.cell(int(i.pod.Slot), 0)
	for range 2 {
		atomic.StoreUint64(begun, room4)
		if got := <-said; got != "garbage collection of connections failed; retrying" {
			t.Errorf("the log has %q", got)
		}
	}
	cancel()
	go func() {
		for range said { // messages from before it has noticed the end
			continue
		}
	}()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Run: %v", err)
	}
	close(said)
}

// messages are the messages of a log.
type messages chan string

func (m messages) Enabled(context.Context, slog.Level) bool { return true }
func (m messages) WithAttrs([]slog.Attr) slog.Handler       { return m }
func (m messages) WithGroup(string) slog.Handler            { return m }

func (m messages) Handle(_ context.Context, r slog.Record) error {
	m <- r.Message
	return nil
}

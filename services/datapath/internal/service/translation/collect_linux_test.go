// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package translation

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/count"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// The time of these tests, in seconds.
const now = 1_000_000

// instance is the maps of translations and of the connections that use them.
type instance struct {
	*Maps
	testing.TB
	pins        *pin.Maps
	connections *conntrack.Connections
}

func open(t testing.TB) *instance {
	t.Helper()
	spec, err := bpf.LoadMaps()
	must(t, "load", err)
	log := slog.New(slog.DiscardHandler)
	i := &instance{TB: t}
	i.pins, err = pin.Open(pin.Options{Dir: kerneltest.NewBPFFS(t), Log: log}, spec)
	must(t, "open the pins", err)
	t.Cleanup(func() { must(t, "close the pins", i.pins.Close()) })
	endpoints := endpointmap.Open(i.pins, ipcache.New(ipmap.Open(i.pins), log), endpointmap.Options{Log: log})
	must(t, "settle the endpoints", endpoints.Initialise())
	i.connections, err = conntrack.Open(i.pins, conntrack.Options{
		Endpoints: endpoints, Bounds: bound.Open(i.pins),
		Worlds: [2]identity.Numeric{identity.WorldIPv4, identity.WorldIPv6}, Log: log,
	})
	must(t, "open the connections", err)
	t.Cleanup(func() { must(t, "close the connections", i.connections.Close()) })
	i.Maps, err = Open(i.pins, endpoints, bound.Open(i.pins))
	must(t, "open", err)
	return i
}

func must(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// zoneOf returns the zone of a translation's key.
func zoneOf(x Translation) uint8 {
	switch {
	case x.Copy && !x.Answer:
		return zoneRequested
	case x.Copy:
		return zoneClaimed
	case x.Answer:
		return zoneNAT
	case x.Record:
		return zoneAnswers
	}
	return 0
}

func key4(x Translation) bpf.MapsSlXlKey4 {
	of := func(a netip.Addr) uint32 { return binary.NativeEndian.Uint32(a.AsSlice()) }
	return bpf.MapsSlXlKey4{
		Src: of(x.Source.Addr()), Dst: of(x.Asked.Addr()), Sport: x.Source.Port(), Dport: x.Asked.Port(),
		Proto: x.Protocol, Zone: zoneOf(x),
	}
}

func valueOf(x Translation) bpf.MapsSlXl {
	v := bpf.MapsSlXl{Port: x.Backend.Port(), Front: x.Front, Backend: x.Number, Gen: x.Generation, LastS: x.LastSeen}
	copy(v.Addr[:], x.Backend.Addr().AsSlice())
	if x.Back {
		v.Back = 1
	}
	return v
}

// put writes translations as programs do.
func (i *instance) put(xs ...Translation) {
	i.Helper()
	keys, values := map[*ebpf.Map][]bpf.MapsSlXlKey4{}, map[*ebpf.Map][]bpf.MapsSlXl{}
	for _, x := range xs {
		in4, in6 := i.xl4, i.xl6
		if x.Record || x.Copy {
			in4, in6 = i.answers4, i.answers6
		}
		if x.Source.Addr().Is6() {
			must(i, "write", in6.Put(bpf.MapsSlXlKey6{
				Src: x.Source.Addr().As16(), Dst: x.Asked.Addr().As16(), Sport: x.Source.Port(), Dport: x.Asked.Port(),
				Proto: x.Protocol, Zone: zoneOf(x),
			}, valueOf(x)))
			continue
		}
		keys[in4], values[in4] = append(keys[in4], key4(x)), append(values[in4], valueOf(x))
	}
	for in := range keys {
		_, err := in.BatchUpdate(keys[in], values[in], nil)
		must(i, "write", err)
	}
}

// connect writes the connections of translations, with an idle time.
func (i *instance) connect(flags conntrack.Flags, idle time.Duration, xs ...Translation) {
	i.Helper()
	for _, x := range xs {
		c := conntrack.Connection{
			Tuple: conntrack.Tuple{Initiator: x.Source, Responder: x.Backend, Protocol: x.Protocol, Transit: x.Answer},
			From:  conntrack.End{Slot: endpointmap.NoID}, To: conntrack.End{Slot: endpointmap.NoID},
			LastSeen: now - uint32(idle/time.Second), Flags: flags,
		}
		if x.Record {
			c.Initiator, c.Responder = x.Asked, x.Source
		}
		m, key := i.connections.Map(c.Tuple)
		v := conntrack.ValueOf(c)
		v.Front = 1
		must(i, "write a connection", m.Put(key, &v))
	}
}

// collectConnections removes connections that have ended or timed out.
func (i *instance) collectConnections() {
	i.Helper()
	c, err := i.connections.NewCollector(conntrack.CollectorOptions{Now: func() uint32 { return now }})
	must(i, "make a collector", err)
	_, err = c.Collect(i.Context())
	must(i, "collect connections", err)
}

func (i *instance) collect() Pass {
	i.Helper()
	p, err := i.Collect(now, i.connections, conntrack.DefaultTimeouts())
	must(i, "collect", err)
	return p
}

// all returns all translations as text, sorted.
func (i *instance) all() (all []string) {
	i.Helper()
	must(i, "list", i.Each(func(x Translation) error {
		all = append(all, x.String())
		return nil
	}))
	slices.Sort(all)
	return all
}

func wantStrings(t testing.TB, what string, got []string, want ...Translation) {
	t.Helper()
	texts := make([]string, len(want))
	for i, x := range want {
		texts[i] = x.String()
	}
	slices.Sort(texts)
	if !slices.Equal(got, texts) {
		t.Errorf("%s:\n got %q\nwant %q", what, got, texts)
	}
}

var at = netip.MustParseAddrPort

// kinds returns translations of every kind, of both families.
func kinds() map[string]Translation {
	of := Translation{
		Source: at("10.244.0.2:40000"), Asked: at("10.96.0.1:80"), Backend: at("10.244.1.3:8080"), Protocol: 6,
		Front: 7, Number: 3, Generation: 2, LastSeen: now,
	}
	with := func(change func(*Translation)) Translation {
		x := of
		change(&x)
		return x
	}
	all := map[string]Translation{
		"of a pod": of,
		"a copy of a pod's": with(func(x *Translation) {
			x.Copy, x.Number, x.Generation = true, 0, 0
		}),
		"of a pod, UDP": with(func(x *Translation) { x.Protocol = 17 }),
		"of a pod to itself": with(func(x *Translation) {
			x.Source, x.Backend = at("10.244.0.9:40000"), at("10.244.0.9:8080")
		}),
		"back to a pod": with(func(x *Translation) {
			x.Source, x.Asked, x.Backend, x.Back = at("10.244.0.9:8080"), at("169.254.1.1:40000"), at("10.96.0.1:80"), true
		}),
		"a copy back to a pod": with(func(x *Translation) {
			x.Source, x.Asked, x.Backend = at("10.244.0.9:8081"), at("169.254.1.1:40000"), at("10.96.0.1:80")
			x.Back, x.Record = true, true
		}),
		"a claim": with(func(x *Translation) {
			x.Source, x.Asked, x.Backend = at("10.244.1.3:8080"), at("192.0.2.10:24711"), at("198.51.100.7:40000")
			x.Answer = true
		}),
		"a copy of a claim": with(func(x *Translation) {
			x.Source, x.Asked, x.Backend = at("10.244.1.3:8080"), at("192.0.2.10:24711"), at("198.51.100.7:40000")
			x.Answer, x.Copy = true, true
		}),
		"a record": with(func(x *Translation) {
			x.Source, x.Asked, x.Backend = at("10.244.1.4:8080"), at("10.244.0.2:40000"), at("0.0.0.0:0")
			x.Record = true
		}),
	}
	six := map[string]Translation{}
	for name, x := range all {
		for _, a := range []*netip.AddrPort{&x.Source, &x.Asked, &x.Backend} {
			b := [16]byte{0: 0xfd}
			copy(b[12:], a.Addr().AsSlice())
			*a = netip.AddrPortFrom(netip.AddrFrom16(b), a.Port())
		}
		six["IPv6 "+name] = x
	}
	for name, x := range six {
		all[name] = x
	}
	return all
}

// TestKernelEachReadsWhatWasWritten: each visits translations of every kind and family, once each.
func TestKernelEachReadsWhatWasWritten(t *testing.T) {
	i := open(t)
	var want []Translation
	for name, x := range kinds() {
		if x.Record && !x.Back && x.Source.Addr().Is6() {
			x.Backend = at("[::]:0")
		}
		i.put(x)
		want = append(want, x)
		if !slices.Contains(i.list(), x) {
			t.Errorf("%s: %+v is not among %+v", name, x, i.list())
		}
	}
	if got := i.list(); len(got) != len(want) {
		t.Errorf("%d listed, want %d", len(got), len(want))
	}
	broken := errors.New("enough")
	if err := i.Each(func(Translation) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("a visit that fails: %v", err)
	}
	i.Close()
	if err := i.Each(func(Translation) error { return nil }); !errors.Is(err, pin.ErrClosed) {
		t.Errorf("Each after Close: %v", err)
	}
	if _, err := i.Collect(now, i.connections, conntrack.DefaultTimeouts()); !errors.Is(err, pin.ErrClosed) {
		t.Errorf("Collect after Close: %v", err)
	}
}

func (i *instance) list() (all []Translation) {
	i.Helper()
	must(i, "list", i.Each(func(x Translation) error {
		all = append(all, x)
		return nil
	}))
	return all
}

// TestKernelCollectRemovesWhatNothingUses: translations of both families are removed when their connection has ended,
// kept for a while after it was evicted, and kept while it exists.
func TestKernelCollectRemovesWhatNothingUses(t *testing.T) {
	const long = 8000 * time.Second // of an established connection
	for _, c := range []struct {
		what  string
		has   string // state of the connection: open, ended, or lost
		idle  time.Duration
		stays []string
	}{
		{"open connections", "open", long - time.Second, []string{
			"of a pod", "a copy of a pod's", "of a pod, UDP", "a record", "a claim", "a copy of a claim",
			"of a pod to itself", "back to a pod", "a copy back to a pod",
		}},
		{"ended connections", "ended", 0, []string{"a claim", "of a pod to itself", "back to a pod", "a copy back to a pod"}},
		{"ended connections some time ago", "ended", Rest, []string{
			"of a pod to itself", "back to a pod", "a copy back to a pod",
		}},
		{"lost connections", "lost", Rest - time.Second, []string{
			"of a pod", "a copy of a pod's", "of a pod, UDP", "a record", "a claim", "a copy of a claim",
			"of a pod to itself", "back to a pod", "a copy back to a pod",
		}},
		{"connections lost some time ago", "lost", Rest, []string{
			"of a pod", "a copy of a pod's", "of a pod, UDP", "a record", "a copy of a claim", "of a pod to itself", "back to a pod",
			"a copy back to a pod",
		}},
		{"connections lost as long ago as UDP lives", "lost", 120 * time.Second, []string{
			"of a pod", "a copy of a pod's", "a record", "a copy of a claim", "of a pod to itself", "back to a pod",
			"a copy back to a pod",
		}},
		{"connections lost long ago", "lost", Keep, []string{"of a pod to itself", "back to a pod", "a copy back to a pod"}},
		{"connections lost very long ago", "lost", long, nil},
	} {
		t.Run(c.what, func(t *testing.T) {
			i := open(t)
			var want []Translation
			all := kinds()
			for name, x := range all {
				x.LastSeen = now - uint32(c.idle/time.Second)
				i.put(x)
				alone := x.Back || x.Source.Addr() == x.Backend.Addr()
				switch {
				case alone:
				case c.has == "open" && x.Protocol == 17:
					i.connect(conntrack.SeenReply, 0, x)
				case c.has == "open":
					i.connect(conntrack.SeenReply|conntrack.Established, 0, x)
				case c.has == "ended":
					i.connect(conntrack.Reset, long, x)
				}
				if slices.Contains(c.stays, strings.TrimPrefix(name, "IPv6 ")) {
					want = append(want, x)
				}
			}
			i.collectConnections()
			if c.has == "lost" { // since the last packet
				_, err := i.Collect(now-uint32(c.idle/time.Second), i.connections, conntrack.DefaultTimeouts())
				must(t, "collect", err)
			}
			p := i.collect()
			wantStrings(t, "left", i.all(), want...)
			if p.Live != len(want) || p.Removed != len(all)-len(want) {
				t.Errorf("%+v, want %d live and %d removed", p, len(want), len(all)-len(want))
			}
		})
	}
}

// TestKernelCollectKeepsWhatOutlivesALongConnection: records and copies are written at the first answer, and are not
// used while their connection has its entry. When a connection that is older than Keep loses its entry, they are kept
// for Keep.
func TestKernelCollectKeepsWhatOutlivesALongConnection(t *testing.T) {
	i := open(t)
	var want []Translation
	for name, x := range kinds() {
		if kind := strings.TrimPrefix(name, "IPv6 "); !slices.Contains([]string{"a record", "a copy of a claim", "a copy of a pod's"}, kind) {
			continue
		}
		if x.Record && x.Source.Addr().Is6() {
			x.Backend = at("[::]:0")
		}
		x.LastSeen = now - uint32(2*Keep/time.Second)
		i.put(x)
		i.connect(conntrack.SeenReply|conntrack.Established, 0, x)
		want = append(want, x)
	}
	after := func(d time.Duration) []string {
		t.Helper()
		_, err := i.Collect(now+uint32(d/time.Second), i.connections, conntrack.DefaultTimeouts())
		must(t, "collect", err)
		return i.all()
	}
	wantStrings(t, "with their connections", after(0), want...)
	for _, x := range want { // as after an eviction
		tuple := conntrack.Tuple{Initiator: x.Source, Responder: x.Backend, Protocol: x.Protocol, Transit: x.Answer}
		if x.Record {
			tuple.Initiator, tuple.Responder = x.Asked, x.Source
		}
		m, key := i.connections.Map(tuple)
		must(t, "evict a connection", m.Delete(key))
	}
	const pass = 30 * time.Second
	wantStrings(t, "when the connections were lost", after(pass), want...)
	wantStrings(t, "later", after(pass+Keep-time.Second), want...)
	wantStrings(t, "long after", after(pass+Keep))
}

// TestKernelTranslationInUseAgainStays: an entry is kept if a packet arrives after a pass has read it, and an entry
// that was removed meanwhile is not counted.
func TestKernelTranslationInUseAgainStays(t *testing.T) {
	i := open(t)
	x := kinds()["of a pod"]
	read := entry{x, i.xl4, key4(x), valueOf(x), true, false}
	wantRemoval := func(what string, want removal) {
		t.Helper()
		if got, err := read.remove(); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", what, got, err, want)
		}
	}
	wantRemoval("gone", gone)
	later := x
	later.LastSeen++
	i.put(later)
	wantRemoval("used since", changed)
	wantStrings(t, "left", i.all(), later)
	i.put(x)
	wantRemoval("as it was read", removed)
	wantStrings(t, "left", i.all())
}

// TestKernelReleaseRemovesFlowsFromTheMaps: Release removes UDP flows of both families whose front has lost their
// backend, returns their number, and ends with its context.
func TestKernelReleaseRemovesFlowsFromTheMaps(t *testing.T) {
	i := open(t)
	var stay, all []Translation
	for _, x := range kinds() {
		all = append(all, x)
		if x.Protocol != 17 {
			stay = append(stay, x)
		}
		kept := x
		kept.Source, kept.Number = netip.AddrPortFrom(x.Source.Addr(), 39999), 4
		all, stay = append(all, kept), append(stay, kept)
	}
	i.put(all...)
	keeps := func(_ uint32, _ bool, backend uint32, _ uint8) bool { return backend == 4 }
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := i.Release(ended, keeps); !errors.Is(err, context.Canceled) {
		t.Errorf("Release with a cancelled context: %d, %v", n, err)
	}
	if n, err := i.Release(t.Context(), func(uint32, bool, uint32, uint8) bool { return true }); n != 0 || err != nil {
		t.Errorf("Release where every front keeps its backends: %d, %v", n, err)
	}
	i.put(all...)
	if n, err := i.Release(t.Context(), keeps); n != len(all)-len(stay) || err != nil {
		t.Errorf("Release: %d, %v, want %d", n, err, len(all)-len(stay))
	}
	wantStrings(t, "left", i.all(), stay...)
}

// claims returns node ports that external clients use to one backend.
func claims(backend string, protocol uint8, sender byte, n int) []Translation {
	xs := make([]Translation, n)
	for i := range xs {
		xs[i] = Translation{
			Source: at(backend), Asked: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, sender}), uint16(20_000+i)),
			Backend:  netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, sender}), uint16(1024+i)),
			Protocol: protocol, Answer: true, LastSeen: now,
		}
	}
	return xs
}

// TestKernelCollectCorrectsTheCountsOfPorts: whatever the counters of ports and shares are, a pass sets them to the
// actual numbers.
func TestKernelCollectCorrectsTheCountsOfPorts(t *testing.T) {
	i := open(t)
	const backend, other = "10.244.1.3:8080", "10.244.1.4:8080"
	many, few := claims(backend, 17, 1, smallShare+6), claims(backend, 17, 2, smallShare)
	elsewhere, sctp := claims(other, 6, 1, 3), claims(other, 132, 3, 9)
	i.put(many...)
	i.put(few...)
	i.put(elsewhere...)
	i.put(sctp...)
	for _, x := range few {
		x.Copy = true
		i.put(x)
	}
	number := func(xs []Translation) uint32 { return i.counts.Sender(xs[0].Backend.Addr()) }
	share := func(xs []Translation, sender uint32) bpf.MapsSlShareKey {
		return shareKey(xs[0].Source, xs[0].Protocol, sender)
	}
	// counted by programs
	i.counts.Add(i.counts.OfBackend(at(backend), 17), 5000)
	i.counts.Add(i.counts.OfSender(at(backend), 17, number(few)), 7)
	absent := share(many, 99)
	for k, v := range map[bpf.MapsSlShareKey]bpf.MapsSlShare{
		share(many, number(many)): {Ports: 3}, share(few, number(few)): {Ports: 2000}, absent: {Ports: 1},
		share(many, 0): {Senders: 3}, share(elsewhere, 0): {Senders: 1},
	} {
		must(t, "write a share", i.share.Put(k, v))
	}
	if p := i.collect(); p.Removed != 0 || p.Ended != 0 {
		t.Errorf("%+v", p)
	}
	for what, c := range map[string]struct{ at, want uint32 }{
		"ports to the backend":      {i.counts.OfBackend(at(backend), 17), uint32(len(many) + len(few))},
		"of the sender of many":     {i.counts.OfSender(at(backend), 17, number(many)), uint32(len(many))},
		"of the sender of few":      {i.counts.OfSender(at(backend), 17, number(few)), uint32(len(few))},
		"ports to the other":        {i.counts.OfBackend(at(other), 6), uint32(len(elsewhere))},
		"of the sender to it":       {i.counts.OfSender(at(other), 6, number(elsewhere)), uint32(len(elsewhere))},
		"SCTP has no ports":         {i.counts.OfBackend(at(other), 132), 0},
		"a backend of other ports":  {i.counts.OfBackend(at("10.244.1.3:8081"), 17), 0},
		"when the pass has counted": {2, now}, // cellTime
	} {
		if got := i.counts.Get(c.at); got != c.want {
			t.Errorf("%s: %d, want %d", what, got, c.want)
		}
	}
	for what, c := range map[string]struct {
		key  bpf.MapsSlShareKey
		want *bpf.MapsSlShare
	}{
		"of the sender of many":         {share(many, number(many)), &bpf.MapsSlShare{Ports: uint32(len(many))}},
		"of the sender of few":          {share(few, number(few)), nil},
		"of a sender without any":       {absent, nil},
		"of all senders":                {share(many, 0), &bpf.MapsSlShare{Senders: 1}},
		"of all senders to the other":   {share(elsewhere, 0), nil},
		"of a sender that is uncounted": {share(elsewhere, number(elsewhere)), nil},
	} {
		var v bpf.MapsSlShare
		switch err := i.share.Lookup(c.key, &v); {
		case c.want == nil && !errors.Is(err, ebpf.ErrKeyNotExist):
			t.Errorf("share %s: %+v, %v, want none", what, v, err)
		case c.want != nil && (err != nil || v != *c.want):
			t.Errorf("share %s: %+v, %v, want %+v", what, v, err, *c.want)
		}
	}
}

// TestKernelCollectEndsWhatIsTooMuch: if open connections use more than their part of the ports to a backend, the
// connections of the largest sender that are idle longest are ended, with their ports.
func TestKernelCollectEndsWhatIsTooMuch(t *testing.T) {
	i := open(t)
	const backend, more = "10.244.1.3:8080", 5
	most, others := claims(backend, 6, 1, openPorts-100+more), claims(backend, 6, 2, 100)
	if i.Pressed() {
		t.Error("pressed without any ports")
	}
	i.put(most...)
	i.put(others...)
	established := conntrack.SeenReply | conntrack.Established
	i.connect(established, time.Minute, most[:2*more]...)
	i.connect(established, 2*time.Minute, most[2*more:3*more]...) // idle longest
	i.connect(established, 0, most[3*more:]...)
	i.connect(established, time.Hour, others...) // of a sender with few
	half := claims(backend, 6, 3, 50)            // not open
	i.put(half...)
	i.connect(conntrack.SeenReply, 0, half...)
	closing := claims(backend, 6, 4, 50)
	i.put(closing...)
	i.connect(established|conntrack.Reset, 0, closing...)
	total := len(most) + len(others) + len(half) + len(closing)
	if p := i.collect(); p.Ended != more || p.Removed != 0 || p.Live != total {
		t.Fatalf("%+v, want %d ended of %d", p, more, total)
	}
	for _, x := range most[2*more : 3*more] {
		c := conntrack.Tuple{Initiator: x.Source, Responder: x.Backend, Protocol: 6, Transit: true}
		if _, there, err := i.connections.Lookup(c); there || err != nil {
			t.Fatalf("%v exists: %v", c, err)
		}
	}
	if got := len(i.list()); got != total-more {
		t.Errorf("%d ports are claimed, want %d", got, total-more)
	}
	if p := i.collect(); p.Ended != 0 {
		t.Errorf("the next pass: %+v", p)
	}
	counters, err := i.connections.Counters()
	if err != nil || counters.Expired != more {
		t.Errorf("%d connections counted as expired, %v, want %d", counters.Expired, err, more)
	}
	for n, want := range map[uint32]bool{openPorts: false, openPorts + 1: true} {
		cell := i.counts.OfBackend(at(backend), 6)
		i.counts.Add(cell, n-i.counts.Get(cell))
		if got := i.Pressed(); got != want {
			t.Errorf("pressed with %d ports: %t", n, got)
		}
	}
}

// TestOnlyIdleUDPFlowsAreRemovedEarly: if little capacity is left, a pass still keeps TCP connections, active flows and
// flows of a pod to itself.
func TestOnlyIdleUDPFlowsAreRemovedEarly(t *testing.T) {
	all := kinds()
	record := all["a record"]
	record.Protocol = 17
	all["a record, UDP"] = record
	for _, name := range []string{"of a pod to itself", "back to a pod", "a copy back to a pod"} {
		x := all[name]
		x.Protocol = 17
		all[name] = x
	}
	for name, x := range all {
		want := strings.HasSuffix(name, ", UDP")
		if got := (&held{entry: entry{Translation: x}, idle: idleUDP}).isIdleUDP(); got != want {
			t.Errorf("%s: can be removed: %t", name, got)
		}
		if (&held{entry: entry{Translation: x}, idle: idleUDP - 1}).isIdleUDP() {
			t.Errorf("%s: can be removed although it was used recently", name)
		}
	}
}

func TestCounterOfConnectionsIsNoneOfPorts(t *testing.T) {
	if count.IsOfPorts(count.ProvenOf(0)) {
		t.Error("a counter of connections is corrected as one of ports")
	}
}

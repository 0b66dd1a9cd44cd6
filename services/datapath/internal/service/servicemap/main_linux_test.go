// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// sizes are the sizes of maps in a test; 0: unchanged.
type sizes struct{ keys, fronts, members, backends uint32 }

// small are maps that fill up, and that are read quickly.
var small = sizes{keys: 256, fronts: 256, members: 512, backends: 256}

// instance is the maps of services without the rest of the kernel.
type instance struct {
	*Maps
	pins   *pin.Maps
	clock  time.Time
	closed bool
}

// open starts or continues an instance as a process does, before RemoveLeftovers.
func open(t testing.TB, dir string, sz sizes) *instance {
	t.Helper()
	spec, err := bpf.LoadMaps()
	if err != nil {
		t.Fatal(err)
	}
	for name, ms := range spec.Maps {
		var size uint32
		switch name {
		case bpf.MapsMapSlFe4, bpf.MapsMapSlFe6, bpf.MapsMapSlSrc4, bpf.MapsMapSlSrc6:
			size = sz.keys
		case bpf.MapsMapSlFront:
			size = sz.fronts
		case bpf.MapsMapSlMember:
			size = sz.members
		case bpf.MapsMapSlBe4, bpf.MapsMapSlBe6:
			size = sz.backends
		default:
			if !slices.ContainsFunc(pin.PreviousMaps, func(p pin.PreviousMap) bool { return p.Previous == name }) {
				delete(spec.Maps, name)
			}
			continue
		}
		if size != 0 {
			ms.MaxEntries = size
		}
	}
	i := &instance{clock: time.Unix(1e9, 0)}
	log := slog.New(slog.DiscardHandler)
	if i.pins, err = pin.Open(pin.Options{Dir: dir, Log: log}, spec); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { i.close(t) })
	if i.Maps, err = Open(i.pins, Options{Log: log, Now: func() time.Time { return i.clock }}); err != nil {
		t.Fatal(err)
	}
	return i
}

// start is like open, but with RemoveLeftovers.
func start(t testing.TB, dir string, sz sizes) *instance {
	t.Helper()
	i := open(t, dir, sz)
	if err := errors.Join(pin.GracePeriod(t.Context()), i.RemoveLeftovers()); err != nil {
		t.Fatalf("RemoveLeftovers: %v", err)
	}
	return i
}

// close ends the process and keeps the maps.
func (i *instance) close(t testing.TB) {
	t.Helper()
	if i.closed {
		return
	}
	i.closed = true
	if i.Maps != nil {
		i.Close()
	}
	if err := i.pins.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

// apply applies changes that fit.
func (i *instance) apply(t testing.TB, tx *frontendtx.Transaction) frontendtx.Result {
	t.Helper()
	res, err := i.Apply(t.Context(), tx)
	if err != nil {
		t.Fatalf("Apply: %v", err)
	}
	for _, r := range res.Refused {
		t.Errorf("%v is refused: %v", r.Key, r.Err)
	}
	return res
}

// sound fails the test if the maps differ from the store.
func (i *instance) sound(t testing.TB) {
	t.Helper()
	ds, err := i.Audit(false)
	if err != nil {
		t.Fatalf("Audit: %v", err)
	}
	for _, d := range ds {
		t.Errorf("audit: %s", d)
	}
}

// leads is the result of a lookup in the kernel's maps: the backends, and the flags of the front.
type leads struct {
	backends []netip.AddrPort
	flags    uint16
	timeout  uint32
	asked    [4]bool // whether each of askers is allowed
}

// askers are clients of each family.
var askers = [families][4]netip.Addr{
	{
		netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.129"), netip.MustParseAddr("198.51.100.7"),
		netip.IPv4Unspecified(),
	},
	{
		netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8:1::1"), netip.MustParseAddr("2001:db8:2::1"),
		netip.IPv6Unspecified(),
	},
}

// ranges are source ranges, by number.
var ranges = [...]netip.Prefix{
	netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("192.0.2.128/25"), netip.MustParsePrefix("0.0.0.0/0"),
	netip.MustParsePrefix("2001:db8::/32"), netip.MustParsePrefix("2001:db8:1::/48"), netip.MustParsePrefix("::/0"),
}

// reader follows the maps as the programs do, with system calls.
type reader struct {
	t testing.TB
	i *instance
}

// find returns what a packet from inside, or outside, finds; nil: no front.
func (r reader) find(k frontend.Key, outside bool) *leads {
	r.t.Helper()
	var v bpf.MapsSlFe
	var err error
	if k.Addr.Is4() {
		key := key4(k)
		err = r.i.pins.Map(bpf.MapsMapSlFe4).Lookup(&key, &v)
	} else {
		key := key6(k)
		err = r.i.pins.Map(bpf.MapsMapSlFe6).Lookup(&key, &v)
	}
	number := v.Inside
	if outside {
		number = v.Outside
	}
	if errors.Is(err, ebpf.ErrKeyNotExist) || err == nil && number == 0 {
		return nil
	}
	var f bpf.MapsSlFront
	if err := errors.Join(err, r.i.pins.Map(bpf.MapsMapSlFront).Lookup(number, &f)); err != nil {
		r.t.Fatalf("%v: %v", k, err)
	}
	if f.Port != k.Port || f.Addr != bytes16(addrWords(k)) {
		r.t.Fatalf("%v: front %d has address %v port %d", k, number, f.Addr, f.Port)
	}
	l := &leads{flags: uint16(f.List >> flagsShift), timeout: f.Timeout}
	for n, a := range askers[familyOf(k.Addr)] {
		ok, err := r.i.MayAsk(number, a)
		if err != nil {
			r.t.Fatalf("%v: %v", k, err)
		}
		l.asked[n] = ok
	}
	base, count := uint32(f.List&baseMask), uint32(f.List>>countShift&maxCount)
	for at := base; at < base+count; at++ {
		var m uint64
		if err := r.i.pins.Map(bpf.MapsMapSlMember).Lookup(at, &m); err != nil {
			r.t.Fatalf("%v: member %d: %v", k, at, err)
		}
		b := r.backend(k.Addr.Is4(), uint32(m))
		if uint32(m>>32) != Salt(b) {
			r.t.Fatalf("%v: member %d of %v has salt %#x", k, at, b, m>>32)
		}
		l.backends = append(l.backends, b)
	}
	return l
}

func (r reader) backend(is4 bool, number uint32) netip.AddrPort {
	r.t.Helper()
	if is4 {
		var w uint64
		if err := r.i.pins.Map(bpf.MapsMapSlBe4).Lookup(number, &w); err != nil {
			r.t.Fatalf("backend %d: %v", number, err)
		}
		if state := uint8(w >> stateShift); state != backendActive {
			r.t.Fatalf("backend %d in a list has state %d", number, state)
		}
		return netip.AddrPortFrom(pin.Addr4(uint32(w)), uint16(w>>portShift))
	}
	var be bpf.MapsSlBe6
	if err := r.i.pins.Map(bpf.MapsMapSlBe6).Lookup(number, &be); err != nil {
		r.t.Fatalf("backend %d: %v", number, err)
	}
	if state := uint8(be.Word >> stateShift); state != backendActive {
		r.t.Fatalf("backend %d in a list has state %d", number, state)
	}
	return netip.AddrPortFrom(netip.AddrFrom16(be.Addr), uint16(be.Word>>portShift))
}

// wanted returns what a packet should find for a frontend.
func wanted(f *frontend.Frontend, outside bool) *leads {
	if f == nil {
		return nil
	}
	l := f.Inside
	if outside && f.Outside != nil {
		l = f.Outside
	}
	if l == nil {
		return nil
	}
	w := &leads{timeout: uint32(f.Affinity / time.Second)}
	if l.Drop {
		w.flags = flagDrop
	}
	if len(f.SourceRanges) > 0 {
		w.flags |= flagSources
	}
	for n, a := range askers[familyOf(f.Key.Addr)] {
		w.asked[n] = slices.ContainsFunc(f.SourceRanges, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for _, b := range l.Backends {
		w.backends = append(w.backends, b.AddrPort)
	}
	return w
}

// state is a set of desired frontends.
type state map[frontend.Key]*frontend.Frontend

// to returns the transaction from one state to another.
func (s state) to(o state) *frontendtx.Transaction {
	tx := &frontendtx.Transaction{}
	for k, f := range o {
		if !reflect.DeepEqual(s[k], f) {
			tx.Upsert(f)
		}
	}
	for k := range s {
		if o[k] == nil {
			tx.Remove(k)
		}
	}
	return tx
}

// all returns the transaction with every frontend of the state.
func (s state) all() *frontendtx.Transaction { return state(nil).to(s) }

// check compares the results of lookups with the state. Other lookups must find nothing, except for the addresses of
// frontends that did not fit.
func (s state) check(t testing.TB, i *instance) {
	t.Helper()
	r := reader{t, i}
	for k, f := range s {
		for _, outside := range []bool{false, true} {
			if got, want := r.find(k, outside), wanted(f, outside); !reflect.DeepEqual(got, want) {
				t.Errorf("%v, outside %t: found %+v, want %+v", k, outside, got, want)
			}
		}
	}
	keys, err := i.Keys()
	closed := i.store.closed
	if err != nil || len(keys) != len(s)+len(closed) {
		t.Errorf("%d frontends (%v), want %d and %d without capacity", len(keys), err, len(s), len(closed))
	}
	n, alone := 0, s.alone()
	for k := range closed {
		alone[k.Addr] = true
	}
	for addr := range alone {
		if ok, err := i.IsOfServices(addr); err != nil || !ok {
			t.Errorf("%v is a virtual IP: %t, %v", addr, ok, err)
		}
	}
	if err := i.store.eachKey(func(rawKey, bpf.MapsSlFe) { n++ }); err != nil || n != len(s)+len(alone) {
		t.Errorf("%d keys in the kernel (%v), want %d of frontends and %d of addresses", n, err, len(s), len(alone))
	}
}

// alone returns the virtual IPs, on whose other ports connections are refused.
func (s state) alone() map[netip.Addr]bool {
	alone, others := map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for k, f := range s {
		switch {
		case f.Kind == frontend.LoadBalancer && f.Inside == nil:
			others[k.Addr] = true
		case f.Kind == frontend.LoadBalancer, f.Kind == frontend.ClusterIP:
			alone[k.Addr] = true
		}
	}
	for addr := range others {
		delete(alone, addr)
	}
	return alone
}

// image returns every byte of the maps.
func (i *instance) image(t testing.TB) string {
	t.Helper()
	var b strings.Builder
	var keys []string
	err := i.store.eachKey(func(k rawKey, v bpf.MapsSlFe) { keys = append(keys, fmt.Sprintln(k, v)) })
	if err != nil {
		t.Fatal(err)
	}
	err = i.store.eachSource(func(s source) { keys = append(keys, fmt.Sprintln(s)) })
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(keys)
	b.WriteString(strings.Join(keys, ""))
	raw := i.store.rawMaps
	for _, a := range []array{raw.fronts, raw.members, raw.backends[ip4], raw.backends[ip6]} {
		b.Write(a.mem)
	}
	return b.String()
}

func clusterIP(n int, is6 bool) frontend.Key {
	a := netip.AddrFrom4([4]byte{10, 96, byte(n >> 8), byte(n)})
	if is6 {
		a = netip.AddrFrom16([16]byte{0xfd, 0x96, 14: byte(n >> 8), 15: byte(n)})
	}
	return frontend.Key{Addr: a, Port: 80, Protocol: frontend.TCP}
}

func backendAt(n int, is6 bool) frontend.Backend {
	a := netip.AddrFrom4([4]byte{10, 244, byte(n >> 8), byte(n)})
	if is6 {
		a = netip.AddrFrom16([16]byte{0xfd, 0x24, 14: byte(n >> 8), 15: byte(n)})
	}
	return frontend.Backend{AddrPort: netip.AddrPortFrom(a, uint16(8080+n%3))}
}

// listOf returns a list of backends by their numbers, in ascending order.
func listOf(is6 bool, ns ...int) *frontend.List {
	l := &frontend.List{}
	for _, n := range ns {
		l.Backends = append(l.Backends, backendAt(n, is6))
	}
	return l
}

func service(n int, is6 bool, inside *frontend.List) *frontend.Frontend {
	return &frontend.Frontend{
		Key: clusterIP(n, is6), Kind: frontend.ClusterIP, Service: fmt.Sprintf("shop/web%d:http", n), Inside: inside,
	}
}

// randomState returns frontends of every shape, of services 0 to n-1.
func randomState(r *rand.Rand, n int) state {
	s := state{}
	list := func(is6 bool) *frontend.List {
		var ns []int
		for b := range 40 {
			if r.IntN(8) == 0 {
				ns = append(ns, b)
			}
		}
		if r.IntN(10) == 0 {
			ns = nil
		}
		l := listOf(is6, ns...)
		l.Drop = r.IntN(4) == 0
		for b := range 40 {
			if r.IntN(8) == 0 && !slices.Contains(ns, b) {
				l.Draining = append(l.Draining, backendAt(b, is6))
			}
		}
		return l
	}
	for i := range n {
		if r.IntN(4) == 0 {
			continue
		}
		is6 := i%3 == 0
		f := service(i, is6, list(is6))
		switch i % 4 {
		case 1:
			f.Kind = frontend.NodePort
			f.Key.Node, f.Key.Addr, f.Key.Port = true, netip.IPv4Unspecified(), 30000+uint16(i)
			if is6 {
				f.Key.Addr = netip.IPv6Unspecified()
			}
		case 2:
			f.Kind, f.Key.Protocol = frontend.LoadBalancer, frontend.UDP
			for _, p := range ranges {
				if r.IntN(4) == 0 {
					f.SourceRanges = append(f.SourceRanges, p)
				}
			}
		}
		switch {
		case r.IntN(3) == 0:
			f.Outside = list(is6)
			if f.Kind == frontend.LoadBalancer && r.IntN(2) == 0 {
				f.Inside = nil
			}
		case r.IntN(4) == 0:
			f.Affinity = time.Duration(1+r.IntN(3)) * time.Hour
		}
		f.Service = fmt.Sprintf("shop/web%d:http", i/4)
		s[f.Key] = f
	}
	return s
}

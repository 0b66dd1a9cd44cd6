// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

func TestKernelPublishShowsWhatItWasGiven(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	for _, e := range []endpointmap.Endpoint{a, only4, withAddrs(testEndpoint(1006, 60), false, true), shaped} {
		s, err := k.Endpoints.Publish(t.Context(), e)
		if err != nil {
			t.Fatalf("Publish: %v", err)
		}
		got, err := k.Endpoints.Lookup(s)
		if err != nil {
			t.Fatalf("Lookup: %v", err)
		}
		if got.Policy.Epoch == 0 {
			t.Error("epoch is 0")
		}
		want := e
		want.Slot, want.Policy.Epoch = s, got.Policy.Epoch
		if got != want {
			t.Errorf("published\n got %+v\nwant %+v", got, want)
		}
		for _, addr := range e.Addrs() {
			info, found, err := k.Addresses.Match(addr)
			if err != nil || !found || info != (ipmap.Info{Identity: e.Identity}) {
				t.Errorf("ipcache of %v: %+v, %v, %v", addr, info, found, err)
			}
		}
	}
}

func TestKernelPublishRefusesWhatIsTakenAndLeavesNothing(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	first := publish(t, k, a)
	if err := k.Endpoints.SyncHostAddrs([]netip.Addr{host4}); err != nil {
		t.Fatal(err)
	}
	other := testEndpoint(77, 77)
	for name, change := range map[string]func(*endpointmap.Endpoint){
		"device":       func(e *endpointmap.Endpoint) { e.Ifindex = a.Ifindex },
		"IPv4":         func(e *endpointmap.Endpoint) { e.IPv4 = a.IPv4 },
		"IPv6":         func(e *endpointmap.Endpoint) { e.IPv6 = a.IPv6 },
		"host address": func(e *endpointmap.Endpoint) { e.IPv4 = host4 },
	} {
		e := other
		change(&e)
		if s, err := k.Endpoints.Publish(t.Context(), e); !errors.Is(err, pin.ErrExists) || s != endpointmap.NoID {
			t.Errorf("%s taken: slot %d, %v, want pin.ErrExists", name, s, err)
		}
	}
	es, err := k.Endpoints.List()
	if err != nil || !reflect.DeepEqual(es, []endpointmap.Endpoint{first}) {
		t.Errorf("endpoints %+v, %v, want %+v", es, err, first)
	}
	owners, err := addrOwners(k)
	want := map[netip.Addr]endpointmap.ID{a.IPv4: first.Slot, a.IPv6: first.Slot, host4: endpointmap.HostID}
	if err != nil || !reflect.DeepEqual(owners, want) {
		t.Errorf("addresses %v, %v, want %v", owners, err, want)
	}
	if _, err := k.Endpoints.Publish(t.Context(), other); err != nil {
		t.Errorf("the same endpoint without the conflicting values: %v", err)
	}
}

func TestKernelPublishNamesTheBadField(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	for field, change := range map[string]func(*endpointmap.Endpoint){
		"Ifindex":            func(e *endpointmap.Endpoint) { e.Ifindex = 0 },
		"Identity":           func(e *endpointmap.Endpoint) { e.Identity = 0 },
		"Identity: 1 ":       func(e *endpointmap.Endpoint) { e.Identity = identity.Host },
		"Identity: 25":       func(e *endpointmap.Endpoint) { e.Identity = identity.UnknownInCluster },
		"Identity: 16711680": func(e *endpointmap.Endpoint) { e.Identity = identity.MinNodeLocal },
		"Identity: 16777216": func(e *endpointmap.Endpoint) { e.Identity = 1 << 24 },
		"neither":            func(e *endpointmap.Endpoint) { *e = withAddrs(*e, false, false) },
		"IPv4: 224":          func(e *endpointmap.Endpoint) { e.IPv4 = netip.MustParseAddr("224.0.0.1") },
		"IPv4: fd00":         func(e *endpointmap.Endpoint) { e.IPv4 = a.IPv6 },
		"IPv6: 10.":          func(e *endpointmap.Endpoint) { e.IPv6 = a.IPv4 },
		"IPv6: fe80":         func(e *endpointmap.Endpoint) { e.IPv6 = podLocal },
		"IPv6: ::ffff":       func(e *endpointmap.Endpoint) { e.IPv6 = netip.MustParseAddr("::ffff:10.0.0.1") },
		"MAC: 00":            func(e *endpointmap.Endpoint) { e.MAC = [6]byte{} },
		"HostMAC: ff":        func(e *endpointmap.Endpoint) { e.HostMAC = broadcastMAC },
		"MTU: 1279":          func(e *endpointmap.Endpoint) { e.MTU = 1279 },
		"Deliver":            func(e *endpointmap.Endpoint) { e.Deliver = 0 },
	} {
		e := a
		change(&e)
		if _, err := k.Endpoints.Publish(t.Context(), e); !errors.Is(err, pin.ErrInvalid) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
	s := publish(t, k, a)
	for _, id := range []identity.Numeric{0, identity.Host, identity.Health, identity.MinNodeLocal, identity.Max} {
		if err := setIdentity(t, k, s.Slot, id); !errors.Is(err, pin.ErrInvalid) {
			t.Errorf("SetIdentity to %d: %v", id, err)
		}
	}
	// An isolated endpoint has the reserved identity init.
	if err := setIdentity(t, k, s.Slot, identity.Init); err != nil {
		t.Errorf("SetIdentity to init: %v", err)
	}
}

// TestKernelUnpublishLeavesNoKeyAndReusesTheSlotAfterABarrier proves INV-36.
func TestKernelUnpublishLeavesNoKeyAndReusesTheSlotAfterABarrier(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	// all endpoint IDs but one
	var others []endpointmap.ID
	for i := range uint32(endpointmap.MaxEndpoints - 1) {
		other := a
		other.Ifindex, other.IPv6 = 10_000+i, netip.Addr{}
		other.IPv4 = netip.AddrFrom4([4]byte{10, 250, byte(i >> 8), byte(i)})
		s, err := k.Endpoints.Publish(t.Context(), other)
		must(t, "publish another", err)
		others = append(others, s)
	}
	before, err := k.Addresses.List()
	must(t, "list the ipcache", err)
	e := publish(t, k, a)
	if _, err := k.Endpoints.Publish(t.Context(), b); !errors.Is(err, pin.ErrFull) {
		t.Errorf("Publish without a free slot: %v, want pin.ErrFull", err)
	}
	if err := k.Endpoints.Unpublish(e.Slot); err != nil {
		t.Fatalf("Unpublish: %v", err)
	}
	cut, err := k.Endpoints.At(e.Slot)
	must(t, "At", err)
	if p := cut.Policy; p.Egress != nodetable.Deny || p.Ingress != nodetable.Deny || p.Epoch == e.Policy.Epoch {
		t.Errorf("policy after Unpublish: %+v", p)
	}
	owners, err := addrOwners(k)
	if err != nil || len(owners) != len(others) {
		t.Errorf("%d addresses, %v, want the addresses of the %d others", len(owners), err, len(others))
	}
	if after, err := k.Addresses.List(); err != nil || !slices.Equal(after, before) {
		t.Errorf("ipcache %+v, %v, want %+v", after, err, before)
	}
	// Publish runs the barrier itself
	again := publish(t, k, b)
	if again.Slot != e.Slot || again.Policy.Epoch <= e.Policy.Epoch {
		t.Errorf("slot %d, epoch %d, want %d, above %d", again.Slot, again.Policy.Epoch, e.Slot, e.Policy.Epoch)
	}
	for _, s := range others {
		must(t, "unpublish another", k.Endpoints.Unpublish(s))
	}
	for name, err := range map[string]error{
		"Unpublish": k.Endpoints.Unpublish(4000), "Cut": k.Endpoints.Cut(4000),
		"SetIdentity": setIdentity(t, k, 4000, 300),
	} {
		if !errors.Is(err, endpointmap.ErrNotFound) {
			t.Errorf("%s of an unused endpoint ID: %v, want ErrNotFound", name, err)
		}
	}
	for _, s := range []endpointmap.ID{endpointmap.HostID, endpointmap.NoID, endpointmap.MaxEndpoints + 1} {
		if err := k.Endpoints.Cut(s); !errors.Is(err, pin.ErrInvalid) {
			t.Errorf("Cut(%d): %v, want pin.ErrInvalid", s, err)
		}
	}
}

// setIdentity changes the identity of an endpoint, keeps its tables, and waits until the change is settled.
func setIdentity(t *testing.T, k *Kernel, s endpointmap.ID, id identity.Numeric) error {
	t.Helper()
	e, err := k.Endpoints.At(s)
	if err != nil {
		return err
	}
	_, err = k.Endpoints.SetIdentity(t.Context(), s, id, e.Policy.Egress, e.Policy.Ingress)
	return errors.Join(err, k.Endpoints.WaitIdentity(t.Context(), s))
}

func TestKernelSetIdentityReachesSlotAndIPCache(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	e := publish(t, k, a)
	if err := setIdentity(t, k, e.Slot, 4711); err != nil {
		t.Fatal(err)
	}
	got, err := k.Endpoints.Lookup(e.Slot)
	if err != nil || got.Identity != 4711 || got.Incomplete || got.Policy.Epoch <= e.Policy.Epoch ||
		got.Policy.Egress != e.Policy.Egress || got.Policy.Ingress != e.Policy.Ingress {
		t.Errorf("after SetIdentity: %+v, %v, before %+v", got, err, e)
	}
}

func TestKernelHostAddrsAreExactlyTheGivenOnes(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	publish(t, k, a)
	other := netip.MustParseAddr("192.0.2.99")
	for _, c := range []struct{ give, want []netip.Addr }{
		{[]netip.Addr{host4, host6, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("fe80::5%lo"), netip.IPv6Loopback()}, []netip.Addr{host4, host6}},
		{[]netip.Addr{host4, other}, []netip.Addr{host4, other}},
		{[]netip.Addr{host4, other}, []netip.Addr{host4, other}},
		{nil, nil},
	} {
		if err := k.Endpoints.SyncHostAddrs(c.give); err != nil {
			t.Fatalf("SyncHostAddrs(%v): %v", c.give, err)
		}
		got, err := k.Endpoints.HostAddrs()
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("host addresses %v, %v, want %v", got, err, c.want)
		}
		var cached []netip.Addr
		es, err := k.Addresses.List()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range es {
			if e.Identity == identity.Host {
				cached = append(cached, e.Prefix.Addr())
			}
		}
		if !slices.Equal(cached, c.want) {
			t.Errorf("ipcache has %v as the host, want %v", cached, c.want)
		}
	}
	if err := k.Endpoints.SyncHostAddrs([]netip.Addr{a.IPv4, host4}); !errors.Is(err, pin.ErrExists) {
		t.Errorf("an endpoint's address: %v, want pin.ErrExists", err)
	}
	if got, _ := k.Endpoints.HostAddrs(); !slices.Equal(got, []netip.Addr{host4}) {
		t.Errorf("host addresses %v, want the rest applied", got)
	}
}

func TestKernelIPCacheHoldsPrefixesOfBothFamilies(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	want := []ipmap.Entry{
		{Prefix: netip.MustParsePrefix("0.0.0.0/0"), Info: ipmap.Info{Identity: 2}},
		{Prefix: netip.MustParsePrefix("10.0.0.0/8"), Info: ipmap.Info{Identity: 300, Node: 7}},
		{Prefix: podCIDR4, Info: ipmap.Info{Identity: identity.UnknownInCluster, Flags: ipmap.PodRange}},
		{Prefix: netip.MustParsePrefix("10.244.0.5/32"), Info: ipmap.Info{Identity: identity.Max, Node: 65535, Flags: 0xfffe}},
		{Prefix: netip.MustParsePrefix("2001:db8::/32"), Info: ipmap.Info{Identity: 301}},
		{Prefix: podCIDR6, Info: ipmap.Info{Identity: identity.UnknownInCluster, Flags: ipmap.PodRange}},
	}
	for _, e := range want {
		for range 2 {
			if err := k.Addresses.Set(e.Prefix, e.Info); err != nil {
				t.Fatalf("UpsertIP(%v): %v", e.Prefix, err)
			}
		}
	}
	if got, err := k.Addresses.List(); err != nil || !slices.Equal(got, want) {
		t.Errorf("ipcache\n got %v, %v\nwant %v", got, err, want)
	}
	for range 2 {
		if err := k.Addresses.Remove(want[1].Prefix); err != nil {
			t.Errorf("DeleteIP: %v", err)
		}
	}
	if got, err := k.Addresses.List(); err != nil || !slices.Equal(got, slices.Delete(slices.Clone(want), 1, 2)) {
		t.Errorf("ipcache after a deletion %v, %v", got, err)
	}
	for _, p := range []netip.Prefix{{}, netip.MustParsePrefix("10.0.0.1/8"), netip.MustParsePrefix("::ffff:10.0.0.0/104")} {
		if err := k.Addresses.Set(p, ipmap.Info{Identity: 300}); !errors.Is(err, pin.ErrInvalid) {
			t.Errorf("UpsertIP(%v): %v, want pin.ErrInvalid", p, err)
		}
	}
}

func TestKernelOpenAdoptsMapsProgramsAndContents(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	first, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	e := publish(t, first, a)
	if err := first.Endpoints.SyncHostAddrs([]netip.Addr{host4}); err != nil {
		t.Fatal(err)
	}
	ids, err := first.Pins.Infos()
	if err != nil {
		t.Fatal(err)
	}
	from, to := first.find(program.FromPod), first.find(program.ToPod)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := first.Endpoints.List(); !errors.Is(err, pin.ErrClosed) {
		t.Errorf("Endpoints after Close: %v", err)
	}

	second := openKernel(t, o)
	if got, err := second.Pins.Infos(); err != nil || !reflect.DeepEqual(got, ids) {
		t.Errorf("maps\n got %+v, %v\nwant %+v", got, err, ids)
	}
	if second.find(program.FromPod).ID != from.ID || second.find(program.ToPod).ID != to.ID {
		t.Errorf("programs %d, %d, want %d, %d",
			second.find(program.FromPod).ID, second.find(program.ToPod).ID, from.ID, to.ID)
	}
	if es, err := second.Endpoints.List(); err != nil || !reflect.DeepEqual(es, []endpointmap.Endpoint{e}) {
		t.Errorf("endpoints %+v, %v, want %+v", es, err, e)
	}
	if as, err := second.Endpoints.HostAddrs(); err != nil || !slices.Equal(as, []netip.Addr{host4}) {
		t.Errorf("host addresses %v, %v", as, err)
	}
	next := publish(t, second, b)
	if next.Slot == e.Slot || next.Policy.Epoch <= e.Policy.Epoch {
		t.Errorf("after adoption: slot %d, epoch %d, before %d, %d", next.Slot, next.Policy.Epoch, e.Slot, e.Policy.Epoch)
	}
	r := runner{second}
	if got := r.run(t, program.FromPod, from4(b.IPv4, 17, udp(1, 2)), skbContext{}, 0); got.reason != event.ForwardedToPod {
		t.Errorf("a packet after adoption: %v", got.reason)
	}
}

// TestKernelProgramsStayFarBelowTheVerifiersLimit: the verifier processes at most a million instructions, and
// the number differs between kernels.
func TestKernelProgramsStayFarBelowTheVerifiersLimit(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	loaded, err := k.Programs.Load(program.Endpoints)
	must(t, "load the programs", err)
	for _, p := range loaded {
		t.Logf("%s: %d instructions", p.Name, p.VerifiedInstructions)
		if p.VerifiedInstructions == 0 || p.VerifiedInstructions > 150_000 {
			t.Errorf("%s: the verifier processed %d instructions", p.Name, p.VerifiedInstructions)
		}
	}
}

func TestKernelOtherConstantsAreAnotherProgramOnTheSameMaps(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	first := openKernel(t, o)
	o.TunnelPorts = []uint16{9999}
	o.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.99.0.0/16")}
	second := openKernel(t, o)

	if first.find(program.FromPod).ID == second.find(program.FromPod).ID {
		t.Fatal("the program with other constants was not loaded")
	}
	audit, err := second.find(program.FromPod).Audit(first.find(program.FromPod).ID)
	if err != nil || !audit.SameCode || !audit.SameMaps || audit.SameConfig || audit.Current() || len(audit.Differences) != 1 {
		t.Errorf("audit of other constants: %+v, %v", audit, err)
	}
	own := second.find(program.FromPod)
	if audit, err := own.Audit(own.ID); err != nil || !audit.Current() {
		t.Errorf("audit of the program itself: %+v, %v", audit, err)
	}
	es, err := second.Addresses.List()
	want := []ipmap.Entry{{Prefix: o.PodCIDRs[0], Info: ipmap.Info{Identity: identity.UnknownInCluster, Flags: ipmap.PodRange}}}
	if err != nil || !slices.Equal(es, want) {
		t.Errorf("ipcache with other pod ranges %v, %v, want %v", es, err, want)
	}

	pins := func() int {
		n, err := filepath.Glob(filepath.Join(o.Dir, program.FromPod+"_*"))
		if err != nil {
			t.Fatal(err)
		}
		return len(n)
	}
	if n := pins(); n != 2 {
		t.Errorf("%d programs pinned, want 2", n)
	}
	if err := second.DropOldPrograms(); err != nil || pins() != 1 {
		t.Errorf("DropOldPrograms: %v, %d pinned, want 1", err, pins())
	}
	third := openKernel(t, o)
	if third.find(program.FromPod).ID != second.find(program.FromPod).ID {
		t.Error("the current program was dropped")
	}
}

func TestKernelAuditSeesForeignMapsAndCode(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	other := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	audit, err := k.find(program.FromPod).Audit(other.find(program.FromPod).ID)
	if err != nil || !audit.SameCode || audit.SameMaps || !audit.SameConfig {
		t.Errorf("the same program of another instance: %+v, %v", audit, err)
	}
	audit, err = k.find(program.FromPod).Audit(k.find(program.ToPod).ID)
	if err != nil || audit.SameCode || audit.Current() {
		t.Errorf("the other program: %+v, %v", audit, err)
	}
	if _, err := k.find(program.FromPod).Audit(1<<31 - 1); !errors.Is(err, program.ErrNoProgram) {
		t.Errorf("no program: %v", err)
	}
}

// TestKernelChangedLayoutIsANewMap: a map with a changed layout is a new map. The map that an older program
// uses is neither adopted nor changed.
func TestKernelChangedLayoutIsANewMap(t *testing.T) {
	spec, err := bpf.LoadMaps()
	if err != nil {
		t.Fatal(err)
	}
	dir := kerneltest.NewBPFFS(t)
	old := spec.Maps[bpf.MapsMapSlIf].Copy()
	old.ValueSize, old.Value = 8, nil
	if pin.Name(old) == pin.Name(spec.Maps[bpf.MapsMapSlIf]) {
		t.Fatalf("two layouts share the pin name %s", pin.Name(old))
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	was, err := newPinned(filepath.Join(dir, pin.Name(old)), old)
	if err != nil {
		t.Fatal(err)
	}
	defer was.Close()
	if err := was.Put(uint32(1), uint64(2)); err != nil {
		t.Fatal(err)
	}

	k := openKernel(t, testOptions(dir))
	publish(t, k, a)
	var v uint64
	if err := was.Lookup(uint32(1), &v); err != nil || v != 2 {
		t.Errorf("the older map holds %d, %v, want 2", v, err)
	}
	if _, err := os.Stat(filepath.Join(dir, pin.Name(old))); err != nil {
		t.Errorf("the older pin: %v", err)
	}
}

func TestLayoutHashSeesEveryFieldAndNoName(t *testing.T) {
	spec, err := bpf.LoadMaps()
	if err != nil {
		t.Fatal(err)
	}
	base := spec.Maps[bpf.MapsMapSlEp]
	for name, change := range map[string]func(*ebpf.MapSpec){
		"type":    func(m *ebpf.MapSpec) { m.Type = ebpf.Hash },
		"entries": func(m *ebpf.MapSpec) { m.MaxEntries++ },
		"flags":   func(m *ebpf.MapSpec) { m.Flags = 0 },
		"key":     func(m *ebpf.MapSpec) { m.KeySize = 8 },
		"value":   func(m *ebpf.MapSpec) { m.Value = spec.Maps[bpf.MapsMapSlEvents].Value },
		"a field": func(m *ebpf.MapSpec) { m.Value = spec.Maps[bpf.MapsMapSlIpc4].Value },
	} {
		m := base.Copy()
		change(m)
		if pin.Layout(m) == pin.Layout(base) {
			t.Errorf("%s: the hash does not change", name)
		}
	}
	renamed := base.Copy()
	value := *btf.UnderlyingType(base.Value).(*btf.Struct)
	value.Members = slices.Clone(value.Members)
	value.Members[0].Name = "a better word"
	renamed.Value = &value
	for name, m := range map[string]*ebpf.MapSpec{"the same": base.Copy(), "with another name of a field": renamed} {
		if pin.Layout(m) != pin.Layout(base) {
			t.Errorf("the hash of the layout %s differs", name)
		}
	}
}

func TestKernelAForeignPinIsRefusedAndKept(t *testing.T) {
	spec, err := bpf.LoadMaps()
	if err != nil {
		t.Fatal(err)
	}
	dir := kerneltest.NewBPFFS(t)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	pin := filepath.Join(dir, pin.Name(spec.Maps[bpf.MapsMapSlIp4]))
	foreign, err := newPinned(pin, &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	if k, err := Open(t.Context(), testOptions(dir)); err == nil || !strings.Contains(err.Error(), pin) {
		if k != nil {
			k.Close()
		}
		t.Errorf("Open: %v, want an error that names %s", err, pin)
	}
	if _, err := os.Stat(pin); err != nil {
		t.Errorf("the foreign pin: %v", err)
	}
}

func TestKernelOpenRefusesADirectoryThatIsNoBPFFS(t *testing.T) {
	kerneltest.RequireRoot(t)
	if k, err := Open(t.Context(), testOptions(t.TempDir())); !errors.Is(err, pin.ErrInvalid) || !strings.Contains(err.Error(), "bpffs") {
		if k != nil {
			k.Close()
		}
		t.Errorf("Open: %v", err)
	}
}

func TestOpenNamesEveryBadOption(t *testing.T) {
	_, err := Open(t.Context(), Options{
		PodCIDRs:    []netip.Prefix{netip.MustParsePrefix("10.1.2.3/8"), podCIDR4, netip.PrefixFrom(podCIDR4.Addr(), 28)},
		TunnelPorts: []uint16{0, 1, 2, 3, 4},
	})
	for _, want := range []string{"Dir", "10.1.2.3/8", "overlaps an earlier one", "TunnelPorts: 5", "0 is not a port"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %q", err, want)
		}
	}
}

func TestKernelValidateOnlyChangesNothing(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	o.ValidateOnly = true
	k := openKernel(t, o)
	if _, err := os.Stat(o.Dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the pin directory: %v, want it absent", err)
	}
	if k.find(program.FromPod).VerifiedInstructions == 0 {
		t.Error("nothing was verified")
	}
	_, publishErr := k.Endpoints.Publish(t.Context(), a)
	for name, err := range map[string]error{
		"Publish": publishErr, "SyncHostAddrs": k.Endpoints.SyncHostAddrs(nil), "UpsertIP": k.Addresses.Set(podCIDR4, ipmap.Info{Identity: 300}),
		"DropOldPrograms": k.DropOldPrograms(), "Barrier": k.Tables.Barrier(t.Context()),
	} {
		if !errors.Is(err, pin.ErrValidateOnly) {
			t.Errorf("%s: %v, want pin.ErrValidateOnly", name, err)
		}
	}

	o.ValidateOnly = false
	live := openKernel(t, o)
	e := publish(t, live, a)
	entries, err := os.ReadDir(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	o.ValidateOnly, o.TunnelPorts = true, []uint16{1}
	look := openKernel(t, o)
	if es, err := look.Endpoints.List(); err != nil || !reflect.DeepEqual(es, []endpointmap.Endpoint{e}) {
		t.Errorf("a validation sees %+v, %v, want %+v", es, err, e)
	}
	after, err := os.ReadDir(o.Dir)
	if err != nil || len(after) != len(entries) {
		t.Errorf("%d pins, %v, want %d", len(after), err, len(entries))
	}
}

// TestKernelOpenCompletesWhatAKilledProcessLeft: when a process is killed between two writes, the next Open
// completes them, or the endpoint is reported.
func TestKernelOpenCompletesWhatAKilledProcessLeft(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	first := openKernel(t, o)
	whole, half := publish(t, first, a), publish(t, first, b)

	// killed in Publish: the device has its key, an address does not
	must(t, "delete", first.Pins.Map(bpf.MapsMapSlIp6).Delete(b.IPv6.As16()))
	// killed during a deletion by an older build: an address belongs to an unused endpoint ID
	stray := netip.MustParseAddr("10.244.0.200")
	must(t, "insert", pin.InsertOnce(first.Pins.Map(bpf.MapsMapSlIp4), stray.As4(), uint32(900)))
	must(t, "insert", first.Addresses.Set(ipmap.HostPrefix(stray), ipmap.Info{Identity: 300}))
	// and a device that its endpoint does not have
	must(t, "insert", pin.InsertOnce(first.Pins.Map(bpf.MapsMapSlIf), uint32(4242), uint32(whole.Slot)))

	second := openKernel(t, o)
	es, err := second.Endpoints.List()
	half.Incomplete = true
	if err != nil || !reflect.DeepEqual(es, []endpointmap.Endpoint{whole, half}) {
		t.Errorf("endpoints %+v, %v, want %+v", es, err, []endpointmap.Endpoint{whole, half})
	}
	owners, err := addrOwners(second)
	want := map[netip.Addr]endpointmap.ID{a.IPv4: whole.Slot, a.IPv6: whole.Slot, b.IPv4: half.Slot}
	if err != nil || !reflect.DeepEqual(owners, want) {
		t.Errorf("addresses %v, %v, want %v", owners, err, want)
	}
	var s uint32
	if err := second.Pins.Map(bpf.MapsMapSlIf).Lookup(uint32(4242), &s); !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Errorf("the stray device belongs to endpoint %d, %v", s, err)
	}
	must(t, "unpublish the half endpoint", second.Endpoints.Unpublish(half.Slot))
	publish(t, second, b)
}

func TestKernelAuditPinsSeesAndRepairsWhatIsGone(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	k := openKernel(t, o)
	e := publish(t, k, a)
	if d, err := k.Pins.Audit(true); err != nil || d != nil {
		t.Fatalf("audit of an intact instance: %v, %v", d, err)
	}
	gone := k.Pins.Pin(bpf.MapsMapSlEp)
	moved := k.Pins.Pin(bpf.MapsMapSlIp4)
	must(t, "remove a pin", os.Remove(gone))
	must(t, "remove a pin", os.Remove(moved))
	must(t, "pin another map there", pinCopy(k.Pins.Map(bpf.MapsMapSlIp6), moved))

	for _, c := range []struct {
		repair bool
		want   []string
	}{{false, []string{gone, moved}}, {true, []string{gone, moved}}, {true, []string{moved}}} {
		d, err := k.Pins.Audit(c.repair)
		if err != nil || len(d) != len(c.want) {
			t.Fatalf("audit: %v, %v, want %v", d, err, c.want)
		}
		for i := range d {
			if !strings.Contains(d[i], c.want[i]) {
				t.Errorf("audit: %q does not name %s", d[i], c.want[i])
			}
		}
	}
	must(t, "remove the other map", os.Remove(moved))
	if _, err := k.Pins.Audit(true); err != nil {
		t.Fatal(err)
	}
	next := openKernel(t, o)
	if es, err := next.Endpoints.List(); err != nil || !reflect.DeepEqual(es, []endpointmap.Endpoint{e}) {
		t.Errorf("endpoints after the repair %+v, %v, want %+v", es, err, e)
	}
}

func TestKernelNothingRemainsWhenThePinsAreGone(t *testing.T) {
	kerneltest.RequireRoot(t)
	var ids []ebpf.MapID
	var prog ebpf.ProgramID
	t.Run("an instance", func(t *testing.T) {
		k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
		publish(t, k, a)
		infos, err := k.Pins.Infos()
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range infos {
			ids = append(ids, ebpf.MapID(i.ID))
		}
		prog = k.find(program.FromPod).ID
	})
	for _, id := range ids {
		servicetest.Eventually(t, "a map to go", func() bool {
			m, err := ebpf.NewMapFromID(id)
			if err == nil {
				m.Close()
			}
			return errors.Is(err, os.ErrNotExist)
		})
	}
	servicetest.Eventually(t, "the program to go", func() bool {
		p, err := ebpf.NewProgramFromID(prog)
		if err == nil {
			p.Close()
		}
		return errors.Is(err, os.ErrNotExist)
	})
}

// TestKernelReadersNeverMissAnEndpoint is the proof of INV-30: during a million changes, a program that looks
// up an endpoint always finds it, with a policy word that was stored as a whole.
//
// The reader is sluice_from_pod itself: its packets go from endpoint a to endpoint b, whose policy words both
// alternate between two values, while other endpoints, addresses, devices and prefixes are added and removed.
func TestKernelReadersNeverMissAnEndpoint(t *testing.T) {
	const flips = 1_000_000
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	// with these addresses a delivered frame is again a frame from a to b, except for its hop limit, so one
	// system call can run it many times
	mirror := b
	mirror.MAC, mirror.HostMAC = a.HostMAC, a.MAC
	src, dst := publish(t, k, a), publish(t, k, mirror)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var others atomic.Uint64
	done := make(chan error, 2)
	// republish the same addresses and devices with ever new endpoint IDs
	go func() {
		var err error
		for n := 0; ctx.Err() == nil && err == nil; n++ {
			e := testEndpoint(5000+uint32(n%50), byte(100+n%50))
			var s endpointmap.ID
			if s, err = k.Endpoints.Publish(ctx, e); err == nil {
				if _, err = k.Endpoints.SetIdentity(ctx, s, 5000, nodetable.Allow, nodetable.Allow); err == nil {
					err = k.Endpoints.Unpublish(s)
				}
			}
			others.Add(1)
		}
		if errors.Is(err, context.Canceled) {
			err = nil
		}
		done <- err
	}()
	// the policy words, the receiver's ipcache entry and the host's addresses
	flipped := make(chan struct{})
	go func() {
		defer close(flipped)
		var err error
		for n := 0; n < flips/2 && err == nil; n++ {
			// the egress table of dst and the ingress table of src deny in turn, so that a reader
			// that mixes up entries or halves is denied, too
			other := nodetable.ID(n & 1)
			if _, err = k.Endpoints.SetPolicy(src.Slot, nodetable.Allow, other); err == nil {
				_, err = k.Endpoints.SetPolicy(dst.Slot, other, nodetable.Allow)
			}
			if err == nil && n%100 == 0 {
				err = errors.Join(
					k.Endpoints.SyncHostAddrs([]netip.Addr{host4, netip.AddrFrom4([4]byte{192, 0, 2, byte(n / 100)})}),
					k.Addresses.Set(ipmap.HostPrefix(b.IPv4), ipmap.Info{Identity: identity.Numeric(256 + n%1000)}))
			}
		}
		done <- err
	}()

	in := [][]byte{from4(b.IPv4, 17, udp(1, 2)), from6(b.IPv6, 17, udp(1, 2))}
	in[0][14+8], in[1][14+7] = 255, 255
	const repeat = 250
	var packets uint64
	for i, running := 0, true; running; i++ {
		select {
		case <-flipped:
			running = false
		default:
			if _, err := k.program(program.FromPod).Run(&ebpf.RunOptions{Data: in[i%2], Repeat: repeat}); err != nil {
				t.Fatalf("run: %v", err)
			}
			packets += repeat
		}
	}
	cancel()
	for range 2 {
		if err := <-done; err != nil {
			t.Errorf("writer: %v", err)
		}
	}
	cs, err := k.Events.Metrics()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d flips, %d endpoints published and unpublished, %d packets", flips, others.Load(), packets)
	for _, c := range cs {
		// an interrupted run repeats more often than requested
		if c.Reason != event.ForwardedToPod || c.Packets < packets {
			t.Errorf("%d packets counted as %v %v, want all %d as %v", c.Packets, c.Reason, c.Direction, packets, event.ForwardedToPod)
		}
	}
	if others.Load() == 0 || packets == 0 {
		t.Error("no packet ran during the changes")
	}
}

// TestMapsAreWrittenInFewPlacesOnly: the rules for writing maps could be broken in one line, so writes are only allowed
// in few places. Hash maps are written through InsertOnce and DeleteKey of package pin, tries through ReplaceInTrie,
// arrays through mapped memory and writeArray of package policymap. One batch writes a hash map, InsertAbsent of
// package pin: its only caller, servicemap, knows that the keys are absent, because the kernel's batches overwrite. The
// collector removes entries that the programs insert, and counts them in a per-CPU array. The replicas fill maps of
// their own, which no attached program uses, and so does GracePeriod where membarrier is rejected.
func TestMapsAreWrittenInFewPlacesOnly(t *testing.T) {
	allowed := map[string]map[string]int{
		"kernel/pin/grace.go":           {".Put(": 1},
		"kernel/pin/write.go":           {"ebpf.UpdateAny": 1, "ebpf.UpdateNoExist": 1, ".Delete(": 1, "BatchUpdate(": 1},
		"policy/policymap/write.go":     {"BatchUpdate(": 1},
		"kernel/conntrack/conntrack.go": {".Put(": 1},
		"kernel/conntrack/batch.go":     {".Put(": 1},    // a pool of memory
		"kernel/conntrack/flush.go":     {".Delete(": 1}, // of the previous version; it is only emptied
		"kernel/conntrack/remover.go":   {"FnMapDeleteElem": 1},
		"observation/dryrun/dryrun.go":  {".Put(": 2, ".Delete(": 1},
		"endpoint/endpointmap/own.go":   {".Put(": 1}, // at an unreferenced index
		// a counter; a program that misses the entry creates it again
		"service/translation/ports.go": {"UpdateExist": 1},
	}
	var files []string
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		name, _ := filepath.Rel("..", path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && name == "bpf": // generated
			return fs.SkipDir
		case strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") && hasMaps(t, filepath.Dir(path)):
			files = append(files, name)
		}
		return nil
	})
	must(t, "list files", err)
	seen := map[string]bool{}
	for _, f := range files {
		seen[f] = true
		src, err := os.ReadFile(filepath.Join("..", f))
		if err != nil {
			t.Fatal(err)
		}
		code := strings.ReplaceAll(string(src), "slices.Delete(", "")
		for _, call := range []string{
			"ebpf.UpdateAny", "ebpf.UpdateNoExist", "UpdateExist", "UpdateLock",
			".Put(", ".Delete(", "BatchUpdate(", "BatchDelete(", "FnMapUpdateElem", "FnMapDeleteElem",
		} {
			if n, want := strings.Count(code, call), allowed[f][call]; n != want {
				t.Errorf("%s uses %s %d times, want %d", f, call, n, want)
			}
		}
	}
	for f := range allowed {
		if !seen[f] {
			t.Errorf("%s is allowed to write, and is not there", f)
		}
	}
}

// hasMaps reports whether a package uses maps: only such packages may.
func hasMaps(t *testing.T, dir string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	must(t, "list files", err)
	return slices.ContainsFunc(files, func(f string) bool {
		if strings.HasSuffix(f, "_test.go") {
			return false
		}
		src, err := os.ReadFile(f)
		must(t, "read "+f, err)
		return strings.Contains(string(src), `"github.com/cilium/ebpf`) || strings.Contains(string(src), "/internal/kernel/pin\"")
	})
}

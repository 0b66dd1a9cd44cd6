// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// legacySpecs returns the maps of the version of LegacyPins: this build's maps, with the former layouts of
// those that have changed.
func legacySpecs(t testing.TB) map[string]*ebpf.MapSpec {
	t.Helper()
	spec, err := bpf.LoadMaps()
	must(t, "read the compiled maps", err)
	specs := map[string]*ebpf.MapSpec{}
	for name, ms := range spec.Maps {
		if strings.HasPrefix(name, "sl_") && name != bpf.MapsMapSlRun {
			specs[name] = ms.Copy()
		}
	}
	// these specs have no BTF, so the BTF of the maps cannot differ
	for name, was := range map[string]*ebpf.MapSpec{
		bpf.MapsMapSlCt4:  {Type: ebpf.LRUHash, KeySize: 16, ValueSize: 48, MaxEntries: 131072},
		bpf.MapsMapSlCt6:  {Type: ebpf.LRUHash, KeySize: 40, ValueSize: 48, MaxEntries: 65536},
		bpf.MapsMapSlIpc4: {Type: ebpf.LPMTrie, KeySize: 8, ValueSize: 8, MaxEntries: 65536, Flags: 1},
		bpf.MapsMapSlIpc6: {Type: ebpf.LPMTrie, KeySize: 20, ValueSize: 8, MaxEntries: 65536, Flags: 1},
	} {
		was.Name = name
		specs[name] = was
	}
	return specs
}

// legacyName returns the former file name of the map's pin.
func legacyName(ms *ebpf.MapSpec) string {
	if l, ok := pin.LegacyPins[ms.Name]; ok {
		return l.Pin
	}
	return pin.Name(ms)
}

// makeLegacy pins the maps of the earlier version below dir, and returns them.
func makeLegacy(t testing.TB, dir string) map[string]*ebpf.Map {
	t.Helper()
	must(t, "make the pin directory", os.MkdirAll(dir, 0o700))
	maps := map[string]*ebpf.Map{}
	for name, ms := range legacySpecs(t) {
		m, err := newPinned(filepath.Join(dir, legacyName(ms)), ms)
		must(t, "create "+name, err)
		t.Cleanup(func() { m.Close() })
		maps[name] = m
	}
	return maps
}

// renamePins gives the pins below dir their names of the earlier version.
func renamePins(t testing.TB, dir string) {
	t.Helper()
	for _, ms := range legacySpecs(t) {
		if l, ok := pin.LegacyPins[ms.Name]; ok && l.Layout == pin.Layout(ms) {
			must(t, "rename a pin", os.Rename(filepath.Join(dir, pin.Name(ms)), filepath.Join(dir, l.Pin)))
		}
	}
}

func TestKernelEndpointsOfTheEarlierVersionAreAdopted(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	k, err := Open(t.Context(), testOptions(dir))
	must(t, "Open", err)
	want := publish(t, k, a)
	owners, err := addrOwners(k)
	must(t, "list addresses", err)
	id := mapID(t, k.Pins.Map(bpf.MapsMapSlEp))
	must(t, "Close", k.Close())
	renamePins(t, dir)

	k = openKernel(t, testOptions(dir))
	got, err := k.Endpoints.Lookup(want.Slot)
	if err != nil || got != want {
		t.Errorf("endpoint %+v, %v, want %+v", got, err, want)
	}
	if now, err := addrOwners(k); err != nil || !reflect.DeepEqual(now, owners) {
		t.Errorf("addresses %v, %v, want %v", now, err, owners)
	}
	if mapID(t, k.Pins.Map(bpf.MapsMapSlEp)) != id {
		t.Error("sl_ep is not the same map")
	}
	// both pins refer to the same map: the next start needs the new pin, a rollback the old one
	for _, name := range []string{pin.LegacyPins["sl_ep"].Pin, filepath.Base(k.Pins.Pin("sl_ep"))} {
		if same, err := pin.LeadsTo(filepath.Join(dir, name), k.Pins.Map(bpf.MapsMapSlEp)); err != nil || !same {
			t.Errorf("pin %s: leads to the map: %v, %v", name, same, err)
		}
	}
}

func TestKernelAdoptsNoOtherMapUnderAnOldName(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	must(t, "make the pin directory", os.MkdirAll(dir, 0o700))
	other := legacySpecs(t)["sl_ep"]
	other.MaxEntries /= 2
	m, err := newPinned(filepath.Join(dir, pin.LegacyPins["sl_ep"].Pin), other)
	must(t, "create another map", err)
	defer m.Close()
	if k, err := Open(t.Context(), testOptions(dir)); err == nil {
		k.Close()
		t.Error("a map of another size was adopted")
	}
}

func TestKernelValidationPinsNothingBesideAnOldName(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	makeLegacy(t, dir)
	o := testOptions(dir)
	o.ValidateOnly = true
	k := openKernel(t, o)
	if _, err := os.Stat(k.Pins.Pin("sl_ep")); !os.IsNotExist(err) {
		t.Errorf("pin of sl_ep: %v, want %v", err, fs.ErrNotExist)
	}
}

func TestKernelIPCacheOfTheEarlierVersionIsCarriedOver(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	old := makeLegacy(t, dir)
	remote := bpf.MapsSlIpcache{Identity: 777, Node: 3}
	for i := range 300 {
		must(t, "write a prefix", old[bpf.MapsMapSlIpc4].Put(&bpf.MapsSlPrefix4{Bits: 32, Addr: [4]byte{10, 9, byte(i >> 8), byte(i)}}, &remote))
		must(t, "write a prefix", old[bpf.MapsMapSlIpc6].Put(&bpf.MapsSlPrefix6{Bits: 128, Addr: [16]byte{0xfd, 9, 14: byte(i >> 8), 15: byte(i)}}, &remote))
	}
	must(t, "write a range", old[bpf.MapsMapSlIpc4].Put(&bpf.MapsSlPrefix4{Bits: 16, Addr: [4]byte{10, 9}}, &remote))
	o := testOptions(dir)
	o.ValidateOnly = true
	for range 3 { // a validation, the upgrade, a restart
		k, err := Open(t.Context(), o)
		must(t, "Open", err)
		entries, err := k.Addresses.List()
		must(t, "IPCache", err)
		must(t, "Close", k.Close())
		n := 0
		for _, e := range entries {
			if e.Info == (ipmap.Info{Identity: 777, Node: 3}) {
				n++
			}
		}
		if n != 601 {
			t.Errorf("%d prefixes of the earlier version, want 601", n)
		}
		o.ValidateOnly = false
	}
}

func mapID(t testing.TB, m *ebpf.Map) ebpf.MapID {
	t.Helper()
	info, err := m.Info()
	must(t, "look at a map", err)
	id, ok := info.ID()
	if !ok {
		t.Fatal("the kernel gives no map id")
	}
	return id
}

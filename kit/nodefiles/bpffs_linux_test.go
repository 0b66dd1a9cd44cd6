// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodefiles

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/instance"
)

// datapath returns the service that pins maps and programs.
func datapath(t *testing.T) Service {
	t.Helper()
	for _, s := range Services() {
		if s.BPF {
			return s
		}
	}
	t.Fatal("no service has a bpffs")
	return Service{}
}

// withBPFFS mounts a bpffs in the machine's place and creates the instance's directory in it, as
// earlier versions did.
func withBPFFS(t *testing.T) (instance.Paths, string) {
	t.Helper()
	p := paths(t)
	former := FormerBPFDir(p)
	machine := filepath.Dir(former)
	if err := os.MkdirAll(machine, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := mountBPF(machine, false); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(machine, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if err := os.Mkdir(former, 0o700); err != nil {
		t.Fatal(err)
	}
	return p, former
}

// pinMap creates a map that is only kept by its pin.
func pinMap(t *testing.T, path string) objectInfo {
	t.Helper()
	attr := struct{ kind, key, value, entries, flags uint32 }{2 /* array */, 4, 8, 1, 0}
	fd, err := bpf(0 /* map create */, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	pin := pinAttr{path: cstring(path), fd: uint32(fd)}
	if _, err := bpf(bpfObjPin, unsafe.Pointer(&pin), unsafe.Sizeof(pin)); err != nil {
		t.Fatal(err)
	}
	runtime.KeepAlive(pin.path)
	return pinned(t, path)
}

// pinned returns the object at a pin.
func pinned(t *testing.T, path string) objectInfo {
	t.Helper()
	fd, err := openPin(path)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	var info objectInfo
	attr := infoAttr{fd: uint32(fd), length: 8, info: &info}
	if _, err := bpf(bpfObjGetInfoByFD, unsafe.Pointer(&attr), unsafe.Sizeof(attr)); err != nil {
		t.Fatal(err)
	}
	runtime.KeepAlive(attr.info)
	return info
}

func TestKernelPinsMoveIntoTheInstancesOwnBPFFS(t *testing.T) {
	p, former := withBPFFS(t)
	if err := os.Mkdir(filepath.Join(former, "programs"), 0o700); err != nil {
		t.Fatal(err)
	}
	names := []string{"sl_ep", "sl_ct4", "programs/sl_x"}
	want := map[string]objectInfo{}
	for _, name := range names {
		want[name] = pinMap(t, filepath.Join(former, name))
	}
	changes, err := Prepare(p, Services()...)
	if err != nil {
		t.Fatal(err)
	}
	if all := strings.Join(changes, "\n"); !strings.Contains(all, "moved 3 pins from "+former) {
		t.Errorf("changes: %s", all)
	}
	if is, err := onBPFFS(p.BPFDir); err != nil || !is {
		t.Errorf("%s is a bpffs: %v, %v", p.BPFDir, is, err)
	}
	s := datapath(t)
	for _, name := range append(names, "", "programs") {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(p.BPFDir, name), &st); err != nil || st.Uid != s.UID || st.Gid != s.GID || st.Mode&0o077 != 0 {
			t.Errorf("%q belongs to %d:%d with mode %#o, %v; want %d:%d and no access for others", name, st.Uid, st.Gid,
				st.Mode&0o777, err, s.UID, s.GID)
		}
	}
	for _, name := range names {
		if got := pinned(t, filepath.Join(p.BPFDir, name)); got != want[name] {
			t.Errorf("%s is %+v, was %+v", name, got, want[name])
		}
	}
	if _, err := os.Lstat(former); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the former directory: %v, want it removed", err)
	}
	if changes, err := Prepare(p, Services()...); err != nil || len(changes) > 0 {
		t.Errorf("once more: %q, %v; want no change", changes, err)
	}
}

// TestKernelInterruptedMoveOfPinsIsFinished begins with some objects that have both pins.
func TestKernelInterruptedMoveOfPinsIsFinished(t *testing.T) {
	p, former := withBPFFS(t)
	a, b := pinMap(t, filepath.Join(former, "a")), pinMap(t, filepath.Join(former, "b"))
	if err := os.MkdirAll(p.RunDir, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := mountBPF(p.BPFDir, false); err != nil {
		t.Fatal(err)
	}
	if err := CopyPin(filepath.Join(former, "a"), filepath.Join(p.BPFDir, "a")); err != nil {
		t.Fatal(err)
	}
	if _, err := Prepare(p, Services()...); err != nil {
		t.Fatal(err)
	}
	if got := pinned(t, filepath.Join(p.BPFDir, "a")); got != a {
		t.Errorf("a is %+v, was %+v", got, a)
	}
	if got := pinned(t, filepath.Join(p.BPFDir, "b")); got != b {
		t.Errorf("b is %+v, was %+v", got, b)
	}
	if _, err := os.Lstat(former); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the former directory: %v, want it removed", err)
	}
}

// TestKernelPinOfAnotherObjectStopsTheMove: it is unknown which of the two objects the programs
// use, so no pin is removed.
func TestKernelPinOfAnotherObjectStopsTheMove(t *testing.T) {
	p, former := withBPFFS(t)
	pinMap(t, filepath.Join(former, "a"))
	pinMap(t, filepath.Join(former, "b"))
	if err := os.MkdirAll(p.RunDir, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := mountBPF(p.BPFDir, false); err != nil {
		t.Fatal(err)
	}
	other := pinMap(t, filepath.Join(p.BPFDir, "b"))
	if _, err := Prepare(p, Services()...); err == nil || !strings.Contains(err.Error(), "are different objects") {
		t.Errorf("got %v, want an error about the two objects", err)
	}
	for _, name := range []string{"a", "b"} {
		if _, err := os.Lstat(filepath.Join(former, name)); err != nil {
			t.Errorf("the former pin %s: %v", name, err)
		}
	}
	if got := pinned(t, filepath.Join(p.BPFDir, "b")); got != other {
		t.Errorf("the new pin b is %+v, was %+v", got, other)
	}
}

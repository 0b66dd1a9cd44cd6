// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/kit/store/storetest"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/test/ipamtest"
)

func TestMain(m *testing.M) {
	disktest.InMemory()
	leaktest.Main(m)
}

func TestStorePassesTheSuite(t *testing.T) {
	dirs := map[ipam.Store]string{}
	ipamtest.Suite(t, func(t *testing.T, old ipam.Store) ipam.Store {
		dir := filepath.Join(t.TempDir(), "ipam")
		if old != nil {
			// As a kill would leave it: a copy taken while it is open.
			source := dirs[old]
			dir = filepath.Join(t.TempDir(), "ipam")
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			data, err := os.ReadFile(filepath.Join(source, FileName))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, FileName), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		s, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() }) //nolint:errcheck // the test is over
		dirs[s] = dir
		return s
	})
}

// filled returns the path of a state file with n owners.
func filled(t testing.TB, n int) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "ipam")
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Load(); err != nil {
		t.Fatal(err)
	}
	fill(t, s, n)
	return s.Path()
}

func fill(t testing.TB, s *Store, n int) {
	t.Helper()
	a4, a6 := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")
	c := &ipam.Changes{Allocations: map[workload.Owner]*ipam.Allocation{}, Quarantined: map[netip.Addr]time.Time{}, Cursors: map[netip.Prefix]netip.Addr{}}
	for i := range n {
		o := workload.Owner{ContainerID: fmt.Sprintf("%064x", i*7919), Interface: "eth0"}
		c.Allocations[o] = &ipam.Allocation{Owner: o, State: ipam.Confirmed, Addresses: []ipam.Address{{Addr: a4, PoolBits: 16}, {Addr: a6, PoolBits: 64}}}
		a4, a6 = a4.Next(), a6.Next()
	}
	for range n / 4 {
		c.Quarantined[a4] = time.Unix(1_800_000_000, 0)
		a4 = a4.Next()
	}
	c.Cursors[netip.MustParsePrefix("10.0.0.0/16")] = a4
	if err := s.Commit(c); err != nil {
		t.Fatal(err)
	}
}

// load opens the file at path and loads it.
func load(path string) (*ipam.Contents, error) {
	s, err := Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer s.Close()
	return s.Load()
}

// TestDamageIsRefused proves INV-43.
func TestDamageIsRefused(t *testing.T) {
	storetest.Sweep(t, storetest.State{
		Dir: filepath.Dir(filled(t, 200)),
		Open: func(dir string) (string, error) {
			c, err := load(filepath.Join(dir, FileName))
			if err != nil {
				return "", err
			}
			return ipamtest.Describe(c), nil
		},
	})
}

func TestRecordsOfAnotherKindAreRefused(t *testing.T) {
	for name, put := range map[string]func(*store.Tx){
		"an allocation": func(tx *store.Tx) { tx.Put(bucketAllocations, []byte("x"), []byte("y")) },
		"a rest":        func(tx *store.Tx) { tx.Put(bucketReleased, []byte("x"), []byte("y")) },
		"a cursor":      func(tx *store.Tx) { tx.Put(bucketCursors, []byte("x"), []byte("y")) },
		"a range":       func(tx *store.Tx) { tx.Put(bucketServing, []byte{0}, []byte{recordVersion, 10, 0, 0, 1, 24}) },
	} {
		path := filled(t, 3)
		d, err := store.OpenDir(filepath.Dir(path), 0o700)
		if err != nil {
			t.Fatal(err)
		}
		f, err := d.Open(options)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(f.Update(func(tx *store.Tx) error { put(tx); return nil }), f.Close(), d.Close()); err != nil {
			t.Fatal(err)
		}
		_, err = load(path)
		if !errors.Is(err, store.ErrCorrupt) || !errors.Is(err, errRecord) || !strings.Contains(err.Error(), "mv "+path) {
			t.Errorf("%s: %v, want a refusal", name, err)
		}
	}
}

// TestAFileOfTheFirstVersionIsRead writes the layout of the first version, which had no ranges.
func TestAFileOfTheFirstVersionIsRead(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ipam")
	d, err := store.OpenDir(dir, 0o700)
	if err != nil {
		t.Fatal(err)
	}
	first := options
	first.Layout, first.Previous, first.Migrate = options.Previous[len(options.Previous)-1], nil, nil
	f, err := d.Open(first)
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParsePrefix("10.0.0.0/24")
	err = f.Update(func(tx *store.Tx) error {
		tx.Put(bucketCursors, cursorKey(at), encodeCursor(at.Addr().Next()))
		return nil
	})
	if err := errors.Join(err, f.Close(), d.Close()); err != nil {
		t.Fatal(err)
	}
	for range 2 { // migrated, and then of the present version
		c, err := load(filepath.Join(dir, FileName))
		if err != nil || ipamtest.Describe(c) != "10.0.0.0/24 at 10.0.0.1\n" {
			t.Fatalf("the file of version 1 reads as %v, %v", c, err)
		}
	}
}

func FuzzRecords(f *testing.F) {
	o := workload.Owner{ContainerID: "c", Interface: "eth0"}
	v4, v6 := ipam.Address{Addr: netip.MustParseAddr("10.0.0.2"), PoolBits: 24}, ipam.Address{Addr: netip.MustParseAddr("fd00::2"), PoolBits: 64}
	f.Add(ownerKey(o), encodeAllocation(&ipam.Allocation{Owner: o, State: ipam.Leased, Expires: time.Unix(1, 1), Addresses: []ipam.Address{v4, v6}}))
	f.Add(ownerKey(o), encodeAllocation(&ipam.Allocation{Owner: o, State: ipam.Confirmed, Addresses: []ipam.Address{v6}}))
	f.Add(v4.Addr.AsSlice(), encodeQuarantined(time.Unix(5, 0)))
	f.Add(cursorKey(netip.MustParsePrefix("fd00::/64")), encodeCursor(v6.Addr))
	f.Add([]byte{0}, []byte{recordVersion})
	f.Add([]byte{0}, encodeServing(netip.MustParsePrefix("10.0.0.0/24")))
	f.Fuzz(func(t *testing.T, key, value []byte) {
		if a, err := decodeAllocation(key, value); err == nil {
			if !bytes.Equal(ownerKey(a.Owner), key) || !bytes.Equal(encodeAllocation(a), value) {
				t.Errorf("allocation %x = %x reads as %+v, which is written differently", key, value, a)
			}
		}
		if r, err := decodeQuarantined(key, value); err == nil {
			if !bytes.Equal(r.Addr.AsSlice(), key) || !bytes.Equal(encodeQuarantined(r.Until), value) {
				t.Errorf("rest %x = %x reads as %+v", key, value, r)
			}
		}
		if p, err := decodeServing(key, value); err == nil && !bytes.Equal(encodeServing(p), value) {
			t.Errorf("serving range %x reads as %s", value, p)
		}
		if p, at, err := decodeCursor(key, value); err == nil {
			if !bytes.Equal(cursorKey(p), key) || !bytes.Equal(encodeCursor(at), value) {
				t.Errorf("cursor %x = %x reads as %s at %s", key, value, p, at)
			}
		}
	})
}

// TestRefusedRangesAreReadAsTheyWereWritten: refused ranges are read as they were written, with reason and whether the
// node keeps the range.
func TestRefusedRangesAreReadAsTheyWereWritten(t *testing.T) {
	path := filled(t, 1)
	want := []ipam.Refusal{
		{Prefix: netip.MustParsePrefix("10.1.0.0/24"), Reason: "node b has it"},
		{Prefix: netip.MustParsePrefix("fd01::/64"), Reason: "other settings", Kept: true},
		{Prefix: netip.MustParsePrefix("10.2.0.0/24"), Kept: true},
	}
	s, err := Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Load(); err != nil {
		t.Fatal(err)
	}
	if err := s.Commit(&ipam.Changes{Refused: want}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := load(path); err != nil || !slices.Equal(got.Refused, want) {
		t.Errorf("read are %+v, %v, want %+v", got.Refused, err, want)
	}
}

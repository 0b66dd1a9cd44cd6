// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam/ipamtest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

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
	c := &ipam.Changes{Allocations: map[ipam.Owner]*ipam.Allocation{}, Resting: map[netip.Addr]time.Time{}, Cursors: map[netip.Prefix]netip.Addr{}}
	for i := range n {
		o := ipam.Owner{ContainerID: fmt.Sprintf("%064x", i*7919), Interface: "eth0"}
		c.Allocations[o] = &ipam.Allocation{Owner: o, State: ipam.Confirmed, Addresses: []ipam.Address{{Addr: a4, PoolBits: 16}, {Addr: a6, PoolBits: 64}}}
		a4, a6 = a4.Next(), a6.Next()
	}
	for range n / 4 {
		c.Resting[a4] = time.Unix(1_800_000_000, 0)
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

func write(t testing.TB, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func read(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// refused checks that a file is refused for the reason, in words that help,
// and that it is byte for byte what it was.
func refused(t *testing.T, path string, want error) {
	t.Helper()
	before := read(t, path)
	_, err := load(path)
	if !errors.Is(err, want) {
		t.Fatalf("got %v, want %v", err, want)
	}
	for _, part := range []string{path, "left as it is", "mv " + path, "docs/ipam.md"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not say %q", err, part)
		}
	}
	if !bytes.Equal(before, read(t, path)) {
		t.Error("the refused file was changed")
	}
}

func edit(t *testing.T, path string, f func(*bolt.Tx) error) {
	t.Helper()
	db, err := openBolt(path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for range 2 { // both meta pages
		if err := db.Update(f); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDamagedAndForeignFilesAreRefused proves INV-43.
func TestDamagedAndForeignFilesAreRefused(t *testing.T) {
	put := func(bucket, key, value []byte) func(*bolt.Tx) error {
		return func(tx *bolt.Tx) error { return tx.Bucket(bucket).Put(key, value) }
	}
	for _, c := range []struct {
		name string
		make func(t *testing.T, path string)
		want error
	}{
		{"empty", func(t *testing.T, path string) { write(t, path, nil) }, ErrCorrupt},
		{"text", func(t *testing.T, path string) { write(t, path, []byte("hello\n")) }, ErrCorrupt},
		{"zeros", func(t *testing.T, path string) { write(t, path, make([]byte, 1<<16)) }, ErrCorrupt},
		{"random", func(t *testing.T, path string) {
			b := make([]byte, 1<<16)
			r := rand.New(rand.NewPCG(1, 2))
			for i := range b {
				b[i] = byte(r.Uint32())
			}
			write(t, path, b)
		}, ErrCorrupt},
		{"one page only", func(t *testing.T, path string) { write(t, path, read(t, path)[:4096]) }, ErrCorrupt},
		{"other byte order", func(t *testing.T, path string) {
			b := read(t, path)
			for i := range 2 {
				binary.BigEndian.PutUint32(b[i*4096+16:], binary.LittleEndian.Uint32(b[i*4096+16:]))
			}
			write(t, path, b)
		}, ErrCorrupt},
		{"another bbolt database", func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			db, err := bolt.Open(path, 0o600, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			if err := db.Update(func(tx *bolt.Tx) error { _, err := tx.CreateBucket([]byte("meta")); return err }); err != nil {
				t.Fatal(err)
			}
		}, ErrForeign},
		{"another database of our kind", func(t *testing.T, path string) {
			edit(t, path, put(bucketMeta, keyFormat, []byte("sluice-other")))
		}, ErrForeign},
		{"without a meta bucket", func(t *testing.T, path string) {
			edit(t, path, func(tx *bolt.Tx) error {
				if tx.Bucket(bucketMeta) == nil {
					return nil
				}
				return tx.DeleteBucket(bucketMeta)
			})
		}, ErrForeign},
		{"later schema", func(t *testing.T, path string) {
			edit(t, path, put(bucketMeta, keySchema, binary.BigEndian.AppendUint32(nil, Schema+1)))
		}, ErrSchema},
		{"earlier schema", func(t *testing.T, path string) {
			edit(t, path, put(bucketMeta, keySchema, binary.BigEndian.AppendUint32(nil, 0)))
		}, ErrSchema},
		{"no schema", func(t *testing.T, path string) {
			edit(t, path, func(tx *bolt.Tx) error { return tx.Bucket(bucketMeta).Delete(keySchema) })
		}, ErrCorrupt},
		{"no sum", func(t *testing.T, path string) {
			edit(t, path, func(tx *bolt.Tx) error { return tx.Bucket(bucketMeta).Delete(keyDigest) })
		}, ErrCorrupt},
		{"no bucket of rests", func(t *testing.T, path string) {
			edit(t, path, func(tx *bolt.Tx) error {
				if tx.Bucket(bucketResting) == nil {
					return nil
				}
				return tx.DeleteBucket(bucketResting)
			})
		}, ErrCorrupt},
		{"a record lost", func(t *testing.T, path string) {
			edit(t, path, func(tx *bolt.Tx) error {
				k, _ := tx.Bucket(bucketAllocations).Cursor().First()
				return tx.Bucket(bucketAllocations).Delete(k)
			})
		}, ErrCorrupt},
		{"a record added", func(t *testing.T, path string) {
			o := ipam.Owner{ContainerID: "new", Interface: "eth0"}
			edit(t, path, put(bucketAllocations, ownerKey(o), encodeAllocation(&ipam.Allocation{
				Owner: o, State: ipam.Confirmed, Addresses: []ipam.Address{{Addr: netip.MustParseAddr("10.0.9.9"), PoolBits: 16}},
			})))
		}, ErrCorrupt},
		{"a record changed", func(t *testing.T, path string) {
			edit(t, path, func(tx *bolt.Tx) error {
				b := tx.Bucket(bucketAllocations)
				k, v := b.Cursor().First()
				v = bytes.Clone(v)
				v[len(v)-1] = 0xee // no address ends so
				return b.Put(k, v)
			})
		}, ErrCorrupt},
		{"a record that is none", func(t *testing.T, path string) {
			edit(t, path, put(bucketAllocations, []byte("x"), []byte("y")))
		}, ErrCorrupt},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filled(t, 200)
			c.make(t, path)
			refused(t, path, c.want)
		})
	}
}

func TestDirectoryInPlaceOfTheFileIsRefused(t *testing.T) {
	path := filled(t, 1)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := load(path); !errors.Is(err, ErrForeign) {
		t.Fatalf("got %v", err)
	}
}

// TestNoDamageGoesUnnoticed flips bits and cuts at many places of a file that
// has branch pages, inline buckets and free pages. What is opened all the same
// must hold exactly what was committed: damage to a free page, to slack, or to
// one of two meta pages, which a torn write would be, costs nothing.
func TestNoDamageGoesUnnoticed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ipam")
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Load(); err != nil {
		t.Fatal(err)
	}
	fill(t, s, 400)
	contents := func() string {
		c, err := s.Load()
		if err != nil {
			t.Fatal(err)
		}
		return ipamtest.Describe(c)
	}
	o := ipam.Owner{ContainerID: "last", Interface: "eth0"}
	older := contents()
	if err := s.Commit(&ipam.Changes{Allocations: map[ipam.Owner]*ipam.Allocation{o: {
		Owner: o, State: ipam.Leased, Expires: time.Unix(1_800_000_000, 0), Addresses: []ipam.Address{{Addr: netip.MustParseAddr("10.0.200.1"), PoolBits: 16}},
	}}}); err != nil {
		t.Fatal(err)
	}
	newest := contents()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	path := s.Path()
	good := read(t, path)
	check := func(what string, data []byte, mayBeOlder bool) (noticed bool) {
		t.Helper()
		write(t, path, data)
		c, err := load(path)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrForeign) && !errors.Is(err, ErrSchema) {
				t.Errorf("%s: %v is not a refusal", what, err)
			}
			return true
		}
		if got := ipamtest.Describe(c); got != newest && !(mayBeOlder && got == older) {
			t.Fatalf("%s: opened with other contents than were committed", what)
		}
		return false
	}
	r := rand.New(rand.NewPCG(5, 6))
	noticed := 0
	for range 300 {
		at, bit := r.IntN(len(good)), r.IntN(8)
		bad := bytes.Clone(good)
		bad[at] ^= 1 << bit
		// The header of the newest commit may be the damaged one: then the
		// file is what it was before, as after a power failure.
		if check(fmt.Sprintf("bit %d of byte %d", bit, at), bad, at < 2*4096) {
			noticed++
		}
	}
	// The heads of all pages and elements are where bbolt would break.
	for page := range len(good) / 4096 {
		for at := page % 5; at < 96; at += 5 {
			bad := bytes.Clone(good)
			bad[page*4096+at] ^= byte(1 + r.IntN(255))
			if check(fmt.Sprintf("byte %d of page %d", at, page), bad, page < 2) {
				noticed++
			}
		}
	}
	for range 40 {
		n := r.IntN(len(good))
		check(fmt.Sprintf("cut to %d bytes", n), good[:n], false)
	}
	if noticed == 0 {
		t.Error("no damage was noticed at all")
	}
	if check("undamaged", good, false) {
		t.Error("the undamaged file is refused")
	}
}

func TestTornHeaderFallsBackToTheCommitBefore(t *testing.T) {
	path := filled(t, 10)
	good := read(t, path)
	opened := 0
	for page := range 2 {
		bad := bytes.Clone(good)
		for i := range 64 {
			bad[page*4096+16+i] = 0xff
		}
		write(t, path, bad)
		if _, err := load(path); err == nil {
			opened++
		}
	}
	if opened != 2 {
		t.Errorf("%d of 2 files with one whole header were opened", opened)
	}
}

func TestSecondProcessIsRefused(t *testing.T) {
	path := filled(t, 1)
	s, err := Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := durable.Lock(filepath.Join(filepath.Dir(path), lockName), 0); !errors.Is(err, ErrLocked) {
		t.Fatalf("got %v", err)
	}
}

func TestMissingDirectoriesAreMade(t *testing.T) {
	parent := filepath.Join(t.TempDir(), "a", "b")
	s, err := Open(filepath.Join(parent, "ipam"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if fi, err := os.Stat(filepath.Dir(s.Path())); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("the state directory: %v, %v; want mode 0700", fi.Mode(), err)
	}
	file := filepath.Join(parent, "file")
	write(t, file, nil)
	if _, err := Open(filepath.Join(file, "ipam")); err == nil {
		t.Error("a state directory below a file was accepted")
	}
}

func TestOpenDirectoryIsRefused(t *testing.T) {
	path := filled(t, 1)
	dir := filepath.Dir(path)
	if err := os.Chmod(dir, 0o750); err != nil { //nolint:gosec // that is the test
		t.Fatal(err)
	}
	if _, err := Open(dir); !errors.Is(err, ErrPermission) || !strings.Contains(err.Error(), "chmod 0700 "+dir) {
		t.Fatalf("got %v", err)
	}
}

func TestInterruptedCreationIsBegunAnew(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ipam")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, FileName+".new"), []byte("half"))
	c, err := load(filepath.Join(dir, FileName))
	if err != nil || ipamtest.Describe(c) != "" {
		t.Fatalf("got %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, FileName+".new")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the half file is left: %v", err)
	}
}

func FuzzRecords(f *testing.F) {
	o := ipam.Owner{ContainerID: "c", Interface: "eth0"}
	v4, v6 := ipam.Address{Addr: netip.MustParseAddr("10.0.0.2"), PoolBits: 24}, ipam.Address{Addr: netip.MustParseAddr("fd00::2"), PoolBits: 64}
	f.Add(ownerKey(o), encodeAllocation(&ipam.Allocation{Owner: o, State: ipam.Leased, Expires: time.Unix(1, 1), Addresses: []ipam.Address{v4, v6}}))
	f.Add(ownerKey(o), encodeAllocation(&ipam.Allocation{Owner: o, State: ipam.Confirmed, Addresses: []ipam.Address{v6}}))
	f.Add(v4.Addr.AsSlice(), encodeRest(time.Unix(5, 0)))
	f.Add(cursorKey(netip.MustParsePrefix("fd00::/64")), encodeCursor(v6.Addr))
	f.Add([]byte{0}, []byte{recordVersion})
	f.Fuzz(func(t *testing.T, key, value []byte) {
		if a, err := decodeAllocation(key, value); err == nil {
			if !bytes.Equal(ownerKey(a.Owner), key) || !bytes.Equal(encodeAllocation(a), value) {
				t.Errorf("allocation %x = %x reads as %+v, which is written differently", key, value, a)
			}
		}
		if r, err := decodeRest(key, value); err == nil {
			if !bytes.Equal(r.Addr.AsSlice(), key) || !bytes.Equal(encodeRest(r.Until), value) {
				t.Errorf("rest %x = %x reads as %+v", key, value, r)
			}
		}
		if p, at, err := decodeCursor(key, value); err == nil {
			if !bytes.Equal(cursorKey(p), key) || !bytes.Equal(encodeCursor(at), value) {
				t.Errorf("cursor %x = %x reads as %s at %s", key, value, p, at)
			}
		}
	})
}

// FuzzFile gives arbitrary damage to a file: nothing may panic or be taken
// for something that was not committed.
func FuzzFile(f *testing.F) {
	path := filled(f, 40)
	good := read(f, path)
	c, err := load(path)
	if err != nil {
		f.Fatal(err)
	}
	want := ipamtest.Describe(c)
	f.Add(uint32(4096*3), []byte{1, 2, 3}, uint32(0))
	f.Add(uint32(16), []byte{0xff}, uint32(5000))
	f.Fuzz(func(t *testing.T, at uint32, patch []byte, cut uint32) {
		bad := bytes.Clone(good)
		copy(bad[int(at)%len(bad):], patch)
		if cut > 0 {
			bad = bad[:int(cut)%len(bad)]
		}
		file := filepath.Join(t.TempDir(), "ipam", FileName)
		if err := os.Mkdir(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, file, bad)
		c, err := load(file)
		if err == nil && ipamtest.Describe(c) != want && int(at)%len(good) >= 2*4096 {
			t.Errorf("a file damaged at %d was taken for something that was never committed", int(at)%len(good))
		}
	})
}

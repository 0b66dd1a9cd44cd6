// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package store keeps the state of an Allocator in a file of kit/store, whose package comment describes crashes and
// corruption. If the file lost an address that is in use, a second pod would get it.
package store

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/pool"
)

// FileName is the name of the file in the state directory.
const FileName = "state.db"

// Version is the version of the layout that this program reads and writes.
const Version = 4

const (
	bucketAllocations = "allocations"
	bucketReleased    = "resting" // the name of the bucket since the first version
	bucketCursors     = "cursors"
	bucketServing     = "serving" // since version 2
	bucketRefused     = "refused" // since version 3
	bucketPrimary     = "primary" // since version 4
)

var options = store.Options{
	Name: FileName,
	Layout: store.Layout{
		Format: "sluice-ipam", Version: Version,
		Buckets: []string{bucketAllocations, bucketReleased, bucketCursors, bucketServing, bucketRefused, bucketPrimary},
	},
	Previous: []store.Layout{
		{Format: "sluice-ipam", Version: 3, Buckets: []string{
			bucketAllocations, bucketReleased, bucketCursors, bucketServing, bucketRefused,
		}},
		{Format: "sluice-ipam", Version: 2, Buckets: []string{
			bucketAllocations, bucketReleased, bucketCursors,
			bucketServing,
		}},
		{Format: "sluice-ipam", Version: 1, Buckets: []string{bucketAllocations, bucketReleased, bucketCursors}},
	},
	Migrate: func(*store.Tx, uint32) error { return nil }, // only buckets were added
	Loss:    "no pod of this node uses an address any more",
	Doc:     `docs/ipam.md, "A refused state file"`,
}

// Store is an open state file. It implements ipam.Store.
type Store struct {
	dir  *store.Dir
	file *store.Store
}

// Open opens the state in a directory. It creates the directory with mode 0700 if it does not exist, and refuses a
// directory that other users may read or write.
func Open(dir string) (*Store, error) {
	d, err := store.OpenDir(dir, 0o700)
	if err != nil {
		return nil, err
	}
	f, err := d.Open(options)
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return &Store{dir: d, file: f}, nil
}

// Load implements ipam.Store.
func (s *Store) Load() (*ipam.Contents, error) {
	c := &ipam.Contents{Cursors: map[netip.Prefix]netip.Addr{}}
	err := s.file.View(func(t *store.Tx) error {
		if err := errors.Join(
			each(t, bucketAllocations, func(k, v []byte) error {
				a, err := decodeAllocation(k, v)
				c.Allocations = append(c.Allocations, a)
				return err
			}),
			each(t, bucketReleased, func(k, v []byte) error {
				r, err := decodeQuarantined(k, v)
				c.Quarantined = append(c.Quarantined, r)
				return err
			}),
			each(t, bucketCursors, func(k, v []byte) error {
				p, at, err := decodeCursor(k, v)
				c.Cursors[p] = at
				return err
			}),
			each(t, bucketServing, func(k, v []byte) error {
				p, err := decodeServing(k, v)
				c.Serving = append(c.Serving, p)
				return err
			}),
			each(t, bucketRefused, func(k, v []byte) error {
				r, err := decodeRefused(k, v)
				c.Refused = append(c.Refused, r)
				return err
			}),
			each(t, bucketPrimary, func(k, v []byte) error {
				p, err := decodeServing(k, v)
				c.Primary = append(c.Primary, p)
				return err
			}),
		); err != nil {
			return s.file.Refuse(err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

func each(t *store.Tx, bucket string, f func(k, v []byte) error) error {
	var errs []error
	err := t.ForEach(bucket, func(k, v []byte) error {
		if err := f(k, v); err != nil && len(errs) < 3 { // a few errors are enough to see a pattern
			errs = append(errs, err)
		}
		return nil
	})
	return errors.Join(append(errs, err)...)
}

// minFree is the free disk space in bytes that is required before the store accepts changes again. It is enough for
// some pages of the file.
const minFree = 64 << 10

// writable checks the free space on the disk. It is needed because an empty commit may succeed within the file although
// there is no space for another record.
func (s *Store) writable() error {
	var st unix.Statfs_t
	if err := unix.Statfs(s.file.Path(), &st); err != nil {
		return fmt.Errorf("state file %s: %w", s.file.Path(), err)
	}
	if free := st.Bavail * uint64(st.Bsize); free < minFree { //nolint:gosec // the size of a block
		return fmt.Errorf("state file %s: %w: %d bytes are free, %d are needed", s.file.Path(), unix.ENOSPC, free, minFree)
	}
	return nil
}

// Commit implements ipam.Store.
func (s *Store) Commit(c *ipam.Changes) error {
	if c.Empty() {
		if err := s.writable(); err != nil {
			return err
		}
	}
	err := s.file.Update(func(t *store.Tx) error {
		for o, a := range c.Allocations {
			if a == nil {
				t.Delete(bucketAllocations, ownerKey(o))
				continue
			}
			t.Put(bucketAllocations, ownerKey(o), encodeAllocation(a))
		}
		for addr, until := range c.Quarantined {
			if until.IsZero() {
				t.Delete(bucketReleased, addr.AsSlice())
				continue
			}
			t.Put(bucketReleased, addr.AsSlice(), encodeQuarantined(until))
		}
		for p, at := range c.Cursors {
			t.Put(bucketCursors, cursorKey(p), encodeCursor(at))
		}
		replace(t, bucketServing, c.Serving, encodeServing)
		replace(t, bucketRefused, c.Refused, encodeRefused)
		replace(t, bucketPrimary, c.Primary, encodeServing)
		return nil
	})
	if errors.Is(err, store.ErrLost) {
		return fmt.Errorf("%w: %w", ipam.ErrStoreLost, err)
	}
	return err
}

// replace writes a list in its order; a nil list leaves the bucket unchanged.
func replace[T any](t *store.Tx, bucket string, list []T, encode func(T) []byte) {
	if list == nil {
		return
	}
	for i := range pool.MaxPools {
		if i < len(list) {
			t.Put(bucket, []byte{byte(i)}, encode(list[i]))
		} else {
			t.Delete(bucket, []byte{byte(i)})
		}
	}
}

// Size implements ipam.Store.
func (s *Store) Size() int64 { return s.file.Size() }

// Path returns the path of the file.
func (s *Store) Path() string { return s.file.Path() }

// Close closes the file and releases the directory for the next process.
func (s *Store) Close() error { return errors.Join(s.file.Close(), s.dir.Close()) }

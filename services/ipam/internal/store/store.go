// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package store keeps the state of an Allocator in a bbolt file.
//
// The file is one writer's: a lock beside it sees to that. It is created
// whole or not at all, every commit is synced before it returns, and a sum
// over all records is part of every commit, so that a record which was
// changed or lost behind our back is noticed at the next start. A file that
// cannot be trusted is refused and left as it is: an address that is in use
// and forgotten would be given to a second pod.
package store

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
)

// Names in the state directory.
const (
	FileName = "state.db"
	lockName = "lock"
)

// Schema is the version of the layout that this program reads and writes.
const Schema = 1

// Sentinels.
var (
	// ErrCorrupt says that the file is damaged.
	ErrCorrupt = errors.New("damaged")
	// ErrForeign says that the file is not the state of this service.
	ErrForeign = errors.New("not the state of sluice-ipam")
	// ErrSchema says that another version of this service wrote the file.
	ErrSchema = errors.New("written by another version")
	// ErrLocked says that another process uses the file.
	ErrLocked = durable.ErrLocked
	// ErrPermission says that others than the service could change the state.
	ErrPermission = errors.New("open to others")
)

const format = "sluice-ipam"

var (
	bucketMeta        = []byte("meta")
	bucketAllocations = []byte("allocations")
	bucketResting     = []byte("resting")
	bucketCursors     = []byte("cursors")
	dataBuckets       = [][]byte{bucketAllocations, bucketResting, bucketCursors}

	keyFormat = []byte("format")
	keySchema = []byte("schema")
	keyDigest = []byte("digest")
)

// lockWait is how long Open waits for a process that is on its way out.
const lockWait = 5 * time.Second

// Store is an open state file. It implements ipam.Store.
type Store struct {
	path string
	lock *os.File
	db   *bolt.DB
	sum  digest // of what is committed
}

// digest is a sum over all records that does not depend on their order, so
// that a commit can bring it up to date from the records it touches.
type digest struct{ sum, count uint64 }

func (d *digest) add(bucket, key, value []byte) {
	d.sum += recordSum(bucket, key, value)
	d.count++
}

func (d *digest) remove(bucket, key, value []byte) {
	d.sum -= recordSum(bucket, key, value)
	d.count--
}

func (d digest) bytes() []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, d.sum), d.count)
}

func recordSum(bucket, key, value []byte) uint64 {
	b := make([]byte, 0, 256)
	for _, part := range [][]byte{bucket, key, value} {
		b = binary.BigEndian.AppendUint32(b, uint32(len(part)))
		b = append(b, part...)
	}
	sum := sha256.Sum256(b)
	return binary.BigEndian.Uint64(sum[:])
}

// Open opens the state in a directory, which is created with mode 0700 if it
// does not exist. A directory that others may write to or read is refused.
func Open(dir string) (*Store, error) {
	if err := prepare(dir); err != nil {
		return nil, err
	}
	s := &Store{path: filepath.Join(dir, FileName)}
	var err error
	if s.lock, err = durable.Lock(filepath.Join(dir, lockName), lockWait); err != nil {
		return nil, fmt.Errorf("state directory %s: %w", dir, err)
	}
	if err := s.open(); err != nil {
		s.lock.Close()
		return nil, err
	}
	return s, nil
}

func prepare(dir string) error {
	if err := makeDir(dir, 0o700); err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	if !info.IsDir() {
		return fmt.Errorf("state directory %s: not a directory", dir)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("state directory %s has mode %04o: %w; run: chmod 0700 %s", dir, info.Mode().Perm(), ErrPermission, dir)
	}
	return nil
}

// makeDir makes what is missing of a directory, durably: a synced file in a
// directory whose own name was lost with the power is lost too.
func makeDir(dir string, mode fs.FileMode) error {
	err := os.Mkdir(dir, mode)
	if errors.Is(err, fs.ErrNotExist) {
		if err := makeDir(filepath.Dir(dir), 0o755); err != nil {
			return err
		}
		err = os.Mkdir(dir, mode)
	}
	switch {
	case errors.Is(err, fs.ErrExist):
		return nil
	case err != nil:
		return err
	}
	return durable.SyncDir(filepath.Dir(dir))
}

func (s *Store) open() error {
	_, err := os.Lstat(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := create(s.path); err != nil {
			return fmt.Errorf("create state file %s: %w", s.path, err)
		}
	} else if err != nil {
		return fmt.Errorf("state file: %w", err)
	}
	if err := s.check(); err != nil {
		return err
	}
	if s.db, err = openBolt(s.path); err != nil {
		if errors.Is(err, berrors.ErrTimeout) {
			err = ErrLocked
		}
		return fmt.Errorf("state file %s: %w", s.path, err)
	}
	return nil
}

// check looks at the file before bbolt maps it.
func (s *Store) check() error {
	f, err := os.OpenFile(s.path, os.O_RDONLY|syscall.O_CLOEXEC|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("state file: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("state file: %w", err)
	}
	if !info.Mode().IsRegular() {
		return s.refuse(ErrForeign, errors.New("not a regular file"))
	}
	switch err := checkPages(f); {
	case err == nil:
		return nil
	case errors.Is(err, errOtherWriter):
		return s.refuse(ErrForeign, err)
	default:
		return s.refuse(ErrCorrupt, err)
	}
}

// refuse says what is wrong with the file and what to do.
func (s *Store) refuse(kind, detail error) error {
	advice := "it was left as it is; restore a copy of it, or, when no pod of this node uses an address any more, move it away with: mv " + s.path + " " + s.path + ".refused"
	if errors.Is(kind, ErrSchema) {
		advice = "it was left as it is; start the version that wrote it, or drain the node and move it away with: mv " + s.path + " " + s.path + ".refused"
	}
	return fmt.Errorf("state file %s is %w: %w; %s (docs/ipam.md, \"A refused state file\")", s.path, kind, detail, advice)
}

func openBolt(path string) (*bolt.DB, error) {
	return bolt.Open(path, 0o600, &bolt.Options{
		Timeout: time.Second,
		// The list of free pages is rebuilt at the start instead of being
		// written with every commit, whose cost would grow with it.
		NoFreelistSync: true,
		FreelistType:   bolt.FreelistMapType,
	})
}

// create makes an empty state beside the file and moves it there, so that a
// state file is always whole: one that is not is damaged, not young.
func create(path string) error {
	tmp := path + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	db, err := openBolt(tmp)
	if err != nil {
		return err
	}
	// Twice, so that both meta pages are of a commit of ours.
	for range 2 {
		if err := db.Update(initialise); err != nil {
			db.Close()
			return err
		}
	}
	if err := db.Close(); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return durable.SyncDir(filepath.Dir(path))
}

func initialise(tx *bolt.Tx) error {
	for _, name := range dataBuckets {
		if _, err := tx.CreateBucketIfNotExists(name); err != nil {
			return err
		}
	}
	meta, err := tx.CreateBucketIfNotExists(bucketMeta)
	if err != nil {
		return err
	}
	return errors.Join(
		meta.Put(keyFormat, []byte(format)),
		meta.Put(keySchema, binary.BigEndian.AppendUint32(nil, Schema)),
		meta.Put(keyDigest, digest{}.bytes()),
	)
}

// guard turns a panic of bbolt over a file that changed under it, and a fault
// in the mapped file, into an error.
func guard(err *error, kind error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("%w: %v", kind, p)
	}
}

// Load reads everything and compares it with the digest.
func (s *Store) Load() (c *ipam.Contents, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer guard(&err, ErrCorrupt)
	c = &ipam.Contents{Cursors: map[netip.Prefix]netip.Addr{}}
	err = s.db.View(func(tx *bolt.Tx) error {
		stored, err := s.readMeta(tx)
		if err != nil {
			return err
		}
		var sum digest
		if err := errors.Join(
			each(tx, &sum, bucketAllocations, func(k, v []byte) error {
				a, err := decodeAllocation(k, v)
				c.Allocations = append(c.Allocations, a)
				return err
			}),
			each(tx, &sum, bucketResting, func(k, v []byte) error {
				r, err := decodeRest(k, v)
				c.Resting = append(c.Resting, r)
				return err
			}),
			each(tx, &sum, bucketCursors, func(k, v []byte) error {
				p, at, err := decodeCursor(k, v)
				c.Cursors[p] = at
				return err
			}),
		); err != nil {
			return s.refuse(ErrCorrupt, err)
		}
		if sum != stored {
			return s.refuse(ErrCorrupt, fmt.Errorf("the sum over its %d records is not the stored one, over %d", sum.count, stored.count))
		}
		s.sum = sum
		return nil
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (s *Store) readMeta(tx *bolt.Tx) (digest, error) {
	meta := tx.Bucket(bucketMeta)
	if meta == nil || string(meta.Get(keyFormat)) != format {
		return digest{}, s.refuse(ErrForeign, errors.New("a bbolt database of another program"))
	}
	schema := meta.Get(keySchema)
	if len(schema) != 4 {
		return digest{}, s.refuse(ErrCorrupt, errors.New("it has no schema version"))
	}
	if got := binary.BigEndian.Uint32(schema); got != Schema {
		return digest{}, s.refuse(ErrSchema, fmt.Errorf("its schema is %d, this program reads %d", got, Schema))
	}
	sum := meta.Get(keyDigest)
	if len(sum) != 16 {
		return digest{}, s.refuse(ErrCorrupt, errors.New("it has no sum over its records"))
	}
	for _, name := range dataBuckets {
		if tx.Bucket(name) == nil {
			return digest{}, s.refuse(ErrCorrupt, fmt.Errorf("it has no bucket %q", name))
		}
	}
	return digest{binary.BigEndian.Uint64(sum), binary.BigEndian.Uint64(sum[8:])}, nil
}

func each(tx *bolt.Tx, sum *digest, bucket []byte, f func(k, v []byte) error) error {
	var errs []error
	err := tx.Bucket(bucket).ForEach(func(k, v []byte) error {
		sum.add(bucket, k, v)
		if err := f(k, v); err != nil && len(errs) < 3 { // enough to see a pattern
			errs = append(errs, err)
		}
		return nil
	})
	return errors.Join(append(errs, err)...)
}

// Commit writes the changes and syncs them.
func (s *Store) Commit(c *ipam.Changes) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer guard(&err, ipam.ErrStoreLost)
	sum := s.sum
	err = s.db.Update(func(tx *bolt.Tx) error {
		w := writer{tx: tx, sum: &sum}
		for o, a := range c.Allocations {
			var value []byte
			if a != nil {
				value = encodeAllocation(a)
			}
			w.set(bucketAllocations, ownerKey(o), value)
		}
		for addr, until := range c.Resting {
			var value []byte
			if !until.IsZero() {
				value = encodeRest(until)
			}
			w.set(bucketResting, addr.AsSlice(), value)
		}
		for p, at := range c.Cursors {
			w.set(bucketCursors, cursorKey(p), encodeCursor(at))
		}
		return errors.Join(w.err, tx.Bucket(bucketMeta).Put(keyDigest, sum.bytes()))
	})
	if err == nil {
		s.sum = sum
		return nil
	}
	err = fmt.Errorf("commit to %s: %w", s.path, err)
	if !full(err) {
		err = fmt.Errorf("%w: %w", ipam.ErrStoreLost, err)
	}
	return err
}

// full says whether a write was refused for want of space. Then nothing that
// was written before is in doubt. After any other error, of a sync above all,
// the kernel may have dropped pages that it calls clean by now, and only a
// process that opens the file anew can believe what it reads.
func full(err error) bool {
	var path *fs.PathError
	return errors.As(err, &path) && path.Op != "sync" &&
		(errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT))
}

type writer struct {
	tx  *bolt.Tx
	sum *digest
	err error
}

// set writes a record, or removes it if value is nil.
func (w *writer) set(bucket, key, value []byte) {
	if w.err != nil {
		return
	}
	b := w.tx.Bucket(bucket)
	if old := b.Get(key); old != nil {
		w.sum.remove(bucket, key, old)
	}
	if value == nil {
		w.err = b.Delete(key)
		return
	}
	w.sum.add(bucket, key, value)
	w.err = b.Put(key, value)
}

// Size is the size of the file in bytes; 0 if it cannot be told.
func (s *Store) Size() int64 {
	info, err := os.Stat(s.path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// Path is the file.
func (s *Store) Path() string { return s.path }

// Close gives the file to the next process.
func (s *Store) Close() error {
	return errors.Join(s.db.Close(), s.lock.Close())
}

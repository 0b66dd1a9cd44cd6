// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package store keeps the state of a service in bbolt files.
//
// A file is created completely or not at all, and a marker file lists the files that were created. A file that is
// missing, empty, truncated, corrupt or of another version is refused and left unchanged; the error names the file and
// the steps to recover. A refused file never makes the directory count as a new installation.
//
// Each commit is synced before Update returns. A checksum over all records is part of each commit,
// so that the next start detects a record that was changed or lost outside the service. Only the
// owner of a Dir opens its files, and only one goroutine at a time may call Update.
//
// The package does not know the meaning of the records and does not limit how often they are
// written: callers batch concurrent calls into one Update.
package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/durable"
)

// Errors of OpenDir and Open.
var (
	// ErrCorrupt is returned for a file that is corrupt.
	ErrCorrupt = errors.New("corrupt")
	// ErrMissing is returned for a file that was created and no longer exists.
	ErrMissing = errors.New("missing")
	// ErrForeign is returned for a file that is not state of this service.
	ErrForeign = errors.New("of another program")
	// ErrVersion is returned for a file of another version of this service that this version cannot
	// read.
	ErrVersion = errors.New("written by another version")
	// ErrLocked is returned if another process uses the directory.
	ErrLocked = durable.ErrLocked
	// ErrPermission is returned if users other than the service's could change the state.
	ErrPermission = errors.New("open to others")
)

// Errors of Update.
var (
	// ErrFull means that the file system is full or read-only. Nothing was changed, and earlier
	// commits are intact: try again later.
	ErrFull = errors.New("the file system accepts no writes")
	// ErrLost means that the state on disk is unknown: after a failed sync the kernel may have
	// dropped pages that it now considers clean. Only a process that opens the file again can
	// determine its content, so this process must end.
	ErrLost = errors.New("the state on disk is uncertain")
)

var (
	bucketMeta = []byte("meta")
	keyFormat  = []byte("format")
	keySchema  = []byte("schema")
	keyDigest  = []byte("digest")
)

// Layout describes the content of a file.
type Layout struct {
	Format  string   // kind of state, such as "sluice-ipam"; never changed
	Version uint32   // of the records, from 1
	Buckets []string // the name "meta" is reserved
}

// Options describe a file.
type Options struct {
	Name   string // in the directory
	Layout Layout

	// Previous lists earlier layouts, which Migrate converts to Layout in one transaction that sees
	// the buckets of both. from is the version of the file.
	Previous []Layout
	Migrate  func(t *Tx, from uint32) error

	// Init fills a new file before it gets its name; nil leaves it empty.
	Init func(*Tx) error

	// Boot keeps the file only for the current boot, without syncs: it survives a killed process,
	// but not a loss of power. Files of earlier boots are removed unread, and the marker does not
	// list the file.
	Boot bool

	// Unlisted keeps the file out of the marker: it is a cache, and a missing cache is created
	// again.
	Unlisted bool

	// Reserve is the size in bytes of the memory mapping of the file. When a commit outgrows the
	// mapping, bbolt doubles it and copies all changes of the commit so far, so a large commit into
	// a small file spends most of its time on copying. A reserve uses address space but no memory,
	// and the file may outgrow it. 0 maps the file in its actual size.
	Reserve int

	// Loss completes the clause "if …, begin without it" in the error about a refused file.
	Loss string
	// Doc is the documentation page for that error, such as `docs/ipam.md, "A refused state file"`.
	Doc string
}

// Store is an open file.
type Store struct {
	o       Options
	path    string
	marker  string // empty if the marker does not list the file
	db      *bolt.DB
	file    *os.File // the file that db uses
	sum     digest   // checksum of the committed records
	fresh   bool
	lost    error // set by the first Update that returned ErrLost
	stuck   bool  // a panic left locks of db taken
	problem atomic.Pointer[error]
}

// Open opens a file of the directory, or creates it if it was never created.
func (d *Dir) Open(o Options) (*Store, error) {
	s := &Store{o: o, path: filepath.Join(d.path, o.Name), marker: d.Marker()}
	if o.Unlisted {
		s.marker = ""
	}
	if o.Boot {
		if err := s.forBoot(d.path); err != nil {
			return nil, err
		}
	}
	_, err := os.Lstat(s.path)
	switch {
	case err == nil:
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("state file: %w", err)
	case !o.Boot && !o.Unlisted && d.Created(o.Name):
		return nil, s.refuse(ErrMissing, fmt.Errorf("%s lists it", s.marker))
	default:
		if err := s.create(); err != nil {
			return nil, fmt.Errorf("create state file %s: %w", s.path, err)
		}
		s.fresh = true
	}
	if err := s.open(); err != nil {
		return nil, err
	}
	if !o.Boot && !o.Unlisted {
		if err := d.mark(o.Name); err != nil {
			return nil, errors.Join(err, s.Close())
		}
	}
	return s, nil
}

// forBoot adds the boot ID to the file name, so that a file of another boot, which may be corrupt,
// is recognised without reading it.
func (s *Store) forBoot(dir string) error {
	id, err := durable.BootID()
	if err != nil {
		return err
	}
	base, ext := strings.TrimSuffix(s.o.Name, filepath.Ext(s.o.Name)), filepath.Ext(s.o.Name)
	name := base + "." + id + ext
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	for _, e := range entries {
		other := e.Name()
		if other == name || !strings.HasPrefix(other, base+".") || !strings.HasSuffix(strings.TrimSuffix(other, ".new"), ext) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, other)); err != nil {
			return fmt.Errorf("remove the state of an earlier boot: %w", err)
		}
	}
	s.path, s.marker = filepath.Join(dir, name), ""
	return nil
}

func (s *Store) open() (err error) {
	if err := s.checkFile(); err != nil {
		return err
	}
	if s.db, err = s.openBolt(s.path); err != nil {
		if errors.Is(err, berrors.ErrTimeout) {
			err = ErrLocked
		}
		return fmt.Errorf("state file %s: %w", s.path, err)
	}
	if err := s.verify(); err != nil {
		return errors.Join(err, s.Close())
	}
	return nil
}

// checkFile checks the file before bbolt maps it.
func (s *Store) checkFile() error {
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
	if !s.o.Boot {
		if err := syncDisk(f); err != nil {
			return fmt.Errorf("sync state file %s: %w", s.path, err)
		}
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

// syncDisk makes the content that is about to be read durable. A killed process may not have synced its last commit,
// and after a failed sync some pages may exist only in the kernel's cache.
func syncDisk(f *os.File) error {
	if err := f.Sync(); err != nil {
		return err
	}
	return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
}

// refuse returns an error with the fault of the file and the steps to recover.
func (s *Store) refuse(kind, detail error) error {
	var commands []string
	if !errors.Is(kind, ErrMissing) {
		commands = append(commands, SetAside(s.path))
	}
	if s.marker != "" {
		commands = append(commands, "rm -f "+s.marker)
	}
	return &Refusal{
		Path: s.path, Kind: kind, Detail: detail, Commands: strings.Join(commands, "; "), Loss: s.o.Loss, Doc: s.o.Doc,
	}
}

// reservedStep is the minimum growth in bytes of a file with a reserve. Without a reserve, bbolt
// doubles the file together with its mapping.
const reservedStep = 1 << 20

func (s *Store) openBolt(path string) (*bolt.DB, error) {
	db, err := bolt.Open(path, 0o600, &bolt.Options{
		Timeout: time.Second,
		// bbolt rebuilds the free list at the start instead of writing it with every commit, which takes longer
		// the longer the list is.
		NoFreelistSync: true,
		FreelistType:   bolt.FreelistMapType,
		NoSync:         s.o.Boot,
		NoGrowSync:     s.o.Boot,

		InitialMmapSize: s.o.Reserve,
		OpenFile: func(name string, flag int, mode os.FileMode) (*os.File, error) {
			f, err := os.OpenFile(name, flag|unix.O_NOFOLLOW, mode)
			s.file = f
			return f, err
		},
	})
	if err != nil {
		return nil, err
	}
	if s.o.Reserve > 0 {
		db.AllocSize = reservedStep
	}
	return db, nil
}

// create writes the file under a temporary name and renames it, so that an incomplete state file is
// always corrupt and never new.
func (s *Store) create() error {
	tmp := s.path + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	db, err := s.openBolt(tmp)
	if err != nil {
		return err
	}
	if err := errors.Join(s.fill(db), db.Close()); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	if err := os.Rename(tmp, s.path); err != nil {
		return err
	}
	if s.o.Boot {
		return nil
	}
	return durable.SyncDir(filepath.Dir(s.path))
}

func (s *Store) fill(db *bolt.DB) error {
	sum := digest{}
	err := db.Update(func(tx *bolt.Tx) error {
		if err := s.putLayout(tx); err != nil {
			return err
		}
		t := &Tx{tx: tx, sum: &sum}
		if s.o.Init != nil {
			if err := s.o.Init(t); err != nil {
				return err
			}
		}
		return t.finish()
	})
	if err != nil {
		return err
	}
	// Commit a second time, so that both meta pages contain Sluice's state.
	return db.Update(func(tx *bolt.Tx) error { return (&Tx{tx: tx, sum: &sum}).finish() })
}

// putLayout writes the records that verify checks, except the digest.
func (s *Store) putLayout(tx *bolt.Tx) error {
	meta, err := tx.CreateBucketIfNotExists(bucketMeta)
	if err != nil {
		return err
	}
	for _, name := range s.o.Layout.Buckets {
		if _, err := tx.CreateBucketIfNotExists([]byte(name)); err != nil {
			return err
		}
	}
	return errors.Join(
		meta.Put(keyFormat, []byte(s.o.Layout.Format)),
		meta.Put(keySchema, binary.BigEndian.AppendUint32(nil, s.o.Layout.Version)),
	)
}

// guarded runs f. If bbolt panics because the file changed under it, or the mapped file cannot be
// read, it returns an error of the given kind.
func (s *Store) guarded(kind error, f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			s.stuck = true
			err = fmt.Errorf("%w: %v", kind, p)
		}
	}()
	return f()
}

// verify compares the file with its layout and digest, and migrates it if necessary.
func (s *Store) verify() error {
	layout := s.o.Layout
	err := s.guarded(errFault, func() error {
		return s.db.View(func(tx *bolt.Tx) error {
			found, stored, err := s.readMeta(tx)
			if err != nil {
				return err
			}
			layout = found
			sum := digest{}
			for _, name := range layout.Buckets {
				b := tx.Bucket([]byte(name))
				if b == nil {
					return s.refuse(ErrCorrupt, fmt.Errorf("it has no bucket %q", name))
				}
				if err := b.ForEach(func(k, v []byte) error { sum.add(name, k, v); return nil }); err != nil {
					return err
				}
			}
			if sum != stored {
				return s.refuse(ErrCorrupt, fmt.Errorf("the checksum over its %d records differs from the stored checksum over %d",
					sum.count, stored.count))
			}
			s.sum = sum
			return nil
		})
	})
	if errors.Is(err, errFault) {
		return s.refuse(ErrCorrupt, err)
	}
	if err != nil || layout.Version == s.o.Layout.Version {
		return err
	}
	if err := s.migrate(layout); err != nil {
		return fmt.Errorf("migrate state file %s from version %d to %d: %w", s.path, layout.Version, s.o.Layout.Version, err)
	}
	return nil
}

// errFault is the detail of a refusal after a panic inside bbolt, or for a page that cannot be read.
var errFault = errors.New("it cannot be read")

func (s *Store) readMeta(tx *bolt.Tx) (Layout, digest, error) {
	meta := tx.Bucket(bucketMeta)
	if meta == nil || string(meta.Get(keyFormat)) != s.o.Layout.Format {
		return Layout{}, digest{}, s.refuse(ErrForeign, errors.New("a bbolt database, but not of "+s.o.Layout.Format))
	}
	schema := meta.Get(keySchema)
	if len(schema) != 4 {
		return Layout{}, digest{}, s.refuse(ErrCorrupt, errors.New("it has no version"))
	}
	layout := s.o.Layout
	if got := binary.BigEndian.Uint32(schema); got != layout.Version {
		i := slices.IndexFunc(s.o.Previous, func(l Layout) bool { return l.Version == got })
		if i < 0 {
			return Layout{}, digest{}, s.refuse(ErrVersion, fmt.Errorf("its version is %d, this program reads %s", got, s.reads()))
		}
		layout = s.o.Previous[i]
	}
	sum := meta.Get(keyDigest)
	if len(sum) != 16 {
		return Layout{}, digest{}, s.refuse(ErrCorrupt, errors.New("it has no checksum over its records"))
	}
	return layout, digest{binary.BigEndian.Uint64(sum), binary.BigEndian.Uint64(sum[8:])}, nil
}

func (s *Store) reads() string {
	var text strings.Builder
	for _, l := range s.o.Previous {
		fmt.Fprintf(&text, "%d and ", l.Version)
	}
	return text.String() + fmt.Sprint(s.o.Layout.Version)
}

// migrate converts a file of an earlier layout to the current one.
func (s *Store) migrate(from Layout) error {
	return s.update(func(t *Tx) error {
		if err := s.putLayout(t.tx); err != nil {
			return err
		}
		if err := s.o.Migrate(t, from.Version); err != nil {
			return s.refuse(ErrVersion, err) // Migrate failed on a record of the previous layout
		}
		for _, name := range from.Buckets {
			if slices.Contains(s.o.Layout.Buckets, name) {
				continue
			}
			if err := t.ForEach(name, func(k, v []byte) error { t.sum.remove(name, k, v); return nil }); err != nil {
				return err
			}
			if err := t.tx.DeleteBucket([]byte(name)); err != nil {
				return err
			}
		}
		return nil
	})
}

// View runs f on the state of the last commit. Keys and values are valid until f returns.
func (s *Store) View(f func(*Tx) error) error {
	err := s.guarded(errFault, func() error {
		return s.db.View(func(tx *bolt.Tx) error { return f(&Tx{tx: tx}) })
	})
	if errors.Is(err, errFault) {
		return s.refuse(ErrCorrupt, err)
	}
	return err
}

// Update runs f in one transaction, which is on disk when Update returns nil. If f fails, Update
// rolls back and returns that error unwrapped; other errors wrap ErrFull or ErrLost.
func (s *Store) Update(f func(*Tx) error) error {
	if s.lost != nil {
		return s.lost
	}
	err := s.update(f)
	switch {
	case err == nil:
		s.problem.Store(nil)
	case errors.Is(err, ErrFull), errors.Is(err, ErrLost):
		s.problem.Store(&err)
		if errors.Is(err, ErrLost) {
			s.lost = err
		}
	}
	return err
}

func (s *Store) update(f func(*Tx) error) error {
	sum := s.sum
	var refused error // the error of f
	err := s.guarded(ErrLost, func() error {
		return s.db.Update(func(tx *bolt.Tx) error {
			t := &Tx{tx: tx, sum: &sum}
			if refused = f(t); refused == nil {
				refused = t.err
			}
			if refused != nil {
				return refused
			}
			return t.finish()
		})
	})
	switch {
	case err == nil:
		s.sum = sum
		return nil
	case refused != nil:
		return refused
	case full(err):
		return fmt.Errorf("write state file %s: %w: %w", s.path, ErrFull, err)
	case errors.Is(err, ErrLost):
		return fmt.Errorf("write state file %s: %w", s.path, err)
	default:
		return fmt.Errorf("write state file %s: %w: %w", s.path, ErrLost, err)
	}
}

// full reports whether a write failed because of missing space or a read-only file system. Earlier
// writes are then intact.
func full(err error) bool {
	var path *fs.PathError
	return errors.As(err, &path) && path.Op != "sync" &&
		(errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EROFS))
}

// Problem returns the error of the last Update if it could not be written, else nil. It is safe for
// concurrent use.
func (s *Store) Problem() error {
	if p := s.problem.Load(); p != nil {
		return *p
	}
	return nil
}

// Probe makes an empty commit if the last Update could not be written, so that Problem becomes nil
// when the file system accepts writes again.
func (s *Store) Probe() error {
	if s.Problem() == nil {
		return nil
	}
	return s.Update(func(*Tx) error { return nil })
}

// Fresh reports whether Open created the file.
func (s *Store) Fresh() bool { return s.fresh }

// Size returns the size of the file in bytes, 0 if it cannot be read.
func (s *Store) Size() int64 {
	info, err := os.Stat(s.path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// Path returns the path of the file.
func (s *Store) Path() string { return s.path }

// Refuse returns the error for a file whose records the caller cannot decode.
func (s *Store) Refuse(detail error) error { return s.refuse(ErrCorrupt, detail) }

// Unload removes the mapped pages of the file from the memory of this process. They stay in the
// page cache and are mapped again on their next use. A commit maps every page that it reads.
func (s *Store) Unload() error {
	// bbolt replaces its mapping when the file grows, but not during a transaction.
	return s.View(func(t *Tx) error {
		_, _, errno := unix.Syscall(unix.SYS_MADVISE, s.db.Info().Data, uintptr(t.tx.Size()), unix.MADV_DONTNEED)
		if errno != 0 {
			return fmt.Errorf("unload %s: %w", s.path, errno)
		}
		return nil
	})
}

// Close closes the file. The directory stays locked.
func (s *Store) Close() error {
	if s.stuck { // bbolt would block on its locks for ever
		return s.file.Close()
	}
	return s.db.Close()
}

// Tx is one transaction.
type Tx struct {
	tx  *bolt.Tx
	sum *digest // nil in View
	err error   // the first error of Put or Delete
}

// Get returns the value of a key, or nil.
func (t *Tx) Get(bucket string, key []byte) []byte {
	return t.tx.Bucket([]byte(bucket)).Get(key)
}

// Put sets the value of a key. After an error the transaction fails.
func (t *Tx) Put(bucket string, key, value []byte) {
	if t.err != nil {
		return
	}
	b := t.tx.Bucket([]byte(bucket))
	if old := b.Get(key); old != nil {
		t.sum.remove(bucket, key, old)
	}
	t.sum.add(bucket, key, value)
	t.err = b.Put(key, value)
}

// Delete removes a key if it exists.
func (t *Tx) Delete(bucket string, key []byte) {
	if t.err != nil {
		return
	}
	b := t.tx.Bucket([]byte(bucket))
	old := b.Get(key)
	if old == nil {
		return
	}
	t.sum.remove(bucket, key, old)
	t.err = b.Delete(key)
}

// ForEach calls f for each key of a bucket in order. f must not change the bucket.
func (t *Tx) ForEach(bucket string, f func(key, value []byte) error) error {
	return t.tx.Bucket([]byte(bucket)).ForEach(f)
}

// ForEachWith calls f for each key of a bucket that has the prefix, in order. f must not change the
// bucket.
func (t *Tx) ForEachWith(bucket string, prefix []byte, f func(key, value []byte) error) error {
	c := t.tx.Bucket([]byte(bucket)).Cursor()
	for k, v := c.Seek(prefix); bytes.HasPrefix(k, prefix) && k != nil; k, v = c.Next() {
		if err := f(k, v); err != nil {
			return err
		}
	}
	return nil
}

// finish writes the digest.
func (t *Tx) finish() error {
	if t.err != nil {
		return t.err
	}
	return t.tx.Bucket(bucketMeta).Put(keyDigest, t.sum.bytes())
}

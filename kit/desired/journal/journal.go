// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package journal stores the objects of a desired-state service and their revision on stable
// storage, together with a cache of state that the service can rebuild.
//
// Objects are kept in a kit/store file that is synced on each change: a change that was reported as enforced survives a
// crash and a loss of power. If that file is lost or corrupt, the service does not start. The cache is a second file,
// which is not synced and is valid for one boot: it survives a killed process, and after a reboot the service receives
// its content again from the sources. Corruption of one file cannot affect the other.
//
// The package does not know the meaning or the encoding of objects: the service provides a Codec
// and the names of the buckets. State files of earlier versions stay readable, because the service
// defines keys and values.
package journal

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/store"
)

// DirMode is the most permissive mode of a state directory: other users may list it; the files are
// readable by their owner only.
const DirMode = 0o755

// Keys of the state bucket that belong to the journal. All other keys belong to the service.
const (
	keyRevision = "revision"
	keyNumber   = "change" // number of the last committed change
)

// ErrLost is returned if the state accepts no more changes; the process must restart.
var ErrLost = store.ErrLost

// errClosed is returned after Close.
var errClosed = errors.New("the journal is closed")

// beforeWrite is a point where a test can kill the process, or make the write fail.
var beforeWrite = fault.Register("journal/before-write")

// Codec encodes objects of one type. Its functions must be safe for concurrent use.
type Codec[O any] struct {
	// Key returns the object's key in the file. It must not end with a zero byte.
	Key func(*O) string
	// Size returns an upper bound of the record length in bytes, without encoding the object. Only
	// needed with Staged.
	Size func(*O) int
	// Encode returns the record of an object. It must not begin with a zero byte.
	Encode func(*O) []byte
	// Decode returns the object of a record, given its key. record and annotation are valid until
	// Decode returns.
	Decode func(key string, record, annotation []byte) (O, error)
	// Annotate returns data that is stored with the object but outside its record; empty for none.
	// May be nil.
	Annotate func(*O) []byte
}

// Options describe the files of a journal.
type Options[O any] struct {
	Codec[O]
	// File holds objects and state. Its layout must have the buckets Objects and State.
	File           store.Options
	Objects, State string
	// Staged appends the number of the change to each record key, so that a large change is written
	// in many transactions and takes effect with the last one. Without Staged, the record key is
	// the object key, and a change is one transaction.
	Staged bool
	// Annotations is the key prefix of annotations in the bucket State. Versions without
	// annotations leave these keys untouched.
	Annotations string
	// Cache describes the cache file; nil for a journal without cache.
	Cache *store.Options
}

// Change is a change of objects and state.
type Change[O any] struct {
	Revision uint64 // revision of the objects after the change; 0 leaves it unchanged
	Puts     []O
	Deletes  []string          // keys of objects
	State    map[string][]byte // records of the service in the bucket State
}

// CacheKey names a record of the cache.
type CacheKey struct{ Bucket, Key string }

// Contents receives the content of a journal, one record at a time. An error from one of its
// functions ends Replay.
type Contents[O any] struct {
	// State receives a record of the service in the bucket State.
	State func(key string, value []byte) error
	// Object receives an object.
	Object func(O) error
	// Cached receives a record of the cache.
	Cached func(bucket string, value []byte) error
}

// Journal is an open journal. One goroutine uses it, with one exception: another goroutine may
// stage one change at a time. Size and Problem may be called from any goroutine.
type Journal[O any] struct {
	options Options[O]
	dir     *store.Dir
	cache   *store.Store        // nil without a cache
	waiting map[CacheKey][]byte // unwritten cache records; nil deletes

	file      *store.Store
	number    uint64   // number of the last committed change
	leftovers []string // objects with records of an uncommitted change, which are removed before the next commit
	outdated  []string // objects with superseded records

	mu     sync.Mutex // held during each transaction of file
	closed bool       // guarded by mu
	mapped bool       // a large change has mapped many pages of file
}

// Open opens the files of a journal in a directory. Close releases the directory. The error for a
// corrupt file ends with the steps to recover.
func Open[O any](dir *store.Dir, o Options[O]) (*Journal[O], error) {
	j := &Journal[O]{options: o, dir: dir, waiting: make(map[CacheKey][]byte)}
	if err := j.open(); err != nil {
		return nil, errors.Join(err, j.Close())
	}
	return j, nil
}

func (j *Journal[O]) open() (err error) {
	// The cache is opened first, so that the directory's marker lists the object file only when both files exist.
	if j.options.Cache != nil {
		if j.cache, err = j.dir.Open(*j.options.Cache); err != nil {
			return err
		}
	}
	j.file, err = j.dir.Open(j.options.File)
	return err
}

// Replay passes the content of the files to the functions of c, state first and cache last, and
// removes records of uncommitted changes. It returns the revision of the objects, 0 if the files
// contain no revision. It must be called once, before any change. If a Codec, State or Cached
// rejects a record, the error names the file and the steps to recover.
func (j *Journal[O]) Replay(c Contents[O]) (revision uint64, err error) {
	if err := j.file.View(func(t *store.Tx) error {
		if revision, err = j.replayState(t, c.State); err != nil {
			return err
		}
		return j.replayObjects(t, c.Object)
	}); err != nil {
		return 0, err
	}
	// If the disk is full, these records stay; they are removed before the next commit.
	if err := j.Tidy(context.Background()); err != nil && !errors.Is(err, store.ErrFull) {
		return 0, err
	}
	if err := j.replayCache(c.Cached); err != nil {
		return 0, err
	}
	return revision, j.file.Unload()
}

func (j *Journal[O]) replayState(t *store.Tx, give func(string, []byte) error) (revision uint64, err error) {
	for key, into := range map[string]*uint64{keyRevision: &revision, keyNumber: &j.number} {
		b := t.Get(j.options.State, []byte(key))
		switch {
		case len(b) == 8:
			*into = binary.BigEndian.Uint64(b)
		case b != nil:
			return 0, j.Refuse(fmt.Errorf("%s %q: %d bytes, want 8", j.options.State, key, len(b)))
		}
	}
	return revision, t.ForEach(j.options.State, func(k, v []byte) error {
		key := string(k)
		if key == keyRevision || key == keyNumber || j.isAnnotation(key) {
			return nil
		}
		if err := give(key, v); err != nil {
			return j.Refuse(fmt.Errorf("%s %.100q: %w", j.options.State, key, err))
		}
		return nil
	})
}

func (j *Journal[O]) replayCache(give func(string, []byte) error) error {
	if j.cache == nil {
		return nil
	}
	if err := j.cache.View(func(t *store.Tx) error {
		for _, bucket := range j.options.Cache.Layout.Buckets {
			if err := t.ForEach(bucket, func(k, v []byte) error {
				if err := give(bucket, v); err != nil {
					return j.cache.Refuse(fmt.Errorf("%s %.100q: %w", bucket, k, err))
				}
				return nil
			}); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return err
	}
	return j.cache.Unload()
}

// Refuse returns the error for an object file that the service cannot decode. The error names the file and the steps to
// recover.
func (j *Journal[O]) Refuse(detail error) error { return j.file.Refuse(detail) }

// Commit stages and commits a change. If it returns nil, the change is on stable storage. After
// ErrLost the process must end; after any other error nothing was changed.
func (j *Journal[O]) Commit(ctx context.Context, c Change[O]) error {
	s, err := j.Stage(ctx, c)
	if err != nil {
		return err
	}
	if err := s.Commit(ctx); err != nil {
		return errors.Join(err, s.Discard())
	}
	if err := j.Tidy(ctx); errors.Is(err, ErrLost) {
		return err
	}
	return nil // Problem reports a failed cleanup
}

// Note writes cache records; nil deletes a record. If it returns nil, the records survive the
// process. After ErrLost the process must end; after any other error the records wait for Flush or
// the next Note.
func (j *Journal[O]) Note(ctx context.Context, records map[CacheKey][]byte) error {
	for k, value := range records {
		j.waiting[k] = value
	}
	if err := beforeWrite.Hit(ctx); err != nil {
		return err
	}
	return j.flush()
}

// flush writes the waiting cache records.
func (j *Journal[O]) flush() error {
	if len(j.waiting) == 0 {
		return nil
	}
	if err := j.cache.Update(func(t *store.Tx) error {
		for k, value := range j.waiting {
			if value == nil {
				t.Delete(k.Bucket, []byte(k.Key))
			} else {
				t.Put(k.Bucket, []byte(k.Key), value)
			}
		}
		return nil
	}); err != nil {
		return err
	}
	clear(j.waiting)
	return nil
}

// Flush retries failed writes. If the last change could not be written, it also probes whether the
// disk accepts writes again.
func (j *Journal[O]) Flush() error {
	return errors.Join(j.probe(), j.flush())
}

func (j *Journal[O]) probe() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.file.Probe()
}

// Problem returns the reason, on one line, for which the next Flush has to retry a write; nil if no write has failed.
func (j *Journal[O]) Problem() error {
	file := j.file.Problem()
	if j.cache == nil {
		return file
	}
	cache := j.cache.Problem()
	if file != nil && cache != nil {
		return fmt.Errorf("%w; %w", file, cache)
	}
	return errors.Join(file, cache)
}

// Size returns the size of the files in bytes.
func (j *Journal[O]) Size() int64 {
	size := j.file.Size()
	if j.cache != nil {
		size += j.cache.Size()
	}
	return size
}

// Close closes the files and releases the directory for the next process.
func (j *Journal[O]) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.closed = true
	var err error
	for _, s := range []*store.Store{j.file, j.cache} {
		if s != nil {
			err = errors.Join(err, s.Close())
		}
	}
	return errors.Join(err, j.dir.Close())
}

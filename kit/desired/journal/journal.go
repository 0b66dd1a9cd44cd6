// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package journal keeps the objects of a service of desired state on stable
// storage, with the revision that they are in, and a cache of what the service
// can learn again.
//
// Objects are in a file of kit/store that is synced with each change: what a
// caller was told to be in force is there after a crash and after a loss of
// power, and a file that is lost or damaged stops the start. The cache is a
// second file, which is not synced and is worth one boot: a killed process loses
// none of it, and after a boot the sources say it again. So neither can damage
// the other.
//
// The package knows neither what an object means nor how it is encoded: the
// service gives a Codec, and the names of the buckets. State files of earlier
// versions stay readable, because the keys and values are the service's own.
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

// DirMode is the mode of a state directory at most: others may list it, the
// files are readable by their owner alone.
const DirMode = 0o755

// Keys of the bucket of state that belong to the journal. All others belong to
// the service.
const (
	keyRevision = "revision"
	keyNumber   = "change" // number of the last change that counts
)

// ErrLost says that the state takes no more changes; the process has to start
// anew.
var ErrLost = store.ErrLost

// errClosed says that the service is going down.
var errClosed = errors.New("the journal is closed")

// beforeWrite is where a test may kill the process or make it fail.
var beforeWrite = fault.Register("journal/before-write")

// Codec encodes objects of one type. Its functions may be called concurrently.
type Codec[O any] struct {
	// Key names an object in the file. It has no zero byte at its end.
	Key func(*O) string
	// Size is at most the length of the record of an object, in bytes. It is found
	// without encoding the object. Only journals that stage need it.
	Size func(*O) int
	// Encode returns the record of an object, which does not begin with a zero byte.
	Encode func(*O) []byte
	// Decode returns the object of a record. The key is the one that the record has.
	// Record and annotation are valid until Decode returns.
	Decode func(key string, record, annotation []byte) (O, error)
	// Annotate returns what is kept of an object outside its record; empty: nothing.
	// A nil Annotate keeps nothing.
	Annotate func(*O) []byte
}

// Options describe the files of a journal.
type Options[O any] struct {
	Codec[O]
	// File has the objects and the state. Its layout has the buckets Objects and
	// State.
	File           store.Options
	Objects, State string
	// Staged gives each record the number of its change, so that a large change is
	// written in many transactions and counts with the last one. Without it, the key
	// of a record is the key of the object, and a change is one transaction.
	Staged bool
	// Annotations begins the keys of annotations in the bucket State. Versions that
	// do not know annotations leave these keys alone.
	Annotations string
	// Cache is the second file; nil: there is none.
	Cache *store.Options
}

// Change is a change of objects and of the state.
type Change[O any] struct {
	Revision uint64 // of the objects after the change; 0: as before
	Puts     []O
	Deletes  []string          // keys of objects
	State    map[string][]byte // records of the service in the bucket State
}

// CacheKey names a record of the cache.
type CacheKey struct{ Bucket, Key string }

// Contents takes what a journal has, one record at a time. An error of one of its
// functions ends Replay.
type Contents[O any] struct {
	// State takes a record of the service in the bucket State.
	State func(key string, value []byte) error
	// Object takes an object.
	Object func(O) error
	// Cached takes a record of the cache.
	Cached func(bucket string, value []byte) error
}

// Journal is the open state. It belongs to one goroutine, but for Staged: one change
// at a time is staged by another goroutine. Size and Problem may be called from
// anywhere.
type Journal[O any] struct {
	options Options[O]
	dir     *store.Dir
	cache   *store.Store        // nil: there is none
	waiting map[CacheKey][]byte // for the cache, nil deletes; could not be written yet

	file      *store.Store
	number    uint64   // of the last change that counts
	leftovers []string // objects with records of a later change, to be removed before the next one is committed
	outdated  []string // objects with records that no longer count

	mu     sync.Mutex // held by each transaction of file
	closed bool       // guarded by mu
	mapped bool       // a large change has mapped many pages of file
}

// Open opens the files of a journal in a directory, which Close gives back. The
// error of a damaged file ends with what to do.
func Open[O any](dir *store.Dir, o Options[O]) (*Journal[O], error) {
	j := &Journal[O]{options: o, dir: dir, waiting: make(map[CacheKey][]byte)}
	if err := j.open(); err != nil {
		return nil, errors.Join(err, j.Close())
	}
	return j, nil
}

func (j *Journal[O]) open() (err error) {
	// The cache first: the directory's marker lists the file of objects only once
	// everything is there.
	if j.options.Cache != nil {
		if j.cache, err = j.dir.Open(*j.options.Cache); err != nil {
			return err
		}
	}
	j.file, err = j.dir.Open(j.options.File)
	return err
}

// Replay gives everything in the files to the functions of c, the state first and
// the cache last, and removes what a change left that was never committed. It
// returns the revision of the objects; 0: there is none. It is called once, before
// anything is changed. A record that a Codec, State or Cached does not understand
// is an error that names the file and the way out.
func (j *Journal[O]) Replay(c Contents[O]) (revision uint64, err error) {
	if err := j.file.View(func(t *store.Tx) error {
		if revision, err = j.replayState(t, c.State); err != nil {
			return err
		}
		return j.replayObjects(t, c.Object)
	}); err != nil {
		return 0, err
	}
	// On a full disk leftovers stay: nothing is committed before they are removed.
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

// Refuse returns the error of a file of objects whose contents the service cannot
// read: it names the file and the way out.
func (j *Journal[O]) Refuse(detail error) error { return j.file.Refuse(detail) }

// Commit stages and commits a change, which is on stable storage when Commit
// returns nil. After ErrLost the process has to end; after any other error
// everything is as before.
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
	return nil // of what could not be tidied, Problem tells
}

// Note writes records of the cache, which survive the process when Note returns
// nil; a nil value deletes a record. After ErrLost the process has to end; after
// any other error the records wait for Flush, or for the next Note.
func (j *Journal[O]) Note(ctx context.Context, records map[CacheKey][]byte) error {
	for k, value := range records {
		j.waiting[k] = value
	}
	if err := beforeWrite.Hit(ctx); err != nil {
		return err
	}
	return j.flush()
}

// flush writes what waits for the cache.
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

// Flush tries again what could not be written, and whether the disk takes writes,
// if the last change found that it does not.
func (j *Journal[O]) Flush() error {
	return errors.Join(j.probe(), j.flush())
}

func (j *Journal[O]) probe() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.file.Probe()
}

// Problem is why there is something for Flush to do, on one line; nil if there
// is not.
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

// Size is the size of the files in bytes.
func (j *Journal[O]) Size() int64 {
	size := j.file.Size()
	if j.cache != nil {
		size += j.cache.Size()
	}
	return size
}

// Close gives the directory to the next process.
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

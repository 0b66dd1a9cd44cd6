// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package journal

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/store"
)

// With Options.Staged, a record key ends with the number of its change. A record is valid once the change number in the
// state bucket is equal or higher. A large change is written in many small transactions; only the last one writes the
// change number, which makes all records valid at once. If an object has several valid records, the record of the
// latest change is the current one; a removal is a record, too. Superseded records, and records of a change that was
// never committed, are removed after the commit or when the file is opened.

// Limits of one transaction, and therefore of the data that Staged.Commit writes. A single object may be larger.
const (
	partRecords = 256
	partBytes   = 256 << 10
)

// Points where a test may kill the process.
var (
	beforeStage = fault.Register("journal/before-stage")
	beforeTidy  = fault.Register("journal/before-tidy")
)

// removal is the record of a removed object. Records of objects never begin with a zero byte.
var removal = []byte{0}

func isRemoval(record []byte) bool { return len(record) == 1 && record[0] == 0 }

// StagedKey returns the record key of an object in a file with Options.Staged.
func StagedKey(key string, number uint64) []byte {
	return binary.BigEndian.AppendUint64(append([]byte(key), 0), number)
}

// numberSize is the length that the change number adds to a key.
const numberSize = 1 + 8

// splitKey splits a record key into object key and change number.
func splitKey(key []byte) (object string, number uint64, err error) {
	end := len(key) - numberSize
	if end < 0 || key[end] != 0 {
		return "", 0, errors.New("the key has no number of a change")
	}
	return string(key[:end]), binary.BigEndian.Uint64(key[end+1:]), nil
}

// part is the content of one transaction.
type part struct {
	keys        []string // of objects
	records     [][]byte
	annotations [][]byte
}

// divide splits a change into at least one part.
func (j *Journal[O]) divide(c Change[O]) []part {
	parts := []part{{}}
	size := 0
	if n := len(c.Puts) + len(c.Deletes); !j.options.Staged {
		parts[0] = part{keys: make([]string, 0, n), records: make([][]byte, 0, n), annotations: make([][]byte, 0, n)}
	}
	add := func(key string, record, annotation []byte) {
		last := &parts[len(parts)-1]
		n := len(last.records)
		if j.options.Staged && (n == partRecords || n > 0 && size+len(record) > partBytes) {
			parts = append(parts, part{})
			last, size = &parts[len(parts)-1], 0
		}
		size += len(record)
		last.keys, last.records = append(last.keys, key), append(last.records, record)
		last.annotations = append(last.annotations, annotation)
	}
	for _, e := range j.encode(c.Puts) {
		add(e.key, e.record, e.annotation)
	}
	for _, key := range c.Deletes {
		add(key, removal, nil)
	}
	return parts
}

// encoded is an object in the form of the file.
type encoded struct {
	key                string
	record, annotation []byte
}

// encode encodes objects. Two goroutines encode many objects. If the change is one transaction, encode also sorts the
// objects by key, so that successive writes concern neighbouring places of the file.
func (j *Journal[O]) encode(puts []O) []encoded {
	out := make([]encoded, len(puts))
	some := func(first, last int) {
		for i := first; i < last; i++ {
			o, e := &puts[i], &out[i]
			if j.options.Annotate != nil {
				e.annotation = j.options.Annotate(o)
			}
			e.key, e.record = j.options.Key(o), j.options.Encode(o)
		}
	}
	if half := len(puts) / 2; half < manyRecords {
		some(0, len(puts))
	} else {
		var first sync.WaitGroup
		first.Go(func() { some(0, half) })
		some(half, len(puts))
		first.Wait()
	}
	if !j.options.Staged {
		slices.SortStableFunc(out, func(a, b encoded) int { return strings.Compare(a.key, b.key) })
	}
	return out
}

// manyRecords is the number of records that justify a goroutine.
const manyRecords = 256

// Staged is a change whose parts except the last are on disk. It is not effective yet. Its owner commits or discards
// it.
type Staged[O any] struct {
	journal *Journal[O]
	change  Change[O] // without objects
	last    part
	written []string // keys of objects
}

// Fits reports whether Commit can write the whole change in one transaction, without Stage.
func (j *Journal[O]) Fits(c Change[O]) bool {
	if !j.options.Staged {
		return true
	}
	if len(j.leftovers) > 0 || len(c.Puts)+len(c.Deletes) > partRecords {
		return false
	}
	size := 0
	for i := range c.Puts {
		size += j.options.Size(&c.Puts[i])
	}
	return size <= partBytes && len(j.divide(c)) == 1
}

// Stage writes all parts of a change except the last. It may run concurrently with every method except Stage, Tidy,
// Commit, and the methods of another Staged.
func (j *Journal[O]) Stage(ctx context.Context, c Change[O]) (*Staged[O], error) {
	// An earlier change with this number was not committed. Its records would become valid with this change, so
	// remove them first.
	if err := j.removeLeftovers(); err != nil {
		return nil, err
	}
	parts := j.divide(c)
	s := &Staged[O]{
		journal: j, change: Change[O]{Revision: c.Revision, State: c.State}, last: parts[len(parts)-1],
	}
	for _, p := range parts[:len(parts)-1] {
		err := beforeStage.Hit(ctx)
		if err == nil {
			err = ctx.Err()
		}
		if err == nil {
			s.written = append(s.written, p.keys...)
			err = j.update(func(t *store.Tx) error { j.put(t, p); return nil })
		}
		if err != nil {
			return nil, errors.Join(err, s.Discard())
		}
	}
	return s, nil
}

// Small reports whether Commit writes the whole change.
func (s *Staged[O]) Small() bool { return len(s.written) == 0 }

// put writes the records of one part.
func (j *Journal[O]) put(t *store.Tx, p part) {
	for i, key := range p.keys {
		record := p.records[i]
		switch {
		case j.options.Staged:
			t.Put(j.options.Objects, StagedKey(key, j.number+1), record)
		case isRemoval(record):
			t.Delete(j.options.Objects, []byte(key))
			j.annotate(t, key, nil)
		default:
			t.Put(j.options.Objects, []byte(key), record)
		}
		if !isRemoval(record) {
			j.annotate(t, key, p.annotations[i])
		}
	}
}

func (j *Journal[O]) isAnnotation(key string) bool {
	return j.options.Annotations != "" && strings.HasPrefix(key, j.options.Annotations)
}

// annotate stores the annotation of an object, or removes it if empty. Annotations have no change
// number: a codec that stages must itself detect whether an annotation belongs to the record.
func (j *Journal[O]) annotate(t *store.Tx, key string, annotation []byte) {
	if j.options.Annotations == "" {
		return
	}
	at := []byte(j.options.Annotations + key)
	if len(annotation) > 0 {
		t.Put(j.options.State, at, annotation)
	} else {
		t.Delete(j.options.State, at)
	}
}

// Commit makes the change valid. If it returns nil, the change is on disk. After ErrLost the process must end; after
// any other error nothing was changed, and the change may be committed again or discarded.
func (s *Staged[O]) Commit(ctx context.Context) error {
	if err := beforeWrite.Hit(ctx); err != nil {
		return err
	}
	j := s.journal
	number := j.number + 1
	if err := j.update(func(t *store.Tx) error {
		for key, value := range s.change.State {
			t.Put(j.options.State, []byte(key), value)
		}
		if s.change.Revision != 0 {
			t.Put(j.options.State, []byte(keyRevision), binary.BigEndian.AppendUint64(nil, s.change.Revision))
		}
		if len(s.last.records) == 0 {
			return nil
		}
		j.put(t, s.last)
		if !j.options.Staged {
			return nil
		}
		t.Put(j.options.State, []byte(keyNumber), binary.BigEndian.AppendUint64(nil, number))
		if s.Small() {
			return j.clean(t, s.last.keys, number)
		}
		return nil
	}); err != nil {
		return err
	}
	if j.options.Staged && len(s.last.records) > 0 {
		j.number = number
	}
	if len(s.last.records) >= partRecords || !s.Small() {
		j.mapped = true
	}
	if !s.Small() {
		j.outdated = append(append(j.outdated, s.written...), s.last.keys...)
	}
	s.written = nil
	return nil
}

// Discard removes the staged records. Records that cannot be removed now never become valid.
func (s *Staged[O]) Discard() error {
	j := s.journal
	j.leftovers = append(j.leftovers, s.written...)
	s.written = nil
	return j.removeLeftovers()
}

// Tidy removes superseded records, in transactions of bounded size, and unmaps the pages of the
// file after a large change. Records that cannot be removed now are removed by a later call, or
// when the file is opened.
func (j *Journal[O]) Tidy(ctx context.Context) error {
	if err := j.removeLeftovers(); err != nil {
		return err
	}
	if err := j.tidy(ctx, &j.outdated); err != nil || !j.mapped {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return errClosed
	}
	j.mapped = false
	return j.file.Unload()
}

func (j *Journal[O]) removeLeftovers() error { return j.tidy(context.Background(), &j.leftovers) }

func (j *Journal[O]) tidy(ctx context.Context, objects *[]string) error {
	for len(*objects) > 0 {
		if err := beforeTidy.Hit(ctx); err != nil {
			return err
		}
		some := (*objects)[:min(partRecords, len(*objects))]
		if err := j.update(func(t *store.Tx) error { return j.clean(t, some, j.number) }); err != nil {
			return err
		}
		*objects = (*objects)[len(some):]
	}
	*objects = nil
	return nil
}

// clean removes the superseded records of some objects, as of the change with the given number.
func (j *Journal[O]) clean(t *store.Tx, objects []string, number uint64) error {
	for _, object := range objects {
		var drop [][]byte
		var current []byte // key
		removed := false
		if err := t.ForEachWith(j.options.Objects, append([]byte(object), 0), func(k, v []byte) error {
			_, n, err := splitKey(k)
			switch {
			case err != nil:
				return j.Refuse(err)
			case n > number:
				drop = append(drop, bytes.Clone(k))
				return nil
			case current != nil:
				drop = append(drop, current)
			}
			current, removed = bytes.Clone(k), isRemoval(v)
			return nil
		}); err != nil {
			return err
		}
		if removed {
			drop = append(drop, current)
			j.annotate(t, object, nil)
		}
		for _, k := range drop {
			t.Delete(j.options.Objects, k)
		}
	}
	return nil
}

// update runs a transaction on the object file.
func (j *Journal[O]) update(f func(*store.Tx) error) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return errClosed
	}
	return j.file.Update(f)
}

// replayObjects passes the objects of the last committed change to give, and records which objects have outdated or
// uncommitted records.
func (j *Journal[O]) replayObjects(t *store.Tx, give func(O) error) error {
	replay := func(object string, record []byte) error {
		if record == nil || j.options.Staged && isRemoval(record) {
			return nil
		}
		o, err := j.options.Decode(object, record, j.annotation(t, object))
		if err != nil {
			return j.Refuse(fmt.Errorf("%s %.100q: %w", j.options.Objects, object, err))
		}
		return give(o)
	}
	if !j.options.Staged {
		return t.ForEach(j.options.Objects, func(k, v []byte) error { return replay(string(k), v) })
	}
	var object string  // the object of the current records
	var current []byte // its latest valid record
	if err := t.ForEach(j.options.Objects, func(k, v []byte) error {
		of, n, err := splitKey(k)
		if err != nil {
			return j.Refuse(fmt.Errorf("%s %.100q: %w", j.options.Objects, k, err))
		}
		if of != object {
			if err := replay(object, current); err != nil {
				return err
			}
			object, current = of, nil
		}
		switch {
		case n > j.number:
			j.leftovers = append(j.leftovers, of)
		default:
			if current != nil || isRemoval(v) {
				j.outdated = append(j.outdated, of)
			}
			current = v
		}
		return nil
	}); err != nil {
		return err
	}
	return replay(object, current)
}

// annotation returns the annotation of an object, nil if it has none.
func (j *Journal[O]) annotation(t *store.Tx, object string) []byte {
	if j.options.Annotations == "" {
		return nil
	}
	return t.Get(j.options.State, []byte(j.options.Annotations+object))
}

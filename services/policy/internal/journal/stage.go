// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package journal

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/store"
)

// A record of a policy has the number of its change in its key, and counts once
// the state has that number or a later one. So a large change is written in many
// small transactions of which nothing counts, and the last one, which has the
// number, makes all of it count at once. Of the records of one policy that count,
// the one of the latest change is the policy; a removal is a record, too. What
// counts no more, and what a change left that was never committed, is removed
// afterwards, or when the file is opened.

// Bounds of one transaction, and so of what Commit writes of any change. A single
// policy may be larger.
const (
	partRecords = 256
	partBytes   = 256 << 10
)

// Points at which a test may kill the process.
var (
	beforeStage = fault.Register("policy/journal/before-stage")
	beforeTidy  = fault.Register("policy/journal/before-tidy")
)

// removal is the record of a removed policy. No header has the length 0.
var removal = []byte{0}

// recordKey names what a change says of a policy.
func recordKey(policy string, number uint64) []byte {
	return binary.BigEndian.AppendUint64(append([]byte(policy), 0), number)
}

// numberSize is how much longer the key of a record is than that of its policy.
const numberSize = 1 + 8

// splitKey divides the key of a record.
func splitKey(key []byte) (policy string, number uint64, err error) {
	end := len(key) - numberSize
	if end < 0 || key[end] != 0 {
		return "", 0, errors.New("the key has no number of a change")
	}
	return string(key[:end]), binary.BigEndian.Uint64(key[end+1:]), nil
}

// part is what one transaction writes.
type part struct {
	policies []string // keys
	records  [][]byte
	places   []*Policy // nil: the policy is removed
}

// divide makes parts of a change, at least one.
func divide(c Change) []part {
	parts := []part{{}}
	size := 0
	add := func(k Key, record []byte, p *Policy) {
		last := &parts[len(parts)-1]
		if n := len(last.records); n == partRecords || n > 0 && size+len(record) > partBytes {
			parts = append(parts, part{})
			last, size = &parts[len(parts)-1], 0
		}
		size += len(record)
		last.policies, last.records = append(last.policies, policyKey(k)), append(last.records, record)
		last.places = append(last.places, p)
	}
	for i := range c.Policies {
		p := &c.Policies[i]
		add(p.Key, encodePolicy(*p), p)
	}
	for _, k := range c.GonePolicies {
		add(k, removal, nil)
	}
	return parts
}

// Staged is a change of policies that is on the disk but for its last part, and
// does not count yet. Its owner commits or discards it.
type Staged struct {
	journal *Journal
	change  Change // without policies
	last    part
	written []string // keys of policies
}

// Fits reports whether Stage of a change has nothing to write.
func (j *Journal) Fits(c Change) bool {
	if len(j.leftovers) > 0 || len(c.Policies)+len(c.GonePolicies) > partRecords {
		return false
	}
	size := 0
	for _, p := range c.Policies {
		size += len(p.Manifest)
	}
	return size <= partBytes && len(divide(c)) == 1
}

// Stage writes a change of policies but for its last part. It may run beside
// every call but those of Stage, Tidy and Commit, and those of another Staged.
func (j *Journal) Stage(ctx context.Context, c Change) (*Staged, error) {
	// What another change left under this number would count with it.
	if err := j.removeLeftovers(); err != nil {
		return nil, err
	}
	parts := divide(c)
	s := &Staged{journal: j, change: Change{State: c.State, Revision: c.Revision}, last: parts[len(parts)-1]}
	for _, p := range parts[:len(parts)-1] {
		err := beforeStage.Hit(ctx)
		if err == nil {
			err = ctx.Err()
		}
		if err == nil {
			s.written = append(s.written, p.policies...)
			err = j.update(func(t *store.Tx) error { j.put(t, p); return nil })
		}
		if err != nil {
			return nil, errors.Join(err, s.Discard())
		}
	}
	return s, nil
}

// Small reports whether Commit writes all of the change.
func (s *Staged) Small() bool { return len(s.written) == 0 }

// put writes records of the change that is not committed yet.
func (j *Journal) put(t *store.Tx, p part) {
	for i, policy := range p.policies {
		t.Put(bucketPolicies, recordKey(policy, j.number+1), p.records[i])
		if p.places[i] != nil {
			putPlace(t, policy, p.places[i])
		}
	}
}

// Commit makes the change count. It is on the disk when Commit returns nil. After
// ErrLost the process has to end; after any other error everything is as before,
// and the change may be committed again or discarded.
func (s *Staged) Commit(ctx context.Context) error {
	if err := beforeWrite.Hit(ctx); err != nil {
		return err
	}
	j := s.journal
	number := j.number + 1
	if err := j.update(func(t *store.Tx) error {
		if s.change.State != "" {
			t.Put(bucketState, keyName, []byte(s.change.State))
		}
		if s.change.Revision != 0 {
			t.Put(bucketState, keyRevision, binary.BigEndian.AppendUint64(nil, s.change.Revision))
		}
		if len(s.last.records) == 0 {
			return nil
		}
		j.put(t, s.last)
		t.Put(bucketState, keyNumber, binary.BigEndian.AppendUint64(nil, number))
		if s.Small() {
			return j.clean(t, s.last.policies, number)
		}
		return nil
	}); err != nil {
		return err
	}
	if len(s.last.records) > 0 {
		j.number = number
	}
	if !s.Small() {
		j.outdated = append(append(j.outdated, s.written...), s.last.policies...)
	}
	s.written = nil
	return nil
}

// Discard removes what Stage wrote. What cannot be removed now never counts.
func (s *Staged) Discard() error {
	j := s.journal
	j.leftovers = append(j.leftovers, s.written...)
	s.written = nil
	return j.removeLeftovers()
}

// Tidy removes what counts no more, in transactions of bounded size. What cannot
// be removed now is removed by a later call, or when the file is opened.
func (j *Journal) Tidy(ctx context.Context) error {
	if err := j.removeLeftovers(); err != nil {
		return err
	}
	return j.tidy(ctx, &j.outdated)
}

func (j *Journal) removeLeftovers() error { return j.tidy(context.Background(), &j.leftovers) }

func (j *Journal) tidy(ctx context.Context, policies *[]string) error {
	for len(*policies) > 0 {
		if err := beforeTidy.Hit(ctx); err != nil {
			return err
		}
		some := (*policies)[:min(partRecords, len(*policies))]
		if err := j.update(func(t *store.Tx) error { return j.clean(t, some, j.number) }); err != nil {
			return err
		}
		*policies = (*policies)[len(some):]
	}
	*policies = nil
	return nil
}

// clean leaves of the records of some policies those that say what the policies
// are after the change with a number.
func (j *Journal) clean(t *store.Tx, policies []string, number uint64) error {
	for _, policy := range policies {
		var drop [][]byte
		var current []byte // key
		removed := false
		if err := t.ForEachWith(bucketPolicies, append([]byte(policy), 0), func(k, v []byte) error {
			_, n, err := splitKey(k)
			switch {
			case err != nil:
				return j.policies.Refuse(err)
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
			if key := placeKey(policy); t.Get(bucketState, key) != nil {
				t.Delete(bucketState, key)
			}
		}
		for _, k := range drop {
			t.Delete(bucketPolicies, k)
		}
	}
	return nil
}

func isRemoval(record []byte) bool { return len(record) == 1 && record[0] == 0 }

// update changes the file of policies.
func (j *Journal) update(f func(*store.Tx) error) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return errClosed
	}
	return j.policies.Update(f)
}

// errClosed: the service is going down.
var errClosed = errors.New("the journal is closed")

// replayPolicies gives the policies that the last change left, and notes what has
// to be removed.
func (j *Journal) replayPolicies(t *store.Tx, replay func(Change) error) error {
	if b := t.Get(bucketState, keyNumber); b != nil {
		if len(b) != 8 {
			return j.policies.Refuse(fmt.Errorf("a number of a change with %d bytes", len(b)))
		}
		j.number = binary.BigEndian.Uint64(b)
	}
	var policy string  // that the records are of
	var current []byte // its record
	give := func() error {
		if current == nil || isRemoval(current) {
			return nil
		}
		p, err := decodePolicy(current)
		if err == nil && policyKey(p.Key) != policy {
			err = errors.New("it is the record of another policy")
		}
		if err != nil {
			return j.policies.Refuse(fmt.Errorf("%s %.100q: %w", bucketPolicies, policy, err))
		}
		p.Place = placeOf(t, policy, &p)
		return replay(Change{Policies: []Policy{p}})
	}
	if err := t.ForEach(bucketPolicies, func(k, v []byte) error {
		of, n, err := splitKey(k)
		if err != nil {
			return j.policies.Refuse(fmt.Errorf("%s %.100q: %w", bucketPolicies, k, err))
		}
		if of != policy {
			if err := give(); err != nil {
				return err
			}
			policy, current = of, nil
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
	return give()
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"
)

// recorder writes what this node holds to its records, and passes on the endpoints that were written.
type recorder struct {
	index     *index
	records   Records
	endpoints EndpointPublisher
	unwritten chan struct{} // the records were not written; capacity 1
	// closing are holders whose move is shown to readers as isolated until it is saved. Guarded by index.mu.
	closing map[Holder]struct{}
}

func newRecorder(x *index, records Records, endpoints EndpointPublisher) *recorder {
	r := &recorder{index: x, records: records, endpoints: endpoints, unwritten: make(chan struct{}, 1), closing: map[Holder]struct{}{}}
	x.saver.init(r.save, r.ended)
	return r
}

// recordsAgain is the pause after records that could not be written.
const recordsAgain = time.Second

// save writes the changes of the holds, and then publishes the changed endpoints, so that readers only learn what
// survives this process. If the write fails, it publishes the endpoints in closing as isolated. One call runs at a
// time.
func (r *recorder) save() error {
	r.index.mu.Lock(opSave)
	c := HoldsChange{NextNodeLocal: r.index.local.next, Session: r.index.joined}
	c.Put, c.Drop = r.index.held.take()
	changed := r.index.held.endpoints(c.Put)
	r.index.mu.Unlock()
	slices.Sort(c.Drop)
	slices.SortFunc(c.Put, func(x, y HolderRecord) int { return strings.Compare(string(x.Holder), string(y.Holder)) })
	err := r.records.SaveHolds(c)
	if err != nil {
		r.index.mu.Lock(opSave)
		defer r.index.mu.Unlock()
		r.index.held.putBack(c.Put, c.Drop)
		for _, e := range changed {
			if _, closes := r.closing[e.Holder]; closes {
				e.Identity = isolated
				r.endpoints.Upsert(e.Holder, e)
			}
		}
		return err
	}
	r.saved(c)
	for _, e := range changed {
		r.endpoints.Upsert(e.Holder, e)
	}
	for _, holder := range c.Drop {
		r.endpoints.Delete(holder)
	}
	return nil
}

// saved ends the isolation of the holders whose change was written.
func (r *recorder) saved(c HoldsChange) {
	r.index.mu.Lock(opSave)
	defer r.index.mu.Unlock()
	for _, h := range c.Put {
		delete(r.closing, h.Holder)
	}
	for _, holder := range c.Drop {
		delete(r.closing, holder)
	}
}

// isolateUnsaved shows an endpoint as isolated to readers while its move to another label set cannot be saved, because
// the former identity may allow more. It returns false if all is saved.
func (r *recorder) isolateUnsaved(ctx context.Context, holder Holder) bool {
	r.index.mu.Lock(opHold)
	r.closing[holder] = struct{}{}
	r.index.mu.Unlock()
	if errors.Is(r.index.saver.wait(ctx), ErrRecords) {
		return true
	}
	r.index.mu.Lock(opHold)
	defer r.index.mu.Unlock()
	delete(r.closing, holder)
	return false
}

// run retries writes that a full disk refused, so that the reported state of the disk is current even without
// calls.
func (r *recorder) run(ctx context.Context) {
	for {
		select {
		case <-r.unwritten:
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(recordsAgain):
		case <-ctx.Done():
			return
		}
		_ = r.index.saver.wait(ctx) // ended has noted its error
	}
}

// ended notes how a write of the records ended.
func (r *recorder) ended(err error) {
	r.index.mu.Lock(opSave)
	defer r.index.mu.Unlock()
	r.index.available.disk(err)
	if err != nil {
		select {
		case r.unwritten <- struct{}{}:
		default:
		}
	}
}

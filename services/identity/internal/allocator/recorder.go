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

// recorder saves this node's holders in the records, and then publishes the saved endpoints.
type recorder struct {
	index     *index
	records   Records
	endpoints EndpointPublisher
	unwritten chan struct{} // contains a token if the records could not be written; capacity 1
	// closing contains the holders that are published as isolated until their move is saved. Guarded by index.mu.
	closing map[Holder]struct{}
}

func newRecorder(x *index, records Records, endpoints EndpointPublisher) *recorder {
	r := &recorder{index: x, records: records, endpoints: endpoints, unwritten: make(chan struct{}, 1), closing: map[Holder]struct{}{}}
	x.saver.init(r.save, r.ended)
	return r
}

// recordsAgain is the pause before another attempt to write the records.
const recordsAgain = time.Second

// save writes the changed holders, and then publishes the changed endpoints, so that readers only receive state that
// survives this process. If the write fails, it publishes the endpoints in closing as isolated. Only one call may run
// at a time.
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

// isolateUnsaved publishes an endpoint as isolated if its move to another label set cannot be saved, because the former
// identity may allow more. It returns false if everything is saved.
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

// run retries failed writes, so that the reported state of the disk is current even without calls.
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
		_ = r.index.saver.wait(ctx) // ended has already recorded the error
	}
}

// ended records the result of a write of the records.
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

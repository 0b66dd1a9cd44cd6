// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"context"
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
}

func newRecorder(x *index, records Records, endpoints EndpointPublisher) *recorder {
	r := &recorder{index: x, records: records, endpoints: endpoints, unwritten: make(chan struct{}, 1)}
	x.saver.init(r.save, r.ended)
	return r
}

// recordsAgain is the pause after records that could not be written.
const recordsAgain = time.Second

// save writes the changes of the holds, and then publishes the changed endpoints, so that readers only learn what
// survives this process. One call runs at a time.
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
		return err
	}
	for _, e := range changed {
		r.endpoints.Upsert(e.Holder, e)
	}
	for _, holder := range c.Drop {
		r.endpoints.Delete(holder)
	}
	return nil
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

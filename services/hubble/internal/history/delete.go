// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package history

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
)

// Deletion selects records to delete.
type Deletion struct {
	// Before excludes records of this time and later; zero excludes no record.
	Before time.Time
	// Skip reports whether no record of a segment is selected.
	Skip func(Index) bool
	// Selects reports whether a record with these facts is selected.
	Selects func(Facts) bool
	// Rest returns the part of the latest record that stays if the record is deleted: its position in the datapath's
	// stream, from which the stream continues after a restart.
	Rest func(data []byte) []byte
	// ValidateOnly is set if records are only counted, and not deleted.
	ValidateOnly bool
}

// Delete deletes the selected records that exist now, and returns their number. Records about losses stay. It
// rewrites one segment at a time, so that new records wait at most for one segment. A corrupt segment stays, and its
// records are not counted.
func (h *History) Delete(ctx context.Context, d Deletion) (deleted uint64, err error) {
	// After Flush, the records up to last are in files, unless the disk is full. Records that arrive later may still
	// wait for a batch. If Delete selected these, the batch would write them after they were deleted from memory.
	last := h.Last()
	h.Flush()
	for _, s := range h.segments(d.Before) {
		if err := ctx.Err(); err != nil {
			return deleted, err
		}
		if d.Skip != nil && d.Skip(s.index) {
			continue
		}
		n, err := h.deleteIn(s, last, d)
		deleted += n
		if err != nil {
			return deleted, err
		}
	}
	if d.ValidateOnly {
		return deleted, nil
	}
	n, err := h.deleteInMemory(last, d)
	return deleted + n, err
}

// segments returns copies of the segments with records before a time, or of all segments if the time is zero.
func (h *History) segments(before time.Time) (all []*segment) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range h.parts {
		for _, s := range p.segments {
			if before.IsZero() || s.from.Before(before) {
				all = append(all, s.copy())
			}
		}
	}
	return all
}

// deleteInMemory deletes records that are only in memory.
func (h *History) deleteInMemory(last uint64, d Deletion) (deleted uint64, err error) {
	gone := make(map[uint64][]byte)
	for _, r := range h.copy(Query{First: 1, Last: last}).recent {
		if r.Loss {
			continue
		}
		facts, err := h.o.Describe(r.Data)
		if err != nil {
			return 0, err
		}
		if rest, ok := d.deletes(r, facts, last); ok {
			gone[r.Number] = rest
		}
	}
	h.forget(gone)
	return uint64(len(gone)), nil
}

// deletes reports whether a record is to be deleted; last is the number of the latest record. It returns the rest of
// the record that stays, or nil. A record that is already such a rest is not deleted again.
func (d Deletion) deletes(r Record, f Facts, last uint64) (rest []byte, ok bool) {
	if r.Loss || r.Number > last || !d.Before.IsZero() && !r.Time.Before(d.Before) || !d.Selects(f) {
		return nil, false
	}
	if r.Number == last {
		rest = d.Rest(r.Data)
	}
	return rest, rest == nil || !bytes.Equal(rest, r.Data)
}

// deleteIn deletes the selected records of one segment.
func (h *History) deleteIn(of *segment, last uint64, d Deletion) (deleted uint64, err error) {
	h.writing.Lock()
	defer h.writing.Unlock()
	p, s := h.find(of)
	if s == nil { // displaced since
		return 0, nil
	}
	content, suffix, err := h.content(s)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	all, err := decode(content, suffix)
	if err != nil {
		h.corrupt(s, err)
		return 0, nil
	}
	kept := &segment{first: s.first, part: s.part, suffix: segmentSuffix}
	kept.index = Index{Part: s.part, First: s.first}
	var frames []byte
	gone := make(map[uint64][]byte)
	for _, r := range all {
		var facts Facts
		if !r.Loss {
			if facts, err = h.o.Describe(r.Data); err != nil {
				h.corrupt(s, err)
				return 0, nil
			}
		}
		if rest, ok := d.deletes(r, facts, last); ok {
			gone[r.Number] = rest
			if r.Data, facts = rest, (Facts{}); r.Data == nil {
				continue
			}
		}
		kept.add(r, facts)
		frames = appendFrame(frames, appendRecord(nil, r))
	}
	if len(gone) == 0 || d.ValidateOnly {
		return uint64(len(gone)), nil
	}
	if err := h.replace(p, s, kept, frames); err != nil {
		return 0, err
	}
	h.forget(gone)
	return uint64(len(gone)), nil
}

// find returns the segment of which of is a copy, and its part; nil if the segment was displaced. Called with writing
// held.
func (h *History) find(of *segment) (*part, *segment) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range h.parts {
		for _, s := range p.segments {
			if s.first == of.first {
				return p, s
			}
		}
	}
	return nil, nil
}

// replace replaces a segment by a segment that contains only the kept frames, or removes it if no record is kept. A
// journal becomes a compressed segment, so its part continues with a new journal. Called with writing held.
func (h *History) replace(p *part, s, kept *segment, frames []byte) error {
	journal := s.suffix == journalSuffix
	if kept.index.Count > 0 {
		index, err := json.Marshal(kept.index)
		if err != nil {
			return err
		}
		out := appendFrame([]byte(segmentMagic), index)
		out = appendFrame(out, encoder.EncodeAll(frames, nil))
		kept.bytes = int64(len(out))
		if err := durable.WriteFile(kept.path(h.o.Dir), out, 0o600, durable.SyncFile); err != nil {
			return err
		}
	}
	if journal || kept.index.Count == 0 {
		if err := os.Remove(s.path(h.o.Dir)); err != nil {
			return err
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if journal && p.journal != nil {
		p.journal.Close() //nolint:errcheck,gosec // the file is removed anyway
		p.journal = nil
	}
	h.bytes += kept.bytes - s.bytes
	for i, x := range p.segments {
		if x != s {
			continue
		}
		if kept.index.Count > 0 {
			p.segments[i] = kept
		} else {
			p.segments = append(p.segments[:i:i], p.segments[i+1:]...)
		}
		return nil
	}
	return nil
}

// forget replaces the content of records in memory. Readers skip records without content.
func (h *History) forget(gone map[uint64][]byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.recent {
		if rest, ok := gone[h.recent[i].Number]; ok {
			h.recent[i].Data = rest
		}
	}
}

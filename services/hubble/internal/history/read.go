// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package history

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"iter"
	"os"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
)

// Query selects records.
type Query struct {
	// First and Last are the lowest and the highest record number to read; zero means no limit.
	First, Last uint64
	// From and To select segments with records in this time span; zero means no limit. A read may return records
	// outside of the time span.
	From, To time.Time
	// Skip reports whether no record of a segment can match; nil skips no segment.
	Skip func(Index) bool
	// Corrupt is called for each segment that cannot be read completely: with the number in its file name, its part,
	// and the number of missing records. If the number of records is unknown, records is 1. If the part is unknown,
	// part is Unknown.
	Corrupt func(file uint64, part string, records int, from, to time.Time)
}

// wants reports whether a record's number is in the range.
func (q Query) wants(number uint64) bool {
	return number >= q.First && (q.Last == 0 || number <= q.Last)
}

// view is the state of the history at the beginning of a read.
type view struct {
	h        *History
	q        Query
	segments []*segment // copies of pointers to the segments that match the query
	recent   []Record   // in order
}

// look returns a view of the current state. It compares the indices of all segments with the query without a lock,
// because this takes long, and records are appended in the meantime.
func (h *History) look(q Query) *view {
	v := h.copy(q)
	if q.Skip != nil {
		v.segments = slices.DeleteFunc(v.segments, func(s *segment) bool { return !s.index.Losses && q.Skip(s.index) })
	}
	return v
}

// copy returns a view of the current state without comparing indices.
func (h *History) copy(q Query) *view {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := &view{h: h, q: q}
	first := h.firstRecent()
	for n := max(first, q.First); n < h.next && q.wants(n); n++ {
		if r := h.recent[(n-h.first)%Recent]; r.Data != nil { // not deleted
			v.recent = append(v.recent, r)
		}
	}
	for _, p := range h.parts {
		for _, s := range p.segments {
			if s.index.First >= first || s.index.Last < q.First || q.Last != 0 && s.index.First > q.Last ||
				!q.From.IsZero() && s.to.Before(q.From) || !q.To.IsZero() && s.from.After(q.To) {
				continue
			}
			v.segments = append(v.segments, s.copy())
		}
	}
	return v
}

// records returns the records of a segment that are not in memory.
func (v *view) records(s *segment) []Record {
	content, suffix, err := v.h.content(s)
	var all []Record
	if err == nil {
		all, err = decode(content, suffix)
	}
	if errors.Is(err, fs.ErrNotExist) { // the segment was displaced since the read began
		return nil
	}
	if err != nil {
		v.h.corrupt(s, err)
		if v.q.Corrupt != nil {
			v.q.Corrupt(s.first, s.part, max(1, s.index.Count-len(all)), s.from, s.to)
		}
	}
	before := uint64(1<<64 - 1)
	if len(v.recent) > 0 {
		before = v.recent[0].Number
	}
	for i := range all {
		all[i].Part = s.part
	}
	return slices.DeleteFunc(all, func(r Record) bool {
		return r.Number >= before || r.Number > s.index.Last || !v.q.wants(r.Number)
	})
}

// content reads the file of a segment. A journal may have been compressed in the meantime.
func (h *History) content(s *segment) (content []byte, suffix string, err error) {
	for _, suffix := range []string{s.suffix, segmentSuffix} {
		c := segment{first: s.first, suffix: suffix}
		content, err = durable.ReadFile(c.path(h.o.Dir), maxFrame)
		if !errors.Is(err, os.ErrNotExist) {
			return content, suffix, err
		}
	}
	return nil, "", err
}

// decode returns the records of a file. If a record is corrupt, it returns an error and the records before it.
func decode(content []byte, suffix string) (all []Record, err error) {
	var frames []byte
	if suffix == segmentSuffix {
		if len(content) < len(segmentMagic) || string(content[:len(segmentMagic)]) != segmentMagic {
			return nil, errCorrupt
		}
		_, rest, _, err := cutFrame(content[len(segmentMagic):])
		if err != nil {
			return nil, err
		}
		compressed, _, _, err := cutFrame(rest)
		if err != nil {
			return nil, err
		}
		if frames, err = decoder.DecodeAll(compressed, nil); err != nil {
			return nil, errCorrupt
		}
	} else if _, frames, _, err = journalHead(content); err != nil {
		return nil, err
	}
	for len(frames) > 0 {
		frame, rest, cut, err := cutFrame(frames)
		if cut && suffix == journalSuffix { // the last batch is just being written
			break
		}
		if err != nil {
			return all, err
		}
		r, err := parseRecord(frame)
		if err != nil {
			return all, err
		}
		all = append(all, r)
		frames = rest
	}
	return all, nil
}

// Forward yields records, oldest first.
func (h *History) Forward(ctx context.Context, q Query) iter.Seq[Record] {
	v := h.look(q)
	slices.SortFunc(v.segments, func(a, b *segment) int { return cmp.Compare(a.index.First, b.index.First) })
	return v.merge(ctx, 1, func(s *segment) uint64 { return s.index.First })
}

// Backward yields records, latest first.
func (h *History) Backward(ctx context.Context, q Query) iter.Seq[Record] {
	v := h.look(q)
	slices.SortFunc(v.segments, func(a, b *segment) int { return cmp.Compare(b.index.Last, a.index.Last) })
	return v.merge(ctx, -1, func(s *segment) uint64 { return s.index.Last })
}

// merge yields the records of all segments and of the memory in ascending order (order is 1) or descending order
// (-1). v.segments must be sorted in this order by edge. merge reads a segment only when its first record in this
// order is due. So only overlapping segments of different parts are in memory at the same time.
func (v *view) merge(ctx context.Context, order int, edge func(*segment) uint64) iter.Seq[Record] {
	return func(yield func(Record) bool) {
		segments := v.segments
		var open [][]Record
		push := func(records []Record) {
			if order < 0 {
				slices.Reverse(records)
			}
			if len(records) > 0 {
				open = append(open, records)
			}
		}
		push(slices.Clone(v.recent)) // copied, because the sequence may be iterated again
		for ctx.Err() == nil {
			best := -1
			for i := range open {
				if best < 0 || order*cmp.Compare(open[i][0].Number, open[best][0].Number) < 0 {
					best = i
				}
			}
			if len(segments) > 0 && (best < 0 || order*cmp.Compare(edge(segments[0]), open[best][0].Number) < 0) {
				push(v.records(segments[0]))
				segments = segments[1:]
				continue
			}
			if best < 0 {
				return
			}
			r := open[best][0]
			if open[best] = open[best][1:]; len(open[best]) == 0 {
				open = slices.Delete(open, best, best+1)
			}
			if !yield(r) {
				return
			}
		}
	}
}

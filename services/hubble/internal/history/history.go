// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package history keeps records of flows: the latest records in memory, for readers that follow, and all records in
// files of limited size.
//
// The records are divided into parts, one for each tenant. When the files reach the limit, the largest part loses its
// oldest segment. So a tenant with many flows displaces its own records first. A segment is first a journal, to which
// a batch is written every second. When it is full, it is compressed. A killed process loses at most the records of
// the last second. If the file system cannot be written, new records are only in memory, and readers that follow are
// not affected.
//
// The package does not depend on flows or gRPC: a record is a byte string with a few facts about it.
package history

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/log"
)

// Bounds.
const (
	// Recent is the number of records that are kept in memory.
	Recent = 4096
	// MaxParts is the maximum number of parts. All further tenants share one part.
	MaxParts = 64
	// MinBytes is the minimum size limit of the files.
	MinBytes = 4 << 20
	// maxRecord is the maximum size of one record in bytes.
	maxRecord = 64 << 10
	// batchRecords and batchBytes limit the records that wait for the next batch. When one of the limits is reached,
	// the batch is written at once.
	batchRecords = Recent / 4
	batchBytes   = 512 << 10
	// maxSegments is the maximum number of files, even if they are small.
	maxSegments = 8192
	// batchInterval is the time between two batches.
	batchInterval = time.Second
	// gather is how long a reader that has read every record waits after the arrival of the next record, to get more
	// records at once. If many readers woke for each record, no CPU time would be left to receive records.
	gather = 10 * time.Millisecond
)

// Others is the part that the tenants beyond MaxParts share.
const Others = "others"

// Facts are the properties of a record that are in the index of its segment.
type Facts struct {
	Namespaces []string
	Pods       []string // "namespace/name"
	Verdict    int32
	Reason     int32
}

// Entry is a new record.
type Entry struct {
	Part  string
	Time  time.Time
	Loss  bool // the record reports lost flows, and is part of every answer
	Data  []byte
	Facts Facts
}

// Record is a stored record.
type Record struct {
	Number uint64 // from 1, in order of arrival; never reused
	Part   string
	Time   time.Time
	Loss   bool
	Data   []byte // must not be changed
}

// Options describe a History. All fields are required.
type Options struct {
	Dir string
	// MaxBytes limits the total size of all files.
	MaxBytes int64
	// MaxAge limits the age of records.
	MaxAge time.Duration
	// Describe returns the facts of a record. It is called for records that an earlier process wrote to a journal.
	Describe func(data []byte) (Facts, error)
	Now      func() time.Time
	Log      *slog.Logger
}

// Status describes the content of a History.
type Status struct {
	Records  uint64 // records in files and in memory
	Bytes    int64  // size of all files
	MaxBytes int64
	Seen     uint64 // records since the start of the process
	Parts    []PartStatus
	// Problem is why records are not written, or which files are corrupt; nil if there is no problem.
	Problem error
	// Unwritten is the number of records since the start that were not written because of a problem.
	Unwritten uint64
}

// PartStatus describes one part.
type PartStatus struct {
	Name    string
	Records uint64
	Bytes   int64
	Oldest  time.Time // time of the oldest stored record
	// Complete is the time of the newest displaced record of the part: after it, the part has all records. It is zero
	// if no record was displaced.
	Complete time.Time
}

// History keeps records. Append must not be called concurrently. All other methods may be called concurrently.
type History struct {
	o       Options
	segment int // size in bytes at which a journal is full

	writing sync.Mutex // held while files change; taken before mu

	mu        sync.Mutex
	recent    []Record      // guarded by mu; the last Recent records
	next      uint64        // guarded by mu; number of the next record
	arrived   chan struct{} // guarded by mu; closed when the next record arrives; nil if no reader waits
	parts     map[string]*part
	complete  map[string]time.Time // guarded by mu; by part, the time of the newest displaced record
	bytes     int64                // guarded by mu; size of all files
	waiting   int                  // guarded by mu; records that wait for a batch
	waitBytes int                  // guarded by mu
	unwritten uint64               // guarded by mu
	first     uint64               // number of the first record of this process
	failure   error                // guarded by mu; why the last batch was not written
	broken    map[string]error     // guarded by mu; by corrupt file
}

// part contains the records of one tenant.
type part struct {
	name     string
	segments []*segment // oldest first
	pending  []Record   // guarded by mu; records for the next batch
	facts    []Facts    // of pending
	journal  *os.File   // journal of the last segment, if it is not full; guarded by writing
}

func (p *part) size() (bytes int64) {
	for _, s := range p.segments {
		bytes += s.bytes
	}
	return bytes
}

// Open reads the index of all files. Corrupt files are kept. They count towards the size limit, and Status reports
// them.
func Open(o Options) (*History, error) {
	h := &History{
		o: o, next: 1, parts: make(map[string]*part),
		complete: make(map[string]time.Time), broken: make(map[string]error),
		segment: int(min(max(o.MaxBytes/256, 64<<10), 1<<20)),
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("history: %w", err)
	}
	if _, err := durable.RemoveTemp(o.Dir); err != nil {
		return nil, fmt.Errorf("history: %w", err)
	}
	if err := h.load(); err != nil {
		return nil, fmt.Errorf("history in %s: %w", o.Dir, err)
	}
	h.first = h.next
	h.writing.Lock()
	defer h.writing.Unlock()
	h.evict(0)
	return h, nil
}

// Append adds a record. It blocks only while it writes a full batch.
func (h *History) Append(e Entry) {
	if len(e.Data) > maxRecord {
		h.o.Log.Warn("record not kept, because it is too large", "bytes", len(e.Data), "most", maxRecord)
		return
	}
	h.mu.Lock()
	p := h.part(e.Part)
	r := Record{Number: h.next, Part: p.name, Time: e.Time, Loss: e.Loss, Data: e.Data}
	if len(h.recent) < Recent {
		h.recent = append(h.recent, r)
	} else {
		h.recent[(r.Number-h.first)%Recent] = r
	}
	h.next++
	p.pending, p.facts = append(p.pending, r), append(p.facts, e.Facts)
	h.waiting++
	h.waitBytes += len(e.Data)
	full := h.waiting >= batchRecords || h.waitBytes >= batchBytes
	if h.arrived != nil {
		close(h.arrived)
		h.arrived = nil
	}
	h.mu.Unlock()
	if full {
		h.Flush()
	}
}

// part returns a part, or the common part if there are too many. Called with mu held.
func (h *History) part(name string) *part {
	if p := h.parts[name]; p != nil {
		return p
	}
	if name != Others && len(h.parts) >= MaxParts-1 {
		return h.part(Others)
	}
	p := &part{name: name}
	h.parts[name] = p
	return p
}

// Run writes batches until ctx ends, and then the last batch.
func (h *History) Run(ctx context.Context) error {
	tick := time.NewTicker(batchInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			h.Flush()
		case <-ctx.Done():
			h.Flush()
			return nil
		}
	}
}

// Close closes the files. Nothing may be appended afterwards.
func (h *History) Close() error {
	h.Flush()
	h.writing.Lock()
	defer h.writing.Unlock()
	var errs []error
	for _, p := range h.parts {
		if p.journal != nil {
			errs = append(errs, p.journal.Close())
			p.journal = nil
		}
	}
	return errors.Join(errs...)
}

// Flush writes the records that wait for a batch, and removes records that exceed the limits.
func (h *History) Flush() {
	h.writing.Lock()
	defer h.writing.Unlock()
	h.mu.Lock()
	type batch struct {
		part    *part
		records []Record
		facts   []Facts
	}
	var batches []batch
	for _, p := range h.parts {
		if len(p.pending) > 0 {
			batches = append(batches, batch{p, p.pending, p.facts})
			p.pending, p.facts = nil, nil
		}
	}
	h.waiting, h.waitBytes = 0, 0
	h.mu.Unlock()
	slices.SortFunc(batches, func(a, b batch) int { return cmp.Compare(a.records[0].Number, b.records[0].Number) })
	var failure error
	for _, b := range batches {
		if err := h.write(b.part, b.records, b.facts); err != nil {
			failure = err
		}
	}
	h.evict(0)
	h.mu.Lock()
	defer h.mu.Unlock()
	for name, p := range h.parts {
		if len(p.segments) == 0 && len(p.pending) == 0 {
			delete(h.parts, name)
		}
	}
	if len(batches) == 0 { // without a batch, it is unknown whether writing works again
		return
	}
	if failure != nil && h.failure == nil {
		h.o.Log.Error("history stopped; new flows are only in memory", log.Err(failure))
	}
	if failure == nil && h.failure != nil {
		h.o.Log.Info("history continues", "unwritten", h.unwritten)
	}
	h.failure = failure
}

// evict removes the oldest segments until need more bytes fit into the size limit. It also removes segments that are
// too old. Called with writing held.
func (h *History) evict(need int64) {
	oldest := h.o.Now().Add(-h.o.MaxAge)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range h.parts {
		// If the clock was set back, a segment may be older than the segment before it.
		for i := 0; i < len(p.segments); {
			if !p.segments[i].to.Before(oldest) {
				i++
				continue
			}
			h.drop(p, i)
		}
	}
	// While a journal is compressed, both the journal and the compressed segment exist.
	bound := h.o.MaxBytes - int64(h.segment)
	for h.bytes+need > bound || h.files() > maxSegments {
		var largest *part
		for _, p := range h.parts {
			if len(p.segments) > 0 && (largest == nil || p.size() > largest.size() ||
				p.size() == largest.size() && p.name < largest.name) {
				largest = p
			}
		}
		if largest == nil {
			return
		}
		h.drop(largest, 0)
	}
}

// files returns the number of files. Called with mu held.
func (h *History) files() (n int) {
	for _, p := range h.parts {
		n += len(p.segments)
	}
	return n
}

// drop removes a segment of a part. Called with writing and mu held.
func (h *History) drop(p *part, i int) {
	s := p.segments[i]
	last := i == len(p.segments)-1
	p.segments = slices.Delete(p.segments, i, i+1)
	if last && p.journal != nil {
		p.journal.Close() //nolint:errcheck,gosec // the file is removed
		p.journal = nil
	}
	if err := os.Remove(s.path(h.o.Dir)); err != nil && !errors.Is(err, os.ErrNotExist) {
		h.o.Log.Error("cannot remove a segment of the history", log.Err(err))
	}
	h.bytes -= s.bytes
	delete(h.broken, s.path(h.o.Dir))
	if s.to.After(h.complete[p.name]) {
		h.complete[p.name] = s.to
	}
	if len(h.complete) > 4*MaxParts { // entries of parts that no longer exist
		for name := range h.complete {
			if h.parts[name] == nil {
				delete(h.complete, name)
			}
		}
	}
}

// Last returns the number of the latest record; 0 without records.
func (h *History) Last() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.next - 1
}

// Next returns the first record after a number, and how many records between them were displaced from memory. It
// waits until there is such a record, or until ctx ends.
func (h *History) Next(ctx context.Context, after uint64) (r Record, missed uint64, err error) {
	for {
		h.mu.Lock()
		if first := h.firstRecent(); after+1 < first {
			missed, after = missed+first-after-1, first-1
		}
		if after+1 < h.next {
			r = h.recent[(after+1-h.first)%Recent]
			h.mu.Unlock()
			if r.Data == nil { // deleted
				after++
				continue
			}
			return r, missed, nil
		}
		if h.arrived == nil {
			h.arrived = make(chan struct{})
		}
		arrived := h.arrived
		h.mu.Unlock()
		select {
		case <-arrived:
		case <-ctx.Done():
			return Record{}, missed, ctx.Err()
		}
		select {
		case <-time.After(gather):
		case <-ctx.Done(): // the record is returned nevertheless
		}
	}
}

// firstRecent returns the number of the oldest record in memory. Called with mu held.
func (h *History) firstRecent() uint64 { return h.next - uint64(len(h.recent)) }

// Status returns a description of the history.
func (h *History) Status() Status {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := Status{
		Bytes: h.bytes, MaxBytes: h.o.MaxBytes, Seen: h.next - h.first, Unwritten: h.unwritten,
	}
	for _, p := range h.parts {
		ps := PartStatus{Name: p.name, Records: uint64(len(p.pending)), Bytes: p.size(), Complete: h.complete[p.name]}
		for _, g := range p.segments {
			ps.Records += uint64(g.index.Count)
			if ps.Oldest.IsZero() || g.from.Before(ps.Oldest) {
				ps.Oldest = g.from
			}
		}
		s.Records += ps.Records
		s.Parts = append(s.Parts, ps)
	}
	slices.SortFunc(s.Parts, func(a, b PartStatus) int { return cmp.Compare(a.Name, b.Name) })
	var problems []error
	if h.failure != nil {
		problems = append(problems, fmt.Errorf("flows are not written: %w", h.failure))
	}
	for path, err := range h.broken {
		problems = append(problems, fmt.Errorf("%s: %w; its flows are missing; delete the file", path, err))
	}
	slices.SortFunc(problems, func(a, b error) int { return cmp.Compare(a.Error(), b.Error()) })
	s.Problem = errors.Join(problems...)
	return s
}

// Incomplete returns the time of the newest record after since that was displaced from the parts for which of returns
// true; nil means all parts. It returns zero if no such record was displaced.
func (h *History) Incomplete(since time.Time, of func(part string) bool) (until time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for part, t := range h.complete {
		if (of == nil || of(part)) && !t.Before(since) && t.After(until) {
			until = t
		}
	}
	return until
}

// Namespaces returns the namespaces with records after a time.
func (h *History) Namespaces(after time.Time) []string {
	found := make(map[string]bool)
	for _, s := range h.indices(after, found) {
		for name, last := range s.index.Namespaces {
			if last >= after.Unix() {
				found[name] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// indices returns copies of the segments with records after a time, and adds the namespaces of records that wait for
// a batch.
func (h *History) indices(after time.Time, found map[string]bool) (all []*segment) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range h.parts {
		for _, s := range p.segments {
			if !s.to.Before(after) {
				all = append(all, s.copy())
			}
		}
		for i, f := range p.facts {
			if p.pending[i].Time.After(after) {
				for _, name := range f.Namespaces {
					found[name] = true
				}
			}
		}
	}
	return all
}

// corrupt records that a file is corrupt.
func (h *History) corrupt(s *segment, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	path := s.path(h.o.Dir)
	if h.broken[path] == nil {
		h.broken[path] = err
		h.o.Log.Error("a segment of the history is corrupt", "file", path, log.Err(err))
	}
}

func (s *segment) path(dir string) string { return filepath.Join(dir, s.file()) }

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package history keeps records of flows: the latest ones in memory, for readers that follow, and all of them in files
// of bounded size.
//
// The records are divided into parts, one per tenant, so that a tenant with many flows displaces its own records
// first: when the files reach their bound, the largest part loses its oldest segment. A segment is written as a
// journal, one batch each second, and compressed once it is full. A killed process loses at most the records of the
// last second. If the file system takes no writes, only the files stop; readers of new records notice nothing.
//
// The package knows neither flows nor gRPC: a record is a text of bytes with a few facts about it.
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
	// Recent is the number of records in memory.
	Recent = 4096
	// MaxParts is the maximum number of parts. The tenants beyond share one of them.
	MaxParts = 64
	// MinBytes is the smallest bound of the files.
	MinBytes = 4 << 20
	// maxRecord is the maximum size of one record in bytes.
	maxRecord = 64 << 10
	// batchRecords and batchBytes bound the records that wait for the next batch. A full batch is written at once.
	batchRecords = Recent / 4
	batchBytes   = 512 << 10
	// maxSegments is the maximum number of files, however small they are.
	maxSegments = 8192
	// batchInterval is the time between two batches.
	batchInterval = time.Second
	// gather is how long a reader that has every record waits for more after the next one. Many readers that wake for
	// each record leave no time to receive records.
	gather = 10 * time.Millisecond
)

// Others is the part of the tenants beyond MaxParts.
const Others = "others"

// Facts are the properties of a record that the index of a segment has.
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
	Loss  bool // the record reports lost flows; it is in every answer
	Data  []byte
	Facts Facts
}

// Record is a stored record.
type Record struct {
	Number uint64 // from 1 on, in order of arrival; never reused
	Part   string
	Time   time.Time
	Loss   bool
	Data   []byte // must not be changed
}

// Options describe a History. All fields are required.
type Options struct {
	Dir string
	// MaxBytes bounds the size of all files together.
	MaxBytes int64
	// MaxAge bounds the age of records.
	MaxAge time.Duration
	// Describe returns the facts of a record that an earlier process wrote to a journal.
	Describe func(data []byte) (Facts, error)
	Now      func() time.Time
	Log      *slog.Logger
}

// Status describes what a History has.
type Status struct {
	Records  uint64 // in files and in memory
	Bytes    int64  // of all files
	MaxBytes int64
	Seen     uint64 // records since the start of the process
	Parts    []PartStatus
	// Problem is why records are not written, or which files are corrupt; nil if all is well.
	Problem error
	// Unwritten is the number of records that were not written since the start, because of a problem.
	Unwritten uint64
}

// PartStatus describes one part.
type PartStatus struct {
	Name    string
	Records uint64
	Bytes   int64
	Oldest  time.Time // of the stored records
	// Complete is the time from which on no record of the part was displaced; zero if none was.
	Complete time.Time
}

// History keeps records. Append must not be called concurrently; all other methods may.
type History struct {
	o       Options
	segment int // bytes of a full journal

	writing sync.Mutex // held while files change; taken before mu

	mu        sync.Mutex
	recent    []Record      // guarded by mu; the last Recent records
	next      uint64        // guarded by mu; number of the next record
	arrived   chan struct{} // guarded by mu; closed at the next record; nil without a reader that waits
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

// part is the records of one tenant.
type part struct {
	name     string
	segments []*segment // oldest first
	pending  []Record   // guarded by mu; for the next batch
	facts    []Facts    // of pending
	journal  *os.File   // of the last segment, if it is not full; guarded by writing
}

func (p *part) size() (bytes int64) {
	for _, s := range p.segments {
		bytes += s.bytes
	}
	return bytes
}

// Open reads the index of all files. Corrupt files are kept, count against the bound, and are reported by Status.
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

// Append adds a record. It blocks only to write a full batch.
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

// Run writes batches until ctx ends, and then a last one.
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

// Flush writes the records that wait for a batch, and removes what exceeds the bounds.
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
	if len(batches) == 0 { // nothing shows that writing works again
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

// evict removes segments until the files and need more bytes fit into the bound, and segments that are too old.
// Called with writing held.
func (h *History) evict(need int64) {
	oldest := h.o.Now().Add(-h.o.MaxAge)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range h.parts {
		// After a jump of the clock, a segment may be older than one before it.
		for i := 0; i < len(p.segments); {
			if !p.segments[i].to.Before(oldest) {
				i++
				continue
			}
			h.drop(p, i)
		}
	}
	// Sealing needs the compressed and the uncompressed segment for a moment.
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
	if len(h.complete) > 4*MaxParts { // parts that are gone
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

// Next returns the first record after a number, and how many records before it were displaced from memory. It waits
// until there is one, or ctx ends.
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
		case <-ctx.Done(): // the record is returned all the same
		}
	}
}

// firstRecent returns the number of the oldest record in memory. Called with mu held.
func (h *History) firstRecent() uint64 { return h.next - uint64(len(h.recent)) }

// Status returns what the history has.
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

// Incomplete returns the time of the newest displaced record after since in the parts that are of interest; zero
// without one. If of is nil, all parts are.
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

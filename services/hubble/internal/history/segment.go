// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package history

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/sluice-net/sluice/kit/durable"
)

// Names and first bytes of files. A journal consists of magic bytes, a header and records. A compressed segment
// consists of magic bytes, its index and the compressed records. The header, each record, the index and the
// compressed records have a frame each.
const (
	journalSuffix = ".journal"
	segmentSuffix = ".segment"
	corruptSuffix = ".corrupt"
	journalMagic  = "SLHJ0002"
	segmentMagic  = "SLHS0002"
)

// frameHead is the size of the length and the checksum at the start of a frame.
const frameHead = 8

// maxNames is the maximum number of namespaces and of pods in an index. An index with more names does not exclude any
// name.
const maxNames = 256

// maxFrame is the maximum size of a frame in bytes.
const maxFrame = 8 << 20

// Unknown is the name of the part for corrupt files whose part is unknown.
const Unknown = "corrupt files"

// errCorrupt is returned for a file whose content is corrupt.
var errCorrupt = errors.New("the content is corrupt")

// segment is a file with records of one part.
type segment struct {
	first  uint64 // number of the first record, and name of the file
	part   string
	suffix string
	bytes  int64 // size of the file
	from   time.Time
	to     time.Time
	index  Index
}

// Index describes the records of a segment.
type Index struct {
	Part       string           `json:"part"`
	First      uint64           `json:"first"`
	Last       uint64           `json:"last"`
	Count      int              `json:"count"`
	From       int64            `json:"from"` // nanoseconds
	To         int64            `json:"to"`
	Losses     bool             `json:"losses,omitempty"`
	Namespaces map[string]int64 `json:"namespaces,omitempty"` // each with the time of its last record, in seconds
	Pods       []string         `json:"pods,omitempty"`
	Many       bool             `json:"many,omitempty"` // there are too many names, so some are missing
	Verdicts   []int32          `json:"verdicts,omitempty"`
	Reasons    []int32          `json:"reasons,omitempty"`
}

// copy returns a copy that later records do not change. Called with mu held.
func (s *segment) copy() *segment {
	c := *s
	if s.suffix == journalSuffix { // in a compressed segment, the fields of the index are replaced, never modified
		c.index.Namespaces = maps.Clone(s.index.Namespaces)
	}
	return &c
}

func (s *segment) file() string { return fmt.Sprintf("%016x%s", s.first, s.suffix) }

// add adds a record to the index.
func (s *segment) add(r Record, f Facts) {
	if s.index.Count == 0 || r.Time.Before(s.from) {
		s.from = r.Time
	}
	if r.Time.After(s.to) {
		s.to = r.Time
	}
	x := &s.index
	x.Count++
	x.Last, x.From, x.To = r.Number, s.from.UnixNano(), s.to.UnixNano()
	x.Losses = x.Losses || r.Loss
	for _, name := range f.Namespaces {
		if _, ok := x.Namespaces[name]; !ok && len(x.Namespaces) >= maxNames {
			x.Many = true
			continue
		}
		if x.Namespaces == nil {
			x.Namespaces = make(map[string]int64)
		}
		x.Namespaces[name] = max(x.Namespaces[name], r.Time.Unix())
	}
	for _, name := range f.Pods {
		if i, ok := slices.BinarySearch(x.Pods, name); !ok {
			if len(x.Pods) >= maxNames {
				x.Many = true
				continue
			}
			x.Pods = slices.Insert(slices.Clone(x.Pods), i, name)
		}
	}
	if !r.Loss && !slices.Contains(x.Verdicts, f.Verdict) {
		x.Verdicts = append(slices.Clone(x.Verdicts), f.Verdict)
	}
	if !r.Loss && !slices.Contains(x.Reasons, f.Reason) {
		x.Reasons = append(slices.Clone(x.Reasons), f.Reason)
	}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// appendFrame appends a frame with its length and checksum.
func appendFrame(to, content []byte) []byte {
	to = binary.LittleEndian.AppendUint32(to, uint32(len(content)))
	to = binary.LittleEndian.AppendUint32(to, crc32.Checksum(content, castagnoli))
	return append(to, content...)
}

// cutFrame returns the first frame of b. cut is true if b ends within the frame, as when a process was killed.
func cutFrame(b []byte) (content, rest []byte, cut bool, err error) {
	if len(b) < frameHead {
		return nil, nil, true, errCorrupt
	}
	n, sum := binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
	if n > maxFrame {
		return nil, nil, false, errCorrupt
	}
	if uint64(len(b)-frameHead) < uint64(n) {
		return nil, nil, true, errCorrupt
	}
	content = b[frameHead : frameHead+int(n)]
	if crc32.Checksum(content, castagnoli) != sum {
		return nil, nil, false, errCorrupt
	}
	return content, b[frameHead+int(n):], false, nil
}

// appendRecord appends the content of a record's frame.
func appendRecord(to []byte, r Record) []byte {
	to = binary.AppendUvarint(to, r.Number)
	to = binary.AppendVarint(to, r.Time.UnixNano())
	loss := byte(0)
	if r.Loss {
		loss = 1
	}
	return append(append(to, loss), r.Data...)
}

func parseRecord(b []byte) (r Record, err error) {
	number, n := binary.Uvarint(b)
	if n <= 0 {
		return r, errCorrupt
	}
	nanoseconds, m := binary.Varint(b[n:])
	if m <= 0 || len(b) < n+m+1 {
		return r, errCorrupt
	}
	return Record{
		Number: number, Time: time.Unix(0, nanoseconds), Loss: b[n+m] != 0, Data: b[n+m+1:],
	}, nil
}

// write appends records to the journal of a part. Called with writing held. Records that are not written are counted.
func (h *History) write(p *part, records []Record, facts []Facts) error {
	for len(records) > 0 {
		n, err := h.writeSome(p, records, facts)
		records, facts = records[n:], facts[n:]
		if err != nil {
			h.mu.Lock()
			h.unwritten += uint64(len(records))
			h.mu.Unlock()
			return err
		}
	}
	return nil
}

// writeSome writes as many records as fit into the journal. It compresses the journal when it is full.
func (h *History) writeSome(p *part, records []Record, facts []Facts) (n int, err error) {
	var head []byte
	h.mu.Lock()
	var s *segment
	if p.journal != nil {
		s = p.segments[len(p.segments)-1]
	}
	h.mu.Unlock()
	if s == nil {
		s = &segment{first: records[0].Number, part: p.name, suffix: journalSuffix}
		s.index = Index{Part: p.name, First: s.first}
		content, err := json.Marshal(Index{Part: p.name, First: s.first})
		if err != nil {
			return 0, err
		}
		head = appendFrame([]byte(journalMagic), content)
	}
	out := head
	var content []byte
	for _, r := range records {
		if n > 0 && s.bytes+int64(len(out)) >= int64(h.segment) {
			break
		}
		content = appendRecord(content[:0], r)
		out = appendFrame(out, content)
		n++
	}
	h.evict(int64(len(out)))
	if s.bytes > 0 && p.journal == nil { // evicted: it was the oldest segment of the largest part
		return h.writeSome(p, records, facts)
	}
	if p.journal == nil {
		f, err := os.OpenFile(s.path(h.o.Dir), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return 0, err
		}
		p.journal = f
		h.mu.Lock()
		p.segments = append(p.segments, s)
		h.mu.Unlock()
	}
	if _, err := p.journal.WriteAt(out, s.bytes); err != nil {
		// The journal can be continued if an incomplete frame is removed.
		err = errors.Join(err, p.journal.Truncate(s.bytes))
		if s.bytes == 0 {
			h.removeEmpty(p, s)
		}
		return 0, err
	}
	h.mu.Lock()
	s.bytes += int64(len(out))
	h.bytes += int64(len(out))
	for i := range n {
		s.add(records[i], facts[i])
	}
	full := s.bytes >= int64(h.segment)
	h.mu.Unlock()
	if full {
		return n, h.seal(p, s)
	}
	return n, nil
}

// removeEmpty removes the empty journal of a part. Called with writing held.
func (h *History) removeEmpty(p *part, s *segment) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p.segments = p.segments[:len(p.segments)-1]
	p.journal.Close() //nolint:errcheck,gosec // nothing was written to it
	p.journal = nil
	os.Remove(s.path(h.o.Dir)) //nolint:errcheck,gosec // if this fails, the next start removes it
}

// Encoder and decoder are safe for concurrent use with EncodeAll and DecodeAll. Each has only one worker, to limit
// memory.
var (
	encoder = func() *zstd.Encoder {
		e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(1<<20),
			zstd.WithLowerEncoderMem(true))
		if err != nil {
			panic(err) // only if an option is wrong
		}
		return e
	}()
	decoder = func() *zstd.Decoder {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(2), zstd.WithDecoderMaxMemory(maxFrame))
		if err != nil {
			panic(err) // only if an option is wrong
		}
		return d
	}()
)

// seal replaces a full journal by a compressed segment. Called with writing held.
func (h *History) seal(p *part, s *segment) error {
	content, err := os.ReadFile(s.path(h.o.Dir))
	if err != nil {
		return err
	}
	_, frames, _, err := journalHead(content)
	if err != nil {
		return fmt.Errorf("%s: %w", s.path(h.o.Dir), err)
	}
	index, err := json.Marshal(s.index)
	if err != nil {
		return err
	}
	out := appendFrame([]byte(segmentMagic), index)
	out = appendFrame(out, encoder.EncodeAll(frames, nil))
	sealed := &segment{first: s.first, part: s.part, suffix: segmentSuffix, bytes: int64(len(out)), from: s.from, to: s.to}
	if err := durable.WriteFile(sealed.path(h.o.Dir), out, 0o600, durable.SyncFile); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	sealed.index = s.index
	p.segments[len(p.segments)-1] = sealed
	h.bytes += sealed.bytes - s.bytes
	p.journal.Close() //nolint:errcheck,gosec // its content is now in the segment
	p.journal = nil
	return os.Remove(s.path(h.o.Dir))
}

// journalHead returns the index in the header of a journal, and the frames of its records.
func journalHead(content []byte) (x Index, frames []byte, cut bool, err error) {
	rest, ok := strings.CutPrefix(string(content[:min(len(content), len(journalMagic))]), journalMagic)
	if !ok || rest != "" {
		return x, nil, len(content) < len(journalMagic), errCorrupt
	}
	head, frames, cut, err := cutFrame(content[len(journalMagic):])
	if err != nil {
		return x, nil, cut, err
	}
	return x, frames, false, json.Unmarshal(head, &x)
}

// load finds the files of an earlier process.
func (h *History) load() error {
	entries, err := os.ReadDir(h.o.Dir)
	if err != nil {
		return err
	}
	var journals []uint64
	sealed := make(map[uint64]bool)
	for _, e := range entries {
		name, suffix := e.Name(), filepath.Ext(e.Name())
		first, err := strconv.ParseUint(strings.TrimSuffix(name, suffix), 16, 64)
		if err != nil || !e.Type().IsRegular() {
			continue
		}
		if removed, err := h.removeEarlier(filepath.Join(h.o.Dir, name)); err != nil || removed {
			if err != nil {
				return err
			}
			continue
		}
		switch suffix {
		case journalSuffix:
			journals = append(journals, first)
		case segmentSuffix, corruptSuffix:
			sealed[first] = true
			if err := h.loadSegment(first, suffix); err != nil {
				return err
			}
		}
	}
	for _, first := range journals {
		s := &segment{first: first, suffix: journalSuffix}
		if sealed[first] { // the process was killed before it removed the compressed journal
			if err := os.Remove(s.path(h.o.Dir)); err != nil {
				return err
			}
			continue
		}
		if err := h.loadJournal(s); err != nil {
			return err
		}
	}
	for _, p := range h.parts {
		slices.SortFunc(p.segments, func(a, b *segment) int { return cmp.Compare(a.first, b.first) })
		if s := p.segments[len(p.segments)-1]; s.suffix == journalSuffix {
			if p.journal, err = os.OpenFile(s.path(h.o.Dir), os.O_RDWR, 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// removeEarlier removes a file in the format of an early version, whose records cannot be read any more.
func (h *History) removeEarlier(path string) (removed bool, err error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	magic := make([]byte, len(segmentMagic))
	if _, err := io.ReadFull(f, magic); err != nil { // the caller handles a file that is too short
		return false, nil //nolint:nilerr // see above
	}
	if text := string(magic); text != "SLHJ0001" && text != "SLHS0001" {
		return false, nil
	}
	h.o.Log.Warn("flows of an earlier version are removed from the history", "file", path)
	return true, os.Remove(path)
}

// keep adds a segment that was read from a file.
func (h *History) keep(s *segment) {
	h.bytes += s.bytes
	h.next = max(h.next, s.index.Last+1, s.first+1)
	if p := h.parts[s.part]; p != nil {
		p.segments = append(p.segments, s)
		return
	}
	h.parts[s.part] = &part{name: s.part, segments: []*segment{s}}
}

// loadSegment reads the index of a compressed segment.
func (h *History) loadSegment(first uint64, suffix string) error {
	s := &segment{first: first, suffix: suffix}
	path := s.path(h.o.Dir)
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	s.bytes, s.from, s.to = info.Size(), info.ModTime(), info.ModTime()
	if s.index, err = readIndex(f); err == nil && s.index.First != first {
		err = errCorrupt
	}
	if err != nil || suffix == corruptSuffix {
		if err == nil {
			err = errCorrupt
		}
		s.index = Index{First: first, Last: first, Many: true}
		s.part = Unknown
		h.keep(s)
		h.corrupt(s, err)
		return nil
	}
	s.part, s.from, s.to = s.index.Part, time.Unix(0, s.index.From), time.Unix(0, s.index.To)
	h.keep(s)
	return nil
}

// readIndex reads the first frame of a segment.
func readIndex(f *os.File) (x Index, err error) {
	head := make([]byte, len(segmentMagic)+frameHead)
	if _, err := f.ReadAt(head, 0); err != nil || string(head[:len(segmentMagic)]) != segmentMagic {
		return x, errCorrupt
	}
	n := binary.LittleEndian.Uint32(head[len(segmentMagic):])
	if n > maxFrame {
		return x, errCorrupt
	}
	frame := make([]byte, frameHead+int(n))
	if _, err := f.ReadAt(frame, int64(len(segmentMagic))); err != nil {
		return x, errCorrupt
	}
	content, _, _, err := cutFrame(frame)
	if err != nil {
		return x, err
	}
	if err := json.Unmarshal(content, &x); err != nil {
		return x, errCorrupt
	}
	return x, nil
}

// loadJournal reads a journal. It truncates a frame that a killed process has not completed. If the journal is
// corrupt in any other way, it is set aside, and its records are missing.
func (h *History) loadJournal(s *segment) error {
	path := s.path(h.o.Dir)
	content, err := durable.ReadFile(path, maxFrame)
	if errors.Is(err, durable.ErrTooLarge) {
		return h.setAside(s, errCorrupt)
	}
	if err != nil {
		return err
	}
	x, frames, cut, err := journalHead(content)
	switch {
	case cut: // not even the header is complete
		return os.Remove(path)
	case err != nil || x.First != s.first:
		return h.setAside(s, errCorrupt)
	}
	s.part, s.index = x.Part, Index{Part: x.Part, First: s.first}
	for len(frames) > 0 {
		frame, rest, cut, err := cutFrame(frames)
		if cut {
			break
		}
		var r Record
		var facts Facts
		if err == nil {
			r, err = parseRecord(frame)
		}
		if err == nil && !r.Loss {
			facts, err = h.o.Describe(r.Data)
		}
		if err != nil {
			return h.setAside(s, errCorrupt)
		}
		s.add(r, facts)
		frames = rest
	}
	s.bytes = int64(len(content) - len(frames))
	if len(frames) > 0 {
		h.o.Log.Warn("the last record of a journal is incomplete, as after a killed process; it is left out", "file", path)
		if err := os.Truncate(path, s.bytes); err != nil {
			return err
		}
	}
	if s.index.Count == 0 {
		return os.Remove(path)
	}
	h.keep(s)
	return nil
}

// setAside renames a corrupt journal, so that it is not continued.
func (h *History) setAside(s *segment, why error) error {
	from := s.path(h.o.Dir)
	s.suffix = corruptSuffix
	if err := os.Rename(from, s.path(h.o.Dir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	info, err := os.Stat(s.path(h.o.Dir))
	if err != nil {
		return err
	}
	s.bytes, s.from, s.to = info.Size(), info.ModTime(), info.ModTime()
	last := max(s.index.Last, s.first)
	s.index = Index{First: s.first, Last: last, Many: true}
	s.part = Unknown
	h.keep(s)
	h.corrupt(s, why)
	return nil
}

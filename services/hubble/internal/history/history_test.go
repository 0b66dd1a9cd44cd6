// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package history

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var start = time.Unix(1_800_000_000, 0)

// open opens a history whose clock shows now.
func open(t testing.TB, dir string, maxBytes int64, now time.Time) *History {
	t.Helper()
	h, err := Open(Options{
		Dir: dir, MaxBytes: maxBytes, MaxAge: 7 * 24 * time.Hour, Log: log.Discard(),
		Now: func() time.Time { return now },
		Describe: func(data []byte) (Facts, error) {
			namespace, _, ok := strings.Cut(string(data), " ")
			if !ok {
				return Facts{}, errors.New("no namespace")
			}
			return Facts{Namespaces: []string{namespace}}, nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Close() })
	return h
}

// entry returns the i-th record of a part. Its content is incompressible.
func entry(part string, i, size int) Entry {
	noise := make([]byte, size/2)
	rand.Read(noise)
	return Entry{
		Part: part, Time: start.Add(time.Duration(i) * time.Millisecond),
		Data:  fmt.Appendf(nil, "%s %d %s", part, i, hex.EncodeToString(noise)),
		Facts: Facts{Namespaces: []string{part}},
	}
}

func forward(t testing.TB, h *History, from uint64, q Query) (numbers []uint64) {
	t.Helper()
	q.First = from
	for r := range h.Forward(t.Context(), q) {
		numbers = append(numbers, r.Number)
	}
	return numbers
}

func backward(t testing.TB, h *History) (numbers []uint64) {
	t.Helper()
	for r := range h.Backward(t.Context(), Query{}) {
		numbers = append(numbers, r.Number)
	}
	return numbers
}

func upTo(from, to uint64) (numbers []uint64) {
	for n := from; n <= to; n++ {
		numbers = append(numbers, n)
	}
	return numbers
}

// want compares record numbers, and reports only the first difference.
func want(t testing.TB, what string, got, wanted []uint64) {
	t.Helper()
	if slices.Equal(got, wanted) {
		return
	}
	for i := range min(len(got), len(wanted)) {
		if got[i] != wanted[i] {
			t.Fatalf("%s: number %d of %d is %d, want %d of %d", what, i, len(got), got[i], wanted[i], len(wanted))
		}
	}
	t.Fatalf("%s: %d numbers, want %d", what, len(got), len(wanted))
}

// TestRecordsAreReadInOrder: records of different parts are in different files, and the latest records are in memory.
// They are read in order of arrival. After a restart, all records are there with the same numbers.
func TestRecordsAreReadInOrder(t *testing.T) {
	dir := t.TempDir()
	h := open(t, dir, 64<<20, start)
	const count = 3 * Recent
	data := make(map[uint64]string)
	for i := range count {
		e := entry(fmt.Sprintf("tenant-%d", mathrand.IntN(5)), i, 200)
		h.Append(e)
		data[uint64(i+1)] = string(e.Data)
	}
	check := func(h *History) {
		t.Helper()
		want(t, "forward", forward(t, h, 0, Query{}), upTo(1, count))
		want(t, "forward from the middle", forward(t, h, count/2, Query{}), upTo(count/2, count))
		reversed := upTo(1, count)
		slices.Reverse(reversed)
		want(t, "backward", backward(t, h), reversed)
		for r := range h.Forward(t.Context(), Query{}) {
			if string(r.Data) != data[r.Number] || !r.Time.Equal(start.Add(time.Duration(r.Number-1)*time.Millisecond)) {
				t.Fatalf("record %d is %q at %s, want %q", r.Number, r.Data, r.Time, data[r.Number])
			}
		}
	}
	check(h)
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	h = open(t, dir, 64<<20, start)
	check(h)
	h.Append(entry("tenant-1", count, 200))
	want(t, "after the restart", forward(t, h, count, Query{}), []uint64{count, count + 1})
	if s := h.Status(); s.Records != count+1 || s.Seen != 1 || s.Problem != nil {
		t.Errorf("status after the restart: %+v", s)
	}
}

// TestIndexSkipsSegments: a read skips segments that, according to their index, have no matching record.
func TestIndexSkipsSegments(t *testing.T) {
	dir := t.TempDir()
	h := open(t, dir, 64<<20, start)
	const each = 2 * Recent
	for i := range each {
		h.Append(entry("first", i, 200))
	}
	for i := range each {
		h.Append(entry("second", each+i, 200))
	}
	h.Flush()
	got := forward(t, h, 0, Query{Skip: func(x Index) bool { _, ok := x.Namespaces["second"]; return !ok }})
	want(t, "the second namespace", got, upTo(each+1, 2*each))
	got = forward(t, h, 0, Query{To: start.Add(time.Second)})
	if slices.Contains(got, each) || !slices.Contains(got, 1) {
		t.Errorf("up to the first second: %d records, from %d to %d", len(got), got[0], got[len(got)-1])
	}
	if names := h.Namespaces(start.Add((each + 2000) * time.Millisecond)); !slices.Equal(names, []string{"second"}) {
		t.Errorf("namespaces of the second half: %q", names)
	}
}

// TestKilledProcessLosesTheIncompleteRecordOnly: the journal of a killed process ends in the middle of a record. All
// other records are readable.
func TestKilledProcessLosesTheIncompleteRecordOnly(t *testing.T) {
	dir := t.TempDir()
	h := open(t, dir, 64<<20, start)
	for i := range 10 {
		h.Append(entry("tenant", i, 200))
	}
	h.Flush()
	killed := t.TempDir()
	if err := os.CopyFS(killed, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(killed, "*"+journalSuffix))
	if err != nil || len(files) != 1 {
		t.Fatalf("journals: %v, %v", files, err)
	}
	info, err := os.Stat(files[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(files[0], info.Size()-3); err != nil {
		t.Fatal(err)
	}
	h = open(t, killed, 64<<20, start)
	want(t, "after the kill", forward(t, h, 0, Query{}), upTo(1, 9))
	h.Append(entry("tenant", 10, 200))
	h.Flush()
	h = open(t, killed, 64<<20, start)
	want(t, "continued", forward(t, h, 0, Query{}), upTo(1, 10))
	if s := h.Status(); s.Problem != nil {
		t.Errorf("a killed process left the problem %v", s.Problem)
	}
}

// TestCorruptFileIsReportedAndKept: a corrupt file is reported, and counts towards the size limit. The records in
// other files stay readable.
func TestCorruptFileIsReportedAndKept(t *testing.T) {
	for _, suffix := range []string{segmentSuffix, journalSuffix} {
		t.Run(suffix, func(t *testing.T) {
			dir := t.TempDir()
			h := open(t, dir, 16<<20, start)
			for i := range 4 * Recent {
				h.Append(entry("tenant", i, 200))
			}
			if err := h.Close(); err != nil {
				t.Fatal(err)
			}
			files, err := filepath.Glob(filepath.Join(dir, "*"+suffix))
			if err != nil || len(files) == 0 {
				t.Fatalf("files: %v, %v", files, err)
			}
			content, err := os.ReadFile(files[0])
			if err != nil {
				t.Fatal(err)
			}
			content[len(content)/2] ^= 0x10
			if err := os.WriteFile(files[0], content, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chtimes(files[0], start, start); err != nil { // the age of an unreadable file
				t.Fatal(err)
			}
			h = open(t, dir, 16<<20, start)
			missing := 0
			got := forward(t, h, 0, Query{Corrupt: func(_ uint64, _ string, n int, _, _ time.Time) { missing += n }})
			if len(got) == 0 || len(got) >= 4*Recent || missing == 0 {
				t.Errorf("%d records are readable, %d are reported as missing", len(got), missing)
			}
			name := strings.TrimSuffix(filepath.Base(files[0]), suffix)
			p := h.Status().Problem
			if p == nil || !strings.Contains(p.Error(), name) || !strings.Contains(p.Error(), "delete the file") {
				t.Errorf("the problem is %v, want the file %s", p, name)
			}
			if left, err := filepath.Glob(filepath.Join(dir, name+".*")); err != nil || len(left) != 1 {
				t.Errorf("the corrupt file is now %v, %v", left, err)
			}
			h.Append(entry("tenant", 4*Recent, 200))
			h.Flush()
			if h.Last() != 4*Recent+1 && suffix == segmentSuffix {
				t.Errorf("the next record has number %d", h.Last())
			}
		})
	}
}

// TestLargestTenantLosesItsOldestRecords: a tenant that fills the files displaces no record of another tenant.
func TestLargestTenantLosesItsOldestRecords(t *testing.T) {
	dir := t.TempDir()
	h := open(t, dir, MinBytes, start)
	for i := range 100 {
		h.Append(entry("quiet", i, 400))
	}
	for i := range 20_000 {
		h.Append(entry("busy", 100+i, 400))
		if i%1000 == 0 {
			h.Append(entry("quiet", 100+i, 400))
		}
		if s := h.Status(); s.Bytes > MinBytes {
			t.Fatalf("after %d records the files have %d bytes, more than %d", i, s.Bytes, MinBytes)
		}
	}
	h.Flush()
	var onDisk int64
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		info, err := f.Info()
		if err != nil {
			t.Fatal(err)
		}
		onDisk += info.Size()
	}
	s := h.Status()
	if onDisk != s.Bytes || onDisk > MinBytes {
		t.Errorf("the files have %d bytes, status says %d, the bound is %d", onDisk, s.Bytes, MinBytes)
	}
	quiet := 0
	for r := range h.Forward(t.Context(), Query{}) {
		if strings.HasPrefix(string(r.Data), "quiet ") {
			quiet++
		}
	}
	if quiet != 120 {
		t.Errorf("%d of 120 records of the quiet tenant are left", quiet)
	}
	for _, p := range s.Parts {
		if displaced := !p.Complete.IsZero(); displaced != (p.Name == "busy") {
			t.Errorf("part %s is complete from %s on", p.Name, p.Complete)
		}
	}
	if until := h.Incomplete(start, nil); until.IsZero() || !h.Incomplete(start.Add(time.Hour), nil).IsZero() {
		t.Errorf("records are missing until %s", until)
	}
}

// TestTenantsBeyondTheMaximumShareAPart: the tenants beyond MaxParts share a part, which limits the number of open
// files.
func TestTenantsBeyondTheMaximumShareAPart(t *testing.T) {
	h := open(t, t.TempDir(), 64<<20, start)
	for i := range 3 * MaxParts {
		h.Append(entry(fmt.Sprintf("tenant-%d", i), i, 100))
	}
	h.Flush()
	s := h.Status()
	if len(s.Parts) != MaxParts || s.Parts[0].Name != Others || s.Parts[0].Records != 2*MaxParts+1 {
		t.Errorf("%d parts, the first is %+v", len(s.Parts), s.Parts[0])
	}
	want(t, "all", forward(t, h, 0, Query{}), upTo(1, 3*MaxParts))
}

func TestOldRecordsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	h := open(t, dir, 64<<20, start)
	for i := range 10 {
		h.Append(entry("tenant", i, 100))
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	h = open(t, dir, 64<<20, start.Add(6*24*time.Hour))
	want(t, "after six days", forward(t, h, 0, Query{}), upTo(1, 10))
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	h = open(t, dir, 64<<20, start.Add(8*24*time.Hour))
	want(t, "after eight days", forward(t, h, 0, Query{}), nil)
	if s := h.Status(); s.Bytes != 0 {
		t.Errorf("the files still have %d bytes", s.Bytes)
	}
}

// TestOldRecordsAreRemovedBehindThoseOfTheFuture: while the clock was wrong, records got times of the next year.
// Later records, whose times are earlier, are nevertheless removed when they are too old.
func TestOldRecordsAreRemovedBehindThoseOfTheFuture(t *testing.T) {
	dir := t.TempDir()
	h := open(t, dir, MinBytes, start)
	for i, at := range []time.Duration{365 * 24 * time.Hour, 0, 7 * 24 * time.Hour} {
		for range 2 { // two records fill a file
			e := entry("tenant", i, 33_000)
			e.Time = start.Add(at)
			h.Append(e)
		}
		h.Flush()
	}
	want(t, "all", forward(t, h, 0, Query{}), upTo(1, 6))
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	h = open(t, dir, MinBytes, start.Add(8*24*time.Hour))
	want(t, "after eight days", forward(t, h, 0, Query{}), []uint64{1, 2, 5, 6})
	if files, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(files) != 2 {
		t.Errorf("files: %v, %v", files, err)
	}
}

// TestReaderWakesOnceForRecordsOfABurst: a reader wakes only once for a burst of records. A wake-up for each record
// would leave no CPU time to receive records.
func TestReaderWakesOnceForRecordsOfABurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := open(t, t.TempDir(), 64<<20, start)
		const count = 50
		woke := make(chan time.Duration, count)
		go func() {
			began := time.Now()
			for last := uint64(0); last < count; {
				r, _, err := h.Next(t.Context(), last)
				if err != nil {
					t.Error(err)
					return
				}
				last = r.Number
				woke <- time.Since(began)
			}
		}()
		synctest.Wait()
		for i := range count {
			h.Append(entry("tenant", i, 100))
			time.Sleep(gather / (2 * count))
		}
		for range count {
			if after := <-woke; after != gather {
				t.Fatalf("a record was returned after %s, want all of them after %s", after, gather)
			}
		}
	})
}

// TestSlowReaderKnowsHowManyRecordsItMissed: a slow reader learns how many records it missed, and blocks neither the
// writer nor other readers.
func TestSlowReaderKnowsHowManyRecordsItMissed(t *testing.T) {
	h := open(t, t.TempDir(), 64<<20, start)
	const count = Recent + 100
	for i := range count {
		h.Append(entry("tenant", i, 100))
	}
	r, missed, err := h.Next(t.Context(), 0)
	if err != nil || missed != 100 || r.Number != 101 {
		t.Errorf("after the beginning: record %d, %d missed, %v", r.Number, missed, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { _, _, err := h.Next(ctx, count); done <- err }()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("a reader whose context ended: %v", err)
	}
	go h.Append(entry("tenant", count, 100))
	if r, missed, err := h.Next(t.Context(), count); err != nil || missed != 0 || r.Number != count+1 {
		t.Errorf("the next record: %d, %d missed, %v", r.Number, missed, err)
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package directory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/dirwatch"
	"github.com/sluice-net/sluice/kit/log"
)

// keeper is a feed that keeps the last listing.
type keeper struct {
	last map[string]File
	err  error // what Set returns
}

func (k *keeper) Set(_ context.Context, files []File) error {
	k.last = make(map[string]File)
	for _, f := range files {
		k.last[f.Origin] = f
	}
	return k.err
}

func (k *keeper) Held(context.Context) (int, error) { return 0, nil }

// stamped is a source with a clock and stamps that tests can set.
type stamped struct {
	*Source
	t      *testing.T
	feed   *keeper
	clock  time.Time
	frozen *stamp   // the stamp of every file, if set
	read   []string // names of files that were read since the last scan
}

func newStamped(t *testing.T) *stamped {
	t.Helper()
	s := &stamped{t: t, feed: &keeper{}, clock: time.Now().Add(time.Hour)}
	s.Source = New(t.TempDir(), "objects", s.feed, nil, log.Discard())
	s.now = func() time.Time { return s.clock }
	s.open = func(path string) ([]byte, stamp, error) {
		s.read = append(s.read, filepath.Base(path))
		data, is, err := s.Source.read(path)
		if s.frozen != nil {
			is = *s.frozen
			is.size = int64(len(data))
		}
		return data, is, err
	}
	s.stat = func(path string) (stamp, error) {
		is, err := stampAt(path)
		if s.frozen != nil {
			size := is.size
			is = *s.frozen
			is.size = size
		}
		return is, err
	}
	return s
}

func (s *stamped) path(name string) string { return filepath.Join(s.Path, name) }

// put writes in place, so that the inode and links to the file stay.
func (s *stamped) put(name, content string) {
	s.t.Helper()
	if err := os.WriteFile(s.path(name), []byte(content), 0o644); err != nil {
		s.t.Fatal(err)
	}
}

// want runs a scan and compares the names of the files that were read.
func (s *stamped) want(what string, names ...string) {
	s.t.Helper()
	s.read = nil
	if err := s.Scan(s.t.Context()); !errors.Is(err, s.feed.err) {
		s.t.Fatalf("%s: %v", what, err)
	}
	if !slices.Equal(s.read, names) {
		s.t.Errorf("%s: read %q, want %q", what, s.read, names)
	}
	for name, f := range s.feed.last {
		if f.Keep || f.Err != nil {
			continue
		}
		if f.Same == slices.Contains(names, name) {
			s.t.Errorf("%s: %s is listed as the same: %t", what, name, f.Same)
		}
		if now, err := os.ReadFile(s.path(name)); err != nil || !f.Same && string(f.Data) != string(now) {
			s.t.Errorf("%s: %s was handed on with %q, and has %q, %v", what, name, f.Data, now, err)
		}
	}
}

func TestUnchangedFilesAreNotReadAgain(t *testing.T) {
	s := newStamped(t)
	for _, name := range []string{"a.yaml", "b.yaml", "c.yaml"} {
		s.put(name, policy(name[:1], 1))
	}
	if err := os.Symlink("c.yaml", s.path("d.yaml")); err != nil {
		t.Fatal(err)
	}
	s.want("at first", "a.yaml", "b.yaml", "c.yaml", "d.yaml")
	s.want("nothing changed")

	before, err := os.Stat(s.path("b.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	s.put("b.yaml", policy("b", 2)) // same length as before
	if err := os.Chtimes(s.path("b.yaml"), before.ModTime(), before.ModTime()); err != nil {
		t.Fatal(err)
	}
	s.want("size and modification time are unchanged", "b.yaml")
	s.put("c.yaml", policy("c", 2))
	s.want("the file is the target of a link", "c.yaml", "d.yaml")
	s.put(".next", policy("a", 2))
	if err := os.Rename(s.path(".next"), s.path("a.yaml")); err != nil {
		t.Fatal(err)
	}
	s.want("another file has taken the name", "a.yaml")
	s.want("nothing changed any more")
}

func TestWriteWithinOneTickOfTheClockIsNotMissed(t *testing.T) {
	s := newStamped(t)
	written := time.Now()
	s.frozen = &stamp{device: 1, inode: 1, changed: written, modified: written}
	s.clock = written.Add(2 * time.Second) // the resolution of FAT; other file systems have a finer one
	s.put("a.yaml", policy("a", 1))
	s.want("written a moment ago", "a.yaml")
	s.put("a.yaml", policy("a", 2)) // within the same tick, in place
	s.clock = written.Add(time.Hour)
	s.want("the second write", "a.yaml")
	s.want("read late enough")

	// If the clock is behind the file's times, an equal stamp proves nothing.
	s.taken = nil
	s.clock = written.Add(-time.Hour)
	s.want("a change time in the future", "a.yaml")
	s.want("a change time in the future, second scan", "a.yaml")

	// An equal stamp proves nothing either if the system does not provide enough.
	s.frozen.weak = true
	s.clock = written.Add(time.Hour)
	s.want("weak stamps", "a.yaml")
	s.want("weak stamps, second scan", "a.yaml")
}

// TestChangeThatLeavesTheStampIsTakenOver: an event about a file, and a full scan, read files with an unchanged stamp:
// a memory mapping changes a file without changing its times.
func TestChangeThatLeavesTheStampIsTakenOver(t *testing.T) {
	freeze := func(s *Source) {
		stat := func(path string) (stamp, error) {
			if _, err := os.Stat(path); err != nil {
				return stamp{}, err
			}
			return stamp{inode: 1, size: 1}, nil
		}
		s.stat = stat
		s.open = func(path string) ([]byte, stamp, error) {
			data, _, err := s.read(path)
			if err != nil {
				return nil, stamp{}, err
			}
			is, err := stat(path)
			return data, is, err
		}
	}
	t.Run("event", func(t *testing.T) {
		p := watched(t, freeze, func(s *Source) { s.Rescan = time.Hour })
		p.write("a.yaml", "1")
		p.write("b.yaml", "1")
		p.want("at first", "a.yaml=1 b.yaml=1")
		p.write("a.yaml", "2")
		p.want("an event names it", "a.yaml=2 b.yaml=1")
	})
	t.Run("no event", func(t *testing.T) {
		p := watched(t, freeze, func(s *Source) { s.Rescan = 10 * time.Millisecond })
		target := filepath.Join(t.TempDir(), "a.yaml")
		p.do(os.WriteFile(target, []byte("1"), 0o644))
		p.do(os.Symlink(target, filepath.Join(p.dir, "a.yaml")))
		p.want("at first", "a.yaml=1")
		p.do(os.WriteFile(target, []byte("2"), 0o644))
		p.want("the scan of everything", "a.yaml=2")
	})
}

func TestFileIsReadAgainAfterItWasNotTaken(t *testing.T) {
	s := newStamped(t)
	s.put("a.yaml", policy("a", 1))
	s.put("b.yaml", policy("b", 1))
	s.want("at first", "a.yaml", "b.yaml")
	s.pending.open["a.yaml"] = time.Now()
	s.want("the file is open for writing")
	if !s.feed.last["a.yaml"].Keep {
		t.Errorf("a file that is open for writing was listed as %+v", s.feed.last["a.yaml"])
	}
	clear(s.pending.open)
	s.want("closed", "a.yaml")

	s.feed.err = errors.New("the feed refuses the listing")
	s.want("the feed fails")
	s.want("it fails again", "a.yaml", "b.yaml")
	s.feed.err = nil
	s.want("it works", "a.yaml", "b.yaml")
	s.want("and goes on")

	for _, e := range []dirwatch.Event{{What: dirwatch.Lost}, {What: dirwatch.Changed}} {
		s.distrust(e)
		s.want(fmt.Sprintf("an event without a name: %+v", e), "a.yaml", "b.yaml")
	}
	s.distrust(dirwatch.Event{What: dirwatch.Closed, Name: "b.yaml"})
	s.want("an event about one", "b.yaml")
}

func TestFilesThatWereNotReadCountAgainstTheBound(t *testing.T) {
	s := newStamped(t)
	s.MaxBytes = 2500
	for _, name := range []string{"b.yaml", "c.yaml"} {
		s.put(name, strings.Repeat("#", 1000))
	}
	s.want("both fit", "b.yaml", "c.yaml")
	s.put("d.yaml", strings.Repeat("#", 1000))
	s.want("a third", "d.yaml")
	if err := s.feed.last["d.yaml"].Err; err == nil || !strings.Contains(err.Error(), "before this one have 2000") {
		t.Errorf("the third file: %v", err)
	}
	s.put("a.yaml", strings.Repeat("#", 1000)) // now c.yaml is the third file
	s.want("one before them", "a.yaml", "c.yaml", "d.yaml")
	if err := s.feed.last["c.yaml"].Err; err == nil {
		t.Error("more than MaxBytes was passed to the feed")
	}
}

// policy returns a file whose size does not depend on the port.
func policy(name string, port int) string { return fmt.Sprintf("%s: %d\n", name, port) }

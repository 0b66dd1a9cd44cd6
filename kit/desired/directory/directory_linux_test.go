// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package directory

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/dirwatch/dirwatchtest"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// feed is a Feed that stores the content of each file, or "!" and the error of a file that cannot be read.
type feed struct {
	mu     sync.Mutex
	has    map[string]string
	lists  int
	failed string
}

func (f *feed) Set(_ context.Context, files []File) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lists++
	f.failed = ""
	now := make(map[string]string)
	for _, x := range files {
		had, ok := f.has[x.Origin]
		switch {
		case x.Err != nil:
			now[x.Origin] = "!" + x.Err.Error()
		case x.Same && !ok:
			return fmt.Errorf("%s is listed as unchanged, and was not listed before", x.Origin)
		case x.Keep && !ok:
		case x.Keep, x.Same:
			now[x.Origin] = had
		default:
			now[x.Origin] = string(x.Data)
		}
	}
	f.has = now
	return nil
}

func (f *feed) Held(context.Context) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.has), nil
}

func (f *feed) text() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	for _, name := range slices.Sorted(maps.Keys(f.has)) {
		out = append(out, name+"="+f.has[name])
	}
	return strings.Join(out, " ")
}

func (f *feed) problem() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.failed
}

type place struct {
	*feed
	t   *testing.T
	dir string
}

// watched runs a source on a temporary directory.
func watched(t *testing.T, change ...func(*Source)) *place {
	t.Helper()
	p := &place{feed: &feed{}, t: t, dir: filepath.Join(t.TempDir(), "objects")}
	if err := os.Mkdir(p.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s := New(p.dir, "objects", p.feed, func(_ context.Context, err error) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.failed = ""; err != nil {
			p.failed = err.Error()
		}
		return nil
	}, log.Discard())
	for _, f := range change {
		f(s)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return p
}

func (p *place) do(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

func (p *place) write(name, text string) {
	p.t.Helper()
	p.do(os.WriteFile(filepath.Join(p.dir, name), []byte(text), 0o644))
}

func (p *place) want(what, want string) {
	p.t.Helper()
	servicetest.EventuallyNil(p.t, what, func() error {
		if got := p.text(); got != want {
			return fmt.Errorf("got %q, want %q", got, want)
		}
		return nil
	})
}

func TestFilesFollowTheDirectory(t *testing.T) {
	p := watched(t)
	p.write("a.yaml", "1")
	p.write("b.json", "2")
	p.write("c.txt", "3")
	p.write(".d.yaml", "4")
	p.do(os.Mkdir(filepath.Join(p.dir, "e.yaml"), 0o755))
	p.want("at first", "a.yaml=1 b.json=2 e.yaml=!not a regular file")
	p.write("a.yaml", "5")
	p.want("a change", "a.yaml=5 b.json=2 e.yaml=!not a regular file")
	p.do(os.Rename(filepath.Join(p.dir, "b.json"), filepath.Join(p.dir, "b.yaml")))
	p.do(os.Remove(filepath.Join(p.dir, "e.yaml")))
	p.want("a rename", "a.yaml=5 b.yaml=2")
	p.do(os.Remove(filepath.Join(p.dir, "a.yaml")))
	p.want("a removal", "b.yaml=2")
}

// TestKernelDirectoryIsReadThoughItCannotBeWatched exhausts the inotify limits, as other programs
// on the machine may do.
func TestKernelDirectoryIsReadThoughItCannotBeWatched(t *testing.T) {
	limit, inside := dirwatchtest.Limited(t)
	if !inside {
		return
	}
	for _, x := range []struct{ instances, watches int }{{0, 1000}, {1000, 0}} {
		limit(x.instances, x.watches)
		p := watched(t, func(s *Source) { s.Rescan = time.Hour })
		p.write("a.yaml", "1")
		p.want("at first", "a.yaml=1")
		p.write("a.yaml", "2")
		p.want("a change", "a.yaml=2")
		p.write("b.yaml", "3")
		p.do(os.Remove(filepath.Join(p.dir, "a.yaml")))
		p.want("a removal", "b.yaml=3")
	}
}

func TestFileThatIsBeingWrittenKeepsWhatItHad(t *testing.T) {
	p := watched(t)
	p.write("a.yaml", "whole")
	p.want("at first", "a.yaml=whole")
	f, err := os.OpenFile(filepath.Join(p.dir, "a.yaml"), os.O_WRONLY|os.O_TRUNC, 0)
	p.do(err)
	defer f.Close()
	_, err = f.WriteString("half")
	p.do(err)
	p.want("open for too long", "a.yaml=!is open for writing: its previous objects stay until it is closed")
	_, err = f.WriteString(" and half")
	p.do(err)
	p.do(f.Close())
	p.want("closed", "a.yaml=half and half")
}

// TestFileThatIsWrittenAtTheStartIsReadLater: a file that was opened before the start, and is still being written,
// causes no event for its first part. The feed must not treat the existing part as the whole file.
func TestFileThatIsWrittenAtTheStartIsReadLater(t *testing.T) {
	p := watched(t, func(s *Source) {
		s.Quiet = time.Hour
		if err := os.WriteFile(filepath.Join(s.Path, "a.yaml"), []byte("half"), 0o644); err != nil {
			t.Fatal(err)
		}
	})
	servicetest.Eventually(t, "the first listing", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.lists > 0
	})
	p.want("at first", "")
	p.write(".a.yaml", "whole")
	p.do(os.Rename(filepath.Join(p.dir, ".a.yaml"), filepath.Join(p.dir, "a.yaml")))
	p.want("complete", "a.yaml=whole")
}

func TestEditorsAndVolumesExchangeFiles(t *testing.T) {
	p := watched(t)
	p.write("a.yaml", "1")
	p.write("b.yaml", "1")
	p.want("at first", "a.yaml=1 b.yaml=1")
	// vim saves by renaming the old file away and creating a new one.
	p.do(os.Rename(filepath.Join(p.dir, "a.yaml"), filepath.Join(p.dir, "a.yaml~")))
	p.write("a.yaml", "2")
	p.do(os.Remove(filepath.Join(p.dir, "a.yaml~")))
	p.want("after an editor", "a.yaml=2 b.yaml=1")
	// The directory is replaced by another one and is missing in between.
	old := p.dir + ".old"
	p.do(os.Rename(p.dir, old))
	servicetest.Eventually(t, "the directory is missing",
		func() bool { return strings.Contains(p.problem(), "no such file") })
	if got := p.text(); got != "a.yaml=2 b.yaml=1" {
		t.Errorf("without the directory: %q", got)
	}
	p.do(os.Mkdir(p.dir, 0o755))
	p.write("c.yaml", "3")
	p.want("another directory", "c.yaml=3")
	servicetest.Eventually(t, "no problem", func() bool { return p.problem() == "" })
}

func TestObjectsOfADirectoryThatBecameEmptyStayForAWhile(t *testing.T) {
	p := watched(t, func(s *Source) { s.Empty = time.Second })
	p.write("a.yaml", "1")
	p.want("at first", "a.yaml=1")
	p.do(os.Remove(filepath.Join(p.dir, "a.yaml")))
	servicetest.Eventually(t, "the problem", func() bool { return strings.Contains(p.problem(), "has no files any more") })
	if got := p.text(); got != "a.yaml=1" {
		t.Errorf("at once: %q", got)
	}
	p.want("after a time", "")
}

func TestFilesTogetherAreBounded(t *testing.T) {
	p := watched(t, func(s *Source) { s.MaxBytes = 10 })
	p.write("a.yaml", "12345678")
	p.write("b.yaml", "12345678")
	p.write("c.yaml", "12")
	p.want("the bound", "a.yaml=12345678 "+
		"b.yaml=!limit exceeded: all files together may have 10 bytes (limits.manifests), "+
		"the files before this one have 8 c.yaml=12")
}

func TestFileThatVanishesWhileItIsListedIsNotDeletedYet(t *testing.T) {
	f := &feed{}
	p := &place{feed: f, t: t, dir: t.TempDir()}
	dir := p.dir
	s := New(dir, "objects", f, nil, log.Discard())
	for _, name := range []string{"a", "b", "c"} {
		p.do(os.WriteFile(filepath.Join(dir, name+".yaml"), []byte("1"), 0o644))
	}
	p.do(s.Scan(t.Context()))
	p.want("at first", "a.yaml=1 b.yaml=1 c.yaml=1")
	p.do(os.WriteFile(filepath.Join(dir, "c.yaml"), []byte("2"), 0o644))
	vanish := func(path string) ([]byte, stamp, error) {
		if filepath.Base(path) == "b.yaml" {
			p.do(os.Rename(path, filepath.Join(dir, ".away")))
		}
		return s.read(path)
	}
	s.open = vanish
	p.do(s.Scan(t.Context()))
	p.want("the others go on", "a.yaml=1 b.yaml=1 c.yaml=2")
	if !s.pending.again {
		t.Error("no further scan is due")
	}
	p.do(os.Rename(filepath.Join(dir, ".away"), filepath.Join(dir, "b.yaml")))
	s.open = s.read
	p.do(s.Scan(t.Context()))
	p.want("it is back", "a.yaml=1 b.yaml=1 c.yaml=2")
	p.do(os.Remove(filepath.Join(dir, "b.yaml")))
	p.do(s.Scan(t.Context()))
	p.want("removed", "a.yaml=1 c.yaml=2")
}

// TestRenamedFileHasItsFormerName: a feed must know whose objects an unreadable file had.
func TestRenamedFileHasItsFormerName(t *testing.T) {
	dir := t.TempDir()
	f := listings{make(chan []File, 1)}
	s := New(dir, "objects", f, nil, log.Discard())
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	path := func(name string) string { return filepath.Join(dir, name+".yaml") }
	want := func(what string, want ...string) {
		t.Helper()
		do(s.Scan(t.Context()))
		var got []string
		for _, x := range <-f.came {
			text := x.Origin
			if x.Former != "" {
				text += " was " + x.Former
			}
			if x.Err != nil {
				text += " unreadable"
			}
			got = append(got, text)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	s.open = func(name string) ([]byte, stamp, error) {
		if name == path("b") {
			return nil, stamp{}, errors.New("unreadable")
		}
		return s.read(name)
	}
	do(os.WriteFile(path("a"), []byte("1"), 0o644))
	do(os.WriteFile(path("c"), []byte("1"), 0o644))
	want("at first", "a.yaml", "c.yaml")
	do(os.Rename(path("a"), path("b")))
	want("renamed", "b.yaml was a.yaml unreadable", "c.yaml")
	want("again", "b.yaml unreadable", "c.yaml")
	do(os.Rename(path("c"), path("b"))) // over another one
	want("renamed over it", "b.yaml was c.yaml unreadable")
	do(os.WriteFile(path("c"), []byte("2"), 0o644))
	want("a new file", "b.yaml unreadable", "c.yaml")
}

// listings passes each listing to a channel.
type listings struct{ came chan []File }

func (f listings) Set(_ context.Context, files []File) error {
	f.came <- files
	return nil
}

func (f listings) Held(context.Context) (int, error) { return 0, nil }

func TestFileWithTheSizeAndTimeOfBeforeIsRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.yaml")
	stamp := time.Now().Add(-time.Hour)
	write := func(port int) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
		if err == nil {
			_, err = f.WriteAt([]byte(fmt.Sprint(port)), 0)
			err = errors.Join(err, f.Close(), os.Chtimes(path, stamp, stamp))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	f := listings{make(chan []File, 1)}
	s := New(filepath.Dir(path), "objects", f, nil, log.Discard())
	for _, port := range []int{1, 2} {
		write(port)
		if err := s.Scan(t.Context()); err != nil {
			t.Fatal(err)
		}
		if files := <-f.came; string(files[0].Data) != fmt.Sprint(port) {
			t.Errorf("read %q", files[0].Data)
		}
	}
}

func TestDirectoryThatNeverRestsIsRead(t *testing.T) {
	dir := t.TempDir()
	f := listings{make(chan []File)}
	s := New(dir, "objects", f, func(context.Context, error) error { return nil }, log.Discard())
	s.Rescan = time.Hour
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() { s.Run(ctx) }) //nolint:errcheck // ends with the context
	<-f.came
	// Links are renamed continuously, so the directory is never quiet.
	wg.Go(func() {
		for ctx.Err() == nil {
			next := filepath.Join(dir, "next")
			errs := errors.Join(os.Symlink("nowhere", next), os.Rename(next, filepath.Join(dir, "a.yaml")))
			if errs != nil {
				t.Error(errs)
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Millisecond):
			}
		}
	})
	for seen := 0; seen < 2; {
		select {
		case files := <-f.came:
			if len(files) == 1 {
				seen++
			} else if seen > 0 { // before, no link was renamed yet
				t.Errorf("%d files", len(files))
			}
		case <-time.After(servicetest.Patience):
			t.Fatal("the directory was not read")
		}
	}
}

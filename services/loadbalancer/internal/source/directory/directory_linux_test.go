// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package directory

import (
	"context"
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
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// feed keeps what the files say, as an owner does.
type feed struct {
	mu     sync.Mutex
	has    map[string]string
	reads  int
	lists  int
	failed string
}

func (f *feed) Set(_ context.Context, files []owner.File) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lists++
	now := make(map[string]string)
	for _, x := range files {
		had, ok := f.has[x.Origin]
		switch {
		case x.Err != nil:
			now[x.Origin] = "!" + x.Err.Error()
		case x.Same && !ok:
			return fmt.Errorf("%s is the same as nothing", x.Origin)
		case x.Keep && !ok:
		case x.Keep, x.Same:
			now[x.Origin] = had
		default:
			f.reads++
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

// watched is a directory that is watched.
func watched(t *testing.T, change ...func(*Source)) *place {
	t.Helper()
	p := &place{feed: &feed{}, t: t, dir: filepath.Join(t.TempDir(), "services")}
	if err := os.Mkdir(p.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s := New(p.dir, p.feed, func(_ context.Context, err error) error {
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

// TestKernelServicesAreServedThoughTheDirectoryCannotBeWatched has the limits of inotify reached, as other programs of
// the machine may reach them.
func TestKernelServicesAreServedThoughTheDirectoryCannotBeWatched(t *testing.T) {
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
	p.want("open for too long", "a.yaml=!is open for writing: what it had stays until it is closed")
	_, err = f.WriteString(" and half")
	p.do(err)
	p.do(f.Close())
	p.want("closed", "a.yaml=half and half")
}

func TestEditorsAndVolumesExchangeFiles(t *testing.T) {
	p := watched(t)
	p.write("a.yaml", "1")
	p.write("b.yaml", "1")
	p.want("at first", "a.yaml=1 b.yaml=1")
	// As vim does: away with the old one, and then a new one.
	p.do(os.Rename(filepath.Join(p.dir, "a.yaml"), filepath.Join(p.dir, "a.yaml~")))
	p.write("a.yaml", "2")
	p.do(os.Remove(filepath.Join(p.dir, "a.yaml~")))
	p.want("after an editor", "a.yaml=2 b.yaml=1")
	// The directory as a whole becomes another, and none for a while.
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

func TestDirectoryThatBecameEmptyIsNotBelievedAtOnce(t *testing.T) {
	p := watched(t, func(s *Source) { s.Empty = time.Second })
	p.write("a.yaml", "1")
	p.want("at first", "a.yaml=1")
	p.do(os.Remove(filepath.Join(p.dir, "a.yaml")))
	servicetest.Eventually(t, "the problem", func() bool { return strings.Contains(p.problem(), "has no file any more") })
	if got := p.text(); got != "a.yaml=1" {
		t.Errorf("at once: %q", got)
	}
	p.want("after a time", "")
}

func TestUnchangedFilesAreReadOnce(t *testing.T) {
	p := watched(t)
	for i := range 20 {
		p.write(fmt.Sprintf("%02d.yaml", i), "x")
	}
	servicetest.Eventually(t, "all files", func() bool { n, _ := p.Held(t.Context()); return n == 20 })
	servicetest.Eventually(t, "all files are read once",
		func() bool { p.mu.Lock(); defer p.mu.Unlock(); return p.reads == 20 })
	p.write("00.yaml", "y")
	servicetest.Eventually(t, "the change", func() bool { return strings.Contains(p.text(), "00.yaml=y") })
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reads != 21 {
		t.Errorf("%d files were read, want 21", p.reads)
	}
}

func TestFilesTogetherAreBounded(t *testing.T) {
	p := watched(t, func(s *Source) { s.MaxBytes = 10 })
	p.write("a.yaml", "12345678")
	p.write("b.yaml", "12345678")
	p.write("c.yaml", "12")
	p.want("the bound", "a.yaml=12345678 b.yaml=!no room: the files together may have 10 bytes (limits.manifests) "+
		"c.yaml=12")
}

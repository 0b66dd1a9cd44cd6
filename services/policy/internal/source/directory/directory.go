// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package directory is a source of policies: the YAML and JSON files of one
// directory, without those below it, watched for changes.
//
// What the kernel says about the directory only begins a scan: each scan lists
// everything there is, so that a message that was lost, an editor that renames
// and a link that is swapped as a whole come to the same. A scan waits until
// files that were written to are closed. A directory that cannot be read is
// reported, and nothing is taken for gone.
package directory

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/node"
)

// maxFiles is how many files a directory may have.
const maxFiles = 20_000

// Feed takes listings.
type Feed interface {
	Set(ctx context.Context, files []node.File) error
}

// Source watches a directory.
type Source struct {
	Path string
	Feed Feed
	// Failed is told why the directory cannot be read; nil when it can.
	Failed func(context.Context, error) error
	Log    *slog.Logger

	Settle   time.Duration // quiet before a scan
	Patience time.Duration // longest wait for a file to be closed
	Rescan   time.Duration // between two scans without a reason
	// MaxBytes is how large the files may be together; one that is too much is
	// refused.
	MaxBytes int
}

// New returns a source with the usual times.
func New(path string, feed Feed, failed func(context.Context, error) error, l *slog.Logger) *Source {
	return &Source{Path: path, Feed: feed, Failed: failed, Log: l, Settle: 50 * time.Millisecond, Patience: 2 * time.Second, Rescan: 30 * time.Second, MaxBytes: 256 << 20}
}

// event is what a watcher says: something happened to a name, or to the
// directory if it is empty.
type event struct {
	name string
	// writing says that the file is open and was written to; done that it was
	// closed, or is another one now.
	writing, done bool
}

// Run lists the directory now and after each change, until the context ends.
func (s *Source) Run(ctx context.Context) error {
	w, err := watch(s.Path)
	if err != nil {
		s.Log.Warn("the directory of policies is not watched, and read from time to time only", "directory", s.Path, log.Err(err))
		w = noWatcher()
	}
	defer w.close()
	var failed string // the last error
	timer := time.NewTimer(0)
	defer timer.Stop()
	open := make(map[string]bool) // files that are being written
	var since time.Time           // when the first of what is pending happened
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-w.events:
			if since.IsZero() {
				since = time.Now()
			}
			switch {
			case e.writing:
				open[e.name] = true
			case e.done:
				delete(open, e.name)
			}
			wait := max(0, s.Patience-time.Since(since))
			if len(open) == 0 {
				wait = min(wait, s.Settle)
			}
			timer.Reset(wait)
			continue
		case <-timer.C:
		}
		clear(open)
		since = time.Time{}
		w.renew(s.Path)
		err := s.scan(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			if failed != "" {
				s.Log.Info("the directory of policies is read again", "directory", s.Path)
			}
			failed = ""
		default:
			if err.Error() != failed {
				failed = err.Error()
				s.Log.Error("the directory of policies cannot be read; its policies stay", "directory", s.Path, log.Err(err))
			}
			if err := s.Failed(ctx, err); err != nil && ctx.Err() == nil {
				return err
			}
		}
		wait := s.Rescan
		if err != nil {
			wait = min(wait, time.Second)
		}
		timer.Reset(wait)
	}
}

// scan hands on what the directory has. It reads everything, whatever the
// times of the files say: they may be set, and what kept a file from being
// taken over may have gone.
func (s *Source) scan(ctx context.Context) error {
	entries, err := os.ReadDir(s.Path)
	if err != nil {
		return err
	}
	var names []string
	for _, e := range entries {
		// Names with a dot at the front are those of editors, and of the
		// directories that a volume of Kubernetes swaps.
		if n := e.Name(); !strings.HasPrefix(n, ".") && (strings.HasSuffix(n, ".yaml") || strings.HasSuffix(n, ".yml") || strings.HasSuffix(n, ".json")) {
			names = append(names, n)
		}
	}
	if len(names) > maxFiles {
		return fmt.Errorf("%s has %d files, the limit is %d", s.Path, len(names), maxFiles)
	}
	files := make([]node.File, 0, len(names))
	size := 0
	for _, n := range names {
		f := node.File{Origin: n}
		f.Data, f.Err = read(filepath.Join(s.Path, n))
		if errors.Is(f.Err, fs.ErrNotExist) {
			// Gone since it was listed, or a link to nothing: look again.
			if _, err := os.Lstat(filepath.Join(s.Path, n)); errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("%s changes while it is read", s.Path)
			}
		}
		if size += len(f.Data); size > s.MaxBytes && f.Err == nil {
			size -= len(f.Data)
			f.Data, f.Err = nil, fmt.Errorf("no room: the files together may have %d bytes, those before it have %d", s.MaxBytes, size)
		}
		files = append(files, f)
	}
	return s.Feed.Set(ctx, files)
}

// read reads a regular file of a size that a manifest may have.
func read(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() {
		return nil, errors.New("not a regular file")
	}
	data, err := io.ReadAll(io.LimitReader(f, manifest.MaxBytes+1))
	if err != nil {
		return nil, err
	}
	if len(data) > manifest.MaxBytes {
		return nil, fmt.Errorf("larger than %d bytes", manifest.MaxBytes)
	}
	return data, nil
}

// watcher says that something happened.
type watcher struct {
	events chan event
	renew  func(path string) // the path may be another directory now
	close  func()
}

func noWatcher() watcher {
	return watcher{events: make(chan event), renew: func(string) {}, close: func() {}}
}

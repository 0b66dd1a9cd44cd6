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
}

// New returns a source with the usual times.
func New(path string, feed Feed, failed func(context.Context, error) error, l *slog.Logger) *Source {
	return &Source{Path: path, Feed: feed, Failed: failed, Log: l, Settle: 50 * time.Millisecond, Patience: 2 * time.Second, Rescan: 30 * time.Second}
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
	var last string   // what the directory looked like
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
			wait := s.Settle
			if len(open) > 0 {
				wait = max(0, s.Patience-time.Since(since))
			}
			timer.Reset(wait)
			continue
		case <-timer.C:
		}
		clear(open)
		since = time.Time{}
		w.renew(s.Path)
		look, err := s.scan(ctx, last)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			if failed != "" {
				s.Log.Info("the directory of policies is read again", "directory", s.Path)
			}
			last, failed = look, ""
		default:
			last = "" // look again, whatever it looks like
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

// scan hands on what the directory has, unless it looks as it did.
func (s *Source) scan(ctx context.Context, last string) (look string, err error) {
	entries, err := os.ReadDir(s.Path)
	if err != nil {
		return "", err
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
		return "", fmt.Errorf("%s has %d files, the limit is %d", s.Path, len(names), maxFiles)
	}
	var b strings.Builder
	for _, n := range names {
		b.WriteString(appearance(filepath.Join(s.Path, n)))
	}
	look = b.String()
	if look == last && last != "" {
		return look, nil
	}
	files := make([]node.File, 0, len(names))
	for _, n := range names {
		f := node.File{Origin: n}
		f.Data, f.Err = read(filepath.Join(s.Path, n))
		if errors.Is(f.Err, fs.ErrNotExist) {
			// Gone since it was listed, or a link to nothing: look again.
			if _, err := os.Lstat(filepath.Join(s.Path, n)); errors.Is(err, fs.ErrNotExist) {
				return "", fmt.Errorf("%s changes while it is read", s.Path)
			}
		}
		files = append(files, f)
	}
	if err := s.Feed.Set(ctx, files); err != nil {
		return "", err
	}
	return look + " ", nil // never empty
}

// appearance changes with the file; links are followed.
func appearance(path string) string {
	fi, err := os.Stat(path)
	if err != nil {
		return path + "!"
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Sprintf("%s %d %d;", path, fi.Size(), fi.ModTime().UnixNano())
	}
	return fmt.Sprintf("%s %d %d %d %d;", path, st.Dev, st.Ino, fi.Size(), fi.ModTime().UnixNano())
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

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package directory is a source of services and endpoint slices: the YAML and JSON
// files of one directory, without those below it, watched for changes.
//
// What the kernel says about the directory only begins a scan, and a scan lists
// everything: a message that was lost, an editor that renames and a link that is
// exchanged come to the same. A file that is being written, or was changed a
// moment ago, keeps what it had. A directory that cannot be read, or that has
// become empty, is reported; nothing is deleted for the one, and for the other
// only when it stays so for some time.
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

	"github.com/sluice-net/sluice/kit/dirwatch"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
)

// maxFiles is how many files a directory may have.
const maxFiles = 20_000

// Feed takes listings.
type Feed interface {
	Set(ctx context.Context, files []owner.File) error
	// Held is how many objects of the source are in force.
	Held(ctx context.Context) (int, error)
}

// Source watches a directory.
type Source struct {
	Path string
	Feed Feed
	// Failed is told why the directory cannot be read; nil when it can.
	Failed func(context.Context, error) error
	Log    *slog.Logger

	// Settle is for how long a file has to be unchanged before it is read.
	Settle time.Duration
	// Rescan is between two scans that read all files.
	Rescan time.Duration
	// Look is between two scans while the kernel has no room for a watch.
	Look time.Duration
	// Empty is how long a directory that had files has to be empty until their
	// objects are deleted: a volume may not be mounted yet.
	Empty time.Duration
	// MaxBytes is how large the files may be together.
	MaxBytes int

	taken  map[string]stamp     // of the files that the feed has
	open   map[string]time.Time // files that are being written, since when
	gone   map[string]time.Time // names that were removed or renamed, when
	empty  time.Time            // since when the directory is empty
	failed string               // the last error
	again  bool                 // the last scan left something out
}

// stamp tells two states of a file apart. The time of the last change of content or
// attributes is one that no program can set.
type stamp struct {
	inode   uint64
	size    int64
	changed time.Time
}

// New returns a source with the usual times.
func New(path string, feed Feed, failed func(context.Context, error) error, l *slog.Logger) *Source {
	return &Source{
		Path: path, Feed: feed, Failed: failed, Log: l, Settle: 50 * time.Millisecond, Rescan: 30 * time.Second,
		Look: time.Second, Empty: 15 * time.Second,
		MaxBytes: 256 << 20, taken: make(map[string]stamp), open: make(map[string]time.Time),
		gone: make(map[string]time.Time),
	}
}

// maxWait is between two scans while dirwatch.Events never end.
const maxWait = 2 * time.Second

// maxOpen is for how long a file that is open for writing is waited for without
// saying so.
const maxOpen = 2 * time.Second

// Run lists the directory now and after each change, until the context ends.
func (s *Source) Run(ctx context.Context) error {
	w := dirwatch.Watch()
	defer w.Close()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var (
		whole time.Time // when the last scan that read all files began
		since time.Time // when the first event behind the last scan was

		unwatched error
	)
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-w.Events:
			s.note(e)
			now := time.Now()
			if since.IsZero() {
				since = now
			}
			timer.Reset(min(s.Settle, max(0, maxWait-now.Sub(since))))
			continue
		case <-timer.C:
		}
		began := time.Now()
		since = time.Time{}
		other, err := w.Renew(s.Path)
		if other {
			clear(s.open)
			clear(s.gone)
			clear(s.taken)
		}
		switch {
		case err != nil && unwatched == nil:
			s.Log.Warn("the directory of services cannot be watched: it is looked at again and again",
				"directory", s.Path, "every", s.Look.String(), log.Err(err))
		case err == nil && unwatched != nil:
			s.Log.Info("the directory of services is watched again", "directory", s.Path)
		}
		unwatched = err
		// A memory mapping may change a file and leave its stamp.
		if began.Sub(whole) >= s.Rescan {
			clear(s.taken)
			whole = began
		}
		err = s.scan(ctx)
		took := time.Since(began)
		if ctx.Err() != nil {
			return nil
		}
		if err := s.report(ctx, err); err != nil {
			return err
		}
		wait := s.Rescan
		switch {
		case err != nil:
			wait = time.Second
		case s.again:
			wait = s.Settle
		case unwatched != nil:
			wait = min(wait, max(s.Look, 3*took))
		}
		timer.Reset(wait)
	}
}

// report says how a scan went, if that is news.
func (s *Source) report(ctx context.Context, err error) error {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text == s.failed {
		return nil
	}
	s.failed = text
	if err != nil {
		s.Log.Error("the directory of services is not taken over; what it had stays", "directory", s.Path, log.Err(err))
	} else {
		s.Log.Info("the directory of services is taken over again", "directory", s.Path)
	}
	if err := s.Failed(ctx, err); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

// note takes an event.
func (s *Source) note(e dirwatch.Event) {
	switch e.What {
	case dirwatch.Written:
		if _, ok := s.open[e.Name]; !ok {
			s.open[e.Name] = time.Now()
		}
	case dirwatch.Lost:
		clear(s.open)
		clear(s.taken)
	case dirwatch.Departed:
		delete(s.open, e.Name)
		s.gone[e.Name] = time.Now()
	case dirwatch.Closed, dirwatch.Arrived:
		delete(s.open, e.Name)
	case dirwatch.Changed:
	}
	if e.Name == "" {
		clear(s.taken)
	}
	delete(s.taken, e.Name)
}

// isManifest reports whether a name is that of a file with objects. Names with a
// dot at the front are those of editors, and of the directories that a volume of
// Kubernetes exchanges.
func isManifest(name string) bool {
	if strings.HasPrefix(name, ".") {
		return false
	}
	switch filepath.Ext(name) {
	case ".yaml", ".yml", ".json":
		return true
	}
	return false
}

// scan hands on what the directory has. Unchanged files are listed too: what kept
// one from being taken over may have gone.
func (s *Source) scan(ctx context.Context) error {
	s.again = false
	began := time.Now()
	entries, err := os.ReadDir(s.Path)
	if err != nil {
		return err
	}
	var names []string
	for _, e := range entries {
		if isManifest(e.Name()) {
			names = append(names, e.Name())
		}
	}
	for name, at := range s.gone {
		if began.Sub(at) >= s.Settle || !isManifest(name) {
			delete(s.gone, name)
		}
	}
	if len(names) > maxFiles {
		return fmt.Errorf("%s has %d files, the limit is %d", s.Path, len(names), maxFiles)
	}
	if err := s.isEmpty(ctx, len(names)+len(s.gone) == 0); err != nil {
		return err
	}
	files := make([]owner.File, 0, len(names))
	taken := make(map[string]stamp, len(names))
	room := int64(s.MaxBytes)
	for _, name := range names {
		f, is := s.file(name, began, &room)
		if f.Err == nil && !f.Keep {
			taken[name] = is
		}
		files = append(files, f)
		delete(s.gone, name)
	}
	for name := range s.gone { // an editor may be about to put another in its place
		files, s.again = append(files, owner.File{Origin: name, Keep: true}), true
	}
	s.taken = make(map[string]stamp) // if the feed fails, it may not have what it was given
	if err := s.Feed.Set(ctx, files); err != nil {
		return err
	}
	s.taken = taken
	return nil
}

// file looks at one file, and reads it if it may be another than before.
func (s *Source) file(name string, now time.Time, room *int64) (owner.File, stamp) {
	f := owner.File{Origin: name}
	if since, ok := s.open[name]; ok {
		f.Keep, s.again = true, true
		if now.Sub(since) >= maxOpen {
			f.Err = errors.New("is open for writing: what it had stays until it is closed")
		}
		return f, stamp{}
	}
	path := filepath.Join(s.Path, name)
	is, err := look(path)
	if err != nil {
		f.Err = err
		return f, is
	}
	if *room -= is.size; *room < 0 {
		*room += is.size
		f.Err = fmt.Errorf("no room: the files together may have %d bytes (limits.manifests)", s.MaxBytes)
		return f, is
	}
	if had, ok := s.taken[name]; ok && had == is {
		f.Same = true
		return f, is
	}
	if age := now.Sub(is.changed); age >= 0 && age < s.Settle {
		f.Keep, s.again = true, true // more may be on its way
		return f, is
	}
	f.Data, f.Err = read(path, is.size)
	if after, err := look(path); f.Err == nil && (err != nil || after != is) {
		f.Data, f.Keep, s.again = nil, true, true
	}
	return f, is
}

// isEmpty notes whether the directory is empty. Its error says that it is too early
// to say so: it had files not long ago.
func (s *Source) isEmpty(ctx context.Context, empty bool) error {
	if !empty {
		s.empty = time.Time{}
		return nil
	}
	held, err := s.Feed.Held(ctx)
	if err != nil || held == 0 {
		return err
	}
	if s.empty.IsZero() {
		s.empty = time.Now()
	}
	if time.Since(s.empty) < s.Empty {
		return fmt.Errorf("%s has no file any more; if it stays so, its %d objects are deleted after %s", s.Path, held,
			s.Empty)
	}
	return nil
}

// look returns the stamp that a file has now.
func look(path string) (stamp, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return stamp{}, err
	}
	if !fi.Mode().IsRegular() {
		return stamp{}, errors.New("not a regular file")
	}
	return stampOf(fi), nil
}

// read reads a regular file of a size.
func read(path string, size int64) ([]byte, error) {
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
		return nil, &fs.PathError{Op: "read", Path: path, Err: errors.New("not a regular file")}
	}
	return io.ReadAll(io.LimitReader(f, size+1)) // one more tells that it grew
}

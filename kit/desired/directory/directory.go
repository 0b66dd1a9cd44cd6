// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package directory is a source of objects: the YAML and JSON files of one directory, without
// subdirectories, watched for changes.
//
// An inotify event only triggers a scan, and each scan lists the whole directory. So lost events, editors that rename
// files, and replaced symbolic links all end in the same result. A scan reads only files that may have changed, but
// once per Source.Rescan it reads all files.
//
// A completed rename is scanned at once. After any other event the scan waits until the directory is quiet. Meanwhile a
// file that is open for writing, or that was just removed, keeps its previous objects. If the directory cannot be read,
// no object is deleted. If the directory becomes empty, its objects are deleted only after it has stayed empty for
// Source.Empty.
package directory

import (
	"bytes"
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
)

// maxFiles is the maximum number of files in a directory.
const maxFiles = 20_000

// File is one file of a listing.
type File struct {
	// Origin is the file name without the directory.
	Origin string
	Data   []byte
	Err    error // the read error; the file's objects stay
	// Keep means that the file was not read because it is being changed. Its objects stay. Err, if
	// set, is reported in addition.
	Keep bool
	// Same means that the file was not read because it has not changed since the previous listing,
	// which contained its Data.
	Same bool
	// Former is the name of the file in the previous listing, if the file was renamed since. It is empty if the
	// file was not renamed, or if that is unknown.
	Former string
}

// Feed receives listings.
type Feed interface {
	// Set receives the complete listing of the directory. One goroutine calls it. If it returns an error, the next
	// listing contains the Data of every file.
	Set(ctx context.Context, files []File) error
	// Held returns how many objects of this source are enforced.
	Held(ctx context.Context) (int, error)
}

// Source watches a directory. Its fields must not change after Run has started.
type Source struct {
	Path string
	// What names the objects in messages, in the plural: "policies".
	What string
	Feed Feed
	// Failed receives the error if the directory cannot be read. The next listing clears it.
	Failed func(context.Context, error) error
	Log    *slog.Logger

	Quiet    time.Duration // time without events before a scan
	Patience time.Duration // longest delay of a scan while events keep coming
	Rescan   time.Duration // interval of scans that read all files
	Poll     time.Duration // interval of scans while no inotify watch is available
	// Rest limits the share of time that is spent on scans: the pause after a scan is at least Rest times its
	// duration.
	Rest time.Duration
	// Grain is the resolution of time stamps. An equal stamp proves equal content only if the file was read at
	// least Grain after its last change. Two writes within one tick of the kernel's clock (10 ms at 100 Hz), or
	// within the 2 s resolution of FAT, leave equal times, and the second write may come after the read.
	Grain time.Duration
	// Empty is how long a directory must have no files before the objects of its former files are deleted. Until
	// then its volume may not be mounted yet.
	Empty time.Duration
	// MaxBytes limits the total size of the files. Files beyond the limit are refused.
	MaxBytes int

	pending *pending
	empty   time.Time // since when the directory is empty; zero if it is not
	// taken holds, by file name, the stamps of files whose content the feed has and which no event has named since.
	// While the stamp is the same, the file is not read again.
	taken map[string]stamp
	// ids identifies the files of the last listing that the feed has.
	ids map[string]fileID

	// Replaced by tests.
	open func(path string) ([]byte, stamp, error) // reads a file
	stat func(path string) (stamp, error)         // returns the stamp of a file without reading it
	now  func() time.Time                         // the clock that stamps are compared with
}

// stamp distinguishes two states of a file, and two files of the same name.
type stamp struct {
	device, inode uint64
	size          int64
	modified      time.Time
	changed       time.Time // ctime: last change of content or attributes; programs cannot set it
	weak          bool      // the system provides too little to distinguish states
}

// fileID identifies a file, whatever its name.
type fileID struct{ device, inode uint64 }

// id returns the ID of the file; zero if it is unknown.
func (s stamp) id() fileID { return fileID{s.device, s.inode} }

// holds reports whether the stamp of a file that was read at the given time is reliable: if the file still has this
// stamp, its content is the same.
func (s stamp) holds(read time.Time, grain time.Duration) bool {
	return !s.weak && !read.Before(s.changed.Add(grain))
}

// New returns a source with default intervals. what is the plural noun for the objects in messages.
func New(path, what string, feed Feed, failed func(context.Context, error) error, l *slog.Logger) *Source {
	s := &Source{
		Path: path, What: what, Feed: feed, Failed: failed, Log: l,
		Quiet: 50 * time.Millisecond, Patience: 2 * time.Second, Rescan: 30 * time.Second,
		Poll: time.Second, Rest: 3, Grain: 3 * time.Second, Empty: 15 * time.Second, MaxBytes: 256 << 20,
		pending: newPending(),
		taken:   make(map[string]stamp), stat: stampAt, now: time.Now,
	}
	s.open = s.read
	return s
}

// Run lists the directory now and after each change, until ctx ends.
func (s *Source) Run(ctx context.Context) error {
	w := dirwatch.Watch()
	defer w.Close()
	var failed string // the last reported error
	var unwatched error
	timer := time.NewTimer(0)
	defer timer.Stop()
	var (
		p       = s.pending
		since   time.Time     // time of the first pending event
		scanned time.Time     // end of the last scan
		took    time.Duration // duration of the last scan
		whole   time.Time     // end of the last scan that read all files
	)
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-w.Events:
			if strings.HasPrefix(e.Name, ".") && !strings.HasPrefix(e.Name, "..") {
				p.aside(e, time.Now())
				continue // a temporary file of an editor, or a file before its rename
			}
			now := time.Now()
			if since.IsZero() {
				since = now
			}
			due := now.Add(s.Quiet)
			if limit := since.Add(s.Patience); limit.Before(due) {
				due = limit
			}
			if p.note(e, now); p.urgent {
				// Scan at once, but while renames continue without end, scans take at most a quarter of
				// the time.
				due = scanned.Add(s.Rest * took)
			}
			s.distrust(e)
			timer.Reset(max(0, due.Sub(now)))
			continue
		case <-timer.C:
		}
		began := time.Now()
		other, err := w.Renew(s.Path)
		if other {
			p.forget()
			clear(s.taken)
		}
		switch {
		case err != nil && unwatched == nil:
			s.Log.Warn("a directory of objects cannot be watched: it is scanned periodically",
				"objects", s.What, "directory", s.Path, "every", s.Poll.String(), log.Err(err))
		case err == nil && unwatched != nil:
			s.Log.Info("a directory of objects is watched again", "objects", s.What, "directory", s.Path)
		}
		unwatched = err
		// A memory mapping, a file system that caches times, or a clock that was set back can
		// change a file without changing its stamp.
		all := began.Sub(whole) >= s.Rescan
		if all {
			clear(s.taken)
		}
		p.expire(began, s.Quiet, s.Patience)
		p.young = s.Quiet
		err = s.Scan(ctx)
		scanned = time.Now()
		took = scanned.Sub(began)
		if all {
			whole = scanned
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			if failed != "" {
				s.Log.Info("a directory of objects is read again", "objects", s.What, "directory", s.Path)
			}
			failed = ""
		default:
			if err.Error() != failed {
				failed = err.Error()
				s.Log.Error("a directory of objects cannot be read; its objects are kept",
					"objects", s.What, "directory", s.Path, log.Err(err))
			}
			if err := s.Failed(ctx, err); err != nil && ctx.Err() == nil {
				return err
			}
		}
		wait := s.Rescan - scanned.Sub(whole)
		switch {
		case len(p.unsettled) > 0:
			wait = s.Quiet
		case err != nil || p.again:
			wait = min(wait, time.Second)
		case unwatched != nil:
			wait = min(wait, max(s.Poll, s.Rest*took))
		}
		clear(p.arrived)
		p.urgent, since = false, time.Time{}
		timer.Reset(wait)
	}
}

// pending collects events since the last scan.
type pending struct {
	open      map[string]time.Time // open for writing, with the time of the first event
	unsettled map[string]span      // recently changed names
	departed  map[uint32]string    // names that were renamed away, by inotify cookie
	arrived   map[string]struct{}  // names that are targets of completed renames
	overdue   map[string]struct{}  // names that were unsettled for too long
	urgent    bool                 // a rename has completed
	// young is the maximum age of a change whose event may still be in the inotify queue.
	young time.Duration
	again bool // the last scan skipped some files
}

// span is the time of the first and of the last event about a name.
type span struct{ first, last time.Time }

func newPending() *pending {
	return &pending{
		open: make(map[string]time.Time), unsettled: make(map[string]span), departed: make(map[uint32]string),
		arrived: make(map[string]struct{}), overdue: make(map[string]struct{}),
	}
}

// aside records an event for a file that is not a manifest but may be the target of a symbolic link.
func (p *pending) aside(e dirwatch.Event, now time.Time) {
	if e.What == dirwatch.Written {
		if _, ok := p.open[e.Name]; !ok {
			p.open[e.Name] = now
		}
		return
	}
	delete(p.open, e.Name)
}

// note records an event.
func (p *pending) note(e dirwatch.Event, now time.Time) {
	at, ok := p.unsettled[e.Name]
	if !ok {
		at.first = now
	}
	at.last = now
	p.unsettled[e.Name] = at
	switch e.What {
	case dirwatch.Written:
		if _, ok := p.open[e.Name]; !ok {
			p.open[e.Name] = now
		}
		return
	case dirwatch.Lost:
		clear(p.open)
		return
	}
	delete(p.open, e.Name)
	switch {
	case e.What == dirwatch.Departed && e.Cookie != 0:
		p.departed[e.Cookie] = e.Name
	// A Kubernetes volume swaps a directory whose name begins with two dots.
	case e.What == dirwatch.Arrived && (e.Name == "" || isManifest(e.Name) || strings.HasPrefix(e.Name, "..")):
		p.urgent = true
		p.arrived[e.Name] = struct{}{}
		delete(p.unsettled, e.Name)
		if from, ok := p.departed[e.Cookie]; ok {
			delete(p.unsettled, from) // the file is still in this directory
			delete(p.departed, e.Cookie)
		}
	}
}

// expire removes names without recent events, and marks names whose events have not stopped for too
// long as overdue.
func (p *pending) expire(now time.Time, quiet, patience time.Duration) {
	clear(p.overdue)
	for name, at := range p.unsettled {
		if now.Sub(at.first) >= patience {
			p.overdue[name] = struct{}{}
		} else if now.Sub(at.last) < quiet {
			continue
		}
		delete(p.unsettled, name)
	}
	for cookie, name := range p.departed {
		if _, ok := p.unsettled[name]; !ok {
			delete(p.departed, cookie)
		}
	}
}

// writing reports whether a file that was read may still be being written in place: it was changed
// recently, and not by a rename. The event for that change may not have arrived yet.
func (p *pending) writing(name string, link bool, changed time.Time) bool {
	if age := time.Since(changed); age < 0 || age >= p.young {
		return false
	}
	for arrived := range p.arrived {
		if arrived == name || arrived == "" || link && strings.HasPrefix(arrived, "..") {
			return false
		}
	}
	_, overdue := p.overdue[name]
	return !overdue
}

// forget discards the events of a former directory.
func (p *pending) forget() {
	clear(p.open)
	clear(p.unsettled)
	clear(p.departed)
}

// isManifest reports whether a file may contain objects. Editors and Kubernetes volumes use names
// that begin with a dot for temporary files and directories.
func isManifest(name string) bool {
	return !strings.HasPrefix(name, ".") &&
		(strings.HasSuffix(name, ".yaml") || strings.HasSuffix(name, ".yml") || strings.HasSuffix(name, ".json"))
}

// distrust makes the next scan read the files that an event concerns, even if their stamps are
// unchanged.
func (s *Source) distrust(e dirwatch.Event) {
	if e.What == dirwatch.Lost || e.Name == "" {
		clear(s.taken)
		return
	}
	delete(s.taken, e.Name)
}

// Scan passes the complete listing to the feed, including unchanged files, because the cause of an
// earlier refusal may be resolved. It ignores timestamps that programs can set. Files that are
// being changed keep their previous objects. It must not run concurrently with Run.
func (s *Source) Scan(ctx context.Context) error {
	p := s.pending
	p.again = false
	began := s.now()
	entries, err := os.ReadDir(s.Path)
	if err != nil {
		return err
	}
	keep, target := p.held(s.Patience)
	var names []string
	links := make(map[string]bool)
	for _, e := range entries {
		n := e.Name()
		if !isManifest(n) {
			continue
		}
		names = append(names, n)
		links[n] = e.Type()&fs.ModeSymlink != 0
		if _, ok := keep[n]; !ok && target && links[n] {
			keep[n], p.again = nil, true
		}
	}
	if len(names) > maxFiles {
		return fmt.Errorf("%s has %d files, the limit is %d", s.Path, len(names), maxFiles)
	}
	if stop, err := s.isEmpty(ctx, len(names) == 0 && len(keep) == 0); stop || err != nil {
		p.again = true
		return err
	}
	files := make([]File, 0, len(names)+len(keep))
	taken := make(map[string]stamp, len(names))
	ids := make(map[string]fileID, len(names))
	size := 0
	for _, n := range names {
		if _, ok := keep[n]; ok {
			continue
		}
		f := File{Origin: n}
		if had, ok := s.taken[n]; ok && size+int(had.size) <= s.MaxBytes {
			if has, err := s.stat(filepath.Join(s.Path, n)); err == nil && has == had {
				f.Same = true
				size += int(had.size)
				taken[n], ids[n] = had, had.id()
				files = append(files, f)
				continue
			}
		}
		var is stamp
		f.Data, is, f.Err = s.open(filepath.Join(s.Path, n))
		if f.Err == nil && p.writing(n, links[n], is.changed) {
			keep[n] = nil
			if _, ok := p.unsettled[n]; !ok {
				p.unsettled[n] = span{first: is.changed, last: is.changed}
			}
			continue
		}
		if errors.Is(f.Err, fs.ErrNotExist) {
			// The file was removed after the listing, or it is a dangling link; Lstat distinguishes
			// the two.
			if _, err := os.Lstat(filepath.Join(s.Path, n)); errors.Is(err, fs.ErrNotExist) {
				keep[n] = nil
				p.again = true
				continue
			}
		}
		if size += len(f.Data); size > s.MaxBytes && f.Err == nil {
			size -= len(f.Data)
			f.Data, f.Err = nil, fmt.Errorf(
				"limit exceeded: all files together may have %d bytes (limits.manifests), the files before this one have %d",
				s.MaxBytes, size)
		}
		if f.Err != nil {
			is, _ = s.stat(filepath.Join(s.Path, n)) // zero if even that fails
		}
		ids[n] = is.id()
		if f.Err == nil && is.holds(began, s.Grain) && is.size == int64(len(f.Data)) {
			taken[n] = is
		}
		files = append(files, f)
	}
	for n, why := range keep {
		ids[n] = s.ids[n]
		if is, err := s.stat(filepath.Join(s.Path, n)); err == nil {
			ids[n] = is.id()
		}
		files = append(files, File{Origin: n, Err: why, Keep: true})
	}
	s.findRenamed(files, ids)
	s.taken = nil // if Set fails, the feed may not have the content
	if err := s.Feed.Set(ctx, files); err != nil {
		return err
	}
	s.taken, s.ids = taken, ids
	return nil
}

// findRenamed sets Former in renamed files. ids contains the IDs of these files.
func (s *Source) findRenamed(files []File, ids map[string]fileID) {
	former := make(map[fileID]string)
	for name, id := range s.ids {
		if id == (fileID{}) || ids[name] == id {
			continue
		}
		if other, ok := former[id]; !ok || name < other {
			former[id] = name
		}
	}
	for i := range files {
		n := files[i].Origin
		if name, ok := former[ids[n]]; ok && name != n {
			files[i].Former = name
		}
	}
}

// held lists manifests that keep their previous objects, with the problem to report; the problem is nil while a file
// has been changing only briefly. target reports whether a file that may be the target of a link is being written.
func (p *pending) held(patience time.Duration) (keep map[string]error, target bool) {
	keep = make(map[string]error)
	for name := range p.unsettled {
		if isManifest(name) {
			keep[name] = nil
		}
	}
	for name, since := range p.open {
		if !isManifest(name) {
			target = target || time.Since(since) < patience
			continue
		}
		keep[name] = nil
		if waited := time.Since(since); waited >= patience {
			keep[name] = errors.New("is open for writing: its previous objects stay until it is closed")
		} else {
			p.again = true
		}
	}
	return keep, target
}

// isEmpty records since when the directory is empty. stop is true if the directory had files
// recently, so that it is too early to delete their objects.
func (s *Source) isEmpty(ctx context.Context, empty bool) (stop bool, err error) {
	if !empty {
		s.empty = time.Time{}
		return false, nil
	}
	held, err := s.Feed.Held(ctx)
	if err != nil || held == 0 {
		return false, err
	}
	if s.empty.IsZero() {
		s.empty = time.Now()
	}
	if until := s.empty.Add(s.Empty); time.Now().Before(until) {
		return true, fmt.Errorf("%s has no files any more; if it stays empty, its %d %s are deleted after %s",
			s.Path, held, s.What, s.Empty)
	}
	return false, nil
}

// stampAt returns the current stamp of a file.
func stampAt(path string) (stamp, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return stamp{}, err
	}
	return stampOf(fi), nil
}

// read reads a regular file of at most MaxBytes and returns its stamp after the read.
func (s *Source) read(path string) ([]byte, stamp, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, stamp{}, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, stamp{}, err
	}
	if !fi.Mode().IsRegular() {
		return nil, stamp{}, errors.New("not a regular file")
	}
	// The size only avoids copies: a file may grow meanwhile.
	var content bytes.Buffer
	content.Grow(int(min(fi.Size(), int64(s.MaxBytes))) + bytes.MinRead)
	if _, err := content.ReadFrom(io.LimitReader(f, int64(s.MaxBytes)+1)); err != nil {
		return nil, stamp{}, err
	}
	data := content.Bytes()
	if len(data) > s.MaxBytes {
		return nil, stamp{}, fmt.Errorf("larger than %d bytes, which all files together may have (limits.manifests)",
			s.MaxBytes)
	}
	if fi, err = f.Stat(); err != nil { // the stamp after the read
		return nil, stamp{}, err
	}
	return data, stampOf(fi), nil
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package directory is a source of objects: the YAML and JSON files of one directory,
// without those below it, watched for changes.
//
// An event of the kernel only begins a scan, and each scan lists the whole directory. So a
// lost event, an editor that renames and a link that is exchanged lead to the same listing. A
// scan reads the files that may have changed; every Rescan, one reads all files.
//
// A finished rename is scanned at once. After any other event the scan waits until the
// directory is quiet. Meanwhile a file that is open for writing, or whose name has just gone,
// keeps what it had. A directory that cannot be read deletes nothing. One that has become empty
// deletes its objects when it has been empty for some time.
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
)

// maxFiles is how many files a directory may have.
const maxFiles = 20_000

// File is one file of a listing.
type File struct {
	// Origin is the name of the file in the directory.
	Origin string
	Data   []byte
	Err    error // it cannot be read; its objects stay
	// Keep says that the file was not read, because it is being changed. Its objects stay. Err,
	// if set, is reported besides.
	Keep bool
	// Same says that the file was not read, because it is as in the listing before, which had
	// it with Data.
	Same bool
}

// Feed takes listings.
type Feed interface {
	// Set takes everything that the directory has. It is called by one goroutine. If it
	// fails, the next listing has the Data of every file.
	Set(ctx context.Context, files []File) error
	// Held returns how many objects of the source are in force.
	Held(ctx context.Context) (int, error)
}

// Source watches a directory. Its fields are not changed after the start of Run.
type Source struct {
	Path string
	// What names the objects in messages, in the plural: "policies".
	What string
	Feed Feed
	// Failed is told why the directory cannot be read. The next listing takes it back.
	Failed func(context.Context, error) error
	Log    *slog.Logger

	Quiet    time.Duration // quiet before a scan
	Patience time.Duration // longest time without a scan while there is no quiet
	Rescan   time.Duration // between two scans that read all files
	Poll     time.Duration // between two scans while the kernel has no room for a watch
	// Rest is how many times as long as a scan took the next waits for at least.
	Rest time.Duration
	// Grain is how long ago a file was changed at least when it is read, if an equal stamp
	// later means equal content. Two writes within one tick of the kernel's clock (10 ms at
	// 100 Hz), or within the 2 s that FAT stores, leave the same times: the second may come
	// after the file was read.
	Grain time.Duration
	// Empty is how long a directory that had files has to be empty until their
	// objects are deleted: a volume may not be mounted yet.
	Empty time.Duration
	// MaxBytes is how large the files may be together; one that is too much is
	// refused.
	MaxBytes int

	pending *pending
	empty   time.Time // since when the directory is empty
	// taken are the files that need not be read again while they have this stamp,
	// by name: the feed has them, and no event named them since.
	taken map[string]stamp

	// Tests have others.
	open func(path string) ([]byte, stamp, error) // read
	stat func(path string) (stamp, error)         // look
	now  func() time.Time                         // what stamps are compared with
}

// stamp tells two states of a file apart, and a file from another of its name.
type stamp struct {
	device, inode uint64
	size          int64
	modified      time.Time
	changed       time.Time // content or attributes; no program can set it
	weak          bool      // the system does not say enough to tell states apart
}

// holds reports whether a file with this stamp, read at a time or later, is the
// same as long as the stamp is.
func (s stamp) holds(read time.Time, grain time.Duration) bool {
	return !s.weak && !read.Before(s.changed.Add(grain))
}

// New returns a source with the usual times. what names its objects in messages, in the plural.
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

// Run lists the directory now and after each change, until the context ends.
func (s *Source) Run(ctx context.Context) error {
	w := dirwatch.Watch()
	defer w.Close()
	var failed string // the last error
	var unwatched error
	timer := time.NewTimer(0)
	defer timer.Stop()
	var (
		p       = s.pending
		since   time.Time     // when the first of what is pending happened
		scanned time.Time     // when the last scan ended
		took    time.Duration // what it took
		whole   time.Time     // when the last scan that read all files ended
	)
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-w.Events:
			if strings.HasPrefix(e.Name, ".") && !strings.HasPrefix(e.Name, "..") {
				p.aside(e, time.Now())
				continue // an editor's, or what is about to be renamed
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
				// At once; but where renames never end, a quarter of the time goes
				// into scans.
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
			s.Log.Warn("a directory of objects cannot be watched: it is looked at again and again",
				"objects", s.What, "directory", s.Path, "every", s.Poll.String(), log.Err(err))
		case err == nil && unwatched != nil:
			s.Log.Info("a directory of objects is watched again", "objects", s.What, "directory", s.Path)
		}
		unwatched = err
		// A memory mapping, a file system that caches times, or a clock that was set
		// back may change a file and leave its stamp.
		all := began.Sub(whole) >= s.Rescan
		if all {
			clear(s.taken)
		}
		p.expire(began, s.Quiet, s.Patience)
		p.young = s.Quiet
		if scanned.IsZero() {
			p.young = 0 // what is there at the start is taken
		}
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
				s.Log.Error("a directory of objects cannot be read; its objects stay",
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

// pending is what happened and is not in a scan yet.
type pending struct {
	open      map[string]time.Time // files that are being written, since when
	unsettled map[string]span      // names of which more may be to come
	departed  map[uint32]string    // by the cookie of a rename
	arrived   map[string]struct{}  // by renames that have finished
	overdue   map[string]struct{}  // unsettled for too long
	urgent    bool                 // a rename has finished
	// young is how long ago a file was changed, at most, if a message about it may
	// be on its way still.
	young time.Duration
	again bool // the last scan left something out
}

// span is the time from the first to the last event about a name.
type span struct{ first, last time.Time }

func newPending() *pending {
	return &pending{
		open: make(map[string]time.Time), unsettled: make(map[string]span), departed: make(map[uint32]string),
		arrived: make(map[string]struct{}), overdue: make(map[string]struct{}),
	}
}

// aside takes an event about a name that is never that of a manifest. A link
// may lead to it.
func (p *pending) aside(e dirwatch.Event, now time.Time) {
	if e.What == dirwatch.Written {
		if _, ok := p.open[e.Name]; !ok {
			p.open[e.Name] = now
		}
		return
	}
	delete(p.open, e.Name)
}

// note takes an event.
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
	// Of a volume of Kubernetes a name with two dots is swapped.
	case e.What == dirwatch.Arrived && (e.Name == "" || isManifest(e.Name) || strings.HasPrefix(e.Name, "..")):
		p.urgent = true
		p.arrived[e.Name] = struct{}{}
		delete(p.unsettled, e.Name)
		if from, ok := p.departed[e.Cookie]; ok {
			delete(p.unsettled, from) // it is here
			delete(p.departed, e.Cookie)
		}
	}
}

// expire forgets names about which nothing happened for a while, or too much for
// too long.
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

// writing reports whether a file that was read may be one that is being written
// in place: it was changed a moment ago, and not by a rename. What the kernel
// says about it may not have been heard yet.
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

// forget says that the dirwatch.Events so far mean nothing any more.
func (p *pending) forget() {
	clear(p.open)
	clear(p.unsettled)
	clear(p.departed)
	p.arrived[""] = struct{}{}
}

// isManifest reports whether a name is that of a file with objects. Names
// with a dot at the front are those of editors, and of the directories that a
// volume of Kubernetes swaps.
func isManifest(name string) bool {
	return !strings.HasPrefix(name, ".") &&
		(strings.HasSuffix(name, ".yaml") || strings.HasSuffix(name, ".yml") || strings.HasSuffix(name, ".json"))
}

// distrust has the files that an event is about read again, whatever their
// stamps say.
func (s *Source) distrust(e dirwatch.Event) {
	if e.What == dirwatch.Lost || e.Name == "" {
		clear(s.taken)
		return
	}
	delete(s.taken, e.Name)
}

// Scan hands on what the directory has, unchanged files too: what kept one from being taken
// over may have gone. It trusts no time that a program can set. Names of which more may be to
// come keep what they had. It does not run beside Run.
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
				taken[n] = had
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
			// Gone since it was listed, or a link to nothing: the next look says
			// whether it is gone, or another by now.
			if _, err := os.Lstat(filepath.Join(s.Path, n)); errors.Is(err, fs.ErrNotExist) {
				keep[n] = nil
				p.again = true
				continue
			}
		}
		if size += len(f.Data); size > s.MaxBytes && f.Err == nil {
			size -= len(f.Data)
			f.Data, f.Err = nil, fmt.Errorf(
				"no room: the files together may have %d bytes (limits.manifests), those before it have %d", s.MaxBytes, size)
		}
		if f.Err == nil && is.holds(began, s.Grain) && is.size == int64(len(f.Data)) {
			taken[n] = is
		}
		files = append(files, f)
	}
	for n, why := range keep {
		files = append(files, File{Origin: n, Err: why, Keep: true})
	}
	s.taken = nil // the feed may not have what it was given if it fails
	if err := s.Feed.Set(ctx, files); err != nil {
		return err
	}
	s.taken = taken
	return nil
}

// held are the manifests that keep what they had, with the problem that this
// is, nil for a moment. Target says that another file is being written, to which
// a link may lead.
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
			keep[name] = errors.New("is open for writing: what it had stays until it is closed")
		} else {
			p.again = true
		}
	}
	return keep, target
}

// isEmpty notes whether the directory is empty. Stop says that it is too early
// to say so: it had files not long ago.
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
		return true, fmt.Errorf("%s has no file any more; if it stays so, its %d %s are deleted after %s",
			s.Path, held, s.What, s.Empty)
	}
	return false, nil
}

// stampAt returns the stamp that a file has now.
func stampAt(path string) (stamp, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return stamp{}, err
	}
	return stampOf(fi), nil
}

// read reads a regular file of a size that all together may have, and returns the
// stamp that it had afterwards.
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
	data, err := io.ReadAll(io.LimitReader(f, int64(s.MaxBytes)+1))
	if err != nil {
		return nil, stamp{}, err
	}
	if len(data) > s.MaxBytes {
		return nil, stamp{}, fmt.Errorf("larger than %d bytes, which all files together may have (limits.manifests)",
			s.MaxBytes)
	}
	if fi, err = f.Stat(); err != nil { // after what was read
		return nil, stamp{}, err
	}
	return data, stampOf(fi), nil
}

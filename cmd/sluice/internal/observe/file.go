// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
)

// Output is a destination for events.
type Output interface {
	Write(e Event) error
	Close() error
}

// minFileSize is the minimum size of a file: it has space for some events with long labels.
const minFileSize = 64 << 10

func (o *Flags) addFile(f *pflag.FlagSet) {
	o.fileSize, o.files = 64<<20, 4
	f.StringVar(&o.file, "output-file", "",
		"write the events to FILE as one JSON object per line, with mode 0600, instead of to standard output; "+
			"FILE must be new, empty or begin with an event")
	f.Var(&o.fileSize, "max-size",
		"rotate the output file at this size; the previous file becomes FILE.1, older ones FILE.2 and so on")
	f.UintVar(&o.files, "max-files", 4, "keep at most this many output files, including the current one")
}

func (o *Flags) checkFile() error {
	switch {
	case o.file == "":
	case o.fileSize < minFileSize:
		return invocation.Usagef("--max-size: %s is less than %s", o.fileSize, invocation.Size(minFileSize))
	case o.files == 0 || o.files > 1000:
		return invocation.Usagef("--max-files: %d is not from 1 to 1000", o.files)
	}
	return nil
}

// Open opens the output. The caller closes it.
func (o *Flags) Open(inv *invocation.Invocation) (Output, error) {
	if o.file == "" {
		return newLines(inv), nil
	}
	f := &file{path: o.file, most: int64(o.fileSize), keep: int(o.files), note: inv.Note}
	if err := f.checkOlder(); err != nil {
		return nil, err
	}
	if err := f.open(); err != nil {
		return nil, err
	}
	return f, nil
}

// ToFile reports whether the output is a file.
func (o *Flags) ToFile() bool { return o.file != "" }

// lines writes events to standard output as they arrive.
type lines struct {
	out   io.Writer
	json  bool
	fold  bool // break lines that are longer than output.Width
	today time.Time
}

func newLines(inv *invocation.Invocation) *lines {
	// With JSON, each line is an object. A JSON array would need an end, which a stream does not have.
	return &lines{out: inv.Out, json: inv.Format == "json", fold: !inv.Wide(), today: time.Now()}
}

func (l *lines) Write(e Event) error {
	if l.json {
		return message.WriteLine(l.out, e)
	}
	line := e.Line(l.today)
	if l.fold {
		line = output.Fold(line)
	}
	_, err := fmt.Fprintln(l.out, line)
	return err
}

func (*lines) Close() error { return nil }

// file writes events as lines of JSON into a file of limited size, and keeps some rotated files. If a write fails,
// for example on a full disk, the event is counted as lost.
type file struct {
	path string
	most int64 // largest size of a file in bytes
	keep int   // number of files, including the current one
	note func(text string)

	f       *os.File // nil: reopening failed
	size    int64
	lost    uint64 // events lost since the last successful write
	dropped uint64 // events lost in total
}

// open opens and locks the file: a second process would rotate the files of the first.
func (w *file) open() error {
	f, err := os.OpenFile(w.path, os.O_RDWR|os.O_CREATE|os.O_APPEND|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return err
	}
	w.size, err = w.prepare(f)
	if err != nil {
		f.Close()
		return err
	}
	w.f = f
	return nil
}

// prepare checks and locks an open file, and returns its size.
func (w *file) prepare(f *os.File) (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if !info.Mode().IsRegular() {
		return 0, fmt.Errorf("%s is not a regular file", w.path)
	}
	if err := output.CheckOwner(info); err != nil {
		return 0, fmt.Errorf("write %s: %w", w.path, err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return 0, fmt.Errorf("another process writes %s", w.path)
		}
		return 0, fmt.Errorf("lock %s: %w", w.path, err)
	}
	if err := w.checkOwn(f, info.Size()); err != nil {
		return 0, err
	}
	if info.Size() > 0 && info.Mode().Perm()&0o077 != 0 { // an empty file may belong to another program
		if err := f.Chmod(0o600); err != nil {
			return 0, err
		}
	}
	size := info.Size()
	if size == 0 {
		return 0, nil
	}
	// A crash may have left an incomplete line.
	last := make([]byte, 1)
	if _, err := f.ReadAt(last, size-1); err != nil {
		return 0, fmt.Errorf("read %s: %w", w.path, err)
	}
	if last[0] == '\n' {
		return size, nil
	}
	n, err := f.Write([]byte{'\n'})
	return size + int64(n), err
}

// beginning limits the number of bytes that are read to find the first event of a file.
const beginning = 64 << 10

// checkOwn refuses a file that another program wrote: a file that is not empty and does not begin with an event.
func (w *file) checkOwn(f *os.File, size int64) error {
	if size == 0 {
		return nil
	}
	text := make([]byte, min(size, beginning))
	if _, err := f.ReadAt(text, 0); err != nil {
		return fmt.Errorf("read %s: %w", f.Name(), err)
	}
	line, _, whole := bytes.Cut(text, []byte{'\n'})
	if !isEvent(line, whole) {
		return fmt.Errorf("write %s: it exists and does not begin with an event; remove it or choose another name", f.Name())
	}
	return nil
}

// isEvent reports whether a line is an event, in the format of this or another release. If whole is false, it reports
// whether the line can be the beginning of an event.
func isEvent(line []byte, whole bool) bool {
	if !whole {
		return bytes.HasPrefix(line, []byte(`{"time":"`)) || bytes.HasPrefix(line, []byte(`{"lost`)) ||
			bytes.HasPrefix([]byte(`{"time":"`), line)
	}
	var f struct {
		missing

		UUID, Verdict, Reason string
	}
	if json.Unmarshal(line, &f) == nil && (f.UUID != "" || f.LostBy != "" || f.Verdict != "" && f.Reason != "") {
		return true
	}
	// A log of another program may also have lines with a time and a note, so a note may have no other fields.
	strict := json.NewDecoder(bytes.NewReader(line))
	strict.DisallowUnknownFields()
	var note missing
	return strict.Decode(&note) == nil && note != missing{}
}

// checkOlder returns an error if files of other programs have the names of rotated files, because a rotation would
// rename or replace them.
func (w *file) checkOlder() error {
	for n := 1; n < w.keep; n++ {
		f, err := os.OpenFile(w.older(n), os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		info, err := f.Stat()
		switch {
		case err != nil:
		case !info.Mode().IsRegular():
			err = fmt.Errorf("%s is not a regular file", f.Name())
		default:
			err = w.checkOwn(f, info.Size())
		}
		f.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// older returns the name of the n-th rotated file.
func (w *file) older(n int) string { return w.path + "." + strconv.Itoa(n) }

// Write implements Output. It returns no error for a failed write: it counts the lost event and prints a note.
func (w *file) Write(e Event) error {
	line, err := e.Append(nil)
	if err != nil {
		return err
	}
	err = w.append(append(line, '\n'))
	switch {
	case err != nil:
		if w.lost == 0 {
			w.note(fmt.Sprintf("events are lost: %v", err))
		}
		w.lost++
		w.dropped++
	case w.lost > 0:
		w.note(fmt.Sprintf("writing to %s works again; %s lost", w.path,
			output.Plural(w.lost, "event was", "events were")))
		w.lost = 0
	}
	return nil
}

// append writes a line, preceded by a line with the number of lost events, if any.
func (w *file) append(line []byte) error {
	if w.lost > 0 {
		line = append(fmt.Appendf(nil, "{\"lost\":%d,\"lostBy\":\"file\"}\n", w.lost), line...)
	}
	if w.f == nil {
		if err := w.open(); err != nil {
			return err
		}
	}
	if w.size > 0 && w.size+int64(len(line)) > w.most {
		if err := w.rotate(); err != nil {
			return err
		}
	}
	if w.size == 0 { // an empty file may have been readable by others
		if err := w.f.Chmod(0o600); err != nil {
			return err
		}
	}
	n, err := w.f.Write(line)
	if err == nil {
		w.size += int64(n)
		return nil
	}
	if n > 0 {
		// Remove the part of the line that was written.
		if terr := w.f.Truncate(w.size); terr != nil {
			w.size += int64(n)
			err = errors.Join(err, terr)
		}
	}
	return err
}

// rotate renames the file and opens a new one.
func (w *file) rotate() error {
	if w.keep == 1 {
		if err := w.f.Truncate(0); err != nil {
			return err
		}
		w.size = 0
		return nil
	}
	if err := w.checkOlder(); err != nil {
		return err
	}
	for n := w.keep - 1; n > 1; n-- {
		if err := os.Rename(w.older(n-1), w.older(n)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := os.Rename(w.path, w.older(1)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	err := w.f.Close()
	w.f = nil
	return errors.Join(err, w.open())
}

// Close implements Output.
func (w *file) Close() error {
	var err error
	if w.f != nil {
		err = w.f.Close()
	}
	if w.dropped > 0 {
		events := output.Plural(w.dropped, "event was", "events were")
		err = errors.Join(err, fmt.Errorf("%s not written to %s", events, w.path))
	}
	return err
}

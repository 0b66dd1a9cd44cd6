// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package journal keeps what the policy service may not forget: policies with
// the revision they are in, and what it last knew of identities, subscribers
// and learned names.
//
// One file takes one line per change, so that a change is whole or not there
// and costs one write, however many policies there are. What a killed process
// left unfinished at the end was answered to nobody and is cut off. Damage
// anywhere else is refused with the file's name: without its policies a node
// would allow what they deny. When the file has grown well beyond what it
// says, the owner's state is written anew beside it and takes its place.
package journal

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/fault"
)

// Names of the files.
const (
	File     = "journal"
	LockFile = "lock"
)

// lockWait is how long Open waits for a process that is on its way out; tests
// do not.
var lockWait = 3 * time.Second

// maxLine bounds one change, in bytes: what a source brings at once, escaped in
// JSON, or the identities of a whole cluster. Tests have less.
var maxLine = 256 << 20

var schema = durable.Schema{Name: "sluice.policy.change", Version: 1}

// Points at which a test may kill the process.
var (
	beforeWrite   = fault.Register("policy/journal/before-write")
	afterWrite    = fault.Register("policy/journal/after-write")
	afterSync     = fault.Register("policy/journal/after-sync")
	beforeRewrite = fault.Register("policy/journal/before-rewrite")
	afterRewrite  = fault.Register("policy/journal/after-rewrite")
)

// Change is one line. Its fields are never given another meaning.
type Change struct {
	// State is the name of the state that the journal keeps, in hexadecimal, in
	// the first change.
	State string `json:"state,omitempty"`
	// Revision of the policies after the change; 0: as before.
	Revision        uint64       `json:"revision,omitempty"`
	Policies        []Policy     `json:"policies,omitempty"`
	GonePolicies    []Key        `json:"gone_policies,omitempty"`
	Identities      []Identity   `json:"identities,omitempty"`
	GoneIdentities  []uint32     `json:"gone_identities,omitempty"`
	Subscribers     []Subscriber `json:"subscribers,omitempty"`
	GoneSubscribers []string     `json:"gone_subscribers,omitempty"`
	Names           []Name       `json:"names,omitempty"`
	GoneNames       []string     `json:"gone_names,omitempty"`
}

// Key names a policy.
type Key struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
}

// Policy is a policy as it came.
type Policy struct {
	Key      Key    `json:"key"`
	Source   string `json:"source"`
	Origin   string `json:"origin,omitempty"`
	Manager  string `json:"manager,omitempty"`
	Manifest []byte `json:"manifest"`
	Revision uint64 `json:"revision"`
	Updated  int64  `json:"updated"` // seconds since 1970
}

// Identity is a number with its labels as source, key, value.
type Identity struct {
	Number uint32      `json:"number"`
	Labels [][3]string `json:"labels"`
}

// Subscriber is what a subscriber asked for.
type Subscriber struct {
	Name      string     `json:"name"`
	Subjects  []uint32   `json:"subjects,omitempty"`
	Locations []Location `json:"locations,omitempty"`
	// Enforces is absent in records of versions that did not know it.
	Enforces bool `json:"enforces,omitempty"`
}

// Location is where an identity lives.
type Location struct {
	Address  string `json:"address"`
	Identity uint32 `json:"identity"`
}

// Name is a DNS name with all addresses learned for it.
type Name struct {
	Name      string    `json:"name"`
	Addresses []Address `json:"addresses"`
}

// Address is one of them.
type Address struct {
	Address string `json:"address"`
	Expires int64  `json:"expires"` // seconds since 1970
}

// Journal is the open file. It belongs to one goroutine.
type Journal struct {
	dir   string
	lock  *os.File
	file  *os.File
	size  int64 // of the whole lines in the file
	base  int64 // size after the last rewrite
	dirty bool  // something behind size could not be cut off
}

// Open takes an existing directory for this process and reads every change to
// replay. Cut is how many bytes at the end were an unfinished change. The
// error of a damaged file ends with what to do.
func Open(dir string, replay func(Change) error) (j *Journal, cut int64, err error) {
	lock, err := durable.Lock(filepath.Join(dir, LockFile), lockWait)
	if err != nil {
		return nil, 0, fmt.Errorf("state directory: %w", err)
	}
	opened := &Journal{dir: dir, lock: lock}
	if cut, err = opened.load(replay); err != nil {
		return nil, 0, errors.Join(err, opened.Close())
	}
	return opened, cut, nil
}

// load opens the file and reads what is in it.
func (j *Journal) load(replay func(Change) error) (cut int64, err error) {
	dir := j.dir
	if _, err := durable.RemoveTemp(dir); err != nil {
		return 0, fmt.Errorf("state directory: %w", err)
	}
	path := filepath.Join(dir, File)
	if j.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o600); err != nil {
		return 0, err
	}
	if st, err := j.file.Stat(); err != nil || !st.Mode().IsRegular() {
		return 0, errors.Join(err, fmt.Errorf("%s: not a regular file", path))
	}
	if cut, err = j.read(replay); err != nil {
		return 0, fmt.Errorf("%s: %w; the policies of this node are in this file: restore it, or remove it and apply them again", path, err)
	}
	if cut > 0 {
		if err := j.file.Truncate(j.size); err != nil {
			return 0, fmt.Errorf("cut off an unfinished change: %w", err)
		}
	}
	j.base = j.size
	return cut, durable.SyncDir(dir)
}

func (j *Journal) read(replay func(Change) error) (cut int64, err error) {
	r := bufio.NewReaderSize(j.file, 1<<20)
	for line := 1; ; line++ {
		b, err := readLine(r)
		if errors.Is(err, io.EOF) {
			// A kill leaves a part of what was to be written, and nothing else. A
			// whole change with another byte in the place of its newline was
			// finished, and answered.
			if last := len(b) - 1; last >= 0 && (b[last] != 0 || (j.size+int64(last))%sector != 0) && durable.Decode(append(b[:last:last], '\n'), schema, new(Change)) == nil {
				return 0, fmt.Errorf("line %d: %w: %q instead of the newline at its end", line, durable.ErrCorrupt, b[last])
			}
			return int64(len(b)), nil
		}
		if err != nil {
			return 0, fmt.Errorf("line %d: %w", line, err)
		}
		var c Change
		if err := durable.Decode(b, schema, &c); err != nil {
			// Blocks that never reached the disk before the power went read as
			// zeros; nothing that was answered can follow them.
			if lostBlocks(b, j.size) {
				if _, perr := r.Peek(1); errors.Is(perr, io.EOF) {
					return int64(len(b)), nil
				}
			}
			return 0, fmt.Errorf("line %d: %w", line, err)
		}
		if err := replay(c); err != nil {
			return 0, fmt.Errorf("line %d: %w", line, err)
		}
		j.size += int64(len(b))
	}
}

// sector is what storage writes whole or not at all.
const sector = 512

// lostBlocks reports whether a line at an offset of the file has zeros, and all
// of them as sectors that were never written: no other damage is so regular.
func lostBlocks(line []byte, offset int64) bool {
	found := false
	for at := 0; at < len(line); {
		if line[at] != 0 {
			at++
			continue
		}
		end := at
		for end < len(line) && line[end] == 0 {
			end++
		}
		if at > 0 && (offset+int64(at))%sector != 0 || end < len(line) && (offset+int64(end))%sector != 0 {
			return false
		}
		found, at = true, end
	}
	return found
}

// encode makes the line of a change that read can read.
func encode(c Change) ([]byte, error) {
	b, err := durable.Encode(schema, c)
	if err == nil && len(b) > maxLine {
		err = fmt.Errorf("a change of %d bytes; the limit is %d", len(b), maxLine)
	}
	return b, err
}

// readLine reads up to and with a newline. At the end it returns io.EOF with
// what there is.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case err == nil, !errors.Is(err, bufio.ErrBufferFull):
			return line, err
		case len(line) > maxLine:
			return nil, fmt.Errorf("%w: longer than %d bytes", durable.ErrCorrupt, maxLine)
		}
	}
}

// Append adds a change. When it returns nil the change survives the process,
// and with sync a loss of power too; else it is not there.
func (j *Journal) Append(ctx context.Context, c Change, sync bool) error {
	b, err := encode(c)
	if err != nil {
		return fmt.Errorf("append to %s: %w", j.path(), err)
	}
	if err := beforeWrite.Hit(ctx); err != nil {
		return err
	}
	if j.dirty {
		if err := j.cutOff(); err != nil {
			return err
		}
	}
	_, err = j.file.WriteAt(b, j.size)
	if err == nil {
		err = afterWrite.Hit(ctx)
	}
	if err == nil && sync {
		err = j.file.Sync()
	}
	if err == nil {
		err = afterSync.Hit(ctx)
	}
	if err != nil {
		j.dirty = true
		return errors.Join(fmt.Errorf("append to %s: %w", j.path(), err), j.cutOff())
	}
	j.size += int64(len(b))
	return nil
}

func (j *Journal) cutOff() error {
	if err := j.file.Truncate(j.size); err != nil {
		return fmt.Errorf("cut off %s: %w", j.path(), err)
	}
	j.dirty = false
	return nil
}

func (j *Journal) path() string { return filepath.Join(j.dir, File) }

// slack is how much the file may grow beyond what it said after the last
// rewrite.
const slack = 8 << 20

// Grown says that Rewrite is due.
func (j *Journal) Grown() bool { return j.size > 2*j.base+slack }

// Size is that of the file in bytes.
func (j *Journal) Size() int64 { return j.size }

// Rewrite replaces everything by the given changes.
func (j *Journal) Rewrite(ctx context.Context, state []Change) error {
	if err := beforeRewrite.Hit(ctx); err != nil {
		return err
	}
	var buf bytes.Buffer
	for _, c := range state {
		b, err := encode(c)
		if err != nil {
			return fmt.Errorf("write %s anew: %w", j.path(), err)
		}
		buf.Write(b)
	}
	if err := durable.WriteFile(j.path(), buf.Bytes(), 0o600, durable.SyncAll); err != nil {
		if !j.named() { // renamed, but not synced
			err = fmt.Errorf("%w: %w", ErrLost, err)
		}
		return err
	}
	f, err := os.OpenFile(j.path(), os.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		// The open file has no name any more: what is added to it would be lost.
		return fmt.Errorf("%w: %w", ErrLost, err)
	}
	j.file.Close()
	j.file, j.size, j.base, j.dirty = f, int64(buf.Len()), int64(buf.Len()), false
	return afterRewrite.Hit(ctx)
}

// named reports whether the open file is the one that a restart would read.
func (j *Journal) named() bool {
	now, err := os.Stat(j.path())
	if err != nil {
		return false
	}
	mine, err := j.file.Stat()
	return err == nil && os.SameFile(now, mine)
}

// ErrLost: the journal can take no more changes; the process has to start anew.
var ErrLost = errors.New("journal lost")

// Close gives the directory to the next process.
func (j *Journal) Close() error {
	var err error
	if j.file != nil {
		err = j.file.Close()
	}
	if cerr := j.lock.Close(); !errors.Is(cerr, fs.ErrClosed) {
		err = errors.Join(err, cerr)
	}
	return err
}

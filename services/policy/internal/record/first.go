// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/desired/journal"
	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/store"
)

// FirstFile is the file of the first format: one line per change, each with a checksum. It is read once, and then
// replaced by a record that earlier versions cannot read. They therefore fail, instead of starting without policies.
const FirstFile = "journal"

var (
	firstSchema   = durable.Schema{Name: "sluice.policy.change", Version: 1}
	retiredSchema = durable.Schema{Name: "sluice.policy.change", Version: 2}
)

// retired is the content of the record that replaces the first format.
type retired struct {
	MovedTo string `json:"moved_to"`
}

const retiredLimit = 4 << 10

// firstChange is a line of the first format. The meaning of its fields must never change.
type firstChange struct {
	State        string   `json:"state,omitempty"`
	Revision     uint64   `json:"revision,omitempty"` // 0: unchanged
	Policies     []Policy `json:"policies,omitempty"`
	GonePolicies []Key    `json:"gone_policies,omitempty"`
	Cache
}

var errIrregular = errors.New("not a regular file")

// maxLine limits one change of the first format, in bytes.
const maxLine = 256 << 20

// first is the content of a file in the first format; nil if there is no such file.
type first struct {
	state       string
	revision    uint64
	policies    map[Key]Policy
	identities  map[uint32]Identity
	subscribers map[string]Subscriber
	names       map[string]Name
}

// readFirstFormat reads the file of the first format, if it exists and was not migrated yet.
func readFirstFormat(d *store.Dir) (*first, error) {
	path, db := filepath.Join(d.Path(), FirstFile), filepath.Join(d.Path(), File)
	_, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var r retired
	if err := durable.Load(path, retiredLimit, retiredSchema, &r); err == nil {
		if _, err := os.Lstat(db); errors.Is(err, fs.ErrNotExist) && !d.Created(File) {
			return nil, refusal(db, store.ErrMissing, fmt.Errorf("%s says that it was created", path), "rm "+path)
		}
		return nil, nil
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = errIrregular
	}
	o := &first{policies: make(map[Key]Policy), identities: make(map[uint32]Identity), subscribers: make(map[string]Subscriber), names: make(map[string]Name)}
	if err == nil {
		err = o.read(f)
	}
	if err != nil {
		if kind := kindOf(err); kind != nil {
			return nil, refusal(path, kind, err, store.SetAside(path))
		}
		return nil, fmt.Errorf("state file %s: %w", path, err)
	}
	return o, nil
}

// refusal returns the error for an unreadable file of the first format, in the same form as kit/store does for its
// files.
func refusal(path string, kind, detail error, commands string) error {
	return &store.Refusal{
		Path: path, Kind: kind, Detail: detail, Commands: commands, Loss: policiesOptions.Loss, Doc: policiesOptions.Doc,
	}
}

// kindOf returns the kind of error in kit/store that corresponds to an error of reading the file; nil if the disk
// failed.
func kindOf(err error) error {
	switch {
	case errors.Is(err, durable.ErrVersion):
		return store.ErrVersion
	case errors.Is(err, durable.ErrForeign), errors.Is(err, errIrregular):
		return store.ErrForeign
	case errors.Is(err, durable.ErrCorrupt):
		return store.ErrCorrupt
	}
	return nil
}

func (o *first) read(f io.Reader) error {
	size := int64(0)
	r := bufio.NewReaderSize(f, 1<<20)
	for line := 1; ; line++ {
		b, err := readLine(r)
		if errors.Is(err, io.EOF) {
			// A killed process leaves at most an incomplete line. If the change is complete but does not end with a
			// newline, it was acknowledged, and the newline was corrupted later.
			if last := len(b) - 1; last >= 0 && (b[last] != 0 || (size+int64(last))%sector != 0) && durable.Decode(append(b[:last:last], '\n'), firstSchema, new(firstChange)) == nil {
				return fmt.Errorf("line %d: %w: %q instead of the newline at its end", line, durable.ErrCorrupt, b[last])
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("line %d: %w", line, err)
		}
		var c firstChange
		if err := durable.Decode(b, firstSchema, &c); err != nil {
			// Blocks that did not reach the disk before a power failure read as zeros. No acknowledged change can follow them,
			// because a change is acknowledged only after it was synced.
			if lostBlocks(b, size) {
				if _, perr := r.Peek(1); errors.Is(perr, io.EOF) {
					return nil
				}
			}
			return fmt.Errorf("line %d: %w", line, err)
		}
		o.apply(c)
		size += int64(len(b))
	}
}

// sector is the unit that storage writes completely or not at all.
const sector = 512

// lostBlocks reports whether the zeros in a line at an offset of the file fill exactly whole sectors. Such sectors
// never reached the disk. Other corruption would not be aligned to sectors.
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

// readLine reads up to and including a newline. At the end it returns io.EOF and the remaining bytes.
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

func (o *first) apply(c firstChange) {
	if c.State != "" {
		o.state = c.State
	}
	if c.Revision != 0 {
		o.revision = c.Revision
	}
	for _, x := range c.Policies {
		o.policies[x.Key] = x
	}
	for _, x := range c.GonePolicies {
		delete(o.policies, x)
	}
	for _, x := range c.Identities {
		o.identities[x.Number] = x
	}
	for _, x := range c.GoneIdentities {
		delete(o.identities, x)
	}
	for _, x := range c.Subscribers {
		o.subscribers[x.Name] = x
	}
	for _, x := range c.GoneSubscribers {
		delete(o.subscribers, x)
	}
	for _, x := range c.Names {
		o.names[x.Name] = x
	}
	for _, x := range c.GoneNames {
		delete(o.names, x)
	}
}

func (o *first) initPolicies(t *store.Tx) error {
	if o == nil {
		return nil
	}
	if o.state != "" {
		t.Put(bucketState, []byte(keyName), []byte(o.state))
	}
	if o.revision != 0 {
		t.Put(bucketState, []byte(keyRevision), binary.BigEndian.AppendUint64(nil, o.revision))
	}
	for _, x := range o.policies {
		t.Put(bucketPolicies, journal.StagedKey(x.Key.Encode(), 0), encodePolicy(x))
	}
	return nil
}

func (o *first) initCache(t *store.Tx) error {
	if o == nil {
		return nil
	}
	for _, x := range o.identities {
		x, _ = rename(x)
		t.Put(bucketIdentities, []byte(identityKey(x.Number)), encode(x))
	}
	for _, x := range o.subscribers {
		t.Put(bucketSubscribers, []byte(x.Name), encode(x))
	}
	for _, x := range o.names {
		t.Put(bucketNames, []byte(x.Name), encode(x))
	}
	return nil
}

// retire replaces the file of the first format by a record that points to File, which now contains the policies.
func (o *first) retire(d *store.Dir) error {
	if o == nil {
		return nil
	}
	return durable.Save(filepath.Join(d.Path(), FirstFile), retiredSchema, retired{MovedTo: File}, durable.SyncAll)
}

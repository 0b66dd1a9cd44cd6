// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ruleset

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
)

// fileName is the name of the file, without the ID of the boot.
const fileName = "rulesets"

const (
	slotSize = len(layer7.Digest{}) + crc32.Size
	fileSize = slots * slotSize
	slots    = 65_536 // those above Size are unused
)

// header is the first slot of the file, which no rule set uses.
var header = slot(0, layer7.Digest([]byte("sluice rule sets, version 2\n\x00\x00\x00\x00")))

// File stores the numbers of rule sets, so that each set has the same number after a restart of the process. After a
// reboot no connection and no packet carries a number, so the file is never synced, and a file of another boot is
// removed.
//
// It has a slot for each number, with the digest of the number's set and a checksum; the digest is zero if the number
// is free again. Numbers are assigned in ascending order. So the slots of numbers that were never assigned are at the
// end, and contain zeros. A node without layer 7 rules has no file.
type File struct {
	// Corrupt is the reason why the file could not be read; the numbers that connections carry are then unknown.
	// Nil: the file was read, or did not exist.
	Corrupt error

	path    string
	file    *os.File // nil before the first write
	keep    bool     // the file exists and is not corrupt
	waiting map[policytable.RuleSet]layer7.Digest
}

// OpenFile opens the file of this boot in a directory, and calls restore for each number in it. If the file is
// corrupt, it calls restore for no number.
func OpenFile(dir string, restore func(policytable.RuleSet, layer7.Digest)) (*File, error) {
	boot, err := durable.BootID()
	if err != nil {
		return nil, err
	}
	f := &File{path: filepath.Join(dir, fileName+"."+boot), waiting: make(map[policytable.RuleSet]layer7.Digest)}
	others, err := filepath.Glob(filepath.Join(dir, fileName+".*"))
	if err != nil {
		return nil, err
	}
	for _, other := range others {
		if other != f.path {
			if err := os.Remove(other); err != nil {
				return nil, fmt.Errorf("remove the rule set numbers of another boot: %w", err)
			}
		}
	}
	data, err := os.ReadFile(f.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return f, nil
	case err != nil:
		return nil, fmt.Errorf("rule set numbers: %w", err)
	}
	if f.Corrupt = check(data); f.Corrupt != nil {
		f.Corrupt = fmt.Errorf("%s: %w", f.path, f.Corrupt)
		return f, nil
	}
	f.keep = true
	for n := 1; n <= Size; n++ {
		if d := digestIn(data, n); d != (layer7.Digest{}) {
			restore(policytable.RuleSet(n), d) //nolint:gosec // at most Size
		}
	}
	return f, nil
}

func digestIn(data []byte, n int) layer7.Digest {
	return layer7.Digest(data[n*slotSize:][:len(layer7.Digest{})])
}

// check returns an error if the content of a file is corrupt or of another version.
func check(data []byte) error {
	if len(data) != fileSize {
		return fmt.Errorf("the file has %d bytes, want %d", len(data), fileSize)
	}
	if !bytes.HasPrefix(data, header) {
		return errors.New("the file has another version, or is not a file of rule set numbers")
	}
	unused, ended := make([]byte, slotSize), false
	for n := 1; n <= Size; n++ {
		have := data[n*slotSize:][:slotSize]
		if bytes.Equal(have, unused) {
			ended = true
			continue
		}
		if ended {
			return fmt.Errorf("the number before %d is missing", n)
		}
		if !bytes.Equal(have, slot(n, digestIn(data, n))) {
			return fmt.Errorf("the checksum of number %d is wrong", n)
		}
	}
	return nil
}

// slot returns the content of a slot. The checksum covers the number, so a slot at the position of another number
// counts as corrupt.
func slot(n int, d layer7.Digest) []byte {
	b := d[:]
	sum := crc32.Checksum(fmt.Appendf(nil, "%d %s", n, b), crc32.MakeTable(crc32.Castagnoli))
	return binary.LittleEndian.AppendUint32(slices.Clone(b), sum)
}

// Write stores changes, together with earlier changes that could not be written.
func (f *File) Write(changes []Change) error {
	for _, c := range changes {
		f.waiting[c.Number] = layer7.Digest{}
		if c.Set != nil {
			f.waiting[c.Number] = c.Digest
		}
	}
	if len(f.waiting) == 0 {
		return nil
	}
	if err := f.open(); err != nil {
		return fmt.Errorf("rule set numbers: %w", err)
	}
	for _, n := range slices.Sorted(maps.Keys(f.waiting)) {
		if _, err := f.file.WriteAt(slot(int(n), f.waiting[n]), int64(n)*int64(slotSize)); err != nil {
			return fmt.Errorf("rule set numbers: %w", err)
		}
		delete(f.waiting, n)
	}
	return nil
}

// open opens the file for writing. It replaces a corrupt file.
func (f *File) open() error {
	if f.file != nil {
		return nil
	}
	flags := os.O_RDWR | os.O_CREATE
	if !f.keep {
		flags |= os.O_TRUNC
	}
	file, err := os.OpenFile(f.path, flags, 0o600)
	if err != nil {
		return err
	}
	if _, err := file.WriteAt(header, 0); err != nil {
		return errors.Join(err, file.Close())
	}
	if err := file.Truncate(int64(fileSize)); err != nil {
		return errors.Join(err, file.Close())
	}
	f.file, f.keep = file, true
	return nil
}

// Close closes the file.
func (f *File) Close() error {
	if f.file == nil {
		return nil
	}
	return f.file.Close()
}

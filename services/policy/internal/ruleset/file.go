// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ruleset

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/layer7"
)

// fileName is the name of the file, without the ID of the boot.
const fileName = "rulesets"

// header is the first slot of the file, which no number uses.
var header = layer7.Digest([]byte("sluice rule sets, version 1\n\x00\x00\x00\x00"))

// File stores the numbers, so that the sets have the same numbers after a restart of the process. Connections end with
// the boot, and their numbers with them. So the file is never synced, and a file of another boot is removed.
//
// It contains the digest of each number's set at the number times the size of a digest; zeros: the number is free. A
// node without layer 7 rules has no file.
type File struct {
	path    string
	file    *os.File // nil before the first write
	waiting map[policytable.RuleSet]layer7.Digest
}

// OpenFile calls restore for each number in the file of this boot in a directory.
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
	if errors.Is(err, fs.ErrNotExist) {
		return f, nil
	}
	if err != nil {
		return nil, fmt.Errorf("rule set numbers: %w", err)
	}
	if !strings.HasPrefix(string(data), string(header[:])) { // another version: it would be misread
		if err := os.Remove(f.path); err != nil {
			return nil, fmt.Errorf("remove the rule set numbers of another version: %w", err)
		}
		return f, nil
	}
	for n := 1; n <= Size && (n+1)*len(header) <= len(data); n++ {
		if d := layer7.Digest(data[n*len(header) : (n+1)*len(header)]); d != (layer7.Digest{}) {
			restore(policytable.RuleSet(n), d) //nolint:gosec // at most Size
		}
	}
	return f, nil
}

// Write stores changes, and the earlier changes that could not be written.
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
	if f.file == nil {
		file, err := os.OpenFile(f.path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return fmt.Errorf("rule set numbers: %w", err)
		}
		if _, err := file.WriteAt(header[:], 0); err != nil {
			return errors.Join(fmt.Errorf("rule set numbers: %w", err), file.Close())
		}
		f.file = file
	}
	for _, n := range slices.Sorted(maps.Keys(f.waiting)) {
		d := f.waiting[n]
		if _, err := f.file.WriteAt(d[:], int64(n)*int64(len(d))); err != nil {
			return fmt.Errorf("rule set numbers: %w", err)
		}
		delete(f.waiting, n)
	}
	return nil
}

// Close closes the file.
func (f *File) Close() error {
	if f.file == nil {
		return nil
	}
	return f.file.Close()
}

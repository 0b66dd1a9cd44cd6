// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package record keeps the endpoints of a node in files, one for each.
//
// The files are replaced in one step, so a killed process leaves whole ones.
// They are not synced to the disk: what they describe ends with the boot, and
// a record of another boot is a tombstone anyway. What a power loss takes is
// found by comparing ipam's allocations with the records.
package record

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

var schema = durable.Schema{Name: "sluice.datapath.endpoint", Version: 1}

const (
	suffix = ".json"
	// maxSize bounds a file: 1,024 labels of the largest size would be larger,
	// and are refused when they are saved.
	maxSize = 4 << 20
)

// Store implements endpoint.Records in a directory that nobody else writes.
type Store struct{ dir string }

// Open makes the directory if it is missing and removes what a killed process
// left half-written in it.
func Open(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open the records: %w", err)
	}
	if _, err := durable.RemoveTemp(dir); err != nil {
		return nil, fmt.Errorf("open the records: %w", err)
	}
	return &Store{dir: dir}, nil
}

// OpenReadOnly opens the directory, which need not exist, and changes nothing.
func OpenReadOnly(dir string) *Store { return &Store{dir: dir} }

func (s *Store) path(o endpoint.Owner) string { return filepath.Join(s.dir, o.Key()+suffix) }

// Save implements endpoint.Records.
func (s *Store) Save(r endpoint.Record) error {
	b, err := durable.Encode(schema, r)
	if err != nil {
		return fmt.Errorf("record of %s: %w", r.Spec.Owner, err)
	}
	if len(b) > maxSize {
		return fmt.Errorf("record of %s: %w: %d bytes, at most %d", r.Spec.Owner, durable.ErrTooLarge, len(b), maxSize)
	}
	if err := durable.WriteFile(s.path(r.Spec.Owner), b, 0o600, durable.SyncNone); err != nil {
		return fmt.Errorf("record of %s: %w", r.Spec.Owner, err)
	}
	return nil
}

// Remove implements endpoint.Records.
func (s *Store) Remove(o endpoint.Owner) error {
	if _, err := durable.Remove(s.path(o), durable.SyncNone); err != nil {
		return fmt.Errorf("record of %s: %w", o, err)
	}
	return nil
}

// Load implements endpoint.Records. A record under another owner's name, or one
// that makes no sense, is bad.
func (s *Store) Load() (records []endpoint.Record, bad []error, err error) {
	list, bad, err := durable.List[endpoint.Record](s.dir, suffix, maxSize, schema)
	if err != nil {
		return nil, nil, err
	}
	for _, r := range list {
		if err := check(r.Name, r.Value); err != nil {
			bad = append(bad, &durable.RecordError{File: filepath.Join(s.dir, r.Name+suffix), Err: err})
			continue
		}
		records = append(records, r.Value)
	}
	return records, bad, nil
}

func check(name string, r endpoint.Record) error {
	if err := r.Validate(); err != nil {
		return errors.Join(durable.ErrCorrupt, err)
	}
	if r.Spec.Owner.Key() != name {
		return fmt.Errorf("%w: it is the record of %s", durable.ErrForeign, r.Spec.Owner)
	}
	return nil
}

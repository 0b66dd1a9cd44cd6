// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package record keeps the endpoints of a node in files.
//
// A file is named <owner>.<phase>.json. A new phase is a new file, and then the
// earlier one is removed: replacing a file by renaming makes ext4 write it out
// at once, which costs more than all the rest of an ADD's bookkeeping. If a
// process was killed between the two, the later phase counts.
//
// The files are made in one step, so a killed process leaves whole ones. They
// are not synced to the disk: what they describe ends with the boot, and
// a record of another boot is a tombstone anyway. What a power loss takes is
// found by comparing ipam's allocations with the records.
package record

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Version 2 added manager, network and pod to the request.
var schema = durable.Schema{Name: "sluice.datapath.endpoint", Version: 2, Oldest: 1}

const (
	suffix = ".json"
	// maxSize bounds a file: 1,024 labels of the largest size would be larger,
	// and are refused when they are saved.
	maxSize = 4 << 20
)

// Store implements endpoint.Records in a directory that nobody else writes.
type Store struct {
	dir string
	// lock keeps other processes out for as long as it is open; the kernel
	// drops it with the process. nil if read-only.
	lock *os.File
}

// lockWait is how long Open waits for a process that is on its way out.
const lockWait = 5 * time.Second

// Open makes the directory if it is missing, locks it until Close by the file
// beside it that ends in ".lock", and removes
// what a killed process left half-written in it.
//
// The error wraps durable.ErrLocked if another process has it open: two that
// own the same endpoints would undo each other's work.
func Open(dir string) (*Store, error) { return open(dir, lockWait) }

func open(dir string, wait time.Duration) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open the records: %w", err)
	}
	lock, err := durable.Lock(dir+".lock", wait)
	if err != nil {
		return nil, fmt.Errorf("open the records: %w", err)
	}
	if _, err := durable.RemoveTemp(dir); err != nil {
		_ = lock.Close()
		return nil, fmt.Errorf("open the records: %w", err)
	}
	return &Store{dir: dir, lock: lock}, nil
}

// Close lets another process open the directory.
func (s *Store) Close() error {
	if s.lock == nil {
		return nil
	}
	return s.lock.Close()
}

// OpenReadOnly opens the directory, which need not exist, and changes nothing.
func OpenReadOnly(dir string) *Store { return &Store{dir: dir} }

func (s *Store) path(o endpoint.Owner, p endpoint.Phase) string {
	return filepath.Join(s.dir, name(o, p)+suffix)
}

func name(o endpoint.Owner, p endpoint.Phase) string { return o.Key() + "." + string(p) }

// phases in the order in which a later one counts. A tombstone beside anything
// else means that the rest was about to be removed, or a new creation had only
// begun.
var phases = []endpoint.Phase{endpoint.PhaseCreating, endpoint.PhaseReady, endpoint.PhaseDeleted}

// Save implements endpoint.Records.
func (s *Store) Save(r endpoint.Record) error {
	o := r.Spec.Owner
	b, err := durable.Encode(schema, r)
	if err != nil {
		return fmt.Errorf("record of %s: %w", o, err)
	}
	if len(b) > maxSize {
		return fmt.Errorf("record of %s: %w: %d bytes, at most %d", o, durable.ErrTooLarge, len(b), maxSize)
	}
	if err := durable.WriteFile(s.path(o, r.Phase), b, 0o600, durable.SyncNone); err != nil {
		return fmt.Errorf("record of %s: %w", o, err)
	}
	return s.remove(o, r.Phase)
}

// Remove implements endpoint.Records.
func (s *Store) Remove(o endpoint.Owner) error { return s.remove(o, "") }

// remove removes the owner's files, but for the one of a phase; the latest
// phase last, so that an earlier one never counts again.
func (s *Store) remove(o endpoint.Owner, but endpoint.Phase) error {
	for _, p := range phases {
		if p == but {
			continue
		}
		if _, err := durable.Remove(s.path(o, p), durable.SyncNone); err != nil {
			return fmt.Errorf("record of %s: %w", o, err)
		}
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
	latest := map[endpoint.Owner]endpoint.Record{}
	for _, r := range list {
		if err := check(r.Name, r.Value); err != nil {
			bad = append(bad, &durable.RecordError{File: filepath.Join(s.dir, r.Name+suffix), Err: err})
			continue
		}
		o := r.Value.Spec.Owner
		if other, ok := latest[o]; !ok || slices.Index(phases, other.Phase) < slices.Index(phases, r.Value.Phase) {
			latest[o] = r.Value
		}
	}
	return slices.Collect(maps.Values(latest)), bad, nil
}

func check(file string, r endpoint.Record) error {
	if err := r.Validate(); err != nil {
		return errors.Join(durable.ErrCorrupt, err)
	}
	if name(r.Spec.Owner, r.Phase) != file {
		return fmt.Errorf("%w: it is the record of %s, phase %s", durable.ErrForeign, r.Spec.Owner, r.Phase)
	}
	return nil
}

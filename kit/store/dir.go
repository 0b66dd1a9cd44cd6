// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
)

// Names in a state directory.
const (
	// MarkerName is the file that lists the state files that were created. A
	// listed file that is absent is a loss, never a new installation.
	MarkerName = "created"
	lockName   = "lock"
)

// markerLimit bounds the marker in bytes; it holds a few names.
const markerLimit = 64 << 10

var markerSchema = durable.Schema{Name: "sluice.state.created", Version: 1}

type marker struct {
	Files []string `json:"files"`
}

// lockWait is how long OpenDir waits for a process that is on its way out.
const lockWait = 5 * time.Second

// Dir is a state directory that belongs to this process until Close.
type Dir struct {
	path    string
	lock    *os.File
	created []string // the content of the marker
	marked  bool     // the marker exists
}

// OpenDir takes a state directory, which is made with the mode if it does not
// exist. A directory whose mode has bits beyond that is refused, and so is one
// that another process uses.
func OpenDir(path string, mode fs.FileMode) (*Dir, error) {
	if err := prepare(path, mode); err != nil {
		return nil, err
	}
	lock, err := durable.Lock(filepath.Join(path, lockName), lockWait)
	if err != nil {
		return nil, fmt.Errorf("state directory %s: %w", path, err)
	}
	d := &Dir{path: path, lock: lock}
	if err := d.readMarker(); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	if _, err := durable.RemoveTemp(path); err != nil {
		return nil, errors.Join(fmt.Errorf("state directory %s: %w", path, err), lock.Close())
	}
	return d, nil
}

func prepare(path string, mode fs.FileMode) error {
	if err := makeDir(path, mode); err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	if !info.IsDir() {
		return fmt.Errorf("state directory %s: not a directory", path)
	}
	if info.Mode().Perm()&^mode != 0 {
		return fmt.Errorf("state directory %s has mode %04o: %w; run: chmod %04o %s", path, info.Mode().Perm(), ErrPermission, mode, path)
	}
	return nil
}

// makeDir makes what is missing of a directory, durably: a synced file in a
// directory whose own name was lost with the power is lost too.
func makeDir(path string, mode fs.FileMode) error {
	err := os.Mkdir(path, mode)
	if errors.Is(err, fs.ErrNotExist) {
		if err := makeDir(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		err = os.Mkdir(path, mode)
	}
	switch {
	case errors.Is(err, fs.ErrExist):
		return nil
	case err != nil:
		return err
	}
	return durable.SyncDir(filepath.Dir(path))
}

// Path is the directory.
func (d *Dir) Path() string { return d.path }

// Marker is the file that lists the state files that were created.
func (d *Dir) Marker() string { return filepath.Join(d.path, MarkerName) }

func (d *Dir) readMarker() error {
	var m marker
	err := durable.Load(d.Marker(), markerLimit, markerSchema, &m)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, durable.ErrVersion):
		return fmt.Errorf("%w: %w; start the version of Sluice that wrote it", ErrVersion, err)
	case err != nil:
		return fmt.Errorf("%w: %w; the file lists the state files of its directory: check that those are there, then run: rm %s", ErrCorrupt, err, d.Marker())
	}
	d.created, d.marked = m.Files, true
	return nil
}

// Created reports whether a state file of that name was created here.
func (d *Dir) Created(name string) bool { return slices.Contains(d.created, name) }

// mark adds a file to the marker. The file has to be durable already.
func (d *Dir) mark(name string) error {
	if d.Created(name) {
		return nil
	}
	files := append(slices.Clone(d.created), name)
	if err := durable.Save(d.Marker(), markerSchema, marker{Files: files}, durable.SyncAll); err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	d.created, d.marked = files, true
	return nil
}

// Close gives the directory to the next process.
func (d *Dir) Close() error { return d.lock.Close() }

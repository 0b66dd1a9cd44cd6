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
	// MarkerName is the name of the file that lists the created state files. If a listed file is missing, it was
	// lost: the directory is not a new installation.
	MarkerName = "created"
	lockName   = "lock"
)

// markerLimit is the maximum size of the marker in bytes.
const markerLimit = 64 << 10

var markerSchema = durable.Schema{Name: "sluice.state.created", Version: 1}

type marker struct {
	Files []string `json:"files"`
}

// lockWait is how long OpenDir waits for a process that is exiting.
const lockWait = 5 * time.Second

// Dir is a state directory that this process owns until Close.
type Dir struct {
	path    string
	lock    *os.File
	created []string // the content of the marker
	marked  bool     // the marker exists
}

// OpenDir opens and locks a state directory. If it does not exist, it is created with the mode. A
// directory with additional mode bits is refused, as is a directory that another process uses.
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

// makeDir creates a directory and its missing parents durably: a power loss can remove even a synced file if the name
// of its directory was not synced.
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

// Path returns the path of the directory.
func (d *Dir) Path() string { return d.path }

// Marker returns the path of the file that lists the created state files.
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
		return fmt.Errorf("%w: %w; the file lists the state files of its directory: check that they exist, then run: rm %s",
			ErrCorrupt, err, d.Marker())
	}
	d.created, d.marked = m.Files, true
	return nil
}

// Created reports whether a state file of that name was created here.
func (d *Dir) Created(name string) bool { return slices.Contains(d.created, name) }

// mark adds a file, which must already be durable, to the marker.
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

// Close releases the directory for the next process.
func (d *Dir) Close() error { return d.lock.Close() }

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package durable stores small records in files that are either complete or absent.
//
// A record is JSON in an envelope with schema name, version and checksum. If a record is corrupt, foreign or of a newer
// version, the error names the file and the field. Such a file is never changed, moved or treated as empty.
package durable

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Sync selects what is durable when a write returns.
type Sync int

const (
	// SyncNone leaves writing to the kernel: the file survives a killed process, but after a power
	// loss it may be missing or empty.
	SyncNone Sync = iota
	// SyncFile makes the content durable: after a power loss the file has the old or the new
	// content.
	SyncFile
	// SyncAll also makes the file name durable: the write survives a power loss.
	SyncAll
)

// tempMark is part of the names of temporary files.
const tempMark = ".tmp-"

// ErrTooLarge is returned for a file larger than the caller's limit.
var ErrTooLarge = errors.New("file too large")

// WriteFile replaces the content of path atomically: readers see the old or the new content, even
// if the process is killed.
func WriteFile(path string, data []byte, perm fs.FileMode, s Sync) (err error) {
	dir, base := filepath.Split(path)
	f, err := os.CreateTemp(dir, "."+base+tempMark+"*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
			err = fmt.Errorf("write %s: %w", path, err)
		}
	}()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Chmod(perm); err != nil {
		return err
	}
	if s >= SyncFile {
		if err := f.Sync(); err != nil {
			return err
		}
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	if s >= SyncAll {
		return SyncDir(filepath.Dir(path))
	}
	return nil
}

// Remove removes path and reports whether it existed.
func Remove(path string, s Sync) (bool, error) {
	err := os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if s >= SyncAll {
		return true, SyncDir(filepath.Dir(path))
	}
	return true, nil
}

// SyncDir makes the file names in a directory durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// ReadFile reads a regular file of at most limit bytes. It does not follow a symbolic link in the
// last path element, and does not block on a named pipe.
func ReadFile(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() {
		return nil, fmt.Errorf("read %s: not a regular file", path)
	}
	if fi.Size() > limit {
		return nil, fmt.Errorf("read %s: %w: %d bytes, at most %d", path, ErrTooLarge, fi.Size(), limit)
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("read %s: %w: at most %d bytes", path, ErrTooLarge, limit)
	}
	return data, nil
}

// isTemp reports whether the file is a temporary file of a killed process.
func isTemp(name string) bool {
	return strings.HasPrefix(name, ".") && strings.Contains(name, tempMark)
}

// RemoveTemp removes the temporary files of killed processes from dir and returns their names. Only
// the owner of the directory may call it, and not concurrently with writes.
func RemoveTemp(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if !isTemp(e.Name()) || !e.Type().IsRegular() {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			return names, err
		}
		names = append(names, e.Name())
	}
	return names, nil
}

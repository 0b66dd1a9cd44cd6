// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package logfile appends to one log from many short-lived processes.
//
// The file is opened with O_APPEND and every record is one write, so records
// of processes that run at once do not mix. Whoever opens a file that has
// grown past the limit turns it: path becomes path.1, path.1 becomes path.2
// and so on, under a lock on the file itself. A process that still holds the
// old file finishes its few lines there.
package logfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Limits of a log.
const (
	MaxBytes = 10 << 20 // of the file before it is turned
	Keep     = 3        // turned files
)

// errTurning says that another process is turning the file. It goes on being
// written to: a few records more than the limit.
var errTurning = errors.New("being turned")

// Open opens the log, making it (0640) and its directory (0750) if they are
// missing. It does not follow a link at path.
func Open(path string) (*os.File, error) { return open(path, MaxBytes) }

func open(path string, limit int64) (*os.File, error) {
	// A second turn is needed if another process turned the file between our
	// open and our lock; a third if that happened again. Then the log is busy
	// enough to write to whatever file we have.
	for try := 0; ; try++ {
		f, err := openAppend(path)
		if err != nil {
			return nil, err
		}
		fi, err := f.Stat()
		if err != nil {
			f.Close()
			return nil, err
		}
		if !fi.Mode().IsRegular() {
			f.Close()
			return nil, fmt.Errorf("log file %s is not a regular file", path)
		}
		if fi.Size() < limit || try == 2 {
			return f, nil
		}
		err = turn(path, f, fi)
		if errors.Is(err, errTurning) {
			return f, nil
		}
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("turn log file %s: %w", path, err)
		}
	}
}

func openAppend(path string) (*os.File, error) {
	const flags = os.O_WRONLY | os.O_APPEND | os.O_CREATE | unix.O_NOFOLLOW | unix.O_NONBLOCK
	f, err := os.OpenFile(path, flags, 0o640)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
			return nil, err
		}
		f, err = os.OpenFile(path, flags, 0o640)
	}
	return f, err
}

// turn moves the files on, if f is still the one at path. It does not wait: a
// process that was stopped while it turned would keep every container waiting.
func turn(path string, f *os.File, self fs.FileInfo) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			break
		}
		if errors.Is(err, unix.EWOULDBLOCK) {
			return errTurning
		}
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
	now, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !os.SameFile(now, self) {
		return nil // turned by another
	}
	for i := Keep; i > 1; i-- {
		err := os.Rename(fmt.Sprintf("%s.%d", path, i-1), fmt.Sprintf("%s.%d", path, i))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return os.Rename(path, path+".1")
}

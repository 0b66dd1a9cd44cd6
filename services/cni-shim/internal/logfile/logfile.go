// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package logfile appends to one log from many short-lived processes.
//
// The file is opened with O_APPEND and every record is one write, so records of concurrent processes do not mix. A
// process that opens a file beyond the limit rotates it, under a lock on the file itself: path becomes path.1, path.1
// becomes path.2 and so on. A process that still has the old file open writes its last few lines there.
package logfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// Limits of a log.
const (
	MaxBytes = 10 << 20 // maximum size of the file before it is rotated
	Keep     = 3        // number of rotated files
)

// errRotating: another process rotates the file. Writing continues, a few records beyond the limit.
var errRotating = errors.New("being rotated")

// ErrForeign is returned for a file or directory to which the plugin must not write. The path comes from a
// configuration that the plugin reads as root, and a mistake in it must not change other files.
var ErrForeign = errors.New("not a valid place for this log")

// Open opens the log, and creates it (0640) and its directory (0750) if they are missing; the parent directory must
// exist. It does not follow a link at path or at its directory. It appends only to a file that begins like a log of
// JSON lines, in a directory without write permission for other users.
func Open(path string) (*os.File, error) { return open(path, MaxBytes) }

func open(path string, limit int64) (*os.File, error) {
	// If another process rotates the file between opening and locking it, another attempt is needed. After several
	// attempts, write to the file that is open.
	if err := checkDir(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("log file %s: %w", path, err)
	}
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
		if err := ours(f, fi); err != nil {
			f.Close()
			return nil, fmt.Errorf("log file %s: %w", path, err)
		}
		if fi.Size() < limit || try == 2 {
			return f, nil
		}
		err = rotate(path, f, fi)
		if errors.Is(err, errRotating) {
			return f, nil
		}
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("rotate log file %s: %w", path, err)
		}
	}
}

func openAppend(path string) (*os.File, error) {
	const flags = os.O_RDWR | os.O_APPEND | os.O_CREATE | unix.O_NOFOLLOW | unix.O_NONBLOCK
	f, err := os.OpenFile(path, flags, 0o640)
	if errors.Is(err, fs.ErrNotExist) {
		// Create only the last directory, so that a mistake in the path creates no tree.
		if err := os.Mkdir(filepath.Dir(path), 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
		f, err = os.OpenFile(path, flags, 0o640)
	}
	return f, err
}

// checkDir returns an error if an existing directory may not contain the log.
func checkDir(dir string) error {
	fi, err := os.Lstat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !fi.IsDir():
		return fmt.Errorf("%w: %s is not a directory", ErrForeign, dir)
	}
	return closed("directory "+dir, fi)
}

// closed returns an error unless a file or directory belongs to root or this user, and other users cannot write it.
func closed(what string, fi fs.FileInfo) error {
	if st := fi.Sys().(*syscall.Stat_t); st.Uid != 0 && st.Uid != uint32(os.Geteuid()) {
		return fmt.Errorf("%w: %s belongs to uid %d", ErrForeign, what, st.Uid)
	}
	if fi.Mode().Perm()&0o002 != 0 {
		return fmt.Errorf("%w: %s has mode %#o, so other users can write to it", ErrForeign, what, fi.Mode().Perm())
	}
	return nil
}

// ours returns an error if the log may not be appended to the file.
func ours(f *os.File, fi fs.FileInfo) error {
	if !fi.Mode().IsRegular() {
		return fmt.Errorf("%w: it is not a regular file", ErrForeign)
	}
	if err := closed("the file", fi); err != nil {
		return err
	}
	if fi.Sys().(*syscall.Stat_t).Nlink > 1 {
		return fmt.Errorf("%w: the file has another hard link", ErrForeign)
	}
	var first [1]byte
	switch _, err := f.ReadAt(first[:], 0); {
	case errors.Is(err, io.EOF): // empty
		return nil
	case err != nil:
		return err
	case first[0] != '{':
		return fmt.Errorf("%w: the file is not a CNI log: it does not begin with '{'", ErrForeign)
	}
	return nil
}

// rotate rotates the files if f is still the file at path. It does not wait for another process that rotates, because a
// process that was stopped during its rotation would block every container.
func rotate(path string, f *os.File, self fs.FileInfo) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			break
		}
		if errors.Is(err, unix.EWOULDBLOCK) {
			return errRotating
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
		return nil // another process has rotated the file
	}
	for i := Keep; i > 1; i-- {
		err := os.Rename(fmt.Sprintf("%s.%d", path, i-1), fmt.Sprintf("%s.%d", path, i))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return os.Rename(path, path+".1")
}

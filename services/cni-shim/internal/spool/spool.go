// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package spool stores deletions for a datapath that does not run.
//
// When the datapath does not run, DEL writes one file here, in the form of
// package deletion, and succeeds; the datapath reads the directory, deletes
// those endpoints and then the files. Writers hold a lock on the directory
// itself.
package spool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/model/deletion"
	"github.com/sluice-net/sluice/model/workload"
)

// Max is the maximum number of deletions in the spool.
const Max = 4096

// ErrFull is returned when the spool already has Max deletions. The caller may try again after the datapath has run.
var ErrFull = errors.New("the spool is full")

// ErrNoState: no datapath reads the spool, because it is missing or other users could write deletions to it.
var ErrNoState = errors.New("not the spool of a node")

// check returns an error if no datapath reads deletions from the spool of a state directory. `sluice prepare` creates
// the spool and gives it to the datapath's user, which distinguishes it from any other directory that a configuration
// could contain. A deletion written elsewhere would be lost silently.
func check(stateDir string) error {
	self := uint32(os.Geteuid()) //nolint:gosec // a uid
	datapath := self             // on a node that runs without root
	if self == 0 {
		datapath = instance.DatapathID
	}
	dir := deletion.Dir(stateDir)
	for _, d := range []struct {
		path  string
		owner uint32
		mode  fs.FileMode // permission bits that must not be set
	}{{stateDir, 0, 0o002}, {filepath.Dir(dir), 0, 0o002}, {dir, datapath, 0o022}} {
		stat := os.Stat // an operator may have replaced the state directory by a link
		if d.path == dir {
			stat = os.Lstat
		}
		fi, err := stat(d.path)
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: %s does not exist", ErrNoState, d.path)
		}
		if err != nil {
			return err
		}
		uid := fi.Sys().(*syscall.Stat_t).Uid
		switch {
		case !fi.IsDir():
			return fmt.Errorf("%w: %s is not a directory", ErrNoState, d.path)
		case uid != d.owner && (d.path == dir || uid != self):
			return fmt.Errorf("%w: %s belongs to uid %d, not to %d", ErrNoState, d.path, uid, d.owner)
		case fi.Mode().Perm()&d.mode != 0:
			return fmt.Errorf("%w: %s has mode %#o, so other users can write to it", ErrNoState, d.path, fi.Mode().Perm())
		}
	}
	return nil
}

// Put adds a deletion to the spool of a state directory, which must be prepared, and returns when it is on stable
// storage. It returns an error if ctx ends while other processes write.
func Put(ctx context.Context, stateDir string, e deletion.Entry) (err error) {
	dir := deletion.Dir(stateDir)
	defer func() {
		if err != nil {
			err = fmt.Errorf("spool the deletion in %s: %w", dir, err)
		}
	}()
	if err := check(stateDir); err != nil {
		return err
	}
	// When a node is drained, many deletions arrive at once, and the count must still be right.
	unlock, err := lock(ctx, dir)
	if err != nil {
		return err
	}
	defer unlock()

	path := filepath.Join(dir, e.Owner.Key())
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		// This process has the lock, so no other process is writing.
		if _, err := durable.RemoveTemp(dir); err != nil {
			return err
		}
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		n := 0
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), ".") {
				n++
			}
		}
		if n >= Max {
			return fmt.Errorf("%w: %d deletions wait for the datapath", ErrFull, n)
		}
	}
	b, err := e.Format()
	if err != nil {
		return err
	}
	// The datapath, which reads the file, runs as another user; other users cannot enter the directory.
	return durable.WriteFile(path, b, 0o644, durable.SyncAll)
}

// Has reports whether a deletion is in the spool.
func Has(dir string, o workload.Owner) (bool, error) {
	_, err := os.Lstat(filepath.Join(dir, o.Key()))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Remove removes a deletion from the spool, because the datapath has executed it meanwhile. A missing entry is not an
// error.
func Remove(dir string, o workload.Owner) error {
	_, err := durable.Remove(filepath.Join(dir, o.Key()), durable.SyncNone)
	return err
}

// lockPause is how long a writer waits before it tries the lock again. A write
// takes some milliseconds, most of it for the sync.
const lockPause = 5 * time.Millisecond

func lock(ctx context.Context, dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	// Do not wait for the lock in the kernel, because ctx could not end that wait.
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			break
		}
		select {
		case <-time.After(lockPause):
			continue
		case <-ctx.Done():
			err = fmt.Errorf("another process has locked it: %w", ctx.Err())
		}
		break
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock: %w", err)
	}
	return func() { f.Close() }, nil
}

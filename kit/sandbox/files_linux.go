// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/landlock-lsm/go-landlock/landlock"
	ll "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"
)

// Files are the files that a process may still open, in addition to files that are already open. If
// a path does not exist, the rule applies to its nearest existing parent, but never to the root.
// File owners and modes still apply.
type Files struct {
	// Read lists files, and directories whose content may be read at any depth.
	Read []string
	// Write lists directories in which files may be read, created, written and removed.
	Write []string
	// Change lists directories in which existing files may be read and written.
	Change []string
}

const (
	readAccess   landlock.AccessFSSet = ll.AccessFSReadFile | ll.AccessFSReadDir
	changeAccess                      = readAccess | ll.AccessFSWriteFile | ll.AccessFSTruncate
	writeAccess                       = changeAccess | ll.AccessFSRemoveDir | ll.AccessFSRemoveFile | ll.AccessFSMakeDir | ll.AccessFSMakeReg |
		ll.AccessFSMakeSock | ll.AccessFSMakeSym
	// Access rights that apply to a file that is not a directory.
	fileAccess landlock.AccessFSSet = ll.AccessFSReadFile | ll.AccessFSWriteFile | ll.AccessFSTruncate
)

// landlockVersion is the newest Landlock ABI version whose rights are used.
const landlockVersion = 7

// RestrictFiles limits every thread to the files in f. As far as the kernel's Landlock version supports it,
// RestrictFiles also forbids executing files, creating devices, signalling processes outside the sandbox, and
// connecting to abstract sockets outside it. It returns that version.
func RestrictFiles(f Files) (version int, err error) {
	version, err = ll.LandlockGetABIVersion()
	if err != nil || version <= 0 {
		return 0, fmt.Errorf("restrict files by Landlock: %w", ErrUnsupported)
	}
	var rules []landlock.Rule
	var held []string
	for _, part := range []struct {
		access landlock.AccessFSSet
		paths  []string
	}{{readAccess, f.Read}, {changeAccess, f.Change}, {writeAccess, f.Write}} {
		for _, path := range part.paths {
			path, access, err := existing(path, part.access)
			if err != nil {
				return version, fmt.Errorf("restrict files: %w", err)
			}
			if path != "/" {
				rules = append(rules, landlock.PathAccess(access, path))
				held = append(held, path)
			}
		}
	}
	// The kernel may give a procfs name a new inode while no process has it open, and the rule would not apply to
	// the new inode. Therefore these descriptors stay open for the life of the process.
	for _, path := range held {
		if _, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0); err != nil {
			return version, fmt.Errorf("restrict files: hold %s: %w", path, err)
		}
	}
	config := landlock.V7.BestEffort()
	if err := config.RestrictPaths(rules...); err != nil {
		return version, fmt.Errorf("restrict files: %w", err)
	}
	if err := config.RestrictScoped(); err != nil {
		return version, fmt.Errorf("restrict signals and abstract sockets: %w", err)
	}
	return min(version, landlockVersion), nil
}

// existing returns the path, or its nearest existing parent, and the rights that apply to its type.
func existing(path string, access landlock.AccessFSSet) (string, landlock.AccessFSSet, error) {
	for path = filepath.Clean(path); path != "/"; path = filepath.Dir(path) {
		var st unix.Stat_t
		switch err := unix.Stat(path, &st); {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			return "", 0, &fs.PathError{Op: "stat", Path: path, Err: err}
		case st.Mode&unix.S_IFMT != unix.S_IFDIR:
			access &= fileAccess
		}
		return path, access, nil
	}
	return path, access, nil
}

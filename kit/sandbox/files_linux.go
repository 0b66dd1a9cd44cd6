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

// Files are what a process may still open, beside what is open. Of a path that
// does not exist, the nearest directory that does stands for it, but never the
// root. The rights are bounds: owners and modes of the files hold as ever.
type Files struct {
	// Read are directories and files whose content, at any depth, may be read.
	Read []string
	// Write are directories in which files may also be made, changed and removed.
	Write []string
	// Change are directories in which files that exist may be read and written.
	Change []string
}

const (
	readAccess   landlock.AccessFSSet = ll.AccessFSReadFile | ll.AccessFSReadDir
	changeAccess                      = readAccess | ll.AccessFSWriteFile | ll.AccessFSTruncate
	writeAccess                       = changeAccess | ll.AccessFSRemoveDir | ll.AccessFSRemoveFile | ll.AccessFSMakeDir | ll.AccessFSMakeReg |
		ll.AccessFSMakeSock | ll.AccessFSMakeSym
	// What applies to a file that is no directory.
	fileAccess landlock.AccessFSSet = ll.AccessFSReadFile | ll.AccessFSWriteFile | ll.AccessFSTruncate
)

// landlockVersion is the newest interface whose rights are known here.
const landlockVersion = 7

// RestrictFiles leaves every thread the files of f, and no way to execute a
// file, to make a device, to signal a process outside or to connect to an
// abstract socket outside, as far as the kernel's version of Landlock knows
// these. It returns that version.
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
	// A name of procfs that nobody holds may get another inode, of which the rule
	// would know nothing. These descriptors stay open as long as the process lives.
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

// existing finds the path or what stands for it, and leaves of the rights those
// that apply to it.
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

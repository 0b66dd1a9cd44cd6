// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package netns checks the path of a network namespace that a runtime passes. If the datapath cannot open the path, the
// package bind-mounts the namespace at a path that the datapath can open.
//
// It never enters a namespace; only the datapath does.
package netns

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrInvalid: a path is not the network namespace of a container.
var ErrInvalid = errors.New("not a container's network namespace")

// ID identifies a namespace.
type ID struct{ Dev, Ino uint64 }

// IsProcess reports whether path names a namespace by the number of a process or thread in it; "self" would be the
// plugin.
func IsProcess(path string) bool {
	rest, proc := strings.CutPrefix(path, "/proc/")
	rest, net := strings.CutSuffix(rest, "/ns/net")
	process, thread, threaded := strings.Cut(rest, "/task/")
	return proc && net && isID(process) && (!threaded || isID(thread))
}

func isID(s string) bool {
	n, err := strconv.ParseInt(s, 10, 32)
	return err == nil && n > 0 && strconv.FormatInt(n, 10) == s
}

// NeedsName reports whether the datapath, which runs as a user of its own, cannot open path. Such a path names a
// namespace by a process, or is below a directory that other users may not enter, such as containerd's state.
func NeedsName(path string) bool {
	if IsProcess(path) {
		return true
	}
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return false // Check returns the error
	}
	for dir := filepath.Dir(resolved); ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil || info.Mode().Perm()&0o001 == 0 {
			return true
		}
		if dir == "/" {
			return false
		}
	}
}

// Check opens path and makes sure that it is a network namespace and not the
// caller's own. The error is ErrInvalid unless the file cannot be read at all.
func Check(path string) (ID, error) {
	if strings.HasPrefix(filepath.Clean(path)+"/", "/proc/") && !IsProcess(path) {
		return ID{}, fmt.Errorf("%w: in /proc only /proc/PID/ns/net is accepted", ErrInvalid)
	}
	id, err := identify(path)
	if err != nil {
		return ID{}, err
	}
	own, err := identify("/proc/thread-self/ns/net")
	if err != nil {
		return ID{}, err
	}
	if id == own {
		return ID{}, fmt.Errorf("%w: it is the plugin's own", ErrInvalid)
	}
	return id, nil
}

// identify opens only nsfs files for reading: it inspects a FIFO or a device at path only through O_PATH.
func identify(path string) (ID, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return ID{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	defer unix.Close(fd)
	var sfs unix.Statfs_t
	if err := unix.Fstatfs(fd, &sfs); err != nil {
		return ID{}, err
	}
	if sfs.Type != unix.NSFS_MAGIC {
		return ID{}, fmt.Errorf("%w: it is not a namespace", ErrInvalid)
	}
	ns, err := unix.Open(fmt.Sprintf("/proc/thread-self/fd/%d", fd), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ID{}, err
	}
	defer unix.Close(ns)
	kind, err := unix.IoctlRetInt(ns, unix.NS_GET_NSTYPE)
	if err != nil {
		return ID{}, err
	}
	if kind != unix.CLONE_NEWNET {
		return ID{}, fmt.Errorf("%w: it is a namespace of another kind", ErrInvalid)
	}
	var st unix.Stat_t
	if err := unix.Fstat(ns, &st); err != nil {
		return ID{}, err
	}
	return ID{Dev: st.Dev, Ino: st.Ino}, nil
}

// Same reports whether two paths refer to one namespace; false if one cannot be inspected.
func Same(a, b string) bool {
	ia, erra := identify(a)
	ib, errb := identify(b)
	return erra == nil && errb == nil && ia == ib
}

// Names are the mounts of one network, in the instance's own directory. They are not in /run/netns: the first `ip netns
// add` on a machine bind-mounts that directory over itself. Earlier mounts in it can then be neither seen nor removed,
// and its namespace is never freed.
type Names struct{ dir, prefix string }

// NamesOf returns the names of a network for the instance with that run directory.
func NamesOf(runDir, network string) Names {
	return Names{dir: filepath.Join(runDir, "netns"), prefix: hash(network)[:16] + "-"}
}

// Path returns the path at which the namespace of an owner is mounted, if it is.
func (n Names) Path(owner string) string { return filepath.Join(n.dir, n.prefix+hash(owner)[:24]) }

// EarlierPath returns the path at which an earlier version, which did not distinguish networks, mounted the namespace.
func (n Names) EarlierPath(owner string) string { return filepath.Join(n.dir, hash(owner)[:24]) }

func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

// Bind bind-mounts the namespace at source, a path that NeedsName, at target. made
// is false if the mount exists already.
func Bind(source, target string) (made bool, err error) {
	// Other users may enter the directory, as they may enter /run/netns: the datapath does not run as root. They may
	// not write to it, because mount follows links.
	if err := os.Mkdir(filepath.Dir(target), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return false, err
	}
	if _, err := identify(target); err == nil {
		if Same(source, target) {
			return false, nil
		}
		// An earlier container of the same name may have left a mount.
		if err := Unbind(target); err != nil {
			return false, err
		}
	}
	f, err := os.OpenFile(target, os.O_RDONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o444)
	if err != nil {
		return false, err
	}
	f.Close()
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return false, errors.Join(fmt.Errorf("bind %s to %s: %w", source, target, err), os.Remove(target))
	}
	return true, nil
}

// Unbind undoes Bind. A missing mount is not an error.
func Unbind(target string) error {
	err := unix.Unmount(target, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", target, err)
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Prune unbinds every mount of the network whose owner is not in keep. It must not run concurrently with an ADD of an
// owner that is not in keep, as CNI requires for GC. Mounts of an earlier version stay for their DEL: their network is
// not known.
func (n Names) Prune(keep []string) error {
	valid := map[string]bool{}
	for _, owner := range keep {
		valid[n.Path(owner)] = true
	}
	entries, err := os.ReadDir(n.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if path := filepath.Join(n.dir, e.Name()); strings.HasPrefix(e.Name(), n.prefix) && !valid[path] {
			errs = append(errs, Unbind(path))
		}
	}
	return errors.Join(errs...)
}

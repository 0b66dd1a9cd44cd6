// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodefiles prepares the directories of the services of an instance, with owners and modes, the bpffs, and the
// device node of TAP devices. It runs as root, before the services, and opens no socket.
//
// All operations are idempotent: correct parts are not touched, and interrupted operations are
// completed.
package nodefiles

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/instance"
)

// Service is a service of a node and the user that it runs as.
type Service struct {
	Name     string
	UID, GID uint32
	// Former is the user that the service ran as in earlier versions. Files of that user are given
	// to UID.
	Former uint32
	// BPF means that the service pins maps and programs.
	BPF bool
	// Mounted means that somebody else mounts the bpffs: Prepare uses it, and does not mount one.
	Mounted bool
	// Optional means that not every node runs the service. Its directories are prepared on every node, so that it can
	// be started later.
	Optional bool
}

// Services returns the services of a node.
func Services() []Service {
	return []Service{
		{Name: "identity", UID: instance.IdentityID, GID: instance.GroupID, Former: 64701},
		{Name: "ipam", UID: instance.IPAMID, GID: instance.GroupID, Former: 64702},
		{Name: "policy", UID: instance.PolicyID, GID: instance.GroupID, Former: 64703},
		// A service that no earlier version had is its own former user: none of its files get another owner.
		{Name: "loadbalancer", UID: instance.LoadBalancerID, GID: instance.GroupID, Former: instance.LoadBalancerID},
		{Name: "datapath", UID: instance.DatapathID, GID: instance.GroupID, Former: 0, BPF: true},
		{Name: "dns", UID: instance.DNSID, GID: instance.GroupID, Former: instance.DNSID},
		{Name: "http", UID: instance.HTTPID, GID: instance.GroupID, Former: instance.HTTPID, Optional: true},
		{Name: "hubble", UID: instance.HubbleID, GID: instance.GroupID, Former: instance.HubbleID, Optional: true},
	}
}

// Store returns sluice-store, which runs on machines that are members of the store only.
func Store() Service {
	// No earlier version had this service: it is its own former user.
	return Service{Name: "store", UID: instance.StoreID, GID: instance.GroupID, Former: instance.StoreID}
}

// directory is the desired state of one directory.
type directory struct {
	path     string
	mode     fs.FileMode
	uid, gid uint32
	former   uint32 // owner of its content in earlier versions
}

// directories returns the directories of the service, parents first.
func (s Service) directories(p instance.Paths) []directory {
	all := []directory{
		{p.RunDir, 0o755, 0, 0, 0},
		{p.StateDir, 0o755, 0, 0, 0},
		{p.ServiceRunDir(s.Name), 0o750, s.UID, s.GID, s.Former},
		{p.ServiceStateDir(s.Name), 0o700, s.UID, s.GID, s.Former},
	}
	if s.BPF {
		all = append(all,
			// The CNI plugin writes deletions to the first directory, from which the service removes them,
			// and mounts namespaces below the second. mount(2) follows links, so the service must not be
			// able to write to the second.
			directory{p.ServiceStateDir("cni"), 0o755, 0, 0, 0},
			directory{filepath.Join(p.ServiceStateDir("cni"), "deletes"), 0o700, s.UID, s.GID, s.Former},
			directory{filepath.Join(p.RunDir, "netns"), 0o755, 0, 0, 0})
	}
	return all
}

// Prepare creates the directories of the services, gives files of a service's former user to its current user, mounts
// the bpffs, and moves the pins of earlier versions into it. It opens the device node of TAP devices to the datapath.
// While it runs, no service may run as its former user. It returns its changes, one line each, even if it fails.
func Prepare(p instance.Paths, services ...Service) (changes []string, err error) {
	for _, s := range services {
		for _, d := range s.directories(p) {
			changed, err := d.prepare()
			changes = append(changes, changed...)
			if err != nil {
				return changes, fmt.Errorf("prepare %s: %w", s.Name, err)
			}
		}
		if s.BPF {
			changed, err := s.prepareBPF(p)
			changes = append(changes, changed...)
			if err == nil {
				changed, err = s.prepareTUN(p)
				changes = append(changes, changed...)
			}
			if err != nil {
				return changes, fmt.Errorf("prepare %s: %w", s.Name, err)
			}
		}
	}
	return changes, nil
}

// Finding is the check result for one directory or for the bpffs.
type Finding struct {
	Kind, Path string
	// Problem is nil if the part is correct.
	Problem error
}

// Check reports, for each directory and for the bpffs, whether it is as Prepare would leave it.
func Check(p instance.Paths, services ...Service) (all []Finding) {
	seen := map[string]bool{}
	for _, s := range services {
		for _, d := range s.directories(p) {
			if !seen[d.path] {
				all = append(all, Finding{"directory", d.path, d.check()})
			}
			seen[d.path] = true
		}
		if s.BPF {
			is, err := onBPFFS(p.BPFDir)
			if err == nil && !is {
				err = errors.New("no bpffs is mounted there")
			}
			all = append(all, Finding{"bpffs", p.BPFDir, err})
		}
	}
	return all
}

// Plan returns the changes to directories and the bpffs that Prepare would make, one line each. It does not look at
// files in the directories, at pins or at the device node of TAP devices.
func Plan(p instance.Paths, services ...Service) (changes []string) {
	for _, f := range Check(p, services...) {
		switch {
		case f.Problem == nil:
		case f.Kind == "bpffs":
			changes = append(changes, "mount a bpffs at "+f.Path)
		case errors.Is(f.Problem, fs.ErrNotExist):
			changes = append(changes, "create "+f.Path)
		default:
			changes = append(changes, fmt.Sprintf("change %s, which %v", f.Path, f.Problem))
		}
	}
	return changes
}

// check returns an error that describes how the directory differs from its desired state.
func (d directory) check() error {
	info, err := os.Lstat(d.path)
	if err != nil {
		return err
	}
	st := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || st.Uid != d.uid || st.Gid != d.gid || info.Mode().Perm() != d.mode {
		return fmt.Errorf("is %s of %d:%d, want %s of %d:%d",
			info.Mode(), st.Uid, st.Gid, d.mode|fs.ModeDir, d.uid, d.gid)
	}
	return nil
}

// prepare creates the directory, or corrects its owner and mode.
func (d directory) prepare() (changes []string, err error) {
	err = os.Mkdir(d.path, d.mode)
	switch {
	case err == nil:
		changes = append(changes, "made "+d.path)
	case !errors.Is(err, fs.ErrExist):
		return nil, err
	}
	info, err := os.Lstat(d.path)
	if err != nil {
		return changes, err
	}
	if !info.IsDir() {
		return changes, fmt.Errorf("%s is not a directory, but %s", d.path, info.Mode().Type())
	}
	st := info.Sys().(*syscall.Stat_t)
	if st.Uid != d.uid || st.Gid != d.gid {
		// Change the owner of the content first. If the run is interrupted, the directory still belongs to the
		// former user, so the next run repeats the step. Once the directory has its new owner, its content is
		// never touched again, whatever the service's user creates there.
		if st.Uid == d.former && d.former != d.uid {
			n, err := d.giveContent()
			if err != nil {
				return changes, err
			}
			if n > 0 {
				changes = append(changes, fmt.Sprintf("gave %s with %d files of uid %d to %d:%d", d.path, n, d.former, d.uid, d.gid))
			}
		}
		if err := os.Lchown(d.path, int(d.uid), int(d.gid)); err != nil {
			return changes, err
		}
	}
	if info.Mode().Perm() != d.mode {
		if err := os.Chmod(d.path, d.mode); err != nil {
			return changes, err
		}
	}
	return changes, nil
}

// giveContent changes the owner of all files of the former user below the directory to the current
// user. It follows no symbolic links. A file with several hard links is an error, because its other
// names may be anywhere.
func (d directory) giveContent() (files int, err error) {
	root, err := os.OpenRoot(d.path)
	if err != nil {
		return 0, err
	}
	defer root.Close()
	err = fs.WalkDir(root.FS(), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || path == "." {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		if st.Uid != d.former {
			return nil
		}
		if !info.IsDir() && st.Nlink > 1 {
			return fmt.Errorf("%s has %d names; remove the others", filepath.Join(d.path, path), st.Nlink)
		}
		files++
		return root.Lchown(path, int(d.uid), int(d.gid))
	})
	if err != nil {
		return files, fmt.Errorf("change the owner of %s to uid %d: %w", d.path, d.uid, err)
	}
	return files, nil
}

// Root returns an error unless the process runs as root.
func Root() error {
	if unix.Geteuid() != 0 {
		return errors.New("must run as root, because it creates directories for other users")
	}
	return nil
}

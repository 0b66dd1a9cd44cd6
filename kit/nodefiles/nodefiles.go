// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodefiles makes what the services of one instance find at their
// start: their directories, each with its owner, and the bpffs. It runs as
// root, before the services, and opens no socket.
//
// Everything here can be repeated: what is as it should be stays untouched, and
// what was interrupted goes on.
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

// Service is one service of a node with the user that it runs as.
type Service struct {
	Name     string
	UID, GID uint32
	// Former is the user that the service ran as in earlier versions: what
	// belongs to it is given to UID.
	Former uint32
	// BPF says that the service pins maps and programs.
	BPF bool
	// Mounted says that somebody else mounts the bpffs.
	Mounted bool
}

// Services are those of a machine.
func Services() []Service {
	return []Service{
		{Name: "identity", UID: instance.IdentityID, GID: instance.GroupID, Former: 64701},
		{Name: "ipam", UID: instance.IPAMID, GID: instance.GroupID, Former: 64702},
		{Name: "policy", UID: instance.PolicyID, GID: instance.GroupID, Former: 64703},
		// Of which there are no earlier versions.
		{Name: "loadbalancer", UID: instance.LoadBalancerID, GID: instance.GroupID, Former: instance.LoadBalancerID},
		{Name: "datapath", UID: instance.DatapathID, GID: instance.GroupID, Former: 0, BPF: true},
	}
}

// directory is one directory as it should be.
type directory struct {
	path     string
	mode     fs.FileMode
	uid, gid uint32
	former   uint32 // owner of its content in earlier versions
}

// directories lists those of a service, parents first.
func (s Service) directories(p instance.Paths) []directory {
	all := []directory{
		{p.RunDir, 0o755, 0, 0, 0},
		{p.StateDir, 0o755, 0, 0, 0},
		{p.ServiceRunDir(s.Name), 0o750, s.UID, s.GID, s.Former},
		{p.ServiceStateDir(s.Name), 0o700, s.UID, s.GID, s.Former},
	}
	if s.BPF {
		all = append(all,
			// Where the CNI plugin leaves deletions, which the service removes, and
			// where it mounts namespaces. mount follows links, so that the service
			// may not write there.
			directory{p.ServiceStateDir("cni"), 0o755, 0, 0, 0},
			directory{filepath.Join(p.ServiceStateDir("cni"), "deletes"), 0o700, s.UID, s.GID, s.Former},
			directory{filepath.Join(p.RunDir, "netns"), 0o755, 0, 0, 0})
	}
	return all
}

// Prepare makes the directories of the services, gives what belonged to a
// service's former user to its user, and mounts the bpffs, into which the pins
// of earlier versions move. A service must not run as its former user
// meanwhile. It returns what it changed, one line each, also beside an error.
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
			if err != nil {
				return changes, fmt.Errorf("prepare %s: %w", s.Name, err)
			}
		}
	}
	return changes, nil
}

// Finding is one part of what Prepare makes.
type Finding struct {
	Kind, Path string
	// Problem is nil if the part is as it should be.
	Problem error
}

// Check reports for each directory and of the bpffs whether it is as Prepare makes it.
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

// check says in what a directory differs.
func (d directory) check() error {
	info, err := os.Lstat(d.path)
	if err != nil {
		return err
	}
	st := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || st.Uid != d.uid || st.Gid != d.gid || info.Mode().Perm() != d.mode {
		return fmt.Errorf("is %s of %d:%d, and should be %s of %d:%d",
			info.Mode(), st.Uid, st.Gid, d.mode|fs.ModeDir, d.uid, d.gid)
	}
	return nil
}

// prepare makes one directory, or gives it its owner and mode.
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
		return changes, fmt.Errorf("%s is not a directory but %s", d.path, info.Mode().Type())
	}
	st := info.Sys().(*syscall.Stat_t)
	if st.Uid != d.uid || st.Gid != d.gid {
		// The content first: as long as the directory belongs to its former user,
		// a run that was interrupted is repeated. Afterwards nothing in it is
		// touched again, whatever the service's user puts there.
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

// giveContent gives everything below the directory that belongs to the former
// user to the user of today. It follows no symbolic link, and a file with a
// second name is an error: the other name may lie anywhere.
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
		return files, fmt.Errorf("give %s to uid %d: %w", d.path, d.uid, err)
	}
	return files, nil
}

// Root says whether the process may do all this.
func Root() error {
	if unix.Geteuid() != 0 {
		return errors.New("it makes directories for other users and must run as root")
	}
	return nil
}

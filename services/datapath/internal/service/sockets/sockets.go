// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package sockets attaches the socket load balancer: programs that replace the address of a service by the address of a
// backend in socket calls. They are attached to a cgroup, for the sockets of processes in it, and translate in the
// namespaces that are in the map of namespaces.
//
// The links are pinned next to the maps, so that the programs keep running while the datapath is down. An upgrade
// replaces the program of a link atomically: every call runs a program. The package does not access the maps of
// services.
package sockets

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
)

var (
	// ErrNotCgroup2 is returned if the directory is not in a cgroup2 hierarchy.
	ErrNotCgroup2 = errors.New("not a cgroup2")
	// ErrNotRoot is returned if the directory is a cgroup, but not the root of the hierarchy.
	ErrNotRoot = errors.New("not the root of the cgroup2 hierarchy")
)

// Options select the sockets that are translated.
type Options struct {
	// Cgroup is the directory to which the programs are attached: the root of the cgroup2 hierarchy, which contains all
	// pods.
	Cgroup string
	// Subtree accepts a cgroup below the root, for a node that is a container itself and for tests. Sockets of processes
	// outside of it are not translated.
	Subtree bool
	// TranslateAll also translates in namespaces that are not in the map of namespaces, such as containers of another
	// runtime.
	TranslateAll bool
}

// Check returns an error if programs cannot be attached to the cgroup.
func (o Options) Check() error {
	var st unix.Statfs_t
	if err := unix.Statfs(o.Cgroup, &st); err != nil {
		return fmt.Errorf("inspect cgroup %q: %w; give the directory at which cgroup2 is mounted", o.Cgroup, err)
	}
	if uint32(st.Type) != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("cgroup %s: %w; give the directory at which cgroup2 is mounted: see `findmnt -t cgroup2`",
			o.Cgroup, ErrNotCgroup2)
	}
	info, err := os.Stat(o.Cgroup)
	if err != nil {
		return fmt.Errorf("inspect cgroup %s: %w", o.Cgroup, err)
	}
	if !info.IsDir() {
		return fmt.Errorf("cgroup %s: %w: it is a file, not a directory", o.Cgroup, ErrNotCgroup2)
	}
	if o.Subtree {
		return nil
	}
	// every cgroup except the root has a type
	if _, err := os.Stat(filepath.Join(o.Cgroup, "cgroup.type")); err == nil {
		return fmt.Errorf("cgroup %s: %w: services would not be translated for sockets of pods outside of it; "+
			"give the directory at which cgroup2 is mounted, in the cgroup namespace of the host", o.Cgroup, ErrNotRoot)
	}
	return nil
}

// attachTypes maps hooks to the kernel's attach types.
var attachTypes = map[program.Hook]ebpf.AttachType{
	program.Connect4:     ebpf.AttachCGroupInet4Connect,
	program.Connect6:     ebpf.AttachCGroupInet6Connect,
	program.SendMsg4:     ebpf.AttachCGroupUDP4Sendmsg,
	program.SendMsg6:     ebpf.AttachCGroupUDP6Sendmsg,
	program.RecvMsg4:     ebpf.AttachCGroupUDP4Recvmsg,
	program.RecvMsg6:     ebpf.AttachCGroupUDP6Recvmsg,
	program.GetPeerName4: ebpf.AttachCgroupInet4GetPeername,
	program.GetPeerName6: ebpf.AttachCgroupInet6GetPeername,
}

// linkPrefix is the prefix of the pins of links, before the hook.
const linkPrefix = "link_"

// Sockets are the programs of the socket load balancer and their links. Its methods may be called concurrently.
type Sockets struct {
	dir      string
	options  Options
	log      *slog.Logger
	programs []*program.Program

	gate  pin.Gate
	links map[program.Hook]link.Link // attached; guarded by gate
}

// Open checks the cgroup. It attaches nothing: links of a previous process keep running its programs until Attach.
func Open(dir string, programs []*program.Program, o Options, validateOnly bool, log *slog.Logger) (*Sockets, error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	return &Sockets{
		dir: dir, options: o, log: log, programs: programs, gate: pin.Gate{ValidateOnly: validateOnly},
		links: map[program.Hook]link.Link{},
	}, nil
}

// Attach attaches the programs, or replaces the programs in links of a previous process. Call it when the maps contain
// the services: after a change of the map layout, programs with empty maps would translate nothing. It may be repeated,
// and repairs the differences that Audit reports.
func (s *Sockets) Attach() error {
	if err := s.gate.Lock(); err != nil {
		return err
	}
	defer s.gate.Unlock()
	var errs []error
	for _, p := range s.programs {
		if err := s.attach(p); err != nil {
			errs = append(errs, fmt.Errorf("attach %s to cgroup %s: %w", p.Name, s.options.Cgroup, err))
		}
	}
	return errors.Join(errs...)
}

func linkPin(dir string, h program.Hook) string { return filepath.Join(dir, linkPrefix+string(h)) }

// attach makes the pinned link of one hook run its program on the cgroup.
func (s *Sockets) attach(p *program.Program) error {
	path := linkPin(s.dir, p.Hook)
	old, differences, err := s.openLink(p)
	if err != nil {
		return err
	}
	switch {
	case old != nil && len(differences) == 0:
		return s.keep(p.Hook, old)
	case old != nil && sameCgroup(old, s.options.Cgroup):
		if err := old.Update(p.Prog); err != nil {
			return errors.Join(fmt.Errorf("replace the program of link %s: %w", path, err), old.Close())
		}
		s.log.Debug("program of a socket hook replaced", "program", p.Name, "was", differences)
		return s.keep(p.Hook, old)
	}
	// A link to another or deleted cgroup is detached when its pin is removed, after the new link is attached.
	l, err := link.AttachCgroup(link.CgroupOptions{Path: s.options.Cgroup, Attach: attachTypes[p.Hook], Program: p.Prog})
	if err != nil {
		if old != nil {
			err = errors.Join(err, old.Close())
		}
		return err
	}
	if old != nil {
		err = errors.Join(os.Remove(path), old.Close())
	}
	if err == nil {
		err = l.Pin(path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("pin link %s: %w", path, err), l.Close())
	}
	s.log.Debug("program of a socket hook attached", "program", p.Name, "cgroup", s.options.Cgroup)
	return s.keep(p.Hook, l)
}

// keep stores an open link and closes the previous one.
func (s *Sockets) keep(h program.Hook, l link.Link) error {
	before := s.links[h]
	s.links[h] = l
	if before == nil {
		return nil
	}
	return before.Close()
}

// openLink opens the pinned link of a hook, nil if no link is pinned, and returns its differences from the desired
// state.
func (s *Sockets) openLink(p *program.Program) (_ link.Link, differences []string, _ error) {
	path := linkPin(s.dir, p.Hook)
	l, err := link.LoadPinnedLink(path, nil)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, []string{fmt.Sprintf("link %s is missing", path)}, nil
	case err != nil:
		return nil, nil, fmt.Errorf("adopt link %s: %w; remove it manually if it is not a link", path, err)
	}
	info, err := l.Info()
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("inspect link %s: %w", path, err), l.Close())
	}
	cgroup := info.Cgroup()
	if cgroup == nil || ebpf.AttachType(cgroup.AttachType) != attachTypes[p.Hook] {
		err := fmt.Errorf("link %s has another type; remove it manually", path)
		return nil, nil, errors.Join(err, l.Close())
	}
	if !sameCgroup(l, s.options.Cgroup) {
		differences = append(differences, fmt.Sprintf("link %s is not at cgroup %s", path, s.options.Cgroup))
	}
	if info.Program != p.ID {
		differences = append(
			differences,
			fmt.Sprintf("link %s runs program %d, not %s (%d)", path, info.Program, p.Name, p.ID),
		)
	}
	return l, differences, nil
}

// sameCgroup reports whether a link is attached to the cgroup. A link to a deleted cgroup is not.
func sameCgroup(l link.Link, dir string) bool {
	info, err := l.Info()
	if err != nil || info.Cgroup() == nil {
		return false
	}
	var st unix.Stat_t
	// the inode of a cgroup's directory is the cgroup ID
	return unix.Stat(dir, &st) == nil && info.Cgroup().CgroupId == st.Ino
}

// Audit reports each hook whose pinned link is missing, runs another program or is attached to another cgroup.
func (s *Sockets) Audit() (differences []string, _ error) {
	if err := s.gate.RLock(); err != nil {
		return nil, err
	}
	defer s.gate.RUnlock()
	var errs []error
	for _, p := range s.programs {
		l, found, err := s.openLink(p)
		differences = append(differences, found...)
		if l != nil {
			err = errors.Join(err, l.Close())
		}
		errs = append(errs, err)
	}
	return differences, errors.Join(errs...)
}

// Close closes the handles. The pinned links stay, and their programs keep running.
func (s *Sockets) Close() error {
	if !s.gate.Close() {
		return nil
	}
	var errs []error
	for _, l := range s.links {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

// Detach removes the links that are pinned in a directory: their programs stop running when no process holds the link
// open. Connected sockets stay connected, but getpeername then returns the backend.
func Detach(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list pins: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		hook, ok := strings.CutPrefix(entry.Name(), linkPrefix)
		if !ok {
			continue
		}
		if _, ours := attachTypes[program.Hook(hook)]; !ours {
			continue
		}
		if err := os.Remove(filepath.Join(dir, entry.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove the pin of a link: %w", err))
		}
	}
	return errors.Join(errs...)
}

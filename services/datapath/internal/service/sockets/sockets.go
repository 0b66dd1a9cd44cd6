// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package sockets attaches the socket load balancer: the programs that give the
// calls of sockets the address of a backend in place of a service's. They run at
// a cgroup, for the sockets that processes in it have opened, and translate for
// the namespaces that the map of namespaces has.
//
// The links are pinned beside the maps, so that the programs run on while the
// datapath is away. An upgrade replaces the program of a link in one step: no call
// is made without one. The package writes no services and opens no map of them.
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
	// ErrNotCgroup2: the directory is not one of a cgroup2 hierarchy.
	ErrNotCgroup2 = errors.New("not a cgroup2")
	// ErrNotRoot: the directory is a cgroup, but not the root of the hierarchy.
	ErrNotRoot = errors.New("not the root of the cgroup2 hierarchy")
)

// Options say whose sockets are translated.
type Options struct {
	// Cgroup is the directory at which the programs are attached: the root of the
	// cgroup2 hierarchy, below which all pods are.
	Cgroup string
	// Subtree accepts a cgroup below the root. Sockets of processes outside it are
	// not translated: for a node that is a container itself, and for tests.
	Subtree bool
	// TranslateAll translates for namespaces that the map of namespaces does not
	// have too, such as containers of another runtime.
	TranslateAll bool
}

// Check says what is wrong with the cgroup, nil if programs can be attached.
func (o Options) Check() error {
	var st unix.Statfs_t
	if err := unix.Statfs(o.Cgroup, &st); err != nil {
		return fmt.Errorf("look at cgroup %q: %w; give the directory at which cgroup2 is mounted", o.Cgroup, err)
	}
	if uint32(st.Type) != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("cgroup %s: %w; give the directory at which cgroup2 is mounted: see `findmnt -t cgroup2`",
			o.Cgroup, ErrNotCgroup2)
	}
	info, err := os.Stat(o.Cgroup)
	if err != nil {
		return fmt.Errorf("look at cgroup %s: %w", o.Cgroup, err)
	}
	if !info.IsDir() {
		return fmt.Errorf("cgroup %s: %w: it is a file in one", o.Cgroup, ErrNotCgroup2)
	}
	if o.Subtree {
		return nil
	}
	// every cgroup but the root has a type
	if _, err := os.Stat(filepath.Join(o.Cgroup, "cgroup.type")); err == nil {
		return fmt.Errorf("cgroup %s: %w: sockets of pods outside it would reach no service; "+
			"give the directory at which cgroup2 is mounted, in the cgroup namespace of the host", o.Cgroup, ErrNotRoot)
	}
	return nil
}

// attachTypes are what the kernel calls the hooks.
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

// linkPrefix begins the name of a link's pin; the hook follows.
const linkPrefix = "link_"

// Sockets are the programs of the socket load balancer and their links. Its
// methods may be called concurrently.
type Sockets struct {
	dir      string
	options  Options
	log      *slog.Logger
	programs []*program.Program

	gate  pin.Gate
	links map[program.Hook]link.Link // attached; guarded by gate
}

// Open checks the cgroup. It attaches nothing: links of an earlier process run
// their programs until Attach.
func Open(dir string, programs []*program.Program, o Options, validateOnly bool, log *slog.Logger) (*Sockets, error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	return &Sockets{
		dir: dir, options: o, log: log, programs: programs, gate: pin.Gate{ValidateOnly: validateOnly},
		links: map[program.Hook]link.Link{},
	}, nil
}

// Attach attaches the programs, or gives the links of an earlier process the
// programs of this one. Call it when the maps have the services: programs that
// find maps of another layout empty would translate nothing. It may be repeated,
// and repairs what Audit names.
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

// attach makes the pinned link of one hook run its program at the cgroup.
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
	// A link to another cgroup, or to one that is gone, detaches when its pin is
	// gone: after the new one is attached.
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

// keep holds a link open in place of the one before.
func (s *Sockets) keep(h program.Hook, l link.Link) error {
	before := s.links[h]
	s.links[h] = l
	if before == nil {
		return nil
	}
	return before.Close()
}

// openLink opens the pinned link of a hook, nil if there is none, and says what it is
// not.
func (s *Sockets) openLink(p *program.Program) (_ link.Link, differences []string, _ error) {
	path := linkPin(s.dir, p.Hook)
	l, err := link.LoadPinnedLink(path, nil)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, []string{fmt.Sprintf("link %s is missing", path)}, nil
	case err != nil:
		return nil, nil, fmt.Errorf("adopt link %s: %w; remove it by hand if it is not a link", path, err)
	}
	info, err := l.Info()
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("look at link %s: %w", path, err), l.Close())
	}
	cgroup := info.Cgroup()
	if cgroup == nil || ebpf.AttachType(cgroup.AttachType) != attachTypes[p.Hook] {
		err := fmt.Errorf("link %s is one of another kind; remove it by hand", path)
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

// sameCgroup says whether a link is at the cgroup. That of a cgroup that was
// removed is at none.
func sameCgroup(l link.Link, dir string) bool {
	info, err := l.Info()
	if err != nil || info.Cgroup() == nil {
		return false
	}
	var st unix.Stat_t
	// the inode of a cgroup's directory is its number
	return unix.Stat(dir, &st) == nil && info.Cgroup().CgroupId == st.Ino
}

// Audit names each hook whose pinned link is missing, runs another program or is
// at another cgroup.
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

// Close releases the handles. The pinned links stay, and their programs run on.
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

// Detach removes the links that are pinned in a directory: their programs run no
// more, once no process holds the link. Sockets that are connected stay so;
// getpeername shows the backend then.
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

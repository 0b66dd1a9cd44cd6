// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/privilege"
	"github.com/sluice-net/sluice/kit/sandbox"
)

// Option changes how Run starts a service.
type Option func(*rights)

// Privileged keeps exactly the given capabilities. If the process is started as root, it becomes the given user, with
// the group of all services, before it opens anything. If it is started as another user, it must have these
// capabilities in its ambient set.
func Privileged(uid uint32, caps ...privilege.Cap) Option {
	return func(r *rights) { r.uid, r.capabilities = uid, caps }
}

// rights are the privileges that a service keeps. The zero value keeps none.
type rights struct {
	uid          uint32
	capabilities []privilege.Cap
}

// take drops all privileges except r. whole reports whether it changed every thread, which the sandbox requires: a
// binary that links C, such as a race detector build, does not know all its threads.
func (r rights) take(logger *slog.Logger) (whole bool, err error) {
	if len(r.capabilities) == 0 {
		if err := privilege.Unprivileged(logger); err != nil {
			return false, err
		}
		state, err := privilege.Current()
		return state.NoNewPrivs, err
	}
	if os.Geteuid() == 0 {
		return true, privilege.Become(r.uid, instance.GroupID, r.capabilities...)
	}
	if err := privilege.NoNewPrivs(); err != nil {
		return false, err
	}
	if err := privilege.KeepCapabilities(r.capabilities...); err != nil {
		return false, errors.Join(err,
			fmt.Errorf("start it as uid %d with ambient capabilities %s, or as root with these, CAP_SETUID and CAP_SETGID",
				r.uid, privilege.SetOf(r.capabilities...)))
	}
	return true, nil
}

// hasRights reports whether the process is root or has capabilities, which its callers could use
// through it. Replaced by tests.
var hasRights = func() bool {
	if os.Geteuid() == 0 {
		return true
	}
	state, err := privilege.Current()
	return err != nil || state.Permitted != 0
}

// Caller is implemented by the configuration (a pointer) of a service that needs more than the common system calls.
type Caller interface{ Calls() sandbox.Calls }

// restrictCalls limits the process to the system calls that its configuration needs.
func (p *Process) restrictCalls(service any) error {
	var c sandbox.Calls
	if s, ok := service.(Caller); ok {
		c = s.Calls()
	}
	c.Inet = c.Inet || p.Config.Metrics.overTCP()
	return p.sandboxed("seccomp", sandbox.RestrictCalls(c))
}

// Confine limits the process to the given files, in addition to its sockets, /proc and files that
// are already open. Call it once, after the service has opened what it needs and before background
// work starts. It does nothing in a process that was not started by Run.
func (p *Process) Confine(f sandbox.Files) error {
	if !p.confined {
		return nil
	}
	f.Read = append(f.Read, "/proc")
	f.Write = append(f.Write, filepath.Dir(p.Config.Socket.Path))
	if filepath.IsAbs(p.Config.Metrics.Address) {
		f.Write = append(f.Write, filepath.Dir(p.Config.Metrics.Address))
	}
	return p.Phase("confine", func() error {
		version, err := sandbox.RestrictFiles(f)
		if err == nil {
			p.Log.Debug("files restricted", "landlock", version, "read", f.Read, "change", f.Change, "write", f.Write)
		}
		return p.sandboxed("landlock", err)
	})
}

// MissingLayers returns the layers of the sandbox that the kernel does not support, one line each. Call it only after
// Confine has returned.
func (p *Process) MissingLayers() []string { return slices.Clone(p.missing) }

// sandboxed records whether a layer of the sandbox is enforced. An unsupported layer is not an
// error: user IDs and capabilities still limit the process.
func (p *Process) sandboxed(layer string, err error) error {
	if errors.Is(err, sandbox.ErrUnsupported) {
		p.sandbox.WithLabelValues(layer).Set(0)
		p.missing = append(p.missing, fmt.Sprintf("a layer of the sandbox is missing, %s: %v", layer, err))
		p.Log.Warn("a layer of the sandbox is missing", "layer", layer, log.Err(err))
		return nil
	}
	if err == nil {
		p.sandbox.WithLabelValues(layer).Set(1)
	}
	return err
}

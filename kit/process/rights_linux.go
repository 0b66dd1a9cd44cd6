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

// Option changes how Run runs a service.
type Option func(*rights)

// Privileged is for a service that needs capabilities: it keeps exactly these.
// Started as root, it becomes that user with the group of all services before
// it opens anything; started as another user, it must have been given them as
// ambient ones.
func Privileged(uid uint32, caps ...privilege.Cap) Option {
	return func(r *rights) { r.uid, r.capabilities = uid, caps }
}

// rights are what a service keeps of what it was started with. The zero value
// needs none.
type rights struct {
	uid          uint32
	capabilities []privilege.Cap
}

// take gives up everything else. The sandbox can follow if that is so of every
// thread: a binary that links C, which only the race detector's do, does not
// know all of its threads.
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

// hasRights says whether the process may do what others may not: what it does
// for a caller, the caller can do. It is replaced by tests.
var hasRights = func() bool {
	if os.Geteuid() == 0 {
		return true
	}
	state, err := privilege.Current()
	return err != nil || state.Permitted != 0
}

// Caller is implemented by the pointer to a configuration of a service that
// makes system calls beside those that every service makes.
type Caller interface{ Calls() sandbox.Calls }

// restrictCalls leaves the process the system calls that its configuration
// needs.
func (p *Process) restrictCalls(service any) error {
	var c sandbox.Calls
	if s, ok := service.(Caller); ok {
		c = s.Calls()
	}
	c.Inet = c.Inet || p.Config.Metrics.overTCP()
	return p.sandboxed("seccomp", sandbox.RestrictCalls(c))
}

// Confine leaves the process the given files, beside its sockets, what /proc
// shows and what is open already. It is called once, when the service has opened
// what it needs, before the first background work. In a process that Run did
// not start it does nothing.
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

// MissingLayers says which layers of the sandbox the kernel does not have, one
// line each. It may be called once Confine has returned.
func (p *Process) MissingLayers() []string { return slices.Clone(p.missing) }

// sandboxed notes whether a layer of the sandbox is enforced. A kernel without
// it is no error: users and capabilities hold as ever.
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

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package attachment implements the CNI verbs by calling sluice-ipam and sluice-datapath. It keeps no state: the two
// services have the state that a killed plugin leaves behind, and the datapath or GC removes it.
package attachment

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"syscall"
	"time"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/cni-shim/internal/invocation"
	"github.com/sluice-net/sluice/services/cni-shim/internal/message"
	"github.com/sluice-net/sluice/services/cni-shim/internal/netns"
	"github.com/sluice-net/sluice/services/cni-shim/internal/unary"
)

// undoTime is the time for undoing steps when the deadline has passed.
const undoTime = 5 * time.Second

// Fault points of the plugin.
var (
	faultAddBegin     = fault.Register("cni/add/begin")
	faultAddBound     = fault.Register("cni/add/netns-bound")
	faultAddAllocated = fault.Register("cni/add/allocated")
	faultAddCreated   = fault.Register("cni/add/created")
	faultDelBegin     = fault.Register("cni/del/begin")
	faultDelSpooled   = fault.Register("cni/del/spooled")
	faultDelDeleted   = fault.Register("cni/del/deleted")
)

// Plugin executes one invocation.
type Plugin struct {
	in    invocation.Invocation
	log   *slog.Logger
	names netns.Names
	// confDir is the directory of the networks' configuration lists.
	confDir string

	ipam, datapath unary.Client

	waits   waiting
	phases  phases
	outcome outcome
}

// Maximum sizes of requests in bytes. GC sends a list of all attachments.
const (
	maxRequest   = 4 << 20
	maxToReclaim = 16 << 20
)

// New returns a Plugin that executes in. start is the start time of the process. It opens no connection yet.
func New(in invocation.Invocation, logger *slog.Logger, start time.Time) (*Plugin, error) {
	p := &Plugin{
		in:      in,
		log:     logger,
		names:   netns.NamesOf(in.Config.RunDir, in.Config.Name),
		confDir: confDir,
		waits:   waiting{patience: patience(in.Command)},
		phases:  phases{start: start, name: "read", since: start},
	}
	var err error
	if p.ipam, err = unary.New(filepath.Join(in.Config.RunDir, "ipam", "ipam.sock"), maxRequest); err != nil {
		return nil, invocation.Field("runDir", "%v", err)
	}
	if p.datapath, err = unary.New(filepath.Join(in.Config.RunDir, "datapath", "datapath.sock"), maxToReclaim); err != nil {
		return nil, invocation.Field("runDir", "%v", err)
	}
	return p, nil
}

// Run executes the verb and writes its result, if it has one, to stdout. It ends after the timeout of the
// configuration, except that it still undoes its steps. The error is a *cni.Error.
func (p *Plugin) Run(ctx context.Context, stdout io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, p.in.Config.Timeout)
	defer cancel()
	switch p.in.Command {
	case invocation.Add:
		return p.add(ctx, stdout)
	case invocation.Del:
		return p.del(ctx)
	case invocation.Check:
		return p.check(ctx)
	case invocation.Status:
		return p.status(ctx)
	case invocation.GC:
		return p.gc(ctx)
	default:
		return cniError(string(p.in.Command), errors.New("unexpected command"))
	}
}

func (p *Plugin) owner() *message.Owner { return owner(p.in.Owner) }

func owner(o workload.Owner) *message.Owner {
	return &message.Owner{ContainerID: o.ContainerID, InterfaceName: o.Interface}
}

// namespace returns the path at which the datapath can open the container's namespace. If the datapath cannot open the
// runtime's path, it bind-mounts the namespace at another one. undo removes that mount.
func (p *Plugin) namespace() (path string, undo func() error, err error) {
	undo = func() error { return nil }
	if _, err := netns.Check(p.in.Netns); err != nil {
		return "", undo, invocation.Environment(invocation.EnvNetns, err)
	}
	if !netns.NeedsName(p.in.Netns) {
		return p.in.Netns, undo, nil
	}
	path = p.names.Path(p.in.Owner.String())
	made, err := netns.Bind(p.in.Netns, path)
	if err != nil {
		return "", undo, err
	}
	if made {
		undo = func() error { return netns.Unbind(path) }
	}
	return path, undo, nil
}

// undo has its own timeout, because the passed deadline may be the reason for the undo.
func (p *Plugin) undo(ctx context.Context, what string, f func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if err := f(ctx); err != nil {
		p.log.WarnContext(ctx, "could not undo a step; garbage collection removes what remains",
			"step", what, log.KeyError, explain(err))
	}
}

// absent reports whether no server listens on the socket: the socket does not exist, or the kernel refuses the
// connection. A slow or stuck server is not absent.
func absent(service unary.Client) bool {
	err := service.Probe()
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT)
}

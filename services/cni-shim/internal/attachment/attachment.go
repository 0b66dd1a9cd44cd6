// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package attachment carries out the CNI verbs by calling sluice-ipam and
// sluice-datapath. It keeps nothing: what a killed plugin leaves behind is
// known to those two, and found by the datapath or by GC.
package attachment

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"syscall"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc/client"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/proto/wire"

	"github.com/sluice-net/sluice/services/cni-shim/internal/invocation"
	"github.com/sluice-net/sluice/services/cni-shim/internal/netns"
)

// undoTime is what undoing gets beyond the deadline that has passed.
const undoTime = 5 * time.Second

// Places at which tests interrupt the plugin.
var (
	faultAddBegin     = fault.Register("cni/add/begin")
	faultAddBound     = fault.Register("cni/add/netns-bound")
	faultAddAllocated = fault.Register("cni/add/allocated")
	faultAddCreated   = fault.Register("cni/add/created")
	faultDelBegin     = fault.Register("cni/del/begin")
	faultDelSpooled   = fault.Register("cni/del/spooled")
	faultDelDeleted   = fault.Register("cni/del/deleted")
)

// Plugin carries out one invocation.
type Plugin struct {
	in    invocation.Invocation
	log   *slog.Logger
	names netns.Names

	ipamSocket, datapathSocket string
	ipamConn, datapathConn     *grpc.ClientConn

	ipam     ipamv1.IPAMServiceClient
	datapath datapathv1.DatapathServiceClient

	waits   waiting
	phases  phases
	outcome outcome
}

// New prepares to carry out in, of a process that started at start. It makes no
// connection yet.
func New(in invocation.Invocation, logger *slog.Logger, start time.Time) (*Plugin, error) {
	p := &Plugin{
		in:             in,
		log:            logger,
		names:          netns.NamesOf(in.Config.RunDir, in.Config.Name),
		ipamSocket:     filepath.Join(in.Config.RunDir, "ipam", "ipam.sock"),
		datapathSocket: filepath.Join(in.Config.RunDir, "datapath", "datapath.sock"),
		waits:          waiting{patience: patience(in.Command)},
		phases:         phases{start: start, name: "read", since: start},
	}
	var err error
	// Deadlines come from the context; repeating is decided in call.
	if p.ipamConn, err = client.Dial(p.ipamSocket, client.Options{Timeout: -1}); err != nil {
		return nil, invocation.Field("runDir", "%v", err)
	}
	if p.datapathConn, err = client.Dial(p.datapathSocket, client.Options{Timeout: -1, MaxSend: 16 << 20}); err != nil {
		return nil, errors.Join(invocation.Field("runDir", "%v", err), p.ipamConn.Close())
	}
	p.ipam = ipamv1.NewIPAMServiceClient(p.ipamConn)
	p.datapath = datapathv1.NewDatapathServiceClient(p.datapathConn)
	return p, nil
}

// Close ends the connections.
func (p *Plugin) Close() error { return errors.Join(p.ipamConn.Close(), p.datapathConn.Close()) }

// Run carries out the verb and writes its result, if it has one, to stdout. It
// is done when the configuration's timeout has passed, except for undoing what
// then has to be undone. The error is a *types.Error.
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
		return cniError(string(p.in.Command), errors.New("is not carried out here"))
	}
}

func (p *Plugin) owner() *workloadv1.Owner {
	return wire.Owner(p.in.Owner)
}

// namespace gives the path under which the datapath finds the container's
// namespace, binding one that the datapath could not open, and how to undo that.
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

// undo runs on a time of its own: the deadline may be why it is needed.
func (p *Plugin) undo(ctx context.Context, what string, f func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if err := f(ctx); err != nil {
		p.log.WarnContext(ctx, "undo left something for garbage collection", "step", what, log.KeyError, message(err))
	}
}

// absent says whether nobody serves the socket: it is not there, or the kernel
// refuses to connect to it. A server that is slow or stuck is not absent.
func absent(ctx context.Context, socket string) bool {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", socket)
	if err == nil {
		c.Close()
		return false
	}
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT)
}

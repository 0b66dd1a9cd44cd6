// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package underlay makes by netlink what leads packets to other nodes: the tunnel
// device, the programs of uplinks, routes to the ranges of other nodes and the link
// addresses of next hops. It also tells how the kernel reaches an address.
//
// It knows no nodes, and remembers nothing that the kernel tells: what it is asked
// to make it compares with what is there. What others made it reports and leaves.
package underlay

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/hook"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

// Options describe the node. All but the programs and Devices are needed.
type Options struct {
	// Home is the node's network namespace. The caller keeps it open.
	Home     *netns.Namespace
	Instance string
	// Tunnel and Uplinks return the programs of the tunnel device and of uplinks: the ones
	// that were loaded last. Nil: there are none.
	Tunnel, Uplinks func() []*program.Program
	// Devices are names of uplinks or patterns as of path.Match; none: they are
	// those that have the node's addresses, of default routes and of other nodes.
	Devices []string
	// Filters has the programs put on as filters even where the kernel has tcx.
	Filters bool
	// SetGlobal allows changes of sysctls that concern devices of others. Without it
	// they are only reported.
	SetGlobal bool
	// Services has uplinks send no redirects: what a service leads to another node goes
	// out by the device that it came in by, and a redirect would name the backend.
	Services bool
	// ProcSysNet is the directory that sysctls are written to; /proc/sys/net if it is
	// empty.
	ProcSysNet string
}

// Underlay is a handle on what leads to other nodes. Its methods may be called
// concurrently.
type Underlay struct {
	o      Options
	name   string // of the tunnel device
	metric uint32 // of routes

	conn  *rtnl.Conn // for questions and changes
	lists *rtnl.Conn // for listings that match strictly
	hooks *hook.Hooks

	mu sync.Mutex
	// hops are neighbours that Resolve keeps, and what is kept of each; guarded by mu.
	hops  map[hop]bool
	found bool // guarded by mu; hops has those of earlier processes too
	// attached are devices that have the programs of uplinks; guarded by mu.
	attached map[uint32]endpoint.HostDevice
	// hooked are the tcx programs of devices with programs of ours; guarded by mu.
	hooked map[endpoint.HostDevice][]ebpf.ProgramID
	// tunnelIndex is that of the device that EnsureTunnel made or found; guarded by mu.
	tunnelIndex uint32
	swept       bool // guarded by mu; attached has those of earlier processes too
}

// hop is a neighbour on a device.
type hop struct {
	ifindex uint32
	addr    netip.Addr
}

// Open opens the netlink sockets in the node's namespace.
func Open(o Options) (_ *Underlay, err error) {
	o.ProcSysNet = cmp.Or(o.ProcSysNet, "/proc/sys/net")
	u := &Underlay{
		o: o, name: TunnelName(o.Instance), metric: routeMetric(o.Instance),
		hops: map[hop]bool{}, attached: map[uint32]endpoint.HostDevice{},
		hooked: map[endpoint.HostDevice][]ebpf.ProgramID{},
	}
	err = o.Home.Do(func() error {
		var errs []error
		for _, c := range []**rtnl.Conn{&u.conn, &u.lists} {
			var err error
			*c, err = rtnl.Open()
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
	if err == nil {
		err = u.lists.Strict()
	}
	if err != nil {
		u.Close()
		return nil, fmt.Errorf("open netlink in the node's namespace: %w", err)
	}
	u.hooks = &hook.Hooks{Home: o.Home, Changes: u.conn, Reads: u.conn, Filters: o.Filters}
	return u, nil
}

// Close closes the sockets. It changes nothing in the kernel.
func (u *Underlay) Close() {
	for _, c := range []*rtnl.Conn{u.conn, u.lists} {
		if c != nil {
			c.Close()
		}
	}
}

// RemoveAll removes everything that this or an earlier process made: the tunnel
// device, the programs of uplinks, routes and neighbours. What is not there is no
// error.
func (u *Underlay) RemoveAll() error {
	routes, err := u.Routes()
	errs := []error{err}
	for p := range routes {
		errs = append(errs, u.RemoveRoute(p))
	}
	errs = append(errs, u.Resolve(nil), u.EnsureUplinks(nil, false), u.RemoveTunnel())
	return errors.Join(errs...)
}

type differences []endpoint.Difference

func (ds *differences) add(subject, key, want, have string) {
	*ds = append(*ds, endpoint.Difference{Subject: subject, Key: key, Want: want, Have: have})
}

func family(a netip.Addr) byte {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// mostLists is how often something is listed that changes all the while.
const mostLists = 100

// whole lists again what changed while it was listed.
func whole(list func() error) (err error) {
	for range mostLists {
		if err = list(); !errors.Is(err, rtnl.ErrInterrupted) {
			return err
		}
	}
	return err
}

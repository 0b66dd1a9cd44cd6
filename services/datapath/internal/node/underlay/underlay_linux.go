// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package underlay manages through netlink what packets to other nodes need: the tunnel device, the programs of
// uplinks, routes to the ranges of other nodes and the link addresses of next hops. It also looks up how the kernel
// reaches an address.
//
// It knows devices, routes and addresses, but no nodes. It always compares the desired objects with the kernel's state.
// It reports objects of others, but does not change them.
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

// Options are the options of an Underlay. All except the programs and Devices are required.
type Options struct {
	// Home is the node's network namespace. The caller keeps it open.
	Home     *netns.Namespace
	Instance string
	// Tunnel and Uplinks return the most recently loaded programs of the tunnel device and of uplinks; nil: none.
	Tunnel, Uplinks func() []*program.Program
	// Devices are names of uplinks, or patterns of path.Match. If empty, uplinks are the devices with the node's
	// addresses, default routes or routes to other nodes.
	Devices []string
	// Filters attaches the programs as clsact filters even if the kernel supports tcx.
	Filters bool
	// SetGlobal allows changes of sysctls that affect devices of others. Otherwise differences are only reported.
	SetGlobal bool
	// Services disables ICMP redirects of uplinks: packets of a service to a backend on another node leave by the device
	// by which they arrived, and a redirect would reveal the backend.
	Services bool
	// ProcSysNet is the directory of the sysctls; "": /proc/sys/net.
	ProcSysNet string
}

// Underlay manages the netlink objects. Its methods may be called concurrently.
type Underlay struct {
	o      Options
	name   string // of the tunnel device
	metric uint32 // of routes

	conn  *rtnl.Conn // for requests and changes
	lists *rtnl.Conn // for listings with strict filters
	hooks *hook.Hooks

	mu sync.Mutex
	// hops are the neighbours that Resolve keeps, and whether each entry is managed; guarded by mu.
	hops  map[hop]bool
	found bool // guarded by mu; hops includes neighbours of previous processes
	// attached are the devices with uplink programs; guarded by mu.
	attached map[uint32]endpoint.HostDevice
	// hooked are the tcx programs on devices with programs of Sluice; guarded by mu.
	hooked map[endpoint.HostDevice][]ebpf.ProgramID
	// tunnelIndex is the index of the device that EnsureTunnel created or found; guarded by mu.
	tunnelIndex uint32
	swept       bool // guarded by mu; attached includes devices of previous processes
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

// RemoveAll removes everything that this or a previous process created: the tunnel device, the programs of uplinks,
// routes and neighbours. Missing objects are not an error.
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

// mostLists is the maximum number of attempts to list objects that keep changing.
const mostLists = 100

// whole repeats a listing that was interrupted by a change.
func whole(list func() error) (err error) {
	for range mostLists {
		if err = list(); !errors.Is(err, rtnl.ErrInterrupted) {
			return err
		}
	}
	return err
}

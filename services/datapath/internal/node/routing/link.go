// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package routing forwards packets to other nodes. For each node it selects the device, next hop and MTU of packets to
// its pods. It keeps the maps of the programs, the routes of the host stack and the devices in that state.
package routing

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/node/xfrm"
)

// Tunnel is the desired configuration of the tunnel device.
type Tunnel struct {
	Port uint16 // UDP
	MTU  uint16 // bytes
}

// NoTunnelError is the error of EnsureTunnel if the node has no tunnel device that can send packets.
type NoTunnelError struct{ Err error }

func (e NoTunnelError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e NoTunnelError) Unwrap() error { return e.Err }

// Policies are the IPsec policies of the node's network namespace; xfrm.Reader implements it.
type Policies interface {
	Policies() (xfrm.Policies, error)
	// Watch calls changed when policies may have changed, until ctx ends or an error occurs.
	Watch(ctx context.Context, changed func()) error
}

// Nexthop is a next hop of a path or route.
type Nexthop struct {
	Ifindex uint32
	Device  string     // name
	Via     netip.Addr // router; invalid: the destination is on the device's link
	Weight  uint16     // share of the traffic with several hops, at least 1
}

// Path describes how the kernel reaches an address.
type Path struct {
	Hops []Nexthop // several: each connection uses one of them
	MTU  uint16    // largest packet in bytes, according to devices and routes
	// Learned is the path MTU that ICMP errors have reported to the kernel, if it is less than MTU; 0: none. Any host that
	// communicates with the node can cause such errors, with any size.
	Learned uint16
	Source  netip.Addr // default source address
	// Special says what the kernel does with packets beyond passing them to one next hop on an Ethernet device; "":
	// nothing.
	Special string
	Err     error // why there is no path
	// Unknown: with Err, it is not known whether there is a path.
	Unknown bool
}

// Direct reports whether the address is on the link of a single device.
func (p Path) Direct() bool { return len(p.Hops) == 1 && !p.Hops[0].Via.IsValid() }

func (r Route) equal(s Route) bool {
	return r.Range == s.Range && r.Source == s.Source && r.MTU == s.MTU &&
		slices.EqualFunc(r.Hops, s.Hops, func(a, b Nexthop) bool {
			return a.Ifindex == b.Ifindex && a.Via == b.Via && max(a.Weight, 1) == max(b.Weight, 1)
		})
}

// Route is a route to a range of another node.
type Route struct {
	Range  netip.Prefix
	Hops   []Nexthop
	Source netip.Addr // invalid: the kernel chooses
	MTU    uint16     // bytes; 0: the devices' MTU
}

// String describes the route in the format of ip-route.
func (r Route) String() string {
	var texts []string
	for _, h := range r.Hops {
		text := fmt.Sprintf("dev %d", h.Ifindex)
		if h.Via.IsValid() {
			text = fmt.Sprintf("via %v %s", h.Via, text)
		}
		texts = append(texts, text)
	}
	text := strings.Join(texts, ", ")
	if r.Source.IsValid() {
		text += fmt.Sprintf(" src %v", r.Source)
	}
	return fmt.Sprintf("%s mtu %d", text, r.MTU)
}

// Links are the devices, routes and neighbours through which packets reach other nodes.
type Links interface {
	// EnsureTunnel creates or repairs the tunnel device, including its programs. With an error, it still returns the
	// device if packets can be sent. The error is a NoTunnelError if they cannot. With any other error and without
	// a device, it is not known whether they can.
	EnsureTunnel(t Tunnel) (endpoint.HostDevice, error)
	// CheckTunnel returns what EnsureTunnel would repair, and the device; the zero device if EnsureTunnel would create a
	// new one.
	CheckTunnel(t Tunnel) (endpoint.HostDevice, []endpoint.Difference, error)
	// RemoveTunnel removes the tunnel device. A missing device is not an error.
	RemoveTunnel() error

	// Uplinks returns the devices through which other nodes are reached: the devices that are configured or, without
	// configuration, the devices with one of the node's addresses or a default route, and the used ones.
	Uplinks(addrs []netip.Addr, used []uint32) ([]endpoint.HostDevice, error)
	// EnsureUplinks attaches the uplink programs to the devices, and detaches them from all others. If programs is false,
	// it only disables the reverse path filter of the devices.
	EnsureUplinks(devices []endpoint.HostDevice, programs bool) error
	// CheckUplinks returns what EnsureUplinks would repair.
	CheckUplinks(devices []endpoint.HostDevice, programs bool) ([]endpoint.Difference, error)

	// Disturbed reports whether the programs of the tunnel or of uplinks have changed since they were ensured: the kernel
	// sends no events about tcx programs.
	Disturbed() (bool, error)

	// Paths returns the paths to addresses, in the same order.
	Paths(addrs []netip.Addr) ([]Path, error)

	// SourcePorts returns the range from which the kernel chooses source ports of tunnel packets.
	SourcePorts() (lowest, highest uint16, err error)
	// Rules returns the routing rules of others for IPv4 whose result depends on more than the addresses of a packet, so
	// that Paths does not take them into account.
	Rules() ([]string, error)

	// Routes returns the routes that SetRoute created.
	Routes() (map[netip.Prefix]Route, error)
	SetRoute(r Route) error
	RemoveRoute(p netip.Prefix) error
	// Foreign returns the ranges that the kernel reaches through another route than one of SetRoute, with a description of
	// that route.
	Foreign(ranges []netip.Prefix) (map[netip.Prefix]string, error)

	// Watch calls events, which must not block, after changes that may affect any of this, until ctx ends.
	Watch(ctx context.Context, events func()) error

	// Resolve makes the kernel resolve the link addresses of hops, whose Via is valid, and keep them resolved. It releases
	// earlier hops that are not listed.
	Resolve(hops []Nexthop) error
}

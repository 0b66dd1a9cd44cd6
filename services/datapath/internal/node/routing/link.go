// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package routing leads packets to other nodes: it decides for each node by which
// device, next hop and MTU packets for its pods leave, and keeps the maps that the
// programs read, the routes of the node's own stack and the devices as decided.
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

// Tunnel says how the tunnel device is to be.
type Tunnel struct {
	Port uint16 // UDP
	MTU  uint16 // bytes
}

// Policies are the IPsec policies of the node's namespace; xfrm.Reader reads them.
type Policies interface {
	Policies() (xfrm.Policies, error)
	// Watch calls changed when policies may have changed, until ctx ends or it fails.
	Watch(ctx context.Context, changed func()) error
}

// Nexthop is where packets leave the node.
type Nexthop struct {
	Ifindex uint32
	Device  string     // name
	Via     netip.Addr // router; invalid: what is looked for is on the device's link
	Weight  uint16     // share among several hops, at least 1
}

// Path is how the kernel reaches an address.
type Path struct {
	Hops []Nexthop // several: each connection takes one of them
	MTU  uint16    // largest packet, bytes: of the devices and routes
	// Learned is what errors from the network have told the kernel, if that is less than
	// MTU; 0: nothing. Anybody who speaks with the node may have caused them, with any size.
	Learned uint16
	Source  netip.Addr // that the node uses unless it is told another
	Err     error      // why there is none
}

// Direct says that the address is on the link of one device.
func (p Path) Direct() bool { return len(p.Hops) == 1 && !p.Hops[0].Via.IsValid() }

func (r Route) equal(s Route) bool {
	return r.Range == s.Range && r.Source == s.Source && r.MTU == s.MTU &&
		slices.EqualFunc(r.Hops, s.Hops, func(a, b Nexthop) bool {
			return a.Ifindex == b.Ifindex && a.Via == b.Via && max(a.Weight, 1) == max(b.Weight, 1)
		})
}

// Route leads to a range of another node.
type Route struct {
	Range  netip.Prefix
	Hops   []Nexthop
	Source netip.Addr // invalid: the kernel chooses
	MTU    uint16     // bytes; 0: that of the devices
}

// String is the route in the words of ip-route.
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

// Links are the devices, routes and neighbours by which packets reach other nodes.
type Links interface {
	// EnsureTunnel makes the tunnel device, or repairs it, programs included. With an
	// error it returns the device if packets can be sent all the same.
	EnsureTunnel(t Tunnel) (endpoint.HostDevice, error)
	// CheckTunnel says what EnsureTunnel would put right, and of which device; the zero
	// device: there is none that EnsureTunnel would keep.
	CheckTunnel(t Tunnel) (endpoint.HostDevice, []endpoint.Difference, error)
	// RemoveTunnel removes the tunnel device. That there is none is no error.
	RemoveTunnel() error

	// Uplinks are the devices through which other nodes are reached: those with one
	// of the node's addresses, of default routes, and used; or those of the setting.
	Uplinks(addrs []netip.Addr, used []uint32) ([]endpoint.HostDevice, error)
	// EnsureUplinks gives devices the programs of uplinks, and takes them from all
	// others. Without programs it only makes them accept what comes by any path.
	EnsureUplinks(devices []endpoint.HostDevice, programs bool) error
	// CheckUplinks says what EnsureUplinks would put right.
	CheckUplinks(devices []endpoint.HostDevice, programs bool) ([]endpoint.Difference, error)

	// Disturbed says whether the programs of the tunnel or of uplinks are others than they
	// were when they were ensured: the kernel sends no event for those of tcx.
	Disturbed() (bool, error)

	// Paths to addresses, in their order.
	Paths(addrs []netip.Addr) ([]Path, error)

	// Routes are those that SetRoute made.
	Routes() (map[netip.Prefix]Route, error)
	SetRoute(r Route) error
	RemoveRoute(p netip.Prefix) error
	// Foreign says which ranges the kernel reaches by another route than one that
	// SetRoute made, and by which.
	Foreign(ranges []netip.Prefix) (map[netip.Prefix]string, error)

	// Watch calls news, which does not wait, after changes that may concern any of
	// this, until ctx ends.
	Watch(ctx context.Context, events func()) error

	// Resolve has the kernel know the link addresses of hops, whose Via is valid, and
	// keep them known, and forget those of before that are not among them.
	Resolve(hops []Nexthop) error
}

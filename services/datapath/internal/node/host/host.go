// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package host manages what the node has for all endpoints together: rules, routes, sysctls, the firewall, the pins of
// maps, the device of a proxy, and the host's own addresses in the maps. It does not change endpoints.
package host

import (
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/node/podrange"
)

// Devices are the rules, routes and sysctls of the node.
type Devices interface {
	CheckNode() ([]endpoint.Difference, error)
	RepairNode() error
	// RemoveRange removes the rules, routes and address of a former pod range.
	RemoveRange(p netip.Prefix) error
	// AddrIn looks for an address of another device in a pod range.
	AddrIn(p netip.Prefix) (a netip.Addr, device string, err error)
	// HostAddrs lists the addresses of the host.
	HostAddrs() ([]netip.Addr, error)
}

// Firewall is the nftables table of the instance.
type Firewall interface {
	Check() ([]endpoint.Difference, error)
	Repair() error
	// MarkRules lists the rules of others that may change bits of the packet mark other than free.
	MarkRules(free uint32) ([]string, error)
	// Closed lists the chains of others that drop forwarded packets.
	Closed() ([]string, error)
	// PortRules lists the rules of others with a condition on the UDP destination port that matches the given port.
	PortRules(port uint16) ([]string, error)
}

// Addresses are the addresses of the host in the maps.
type Addresses interface {
	HostAddrs() ([]netip.Addr, error)
	SyncHostAddrs(addrs []netip.Addr) error
}

// Router manages packet forwarding to other nodes.
type Router interface {
	Check() ([]endpoint.Difference, error)
	Repair() error
	// Warnings lists problems that block packets from other nodes, or may.
	Warnings() []string
}

// Proxy manages the device of a proxy.
type Proxy interface {
	Check() ([]endpoint.Difference, error)
	Repair() error
}

// Pins are the pins of the maps in the bpffs.
type Pins interface {
	// Audit returns the pins that do not refer to the map in use. With repair, it restores them.
	Audit(repair bool) ([]string, error)
}

// Options are the dependencies of Host.
type Options struct {
	Devices   Devices
	Firewall  Firewall
	Addresses Addresses
	Router    Router // nil: no packets travel to other nodes
	Proxy     Proxy  // nil: no proxy can attach
	Pins      Pins   // nil: the maps are not pinned
	Ranges    *podrange.Set
	// TunnelPort is the UDP port of tunnel packets that bypass the stack and its firewall rules; 0: no tunnel
	// packets do.
	TunnelPort uint16
	// Changed is called when addresses or default routes of the node may have changed; nil: not called.
	Changed func()
	Log     *slog.Logger
}

// Host implements endpoint.Host.
type Host struct {
	o        Options
	warnings atomic.Pointer[[]string] // nil before the first CheckWarnings
	bypassed atomic.Pointer[[]string] // nil before the first CheckWarnings
}

// New returns a Host. It does not read or change the kernel.
func New(o Options) *Host { return &Host{o: o} }

// Changed reports that addresses or default routes of the node may have changed.
func (h *Host) Changed() {
	if h.o.Changed != nil {
		h.o.Changed()
	}
}

// Check implements endpoint.Host.
func (h *Host) Check() ([]endpoint.Difference, error) {
	diffs, err := h.o.Devices.CheckNode()
	if err != nil {
		return nil, err
	}
	fw, err := h.o.Firewall.Check()
	if err != nil {
		return nil, err
	}
	diffs = append(diffs, fw...)
	if h.o.Router != nil {
		ds, err := h.o.Router.Check()
		if err != nil {
			return nil, err
		}
		diffs = append(diffs, ds...)
	}
	if h.o.Proxy != nil {
		ds, err := h.o.Proxy.Check()
		if err != nil {
			return nil, err
		}
		diffs = append(diffs, ds...)
	}
	have, err := h.o.Addresses.HostAddrs()
	if err != nil {
		return nil, err
	}
	for _, a := range h.o.Ranges.NodeAddrs() {
		if !slices.Contains(have, a) {
			diffs = append(diffs, endpoint.Difference{Subject: "sl_ip", Key: a.String(), Want: "the host"})
		}
	}
	if h.o.Pins == nil {
		return diffs, nil
	}
	pins, err := h.o.Pins.Audit(false)
	for _, p := range pins {
		diffs = append(diffs, endpoint.Difference{Subject: "pin", Key: p, Want: "the map in use"})
	}
	return diffs, err
}

// Repair implements endpoint.Host.
func (h *Host) Repair() error {
	errs := []error{h.o.Devices.RepairNode(), h.SyncAddrs()}
	fw, err := h.o.Firewall.Check()
	if err == nil && len(fw) > 0 {
		err = h.o.Firewall.Repair()
	}
	errs = append(errs, err)
	if h.o.Router != nil {
		errs = append(errs, h.o.Router.Repair())
	}
	if h.o.Proxy != nil {
		errs = append(errs, h.o.Proxy.Repair())
	}
	if h.o.Pins != nil {
		_, err := h.o.Pins.Audit(true)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// SyncAddrs writes the host's addresses to the maps.
func (h *Host) SyncAddrs() error {
	defer h.Changed()
	addrs, err := h.o.Devices.HostAddrs()
	if err != nil {
		return err
	}
	return h.o.Addresses.SyncHostAddrs(addrs)
}

// RemoveRange removes the rules, routes and address of a former pod range.
func (h *Host) RemoveRange(p netip.Prefix) error {
	return errors.Join(h.o.Devices.RemoveRange(p), h.SyncAddrs())
}

// AddrIn implements podrange.Host.
func (h *Host) AddrIn(p netip.Prefix) (netip.Addr, string, error) { return h.o.Devices.AddrIn(p) }

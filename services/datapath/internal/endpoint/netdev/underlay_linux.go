// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// maxUnderlay is the largest number of underlay addresses of a node in the cluster.
const maxUnderlay = 16

// UnderlayAddrs returns the addresses by which other nodes reach this one: the global addresses of
// the devices with default routes, the preferred route's first, or of the devices whose names match
// a pattern. Addresses in pod ranges, temporary, deprecated and tentative addresses are left out.
func (n *Netdev) UnderlayAddrs(patterns []string) ([]netip.Addr, error) {
	var addrs []netip.Addr
	for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
		devices, err := n.uplinks(f, patterns)
		if err != nil {
			return nil, err
		}
		list, err := whole(func() ([]netlink.Addr, error) { return n.reads.AddrList(nil, f) })
		if err != nil {
			return nil, fmt.Errorf("list addresses: %w", err)
		}
		for _, index := range devices {
			for _, a := range list {
				if ip, ok := n.reachable(a); ok && a.LinkIndex == index && !slices.Contains(addrs, ip) {
					addrs = append(addrs, ip)
				}
			}
		}
	}
	return addrs[:min(len(addrs), maxUnderlay)], nil
}

// reachable returns the address, and whether other nodes can use it to reach this node.
func (n *Netdev) reachable(a netlink.Addr) (netip.Addr, bool) {
	const unusable = unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED | unix.IFA_F_DEPRECATED
	ip, ok := netip.AddrFromSlice(a.IP)
	ip = ip.Unmap()
	switch {
	case !ok, a.Flags&unusable != 0, ip.Is6() && a.Flags&unix.IFA_F_TEMPORARY != 0:
		return ip, false
	case a.Scope != unix.RT_SCOPE_UNIVERSE, !ip.IsGlobalUnicast():
		return ip, false
	}
	_, pods := n.o.Ranges.Of(ip)
	return ip, !pods
}

// uplinks returns the indexes of the devices that match a pattern, or without patterns of the
// devices with default routes of the family, the preferred route's first.
func (n *Netdev) uplinks(family int, patterns []string) (indices []int, err error) {
	if len(patterns) > 0 {
		links, err := whole(n.reads.LinkList)
		if err != nil {
			return nil, fmt.Errorf("list devices: %w", err)
		}
		for _, pattern := range patterns {
			for _, l := range links {
				if ok, err := path.Match(pattern, l.Attrs().Name); ok && err == nil {
					indices = append(indices, l.Attrs().Index)
				}
			}
		}
		return indices, nil
	}
	routes, err := whole(func() ([]netlink.Route, error) {
		return n.reads.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	})
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	slices.SortStableFunc(routes, func(a, b netlink.Route) int { return cmp.Compare(a.Priority, b.Priority) })
	for _, r := range routes {
		if !isDefault(r) {
			continue
		}
		if r.LinkIndex != 0 {
			indices = append(indices, r.LinkIndex)
		}
		for _, hop := range r.MultiPath {
			indices = append(indices, hop.LinkIndex)
		}
	}
	return indices, nil
}

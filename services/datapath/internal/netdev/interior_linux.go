// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// sourceRulePriority is that of the rules by which source-routed addresses find
// their table: after the local table, before the main one.
const sourceRulePriority = 0x5c00

// sourceTable is the routing table of a container's device. Indexes are unique
// in a namespace, and no other program counts its tables from here.
func sourceTable(d endpoint.Device) int { return 0x5c000000 + int(d.Index) }

// activateContainer sets the device up and leads what the container sends to the
// gateway of each family: by the main table, or for a source-routed address by
// the device's own.
func activateContainer(h *netlink.Handle, d endpoint.Device) error {
	link := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: int(d.Index)}}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s in the container up: %w", d.Name, err)
	}
	for _, a := range d.Addrs {
		gw := gatewayFor(a)
		if err := h.NeighSet(neighbour(d.Index, gw, d.HostMAC)); err != nil {
			return fmt.Errorf("neighbour %v in the container: %w", gw, err)
		}
		if err := h.RouteReplace(containerRoute(d, a)); err != nil {
			return fmt.Errorf("default route by %v in the container: %w", gw, err)
		}
		if !slices.Contains(d.SourceRouted, a) {
			continue
		}
		if err := h.RuleAdd(sourceRule(d, a)); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("rule from %v in the container: %w", a, err)
		}
	}
	return nil
}

// containerRoute is the default route by which packets from the address leave.
func containerRoute(d endpoint.Device, a netip.Addr) *netlink.Route {
	r := &netlink.Route{
		LinkIndex: int(d.Index), Dst: ipNet(netip.PrefixFrom(unspecified(a), 0)), Gw: gatewayFor(a).AsSlice(), Flags: unix.RTNH_F_ONLINK,
	}
	if slices.Contains(d.SourceRouted, a) {
		r.Table, r.Protocol = sourceTable(d), protocol
	}
	return r
}

func sourceRule(d endpoint.Device, a netip.Addr) *netlink.Rule {
	r := netlink.NewRule()
	r.Priority, r.Family, r.Protocol = sourceRulePriority, family(a), protocol
	r.Src, r.Table = ipNet(netip.PrefixFrom(a, a.BitLen())), sourceTable(d)
	return r
}

// yieldDefaults makes those addresses source-routed whose family has a default
// route by another interface, made by this plugin or another.
func yieldDefaults(h *netlink.Handle, d endpoint.Device) (endpoint.Device, error) {
	d.SourceRouted = slices.Clone(d.SourceRouted)
	for _, a := range d.Addrs {
		if slices.Contains(d.SourceRouted, a) {
			continue
		}
		routes, err := whole(func() ([]netlink.Route, error) {
			return h.RouteListFiltered(family(a), &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
		})
		if err != nil {
			return d, fmt.Errorf("list routes of the container: %w", err)
		}
		if slices.ContainsFunc(routes, func(r netlink.Route) bool {
			return isDefault(r) && r.Type == unix.RTN_UNICAST && r.LinkIndex != int(d.Index)
		}) {
			d.SourceRouted = append(d.SourceRouted, a)
		}
	}
	slices.SortFunc(d.SourceRouted, netip.Addr.Compare)
	return d, nil
}

// sourceRules lists the rules of ours in a container.
func sourceRules(h *netlink.Handle) ([]netlink.Rule, error) {
	var ours []netlink.Rule
	for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
		rules, err := whole(func() ([]netlink.Rule, error) { return h.RuleList(f) })
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list rules of the container: %w", err)
		}
		for _, r := range rules {
			if r.Protocol == protocol && r.Priority == sourceRulePriority && r.Src != nil {
				r.Family = f
				ours = append(ours, r)
			}
		}
	}
	return ours, nil
}

// removeStaleRules removes rules of ours whose address no interface of the
// container has, or which lead it to another table than that of the device: an
// endpoint whose deletion was killed has left them.
func removeStaleRules(h *netlink.Handle, d endpoint.Device) error {
	rules, err := sourceRules(h)
	if err != nil || len(rules) == 0 {
		return err
	}
	addrs, err := whole(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("list addresses of the container: %w", err)
	}
	for _, r := range rules {
		src, _ := netip.AddrFromSlice(r.Src.IP)
		src = src.Unmap()
		own := slices.Contains(d.SourceRouted, src) && r.Table == sourceTable(d)
		used := !slices.Contains(d.Addrs, src) && slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.Equal(r.Src.IP) })
		if own || used {
			continue
		}
		if err := h.RuleDel(&r); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("remove the rule from %v in the container: %w", src, err)
		}
	}
	return nil
}

// Deactivate implements endpoint.Links.
func (n *Netdev) Deactivate(ns endpoint.Namespace, d endpoint.Device) error {
	return ns.(*container).enter(func(h *netlink.Handle) error {
		rules, err := sourceRules(h)
		if err != nil {
			return err
		}
		for _, r := range rules {
			src, _ := netip.AddrFromSlice(r.Src.IP)
			if !slices.Contains(d.Addrs, src.Unmap()) {
				continue
			}
			if err := h.RuleDel(&r); err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("remove the rule from %v in the container: %w", src, err)
			}
		}
		return nil
	})
}

// checkContainerRoutes compares the default routes, and the rules that lead to
// them, with what activateContainer makes.
func checkContainerRoutes(ds *differences, h *netlink.Handle, d endpoint.Device) error {
	rules, err := sourceRules(h)
	if err != nil {
		return err
	}
	for _, a := range d.Addrs {
		want := containerRoute(d, a)
		table := want.Table
		table = cmp.Or(table, unix.RT_TABLE_MAIN)
		routes, err := whole(func() ([]netlink.Route, error) {
			return h.RouteListFiltered(family(a), &netlink.Route{LinkIndex: int(d.Index), Table: table}, netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE)
		})
		if err != nil {
			return fmt.Errorf("list routes of %s: %w", d.Name, err)
		}
		key := want.Dst.String()
		if want.Table != 0 {
			key += " in table " + strconv.Itoa(want.Table)
		}
		if !slices.ContainsFunc(routes, func(r netlink.Route) bool { return isDefault(r) && r.Gw.Equal(want.Gw) }) {
			ds.add("container route", key, "by "+want.Gw.String(), "")
		}
		wanted := slices.Contains(d.SourceRouted, a)
		have := ""
		for _, r := range rules {
			if src, _ := netip.AddrFromSlice(r.Src.IP); src.Unmap() == a {
				have = "table " + strconv.Itoa(r.Table)
			}
		}
		switch rule := "table " + strconv.Itoa(sourceTable(d)); {
		case wanted && have != rule:
			ds.add("container rule", "from "+a.String(), rule, have)
		case !wanted && have != "":
			ds.add("container rule", "from "+a.String(), "", have)
		}
	}
	return nil
}

// RepairContainer implements endpoint.Links.
func (n *Netdev) RepairContainer(ns endpoint.Namespace, d endpoint.Device) error {
	return ns.(*container).enter(func(h *netlink.Handle) error {
		link, err := h.LinkByName(d.Name)
		if err != nil {
			return fmt.Errorf("find %s in the container: %w", d.Name, err)
		}
		if link.Attrs().Index != int(d.Index) {
			return fmt.Errorf("%s in the container has index %d, and its own had %d", d.Name, link.Attrs().Index, d.Index)
		}
		if err := h.LinkSetHardwareAddr(link, d.MAC[:]); err != nil {
			return fmt.Errorf("hardware address of %s in the container: %w", d.Name, err)
		}
		if err := h.LinkSetMTU(link, int(d.MTU)); err != nil {
			return fmt.Errorf("mtu of %s in the container: %w", d.Name, err)
		}
		if err := n.configureContainer(h, d); err != nil {
			return err
		}
		if err := removeStaleRules(h, d); err != nil {
			return err
		}
		return activateContainer(h, d)
	})
}

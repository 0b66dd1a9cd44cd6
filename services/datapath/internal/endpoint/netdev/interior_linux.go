// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

// sourceRulePriority is the priority of the rules that select the routing table of source-routed
// addresses: after the local table, before the main one.
const sourceRulePriority = 0x5c00

// sourceTable returns the number of the routing table of a container's device. Interface indexes are unique in a
// namespace, and no other program numbers its tables from here.
func sourceTable(d endpoint.Device) int { return 0x5c000000 + int(d.Index) }

// yieldDefaults adds the addresses of a family to d.SourceRouted if another interface already has a default route of
// that family. It does not matter which plugin created the route.
func yieldDefaults(conn *rtnl.Conn, d endpoint.Device) (endpoint.Device, error) {
	taken, err := otherDefaults(conn, d.Index)
	if err != nil {
		return d, fmt.Errorf("list routes of the container: %w", err)
	}
	d.SourceRouted = slices.Clone(d.SourceRouted)
	for _, a := range d.Addrs {
		if taken[family(a)] && !slices.Contains(d.SourceRouted, a) {
			d.SourceRouted = append(d.SourceRouted, a)
		}
	}
	slices.SortFunc(d.SourceRouted, netip.Addr.Compare)
	return d, nil
}

// activate sets the device up and adds the default route to the gateway of each family: in the main
// table, or for a source-routed address in the device's own table.
func (c *container) activate(conn *rtnl.Conn, d endpoint.Device) error {
	var b rtnl.Batch
	setUp(&b, d.Index, d.Name)
	for _, a := range d.Addrs {
		setNeighbour(&b, d.Index, gatewayFor(a), d.HostMAC)
		setRoute(&b, containerRoute(d, a))
	}
	if err := conn.Do(&b); err != nil {
		return fmt.Errorf("%s in the container: %w", d.Name, err)
	}
	if len(d.SourceRouted) == 0 {
		return nil
	}
	h, err := c.handle()
	if err != nil {
		return err
	}
	for _, a := range d.SourceRouted {
		if err := h.RuleAdd(sourceRule(d, a)); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("rule from %v in the container: %w", a, err)
		}
	}
	return nil
}

// containerRoute returns the default route for packets from the address.
func containerRoute(d endpoint.Device, a netip.Addr) route {
	r := route{
		dst: netip.PrefixFrom(unspecified(a), 0), ifindex: d.Index, gateway: gatewayFor(a),
		table: unix.RT_TABLE_MAIN, protocol: unix.RTPROT_BOOT,
	}
	if slices.Contains(d.SourceRouted, a) {
		r.table, r.protocol = uint32(sourceTable(d)), Protocol //nolint:gosec // it is positive
	}
	return r
}

func sourceRule(d endpoint.Device, a netip.Addr) *netlink.Rule {
	r := netlink.NewRule()
	r.Priority, r.Family, r.Protocol = sourceRulePriority, family(a), Protocol
	r.Src, r.Table = ipNet(netip.PrefixFrom(a, a.BitLen())), sourceTable(d)
	return r
}

// otherDefaults returns the families that have a default route by an interface other than ifindex.
func otherDefaults(conn *rtnl.Conn, ifindex uint32) (map[int]bool, error) {
	return whole(func() (map[int]bool, error) {
		var b rtnl.Batch
		b.Add(unix.RTM_GETROUTE, 0, make([]byte, unix.SizeofRtMsg))
		taken := map[int]bool{}
		err := conn.Dump(&b, func(m []byte) {
			if len(m) < unix.SizeofRtMsg || m[1] != 0 || m[7] != unix.RTN_UNICAST {
				return // a route to a prefix, or not a unicast route
			}
			table, oif := uint32(m[4]), uint32(0)
			rtnl.Attrs(m, unix.SizeofRtMsg, func(kind uint16, v []byte) {
				switch kind {
				case unix.RTA_TABLE:
					table = rtnl.Number(v)
				case unix.RTA_OIF:
					oif = rtnl.Number(v)
				}
			})
			if table == unix.RT_TABLE_MAIN && oif != ifindex {
				taken[int(m[0])] = true
			}
		})
		return taken, err
	})
}

// hasSourceRules reports whether a container has rules of Sluice, which is rare.
func hasSourceRules(conn *rtnl.Conn) (bool, error) {
	return whole(func() (ours bool, err error) {
		var b rtnl.Batch
		b.Add(unix.RTM_GETRULE, 0, make([]byte, unix.SizeofRtMsg))
		err = conn.Dump(&b, func(m []byte) {
			rtnl.Attrs(m, unix.SizeofRtMsg, func(kind uint16, v []byte) {
				ours = ours || kind == nl.FRA_PRIORITY && rtnl.Number(v) == sourceRulePriority
			})
		})
		return ours, err
	})
}

// sourceRules lists Sluice's rules in a container.
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
			if r.Protocol == Protocol && r.Priority == sourceRulePriority && r.Src != nil {
				r.Family = f
				ours = append(ours, r)
			}
		}
	}
	return ours, nil
}

// removeStaleRules removes rules of Sluice whose address no interface of the container has, or which select another
// table than the device's. They remain if a process is killed while it deletes an endpoint.
func (c *container) removeStaleRules(conn *rtnl.Conn, d endpoint.Device) error {
	if some, err := hasSourceRules(conn); err != nil || !some {
		return err
	}
	h, err := c.handle()
	if err != nil {
		return err
	}
	rules, err := sourceRules(h)
	if err != nil {
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
	h, err := ns.(*container).handle()
	if err != nil {
		return err
	}
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
}

// checkContainerRoutes compares the default routes, and the rules that select them, with what
// activate creates.
func checkContainerRoutes(ds *differences, h *netlink.Handle, d endpoint.Device) error {
	rules, err := sourceRules(h)
	if err != nil {
		return err
	}
	for _, a := range d.Addrs {
		want := containerRoute(d, a)
		table := int(want.table)
		routes, err := whole(func() ([]netlink.Route, error) {
			return h.RouteListFiltered(family(a), &netlink.Route{LinkIndex: int(d.Index), Table: table}, netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE)
		})
		if err != nil {
			return fmt.Errorf("list routes of %s: %w", d.Name, err)
		}
		key := want.dst.String()
		if table != unix.RT_TABLE_MAIN {
			key += " in table " + strconv.Itoa(table)
		}
		if !slices.ContainsFunc(routes, func(r netlink.Route) bool { return isDefault(r) && r.Gw.Equal(want.gateway.AsSlice()) }) {
			ds.add("container route", key, "by "+want.gateway.String(), "")
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
	c := ns.(*container)
	h, err := c.handle()
	if err != nil {
		return err
	}
	link, err := h.LinkByName(d.Name)
	if err != nil {
		return fmt.Errorf("find %s in the container: %w", d.Name, err)
	}
	if link.Attrs().Index != int(d.Index) {
		return fmt.Errorf("%s in the container has index %d, but the endpoint's device had %d", d.Name, link.Attrs().Index,
			d.Index)
	}
	if err := h.LinkSetHardwareAddr(link, d.MAC[:]); err != nil {
		return fmt.Errorf("hardware address of %s in the container: %w", d.Name, err)
	}
	if err := h.LinkSetMTU(link, int(d.MTU)); err != nil {
		return fmt.Errorf("mtu of %s in the container: %w", d.Name, err)
	}
	if err := n.configureContainer(c, d); err != nil {
		return err
	}
	if err := c.removeStaleRules(c.conn, d); err != nil {
		return err
	}
	return c.activate(c.conn, d)
}

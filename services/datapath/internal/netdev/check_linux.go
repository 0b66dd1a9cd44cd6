// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

type differences []endpoint.Difference

func (ds *differences) add(subject, key, want, have string) {
	*ds = append(*ds, endpoint.Difference{Subject: subject, Key: key, Want: want, Have: have})
}

func (n *Netdev) checkFilters(link netlink.Link) ([]endpoint.Difference, error) {
	var ds differences
	for _, p := range n.o.Programs {
		want := fmt.Sprintf("%s, program %d", p.Name, p.ID)
		filters, err := whole(func() ([]netlink.Filter, error) { return n.looks.FilterList(link, parents[p.Hook]) })
		if err != nil {
			return nil, fmt.Errorf("list filters of %s: %w", link.Attrs().Name, err)
		}
		key := link.Attrs().Name + " " + string(p.Hook)
		if len(filters) == 0 {
			ds.add(endpoint.SubjectFilter, key, want, "")
			continue
		}
		// only the first one counts: whatever stands before ours could let
		// packets pass
		first, ok := filters[0].(*netlink.BpfFilter)
		a := filters[0].Attrs()
		switch {
		case !ok:
			ds.add(endpoint.SubjectFilter, key, want, "a filter of kind "+filters[0].Type())
		case a.Priority != filterPriority || a.Handle != filterHandle || !first.DirectAction:
			ds.add(endpoint.SubjectFilter, key, want, fmt.Sprintf("%s, priority %d, handle %d", first.Name, a.Priority, a.Handle))
		case !p.Current(ebpf.ProgramID(first.Id)):
			ds.add(endpoint.SubjectFilter, key, want, fmt.Sprintf("%s, program %d", first.Name, first.Id))
		}
	}
	err := n.checkTCX(&ds, link)
	return ds, err
}

// CheckFilters implements endpoint.Links.
func (n *Netdev) CheckFilters(d endpoint.HostDevice) ([]endpoint.Difference, error) {
	link, err := n.looks.LinkByIndex(int(d.Index))
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", d.Name, err)
	}
	diffs, err := n.checkFilters(link)
	return slices.DeleteFunc(diffs, func(d endpoint.Difference) bool { return d.Subject != endpoint.SubjectFilter }), err
}

// AttachTo implements endpoint.Links.
func (n *Netdev) AttachTo(d endpoint.HostDevice) error {
	dev := endpoint.Device{HostName: d.Name, HostIndex: d.Index}
	if err := n.addClsact(dev); err != nil {
		return err
	}
	return n.Attach(dev)
}

// CheckHost implements endpoint.Links.
func (n *Netdev) CheckHost(d endpoint.Device) ([]endpoint.Difference, error) {
	var ds differences
	link, err := n.looks.LinkByIndex(int(d.HostIndex))
	switch {
	case errors.As(err, new(netlink.LinkNotFoundError)):
		ds.add(endpoint.SubjectDevice, d.HostName, fmt.Sprintf("index %d", d.HostIndex), "")
		return ds, nil
	case err != nil:
		return nil, fmt.Errorf("find %s: %w", d.HostName, err)
	case link.Attrs().Name != d.HostName:
		ds.add(endpoint.SubjectDevice, d.HostName, fmt.Sprintf("index %d", d.HostIndex), "that index is "+link.Attrs().Name)
		return ds, nil
	}
	checkDevice(&ds, link, d.HostName, d.HostMAC, d.MTU)
	if g := link.Attrs().Group; g != n.group {
		ds.add("device group", d.HostName, strconv.Itoa(int(n.group)), strconv.Itoa(int(g)))
	}
	filters, err := n.checkFilters(link)
	if err != nil {
		return nil, err
	}
	ds = append(ds, filters...)
	err = n.o.Home.Do(func() error {
		s, err := checkSysctls(hostSysctls(d))
		ds = append(ds, s...)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := n.checkHostRoutes(&ds, d); err != nil {
		return nil, err
	}
	return ds, checkNeighbours(&ds, n.looks, d.HostIndex, d.HostName, d.Addrs, d.MAC)
}

func checkDevice(ds *differences, link netlink.Link, name string, mac endpoint.MAC, mtu uint16) {
	a := link.Attrs()
	if a.Flags&net.FlagUp == 0 {
		ds.add("device state", name, "up", "down")
	}
	if !bytes.Equal(a.HardwareAddr, mac[:]) {
		ds.add("device address", name, mac.String(), a.HardwareAddr.String())
	}
	if a.MTU != int(mtu) {
		ds.add("device mtu", name, strconv.Itoa(int(mtu)), strconv.Itoa(a.MTU))
	}
}

// checkHostRoutes asks where packets would go, instead of listing the table.
func (n *Netdev) checkHostRoutes(ds *differences, d endpoint.Device) error {
	for _, a := range d.Addrs {
		want := "by " + d.HostName
		src, hasSrc := n.nodeAddr(a)
		if hasSrc {
			want += " from " + src.String()
		}
		routes, err := n.looks.RouteGet(a.AsSlice())
		if err != nil || len(routes) == 0 {
			ds.add("route", a.String(), want, fmt.Sprint(err))
			continue
		}
		got := routes[0]
		gotSrc, _ := netip.AddrFromSlice(got.Src)
		if got.LinkIndex != int(d.HostIndex) || hasSrc && gotSrc.Unmap() != src {
			ds.add("route", a.String(), want, fmt.Sprintf("by device %d from %v", got.LinkIndex, got.Src))
		}
	}
	return nil
}

func checkNeighbours(ds *differences, h *netlink.Handle, ifindex uint32, device string, addrs []netip.Addr, mac endpoint.MAC) error {
	var have []netlink.Neigh
	for _, f := range []uint8{unix.AF_INET, unix.AF_INET6} {
		list, err := whole(func() ([]netlink.Neigh, error) {
			return h.NeighListExecute(netlink.Ndmsg{Family: f, Index: ifindex, State: netlink.NUD_PERMANENT})
		})
		if err != nil {
			return fmt.Errorf("list neighbours of %s: %w", device, err)
		}
		have = append(have, list...)
	}
	for _, a := range addrs {
		ok := slices.ContainsFunc(have, func(e netlink.Neigh) bool {
			ip, _ := netip.AddrFromSlice(e.IP)
			return ip.Unmap() == a && bytes.Equal(e.HardwareAddr, mac[:]) && e.State&netlink.NUD_PERMANENT != 0
		})
		if !ok {
			ds.add("neighbour", a.String()+" on "+device, mac.String(), "")
		}
	}
	return nil
}

// CheckContainer implements endpoint.Links.
func (n *Netdev) CheckContainer(ns endpoint.Namespace, d endpoint.Device) (out []endpoint.Difference, err error) {
	var ds differences
	err = ns.(*container).enter(func(h *netlink.Handle) error { return checkContainer(&ds, h, d) })
	return ds, err
}

func checkContainer(ds *differences, h *netlink.Handle, d endpoint.Device) error {
	link, err := h.LinkByName(d.Name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		ds.add("container device", d.Name, fmt.Sprintf("index %d", d.Index), "")
		return nil
	}
	if err != nil {
		return fmt.Errorf("find %s: %w", d.Name, err)
	}
	if link.Attrs().Index != int(d.Index) {
		ds.add("container device", d.Name, fmt.Sprintf("index %d", d.Index), fmt.Sprintf("index %d", link.Attrs().Index))
		return nil
	}
	checkDevice(ds, link, d.Name, d.MAC, d.MTU)

	addrs, err := whole(func() ([]netlink.Addr, error) { return h.AddrList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", d.Name, err)
	}
	for _, a := range d.Addrs {
		want := ipNet(netip.PrefixFrom(a, a.BitLen())).String()
		if !slices.ContainsFunc(addrs, func(have netlink.Addr) bool { return have.IPNet.String() == want }) {
			ds.add("container address", want, "on "+d.Name, "")
		}
	}
	var gateways []netip.Addr
	for _, a := range d.Addrs {
		gateways = append(gateways, gatewayFor(a))
	}
	if err := checkContainerRoutes(ds, h, d); err != nil {
		return err
	}
	if err := checkNeighbours(ds, h, d.Index, d.Name, gateways, d.HostMAC); err != nil {
		return err
	}
	s, err := checkSysctls(containerSysctls(d))
	*ds = append(*ds, s...)
	return err
}

func isDefault(r netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	ones, _ := r.Dst.Mask.Size()
	return ones == 0
}

func unspecified(like netip.Addr) netip.Addr {
	if like.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// RepairHost implements endpoint.Links. The filters come first: until they are
// back nothing evaluates the container.
func (n *Netdev) RepairHost(d endpoint.Device) error {
	if err := n.addClsact(d); err != nil {
		return err
	}
	link, err := n.looks.LinkByIndex(int(d.HostIndex))
	if err != nil {
		return fmt.Errorf("find %s: %w", d.HostName, err)
	}
	diffs, err := n.checkFilters(link)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(diffs, func(d endpoint.Difference) bool { return d.Subject == endpoint.SubjectFilter }) {
		if err := n.Attach(d); err != nil {
			return err
		}
	}
	if link.Attrs().Group != n.group {
		if err := n.changes.LinkSetGroup(link, int(n.group)); err != nil {
			return fmt.Errorf("device group of %s: %w", d.HostName, err)
		}
	}
	if !bytes.Equal(link.Attrs().HardwareAddr, d.HostMAC[:]) {
		if err := n.changes.LinkSetHardwareAddr(link, d.HostMAC[:]); err != nil {
			return fmt.Errorf("hardware address of %s: %w", d.HostName, err)
		}
	}
	if link.Attrs().MTU != int(d.MTU) {
		if err := n.changes.LinkSetMTU(link, int(d.MTU)); err != nil {
			return fmt.Errorf("mtu of %s: %w", d.HostName, err)
		}
	}
	if err := n.o.Home.Do(func() error { return applySysctls(n.o.ProcSysNet, hostSysctls(d)) }); err != nil {
		return err
	}
	return n.activateHost(d)
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

type differences []endpoint.Difference

func (ds *differences) add(subject, key, want, have string) {
	*ds = append(*ds, endpoint.Difference{Subject: subject, Key: key, Want: want, Have: have})
}

// CheckFilters implements endpoint.Links.
func (n *Netdev) CheckFilters(d endpoint.HostDevice) ([]endpoint.Difference, error) {
	var b rtnl.Batch
	getLink(&b, d.Index, "")
	replies, err := n.checks.Exchange(&b)
	if err == nil {
		err = replies[0].Err
	}
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", d.Name, err)
	}
	ds, err := n.hooks.Check(d, n.programs())
	return slices.DeleteFunc(ds, func(d endpoint.Difference) bool { return d.Subject != endpoint.SubjectFilter }), err
}

// AttachTo implements endpoint.Links.
func (n *Netdev) AttachTo(d endpoint.HostDevice) error { return n.hooks.AttachTo(d, n.programs()) }

// CheckHost implements endpoint.Links.
func (n *Netdev) CheckHost(d endpoint.Device) ([]endpoint.Difference, error) {
	diffs, err := n.CheckHosts([]endpoint.Device{d})
	if err != nil {
		return nil, err
	}
	return diffs[0], nil
}

// together is the number of host ends in one netlink batch. The socket's buffer can hold the replies to several
// batches.
const together = 16

// CheckHosts implements endpoint.Links. It queries devices individually instead of listing all
// devices of the node, which may have thousands.
func (n *Netdev) CheckHosts(devices []endpoint.Device) ([][]endpoint.Difference, error) {
	all := make([][]endpoint.Difference, 0, len(devices))
	for some := range slices.Chunk(devices, together) {
		var b rtnl.Batch
		for _, d := range some {
			getLink(&b, d.HostIndex, "")
			for _, a := range d.Addrs {
				getRoute(&b, a)
				getNeighbour(&b, d.HostIndex, a)
			}
		}
		replies, err := n.checks.Exchange(&b)
		if err != nil {
			return nil, fmt.Errorf("look at devices: %w", err)
		}
		for _, d := range some {
			asked := 1 + 2*len(d.Addrs)
			diffs, err := n.checkHost(d, replies[:asked])
			if err != nil {
				return nil, fmt.Errorf("device %s: %w", d.HostName, err)
			}
			all, replies = append(all, diffs), replies[asked:]
		}
	}
	return all, nil
}

// checkHost reads the replies about one host end, and checks its hooks.
func (n *Netdev) checkHost(d endpoint.Device, replies []rtnl.Reply) ([]endpoint.Difference, error) {
	var ds differences
	found, replies := replies[0], replies[1:]
	l := deviceOf(found.Data)
	switch {
	case errors.Is(found.Err, unix.ENODEV):
		ds.add(endpoint.SubjectDevice, d.HostName, fmt.Sprintf("index %d", d.HostIndex), "")
		return ds, nil
	case found.Err != nil:
		return nil, fmt.Errorf("find it: %w", found.Err)
	case l.name != d.HostName:
		ds.add(endpoint.SubjectDevice, d.HostName, fmt.Sprintf("index %d", d.HostIndex), "the index belongs to "+l.name)
		return ds, nil
	}
	checkDevice(&ds, l, d.HostName, d.HostMAC, d.MTU)
	if l.group != n.group {
		ds.add("device group", d.HostName, strconv.Itoa(int(n.group)), strconv.Itoa(int(l.group)))
	}
	diffs, err := n.hooks.Check(hostEnd(d), n.programs())
	if err != nil {
		return nil, err
	}
	ds = append(ds, diffs...)
	checkQdisc(&ds, l)
	checkSettings(&ds, l, hostSettings, has6(d))
	for i, a := range d.Addrs {
		n.checkRoute(&ds, replies[2*i], d, a)
		if err := checkNeighbour(&ds, replies[2*i+1], d.HostName, a, d.MAC); err != nil {
			return nil, err
		}
	}
	return ds, nil
}

// checkQdisc finds a foreign root qdisc on a host end, such as one from the CNI plugin bandwidth. A
// device that is down has none.
func checkQdisc(ds *differences, l device) {
	switch l.qdisc {
	case "", "noqueue", "noop":
		return
	}
	ds.add(endpoint.SubjectRootQdisc, l.name, "",
		l.qdisc+", which does not limit traffic from other pods, because the programs bypass it "+
			"(tc qdisc del dev "+l.name+" root)")
}

// CheckContainer implements endpoint.Links.
func (n *Netdev) CheckContainer(ns endpoint.Namespace, d endpoint.Device) ([]endpoint.Difference, error) {
	c := ns.(*container)
	conn, err := c.socket()
	if err != nil {
		return nil, err
	}
	h, err := c.handle()
	if err != nil {
		return nil, err
	}
	var b rtnl.Batch
	getLink(&b, 0, d.Name)
	for _, a := range d.Addrs {
		getNeighbour(&b, d.Index, gatewayFor(a))
	}
	replies, err := conn.Exchange(&b)
	if err != nil {
		return nil, fmt.Errorf("look at %s: %w", d.Name, err)
	}
	var ds differences
	l := deviceOf(replies[0].Data)
	switch err := replies[0].Err; {
	case errors.Is(err, unix.ENODEV):
		ds.add("container device", d.Name, fmt.Sprintf("index %d", d.Index), "")
		return ds, nil
	case err != nil:
		return nil, fmt.Errorf("find %s: %w", d.Name, err)
	case l.index != d.Index:
		ds.add("container device", d.Name, fmt.Sprintf("index %d", d.Index), fmt.Sprintf("index %d", l.index))
		return ds, nil
	}
	checkDevice(&ds, l, d.Name, d.MAC, d.MTU)
	if err := checkContainerAddrs(&ds, h, d); err != nil {
		return nil, err
	}
	if err := checkContainerRoutes(&ds, h, d); err != nil {
		return nil, err
	}
	for i, a := range d.Addrs {
		if err := checkNeighbour(&ds, replies[1+i], d.Name, gatewayFor(a), d.HostMAC); err != nil {
			return nil, err
		}
	}
	checkSettings(&ds, l, containerSettings, has6(d))
	return ds, nil
}

func checkContainerAddrs(ds *differences, h *netlink.Handle, d endpoint.Device) error {
	device := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: int(d.Index), Name: d.Name}}
	addrs, err := whole(func() ([]netlink.Addr, error) { return h.AddrList(device, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", d.Name, err)
	}
	for _, a := range d.Addrs {
		want := ipNet(netip.PrefixFrom(a, a.BitLen())).String()
		if !slices.ContainsFunc(addrs, func(have netlink.Addr) bool { return have.IPNet.String() == want }) {
			ds.add("container address", want, "on "+d.Name, "")
		}
	}
	return nil
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

// RepairHost implements endpoint.Links. It attaches the filters first: without them, no policy is
// enforced on the container.
func (n *Netdev) RepairHost(d endpoint.Device) error {
	if err := n.hooks.Prepare(hostEnd(d)); err != nil {
		return err
	}
	var b rtnl.Batch
	getLink(&b, d.HostIndex, "")
	replies, err := n.checks.Exchange(&b)
	if err == nil {
		err = replies[0].Err
	}
	if err != nil {
		return fmt.Errorf("find %s: %w", d.HostName, err)
	}
	l := deviceOf(replies[0].Data)
	diffs, err := n.hooks.Check(hostEnd(d), n.programs())
	if err != nil {
		return err
	}
	if slices.ContainsFunc(diffs, func(d endpoint.Difference) bool { return d.Subject == endpoint.SubjectFilter }) {
		if err := n.Attach(d); err != nil {
			return err
		}
	}
	device := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: int(d.HostIndex)}}
	if l.group != n.group {
		if err := n.changes.LinkSetGroup(device, int(n.group)); err != nil {
			return fmt.Errorf("device group of %s: %w", d.HostName, err)
		}
	}
	if !bytes.Equal(l.addr, d.HostMAC[:]) {
		if err := n.changes.LinkSetHardwareAddr(device, d.HostMAC[:]); err != nil {
			return fmt.Errorf("hardware address of %s: %w", d.HostName, err)
		}
	}
	if l.mtu != uint32(d.MTU) {
		if err := n.changes.LinkSetMTU(device, int(d.MTU)); err != nil {
			return fmt.Errorf("mtu of %s: %w", d.HostName, err)
		}
	}
	if err := n.setHostEnd(d, l); err != nil {
		return err
	}
	return n.activateHost(d)
}

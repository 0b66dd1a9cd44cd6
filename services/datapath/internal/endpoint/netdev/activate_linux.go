// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

// Activate implements endpoint.Links. It sets both ends up first. Kernel workers then complete the setup in the
// background, during the remaining steps; awaitTraffic waits for them.
func (n *Netdev) Activate(ns endpoint.Namespace, d endpoint.Device) (endpoint.Device, error) {
	c := ns.(*container)
	conn, err := c.socket()
	if err != nil {
		return d, err
	}
	if d, err = yieldDefaults(conn, d); err != nil {
		return d, err
	}
	if err := c.removeStaleRules(conn, d); err != nil {
		return d, err
	}
	var outside, inside rtnl.Batch
	setUp(&outside, d.HostIndex, d.HostName)
	setUp(&inside, d.Index, d.Name)
	if err := n.making.Do(&outside); err != nil {
		return d, err
	}
	if err := conn.Do(&inside); err != nil {
		return d, fmt.Errorf("in the container: %w", err)
	}
	if err := n.activateHost(d); err != nil {
		return d, err
	}
	if err := c.activate(conn, d); err != nil {
		return d, err
	}
	return d, n.awaitTraffic(c, d, trafficPatience)
}

// activateHost sets the host end up and adds routes and neighbours for the container's addresses.
func (n *Netdev) activateHost(d endpoint.Device) error {
	var b rtnl.Batch
	setUp(&b, d.HostIndex, d.HostName)
	for _, a := range d.Addrs {
		setNeighbour(&b, d.HostIndex, a, d.MAC)
		setRoute(&b, n.hostRoute(d, a))
	}
	if err := n.making.Do(&b); err != nil {
		return fmt.Errorf("%s: %w", d.HostName, err)
	}
	return nil
}

// trafficPatience is longer than kernel workers are delayed on a machine under load, and shorter than the caller of ADD
// waits.
const trafficPatience = 10 * time.Second

// awaitTraffic waits until the device carries packets in both directions; it checks at least once.
// After patience it returns ErrDeadlineExceeded with what is missing. Two things are done by kernel
// workers some time after the calls return, and packets are lost until then (Linux 6.18): the host
// end has no queue before its operational state is up, and an IPv6 address does not receive before
// the local table has its route.
func (n *Netdev) awaitTraffic(c *container, d endpoint.Device, patience time.Duration) error {
	const least, most = 100 * time.Microsecond, 2 * time.Millisecond
	pause := least
	for end := time.Now().Add(patience); ; time.Sleep(pause) {
		missing, err := n.missingForTraffic(c, d)
		if err != nil || missing == "" {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s: %w", missing, os.ErrDeadlineExceeded)
		}
		pause = min(2*pause, most)
	}
}

// operUp is IF_OPER_UP of linux/if.h.
const operUp = 6

func (n *Netdev) missingForTraffic(c *container, d endpoint.Device) (string, error) {
	var b rtnl.Batch
	getLink(&b, d.HostIndex, "")
	replies, err := n.checks.Exchange(&b)
	if err == nil {
		err = replies[0].Err
	}
	if err != nil {
		return "", fmt.Errorf("find %s: %w", d.HostName, err)
	}
	if state := deviceOf(replies[0].Data).state; state != operUp {
		return fmt.Sprintf("carrier of %s, which is %v", d.HostName, netlink.LinkOperState(state)), nil
	}
	for _, a := range d.Addrs {
		if a.Is4() {
			continue // its route is added with the address
		}
		if local, err := c.isLocal(a); err != nil {
			return "", fmt.Errorf("find the local route of the container: %w", err)
		} else if !local {
			return fmt.Sprintf("local route to %v in the container", a), nil
		}
	}
	return "", nil
}

// isLocal reports whether the container receives packets for an address.
func (c *container) isLocal(a netip.Addr) (bool, error) {
	conn, err := c.socket()
	if err != nil {
		return false, err
	}
	var b rtnl.Batch
	getRoute(&b, a)
	replies, err := conn.Exchange(&b)
	if err != nil {
		return false, err
	}
	if m := replies[0].Data; len(m) >= unix.SizeofRtMsg && m[7] == unix.RTN_LOCAL {
		return true, nil
	}
	// A routing rule of the container may precede the local table, so look into the table itself.
	h, err := c.handle()
	if err != nil {
		return false, err
	}
	to := &netlink.Route{Table: unix.RT_TABLE_LOCAL, Dst: ipNet(netip.PrefixFrom(a, a.BitLen()))}
	routes, err := whole(func() ([]netlink.Route, error) {
		return h.RouteListFiltered(family(a), to, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
	})
	return len(routes) > 0, err
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
)

// intact returns an error if an endpoint or the node differs from the desired state.
func (w *world) intact(p *pod) error {
	diffs, err := w.node.Endpoints.Reconciler.Check(w.t.Context(), p.owner, lifecycle.Expected{})
	if err != nil || len(diffs) > 0 {
		return fmt.Errorf("endpoint: %+v, %w", diffs, err)
	}
	diffs, err = w.node.Node.Host.Check()
	if err != nil || len(diffs) > 0 {
		return fmt.Errorf("node: %+v, %w", diffs, err)
	}
	return nil
}

// repairs returns the number of repairs of all kinds.
func (w *world) repairs() uint64 {
	n := w.node.Endpoints.Report.Counts()
	return n.Repairs + n.DeviceRepairs + n.NodeRepairs
}

func sysctl(path, value string) func() error {
	return func() error { return os.WriteFile("/proc/sys/net/"+path, []byte(value), 0) }
}

// TestKernelChangedHostEndsAndNodeAreRepairedByEvents runs no audit, so that only kernel events can trigger the
// repairs.
func TestKernelChangedHostEndsAndNodeAreRepairedByEvents(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	a := w.pod("a")
	w.addUplink()
	// A start compares everything once. That is done when an event that came later has been handled.
	w.deleteClsact(a)
	servicetest.EventuallyNil(t, "first repair", func() error {
		if w.node.Endpoints.Report.Counts().Repairs == 0 {
			return errors.New("not yet")
		}
		return w.intact(a)
	})
	d := a.ep.Device
	link := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: int(d.HostIndex), Name: d.HostName}}
	hostRoute := func(i int) *netlink.Route {
		r := &netlink.Route{LinkIndex: int(d.HostIndex), Dst: netlink.NewIPNet(a.spec.Addrs[i].AsSlice())}
		if a.spec.Addrs[i].Is4() {
			r.Scope = netlink.SCOPE_LINK
		}
		return r
	}
	neighbour := func(i int) *netlink.Neigh {
		return &netlink.Neigh{LinkIndex: int(d.HostIndex), State: netlink.NUD_PERMANENT, IP: a.spec.Addrs[i].AsSlice(), HardwareAddr: []byte{2, 9, 9, 9, 9, 9}}
	}
	lo, err := func() (l netlink.Link, err error) {
		err = w.home.Do(func() (err error) { l, err = netlink.LinkByName("lo"); return err })
		return l, err
	}()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		change func() error
	}{
		{"host end down", func() error { return netlink.LinkSetDown(link) }},
		{"host end down and up", func() error { return errors.Join(netlink.LinkSetDown(link), netlink.LinkSetUp(link)) }},
		{"hardware address", func() error { return netlink.LinkSetHardwareAddr(link, []byte{2, 1, 1, 1, 1, 1}) }},
		{"mtu", func() error { return netlink.LinkSetMTU(link, 1300) }},
		{"device group", func() error { return netlink.LinkSetGroup(link, 0) }},
		{"IPv4 route removed", func() error { return netlink.RouteDel(hostRoute(0)) }},
		{"IPv6 route removed", func() error { return netlink.RouteDel(hostRoute(1)) }},
		{"IPv4 route replaced", func() error {
			r := hostRoute(0)
			r.LinkIndex = lo.Attrs().Index
			return netlink.RouteReplace(r)
		}},
		{"neighbour removed", func() error { return netlink.NeighDel(neighbour(0)) }},
		{"neighbour replaced", func() error { return netlink.NeighSet(neighbour(1)) }},
		{"IPv4 forwarding of the host end", sysctl("ipv4/conf/"+d.HostName+"/forwarding", "0")},
		{"IPv6 forwarding of the host end", sysctl("ipv6/conf/"+d.HostName+"/forwarding", "0")},
		{"rp_filter of the host end", sysctl("ipv4/conf/"+d.HostName+"/rp_filter", "0")},
		{"proxy_arp of the host end", sysctl("ipv4/conf/"+d.HostName+"/proxy_arp", "1")},
		{"rp_filter of the uplink", sysctl("ipv4/conf/up0/rp_filter", "1")},
		{"IPv4 forwarding", sysctl("ipv4/ip_forward", "0")},
		{"IPv6 forwarding", sysctl("ipv6/conf/all/forwarding", "0")},
		{"IPv4 address of the node", func() error {
			return netlink.AddrDel(lo, &netlink.Addr{IPNet: netlink.NewIPNet(w.node.Ranges.NodeAddrs()[0].AsSlice())})
		}},
		{"IPv6 address of the node", func() error {
			return netlink.AddrDel(lo, &netlink.Addr{IPNet: netlink.NewIPNet(w.node.Ranges.NodeAddrs()[1].AsSlice())})
		}},
		{"lo down", func() error { return netlink.LinkSetDown(lo) }},
		{"unreachable route", func() error {
			dst, err := netlink.ParseIPNet(cidr4.String())
			if err != nil {
				return err
			}
			return netlink.RouteDel(&netlink.Route{Dst: dst, Type: unix.RTN_UNREACHABLE})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := w.repairs()
			if err := w.home.Do(c.change); err != nil {
				t.Fatal(err)
			}
			servicetest.EventuallyNil(t, "repair", func() error {
				if w.repairs() == before {
					return errors.New("no repair")
				}
				return w.intact(a)
			})
			for _, to := range a.spec.Addrs {
				if err := talk(w.home, a.echo(to), patience); err != nil {
					t.Errorf("host to %v: %v", to, err)
				}
			}
		})
	}
	host := &pod{t: t, ns: w.home}
	if err := talk(a.ns, host.echo(w.node.Ranges.NodeAddrs()[0]), patience); err != nil {
		t.Errorf("pod to its host: %v", err)
	}
	if left := w.node.Endpoints.Report.Counts().Unrepaired; len(left) > 0 {
		t.Errorf("unrepaired %q", left)
	}
}

// TestKernelRouteThatCannotBeRepairedIsReported creates a route that overrides the endpoint's route and belongs to
// somebody else. The datapath cannot repair that and must report it.
func TestKernelRouteThatCannotBeRepairedIsReported(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	a := w.pod("a")
	addr := a.spec.Addrs[0]
	err := w.home.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		// The table local has priority over the table with the endpoint's route.
		return netlink.AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(addr.AsSlice())})
	})
	if err != nil {
		t.Fatal(err)
	}
	servicetest.EventuallyNil(t, "report", func() error {
		for _, d := range w.node.Endpoints.Report.Counts().Unrepaired {
			if want := fmt.Sprintf("%s: route %v:", a.owner, addr); len(d) > len(want) && d[:len(want)] == want {
				return nil
			}
		}
		return fmt.Errorf("unrepaired %q", w.node.Endpoints.Report.Counts().Unrepaired)
	})
}

// TestKernelDeletedDeviceIsShownByTheEvent deletes an endpoint's device. The datapath cannot create it again without
// the container, because the new device in the container would have another index and no addresses and routes.
func TestKernelDeletedDeviceIsShownByTheEvent(t *testing.T) {
	for name, del := range map[string]func(w *world, p *pod) error{
		"by the pod": func(_ *world, p *pod) error {
			return p.ns.Do(func() error { return netlink.LinkDel(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}}) })
		},
		"on the node": func(w *world, p *pod) error {
			return w.home.Do(func() error {
				return netlink.LinkDel(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: p.ep.Device.HostName}})
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.start(true)
			p, other := w.pod("a"), w.pod("other")
			if err := del(w, p); err != nil {
				t.Fatal(err)
			}
			shown := func() error {
				e, err := w.node.Endpoints.Report.Get(p.owner)
				n := w.node.Endpoints.Report.Counts()
				text := strings.Join(n.Unrepaired, "\n")
				if err != nil || e.State != endpoint.Damaged || n.ByState[endpoint.Damaged] != 1 ||
					!strings.Contains(text, p.owner.String()) || !strings.Contains(text, "delete and create the container again") {
					return errors.Join(err, fmt.Errorf("state %v, %q", e.State, text))
				}
				return nil
			}
			servicetest.EventuallyNil(t, "the state of the endpoint is shown", shown)
			w.stop()
			w.start(true)
			if err := shown(); err != nil {
				t.Errorf("after a restart: %v", err)
			}
			var err error
			if p.ep, err = w.node.Endpoints.Lifecycle.Create(t.Context(), p.spec, false); err != nil {
				t.Fatal(err)
			}
			e, err := w.node.Endpoints.Report.Get(p.owner)
			if left := w.node.Endpoints.Report.Counts().Unrepaired; err != nil || e.State != endpoint.Ready || len(left) != 0 {
				t.Errorf("after another ADD: %v, %v, %q", e.State, err, left)
			}
			if err := talk(other.ns, p.echo(p.ep.Spec.Addrs[1]), patience); err != nil {
				t.Errorf("after another ADD: %v", err)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/node/underlay"
)

// routed is a node that exchanges packets with another node.
type routed struct {
	*world
	name  string
	addrs []netip.Addr // on the link between the nodes
	hub   others
}

// newPair creates two nodes on one link that know each other.
func newPair(t *testing.T, routing RoutingConfig, families ...string) (a, b *routed) {
	t.Helper()
	nodes := make([]*routed, 2)
	for i := range nodes {
		n := &routed{world: newWorld(t), name: fmt.Sprintf("node%d", i+1)}
		n.routing, n.underlay.Devices = routing, []string{"uplink0"}
		n.pods4 = netip.MustParsePrefix(fmt.Sprintf("10.9%d.0.0/24", i+1))
		n.pods6 = netip.MustParsePrefix(fmt.Sprintf("fd00:9%d::/64", i+1))
		nodes[i] = n
	}
	a, b = nodes[0], nodes[1]
	a.ip("link add uplink0 type veth peer name far")
	moveTo(t, a.world, "far", b.home)
	b.ip("link set far name uplink0")
	for i, n := range nodes {
		for _, f := range families {
			addr := map[string]string{"4": "192.0.2.%d/24", "6": "2001:db8::%d/64"}[f]
			p := netip.MustParsePrefix(fmt.Sprintf(addr, i+1))
			n.addrs = append(n.addrs, p.Addr())
			flag := ""
			if p.Addr().Is6() {
				flag = " nodad"
			}
			n.ip("address add " + p.String() + " dev uplink0" + flag)
		}
		n.ip("link set uplink0 up")
	}
	for _, n := range nodes {
		n.know(true, others{watch.NewHub[cluster.Key](watch.Options[cluster.Item]{Loading: true})})
	}
	a.say(b)
	b.say(a)
	for _, n := range nodes {
		n.start(true)
	}
	return a, b
}

func moveTo(t *testing.T, w *world, device string, to *netns.Namespace) {
	t.Helper()
	fd, err := unix.FcntlInt(uintptr(to.Fd()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "netns")
	defer file.Close()
	err = w.home.Do(func() error {
		cmd := exec.CommandContext(t.Context(), "ip", "link", "set", device, "netns", "/proc/self/fd/3")
		cmd.ExtraFiles = []*os.File{file}
		return cmd.Run()
	})
	if err != nil {
		t.Fatal(err)
	}
}

// know replaces the cluster watch of a node by a source of other nodes.
func (n *routed) know(all bool, hub others) {
	n.hub, n.cluster = hub, hub
	if all {
		hub.Loaded()
	}
}

// say announces another node to n.
func (n *routed) say(of *routed) {
	n.hub.Upsert(cluster.Key{Node: of.name}, cluster.Item{Node: &cluster.Node{
		Incarnation: of.name, Addresses: of.addrs, Ranges: []netip.Prefix{of.pods4, of.pods6},
		Mode: cluster.Mode(of.routing.Mode), TunnelPort: of.routing.port(),
	}})
}

// ways waits until the next hops to the only other node satisfy ok.
func (n *routed) ways(what string, ok func(ways [2]nodemap.NextHop) bool) {
	n.t.Helper()
	servicetest.EventuallyNil(n.t, what, func() error {
		nodes, err := n.node.Kernel.Nodes.Nodes()
		if err != nil {
			return err
		}
		for _, e := range nodes {
			if ok(e.NextHops) {
				return nil
			}
		}
		return fmt.Errorf("nodes %+v, warnings %v", nodes, n.node.Node.Host.Warnings())
	})
}

// reaches fails unless the pod reaches another pod with its own address as the source, by TCP, in both families.
func (p *pod) reaches(to *pod) {
	p.t.Helper()
	for i, a := range to.spec.Addrs {
		there := to.mirror(a)
		servicetest.EventuallyNil(p.t, "a connection to "+there.String(), func() error {
			c, err := dialIn(p.ns, "tcp", there, patience)
			if err != nil {
				return err
			}
			defer c.Close()
			got, err := ask(c)
			if err == nil && got.Addr() != p.spec.Addrs[i] {
				err = fmt.Errorf("seen as %v, want %v", got, p.spec.Addrs[i])
			}
			return err
		})
	}
}

// modes are the routing modes and the families of the network between the nodes.
var modes = map[string]struct {
	RoutingConfig
	families []string
	flags    [2]nodemap.Flags
}{
	"overlay on IPv4": {
		RoutingConfig{Mode: "overlay"}, []string{"4", "6"}, [2]nodemap.Flags{nodemap.Overlay, nodemap.Overlay},
	},
	"overlay without the device": {
		RoutingConfig{Mode: "overlay", Shortcut: shortcutAuto},
		[]string{"4", "6"},
		[2]nodemap.Flags{nodemap.Overlay, nodemap.Overlay},
	},
	"overlay on IPv6": {
		RoutingConfig{Mode: "overlay", TunnelPort: 8472},
		[]string{"6"},
		[2]nodemap.Flags{nodemap.Overlay | nodemap.Underlay6, nodemap.Overlay | nodemap.Underlay6},
	},
	"native": {RoutingConfig{Mode: "native"}, []string{"4", "6"}, [2]nodemap.Flags{nodemap.Hop, nodemap.Hop}},
}

// TestKernelPodsOfTwoNodesReachEachOther checks that pods of two nodes reach each other in each routing mode, also
// after a node restarts while its list of other nodes is not complete. The audit must find nothing.
func TestKernelPodsOfTwoNodesReachEachOther(t *testing.T) {
	for name, mode := range modes {
		t.Run(name, func(t *testing.T) {
			a, b := newPair(t, mode.RoutingConfig, mode.families...)
			pa, pb := a.pod("a"), b.pod("b")
			for _, n := range []*routed{a, b} {
				n.ways("a way", func(ways [2]nodemap.NextHop) bool {
					return ways[0].Flags == mode.flags[0] && ways[1].Flags == mode.flags[1]
				})
			}
			pa.reaches(pb)
			pb.reaches(pa)
			if w := a.node.Node.Host.Warnings(); len(w) > 0 {
				t.Errorf("warnings %v, want none", w)
			}
			c := a.dial(pa.ns, "tcp", pb.mirror(pb.spec.Addrs[0]))
			if _, err := ask(c); err != nil {
				t.Fatal(err)
			}

			a.stop()
			if _, err := ask(c); err != nil {
				t.Errorf("while the process is down: %v", err)
			}
			a.know(false, others{watch.NewHub[cluster.Key](watch.Options[cluster.Item]{Loading: true})})
			a.start(true)
			if _, err := ask(c); err != nil {
				t.Errorf("after a restart: %v", err)
			}
			pa.reaches(pb)
			if found := a.findings(false, ""); len(found) > 0 {
				t.Errorf("findings %v, want none", found)
			}
		})
	}
}

// TestKernelHostReachesPodsOfAnotherNode through the routes of the host stack.
func TestKernelHostReachesPodsOfAnotherNode(t *testing.T) {
	for name, mode := range modes {
		t.Run(name, func(t *testing.T) {
			a, b := newPair(t, mode.RoutingConfig, mode.families...)
			key := netip.PrefixFrom(b.addrs[0], b.addrs[0].BitLen())
			a.hub.Upsert(cluster.Key{Prefix: key}, cluster.Item{On: b.name, Identity: identity.RemoteNode})
			for _, x := range [][2]*routed{{a, b}, {b, a}} {
				for _, addr := range append(slices.Clone(x[1].addrs),
					x[1].pods4.Addr().Next(), x[1].pods6.Addr().Next()) {
					x[0].hub.Upsert(cluster.Key{Prefix: netip.PrefixFrom(addr, addr.BitLen())},
						cluster.Item{On: x[1].name, Identity: identity.RemoteNode})
				}
			}
			pb := b.pod("b")
			for _, addr := range pb.spec.Addrs {
				there := pb.mirror(addr)
				servicetest.EventuallyNil(t, "a connection to "+there.String(), func() error {
					c, err := dialIn(a.home, "tcp", there, patience)
					if err != nil {
						return err
					}
					defer c.Close()
					_, err = ask(c)
					return err
				})
			}
		})
	}
}

// TestKernelWayFollowsTheUplinksMTU lowers and raises the MTU of the uplink and of a route.
func TestKernelWayFollowsTheUplinksMTU(t *testing.T) {
	for name, mode := range modes {
		t.Run(name, func(t *testing.T) {
			a, b := newPair(t, mode.RoutingConfig, mode.families...)
			less := map[string]uint16{
				"overlay on IPv4": 50, "overlay without the device": 50, "overlay on IPv6": 70, "native": 0,
			}[name]
			want := func(what string, mtu uint16) {
				t.Helper()
				a.ways(what, func(ways [2]nodemap.NextHop) bool { return ways[0].MTU == mtu-less })
			}
			want("the uplink's", 1500)
			a.ip("link set uplink0 mtu 1400")
			want("a lowered uplink's", 1400)
			a.ip("link set uplink0 mtu 1500")
			want("a raised uplink's", 1500)
			a.ip("route add " + b.addrs[0].String() + " dev uplink0 mtu 1350")
			want("a route's", 1350)
			// The map of the programs is written before the routes of the host stack.
			servicetest.EventuallyNil(t, "the MTU of the host's route", func() (err error) {
				var out []byte
				doErr := a.home.Do(func() error {
					out, err = exec.CommandContext(t.Context(), "ip", "route", "get", b.pods4.Addr().Next().String()).Output()
					return err
				})
				if doErr == nil && !strings.Contains(string(out), fmt.Sprint("mtu ", 1350-less)) {
					doErr = fmt.Errorf("route %s, want mtu %d", out, 1350-less)
				}
				return doErr
			})
			a.ip("route del " + b.addrs[0].String())
			want("without the route", 1500)
		})
	}
}

// TestKernelTunnelDeviceThatIsDeletedComesBack deletes the tunnel device. It must be created again and carry packets.
func TestKernelTunnelDeviceThatIsDeletedComesBack(t *testing.T) {
	a, b := newPair(t, RoutingConfig{Mode: "overlay"}, "4", "6")
	pa, pb := a.pod("a"), b.pod("b")
	pa.reaches(pb)
	a.ip("link del " + underlay.TunnelName("test"))
	pa.reaches(pb)
	pb.reaches(pa)
	if found := a.findings(false, ""); len(found) > 0 {
		t.Errorf("findings %v, want none", found)
	}
}

// TestKernelNodeOfAnotherModeIsNamed expects a warning about a node with another routing mode, and no packets to it.
func TestKernelNodeOfAnotherModeIsNamed(t *testing.T) {
	a, b := newPair(t, RoutingConfig{Mode: "overlay"}, "4", "6")
	a.ways("a way", func(ways [2]nodemap.NextHop) bool { return ways[0].Flags != 0 })
	b.routing = RoutingConfig{Mode: "native"}
	a.say(b)
	a.ways("no way", func(ways [2]nodemap.NextHop) bool { return ways == [2]nodemap.NextHop{} })
	want := "node node2 is not reachable: mode native, this node has overlay"
	if w := a.node.Node.Host.Warnings(); !slices.Contains(w, want) {
		t.Errorf("warnings %q, want %q", w, want)
	}
}

// hasPrograms reports whether a device has programs at ingress: filters of Sluice or, where the kernel supports it, any
// tcx program.
func (n *routed) hasPrograms(t *testing.T, device string) (has bool) {
	t.Helper()
	if err := n.home.Do(func() error {
		out, err := exec.CommandContext(t.Context(), "tc", "filter", "show", "dev", device, "ingress").CombinedOutput()
		if err != nil {
			return fmt.Errorf("tc: %w: %s", err, out)
		}
		l, err := net.InterfaceByName(device)
		if err != nil {
			return err
		}
		r, err := link.QueryPrograms(link.QueryOptions{Target: l.Index, Attach: ebpf.AttachTCXIngress})
		if errors.Is(err, unix.EINVAL) || errors.Is(err, ebpf.ErrNotSupported) {
			r, err = &link.QueryResult{}, nil
		}
		has = strings.Contains(string(out), "sluice") || err == nil && len(r.Programs) > 0
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return has
}

// TestKernelAnotherModeLeavesNothingOfTheOneBefore changes the routing mode, which must remove everything of the
// previous mode; uninstalling must remove everything.
func TestKernelAnotherModeLeavesNothingOfTheOneBefore(t *testing.T) {
	for _, shortcut := range []string{"off", shortcutAuto} {
		t.Run("shortcut "+shortcut, func(t *testing.T) { leavesNothing(t, shortcut) })
	}
}

func leavesNothing(t *testing.T, shortcut string) {
	a, b := newPair(t, RoutingConfig{Mode: "overlay", Shortcut: shortcut}, "4", "6")
	traces := func() (list []string) {
		t.Helper()
		for what, args := range map[string]string{
			"tunnel": "-br link", "route": "route show proto 93", "route6": "-6 route show proto 93",
			"neighbour": "-4 neigh show proto 93", "neighbour6": "-6 neigh show proto 93",
		} {
			var out []byte
			if err := a.home.Do(func() (err error) {
				out, err = exec.CommandContext(t.Context(), "ip", strings.Fields(args)...).CombinedOutput()
				return err
			}); err != nil {
				t.Fatalf("%s: %v: %s", args, err, out)
			}
			if what != "tunnel" && len(out) > 0 || strings.Contains(string(out), underlay.TunnelName("test")) {
				list = append(list, what)
			}
		}
		// on kernels with tcx, the overlay without the device has one, too
		if a.hasPrograms(t, "uplink0") && (a.routing.Mode != "overlay" || shortcut == "off") {
			list = append(list, "programs")
		}
		slices.Sort(list)
		return list
	}
	want := func(what string, traces func() []string, list ...string) {
		t.Helper()
		servicetest.EventuallyNil(t, what, func() error {
			if got := traces(); !slices.Equal(got, list) {
				return fmt.Errorf("%v, want %v", got, list)
			}
			return nil
		})
	}
	want("overlay", traces, "neighbour", "route", "route6", "tunnel")
	for _, mode := range []string{"native", "none", "overlay", "none", "native"} {
		a.stop()
		a.routing.Mode, b.routing.Mode = mode, mode
		a.know(true, others{watch.NewHub[cluster.Key](watch.Options[cluster.Item]{Loading: true})})
		a.say(b)
		a.start(true)
		switch mode {
		case "native":
			want(mode, traces, "neighbour", "neighbour6", "programs", "route", "route6")
		case "overlay":
			want(mode, traces, "neighbour", "route", "route6", "tunnel")
		default:
			want(mode, traces)
			if nodes, err := a.node.Kernel.Nodes.Nodes(); err != nil || len(nodes) > 0 {
				t.Errorf("nodes %v, %v; want none", nodes, err)
			}
		}
	}
	a.stop()
	if err := a.home.Do(func() error { return uninstallNode("test", a.config().PodCIDRs) }); err != nil {
		t.Fatal(err)
	}
	want("uninstalled", traces)
}

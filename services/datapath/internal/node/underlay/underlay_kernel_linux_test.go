// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package underlay

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
	"github.com/sluice-net/sluice/services/datapath/internal/node/routing"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// node is a network namespace with an uplink.
type node struct {
	*Underlay
	ns *netns.Namespace
}

// newNode creates a node whose uplink "uplink0" is connected to another namespace with the addresses 192.0.2.2,
// 192.0.2.3, 2001:db8::2 and 2001:db8::3.
func newNode(t *testing.T) node {
	t.Helper()
	n := node{ns: netnstest.New(t)}
	n.ip(t, "link add uplink0 type veth peer name far", "link set uplink0 up", "link set far up",
		"addr add 192.0.2.1/24 dev uplink0", "addr add 2001:db8::1/64 dev uplink0 nodad")
	other := netnstest.New(t)
	file := os.NewFile(uintptr(dup(t, other)), "netns")
	defer file.Close()
	n.run(t, file, "ip", "link", "set", "far", "netns", "/proc/self/fd/3")
	o := node{ns: other}
	o.ip(t, "link set far up", "addr add 192.0.2.2/24 dev far", "addr add 192.0.2.3/24 dev far",
		"addr add 2001:db8::2/64 dev far nodad", "addr add 2001:db8::3/64 dev far nodad")
	n.Underlay = n.open(t, Options{})
	return n
}

func (n node) open(t *testing.T, o Options) *Underlay {
	t.Helper()
	o.Home, o.Instance, o.SetGlobal = n.ns, "test", true
	u, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(u.Close)
	return u
}

// ip runs commands of iproute2 in the node.
func (n node) ip(t *testing.T, commands ...string) string {
	t.Helper()
	out := ""
	for _, c := range commands {
		out += n.run(t, nil, "ip", strings.Fields(c)...)
	}
	return out
}

func (n node) run(t *testing.T, file *os.File, name string, args ...string) (text string) {
	t.Helper()
	err := n.ns.Do(func() error {
		cmd := exec.Command(name, args...)
		if file != nil {
			cmd.ExtraFiles = []*os.File{file}
		}
		out, err := cmd.CombinedOutput()
		text = string(out)
		return err
	})
	if err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, text)
	}
	return text
}

var tunnel = routing.Tunnel{Port: 4789, MTU: 1450}

func (n node) ensure(t *testing.T) endpoint.HostDevice {
	t.Helper()
	d, err := n.EnsureTunnel(tunnel)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// clean fails unless the tunnel has no differences.
func (n node) clean(t *testing.T) {
	t.Helper()
	if _, diffs, err := n.CheckTunnel(tunnel); err != nil || len(diffs) > 0 {
		t.Errorf("after a repair: %v, %v", diffs, err)
	}
}

func TestKernelTunnelDeviceTakesPacketsOfBothFamiliesAndLearnsNothing(t *testing.T) {
	n := newNode(t)
	d := n.ensure(t)
	n.clean(t)
	text := n.ip(t, "-d link show "+d.Name)
	for _, want := range []string{
		"vxlan external", "dstport 4789", "nolearning", "mtu 1450", "NOARP", "UP", "addrgenmode none",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %s", want, text)
		}
	}
	if addrs := n.ip(t, "addr show dev "+d.Name); strings.Contains(addrs, "inet") {
		t.Errorf("it has an address: %s", addrs)
	}
	sockets := n.run(t, nil, "cat", "/proc/net/udp", "/proc/net/udp6")
	if strings.Count(sockets, ":12B5 ") != 2 {
		t.Errorf("sockets with port 4789, want one of each family:\n%s", sockets)
	}
}

func TestKernelTunnelDeviceIsAdoptedWithItsAddress(t *testing.T) {
	n := newNode(t)
	first := n.ensure(t)
	mac := n.ip(t, "-br link show "+first.Name)
	n.Underlay = n.open(t, Options{})
	if second := n.ensure(t); second != first {
		t.Errorf("%+v, want the same device as before, %+v", second, first)
	}
	if now := n.ip(t, "-br link show "+first.Name); now != mac {
		t.Errorf("%q, want as before: %q", now, mac)
	}
}

// TestKernelTunnelDeviceIsRepairedInPlace tests changes that are repaired without replacing the device: it keeps its
// index.
func TestKernelTunnelDeviceIsRepairedInPlace(t *testing.T) {
	n := newNode(t)
	d := n.ensure(t)
	for _, damage := range []struct{ args, subject string }{
		{"link set " + d.Name + " down", "device state"},
		{"link set " + d.Name + " mtu 1300", "device mtu"},
		{"link set " + d.Name + " arp on", "device flags"},
		{"link set " + d.Name + " addrgenmode eui64", "device addrgenmode"},
		{"link set " + d.Name + " type vxlan learning", "device learning"},
	} {
		n.ip(t, damage.args)
		n.differs(t, damage.subject)
		if again := n.ensure(t); again != d {
			t.Errorf("%s: %+v, want %+v", damage.args, again, d)
		}
		n.clean(t)
	}
	n.run(t, nil, "sh", "-c",
		"cd /proc/sys/net; echo 1 >ipv4/conf/"+d.Name+"/rp_filter; echo 0 >ipv6/conf/"+d.Name+"/forwarding")
	n.differs(t, "sysctl")
	n.ensure(t)
	n.clean(t)
}

func (n node) differs(t *testing.T, subject string) {
	t.Helper()
	_, diffs, err := n.CheckTunnel(tunnel)
	if !slices.ContainsFunc(diffs, func(d endpoint.Difference) bool { return d.Subject == subject }) {
		t.Errorf("differences %v (%v), want one of %s", diffs, err, subject)
	}
}

func TestKernelTunnelDeviceIsMadeAgainWithAnotherPortOrAfterItsRemoval(t *testing.T) {
	n := newNode(t)
	first := n.ensure(t)
	other := routing.Tunnel{Port: 8472, MTU: 1400}
	second, err := n.EnsureTunnel(other)
	if err != nil || second.Index == first.Index {
		t.Errorf("%+v, %v; want another device than %+v", second, err, first)
	}
	if _, diffs, err := n.CheckTunnel(other); err != nil || len(diffs) > 0 {
		t.Error(diffs, err)
	}
	n.ip(t, "link del "+second.Name)
	n.differs(t, "tunnel device")
	n.ensure(t)
	n.clean(t)
	for range 2 {
		if err := n.RemoveTunnel(); err != nil {
			t.Fatal(err)
		}
	}
	if out := n.ip(t, "-br link"); strings.Contains(out, first.Name) {
		t.Errorf("the device is still there: %s", out)
	}
}

// TestKernelTunnelDeviceThatCannotBeRepairedIsStillUsed: packets use the existing device, and no device that was never
// set up.
func TestKernelTunnelDeviceThatCannotBeRepairedIsStillUsed(t *testing.T) {
	n := newNode(t)
	d := n.ensure(t)
	impossible := routing.Tunnel{Port: tunnel.Port, MTU: 1} // less than the kernel allows
	if have, err := n.EnsureTunnel(impossible); err == nil || have != d {
		t.Errorf("device %+v, %v; want %+v and an error", have, err, d)
	}
	n.ip(t, "link set "+d.Name+" down")
	have, err := n.EnsureTunnel(impossible)
	var none routing.NoTunnelError
	if !errors.As(err, &none) || have != (endpoint.HostDevice{}) {
		t.Errorf("device %+v, %v while it is down; want none and a NoTunnelError", have, err)
	}
	if again := n.ensure(t); again != d {
		t.Errorf("device %+v, want %+v", again, d)
	}
}

// TestKernelTunnelNamesTheDeviceOfOthersInItsWay also tests that the foreign device is left alone.
func TestKernelTunnelNamesTheDeviceOfOthersInItsWay(t *testing.T) {
	for name, add := range map[string]string{
		"port": "link add theirs type vxlan id 7 dstport 4789",
		"name": "link add " + TunnelName("test") + " type bridge",
	} {
		n := newNode(t)
		n.ip(t, add)
		before := n.ip(t, "-br link")
		_, err := n.EnsureTunnel(tunnel)
		var none routing.NoTunnelError
		if !errors.Is(err, ErrTaken) || !errors.As(err, &none) {
			t.Errorf("%s: %v, want %v as a NoTunnelError", name, err, ErrTaken)
		}
		if name == "port" && !strings.Contains(fmt.Sprint(err), "theirs") {
			t.Errorf("%v, want the name of the device", err)
		}
		if err := n.RemoveTunnel(); err != nil {
			t.Error(err)
		}
		if after := n.ip(t, "-br link"); after != before {
			t.Errorf("%s: devices\n%swant\n%s", name, after, before)
		}
	}
}

// TestKernelPathHasTheLeastMTUOfDeviceAndRoute tests both families.
func TestKernelPathHasTheLeastMTUOfDeviceAndRoute(t *testing.T) {
	n := newNode(t)
	for _, to := range []string{"192.0.2.2", "2001:db8::2"} {
		addr := netip.MustParseAddr(to)
		want := func(what string, mtu uint16) {
			t.Helper()
			p, err := n.PathTo(addr)
			if err != nil || p.MTU != mtu || !p.Direct() || p.Hops[0].Device != "uplink0" {
				t.Errorf("%s, %s: %+v, %v; want MTU %d", to, what, p, err, mtu)
			}
		}
		want("as made", 1500)
		n.ip(t, "link set uplink0 mtu 1400")
		want("device of 1400", 1400)
		n.ip(t, "link set uplink0 mtu 1500")
		want("device of 1500 again", 1500)
		n.ip(t, "route add "+to+" dev uplink0 mtu 1300")
		want("route of 1300", 1300)
		n.ip(t, "route change "+to+" dev uplink0 mtu lock 1350")
		want("locked route of 1350", 1350)
		n.ip(t, "route del "+to)
		want("without a route", 1500)
	}
	if p, err := n.PathTo(netip.MustParseAddr("192.0.2.2")); err != nil || p.Source != netip.MustParseAddr("192.0.2.1") {
		t.Errorf("%+v, %v; want the source 192.0.2.1", p, err)
	}
	for _, none := range []string{"198.51.100.1", "192.0.2.1", "192.0.2.255"} {
		if p, err := n.PathTo(netip.MustParseAddr(none)); err == nil {
			t.Errorf("path to %s: %+v, want none", none, p)
		}
	}
}

func TestKernelPathHasAllHops(t *testing.T) {
	n := newNode(t)
	n.ip(t, "link add second type veth peer name far2", "link set second up", "link set far2 up",
		"addr add 203.0.113.1/24 dev second", "addr add 2001:db8:1::1/64 dev second nodad", "link set second mtu 1450",
		"route add 198.51.100.0/24 nexthop via 192.0.2.2 weight 3 nexthop via 203.0.113.9",
		"route add 2001:db8:2::/64 nexthop via 2001:db8::2 nexthop via 2001:db8:1::9")
	for _, to := range []string{"198.51.100.1", "2001:db8:2::1"} {
		p, err := n.PathTo(netip.MustParseAddr(to))
		if err != nil || len(p.Hops) != 2 || p.MTU != 1450 || p.Direct() {
			t.Errorf("%s: %+v, %v; want two hops and the least MTU", to, p, err)
			continue
		}
		r := routing.Route{Range: netip.MustParsePrefix("fd00:9::/64"), Hops: p.Hops, MTU: p.MTU}
		if p.Hops[0].Via.Is4() {
			r.Range = netip.MustParsePrefix("10.9.0.0/24")
		}
		if err := n.SetRoute(r); err != nil {
			t.Fatal(err)
		}
		have, err := n.Routes()
		got := have[r.Range]
		if err != nil || len(got.Hops) != 2 || got.Hops[0].Weight != p.Hops[0].Weight || got.MTU != 1450 {
			t.Errorf("route %+v, %v; want %+v", got, err, r)
		}
	}
}

// TestKernelRouteOfOthersIsReportedAndStays also tests that the instance's own route can be added and removed in
// addition.
func TestKernelRouteOfOthersIsReportedAndStays(t *testing.T) {
	n := newNode(t)
	d := n.ensure(t)
	for _, text := range []string{"10.9.0.0/24", "fd00:9::/64"} {
		p := netip.MustParsePrefix(text)
		r := routing.Route{Range: p, Hops: []routing.Nexthop{{Ifindex: d.Index}}, MTU: 1450}
		for range 2 {
			if err := n.SetRoute(r); err != nil {
				t.Fatal(err)
			}
		}
		if foreign, err := n.Foreign([]netip.Prefix{p}); err != nil || len(foreign) > 0 {
			t.Errorf("foreign routes %v, %v; want none", foreign, err)
		}
		n.ip(t, "route add "+text+" dev uplink0 proto bird")
		theirs := func() string {
			if p.Addr().Is6() {
				return n.ip(t, "-6 route show proto bird")
			}
			return n.ip(t, "route show proto bird")
		}
		foreign, err := n.Foreign([]netip.Prefix{p})
		if err != nil || !strings.Contains(foreign[p], "proto 12") {
			t.Errorf("foreign routes %v, %v; want bird's route", foreign, err)
		}
		r.MTU = 1400
		before := theirs()
		if err := n.SetRoute(r); err != nil {
			t.Fatal(err)
		}
		have, err := n.Routes()
		if err != nil || len(have) != 1 || have[p].MTU != 1400 {
			t.Errorf("routes %v, %v; want the route of the instance with MTU 1400", have, err)
		}
		for range 2 {
			if err := n.RemoveRoute(p); err != nil {
				t.Fatal(err)
			}
		}
		if have, err := n.Routes(); err != nil || len(have) != 0 {
			t.Errorf("routes %v, %v; want none", have, err)
		}
		if after := theirs(); before == "" || after != before {
			t.Errorf("their route %q, want %q", after, before)
		}
	}
}

// TestKernelUnreachableRoutesOfOwnRangesAreNotTaken: they must not count as routes to other nodes.
func TestKernelUnreachableRoutesOfOwnRangesAreNotTaken(t *testing.T) {
	n := newNode(t)
	n.ip(t, "route add unreachable 10.1.0.0/24 proto 92", "route add 10.1.0.5 dev uplink0 scope link proto 92")
	if have, err := n.Routes(); err != nil || len(have) != 0 {
		t.Errorf("routes %v, %v; want none", have, err)
	}
}

func dup(t *testing.T, ns *netns.Namespace) int {
	t.Helper()
	fd, err := unix.FcntlInt(uintptr(ns.Fd()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

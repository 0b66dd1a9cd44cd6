// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package devnode

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// netnsDir is the directory in which iproute2 keeps named network namespaces.
const netnsDir = "/run/netns"

// uplink is the node's device towards the caller's namespace.
const uplink = "eth0"

// Addresses of links come from the upper half of 169.254.0.0/16 and from fd00:244:ffff::/48, which pods do not use: a
// pod's gateway is in 169.254.1.0/24.
var (
	linksIPv4 = netip.MustParsePrefix("169.254.128.0/17")
	linksIPv6 = netip.MustParsePrefix("fd00:244:ffff::/48")
)

// linkAddresses returns the addresses of both ends of the link, the caller's first. They are derived from a hash of
// the instance's name. If the hashes of two instances collide, the kernel rejects the addresses of the second one.
func (n *Node) linkAddresses() (ipv4, ipv6 [2]netip.Addr) {
	sum := sha256.Sum256([]byte(n.paths.Name))
	pair := binary.BigEndian.Uint32(sum[:])
	four := linksIPv4.Addr().As4()
	binary.BigEndian.PutUint32(four[:], binary.BigEndian.Uint32(four[:])|pair&0x7ffe)
	six := linksIPv6.Addr().As16()
	binary.BigEndian.PutUint32(six[12:], pair&^1)
	ipv4[0], ipv6[0] = netip.AddrFrom4(four), netip.AddrFrom16(six)
	ipv4[1], ipv6[1] = ipv4[0].Next(), ipv6[0].Next()
	return ipv4, ipv6
}

// link returns the caller's device towards the node.
func (n *Node) link() string {
	return "sldev" + hashOf(n.paths.Name)[:8]
}

// hashOf is the SHA-256 of s in hexadecimal.
func hashOf(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

// makeNamespace makes the node's network namespace, with its loopback device up,
// and names it as iproute2 does.
func (n *Node) makeNamespace() error {
	if err := makeNetns(n.netnsMount()); err != nil {
		return err
	}
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return err
	}
	if err := os.Symlink(n.netnsMount(), n.Netns()); err != nil {
		return fmt.Errorf("name network namespace: %w", err)
	}
	return inNetns(n.Netns(), func() error { return setUp("lo") })
}

// connect makes a veth pair from the calling thread's namespace into another one.
func connect(device, netns, peer string, mtu int) error {
	target, err := os.Open(netns)
	if err != nil {
		return err
	}
	defer target.Close()
	attributes := netlink.NewLinkAttrs()
	attributes.Name, attributes.MTU = device, mtu
	pair := &netlink.Veth{
		LinkAttrs: attributes, PeerName: peer, PeerMTU: uint32(mtu), PeerNamespace: netlink.NsFd(int(target.Fd())),
	}
	if err := netlink.LinkAdd(pair); err != nil {
		return fmt.Errorf("make device %s: %w", device, err)
	}
	return nil
}

// makeNetwork makes the node's namespace and joins it to the caller's namespace by a veth pair. The caller reaches
// the node and its pods, and the node's default route leads to the caller. Nothing else in the caller's namespace
// changes.
func (n *Node) makeNetwork() error {
	if err := n.makeNamespace(); err != nil {
		return err
	}
	mtu, err := defaultRouteMTU()
	if err != nil {
		return err
	}
	if err := connect(n.link(), n.Netns(), uplink, mtu); err != nil {
		return err
	}
	ipv4, ipv6 := n.linkAddresses()
	// Configure the node's end first, so that the device is up when the caller adds its routes.
	if err := n.configureUplink([]netip.Prefix{netip.PrefixFrom(ipv4[1], 31), netip.PrefixFrom(ipv6[1], 127)},
		ipv4[0], ipv6[0]); err != nil {
		return err
	}
	if err := configure(n.link(), netip.PrefixFrom(ipv4[0], 31), netip.PrefixFrom(ipv6[0], 127)); err != nil {
		return fmt.Errorf("configure %s: %w", n.link(), err)
	}
	if err := n.routePods(n.link(), ipv4[1], ipv6[1]); err != nil {
		return fmt.Errorf("route to the pods: %w", err)
	}
	return nil
}

// configureUplink enables forwarding on the node, adds the addresses of its uplink, and adds default routes via the
// gateways.
func (n *Node) configureUplink(addresses []netip.Prefix, gateways ...netip.Addr) error {
	err := inNetns(n.Netns(), func() error {
		// /proc/sys/net shows the sysctls of the thread's network namespace.
		for _, path := range []string{"/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"} {
			if err := os.WriteFile(path, []byte("1"), 0); err != nil {
				return err
			}
		}
		if err := configure(uplink, addresses...); err != nil {
			return err
		}
		for _, gateway := range gateways {
			if err := addRoute(uplink, netip.PrefixFrom(unspecified(gateway), 0), gateway); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("configure the node's %s: %w", uplink, err)
	}
	return nil
}

// routePods adds the caller's routes to the pod ranges over one of its devices. If no ranges are given, it takes free
// ones: a route claims a range, and another node may claim the same range first.
func (n *Node) routePods(device string, ipv4, ipv6 netip.Addr) error {
	add := func(prefixes []netip.Prefix) error {
		for i, prefix := range prefixes {
			gateway := ipv4
			if prefix.Addr().Is6() {
				gateway = ipv6
			}
			if err := addRoute(device, prefix, gateway); err != nil {
				for _, added := range prefixes[:i] {
					err = errors.Join(err, deleteRoute(device, added))
				}
				return err
			}
		}
		return nil
	}
	if len(n.state.PodCIDRs) > 0 {
		err := add(n.state.PodCIDRs)
		if errors.Is(err, unix.EEXIST) {
			err = fmt.Errorf("%w: the range is used by another development node or network of this machine; `ip route` "+
				"and `ip -6 route` name the device that it is routed to", err)
		}
		return err
	}
	for {
		prefixes, err := freePodCIDRs()
		if err != nil {
			return err
		}
		switch err := add(prefixes); {
		case err == nil:
			n.state.PodCIDRs = prefixes
			return nil
		case !errors.Is(err, unix.EEXIST):
			return err
		}
	}
}

func deleteRoute(device string, to netip.Prefix) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	if err := netlink.RouteDel(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(to)}); err != nil {
		return fmt.Errorf("delete the route to %s: %w", to, err)
	}
	return nil
}

// removePodMounts removes the plugin's mounts of the network namespaces of containers that were given as a process
// path and never deleted.
func (n *Node) removePodMounts() error {
	mounts, err := filepath.Glob(filepath.Join(n.paths.RunDir, "netns", "*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range mounts {
		errs = append(errs, removeMount(path))
	}
	return errors.Join(errs...)
}

// removeMount unmounts and removes a file. It returns nil if the file does not exist.
func removeMount(path string) error {
	err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// removeLink removes a device of the calling thread's namespace, and with it its routes. It returns nil if the device
// does not exist.
func removeLink(device string) error {
	link, err := netlink.LinkByName(device)
	switch {
	case errors.As(err, new(netlink.LinkNotFoundError)):
		return nil
	case err != nil:
		return fmt.Errorf("find %s: %w", device, err)
	}
	if err := netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove %s: %w", device, err)
	}
	return nil
}

// removeNetwork removes the device with its routes, and the namespace.
func (n *Node) removeNetwork() error {
	errs := []error{removeLink(n.link()), n.leaveNetwork()}
	if err := os.Remove(n.Netns()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	errs = append(errs, removeMount(n.netnsMount()))
	return errors.Join(errs...)
}

func makeNetns(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("make network namespace: %w", err)
	}
	_ = file.Close()
	done := make(chan error, 1)
	go func() {
		// The thread stays in the new namespace and ends with the goroutine.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("make network namespace: %w", err)
			return
		}
		if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
			done <- fmt.Errorf("bind network namespace to %s: %w", path, err)
			return
		}
		done <- nil
	}()
	return <-done
}

// configure gives a device of the current namespace its addresses and sets it
// up.
func configure(device string, addresses ...netip.Prefix) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	for _, p := range addresses {
		a := &netlink.Addr{IPNet: ipNet(p)}
		if p.Addr().Is6() {
			// Skip duplicate address detection: the address works at once, and every device of the network is ours.
			a.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return fmt.Errorf("address %s: %w", p, err)
		}
	}
	return netlink.LinkSetUp(link)
}

func setUp(device string) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(link)
}

func addRoute(device string, to netip.Prefix, via netip.Addr) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	route := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(to), Gw: via.AsSlice()}
	if err := netlink.RouteAdd(route); err != nil {
		return fmt.Errorf("route to %s via %s: %w", to, via, err)
	}
	return nil
}

// defaultRouteMTU returns the MTU of the device of the caller's default route, or the Ethernet MTU if the caller has
// no default route.
func defaultRouteMTU() (int, error) {
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return 0, fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		if r.Dst != nil && r.Dst.IP.IsUnspecified() && r.LinkIndex > 0 {
			if link, err := netlink.LinkByIndex(r.LinkIndex); err == nil {
				return link.Attrs().MTU, nil
			}
		}
	}
	return 1500, nil
}

// freePodCIDRs returns prefixes for which the caller has no route.
func freePodCIDRs() ([]netip.Prefix, error) {
	free, err := freeRanges(244)
	if err != nil {
		return nil, fmt.Errorf("%w; give the pod CIDRs", err)
	}
	return free, nil
}

// freeRanges returns 10.K.N.0/24 and fd00:K:N::/64, in IPv6 with hexadecimal digits, with the lowest N for which the
// caller has no route.
func freeRanges(k byte) ([]netip.Prefix, error) {
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	taken := func(p netip.Prefix) bool {
		for _, r := range routes {
			if r.Dst == nil {
				continue
			}
			ones, _ := r.Dst.Mask.Size()
			address, ok := netip.AddrFromSlice(r.Dst.IP)
			if ok && ones > 0 && netip.PrefixFrom(address.Unmap(), ones).Overlaps(p) {
				return true
			}
		}
		return false
	}
	for i := range 256 {
		ipv4 := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, k, byte(i)}), 24)
		ipv6 := netip.MustParsePrefix(fmt.Sprintf("fd00:%d:%x::/64", k, i))
		if !taken(ipv4) && !taken(ipv6) {
			return []netip.Prefix{ipv4, ipv6}, nil
		}
	}
	return nil, fmt.Errorf("every range 10.%d.0.0/24 to 10.%d.255.0/24 has a route", k, k)
}

func unspecified(like netip.Addr) netip.Addr {
	if like.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

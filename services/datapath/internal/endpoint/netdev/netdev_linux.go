// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package netdev creates and inspects network devices by netlink: the veth pairs of endpoints with
// addresses, routes, neighbours, filters and sysctls, and the routes, rules and addresses of the
// node itself.
//
// It keeps no state, but reads from the kernel on every call. It replaces filters instead of
// deleting and adding them, because packets would pass without a verdict in between.
package netdev

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"path/filepath"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/hook"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
	"github.com/sluice-net/sluice/services/datapath/internal/node/podrange"
)

// The gateways of every container. The eBPF programs answer for them; no device has them.
var (
	Gateway4 = netip.MustParseAddr("169.254.1.1")
	Gateway6 = netip.MustParseAddr("fe80::1")
)

// MarkMask covers the bits of a packet mark that identify the program that set it. A packet from an
// endpoint with none of these bits has passed no program.
const MarkMask = 0x0f00

// MarkPod is set by the program of a pod's device on packets that it passes to the host stack.
const MarkPod = 0x0200

// Marks that the node's firewall sets on every forwarded packet, by the device of arrival. A packet
// from an endpoint that leaves the node keeps MarkPod.
const (
	MarkForwarded = 0x0100 // arrived neither from an endpoint nor through the tunnel
	MarkRemote    = 0x0300 // arrived through the tunnel; also set by programs
	MarkLocal     = 0x0900 // arrived from an endpoint, and goes to another endpoint
)

// MarkFree covers the bits of a packet mark that Sluice leaves to other programs.
const MarkFree = 0xf000

// rulePriority is the priority of the rules that stop unmarked packets: before every table except
// the local one.
const rulePriority = 9

// Protocol is the protocol number of Sluice's routes and rules, which distinguishes them from
// others.
const Protocol = 0x5c

// Options configure Open.
type Options struct {
	// Home is the node's network namespace. The caller keeps it open.
	Home *netns.Namespace
	// Instance is part of the device group.
	Instance string
	// Programs returns the programs to attach to the host end of every endpoint: the last loaded
	// ones. nil: no programs.
	Programs func() []*program.Program
	// Ranges are the node's pod ranges, which may change; nil: none.
	Ranges *podrange.Set
	// ServiceDevices are names of devices, or patterns of path.Match, whose addresses belong to
	// services and not to the node.
	ServiceDevices []string
	// SetGlobal allows changes of sysctls of the whole node: forwarding, redirects. Without it,
	// differences are only reported.
	SetGlobal bool
	// ProcSysNet is the directory to which sysctls are written; /proc/sys/net if empty.
	ProcSysNet string
}

// Group returns the device group of an instance's endpoints; Group|1 is the group of devices about to be deleted.
func Group(instance string) uint32 { return groupOf("sluice device group", instance) }

// TunnelGroup returns the device group of an instance's tunnel.
func TunnelGroup(instance string) uint32 { return groupOf("sluice tunnel group", instance) }

// ProxyGroup returns the device group of an instance's devices for proxies.
func ProxyGroup(instance string) uint32 { return groupOf("group of sluice proxies", instance) }

func groupOf(what, instance string) uint32 {
	sum := sha256.Sum256([]byte(what + "\x00" + instance))
	return binary.BigEndian.Uint32(sum[:])&0x3ffffffe | 0x40000000
}

// Netdev is a handle on the devices of a node. Its methods may be called
// concurrently; the kernel serialises them.
type Netdev struct {
	o     Options
	group uint32

	// Sockets in the node's namespace. They are separate, so that replacing a filter does not wait
	// for other changes, and reads do not wait for changes.
	changes *netlink.Handle // for rare changes
	making  *rtnl.Conn      // for creating endpoints
	filters *rtnl.Conn
	hooks   *hook.Hooks
	reads   *netlink.Handle // for rare reads
	checks  *rtnl.Conn      // for reads of every endpoint
	// conf6 is the directory of the node's IPv6 settings; -1 without IPv6. An open directory avoids
	// the path lookup, in which the kernel searches the entries of all containers' namespaces.
	conf6   int
	early   subscription // from Subscribe, until Watch or Close
	removal sync.Mutex   // serialises group deletions
	node    sync.Mutex   // serialises repair and removal of ranges
}

// Open opens the netlink sockets in the node's namespace.
func Open(o Options) (_ *Netdev, err error) {
	o.ProcSysNet = cmp.Or(o.ProcSysNet, sysctlRoot)
	if o.Ranges == nil {
		o.Ranges = podrange.Of(nil, false)
	}
	n := &Netdev{o: o, group: Group(o.Instance), conf6: -1}
	defer func() {
		if err != nil {
			n.Close()
		}
	}()
	err = o.Home.Do(func() error {
		var errs []error
		for _, h := range []**netlink.Handle{&n.changes, &n.reads} {
			var err error
			*h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
			errs = append(errs, err)
		}
		for _, c := range []**rtnl.Conn{&n.making, &n.filters, &n.checks} {
			var err error
			*c, err = rtnl.Open()
			errs = append(errs, err)
		}
		dir, err := unix.Open(filepath.Join(o.ProcSysNet, "ipv6/conf"), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err == nil {
			n.conf6 = dir
		}
		return errors.Join(append(errs, ignoring(err, unix.ENOENT))...)
	})
	if err != nil {
		return nil, fmt.Errorf("open netlink and settings in the node's namespace: %w", err)
	}
	n.hooks = &hook.Hooks{Home: o.Home, Changes: n.filters, Reads: n.checks}
	return n, nil
}

// Close closes the sockets. It changes nothing in the kernel.
func (n *Netdev) Close() {
	for _, h := range []*netlink.Handle{n.changes, n.reads} {
		if h != nil {
			h.Close()
		}
	}
	for _, c := range []*rtnl.Conn{n.making, n.filters, n.checks} {
		if c != nil {
			c.Close()
		}
	}
	n.early.close()
	if n.conf6 >= 0 {
		unix.Close(n.conf6)
		n.conf6 = -1
	}
}

// container is an open network namespace of a container. Its sockets are opened inside and work
// from any namespace.
type container struct {
	ns   *netns.Namespace
	nl   *netlink.Handle // nil until the first use
	conn *rtnl.Conn      // nil until the first use
}

func (c *container) ID() endpoint.NamespaceID {
	id := c.ns.ID()
	return endpoint.NamespaceID{Dev: id.Dev, Inode: id.Inode}
}

// Cookie implements endpoint.Namespace.
func (c *container) Cookie() (uint64, error) {
	conn, err := c.socket()
	if err != nil {
		return 0, err
	}
	return conn.Cookie()
}

// Netns returns the namespace behind an endpoint.Namespace that OpenNamespace returned. It is valid
// until Close.
func Netns(ns endpoint.Namespace) *netns.Namespace { return ns.(*container).ns }

func (c *container) Close() error {
	if c.nl != nil {
		c.nl.Close()
	}
	if c.conn != nil {
		c.conn.Close()
	}
	return c.ns.Close()
}

// enter runs fn inside the namespace.
func (c *container) enter(fn func(*rtnl.Conn) error) error {
	return c.ns.Do(func() (err error) {
		if c.conn == nil {
			if c.conn, err = rtnl.Open(); err != nil {
				return err
			}
		}
		return fn(c.conn)
	})
}

// socket returns a netlink connection inside the namespace.
func (c *container) socket() (*rtnl.Conn, error) {
	if c.conn != nil {
		return c.conn, nil
	}
	err := c.enter(func(*rtnl.Conn) error { return nil })
	return c.conn, err
}

// handle returns a handle of the netlink library inside the namespace.
func (c *container) handle() (*netlink.Handle, error) {
	if c.nl != nil {
		return c.nl, nil
	}
	err := c.ns.Do(func() (err error) {
		c.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open netlink in the container: %w", err)
	}
	return c.nl, nil
}

// OpenNamespace implements endpoint.Links.
func (n *Netdev) OpenNamespace(path string) (endpoint.Namespace, error) {
	ns, err := netns.Open(path)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return nil, fmt.Errorf("%w: %w", endpoint.ErrNamespaceGone, err)
	case errors.Is(err, netns.ErrNotNetns), errors.Is(err, fs.ErrPermission), errors.Is(err, unix.ELOOP):
		return nil, fmt.Errorf("%w: %w", endpoint.ErrNamespace, err)
	case err != nil:
		return nil, err
	}
	if ns.ID() == n.o.Home.ID() {
		ns.Close()
		return nil, fmt.Errorf("%w: %s is %w", endpoint.ErrNamespace, path, netns.ErrOwn)
	}
	return &container{ns: ns}, nil
}

// Create implements endpoint.Links. It creates the peer directly in the container under its final
// name: moving or renaming it would cost ten times as much and be visible.
func (n *Netdev) Create(ns endpoint.Namespace, d endpoint.Device) (endpoint.Device, error) {
	c := ns.(*container)
	l, err := n.addPair(c, d)
	if errors.Is(err, unix.EEXIST) {
		if err := n.whoseName(d); err != nil {
			return d, err
		}
		l, err = n.addPair(c, d)
	}
	if err != nil {
		return d, fmt.Errorf("make the pair %s and %s: %w", d.HostName, d.Name, err)
	}
	// the kernel reports the peer's index as the link of this end
	d.HostIndex, d.Index = l.index, l.peer
	return d, nil
}

func (n *Netdev) addPair(c *container, d endpoint.Device) (device, error) {
	var b rtnl.Batch
	addPair(&b, d, n.group, c.ns.Fd())
	getLink(&b, 0, d.HostName)
	replies, err := n.making.Exchange(&b)
	if err != nil {
		return device{}, err
	}
	if made, found := replies[0], replies[1]; made.Err != nil {
		return device{}, made.Err
	} else if found.Err != nil {
		dev := netlink.NewLinkAttrs()
		dev.Name = d.HostName
		return device{}, errors.Join(fmt.Errorf("find it: %w", found.Err), n.changes.LinkDel(&netlink.Device{LinkAttrs: dev}))
	}
	return deviceOf(replies[1].Data), nil
}

// whoseName makes the device name available: if an earlier endpoint of the same owner still has it, because its
// namespace still exists, whoseName removes that device. It returns ErrNameTaken if the name belongs to another device.
func (n *Netdev) whoseName(d endpoint.Device) error {
	link, err := n.reads.LinkByName(d.HostName)
	if err == nil {
		if g := link.Attrs().Group &^ 1; g != n.group {
			return fmt.Errorf("device %s of the node: %w, by a device that is not Sluice's (group %d)", d.HostName,
				endpoint.ErrNameTaken, g)
		}
		return n.Remove([]endpoint.HostDevice{{Name: d.HostName, Index: uint32(link.Attrs().Index)}})
	}
	return fmt.Errorf("interface %s of the container: %w", d.Name, endpoint.ErrNameTaken)
}

// Configure implements endpoint.Links.
func (n *Netdev) Configure(ns endpoint.Namespace, d endpoint.Device) error {
	if err := n.configureHost(d); err != nil {
		return err
	}
	return n.configureContainer(ns.(*container), d)
}

// configureHost adds the qdisc for the filters, and the settings of the host end. The first filter
// on a new qdisc may wait for a grace period of the kernel, so the qdisc is added early and the
// filters last.
func (n *Netdev) configureHost(d endpoint.Device) error {
	var b rtnl.Batch
	getLink(&b, d.HostIndex, "")
	hook.AddClsact(&b, d.HostIndex)
	replies, err := n.making.Exchange(&b)
	if err != nil {
		return fmt.Errorf("configure %s: %w", d.HostName, err)
	}
	if err := replies[0].Err; err != nil {
		return fmt.Errorf("find %s: %w", d.HostName, err)
	}
	if err := replies[1].Err; err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("qdisc clsact on %s: %w", d.HostName, err)
	}
	return n.setHostEnd(d, deviceOf(replies[0].Data))
}

// setHostEnd writes the settings of the host end that differ.
func (n *Netdev) setHostEnd(d endpoint.Device, l device) error {
	var b rtnl.Batch
	setHostEnd(&b, l)
	if err := n.making.Do(&b); err != nil {
		return err
	}
	if l.conf6 == nil && !has6(d) {
		return nil
	}
	if n.conf6 < 0 {
		return fmt.Errorf("IPv6 settings of %s: %w", d.HostName, unix.EAFNOSUPPORT)
	}
	return n.o.Home.Do(func() error { return applySettings(n.conf6, "", l, hostSettings) })
}

// configureContainer writes the settings and addresses of the container's device.
func (n *Netdev) configureContainer(c *container, d endpoint.Device) error {
	err := c.enter(func(conn *rtnl.Conn) error {
		var b rtnl.Batch
		getLink(&b, d.Index, "")
		replies, err := conn.Exchange(&b)
		if err == nil {
			err = replies[0].Err
		}
		if err != nil {
			return fmt.Errorf("find %s: %w", d.Name, err)
		}
		l := deviceOf(replies[0].Data)
		if l.conf6 == nil && !has6(d) {
			return nil
		}
		return applySettings(unix.AT_FDCWD, filepath.Join(n.o.ProcSysNet, "ipv6/conf"), l, containerSettings)
	})
	if err != nil {
		return fmt.Errorf("in the container: %w", err)
	}
	var b rtnl.Batch
	for _, a := range d.Addrs {
		setAddr(&b, d.Index, a)
	}
	if err := c.conn.Do(&b); err != nil {
		return fmt.Errorf("%s in the container: %w", d.Name, err)
	}
	return nil
}

func hostEnd(d endpoint.Device) endpoint.HostDevice {
	return endpoint.HostDevice{Name: d.HostName, Index: d.HostIndex}
}

// programs returns the last loaded programs of endpoints.
func (n *Netdev) programs() []*program.Program {
	if n.o.Programs == nil {
		return nil
	}
	return n.o.Programs()
}

// Attach implements endpoint.Links.
func (n *Netdev) Attach(d endpoint.Device) error {
	return n.hooks.Attach(hostEnd(d), n.programs())
}

func gatewayFor(a netip.Addr) netip.Addr {
	if a.Is4() {
		return Gateway4
	}
	return Gateway6
}

// hostRoute returns the route to one address of a container. Its source is the node's own address in the pod range.
func (n *Netdev) hostRoute(d endpoint.Device, a netip.Addr) route {
	r := route{
		dst: netip.PrefixFrom(a, a.BitLen()), ifindex: d.HostIndex, table: unix.RT_TABLE_MAIN,
		scope: unix.RT_SCOPE_LINK, protocol: Protocol,
	}
	if a.Is6() {
		r.scope = unix.RT_SCOPE_UNIVERSE
	}
	if src, ok := n.nodeAddr(a); ok {
		r.source = src
	}
	return r
}

// nodeAddr returns the node's own address in the range of an address.
func (n *Netdev) nodeAddr(of netip.Addr) (netip.Addr, bool) {
	p, ok := n.o.Ranges.Of(of)
	return podrange.NodeAddr(p), ok
}

// Remove implements endpoint.Links. The kernel waits for a grace period for each deletion; deleting
// a device group costs only one.
func (n *Netdev) Remove(devices []endpoint.HostDevice) error {
	n.removal.Lock()
	defer n.removal.Unlock()
	marked := 0
	for _, d := range devices {
		link, err := n.reads.LinkByIndex(int(d.Index))
		if d.Index == 0 {
			link, err = n.reads.LinkByName(d.Name)
		}
		switch {
		case errors.As(err, new(netlink.LinkNotFoundError)):
			continue
		case err != nil:
			return fmt.Errorf("find %s: %w", d.Name, err)
		case link.Attrs().Name != d.Name || link.Attrs().Group&^1 != n.group:
			continue // the index now belongs to another device
		}
		if err := n.changes.LinkSetGroup(link, int(n.group|1)); err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("mark %s for removal: %w", d.Name, err)
		}
		marked++
	}
	if marked == 0 {
		return nil
	}
	return n.deleteGroup(n.group | 1)
}

// RemoveDevices removes the devices of all endpoints.
func (n *Netdev) RemoveDevices() error {
	return errors.Join(n.deleteGroup(n.group), n.deleteGroup(n.group|1))
}

// deleteGroup runs the request of `ip link delete group`. The kernel returns ENODEV if the group is empty, because the
// last device vanished with its namespace.
func (n *Netdev) deleteGroup(group uint32) error {
	var err error
	derr := n.o.Home.Do(func() error {
		req := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
		req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		req.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(group)))
		_, err = req.Execute(unix.NETLINK_ROUTE, 0)
		return nil
	})
	if err = errors.Join(derr, err); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete device group %#x: %w", group, err)
	}
	return nil
}

// Devices implements endpoint.Links.
func (n *Netdev) Devices() ([]endpoint.HostDevice, error) {
	ds, err := whole(func() (ds []endpoint.HostDevice, err error) {
		var b rtnl.Batch
		b.Add(unix.RTM_GETLINK, 0, infomsg(0, 0, 0))
		b.Uint32(unix.IFLA_EXT_MASK, skipStats)
		err = n.checks.Dump(&b, func(m []byte) {
			if l := deviceOf(m); l.kind == "veth" && l.group&^1 == n.group {
				ds = append(ds, endpoint.HostDevice{Name: l.name, Index: l.index})
			}
		})
		return ds, err
	})
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	return ds, nil
}

func family(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

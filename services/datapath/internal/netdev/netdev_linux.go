// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package netdev makes and inspects network devices by netlink: the pairs of
// endpoints, their addresses, routes, neighbours, filters and sysctls, and the
// routes, rules and addresses of the node itself.
//
// It keeps no state: what it is asked about, it reads from the kernel. It
// never deletes a filter and adds it again, because packets would pass
// unjudged meanwhile; it replaces.
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
	"os"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/podrange"
)

// The gateways of every container. eBPF answers for them; no device has them.
var (
	Gateway4 = netip.MustParseAddr("169.254.1.1")
	Gateway6 = netip.MustParseAddr("fe80::1")
)

// MarkMask covers the bits of a packet mark that say which program set it. A
// packet from an endpoint without any has met none.
const MarkMask = 0x0f00

// MarkForwarded is what the node's firewall sets in these bits of a packet that
// is forwarded to an endpoint.
const MarkForwarded = 0x0100

// MarkFree covers the bits of a packet mark that the programs leave to others.
const MarkFree = 0xf000

// rulePriority is that of the rules that stop unmarked packets: before every
// table but the local one.
const rulePriority = 9

// protocol marks our routes and rules, so that they are told from others'.
const protocol = 0x5c

// Options describe the node.
type Options struct {
	// Home is the node's network namespace. The caller keeps it open.
	Home *netns.Namespace
	// Instance is part of the device group.
	Instance string
	// Programs are attached to the host end of every endpoint's device.
	Programs []*program.Program
	// Ranges are the node's pod ranges, which may change; none if nil.
	Ranges *podrange.Set
	// ServiceDevices are names of devices, or patterns as of path.Match, whose
	// addresses are those of services and not of the node.
	ServiceDevices []string
	// SetGlobal allows changes of sysctls that concern the whole node:
	// forwarding, redirects. Without it they are only reported.
	SetGlobal bool
	// ProcSysNet is the directory that sysctls are written to; /proc/sys/net if
	// it is empty.
	ProcSysNet string
}

// Group is the device group of an instance's endpoints; Group|1 that of
// devices about to be deleted.
func Group(instance string) uint32 {
	sum := sha256.Sum256([]byte("sluice device group\x00" + instance))
	return binary.BigEndian.Uint32(sum[:])&0x3ffffffe | 0x40000000
}

// Netdev is a handle on the devices of a node. Its methods may be called
// concurrently; the kernel serialises them.
type Netdev struct {
	o     Options
	group uint32

	changes *netlink.Handle // for everything that changes devices
	filters *netlink.Handle // for filters alone: replacing one must not wait
	looks   *netlink.Handle // for reading
	removal sync.Mutex      // one group deletion at a time
	node    sync.Mutex      // nothing of a range is repaired while it is removed
}

// Open opens the netlink sockets in the node's namespace.
func Open(o Options) (_ *Netdev, err error) {
	o.ProcSysNet = cmp.Or(o.ProcSysNet, sysctlRoot)
	if o.Ranges == nil {
		o.Ranges = podrange.Of(nil, false)
	}
	n := &Netdev{o: o, group: Group(o.Instance)}
	defer func() {
		if err != nil {
			n.Close()
		}
	}()
	for _, h := range []**netlink.Handle{&n.changes, &n.filters, &n.looks} {
		if *h, err = handleIn(o.Home); err != nil {
			return nil, fmt.Errorf("open netlink in the node's namespace: %w", err)
		}
	}
	return n, nil
}

func handleIn(ns *netns.Namespace) (h *netlink.Handle, err error) {
	err = ns.Do(func() error {
		h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	return h, err
}

// Close closes the sockets. It changes nothing in the kernel.
func (n *Netdev) Close() {
	for _, h := range []*netlink.Handle{n.changes, n.filters, n.looks} {
		if h != nil {
			h.Close()
		}
	}
}

// container is an open namespace of a container.
type container struct {
	ns *netns.Namespace
	nl *netlink.Handle // nil until the first use
}

func (c *container) ID() endpoint.NamespaceID {
	id := c.ns.ID()
	return endpoint.NamespaceID{Dev: id.Dev, Inode: id.Inode}
}

func (c *container) Close() error {
	if c.nl != nil {
		c.nl.Close()
	}
	return c.ns.Close()
}

// enter runs fn inside, with a netlink socket there.
func (c *container) enter(fn func(*netlink.Handle) error) error {
	return c.ns.Do(func() (err error) {
		if c.nl == nil {
			if c.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
				return fmt.Errorf("open netlink: %w", err)
			}
		}
		return fn(c.nl)
	})
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

// Create implements endpoint.Links: the pair, with the peer already inside the
// container under its final name. Moving or renaming it would cost ten times
// as much, and be seen.
func (n *Netdev) Create(ns endpoint.Namespace, d endpoint.Device) (endpoint.Device, error) {
	c := ns.(*container)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr, attrs.Group = d.HostName, int(d.MTU), d.HostMAC[:], n.group
	attrs.TxQLen = 1000
	pair := &netlink.Veth{
		LinkAttrs: attrs,
		PeerName:  d.Name, PeerHardwareAddr: d.MAC[:], PeerMTU: uint32(d.MTU), PeerTxQLen: 1000,
		PeerNamespace: netlink.NsFd(c.ns.Fd()),
	}
	err := n.changes.LinkAdd(pair)
	if errors.Is(err, unix.EEXIST) {
		if err := n.whoseName(c, d); err != nil {
			return d, err
		}
		err = n.changes.LinkAdd(pair)
	}
	if err != nil {
		return d, fmt.Errorf("make the pair %s and %s: %w", d.HostName, d.Name, err)
	}
	link, err := n.looks.LinkByName(d.HostName)
	if err != nil {
		return d, errors.Join(fmt.Errorf("find %s: %w", d.HostName, err), n.changes.LinkDel(pair))
	}
	d.HostIndex = uint32(link.Attrs().Index)
	// the peer's index travels as the link of this end
	d.Index = uint32(link.Attrs().ParentIndex)
	return d, nil
}

// whoseName clears the way if the name is that of an earlier endpoint of the
// same owner, whose namespace is still there.
func (n *Netdev) whoseName(c *container, d endpoint.Device) error {
	link, err := n.looks.LinkByName(d.HostName)
	if err == nil {
		if g := link.Attrs().Group &^ 1; g != n.group {
			return fmt.Errorf("device %s of the node: %w, by a device that is not ours (group %d)", d.HostName, endpoint.ErrNameTaken, g)
		}
		return n.Remove([]endpoint.HostDevice{{Name: d.HostName, Index: uint32(link.Attrs().Index)}})
	}
	return fmt.Errorf("interface %s of the container: %w", d.Name, endpoint.ErrNameTaken)
}

// Configure implements endpoint.Links.
func (n *Netdev) Configure(ns endpoint.Namespace, d endpoint.Device) error {
	c := ns.(*container)
	host := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: int(d.HostIndex)}}
	// The first filter on a fresh qdisc may wait for a grace period of the
	// kernel: the qdisc comes early, the filters last.
	if err := n.addClsact(d); err != nil {
		return err
	}
	if err := n.changes.LinkSetIP6AddrGenMode(host, nl.IN6_ADDR_GEN_MODE_NONE); err != nil {
		return fmt.Errorf("no link-local address for %s: %w", d.HostName, err)
	}
	if err := n.o.Home.Do(func() error { return applySysctls(n.o.ProcSysNet, hostSysctls(d)) }); err != nil {
		return err
	}
	return c.enter(func(h *netlink.Handle) error { return n.configureContainer(h, d) })
}

func (n *Netdev) configureContainer(h *netlink.Handle, d endpoint.Device) error {
	if err := applySysctls(n.o.ProcSysNet, containerSysctls(d)); err != nil {
		return fmt.Errorf("in the container: %w", err)
	}
	link := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: int(d.Index)}}
	for _, a := range d.Addrs {
		addr := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, a.BitLen()))}
		if a.Is6() {
			// ipam knows that nobody else has it
			addr.Flags = unix.IFA_F_NODAD
		}
		if err := h.AddrReplace(link, addr); err != nil {
			return fmt.Errorf("address %v of %s in the container: %w", a, d.Name, err)
		}
	}
	return nil
}

// Attach implements endpoint.Links.
func (n *Netdev) Attach(d endpoint.Device) error {
	for _, p := range n.o.Programs {
		if err := n.replaceFilter(d, p); err != nil {
			return err
		}
	}
	return nil
}

// parents are the hooks of a device as tc numbers them.
var parents = map[program.Hook]uint32{
	program.Ingress: netlink.HANDLE_MIN_INGRESS,
	program.Egress:  netlink.HANDLE_MIN_EGRESS,
}

func (n *Netdev) addClsact(d endpoint.Device) error {
	q := &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: int(d.HostIndex), Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
		},
		QdiscType: "clsact",
	}
	if err := n.filters.QdiscAdd(q); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("qdisc clsact on %s: %w", d.HostName, err)
	}
	return nil
}

// Place of our filters on a device: first of all, and where we find them again.
const (
	filterPriority = 1
	filterHandle   = 1
)

func (n *Netdev) replaceFilter(d endpoint.Device, p *program.Program) error {
	f := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: int(d.HostIndex), Parent: parents[p.Hook], Handle: filterHandle, Priority: filterPriority,
			Protocol: unix.ETH_P_ALL,
		},
		Fd: p.Prog.FD(), Name: p.Name, DirectAction: true,
	}
	if err := n.filters.FilterReplace(f); err != nil {
		return fmt.Errorf("filter %s on %s %s: %w", p.Name, d.HostName, p.Hook, err)
	}
	return nil
}

// Activate implements endpoint.Links.
func (n *Netdev) Activate(ns endpoint.Namespace, d endpoint.Device) (endpoint.Device, error) {
	if err := n.activateHost(d); err != nil {
		return d, err
	}
	err := ns.(*container).enter(func(h *netlink.Handle) (err error) {
		if d, err = yieldDefaults(h, d); err != nil {
			return err
		}
		if err := removeStaleRules(h, d); err != nil {
			return err
		}
		if err := activateContainer(h, d); err != nil {
			return err
		}
		return n.awaitTraffic(h, d, trafficPatience)
	})
	return d, err
}

// trafficPatience is longer than workers of the kernel are late on a machine
// under load, and shorter than a caller waits for ADD.
const trafficPatience = 10 * time.Second

// awaitTraffic waits until the device carries packets both ways, at least for one
// look; ErrDeadlineExceeded names what was missing after that time. Two things
// are done by workers of the kernel some time after the calls that cause them
// return, and packets are lost until then (Linux 6.18): the host end has no
// queue before its state is up, and an IPv6 address does not receive before the
// local table has a route to it.
func (n *Netdev) awaitTraffic(h *netlink.Handle, d endpoint.Device, patience time.Duration) error {
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		missing, err := n.missingForTraffic(h, d)
		if err != nil || missing == "" {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s: %w", missing, os.ErrDeadlineExceeded)
		}
	}
}

func (n *Netdev) missingForTraffic(h *netlink.Handle, d endpoint.Device) (string, error) {
	host, err := n.looks.LinkByIndex(int(d.HostIndex))
	if err != nil {
		return "", fmt.Errorf("find %s: %w", d.HostName, err)
	}
	if state := host.Attrs().OperState; state != netlink.OperUp {
		return fmt.Sprintf("carrier of %s, which is %v", d.HostName, state), nil
	}
	for _, a := range d.Addrs {
		if a.Is4() {
			continue // its route comes with the address and the device
		}
		to := &netlink.Route{Table: unix.RT_TABLE_LOCAL, Dst: ipNet(netip.PrefixFrom(a, a.BitLen()))}
		routes, err := whole(func() ([]netlink.Route, error) {
			return h.RouteListFiltered(family(a), to, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
		})
		if err != nil {
			return "", fmt.Errorf("list local routes of the container: %w", err)
		}
		if len(routes) == 0 {
			return fmt.Sprintf("local route to %v in the container", a), nil
		}
	}
	return "", nil
}

func (n *Netdev) activateHost(d endpoint.Device) error {
	host := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: int(d.HostIndex)}}
	if err := n.changes.LinkSetUp(host); err != nil {
		return fmt.Errorf("set %s up: %w", d.HostName, err)
	}
	for _, a := range d.Addrs {
		if err := n.changes.NeighSet(neighbour(d.HostIndex, a, d.MAC)); err != nil {
			return fmt.Errorf("neighbour %v on %s: %w", a, d.HostName, err)
		}
		if err := n.changes.RouteReplace(n.hostRoute(d, a)); err != nil {
			return fmt.Errorf("route to %v by %s: %w", a, d.HostName, err)
		}
	}
	return nil
}

func gatewayFor(a netip.Addr) netip.Addr {
	if a.Is4() {
		return Gateway4
	}
	return Gateway6
}

func neighbour(ifindex uint32, a netip.Addr, mac endpoint.MAC) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: int(ifindex), Family: family(a), State: netlink.NUD_PERMANENT,
		IP: a.AsSlice(), HardwareAddr: mac[:],
	}
}

// hostRoute leads to one address of a container. The node answers from its
// address on the pod side.
func (n *Netdev) hostRoute(d endpoint.Device, a netip.Addr) *netlink.Route {
	r := &netlink.Route{
		LinkIndex: int(d.HostIndex), Dst: ipNet(netip.PrefixFrom(a, a.BitLen())),
		Scope: netlink.SCOPE_LINK, Protocol: protocol,
	}
	if a.Is6() {
		r.Scope = netlink.SCOPE_UNIVERSE
	}
	if src, ok := n.nodeAddr(a); ok {
		r.Src = src.AsSlice()
	}
	return r
}

// nodeAddr is the node's own address in the range that holds an address.
func (n *Netdev) nodeAddr(of netip.Addr) (netip.Addr, bool) {
	p, ok := n.o.Ranges.Of(of)
	return podrange.NodeAddr(p), ok
}

// Remove implements endpoint.Links. Deleting devices one by one costs the
// kernel a grace period each; a whole group costs one.
func (n *Netdev) Remove(devices []endpoint.HostDevice) error {
	n.removal.Lock()
	defer n.removal.Unlock()
	marked := 0
	for _, d := range devices {
		link, err := n.looks.LinkByIndex(int(d.Index))
		if d.Index == 0 {
			link, err = n.looks.LinkByName(d.Name)
		}
		switch {
		case errors.As(err, new(netlink.LinkNotFoundError)):
			continue
		case err != nil:
			return fmt.Errorf("find %s: %w", d.Name, err)
		case link.Attrs().Name != d.Name || link.Attrs().Group&^1 != n.group:
			continue // the index is somebody else's by now
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

// deleteGroup is `ip link delete group`. The kernel answers ENODEV if the
// group is empty, which means that a namespace took the last device along.
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
	links, err := whole(n.looks.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	var ds []endpoint.HostDevice
	for _, l := range links {
		if a := l.Attrs(); l.Type() == "veth" && a.Group&^1 == n.group {
			ds = append(ds, endpoint.HostDevice{Name: a.Name, Index: uint32(a.Index)})
		}
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

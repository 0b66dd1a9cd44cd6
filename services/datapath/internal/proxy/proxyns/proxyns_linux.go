// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package proxyns makes the proxy namespace, a network namespace for the TCP sockets of a proxy. In it every address is
// local, so a proxy accepts connections to any server, and connects to it from the address and port of the client. The
// proxy has no right to open a socket there: the datapath makes the sockets and passes them on.
//
// A veth pair connects the namespace with the node. The programs redirect TCP segments to the node's end, and
// sluice_from_tap receives what the sockets send. These packets bypass the stack of the node.
//
// The namespace exists while a process has a descriptor or a socket of it: the datapath, or the proxy. A datapath that
// starts again gets it back from the proxy, and its connections stay. If both have ended, so has the namespace.
package proxyns

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/hook"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

const (
	// MTU is the MTU of the devices. The sockets use smaller segments, which the other end requests.
	MTU = 9000
	// Port is the port of the listeners, at the loopback address: SL_LISTENER_PORT of into_proxy.c.
	Port = 1
	// Backlog is the number of connections that wait for the proxy. The programs pass half as many new connections
	// before the proxy has to accept some, so one pod cannot fill the backlog.
	Backlog = 4096
	// MaxSockets is the number of sockets that Sockets makes at a time.
	MaxSockets = 64

	inside = "eth0" // the device in the namespace
	table  = 100    // routes of packets that arrive
)

// Sizes of the buffers of sockets in bytes; the kernel doubles them. They bound the kernel's memory for a connection
// whose ends read nothing.
const (
	toClientBuffer   = 32 << 10
	fromClientBuffer = 8 << 10
)

// ErrTaken is returned if the name of the device belongs to a device that Sluice did not make.
var ErrTaken = errors.New("taken by a device that Sluice did not create")

// Options are the options of a Space. Programs, Inside, ProcSysNet and Filters are optional.
type Options struct {
	// Home is the node's network namespace. The caller keeps it open.
	Home     *netns.Namespace
	Instance string
	Kind     policytable.Proxy
	// Programs and Inside return the most recently loaded programs of the node's end and of the other end.
	Programs, Inside func() []*program.Program
	// ProcSysNet is the directory of the sysctls; "": /proc/sys/net.
	ProcSysNet string
	// Filters attaches the programs as clsact filters even if the kernel supports tcx.
	Filters bool
}

// Space is the proxy namespace of a kind of proxy. Its methods may be called concurrently.
type Space struct {
	o     Options
	name  string
	group uint32

	mu      sync.Mutex
	node    *end             // guarded by mu
	ns      *netns.Namespace // nil before Ensure; guarded by mu
	inner   *end             // in ns; guarded by mu
	listen4 int              // guarded by mu
	listen6 int              // -1: the kernel has no IPv6; guarded by mu
}

// end is a network namespace, with sockets to configure its end of the veth pair.
type end struct {
	links *netlink.Handle
	conn  *rtnl.Conn
	hooks *hook.Hooks
}

func openEnd(ns *netns.Namespace, filters bool) (*end, error) {
	e := &end{}
	err := ns.Do(func() (err error) {
		if e.links, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			return err
		}
		e.conn, err = rtnl.Open()
		return err
	})
	if err != nil {
		e.close()
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	e.hooks = &hook.Hooks{Home: ns, Changes: e.conn, Reads: e.conn, Filters: filters}
	return e, nil
}

func (e *end) close() {
	if e.links != nil {
		e.links.Close()
	}
	if e.conn != nil {
		e.conn.Close()
	}
}

// Name returns the name of the device of an instance for a kind of proxy, in the node's namespace.
func Name(instance string, kind policytable.Proxy) string {
	sum := sha256.Sum256([]byte("proxy namespace\x00" + kind.String() + "\x00" + instance))
	return "slp" + hex.EncodeToString(sum[:])[:10]
}

// Open returns a Space. It makes nothing in the kernel.
func Open(o Options) (*Space, error) {
	o.ProcSysNet = cmp.Or(o.ProcSysNet, "/proc/sys/net")
	s := &Space{o: o, name: Name(o.Instance, o.Kind), group: netdev.ProxyGroup(o.Instance), listen4: -1, listen6: -1}
	var err error
	if s.node, err = openEnd(o.Home, o.Filters); err != nil {
		return nil, err
	}
	return s, nil
}

// Name returns the name of the device in the node's namespace, also before it exists.
func (s *Space) Name() string { return s.name }

// Close closes all descriptors. The namespace stays while a proxy has sockets of it.
func (s *Space) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leave()
	s.node.close()
}

// leave closes the descriptors of the namespace.
func (s *Space) leave() {
	for _, fd := range []*int{&s.listen4, &s.listen6} {
		if *fd >= 0 {
			unix.Close(*fd) //nolint:errcheck // nothing was written
		}
		*fd = -1
	}
	if s.inner != nil {
		s.inner.close()
	}
	if s.ns != nil {
		s.ns.Close()
	}
	s.inner, s.ns = nil, nil
}

// Adopt attaches the current programs to the device of a previous process, and returns its index; 0: no device.
func (s *Space) Adopt() (index uint32, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, err := s.link()
	if err != nil || l == nil {
		return 0, err
	}
	return index32(l), s.node.attach(l, programs(s.o.Programs))
}

// Use has the descriptors for a proxy. They belong to the Space.
type Use struct {
	Device    uint32 // index of the node's end
	Namespace int
	Listen4   int
	Listen6   int // -1: the kernel has no IPv6
}

// Ensure makes or repairs the namespace. former are the descriptors that the proxy has: the namespace and its
// listeners. If they are of the namespace of a previous process, Ensure continues with it. It does not close them.
func (s *Space) Ensure(former ...int) (Use, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, err := s.link()
	if err != nil {
		return Use{}, err
	}
	if s.ns == nil && l != nil && len(former) > 0 {
		if err := s.enter(l, former); err != nil {
			return Use{}, err
		}
	}
	if s.ns == nil || l == nil {
		if l, err = s.make(l); err != nil {
			s.leave()
			return Use{}, err
		}
	}
	if err := s.repair(l); err != nil {
		return Use{}, err
	}
	return Use{Device: index32(l), Namespace: s.ns.Fd(), Listen4: s.listen4, Listen6: s.listen6}, nil
}

// enter opens the namespace of a descriptor, if the other end of the device is in it. A proxy could pass a descriptor
// of any namespace, but only root can put the other end of this device into one. If the proxy does not pass the
// listeners, too, the namespace cannot be used, because their port is taken.
func (s *Space) enter(l netlink.Link, former []int) error {
	peer, err := s.node.links.GetNetNsIdByFd(former[0])
	if err != nil || peer < 0 || peer != l.Attrs().NetNsID {
		return nil //nolint:nilerr // the proxy gets another namespace
	}
	fd, err := duplicate(former[0])
	if err != nil {
		return err
	}
	ns, err := netns.FromFile(fd)
	if err != nil {
		return err
	}
	if err := s.use(ns); err != nil {
		return err
	}
	cookie, err := ns.Cookie()
	if err != nil {
		s.leave()
		return err
	}
	for _, listener := range former[1:] {
		switch kind := listenerOf(listener, cookie); {
		case kind == unix.AF_INET && s.listen4 < 0:
			s.listen4, err = duplicate(listener)
		case kind == unix.AF_INET6 && s.listen6 < 0:
			s.listen6, err = duplicate(listener)
		}
		if err != nil {
			s.leave()
			return err
		}
	}
	if s.listen4 < 0 {
		s.leave()
	}
	return nil
}

func duplicate(fd int) (int, error) {
	out, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("copy a descriptor of the proxy namespace: %w", err)
	}
	return out, nil
}

// use makes ns the namespace, and opens the listeners in it.
func (s *Space) use(ns *netns.Namespace) (err error) {
	s.ns = ns
	if s.inner, err = openEnd(ns, s.o.Filters); err != nil {
		s.leave()
	}
	return err
}

// make makes a new namespace. It deletes the device of a former one.
func (s *Space) make(former netlink.Link) (netlink.Link, error) {
	if former != nil {
		if err := s.node.links.LinkDel(former); err != nil && !errors.Is(err, unix.ENODEV) {
			return nil, fmt.Errorf("delete the device %s of a former proxy namespace: %w", s.name, err)
		}
	}
	s.leave()
	ns, err := netns.New()
	if err != nil {
		return nil, err
	}
	if err := s.use(ns); err != nil {
		return nil, err
	}
	pair := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: s.name, MTU: MTU, Group: s.group},
		PeerName:  inside, PeerMTU: MTU, PeerNamespace: netlink.NsFd(ns.Fd()),
	}
	if err := s.node.links.LinkAdd(pair); err != nil {
		return nil, fmt.Errorf("make the device %s of the proxy namespace: %w", s.name, err)
	}
	return s.link()
}

// link returns the device in the node's namespace; nil if it does not exist.
func (s *Space) link() (netlink.Link, error) {
	l, err := s.node.links.LinkByName(s.name)
	switch {
	case errors.As(err, new(netlink.LinkNotFoundError)):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("find the device %s of the proxy namespace: %w", s.name, err)
	case l.Type() != "veth" || l.Attrs().Group != s.group:
		return nil, fmt.Errorf("device %s of the proxy namespace: the name is %w (%s, group %d); rename or delete that device",
			s.name, ErrTaken, l.Type(), l.Attrs().Group)
	}
	return l, nil
}

func index32(l netlink.Link) uint32 { return uint32(l.Attrs().Index) } //nolint:gosec // an index is positive

func programs(of func() []*program.Program) []*program.Program {
	if of == nil {
		return nil
	}
	return of()
}

// attach attaches missing programs to a device of the namespace.
func (e *end) attach(l netlink.Link, list []*program.Program) error {
	if len(list) == 0 {
		return nil
	}
	d := endpoint.HostDevice{Name: l.Attrs().Name, Index: index32(l)}
	diffs, err := e.hooks.CheckFirst(d, list)
	if err != nil || len(diffs) == 0 {
		return err
	}
	return e.hooks.AttachFirst(d, list)
}

// repair configures both ends, from the inside to the outside: segments arrive only when all is ready.
func (s *Space) repair(l netlink.Link) error {
	peer, err := s.inner.links.LinkByName(inside)
	if err != nil {
		return fmt.Errorf("find the device %s in the proxy namespace: %w", inside, err)
	}
	if peer.Attrs().ParentIndex != l.Attrs().Index || l.Attrs().ParentIndex != peer.Attrs().Index {
		s.leave()
		return fmt.Errorf("the device %s does not lead to the proxy namespace", s.name)
	}
	if err := s.ns.Do(func() error { return writeSysctls(s.o.ProcSysNet, namespaceSysctls) }); err != nil {
		return fmt.Errorf("configure the proxy namespace: %w", err)
	}
	if err := s.inner.attach(peer, programs(s.o.Inside)); err != nil {
		return fmt.Errorf("attach programs in the proxy namespace: %w", err)
	}
	if err := s.inner.route(peer); err != nil {
		return fmt.Errorf("configure the proxy namespace: %w", err)
	}
	if err := s.listen(); err != nil {
		return err
	}
	sysctls := []sysctl{
		{"ipv6/conf/" + s.name + "/disable_ipv6", "1", true}, {"ipv6/conf/" + s.name + "/addr_gen_mode", "1", true},
	}
	if err := s.o.Home.Do(func() error { return writeSysctls(s.o.ProcSysNet, sysctls) }); err != nil {
		return fmt.Errorf("configure the device %s: %w", s.name, err)
	}
	// Without its program, the device would give packets of the proxy to the stack.
	if err := s.node.attach(l, programs(s.o.Programs)); err != nil {
		return fmt.Errorf("attach programs to %s: %w", s.name, err)
	}
	if err := errors.Join(s.node.links.LinkSetARPOff(l), s.node.links.LinkSetUp(l)); err != nil {
		return fmt.Errorf("set the device %s up: %w", s.name, err)
	}
	return nil
}

// sysctl is a setting. Those of IPv6 are left out on kernels without it.
type sysctl struct {
	path, value string
	six         bool
}

// namespaceSysctls let packets with any addresses in and out, and let proxies bind any port without a capability.
var namespaceSysctls = []sysctl{
	{"core/somaxconn", "4096", false},
	{"ipv4/tcp_max_syn_backlog", "4096", false},
	{"ipv4/tcp_fwmark_accept", "1", false},
	{"ipv4/tcp_tw_reuse", "1", false},
	{"ipv4/ip_unprivileged_port_start", "0", false},
	{"ipv4/conf/all/rp_filter", "0", false},
	{"ipv4/conf/" + inside + "/rp_filter", "0", false},
	{"ipv4/conf/" + inside + "/send_redirects", "0", false},
	{"ipv4/conf/all/send_redirects", "0", false},
	{"ipv6/conf/all/disable_ipv6", "0", true},
	{"ipv6/conf/lo/disable_ipv6", "0", true},
	{"ipv6/conf/" + inside + "/disable_ipv6", "0", true},
	{"ipv6/conf/" + inside + "/accept_ra", "0", true},
	{"ipv6/conf/" + inside + "/accept_dad", "0", true},
	{"ipv6/conf/" + inside + "/router_solicitations", "0", true},
	{"ipv6/conf/" + inside + "/addr_gen_mode", "1", true},
}

// writeSysctls changes the settings that differ, in the namespace of the calling thread.
func writeSysctls(dir string, list []sysctl) error {
	for _, s := range list {
		path := filepath.Join(dir, s.path)
		have, err := os.ReadFile(path)
		if s.six && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil && strings.TrimSpace(string(have)) != s.value {
			err = os.WriteFile(path, []byte(s.value), 0)
		}
		if err != nil {
			return fmt.Errorf("sysctl net/%s=%s: %w", s.path, s.value, err)
		}
	}
	return nil
}

// route makes every destination of an arriving packet local, and sends what sockets send out of the device.
func (e *end) route(peer netlink.Link) error {
	lo, err := e.links.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := errors.Join(
		e.links.LinkSetUp(lo), e.links.LinkSetARPOff(peer), e.links.LinkSetUp(peer),
	); err != nil {
		return err
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		if err := e.routeFamily(family, lo, peer); err != nil {
			if family == netlink.FAMILY_V6 && errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
				continue
			}
			return err
		}
	}
	return nil
}

func (e *end) routeFamily(family int, lo, peer netlink.Link) error {
	rules, err := e.links.RuleListFiltered(family, &netlink.Rule{Table: table}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return err
	}
	if len(rules) == 0 {
		r := netlink.NewRule()
		r.Family, r.IifName, r.Table, r.Priority = family, inside, table, table
		if err := e.links.RuleAdd(r); err != nil {
			return fmt.Errorf("rule: %w", err)
		}
	}
	all := anywhere(family)
	local := netlink.Route{
		LinkIndex: lo.Attrs().Index, Table: table, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, Dst: all, Family: family,
	}
	out := netlink.Route{LinkIndex: peer.Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: all, Family: family}
	for _, r := range []netlink.Route{local, out} {
		if err := e.links.RouteReplace(&r); err != nil {
			return fmt.Errorf("route: %w", err)
		}
	}
	return nil
}

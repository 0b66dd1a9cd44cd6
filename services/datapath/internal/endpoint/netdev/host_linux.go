// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/node/podrange"
)

// Node-wide state for all endpoints:
//
//   - the node's own address of each pod range on lo, from which it replies to pods;
//   - an unreachable route for each range, so that packets to an unassigned address do not leave by
//     the uplink;
//   - rules for each range that prohibit packets from the range that no program marked;
//   - removal of devices whose endpoints a killed process deleted.

// CheckNode compares the node-wide state with the kernel.
func (n *Netdev) CheckNode() ([]endpoint.Difference, error) {
	var ds differences
	lo, err := n.reads.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("find lo: %w", err)
	}
	if lo.Attrs().Flags&net.FlagUp == 0 {
		ds.add("device state", "lo", "up", "down")
	}
	addrs, err := whole(func() ([]netlink.Addr, error) { return n.reads.AddrList(lo, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses of lo: %w", err)
	}
	for _, a := range n.o.Ranges.NodeAddrs() {
		want := ipNet(netip.PrefixFrom(a, a.BitLen())).String()
		if !slices.ContainsFunc(addrs, func(have netlink.Addr) bool { return have.IPNet.String() == want }) {
			ds.add("node address", want, "on lo", "")
		}
	}
	for _, p := range n.o.Ranges.All() {
		rules, err := n.listRules(family(p.Addr()))
		if err != nil {
			return nil, fmt.Errorf("list rules: %w", err)
		}
		for _, want := range n.rules(p) {
			if !slices.ContainsFunc(rules, func(have netlink.Rule) bool { return sameRule(have, want) }) {
				ds.add("rule", p.String(), describeRule(want), "")
			}
		}
		routes, err := whole(func() ([]netlink.Route, error) {
			return n.reads.RouteListFiltered(family(p.Addr()), unreachable(p), netlink.RT_FILTER_DST|netlink.RT_FILTER_TYPE)
		})
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		if len(routes) == 0 {
			ds.add("route", p.String(), "unreachable", "")
		}
	}
	err = n.o.Home.Do(func() error {
		list, err := n.nodeSysctls()
		if err != nil {
			return err
		}
		s, err := checkSysctls(list)
		ds = append(ds, s...)
		return err
	})
	return ds, err
}

// RepairNode repairs what CheckNode finds.
func (n *Netdev) RepairNode() error {
	n.node.Lock()
	defer n.node.Unlock()
	var errs []error
	if err := n.deleteGroup(n.group | 1); err != nil {
		errs = append(errs, err)
	}
	lo, err := n.reads.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := n.changes.LinkSetUp(lo); err != nil {
		errs = append(errs, fmt.Errorf("set lo up: %w", err))
	}
	for _, a := range n.o.Ranges.NodeAddrs() {
		addr := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, a.BitLen()))}
		if a.Is6() {
			addr.Flags = unix.IFA_F_NODAD
		}
		if err := n.changes.AddrReplace(lo, addr); err != nil {
			errs = append(errs, fmt.Errorf("address %v on lo: %w", a, err))
		}
	}
	for _, p := range n.o.Ranges.All() {
		for _, r := range n.rules(p) {
			if err := n.changes.RuleAdd(r); err != nil && !errors.Is(err, unix.EEXIST) {
				errs = append(errs, fmt.Errorf("rule %s: %w", describeRule(r), err))
			}
		}
		if err := n.changes.RouteReplace(unreachable(p)); err != nil {
			errs = append(errs, fmt.Errorf("unreachable route for %v: %w", p, err))
		}
	}
	if n.o.SetGlobal {
		errs = append(errs, n.o.Home.Do(func() error {
			list, err := n.nodeSysctls()
			return errors.Join(err, applySysctls(n.o.ProcSysNet, list))
		}))
	}
	return errors.Join(errs...)
}

// rules returns the rules that stop packets from a pod range without a mark:
//
//	8: from NODE iif lo goto 10
//	9: from RANGE fwmark 0/0xf00 prohibit
//	10: nop
//
// The node's own address lies in the range. Packets that the node itself sends pass no program and
// need no mark.
func (n *Netdev) rules(p netip.Prefix) []*netlink.Rule {
	rule := func(pref int) *netlink.Rule {
		r := netlink.NewRule()
		r.Priority, r.Family, r.Protocol = pref, family(p.Addr()), Protocol
		return r
	}
	mask := uint32(MarkMask)
	stop := rule(rulePriority)
	stop.Src, stop.Mask, stop.Type = ipNet(p), &mask, unix.RTN_PROHIBIT

	node := podrange.NodeAddr(p)
	land := rule(rulePriority + 1)
	land.Type = unix.FR_ACT_NOP
	jump := rule(rulePriority - 1)
	jump.Src, jump.IifName = ipNet(netip.PrefixFrom(node, node.BitLen())), "lo"
	jump.Type, jump.Goto = unix.FR_ACT_GOTO, land.Priority
	return []*netlink.Rule{land, jump, stop}
}

// listRules reads the rules of an address family. netlink.RuleList does not return the action of a
// rule, which must be compared.
func (n *Netdev) listRules(family int) (rules []netlink.Rule, err error) {
	var msgs [][]byte
	err = n.o.Home.Do(func() (err error) {
		msgs, err = whole(func() ([][]byte, error) {
			req := nl.NewNetlinkRequest(unix.RTM_GETRULE, unix.NLM_F_DUMP)
			req.AddData(nl.NewIfInfomsg(family))
			return req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWRULE)
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, m := range msgs {
		head := nl.DeserializeRtMsg(m)
		attrs, err := nl.ParseRouteAttr(m[head.Len():])
		if err != nil {
			return nil, err
		}
		r := netlink.NewRule()
		r.Type, r.Invert = head.Type, head.Flags&netlink.FibRuleInvert != 0
		for _, a := range attrs {
			switch a.Attr.Type {
			case nl.FRA_SRC:
				r.Src = &net.IPNet{IP: a.Value, Mask: net.CIDRMask(int(head.Src_len), 8*len(a.Value))}
			case nl.FRA_DST:
				r.Dst = &net.IPNet{IP: a.Value, Mask: net.CIDRMask(int(head.Dst_len), 8*len(a.Value))}
			case nl.FRA_IIFNAME:
				r.IifName = unix.ByteSliceToString(a.Value)
			case nl.FRA_OIFNAME:
				r.OifName = unix.ByteSliceToString(a.Value)
			case nl.FRA_PRIORITY:
				r.Priority = int(binary.NativeEndian.Uint32(a.Value))
			case nl.FRA_FWMARK:
				r.Mark = binary.NativeEndian.Uint32(a.Value)
			case nl.FRA_FWMASK:
				mask := binary.NativeEndian.Uint32(a.Value)
				r.Mask = &mask
			case nl.FRA_GOTO:
				r.Goto = int(binary.NativeEndian.Uint32(a.Value))
			}
		}
		rules = append(rules, *r)
	}
	return rules, nil
}

func sameRule(have netlink.Rule, want *netlink.Rule) bool {
	mask := func(r *netlink.Rule) uint32 {
		if r.Mask == nil {
			return 0
		}
		return *r.Mask
	}
	src := func(r *netlink.Rule) string {
		if r.Src == nil {
			return ""
		}
		return r.Src.String()
	}
	return have.Priority == want.Priority && !have.Invert && have.Dst == nil && have.OifName == "" &&
		src(&have) == src(want) && have.Mark == want.Mark &&
		mask(&have) == mask(want) && have.Type == want.Type && have.IifName == want.IifName &&
		(want.Goto < 0 || have.Goto == want.Goto)
}

func describeRule(r *netlink.Rule) string {
	switch r.Type {
	case unix.RTN_PROHIBIT:
		return fmt.Sprintf("pref %d from %v fwmark 0/%#x prohibit", r.Priority, r.Src, MarkMask)
	case unix.FR_ACT_GOTO:
		return fmt.Sprintf("pref %d from %v iif lo goto %d", r.Priority, r.Src, r.Goto)
	}
	return fmt.Sprintf("pref %d nop", r.Priority)
}

func unreachable(p netip.Prefix) *netlink.Route {
	return &netlink.Route{Dst: ipNet(p), Type: unix.RTN_UNREACHABLE, Protocol: Protocol, Table: unix.RT_TABLE_MAIN}
}

// nodeSysctls returns settings of the whole node. Redirects are sent if either "all" or the device enables them; the
// host end's own value is not enough.
func (n *Netdev) nodeSysctls() ([]sysctl, error) {
	s, err := n.filteredUplinks()
	if err != nil {
		return nil, err
	}
	for _, p := range n.o.Ranges.All() {
		if p.Addr().Is4() {
			s = append(s, sysctl{path: "ipv4/ip_forward", value: "1"}, sysctl{path: "ipv4/conf/all/send_redirects", value: "0"})
		} else {
			s = append(s, sysctl{path: "ipv6/conf/all/forwarding", value: "1"})
		}
	}
	return s, nil
}

// filteredUplinks returns settings that switch off the reverse path filter (rp_filter) on the
// devices of default routes. In any mode, also loose, the filter drops packets from outside to
// pods: it looks up the route of an unmarked packet from the pod, which a rule prohibits (see
// rules). The kernel uses the larger of the device's value and the value of "all".
func (n *Netdev) filteredUplinks() ([]sysctl, error) {
	const off = "0"
	links, err := defaultLinks(n.reads, unix.AF_INET)
	if err != nil {
		return nil, err
	}
	all := sysctl{path: "ipv4/conf/all/rp_filter", value: off}
	every, err := all.read()
	if err != nil {
		return nil, err
	}
	var list []sysctl
	if len(links) > 0 && every != off {
		list = append(list, all)
	}
	for _, l := range links {
		s := sysctl{path: "ipv4/conf/" + l.Attrs().Name + "/rp_filter", value: off}
		own, err := s.read()
		switch {
		case errors.Is(err, fs.ErrNotExist): // the device was removed meanwhile
		case err != nil:
			return nil, err
		case own != off:
			list = append(list, s)
		}
	}
	return list, nil
}

// RemoveNode removes what RepairNode adds, for an uninstallation and for tests. The process never
// calls it at its end, because endpoints must keep working without the process.
func (n *Netdev) RemoveNode() error {
	n.node.Lock()
	defer n.node.Unlock()
	var errs []error
	for _, p := range n.o.Ranges.All() {
		errs = append(errs, n.removeRange(p, nil))
	}
	return errors.Join(errs...)
}

// RemoveRange removes what RepairNode added for a range that is no longer in the set, except what
// another range of the set needs.
func (n *Netdev) RemoveRange(p netip.Prefix) error {
	n.node.Lock()
	defer n.node.Unlock()
	return n.removeRange(p, n.o.Ranges.All())
}

func (n *Netdev) removeRange(p netip.Prefix, keep []netip.Prefix) error {
	needed, addrs := map[string]bool{}, []netip.Addr(nil)
	for _, q := range keep {
		addrs = append(addrs, podrange.NodeAddr(q))
		for _, r := range n.rules(q) {
			needed[fmt.Sprint(r.Family, describeRule(r))] = true
		}
	}
	var errs []error
	for _, r := range n.rules(p) {
		if !needed[fmt.Sprint(r.Family, describeRule(r))] {
			errs = append(errs, ignoring(n.changes.RuleDel(r), unix.ENOENT))
		}
	}
	errs = append(errs, ignoring(n.changes.RouteDel(unreachable(p)), unix.ESRCH))
	own := podrange.NodeAddr(p)
	if slices.Contains(addrs, own) {
		return errors.Join(errs...)
	}
	lo, err := n.reads.LinkByName("lo")
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	addr := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(own, own.BitLen()))}
	return errors.Join(append(errs, ignoring(n.changes.AddrDel(lo, addr), unix.EADDRNOTAVAIL))...)
}

// AddrIn returns an address in a range that a device has, other than the node's own address on lo.
func (n *Netdev) AddrIn(p netip.Prefix) (a netip.Addr, device string, err error) {
	list, err := whole(func() ([]netlink.Addr, error) { return n.reads.AddrList(nil, family(p.Addr())) })
	if err != nil {
		return a, "", fmt.Errorf("list addresses: %w", err)
	}
	for _, have := range list {
		ip, _ := netip.AddrFromSlice(have.IP)
		if a = ip.Unmap(); !p.Contains(a) || a == podrange.NodeAddr(p) && have.LinkIndex == loopback {
			continue
		}
		link, err := n.reads.LinkByIndex(have.LinkIndex)
		if err != nil {
			return a, fmt.Sprintf("device %d", have.LinkIndex), nil
		}
		return a, link.Attrs().Name, nil
	}
	return netip.Addr{}, "", nil
}

func ignoring(err, ok error) error {
	if errors.Is(err, ok) {
		return nil
	}
	return err
}

// HostAddrs lists the addresses at which packets reach the node itself: first its own addresses in
// the pod ranges, then the addresses of its devices except service devices, and the broadcast and
// anycast addresses that the kernel also accepts.
func (n *Netdev) HostAddrs() ([]netip.Addr, error) {
	list, err := whole(func() ([]netlink.Addr, error) { return n.reads.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var as []netip.Addr
	service := map[int]bool{} // by index
	for _, a := range list {
		ip, ok := netip.AddrFromSlice(a.IP)
		if !ok {
			continue
		}
		if _, known := service[a.LinkIndex]; !known {
			if service[a.LinkIndex], err = n.isServiceDevice(a.LinkIndex); err != nil {
				return nil, err
			}
		}
		if service[a.LinkIndex] {
			continue
		}
		as = append(as, ip.Unmap())
		if b, ok := netip.AddrFromSlice(a.Broadcast); ok {
			as = append(as, b.Unmap())
		}
		ones, _ := a.Mask.Size()
		if b, ok := sharedAddr(netip.PrefixFrom(ip.Unmap(), ones)); ok {
			as = append(as, b)
		}
	}
	slices.SortFunc(as, netip.Addr.Compare)
	own := n.o.Ranges.NodeAddrs()
	as = slices.DeleteFunc(slices.Compact(as), func(a netip.Addr) bool { return slices.Contains(own, a) })
	return slices.Concat(own, as), nil
}

// isServiceDevice reports whether the addresses of a device belong to services. It returns true for
// a device that was removed.
func (n *Netdev) isServiceDevice(index int) (bool, error) {
	link, err := n.reads.LinkByIndex(index)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("find device %d: %w", index, err)
	}
	return slices.ContainsFunc(n.o.ServiceDevices, func(pattern string) bool {
		ok, err := path.Match(pattern, link.Attrs().Name)
		return ok && err == nil
	}), nil
}

// sharedAddr returns the address of a device's prefix that the kernel treats as its own although
// all hosts or routers share it: the IPv4 broadcast address, the IPv6 subnet-router anycast address. Packets that a pod
// sends there go to the host.
func sharedAddr(p netip.Prefix) (netip.Addr, bool) {
	if bits := p.Addr().BitLen(); !p.IsValid() || p.Bits() >= bits-1 {
		return netip.Addr{}, false
	}
	if p.Addr().Is6() {
		return p.Masked().Addr(), true
	}
	last := p.Masked().Addr().As4()
	for i := p.Bits(); i < 32; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	return netip.AddrFrom4(last), true
}

// DefaultMTU returns the MTU of the device of the default route, or 1500 without a default route.
func DefaultMTU(home *netns.Namespace) (uint16, error) {
	var h *netlink.Handle
	err := home.Do(func() (err error) {
		h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return 0, err
	}
	defer h.Close()
	for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
		links, err := defaultLinks(h, f)
		if err != nil {
			return 0, err
		}
		for _, l := range links {
			if l.Attrs().MTU >= 1280 && l.Attrs().MTU <= 65535 {
				return uint16(l.Attrs().MTU), nil
			}
		}
	}
	return 1500, nil
}

// defaultLinks returns the devices of the default routes in the main table.
func defaultLinks(h *netlink.Handle, family int) ([]netlink.Link, error) {
	routes, err := whole(func() ([]netlink.Route, error) {
		return h.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	var links []netlink.Link
	for _, r := range routes {
		if !isDefault(r) || r.LinkIndex == 0 {
			continue
		}
		// skip devices that were removed meanwhile
		if l, err := h.LinkByIndex(r.LinkIndex); err == nil {
			links = append(links, l)
		}
	}
	return links, nil
}

// InitialNamespace reports whether the calling thread is in the machine's initial network
// namespace: some sysctls exist only there.
func InitialNamespace() bool {
	_, err := os.Stat(sysctlRoot + "ipv4/neigh/default/gc_thresh3")
	return !errors.Is(err, fs.ErrNotExist)
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/flow"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/record"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

func TestKernelPodsTalkThroughTheProgramsAlone(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	a, b := w.pod("a"), w.pod("b")
	for _, addr := range b.spec.Addrs {
		before := w.counted(event.ForwardedToPod)
		if err := talk(a.ns, b.echo(addr), patience); err != nil {
			t.Fatalf("tcp a to %v: %v", addr, err)
		}
		// three packets of the handshake, data and an acknowledgement in each direction
		if n := w.counted(event.ForwardedToPod) - before; n < 6 {
			t.Errorf("tcp a to %v: the programs moved %d packets, want >= 6", addr, n)
		}
	}
	if n := w.counted(event.ForwardedFromStack); n != 0 {
		t.Errorf("%d packets between pods passed the host's stack", n)
	}
	diffs, err := w.node.Endpoints.Reconciler.Check(t.Context(), a.owner, lifecycle.Expected{})
	if err != nil || len(diffs) > 0 {
		t.Errorf("check of a fresh endpoint: %+v, %v", diffs, err)
	}
}

func TestKernelHostAndPodTalk(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	p := w.pod("a")
	for _, addr := range p.spec.Addrs {
		if err := talk(w.home, p.echo(addr), patience); err != nil {
			t.Errorf("host to %v: %v", addr, err)
		}
	}
	host := &pod{t: t, ns: w.home}
	for _, addr := range w.node.Ranges.NodeAddrs() {
		before := w.counted(event.ForwardedToHost)
		if err := talk(p.ns, host.echo(addr), patience); err != nil {
			t.Errorf("pod to its host %v: %v", addr, err)
		}
		if w.counted(event.ForwardedToHost) == before {
			t.Errorf("pod to its host %v: no packet counted", addr)
		}
	}
}

func TestKernelDeletionCutsAtOnceAndReleasesLater(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	a, b := w.pod("a"), w.pod("b")
	addr := b.echo(b.spec.Addrs[0])
	c, err := dialIn(a.ns, "tcp", addr, patience)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := exchange(c, "before", patience); err != nil {
		t.Fatal(err)
	}
	if existed, err := w.delete(b.owner); err != nil || !existed {
		t.Fatalf("delete: %v, %v", existed, err)
	}
	dropped := w.counted(event.NoRoute) + w.counted(event.NoEndpoint)
	if err := exchange(c, "after", 300*time.Millisecond); err == nil {
		t.Error("a connection of a deleted endpoint still exchanges data")
	}
	if w.counted(event.NoRoute)+w.counted(event.NoEndpoint) == dropped {
		t.Error("no drop counted")
	}
	servicetest.EventuallyNil(t, "release", func() error {
		w.leases.mu.Lock()
		defer w.leases.mu.Unlock()
		if _, held := w.leases.held[b.owner]; held || w.node.Endpoints.Report.Counts().PendingReleases > 0 {
			return errors.New("the addresses are still allocated")
		}
		return nil
	})
	// the namespace outlives the endpoint, but the device must be removed
	servicetest.EventuallyNil(t, "reap", func() error {
		devices, err := w.node.Devices.Devices()
		if err != nil {
			return err
		}
		if len(devices) != 1 {
			return errors.New("the device is still there")
		}
		return nil
	})
}

// sendFrom sends one UDP datagram from the pod's device with any source address.
func (p *pod) sendFrom(source netip.Addr, to netip.AddrPort) {
	p.t.Helper()
	packet := make([]byte, 32)
	packet[0], packet[8], packet[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(packet[2:], uint16(len(packet)))
	src, dst := source.As4(), to.Addr().As4()
	copy(packet[12:], src[:])
	copy(packet[16:], dst[:])
	binary.BigEndian.PutUint16(packet[20:], 4000)
	binary.BigEndian.PutUint16(packet[22:], to.Port())
	binary.BigEndian.PutUint16(packet[24:], 12)
	err := p.ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: dst})
	})
	if err != nil {
		p.t.Fatal(err)
	}
}

func TestKernelSpoofedSourceIsDroppedWithItsReason(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	a, b := w.pod("a"), w.pod("b")
	before := w.counted(event.SpoofedIP)
	reader := w.node.Observation.Ring.Tail()
	a.sendFrom(netip.MustParseAddr("10.99.0.77"), netip.AddrPortFrom(b.spec.Addrs[0], 9))
	if n := w.counted(event.SpoofedIP) - before; n != 1 {
		t.Fatalf("%d spoofed packets counted, want 1", n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		e, _, _, err := reader.Next(ctx, true)
		if err != nil {
			t.Fatalf("no event of the spoofed packet: %v", err)
		}
		if e.Reason != uint32(event.SpoofedIP) {
			continue
		}
		if e.From.Owner != a.owner || e.Verdict != flow.Dropped || !e.Egress || e.Source.Addr().String() != "10.99.0.77" {
			t.Errorf("event %+v, want one about %s", e, a.owner)
		}
		return
	}
}

// cutOff fails unless the pod reaches none of the targets: no other pod, not the node, nothing beyond it.
func cutOff(t *testing.T, w *world, a *pod, targets map[string]netip.AddrPort) {
	t.Helper()
	for name, addr := range targets {
		if err := talk(a.ns, addr, 300*time.Millisecond); err == nil {
			t.Errorf("without its programs the pod reaches %s (%v)", name, addr)
		}
	}
}

func (w *world) deleteClsact(p *pod) {
	w.t.Helper()
	q := &netlink.GenericQdisc{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: int(p.ep.Device.HostIndex), Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}, QdiscType: "clsact"}
	if err := w.home.Do(func() error { return netlink.QdiscDel(q) }); err != nil {
		w.t.Fatal(err)
	}
}

// outside connects the node to another namespace that pods reach through routing.
func (w *world) outside() *pod {
	w.t.Helper()
	ns := netnstest.New(w.t)
	out := &pod{t: w.t, ns: ns}
	configure := func(device, addr4, addr6 string, gw4, gw6 net.IP) error {
		link, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		for _, text := range []string{addr4, addr6} {
			a, err := netlink.ParseAddr(text)
			if err != nil {
				return err
			}
			a.Flags = unix.IFA_F_NODAD
			if err := netlink.AddrAdd(link, a); err != nil {
				return err
			}
		}
		if err := netlink.LinkSetUp(link); err != nil || gw4 == nil {
			return err
		}
		for _, r := range []*netlink.Route{
			{Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Gw: gw4},
			{Dst: &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}, Gw: gw6},
		} {
			if err := netlink.RouteAdd(r); err != nil {
				return err
			}
		}
		return nil
	}
	err := w.home.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "up0"
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(ns.Fd())}); err != nil {
			return err
		}
		return configure("up0", "192.0.2.1/24", "2001:db8::1/64", nil, nil)
	})
	if err == nil {
		err = ns.Do(func() error {
			return configure("eth0", "192.0.2.2/24", "2001:db8::2/64", net.ParseIP("192.0.2.1"), net.ParseIP("2001:db8::1"))
		})
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// TestKernelWithoutItsProgramsAPodReachesNothing proves INV-33.
func TestKernelWithoutItsProgramsAPodReachesNothing(t *testing.T) {
	w := newWorld(t)
	w.start(false) // no repairs
	a, b := w.pod("a"), w.pod("b")
	out := w.outside()
	host := &pod{t: t, ns: w.home}
	targets := map[string]netip.AddrPort{
		"a pod (IPv4)":            b.echo(b.spec.Addrs[0]),
		"a pod (IPv6)":            b.echo(b.spec.Addrs[1]),
		"its host (IPv4)":         host.echo(w.node.Ranges.NodeAddrs()[0]),
		"its host (IPv6)":         host.echo(w.node.Ranges.NodeAddrs()[1]),
		"outside (IPv4)":          out.echo(netip.MustParseAddr("192.0.2.2")),
		"outside (IPv6)":          out.echo(netip.MustParseAddr("2001:db8::2")),
		"uplink addr of the host": host.echo(netip.MustParseAddr("192.0.2.1")),
	}
	if err := w.node.Node.Host.SyncAddrs(); err != nil {
		t.Fatal(err)
	}
	for name, addr := range targets {
		servicetest.EventuallyNil(t, "with its programs the pod reaches "+name, func() error {
			return talk(a.ns, addr, patience)
		})
	}
	w.deleteClsact(a)
	cutOff(t, w, a, targets)

	// the rule and the firewall are two barriers: each must block traffic beyond the node on its own
	if err := w.node.Node.Firewall.Remove(); err != nil {
		t.Fatal(err)
	}
	delete(targets, "its host (IPv4)") // the rule of table local comes first: only the firewall blocks this traffic
	delete(targets, "its host (IPv6)")
	delete(targets, "uplink addr of the host")
	cutOff(t, w, a, targets)

	diffs, err := w.node.Endpoints.Reconciler.Check(t.Context(), a.owner, lifecycle.Expected{})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(subjects(diffs), endpoint.SubjectFilter) {
		t.Errorf("check does not report the missing programs: %+v", diffs)
	}
	if err := w.node.Endpoints.Auditor.Audit(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if err := talk(a.ns, targets["a pod (IPv4)"], patience); err != nil {
		t.Errorf("after the audit: %v", err)
	}
	if fw, err := w.node.Node.Firewall.Check(); err != nil || len(fw) > 0 {
		t.Errorf("the audit left the firewall as %+v, %v", fw, err)
	}
}

func TestKernelRemovedProgramsAreSeenRepairedAndCounted(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	a, b := w.pod("a"), w.pod("b")
	addr := b.echo(b.spec.Addrs[0])
	for i := uint64(1); i <= 3; i++ {
		w.deleteClsact(a)
		servicetest.EventuallyNil(t, "repair", func() error {
			if n := w.node.Endpoints.Report.Counts().Repairs; n < i {
				return fmt.Errorf("%d repairs, want %d", n, i)
			}
			return nil
		})
		if err := talk(a.ns, addr, patience); err != nil {
			t.Fatalf("after repair %d: %v", i, err)
		}
	}
	diffs, err := w.node.Endpoints.Reconciler.Check(t.Context(), a.owner, lifecycle.Expected{})
	if err != nil || len(diffs) > 0 {
		t.Errorf("after the repairs: %+v, %v", diffs, err)
	}
}

func TestKernelRemovedWallsAreRebuilt(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	p := w.pod("a")
	intact := func() error {
		diffs, err := w.node.Node.Host.Check()
		if err != nil || len(diffs) > 0 {
			return fmt.Errorf("%+v, %w", diffs, err)
		}
		return nil
	}
	servicetest.EventuallyNil(t, "walls after the start", intact)
	for name, remove := range map[string]func() error{
		"the firewall": w.node.Node.Firewall.Remove,
		"the firewall from its hook": func() error {
			if err := w.home.Do(func() error { return putToSleep(w.node.Node.Firewall.Name()) }); err != nil {
				return err
			}
			if diffs, err := w.node.Node.Firewall.Check(); err != nil || len(diffs) > 0 {
				return err
			}
			// noticed too late, unless it is already repaired
			return w.home.Do(func() error { return isAwake(w.node.Node.Firewall.Name()) })
		},
		"the rules": func() error {
			return w.home.Do(func() error {
				for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
					rules, err := netlink.RuleList(family)
					if err != nil {
						return err
					}
					for _, r := range rules {
						if r.Priority == 9 {
							r.Type = unix.RTN_PROHIBIT
							if err := netlink.RuleDel(&r); err != nil {
								return err
							}
						}
					}
				}
				return nil
			})
		},
	} {
		if err := remove(); err != nil {
			t.Fatalf("remove %s: %v", name, err)
		}
		servicetest.EventuallyNil(t, "rebuild "+name, intact)
	}
	if err := talk(w.home, p.echo(p.spec.Addrs[0]), patience); err != nil {
		t.Error(err)
	}
}

// TestKernelAlteredRulesAreSeen replaces a rule that blocks unmarked packets by a rule that differs in one property.
// The check must report the original rule as missing, and the repair must add it.
func TestKernelAlteredRulesAreSeen(t *testing.T) {
	w := newWorld(t)
	w.start(false) // no repairs
	missing := func() (rules int) {
		t.Helper()
		diffs, err := w.node.Node.Host.Check()
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range diffs {
			if d.Subject == "rule" {
				rules++
			}
		}
		return rules
	}
	if err := w.node.Node.Host.Repair(); err != nil {
		t.Fatal(err)
	}
	if n := missing(); n != 0 {
		t.Fatalf("%d rules are missing at the beginning", n)
	}
	for i, p := range w.node.Ranges.All() {
		version, elsewhere := "-4", "192.0.2.0/24"
		if p.Addr().Is6() {
			version, elsewhere = "-6", "2001:db8::/64"
		}
		ip := func(args ...string) {
			t.Helper()
			args = append([]string{version, "rule"}, args...)
			if err := w.home.Do(func() error {
				out, err := exec.CommandContext(t.Context(), "ip", args...).CombinedOutput()
				if err != nil {
					err = fmt.Errorf("%w: %s", err, out)
				}
				return err
			}); err != nil {
				t.Fatalf("ip %q: %v", args, err)
			}
		}
		// Removing a range keeps the rules that other ranges of its family need: all jump to one rule.
		gone := netip.MustParsePrefix(elsewhere)
		if err := w.node.Devices.RemoveRange(gone); err != nil {
			t.Errorf("remove %v: %v", gone, err)
		}
		if n := missing(); n != 0 {
			t.Errorf("%d rules are missing after %v was removed", n, gone)
		}
		from, node := p.String(), w.node.Ranges.NodeAddrs()[i].String()
		for _, rule := range []struct {
			pref, altered string
		}{
			{"9", "from " + from + " fwmark 0/0xf000 prohibit"},
			{"9", "from " + from + " fwmark 0x100/0xf00 prohibit"},
			{"9", "not from " + from + " fwmark 0/0xf00 prohibit"},
			{"9", "from " + from + " iif lo fwmark 0/0xf00 prohibit"},
			{"9", "from " + from + " oif lo fwmark 0/0xf00 prohibit"},
			{"9", "from " + from + " to " + elsewhere + " fwmark 0/0xf00 prohibit"},
			{"9", "from " + from + " fwmark 0/0xf00 lookup main"},
			{"9", "from " + elsewhere + " fwmark 0/0xf00 prohibit"},
			{"8", "from " + node + " goto 10"},
			{"8", "from " + from + " iif lo goto 10"},
			{"10", "from " + from + " prohibit"},
		} {
			altered := append([]string{"pref", rule.pref}, strings.Fields(rule.altered)...)
			if altered[2] == "not" {
				altered = append([]string{"not", "pref", rule.pref}, altered[3:]...)
			}
			ip("del", "pref", rule.pref)
			ip(append([]string{"add"}, altered...)...)
			if n := missing(); n != 1 {
				t.Errorf("with %q: %d rules are missing, want 1", altered, n)
			}
			if err := w.node.Node.Host.Repair(); err != nil {
				t.Fatal(err)
			}
			if n := missing(); n != 0 {
				t.Errorf("with %q: %d rules are missing after the repair", altered, n)
			}
			ip(append([]string{"del"}, altered...)...)
			if n := missing(); n != 0 {
				t.Fatalf("without %q: %d rules are missing", altered, n)
			}
		}
	}
}

// putToSleep makes a table dormant: its chains are detached from their hooks. The nftables library has no function for
// this.
func putToSleep(table string) error {
	const begin, end = 0x10, 0x11 // NFNL_MSG_BATCH_BEGIN and _END of linux/netfilter/nfnetlink.h
	message := func(kind, family, resource uint16, attrs []byte) []byte {
		b := binary.NativeEndian.AppendUint32(nil, uint32(20+len(attrs)))
		b = binary.NativeEndian.AppendUint16(b, kind)
		b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST)
		b = append(b, 0, 0, 0, 0, 0, 0, 0, 0, byte(family), 0)
		return append(binary.BigEndian.AppendUint16(b, resource), attrs...)
	}
	name := append([]byte(table), 0)
	attrs := binary.NativeEndian.AppendUint16(nil, uint16(4+len(name)))
	attrs = append(binary.NativeEndian.AppendUint16(attrs, unix.NFTA_TABLE_NAME), name...)
	for len(attrs)%4 != 0 {
		attrs = append(attrs, 0)
	}
	attrs = binary.NativeEndian.AppendUint16(attrs, 8)
	attrs = binary.NativeEndian.AppendUint16(attrs, unix.NFTA_TABLE_FLAGS)
	attrs = binary.BigEndian.AppendUint32(attrs, unix.NFT_TABLE_F_DORMANT)

	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Sendto(fd, slices.Concat(
		message(begin, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES, nil),
		message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWTABLE, unix.NFPROTO_INET, 0, attrs),
		message(end, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES, nil),
	), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

func isAwake(name string) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	table, err := c.ListTableOfFamily(name, nftables.TableFamilyINet)
	if err != nil {
		return err
	}
	if table.Flags != 0 {
		return errors.New("the table is dormant, and the check reports no difference")
	}
	return nil
}

// TestKernelFiltersAreReplacedWithoutLossOrBypass proves INV-32.
func TestKernelFiltersAreReplacedWithoutLossOrBypass(t *testing.T) {
	w := newWorld(t)
	w.start(false)
	a, b := w.pod("a"), w.pod("b")
	sink := b.listen("udp", netip.AddrPortFrom(b.spec.Addrs[0], 0).String()).(net.PacketConn)
	defer sink.Close()
	to := netip.AddrPortFrom(b.spec.Addrs[0], uint16(sink.LocalAddr().(*net.UDPAddr).Port))
	c, err := dialIn(a.ns, "udp", to, patience)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()

	stop := make(chan struct{})
	replaced := make(chan int, 1)
	go func() {
		n := 0
		defer func() { replaced <- n }()
		for {
			select {
			case <-stop:
				return
			default:
				if err := w.node.Devices.Attach(a.ep.Device); err != nil {
					t.Error(err)
					return
				}
				n++
			}
		}
	}()
	before := w.counted(event.ForwardedToPod)
	const packets = 50_000
	for range packets {
		if _, err := c.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	n := <-replaced
	if got := w.counted(event.ForwardedToPod) - before; got != packets {
		t.Errorf("%d packets sent during %d replacements, the programs moved %d", packets, n, got)
	}
	if stack := w.counted(event.ForwardedFromStack); stack != 0 {
		t.Errorf("%d packets passed the stack", stack)
	}
	if n < 10 {
		t.Errorf("only %d replacements during the test", n)
	}
	t.Logf("%d packets, %d replacements", packets, n)
}

func TestKernelConnectionsLiveThroughRestarts(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	a, b := w.pod("a"), w.pod("b")
	c, err := dialIn(a.ns, "tcp", b.echo(b.spec.Addrs[1]), patience)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	filter := func() int {
		var id int
		if err := w.home.Do(func() error {
			link, err := netlink.LinkByIndex(int(a.ep.Device.HostIndex))
			if err != nil {
				return err
			}
			fs, err := netlink.FilterList(link, netlink.HANDLE_MIN_INGRESS)
			if err == nil && len(fs) == 1 {
				id = fs[0].(*netlink.BpfFilter).Id
			}
			return err
		}); err != nil || id == 0 {
			t.Fatalf("filter of %s: %v", a.owner, err)
		}
		return id
	}
	program := filter()
	for i := range 5 {
		moved := w.counted(event.ForwardedToPod)
		w.stop()
		if err := exchange(c, fmt.Sprint("while it is unavailable ", i), patience); err != nil {
			t.Fatal(err)
		}
		w.start(true)
		if n := w.counted(event.ForwardedToPod); n <= moved {
			t.Errorf("restart %d: the counter went from %d to %d, so other programs handled the traffic", i, moved, n)
		}
		if now := filter(); now != program {
			t.Errorf("restart %d: program %d was replaced by %d although nothing changed", i, program, now)
		}
		for _, p := range []*pod{a, b} {
			e, err := w.node.Endpoints.Report.Get(p.owner)
			if err != nil || e.State != endpoint.Ready || e.Slot != p.ep.Slot {
				t.Fatalf("restart %d: %s is %+v, %v", i, p.owner, e, err)
			}
		}
		if err := exchange(c, fmt.Sprint("afterwards ", i), patience); err != nil {
			t.Fatal(err)
		}
	}
	if n := w.node.Endpoints.Report.Counts().Repairs; n != 0 {
		t.Errorf("%d repairs after clean restarts", n)
	}
}

func TestKernelRestartFindsWhatChangedMeanwhile(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	a, b, gone, deleted := w.pod("a"), w.pod("b"), w.pod("gone"), w.pod("deleted")
	addr := b.echo(b.spec.Addrs[0])
	w.stop()

	w.deleteClsact(a)
	if err := w.home.Do(func() error {
		link, err := netlink.LinkByName(b.ep.Device.HostName)
		if err != nil {
			return err
		}
		return netlink.LinkSetDown(link)
	}); err != nil {
		t.Fatal(err)
	}
	gone.ns.Close() // the container ends: its namespace and its device are destroyed
	servicetest.EventuallyNil(t, "the device is removed with its namespace", func() error {
		return w.home.Do(func() error {
			if _, err := netlink.LinkByName(gone.ep.Device.HostName); err == nil {
				return errors.New("still there")
			}
			return nil
		})
	})
	spool := filepath.Join(w.dir, "spool")
	writeSpool(t, spool, deleted.owner, time.Now())

	w.start(true)
	parts := w.node.Endpoints.Parts
	if err := record.OpenSpool(spool, log.Discard()).Replay(t.Context(), parts.Report, parts.Lifecycle); err != nil {
		t.Fatal(err)
	}
	for _, o := range []workload.Owner{gone.owner, deleted.owner} {
		if _, err := w.node.Endpoints.Report.Get(o); !errors.Is(err, endpoint.ErrNotFound) {
			t.Errorf("endpoint of %s: %v, want it deleted", o, err)
		}
	}
	if left, _ := os.ReadDir(spool); len(left) != 0 {
		t.Errorf("spool still has %v", left)
	}
	if err := talk(a.ns, addr, patience); err != nil {
		t.Errorf("after the repair: %v", err)
	}
	if n := w.node.Endpoints.Report.Counts().Repairs; n != 1 {
		t.Errorf("%d attachment repairs, want 1", n)
	}
	entries, err := w.node.Kernel.Endpoints.List()
	if err != nil || len(entries) != 2 {
		t.Errorf("%d published endpoints (%v), want 2", len(entries), err)
	}
	servicetest.EventuallyNil(t, "release", func() error {
		w.leases.mu.Lock()
		defer w.leases.mu.Unlock()
		if len(w.leases.held) != 2 {
			return fmt.Errorf("%d leases held, want 2", len(w.leases.held))
		}
		return nil
	})
}

// TestKernelSpoolIsReplayedWhileServing spools a deletion just before the socket exists. The service must replay it
// without another restart, independent of the clock times of the spool entry and of the endpoint's creation.
func TestKernelSpoolIsReplayedWhileServing(t *testing.T) {
	w := newWorld(t)
	spool := filepath.Join(w.dir, "spool")
	hourAgo := time.Now().Add(-time.Hour)
	w.start(true)
	kept, early, deleted := w.pod("kept"), w.pod("early"), w.pod("deleted")
	ctx, cancel := context.WithCancel(t.Context())
	looped := make(chan error, 1)
	go func() { looped <- w.node.Endpoints.Replay(ctx, record.OpenSpool(spool, log.Discard())) }()
	writeSpool(t, spool, early.owner, hourAgo)
	writeSpool(t, spool, deleted.owner, time.Now())
	servicetest.EventuallyNil(t, "the spool is worked off", func() error {
		if left, _ := os.ReadDir(spool); len(left) != 0 {
			return fmt.Errorf("spool still has %v", left)
		}
		return nil
	})
	for _, o := range []workload.Owner{early.owner, deleted.owner} {
		if _, err := w.node.Endpoints.Report.Get(o); !errors.Is(err, endpoint.ErrNotFound) {
			t.Errorf("endpoint of %s: %v, want it deleted", o, err)
		}
	}
	if _, err := w.node.Endpoints.Report.Get(kept.owner); err != nil {
		t.Errorf("an endpoint without a deletion: %v, want it kept", err)
	}
	cancel()
	if err := <-looped; !errors.Is(err, context.Canceled) {
		t.Errorf("the loop ended with %v", err)
	}
}

// stubborn is a record store that cannot mark one owner's endpoint as deleted.
type stubborn struct {
	*record.Store
	owner workload.Owner
}

func (s stubborn) Save(r endpoint.Record) error {
	if r.Spec.Owner == s.owner && r.Phase == endpoint.PhaseDeleted {
		return errors.New("no space left")
	}
	return s.Store.Save(r)
}

// TestKernelOneStubbornDeletionKeepsNoOtherWaiting replays several deletions of which one fails. The failed deletion
// stays in the spool, the others are done.
func TestKernelOneStubbornDeletionKeepsNoOtherWaiting(t *testing.T) {
	w := newWorld(t)
	bad := workload.Owner{ContainerID: "bad", Interface: "eth0"}
	w.records = func(s *record.Store) endpoint.Records { return stubborn{s, bad} }
	w.start(true)
	pods := []*pod{w.pod("a"), w.pod("bad"), w.pod("z")}
	spool := filepath.Join(w.dir, "spool")
	for _, p := range pods {
		writeSpool(t, spool, p.owner, time.Now())
	}
	parts := w.node.Endpoints.Parts
	if err := record.OpenSpool(spool, log.Discard()).Replay(t.Context(), parts.Report, parts.Lifecycle); err == nil {
		t.Error("the replay returns no error for the failed deletion")
	}
	left, err := os.ReadDir(spool)
	if err != nil || len(left) != 1 || left[0].Name() != bad.Key() {
		t.Errorf("the spool has %v (%v), want the entry of %s alone", left, err, bad)
	}
	for _, p := range pods {
		if _, err := w.node.Endpoints.Report.Get(p.owner); p.owner != bad && !errors.Is(err, endpoint.ErrNotFound) {
			t.Errorf("endpoint of %s: %v, want it deleted", p.owner, err)
		}
	}
}

func writeSpool(t *testing.T, dir string, o workload.Owner, at time.Time) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	content := fmt.Sprintf(`{"version":1,"containerId":%q,"interfaceName":%q,"time":%q}`, o.ContainerID, o.Interface, at.UTC().Format(time.RFC3339Nano))
	if err := os.WriteFile(filepath.Join(dir, o.Key()), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestKernelCheckReportsWhatAPodLost(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	p := w.pod("a")
	if err := p.ns.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetDown(link), netlink.LinkSetUp(link))
	}); err != nil {
		t.Fatal(err)
	}
	diffs, err := w.node.Endpoints.Reconciler.Check(t.Context(), p.owner, lifecycle.Expected{})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"container route", "neighbour"} {
		if !slices.Contains(subjects(diffs), want) {
			t.Errorf("after down and up the check reports %v, want %q too", subjects(diffs), want)
		}
	}
}

func TestKernelBadNamespacesAndNamesAreRefused(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	file := filepath.Join(w.dir, "file")
	fifo := filepath.Join(w.dir, "fifo")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{
		pathOf(w.home):            endpoint.ErrNamespace, // the node's own namespace
		file:                      endpoint.ErrNamespace,
		fifo:                      endpoint.ErrNamespace,
		"/proc/self/ns/mnt":       endpoint.ErrNamespace,
		"/dev/null":               endpoint.ErrNamespace,
		filepath.Join(w.dir, "x"): endpoint.ErrNamespaceGone,
	} {
		s := w.spec("bad", w.home)
		s.Netns = path
		_, err := w.node.Endpoints.Lifecycle.Create(t.Context(), s, false)
		if !errors.Is(err, want) || !errors.Is(err, endpoint.ErrInvalid) {
			t.Errorf("netns %s: %v, want %v", path, err, want)
		}
	}

	p := w.pod("first")
	s := w.spec("second", p.ns) // another owner, the same interface name in the same namespace
	if _, err := w.node.Endpoints.Lifecycle.Create(t.Context(), s, false); !errors.Is(err, endpoint.ErrNameTaken) {
		t.Errorf("a taken interface name: %v", err)
	}
	if devices, err := w.node.Devices.Devices(); err != nil || len(devices) != 1 {
		t.Errorf("devices after the refusal: %v, %v", devices, err)
	}
	if err := talk(w.home, p.echo(p.spec.Addrs[0]), patience); err != nil {
		t.Errorf("the first pod is affected: %v", err)
	}
}

func TestKernelSameOwnerAgainInTheSameNamespace(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	p := w.pod("a")
	again, err := w.node.Endpoints.Lifecycle.Create(t.Context(), p.spec, false)
	if err != nil || again.Slot != p.ep.Slot || again.Device.HostIndex != p.ep.Device.HostIndex {
		t.Fatalf("the same request again: %+v, %v", again, err)
	}
	other := p.spec
	other.MTU = 1400
	if _, err := w.node.Endpoints.Lifecycle.Create(t.Context(), other, false); !errors.Is(err, endpoint.ErrExists) {
		t.Errorf("other content: %v, want ErrExists", err)
	}
	// a runtime that immediately retries finds the device that the reaper has not yet removed
	if _, err := w.delete(p.owner); err != nil {
		t.Fatal(err)
	}
	if _, err := w.node.Endpoints.Lifecycle.Create(t.Context(), p.spec, false); err != nil {
		t.Fatalf("after a deletion: %v", err)
	}
	if err := talk(w.home, p.echo(p.spec.Addrs[0]), patience); err != nil {
		t.Error(err)
	}
}

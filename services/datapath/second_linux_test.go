// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

// attach creates another endpoint in the namespace of a pod.
func (w *world) attach(p *pod, name string) *pod {
	w.t.Helper()
	q := &pod{t: w.t, ns: p.ns, spec: w.spec(p.owner.ContainerID, p.ns)}
	q.spec.Owner.Interface = name
	q.owner = q.spec.Owner
	var err error
	if q.ep, err = w.node.Endpoints.Lifecycle.Create(w.t.Context(), q.spec, false); err != nil {
		w.t.Fatal(err)
	}
	return q
}

func (w *world) del(p *pod) {
	w.t.Helper()
	if _, err := w.delete(p.owner); err != nil {
		w.t.Fatal(err)
	}
	servicetest.EventuallyNil(w.t, "the device of "+p.owner.String()+" is removed", func() error {
		if hasLink(p.ns, p.owner.Interface) == nil {
			return errors.New("it is there")
		}
		return nil
	})
}

// talkFrom connects from an address, or from any if it is not valid, and returns the source address that the peer saw.
func talkFrom(ns *netns.Namespace, from netip.Addr, to netip.AddrPort) (used netip.Addr, err error) {
	err = ns.Do(func() error {
		d := net.Dialer{Timeout: patience}
		if from.IsValid() {
			d.LocalAddr = &net.TCPAddr{IP: from.AsSlice()}
		}
		c, err := d.Dial("tcp", to.String())
		if err != nil {
			return err
		}
		defer c.Close()
		used = c.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
		return errors.Join(abortOnClose(c), exchange(c, "hello", patience))
	})
	return used, err
}

// works fails unless the attachment has traffic in both directions and families with its own addresses, and its
// configuration inside the container is correct.
func (p *pod) works(w *world, peer *pod) {
	p.t.Helper()
	for i, a := range p.ep.Spec.Addrs {
		if used, err := talkFrom(p.ns, a, peer.echo(peer.ep.Spec.Addrs[i])); err != nil || used != a {
			p.t.Errorf("from %v of %s: %v, %v", a, p.owner, used, err)
		}
		if err := talk(peer.ns, p.echo(a), patience); err != nil {
			p.t.Errorf("to %v of %s: %v", a, p.owner, err)
		}
	}
	diffs, err := w.node.Endpoints.Reconciler.Check(p.t.Context(), p.owner, lifecycle.Expected{})
	if err != nil || len(diffs) != 0 {
		p.t.Errorf("check of %s: %v, %v", p.owner, diffs, err)
	}
}

// leadsBy fails unless sockets that are bound to no address use the attachment p.
func leadsBy(t *testing.T, ns *netns.Namespace, p, peer *pod) {
	t.Helper()
	for i, want := range p.ep.Spec.Addrs {
		if used, err := talkFrom(ns, netip.Addr{}, peer.echo(peer.ep.Spec.Addrs[i])); err != nil || used != want {
			t.Errorf("by the default route: from %v, %v, want %v", used, err, want)
		}
	}
}

// leadsNowhere fails unless there are no default routes. For IPv6, the kernel then chooses one of the remaining
// addresses and its route.
func leadsNowhere(t *testing.T, ns *netns.Namespace, rest, peer *pod) {
	t.Helper()
	if used, err := talkFrom(ns, netip.Addr{}, peer.echo(peer.ep.Spec.Addrs[0])); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("without default routes: from %v, %v, want ENETUNREACH", used, err)
	}
	if used, err := talkFrom(ns, netip.Addr{}, peer.echo(peer.ep.Spec.Addrs[1])); err != nil || used != rest.ep.Spec.Addrs[1] {
		t.Errorf("without default routes: from %v, %v, want %v", used, err, rest.ep.Spec.Addrs[1])
	}
}

func sourceRulesIn(t *testing.T, ns *netns.Namespace) (n int) {
	t.Helper()
	if err := ns.Do(func() error {
		for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
			rules, err := netlink.RuleList(f)
			if err != nil {
				return err
			}
			for _, r := range rules {
				if r.Src != nil {
					n++
				}
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestKernelTwoAttachmentsOfOnePod tests that each attachment has its own traffic, and deletes them in both orders.
func TestKernelTwoAttachmentsOfOnePod(t *testing.T) {
	for _, order := range []string{"first goes first", "second goes first"} {
		t.Run(order, func(t *testing.T) {
			w := newWorld(t)
			w.start(true)
			peer, eth0 := w.pod("peer"), w.pod("a")
			net1 := w.attach(eth0, "net1")
			if !slices.Equal(net1.ep.Device.SourceRouted, net1.ep.Spec.Addrs) || len(eth0.ep.Device.SourceRouted) != 0 {
				t.Errorf("source-routed: %v of eth0, %v of net1", eth0.ep.Device.SourceRouted, net1.ep.Device.SourceRouted)
			}
			eth0.works(w, peer)
			net1.works(w, peer)
			leadsBy(t, eth0.ns, eth0, peer)
			if n := sourceRulesIn(t, eth0.ns); n != 2 {
				t.Errorf("%d rules by source, want 2", n)
			}
			w.stop()
			w.start(true)
			eth0.works(w, peer)
			net1.works(w, peer)

			stays, goes := eth0, net1
			if order == "first goes first" {
				stays, goes = net1, eth0
			}
			w.del(goes)
			stays.works(w, peer)
			if stays == eth0 {
				leadsBy(t, eth0.ns, eth0, peer)
				if n := sourceRulesIn(t, eth0.ns); n != 0 {
					t.Errorf("%d rules by source stay", n)
				}
			} else {
				leadsNowhere(t, eth0.ns, net1, peer)
			}
			again := w.attach(goes, goes.owner.Interface)
			again.works(w, peer)
			stays.works(w, peer)
			leadsBy(t, eth0.ns, map[bool]*pod{true: stays, false: again}[stays == eth0], peer)
			w.del(stays)
			again.works(w, peer)
			w.del(again)
			if n := sourceRulesIn(t, eth0.ns); n != 0 {
				t.Errorf("%d rules by source stay", n)
			}
		})
	}
}

// TestKernelDefaultRouteOfOthersStays tests a pod whose first interface another plugin created.
func TestKernelDefaultRouteOfOthersStays(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	peer := w.pod("peer")
	ns := netnstest.New(t)
	if err := ns.Do(func() error {
		pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "other"}, PeerName: "end"}
		if err := errors.Join(netlink.LinkAdd(pair), netlink.LinkSetUp(pair)); err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{
			LinkIndex: pair.Index, Priority: 100, Scope: netlink.SCOPE_LINK,
			Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)},
		})
	}); err != nil {
		t.Fatal(err)
	}
	p := &pod{t: t, ns: ns, spec: w.spec("a", ns)}
	p.owner = p.spec.Owner
	var err error
	if p.ep, err = w.node.Endpoints.Lifecycle.Create(t.Context(), p.spec, false); err != nil {
		t.Fatal(err)
	}
	if got, want := p.ep.Device.SourceRouted, p.ep.Spec.Addrs[:1]; !slices.Equal(got, want) {
		t.Errorf("source-routed %v, want %v: the other interface has only an IPv4 default route", got, want)
	}
	p.works(w, peer)
}

// TestKernelAuditOfContainersRepairsRoutesAndRules removes routes and rules inside a container. CHECK and the audit
// report them, and an audit with repair restores them.
func TestKernelAuditOfContainersRepairsRoutesAndRules(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	peer, eth0 := w.pod("peer"), w.pod("a")
	net1 := w.attach(eth0, "net1")
	if err := eth0.ns.Do(func() error {
		for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
			rules, err := netlink.RuleList(f)
			if err != nil {
				return err
			}
			for _, r := range rules {
				if r.Src == nil {
					continue
				}
				r.Family = f
				if err := netlink.RuleDel(&r); err != nil {
					return err
				}
			}
		}
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetDown(link), netlink.LinkSetUp(link))
	}); err != nil {
		t.Fatal(err)
	}
	diffs, err := w.node.Endpoints.Reconciler.Check(t.Context(), net1.owner, lifecycle.Expected{})
	if err != nil || !slices.Contains(subjects(diffs), "container rule") {
		t.Errorf("check of net1 without its rules: %v, %v", diffs, err)
	}
	audit := func(repair bool) (found []string) {
		err := w.node.Endpoints.Reconciler.AuditContainers(t.Context(), repair, func(f endpoint.Finding) error {
			if f.Repaired != repair {
				t.Errorf("%v: repaired %v, %v", f.Difference, f.Repaired, f.Err)
			}
			found = append(found, fmt.Sprintf("%s %s", f.Subject, f.Key))
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		return found
	}
	want := fmt.Sprintf("container rule %s: from %v", net1.owner, net1.ep.Spec.Addrs[0])
	if found := audit(false); !slices.Contains(found, want) || !slices.Contains(found, fmt.Sprintf("container route %s: 0.0.0.0/0", eth0.owner)) {
		t.Errorf("the audit finds %q", found)
	}
	audit(true)
	if found := audit(false); len(found) != 0 {
		t.Errorf("after the repair: %q", found)
	}
	eth0.works(w, peer)
	net1.works(w, peer)
	leadsBy(t, eth0.ns, eth0, peer)
}

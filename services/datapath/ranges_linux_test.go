// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/node/podrange"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// announced is a source of ranges in this process.
type announced struct {
	*watch.Hub[netip.Prefix, podrange.Range]
}

func newAnnounced() announced {
	return announced{watch.NewHub[netip.Prefix](watch.Options[podrange.Range]{Loading: true})}
}

func (a announced) Watch(ctx context.Context, token []byte) iter.Seq2[watch.Event[netip.Prefix, podrange.Range], error] {
	return func(yield func(watch.Event[netip.Prefix, podrange.Range], error) bool) {
		s, err := a.Subscribe(token)
		if err != nil {
			yield(watch.Event[netip.Prefix, podrange.Range]{}, err)
			return
		}
		defer s.Close()
		for err == nil {
			var e watch.Event[netip.Prefix, podrange.Range]
			if e, err = s.Next(ctx); !yield(e, err) {
				return
			}
		}
	}
}

// only announces exactly these ranges.
func (a announced) only(ranges ...netip.Prefix) {
	for _, p := range a.Keys() {
		if !slices.Contains(ranges, p) {
			a.Delete(p)
		}
	}
	primary := map[bool]bool{} // families that have a primary range
	for _, p := range ranges {
		is4 := p.Addr().Is4()
		a.Upsert(p, podrange.Range{Node: podrange.NodeAddr(p), Primary: !primary[is4]})
		primary[is4] = true
	}
	a.Loaded()
}

// traces lists the kernel objects of a range on the node.
func (w *world) traces(p netip.Prefix) []string {
	w.t.Helper()
	family, node := "-4", podrange.NodeAddr(p).String()
	if p.Addr().Is6() {
		family = "-6"
	}
	var found []string
	for _, args := range [][]string{
		{"ip", family, "rule"},
		{"ip", family, "route", "show", "type", "unreachable"},
		{"ip", family, "address", "show", "dev", "lo"},
	} {
		var out []byte
		if err := w.home.Do(func() (err error) {
			out, err = exec.Command(args[0], args[1:]...).CombinedOutput()
			return err
		}); err != nil {
			w.t.Fatalf("%v: %v: %s", args, err, out)
		}
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, p.String()) || strings.Contains(line, node+" ") || strings.Contains(line, node+"/") {
				found = append(found, strings.Join(args[2:], " ")+": "+strings.TrimSpace(line))
			}
		}
	}
	entries, err := w.node.Kernel.Addresses.Ranges()
	if err != nil {
		w.t.Fatal(err)
	}
	if slices.Contains(entries, p) {
		found = append(found, "ipcache: "+p.String())
	}
	addrs, err := w.node.Kernel.Endpoints.HostAddrs()
	if err != nil {
		w.t.Fatal(err)
	}
	if slices.Contains(addrs, podrange.NodeAddr(p)) {
		found = append(found, "sl_ip: "+node)
	}
	return found
}

// allTraces is the number of objects of a range: two rules, the route, the address and two map entries.
const allTraces = 6

func (w *world) wantRange(p netip.Prefix, there bool) {
	w.t.Helper()
	servicetest.EventuallyNil(w.t, fmt.Sprintf("range %v there: %v", p, there), func() error {
		found := w.traces(p)
		if there && len(found) != allTraces || !there && len(found) != 0 {
			return fmt.Errorf("the node has %q", found)
		}
		diffs, err := w.node.Node.Host.Check()
		if len(diffs) > 0 {
			return fmt.Errorf("the node has differences: %v", diffs)
		}
		return err
	})
}

// podIn creates a pod whose address in each range has this last byte.
func (w *world) podIn(name string, last byte, ranges ...netip.Prefix) *pod {
	w.t.Helper()
	ns := netnstest.New(w.t)
	s := w.spec(name, ns)
	s.Addrs = nil
	for _, p := range ranges {
		raw := p.Addr().AsSlice()
		raw[len(raw)-1] = last
		a, _ := netip.AddrFromSlice(raw)
		s.Addrs = append(s.Addrs, a)
	}
	p := &pod{t: w.t, ns: ns, spec: s, owner: s.Owner}
	servicetest.EventuallyNil(w.t, "create "+name, func() (err error) {
		p.ep, err = w.node.Endpoints.Lifecycle.Create(w.t.Context(), p.spec, false)
		if err != nil && !errors.Is(err, endpoint.ErrUnavailable) {
			w.t.Fatal(err)
		}
		return err
	})
	return p
}

// TestKernelRangesComeAndGoWhilePodsTalk proves INV-19: a node starts without a range. Ranges are added, two of one
// family among them, and removed. A connection between pods in different ranges is never interrupted, not even by a
// restart without the source.
func TestKernelRangesComeAndGoWhilePodsTalk(t *testing.T) {
	w, source := newWorld(t), newAnnounced()
	w.ranges = source
	w.start(true)
	_, err := w.node.Endpoints.Lifecycle.Create(t.Context(), w.spec("early", netnstest.New(t)), false)
	if !errors.Is(err, endpoint.ErrUnavailable) {
		t.Fatalf("a creation without a range: %v", err)
	}
	second := netip.MustParsePrefix("10.97.0.0/24")
	source.only(cidr4, cidr6)
	a := w.podIn("a", 10, cidr4, cidr6)
	w.wantRange(cidr4, true)
	w.wantRange(cidr6, true)

	source.only(cidr4, cidr6, second)
	b := w.podIn("b", 11, second, cidr6)
	w.wantRange(second, true)
	host := &pod{t: t, ns: w.home}
	for _, addr := range b.spec.Addrs {
		if err := talk(a.ns, b.echo(addr), patience); err != nil {
			t.Errorf("pod to pod at %v: %v", addr, err)
		}
		if err := talk(w.home, b.echo(addr), patience); err != nil {
			t.Errorf("host to pod at %v: %v", addr, err)
		}
		if err := talk(a.ns, host.echo(podrange.NodeAddr(must(w.node.Ranges.Of(addr)))), patience); err != nil {
			t.Errorf("pod to its host in the range of %v: %v", addr, err)
		}
	}
	before := w.counted(event.NoRoute)
	err = talk(a.ns, netip.MustParseAddrPort("10.97.0.99:80"), 100*time.Millisecond)
	if err == nil || w.counted(event.NoRoute) == before {
		t.Error("an address of the new range without an endpoint is not dropped with the reason no-route")
	}
	c, err := dialIn(a.ns, "tcp", b.echo(b.spec.Addrs[0]), patience)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	talking := func(when string) {
		t.Helper()
		if err := exchange(c, when, patience); err != nil {
			t.Fatalf("the connection %s: %v", when, err)
		}
	}
	talking("before anything goes")

	// A range is removed while a pod has an address in it. The kernel keeps the range across restarts, whether the source
	// answers or not.
	source.only(cidr6, second)
	silent := newAnnounced()
	for _, s := range []announced{source, silent, source} {
		w.wantRange(cidr4, true)
		talking("in a removed range")
		w.stop()
		w.ranges = s
		w.start(true)
		select {
		case <-w.node.Endpoints.Keeper.Known():
		default:
			t.Error("after a restart, no range is known")
		}
		w.wantRange(second, true)
	}
	w.ranges = source
	if _, err := w.delete(a.owner); err != nil {
		t.Fatal(err)
	}
	w.wantRange(cidr4, false)
	w.wantRange(second, true)
	if err := talk(w.home, b.echo(b.spec.Addrs[0]), patience); err != nil {
		t.Errorf("host to a pod of the remaining range: %v", err)
	}
	// The range is added again.
	source.only(cidr4, cidr6, second)
	w.wantRange(cidr4, true)
	d := w.podIn("d", 12, cidr4)
	if err := talk(d.ns, b.echo(b.spec.Addrs[0]), patience); err != nil {
		t.Errorf("a pod of the range that was added again: %v", err)
	}
}

// TestKernelSourcesIntoTheTunnelStayOverAStart restarts the datapath while sluice-ipam is unavailable. External traffic
// to a backend on another node keeps the source address that the previous process wrote. No step of the start reports a
// difference or writes another address, not even briefly.
func TestKernelSourcesIntoTheTunnelStayOverAStart(t *testing.T) {
	w, source := newWorld(t), newAnnounced()
	w.ranges, w.frontends, w.routing = source, silentBalancer{}, RoutingConfig{Mode: "overlay", TunnelPort: 4789}
	w.outside()
	w.start(true)
	source.only(cidr4, cidr6)
	var before nodemap.Local
	servicetest.EventuallyNil(t, "sources", func() (err error) {
		before, err = w.node.Kernel.Nodes.Local()
		if err == nil && slices.Contains(before.Sources[:nodemap.SourceUplink], 0) {
			return fmt.Errorf("this node is %+v", before)
		}
		return err
	})
	w.stop()
	w.ranges = newAnnounced()
	r := w.open()
	same := func(when string) {
		t.Helper()
		if l, err := r.node.Kernel.Nodes.Local(); err != nil || l != before {
			t.Errorf("%s this node is %+v, %v; want %+v", when, l, err, before)
		}
	}
	same("after the programs were taken over")
	if diffs, err := r.node.Node.Router.Check(); err != nil || len(diffs) > 0 {
		t.Errorf("the first comparison of a start: %v, %v", diffs, err)
	}
	if err := r.node.restore(t.Context()); err != nil {
		t.Error(err)
	}
	same("after the endpoints were restored")
	if err := r.node.Endpoints.Compare(t.Context()); err != nil {
		t.Error(err)
	}
	same("after the devices were compared")
	w.run(r, true)
	same("while sluice-ipam is unavailable")
	w.ranges = source
	w.stop()
	w.start(true)
	servicetest.EventuallyNil(t, "the ranges of sluice-ipam", func() error {
		if _, known := w.node.Ranges.OverlayAddrs(); !known {
			return errors.New("not known")
		}
		return nil
	})
	r.node = w.node
	same("when sluice-ipam is back")
}

// TestKernelARangeThatHoldsTheNodesUplinkIsRefused announces ranges that contain the uplink's address. Rules and routes
// of such a range would disconnect the node.
func TestKernelARangeThatHoldsTheNodesUplinkIsRefused(t *testing.T) {
	w, source := newWorld(t), newAnnounced()
	w.ranges = source
	w.start(true)
	out := w.outside()
	uplink := netip.MustParsePrefix("192.0.2.0/24")  // the uplink's address is its second address
	holding := netip.MustParsePrefix("192.0.0.0/22") // the uplink's address is another one in the range
	for _, p := range []netip.Prefix{uplink, holding} {
		source.only(cidr4, p)
		w.wantRange(cidr4, true)
		servicetest.EventuallyNil(t, "refusal", func() error {
			problems := w.node.Endpoints.Keeper.Problems()
			if len(problems) != 1 || !strings.Contains(problems[0], p.String()+" holds 192.0.2.1, an address of ") {
				return fmt.Errorf("problems %q", problems)
			}
			return nil
		})
	}
	if found := w.traces(uplink); len(found) != 1 { // the uplink's address, which outside created
		t.Errorf("the node has %q for the rejected range", found)
	}
	if err := talk(w.home, out.echo(netip.MustParseAddr("192.0.2.2")), patience); err != nil {
		t.Errorf("the node is disconnected: %v", err)
	}
}

// must returns p, and panics if ok is false.
func must(p netip.Prefix, ok bool) netip.Prefix {
	if !ok {
		panic("no range")
	}
	return p
}

// TestKernelUninstallKnowsTheRangesByItsPins uninstalls learned ranges that are in no configuration.
func TestKernelUninstallKnowsTheRangesByItsPins(t *testing.T) {
	w, source := newWorld(t), newAnnounced()
	w.ranges = source
	w.start(true)
	source.only(cidr4)
	w.wantRange(cidr4, true)
	ranges, err := kernel.PinnedRanges(w.config().BPFDir)
	if err != nil || !slices.Equal(ranges, []netip.Prefix{cidr4}) {
		t.Fatalf("the pinned ranges are %v, %v", ranges, err)
	}
	if ranges, err := kernel.PinnedRanges(w.config().BPFDir + "-none"); err != nil || len(ranges) != 0 {
		t.Errorf("the ranges of a directory without pins are %v, %v", ranges, err)
	}
}

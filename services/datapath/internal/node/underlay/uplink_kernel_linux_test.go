// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package underlay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/node/routing"
)

// load loads a program that lets everything pass.
func load(t *testing.T, spec program.Spec) *program.Program {
	t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: spec.Name, Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { prog.Close() })
	info, err := prog.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return &program.Program{Spec: spec, Prog: prog, ID: id}
}

func programs(t *testing.T) (list []*program.Program) {
	for _, s := range uplinkSpecs() {
		list = append(list, load(t, s))
	}
	return list
}

// listed returns programs in the form that Options need.
func listed(programs []*program.Program) func() []*program.Program {
	return func() []*program.Program { return programs }
}

// attached returns the names of Sluice's programs on a device, clsact filters and tcx.
func (n node) attached(t *testing.T, device string) (names []string) {
	t.Helper()
	for _, s := range uplinkSpecs() {
		text := n.run(t, nil, "tc", "filter", "show", "dev", device, string(s.Hook))
		if slices.Contains(strings.Fields(text), s.Name) {
			names = append(names, s.Name)
		}
		for _, p := range n.tcx(t, device, s.Hook) {
			if name := nameOf(t, p); strings.HasPrefix(s.Name, name) {
				names = append(names, s.Name)
			}
		}
	}
	slices.Sort(names)
	return names
}

// allOn returns the names of the programs that a device should have: the optional one only on kernels with tcx.
func (n node) allOn(t *testing.T, device string) (names []string) {
	t.Helper()
	tcx := len(n.tcx(t, device, program.Egress)) > 0
	for _, s := range uplinkSpecs() {
		if !s.Optional || tcx {
			names = append(names, s.Name)
		}
	}
	slices.Sort(names)
	return names
}

// tcx returns the tcx programs of a hook; none if the kernel does not support tcx.
func (n node) tcx(t *testing.T, device string, at program.Hook) (ids []ebpf.ProgramID) {
	t.Helper()
	index := n.index(t, device)
	err := n.ns.Do(func() error {
		r, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: attachTypes[at]})
		if errors.Is(err, unix.EINVAL) || errors.Is(err, ebpf.ErrNotSupported) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, p := range r.Programs {
			ids = append(ids, p.ID)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

var attachTypes = map[program.Hook]ebpf.AttachType{
	program.Ingress: ebpf.AttachTCXIngress, program.Egress: ebpf.AttachTCXEgress,
}

func (n node) index(t *testing.T, device string) int {
	t.Helper()
	number, _, _ := strings.Cut(n.ip(t, "-o link show "+device), ":")
	index, err := strconv.Atoi(number)
	if err != nil {
		t.Fatal(err)
	}
	return index
}

func nameOf(t *testing.T, id ebpf.ProgramID) string {
	t.Helper()
	prog, err := ebpf.NewProgramFromID(id)
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	info, err := prog.Info()
	if err != nil {
		t.Fatal(err)
	}
	return info.Name
}

// attachTCX attaches a program to a hook.
func (n node) attachTCX(t *testing.T, device string, at program.Hook, prog *ebpf.Program, anchor link.Anchor) {
	t.Helper()
	index := n.index(t, device)
	if err := n.ns.Do(func() error {
		return link.RawAttachProgram(link.RawAttachProgramOptions{
			Target: index, Program: prog, Attach: attachTypes[at], Anchor: anchor,
		})
	}); err != nil {
		t.Fatal(err)
	}
}

// takeOff detaches Sluice's program from a hook, in whichever form it is attached.
func (n node) takeOff(t *testing.T, device string, at program.Hook) {
	t.Helper()
	ids, index := n.tcx(t, device, at), n.index(t, device)
	if len(ids) == 0 {
		n.run(t, nil, "tc", "filter", "del", "dev", device, string(at), "pref", "1")
		return
	}
	for _, id := range ids {
		if !strings.HasPrefix(nameOf(t, id), "sluice_") {
			continue
		}
		prog, err := ebpf.NewProgramFromID(id)
		if err != nil {
			t.Fatal(err)
		}
		defer prog.Close()
		if err := n.ns.Do(func() error {
			return link.RawDetachProgram(link.RawDetachProgramOptions{
				Target: index, Program: prog, Attach: attachTypes[at],
			})
		}); err != nil {
			t.Fatal(err)
		}
	}
}

func (n node) uplinks(t *testing.T, addrs ...string) (names []string, devices []endpoint.HostDevice) {
	t.Helper()
	var as []netip.Addr
	for _, a := range addrs {
		as = append(as, netip.MustParseAddr(a))
	}
	devices, err := n.Uplinks(as, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range devices {
		names = append(names, d.Name)
	}
	slices.Sort(names)
	return names, devices
}

func TestKernelUplinksHaveAddressesAndRoutesOrAreThoseOfTheSetting(t *testing.T) {
	n := newNode(t)
	n.ensure(t)
	n.ip(t, "link add other type bridge", "link set other up", "addr add 198.51.100.1/24 dev other",
		"link add third type bridge", "link set third up", "addr add 203.0.113.1/24 dev third")
	check := func(what string, want ...string) {
		t.Helper()
		if got, _ := n.uplinks(t, "192.0.2.1"); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	check("by address", "uplink0")
	n.ip(t, "route add default via 198.51.100.9")
	check("by default route", "other", "uplink0")
	n.ip(t, "route del default", "-6 route add default dev third")
	check("by default route of IPv6", "third", "uplink0")
	n.ip(t, "route add default nexthop via 198.51.100.9 nexthop via 203.0.113.9")
	check("by all hops", "other", "third", "uplink0")
	n.Underlay = n.open(t, Options{Devices: []string{"o*", "slt*", "lo"}})
	check("by pattern", "other")
}

// TestKernelUplinkGetsAndLosesOurProgramsOnly tests both forms next to foreign programs.
func TestKernelUplinkGetsAndLosesOurProgramsOnly(t *testing.T) {
	for _, filters := range []bool{true, false} {
		t.Run(fmt.Sprint("filters ", filters), func(t *testing.T) { ourProgramsOnly(t, filters) })
	}
}

func ourProgramsOnly(t *testing.T, filters bool) {
	n := newNode(t)
	o := Options{Uplinks: listed(programs(t)), Filters: filters}
	n.Underlay = n.open(t, o)
	n.run(t, nil, "tc", "qdisc", "add", "dev", "uplink0", "clsact")
	n.run(t, nil, "tc", "filter", "add", "dev", "uplink0", "ingress", "pref", "7",
		"protocol", "ip", "u32", "match", "u32", "0", "0", "flowid", "1:1")
	theirs := n.run(t, nil, "tc", "filter", "show", "dev", "uplink0", "ingress")
	_, devices := n.uplinks(t, "192.0.2.1")
	for range 2 {
		if err := n.EnsureUplinks(devices, true); err != nil {
			t.Fatal(err)
		}
		want := n.allOn(t, "uplink0")
		if got := n.attached(t, "uplink0"); !slices.Equal(got, want) {
			t.Errorf("programs %v, want %v", got, want)
		}
		if diffs, err := n.CheckUplinks(devices, true); err != nil || len(diffs) > 0 {
			t.Errorf("differences %v, %v; want none", diffs, err)
		}
		if disturbed, err := n.Disturbed(); err != nil || disturbed {
			t.Errorf("disturbed %t, %v", disturbed, err)
		}
		tcx := len(n.tcx(t, "uplink0", program.Egress)) > 0
		n.takeOff(t, "uplink0", program.Egress)
		if diffs, err := n.CheckUplinks(devices, true); err != nil || len(diffs) != 1 {
			t.Errorf("differences %v, %v; want the detached program", diffs, err)
		}
		// the kernel sends events about filters
		if disturbed, err := n.Disturbed(); err != nil || disturbed != tcx {
			t.Errorf("disturbed %t, %v; want %t", disturbed, err, tcx)
		}
	}
	if err := n.EnsureUplinks(devices, true); err != nil {
		t.Fatal(err)
	}
	// A process without uplink programs removes them, too.
	n.Underlay = n.open(t, Options{})
	if err := n.EnsureUplinks(nil, false); err != nil {
		t.Fatal(err)
	}
	if got := n.attached(t, "uplink0"); len(got) > 0 {
		t.Errorf("programs %v, want none", got)
	}
	if after := n.run(t, nil, "tc", "filter", "show", "dev", "uplink0", "ingress"); after != theirs {
		t.Errorf("filters of others\n%swant\n%s", after, theirs)
	}
}

// TestKernelUplinkChangesTheFormOfItsPrograms tests that a device never has programs in both forms or of two processes,
// whichever form the previous process used.
func TestKernelUplinkChangesTheFormOfItsPrograms(t *testing.T) {
	n := newNode(t)
	_, devices := n.uplinks(t, "192.0.2.1")
	for _, filters := range []bool{true, false, false, true, true} {
		n.Underlay = n.open(t, Options{Uplinks: listed(programs(t)), Filters: filters})
		if err := n.EnsureUplinks(devices, true); err != nil {
			t.Fatal(err)
		}
		want := n.allOn(t, "uplink0")
		if got := n.attached(t, "uplink0"); !slices.Equal(got, want) {
			t.Errorf("filters %t: programs %v, want %v", filters, got, want)
		}
		if diffs, err := n.CheckUplinks(devices, true); err != nil || len(diffs) > 0 {
			t.Errorf("filters %t: differences %v, %v; want none", filters, diffs, err)
		}
	}
}

// TestKernelProgramsOfUplinksRunBeforeThoseOfOthers also tests that foreign programs stay attached.
func TestKernelProgramsOfUplinksRunBeforeThoseOfOthers(t *testing.T) {
	n := newNode(t)
	ours := programs(t)
	n.Underlay = n.open(t, Options{Uplinks: listed(ours)})
	_, devices := n.uplinks(t, "192.0.2.1")
	if err := n.EnsureUplinks(devices, true); err != nil {
		t.Fatal(err)
	}
	if len(n.tcx(t, "uplink0", program.Ingress)) == 0 {
		t.Log("this kernel has no tcx: foreign programs run after filters of priority 1")
		return
	}
	other := load(t, program.Spec{Name: "others"}).Prog
	id := func(p *ebpf.Program) ebpf.ProgramID {
		info, err := p.Info()
		if err != nil {
			t.Fatal(err)
		}
		id, _ := info.ID()
		return id
	}
	n.attachTCX(t, "uplink0", program.Ingress, other, link.Tail())
	if diffs, err := n.CheckUplinks(devices, true); err != nil || len(diffs) > 0 {
		t.Errorf("after Sluice's: differences %v, %v; want none", diffs, err)
	}
	first := load(t, program.Spec{Name: "first"}).Prog
	n.attachTCX(t, "uplink0", program.Ingress, first, link.Head())
	if diffs, err := n.CheckUplinks(devices, true); err != nil || len(diffs) != 2 {
		t.Errorf("before Sluice's: differences %v, %v; want one for each program", diffs, err)
	}
	if disturbed, err := n.Disturbed(); err != nil || !disturbed {
		t.Errorf("disturbed %t, %v", disturbed, err)
	}
	if err := n.EnsureUplinks(devices, true); err != nil {
		t.Fatal(err)
	}
	want := []ebpf.ProgramID{ours[0].ID, ours[1].ID, id(first), id(other)}
	if got := n.tcx(t, "uplink0", program.Ingress); !slices.Equal(got, want) {
		t.Errorf("programs %v, want %v", got, want)
	}
	if got := n.attached(t, "uplink0"); !slices.Equal(got, n.allOn(t, "uplink0")) {
		t.Errorf("programs %v: the temporary filter is left", got)
	}
	// A process with other settings has fewer programs, and the rest is removed.
	n.Underlay = n.open(t, Options{Uplinks: listed(ours[1:])})
	if err := n.EnsureUplinks(devices, true); err != nil {
		t.Fatal(err)
	}
	if got := n.tcx(t, "uplink0", program.Ingress); !slices.Equal(got, []ebpf.ProgramID{ours[1].ID, id(first), id(other)}) {
		t.Errorf("without the first program %v", got)
	}
	// The missing one is put before those that run.
	n.Underlay = n.open(t, Options{Uplinks: listed(ours)})
	if err := n.EnsureUplinks(devices, true); err != nil {
		t.Fatal(err)
	}
	if got := n.tcx(t, "uplink0", program.Ingress); !slices.Equal(got, want) {
		t.Errorf("with the first program again %v, want %v", got, want)
	}
}

// TestKernelWhatKeepsProgramsFromAnUplinkIsNamed also tests that the obstacle is left alone.
func TestKernelWhatKeepsProgramsFromAnUplinkIsNamed(t *testing.T) {
	for what, c := range map[string]struct{ commands, want string }{
		"ingress": {"qdisc add dev uplink0 ingress", "qdisc ingress, which excludes clsact"},
		"filter": {
			"qdisc add dev uplink0 clsact\n" +
				"filter add dev uplink0 ingress pref 1 protocol ip u32 match u32 0 0 flowid 1:1", "kind u32",
		},
	} {
		n := newNode(t)
		n.Underlay = n.open(t, Options{Uplinks: listed(programs(t)), Filters: true})
		for line := range strings.Lines(c.commands) {
			n.run(t, nil, "tc", strings.Fields(line)...)
		}
		show := func() string {
			return n.run(t, nil, "tc", "filter", "show", "dev", "uplink0", "ingress") +
				n.run(t, nil, "tc", "qdisc", "show", "dev", "uplink0")
		}
		before := show()
		_, devices := n.uplinks(t, "192.0.2.1")
		err := n.EnsureUplinks(devices, true)
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "uplink0") {
			t.Errorf("%s: %v, want %q", what, err, c.want)
		}
		if after := show(); after != before {
			t.Errorf("%s: now\n%swas\n%s", what, after, before)
		}
	}
}

func TestKernelFiltersOfUplinksAreSwitchedOff(t *testing.T) {
	n := newNode(t)
	set := func(path, value string) {
		n.run(t, nil, "sh", "-c", "echo "+value+" >/proc/sys/net/ipv4/conf/"+path+"/rp_filter")
	}
	_, devices := n.uplinks(t, "192.0.2.1")
	for _, c := range []struct{ all, own, want string }{
		{"0", "0", "0"}, {"0", "1", "0"}, {"1", "0", "0"}, {"2", "1", "0"}, {"0", "2", "0"},
	} {
		set("all", c.all)
		set("uplink0", c.own)
		diffs, err := n.CheckUplinks(devices, false)
		if err != nil || (len(diffs) > 0) != (c.own != "0" || c.all != "0") {
			t.Errorf("%+v: differences %v, %v", c, diffs, err)
		}
		if err := n.EnsureUplinks(devices, false); err != nil {
			t.Fatal(err)
		}
		if got := strings.TrimSpace(n.run(t, nil, "cat", "/proc/sys/net/ipv4/conf/uplink0/rp_filter")); got != c.want {
			t.Errorf("%+v: rp_filter %s", c, got)
		}
	}
}

// TestKernelNextHopsAreResolvedAndKept: they stay resolved until they are removed.
func TestKernelNextHopsAreResolvedAndKept(t *testing.T) {
	n := newNode(t)
	index := func() uint32 {
		p, err := n.PathTo(netip.MustParseAddr("192.0.2.2"))
		if err != nil {
			t.Fatal(err)
		}
		return p.Hops[0].Ifindex
	}()
	var hops []routing.Nexthop
	for _, a := range []string{"192.0.2.2", "2001:db8::2", "192.0.2.3"} {
		hops = append(hops, routing.Nexthop{Ifindex: index, Via: netip.MustParseAddr(a)})
	}
	n.ip(t, "neigh add 192.0.2.3 dev uplink0 lladdr 02:00:00:00:00:03 nud permanent")
	known := func(want int) {
		t.Helper()
		servicetest.EventuallyNil(t, "neighbours", func() error {
			if err := n.Resolve(hops); err != nil {
				return err
			}
			text := n.ip(t, "neigh show")
			managed := 0
			for line := range strings.Lines(text) {
				if strings.Contains(line, "managed") && strings.Contains(line, "lladdr") {
					managed++
				}
			}
			if managed != want || !strings.Contains(text, "02:00:00:00:00:03 PERMANENT") {
				return fmt.Errorf("neighbours\n%swant %d that are managed", text, want)
			}
			return nil
		})
	}
	known(2)
	n.ip(t, "neigh flush dev uplink0")
	known(2)
	n.Underlay = n.open(t, Options{}) // another process, with fewer next hops
	hops = hops[1:]
	known(1)
	hops = nil
	known(0)
}

// TestKernelPathKnowsWhatARouterSaidOfItsMTU tests both families.
func TestKernelPathKnowsWhatARouterSaidOfItsMTU(t *testing.T) {
	n := newNode(t)
	far := netnstest.New(t)
	// uplink0 is connected to the router, whose second device has a smaller MTU.
	router := node{ns: netnstest.New(t)}
	n.ip(t, "link add way type veth peer name back")
	move(t, n, "back", router)
	router.ip(t, "link add on type veth peer name end")
	move(t, router, "end", node{ns: far})
	n.ip(t, "link set way up", "addr add 198.51.100.1/24 dev way", "addr add 2001:db8:1::1/64 dev way nodad",
		"route add 203.0.113.0/24 via 198.51.100.2", "route add 2001:db8:2::/64 via 2001:db8:1::2")
	router.ip(t, "link set back up", "addr add 198.51.100.2/24 dev back", "addr add 2001:db8:1::2/64 dev back nodad",
		"link set on mtu 1400", "link set on up", "addr add 203.0.113.1/24 dev on", "addr add 2001:db8:2::1/64 dev on nodad")
	router.run(t, nil, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward; echo 1 >/proc/sys/net/ipv6/conf/all/forwarding")
	node{ns: far}.ip(t, "link set end up", "addr add 203.0.113.2/24 dev end", "addr add 2001:db8:2::2/64 dev end nodad",
		"route add default via 203.0.113.1", "-6 route add default via 2001:db8:2::1")
	for _, to := range []string{"203.0.113.2", "2001:db8:2::2"} {
		addr := netip.MustParseAddr(to)
		p, err := n.PathTo(addr)
		if err != nil || p.MTU != 1500 || p.Direct() {
			t.Errorf("%s: %+v, %v; want MTU 1500 by a router", to, p, err)
		}
		var c net.Conn
		if err := n.ns.Do(func() (err error) {
			c, err = net.Dial("udp", netip.AddrPortFrom(addr, 9).String())
			return err
		}); err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		servicetest.EventuallyNil(t, "the path's MTU", func() error {
			_, _ = c.Write(make([]byte, 1420)) // an error caused by the previous packet is expected
			p, err := n.PathTo(addr)
			if err == nil && (p.MTU != 1500 || p.Learned != 1400) {
				err = fmt.Errorf("%s: %+v, want MTU 1500 and 1400 learned", to, p)
			}
			return err
		})
	}
}

func move(t *testing.T, from node, device string, to node) {
	t.Helper()
	file := os.NewFile(uintptr(dup(t, to.ns)), "netns")
	defer file.Close()
	from.run(t, file, "ip", "link", "set", device, "netns", "/proc/self/fd/3")
}

// TestKernelNewsAreOfWhatLeadsToOthers expects an event for each change that affects packets to other nodes.
func TestKernelNewsAreOfWhatLeadsToOthers(t *testing.T) {
	n := newNode(t)
	d := n.ensure(t)
	ctx, cancel := context.WithCancel(t.Context())
	news, done := make(chan struct{}, 1000), make(chan error)
	go func() { done <- n.Watch(ctx, func() { news <- struct{}{} }) }()
	<-news // of earlier changes
	heard := func(what string, commands ...string) {
		t.Helper()
		n.ip(t, commands...)
		ctx, cancel := context.WithTimeout(t.Context(), servicetest.Patience)
		defer cancel()
		select {
		case <-news:
		case <-ctx.Done():
			t.Errorf("%s: no news", what)
		}
		for len(news) > 0 {
			<-news
		}
	}
	heard("a device", "link set uplink0 mtu 1400")
	heard("a route", "route add 198.51.100.0/24 dev uplink0")
	heard("a removed foreign route", "route del 198.51.100.0/24 dev uplink0")
	r := routing.Route{Range: netip.MustParsePrefix("10.9.0.0/24"), Hops: []routing.Nexthop{{Ifindex: d.Index}}, MTU: 1400}
	if err := n.SetRoute(r); err != nil {
		t.Fatal(err)
	}
	heard("a removed route of the instance", "route del 10.9.0.0/24")
	heard("an address", "addr add 198.51.100.7/32 dev uplink0")
	heard("a rule", "rule add pref 77 from 10.0.0.0/8 lookup main")
	heard("the tunnel device", "link del "+d.Name)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

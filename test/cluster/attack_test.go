// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// passing are the reasons of packets that were not dropped, and of packets that are always sent on a link.
var passing = []string{"forwarded", "answered", "stack-", "arp", "ndp", "multicast", "broadcast"}

// drops returns the number of packets that the node has dropped, by the reason of its programs or the chain of its
// firewall.
func (n *node) drops(t *testing.T) map[string]uint64 {
	t.Helper()
	out, err := n.run(t.Context(), "map", "dump", "sl_metrics")
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]uint64{}
	for line := range bytes.Lines(out) {
		var e struct{ Key, Value string }
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatal(err)
		}
		reason, _, _ := strings.Cut(e.Key, " ")
		count, err := strconv.ParseUint(strings.Fields(e.Value)[1], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range passing {
			if strings.HasPrefix(reason, p) {
				count = 0
			}
		}
		if count > 0 {
			counts[reason] += count
		}
	}
	for chain, count := range n.firewallDrops(t) {
		counts["firewall chain "+chain] += count
	}
	return counts
}

// firewall opens a connection to the node's nftables.
func (n *node) firewall(t *testing.T, do func(*nftables.Conn, *nftables.Table) error) {
	t.Helper()
	err := pod.In(n.Netns(), func() error {
		c, err := nftables.New(nftables.AsLasting())
		if err != nil {
			return err
		}
		defer c.CloseLasting() //nolint:errcheck // all results are known by now
		return do(c, &nftables.Table{Name: "sluice-" + n.Instance(), Family: nftables.TableFamilyINet})
	})
	if err != nil {
		t.Fatalf("firewall of %s: %v", n.Name(), err)
	}
}

// firewallDrops returns the number of packets that each chain has dropped.
func (n *node) firewallDrops(t *testing.T) map[string]uint64 {
	t.Helper()
	counts := map[string]uint64{}
	n.firewall(t, func(c *nftables.Conn, table *nftables.Table) error {
		chains, err := c.ListChainsOfTableFamily(table.Family)
		if err != nil {
			return err
		}
		for _, ch := range chains {
			if ch.Table.Name != table.Name {
				continue
			}
			rules, err := c.GetRules(table, ch)
			if err != nil {
				return err
			}
			for _, r := range rules {
				var packets uint64
				for _, e := range r.Exprs {
					switch e := e.(type) {
					case *expr.Counter:
						packets = e.Packets
					case *expr.Verdict:
						if e.Kind == expr.VerdictDrop && packets > 0 {
							counts[ch.Name] += packets
						}
					}
				}
			}
		}
		return nil
	})
	return counts
}

// shot is one crafted packet.
type shot struct {
	what   string
	packet []byte
	heard  bool // the packet must arrive
	stack  bool // the programs must pass the packet, and the kernel must not deliver it
}

// arena is a cluster whose first node is attacked. Ears listen in every pod and on every host.
type arena struct {
	*testCluster
	ears     *ears
	pods     []pod.Pod // one pod on each node
	macs     []net.HardwareAddr
	outside  pod.Pod
	wire     *wire // the outsider's
	ids      []uint32
	tunnel   net.HardwareAddr // Ethernet address of the attacked node's tunnel
	sent     int
	attacked *node
}

// newArena makes a cluster with additional datapath arguments.
func newArena(t *testing.T, mode string, args ...string) *arena {
	t.Helper()
	a := &arena{
		testCluster: newCluster(t, devnode.ClusterOptions{Nodes: 3, Routing: mode, Options: devnode.Options{
			Args: map[string][]string{devnode.Datapath: args},
		}}),
		ears: &ears{heard: map[string]int{}},
	}
	for i, n := range a.nodes {
		p := n.add(t, fmt.Sprint("app-", i))
		a.pods = append(a.pods, p)
		mac, _ := hardware(t, n.Netns(), "eth0")
		a.macs = append(a.macs, mac)
		a.ears.deviceOf(t, p)
		a.ears.socketsOf(t, p, attackedPorts...)
		a.ears.socketsOf(t, n.host(), attackedPorts[0]) // the other port is the tunnel's
	}
	for i, p := range a.pods {
		a.ids = append(a.ids, 0)
		for k, n := range a.nodes {
			if k != i {
				a.ids[i] = n.identityOf(t, p, a.nodes[i])
				n.kernelHas(t, entries(p, a.ids[i], a.nodes[i])...)
			}
		}
	}
	a.outside, a.attacked = a.plug(t), a.nodes[0]
	a.wire = newWire(t, a.outside.Netns)
	a.tunnel = net.HardwareAddr{2, 0xaa, 0, 0, 0, 1}
	if mode == "overlay" {
		err := pod.In(a.attacked.Netns(), func() error {
			return onTunnel(func(l netlink.Link) error {
				a.tunnel = l.Attrs().HardwareAddr
				return nil
			})
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for i, from := range a.pods {
		for k, to := range a.pods {
			for _, address := range to.Addresses() {
				if i != k {
					servicetest.EventuallyNil(t, fmt.Sprintf("%s to %s", from.Name, address), func() error {
						return pod.ExchangeUDP(servicetest.Context(t), from, to, address, []byte("x"))
					})
				}
			}
		}
	}
	return a
}

// crafted builds a named packet whose payload identifies it to the ears.
func (a *arena) crafted(what string, build func(payload []byte) []byte) shot {
	a.sent++
	what = fmt.Sprintf("%s%d %s", marker, a.sent, what)
	return shot{what: what, packet: build([]byte(what + ";"))}
}

func (a *arena) tunnelled(vni uint32, packet []byte) []byte { return tunnelled(a.tunnel, vni, packet) }

// fire sends packets by a wire. It waits until each packet that must arrive was heard, and the drop counters of the
// attacked node have increased by the number of the others. Hearing any other packet is an error.
func (a *arena) fire(t *testing.T, name string, w *wire, to net.HardwareAddr, shots []shot) {
	t.Helper()
	a.fireCounted(t, name, w, to, shots, true)
}

// inFlight is the number of packets sent before a check. It is below the kernel's queue of a busy CPU
// (net.core.netdev_max_backlog), which would drop further packets before a program sees them.
const inFlight = 500

// Packets are sent again if too few were heard or counted: a busy kernel may lose some on the way to the attacked
// node.
const (
	repeatAfter  = 15 * time.Second
	mostRepeated = 2
)

func (a *arena) fireCounted(t *testing.T, name string, w *wire, to net.HardwareAddr, shots []shot, counted bool) {
	t.Helper()
	a.ears.take()
	o := &outcome{name: name, heard: map[string]bool{}, all: map[string]bool{}, by: map[string]uint64{}}
	for some := range slices.Chunk(shots, inFlight) {
		a.volley(t, o, w, to, some, counted)
	}
	// Packets that passed have been heard before this exchange ends.
	for _, address := range append(a.attacked.Addresses(), a.pods[0].Addresses()...) {
		if _, err := a.ask(a.pods[1], address); err != nil {
			t.Errorf("%s: an exchange afterwards: %v", name, err)
		}
	}
	o.listen(t, a.ears)
	t.Logf("%s: %d packets, %d may pass, %d were heard wrongly; drops: %v",
		name, len(shots), len(o.heard), o.wrong, o.by)
}

// outcome contains the results of sent packets.
type outcome struct {
	name  string
	heard map[string]bool // sent packets that must be heard
	all   map[string]bool // heard packets
	wrong int             // number of heard packets that must not be
	by    map[string]uint64
}

func (o *outcome) listen(t *testing.T, e *ears) {
	t.Helper()
	for who := range e.take() {
		_, what, _ := strings.Cut(who, ": ")
		if o.all[what] = true; !o.heard[what] {
			if o.wrong++; o.wrong <= 20 {
				t.Errorf("%s: heard by %s", o.name, who)
			}
		}
	}
}

// volley sends packets at once and waits for their results.
func (a *arena) volley(t *testing.T, o *outcome, w *wire, to net.HardwareAddr, shots []shot, counted bool) {
	t.Helper()
	before, denied := a.attacked.drops(t), uint64(0)
	for _, s := range shots {
		switch {
		case s.stack:
		case s.heard:
			o.heard[s.what] = true
		default:
			denied++
		}
	}
	send := func() {
		for _, s := range shots {
			if err := w.send(to, s.packet); err != nil {
				t.Fatalf("%s: send %s: %v", o.name, s.what, err)
			}
		}
	}
	send()
	var by map[string]uint64
	settled := func() error {
		o.listen(t, a.ears)
		by = map[string]uint64{}
		sum := uint64(0)
		for reason, count := range a.attacked.drops(t) {
			if count -= before[reason]; count > 0 {
				by[reason] = count
				sum += count
			}
		}
		var missing []string
		for what := range o.heard {
			if !o.all[what] {
				missing = append(missing, what)
			}
		}
		if len(missing) > 0 {
			slices.Sort(missing)
			return fmt.Errorf("%d of %d are not heard: %q; drops: %v", len(missing), len(o.heard), missing, by)
		}
		if counted && sum < denied {
			return fmt.Errorf("%d of %d drops were counted: %v", sum, denied, by)
		}
		return nil
	}
	sentAt, repeated := time.Now(), 0
	servicetest.EventuallyNil(t, o.name+": all is heard or counted", func() error {
		err := settled()
		if err != nil && repeated < mostRepeated && time.Since(sentAt) > repeatAfter {
			// If a program lost packets silently, it would lose them each time.
			t.Logf("%s: sent once more, the kernel has lost packets: %v", o.name, err)
			before = a.attacked.drops(t)
			send()
			sentAt, repeated = time.Now(), repeated+1
		}
		return err
	})
	for reason, count := range by {
		o.by[reason] += count
	}
}

// ask sends queries to the ears until one of them answers.
func (a *arena) ask(from pod.Pod, at netip.Addr) (tries int, err error) {
	c, err := from.ListenPacket(netip.AddrPortFrom(netip.IPv6Unspecified(), 0))
	if err != nil {
		return 0, err
	}
	defer c.Close()
	b := make([]byte, 100)
	for tries = 1; tries <= 20; tries++ {
		if _, err = c.WriteToUDPAddrPort([]byte("ask"), netip.AddrPortFrom(at, attackedPorts[0])); err != nil {
			return tries, err
		}
		_ = c.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		if _, _, err = c.ReadFromUDPAddrPort(b); err == nil {
			return tries, nil
		}
	}
	return tries, err
}

// claim is a sender address in a tunnelled packet.
type claim struct {
	what    string
	of      int // the node with the address; -1 for none
	host    bool
	address netip.Addr
}

// claims returns all kinds of sender addresses, in both families.
func (a *arena) claims() (all []claim) {
	for i, n := range a.nodes {
		for _, address := range a.pods[i].Addresses() {
			all = append(all, claim{fmt.Sprint("pod of node ", i), i, false, address})
		}
		for _, address := range n.Addresses() {
			all = append(all, claim{fmt.Sprint("node ", i), i, true, address})
		}
		for k, address := range n.overlay() {
			all = append(all, claim{fmt.Sprint("overlay address of node ", i), i, true, address})
			b := n.PodCIDRs()[k].Addr().AsSlice()
			b[len(b)-1] = 77
			nobody, _ := netip.AddrFromSlice(b)
			all = append(all, claim{fmt.Sprint("no pod of node ", i), i, false, nobody})
		}
	}
	for _, address := range []string{"198.51.100.7", "2001:db8:7::7", "127.0.0.1", "::1", "169.254.1.1"} {
		all = append(all, claim{"world", -1, false, netip.MustParseAddr(address)})
	}
	return all
}

// vnis returns the boundary values of the VNI, the identities of all pods, and all reserved identities.
func (a *arena) vnis() []uint32 {
	all := []uint32{255, 256, 65535, 65536, 0xff0000, 0xffffff}
	for v := range uint32(11) {
		all = append(all, v)
	}
	return append(all, a.ids...)
}

// inTunnels returns tunnelled packets with every claimed sender and every VNI to the pod and the host of the attacked
// node, and to a pod of another node. The outer packets come from the node with the index sender; a negative index
// means that no node has the outer address.
func (a *arena) inTunnels(name string, outer, at netip.Addr, sender int) (shots []shot) {
	type target struct {
		what    string
		address netip.Addr
		here    bool
	}
	var targets []target
	for _, address := range a.pods[0].Addresses() {
		targets = append(targets, target{"the pod", address, true})
	}
	for _, address := range append(a.attacked.Addresses(), a.attacked.overlay()...) {
		targets = append(targets, target{"the host", address, true})
	}
	for _, address := range a.pods[1].Addresses() {
		targets = append(targets, target{"a pod of node 1", address, false})
	}
	for _, from := range a.claims() {
		for _, to := range targets {
			if from.address.Is4() != to.address.Is4() {
				continue
			}
			for _, vni := range a.vnis() {
				s := a.crafted(fmt.Sprintf("%s: %s %s to %s, VNI %d", name, from.what, from.address, to.what, vni),
					func(payload []byte) []byte {
						inner := datagram(netip.AddrPortFrom(from.address, 4000), netip.AddrPortFrom(to.address, 7000), payload)
						packet := datagram(netip.AddrPortFrom(outer, 40000), netip.AddrPortFrom(at, tunnelPort), a.tunnelled(vni, inner))
						if at.Is4() { // as nodes send: only such packets are decapsulated without the tunnel device
							packet[20+6], packet[20+7] = 0, 0
						}
						return packet
					})
				mine := to.here && sender >= 0 && from.of == sender
				ofPod := !from.host && vni >= 256 && vni <= 65535
				ofHost := from.host && (vni == 6 || vni == 9 || vni == 10)
				s.heard = mine && (ofPod || ofHost)
				// the return path of a node's own address does not use the tunnel, so rp_filter drops the packet
				s.stack = s.heard && to.what == "the host" && slices.Contains(a.nodes[from.of].Addresses(), from.address) &&
					from.address.Is4()
				shots = append(shots, s)
			}
		}
	}
	return shots
}

// TestNothingForgedLeavesATunnel sends some thousand packets to the tunnel port of a node: from an outsider with its
// own address, an unassigned address and a node's address, and from a malicious node. A sender with the address of a
// registered node can send as that node and its pods, and as no other.
func TestNothingForgedLeavesATunnel(t *testing.T) {
	a := newArena(t, "overlay")
	liar := newWire(t, a.nodes[2].Netns())
	for _, at := range append(a.attacked.Addresses(), a.attacked.overlay()...) {
		own := addressOf(a.outside.Addresses(), at)
		nobody := addressOf([]netip.Addr{netip.MustParseAddr("203.0.113.9"), netip.MustParseAddr("2001:db8:9::9")}, at)
		node := addressOf(a.nodes[2].Addresses(), at)
		a.fire(t, fmt.Sprint("outsider to ", at), a.wire, a.macs[0], a.inTunnels("own", own, at, -1))
		a.fire(t, fmt.Sprint("unassigned address to ", at), a.wire, a.macs[0], a.inTunnels("nobody", nobody, at, -1))
		a.fire(t, fmt.Sprint("outsider as node 2 to ", at), a.wire, a.macs[0], a.inTunnels("as node 2", node, at, 2))
		a.fire(t, fmt.Sprint("node 2 lies to ", at), liar, a.macs[0], a.inTunnels("node 2", node, at, 2))
	}
	// Outer addresses that no other machine has, or that only pods have.
	for _, outer := range append(a.pods[0].Addresses(), a.pods[1].Addresses()...) {
		at := addressOf(a.attacked.Addresses(), outer)
		a.fire(t, fmt.Sprint("outsider as pod ", outer), a.wire, a.macs[0], a.inTunnels("as a pod", outer, at, -1))
	}
	for _, outer := range a.attacked.Addresses() {
		// The kernel itself rejects its own IPv4 address as a source.
		a.fireCounted(t, fmt.Sprint("outsider as the node itself ", outer), a.wire, a.macs[0],
			a.inTunnels("as itself", outer, outer, -1), outer.Is6())
	}
	t.Logf("%d packets", a.sent)
}

// hostEnd returns the Ethernet address of the node's end of a pod's device.
func hostEnd(t *testing.T, n *node, p pod.Pod) (mac net.HardwareAddr) {
	t.Helper()
	var parent int
	err := pod.In(p.Netns, func() error {
		link, err := netlink.LinkByName("eth0")
		if err == nil {
			parent = link.Attrs().ParentIndex
		}
		return err
	})
	if err == nil {
		err = pod.In(n.Netns(), func() error {
			link, err := netlink.LinkByIndex(parent)
			if err == nil {
				mac = link.Attrs().HardwareAddr
			}
			return err
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	return mac
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// Return values of the programs.
const (
	verdictOK       = 0
	verdictShot     = 2
	verdictRedirect = 7
)

const (
	markMask      = 0x0f00
	markPod       = 0x0200
	markEvaluated = 0x0d00
)

// markOf sets the upper half of a mark: a device, or the identity that older programs stored there.
func markOf(magic, number uint32) uint32 { return magic | number<<16 }

// skbContext is struct __sk_buff as BPF_PROG_TEST_RUN reads and writes it.
type skbContext struct {
	Len, PktType, Mark, QueueMapping, Protocol, VlanPresent, VlanTCI, VlanProto, Priority uint32
	IngressIfindex, Ifindex, TCIndex                                                      uint32
	CB                                                                                    [5]uint32
	Hash, TCClassid, Data, DataEnd, NapiID                                                uint32
	Family, RemoteIP4, LocalIP4                                                           uint32
	RemoteIP6, LocalIP6                                                                   [4]uint32
	RemotePort, LocalPort, DataMeta                                                       uint32
	FlowKeys                                                                              uint64
	Tstamp                                                                                uint64
	WireLen, GSOSegs                                                                      uint32
	SK                                                                                    uint64
	GSOSize                                                                               uint32
	TstampType                                                                            uint8
	_                                                                                     [3]uint8
	HWTstamp                                                                              uint64
}

// outcome is the result for one packet.
type outcome struct {
	verdict   uint32
	mark      uint32
	reason    event.Reason
	direction event.Direction
	packets   uint64
	bytes     uint64
	out       []byte
	ctx       skbContext
}

// runner runs the programs on one packet at a time and reads the counters.
type runner struct {
	k *Kernel
}

const testFlagChecksumComplete = 1 << 2 // BPF_F_TEST_SKB_CHECKSUM_COMPLETE

func (r runner) run(t testing.TB, prog string, in []byte, ctx skbContext, flags uint32) outcome {
	t.Helper()
	before := r.counters(t)
	o := outcome{out: make([]byte, len(in)+256)}
	opts := &ebpf.RunOptions{Data: in, DataOut: o.out, Context: ctx, ContextOut: &o.ctx, Flags: flags}
	verdict, err := r.k.program(prog).Run(opts)
	if err != nil {
		t.Fatalf("run %s: %v", prog, err)
	}
	o.verdict, o.mark, o.out = verdict, o.ctx.Mark, opts.DataOut
	after := r.counters(t)
	maps.DeleteFunc(after, func(key cell, c event.Counter) bool { return c.Packets == before[key].Packets })
	if len(after) > 1 {
		// The stacks of pods send neighbour discovery and listener reports at any time.
		maps.DeleteFunc(after, func(key cell, _ event.Counter) bool { return key.reason == event.Multicast })
	}
	for key, c := range after {
		o.reason, o.direction = key.reason, key.direction
		o.packets += c.Packets - before[key].Packets
		o.bytes += c.Bytes - before[key].Bytes
	}
	return o
}

// forget removes the state that programs keep about packets.
func (r runner) forget(t testing.TB) {
	t.Helper()
	for _, name := range []string{
		bpf.MapsMapSlCt4, bpf.MapsMapSlCt6, bpf.MapsMapSlRevoked4, bpf.MapsMapSlRevoked6,
		bpf.MapsMapSlFrag, bpf.MapsMapSlPodFrag,
	} {
		m := r.k.Pins.Map(name)
		var keys [][]byte
		key, value := make([]byte, m.KeySize()), make([]byte, m.ValueSize())
		it := m.Iterate()
		for it.Next(&key, &value) {
			keys = append(keys, bytes.Clone(key))
		}
		must(t, "list "+name, it.Err())
		for _, key := range keys {
			must(t, "delete from "+name, m.Delete(key))
		}
	}
}

// drain reads the events that have been sent. When a test run has returned, its events are in the ring.
func drain(t testing.TB, r *event.Reader) []event.Event {
	t.Helper()
	var got []event.Event
	for r.Waiting() > 0 {
		e, err := r.Read(t.Context())
		must(t, "Read", err)
		got = append(got, e)
	}
	return got
}

type cell struct {
	reason    event.Reason
	direction event.Direction
}

func (r runner) counters(t testing.TB) map[cell]event.Counter {
	t.Helper()
	cs, err := r.k.Events.Metrics()
	if err != nil {
		t.Fatalf("Metrics: %v", err)
	}
	m := map[cell]event.Counter{}
	for _, c := range cs {
		m[cell{c.Reason, c.Direction}] = c
	}
	return m
}

// The cast of the packet tests: a is the pod under test, on the loopback device because BPF_PROG_TEST_RUN
// requires an existing device.
var (
	a       = testEndpoint(1, 10)
	b       = testEndpoint(1002, 20)
	only4   = withAddrs(testEndpoint(1003, 30), true, false)
	shaped  = withDeliver(testEndpoint(1004, 40), endpointmap.DeliverRedirect)
	narrow  = withMTU(testEndpoint(1005, 50), 1280)
	host4   = netip.MustParseAddr("192.0.2.1")
	host6   = netip.MustParseAddr("2001:db8::1")
	remote4 = netip.MustParseAddr("192.0.2.2")
	server4 = netip.MustParseAddr("192.0.2.3")
	remote6 = netip.MustParseAddr("2001:db8::2")
	world4  = netip.MustParseAddr("198.51.100.7")
	world6  = netip.MustParseAddr("2001:db8:ffff::7")
	nobody4 = netip.MustParseAddr("10.244.0.99")
	nobody6 = netip.MustParseAddr("fd00:244::99")

	gateway4 = netip.MustParseAddr("169.254.1.1")
	gateway6 = netip.MustParseAddr("fe80::1")
	podLocal = netip.MustParseAddr("fe80::aa")
)

func withAddrs(e endpointmap.Endpoint, v4, v6 bool) endpointmap.Endpoint {
	if !v4 {
		e.IPv4 = netip.Addr{}
	}
	if !v6 {
		e.IPv6 = netip.Addr{}
	}
	return e
}

func withDeliver(e endpointmap.Endpoint, d endpointmap.Deliver) endpointmap.Endpoint {
	e.Deliver = d
	return e
}
func withMTU(e endpointmap.Endpoint, mtu uint16) endpointmap.Endpoint { e.MTU = mtu; return e }

// newStage publishes the cast.
func newStage(t testing.TB) (runner, map[string]endpointmap.Endpoint) {
	t.Helper()
	return newStageOf(t, testOptions(kerneltest.NewBPFFS(t)))
}

func newStageOf(t testing.TB, o Options) (runner, map[string]endpointmap.Endpoint) {
	t.Helper()
	k := openKernel(t, o)
	cast := map[string]endpointmap.Endpoint{}
	for name, e := range map[string]endpointmap.Endpoint{
		"a": a, "b": b, "only4": only4, "shaped": shaped, "narrow": narrow,
	} {
		cast[name] = publish(t, k, e)
	}
	if err := k.Endpoints.SyncHostAddrs([]netip.Addr{host4, host6}); err != nil {
		t.Fatalf("SyncHostAddrs: %v", err)
	}
	for _, x := range []netip.Addr{remote4, remote6} {
		if err := k.Addresses.Set(ipmap.HostPrefix(x), ipmap.Info{Identity: identity.RemoteNode, Node: 2}); err != nil {
			t.Fatalf("UpsertIP(%v): %v", x, err)
		}
	}
	server := ipcache.Remote{Identity: identity.KubeAPIServer, Node: 3}
	must(t, "an API server", k.IPCache.SetRemote(ipmap.HostPrefix(server4), server))
	return runner{k}, cast
}

// from4 and from6 return frames from pod a.
func from4(dst netip.Addr, proto byte, payload []byte) []byte {
	return frame(a.HostMAC, a.MAC, etherIPv4, ip4Header{src: a.IPv4, dst: dst, proto: proto}.with(payload))
}

func from6(dst netip.Addr, next byte, payload []byte) []byte {
	return frame(a.HostMAC, a.MAC, etherIPv6, ip6(a.IPv6, dst, next, payload))
}

// to4 and to6 return frames from the host's stack to pod a.
func to4(src netip.Addr, proto byte, payload []byte) []byte {
	return frame(a.MAC, a.HostMAC, etherIPv4, ip4Header{src: src, dst: a.IPv4, proto: proto}.with(payload))
}

func to6(src netip.Addr, next byte, payload []byte) []byte {
	return frame(a.MAC, a.HostMAC, etherIPv6, ip6(src, a.IPv6, next, payload))
}

var (
	broadcastMAC = [6]byte{255, 255, 255, 255, 255, 255}
	strangerMAC  = [6]byte{2, 0, 0, 0, 9, 9}
)

// life is one packet and its expected result.
type life struct {
	name      string
	to        bool // sluice_to_pod, else sluice_from_pod
	policies  map[string]endpointmap.Policy
	before    []byte // sent through the same program before
	in        []byte
	mark      uint32
	reason    event.Reason
	direction event.Direction // the program's direction if 0
}

func (l life) verdict() uint32 {
	switch l.reason {
	case event.ForwardedToPod, event.ForwardedToPodDevice, event.AnsweredARP, event.AnsweredNDP:
		return verdictRedirect
	case event.ForwardedToHost, event.ForwardedOutside, event.ForwardedFromStack, event.StackTimeExceeded, event.StackTooBig:
		return verdictOK
	}
	return verdictShot
}

func lives() []life {
	dns, web := udp(40000, 53), tcp(40000, 80, flagSYN)
	deny := func(who string, egress, ingress nodetable.ID) map[string]endpointmap.Policy {
		return map[string]endpointmap.Policy{who: {Egress: egress, Ingress: ingress}}
	}
	spoof4 := frame(a.HostMAC, a.MAC, etherIPv4, ip4Header{src: b.IPv4, dst: world4, proto: 17}.with(dns))
	spoof6 := frame(a.HostMAC, a.MAC, etherIPv6, ip6(b.IPv6, world6, 17, dns))
	unspecified4, unspecified6 := netip.IPv4Unspecified(), netip.IPv6Unspecified()
	mcast6 := netip.MustParseAddr("ff02::16")
	gatewayGroup := netip.MustParseAddr("ff02::1:ff00:1")
	raw4 := func(h ip4Header, payload []byte) []byte {
		if !h.src.IsValid() {
			h.src = a.IPv4
		}
		return frame(a.HostMAC, a.MAC, etherIPv4, h.with(payload))
	}
	nd := func(kind byte) []byte {
		return ip6Header{src: podLocal, dst: gateway6, next: 58, hops: 255, length: -1}.with(icmp6(podLocal, gateway6, icmp(kind, 0, make([]byte, 16)...)))
	}
	chain := func(n int) []byte {
		var p []byte
		for i := range n {
			next := byte(60)
			if i == n-1 {
				next = 17
			}
			p = append(p, ext(next)...)
		}
		return from6(b.IPv6, 60, append(p, dns...))
	}
	badIHL := from4(b.IPv4, 17, dns)
	badIHL[14] = 0x44
	badVersion4 := from4(b.IPv4, 17, dns)
	badVersion4[14] = 0x65
	badVersion6 := from6(b.IPv6, 17, dns)
	badVersion6[14] = 0x40
	badDoff := from4(b.IPv4, 6, web)
	badDoff[14+20+12] = 4 << 4
	longDoff := from4(b.IPv4, 6, web)
	longDoff[14+20+12] = 6 << 4
	bigICMP := make([]byte, 1400)

	return []life{
		// Ethernet
		{name: "a VLAN tag is not for pods", in: frame(a.HostMAC, a.MAC, etherVLAN, []byte{0, 5, 8, 0}, from4(b.IPv4, 17, dns)[14:]), reason: event.NotIP},
		{name: "QinQ is not for pods", in: frame(a.HostMAC, a.MAC, 0x88a8, make([]byte, 40)), reason: event.NotIP},
		{name: "LLDP is not for pods", in: frame(a.HostMAC, a.MAC, 0x88cc, make([]byte, 40)), reason: event.NotIP},
		{name: "a length instead of a type is not for pods", in: frame(a.HostMAC, a.MAC, 40, make([]byte, 40)), reason: event.NotIP},
		{name: "a foreign source MAC is spoofed", in: frame(a.HostMAC, strangerMAC, etherIPv4, from4(b.IPv4, 17, dns)[14:]), reason: event.SpoofedMAC},
		{name: "the MAC of another pod is spoofed", in: frame(a.HostMAC, b.MAC, etherIPv6, from6(b.IPv6, 17, dns)[14:]), reason: event.SpoofedMAC},
		{name: "a unicast packet to a foreign MAC", in: frame(strangerMAC, a.MAC, etherIPv4, from4(b.IPv4, 17, dns)[14:]), reason: event.WrongMAC},
		{name: "a unicast packet to the broadcast MAC", in: frame(broadcastMAC, a.MAC, etherIPv6, from6(b.IPv6, 17, dns)[14:]), reason: event.WrongMAC},

		// ARP
		{name: "ARP for the gateway is answered", in: frame(broadcastMAC, a.MAC, etherARP, arp(1, a.MAC, a.IPv4, [6]byte{}, gateway4)), reason: event.AnsweredARP},
		{name: "unicast ARP for the gateway is answered", in: frame(a.HostMAC, a.MAC, etherARP, arp(1, a.MAC, a.IPv4, [6]byte{}, gateway4)), reason: event.AnsweredARP},
		{name: "ARP for another pod is ignored", in: frame(broadcastMAC, a.MAC, etherARP, arp(1, a.MAC, a.IPv4, [6]byte{}, b.IPv4)), reason: event.ARP},
		{name: "gratuitous ARP is ignored", in: frame(broadcastMAC, a.MAC, etherARP, arp(1, a.MAC, a.IPv4, [6]byte{}, a.IPv4)), reason: event.ARP},
		{name: "an ARP reply is ignored", in: frame(a.HostMAC, a.MAC, etherARP, arp(2, a.MAC, a.IPv4, a.HostMAC, gateway4)), reason: event.ARP},
		{name: "an ARP probe is ignored", in: frame(broadcastMAC, a.MAC, etherARP, arp(1, a.MAC, unspecified4, [6]byte{}, gateway4)), reason: event.ARP},
		{name: "ARP in the name of another pod", in: frame(broadcastMAC, a.MAC, etherARP, arp(1, a.MAC, b.IPv4, [6]byte{}, gateway4)), reason: event.SpoofedIP},
		{name: "ARP with another MAC inside", in: frame(broadcastMAC, a.MAC, etherARP, arp(1, b.MAC, a.IPv4, [6]byte{}, gateway4)), reason: event.SpoofedMAC},

		// neighbour discovery
		{name: "a solicitation for the gateway is answered", in: frame([6]byte{0x33, 0x33, 0xff, 0, 0, 1}, a.MAC, etherIPv6, solicit(podLocal, gatewayGroup, gateway6, &a.MAC)), reason: event.AnsweredNDP},
		{name: "a solicitation from the global address is answered", in: frame([6]byte{0x33, 0x33, 0xff, 0, 0, 1}, a.MAC, etherIPv6, solicit(a.IPv6, gatewayGroup, gateway6, &a.MAC)), reason: event.AnsweredNDP},
		{name: "a unicast probe without option is answered", in: frame(a.HostMAC, a.MAC, etherIPv6, solicit(podLocal, gateway6, gateway6, nil)), reason: event.AnsweredNDP},
		{name: "a solicitation in the name of another pod", in: frame(a.HostMAC, a.MAC, etherIPv6, solicit(b.IPv6, gateway6, gateway6, &a.MAC)), reason: event.SpoofedIP},
		{name: "a solicitation for another pod is ignored", in: frame(a.HostMAC, a.MAC, etherIPv6, solicit(podLocal, gatewayGroup, b.IPv6, &a.MAC)), reason: event.NDP},
		{name: "duplicate address detection is ignored", in: frame(a.HostMAC, a.MAC, etherIPv6, solicit(unspecified6, gatewayGroup, gateway6, nil)), reason: event.NDP},
		{name: "a solicitation that was routed", in: frame(a.HostMAC, a.MAC, etherIPv6, func() []byte { p := solicit(podLocal, gateway6, gateway6, &a.MAC); p[7] = 254; return p }()), reason: event.Malformed},
		{name: "a router solicitation is ignored", in: frame(a.HostMAC, a.MAC, etherIPv6, nd(133)), reason: event.NDP},
		{name: "a router advertisement is ignored", in: frame(a.HostMAC, a.MAC, etherIPv6, nd(134)), reason: event.NDP},
		{name: "a neighbour advertisement is ignored", in: frame(a.HostMAC, a.MAC, etherIPv6, nd(136)), reason: event.NDP},
		{name: "a redirect is ignored", in: frame(a.HostMAC, a.MAC, etherIPv6, nd(137)), reason: event.NDP},

		// headers
		{name: "IHL below 5", in: badIHL, reason: event.Malformed},
		{name: "version 6 in an IPv4 frame", in: badVersion4, reason: event.Malformed},
		{name: "version 4 in an IPv6 frame", in: badVersion6, reason: event.Malformed},
		{name: "IPv4 length beyond the frame", in: raw4(ip4Header{dst: b.IPv4, proto: 17, total: 200}, dns), reason: event.Malformed},
		{name: "IPv4 length below the header", in: raw4(ip4Header{dst: b.IPv4, proto: 17, total: 19}, dns), reason: event.Malformed},
		{name: "IPv4 length cuts the UDP header", in: raw4(ip4Header{dst: b.IPv4, proto: 17, total: 27}, dns), reason: event.Malformed},
		{name: "IPv6 length beyond the frame", in: frame(a.HostMAC, a.MAC, etherIPv6, ip6Header{src: a.IPv6, dst: b.IPv6, next: 17, hops: 64, length: 9}.with(dns)), reason: event.Malformed},
		{name: "IPv6 length cuts the UDP header", in: frame(a.HostMAC, a.MAC, etherIPv6, ip6Header{src: a.IPv6, dst: b.IPv6, next: 17, hops: 64, length: 7}.with(dns)), reason: event.Malformed},
		{name: "padding behind the IPv4 packet does not matter", in: append(from4(b.IPv4, 17, dns), make([]byte, 18)...), reason: event.ForwardedToPod},
		{name: "TCP data offset below 5", in: badDoff, reason: event.Malformed},
		{name: "TCP data offset beyond the packet", in: longDoff, reason: event.Malformed},
		{name: "IPv4 options pass", in: raw4(ip4Header{dst: b.IPv4, proto: 17, options: []byte{1, 7, 7, 4, 0, 0, 0, 0}}, dns), reason: event.ForwardedToPod},
		{name: "40 bytes of no-operation options pass", in: raw4(ip4Header{dst: b.IPv4, proto: 17, options: bytes.Repeat([]byte{1}, 40)}, dns), reason: event.ForwardedToPod},
		{name: "an option of length 0", in: raw4(ip4Header{dst: b.IPv4, proto: 17, options: []byte{7, 0, 0, 0}}, dns), reason: event.Malformed},
		{name: "an option beyond the header", in: raw4(ip4Header{dst: b.IPv4, proto: 17, options: []byte{7, 5, 0, 0}}, dns), reason: event.Malformed},
		{name: "an option cut behind its type", in: raw4(ip4Header{dst: b.IPv4, proto: 17, options: []byte{1, 1, 1, 7}}, dns), reason: event.Malformed},
		{name: "a loose source route", in: raw4(ip4Header{dst: host4, proto: 17, options: []byte{131, 7, 4, 10, 244, 0, 20, 0}}, dns), reason: event.SourceRoute},
		{name: "a strict source route behind other options", in: raw4(ip4Header{dst: host4, proto: 17, options: []byte{1, 137, 7, 4, 10, 244, 0, 20}}, dns), reason: event.SourceRoute},
		{name: "bytes behind the end of options do not matter", in: raw4(ip4Header{dst: b.IPv4, proto: 17, options: []byte{0, 131, 7, 4}}, dns), reason: event.ForwardedToPod},
		{name: "hop-by-hop options pass", in: from6(b.IPv6, 0, append(ext(17), dns...)), reason: event.ForwardedToPod},
		{name: "hop-by-hop options only come first", in: from6(b.IPv6, 60, slices.Concat(ext(0), ext(17), dns)), reason: event.Malformed},
		{name: "six extension headers pass", in: chain(6), reason: event.ForwardedToPod},
		{name: "seven extension headers are too many", in: chain(7), reason: event.ExtensionHeaders},
		{name: "a routing header is a source route", in: from6(b.IPv6, 43, append(ext(17), dns...)), reason: event.SourceRoute},
		{name: "a routing header behind others is a source route", in: from6(b.IPv6, 0, slices.Concat(ext(60), ext(43), ext(17), dns)), reason: event.SourceRoute},
		{name: "an extension header beyond the packet", in: from6(b.IPv6, 60, []byte{17, 9, 0, 0, 0, 0, 0, 0}), reason: event.Malformed},
		{name: "a transport header far into the packet is found", in: from6(b.IPv6, 60, append(append([]byte{17, 39}, make([]byte, 318)...), dns...)), reason: event.ForwardedToPod},
		{name: "a tunnel port far into the packet is found", in: from6(host6, 60, append(append([]byte{17, 39}, make([]byte, 318)...), udp(40000, 4789)...)), reason: event.TunnelPort},
		{name: "an authentication header passes", in: from6(b.IPv6, 51, slices.Concat([]byte{17, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, dns)), reason: event.ForwardedToPod},
		{name: "no next header passes", in: from6(b.IPv6, 59, nil), reason: event.ForwardedToPod},

		// fragments
		{name: "a first IPv4 fragment passes", in: raw4(ip4Header{dst: b.IPv4, proto: 17, frag: 0x2000}, dns), reason: event.ForwardedToPod},
		{name: "a later IPv4 fragment behind the first passes", before: raw4(ip4Header{dst: b.IPv4, proto: 17, frag: 0x2000}, dns), in: raw4(ip4Header{dst: b.IPv4, proto: 17, frag: 0x2001}, []byte{1}), reason: event.ForwardedToPod},
		{name: "a later IPv4 fragment without the first", in: raw4(ip4Header{dst: b.IPv4, proto: 17, frag: 0x2001}, []byte{1}), reason: event.FragmentUnknown},
		{name: "a later IPv4 fragment of a protocol without ports", in: raw4(ip4Header{dst: b.IPv4, proto: 47, frag: 0x2001}, []byte{1}), reason: event.ForwardedToPod},
		{name: "a later IPv4 fragment is not above spoofing", in: raw4(ip4Header{src: b.IPv4, dst: world4, proto: 17, frag: 0x0001}, dns), reason: event.SpoofedIP},
		{name: "a first IPv4 fragment without ports", in: raw4(ip4Header{dst: b.IPv4, proto: 17, frag: 0x2000}, dns[:7]), reason: event.Malformed},
		{name: "a first IPv6 fragment passes", in: from6(b.IPv6, 44, append([]byte{17, 0, 0, 1, 0, 0, 0, 1}, dns...)), reason: event.ForwardedToPod},
		{name: "a later IPv6 fragment behind the first passes", before: from6(b.IPv6, 44, append([]byte{17, 0, 0, 1, 0, 0, 0, 1}, dns...)), in: from6(b.IPv6, 44, []byte{17, 0, 0, 8, 0, 0, 0, 1, 9}), reason: event.ForwardedToPod},
		{name: "a later IPv6 fragment of another packet", before: from6(b.IPv6, 44, append([]byte{17, 0, 0, 1, 0, 0, 0, 1}, dns...)), in: from6(b.IPv6, 44, []byte{17, 0, 0, 8, 0, 0, 0, 2, 9}), reason: event.FragmentUnknown},
		{name: "a later fragment of destination options is not followed", in: from6(b.IPv6, 44, []byte{60, 0, 0, 8, 0, 0, 0, 1, 9}), reason: event.FragmentUnknown},

		// addresses
		{name: "the IPv4 address of another pod is spoofed", in: spoof4, reason: event.SpoofedIP},
		{name: "the IPv6 address of another pod is spoofed", in: spoof6, reason: event.SpoofedIP},
		{name: "the host's address is spoofed", in: raw4(ip4Header{src: host4, dst: b.IPv4, proto: 17}, dns), reason: event.SpoofedIP},
		{name: "no IPv4 source is spoofed", in: raw4(ip4Header{src: unspecified4, dst: b.IPv4, proto: 17}, dns), reason: event.SpoofedIP},
		{name: "no IPv6 source is spoofed", in: frame(a.HostMAC, a.MAC, etherIPv6, ip6(unspecified6, b.IPv6, 17, dns)), reason: event.SpoofedIP},
		{name: "a link-local source beyond the gateway", in: frame(a.HostMAC, a.MAC, etherIPv6, ip6(podLocal, b.IPv6, 17, dns)), reason: event.LinkLocal},
		{name: "a link-local destination", in: from6(gateway6, 17, dns), reason: event.LinkLocal},
		{name: "the IPv4 gateway speaks ARP only", in: from4(gateway4, 1, icmp(8, 0)), reason: event.LinkLocal},
		{name: "DHCP is ignored", in: frame(broadcastMAC, a.MAC, etherIPv4, ip4Header{src: unspecified4, dst: netip.MustParseAddr("255.255.255.255"), proto: 17}.with(udp(68, 67))), reason: event.Broadcast},
		{name: "IPv4 multicast is ignored", in: from4(netip.MustParseAddr("224.0.0.251"), 17, dns), reason: event.Multicast},
		{name: "MLD is ignored", in: frame(a.HostMAC, a.MAC, etherIPv6, ip6(podLocal, mcast6, 0, append(ext(58), icmp(143, 0)...))), reason: event.Multicast},
		{name: "127.0.0.1", in: from4(netip.MustParseAddr("127.0.0.1"), 17, dns), reason: event.MartianAddress},
		{name: "0.0.0.0", in: from4(unspecified4, 17, dns), reason: event.MartianAddress},
		{name: "240.0.0.1", in: from4(netip.MustParseAddr("240.0.0.1"), 17, dns), reason: event.MartianAddress},
		{name: "::1", in: from6(netip.IPv6Loopback(), 17, dns), reason: event.MartianAddress},
		{name: "::", in: from6(unspecified6, 17, dns), reason: event.MartianAddress},
		{name: "an IPv4-mapped destination", in: from6(netip.MustParseAddr("::ffff:192.0.2.1"), 17, dns), reason: event.MartianAddress},
		{name: "a pod to itself, IPv4", in: from4(a.IPv4, 17, dns), reason: event.Hairpin},
		{name: "a pod to itself, IPv6", in: from6(a.IPv6, 17, dns), reason: event.Hairpin},

		// paths
		{name: "UDP to a local pod, IPv4", in: from4(b.IPv4, 17, dns), reason: event.ForwardedToPod},
		{name: "UDP to a local pod, IPv6", in: from6(b.IPv6, 17, dns), reason: event.ForwardedToPod},
		{name: "TCP to a local pod, IPv4", in: from4(b.IPv4, 6, web), reason: event.ForwardedToPod},
		{name: "TCP to a local pod, IPv6", in: from6(b.IPv6, 6, web), reason: event.ForwardedToPod},
		{name: "SCTP to a local pod", in: from4(b.IPv4, 132, make([]byte, 12)), reason: event.ForwardedToPod},
		{name: "an echo request to a local pod, IPv4", in: from4(b.IPv4, 1, icmp(8, 0)), reason: event.ForwardedToPod},
		{name: "an echo request to a local pod, IPv6", in: from6(b.IPv6, 58, icmp(128, 0)), reason: event.ForwardedToPod},
		{name: "GRE to a local pod", in: from4(b.IPv4, 47, make([]byte, 4)), reason: event.ForwardedToPod},
		{name: "a foreign mark does not matter", in: from4(b.IPv4, 17, dns), mark: markOf(markEvaluated, 1), reason: event.ForwardedToPod},
		{name: "a pod that is delivered by its device", in: from4(shaped.IPv4, 17, dns), reason: event.ForwardedToPodDevice},
		{name: "the local host, IPv4", in: from4(host4, 6, web), reason: event.ForwardedToHost},
		{name: "the local host, IPv6", in: from6(host6, 6, web), reason: event.ForwardedToHost},
		{name: "a remote node", in: from4(remote4, 6, web), reason: event.ForwardedOutside},
		{name: "the world, IPv4", in: from4(world4, 6, web), reason: event.ForwardedOutside},
		{name: "the world, IPv6", in: from6(world6, 6, web), reason: event.ForwardedOutside},
		{name: "the IPv6 of a pod without one", in: from6(netip.MustParseAddr("fd00:244::1e"), 17, dns), reason: event.NoRoute},
		{name: "an unassigned address in the pod CIDR, IPv4", in: from4(nobody4, 17, dns), reason: event.NoRoute},
		{name: "an unassigned address in the pod CIDR, IPv6", in: from6(nobody6, 17, dns), reason: event.NoRoute},
		{name: "a tunnel port of the host, IPv4", in: from4(host4, 17, udp(40000, 4789)), reason: event.TunnelPort},
		{name: "a tunnel port of the host, IPv6", in: from6(host6, 17, udp(40000, 8472)), reason: event.TunnelPort},
		{name: "a tunnel port of a remote node, IPv4", in: from4(remote4, 17, udp(40000, 4789)), reason: event.TunnelPort},
		{name: "a tunnel port of a remote node, IPv6", in: from6(remote6, 17, udp(40000, 4789)), reason: event.TunnelPort},
		{name: "a tunnel port of a remote node behind options", in: from6(remote6, 60, append(ext(17), udp(40000, 4789)...)), reason: event.TunnelPort},
		{name: "a tunnel port in a first fragment", in: raw4(ip4Header{dst: remote4, proto: 17, frag: 0x2000}, udp(40000, 4789)), reason: event.TunnelPort},
		{name: "IPv4 within IPv4 to the host", in: from4(host4, 4, from4(b.IPv4, 17, dns)[14:]), reason: event.TunnelPort},
		{name: "IPv6 within IPv4 to the host", in: from4(host4, 41, from6(b.IPv6, 17, dns)[14:]), reason: event.TunnelPort},
		{
			name: "a tunnel port of a node with an API server",
			in:   from4(server4, 17, udp(40000, 4789)), reason: event.TunnelPort,
		},
		{
			name: "IPv4 in IPv4 to a node with an API server",
			in:   from4(server4, 4, make([]byte, 24)), reason: event.TunnelPort,
		},
		{name: "GRE to a remote node", in: from4(remote4, 47, make([]byte, 24)), reason: event.TunnelPort},
		{name: "GRE behind options to the host, IPv6", in: from6(host6, 60, append(ext(47), make([]byte, 24)...)), reason: event.TunnelPort},
		{name: "IPv6 within IPv6 to the host", in: from6(host6, 41, from6(b.IPv6, 17, dns)[14:]), reason: event.TunnelPort},
		{name: "L2TP to the host", in: from4(host4, 115, make([]byte, 24)), reason: event.TunnelPort},
		{name: "MPLS to a remote node, IPv6", in: from6(remote6, 137, make([]byte, 24)), reason: event.TunnelPort},
		{name: "a later fragment of a tunnelled packet", in: raw4(ip4Header{dst: host4, proto: 47, frag: 0x2001}, make([]byte, 24)), reason: event.TunnelPort},
		{name: "GRE to the world is a protocol like any other", in: from4(world4, 47, make([]byte, 24)), reason: event.ForwardedOutside},
		{name: "a tunnel port number of TCP is a port like any other", in: from4(host4, 6, tcp(40000, 4789, flagSYN)), reason: event.ForwardedToHost},
		{name: "a tunnel port of a pod is a port like any other", in: from4(b.IPv4, 17, udp(40000, 4789)), reason: event.ForwardedToPod},
		{name: "a tunnel port of the world is a port like any other", in: from4(world4, 17, udp(40000, 4789)), reason: event.ForwardedOutside},

		// hops and sizes
		{name: "TTL 2 arrives", in: raw4(ip4Header{dst: b.IPv4, proto: 17, ttl: 2}, dns), reason: event.ForwardedToPod},
		{name: "TTL 1 goes to the stack", in: raw4(ip4Header{dst: b.IPv4, proto: 17, ttl: 1}, dns), reason: event.StackTimeExceeded},
		{name: "hop limit 1 goes to the stack", in: frame(a.HostMAC, a.MAC, etherIPv6, ip6Header{src: a.IPv6, dst: b.IPv6, next: 17, hops: 1, length: -1}.with(dns)), reason: event.StackTimeExceeded},
		{name: "hop limit 0 goes to the stack", in: frame(a.HostMAC, a.MAC, etherIPv6, ip6Header{src: a.IPv6, dst: b.IPv6, next: 17, hops: 0, length: -1}.with(dns)), reason: event.StackTimeExceeded},
		{name: "TTL 1 that the policy denies is dropped", policies: deny("b", nodetable.Allow, nodetable.Deny), in: raw4(ip4Header{dst: b.IPv4, proto: 17, ttl: 1}, dns), reason: event.PolicyDenied, direction: event.Ingress},
		{name: "a packet over the receiver's MTU goes to the stack, IPv4", in: from4(narrow.IPv4, 1, icmp(8, 0, bigICMP...)), reason: event.StackTooBig},
		{name: "a packet over the receiver's MTU goes to the stack, IPv6", in: from6(narrow.IPv6, 58, icmp(128, 0, bigICMP...)), reason: event.StackTooBig},
		{name: "a packet of exactly the MTU arrives", in: from4(narrow.IPv4, 1, icmp(8, 0, bigICMP[:1280-28]...)), reason: event.ForwardedToPod},

		// policy
		{name: "egress denied to a pod", policies: deny("a", nodetable.Deny, nodetable.Allow), in: from4(b.IPv4, 17, dns), reason: event.PolicyDenied},
		{name: "egress denied to the host", policies: deny("a", nodetable.Deny, nodetable.Allow), in: from4(host4, 17, dns), reason: event.PolicyDenied},
		{name: "egress denied to the world", policies: deny("a", nodetable.Deny, nodetable.Allow), in: from6(world6, 17, dns), reason: event.PolicyDenied},
		{name: "ingress denied by the other pod", policies: deny("b", nodetable.Allow, nodetable.Deny), in: from4(b.IPv4, 17, dns), reason: event.PolicyDenied, direction: event.Ingress},
		{name: "ingress of the sender does not matter", policies: deny("a", nodetable.Allow, nodetable.Deny), in: from4(b.IPv4, 17, dns), reason: event.ForwardedToPod},
		{name: "egress of the receiver does not matter", policies: deny("b", nodetable.Deny, nodetable.Allow), in: from4(b.IPv4, 17, dns), reason: event.ForwardedToPod},
		{name: "egress pending to a pod", policies: deny("a", nodetable.Pending, nodetable.Allow), in: from4(b.IPv4, 6, web), reason: event.PolicyPending},
		{name: "egress pending to the world", policies: deny("a", nodetable.Pending, nodetable.Pending), in: from4(world4, 6, tcp(80, 40000, flagACK)), reason: event.PolicyPending},
		{name: "egress pending opens nothing to the host", policies: deny("a", nodetable.Pending, nodetable.Allow), in: from4(host4, 6, web), reason: event.PolicyPending},
		{name: "egress pending sends no UDP to the host", policies: deny("a", nodetable.Pending, nodetable.Allow), in: from4(host4, 17, dns), reason: event.PolicyPending},
		{name: "ingress pending from a pod", policies: deny("b", nodetable.Allow, nodetable.Pending), in: from4(b.IPv4, 17, dns), reason: event.PolicyPending, direction: event.Ingress},
		{name: "an unknown egress table denies", policies: deny("a", 16, nodetable.Allow), in: from4(b.IPv4, 17, dns), reason: event.PolicyTableUnknown},
		{name: "an unknown ingress table denies", policies: deny("b", nodetable.Allow, 0xffff), in: from4(b.IPv4, 17, dns), reason: event.PolicyTableUnknown, direction: event.Ingress},
		{name: "table 3 is reserved and denies", policies: deny("b", nodetable.Allow, 3), in: from6(b.IPv6, 17, dns), reason: event.PolicyTableUnknown, direction: event.Ingress},

		// from the stack
		{name: "the host to a pod, IPv4", to: true, in: to4(host4, 6, web), reason: event.ForwardedFromStack},
		{name: "the host to a pod, IPv6", to: true, in: to6(host6, 6, web), reason: event.ForwardedFromStack},
		{name: "the world to a pod", to: true, in: to4(world4, 6, web), reason: event.ForwardedFromStack},
		{name: "ARP from the host is ignored", to: true, in: frame(broadcastMAC, a.HostMAC, etherARP, arp(1, a.HostMAC, host4, [6]byte{}, a.IPv4)), reason: event.ARP},
		{name: "neighbour discovery from the host is ignored", to: true, in: frame(a.MAC, a.HostMAC, etherIPv6, solicit(host6, a.IPv6, a.IPv6, &a.HostMAC)), reason: event.NDP},
		{name: "multicast from the host is ignored", to: true, in: frame(a.MAC, a.HostMAC, etherIPv6, ip6(unspecified6, mcast6, 0, append(ext(58), icmp(143, 0)...))), reason: event.Multicast},
		{name: "broadcast from the host is ignored", to: true, in: frame(broadcastMAC, a.HostMAC, etherIPv4, ip4Header{src: host4, dst: netip.MustParseAddr("255.255.255.255"), proto: 17}.with(dns)), reason: event.Broadcast},
		{name: "another pod's address, IPv4", to: true, in: frame(a.MAC, a.HostMAC, etherIPv4, ip4Header{src: host4, dst: b.IPv4, proto: 17}.with(dns)), reason: event.WrongAddress},
		{name: "another pod's address, IPv6", to: true, in: frame(a.MAC, a.HostMAC, etherIPv6, ip6(host6, b.IPv6, 17, dns)), reason: event.WrongAddress},
		{name: "something else than IP from the host", to: true, in: frame(a.MAC, a.HostMAC, 0x88cc, make([]byte, 40)), reason: event.NotIP},
		{name: "a short packet from the host", to: true, in: to4(host4, 6, web[:19]), reason: event.Malformed},
		{name: "a source route through the host", to: true, in: to6(world6, 43, append(ext(17), dns...)), reason: event.SourceRoute},
		{name: "ingress denied from the host", to: true, policies: deny("a", nodetable.Allow, nodetable.Deny), in: to4(host4, 6, web), reason: event.PolicyDenied},
		{name: "ingress pending admits the local host", to: true, policies: deny("a", nodetable.Pending, nodetable.Pending), in: to4(host4, 6, web), reason: event.ForwardedFromStack},
		{name: "ingress pending denies a remote node", to: true, policies: deny("a", nodetable.Pending, nodetable.Pending), in: to4(remote4, 6, web), reason: event.PolicyPending},
		{name: "ingress pending denies the world", to: true, policies: deny("a", nodetable.Pending, nodetable.Pending), in: to6(world6, 6, web), reason: event.PolicyPending},
		{name: "the mark of an uplink names no sender", to: true, policies: deny("a", nodetable.Pending, nodetable.Pending), in: to4(host4, 6, web), mark: markOf(0x0a00, uint32(identity.World)), reason: event.ForwardedFromStack},
		{name: "the mark of a pod names no sender", to: true, policies: deny("a", nodetable.Pending, nodetable.Pending), in: to4(host4, 6, web), mark: markOf(markPod, 300), reason: event.ForwardedFromStack},
		{name: "a mark does not make the world the host", to: true, policies: deny("a", nodetable.Pending, nodetable.Pending), in: to4(world4, 6, web), mark: markOf(markPod, uint32(identity.Host)), reason: event.PolicyPending},
		{name: "a process of the host is not the pod whose address it uses", to: true, in: to4(b.IPv4, 6, web), mark: markOf(markPod, 300), reason: event.SpoofedIP},
		{name: "the same in IPv6", to: true, in: to6(b.IPv6, 17, dns), reason: event.SpoofedIP},
		{name: "a mark of the host's processes does not say that the packet was evaluated", to: true, policies: deny("a", nodetable.Deny, nodetable.Deny), in: to4(host4, 6, web), mark: markOf(markEvaluated, 1), reason: event.PolicyDenied},
		{name: "a mark that is not ours says nothing", to: true, policies: deny("a", nodetable.Pending, nodetable.Pending), in: to4(host4, 6, web), mark: 0x0300, reason: event.ForwardedFromStack},
		{name: "kube-proxy's marks do not matter", to: true, policies: deny("a", nodetable.Pending, nodetable.Pending), in: to4(host4, 6, web), mark: 0x4000 | 0x8000, reason: event.ForwardedFromStack},
		{name: "an unknown ingress table denies the host", to: true, policies: deny("a", nodetable.Allow, 17), in: to4(host4, 6, web), reason: event.PolicyTableUnknown},
	}
}

// TestKernelPacketLife runs every packet through a program and checks the verdict, the counter, the event and
// the mark (INV-31, INV-33, INV-34, INV-35).
func TestKernelPacketLife(t *testing.T) {
	r, cast := newStage(t)
	events, err := r.k.Events.Read()
	if err != nil {
		t.Fatalf("Events: %v", err)
	}
	defer events.Close()

	for _, l := range lives() {
		t.Run(l.name, func(t *testing.T) {
			for who, p := range l.policies {
				setPolicy(t, r.k, cast[who].Slot, p)
				defer setPolicy(t, r.k, cast[who].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow})
			}
			prog, direction := program.FromPod, event.Egress
			if l.to {
				prog, direction = program.ToPod, event.Ingress
			}
			if l.direction != 0 {
				direction = l.direction
			}
			r.forget(t)
			if l.before != nil {
				r.run(t, prog, l.before, skbContext{}, 0)
				drain(t, events)
			}
			o := r.run(t, prog, l.in, skbContext{Mark: l.mark, Priority: 6}, 0)

			if o.reason != l.reason || o.direction != direction {
				t.Errorf("counted as %v %v, want %v %v", o.reason, o.direction, l.reason, direction)
			}
			// an answer is counted with the answer's length
			length := uint64(len(l.in))
			if l.reason == event.AnsweredNDP {
				length = uint64(len(o.out))
			}
			if o.packets != 1 || o.bytes != length {
				t.Errorf("counted %d packets, %d bytes, want 1, %d", o.packets, o.bytes, length)
			}
			if o.verdict != l.verdict() {
				t.Errorf("verdict %d, want %d", o.verdict, l.verdict())
			}
			if want := l.markAfter(); o.mark != want {
				t.Errorf("mark %#x, want %#x", o.mark, want)
			}
			checkEvents(t, events, l, direction)
		})
	}
}

// markAfter returns the expected mark of the packet.
func (l life) markAfter() uint32 {
	switch l.reason {
	case event.ForwardedToHost, event.ForwardedOutside, event.StackTimeExceeded, event.StackTooBig:
		return markPod
	case event.ForwardedToPod:
		return 0
	case event.ForwardedToPodDevice:
		return markEvaluated | shaped.Ifindex<<16
	case event.AnsweredARP, event.AnsweredNDP:
		return markEvaluated | 1<<16
	}
	return l.mark
}

func setPolicy(t testing.TB, k *Kernel, s endpointmap.ID, p endpointmap.Policy) {
	t.Helper()
	if _, err := k.Endpoints.SetPolicy(s, p.Egress, p.Ingress); err != nil {
		t.Fatalf("SetPolicy(%d, %+v): %v", s, p, err)
	}
}

// checkEvents reads the events of the packet: one for a drop that is not quiet, otherwise none.
// TestKernelConnectionLife checks the events of connections.
func checkEvents(t *testing.T, r *event.Reader, l life, direction event.Direction) {
	t.Helper()
	got := slices.DeleteFunc(drain(t, r), func(e event.Event) bool { return e.Type != event.PacketDropped })
	loud := l.reason.Dropped() && !l.reason.Quiet()
	if !loud {
		if len(got) != 0 {
			t.Errorf("events %+v, want none", got)
		}
		return
	}
	if len(got) != 1 {
		t.Fatalf("%d events, want 1", len(got))
	}
	e := got[0]
	if e.Reason != l.reason || e.Direction != direction || e.Ifindex != 1 || e.Length != uint32(len(l.in)) || e.Lost != 0 {
		t.Errorf("event %+v, want reason %v, direction %v, ifindex 1, length %d, lost 0", e, l.reason, direction, len(l.in))
	}
	if age := time.Since(e.Time); age < -time.Minute || age > time.Minute {
		t.Errorf("event is of %v, %v ago", e.Time, age)
	}
}

func TestKernelEventsTellWhoAndWhere(t *testing.T) {
	r, cast := newStage(t)
	events, err := r.k.Events.Read()
	if err != nil {
		t.Fatalf("Events: %v", err)
	}
	defer events.Close()
	epoch, err := r.k.Endpoints.SetPolicy(cast["b"].Slot, nodetable.Allow, nodetable.Deny)
	must(t, "SetPolicy", err)

	for _, c := range []struct {
		name string
		in   []byte
		want event.Event
	}{
		{"IPv4 TCP", from4(b.IPv4, 6, tcp(40000, 80, flagSYN)), event.Event{
			EtherType: etherIPv4, Protocol: 6, TCPFlags: flagSYN,
			Source: netip.AddrPortFrom(a.IPv4, 40000), Destination: netip.AddrPortFrom(b.IPv4, 80),
		}},
		{"IPv6 UDP behind options", from6(b.IPv6, 60, append(ext(17), udp(5353, 53)...)), event.Event{
			EtherType: etherIPv6, Protocol: 17,
			Source: netip.AddrPortFrom(a.IPv6, 5353), Destination: netip.AddrPortFrom(b.IPv6, 53),
		}},
		{"IPv4 ICMP", from4(b.IPv4, 1, icmp(13, 4)), event.Event{
			EtherType: etherIPv4, Protocol: 1,
			Source: netip.AddrPortFrom(a.IPv4, 0), Destination: netip.AddrPortFrom(b.IPv4, 13<<8|4),
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r.run(t, program.FromPod, c.in, skbContext{}, 0)
			got, err := events.Read(t.Context())
			if err != nil {
				t.Fatalf("Read: %v", err)
			}
			want := c.want
			want.Time, want.Type = got.Time, event.PacketDropped
			want.Reason, want.Direction = event.PolicyDenied, event.Ingress
			want.Ifindex, want.Length, want.SourceMAC = 1, uint32(len(c.in)), a.MAC
			want.SourceIdentity, want.DestinationIdentity = a.Identity, b.Identity
			want.SourceSlot, want.DestinationSlot = cast["a"].Slot, cast["b"].Slot
			want.Egress = event.SideVerdict{By: event.ByTable, Table: nodetable.Allow, Epoch: cast["a"].Policy.Epoch, Action: event.ActionAllow}
			want.Ingress = event.SideVerdict{By: event.ByTable, Table: nodetable.Deny, Epoch: epoch, Action: event.ActionDeny}
			if got != want {
				t.Errorf("event\n got %+v\nwant %+v", got, want)
			}
		})
	}
}

// delivered are packets to other pods, and the offset of their hop limit.
var delivered = []struct {
	name string
	in   []byte
	hops int // offset of TTL or hop limit
	to   endpointmap.Endpoint
}{
	{"IPv4", from4(b.IPv4, 17, udp(1, 2, 3, 4)), 14 + 8, b},
	{"IPv6", from6(b.IPv6, 17, udp(1, 2, 3, 4)), 14 + 7, b},
	{"IPv4 by device", from4(shaped.IPv4, 17, udp(1, 2, 3, 4)), 14 + 8, shaped},
	{"IPv6 by device", from6(shaped.IPv6, 17, udp(1, 2, 3, 4)), 14 + 7, shaped},
}

func TestKernelDeliveryRewritesLikeARouter(t *testing.T) {
	r, _ := newStage(t)
	for _, c := range delivered {
		t.Run(c.name, func(t *testing.T) {
			o := r.run(t, program.FromPod, c.in, skbContext{Mark: 7, Priority: 6, Tstamp: 12345}, 0)
			want := slices.Clone(c.in)
			copy(want, c.to.MAC[:])
			copy(want[6:], c.to.HostMAC[:])
			want[c.hops]--
			if c.hops == 14+8 {
				copy(want[24:26], []byte{0, 0})
				binary.BigEndian.PutUint16(want[24:], checksum(want[14:34]))
			}
			if !bytes.Equal(o.out, want) {
				t.Errorf("packet\n got %x\nwant %x", o.out, want)
			}
			if o.ctx.Priority != 0 || o.ctx.Tstamp != 0 {
				t.Errorf("priority %d, timestamp %d, want both cleared", o.ctx.Priority, o.ctx.Tstamp)
			}
		})
	}
}

// TestKernelDeliveryKeepsACompleteChecksum: hardware may supply a checksum over the whole packet (CHECKSUM_COMPLETE).
// For such a packet the kernel itself checks that a program has kept it correct (EBADMSG if not).
func TestKernelDeliveryKeepsACompleteChecksum(t *testing.T) {
	r, _ := newStage(t)
	requireKernel(t, 6, 18, "BPF_F_TEST_SKB_CHECKSUM_COMPLETE")
	for _, c := range delivered {
		t.Run(c.name, func(t *testing.T) {
			o := r.run(t, program.FromPod, c.in, skbContext{}, testFlagChecksumComplete)
			if o.verdict != verdictRedirect {
				t.Errorf("verdict %d, reason %v", o.verdict, o.reason)
			}
		})
	}
	t.Run("the gateway's answer", func(t *testing.T) {
		in := frame(a.HostMAC, a.MAC, etherIPv6, solicit(podLocal, gateway6, gateway6, nil))
		if o := r.run(t, program.FromPod, in, skbContext{}, testFlagChecksumComplete); o.reason != event.AnsweredNDP {
			t.Errorf("reason %v", o.reason)
		}
	})
}

func TestKernelTTLChecksumIsRightForEveryTTL(t *testing.T) {
	r, _ := newStage(t)
	for ttl := 2; ttl < 256; ttl++ {
		for _, id := range []uint16{0, 0xffff, 0x1234} {
			in := frame(a.HostMAC, a.MAC, etherIPv4, ip4Header{src: a.IPv4, dst: b.IPv4, proto: 17, ttl: byte(ttl)}.with(udp(1, 2)))
			binary.BigEndian.PutUint16(in[14+4:], id)
			copy(in[14+10:], []byte{0, 0})
			binary.BigEndian.PutUint16(in[14+10:], checksum(in[14:34]))
			out := make([]byte, len(in))
			if _, err := r.k.program(program.FromPod).Run(&ebpf.RunOptions{Data: in, DataOut: out}); err != nil {
				t.Fatalf("run: %v", err)
			}
			if out[14+8] != byte(ttl-1) || checksum(out[14:34]) != 0 {
				t.Fatalf("TTL %d, id %#x: header %x has TTL %d and sum %#x", ttl, id, out[14:34], out[14+8], checksum(out[14:34]))
			}
		}
	}
}

func TestKernelGatewayAnswersAreExact(t *testing.T) {
	r, _ := newStage(t)
	t.Run("ARP", func(t *testing.T) {
		in := frame(broadcastMAC, a.MAC, etherARP, arp(1, a.MAC, a.IPv4, [6]byte{}, gateway4))
		o := r.run(t, program.FromPod, in, skbContext{}, 0)
		want := frame(a.MAC, a.HostMAC, etherARP, arp(2, a.HostMAC, gateway4, a.MAC, a.IPv4))
		if !bytes.Equal(o.out, want) {
			t.Errorf("answer\n got %x\nwant %x", o.out, want)
		}
	})
	for _, c := range []struct {
		name string
		src  netip.Addr
		mac  *[6]byte
		tail []byte
	}{
		{"a solicitation with option", podLocal, &a.MAC, nil},
		{"a solicitation without option", podLocal, nil, nil},
		{"a solicitation from the global address", a.IPv6, &a.MAC, nil},
		{"a solicitation with trailing bytes", podLocal, &a.MAC, make([]byte, 100)},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := append(frame(a.HostMAC, a.MAC, etherIPv6, solicit(c.src, gateway6, gateway6, c.mac)), c.tail...)
			o := r.run(t, program.FromPod, in, skbContext{}, 0)
			msg := slices.Concat([]byte{136, 0, 0, 0, 0xe0, 0, 0, 0}, gateway6.AsSlice(), []byte{2, 1}, a.HostMAC[:])
			want := frame(a.MAC, a.HostMAC, etherIPv6, ip6Header{src: gateway6, dst: c.src, next: 58, hops: 255, length: -1}.with(icmp6(gateway6, c.src, msg)))
			if !bytes.Equal(o.out, want) {
				t.Errorf("answer\n got %x\nwant %x", o.out, want)
			}
		})
	}
}

// TestKernelTruncatedPacketsAreNeverForwarded truncates every kind of packet at every length below its headers.
// BPF_PROG_TEST_RUN rejects a frame without a complete IP header: TestKernelTruncatedIPHeadersAreNeverForwarded
// sends those.
func TestKernelTruncatedPacketsAreNeverForwarded(t *testing.T) {
	r, _ := newStage(t)
	for _, c := range []struct {
		name string
		in   []byte
		full int // the shortest length that may be forwarded
		prog string
	}{
		{"ARP", frame(broadcastMAC, a.MAC, etherARP, arp(1, a.MAC, a.IPv4, [6]byte{}, gateway4)), 14 + 28, program.FromPod},
		{"solicitation", frame(a.HostMAC, a.MAC, etherIPv6, solicit(podLocal, gateway6, gateway6, nil)), 14 + 40 + 24, program.FromPod},
		{"IPv4 UDP", from4(b.IPv4, 17, udp(1, 2)), 14 + 20 + 8, program.FromPod},
		{"IPv4 TCP", from4(b.IPv4, 6, tcp(1, 2, flagSYN)), 14 + 20 + 20, program.FromPod},
		{"IPv4 SCTP", from4(b.IPv4, 132, make([]byte, 12)), 14 + 20 + 12, program.FromPod},
		{"IPv4 ICMP", from4(b.IPv4, 1, icmp(8, 0)), 14 + 20 + 8, program.FromPod},
		{"IPv4 with options", frame(a.HostMAC, a.MAC, etherIPv4, ip4Header{src: a.IPv4, dst: b.IPv4, proto: 17, options: bytes.Repeat([]byte{1}, 40)}.with(udp(1, 2))), 14 + 60 + 8, program.FromPod},
		{"IPv4 to the host", from4(host4, 17, udp(1, 2)), 14 + 20 + 8, program.FromPod},
		{"IPv4 outside", from4(world4, 17, udp(1, 2)), 14 + 20 + 8, program.FromPod},
		{"IPv6 UDP", from6(b.IPv6, 17, udp(1, 2)), 14 + 40 + 8, program.FromPod},
		{"IPv6 TCP", from6(b.IPv6, 6, tcp(1, 2, flagSYN)), 14 + 40 + 20, program.FromPod},
		{"IPv6 ICMP", from6(b.IPv6, 58, icmp(128, 0)), 14 + 40 + 8, program.FromPod},
		{"IPv6 with six headers", from6(b.IPv6, 0, slices.Concat(ext(60), ext(60), ext(60), ext(60), ext(60), ext(17), udp(1, 2))), 14 + 40 + 48 + 8, program.FromPod},
		{"IPv6 fragment", from6(b.IPv6, 44, append([]byte{17, 0, 0, 1, 0, 0, 0, 1}, udp(1, 2)...)), 14 + 40 + 8 + 8, program.FromPod},
		{"IPv4 from the host", to4(host4, 6, tcp(1, 2, flagSYN)), 14 + 20 + 20, program.ToPod},
		{"IPv6 from the host", to6(host6, 0, append(ext(17), udp(1, 2)...)), 14 + 40 + 8 + 8, program.ToPod},
	} {
		t.Run(c.name, func(t *testing.T) {
			if o := r.run(t, c.prog, c.in, skbContext{}, 0); o.reason.Dropped() {
				t.Fatalf("the whole packet is dropped: %v", o.reason)
			}
			for n := shortestRun(c.in); n < c.full; n++ {
				for _, lie := range []bool{false, true} {
					in := slices.Clone(c.in[:n])
					if !lie {
						truthful(in)
					}
					o := r.run(t, c.prog, in, skbContext{}, 0)
					if o.verdict != verdictShot || !o.reason.Dropped() || o.packets != 1 {
						t.Errorf("%d of %d bytes (lengths wrong: %v): verdict %d, reason %v, counted %d", n, len(c.in), lie, o.verdict, o.reason, o.packets)
					}
				}
			}
		})
	}
}

// shortestRun returns the shortest truncated frame that BPF_PROG_TEST_RUN accepts.
func shortestRun(in []byte) int {
	switch binary.BigEndian.Uint16(in[12:]) {
	case etherIPv4:
		return 14 + 20
	case etherIPv6:
		return 14 + 40
	}
	return 14
}

// truthful sets the length in the IP header of a truncated frame to its real length.
func truthful(in []byte) {
	switch {
	case len(in) >= 34 && in[12] == 8 && in[13] == 0:
		binary.BigEndian.PutUint16(in[16:], uint16(len(in)-14))
	case len(in) >= 54 && in[12] == 0x86:
		binary.BigEndian.PutUint16(in[18:], uint16(len(in)-54))
	}
}

func TestKernelUnknownDeviceIsDropped(t *testing.T) {
	r := runner{openKernel(t, testOptions(kerneltest.NewBPFFS(t)))}
	for prog, in := range map[string][]byte{
		program.FromPod: from4(b.IPv4, 17, udp(1, 2)), program.ToPod: to4(host4, 17, udp(1, 2)),
	} {
		o := r.run(t, prog, in, skbContext{}, 0)
		if o.verdict != verdictShot || o.reason != event.NoEndpoint {
			t.Errorf("%s: verdict %d, reason %v, want %d, %v", prog, o.verdict, o.reason, verdictShot, event.NoEndpoint)
		}
	}
}

// TestKernelEvaluatedPacketsPassUncountedAndUnmarked: a packet that sluice_from_pod redirected to a host end passes
// sluice_to_pod there, because it was already evaluated: it entered by an endpoint's device, and its mark contains this
// device.
func TestKernelEvaluatedPacketsPassUncountedAndUnmarked(t *testing.T) {
	r, cast := newStage(t)
	setPolicy(t, r.k, cast["a"].Slot, endpointmap.Policy{})
	in := to4(world4, 17, udp(1, 2))
	o := r.run(t, program.ToPod, in, skbContext{Mark: markEvaluated | 1<<16, IngressIfindex: cast["b"].Ifindex}, 0)
	if o.verdict != verdictOK || o.packets != 0 || o.mark != 0 {
		t.Errorf("verdict %d, counted %d, mark %#x, want %d, 0, 0", o.verdict, o.packets, o.mark, verdictOK)
	}
	for what, ctx := range map[string]skbContext{
		"no device":             {Mark: markEvaluated, IngressIfindex: cast["b"].Ifindex},
		"another device":        {Mark: markEvaluated | 2<<16, IngressIfindex: cast["b"].Ifindex},
		"more than the device":  {Mark: markEvaluated | 1<<16 | 1, IngressIfindex: cast["b"].Ifindex},
		"made by the host":      {Mark: markEvaluated | 1<<16},
		"from another's device": {Mark: markEvaluated | 1<<16, IngressIfindex: otherDevice},
	} {
		if o := r.run(t, program.ToPod, in, ctx, 0); o.reason != event.PolicyDenied {
			t.Errorf("%s: %v, want %v", what, o.reason, event.PolicyDenied)
		}
	}
}

func TestKernelEventsAreLimitedAndTheLossIsTold(t *testing.T) {
	stayOnOneCPU(t)
	o := testOptions(kerneltest.NewBPFFS(t))
	o.EventsPerSecond = 3
	k := openKernel(t, o)
	r := runner{k}
	publish(t, k, a)
	events, err := k.Events.Read()
	if err != nil {
		t.Fatalf("Events: %v", err)
	}
	defer events.Close()

	in := from4(nobody4, 17, udp(1, 2))
	const sent = 1000
	if _, err := k.program(program.FromPod).Run(&ebpf.RunOptions{Data: in, Repeat: sent}); err != nil {
		t.Fatalf("run: %v", err)
	}
	counted := r.counters(t)[cell{event.NoRoute, event.Egress}].Packets
	lost, err := k.Events.Lost()
	if err != nil {
		t.Fatalf("EventsLost: %v", err)
	}
	var read, told uint64
	for events.Waiting() > 0 {
		e, err := events.Read(t.Context())
		if err != nil {
			t.Fatalf("Read: %v", err)
		}
		read++
		told += uint64(e.Lost)
	}
	if counted != sent || read+lost != sent || lost == 0 || told > lost {
		t.Errorf("%d drops counted, %d events read, %d lost, %d reported as lost; want %d = read + lost, reported <= lost",
			counted, read, lost, told, sent)
	}
	// another reason has a limit of its own
	r.run(t, program.FromPod, from4(a.IPv4, 17, udp(1, 2)), skbContext{}, 0)
	e, err := events.Read(t.Context())
	if err != nil || e.Reason != event.Hairpin || e.Lost != 0 {
		t.Errorf("event %+v, %v, want a hairpin with nothing lost", e, err)
	}
}

// TestKernelEventsOfOneEndpointLeaveRoomForOthers: an endpoint whose packets are always denied does not suppress the
// events of others.
func TestKernelEventsOfOneEndpointLeaveRoomForOthers(t *testing.T) {
	stayOnOneCPU(t)
	th := newTheatre(t, false)
	o := testOptions(kerneltest.NewBPFFS(t))
	o.EventsPerSecond = 4
	k := openKernel(t, o)
	for _, e := range th.pods {
		e.Policy = endpointmap.Policy{}
		publish(t, k, e)
	}
	events, err := k.Events.Read()
	must(t, "Events", err)
	defer events.Close()
	send := func(who string, n uint32) {
		_, ctx, in := th.frame(say(who, "world", datagram(1, 53), 0))
		opts := &ebpf.RunOptions{Data: in, DataOut: make([]byte, 256+len(in)), Context: ctx, Repeat: n}
		_, err := k.program(program.FromPod).Run(opts)
		must(t, "run", err)
	}
	send("a", 10_000)
	flood := drain(t, events)
	if n := len(flood); n < 4 || n > 8 {
		t.Errorf("%d events of the endpoint that floods, want 4 in each second", n)
	}
	send("b", 1)
	if got := drain(t, events); len(got) != 1 || got[0].Source.Addr() != th.addr("b") || got[0].Lost == 0 {
		t.Errorf("events %+v, want the other endpoint's event, with the number of suppressed ones", got)
	}
}

// TestKernelEventsOfManyEndpointsLeaveRoomForOthers: 20 endpoints whose packets are dropped, and packets of no
// endpoint, use all events that a CPU sends in a second. Another endpoint still gets the event of its drop.
func TestKernelEventsOfManyEndpointsLeaveRoomForOthers(t *testing.T) {
	stayOnOneCPU(t)
	const flooders, rate = 20, 4
	o := testOptions(kerneltest.NewBPFFS(t))
	o.EventsPerSecond = rate
	k := openKernel(t, o)
	var all []endpointmap.Endpoint
	for i, ifindex := range devices(t, flooders+1) {
		e := testEndpoint(ifindex, byte(100+i))
		e.Policy = endpointmap.Policy{}
		all = append(all, publish(t, k, e))
	}
	k.Bounds.DivideEvents(len(all))
	events, err := k.Events.Read()
	must(t, "Events", err)
	defer events.Close()
	send := func(from endpointmap.Endpoint) {
		h := ip4Header{src: from.IPv4, dst: world4, proto: protoUDP}
		in := frame(from.HostMAC, from.MAC, etherIPv4, h.with(udp(1, 53)))
		ctx := skbContext{Ifindex: from.Ifindex}
		opts := &ebpf.RunOptions{Data: in, DataOut: make([]byte, 256+len(in)), Context: ctx, Repeat: 2 * rate}
		_, err := k.program(program.FromPod).Run(opts)
		must(t, "run", err)
	}
	quiet := all[flooders]
	for _, e := range all[:flooders] {
		send(e)
	}
	if n := len(drain(t, events)); n < flooders {
		t.Errorf("%d events of %d endpoints, want one of each or more", n, flooders)
	}
	send(quiet)
	got := drain(t, events)
	if len(got) == 0 || got[0].Source.Addr() != quiet.IPv4 {
		t.Errorf("events %+v, want one of the endpoint that had none before", got)
	}
}

// devices creates network devices until the test ends, and returns their indexes.
func devices(t *testing.T, n int) (all []uint32) {
	t.Helper()
	for i := 0; len(all) < n; i++ {
		names := [2]string{fmt.Sprintf("sld%da", i), fmt.Sprintf("sld%db", i)}
		pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: names[0]}, PeerName: names[1]}
		must(t, "add a pair of devices", netlink.LinkAdd(pair))
		for _, name := range names {
			link, err := netlink.LinkByName(name)
			must(t, "find "+name, err)
			must(t, "set "+name+" up", netlink.LinkSetUp(link))
			all = append(all, uint32(link.Attrs().Index))
		}
		t.Cleanup(func() { must(t, "delete "+names[0], netlink.LinkDel(pair)) })
	}
	return all[:n]
}

// stayOnOneCPU keeps the test on its CPU, because suppressed events are counted per CPU.
func stayOnOneCPU(t *testing.T) {
	t.Helper()
	// never unlocked: the thread ends with the test
	runtime.LockOSThread()
	var all, one unix.CPUSet
	must(t, "sched_getaffinity", unix.SchedGetaffinity(0, &all))
	for cpu := range 1024 {
		if all.IsSet(cpu) {
			one.Set(cpu)
			break
		}
	}
	must(t, "sched_setaffinity", unix.SchedSetaffinity(0, &one))
}

// TestKernelAFullEventBufferLosesEventsButTellsHowMany: a slow reader loses events and learns how many, and the
// counters contain every drop.
func TestKernelAFullEventBufferLosesEventsButTellsHowMany(t *testing.T) {
	stayOnOneCPU(t)
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	r := runner{k}
	publish(t, k, a)
	events, err := k.Events.Read()
	must(t, "Events", err)
	defer events.Close()

	in := from4(nobody4, 17, udp(1, 2))
	const room, sent = 1 << 20 / 104, 30_000 // an event takes 96 bytes and a header of 8
	_, err = k.program(program.FromPod).Run(&ebpf.RunOptions{Data: in, Repeat: sent})
	must(t, "run", err)
	lost, err := k.Events.Lost()
	must(t, "EventsLost", err)
	counted := r.counters(t)[cell{event.NoRoute, event.Egress}].Packets
	var read, told uint64
	drain := func() {
		for events.Waiting() > 0 {
			e, err := events.Read(t.Context())
			must(t, "Read", err)
			read++
			told += uint64(e.Lost)
		}
	}
	drain()
	if read > room || counted < sent || read+lost != counted {
		t.Errorf("%d events read, %d lost, %d drops counted; want <= %d read and the sum right", read, lost, counted, room)
	}
	// the first event that fits again contains the number
	_, err = k.program(program.FromPod).Run(&ebpf.RunOptions{Data: in})
	must(t, "run", err)
	drain()
	if told != lost {
		t.Errorf("%d losses reported, want %d", told, lost)
	}
}

func TestKernelEventReaderEndsWithItsContextAndItsClose(t *testing.T) {
	r, _ := newStage(t)
	events, err := r.k.Events.Read()
	if err != nil {
		t.Fatalf("Events: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := events.Read(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Read with a cancelled context: %v", err)
	}
	// a later call is not affected by the cancelled one
	r.run(t, program.FromPod, from4(nobody4, 17, udp(1, 2)), skbContext{}, 0)
	if e, err := events.Read(t.Context()); err != nil || e.Reason != event.NoRoute {
		t.Errorf("Read after a cancelled one: %+v, %v", e, err)
	}
	if err := events.Close(); err != nil {
		t.Fatalf("Close: %v", err)
	}
	if _, err := events.Read(t.Context()); !errors.Is(err, pin.ErrClosed) {
		t.Errorf("Read after Close: %v", err)
	}
}

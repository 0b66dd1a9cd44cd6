// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"errors"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
)

// claim describes the sender that a tunnel packet to b claims to have. Each inner packet ends with a number that
// identifies it.
type claim struct {
	outer, to netip.Addr // source and destination of the outer packet
	vni       identity.Numeric
	inner     netip.Addr // source of the inner packet
	broken    string     // what is wrong with the headers; "": nothing
}

// claimMagic precedes the number.
const claimMagic = 0x51be11ed

// packet returns the tunnel packet. A fifth of the packets are datagrams.
func (c claim) packet(f *fabric, number uint32) outerPacket {
	dst := f.b.pod.IPv4
	if !c.inner.Is4() {
		dst = f.b.pod.IPv6
	}
	text := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, claimMagic), number)
	var payload []byte
	sport, proto := uint16(1024+number%60000), byte(6)
	if number%5 == 0 {
		sport, proto = 900, 17
		payload = udp(sport, 53, text...)
	} else {
		payload = tcp(sport, 80, flagSYN, text...)
	}
	p := f.newOuterWith(c.vni, c.inner, dst, proto, payload).changed(func(p outerPacket) {
		copy(p[outerIP+12:], c.outer.AsSlice())
		copy(p[outerIP+16:], c.to.AsSlice())
	})
	if c.broken != "" {
		breaks[c.broken](p)
		if c.broken != "IP checksum" {
			p.summed()
		}
	}
	return p
}

// breaks change a tunnel packet so that the kernel does not pass it to a tunnel device.
var breaks = map[string]func(p outerPacket){
	"frame of another host": func(p outerPacket) { p[5] ^= 1 },
	"IP checksum":           func(p outerPacket) { p[outerIP+10] ^= 1 },
	"UDP checksum":          func(p outerPacket) { p[outerUDP+6], p[outerUDP+7] = 1, 1 },
	"first fragment":        func(p outerPacket) { p[outerIP+6] = 0x20 },
	"later fragment":        func(p outerPacket) { p[outerIP+6], p[outerIP+7] = 0, 2 },
	"protocol":              func(p outerPacket) { p[outerIP+9] = 6 },
	"port":                  func(p outerPacket) { p[outerUDP+3]++ },
	"no VNI":                func(p outerPacket) { p[outerUDP+8] = 0 },
	"IP length":             func(p outerPacket) { p[outerIP+2]++ },
	"UDP length":            func(p outerPacket) { p[outerUDP+4]++ },
	"IP version":            func(p outerPacket) { p[outerIP] = 0x65 },
}

// TestKernelNothingForgedLeavesTheTunnel sends 4,000 tunnel packets to b, each with up to two forged fields. Only
// packets whose outer source is the node of the inner source, with an identity that this source may have, arrive in b's
// pod. Two other nodes are registered with direct paths. All packets without forged fields arrive, and bypass the
// tunnel device.
func TestKernelNothingForgedLeavesTheTunnel(t *testing.T) {
	f := newDirectFabric(t, func(*Options) {})
	f.thirdNode(t)
	must(t, "SetDirect", f.b.k.Nodes.SetDirect(3, nodemap.Direct{
		Ifindex: uint32(f.b.uplink.Attrs().Index), Via: f.outside, Local: f.b.addr4,
	}))
	a, b := f.a.pod, f.b.pod
	r := rand.New(rand.NewPCG(1, 2))
	pick := func(addrs ...netip.Addr) netip.Addr { return addrs[r.IntN(len(addrs))] }
	third, broadcast := netip.MustParseAddr("10.244.3.10"), netip.MustParseAddr("255.255.255.255")
	loopback, multicast := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("224.0.0.1")
	broken := slices.Sorted(maps.Keys(breaks))
	claims := make([]claim, 4000)
	frames := make([]outerPacket, len(claims))
	for i := range claims {
		c := claim{outer: f.a.addr4, to: f.b.addr4, vni: a.Identity, inner: pick(a.IPv4, a.IPv6)}
		for range r.IntN(3) {
			switch r.IntN(5) {
			case 0:
				c.outer = pick(f.outside, f.b.addr4, f.b.over4, netip.MustParseAddr("192.0.2.98"), loopback,
					netip.IPv4Unspecified(), broadcast, multicast)
			case 1:
				c.to = pick(f.outside, f.b.over4, f.a.addr4, broadcast, loopback)
			case 2:
				all := []identity.Numeric{0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 255, 300, 65535, 65536, 0xff0001, 0xffffff, b.Identity}
				c.vni = all[r.IntN(len(all))]
			case 3:
				c.inner = pick(b.IPv4, b.IPv6, f.b.over4, f.b.addr4, f.a.over4, f.a.addr4, third, world4, world6,
					netip.MustParseAddr("10.244.2.99"), loopback, multicast)
			case 4:
				c.broken = broken[r.IntN(len(broken))]
			}
		}
		claims[i], frames[i] = c, c.packet(f, uint32(i))
	}
	fd := f.sniffPod(t)
	defer unix.Close(fd)
	_, before := f.b.throughDevice(t)
	f.received(t, f.a.ns, frames...)
	_, after := f.b.throughDevice(t)
	arrived := arrivedClaims(t, fd)

	taken := 0
	for i, c := range claims {
		// through the device, packets to the other addresses of b arrive, too
		right := c.broken == "" && f.isTrue(c, third) &&
			slices.Contains([]netip.Addr{f.b.addr4, f.b.over4, broadcast}, c.to)
		switch count := arrived[uint32(i)]; {
		case count > 1 || count == 1 && !right:
			t.Errorf("%+v arrived %d times", c, count)
		case count == 0 && right:
			t.Errorf("%+v did not arrive", c)
		case count == 1 && c.to == f.b.addr4 && i%5 != 0:
			taken++
		}
	}
	if taken < 1000 {
		t.Errorf("%d true segments arrived, want 1000 or more", taken)
	}
	if device := after - before; int(device) > len(claims)-taken {
		t.Errorf("%d of %d packets passed the device, although %d segments may bypass it", device, len(claims), taken)
	}
}

// isTrue reports whether the node with the outer source has the sender of the inner packet, with that identity. A node
// is trusted about the identities of its own pods.
func (f *fabric) isTrue(c claim, third netip.Addr) bool {
	const remoteNode = 6
	ofPods := c.vni > 255 && c.vni < 65536
	switch c.inner {
	case f.a.pod.IPv4, f.a.pod.IPv6:
		return c.outer == f.a.addr4 && ofPods
	case f.a.over4, f.a.addr4:
		return c.outer == f.a.addr4 && c.vni == remoteNode
	case third:
		return c.outer == f.outside && ofPods
	}
	return false
}

// sniffPod returns a socket that receives what b's pod does.
func (f *fabric) sniffPod(t *testing.T) (fd int) {
	t.Helper()
	inNetns(t, f.b.pod.ns, func() {
		var err error
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK,
			0x0300 /* all, in network order */)
		must(t, "packet socket", err)
		must(t, "its buffer", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20))
	})
	return fd
}

// arrivedClaims counts by number what a socket has received from other hosts.
func arrivedClaims(t *testing.T, fd int) map[uint32]int {
	t.Helper()
	arrived := map[uint32]int{}
	b := make([]byte, 1<<16)
	for {
		n, from, err := unix.Recvfrom(fd, b, 0)
		if errors.Is(err, unix.EAGAIN) {
			return arrived
		}
		must(t, "receive", err)
		if at, ok := from.(*unix.SockaddrLinklayer); ok && at.Pkttype == unix.PACKET_OUTGOING || n < 8 {
			continue
		}
		if binary.BigEndian.Uint32(b[n-8:]) == claimMagic {
			arrived[binary.BigEndian.Uint32(b[n-4:n])]++
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"sync"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
)

// Many devices supply the checksum over a whole packet instead of verifying the packet's checksum
// (CHECKSUM_COMPLETE): code that changes the packet must update that checksum, too. The veth devices of the
// tests supply none. But a tunnel with outer checksums does: the kernel has computed the checksum when it
// decapsulates the inner packet.

// summing is an uplinkKind whose packets have such checksums.
func summing(t *testing.T, bridge netlink.Link, n byte, ns netns.NsHandle) {
	t.Helper()
	wire := newNetns(t)
	h, err := netlink.NewHandleAt(wire, unix.NETLINK_ROUTE)
	must(t, "netlink", err)
	t.Cleanup(h.Close)
	here, there := netip.AddrFrom4([4]byte{10, 99, n, 1}), netip.AddrFrom4([4]byte{10, 99, n, 2})
	name := fmt.Sprintf("slwire%d", n)
	cable := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: name, MTU: fabricMTU + 100},
		PeerName:  "wire0", PeerNamespace: netlink.NsFd(wire), PeerMTU: fabricMTU + 100,
	}
	must(t, "add a cable", netlink.LinkAdd(cable))
	t.Cleanup(func() {
		if err := netlink.LinkDel(cable); err != nil {
			t.Errorf("delete a cable: %v", err)
		}
	})
	for _, end := range []struct {
		ns     netns.NsHandle
		h      *netlink.Handle
		device string
		local  netip.Addr
		remote netip.Addr
		tunnel netlink.LinkAttrs
	}{
		{netns.None(), &netlink.Handle{}, name, here, there, netlink.LinkAttrs{
			Name: fmt.Sprintf("slport%d", n), MTU: fabricMTU, MasterIndex: bridge.Attrs().Index,
		}},
		{wire, h, "wire0", there, here, netlink.LinkAttrs{Name: "up0", MTU: fabricMTU}},
	} {
		// no device of this test would complete a checksum that the sender has left to the device
		inNetns(t, end.ns, func() { addNoChecksums(t, end.device) })
		l, err := end.h.LinkByName(end.device)
		must(t, "find "+end.device, err)
		must(t, "add an address", end.h.AddrAdd(l, &netlink.Addr{IPNet: prefix24(end.local)}))
		must(t, "set "+end.device+" up", end.h.LinkSetUp(l))
		tunnel := &netlink.Vxlan{
			LinkAttrs: end.tunnel, VxlanId: int(n), Port: 4790, UDPCSum: true,
			SrcAddr: end.local.AsSlice(), Group: end.remote.AsSlice(),
		}
		must(t, "add the tunnel", end.h.LinkAdd(tunnel))
		l, err = end.h.LinkByName(end.tunnel.Name)
		must(t, "find the tunnel", err)
		// it has no carrier that could come up
		inNetns(t, end.ns, func() { setOperational(t, l) })
		if end.ns == wire {
			must(t, "move up0", h.LinkSetNsFd(l, int(ns)))
			continue
		}
		must(t, "set the port up", netlink.LinkSetUp(l))
		t.Cleanup(func() {
			if err := netlink.LinkDel(l); err != nil {
				t.Errorf("delete a port: %v", err)
			}
		})
	}
}

// prefix24 returns an address with a prefix length of 24.
func prefix24(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(24, 32)}
}

// addNoChecksums makes the kernel compute checksums and segment packets, instead of the device.
func addNoChecksums(t *testing.T, device string) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Errorf("open a socket: %v", err)
		return
	}
	defer unix.Close(fd)
	value := struct{ command, data uint32 }{unix.ETHTOOL_STXCSUM, 0}
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		rest [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(request.name[:], device)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
	if errno != 0 {
		t.Errorf("checksums of %s: %v", device, errno)
	}
}

// setOperational sets the operational state of a device without a carrier to up.
func setOperational(t *testing.T, l netlink.Link) {
	t.Helper()
	req := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(l.Attrs().Index)
	req.AddData(msg)
	req.AddData(nl.NewRtAttr(unix.IFLA_OPERSTATE, nl.Uint8Attr(uint8(netlink.OperUp))))
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		t.Errorf("set the state of %s: %v", l.Attrs().Name, err)
	}
}

// sums counts the packets with checksums that devices have received, after the programs.
type sums struct {
	prog *ebpf.Program

	mu    sync.Mutex
	seen  map[string]int // guarded by mu; by protocol and ends
	wrong int            // guarded by mu
}

// sumBytes is the largest number of bytes of a packet that are compared.
const sumBytes = 2047

// watchSums compares checksums until the test ends. A record contains the kernel's checksum of a packet, its
// length, and the packet from the IP header on.
func watchSums(t *testing.T) *sums {
	t.Helper()
	ring, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.RingBuf, MaxEntries: 1 << 24})
	must(t, "make a ring", err)
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.Mov.Imm(asm.R2, 0),
			asm.FnCsumUpdate.Call(), // fails if the packet has no checksum
			asm.Mov.Reg(asm.R7, asm.R0),
			asm.JSLT.Imm(asm.R7, 0, "out"),
			asm.LoadMem(asm.R8, asm.R6, 0, asm.Word), // len
			asm.JLE.Imm(asm.R8, 14, "out"),
			asm.Sub.Imm(asm.R8, 14),
			asm.JGT.Imm(asm.R8, sumBytes, "out"),
			asm.LoadMapPtr(asm.R1, ring.FD()),
			asm.Mov.Imm(asm.R2, 8+sumBytes+1),
			asm.Mov.Imm(asm.R3, 0),
			asm.FnRingbufReserve.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
			asm.Mov.Reg(asm.R9, asm.R0),
			asm.StoreMem(asm.R9, 0, asm.R7, asm.Word),
			asm.StoreMem(asm.R9, 4, asm.R8, asm.Word),
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.Mov.Imm(asm.R2, 14),
			asm.Mov.Reg(asm.R3, asm.R9),
			asm.Add.Imm(asm.R3, 8),
			asm.Mov.Reg(asm.R4, asm.R8),
			asm.FnSkbLoadBytes.Call(),
			asm.Mov.Reg(asm.R1, asm.R9),
			asm.Mov.Imm(asm.R2, 0),
			asm.FnRingbufSubmit.Call(),
			asm.Mov.Imm32(asm.R0, -1).WithSymbol("out"), // pass to the stack
			asm.Return(),
		},
	})
	must(t, "load the program", err)
	r, err := ringbuf.NewReader(ring)
	must(t, "read the ring", err)
	s := &sums{prog: prog, seen: map[string]int{}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			record, err := r.Read()
			if err != nil {
				return
			}
			s.compare(t, record.RawSample)
		}
	}()
	t.Cleanup(func() {
		r.Close()
		<-done
		prog.Close()
		ring.Close()
	})
	return s
}

// compare compares the checksum of a packet with the kernel's.
func (s *sums) compare(t *testing.T, record []byte) {
	has, n := binary.NativeEndian.Uint32(record), binary.NativeEndian.Uint32(record[4:])
	packet := record[8 : 8+n]
	for has>>16 != 0 {
		has = has&0xffff + has>>16
	}
	// the byte order of sums of little-endian words is swapped
	kernel := bits.ReverseBytes16(uint16(has))
	ethertype := uint16(etherIPv4)
	if packet[0]>>4 == 6 {
		ethertype = etherIPv6
	}
	w := readWire(ethertype, packet)
	what := fmt.Sprintf("%d %v to %v", w.proto, w.src, w.dst)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen[what]++
	if want := ^checksum(packet); kernel%0xffff != want%0xffff {
		if s.wrong++; s.wrong <= 10 {
			t.Errorf("%s: the kernel has the sum %#04x, which is %#04x", what, kernel, want)
		}
	}
}

// at compares the packets that a device of a namespace receives, after its programs.
func (s *sums) at(t *testing.T, h *netlink.Handle, device string) {
	t.Helper()
	l, err := h.LinkByName(device)
	must(t, "find "+device, err)
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	must(t, "add the qdisc", h.QdiscReplace(qdisc))
	must(t, "attach the program", h.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: 100, Protocol: unix.ETH_P_ALL,
		},
		Fd: s.prog.FD(), Name: "sums", DirectAction: true,
	}))
}

// want waits for packets with a checksum from one end to another, over TCP and UDP.
func (s *sums) want(t *testing.T, what string, from, to netip.Addr) {
	t.Helper()
	for _, proto := range []byte{protoTCP, protoUDP} {
		servicetest.Eventually(t, fmt.Sprintf("%s: a sum of protocol %d from %v to %v", what, proto, from, to), func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.seen[fmt.Sprintf("%d %v to %v", proto, from, to)] > 0
		})
	}
}

// TestKernelOutsideKeepsChecksumsThatTheDeviceSummed: if a packet has a checksum from a device and a service
// changes its ends, the checksum is updated: on the way to pods, hosts and sockets of this and another node,
// and back to outside clients and to a pod.
func TestKernelOutsideKeepsChecksumsThatTheDeviceSummed(t *testing.T) {
	eachUnderlayOn(t, summing, func(t *testing.T, f *fabric, routing Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		s := watchSums(t)
		s.at(t, f.a.h, "up0")
		inPod, err := netlink.NewHandleAt(f.a.pod.ns, unix.NETLINK_ROUTE)
		must(t, "netlink in the pod", err)
		defer inPod.Close()
		s.at(t, inPod, "eth0")
		ask := func(from netns.NsHandle, at netip.AddrPort) {
			askTCP(t, from, at, 1<<20)
			askUDP(t, from, at, 1024)
		}
		for i, client := range f.outsideAddrs() {
			own := []netip.Addr{f.a.addr4, f.a.addr6}[i]
			host := []netip.Addr{f.b.addr4, f.b.addr6}[i]
			for j, c := range []struct {
				what string
				in   netns.NsHandle
				at   netip.Addr
				back bool // the uplink redirects its answers to the client
			}{
				{"pod", f.a.pod.ns, f.a.pod.Addrs()[i], false},
				{"pod elsewhere", f.b.pod.ns, f.b.pod.Addrs()[i], routing == RoutingNative},
				{"host elsewhere", f.b.ns, host, true},
				{"own", f.a.ns, own, false},
			} {
				at := netip.AddrPortFrom(c.at, 9000+uint16(j))
				tell(t, c.in, at)
				vip := serviceAddr(at.Addr(), byte(20+j))
				f.routeFromOutside(t, vip.Addr(), f.a)
				n.lead(vip, feAddress, at)
				nodePort := netip.AddrPortFrom(own, 30080+uint16(j))
				n.lead(nodePort, feNode, at)
				ask(f.outsider, vip)
				ask(f.outsider, nodePort)
				s.want(t, c.what, client, c.at)
				if c.back {
					s.want(t, c.what, c.at, client)
				}
			}
			// the answer of a backend on another node, which the pod receives from the service
			vip := serviceAddr(own, 20+1)
			ask(f.a.pod.ns, vip)
			s.want(t, "pod", vip.Addr(), f.a.pod.Addrs()[i])
		}
	})
}

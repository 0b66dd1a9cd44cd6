// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// wire sends packets by a device without the network stack of its namespace, so without a socket and with any
// content.
type wire struct {
	netns string
	fd    int
	mac   net.HardwareAddr // of the device
}

// hardware returns the Ethernet address and the index of a device.
func hardware(t *testing.T, netns, device string) (mac net.HardwareAddr, index int) {
	t.Helper()
	err := pod.In(netns, func() error {
		link, err := netlink.LinkByName(device)
		if err == nil {
			mac, index = link.Attrs().HardwareAddr, link.Attrs().Index
		}
		return err
	})
	if err != nil {
		t.Fatalf("device %s in %s: %v", device, netns, err)
	}
	return mac, index
}

func htons(v uint16) uint16 { return binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, v)) }

// packetSocket opens a device for frames. It receives frames of a protocol, or none.
func packetSocket(t *testing.T, netns, device string, protocol uint16) (fd int) {
	t.Helper()
	_, index := hardware(t, netns, device)
	err := pod.In(netns, func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return err
	})
	if err == nil {
		t.Cleanup(func() { _ = unix.Close(fd) })
		// Set it before the socket is bound, or the buffer is too small for the first frames.
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20)
	}
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: index, Protocol: htons(protocol)})
	}
	if err != nil {
		t.Fatalf("open device %s in %s: %v", device, netns, err)
	}
	return fd
}

func newWire(t *testing.T, netns string) *wire {
	t.Helper()
	mac, _ := hardware(t, netns, "eth0")
	return &wire{netns: netns, fd: packetSocket(t, netns, "eth0", 0), mac: mac}
}

// send sends a packet. It waits while the device's queue is full.
func (w *wire) send(to net.HardwareAddr, packet []byte) error {
	f := frame(to, w.mac, packet)
	for {
		_, err := unix.Write(w.fd, f)
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.ENOBUFS) {
			return err
		}
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLOUT}}, 10)
	}
}

// frame returns a packet with an Ethernet header.
func frame(to, from net.HardwareAddr, packet []byte) []byte {
	b := append(append(make([]byte, 0, 14+len(packet)), to...), from...)
	kind := uint16(unix.ETH_P_IP)
	if packet[0]>>4 == 6 {
		kind = unix.ETH_P_IPV6
	}
	return append(binary.BigEndian.AppendUint16(b, kind), packet...)
}

func checksum(b []byte, sum uint32) uint16 {
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(b[0])<<8 | uint32(b[1])
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// udp returns a datagram with its UDP header.
func udp(from, to netip.AddrPort, payload []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, from.Port())
	b = binary.BigEndian.AppendUint16(b, to.Port())
	b = binary.BigEndian.AppendUint16(b, uint16(8+len(payload)))
	b = append(append(b, 0, 0), payload...)
	pseudo := append(append([]byte{}, from.Addr().AsSlice()...), to.Addr().AsSlice()...)
	pseudo = append(pseudo, 0, unix.IPPROTO_UDP, byte(len(b)>>8), byte(len(b)))
	sum := checksum(append(pseudo, b...), 0)
	if sum == 0 {
		sum = 0xffff // zero means no checksum, which IPv6 stacks reject (RFC 8200, 8.1)
	}
	binary.BigEndian.PutUint16(b[6:], sum)
	return b
}

// part describes a fragment; the zero value is a whole packet.
type part struct {
	id     uint16
	offset int // in bytes
	more   bool
}

// ip returns a packet of an IP protocol.
func ip(from, to netip.Addr, protocol byte, p part, payload []byte) []byte {
	at := uint16(p.offset)
	if from.Is4() {
		at /= 8
		if p.more {
			at |= 0x2000
		}
		b := binary.BigEndian.AppendUint16([]byte{0x45, 0}, uint16(20+len(payload)))
		b = binary.BigEndian.AppendUint16(b, p.id)
		b = binary.BigEndian.AppendUint16(b, at)
		b = append(append(append(b, 64, protocol, 0, 0), from.AsSlice()...), to.AsSlice()...)
		binary.BigEndian.PutUint16(b[10:], checksum(b, 0))
		return append(b, payload...)
	}
	if p != (part{}) {
		if p.more {
			at |= 1
		}
		header := binary.BigEndian.AppendUint16([]byte{protocol, 0}, at)
		payload = append(append(header, 0, 0, byte(p.id>>8), byte(p.id)), payload...)
		protocol = unix.IPPROTO_FRAGMENT
	}
	b := binary.BigEndian.AppendUint16([]byte{0x60, 0, 0, 0}, uint16(len(payload)))
	b = append(append(append(b, protocol, 64), from.AsSlice()...), to.AsSlice()...)
	return append(b, payload...)
}

// datagram returns a whole UDP packet.
func datagram(from, to netip.AddrPort, payload []byte) []byte {
	return ip(from.Addr(), to.Addr(), unix.IPPROTO_UDP, part{}, udp(from, to, payload))
}

// fragmented returns a datagram in two fragments. The first has this number of bytes after its IP header, a multiple
// of eight.
func fragmented(from, to netip.AddrPort, payload []byte, first int, id uint16) (packets [2][]byte) {
	u := udp(from, to, payload)
	packets[0] = ip(from.Addr(), to.Addr(), unix.IPPROTO_UDP, part{id: id, more: true}, u[:first])
	packets[1] = ip(from.Addr(), to.Addr(), unix.IPPROTO_UDP, part{id: id, offset: first}, u[first:])
	return packets
}

// tunnelled returns the payload of a tunnel packet's UDP header, for a device with an Ethernet address. Without a
// program on the device, the stack accepts only this address.
func tunnelled(to net.HardwareAddr, vni uint32, packet []byte) []byte {
	b := binary.BigEndian.AppendUint32([]byte{8, 0, 0, 0}, vni<<8)
	return append(b, frame(to, net.HardwareAddr{2, 0xaa, 0, 0, 0, 2}, packet)...)
}

// marker is the prefix of the attacks' payloads, by which receivers recognize them.
const marker = "attack:"

// ears record the attacks that arrive at pods and hosts.
type ears struct {
	mu    sync.Mutex
	heard map[string]int // by "who: what"
}

func (e *ears) hear(who string, b []byte) {
	at := bytes.Index(b, []byte(marker))
	if at < 0 {
		return
	}
	what, _, _ := bytes.Cut(b[at:], []byte(";"))
	e.mu.Lock()
	defer e.mu.Unlock()
	e.heard[who+": "+string(what)]++
}

// take returns what was heard since the last call.
func (e *ears) take() map[string]int {
	e.mu.Lock()
	defer e.mu.Unlock()
	heard := e.heard
	e.heard = map[string]int{}
	return heard
}

// attackedPorts are the ports on which pods and hosts listen.
var attackedPorts = []uint16{7000, tunnelPort}

const tunnelPort = 4789

// socketsOf listens on UDP ports of a namespace, at all of its addresses.
func (e *ears) socketsOf(t *testing.T, p pod.Pod, ports ...uint16) {
	t.Helper()
	for _, port := range ports {
		c, err := p.ListenPacket(netip.AddrPortFrom(netip.IPv6Unspecified(), port))
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for b := make([]byte, 1<<16); ; {
				n, from, err := c.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				if bytes.HasPrefix(b[:n], []byte("ask")) {
					_, _ = c.WriteToUDPAddrPort(b[:n], from)
				}
				e.hear(p.Name, b[:n])
			}
		}()
		t.Cleanup(func() { _ = c.Close(); <-done })
	}
}

// deviceOf reads every frame that a pod's device receives.
func (e *ears) deviceOf(t *testing.T, p pod.Pod) {
	t.Helper()
	fd := packetSocket(t, p.Netns, "eth0", unix.ETH_P_ALL)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for b := make([]byte, 1<<16); ; {
			n, from, err := unix.Recvfrom(fd, b, 0)
			if err != nil {
				select {
				case <-stop:
					return
				default:
					_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 50)
					continue
				}
			}
			// An ICMP error only quotes a dropped packet.
			if bytes.Equal(b[12:14], []byte{8, 0}) && b[14+9] == unix.IPPROTO_ICMP ||
				bytes.Equal(b[12:14], []byte{0x86, 0xdd}) && b[14+6] == unix.IPPROTO_ICMPV6 {
				continue
			}
			if l, ok := from.(*unix.SockaddrLinklayer); ok && l.Pkttype != unix.PACKET_OUTGOING {
				e.hear(p.Name, b[:n])
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-done })
}

// plug makes a namespace that is attached to the bridge between the nodes but is not a node: an outsider on the same
// link, with the host number 200.
func (c *testCluster) plug(t *testing.T) pod.Pod {
	t.Helper()
	p := newPod(t)
	name := random("out")
	err := pod.In(c.Hub().Netns(), func() error {
		master, err := netlink.LinkByName("br0")
		if err != nil {
			return err
		}
		target, err := os.Open(p.Netns)
		if err != nil {
			return err
		}
		defer target.Close()
		a := netlink.NewLinkAttrs()
		a.Name, a.MTU, a.MasterIndex = name, master.Attrs().MTU, master.Attrs().Index
		pair := &netlink.Veth{
			LinkAttrs: a, PeerName: "eth0", PeerMTU: uint32(a.MTU), PeerNamespace: netlink.NsFd(int(target.Fd())),
		}
		if err := netlink.LinkAdd(pair); err != nil {
			return err
		}
		return netlink.LinkSetUp(pair)
	})
	if err != nil {
		t.Fatalf("join a namespace to the bridge: %v", err)
	}
	var own []netip.Addr
	err = pod.In(p.Netns, func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		for _, near := range c.nodes[0].Addresses() {
			b, bits := near.AsSlice(), 24
			if near.Is6() {
				bits = 64
			}
			b[len(b)-1] = 200
			a, _ := netip.AddrFromSlice(b)
			own = append(own, a)
			err = errors.Join(err, netlink.AddrAdd(link, &netlink.Addr{
				IPNet: &net.IPNet{IP: b, Mask: net.CIDRMask(bits, a.BitLen())}, Flags: unix.IFA_F_NODAD,
			}))
		}
		return errors.Join(err, netlink.LinkSetUp(link))
	})
	if err != nil {
		t.Fatalf("configure a namespace at the bridge: %v", err)
	}
	p = p.WithAddresses(own)
	// A bridge port forwards no packets until the bridge has seen its link up.
	servicetest.EventuallyNil(t, "the outsider reaches a node", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, _, err := p.Ping(ctx, c.nodes[0].Addresses()[0])
		return err
	})
	return p
}

// addressOf returns the address of the other address's family.
func addressOf(all []netip.Addr, like netip.Addr) netip.Addr {
	for _, a := range all {
		if a.Is4() == like.Is4() {
			return a
		}
	}
	panic(fmt.Sprintf("none of %v is like %s", all, like))
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// TCP flags.
const (
	fin = 1 << iota
	syn
	rst
	psh
	ack
	urg
)

// wire is the device of a pod, or of the world, without the network stack: frames are sent without a socket, and
// every frame on the device is read.
type wire struct {
	fd       int
	ethernet [12]byte // Ethernet addresses of the node's end, then of this end
}

// newWire opens eth0 of a pod for sending and, if listen is set, for reading.
func (n *testNode) newWire(t *testing.T, p pod.Pod, listen bool) *wire {
	t.Helper()
	w := &wire{}
	var parent, index int
	must(t, pod.In(p.Netns, func() (err error) {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		parent, index = link.Attrs().ParentIndex, link.Attrs().Index
		copy(w.ethernet[6:], link.Attrs().HardwareAddr)
		w.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return err
	}))
	t.Cleanup(func() { _ = unix.Close(w.fd) })
	// Bind after enlarging the buffer, so that no early frame is lost.
	must(t, unix.SetsockoptInt(w.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20))
	protocol := uint16(0)
	if listen {
		protocol = binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_ALL))
	}
	must(t, unix.Bind(w.fd, &unix.SockaddrLinklayer{Ifindex: index, Protocol: protocol}))
	must(t, pod.In(n.Netns(), func() error {
		link, err := netlink.LinkByIndex(parent)
		if err != nil {
			return err
		}
		copy(w.ethernet[:6], link.Attrs().HardwareAddr)
		return nil
	}))
	return w
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// send sends a frame. It waits while the device's queue is full.
func (w *wire) send(t testing.TB, frame []byte) {
	for {
		_, err := unix.Write(w.fd, frame)
		switch {
		case err == nil:
			return
		case errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOBUFS):
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLOUT}}, 10)
		default:
			t.Fatalf("send a frame: %v", err)
		}
	}
}

// segment is a TCP segment or, with negative flags, a UDP datagram.
type segment struct {
	from, to netip.AddrPort
	flags    int
	seq, ack uint32
	payload  string
}

const datagram = -1

func (s segment) String() string {
	return fmt.Sprintf("%v to %v with flags %#x", s.from, s.to, s.flags)
}

func sum(b []byte, s uint32) uint32 {
	for ; len(b) > 1; b = b[2:] {
		s += uint32(b[0])<<8 | uint32(b[1])
	}
	if len(b) == 1 {
		s += uint32(b[0]) << 8
	}
	return s
}

func fold(s uint32) uint16 {
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return ^uint16(s)
}

// frame returns the segment as an Ethernet frame.
func (w *wire) frame(s segment) []byte {
	protocol, header, at := byte(unix.IPPROTO_TCP), 20, 16
	if s.flags == datagram {
		protocol, header, at = unix.IPPROTO_UDP, 8, 6
	}
	size := header + len(s.payload)
	b := append(make([]byte, 0, 54+size), w.ethernet[:]...)
	src, dst := s.from.Addr().AsSlice(), s.to.Addr().AsSlice()
	if s.from.Addr().Is4() {
		b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IP)
		ip := len(b)
		b = append(b, 0x45, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(20+size))
		b = append(b, 0, 0, 0x40, 0, 64, protocol, 0, 0)
		b = append(append(b, src...), dst...)
		binary.BigEndian.PutUint16(b[ip+10:], fold(sum(b[ip:], 0)))
	} else {
		b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IPV6)
		b = append(b, 0x60, 0, 0, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(size))
		b = append(b, protocol, 64)
		b = append(append(b, src...), dst...)
	}
	l4 := len(b)
	b = binary.BigEndian.AppendUint16(b, s.from.Port())
	b = binary.BigEndian.AppendUint16(b, s.to.Port())
	if s.flags == datagram {
		b = binary.BigEndian.AppendUint16(b, uint16(size))
	} else {
		b = binary.BigEndian.AppendUint32(b, s.seq)
		b = binary.BigEndian.AppendUint32(b, s.ack)
		b = append(b, 5<<4, byte(s.flags), 0x20, 0)
	}
	b = append(b, make([]byte, l4+header-len(b))...)
	b = append(b, s.payload...)
	checksum := fold(sum(b[l4:], sum(src, sum(dst, uint32(protocol)+uint32(size)))))
	if checksum == 0 && s.flags == datagram {
		checksum = 0xffff
	}
	binary.BigEndian.PutUint16(b[l4+at:], checksum)
	return b
}

// parse parses TCP segments and UDP datagrams. For other frames ok is false.
func parse(b []byte) (s segment, ok bool) {
	if len(b) < 14 {
		return s, false
	}
	var protocol byte
	var src, dst []byte
	ethertype, b := binary.BigEndian.Uint16(b[12:]), b[14:]
	switch {
	case ethertype == unix.ETH_P_IP && len(b) >= 20:
		protocol, src, dst, b = b[9], b[12:16], b[16:20], b[int(b[0]&15)*4:]
	case ethertype == unix.ETH_P_IPV6 && len(b) >= 40:
		protocol, src, dst, b = b[6], b[8:24], b[24:40], b[40:]
	default:
		return s, false
	}
	if len(b) < 8 || protocol != unix.IPPROTO_TCP && protocol != unix.IPPROTO_UDP {
		return s, false
	}
	from, _ := netip.AddrFromSlice(src)
	to, _ := netip.AddrFromSlice(dst)
	s.from = netip.AddrPortFrom(from, binary.BigEndian.Uint16(b))
	s.to = netip.AddrPortFrom(to, binary.BigEndian.Uint16(b[2:]))
	s.flags = datagram
	if protocol == unix.IPPROTO_TCP && len(b) >= 20 {
		s.seq, s.ack, s.flags = binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:]), int(b[13])
	}
	return s, true
}

// read returns the frames that arrived since the last read.
func (w *wire) read(t testing.TB) (all []segment) {
	t.Helper()
	b := make([]byte, 2048)
	for {
		n, _, err := unix.Recvfrom(w.fd, b, 0)
		if errors.Is(err, unix.EAGAIN) {
			return all
		}
		if err != nil {
			t.Fatalf("read the wire: %v", err)
		}
		if s, ok := parse(b[:n]); ok {
			all = append(all, s)
		}
	}
}

// await reads until a segment matches.
func (w *wire) await(t testing.TB, what string, match func(segment) bool) (found segment) {
	t.Helper()
	servicetest.EventuallyNil(t, what, func() error {
		for _, s := range w.read(t) {
			if match(s) {
				found = s
				return nil
			}
		}
		return errors.New("not on the wire")
	})
	if t.Failed() {
		t.FailNow()
	}
	return found
}

// flood sends count segments, each one repeat times.
func (w *wire) flood(t testing.TB, count, repeat int, next func(i int) segment) {
	t.Helper()
	begin := time.Now()
	for i := range count {
		frame := w.frame(next(i))
		for range repeat {
			w.send(t, frame)
		}
	}
	t.Logf("%d frames in %v", count*repeat, time.Since(begin).Round(time.Millisecond))
}

// inbox counts the data that arrive at an end of a connection.
type inbox struct {
	mu  sync.Mutex
	got []byte
}

func newInbox(t *testing.T, c *net.TCPConn) *inbox {
	must(t, c.SetDeadline(time.Time{}))
	in := &inbox{}
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 256)
		for {
			n, err := c.Read(b)
			in.mu.Lock()
			in.got = append(in.got, b[:n]...)
			in.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
	t.Cleanup(func() {
		_ = c.Close()
		wg.Wait()
	})
	return in
}

func (in *inbox) String() string {
	in.mu.Lock()
	defer in.mu.Unlock()
	return string(in.got)
}

// port returns the source port of a numbered segment of a flood.
func port(i int) uint16 { return uint16(1024 + i%60000) }

func at(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

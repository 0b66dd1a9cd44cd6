// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/test/internal/pod"
	"github.com/sluice-net/sluice/test/model"
)

// rawSocket sends and receives packets of one IP protocol. With it, SCTP works without support by the kernel.
type rawSocket struct {
	f *os.File
	c syscall.RawConn
	// ipv4 is set if received packets begin with an IP header.
	ipv4 bool
}

// openRaw opens a raw socket. If headers is set, the caller of send writes the IP header.
func openRaw(netns string, family, protocol int, headers bool, local netip.Addr) (*rawSocket, error) {
	fd := -1
	err := pod.In(netns, func() (err error) {
		if fd, err = unix.Socket(family, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, protocol); err != nil {
			return err
		}
		if local.IsValid() {
			if err := unix.Bind(fd, socketAddress(netip.AddrPortFrom(local, 0))); err != nil {
				return err
			}
		}
		if family == unix.AF_INET6 {
			if err := unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_RECVPKTINFO, 1); err != nil || !headers {
				return err
			}
			return unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_HDRINCL, 1)
		}
		if headers {
			return unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_HDRINCL, 1)
		}
		return nil
	})
	if err != nil {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
		return nil, fmt.Errorf("raw socket: %w", err)
	}
	s := &rawSocket{f: os.NewFile(uintptr(fd), "raw"), ipv4: family == unix.AF_INET}
	if s.c, err = s.f.SyscallConn(); err != nil {
		return nil, errors.Join(err, s.f.Close())
	}
	return s, nil
}

// receive returns the next packet without its IP header. The payload is a part of b.
func (s *rawSocket) receive(b []byte) (payload []byte, from, to netip.Addr, err error) {
	oob := make([]byte, 128)
	var n, oobn int
	var sender unix.Sockaddr
	var failed error
	err = s.c.Read(func(fd uintptr) bool {
		n, oobn, _, sender, failed = unix.Recvmsg(int(fd), b, oob, 0)
		return !errors.Is(failed, unix.EAGAIN)
	})
	if err = errors.Join(err, failed); err != nil {
		return nil, from, to, err
	}
	if s.ipv4 {
		if n < 20 || n < int(b[0]&15)*4 {
			return nil, from, to, nil
		}
		from, _ = netip.AddrFromSlice(b[12:16])
		to, _ = netip.AddrFromSlice(b[16:20])
		return b[int(b[0]&15)*4 : n], from, to, nil
	}
	if a, ok := sender.(*unix.SockaddrInet6); ok {
		from = netip.AddrFrom16(a.Addr)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	for _, m := range messages {
		if m.Header.Level == unix.SOL_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= 16 {
			to = netip.AddrFrom16([16]byte(m.Data[:16]))
		}
	}
	return b[:n], from, to, err
}

func (s *rawSocket) send(packet []byte, to netip.Addr) (err error) {
	failed := s.c.Write(func(fd uintptr) bool {
		err = unix.Sendto(int(fd), packet, 0, socketAddress(netip.AddrPortFrom(to, 0)))
		return !errors.Is(err, unix.EAGAIN)
	})
	return errors.Join(failed, err)
}

// ICMP types, and types of SCTP chunks.
const (
	echoReply   = 0
	echoReplyV6 = 129
	sctpInit    = 1
	sctpInitAck = 2
)

const sctpHeader = 12 // bytes in front of the first chunk

// chunk returns an SCTP packet with one chunk, INIT or INIT ACK. The payload is a parameter of an unknown type, which
// receivers skip.
func chunk(from, to uint16, tag uint32, kind byte, payload []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, from)
	b = binary.BigEndian.AppendUint16(b, to)
	b = binary.BigEndian.AppendUint32(b, tag)
	b = append(b, 0, 0, 0, 0, kind, 0)
	// initiate tag, window, outbound and inbound streams, initial TSN
	value := binary.BigEndian.AppendUint32(nil, 1)
	value = append(value, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1)
	value = binary.BigEndian.AppendUint16(value, 0x8fff)
	value = binary.BigEndian.AppendUint16(value, uint16(4+len(payload)))
	value = append(value, payload...)
	b = binary.BigEndian.AppendUint16(b, uint16(4+len(value)))
	b = append(b, value...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// readChunk parses a packet of chunk.
func readChunk(b []byte) (from, to uint16, kind byte, payload []byte, ok bool) {
	const before = sctpHeader + 4 + 16 + 4
	if len(b) < before {
		return 0, 0, 0, nil, false
	}
	at := sctpHeader + 4 + 16
	n := int(binary.BigEndian.Uint16(b[at+2:]))
	if n < 4 || at+n > len(b) {
		return 0, 0, 0, nil, false
	}
	return binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:]), b[sctpHeader], b[before : at+n], true
}

// echoRequest returns an echo request.
func echoRequest(ipv4 bool, id uint16, payload []byte) []byte {
	b := []byte{model.EchoRequest, 0, 0, 0}
	if !ipv4 {
		b[0] = model.EchoRequestV6 // the kernel writes the checksum
	}
	b = binary.BigEndian.AppendUint16(b, id)
	b = append(append(b, 0, 1), payload...)
	if ipv4 {
		binary.BigEndian.PutUint16(b[2:], checksum(b, 0))
	}
	return b
}

// serveRaw answers SCTP, and records ICMP echo requests, which the kernel answers.
func (a *agent) serveRaw(t *testing.T, h *heard) {
	t.Helper()
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		icmp, request := unix.IPPROTO_ICMP, byte(model.EchoRequest)
		if family == unix.AF_INET6 {
			icmp, request = unix.IPPROTO_ICMPV6, model.EchoRequestV6
		}
		a.receiveRaw(t, family, icmp, func(_ *rawSocket, b []byte, from, _ netip.Addr) {
			if len(b) < 8 || b[0] != request {
				return
			}
			if id, _, ok := bytes.Cut(b[8:], []byte{'\n'}); ok {
				_ = a.reply(h, string(id), from)
			}
		})
		a.receiveRaw(t, family, unix.IPPROTO_SCTP, func(s *rawSocket, b []byte, from, to netip.Addr) {
			client, port, kind, payload, ok := readChunk(b)
			if !ok || kind != sctpInit || !slices.Contains(model.Ports, port) {
				return
			}
			id, _, _ := bytes.Cut(payload, []byte{'\n'})
			answer := chunk(port, client, 1, sctpInitAck, a.reply(h, string(id), from))
			_ = s.send(ip(to, from, unix.IPPROTO_SCTP, part{}, answer), from)
		})
	}
}

// receiveRaw calls take for every packet of a protocol until the test ends.
func (a *agent) receiveRaw(
	t *testing.T, family, protocol int, take func(s *rawSocket, b []byte, from, to netip.Addr),
) {
	t.Helper()
	s, err := openRaw(a.Netns, family, protocol, protocol == unix.IPPROTO_SCTP, netip.Addr{})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		buffer := make([]byte, 65536)
		for {
			b, from, to, err := s.receive(buffer)
			if err != nil {
				return
			}
			take(s, b, from, to)
		}
	})
	t.Cleanup(func() { _ = s.f.Close(); wg.Wait() })
}

// askRaw sends the packet of a question, and receives packets until take returns true.
func (a *agent) askRaw(
	q *model.Question, protocol int, packet []byte, deadline time.Time, take func(b []byte) bool,
) (from netip.Addr, err error) {
	family := unix.AF_INET6
	if q.To.Addr().Is4() {
		family = unix.AF_INET
	}
	s, err := openRaw(a.Netns, family, protocol, false, q.Source.Addr())
	if err != nil {
		return from, err
	}
	defer s.f.Close()
	if err := errors.Join(s.f.SetDeadline(deadline), s.send(packet, q.To.Addr())); err != nil {
		return from, err
	}
	buffer := make([]byte, 65536)
	for {
		b, from, _, err := s.receive(buffer)
		if err != nil {
			return from, err
		}
		if take(b) {
			return from, nil
		}
	}
}

func (a *agent) askForEcho(q *model.Question, deadline time.Time) (netip.AddrPort, error) {
	protocol, kind := unix.IPPROTO_ICMP, byte(echoReply)
	if q.Proto == model.ICMPv6 {
		protocol, kind = unix.IPPROTO_ICMPV6, echoReplyV6
	}
	payload := payloadOf(q)
	from, err := a.askRaw(q, protocol, echoRequest(q.Proto == model.ICMP, q.Source.Port(), payload), deadline,
		func(b []byte) bool { return len(b) >= 8 && b[0] == kind && bytes.Equal(b[8:], payload) })
	return netip.AddrPortFrom(from, 0), err
}

func (a *agent) askByChunk(q *model.Question, deadline time.Time) (answer []byte, _ netip.AddrPort, err error) {
	var port uint16
	packet := chunk(q.Source.Port(), q.To.Port(), 0, sctpInit, payloadOf(q))
	from, err := a.askRaw(q, unix.IPPROTO_SCTP, packet, deadline, func(b []byte) bool {
		from, to, kind, payload, ok := readChunk(b)
		if !ok || kind != sctpInitAck || to != q.Source.Port() || !bytes.Contains(payload, []byte(q.ID)) {
			return false
		}
		port, answer = from, bytes.Clone(payload)
		return true
	})
	return answer, netip.AddrPortFrom(from, port), err
}

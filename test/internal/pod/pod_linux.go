// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pod

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// Pod is the network of one container.
type Pod struct {
	// Name is used in messages.
	Name string
	// Netns is the path of its network namespace.
	Netns string
	// IPv4 and IPv6 are its addresses. The zero Addr means that it has no address of the family.
	IPv4, IPv6 netip.Addr
}

// Addresses returns the valid addresses among IPv4 and IPv6.
func (p Pod) Addresses() []netip.Addr {
	var all []netip.Addr
	for _, a := range []netip.Addr{p.IPv4, p.IPv6} {
		if a.IsValid() {
			all = append(all, a)
		}
	}
	return all
}

// Listen listens on a stream socket inside the pod.
func (p Pod) Listen(address netip.AddrPort) (*net.TCPListener, error) {
	var l *net.TCPListener
	err := In(p.Netns, func() (err error) {
		l, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(address))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen in pod %s: %w", p.Name, err)
	}
	return l, nil
}

// Dial connects a stream socket of the pod.
func (p Pod) Dial(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
	var c net.Conn
	err := In(p.Netns, func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, "tcp", to.String())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("from pod %s: %w", p.Name, err)
	}
	return c.(*net.TCPConn), nil
}

// DialUDP connects a datagram socket of the pod.
func (p Pod) DialUDP(to netip.AddrPort) (*net.UDPConn, error) {
	var c *net.UDPConn
	err := In(p.Netns, func() (err error) {
		c, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("from pod %s: %w", p.Name, err)
	}
	return c, nil
}

// ListenPacket opens a datagram socket in the pod. Its buffer holds what arrives while the process is not scheduled
// for seconds; the default buffer holds only about 280 datagrams.
func (p Pod) ListenPacket(address netip.AddrPort) (*net.UDPConn, error) {
	var c *net.UDPConn
	err := In(p.Netns, func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(address))
		return err
	})
	if err == nil {
		err = growReceiveBuffer(c)
	}
	if err != nil {
		return nil, fmt.Errorf("listen in pod %s: %w", p.Name, err)
	}
	return c, nil
}

func growReceiveBuffer(c *net.UDPConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	err = raw.Control(func(fd uintptr) {
		set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20)
	})
	return errors.Join(err, set)
}

// ExchangeTCP sends message from one pod to the other over a new connection, and requires the same bytes as the
// answer.
func ExchangeTCP(ctx context.Context, from, to Pod, address netip.Addr, message []byte) error {
	l, err := to.Listen(netip.AddrPortFrom(address, 0))
	if err != nil {
		return err
	}
	ctx, leave := context.WithCancel(ctx)
	echoed, ended := make(chan error, 1), make(chan struct{})
	defer func() {
		leave()
		_ = l.Close()
		<-ended
	}()
	go func() {
		defer close(ended)
		c, err := l.AcceptTCP()
		if err == nil {
			// The other end may disappear without sending a packet.
			stop := context.AfterFunc(ctx, func() { _ = c.Close() })
			_, err = io.Copy(c, c)
			stop()
			_ = c.Close()
		}
		echoed <- err
	}()
	c, err := from.Dial(ctx, netip.AddrPortFrom(address, uint16(l.Addr().(*net.TCPAddr).Port)))
	if err != nil {
		return err
	}
	defer c.Close()
	if deadline, ok := ctx.Deadline(); ok {
		_ = c.SetDeadline(deadline)
	}
	if _, err := c.Write(message); err != nil {
		return err
	}
	if err := c.CloseWrite(); err != nil {
		return err
	}
	back, err := io.ReadAll(c)
	if err != nil {
		return err
	}
	if !bytes.Equal(back, message) {
		return fmt.Errorf("tcp %s to %s: sent %d bytes, received %d others", from.Name, address, len(message), len(back))
	}
	return <-echoed
}

// ExchangeUDP sends message as one datagram to the other pod, and requires the same bytes as the answer.
func ExchangeUDP(ctx context.Context, from, to Pod, address netip.Addr, message []byte) error {
	server, err := to.ListenPacket(netip.AddrPortFrom(address, 0))
	if err != nil {
		return err
	}
	defer server.Close()
	client, err := from.ListenPacket(netip.AddrPortFrom(netip.IPv6Unspecified(), 0))
	if err != nil {
		return err
	}
	defer client.Close()
	if deadline, ok := ctx.Deadline(); ok {
		_ = server.SetDeadline(deadline)
		_ = client.SetDeadline(deadline)
	}
	target := netip.AddrPortFrom(address, uint16(server.LocalAddr().(*net.UDPAddr).Port))
	if _, err := client.WriteToUDPAddrPort(message, target); err != nil {
		return fmt.Errorf("udp %s to %s: %w", from.Name, target, err)
	}
	buf := make([]byte, 64<<10)
	n, sender, err := server.ReadFromUDPAddrPort(buf)
	if err != nil {
		return fmt.Errorf("udp %s to %s: %w", from.Name, target, err)
	}
	if _, err := server.WriteToUDPAddrPort(buf[:n], sender); err != nil {
		return fmt.Errorf("udp answer of %s to %s: %w", to.Name, sender, err)
	}
	n, _, err = client.ReadFromUDPAddrPort(buf)
	if err != nil {
		return fmt.Errorf("udp answer of %s to %s: %w", to.Name, sender, err)
	}
	if !bytes.Equal(buf[:n], message) {
		return fmt.Errorf("udp %s to %s: sent %d bytes, received %d others", from.Name, address, len(message), n)
	}
	return nil
}

// Ping sends one echo request and returns the round-trip time and the TTL or hop limit of the answer.
func (p Pod) Ping(ctx context.Context, to netip.Addr) (rtt time.Duration, ttl int, err error) {
	network, echo, proto := "ip4:icmp", icmp.Type(ipv4.ICMPTypeEcho), 1
	if to.Is6() {
		network, echo, proto = "ip6:ipv6-icmp", ipv6.ICMPTypeEchoRequest, 58
	}
	var conn *icmp.PacketConn
	if err := In(p.Netns, func() (err error) {
		conn, err = icmp.ListenPacket(network, "")
		return err
	}); err != nil {
		return 0, 0, fmt.Errorf("ping from pod %s: %w", p.Name, err)
	}
	defer conn.Close()
	if to.Is6() {
		err = conn.IPv6PacketConn().SetControlMessage(ipv6.FlagHopLimit, true)
	} else {
		err = conn.IPv4PacketConn().SetControlMessage(ipv4.FlagTTL, true)
	}
	if err != nil {
		return 0, 0, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	start := time.Now()
	id := int(start.UnixNano()) & 0xffff
	request := icmp.Message{Type: echo, Body: &icmp.Echo{ID: id, Seq: 1, Data: []byte("sluice")}}
	wire, err := request.Marshal(nil)
	if err != nil {
		return 0, 0, err
	}
	if _, err := conn.WriteTo(wire, &net.IPAddr{IP: to.AsSlice()}); err != nil {
		return 0, 0, fmt.Errorf("ping %s from pod %s: %w", to, p.Name, err)
	}
	buf := make([]byte, 1500)
	for {
		var n int
		if to.Is6() {
			var cm *ipv6.ControlMessage
			if n, cm, _, err = conn.IPv6PacketConn().ReadFrom(buf); cm != nil {
				ttl = cm.HopLimit
			}
		} else {
			var cm *ipv4.ControlMessage
			if n, cm, _, err = conn.IPv4PacketConn().ReadFrom(buf); cm != nil {
				ttl = cm.TTL
			}
		}
		if err != nil {
			return 0, 0, fmt.Errorf("ping %s from pod %s: %w", to, p.Name, err)
		}
		message, err := icmp.ParseMessage(proto, buf[:n])
		if err != nil {
			continue
		}
		reply, ok := message.Body.(*icmp.Echo)
		if ok && reply.ID == id && (message.Type == ipv4.ICMPTypeEchoReply || message.Type == ipv6.ICMPTypeEchoReply) {
			return time.Since(start), ttl, nil
		}
	}
}

// SendFrom sends one UDP datagram over IPv4 with any source address, including a forged one.
func (p Pod) SendFrom(source netip.Addr, to netip.AddrPort, payload []byte) error {
	const ipHeader, udpHeader = 20, 8
	packet := make([]byte, ipHeader+udpHeader+len(payload))
	packet[0], packet[8], packet[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(packet[2:], uint16(len(packet)))
	src, dst := source.As4(), to.Addr().As4()
	copy(packet[12:], src[:])
	copy(packet[16:], dst[:])
	udp := packet[ipHeader:]
	binary.BigEndian.PutUint16(udp[0:], 4000)
	binary.BigEndian.PutUint16(udp[2:], to.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(udpHeader+len(payload)))
	copy(udp[udpHeader:], payload)
	if err := p.sendRaw(dst, packet); err != nil {
		return fmt.Errorf("as %s: %w", source, err)
	}
	return nil
}

// SendSYN sends a single TCP segment with the flag SYN over IPv4 without a socket.
func (p Pod) SendSYN(from, to netip.AddrPort) error {
	const ipHeader, tcpHeader = 20, 20
	packet := make([]byte, ipHeader+tcpHeader)
	packet[0], packet[8], packet[9] = 0x45, 64, unix.IPPROTO_TCP
	binary.BigEndian.PutUint16(packet[2:], uint16(len(packet)))
	src, dst := from.Addr().As4(), to.Addr().As4()
	copy(packet[12:], src[:])
	copy(packet[16:], dst[:])
	tcp := packet[ipHeader:]
	binary.BigEndian.PutUint16(tcp[0:], from.Port())
	binary.BigEndian.PutUint16(tcp[2:], to.Port())
	binary.BigEndian.PutUint32(tcp[4:], 1) // sequence number
	tcp[12], tcp[13] = tcpHeader/4<<4, 0x02
	binary.BigEndian.PutUint16(tcp[14:], 1024) // window
	sum := uint32(unix.IPPROTO_TCP + tcpHeader)
	for _, part := range [][]byte{src[:], dst[:], tcp} {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	sum = sum&0xffff + sum>>16
	binary.BigEndian.PutUint16(tcp[16:], ^uint16(sum+sum>>16))
	return p.sendRaw(dst, packet)
}

// sendRaw sends a complete IPv4 packet. The kernel fills in the checksum and the identification.
func (p Pod) sendRaw(to [4]byte, packet []byte) error {
	return In(p.Netns, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: to}); err != nil {
			return fmt.Errorf("send from pod %s: %w", p.Name, err)
		}
		return nil
	})
}

// WithAddresses sets the pod's addresses, at most one of each family.
func (p Pod) WithAddresses(addresses []netip.Addr) Pod {
	for _, a := range addresses {
		if a.Is4() {
			p.IPv4 = a
		} else {
			p.IPv6 = a
		}
	}
	return p
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package listeners keeps the listening TCP sockets of one process in another one, so that they survive a restart: the
// kernel completes connections to them meanwhile, and the next process accepts these. The Store never accepts any.
//
// The two processes send messages on a unix socket of type SOCK_SEQPACKET. After a connection, the store sends a
// message with each socket that it has. Then it answers each request of the client.
package listeners

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/seqpacket"
)

// Kinds of messages: their first byte. The address of a socket follows as text.
const (
	has  = 'h' // from the store: it has a socket, whose descriptor comes with the message
	ends = 'e' // from the store: it has sent all sockets
	done = 'd' // from the store: it has done what was requested
	full = 'f' // from the store: it has its maximum number of sockets
	not  = 'n' // from the store: the descriptor is not a listening TCP socket

	keep = 'k' // from the client: keep the socket that comes with the message
	drop = 'r' // from the client: close the socket
)

// maxMessage is the size of a message with the longest address and a zone.
const maxMessage = 128

// sendTimeout limits how long sending a message may take if the other side does not receive it.
const sendTimeout = time.Second

// ErrFull is returned by Keep if the store has its maximum number of sockets.
var ErrFull = errors.New("the store has its maximum number of listening sockets")

// packets is a connection with messages.
type packets interface {
	net.Conn
	ReadMsgUnix(b, oob []byte) (n, oobn, flags int, addr *net.UnixAddr, err error)
	WriteMsgUnix(b, oob []byte, addr *net.UnixAddr) (n, oobn int, err error)
}

// message is a message with at most one descriptor.
type message struct {
	kind byte
	addr netip.AddrPort
	fd   int // -1: none
}

// send sends a message. It does not close the descriptor.
func send(c packets, m message) error {
	b := []byte{m.kind}
	if m.addr.IsValid() {
		b = m.addr.AppendTo(b)
	}
	var oob []byte
	if m.fd >= 0 {
		oob = unix.UnixRights(m.fd)
	}
	err := c.SetWriteDeadline(time.Now().Add(sendTimeout))
	if err == nil {
		_, _, err = c.WriteMsgUnix(b, oob, nil)
	}
	return err
}

// receive receives a message. The caller closes its descriptor.
func receive(c packets) (message, error) {
	m := message{fd: -1}
	b, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4))
	n, control, flags, _, err := c.ReadMsgUnix(b, oob)
	if fds := seqpacket.Descriptors(oob[:control]); len(fds) == 1 {
		m.fd = fds[0]
	} else {
		seqpacket.CloseAll(fds)
	}
	switch {
	case err != nil:
	case n == 0:
		err = net.ErrClosed
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		err = errors.New("the message is too long")
	default:
		m.kind = b[0]
		if n > 1 {
			err = m.addr.UnmarshalText(b[1:n])
		}
	}
	if err != nil {
		closeFD(m.fd)
		return message{fd: -1}, err
	}
	return m, nil
}

func closeFD(fd int) {
	if fd >= 0 {
		unix.Close(fd) //nolint:errcheck // nothing was written
	}
}

// addressOf returns the address of a listening TCP socket.
func addressOf(fd int) (netip.AddrPort, error) {
	for option, want := range map[int][]int{
		unix.SO_TYPE: {unix.SOCK_STREAM}, unix.SO_ACCEPTCONN: {1},
		unix.SO_PROTOCOL: {unix.IPPROTO_TCP, unix.IPPROTO_MPTCP}, // Go's listeners use MPTCP if the kernel has it
	} {
		if have, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, option); err != nil || !slices.Contains(want, have) {
			return netip.AddrPort{}, errors.New("the descriptor is not a listening TCP socket")
		}
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("read the address of a listening socket: %w", err)
	}
	switch a := name.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)), nil
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port)), nil
	}
	return netip.AddrPort{}, errors.New("the descriptor is not an internet socket")
}

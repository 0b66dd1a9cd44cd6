// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package socketend

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/service/socketlist"
)

// Requests of linux/sock_diag.h: SOCK_DIAG_BY_FAMILY and SOCK_DESTROY.
const (
	sockDiagByFamily = 20
	sockDestroy      = 21
)

// Errors of kernels that cannot end sockets.
var (
	errNoDestroy = errors.New("the kernel lacks CONFIG_INET_DIAG_DESTROY")
	errNoUDPDiag = errors.New("the kernel lacks udp_diag (CONFIG_INET_UDP_DIAG), or may not load it")
)

// destroy ends UDP sockets of a namespace. It returns how many it ended, and those that the kernel did not find: they
// are closed, their addresses have changed, or another socket has the same addresses.
func destroy(ns *netns.Namespace, sockets []socketlist.Socket) (n int, missed []socketlist.Socket, err error) {
	c, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, &netlink.Config{NetNS: ns.Fd()})
	if err != nil {
		return 0, nil, fmt.Errorf("end sockets: %w", err)
	}
	defer c.Close()
	var errs []error
	for _, s := range sockets {
		_, err := c.Execute(netlink.Message{
			Header: netlink.Header{Type: sockDestroy, Flags: netlink.Request | netlink.Acknowledge},
			Data:   request(s.Family, unix.IPPROTO_UDP, allStates, s.ID),
		})
		switch {
		case err == nil:
			n++
		case errors.Is(err, unix.EOPNOTSUPP):
			return n, nil, fmt.Errorf("end sockets: %w: %w", err, errNoDestroy)
		case errors.Is(err, unix.ENOENT):
			missed = append(missed, s)
		default:
			errs = append(errs, fmt.Errorf("end the socket that is connected to %v: %w", s.Remote, err))
		}
	}
	// a kernel without udp_diag returns ENOENT for every UDP socket
	if len(missed) > 0 && n == 0 && !lists(c, sockets[0].Family, unix.IPPROTO_UDP) {
		errs = append(errs, fmt.Errorf("end sockets: %w", errNoUDPDiag))
	}
	return n, missed, errors.Join(errs...)
}

// lists reports whether the kernel can list the sockets of a protocol, by requesting an empty list.
func lists(c *netlink.Conn, family, protocol uint8) bool {
	_, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: sockDiagByFamily, Flags: netlink.Request | netlink.Dump},
		Data:   request(family, protocol, 0, socketlist.ID{}),
	})
	return !errors.Is(err, unix.ENOENT)
}

// allStates selects sockets in any state.
const allStates = 0xffffffff

// request returns a struct inet_diag_req_v2 of linux/inet_diag.h.
func request(family, protocol uint8, states uint32, id socketlist.ID) []byte {
	return append(binary.NativeEndian.AppendUint32([]byte{family, protocol, 0, 0}, states), id[:]...)
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package socketend

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/socketlist"
	"github.com/sluice-net/sluice/services/datapath/internal/netns"
)

// sockDestroy is SOCK_DESTROY of linux/sock_diag.h.
const sockDestroy = 21

// destroy ends UDP sockets of a namespace and returns how many there were. One that
// is closed, or has other ends by now, is none.
func destroy(ns *netns.Namespace, sockets []socketlist.Socket) (n int, err error) {
	c, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, &netlink.Config{NetNS: ns.Fd()})
	if err != nil {
		return 0, fmt.Errorf("end sockets: %w", err)
	}
	defer c.Close()
	var errs []error
	for _, s := range sockets {
		_, err := c.Execute(netlink.Message{
			Header: netlink.Header{Type: sockDestroy, Flags: netlink.Request | netlink.Acknowledge},
			Data:   request(s),
		})
		switch {
		case err == nil:
			n++
		case errors.Is(err, unix.EOPNOTSUPP):
			return n, fmt.Errorf("end sockets: %w: the kernel is without CONFIG_INET_DIAG_DESTROY", err)
		case !errors.Is(err, unix.ENOENT):
			errs = append(errs, fmt.Errorf("end the socket that is connected to %v: %w", s.Remote, err))
		}
	}
	return n, errors.Join(errs...)
}

// request is struct inet_diag_req_v2 of linux/inet_diag.h: of all states.
func request(s socketlist.Socket) []byte {
	const allStates = 0xffffffff
	b := binary.NativeEndian.AppendUint32([]byte{s.Family, unix.IPPROTO_UDP, 0, 0}, allStates)
	return append(b, s.ID[:]...)
}

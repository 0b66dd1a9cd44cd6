// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package underlay

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

// groups are the multicast groups of Watch.
var groups = []uint{
	unix.RTNLGRP_LINK, unix.RTNLGRP_TC, unix.RTNLGRP_NEIGH,
	unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV4_NETCONF,
	unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV6_NETCONF,
}

// watchBuffer is the size of the socket's receive buffer in bytes.
const watchBuffer = 1 << 20

// Watch calls changed after changes that may affect packets to other nodes, until ctx ends, and once at the start for
// earlier changes. changed must not block. Changes of endpoints and their routes are ignored.
func (u *Underlay) Watch(ctx context.Context, changed func()) error {
	var s *nl.NetlinkSocket
	err := u.o.Home.Do(func() (err error) {
		s, err = nl.Subscribe(unix.NETLINK_ROUTE, groups...)
		return err
	})
	if err != nil {
		return fmt.Errorf("subscribe to changes: %w", err)
	}
	defer s.Close()
	err = s.SetReceiveBufferSize(watchBuffer, true)
	if err == nil {
		err = s.SetReceiveTimeout(&unix.Timeval{Usec: 100_000})
	}
	if err != nil {
		return fmt.Errorf("subscribe to changes: %w", err)
	}
	changed()
	for ctx.Err() == nil {
		msgs, _, err := s.Receive()
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.ENOBUFS):
			// The kernel drops messages until the socket is empty. The reconciliation that this triggers, or the next poll
			// within a second, sees the dropped changes.
			changed()
		case err != nil:
			return fmt.Errorf("receive changes: %w", err)
		}
		for _, m := range msgs {
			if u.concerns(m) {
				changed()
				break
			}
		}
	}
	return ctx.Err()
}

// concerns reports whether a message may affect packets to other nodes.
func (u *Underlay) concerns(m syscall.NetlinkMessage) bool {
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		return deviceOf(m.Data).group&^1 != netdev.Group(u.o.Instance)
	case unix.RTM_NEWQDISC, unix.RTM_DELQDISC, unix.RTM_NEWTFILTER, unix.RTM_DELTFILTER:
		return len(m.Data) >= nl.SizeofTcMsg && u.watched(binary.NativeEndian.Uint32(m.Data[4:]))
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		return routeConcerns(m)
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		return u.neighbourConcerns(m)
	case unix.RTM_NEWNETCONF:
		var index int32
		rtnl.Attrs(m.Data, 4, func(kind uint16, v []byte) {
			if kind == 1 { // NETCONFA_IFINDEX
				index = int32(rtnl.Number(v)) //nolint:gosec // signed
			}
		})
		return index <= 0 || u.watched(uint32(index))
	case unix.RTM_NEWADDR, unix.RTM_DELADDR, unix.RTM_NEWRULE, unix.RTM_DELRULE:
		return true
	}
	return false
}

// routeConcerns ignores routes that the kernel creates for local addresses, routes of this process, and learned
// exceptions, which send no message when they expire.
func routeConcerns(m syscall.NetlinkMessage) bool {
	if len(m.Data) < unix.SizeofRtMsg {
		return false
	}
	r := readRoute(m.Data)
	made := m.Header.Type == unix.RTM_NEWROUTE
	return r.table != unix.RT_TABLE_LOCAL && r.protocol != netdev.Protocol && (!made || r.protocol != Protocol)
}

func (u *Underlay) neighbourConcerns(m syscall.NetlinkMessage) bool {
	if len(m.Data) < sizeofNdmsg {
		return false
	}
	n := readNeighbour(m.Data)
	gone := m.Header.Type == unix.RTM_DELNEIGH || n.state&resolved == 0
	return gone && u.interesting(n.ifindex, n.to)
}

// watched reports whether a device is the tunnel or an uplink.
func (u *Underlay) watched(ifindex uint32) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	_, uplink := u.attached[ifindex]
	return uplink || ifindex == u.tunnelIndex && ifindex != 0
}

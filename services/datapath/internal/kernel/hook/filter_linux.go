// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hook

import (
	"encoding/binary"
	"errors"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

// parents are tc's handles of a device's hooks.
var parents = map[program.Hook]uint32{
	program.Ingress: netlink.HANDLE_MIN_INGRESS,
	program.Egress:  netlink.HANDLE_MIN_EGRESS,
}

// Priority and handle of our filters on a device: they run first, and can be found again.
const (
	filterPriority = 1
	filterHandle   = 1
)

// filter is a filter at a hook of a device.
type filter struct {
	kind, name       string
	priority, handle uint32
	direct           bool
	program          uint32
}

// tcmsg encodes a struct tcmsg.
func tcmsg(ifindex, handle, parent, info uint32) []byte {
	m := make([]byte, nl.SizeofTcMsg)
	for i, v := range []uint32{ifindex, handle, parent, info} {
		binary.NativeEndian.PutUint32(m[4*(i+1):], v)
	}
	return m
}

// filtersAt lists the filters of a hook in the order in which they run.
func filtersAt(c *rtnl.Conn, ifindex, parent uint32) ([]filter, error) {
	return whole(func() (list []filter, err error) {
		var b rtnl.Batch
		b.Add(unix.RTM_GETTFILTER, 0, tcmsg(ifindex, 0, parent, 0))
		err = c.Dump(&b, func(m []byte) {
			if len(m) < nl.SizeofTcMsg {
				return
			}
			f := filter{handle: binary.NativeEndian.Uint32(m[8:]), priority: binary.NativeEndian.Uint32(m[16:]) >> 16}
			detailed := false // the kernel also sends a message for each priority, without a filter
			rtnl.Attrs(m, nl.SizeofTcMsg, func(kind uint16, v []byte) {
				switch kind {
				case nl.TCA_KIND:
					f.kind = unix.ByteSliceToString(v)
				case nl.TCA_OPTIONS:
					detailed = true
					rtnl.Attrs(v, 0, func(kind uint16, v []byte) {
						switch kind {
						case nl.TCA_BPF_NAME:
							f.name = unix.ByteSliceToString(v)
						case nl.TCA_BPF_FLAGS:
							f.direct = rtnl.Number(v)&nl.TCA_BPF_FLAG_ACT_DIRECT != 0
						case nl.TCA_BPF_ID:
							f.program = rtnl.Number(v)
						}
					})
				}
			})
			if detailed {
				list = append(list, f)
			}
		})
		return slices.Clip(list), err
	})
}

// AddClsact adds the clsact qdisc, which has the hooks, to a device; EEXIST if it has one.
func AddClsact(b *rtnl.Batch, ifindex uint32) {
	body := tcmsg(ifindex, netlink.HANDLE_INGRESS&0xffff0000, netlink.HANDLE_CLSACT, 0)
	b.Add(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_EXCL, body)
	b.For("qdisc clsact")
	b.String(nl.TCA_KIND, "clsact")
}

// setFilter makes a program the first filter at its hook of a device.
func setFilter(b *rtnl.Batch, ifindex uint32, p *program.Program) {
	info := uint32(filterPriority)<<16 | uint32(nl.Swap16(unix.ETH_P_ALL))
	b.Add(unix.RTM_NEWTFILTER, unix.NLM_F_CREATE, tcmsg(ifindex, filterHandle, parents[p.Hook], info))
	b.For("filter %s at %s", p.Name, p.Hook)
	b.String(nl.TCA_KIND, "bpf")
	b.Nest(nl.TCA_OPTIONS, nil, func() {
		b.Uint32(nl.TCA_BPF_FD, uint32(p.Prog.FD())) //nolint:gosec // a descriptor
		b.String(nl.TCA_BPF_NAME, p.Name)
		b.Uint32(nl.TCA_BPF_FLAGS, nl.TCA_BPF_FLAG_ACT_DIRECT)
	})
}

// delFilter removes the filter of setFilter.
func delFilter(b *rtnl.Batch, ifindex uint32, p program.Spec) {
	info := uint32(filterPriority)<<16 | uint32(nl.Swap16(unix.ETH_P_ALL))
	b.Add(unix.RTM_DELTFILTER, 0, tcmsg(ifindex, filterHandle, parents[p.Hook], info))
}

// ingressQdisc returns the kind of the qdisc with a device's ingress hook; "" if the device has none. It lists the
// qdiscs of all devices, because the answer about a single device would be sent to all listeners for changes,
// too.
func ingressQdisc(c *rtnl.Conn, ifindex uint32) (string, error) {
	return whole(func() (kind string, err error) {
		var b rtnl.Batch
		b.Add(unix.RTM_GETQDISC, 0, tcmsg(0, 0, 0, 0))
		err = c.Dump(&b, func(m []byte) {
			if len(m) < nl.SizeofTcMsg || binary.NativeEndian.Uint32(m[4:]) != ifindex ||
				binary.NativeEndian.Uint32(m[12:]) != netlink.HANDLE_CLSACT {
				return
			}
			rtnl.Attrs(m, nl.SizeofTcMsg, func(attr uint16, v []byte) {
				if attr == nl.TCA_KIND {
					kind = unix.ByteSliceToString(v)
				}
			})
		})
		return kind, err
	})
}

// mostLists is the maximum number of attempts to read a list that keeps changing.
const mostLists = 100

// whole repeats a listing that was interrupted by a change.
func whole[T any](list func() (T, error)) (all T, err error) {
	for range mostLists {
		if all, err = list(); !errors.Is(err, rtnl.ErrInterrupted) {
			return all, err
		}
	}
	return all, err
}

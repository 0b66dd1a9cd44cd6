// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package underlay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
	"github.com/sluice-net/sluice/services/datapath/internal/node/routing"
)

// Offsets in struct ndmsg and its size, and attributes of linux/neighbour.h.
const (
	sizeofNdmsg = 12
	ndmIfindex  = 4
	ndmState    = 8
	ndmFlags    = 10
	ndaProtocol = 12
	ndaFlagsExt = 15
	extManaged  = 1 // NTF_EXT_MANAGED, since Linux 5.16
)

// resolved are the states in which the kernel has a link address, or soon will.
const resolved = unix.NUD_REACHABLE | unix.NUD_STALE | unix.NUD_DELAY | unix.NUD_PROBE |
	unix.NUD_PERMANENT | unix.NUD_NOARP

func ndmsg(h hop, flags uint8) []byte {
	m := make([]byte, sizeofNdmsg)
	m[0], m[ndmFlags] = family(h.addr), flags
	binary.NativeEndian.PutUint32(m[ndmIfindex:], h.ifindex)
	return m
}

// neighbour is a neighbour entry of the kernel.
type neighbour struct {
	ifindex  uint32
	to       netip.Addr
	state    uint16
	managed  bool
	protocol uint8
}

func readNeighbour(m []byte) (n neighbour) {
	if len(m) < sizeofNdmsg {
		return n
	}
	n.ifindex = binary.NativeEndian.Uint32(m[ndmIfindex:])
	n.state = binary.NativeEndian.Uint16(m[ndmState:])
	rtnl.Attrs(m, sizeofNdmsg, func(kind uint16, v []byte) {
		switch {
		case kind == unix.NDA_DST:
			n.to = addrOf(v)
		case kind == ndaFlagsExt:
			n.managed = rtnl.Number(v)&extManaged != 0
		case kind == ndaProtocol && len(v) > 0:
			n.protocol = v[0]
		}
	})
	return n
}

// Resolve implements routing.Links. The kernel keeps managed entries resolved on its own; before Linux 5.16, resolution
// is requested again whenever an entry is missing. Permanent entries of others are not changed.
func (u *Underlay) Resolve(hops []routing.Nexthop) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if err := u.find(); err != nil {
		return err
	}
	want := map[hop]bool{}
	for _, h := range hops {
		want[hop{h.Ifindex, h.Via}] = true
	}
	var errs []error
	for h := range u.hops {
		if !want[h] {
			errs = append(errs, u.forget(h))
			delete(u.hops, h)
		}
	}
	for some := range slices.Chunk(slices.Collect(maps.Keys(want)), together) {
		var b rtnl.Batch
		for _, h := range some {
			getNeighbour(&b, h)
		}
		replies, err := u.conn.Exchange(&b)
		if err != nil {
			return errors.Join(append(errs, fmt.Errorf("look up neighbours: %w", err))...)
		}
		for i, h := range some {
			errs = append(errs, u.keep(h, readNeighbour(replies[i].Data)))
		}
	}
	return errors.Join(errs...)
}

// find looks once for neighbours that a previous process managed. The lock is held.
func (u *Underlay) find() error {
	if u.found {
		return nil
	}
	err := whole(func() error {
		var b rtnl.Batch
		b.Add(unix.RTM_GETNEIGH, 0, make([]byte, sizeofNdmsg))
		return u.conn.Dump(&b, func(m []byte) {
			if n := readNeighbour(m); n.protocol == Protocol && n.to.IsValid() {
				u.hops[hop{n.ifindex, n.to}] = n.managed
			}
		})
	})
	if err != nil {
		return fmt.Errorf("list neighbours: %w", err)
	}
	u.found = true
	return nil
}

func getNeighbour(b *rtnl.Batch, h hop) {
	b.Add(unix.RTM_GETNEIGH, 0, ndmsg(h, 0))
	b.Attr(unix.NDA_DST, h.addr.AsSlice())
}

// keep makes the kernel resolve a neighbour, unless it already does.
func (u *Underlay) keep(h hop, have neighbour) error {
	managed, known := u.hops[h]
	switch {
	case have.state&unix.NUD_PERMANENT != 0 && !have.managed:
		u.hops[h] = false
		return nil
	case have.managed:
		u.hops[h] = true
		return nil
	case known && !managed && have.state&resolved != 0:
		return nil
	}
	var b rtnl.Batch
	b.Add(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, ndmsg(h, unix.NTF_USE))
	b.For("resolve neighbour %v on device %d", h.addr, h.ifindex)
	b.Attr(unix.NDA_DST, h.addr.AsSlice())
	b.Attr(ndaProtocol, []byte{Protocol})
	b.Add(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, ndmsg(h, 0))
	b.Attr(unix.NDA_DST, h.addr.AsSlice())
	b.Attr(ndaProtocol, []byte{Protocol})
	b.Uint32(ndaFlagsExt, extManaged)
	replies, err := u.conn.Exchange(&b)
	if err != nil {
		return fmt.Errorf("resolve neighbour %v on device %d: %w", h.addr, h.ifindex, err)
	}
	u.hops[h] = replies[1].Err == nil
	if err := replies[0].Err; err != nil && replies[1].Err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("resolve neighbour %v on device %d: %w", h.addr, h.ifindex, err)
	}
	return nil
}

// forget stops keeping a neighbour resolved. It deletes the entry only if Sluice created it; the kernel resolves it
// again when needed.
func (u *Underlay) forget(h hop) error {
	have, err := u.neighbour(h)
	if err != nil || have.protocol != Protocol {
		return err
	}
	var b rtnl.Batch
	b.Add(unix.RTM_DELNEIGH, 0, ndmsg(h, 0))
	b.For("forget neighbour %v on device %d", h.addr, h.ifindex)
	b.Attr(unix.NDA_DST, h.addr.AsSlice())
	return u.conn.Do(&b, unix.ENOENT, unix.ENODEV)
}

func (u *Underlay) neighbour(h hop) (n neighbour, err error) {
	var b rtnl.Batch
	getNeighbour(&b, h)
	replies, err := u.conn.Exchange(&b)
	if err == nil {
		err = replies[0].Err
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
		return n, nil
	}
	if err != nil {
		return n, fmt.Errorf("look up neighbour %v on device %d: %w", h.addr, h.ifindex, err)
	}
	return readNeighbour(replies[0].Data), nil
}

// interesting reports whether events about a neighbour matter.
func (u *Underlay) interesting(ifindex uint32, a netip.Addr) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	_, ok := u.hops[hop{ifindex, a}]
	return ok
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Change is an event from the kernel. Exactly one of its fields is set.
type Change struct {
	// Ifindex: a device, its filters, qdiscs, neighbours or sysctls may have changed.
	Ifindex uint32
	// Addr: the route to a container's address may have changed.
	Addr netip.Addr
	// Addresses: addresses of the node changed.
	Addresses bool
	// Node: routing rules, the firewall or other node-wide state may have changed.
	Node bool
	// Everything: the socket overflowed, or one change implies others for which the kernel sends no
	// events.
	Everything bool
}

// routeGroups are the multicast groups of the route socket.
var routeGroups = []uint{
	unix.RTNLGRP_LINK, unix.RTNLGRP_TC, unix.RTNLGRP_NEIGH,
	unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV4_NETCONF,
	unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV6_NETCONF,
}

// watchBuffer is the size of a socket's receive buffer in bytes.
const watchBuffer = 1 << 20

// subscription holds the sockets of a Watch.
type subscription struct{ route, firewall *nl.NetlinkSocket }

func (n *Netdev) subscribe(buffer int) (s subscription, err error) {
	err = n.o.Home.Do(func() (err error) {
		if s.route, err = nl.Subscribe(unix.NETLINK_ROUTE, routeGroups...); err != nil {
			return err
		}
		s.firewall, err = nl.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
		return err
	})
	for _, sock := range s.sockets() {
		if err == nil {
			err = sock.SetReceiveBufferSize(buffer, true)
		}
		if err == nil {
			// so that Receive notices a closed socket
			err = sock.SetReceiveTimeout(&unix.Timeval{Usec: 100_000})
		}
	}
	if err != nil {
		s.close()
		return s, fmt.Errorf("subscribe to changes: %w", err)
	}
	return s, nil
}

func (s subscription) sockets() []*nl.NetlinkSocket {
	return slices.DeleteFunc([]*nl.NetlinkSocket{s.route, s.firewall}, func(sock *nl.NetlinkSocket) bool { return sock == nil })
}

func (s subscription) close() {
	for _, sock := range s.sockets() {
		sock.Close()
	}
}

// Subscribe starts to buffer kernel events for the next Watch, which begins with them. A caller
// that compares everything in between need not compare again.
func (n *Netdev) Subscribe() error {
	s, err := n.subscribe(watchBuffer)
	if err == nil {
		n.early = s
	}
	return err
}

// Watch calls handle for every change until ctx ends. The first change is Everything, because of changes before the
// subscription. If Subscribe was called, the first change is only Addresses, because no audit compares these
// completely. Equal changes that arrive while handle runs are merged. The same change is handled 8 times in a row and
// then every 100 ms (Everything: twice, then every 2 s), so that a fight with another program over a device neither
// consumes the CPU nor delays other repairs. If handle returns true, it is called again for the same change.
func (n *Netdev) Watch(ctx context.Context, handle func(Change) (again bool)) error {
	s, first := n.early, Change{Addresses: true}
	n.early = subscription{}
	if len(s.sockets()) == 0 {
		var err error
		if s, err = n.subscribe(watchBuffer); err != nil {
			return err
		}
		first = Change{Everything: true}
	}
	return n.watch(ctx, s, first, handle)
}

// watch is like Watch, but on open sockets, which it closes.
func (n *Netdev) watch(ctx context.Context, s subscription, first Change, handle func(Change) (again bool)) error {
	q := newQueue()
	q.put(first)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer s.close()
	failed := make(chan error, 2)
	wg.Go(func() { failed <- receive(ctx, s.route, q.put, Change{Everything: true}, n.changesOf) })
	wg.Go(func() {
		node := Change{Node: true}
		failed <- receive(ctx, s.firewall, q.put, node, func(syscall.NetlinkMessage) []Change { return []Change{node} })
	})
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-q.events:
		case <-timer.C:
		case err := <-failed:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
		ready, wait := q.take(time.Now())
		for _, c := range ready {
			if handle(c) {
				q.put(c)
			}
		}
		if wait > 0 {
			timer.Reset(wait)
		}
	}
}

type queue struct {
	events  chan struct{}
	mu      sync.Mutex
	order   []Change
	pending map[Change]bool // the set of order
	paces   map[Change]pace // guarded by mu; of recently handled changes
}

func newQueue() *queue {
	return &queue{events: make(chan struct{}, 1), pending: map[Change]bool{}, paces: map[Change]pace{}}
}

// maxChanges bounds the pending changes. If there are more, Everything replaces them and all changes
// that arrive before it is handled.
const maxChanges = 4096

func (q *queue) put(c Change) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pending[c] || q.pending[Change{Everything: true}] {
		return
	}
	if c.Everything || len(q.order) >= maxChanges {
		c = Change{Everything: true}
		q.order = nil
		clear(q.pending)
	}
	q.pending[c] = true
	q.order = append(q.order, c)
	select {
	case q.events <- struct{}{}:
	default:
	}
}

// take returns the changes that may be handled now, in order, and how long until the next one may
// be; 0 if none is left.
func (q *queue) take(now time.Time) (ready []Change, wait time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	var rest []Change
	for _, c := range q.order {
		p, w := q.paces[c].next(now, c.limit())
		if w > 0 {
			rest = append(rest, c)
			if wait == 0 || w < wait {
				wait = w
			}
			continue
		}
		q.paces[c] = p
		delete(q.pending, c)
		ready = append(ready, c)
	}
	q.order = rest
	if len(q.paces) > maxChanges {
		maps.DeleteFunc(q.paces, func(_ Change, p pace) bool { return p.idle(now) })
	}
	return ready, wait
}

// limit is the rate at which a change is handled: burst times in a row, then once per interval.
type limit struct {
	burst int
	every time.Duration
}

func (c Change) limit() limit {
	if c.Everything {
		return limit{burst: 2, every: 2 * time.Second}
	}
	return limit{burst: 8, every: 100 * time.Millisecond}
}

// pace is a token bucket, stored as the time at which it is full again.
type pace struct{ full time.Time }

// next takes a token, or returns the time until there is one.
func (p pace) next(now time.Time, l limit) (pace, time.Duration) {
	full := p.full
	if full.Before(now) {
		full = now
	}
	full = full.Add(l.every)
	if w := full.Sub(now) - time.Duration(l.burst)*l.every; w > 0 {
		return p, w
	}
	return pace{full}, 0
}

func (p pace) idle(now time.Time) bool { return !p.full.After(now) }

// receive passes the changes in a socket's messages to put. After an overflow of the socket, it passes all.
func receive(ctx context.Context, s *nl.NetlinkSocket, put func(Change), all Change, changes func(syscall.NetlinkMessage) []Change) error {
	for ctx.Err() == nil {
		msgs, _, err := s.Receive()
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOBUFS):
			// After an overflow, the kernel drops events without a further error until the socket
			// was empty once. A check before that would miss them.
			if err := drain(ctx, s.GetFd()); err != nil {
				return fmt.Errorf("receive changes: %w", err)
			}
			put(all)
			continue
		case err != nil:
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("receive changes: %w", err)
		}
		for _, m := range msgs {
			for _, c := range changes(m) {
				put(c)
			}
		}
	}
	return ctx.Err()
}

// maxDrain bounds the messages that drain discards. If the socket is not empty by then, it
// overflows again and is drained again.
const maxDrain = 1 << 16

// drain discards the messages that wait in a socket.
func drain(ctx context.Context, fd int) error {
	var b [1]byte // the rest of a message is discarded
	for range maxDrain {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		_, _, err := unix.Recvfrom(fd, b[:], unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR):
			return err
		}
	}
	return nil
}

// changesOf decodes a message of a route socket.
func (n *Netdev) changesOf(m syscall.NetlinkMessage) []Change {
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		if len(m.Data) < unix.SizeofIfInfomsg {
			return nil
		}
		if i := nl.DeserializeIfInfomsg(m.Data).Index; i != loopback {
			return []Change{{Ifindex: uint32(i)}}
		}
		return []Change{{Node: true}}
	case unix.RTM_NEWQDISC, unix.RTM_DELQDISC, unix.RTM_NEWTFILTER, unix.RTM_DELTFILTER:
		if len(m.Data) < nl.SizeofTcMsg {
			return nil
		}
		return []Change{{Ifindex: uint32(nl.DeserializeTcMsg(m.Data).Ifindex)}}
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		if m.Header.Type == unix.RTM_DELADDR && slices.Contains(n.o.Ranges.NodeAddrs(), addrAttr(m.Data, unix.SizeofIfAddrmsg, unix.IFA_ADDRESS)) {
			// The routes of all containers with this source address vanish with it.
			return []Change{{Everything: true}}
		}
		return []Change{{Addresses: true}}
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		return []Change{{Node: true}}
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		return n.routeChanges(m)
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		if n.ofContainer(addrAttr(m.Data, unix.SizeofNdMsg, unix.NDA_DST)) {
			return []Change{{Ifindex: binary.NativeEndian.Uint32(m.Data[ndmIfindex:])}}
		}
	case unix.RTM_NEWNETCONF:
		return n.netconfChanges(m.Data)
	}
	return nil
}

// loopback is the index of lo in every network namespace.
const loopback = 1

func (n *Netdev) ofContainer(a netip.Addr) bool {
	_, ok := n.o.Ranges.Of(a)
	return ok && !slices.Contains(n.o.Ranges.NodeAddrs(), a)
}

// routeChanges decodes a route message. It returns changes for the routes of containers and of pod
// ranges, for new default routes, whose devices may have rp_filter set, and for removed default
// routes, which change the node's underlay addresses. It ignores all other routes.
func (n *Netdev) routeChanges(m syscall.NetlinkMessage) []Change {
	if len(m.Data) < unix.SizeofRtMsg {
		return nil
	}
	head, added := nl.DeserializeRtMsg(m.Data), m.Header.Type == unix.RTM_NEWROUTE
	if added && head.Protocol == Protocol {
		return nil // added by this process
	}
	if head.Dst_len == 0 {
		switch {
		case head.Table != unix.RT_TABLE_MAIN:
			return nil
		case !added:
			return []Change{{Addresses: true}}
		}
		return []Change{{Node: true}}
	}
	dst := netip.PrefixFrom(addrAttr(m.Data, unix.SizeofRtMsg, unix.RTA_DST), int(head.Dst_len))
	switch {
	case dst.IsSingleIP() && n.ofContainer(dst.Addr()):
		return []Change{{Addr: dst.Addr()}}
	case slices.Contains(n.o.Ranges.All(), dst):
		return []Change{{Node: true}}
	}
	return nil
}

// Attributes of linux/netconf.h.
const (
	sizeofNetconfmsg = 4
	netconfIfindex   = 1
	netconfRPFilter  = 3
)

// netconfChanges decodes a change of one sysctl, of a device or of "all". A message with several
// sysctls announces a new device and is not a change.
func (n *Netdev) netconfChanges(data []byte) []Change {
	if len(data) < sizeofNetconfmsg {
		return nil
	}
	attrs, err := nl.ParseRouteAttr(data[sizeofNetconfmsg:])
	if err != nil {
		return nil
	}
	index, values, filter := int32(0), 0, false
	for _, a := range attrs {
		if a.Attr.Type != netconfIfindex {
			values++
			filter = filter || a.Attr.Type == netconfRPFilter
		} else if len(a.Value) >= 4 {
			index = int32(binary.NativeEndian.Uint32(a.Value))
		}
	}
	switch {
	case values != 1:
		return nil
	case index <= 0: // "all", or the values that new devices get
		return []Change{{Node: true}}
	case filter && !n.isHostEnd(index): // perhaps an uplink's
		return []Change{{Node: true}}
	}
	return []Change{{Ifindex: uint32(index)}}
}

// isHostEnd reports whether a device is in the group of this instance. Every creation of an
// endpoint writes rp_filter of its host end, which need not trigger a check of the node.
func (n *Netdev) isHostEnd(index int32) bool {
	link, err := n.reads.LinkByIndex(int(index))
	return err == nil && link.Attrs().Group&^1 == n.group
}

// addrAttr returns the address in an attribute; the zero Addr if it is missing.
func addrAttr(data []byte, head int, kind uint16) netip.Addr {
	if len(data) < head {
		return netip.Addr{}
	}
	attrs, err := nl.ParseRouteAttr(data[head:])
	if err != nil {
		return netip.Addr{}
	}
	for _, a := range attrs {
		if a.Attr.Type == kind {
			addr, _ := netip.AddrFromSlice(a.Value)
			return addr.Unmap()
		}
	}
	return netip.Addr{}
}

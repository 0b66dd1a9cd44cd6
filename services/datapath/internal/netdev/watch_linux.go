// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Change is news from the kernel. One of its fields is set.
type Change struct {
	// Ifindex: a device, or its filters and qdiscs, may have changed.
	Ifindex uint32
	// Addresses: some of the node's own changed.
	Addresses bool
	// Node: routing rules or the firewall may have changed.
	Node bool
	// Everything: the kernel had more news than the socket could hold.
	Everything bool
}

// Watch calls handle for every change, in order, until ctx ends; first with
// Everything, for what changed before the subscription. News of the same thing
// that come while handle works are merged into one.
func (n *Netdev) Watch(ctx context.Context, handle func(Change)) error {
	var route, firewall *nl.NetlinkSocket
	err := n.o.Home.Do(func() (err error) {
		route, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_TC, unix.RTNLGRP_IPV4_IFADDR,
			unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE)
		if err != nil {
			return err
		}
		firewall, err = nl.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
		if err != nil {
			route.Close()
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("subscribe to changes: %w", err)
	}
	q := &queue{news: make(chan struct{}, 1), pending: map[Change]bool{}}
	q.put(Change{Everything: true})
	var wg sync.WaitGroup
	defer wg.Wait()
	defer route.Close()
	defer firewall.Close()
	failed := make(chan error, 2)
	for _, s := range []*nl.NetlinkSocket{route, firewall} {
		// so that closing the socket ends a Receive
		if err := s.SetReceiveTimeout(&unix.Timeval{Usec: 100_000}); err != nil {
			return fmt.Errorf("subscribe to changes: %w", err)
		}
		wg.Go(func() { failed <- receive(ctx, s, s == firewall, q) })
	}
	for {
		select {
		case <-q.news:
			for _, c := range q.take() {
				handle(c)
			}
		case err := <-failed:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

type queue struct {
	news    chan struct{}
	mu      sync.Mutex
	order   []Change
	pending map[Change]bool // what is in order
}

// maxChanges is how many changes wait; more become Everything, which stands for
// all of them, and for those that come before it is handled.
const maxChanges = 4096

func (q *queue) put(c Change) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pending[c] || q.pending[Change{Everything: true}] {
		return
	}
	if len(q.order) >= maxChanges {
		c = Change{Everything: true}
		q.order = nil
		clear(q.pending)
	}
	q.pending[c] = true
	q.order = append(q.order, c)
	select {
	case q.news <- struct{}{}:
	default:
	}
}

func (q *queue) take() []Change {
	q.mu.Lock()
	defer q.mu.Unlock()
	order := q.order
	q.order = nil
	clear(q.pending)
	return order
}

func receive(ctx context.Context, s *nl.NetlinkSocket, firewall bool, q *queue) error {
	for ctx.Err() == nil {
		msgs, _, err := s.Receive()
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOBUFS):
			q.put(Change{Everything: true})
			continue
		case err != nil:
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("receive changes: %w", err)
		}
		for _, m := range msgs {
			if firewall {
				q.put(Change{Node: true})
				continue
			}
			if c, ok := changeOf(m); ok {
				q.put(c)
			}
		}
	}
	return ctx.Err()
}

func changeOf(m syscall.NetlinkMessage) (Change, bool) {
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		if len(m.Data) < unix.SizeofIfInfomsg {
			return Change{}, false
		}
		return Change{Ifindex: uint32(nl.DeserializeIfInfomsg(m.Data).Index)}, true
	case unix.RTM_NEWQDISC, unix.RTM_DELQDISC, unix.RTM_NEWTFILTER, unix.RTM_DELTFILTER:
		if len(m.Data) < nl.SizeofTcMsg {
			return Change{}, false
		}
		return Change{Ifindex: uint32(nl.DeserializeTcMsg(m.Data).Ifindex)}, true
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		return Change{Addresses: true}, true
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		return Change{Node: true}, true
	}
	return Change{}, false
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package firewall

import (
	"encoding/binary"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// others are the ranges and addresses of other nodes.
type others struct {
	ranges []netip.Prefix
	nodes  []netip.Addr
}

// A plan is the desired content of the table at one moment. The ranges of the node change over time.
type plan struct {
	settings
	sets []set
}

func (t *Table) plan() plan {
	s := t.settings()
	if f := s.routing; f != nil && !f.Native && !s.tracked && (s.masquerade != nil || t.tracks()) {
		s.tracked = true
		t.mu.Lock()
		t.set.tracked = true
		t.mu.Unlock()
	}
	return plan{s, s.sets()}
}

// tracks reports whether the kernel tracks connections of the node. The kernel does so once a rule of any table needs
// connection tracking. From then on there is at least one conntrack entry, for the tunnel, so the count is not 0.
func (t *Table) tracks() (tracks bool) {
	_ = t.home.Do(func() error {
		count, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		// Without the file, the kernel has no connection tracking.
		tracks = err == nil && strings.TrimSpace(string(count)) != "0"
		return nil
	})
	return tracks
}

// SetOthers sets the pod ranges and addresses of other nodes. It writes the changed set elements in one transaction, so
// a packet sees either the old sets or the new ones. Without changes it writes nothing. If the table differs in
// anything else, it is repaired. Without a masquerade or routing between nodes, SetOthers writes nothing.
func (t *Table) SetOthers(ranges []netip.Prefix, nodes []netip.Addr) error {
	// Held until the table is written, so that Check does not report the pending change as a difference.
	t.kernel.Lock()
	defer t.kernel.Unlock()
	t.mu.Lock()
	t.set.others = &others{slices.Clone(ranges), slices.Clone(nodes)}
	t.mu.Unlock()
	p := t.plan()
	if p.masquerade == nil && p.routing == nil {
		return nil
	}
	generation := t.generation()
	d, known := t.sinceSeen(p, generation)
	if !known {
		var err error
		if d, err = t.compare(p, generation); err != nil {
			return err
		}
	}
	if d == nil || len(d.changes) > 0 && t.change(p, d.changes, generation) == nil {
		return nil
	}
	// This also repairs the table if another process has changed the sets since they were read.
	return t.repair(p)
}

// change writes changes of sets, which were read at the generation, in one transaction.
func (t *Table) change(p plan, changes []change, generation uint32) error {
	t.seen = nil
	err := t.conn(func(c *nftables.Conn) error {
		for _, ch := range changes {
			if err := ch.write(c, t.table()); err != nil {
				return err
			}
		}
		return c.Flush()
	})
	if err == nil {
		t.remember(p, generation, 1)
	}
	return err
}

// seen is a plan that the table was equal to, at a generation of the kernel's ruleset.
type seen struct {
	plan       plan
	generation uint32
}

// remember records that the table equals the plan. It does so only if the ruleset generation grew by exactly ours, the
// number of our own transactions, so that no other process changed the ruleset.
func (t *Table) remember(p plan, generation, ours uint32) {
	t.seen = nil
	if now := t.generation(); generation != 0 && now == generation+ours {
		t.seen = &seen{p, now}
	}
}

// sinceSeen computes the difference between the table and a plan without reading the table. known is false if another
// process may have changed the table since this process last knew its content.
func (t *Table) sinceSeen(p plan, generation uint32) (d *difference, known bool) {
	last := t.seen
	if last == nil || generation == 0 || last.generation != generation ||
		last.plan.masquerade != p.masquerade || last.plan.routing != p.routing {
		return nil, false
	}
	for i, have := range last.plan.sets { // the settings are the same, so the sets are, too
		d = d.and(have.change(p.sets[i]))
	}
	return d, true
}

// generation returns the ruleset generation, which each transaction in the namespace increments; 0: unknown. Then the
// only cost is that the table is read again.
func (t *Table) generation() uint32 {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: t.home.Fd()})
	if err != nil {
		return 0
	}
	defer c.Close()
	answers, err := c.Execute(netlink.Message{
		Header: netlink.Header{
			Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: netlink.Request,
		},
		Data: []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0},
	})
	const header = 4
	if err != nil || len(answers) != 1 || len(answers[0].Data) < header {
		return 0
	}
	attributes, err := netlink.NewAttributeDecoder(answers[0].Data[header:])
	if err != nil {
		return 0
	}
	attributes.ByteOrder = binary.BigEndian
	for attributes.Next() {
		if attributes.Type() == unix.NFTA_GEN_ID {
			return attributes.Uint32()
		}
	}
	return 0
}

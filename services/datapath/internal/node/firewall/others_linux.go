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

// A plan is what the table is to hold at one moment: the ranges of the node come and go.
type plan struct {
	settings
	sets []set
}

func (t *Table) plan() plan {
	s := t.settings()
	if f := s.fabric; f != nil && !f.Native && !s.tracked && (s.masquerade != nil || t.tracks()) {
		s.tracked = true
		t.mu.Lock()
		t.set.tracked = true
		t.mu.Unlock()
	}
	return plan{s, s.sets()}
}

// tracks says whether the kernel tracks connections of the node, which it does as soon
// as a rule of anybody asks for it: then it knows some, if only those of the tunnel.
func (t *Table) tracks() (tracks bool) {
	_ = t.home.Do(func() error {
		count, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		// Without the file there is no connection tracking.
		tracks = err == nil && strings.TrimSpace(string(count)) != "0"
		return nil
	})
	return tracks
}

// SetOthers says which pod ranges other nodes have, and by which addresses they are
// reached. One transaction writes the elements of sets that differ from it, and a packet
// meets the sets of before or those of after; if none differ, nothing is written. A table
// that differs otherwise is repaired. Without a masquerade or a fabric there is nothing
// to do.
func (t *Table) SetOthers(ranges []netip.Prefix, nodes []netip.Addr) error {
	// Held from before the table is to be another until it is: Check finds no difference.
	t.kernel.Lock()
	defer t.kernel.Unlock()
	t.mu.Lock()
	t.set.others = &others{slices.Clone(ranges), slices.Clone(nodes)}
	t.mu.Unlock()
	p := t.plan()
	if p.masquerade == nil && p.fabric == nil {
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
	// Also if another wrote to the sets after they were read.
	return t.repair(p)
}

// change writes what sets lack or have too many, in one transaction. They were looked
// at in a generation.
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

// seen is a plan that the table was like, and the generation of the kernel's tables in
// which it was.
type seen struct {
	plan       plan
	generation uint32
}

// remember notes that the table is like the plan if no transaction but so many of ours
// has run since a generation.
func (t *Table) remember(p plan, generation, ours uint32) {
	t.seen = nil
	if now := t.generation(); generation != 0 && now == generation+ours {
		t.seen = &seen{p, now}
	}
}

// sinceSeen is how the table differs from a plan, without a look at it: known if it has
// been like another since which no transaction has run.
func (t *Table) sinceSeen(p plan, generation uint32) (d *difference, known bool) {
	last := t.seen
	if last == nil || generation == 0 || last.generation != generation ||
		last.plan.masquerade != p.masquerade || last.plan.fabric != p.fabric {
		return nil, false
	}
	for i, have := range last.plan.sets { // by the same settings, so they are the same ones
		d = d.and(have.change(p.sets[i]))
	}
	return d, true
}

// generation is what each transaction of the namespace raises by 1; 0: not known.
// Nothing is lost then but time.
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

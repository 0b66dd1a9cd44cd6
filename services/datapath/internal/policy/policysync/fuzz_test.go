// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
)

// drawn is a source of small numbers.
type drawn []byte

func (d *drawn) next(n int) int {
	if len(*d) == 0 {
		return 0
	}
	b := (*d)[0]
	*d = (*d)[1:]
	return int(b) % n
}

func (d *drawn) ranges() (out policytable.Ranges) {
	for range d.next(4) {
		first := uint32(d.next(8)) << 28
		out = append(out, policytable.PortRange{
			First: first, Last: first + uint32(d.next(3))<<28, Admin: uint16(d.next(3)), Rest: uint16(d.next(3)),
		})
	}
	return out
}

func (d *drawn) step() policytable.Step {
	switch d.next(13) {
	case 0:
		return policytable.DefineIdentityClass{IdentityClass: policytable.IdentityClass(d.next(5)), Key: policytable.ClassKey{byte(d.next(4))}}
	case 1:
		return policytable.RetireIdentityClass{IdentityClass: policytable.IdentityClass(d.next(5))}
	case 2:
		return policytable.SetIdentity{Identity: identity.Numeric(300 + d.next(4)), IdentityClass: policytable.IdentityClass(d.next(5)), Kind: identity.Kind(d.next(9)), Scope: identity.PeerScope(d.next(4))}
	case 3:
		st := policytable.DefineTable{Table: policytable.ID(d.next(5)), Content: policytable.Table{Hash: [32]byte{byte(d.next(4))}}}
		st.Content.HasAddresses = d.next(2) == 0
		for range d.next(3) {
			st.Content.Rules = append(st.Content.Rules, policytable.Rule{Action: policytable.Action(d.next(5)), Tier: policytable.Tier(d.next(4))})
		}
		for range 1 + d.next(3) {
			st.Content.Classes = append(st.Content.Classes, d.ranges())
		}
		st.Content.DefaultClasses[d.next(8)] = uint16(d.next(3))
		for range d.next(3) {
			st.Peers = append(st.Peers, policytable.Row{IdentityClass: policytable.IdentityClass(d.next(5)), Class: uint16(d.next(3))})
		}
		return st
	case 4:
		st := policytable.GrowTable{Table: policytable.ID(d.next(5))}
		for range d.next(3) {
			st.Classes = append(st.Classes, d.ranges())
		}
		return st
	case 5:
		return policytable.RetireTable{Table: policytable.ID(d.next(5))}
	case 6, 7:
		table, row := policytable.ID(d.next(5)), policytable.Row{IdentityClass: policytable.IdentityClass(d.next(5)), Class: uint16(d.next(4))}
		if d.next(2) == 0 {
			return policytable.DeletePeer{Table: table, IdentityClass: row.IdentityClass}
		}
		return policytable.SetPeer{Table: table, Row: row}
	case 8:
		prefix := []netip.Prefix{{}, netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.0.0.1/8"), netip.MustParsePrefix("fd00::/8")}[d.next(4)]
		table, classes := policytable.ID(d.next(5)), policytable.PrefixClasses{uint16(d.next(4))}
		if d.next(2) == 0 {
			return policytable.DeletePrefix{Table: table, Prefix: prefix}
		}
		return policytable.SetPrefix{Table: table, Prefix: prefix, Classes: classes}
	case 9, 10:
		return policytable.BindSubject{Subject: identity.Numeric(300 + d.next(2)), Direction: policytable.Direction(d.next(3)), Table: policytable.ID(d.next(5))}
	case 11:
		return policytable.RemoveSubject{Subject: identity.Numeric(300 + d.next(2))}
	}
	return policytable.Barrier{PolicyRevision: uint64(d.next(9))}
}

// FuzzSteps: invalid steps are rejected before anything is written: the kernel never has to reject one, and nothing
// panics. Afterwards a valid snapshot repairs everything.
func FuzzSteps(f *testing.F) {
	f.Add([]byte{0, 1, 1, 2, 0, 1, 0, 0, 3, 1, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 1, 9, 0, 1, 1, 11, 0})
	f.Add([]byte("steps that make no sense are refused before they are written"))
	good := testStates()[2]
	f.Fuzz(func(t *testing.T, b []byte) {
		d := drawn(b)
		k := scene()
		a := start(t, k)
		seq := uint64(1)
		m := policytable.Message{Incarnation: "fuzz", Seq: seq}
		if d.next(2) == 0 {
			m.Steps = append(m.Steps, policytable.SnapshotComplete{})
		}
		for i := 0; len(d) > 0 && i < 200; i++ {
			m.Steps = append(m.Steps, d.step())
			if d.next(4) == 0 && i > 3 {
				m.Steps = append(m.Steps, policytable.SnapshotComplete{})
				break
			}
		}
		if _, err := a.load(m); err != nil && !errors.Is(err, policytable.ErrInvalid) {
			t.Fatalf("%v: %+v", err, m.Steps)
		}
		if err := a.again(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := start(t, k).load(newService(2).snapshot(good)); err != nil {
			t.Fatal(err)
		}
		qs := questions(k)
		same(t, "afterwards", qs, k.answers(qs), good.answers(k, qs))
		nothingLeft(t, k, good)
	})
}

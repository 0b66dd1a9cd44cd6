// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"errors"
	"net/netip"
	"testing"
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

func (d *drawn) node() (n Node) {
	n = leaf(noAdmin<<16 | noRest)
	for i := range d.next(4) {
		n.High[i] = uint32(d.next(8)) << 28
		n.Value[i] = []uint32{child, child | 1, child | 9, noAdmin<<16 | 1, 1<<16 | noRest, 0}[d.next(6)]
	}
	return n
}

func (d *drawn) step() Step {
	switch d.next(13) {
	case 0:
		return NodeClassDefine{uint32(d.next(5)), ClassKey{byte(d.next(4))}}
	case 1:
		return NodeClassRetire{uint32(d.next(5))}
	case 2:
		return IdentityUpdate{uint32(300 + d.next(4)), uint32(d.next(5)), uint8(d.next(9)), uint8(d.next(4))}
	case 3:
		st := TableDefine{Table: uint64(d.next(5)), Content: Content{Hash: [32]byte{byte(d.next(4))}}}
		st.Content.HasAddresses = d.next(2) == 0
		for range d.next(3) {
			st.Content.Rules = append(st.Content.Rules, Rule{Action: uint8(d.next(5)), Tier: uint8(d.next(4))})
		}
		for range 1 + d.next(3) {
			st.Content.Nodes = append(st.Content.Nodes, d.node())
		}
		for range 1 + d.next(3) {
			st.Content.Classes = append(st.Content.Classes, uint32(d.next(4)))
		}
		st.Content.DefaultClasses[d.next(8)] = uint16(d.next(3))
		for range d.next(3) {
			st.Peers = append(st.Peers, Row{uint32(d.next(5)), uint16(d.next(3))})
		}
		return st
	case 4:
		st := TableGrow{Table: uint64(d.next(5))}
		for range d.next(3) {
			st.Nodes = append(st.Nodes, d.node())
		}
		for range d.next(3) {
			st.Classes = append(st.Classes, uint32(d.next(6)))
		}
		return st
	case 5:
		return TableRetire{uint64(d.next(5))}
	case 6, 7:
		return PeerUpdate{uint64(d.next(5)), Row{uint32(d.next(5)), uint16(d.next(4))}, d.next(2) == 0}
	case 8:
		prefix := []netip.Prefix{{}, netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.0.0.1/8"), netip.MustParsePrefix("fd00::/8")}[d.next(4)]
		return AddressUpdate{uint64(d.next(5)), prefix, [Scopes]uint16{uint16(d.next(4))}, d.next(2) == 0}
	case 9, 10:
		return Bind{Subject: uint32(300 + d.next(2)), Direction: Direction(d.next(3)), Table: uint64(d.next(5))}
	case 11:
		return SubjectGone{uint32(300 + d.next(2))}
	}
	return Barrier{PolicyRevision: uint64(d.next(9))}
}

// Steps that make no sense are refused before they are written: the kernel
// never has to refuse one, and nothing panics. Afterwards a good snapshot puts
// everything right.
func FuzzSteps(f *testing.F) {
	f.Add([]byte{0, 1, 1, 2, 0, 1, 0, 0, 3, 1, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 1, 9, 0, 1, 1, 11, 0})
	f.Add([]byte("steps that make no sense are refused before they are written"))
	good := testStates()[2]
	f.Fuzz(func(t *testing.T, b []byte) {
		d := drawn(b)
		k := scene()
		a := start(t, k)
		seq := uint64(1)
		m := Message{Incarnation: "fuzz", Seq: seq}
		if d.next(2) == 0 {
			m.Steps = append(m.Steps, SnapshotComplete{})
		}
		for i := 0; len(d) > 0 && i < 200; i++ {
			m.Steps = append(m.Steps, d.step())
			if d.next(4) == 0 && i > 3 {
				m.Steps = append(m.Steps, SnapshotComplete{})
				break
			}
		}
		if _, err := a.load(m); err != nil && !errors.Is(err, ErrInvalid) {
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

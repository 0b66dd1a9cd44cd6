// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"errors"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
	"github.com/sluice-net/sluice/services/datapath/internal/service/idalloc"
)

// gather moves lists to make contiguous space for frontends that were refused because of fragmentation. The old
// elements of moved lists become free after a grace period.
//
// Without it, a tenant that creates many short lists and removes most of them would leave no contiguous space for the
// longer lists of others.
func (a *application) gather() {
	s := a.s
	sum, longest, table := 0, 0, 0
	for _, r := range a.res.Refused {
		room, ok := errors.AsType[*frontendtx.NoRoomError](r.Err)
		switch {
		case !ok || room.Map != bpf.MapsMapSlMember:
		case room.Aligned:
			table = max(table, room.Run)
		default:
			sum, longest = sum+room.Run, max(longest, room.Run)
		}
	}
	var of idalloc.Run // the table
	if table > 0 {
		of, _ = s.gather(table, true, of)
	}
	if sum == 0 {
		return
	}
	at, ok := s.gather(min(sum, quarter(s.nMembers)), false, of)
	if !ok {
		at, ok = s.gather(longest, false, of)
	}
	if ok {
		s.members.LookFrom(at.Base)
	}
}

// States of an element of sl_member in gather.
const (
	stuck   = iota // belongs to a table, or to a list that programs may still use
	movable        // belongs to a list without a table
	leaving        // free after the next grace period
	vacant
	uses
)

// gather moves lists without tables so that n consecutive elements are free after a grace period. It selects the run
// of n elements that needs the fewest moves and has no element of but. If aligned is set, the distance of the run
// from the end of the map is a multiple of n. It returns false if there is no such run.
func (s *store) gather(n int, aligned bool, but idalloc.Run) (idalloc.Run, bool) {
	use := make([]byte, s.nMembers)
	mark := func(run idalloc.Run, as byte) {
		for i := range run.N {
			use[run.Base+i] = as
		}
	}
	for _, run := range s.members.Spans() {
		mark(run, vacant)
	}
	for _, run := range s.left.spans {
		mark(run, leaving)
	}
	for _, ls := range s.lists {
		for _, l := range ls {
			if l.table == nil {
				mark(l.span, movable)
			}
		}
	}
	mark(but, stuck)
	var in [uses]int // of the run
	best, fewest := idalloc.Run{}, n+1
	for i, u := range use {
		in[u]++
		if i >= n {
			in[use[i-n]]--
		}
		at := idalloc.Run{Base: i + 1 - n, N: n}
		if at.Base < 0 || aligned && (s.nMembers-at.End())%n != 0 || in[stuck] > 0 || in[movable] >= fewest ||
			in[movable] > s.members.Free()-in[vacant] {
			continue
		}
		best, fewest = at, in[movable]
	}
	if fewest > n || !s.vacate(best, but) {
		return idalloc.Run{}, false
	}
	return best, true
}

// vacate moves the lists in run to elements that are neither in run nor in but. It returns false if they do not fit.
func (s *store) vacate(run, but idalloc.Run) bool {
	var kept []idalloc.Run // free elements to which no list may be moved
	for _, free := range s.members.Spans() {
		for _, r := range []idalloc.Run{run, but} {
			if base, end := max(free.Base, r.Base), min(free.End(), r.End()); base < end {
				kept = append(kept, idalloc.Run{Base: base, N: end - base})
			}
		}
	}
	for _, free := range kept {
		s.members.TakeAt(free)
	}
	moves := map[*list]idalloc.Run{}
	fits := true
	for _, ls := range s.lists {
		for _, l := range ls {
			if fits && l.span.Base < run.End() && run.Base < l.span.End() {
				if moves[l], fits = s.members.Take(l.span.N); !fits {
					delete(moves, l)
				}
			}
		}
	}
	for _, free := range kept {
		s.members.Give(free)
	}
	if !fits {
		for _, to := range moves {
			s.members.Give(to)
		}
		return false
	}
	for l, to := range moves {
		s.left.spans = append(s.left.spans, l.span)
		l.span = to
		for i := range to.N {
			s.storeMember(to.Base+i, l.element(i))
		}
	}
	for _, f := range s.fronts {
		if f == nil || f.list == nil {
			continue
		}
		if _, moved := moves[f.list]; moved {
			s.storeFrontWord(f.number, listWord, f.listWord())
		}
	}
	return true
}

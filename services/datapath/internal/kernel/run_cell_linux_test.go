// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"bytes"
	"reflect"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// fillRunCells fills the per-CPU memory of the programs' runs with a byte, on every CPU.
func (r runner) fillRunCells(t testing.TB, with byte) {
	t.Helper()
	m := r.k.Pins.Map(bpf.MapsMapSlRun)
	cpus, err := ebpf.PossibleCPU()
	must(t, "count CPUs", err)
	values := make([]bpf.MapsSlRunCell, cpus)
	for i := range values {
		for j := range values[i].Word {
			values[i].Word[j] = 0x0101010101010101 * uint64(with)
		}
	}
	for at := range m.MaxEntries() {
		// in place: no program runs meanwhile
		must(t, "fill a cell", m.Put(at, values))
	}
}

// TestKernelRunsDoNotInheritFromEarlierPackets: data of an earlier packet in per-CPU memory does not affect the next
// packet: result and event are the same with any contents.
func TestKernelRunsDoNotInheritFromEarlierPackets(t *testing.T) {
	r, cast := newStage(t)
	events, err := r.k.Events.Read()
	must(t, "Events", err)
	defer events.Close()
	for _, l := range lives() {
		prog, ctx := program.FromPod, skbContext{Ifindex: 1, Mark: l.mark}
		if l.to {
			prog = program.ToPod
		}
		for who, p := range l.policies {
			setPolicy(t, r.k, cast[who].Slot, p)
		}
		var outcomes []outcome
		var told [][]event.Event
		for _, left := range []byte{0, 0xff, 0x5a} {
			r.forget(t)
			if l.before != nil {
				r.run(t, prog, l.before, ctx, 0)
			}
			drain(t, events)
			r.fillRunCells(t, left)
			outcomes = append(outcomes, r.run(t, prog, l.in, ctx, 0))
			got := drain(t, events)
			told = append(told, got)
		}
		for who := range l.policies {
			setPolicy(t, r.k, cast[who].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow})
		}
		for i := range outcomes[1:] {
			a, b := outcomes[0], outcomes[i+1]
			if a.verdict != b.verdict || a.reason != b.reason || a.direction != b.direction || a.mark != b.mark || !bytes.Equal(a.out, b.out) {
				t.Errorf("%s: %v %v, verdict %d, mark %#x; over other memory %v %v, verdict %d, mark %#x", l.name,
					a.reason, a.direction, a.verdict, a.mark, b.reason, b.direction, b.verdict, b.mark)
			}
			if !sameEvents(told[0], told[i+1]) {
				t.Errorf("%s: events\n%+v\nover other memory\n%+v", l.name, told[0], told[i+1])
			}
		}
	}
}

// sameEvents compares events except for their times.
func sameEvents(a, b []event.Event) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		x, y := a[i], b[i]
		x.Time = y.Time
		if !reflect.DeepEqual(x, y) {
			return false
		}
	}
	return true
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kerneltest

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// Evaluator runs the programs' function that evaluates a policy table, in isolation.
type Evaluator struct {
	prog *ebpf.Program
}

// NewEvaluator loads the function with the maps of an instance.
func NewEvaluator(t testing.TB, pm *pin.Maps) Evaluator {
	t.Helper()
	spec, err := bpf.LoadJudge()
	if err != nil {
		t.Fatalf("read the compiled program sluice_judge: %v", err)
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		MapReplacements: pm.For(spec), Cache: btf.NewCache(),
	})
	if err != nil {
		t.Fatalf("load sluice_judge: %v", err)
	}
	t.Cleanup(coll.Close)
	return Evaluator{coll.Programs["sluice_judge"]}
}

// Ask appends the question to an Ethernet header, runs the function, and reads the answer after the question.
func (j Evaluator) Ask(t testing.TB, q bpf.MapsSlQuestion) (event.Reason, bpf.MapsSlSide) {
	t.Helper()
	in, err := binary.Append(make([]byte, 14), binary.NativeEndian, q)
	if err != nil {
		t.Fatalf("encode the question: %v", err)
	}
	at := len(in)
	in = append(in, make([]byte, binary.Size(bpf.MapsSlAnswer{}))...)
	opts := &ebpf.RunOptions{Data: in, DataOut: make([]byte, len(in)+256)}
	verdict, err := j.prog.Run(opts)
	if err != nil || verdict != 0 {
		t.Fatalf("run sluice_judge: it returns %d, %v", verdict, err)
	}
	var answer bpf.MapsSlAnswer
	if _, err := binary.Decode(opts.DataOut[at:], binary.NativeEndian, &answer); err != nil {
		t.Fatalf("decode the answer: %v", err)
	}
	return event.Reason(answer.Reason), answer.Side
}

// Question returns a question about a peer to an ingress table.
func Question(table nodetable.ID, peer identity.Numeric, addr netip.Addr, proto uint8, port uint16) bpf.MapsSlQuestion {
	q := bpf.MapsSlQuestion{
		Identity:  uint32(peer),
		Point:     uint32(proto)<<16 | uint32(port),
		Table:     uint16(table),
		Family:    6,
		Direction: uint8(event.Ingress),
	}
	copy(q.Addr[:], addr.AsSlice())
	if addr.Is4() {
		q.Family = 4
	}
	return q
}

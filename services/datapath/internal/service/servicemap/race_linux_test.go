// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"encoding/binary"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// chooser returns a program that slowly follows a front to one of its backends, as the programs of services do, and
// returns the address; 1: the backend is free.
func chooser(t *testing.T, i *instance, number uint32) *ebpf.Program {
	t.Helper()
	lookup := func(name string, key asm.Register) asm.Instructions {
		return asm.Instructions{
			asm.StoreMem(asm.RFP, -4, key, asm.Word),
			asm.LoadMapPtr(asm.R1, i.pins.Map(name).FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "missing"),
		}
	}
	ins := asm.Instructions{asm.Mov.Imm32(asm.R3, int32(number))}
	ins = append(ins, lookup(bpf.MapsMapSlFront, asm.R3)...)
	ins = append(ins, asm.LoadMem(asm.R6, asm.R0, 0, asm.DWord))
	for range 100 { // the longer it takes, the more can change meanwhile
		ins = append(ins, asm.FnGetPrandomU32.Call())
	}
	ins = append(ins,
		asm.Mov.Reg(asm.R7, asm.R6),
		asm.RSh.Imm(asm.R7, countShift),
		asm.And.Imm(asm.R7, maxCount),
		asm.JEq.Imm(asm.R7, 0, "missing"),
		asm.Mod.Reg32(asm.R0, asm.R7),
		asm.Mov.Reg(asm.R3, asm.R6),
		asm.And.Imm(asm.R3, baseMask),
		asm.Add.Reg(asm.R3, asm.R0),
	)
	ins = append(ins, lookup(bpf.MapsMapSlMember, asm.R3)...)
	ins = append(ins, asm.LoadMem(asm.R3, asm.R0, 0, asm.Word))
	ins = append(ins, lookup(bpf.MapsMapSlBe4, asm.R3)...)
	ins = append(ins,
		asm.LoadMem(asm.R6, asm.R0, 0, asm.DWord),
		asm.Mov.Reg32(asm.R0, asm.R6),
		asm.RSh.Imm(asm.R6, stateShift),
		asm.And.Imm(asm.R6, 0xff),
		asm.JNE.Imm(asm.R6, backendFree, "end"),
		asm.Mov.Imm(asm.R0, 1),
		asm.Ja.Label("end"),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("missing"),
		asm.Return().WithSymbol("end"),
	)
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SocketFilter, Instructions: ins, License: "GPL"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// TestKernelListsFlipWhole changes a list at full speed while lists of other frontends reuse its elements and IDs.
func TestKernelListsFlipWhole(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), sizes{keys: 64, fronts: 64, members: 96, backends: 64})
	lists := [2]*frontend.List{listOf(false, 0, 1, 2, 3, 4, 5, 6, 7), listOf(false, 4, 5, 6, 7, 8, 9)}
	allowed := map[netip.Addr]bool{}
	for _, l := range lists {
		for _, b := range l.Backends {
			allowed[b.Addr()] = true
		}
	}
	f := service(1, false, lists[0])
	i.apply(t, state{f.Key: f}.all())
	choose := chooser(t, i, i.only(t, f.Key).Inside.Number)

	var asked atomic.Uint64
	var wrong sync.Map
	var reader sync.WaitGroup
	stop := make(chan struct{})
	reader.Go(func() {
		packet := make([]byte, 64)
		for {
			select {
			case <-stop:
				return
			default:
			}
			ret, err := choose.Run(&ebpf.RunOptions{Data: packet, Repeat: 20})
			if err != nil {
				wrong.Store(err, true)
				return
			}
			var b [4]byte
			binary.NativeEndian.PutUint32(b[:], ret)
			if a := netip.AddrFrom4(b); !allowed[a] {
				wrong.Store(a, true)
			}
			asked.Add(1)
		}
	})
	others := [2]*frontend.List{listOf(false, 20, 21, 22, 23, 24, 25), listOf(false, 30, 31, 32, 33, 34, 35, 36, 37)}
	flips := 0
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end) && !t.Failed(); flips++ {
		i.apply(t, state{f.Key: service(1, false, lists[flips%2])}.all())
		if err := i.Barrier(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := i.Collect(t.Context(), &users{}); err != nil {
			t.Fatal(err)
		}
		i.apply(t, state{clusterIP(2, false): service(2, false, others[flips%2])}.all())
	}
	close(stop)
	reader.Wait()
	wrong.Range(func(what, _ any) bool {
		t.Errorf("a packet was translated to %v", what)
		return true
	})
	t.Logf("%d flips, %d packets", flips, asked.Load())
	if flips < 20 || asked.Load() < 1000 {
		t.Error("too few to prove anything")
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-net/sluice/kit/servicetest"
)

// TestKernelGraceByMapWaitsForRunsThatHaveBegun runs a program for about ten milliseconds, and waits as on a
// kernel with nohz_full CPUs.
func TestKernelGraceByMapWaitsForRunsThatHaveBegun(t *testing.T) {
	state, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer state.Close()
	const begun, ended = 1, 2
	set := func(to int64) asm.Instructions {
		return asm.Instructions{asm.LoadMapValue(asm.R6, state.FD(), 0), asm.StoreImm(asm.R6, 0, to, asm.Word)}
	}
	// The verifier requires that the callback is static.
	function := func(name string, linkage btf.FuncLinkage, params ...btf.FuncParam) *btf.Func {
		result := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}
		return &btf.Func{Name: name, Linkage: linkage, Type: &btf.FuncProto{Return: result, Params: params}}
	}
	pointer := btf.FuncParam{Name: "ctx", Type: &btf.Pointer{Target: &btf.Void{}}}
	callback := asm.Instruction{OpCode: asm.LoadImmOp(asm.DWord), Dst: asm.R2, Src: asm.PseudoFunc, Constant: -1}
	steps := append(set(begun),
		asm.Mov.Imm(asm.R1, 1<<22), callback.WithReference("turn"),
		asm.Mov.Imm(asm.R3, 0), asm.Mov.Imm(asm.R4, 0), asm.FnLoop.Call())
	steps = append(append(steps, set(ended)...), asm.Mov.Imm(asm.R0, 0), asm.Return(),
		btf.WithFuncMetadata(asm.Mov.Imm(asm.R0, 0).WithSymbol("turn"), function("turn", btf.StaticFunc,
			btf.FuncParam{Name: "at", Type: &btf.Int{Name: "unsigned int", Size: 4}}, pointer)), asm.Return())
	steps[0] = btf.WithFuncMetadata(steps[0].WithSymbol("main"), function("main", btf.GlobalFunc, pointer))
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Instructions: steps, License: "GPL"})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	defer program.Close()
	for run := range 20 {
		if err := state.Put(uint32(0), uint32(0)); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			_, err := program.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
			done <- err
		}()
		read := func() (v uint32) {
			if err := state.Lookup(uint32(0), &v); err != nil {
				t.Fatal(err)
			}
			return v
		}
		servicetest.Eventually(t, "the program runs", func() bool { return read() != 0 })
		if err := graceByMap(); err != nil {
			t.Fatal(err)
		}
		if read() != ended {
			t.Errorf("run %d continues after the grace period", run)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf/asm"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
)

// frames returns the stack usage of each function of a program in bytes, and the functions that it calls.
func frames(t *testing.T, insns asm.Instructions) (bytes map[string]int, calls map[string][]string) {
	t.Helper()
	targets := map[string]bool{insns[0].Symbol(): true}
	for _, ins := range insns {
		if ins.IsFunctionCall() {
			targets[ins.Reference()] = true
		}
	}
	bytes, calls = map[string]int{}, map[string][]string{}
	in := ""
	for i, ins := range insns {
		if targets[ins.Symbol()] {
			in = ins.Symbol()
		}
		deep := 0
		switch class := ins.OpCode.Class(); {
		case ins.IsFunctionCall():
			calls[in] = append(calls[in], ins.Reference())
		case class.IsLoad() && ins.Src == asm.RFP, class.IsStore() && ins.Dst == asm.RFP:
			deep = -int(ins.Offset)
		case class.IsALU() && ins.OpCode.ALUOp() == asm.Mov && ins.Src == asm.RFP:
			// an address on the stack, computed by the next instruction
			if next := insns[i+1]; next.OpCode.ALUOp() == asm.Add && next.Dst == ins.Dst {
				deep = -int(next.Constant)
			}
		}
		bytes[in] = max(bytes[in], deep)
	}
	return bytes, calls
}

// deepest returns the chain of calls with the highest stack usage, with frames rounded up to 32 bytes.
func deepest(in string, bytes map[string]int, calls map[string][]string) (int, []string) {
	most, chain := 0, []string(nil)
	for _, callee := range calls[in] {
		if d, c := deepest(callee, bytes, calls); d > most {
			most, chain = d, c
		}
	}
	return most + (max(bytes[in], 1)+31)/32*32, append([]string{in}, chain...)
}

// stackLimit leaves one frame of the 512 bytes for the next change.
const stackLimit = 480

// TestProgramsFitIntoTheStackOfOldKernels: Linux limits all frames of a program together to 512 bytes, and older
// kernels round each frame up to 32 bytes: newer kernels accept programs that 6.1 rejects.
func TestProgramsFitIntoTheStackOfOldKernels(t *testing.T) {
	for _, row := range program.Table() {
		name := row.Name
		spec, err := row.Load()
		if err != nil {
			t.Fatal(err)
		}
		bytes, calls := frames(t, spec.Programs[name].Instructions)
		d, chain := deepest(name, bytes, calls)
		t.Logf("%s: %d bytes in %s", name, d, strings.Join(chain, " > "))
		least := 300
		if row.Devices == program.Sockets || row.Devices == program.ProxyNamespaces {
			least = 32 // they evaluate no policy
		}
		if d < least {
			t.Errorf("%s: %d bytes are too few to be true: %v", name, d, bytes)
		}
		if d > stackLimit {
			t.Errorf("%s: %d bytes of stack, at most %d, in %s: %v", name, d, stackLimit, strings.Join(chain, " > "), bytes)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// remover deletes connections of one map that have not changed since they were read. The kernel can delete many
// keys in one system call, but does not compare their values; a lookup and a deletion of each key would be two
// system calls. Therefore a program does both, about ten nanoseconds apart, for as many keys as its result has
// bits. It is not attached; the collector runs it.
type remover struct {
	mu      sync.Mutex
	program *ebpf.Program // guarded by mu; nil before the first use
	input   []byte        // guarded by mu
}

// valueSize is the size of a connection's value, word the size of a register, both in bytes.
const (
	valueSize = int(unsafe.Sizeof(bpf.MapsSlCt{}))
	word      = 8
)

// remove implements Connections.Remove for connections of the map.
func (r *remover) remove(m *ebpf.Map, cs []Connection) (deleted uint32, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	keySize := int(m.KeySize())
	if r.program == nil {
		if r.program, err = loadRemover(m); err != nil {
			return 0, err
		}
		r.input = make([]byte, word+RemoveAtOnce*(keySize+valueSize))
	}
	*(*uint64)(unsafe.Pointer(&r.input[0])) = uint64(len(cs))
	for i := range cs {
		at := r.input[word+i*(keySize+valueSize):]
		if cs[i].Initiator.Addr().Is4() {
			*(*bpf.MapsSlCtKey4)(unsafe.Pointer(&at[0])) = cs[i].Key4()
		} else {
			*(*bpf.MapsSlCtKey6)(unsafe.Pointer(&at[0])) = cs[i].Key6()
		}
		*(*bpf.MapsSlCt)(unsafe.Pointer(&at[keySize])) = cs[i].Value
	}
	if deleted, err = r.program.Run(&ebpf.RunOptions{Context: r.input}); err != nil {
		return 0, fmt.Errorf("delete %d connections: %w", len(cs), err)
	}
	return deleted, nil
}

func (r *remover) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.program == nil {
		return nil
	}
	return r.program.Close()
}

// loadRemover loads the program for a map. Its input is a number of entries, followed by that many keys, each
// with the value that it must still have. The verifier allows no variable offset into the input, so the loop is
// unrolled.
func loadRemover(m *ebpf.Map) (*ebpf.Program, error) {
	keySize := int16(m.KeySize())
	const input, deleted = asm.R6, asm.R7
	steps := asm.Instructions{asm.Mov.Reg(input, asm.R1), asm.Mov.Imm(deleted, 0)}
	for i := range int16(RemoveAtOnce) {
		next := fmt.Sprintf("entry %d", i+1)
		if i == RemoveAtOnce-1 {
			next = "end"
		}
		key := word + i*(keySize+int16(valueSize))
		value := key + keySize
		steps = append(steps,
			asm.LoadMem(asm.R1, input, 0, asm.DWord).WithSymbol(fmt.Sprintf("entry %d", i)),
			asm.JLE.Imm(asm.R1, int32(i), "end"))
		for at := int16(0); at < keySize; at += word {
			steps = append(steps,
				asm.LoadMem(asm.R1, input, key+at, asm.DWord),
				asm.StoreMem(asm.RFP, at-keySize, asm.R1, asm.DWord))
		}
		onKey := func(fn asm.BuiltinFunc) {
			steps = append(steps,
				asm.LoadMapPtr(asm.R1, m.FD()),
				asm.Mov.Reg(asm.R2, asm.RFP),
				asm.Add.Imm(asm.R2, -int32(keySize)),
				fn.Call())
		}
		onKey(asm.FnMapLookupElem)
		steps = append(steps, asm.JEq.Imm(asm.R0, 0, next))
		for at := int16(0); at < int16(valueSize); at += word {
			steps = append(steps,
				asm.LoadMem(asm.R1, asm.R0, at, asm.DWord),
				asm.LoadMem(asm.R2, input, value+at, asm.DWord),
				asm.JNE.Reg(asm.R1, asm.R2, next))
		}
		onKey(asm.FnMapDeleteElem)
		steps = append(steps,
			asm.JNE.Imm(asm.R0, 0, next),
			asm.LoadImm(asm.R1, 1<<i, asm.DWord),
			asm.Or.Reg(deleted, asm.R1))
	}
	steps = append(steps,
		asm.Mov.Reg(asm.R0, deleted).WithSymbol("end"),
		asm.Return())
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "sluice_remove", Type: ebpf.Syscall, Flags: unix.BPF_F_SLEEPABLE, Instructions: steps,
		License: "Dual BSD/GPL",
	})
	if err != nil {
		return nil, fmt.Errorf("load the program that removes connections: %w", err)
	}
	return program, nil
}

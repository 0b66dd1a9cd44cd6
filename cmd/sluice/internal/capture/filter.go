// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package capture

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/net/bpf"
)

// filter selects packets that match one of the prefixes, one of the ports and one of the protocols. An empty list
// matches everything.
type filter struct {
	prefixes  []netip.Prefix
	ports     []uint16
	protocols []uint8
}

// Offsets in an Ethernet frame with IP.
const (
	etherTypeAt, protocol4At, fragment4At, source4At, destination4At = 12, 23, 20, 26, 30
	nextHeader6At, source6At, destination6At                         = 20, 22, 38
	header4At, payload6At                                            = 14, 54
)

// portProtocols have the source and destination ports at the start of their header: TCP, UDP, DCCP, SCTP, UDP-Lite.
var portProtocols = []uint8{6, 17, 33, 132, 136}

// program is a classic BPF program with labels as targets of jumps.
type program struct {
	code   []bpf.Instruction
	jumps  map[int]string // index of a bpf.Jump → label
	labels map[string]int
}

func (p *program) add(code ...bpf.Instruction) { p.code = append(p.code, code...) }

func (p *program) label(name string) { p.labels[name] = len(p.code) }

func (p *program) jump(to string) {
	p.jumps[len(p.code)] = to
	p.add(bpf.Jump{})
}

// when adds a jump to the label that is taken if the test is true. It uses an unconditional jump after the test,
// because a conditional jump reaches only 255 instructions.
func (p *program) when(test bpf.JumpTest, value uint32, to string) {
	p.add(bpf.JumpIf{Cond: test, Val: value, SkipFalse: 1})
	p.jump(to)
}

// whenIn adds a jump to the label that is taken if the loaded value is one of values.
func whenIn[N ~uint8 | ~uint16](p *program, values []N, to string) {
	for _, v := range values {
		p.when(bpf.JumpEqual, uint32(v), to)
	}
}

func (p *program) assemble() ([]bpf.RawInstruction, error) {
	for at, to := range p.jumps {
		p.code[at] = bpf.Jump{Skip: uint32(p.labels[to] - at - 1)}
	}
	return bpf.Assemble(p.code)
}

// compile returns the program that the kernel runs on each packet; it captures at most snaplen bytes. For IPv6, the
// protocol is the next header of the fixed header. Fragments other than the first have no ports.
func (f filter) compile(snaplen uint32) ([]bpf.RawInstruction, error) {
	p := &program{jumps: map[int]string{}, labels: map[string]int{}}
	if len(f.prefixes)+len(f.ports)+len(f.protocols) > 0 {
		p.add(bpf.LoadAbsolute{Off: etherTypeAt, Size: 2})
		p.when(bpf.JumpEqual, 0x0800, "4")
		p.when(bpf.JumpEqual, 0x86dd, "6")
		p.jump("no")
		p.label("4")
		f.protocol(p, protocol4At, "4")
		f.address(p, true, "4")
		f.port(p, protocol4At, "4")
		p.label("6")
		f.protocol(p, nextHeader6At, "6")
		f.address(p, false, "6")
		f.port(p, nextHeader6At, "6")
		p.label("no")
		p.add(bpf.RetConstant{})
	}
	p.label("yes")
	p.add(bpf.RetConstant{Val: snaplen})
	return p.assemble()
}

func (f filter) protocol(p *program, at uint32, family string) {
	if len(f.protocols) > 0 {
		p.add(bpf.LoadAbsolute{Off: at, Size: 1})
		whenIn(p, f.protocols, "address"+family)
		p.jump("no")
	}
	p.label("address" + family)
}

func (f filter) address(p *program, four bool, family string) {
	if len(f.prefixes) > 0 {
		for _, prefix := range f.prefixes {
			if prefix.Addr().Is4() != four {
				continue
			}
			places := []uint32{source6At, destination6At}
			if four {
				places = []uint32{source4At, destination4At}
			}
			for _, at := range places {
				prefixAt(p, prefix, at, "port"+family)
			}
		}
		p.jump("no")
	}
	p.label("port" + family)
}

// prefixAt adds a jump to the label that is taken if the address at the offset is in the prefix.
func prefixAt(p *program, prefix netip.Prefix, at uint32, to string) {
	address := prefix.Masked().Addr().AsSlice()
	bits := prefix.Bits()
	next := len(p.code)
	other := "other" + string(rune(next)) // a label of its own
	for word := 0; word*32 < bits; word++ {
		mask := ^uint32(0) << max(0, 32-(bits-word*32))
		p.add(bpf.LoadAbsolute{Off: at + uint32(word*4), Size: 4}, bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: mask})
		p.when(bpf.JumpNotEqual, binary.BigEndian.Uint32(address[word*4:]), other)
	}
	p.jump(to)
	p.label(other)
}

func (f filter) port(p *program, protocolAt uint32, family string) {
	if len(f.ports) == 0 {
		p.jump("yes")
		return
	}
	p.add(bpf.LoadAbsolute{Off: protocolAt, Size: 1})
	whenIn(p, portProtocols, "ports"+family)
	p.jump("no")
	p.label("ports" + family)
	if family == "4" {
		p.add(bpf.LoadAbsolute{Off: fragment4At, Size: 2})
		p.when(bpf.JumpBitsSet, 0x1fff, "no")
		p.add(bpf.LoadMemShift{Off: header4At})
	} else {
		p.add(bpf.LoadConstant{Dst: bpf.RegX, Val: payload6At - header4At})
	}
	for _, at := range []uint32{header4At, header4At + 2} {
		p.add(bpf.LoadIndirect{Off: at, Size: 2})
		whenIn(p, f.ports, "yes")
	}
	p.jump("no")
}

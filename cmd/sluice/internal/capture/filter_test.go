// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package capture

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/net/bpf"
)

// passes is a simple implementation of the filter.
func (f filter) passes(frame []byte) bool {
	if len(f.prefixes)+len(f.ports)+len(f.protocols) == 0 {
		return true
	}
	if len(frame) < 14 {
		return false
	}
	var protocol uint8
	var source, destination netip.Addr
	var payload []byte
	first := true
	switch p := frame[14:]; binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		if len(p) < 20 {
			return false
		}
		protocol, first = p[9], binary.BigEndian.Uint16(p[6:])&0x1fff == 0
		source, destination = netip.AddrFrom4([4]byte(p[12:])), netip.AddrFrom4([4]byte(p[16:]))
		payload = p[min(len(p), int(p[0]&15)*4):]
	case 0x86dd:
		if len(p) < 40 {
			return false
		}
		protocol, payload = p[6], p[40:]
		source, destination = netip.AddrFrom16([16]byte(p[8:])), netip.AddrFrom16([16]byte(p[24:]))
	default:
		return false
	}
	if len(f.protocols) > 0 && !slices.Contains(f.protocols, protocol) {
		return false
	}
	if len(f.prefixes) > 0 && !slices.ContainsFunc(f.prefixes,
		func(p netip.Prefix) bool { return p.Contains(source) || p.Contains(destination) }) {
		return false
	}
	if len(f.ports) == 0 {
		return true
	}
	return slices.Contains(portProtocols, protocol) && first && (len(payload) >= 2 && slices.Contains(f.ports,
		binary.BigEndian.Uint16(payload)) ||
		len(payload) >= 4 && slices.Contains(f.ports, binary.BigEndian.Uint16(payload[2:])))
}

// randomFrame returns a frame with few different addresses, protocols and ports, so that filters often match.
func randomFrame(r *rand.Rand) []byte {
	frame := make([]byte, 14, 128)
	protocol := []uint8{1, 6, 17, 58, 132, 47}[r.IntN(6)]
	switch r.IntN(5) {
	case 0, 1:
		binary.BigEndian.PutUint16(frame[12:], 0x0800)
		words := r.IntN(3)
		p := make([]byte, 20+4*words)
		p[0], p[9] = 0x45+uint8(words), protocol
		if r.IntN(4) == 0 {
			binary.BigEndian.PutUint16(p[6:], uint16(r.IntN(3))|0x2000)
		}
		copy(p[12:], []byte{10, 0, uint8(r.IntN(2)), uint8(r.IntN(4))})
		copy(p[16:], []byte{10, 1, uint8(r.IntN(2)), uint8(r.IntN(4))})
		frame = append(frame, p...)
	case 2, 3:
		binary.BigEndian.PutUint16(frame[12:], 0x86dd)
		p := make([]byte, 40)
		p[0], p[6] = 0x60, protocol
		p[8], p[15], p[23] = 0xfd, uint8(r.IntN(2)), uint8(r.IntN(4))
		p[24], p[31], p[39] = 0xfd, uint8(r.IntN(2)), uint8(r.IntN(4))
		frame = append(frame, p...)
	default:
		binary.BigEndian.PutUint16(frame[12:], 0x0806)
	}
	ports := make([]byte, 8)
	binary.BigEndian.PutUint16(ports, uint16(80+r.IntN(3)))
	binary.BigEndian.PutUint16(ports[2:], uint16(80+r.IntN(3)))
	frame = append(frame, ports...)
	if r.IntN(10) == 0 {
		frame = frame[:len(frame)-r.IntN(9)] // truncated
	}
	return frame
}

// TestFilterIsWhatItSays compares the program with passes on random frames.
func TestFilterIsWhatItSays(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	prefixes := []string{
		"10.0.0.1/32", "10.1.1.0/24", "10.0.0.0/8", "0.0.0.0/0", "fd00::1/128", "fd00:0:0:1::/64", "::/0", "fd00::/9",
		"fd00::2/127",
		"10.0.0.2/31",
	}
	passed := 0
	for range 2000 {
		var f filter
		for range r.IntN(3) {
			f.prefixes = append(f.prefixes, netip.MustParsePrefix(prefixes[r.IntN(len(prefixes))]).Masked())
		}
		for range r.IntN(3) {
			f.ports = append(f.ports, uint16(80+r.IntN(3)))
		}
		for range r.IntN(3) {
			f.protocols = append(f.protocols, []uint8{1, 6, 17, 58}[r.IntN(4)])
		}
		raw, err := f.compile(64)
		if err != nil {
			t.Fatal(err)
		}
		code, ok := bpf.Disassemble(raw)
		if !ok {
			t.Fatalf("%+v: instructions that nothing knows", f)
		}
		vm, err := bpf.NewVM(code)
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			frame := randomFrame(r)
			n, err := vm.Run(frame)
			if err != nil || (n == 64) != f.passes(frame) || n != 0 && n != 64 {
				t.Fatalf("%+v on %x: %d bytes, %v, want passes %v", f, frame, n, err, f.passes(frame))
			}
			if n > 0 {
				passed++
			}
		}
	}
	if passed < 2000 || passed > 38000 {
		t.Errorf("%d of 40000 frames passed: the frames try nothing", passed)
	}
}

func TestLargestFilterIsOne(t *testing.T) {
	f := filter{protocols: make([]uint8, mostKinds), ports: make([]uint16, mostKinds)}
	for range mostKinds {
		f.prefixes = append(f.prefixes, netip.MustParsePrefix("fd00::1/128"))
	}
	if code, err := f.compile(whole); err != nil || len(code) > 4096 {
		t.Errorf("%d instructions, %v: the kernel takes 4096", len(code), err)
	}
}

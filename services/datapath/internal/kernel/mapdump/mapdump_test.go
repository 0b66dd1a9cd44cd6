// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package mapdump

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// TestEveryFieldOfEveryMapIsShown changes each field of the compiled maps: the text must change, unless the
// field is hidden.
func TestEveryFieldOfEveryMapIsShown(t *testing.T) {
	compiled, err := bpf.LoadMaps()
	if err != nil {
		t.Fatal(err)
	}
	fields := 0
	for name, spec := range compiled.Maps {
		f, err := Of(spec, compiled.Types)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for side, of := range map[string]struct {
			t    btf.Type
			size uint32
			p    phrases
			c    context
		}{
			"key":   {spec.Key, spec.KeySize, f.key, context{zeros: true}},
			"value": {spec.Value, spec.ValueSize, f.value, context{}},
		} {
			s, ok := btf.UnderlyingType(of.t).(*btf.Struct)
			if !ok || spec.Type == ebpf.RingBuf {
				continue
			}
			for _, m := range s.Members {
				hidden := slices.Contains(m.Tags, "as:hidden")
				if strings.HasPrefix(m.Name, "pad") || m.Name == "reserved" || hidden {
					continue
				}
				fields++
				from, to := int(m.Offset.Bytes()), int(m.Offset.Bytes())+bytesize(m.Type)
				zero := of.p(make([]byte, of.size), of.c)
				shown := slices.ContainsFunc([]byte{0x01, 0x84}, func(fill byte) bool {
					b := make([]byte, of.size)
					copy(b[from:to], bytes.Repeat([]byte{fill}, to-from))
					return !slices.Equal(zero, of.p(b, of.c))
				})
				// A family only changes the text of its address, which is zero here.
				if !shown && m.Name != "family" {
					t.Errorf("%s, %s: field %s does not change the text %q", name, side, m.Name, zero)
				}
			}
		}
	}
	if fields < 100 {
		t.Errorf("%d fields were checked", fields)
	}
}

// TestNewMapNeedsNothing renders a map that the package does not know.
func TestNewMapNeedsNothing(t *testing.T) {
	u32 := &btf.Int{Name: "unsigned int", Size: 4}
	u16 := &btf.Int{Name: "unsigned short", Size: 2}
	bytes16 := &btf.Array{Type: &btf.Int{Name: "unsigned char", Size: 1}, Nelems: 16}
	values := []btf.EnumValue{{Name: "SL_NEW_IDLE", Value: 0}, {Name: "SL_NEW_IN_USE", Value: 1}}
	state := &btf.Enum{Name: "sl_new", Size: 4, Values: values}
	spec := &ebpf.MapSpec{
		Name: "sl_new", Type: ebpf.Hash, Key: &btf.Typedef{Name: "__be32", Type: u32},
		Value: &btf.Struct{Name: "sl_new_value", Size: 32, Members: []btf.Member{
			{Name: "addr", Type: bytes16},
			{Name: "port", Type: &btf.Typedef{Name: "__be16", Type: u16}, Offset: 16 * 8},
			{Name: "pad", Type: u16, Offset: 18 * 8},
			{Name: "seen", Type: u32, Offset: 20 * 8, Tags: []string{"as:seconds"}},
			{Name: "state", Type: state, Offset: 24 * 8},
			{Name: "way", Type: u32, Offset: 28 * 8, Tags: []string{"part:hop@31 mtu@0:16 node@16:8=node"}},
		}},
	}
	f, err := Of(spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	value := make([]byte, 32)
	value[0], value[15], value[16], value[17], value[20], value[24] = 0xfd, 1, 0x1f, 0x90, 70, 1
	copy(value[28:], []byte{0xdc, 5, 3, 0x80})
	var got string
	names := Names{Now: 77, Node: func(id uint16) string { return map[uint16]string{3: "worker"}[id] }}
	keep := func(k, v string) error { got = k + ": " + v; return nil }
	if err := f.entry([]byte{192, 0, 2, 1}, value, names, keep); err != nil {
		t.Fatal(err)
	}
	want := "192.0.2.1: addr fd00::1 port 8080 seen 7 s ago state in-use way hop mtu 1500 node 3 worker"
	if got != want {
		t.Errorf("\n got %s\nwant %s", got, want)
	}
}

func TestDescriptionThatIsWrongIsAnError(t *testing.T) {
	for tag, want := range map[string]string{
		"as:colour":          `unknown renderer "colour"`,
		"as:enum:sl_nowhere": "not found",
		"as:unless:x":        "invalid syntax",
		"bits:a":             `"a" is not NAME@FIRST:COUNT=RENDERER`,
		"bits:a@x":           `"a@x" is not`,
		"bits:a@0:4=colour":  `unknown renderer "colour"`,
		"addr:port=nowhere":  `no field "nowhere"`,
		"addr:colour":        `unknown option "colour"`,
	} {
		spec := &ebpf.MapSpec{
			Name: "sl_new", Type: ebpf.Hash, Key: &btf.Int{Size: 4},
			Value: &btf.Struct{Name: "s", Size: 4, Members: []btf.Member{
				{Name: "f", Type: &btf.Int{Size: 4}, Tags: []string{tag}},
			}},
		}
		compiled, err := bpf.LoadMaps()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Of(spec, compiled.Types); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", tag, err, want)
		}
	}
}

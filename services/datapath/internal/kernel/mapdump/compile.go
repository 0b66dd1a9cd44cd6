// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package mapdump

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// phrases renders a value as "name text" for each field that is shown.
type phrases func(b []byte, c context) []string

type context struct {
	Names

	zeros bool // show zero fields, too
}

type compiler struct {
	types *btf.Spec
}

// key compiles the format of a key. In an LPM trie the key ends in a prefix, whose length is its first field.
func (c compiler) key(spec *ebpf.MapSpec) (phrases, error) {
	t, ok := btf.UnderlyingType(spec.Key).(*btf.Struct)
	if spec.Type != ebpf.LPMTrie || !ok || len(t.Members) < 2 {
		return c.of(spec.Key, "", nil)
	}
	last := t.Members[len(t.Members)-1]
	at := int(last.Offset.Bytes())
	between, err := c.members(t, t.Members[1:len(t.Members)-1])
	if err != nil {
		return nil, err
	}
	return func(b []byte, cx context) []string {
		bits := int(number(b[:4])) - 8*(at-4)
		return append(between(b, cx), fmt.Sprintf("%v/%d", address(b[at:], false), bits))
	}, nil
}

// of compiles the format of a type. tags are the tags of the field or of the typedef.
func (c compiler) of(t btf.Type, label string, tags []string) (phrases, error) {
	for {
		td, ok := t.(*btf.Typedef)
		if !ok {
			break
		}
		tags = slices.Concat(tags, td.Tags)
		switch td.Name {
		case "__be32":
			tags = append(tags, "as:address")
		case "__be16":
			tags = append(tags, "as:be16")
		}
		t = td.Type
	}
	size, err := btf.Sizeof(t)
	if t == nil || err != nil {
		return func([]byte, context) []string { return nil }, nil // a ring buffer has no keys
	}
	for _, tag := range tags { // the first tag applies: tags of a field precede the tags of its type
		kind, text, _ := strings.Cut(tag, ":")
		switch kind {
		case "as":
			return c.as(label, text, size)
		case "bits", "part":
			p, err := c.bits(text)
			if a, ok := t.(*btf.Array); ok && err == nil {
				p, err = list(p, a)
				kind = "part"
			}
			if kind == "part" {
				p = labelled(label, p)
			}
			return p, err
		}
	}
	switch t := t.(type) {
	case *btf.Struct:
		return c.members(t, t.Members)
	case *btf.Array:
		if bytesize(t.Type) == 1 && slices.Contains([]uint32{4, 6, 16}, t.Nelems) {
			return c.as(label, map[uint32]string{4: "address", 6: "mac", 16: "address"}[t.Nelems], size)
		}
		p, err := c.of(t.Type, "", nil)
		if err != nil {
			return nil, err
		}
		p, err = list(p, t)
		return labelled(label, p), err
	case *btf.Int:
		return c.as(label, "number", size)
	case *btf.Enum:
		return shown(label, names(enumerators(t)), size), nil
	}
	return nil, fmt.Errorf("%s: no format for %v", label, t)
}

// members compiles the format of a struct's fields. A field that is the port or the family of another field is
// shown with that field.
func (c compiler) members(s *btf.Struct, members []btf.Member) (phrases, error) {
	at := func(name string) (part, error) {
		for _, m := range s.Members {
			if m.Name == name {
				return part{first: int(m.Offset), bits: 8 * bytesize(m.Type)}, nil
			}
		}
		return part{}, fmt.Errorf("struct %s has no field %q", s.Name, name)
	}
	named := map[string]bool{} // fields that are shown together with an address
	var all []phrases
	for _, m := range members {
		for _, tag := range m.Tags {
			text, ok := strings.CutPrefix(tag, "addr:")
			if !ok {
				continue
			}
			p, shown, err := addresses(m, text, at)
			if err != nil {
				return nil, fmt.Errorf("struct %s, field %s: %w", s.Name, m.Name, err)
			}
			for _, name := range shown {
				named[name] = true
			}
			named[m.Name] = true
			all = append(all, p)
		}
		if named[m.Name] || strings.HasPrefix(m.Name, "pad") {
			all = append(all, nil)
			continue
		}
		label := m.Name
		if len(s.Members) == 1 {
			label = ""
		}
		p, err := c.of(m.Type, label, m.Tags)
		if err != nil {
			return nil, fmt.Errorf("struct %s: %w", s.Name, err)
		}
		from, to := int(m.Offset.Bytes()), int(m.Offset.Bytes())+bytesize(m.Type)
		name := m.Name
		all = append(all, func(b []byte, cx context) []string {
			if named[name] {
				return nil
			}
			return p(b[from:to], cx)
		})
	}
	all = slices.DeleteFunc(all, func(p phrases) bool { return p == nil })
	return func(b []byte, cx context) (words []string) {
		for _, p := range all {
			words = append(words, p(b, cx)...)
		}
		return words
	}, nil
}

// addresses compiles the format of an address with its port. shown are the fields that are included.
func addresses(m btf.Member, text string, at func(name string) (part, error)) (_ phrases, shown []string, err error) {
	var port, family *part
	mixed := false
	for _, option := range strings.Fields(text) {
		name, of, _ := strings.Cut(option, "=")
		if name == "mixed" {
			mixed = true
			continue
		}
		if name != "port" && name != "family" {
			return nil, nil, fmt.Errorf("unknown option %q of SL_ADDR", option)
		}
		p, err := at(of)
		if err != nil {
			return nil, nil, err
		}
		shown = append(shown, of)
		if name == "port" {
			port = &p
		} else {
			family = &p
		}
	}
	from, to := int(m.Offset.Bytes()), int(m.Offset.Bytes())+bytesize(m.Type)
	return func(b []byte, cx context) []string {
		a := b[from:to]
		four := mixed
		if family != nil {
			four = family.of(b)&0x7f == 4
			if four {
				a = a[:4]
			}
		}
		text := addressText(address(a, four), port, b)
		if text == "" || !cx.zeros && zero(b[from:to]) && (port == nil || port.of(b) == 0) {
			return nil
		}
		return []string{m.Name + " " + text}
	}, shown, nil
}

func (c compiler) as(label, how string, size int) (phrases, error) {
	r, err := c.renderer(how)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", label, err)
	}
	return shown(label, r, size), nil
}

func shown(label string, r renderer, size int) phrases {
	return func(b []byte, cx context) []string {
		text, ok := r(b[:size], cx)
		if !ok {
			return nil
		}
		return []string{strings.TrimPrefix(label+" "+text, " ")}
	}
}

// part is a range of bits; first counts from the lowest bit.
type part struct {
	name        string
	first, bits int
	render      renderer // nil: a flag
}

func (p part) of(b []byte) uint64 {
	v := number(b[p.first/8 : min(p.first/8+8, len(b))])
	v >>= p.first % 8
	if p.bits < 64 {
		v &= 1<<p.bits - 1
	}
	return v
}

// bits compiles the format of a packed word.
func (c compiler) bits(text string) (phrases, error) {
	var parts []part
	for _, field := range strings.Fields(text) {
		name, where, ok := strings.Cut(field, "@")
		where, how, named := strings.Cut(where, "=")
		first, count, ranged := strings.Cut(where, ":")
		p := part{name: name, bits: 1}
		var err, err2 error
		p.first, err = strconv.Atoi(first)
		if ranged {
			p.bits, err2 = strconv.Atoi(count)
		}
		if !ok || err != nil || err2 != nil {
			return nil, fmt.Errorf("%q is not NAME@FIRST:COUNT=RENDERER", field)
		}
		if ranged || named {
			if !named {
				how = "number"
			}
			if p.render, err = c.renderer(how); err != nil {
				return nil, fmt.Errorf("%s: %w", field, err)
			}
		}
		parts = append(parts, p)
	}
	return func(b []byte, cx context) (words []string) {
		for _, p := range parts {
			v := p.of(b)
			if p.render == nil {
				if v != 0 {
					words = append(words, p.name)
				}
				continue
			}
			raw := make([]byte, (p.bits+7)/8)
			put(raw, v)
			if text, ok := p.render(raw, cx); ok {
				words = append(words, strings.TrimPrefix(p.name+" "+text, " "))
			}
		}
		return words
	}, nil
}

// labelled prepends a label to all phrases; without phrases it shows nothing.
func labelled(label string, p phrases) phrases {
	return func(b []byte, cx context) []string {
		words := p(b, cx)
		if len(words) > 0 && label != "" {
			words[0] = label + " " + words[0]
		}
		return words
	}
}

// list renders an array as "[a, b, c]". Equal elements at the end are shown once, followed by dots. An array of
// zeros is not shown.
func list(p phrases, a *btf.Array) (phrases, error) {
	size := bytesize(a.Type)
	if size == 0 {
		return nil, fmt.Errorf("an array of %v", a.Type)
	}
	return func(b []byte, cx context) []string {
		if zero(b) && !cx.zeros {
			return nil
		}
		cx.zeros = true
		var all []string
		for i := range int(a.Nelems) {
			all = append(all, cmp.Or(strings.Join(p(b[i*size:(i+1)*size], cx), " "), "-"))
		}
		separator := " "
		if slices.ContainsFunc(all, func(s string) bool { return strings.Contains(s, " ") }) {
			separator = ", "
		}
		end := len(all)
		for end > 1 && all[end-1] == all[end-2] {
			end--
		}
		words := strings.Join(all[:end], separator)
		if end < len(all) {
			words += separator + "..."
		}
		return []string{"[" + words + "]"}
	}, nil
}

func bytesize(t btf.Type) int {
	n, err := btf.Sizeof(t)
	if err != nil {
		return 0
	}
	return n
}

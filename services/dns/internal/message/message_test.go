// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// raw builds messages byte by byte, so that they can contain mistakes.
type raw struct{ b []byte }

// header begins a message with the number of records of each section.
func header(id, flags uint16, counts ...uint16) *raw {
	r := &raw{}
	r.u16(id, flags)
	r.u16(append(counts, make([]uint16, 4-len(counts))...)...)
	return r
}

func (r *raw) u16(all ...uint16) *raw {
	for _, v := range all {
		r.b = binary.BigEndian.AppendUint16(r.b, v)
	}
	return r
}

func (r *raw) bytes(b ...byte) *raw {
	r.b = append(r.b, b...)
	return r
}

// name appends labels that are separated by dots; "@12" at the end is a pointer.
func (r *raw) name(text string) *raw {
	r.b = packed(r.b, text)
	return r
}

func packed(b []byte, text string) []byte {
	for label := range strings.SplitSeq(strings.TrimSuffix(text, "."), ".") {
		var at uint16
		if n, _ := fmt.Sscanf(label, "@%d", &at); n == 1 {
			return binary.BigEndian.AppendUint16(b, 0xc000|at)
		}
		if label != "" {
			b = append(append(b, byte(len(label))), label...)
		}
	}
	return append(b, 0)
}

func (r *raw) question(name string, kind uint16) *raw { return r.name(name).u16(kind, ClassIN) }

func (r *raw) record(owner string, kind uint16, ttl uint32, data []byte) *raw {
	r.name(owner).u16(kind, ClassIN, uint16(ttl>>16), uint16(ttl), uint16(len(data)))
	return r.bytes(data...)
}

func (r *raw) opt(version uint8, do bool, data ...byte) *raw {
	flags := uint16(0)
	if do {
		flags = 1 << 15
	}
	return r.name("").u16(TypeOPT, 4096, uint16(version), flags, uint16(len(data))).bytes(data...)
}

func ip(text string) []byte { return netip.MustParseAddr(text).AsSlice() }

const answered = flagQR | flagRD | flagRA

func TestQueriesAreRead(t *testing.T) {
	for what, c := range map[string]struct {
		message *raw
		name    string
		err     error
		code    RCode // of the reply to a refused query
		silent  bool
	}{
		"plain": {header(7, flagRD, 1).question("API.example.COM", TypeA), "api.example.com.", nil, 0, false},
		"root":  {header(7, 0, 1).question("", 2), ".", nil, 0, false},
		"EDNS": {
			header(7, 0, 1, 0, 0, 1).question("a.b", TypeA).opt(0, true, 0, 10, 0, 2, 1, 2),
			"a.b.", nil, 0, false,
		},
		"EDNS of version 9": {header(7, 0, 1, 0, 0, 1).question("a.b", TypeA).opt(9, false), "a.b.", nil, 0, false},
		"a signature": {
			header(7, 0, 1, 0, 0, 2).question("a.b", TypeA).opt(0, false).record("key", 250, 0, []byte{1}),
			"a.b.", nil, 0, false,
		},
		"a dot in a label": {
			header(7, 0, 1).bytes(3, 'a', '.', 'b', 3, 'c', 'o', 'm', 0).u16(TypeA, ClassIN),
			`a\046b.com.`, nil, 0, false,
		},
		"a backslash": {header(7, 0, 1).bytes(2, '\\', 200, 0).u16(TypeA, ClassIN), `\092\200.`, nil, 0, false},
		"longest name": {
			header(7, 0, 1).question(strings.Repeat("abcdefghi.", 25)+"xyz", TypeA),
			strings.Repeat("abcdefghi.", 25) + "xyz.", nil, 0, false,
		},
		"nothing":        {&raw{}, "", ErrHeader, 0, true},
		"half a header":  {&raw{b: make([]byte, 11)}, "", ErrHeader, 0, true},
		"an answer":      {header(7, answered, 1).question("a.b", TypeA), "", ErrNotQuery, 0, true},
		"an update":      {header(7, 5<<11, 1).question("a.b", TypeA), "", ErrOpcode, NotImp, false},
		"a status query": {header(7, 2<<11, 1).question("a.b", TypeA), "", ErrOpcode, NotImp, false},
		"no question":    {header(7, 0), "", ErrQuestions, FormErr, false},
		"two questions": {
			header(7, 0, 2).question("a.b", TypeA).question("c.d", TypeA),
			"", ErrQuestions, FormErr, false,
		},
		"a record in answers": {
			header(7, 0, 1, 1).question("a.b", TypeA).record("a.b", TypeA, 1, ip("192.0.2.1")),
			"", ErrRecords, FormErr, false,
		},
		"a zone transfer": {
			header(7, 0, 1, 0, 1).question("a.b", 251).record("a.b", TypeSOA, 1, nil),
			"", ErrRecords, FormErr, false,
		},
		"a second OPT": {
			header(7, 0, 1, 0, 0, 2).question("a.b", TypeA).opt(0, false).opt(0, false),
			"", ErrEDNS, FormErr, false,
		},
		"OPT with a name": {
			header(7, 0, 1, 0, 0, 1).question("a.b", TypeA).record("x", TypeOPT, 0, nil),
			"", ErrEDNS, FormErr, false,
		},
		"half an option": {
			header(7, 0, 1, 0, 0, 1).question("a.b", TypeA).opt(0, false, 0, 10, 0, 9, 1),
			"", ErrEDNS, FormErr, false,
		},
		"data behind":         {header(7, 0, 1).question("a.b", TypeA).bytes('x'), "", ErrTrailing, FormErr, false},
		"a missing record":    {header(7, 0, 1, 0, 0, 1).question("a.b", TypeA), "", ErrShort, FormErr, false},
		"half a name":         {header(7, 0, 1).bytes(3, 'a'), "", ErrShort, FormErr, false},
		"no type":             {header(7, 0, 1).name("a.b"), "", ErrShort, FormErr, false},
		"a pointer in it":     {header(7, 0, 1).bytes(0xc0, 12).u16(TypeA, ClassIN), "", ErrName, FormErr, false},
		"a pointer to the ID": {header(7, 0, 1).bytes(0xc0, 0).u16(TypeA, ClassIN), "", ErrName, FormErr, false},
		"a pointer ahead": {
			header(7, 0, 1).bytes(0xc0, 18).u16(TypeA, ClassIN).name("a.b"),
			"", ErrName, FormErr, false,
		},
		"a label of type 01": {header(7, 0, 1).bytes(0x41, 'a', 0).u16(TypeA, ClassIN), "", ErrName, FormErr, false},
		"a name that is long": {
			header(7, 0, 1).question(strings.Repeat("abcdefghi.", 25)+"wxyz", TypeA),
			"", ErrName, FormErr, false,
		},
		"a label at the limit": {
			header(7, 0, 1).question(strings.Repeat("a", 63), TypeA),
			strings.Repeat("a", 63) + ".", nil, 0, false,
		},
	} {
		var q Query
		err := q.Read(c.message.b)
		if !errors.Is(err, c.err) || err == nil && (string(q.Name()) != c.name || q.ID != 7) {
			t.Errorf("%s: %v, %q, ID %d; want %v, %q", what, err, q.Name(), q.ID, c.err, c.name)
		}
		if err == nil {
			continue
		}
		if code, ok := q.Reply(err); code != c.code || ok == c.silent {
			t.Errorf("%s: reply %d, %t; want %d, %t", what, code, ok, c.code, !c.silent)
		}
	}
}

func TestAnswersAreMadeInTheServersName(t *testing.T) {
	var q Query
	query := header(77, flagRD|flagCD, 1, 0, 0, 1).question("Nope.default.svc.cluster.local", TypeAAAA).opt(3, true)
	if err := q.Read(query.b); err != nil {
		t.Fatal(err)
	}
	for code, zone := range map[RCode]string{Refused: "", FormErr: "", NXDomain: "cluster.local."} {
		got := q.AppendAnswer([]byte("xy"), code, zone)
		if !bytes.HasPrefix(got, []byte("xy")) {
			t.Fatal("the text before the answer is lost")
		}
		var m dnsmessage.Message
		if err := m.Unpack(got[2:]); err != nil {
			t.Fatalf("%d: %v", code, err)
		}
		if h := m.Header; h.ID != 77 || !h.Response || !h.RecursionDesired || !h.CheckingDisabled || h.Truncated ||
			h.RCode != dnsmessage.RCode(code) {
			t.Errorf("%d: header %+v", code, h)
		}
		// The reply keeps the case of the name in the query, because some clients randomise the case and check it.
		if len(m.Questions) != 1 || m.Questions[0].Name.String() != "Nope.default.svc.cluster.local." ||
			m.Questions[0].Type != dnsmessage.TypeAAAA {
			t.Errorf("%d: questions %v", code, m.Questions)
		}
		// The OPT record is the last one: root, type, size, version and DO bit, no data.
		opt := []byte{0, 0, 41, 1232 >> 8, 1232 & 0xff, 0, 3, 1 << 7, 0, 0, 0}
		if got[2+11] != 1 || !bytes.HasSuffix(got, opt) {
			t.Errorf("%d: answer % x does not end with % x", code, got, opt)
		}
		if code != NXDomain {
			continue
		}
		soa, ok := m.Authorities[0].Body.(*dnsmessage.SOAResource)
		if !ok || m.Authorities[0].Header.Name.String() != zone || m.Authorities[0].Header.TTL != 5 || soa.MinTTL != 5 {
			t.Errorf("%v", m.Authorities)
		}
	}
	if err := q.Read(header(1, 0, 2).question("a.b", TypeA).b); err == nil {
		t.Fatal("accepted")
	}
	got := q.AppendAnswer(nil, FormErr, "")
	if len(got) != headerSize || got[5] != 0 || got[3] != byte(FormErr) {
		t.Errorf("without a question that can be read: % x", got)
	}
	for _, zone := range []string{"", "a", "a..", strings.Repeat("a", 64) + ".", `a\3.`, `a\999.`} {
		if err := q.Read(query.b); err != nil {
			t.Fatal(err)
		}
		if out := q.AppendAnswer(nil, NXDomain, zone); out[9] != 0 {
			t.Errorf("zone %q has an SOA record", zone)
		}
	}
}

// learned returns the addresses to learn from an answer, as text.
func learned(a *Answer) string {
	var out []string
	for _, x := range a.Addresses {
		out = append(out, fmt.Sprintf("%s %d", x.Addr, x.TTL/time.Second))
	}
	return strings.Join(out, ", ")
}

// service returns the data of an HTTPS record.
func service(priority byte, target string, parameters ...byte) []byte {
	return append(packed([]byte{0, priority}, target), parameters...)
}

func TestOnlyTheChainTeaches(t *testing.T) {
	one, two, six := ip("192.0.2.1"), ip("192.0.2.2"), ip("2001:db8::6")
	cname := func(to string) []byte { return packed(nil, to) }
	begin := func(kind uint16, answers ...uint16) *raw {
		return header(7, answered, append([]uint16{1}, answers...)...).question("Www.example.com", kind)
	}
	v4, v6 := append([]byte{0, 4, 0, 8}, append(one, two...)...), append([]byte{0, 6, 0, 16}, six...)
	for what, c := range map[string]struct {
		message *raw
		want    string
		links   int
		ignored int
	}{
		"one address": {begin(TypeA, 1).record("@12", TypeA, 300, one), "192.0.2.1 300", 0, 0},
		"no pointer":  {begin(TypeA, 1).record("wWw.Example.Com", TypeA, 300, one), "192.0.2.1 300", 0, 0},
		"two families": {
			begin(TypeANY, 2).record("@12", TypeA, 1, one).record("@12", TypeAAAA, 2, six),
			"192.0.2.1 1, 2001:db8::6 2", 0, 0,
		},
		"lowest TTL": {
			begin(TypeA, 3).record("@12", TypeCNAME, 20, cname("b.net")).record("b.net", TypeA, 300, one).
				record("b.net", TypeA, 5, two),
			"192.0.2.1 20, 192.0.2.2 5", 1, 0,
		},
		"chain backwards": {
			begin(TypeA, 3).record("c.net", TypeA, 9, one).record("b.net", TypeCNAME, 9, cname("C.net")).
				record("@12", TypeCNAME, 9, cname("b.NET")),
			"192.0.2.1 9", 2, 0,
		},
		"address at an alias": {
			begin(TypeA, 3).record("@12", TypeCNAME, 9, cname("b.net")).record("@12", TypeA, 8, one).
				record("b.net", TypeA, 7, two),
			"192.0.2.1 8, 192.0.2.2 7", 1, 0,
		},
		"another owner": {
			begin(TypeA, 2).record("@12", TypeA, 9, one).record("b.net", TypeA, 9, two),
			"192.0.2.1 9", 0, 1,
		},
		"longer owner":    {begin(TypeA, 1).record("x.@12", TypeA, 9, one), "", 0, 1},
		"suffix as owner": {begin(TypeA, 1).record("@16", TypeA, 9, one), "", 0, 1},
		"two aliases": {
			begin(TypeA, 4).record("@12", TypeCNAME, 9, cname("b.net")).record("@12", TypeCNAME, 9, cname("c.net")).
				record("b.net", TypeA, 9, one).record("c.net", TypeA, 9, two),
			"192.0.2.1 9", 1, 1,
		},
		"alias of itself": {
			begin(TypeA, 2).record("@12", TypeCNAME, 9, cname("@12")).record("b.net", TypeA, 9, one),
			"", 0, 1,
		},
		"circle": {
			begin(TypeA, 3).record("@12", TypeCNAME, 9, cname("b.net")).record("b.net", TypeCNAME, 9, cname("@12")).
				record("b.net", TypeA, 9, one),
			"192.0.2.1 9", 1, 0,
		},
		"in authority":       {begin(TypeA, 0, 1).record("@12", TypeA, 9, one), "", 0, 0},
		"in additional":      {begin(TypeA, 0, 0, 1).record("@12", TypeA, 9, one), "", 0, 0},
		"for a TXT question": {begin(16, 1).record("@12", TypeA, 9, one), "", 0, 1},
		"another class": {
			header(7, answered, 1, 1).name("a.b").u16(TypeA, 3).name("a.b").u16(TypeA, 3, 0, 9, 4).bytes(one...),
			"", 0, 0,
		},
		"no such name": {
			header(7, answered|uint16(NXDomain), 1, 1).question("a.b", TypeA).record("@12", TypeA, 9, one),
			"", 0, 0,
		},
		"extended result": {
			header(7, answered, 1, 1, 0, 1).question("a.b", TypeA).record("@12", TypeA, 9, one).name("").
				u16(TypeOPT, 512, 1<<8, 0, 0),
			"", 0, 0,
		},
		"negative TTL":   {begin(TypeA, 1).record("@12", TypeA, 1<<31, one), "192.0.2.1 0", 0, 0},
		"mapped address": {begin(TypeAAAA, 1).record("@12", TypeAAAA, 9, ip("::ffff:192.0.2.1")), "192.0.2.1 9", 0, 0},
		"same address twice": {
			begin(TypeA, 2).record("@12", TypeA, 9, one).record("@12", TypeA, 3, one),
			"192.0.2.1 3", 0, 0,
		},
		"hints": {
			begin(TypeHTTPS, 1).record("@12", TypeHTTPS, 9, service(1, "", append(v4, v6...)...)),
			"192.0.2.1 9, 192.0.2.2 9, 2001:db8::6 9", 0, 0,
		},
		"hints of SVCB": {
			begin(TypeSVCB, 1).record("@12", TypeSVCB, 9, service(1, "x.net", v6...)),
			"2001:db8::6 9", 0, 0,
		},
		"hints of an alias": {begin(TypeHTTPS, 1).record("@12", TypeHTTPS, 9, service(0, "x.net", v6...)), "", 0, 0},
		"hints for A":       {begin(TypeA, 1).record("@12", TypeHTTPS, 9, service(1, "", v6...)), "", 0, 1},
		"hints beyond a name": {
			begin(TypeHTTPS, 2).record("@12", TypeCNAME, 4, cname("b.net")).
				record("b.net", TypeHTTPS, 9, service(1, "", v6...)),
			"2001:db8::6 4", 1, 0,
		},
		"truncated: empty": {header(7, answered|flagTC, 1, 3).question("a.b", TypeA), "", 0, 0},
		"truncated: within": {
			header(7, answered|flagTC, 1, 3).question("a.b", TypeA).record("@12", TypeA, 9, one).name("@12").
				u16(TypeA, ClassIN, 0, 9, 4).bytes(1, 2),
			"192.0.2.1 9", 0, 0,
		},
	} {
		var a Answer
		if err := a.Read(c.message.b); err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		if got := learned(&a); got != c.want || a.Links() != c.links || a.Ignored != c.ignored {
			t.Errorf("%s: learned %q, %d links, %d ignored; want %q, %d, %d", what, got, a.Links(), a.Ignored, c.want,
				c.links, c.ignored)
		}
	}
}

func TestWrongAnswersAreRefused(t *testing.T) {
	one := ip("192.0.2.1")
	begin := func(counts ...uint16) *raw {
		return header(7, answered, append([]uint16{1}, counts...)...).question("a.b", TypeA)
	}
	https := func(data []byte) *raw {
		return header(7, answered, 1, 1).question("a.b", TypeHTTPS).record("@12", TypeHTTPS, 9, data)
	}
	for what, c := range map[string]struct {
		message *raw
		want    error
	}{
		"nothing":                   {&raw{}, ErrHeader},
		"a query":                   {header(7, flagRD, 1).question("a.b", TypeA), ErrNotAnswer},
		"an answer to an update":    {header(7, answered|5<<11, 1).question("a.b", TypeA), ErrOpcode},
		"no question":               {header(7, answered, 0, 1).record("a.b", TypeA, 9, one), ErrQuestions},
		"two questions":             {header(7, answered, 2).question("a.b", TypeA).question("c.d", TypeA), ErrQuestions},
		"a missing record":          {begin(2).record("@12", TypeA, 9, one), ErrShort},
		"half a record":             {begin(1).name("@12").u16(TypeA, ClassIN, 0, 9, 4).bytes(1, 2), ErrShort},
		"data behind":               {begin(1).record("@12", TypeA, 9, one).bytes(0), ErrTrailing},
		"data behind a truncated":   {header(7, answered|flagTC, 1).question("a.b", TypeA).bytes(0), ErrTrailing},
		"a long A record":           {begin(1).record("@12", TypeA, 9, ip("2001:db8::1")), ErrData},
		"a short AAAA record":       {begin(1).record("@12", TypeAAAA, 9, one), ErrData},
		"an A record in authority":  {begin(0, 1).record("@12", TypeA, 9, one[:3]), ErrData},
		"a CNAME and more":          {begin(1).record("@12", TypeCNAME, 9, append(packed(nil, "c.d"), 0)), ErrData},
		"half a CNAME":              {begin(1).record("@12", TypeCNAME, 9, []byte{1, 'a'}), ErrData},
		"a pointer to itself":       {begin(1).name("@21").u16(TypeA, ClassIN, 0, 9, 4).bytes(one...), ErrName},
		"a pointer ahead":           {begin(1).name("@40").u16(TypeA, ClassIN, 0, 9, 4).bytes(one...).name("a.b"), ErrName},
		"a pointer into the header": {begin(1).record("@2", TypeA, 9, one), ErrName},
		"OPT among answers":         {begin(1).opt(0, false), ErrEDNS},
		"two OPT records":           {begin(0, 0, 2).opt(0, false).opt(0, false), ErrEDNS},
		"HTTPS without a target":    {https([]byte{0, 1}), ErrData},
		"HTTPS, compressed target":  {https([]byte{0, 1, 0xc0, 12}), ErrData},
		"HTTPS, half a parameter":   {https(service(1, "", 0, 4, 0, 4, 1)), ErrData},
		"HTTPS, keys not ascending": {https(service(1, "", 0, 5, 0, 0, 0, 5, 0, 0)), ErrData},
		"HTTPS, empty hint":         {https(service(1, "", 0, 4, 0, 0)), ErrData},
		"HTTPS, odd hint":           {https(service(1, "", 0, 6, 0, 4, 1, 2, 3, 4)), ErrData},
	} {
		var a Answer
		if err := a.Read(c.message.b); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", what, err, c.want)
		}
		if len(a.Addresses) != 0 {
			t.Errorf("%s: learned %s", what, learned(&a))
		}
	}
}

// TestPointersAreBounded: a message in which each name has the maximum number of pointers takes little time to parse.
// A name with one more pointer is refused.
func TestPointersAreBounded(t *testing.T) {
	for extra, want := range map[int]error{0: nil, 1: ErrName} {
		r := header(7, answered, 1, 1).question("a.b", TypeA)
		// The data of an unknown record contains a chain of pointers, each to the previous one.
		var data []byte
		at, to := len(r.b)+12, 12
		for range maxPointers - 1 + extra {
			data = binary.BigEndian.AppendUint16(data, 0xc000|uint16(to))
			to = at + len(data) - 2
		}
		r.record("@12", 65280, 9, data)
		r.b[7]++
		r.record(fmt.Sprintf("@%d", to), TypeA, 9, ip("192.0.2.1"))
		var a Answer
		if err := a.Read(r.b); !errors.Is(err, want) || want == nil && learned(&a) != "192.0.2.1 9" {
			t.Errorf("%d more: %v, %s", extra, err, learned(&a))
		}
	}
}

func TestAddressesAndLinksOfAnAnswerAreBounded(t *testing.T) {
	const n = MaxAddresses + 10
	r := header(7, answered, 1, n+1).question("a.b", TypeA)
	for i := range n {
		r.record("@12", TypeA, 9, []byte{10, 0, byte(i >> 8), byte(i)})
	}
	r.record("@12", TypeA, 3, []byte{10, 0, 0, 0}) // duplicate: only its TTL counts
	var a Answer
	for range 2 {
		if err := a.Read(r.b); err != nil || len(a.Addresses) != MaxAddresses || a.Ignored != 10 ||
			a.Addresses[0].TTL != 3*time.Second {
			t.Fatalf("%v, %d addresses, %d ignored", err, len(a.Addresses), a.Ignored)
		}
	}
	r = header(7, answered, 1, maxChain+2).question("n0.b", TypeA)
	for i := range maxChain + 1 {
		r.record(fmt.Sprintf("n%d.b", i), TypeCNAME, 9, packed(nil, fmt.Sprintf("n%d.b", i+1)))
	}
	r.record(fmt.Sprintf("n%d.b", maxChain+1), TypeA, 9, ip("192.0.2.1"))
	if err := a.Read(r.b); err != nil || a.Links() != maxChain || len(a.Addresses) != 0 {
		t.Errorf("%v, %d links, %s", err, a.Links(), learned(&a))
	}
	if got := string(a.AppendLink(nil, 2)); got != "n3.b." {
		t.Errorf("third link %s", got)
	}
}

// seeds are messages for the fuzz tests.
func seeds() [][]byte {
	return [][]byte{
		header(1, flagRD, 1, 0, 0, 1).question("Www.Example.com", TypeA).opt(0, true, 0, 10, 0, 2, 1, 2).b,
		header(1, answered, 1, 3, 0, 1).question("www.example.com", TypeA).record("@12", TypeCNAME, 20, packed(nil, "b.@16")).
			record("b.@16", TypeA, 300, ip("192.0.2.1")).record("@12", TypeAAAA, 300, ip("2001:db8::1")).opt(0, false).b,
		header(1, answered, 1, 1).question("a.b", TypeHTTPS).
			record("@12", TypeHTTPS, 9, service(1, "", append([]byte{0, 4, 0, 4}, ip("192.0.2.1")...)...)).b,
		header(1, answered|flagTC, 1, 9).question("a.b", TypeA).record("@12", TypeA, 9, ip("192.0.2.1")).b,
	}
}

// FuzzQuery compares this package with the parser of golang.org/x/net: a query that this package accepts must be
// parsed in the same way by both.
func FuzzQuery(f *testing.F) {
	for _, s := range seeds() {
		f.Add(s)
	}
	var q Query
	f.Fuzz(func(t *testing.T, b []byte) {
		before := bytes.Clone(b)
		err := q.Read(b)
		if !bytes.Equal(b, before) {
			t.Fatal("the message was changed")
		}
		if code, ok := q.Reply(err); err != nil && ok {
			var m dnsmessage.Message
			// The question of a refused message need not be readable, because its name may be invalid for other
			// parsers.
			if out := q.AppendAnswer(nil, code, ""); len(out) < headerSize || out[2]&0x80 == 0 {
				t.Fatalf("reply % x, %v", out, m)
			}
		}
		if err != nil {
			return
		}
		for _, code := range []RCode{Refused, NXDomain} {
			out := q.AppendAnswer(nil, code, "cluster.local.")
			var a Answer
			if err := a.Read(out); err != nil || a.ID != q.ID || a.Type != q.Type || a.Class != q.Class || a.Code != code ||
				!bytes.Equal(a.Name(), q.Name()) || len(a.Addresses) != 0 {
				t.Fatalf("own answer % x is read as %+v, %v", out, a, err)
			}
		}
		if back, ok := packName(nil, string(q.Name())); !ok || !equalFold(back, b[headerSize:headerSize+len(back)]) {
			t.Fatalf("%q is packed as % x, %t", q.Name(), back, ok)
		}
		var p dnsmessage.Parser
		if _, err := p.Start(b); err != nil {
			t.Fatalf("accepted, but x/net says %v", err)
		}
		question, err := p.Question()
		if err != nil {
			return // x/net refuses a label that contains a dot
		}
		if !strings.Contains(string(q.Name()), `\`) && strings.ToLower(question.Name.String()) != string(q.Name()) ||
			uint16(question.Type) != q.Type || uint16(question.Class) != q.Class {
			t.Fatalf("%q %d %d, and x/net reads %v", q.Name(), q.Type, q.Class, question)
		}
	})
}

// FuzzAnswer compares the addresses to learn from an answer with a simple and slow implementation based on
// golang.org/x/net.
func FuzzAnswer(f *testing.F) {
	for _, s := range seeds() {
		f.Add(s)
	}
	var a Answer
	f.Fuzz(func(t *testing.T, b []byte) {
		before := bytes.Clone(b)
		err := a.Read(b)
		if !bytes.Equal(b, before) {
			t.Fatal("the message was changed")
		}
		if err != nil {
			if len(a.Addresses) != 0 {
				t.Fatalf("refused with %v, but teaches %s", err, learned(&a))
			}
			return
		}
		if len(a.Addresses) > MaxAddresses || a.Links() > maxChain {
			t.Fatalf("%d addresses, %d links", len(a.Addresses), a.Links())
		}
		for i := range a.Links() {
			a.AppendLink(nil, i)
		}
		may, ok := slowly(b)
		if !ok {
			return
		}
		for _, x := range a.Addresses {
			if !slices.Contains(may, x.Addr) {
				t.Fatalf("teaches %s, which no record of the chain has: %v", x.Addr, may)
			}
		}
	})
}

// slowly returns the addresses that may be learned from an answer: addresses whose owner can be reached from the
// question by any CNAME records. ok is false if golang.org/x/net cannot parse the message.
func slowly(b []byte) (addrs []netip.Addr, ok bool) {
	var p dnsmessage.Parser
	h, err := p.Start(b)
	if err != nil {
		return nil, false
	}
	all, err := p.AllQuestions()
	if err != nil || len(all) != 1 {
		return nil, false
	}
	var records []dnsmessage.Resource
	for {
		r, err := p.Answer()
		if errors.Is(err, dnsmessage.ErrSectionDone) || err != nil && h.Truncated {
			break
		}
		if err != nil {
			return nil, false
		}
		records = append(records, r)
	}
	lower := func(n dnsmessage.Name) string { return strings.ToLower(n.String()) }
	reached := map[string]bool{lower(all[0].Name): true}
	for range records {
		for _, r := range records {
			if c, ok := r.Body.(*dnsmessage.CNAMEResource); ok && reached[lower(r.Header.Name)] {
				reached[lower(c.CNAME)] = true
			}
		}
	}
	hints := func(params []dnsmessage.SVCParam) {
		for _, p := range params {
			for n := map[dnsmessage.SVCParamKey]int{4: 4, 6: 16}[p.Key]; n > 0 && len(p.Value) >= n; p.Value = p.Value[n:] {
				addr, _ := netip.AddrFromSlice(p.Value[:n])
				addrs = append(addrs, addr.Unmap())
			}
		}
	}
	for _, r := range records {
		if !reached[lower(r.Header.Name)] {
			continue
		}
		switch body := r.Body.(type) {
		case *dnsmessage.AResource:
			addrs = append(addrs, netip.AddrFrom4(body.A))
		case *dnsmessage.AAAAResource:
			addrs = append(addrs, netip.AddrFrom16(body.AAAA).Unmap())
		case *dnsmessage.SVCBResource:
			hints(body.Params)
		case *dnsmessage.HTTPSResource:
			hints(body.Params)
		}
	}
	return addrs, true
}

// benchAnswer has a CNAME record and 8 addresses.
func benchAnswer() []byte {
	r := header(1, answered, 1, 9, 0, 1).question("www.example.com", TypeA).
		record("@12", TypeCNAME, 20, packed(nil, "edge.cdn.net"))
	at := len(r.b) - len(packed(nil, "edge.cdn.net"))
	for i := range 8 {
		r.record(fmt.Sprintf("@%d", at), TypeA, 300, []byte{192, 0, 2, byte(i)})
	}
	return r.opt(0, false).b
}

func BenchmarkAnswer(b *testing.B) {
	m := benchAnswer()
	b.Run("this package", func(b *testing.B) {
		var a Answer
		b.ReportAllocs()
		for b.Loop() {
			if err := a.Read(m); err != nil || len(a.Addresses) != 8 {
				b.Fatal(err)
			}
		}
	})
	// This only parses the records, without the chain and the strict checks.
	b.Run("dnsmessage", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var p dnsmessage.Parser
			if _, err := p.Start(m); err != nil {
				b.Fatal(err)
			}
			if _, err := p.Question(); err != nil {
				b.Fatal(err)
			}
			if err := p.SkipAllQuestions(); err != nil {
				b.Fatal(err)
			}
			n := 0
			for {
				h, err := p.AnswerHeader()
				if err != nil {
					break
				}
				switch h.Type {
				case dnsmessage.TypeA:
					if _, err := p.AResource(); err != nil {
						b.Fatal(err)
					}
					n++
				case dnsmessage.TypeCNAME:
					if _, err := p.CNAMEResource(); err != nil {
						b.Fatal(err)
					}
				default:
					if err := p.SkipAnswer(); err != nil {
						b.Fatal(err)
					}
				}
			}
			if n != 8 {
				b.Fatal(n)
			}
		}
	})
}

func BenchmarkQuery(b *testing.B) {
	m := header(1, flagRD, 1, 0, 0, 1).question("www.example.com", TypeA).opt(0, true).b
	var q Query
	b.ReportAllocs()
	for b.Loop() {
		if err := q.Read(m); err != nil {
			b.Fatal(err)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// forgery is an attempt to make sluice-dns learn an address that no allowed name has.
type forgery struct {
	what string
	// name is the name in the question; empty: one below service.example, which the policy selects.
	name string
	// kind is the type of the question; 0: A.
	kind dnsmessage.Type
	// answers returns what the server sends. target is the address to open, and right the packet that would open it if
	// the question were for a selected name.
	answers func(f *forger, query dnsmessage.Message, target netip.Addr, right []byte) [][]byte
	// from sends the answers with this source instead of the server's socket.
	from func(f *forger) *net.UDPConn
	// target replaces the address to open.
	target netip.Addr
}

// forger has what forgeries use.
type forger struct {
	t     *testing.T
	world pod.Pod
	// port53 belongs to another address of the host outside, portOther to another port of the server.
	port53, portOther *net.UDPConn
}

func dnsName(s string) dnsmessage.Name { return dnsmessage.MustNewName(s) }

func head(owner string) dnsmessage.ResourceHeader {
	return dnsmessage.ResourceHeader{Name: dnsName(owner), Class: dnsmessage.ClassINET, TTL: 300}
}

func addressRecord(owner string, a netip.Addr) dnsmessage.Resource {
	if a.Is6() {
		return dnsmessage.Resource{Header: head(owner), Body: &dnsmessage.AAAAResource{AAAA: a.As16()}}
	}
	return dnsmessage.Resource{Header: head(owner), Body: &dnsmessage.AResource{A: a.As4()}}
}

func alias(owner, to string) dnsmessage.Resource {
	return dnsmessage.Resource{Header: head(owner), Body: &dnsmessage.CNAMEResource{CNAME: dnsName(to)}}
}

// reply returns a response to a query after a change.
func reply(f *forger, query dnsmessage.Message, change func(*dnsmessage.Message)) []byte {
	m := query
	m.Response, m.RecursionAvailable = true, true
	m.Questions = append([]dnsmessage.Question(nil), query.Questions...)
	change(&m)
	b, err := m.Pack()
	if err != nil {
		f.t.Errorf("pack an answer: %v", err)
	}
	return b
}

// changed returns a forgery: the right answer, after a change of the message.
func changed(what string, change func(m *dnsmessage.Message, target netip.Addr)) forgery {
	return forgery{what: what, answers: func(f *forger, q dnsmessage.Message, target netip.Addr, _ []byte) [][]byte {
		return [][]byte{reply(f, q, func(m *dnsmessage.Message) {
			m.Answers = []dnsmessage.Resource{addressRecord(q.Questions[0].Name.String(), target)}
			change(m, target)
		})}
	}}
}

// raw returns a forgery: the right answer, after a change of its bytes.
func raw(what string, change func(b []byte) []byte) forgery {
	return forgery{what: what, answers: func(_ *forger, _ dnsmessage.Message, _ netip.Addr, right []byte) [][]byte {
		return [][]byte{change(bytes.Clone(right))}
	}}
}

// about returns a forgery of the right answer to a question for a name that the policy does not select.
func about(what, question string, records func(question string, target netip.Addr) []dnsmessage.Resource) forgery {
	return forgery{what: what, name: question, answers: func(
		f *forger, q dnsmessage.Message, target netip.Addr, _ []byte,
	) [][]byte {
		return [][]byte{reply(f, q, func(m *dnsmessage.Message) { m.Answers = records(question, target) })}
	}}
}

// The lengths of parts of a DNS message.
const (
	headerLength = 12
	typeAndClass = 4
)

// questionEnd returns the offset behind the question.
func questionEnd(b []byte) int {
	at := headerLength
	for b[at] != 0 {
		at += int(b[at]) + 1
	}
	return at + 1 + typeAndClass
}

// forgeries returns all attempts. inside are addresses of the cluster.
func forgeries(inside map[string]netip.Addr) []forgery {
	const selected = "victim.service.example."
	list := []forgery{
		changed("another ID", func(m *dnsmessage.Message, _ netip.Addr) { m.ID++ }),
		changed("no response", func(m *dnsmessage.Message, _ netip.Addr) { m.Response = false }),
		changed("another operation", func(m *dnsmessage.Message, _ netip.Addr) { m.OpCode = 4 }),
		changed("no question", func(m *dnsmessage.Message, _ netip.Addr) { m.Questions = nil }),
		changed("the question twice", func(m *dnsmessage.Message, _ netip.Addr) {
			m.Questions = append(m.Questions, m.Questions[0])
		}),
		changed("another question", func(m *dnsmessage.Message, target netip.Addr) {
			m.Questions[0].Name = dnsName(selected)
			m.Answers = []dnsmessage.Resource{addressRecord(selected, target)}
		}),
		changed("the question for another type", func(m *dnsmessage.Message, _ netip.Addr) {
			m.Questions[0].Type = dnsmessage.TypeAAAA
		}),
		changed("the question in another class", func(m *dnsmessage.Message, _ netip.Addr) {
			m.Questions[0].Class = dnsmessage.ClassCHAOS
		}),
		changed("a record in another class", func(m *dnsmessage.Message, _ netip.Addr) {
			m.Answers[0].Header.Class = dnsmessage.ClassCHAOS
		}),
		changed("a record of another name", func(m *dnsmessage.Message, target netip.Addr) {
			m.Answers = []dnsmessage.Resource{addressRecord(selected, target)}
		}),
		changed("a record of the parent", func(m *dnsmessage.Message, target netip.Addr) {
			m.Answers = []dnsmessage.Resource{addressRecord("service.example.", target)}
		}),
		changed("only additional records", func(m *dnsmessage.Message, _ netip.Addr) {
			m.Additionals, m.Answers = m.Answers, nil
		}),
		changed("only records of the authority", func(m *dnsmessage.Message, _ netip.Addr) {
			m.Authorities, m.Answers = m.Answers, nil
		}),
		changed("a chain with a gap", func(m *dnsmessage.Message, target netip.Addr) {
			q := m.Questions[0].Name.String()
			m.Answers = []dnsmessage.Resource{alias(q, "a.example."), addressRecord("b.example.", target)}
		}),
		changed("a chain that is a loop", func(m *dnsmessage.Message, target netip.Addr) {
			q := m.Questions[0].Name.String()
			m.Answers = []dnsmessage.Resource{
				alias(q, "a.example."), alias("a.example.", q), addressRecord("c.example.", target),
			}
		}),
		changed("a chain from the root", func(m *dnsmessage.Message, target netip.Addr) {
			m.Answers = []dnsmessage.Resource{alias(".", "a.example."), addressRecord("a.example.", target)}
		}),
		changed("a pointer name", func(m *dnsmessage.Message, target netip.Addr) {
			m.Answers = []dnsmessage.Resource{{Header: head(m.Questions[0].Name.String()), Body: &dnsmessage.PTRResource{
				PTR: dnsName("77.100.51.198.in-addr.arpa."),
			}}, {Header: head("77.100.51.198.in-addr.arpa."), Body: &dnsmessage.AResource{A: target.As4()}}}
		}),
		changed("an error with records", func(m *dnsmessage.Message, _ netip.Addr) {
			m.RCode, m.OpCode = dnsmessage.RCodeServerFailure, 9
		}),
		raw("cut in the record", func(b []byte) []byte { return b[:len(b)-2] }),
		raw("cut in the question", func(b []byte) []byte { return b[:headerLength+3] }),
		raw("cut in the header", func(b []byte) []byte { return b[:7] }),
		raw("empty", func([]byte) []byte { return nil }),
		raw("more records counted", func(b []byte) []byte { b[7] = 200; return b }),
		raw("fewer records counted", func(b []byte) []byte { b[7] = 0; return b }),
		raw("65535 questions counted", func(b []byte) []byte { b[4], b[5] = 0xff, 0xff; return b }),
		raw("data behind the end", func(b []byte) []byte { return append(b, b[questionEnd(b):]...) }),
		raw("a length beyond the end", func(b []byte) []byte {
			binary.BigEndian.PutUint16(b[len(b)-6:], 200)
			return b
		}),
		raw("a length of three bytes", func(b []byte) []byte {
			binary.BigEndian.PutUint16(b[len(b)-6:], 3)
			return b
		}),
		raw("a name that points to itself", func(b []byte) []byte {
			at := questionEnd(b)
			binary.BigEndian.PutUint16(b[at:], 0xc000|uint16(at)) //nolint:gosec // below 512
			return b
		}),
		raw("a name that points forward", func(b []byte) []byte {
			at := questionEnd(b)
			binary.BigEndian.PutUint16(b[at:], 0xc000|uint16(at+2)) //nolint:gosec // below 512
			return b
		}),
		raw("a name that points into the header", func(b []byte) []byte {
			binary.BigEndian.PutUint16(b[questionEnd(b):], 0xc002)
			return b
		}),
		raw("a label of an unknown kind", func(b []byte) []byte { b[headerLength] = 0x81; return b }),
		raw("the question in other letters and bytes", func(b []byte) []byte { b[headerLength+1] = 0; return b }),
		{what: "twice, the first with another ID", answers: func(
			_ *forger, _ dnsmessage.Message, _ netip.Addr, right []byte,
		) [][]byte {
			first, second := bytes.Clone(right), bytes.Clone(right)
			first[0] ^= 1
			second[1] ^= 0x80
			return [][]byte{first, second}
		}},
		{what: "every other ID of 300", answers: func(_ *forger, _ dnsmessage.Message, _ netip.Addr, right []byte) [][]byte {
			var all [][]byte
			for i := range uint16(300) {
				b := bytes.Clone(right)
				binary.BigEndian.PutUint16(b, binary.BigEndian.Uint16(right)+1+i)
				all = append(all, b)
			}
			return all
		}},
		{
			what: "from another address", from: func(f *forger) *net.UDPConn { return f.port53 },
			answers: func(_ *forger, _ dnsmessage.Message, _ netip.Addr, right []byte) [][]byte { return [][]byte{right} },
		},
		{
			what: "from another port", from: func(f *forger) *net.UDPConn { return f.portOther },
			answers: func(_ *forger, _ dnsmessage.Message, _ netip.Addr, right []byte) [][]byte { return [][]byte{right} },
		},
	}
	for what, records := range map[string]func(question string, target netip.Addr) []dnsmessage.Resource{
		"its address": func(question string, target netip.Addr) []dnsmessage.Resource {
			return []dnsmessage.Resource{addressRecord(question, target)}
		},
		"an alias of a selected name": func(question string, target netip.Addr) []dnsmessage.Resource {
			return []dnsmessage.Resource{alias(question, selected), addressRecord(selected, target)}
		},
		"a second record, of a selected name": func(question string, target netip.Addr) []dnsmessage.Resource {
			return []dnsmessage.Resource{
				addressRecord(question, netip.MustParseAddr("198.51.100.1")), addressRecord(selected, target),
			}
		},
		"a selected name as the alias": func(question string, target netip.Addr) []dnsmessage.Resource {
			return []dnsmessage.Resource{alias(selected, question), addressRecord(question, target)}
		},
	} {
		for i, question := range []string{
			"%d.other.example.", "%d.service.example.evil.example.", "%d.xservice.example.", "a.%d.service.example.",
		} {
			list = append(list, about("about "+question+": "+what, fmt.Sprintf(question, i+10*len(list)), records))
		}
	}
	for what, a := range inside {
		for _, kind := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeAAAA} {
			if a.Is4() == (kind == dnsmessage.TypeA) {
				list = append(list, forgery{what: "the address of " + what, kind: kind, target: a, answers: func(
					_ *forger, _ dnsmessage.Message, _ netip.Addr, right []byte,
				) [][]byte {
					return [][]byte{right}
				}})
			}
		}
	}
	return list
}

// TestNothingOpensThatNamesDoNotAllow answers the queries of a pod with every kind of message from which sluice-dns
// must learn no address.
func TestNothingOpensThatNamesDoNotAllow(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "other")
	client, other := pods[0], pods[1]
	s := &nameServer{world: n.outside(t)}
	f := &forger{t: t, world: s.world}
	inside := map[string]netip.Addr{"a pod": other.IPv4, "a pod by IPv6": other.IPv6}
	for i, a := range n.Addresses() {
		inside[fmt.Sprintf("the node, %d", i)] = a
	}
	attempts := forgeries(inside)
	if len(attempts) < 50 {
		t.Fatalf("%d attempts, want 50 or more", len(attempts))
	}
	byName := make(map[string]*forgery)
	for i := range attempts {
		a := &attempts[i]
		if a.name == "" {
			a.name = fmt.Sprintf("f%d.service.example.", i)
		}
		if a.kind == 0 {
			a.kind = dnsmessage.TypeA
		}
		if !a.target.IsValid() {
			a.target = netip.AddrFrom4([4]byte{198, 51, 100, byte(10 + i)})
		}
		byName[a.name] = a
	}
	s.forge = func(query dnsmessage.Message, client netip.AddrPort, send func([]byte)) bool {
		a := byName[query.Questions[0].Name.String()]
		if a == nil {
			return false
		}
		right := reply(f, query, func(m *dnsmessage.Message) {
			m.Answers = []dnsmessage.Resource{addressRecord(a.name, a.target)}
		})
		for _, b := range a.answers(f, query, a.target, right) {
			if a.from == nil {
				send(b)
				continue
			}
			_, _ = a.from(f).WriteToUDPAddrPort(b, client)
		}
		return true
	}
	s.start(t, n)
	for _, c := range []struct {
		at   netip.AddrPort
		conn **net.UDPConn
	}{
		{netip.AddrPortFrom(rotating4.Addr().Next(), 53), &f.port53},
		{netip.AddrPortFrom(s.world.IPv4, 5353), &f.portOther},
	} {
		conn, err := s.world.ListenPacket(c.at)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		*c.conn = conn
	}
	policies := n.policies(t)
	enforce(t, policies, namesPolicy)
	drops := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})

	var wg sync.WaitGroup
	for i := range attempts {
		r := newResolver(t, client, netip.AddrPortFrom(s.world.IPv4, 53))
		wg.Go(func() { _, _, _ = r.ask(attempts[i].name, attempts[i].kind, 1) })
	}
	wg.Wait()
	ctx, cancel := deadline(t)
	defer cancel()
	stream, err := policies.ListNames(ctx, &policyv1.ListNamesRequest{Pattern: "*"})
	if err != nil {
		t.Fatal(err)
	}
	names, err := receiveAll(stream)
	if err != nil {
		t.Fatal(err)
	}
	known := make(map[netip.Addr]string)
	for _, m := range names {
		for _, a := range m.GetName().GetAddresses() {
			known[netip.MustParseAddr(a.GetAddress())] = m.GetName().GetName()
		}
	}
	selected := func(learned string) bool {
		rest, ok := strings.CutSuffix(learned, ".service.example.")
		return ok && !strings.Contains(rest, ".")
	}
	for i := range attempts {
		a := &attempts[i]
		if learned := known[a.target]; selected(learned) {
			t.Errorf("%s: %s was learned for %s", a.what, a.target, learned)
		}
		to := s.world
		to.IPv4, to.IPv6 = a.target, netip.Addr{}
		if a.target.Is6() {
			to.IPv4, to.IPv6 = netip.Addr{}, a.target
		}
		if denied := n.wantDenied(t, drops, client, to, servedPort); len(denied) == 0 {
			t.Errorf("%s: %s is open", a.what, a.target)
		}
	}
	// The same server and client, with a right answer.
	r := newResolver(t, client, netip.AddrPortFrom(s.world.IPv4, 53))
	_, addresses, err := r.ask("right.service.example.", dnsmessage.TypeA, 3)
	if err != nil || len(addresses) != 1 {
		t.Fatalf("%v, %v", addresses, err)
	}
	if err := talk(ctx, client, netip.AddrPortFrom(addresses[0], servedPort)); err != nil {
		t.Errorf("connect to %s after a right answer: %v", addresses[0], err)
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// secret is the text that a pod tries to pass to a server.
const secret = "smuggled"

// sink is a server that records what arrives, whatever that is.
type sink struct {
	mu   sync.Mutex
	data bytes.Buffer // guarded by mu
}

func (s *sink) add(b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.data.Write(b)
}

func (s *sink) has(text string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return bytes.Contains(bytes.ToLower(s.data.Bytes()), []byte(text))
}

// newSink listens over UDP and TCP, and answers nothing.
func newSink(t *testing.T, in pod.Pod, at netip.AddrPort) *sink {
	t.Helper()
	s := &sink{}
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	socket, err := in.ListenPacket(at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.Close() })
	l, err := in.Listen(at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	wg.Go(func() {
		buf := make([]byte, 1<<16)
		for {
			size, _, err := socket.ReadFromUDPAddrPort(buf)
			if err != nil {
				return // the socket was closed
			}
			s.add(buf[:size])
		}
	})
	wg.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return // the listener was closed
			}
			t.Cleanup(func() { _ = c.Close() })
			wg.Go(func() {
				buf := make([]byte, 4096)
				for {
					size, err := c.Read(buf)
					s.add(buf[:size])
					if err != nil {
						return
					}
				}
			})
		}
	})
	return s
}

// tunnels returns the messages by which a pod tries to pass a secret to a server at port 53.
func tunnels(t *testing.T) map[string][]byte {
	t.Helper()
	refused, allowed := secret+".blocked.test.", "right.example."
	packed := func(m dnsmessage.Message) []byte {
		b, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	of := func(name string, change func(m *dnsmessage.Message)) []byte {
		var m dnsmessage.Message
		if err := m.Unpack(queryFor(3, name, dnsmessage.TypeTXT)); err != nil {
			t.Fatal(err)
		}
		change(&m)
		return packed(m)
	}
	text := dnsmessage.Resource{
		Header: dnsmessage.ResourceHeader{Name: dnsName(allowed), Type: dnsmessage.TypeTXT, Class: dnsmessage.ClassINET},
		Body:   &dnsmessage.TXTResource{TXT: []string{secret}},
	}
	option := func(code uint16) dnsmessage.Resource {
		var h dnsmessage.ResourceHeader
		if err := h.SetEDNS0(1232, dnsmessage.RCodeSuccess, false); err != nil {
			t.Fatal(err)
		}
		return dnsmessage.Resource{Header: h, Body: &dnsmessage.OPTResource{
			Options: []dnsmessage.Option{{Code: code, Data: []byte(secret)}},
		}}
	}
	capitals := strings.ToUpper(secret) + ".BLOCKED.TEST."
	right := queryFor(3, allowed, dnsmessage.TypeA)
	pointer := slices.Concat(right[:12], []byte{8}, []byte(secret), []byte{0xc0, 12, 0, 1, 0, 1})
	return map[string][]byte{
		"a refused name":                                   queryFor(3, refused, dnsmessage.TypeA),
		"a refused name in capitals":                       queryFor(3, capitals, dnsmessage.TypeA),
		"a refused name with an allowed one as its prefix": queryFor(3, "right.example."+refused, dnsmessage.TypeA),
		"a refused name for another class": of(refused, func(m *dnsmessage.Message) {
			m.Questions[0].Class = dnsmessage.ClassCHAOS
		}),
		"a name that begins with a refused byte": queryFor(3, "\x00"+refused, dnsmessage.TypeA),
		"two questions, the second refused": of(allowed, func(m *dnsmessage.Message) {
			m.Questions = append(m.Questions, dnsmessage.Question{
				Name: dnsName(refused), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET,
			})
		}),
		"two allowed questions and a text": of(allowed, func(m *dnsmessage.Message) {
			m.Questions = append(m.Questions, m.Questions[0])
			m.Additionals = []dnsmessage.Resource{text}
		}),
		"no question": of(allowed, func(m *dnsmessage.Message) {
			m.Questions, m.Additionals = nil, []dnsmessage.Resource{option(65001)}
		}),
		"records of answers": of(allowed, func(m *dnsmessage.Message) { m.Answers = []dnsmessage.Resource{text} }),
		"records of another": of(refused, func(m *dnsmessage.Message) { m.Authorities = []dnsmessage.Resource{text} }),
		"two OPT records": of(allowed, func(m *dnsmessage.Message) {
			m.Additionals = []dnsmessage.Resource{option(65001), option(65002)}
		}),
		"an update": of(allowed, func(m *dnsmessage.Message) {
			m.OpCode, m.Authorities = 5, []dnsmessage.Resource{text}
		}),
		"a notification": of(allowed, func(m *dnsmessage.Message) {
			m.OpCode, m.Additionals = 4, []dnsmessage.Resource{text}
		}),
		"a status query": of(allowed, func(m *dnsmessage.Message) {
			m.OpCode, m.Additionals = 2, []dnsmessage.Resource{option(65001)}
		}),
		"a response": of(allowed, func(m *dnsmessage.Message) {
			m.Response, m.Answers = true, []dnsmessage.Resource{text}
		}),
		"data behind the end":                      append(bytes.Clone(right), secret...),
		"a pointer in the question that is a loop": pointer,
		"a header and no question":                 append(bytes.Clone(right[:12]), secret...),
		"a label that is cut":                      append(bytes.Clone(right[:12]), "\x3f"+secret...),
		"a label of an unknown kind":               append(bytes.Clone(right[:12]), "\x88"+secret...),
		"a text that is no DNS":                    []byte("GET /" + secret + " HTTP/1.1\r\n\r\n"),
		"the banner of SSH":                        []byte("SSH-2.0-" + secret + "\r\n"),
		"a long text":                              bytes.Repeat([]byte(secret), 600), // several fragments
		"a large query": of(refused, func(m *dnsmessage.Message) { // several fragments
			for range 40 {
				m.Additionals = append(m.Additionals, text)
			}
			m.Additionals = append(m.Additionals, option(65001))
		}),
	}
}

// TestNothingPassesPort53ThatNamesDoNotAllow sends a secret to a server at port 53 in every kind of message, over UDP
// and over TCP: as a message, in segments of one byte, behind an allowed query, and without a length. The server
// receives the allowed queries and nothing else.
func TestNothingPassesPort53ThatNamesDoNotAllow(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	client := n.addPods(t, "client")[0]
	world := n.outside(t)
	n.awaitProxy(t)
	server := netip.AddrPortFrom(world.IPv4, 53)
	s := newSink(t, world, server)
	enforce(t, n.policies(t), streamPolicy)
	attempts := tunnels(t)
	framed := func(b []byte) []byte { return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...) }
	count := 0
	for what, message := range attempts {
		if len(message) < 1<<16 {
			r := newResolver(t, client, server)
			if _, err := r.c.Write(message); err != nil {
				t.Errorf("%s: %v", what, err)
			}
			count++
		}
		for how, send := range map[string]func(c net.Conn) error{
			"a message": func(c net.Conn) error { return second(c.Write(framed(message))) },
			"segments": func(c net.Conn) error {
				whole := framed(message)
				for i := range min(len(whole), 60) {
					if _, err := c.Write(whole[i : i+1]); err != nil {
						return err
					}
				}
				return second(c.Write(whole[min(len(whole), 60):]))
			},
			"behind an allowed query": func(c net.Conn) error {
				return second(c.Write(slices.Concat(framed(queryFor(4, "before.example.", dnsmessage.TypeA)), framed(message))))
			},
			"without a length": func(c net.Conn) error { return second(c.Write(message)) },
		} {
			c := dialDNS(t, client, server)
			// The connection may be reset meanwhile.
			_ = c.SetDeadline(time.Now().Add(time.Second))
			_ = send(c)
			_ = c.(*net.TCPConn).CloseWrite()
			count++
			_, _ = c.Read(make([]byte, 1))
			if s.has(secret) {
				t.Fatalf("%s over TCP, %s, has reached the server", what, how)
			}
			_ = c.Close()
		}
	}
	// The same client and server, with allowed queries, which are behind the others in each queue.
	r := newResolver(t, client, server)
	_, _, _ = r.ask("last.example.", dnsmessage.TypeA, 1)
	_ = writeDNS(dialDNS(t, client, server), queryFor(5, "stream.example.", dnsmessage.TypeA))
	servicetest.Eventually(t, "the allowed queries arrive", func() bool {
		return s.has("last") && s.has("stream") && s.has("before")
	})
	if s.has(secret) {
		t.Error("a message over UDP has reached the server")
	}
	if count < 100 {
		t.Errorf("%d attempts", count)
	}
	t.Logf("%d attempts", count)
}

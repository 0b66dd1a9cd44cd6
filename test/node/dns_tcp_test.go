// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// streamServer serves a nameServer over TCP, and remembers its clients.
type streamServer struct {
	*nameServer
	mu      sync.Mutex
	clients []netip.AddrPort // guarded by mu
	ended   int              // connections that their client has closed; guarded by mu
}

// listenTCP answers queries over TCP to an address of a namespace, in the order of their arrival.
func (s *nameServer) listenTCP(t *testing.T, in pod.Pod, at netip.AddrPort) *streamServer {
	t.Helper()
	l, err := in.Listen(at)
	if err != nil {
		t.Fatal(err)
	}
	out := &streamServer{nameServer: s}
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	t.Cleanup(func() { _ = l.Close() })
	wg.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return // the listener was closed
			}
			out.mu.Lock()
			out.clients = append(out.clients, c.RemoteAddr().(*net.TCPAddr).AddrPort())
			out.mu.Unlock()
			stop := context.AfterFunc(t.Context(), func() { _ = c.Close() })
			wg.Go(func() {
				defer c.Close()
				defer stop()
				for {
					b, err := readDNS(c)
					if err != nil {
						out.mu.Lock()
						out.ended++
						out.mu.Unlock()
						return
					}
					var query dnsmessage.Message
					if query.Unpack(b) != nil || len(query.Questions) != 1 {
						return
					}
					answer := s.answer
					if s.stream != nil {
						answer = s.stream
					}
					if writeDNS(c, answer(query)) != nil {
						return
					}
				}
			})
		}
	})
	return out
}

// last returns the address of the client that has connected last.
func (s *streamServer) last() netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.clients) == 0 {
		return netip.AddrPort{}
	}
	return s.clients[len(s.clients)-1]
}

func readDNS(c io.Reader) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return nil, err
	}
	b := make([]byte, binary.BigEndian.Uint16(size[:]))
	_, err := io.ReadFull(c, b)
	return b, err
}

func writeDNS(c io.Writer, b []byte) error {
	_, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...))
	return err
}

// dialDNS opens a connection to a DNS server.
func dialDNS(t *testing.T, from pod.Pod, to netip.AddrPort) net.Conn {
	t.Helper()
	ctx, cancel := deadline(t)
	defer cancel()
	c, err := from.Dial(ctx, to)
	if err != nil {
		t.Fatalf("connect to %s: %v", to, err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func queryFor(id uint16, name string, kind dnsmessage.Type) []byte {
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: id, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: kind, Class: dnsmessage.ClassINET}},
	}
	b, err := m.Pack()
	if err != nil {
		panic(err)
	}
	return b
}

// askByTCP sends a query by a connection, and returns the result and the addresses of the answer.
func askByTCP(c net.Conn, name string, kind dnsmessage.Type) (dnsmessage.RCode, []netip.Addr, error) {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return 0, nil, err
	}
	if err := writeDNS(c, queryFor(7, name, kind)); err != nil {
		return 0, nil, err
	}
	b, err := readDNS(c)
	if err != nil {
		return 0, nil, err
	}
	var m dnsmessage.Message
	if err := m.Unpack(b); err != nil {
		return 0, nil, err
	}
	if m.ID != 7 || !m.Response || len(m.Questions) != 1 || m.Questions[0].Name.String() != name {
		return 0, nil, fmt.Errorf("%+v does not answer the query for %s", m, name)
	}
	return m.RCode, addressesOf(m), nil
}

// askAnew asks by a new connection, again and again while the connections are reset, as resolvers do.
func askAnew(
	ctx context.Context, from pod.Pod, to netip.AddrPort, name string, kind dnsmessage.Type,
) ([]netip.Addr, error) {
	for {
		var addresses []netip.Addr
		c, err := from.Dial(ctx, to)
		if err == nil {
			var code dnsmessage.RCode
			code, addresses, err = askByTCP(c, name, kind)
			_ = c.Close()
			if err == nil && code != dnsmessage.RCodeSuccess {
				err = fmt.Errorf("%s: %v", name, code)
			}
		}
		if err == nil || ctx.Err() != nil {
			return addresses, err
		}
		time.Sleep(20 * time.Millisecond) // before the query is repeated
	}
}

const streamPolicy = `
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client}
spec:
  endpointSelector: {matchLabels: {app: client}}
  egress:
  - toCIDR: [203.0.113.2/32, "2001:db8:ffff::2/128"]
    toPorts:
    - ports: [{protocol: ANY, port: "53"}]
      rules: {dns: [{matchPattern: "**.example"}]}
  - toEndpoints: [{matchLabels: {app: dns}}]
    toPorts:
    - ports: [{protocol: TCP, port: "5353"}]
      rules: {dns: [{matchPattern: "**.example"}]}
  - toFQDNs: [{matchPattern: "*.service.example"}]
    toPorts: [{ports: [{protocol: TCP, port: "7003"}]}]
`

func typeFor(server netip.Addr) dnsmessage.Type {
	if server.Is6() {
		return dnsmessage.TypeAAAA
	}
	return dnsmessage.TypeA
}

// wantNames checks by one connection that names are refused in the server's name, that answers teach, and that the
// server sees the client's own address and port.
func wantNames(t *testing.T, client pod.Pod, s *streamServer, server netip.AddrPort) {
	t.Helper()
	kind := typeFor(server.Addr())
	c := dialDNS(t, client, server)
	defer c.Close()
	before := s.queries("blocked.test.")
	code, addresses, err := askByTCP(c, "blocked.test.", kind)
	if err != nil || code != dnsmessage.RCodeRefused || len(addresses) > 0 || s.queries("blocked.test.") != before {
		t.Fatalf("blocked.test by %s: %v, %v, %v, want it refused on the node", server, code, addresses, err)
	}
	for i := range 20 {
		name := fmt.Sprintf("t%d.service.example.", i%10)
		code, addresses, err := askByTCP(c, name, kind)
		if err != nil || code != dnsmessage.RCodeSuccess || len(addresses) != 1 {
			t.Fatalf("%s by %s: %v, %v, %v", name, server, code, addresses, err)
		}
		ctx, cancel := deadline(t)
		if err := talk(ctx, client, netip.AddrPortFrom(addresses[0], servedPort)); err != nil {
			t.Errorf("connect to %s, %s, after the answer: %v", name, addresses[0], err)
		}
		cancel()
	}
	if server.Addr() == s.world.IPv4 || server.Addr() == s.world.IPv6 {
		return // which may see an address of the node
	}
	if want := c.LocalAddr().(*net.TCPAddr).AddrPort(); s.last() != want {
		t.Errorf("the server %s saw a connection of %s, want %s", server, s.last(), want)
	}
}

// TestDNSOverTCP resolves names over TCP by servers outside and in a pod of the same node.
func TestDNSOverTCP(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "dns")
	client, server := pods[0], pods[1]
	s := n.nameServer(t)
	enforce(t, n.policies(t), streamPolicy)
	for _, address := range server.Addresses() {
		at := netip.AddrPortFrom(address, 5353)
		wantNames(t, client, s.listenTCP(t, server, at), at)
	}
	for _, address := range s.world.Addresses() {
		at := netip.AddrPortFrom(address, 53)
		wantNames(t, client, s.listenTCP(t, s.world, at), at)
	}
}

// TestPipelinedQueriesOverTCP sends many queries before it reads the first answer.
func TestPipelinedQueriesOverTCP(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "dns")
	client, server := pods[0], netip.AddrPortFrom(pods[1].IPv4, 5353)
	s := n.nameServer(t)
	s.listenTCP(t, pods[1], server)
	enforce(t, n.policies(t), streamPolicy)
	c := dialDNS(t, client, server)
	const queries = 100
	var all []byte
	for i := range queries {
		name := fmt.Sprintf("p%d.service.example.", i)
		if i%3 == 0 {
			name = "blocked.test."
		}
		b := queryFor(uint16(i), name, dnsmessage.TypeA)
		all = append(binary.BigEndian.AppendUint16(all, uint16(len(b))), b...)
	}
	if err := errors.Join(c.SetDeadline(time.Now().Add(2*patience)), second(c.Write(all))); err != nil {
		t.Fatal(err)
	}
	answered := make(map[uint16]bool)
	for range queries {
		b, err := readDNS(c)
		if err != nil {
			t.Fatalf("after %d answers: %v", len(answered), err)
		}
		var m dnsmessage.Message
		if err := m.Unpack(b); err != nil || answered[m.ID] || (m.RCode == dnsmessage.RCodeRefused) != (m.ID%3 == 0) {
			t.Fatalf("%+v, %v; answered before: %t", m.Header, err, answered[m.ID])
		}
		answered[m.ID] = true
	}
}

func second[T any](_ T, err error) error { return err }

// TestFaultKillDNSOverTCP kills sluice-dns while connections are open. The clients see that their connections end.
// The next process serves connections that were opened in the meantime.
func TestFaultKillDNSOverTCP(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "dns")
	client, server := pods[0], netip.AddrPortFrom(pods[1].IPv4, 5353)
	s := n.nameServer(t)
	s.listenTCP(t, pods[1], server)
	enforce(t, n.policies(t), streamPolicy)
	for round := range 3 {
		c := dialDNS(t, client, server)
		if _, _, err := askByTCP(c, "k.service.example.", dnsmessage.TypeA); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		defer cancel()
		var meanwhile sync.WaitGroup
		for i := range 10 {
			meanwhile.Go(func() {
				name := fmt.Sprintf("m%d-%d.service.example.", round, i)
				addresses, err := askAnew(ctx, client, server, name, dnsmessage.TypeA)
				if err == nil {
					err = talk(ctx, client, netip.AddrPortFrom(addresses[0], servedPort))
				}
				if err != nil {
					t.Errorf("round %d: %s: %v", round, name, err)
				}
			})
		}
		if err := n.Restart(ctx, devnode.DNS); err != nil {
			t.Fatalf("restart %s: %v", devnode.DNS, err)
		}
		meanwhile.Wait()
		if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		var timeout net.Error
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.As(err, &timeout) && timeout.Timeout() {
			t.Errorf("round %d: the connection of the dead process has %v, want its end", round, err)
		}
	}
}

// TestFaultKillDatapathWhileProxiedConnectionsAreOpen restarts sluice-datapath. Connections through the proxy go on.
func TestFaultKillDatapathWhileProxiedConnectionsAreOpen(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "dns")
	client, server := pods[0], netip.AddrPortFrom(pods[1].IPv4, 5353)
	s := n.nameServer(t)
	s.listenTCP(t, pods[1], server)
	enforce(t, n.policies(t), streamPolicy)
	c := dialDNS(t, client, server)
	for round := range 3 {
		if _, _, err := askByTCP(c, "d.service.example.", dnsmessage.TypeA); err != nil {
			t.Fatalf("round %d: an open connection: %v", round, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		if err := n.Restart(ctx, devnode.Datapath); err != nil {
			t.Fatalf("restart %s: %v", devnode.Datapath, err)
		}
		name := fmt.Sprintf("r%d.service.example.", round)
		if _, err := askAnew(ctx, client, server, name, dnsmessage.TypeA); err != nil {
			t.Errorf("round %d: a new connection: %v", round, err)
		}
		cancel()
	}
}

// TestSilentConnectionsDelayNoOtherPod opens 5,000 connections that send and read nothing. Another pod still resolves
// names over TCP and UDP. A pod with too many connections loses only its own connections.
func TestSilentConnectionsDelayNoOtherPod(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "dns", "client")
	client, flooder, server := pods[0], pods[2], netip.AddrPortFrom(pods[1].IPv4, 5353)
	s := n.nameServer(t)
	s.listenTCP(t, pods[1], server)
	enforce(t, n.policies(t), streamPolicy)
	kept := dialDNS(t, client, server)
	if _, _, err := askByTCP(kept, "kept.service.example.", dnsmessage.TypeA); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var flood sync.WaitGroup
	for range 50 {
		flood.Go(func() {
			var open []net.Conn
			for range 100 {
				c, err := flooder.Dial(ctx, server)
				if err != nil {
					break
				}
				open = append(open, c)
			}
			<-ctx.Done()
			for _, c := range open {
				_ = c.Close()
			}
		})
	}
	udp := newResolver(t, client, netip.AddrPortFrom(s.world.IPv4, 53))
	var times []time.Duration
	for i := range 200 {
		began := time.Now()
		name := fmt.Sprintf("f%d.service.example.", i%10)
		if _, _, err := askByTCP(kept, name, dnsmessage.TypeA); err != nil {
			t.Fatalf("over TCP, query %d: %v", i, err)
		}
		times = append(times, time.Since(began))
		if _, _, err := udp.ask(name, dnsmessage.TypeA, 3); err != nil {
			t.Fatalf("over UDP, query %d: %v", i, err)
		}
	}
	fresh := dialDNS(t, client, server)
	if _, _, err := askByTCP(fresh, "fresh.service.example.", dnsmessage.TypeA); err != nil {
		t.Errorf("a new connection: %v", err)
	}
	cancel()
	flood.Wait()
	slices.Sort(times)
	t.Logf("lookups over TCP during the flood: median %s, 99 %% %s", times[len(times)/2], times[len(times)*99/100])
}

// TestPolicyChangeEndsConnectionsOverTCP changes the names that a pod may look up. The former rules do not continue
// to apply to an open connection.
func TestPolicyChangeEndsConnectionsOverTCP(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "dns")
	client, server := pods[0], netip.AddrPortFrom(pods[1].IPv4, 5353)
	s := n.nameServer(t)
	s.listenTCP(t, pods[1], server)
	policies := n.policies(t)
	enforce(t, policies, streamPolicy)
	c := dialDNS(t, client, server)
	if code, _, err := askByTCP(c, "a.example.", dnsmessage.TypeA); err != nil || code != dnsmessage.RCodeSuccess {
		t.Fatalf("%v, %v", code, err)
	}
	enforce(t, policies, `
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client}
spec:
  endpointSelector: {matchLabels: {app: client}}
  egress:
  - toEndpoints: [{matchLabels: {app: dns}}]
    toPorts:
    - ports: [{protocol: TCP, port: "5353"}]
      rules: {dns: [{matchName: other.example}]}
`)
	before := s.queries("a.example.")
	if code, _, err := askByTCP(c, "a.example.", dnsmessage.TypeA); err == nil && code == dnsmessage.RCodeSuccess ||
		s.queries("a.example.") != before {
		t.Errorf("the open connection resolves a.example: %v, %v", code, err)
	}
	again := dialDNS(t, client, server)
	if code, _, err := askByTCP(again, "a.example.", dnsmessage.TypeA); err != nil || code != dnsmessage.RCodeRefused {
		t.Errorf("a new connection: %v, %v, want a.example refused", code, err)
	}
	if code, _, err := askByTCP(again, "other.example.", dnsmessage.TypeA); err != nil || code != dnsmessage.RCodeSuccess {
		t.Errorf("a new connection: other.example: %v, %v", code, err)
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// Addresses that names of the zone "service.example." have, one after the other. All belong to the host outside.
var (
	rotating4 = netip.MustParsePrefix("198.51.100.0/24")
	rotating6 = netip.MustParsePrefix("2001:db8:aaaa::/64")
)

// servedPort is the port that servers outside listen to.
const servedPort = 7003

// awaitProxy returns when packets reach sluice-dns. Until then they pass under rules that allow every name.
func (n *testNode) awaitProxy(t *testing.T) {
	t.Helper()
	servicetest.EventuallyNil(t, "sluice-dns is attached", func() error {
		st, err := n.datapath.GetStatus(servicetest.Context(t), &datapathv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		for _, p := range st.GetProxies() {
			if p.GetAttached() && p.GetTcpDevice() != "" {
				return nil
			}
		}
		return fmt.Errorf("proxies %v", st.GetProxies())
	})
}

// nameServer is a DNS server outside. Every name exists. Each answer for a name of
// "service.example." contains another address; the other names have the address of the host outside.
type nameServer struct {
	world pod.Pod
	// forge handles the query, instead of answer, if it returns true. send sends from the server's socket.
	forge func(query dnsmessage.Message, client netip.AddrPort, send func([]byte)) bool
	// stream returns the answer to a query over TCP; nil: answer does.
	stream func(query dnsmessage.Message) []byte

	mu    sync.Mutex
	next  uint32   // guarded by mu
	asked []string // guarded by mu; the names of all queries
}

// nameServer starts a DNS server outside, to which routes of the node lead.
func (n *testNode) nameServer(t *testing.T) *nameServer {
	t.Helper()
	n.awaitProxy(t)
	s := &nameServer{world: n.outside(t)}
	s.start(t, n)
	return s
}

func (s *nameServer) start(t *testing.T, n *testNode) {
	t.Helper()
	s.own(t, n, rotating4, rotating6)
	serve(t, s.world, servedPort)
	for _, address := range s.world.Addresses() {
		s.listen(t, s.world, netip.AddrPortFrom(address, 53))
	}
}

// own makes addresses belong to the host outside.
func (s *nameServer) own(t *testing.T, n *testNode, ranges ...netip.Prefix) {
	t.Helper()
	route := func(p netip.Prefix, r netlink.Route) error {
		r.Dst = &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
		r.Family = netlink.FAMILY_V4
		if p.Addr().Is6() {
			r.Family = netlink.FAMILY_V6
		}
		return netlink.RouteAdd(&r)
	}
	for _, p := range ranges {
		gateway := s.world.IPv4
		if p.Addr().Is6() {
			gateway = s.world.IPv6
		}
		if err := pod.In(n.Netns(), func() error { return route(p, netlink.Route{Gw: gateway.AsSlice()}) }); err != nil {
			t.Fatalf("route the addresses of names: %v", err)
		}
		if err := pod.In(s.world.Netns, func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			return errors.Join(netlink.LinkSetUp(lo), route(p, netlink.Route{
				LinkIndex: lo.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
			}))
		}); err != nil {
			t.Fatalf("take the addresses of names: %v", err)
		}
	}
}

// listen also answers queries to an address of a namespace.
func (s *nameServer) listen(t *testing.T, in pod.Pod, at netip.AddrPort) {
	t.Helper()
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	socket, err := in.ListenPacket(at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.Close() })
	wg.Go(func() {
		buf := make([]byte, 2048)
		for {
			size, client, err := socket.ReadFromUDPAddrPort(buf)
			if err != nil {
				return // the socket was closed
			}
			var query dnsmessage.Message
			if query.Unpack(buf[:size]) != nil || len(query.Questions) != 1 {
				continue
			}
			send := func(b []byte) { _, _ = socket.WriteToUDPAddrPort(b, client) }
			if s.forge == nil || !s.forge(query, client, send) {
				send(s.answer(query))
			}
		}
	})
}

// answer returns the answer to a query.
func (s *nameServer) answer(m dnsmessage.Message) []byte {
	q := m.Questions[0]
	s.mu.Lock()
	s.asked = append(s.asked, q.Name.String())
	s.next++
	number := s.next
	s.mu.Unlock()
	m.Response, m.RecursionAvailable = true, true
	head := dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 5}
	four, six := s.world.IPv4.As4(), s.world.IPv6.As16()
	if strings.HasSuffix(q.Name.String(), ".service.example.") {
		four, six = rotating4.Addr().As4(), rotating6.Addr().As16()
		four[3] = byte(number%250 + 1)
		binary.BigEndian.PutUint32(six[12:], number)
	}
	switch q.Type {
	case dnsmessage.TypeA:
		m.Answers = []dnsmessage.Resource{{Header: head, Body: &dnsmessage.AResource{A: four}}}
	case dnsmessage.TypeAAAA:
		m.Answers = []dnsmessage.Resource{{Header: head, Body: &dnsmessage.AAAAResource{AAAA: six}}}
	}
	answer, err := m.Pack()
	if err != nil {
		return nil
	}
	return answer
}

// queries returns the number of queries for a name that have arrived.
func (s *nameServer) queries(name string) (count int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, asked := range s.asked {
		if asked == name {
			count++
		}
	}
	return count
}

// resolver asks one server over one socket, as the resolver of a pod.
type resolver struct {
	c      *net.UDPConn
	number uint16
}

func newResolver(t *testing.T, from pod.Pod, server netip.AddrPort) *resolver {
	t.Helper()
	c, err := from.DialUDP(server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return &resolver{c: c}
}

// ask sends a query and returns the result and the addresses of the answer. It sends again each second, as resolvers
// do, up to "times".
func (r *resolver) ask(name string, kind dnsmessage.Type, times int) (dnsmessage.RCode, []netip.Addr, error) {
	r.number++
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: r.number, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: kind, Class: dnsmessage.ClassINET}},
	}
	query, err := m.Pack()
	if err != nil {
		return 0, nil, err
	}
	buf := make([]byte, 2048)
	for range times {
		if _, err := r.c.Write(query); err != nil {
			return 0, nil, err
		}
		_ = r.c.SetReadDeadline(time.Now().Add(time.Second))
		for {
			size, err := r.c.Read(buf)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if err != nil {
				return 0, nil, err
			}
			var answer dnsmessage.Message
			if err := answer.Unpack(buf[:size]); err != nil {
				return 0, nil, err
			}
			if answer.ID != r.number {
				continue // of an earlier query
			}
			return answer.RCode, addressesOf(answer), nil
		}
	}
	return 0, nil, fmt.Errorf("no answer to %d queries for %s", times, name)
}

func addressesOf(m dnsmessage.Message) (list []netip.Addr) {
	for _, a := range m.Answers {
		switch body := a.Body.(type) {
		case *dnsmessage.AResource:
			list = append(list, netip.AddrFrom4(body.A))
		case *dnsmessage.AAAAResource:
			list = append(list, netip.AddrFrom16(body.AAAA))
		}
	}
	return list
}

const namesPolicy = `
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client}
spec:
  endpointSelector: {matchLabels: {app: client}}
  egress:
  - toCIDR: [203.0.113.2/32, "2001:db8:ffff::2/128"]
    toPorts:
    - ports: [{protocol: UDP, port: "53"}]
      rules: {dns: [{matchPattern: "**.example"}]}
  - toFQDNs: [{matchPattern: "*.service.example"}]
    toPorts: [{ports: [{protocol: TCP, port: "7003"}]}]
`

// TestConnectionAfterTheAnswerIsNeverDenied resolves names to a new address each time, and connects to it at once. A
// query for a name that no DNS rule allows gets REFUSED from sluice-dns, and the server does not see the query. A name
// that only the DNS rule allows resolves, but connections to its addresses are denied.
func TestConnectionAfterTheAnswerIsNeverDenied(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	client := n.addPods(t, "client")[0]
	s := n.nameServer(t)
	enforce(t, n.policies(t), namesPolicy)
	drops := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})
	for _, server := range s.world.Addresses() {
		r := newResolver(t, client, netip.AddrPortFrom(server, 53))
		kind := dnsmessage.TypeA
		if server.Is6() {
			kind = dnsmessage.TypeAAAA
		}
		code, addresses, err := r.ask("blocked.test.", kind, 3)
		if err != nil || code != dnsmessage.RCodeRefused || len(addresses) > 0 || s.queries("blocked.test.") > 0 {
			t.Fatalf("blocked.test by %s: %v, %v, %v; the server got %d queries; want it refused on the node", server,
				code, addresses, err, s.queries("blocked.test."))
		}
		code, addresses, err = r.ask("other.example.", kind, 3)
		if err != nil || code != dnsmessage.RCodeSuccess || !slices.Equal(addresses, []netip.Addr{server}) {
			t.Fatalf("other.example by %s: %v, %v, %v", server, code, addresses, err)
		}
		mark := drops.mark()
		for i := range 100 {
			name := fmt.Sprintf("n%d.service.example.", i%10)
			code, addresses, err := r.ask(name, kind, 1)
			if err != nil || code != dnsmessage.RCodeSuccess || len(addresses) != 1 {
				t.Fatalf("%s by %s: %v, %v, %v", name, server, code, addresses, err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			err = talk(ctx, client, netip.AddrPortFrom(addresses[0], servedPort))
			cancel()
			if err != nil {
				t.Errorf("connect to %s, %s, after the answer: %v", name, addresses[0], err)
			}
		}
		if denied := drops.since(mark); len(denied) > 0 {
			t.Errorf("%d packets to answered addresses were denied, the first: %v", len(denied), denied[0])
		}
	}
	n.wantDenied(t, drops, client, s.world, servedPort) // other.example
}

// TestFaultKillDNSLosesNoEnforcedName kills sluice-dns. Connections to addresses that are already enforced keep
// working. Names resolve again when the process has started: the resolver repeats its query each second.
func TestFaultKillDNSLosesNoEnforcedName(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	client := n.addPods(t, "client")[0]
	s := n.nameServer(t)
	enforce(t, n.policies(t), namesPolicy)
	r := newResolver(t, client, netip.AddrPortFrom(s.world.IPv4, 53))
	var known []netip.Addr
	for i := range 5 {
		_, addresses, err := r.ask(fmt.Sprintf("n%d.service.example.", i), dnsmessage.TypeA, 3)
		if err != nil || len(addresses) != 1 {
			t.Fatalf("%v, %v", addresses, err)
		}
		known = append(known, addresses[0])
	}
	for round := range 5 {
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		if err := n.Restart(ctx, devnode.DNS); err != nil {
			t.Fatalf("restart %s: %v", devnode.DNS, err)
		}
		for _, a := range known {
			if err := talk(ctx, client, netip.AddrPortFrom(a, servedPort)); err != nil {
				t.Errorf("round %d: connect to %s: %v", round, a, err)
			}
		}
		name := fmt.Sprintf("m%d.service.example.", round)
		_, addresses, err := r.ask(name, dnsmessage.TypeA, 10)
		if err != nil || len(addresses) != 1 {
			t.Fatalf("round %d: %s: %v, %v", round, name, addresses, err)
		}
		if err := talk(ctx, client, netip.AddrPortFrom(addresses[0], servedPort)); err != nil {
			t.Errorf("round %d: connect to %s: %v", round, addresses[0], err)
		}
		known = append(known, addresses[0])
		cancel()
	}
}

// TestNodeLocalDNSCacheTeaches resolves names by a server on the node itself, at an address of a device of its own.
func TestNodeLocalDNSCacheTeaches(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	client := n.addPods(t, "client")[0]
	s := n.nameServer(t)
	cache := netip.MustParseAddr("169.254.20.10")
	if err := pod.In(n.Netns(), func() error {
		attributes := netlink.NewLinkAttrs()
		attributes.Name = "nodelocaldns"
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attributes}); err != nil {
			return err
		}
		return address(attributes.Name, []netip.Prefix{netip.PrefixFrom(cache, 32)})
	}); err != nil {
		t.Fatalf("make the device of the cache: %v", err)
	}
	s.listen(t, pod.Pod{Name: "node", Netns: n.Netns()}, netip.AddrPortFrom(cache, 53))
	enforce(t, n.policies(t), namesPolicyOf(`
  - toEntities: [host]
    toPorts:
    - ports: [{protocol: UDP, port: "53"}]
      rules: {dns: [{matchName: host.service.example}]}
`))
	s.wantTaught(t, client, netip.AddrPortFrom(cache, 53), "host.service.example.", "pod.service.example.")
}

// TestDNSOnPort5353OfProtocolANYTeaches resolves names by a pod at another port, in both families, by a rule for every
// protocol.
func TestDNSOnPort5353OfProtocolANYTeaches(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "dns")
	client, server := pods[0], pods[1]
	s := n.nameServer(t)
	enforce(t, n.policies(t), namesPolicyOf(`
  - toEndpoints: [{matchLabels: {app: dns}}]
    toPorts:
    - ports: [{protocol: ANY, port: "5353"}]
      rules: {dns: [{matchName: pod.service.example}]}
`))
	for _, a := range server.Addresses() {
		at := netip.AddrPortFrom(a, 5353)
		s.listen(t, server, at)
		s.wantTaught(t, client, at, "pod.service.example.", "host.service.example.")
	}
}

// namesPolicyOf returns a policy that allows connections to names below service.example, with a DNS rule.
func namesPolicyOf(dnsRule string) string {
	return `
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client}
spec:
  endpointSelector: {matchLabels: {app: client}}
  egress:` + dnsRule + `
  - toFQDNs: [{matchPattern: "*.service.example"}]
    toPorts: [{ports: [{protocol: TCP, port: "7003"}]}]
`
}

// wantTaught fails the test unless a server teaches a name, and another name is refused on the node.
func (s *nameServer) wantTaught(t *testing.T, client pod.Pod, server netip.AddrPort, name, refused string) {
	t.Helper()
	kind := dnsmessage.TypeA
	if server.Addr().Is6() {
		kind = dnsmessage.TypeAAAA
	}
	before := s.queries(refused)
	if code, _, err := newResolver(t, client, server).ask(refused, kind, 3); err != nil ||
		code != dnsmessage.RCodeRefused || s.queries(refused) != before {
		t.Errorf("%s by %s: %v, %v, want it refused on the node", refused, server, code, err)
	}
	wantOpen(t, client, resolve(t, client, server, name))
}

// TestDNSRuleOfEveryNameDropsNoOtherMessage exchanges messages that are no DNS at port 53: a rule that allows every
// name denies nothing. The last message has several fragments.
func TestDNSRuleOfEveryNameDropsNoOtherMessage(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "dns")
	client, server := pods[0], pods[1]
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	socket, err := server.ListenPacket(netip.AddrPortFrom(server.IPv4, 53))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.Close() })
	wg.Go(func() {
		buf := make([]byte, 1<<16)
		for {
			size, from, err := socket.ReadFromUDPAddrPort(buf)
			if err != nil {
				return // the socket was closed
			}
			_, _ = socket.WriteToUDPAddrPort(slices.Concat([]byte("dns"), buf[:size]), from)
		}
	})
	r := newResolver(t, client, netip.AddrPortFrom(server.IPv4, 53))
	messages := []string{"?", "", strings.Repeat("GET / ", 1000)}
	for what, others := range map[string]string{"alone": "", "beside a plain rule": "  - toEntities: [cluster]\n"} {
		enforce(t, n.policies(t), `
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: baseline}
spec:
  endpointSelector: {matchLabels: {app: client}}
  egress:
`+others+`  - toEndpoints: [{matchLabels: {app: dns}}]
    toPorts:
    - ports: [{port: "53", protocol: ANY}]
      rules: {dns: [{matchPattern: "*"}]}
`)
		for _, message := range messages {
			if err := r.exchange(message, 5); err != nil {
				t.Errorf("%s: a message of %d bytes: %v", what, len(message), err)
			}
		}
	}
}

// exchange sends a message until it gets its answer, at most so many times.
func (r *resolver) exchange(message string, times int) error {
	buf := make([]byte, 1<<16)
	for range times {
		if _, err := r.c.Write([]byte(message)); err != nil {
			return err
		}
		_ = r.c.SetReadDeadline(time.Now().Add(time.Second))
		for {
			size, err := r.c.Read(buf)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if err != nil {
				return err
			}
			if string(buf[:size]) == "dns"+message {
				return nil
			}
		}
	}
	return fmt.Errorf("no answer to %d messages", times)
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

const dnsAcrossNodes = `
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client, namespace: test}
spec:
  endpointSelector: {matchLabels: {app: client}}
  egress:
  - toEntities: [all]
    toPorts:
    - ports: [{protocol: TCP, port: "53"}]
      rules: {dns: [{matchName: allowed.example}]}
`

// serveDNS answers each query over TCP without an error. It returns the addresses of its clients.
func serveDNS(t *testing.T, in pod.Pod, at netip.Addr) <-chan netip.Addr {
	t.Helper()
	l, err := in.Listen(netip.AddrPortFrom(at, 53))
	if err != nil {
		t.Fatal(err)
	}
	clients := make(chan netip.Addr, 16)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return // the listener was closed
			}
			clients <- c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
			stop := context.AfterFunc(t.Context(), func() { _ = c.Close() }) // the client may be gone without a FIN
			go func() {
				defer c.Close()
				defer stop()
				for {
					b, err := readMessage(c)
					var m dnsmessage.Message
					if err != nil || m.Unpack(b) != nil {
						return
					}
					m.Response = true
					if b, err = m.Pack(); err != nil || writeMessage(c, b) != nil {
						return
					}
				}
			}()
		}
	}()
	return clients
}

func readMessage(c io.Reader) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return nil, err
	}
	b := make([]byte, binary.BigEndian.Uint16(size[:]))
	_, err := io.ReadFull(c, b)
	return b, err
}

func writeMessage(c io.Writer, b []byte) error {
	_, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...))
	return err
}

// lookUp sends a query for a name over TCP.
func lookUp(c net.Conn, name string) (dnsmessage.RCode, error) {
	m := dnsmessage.Message{
		Header: dnsmessage.Header{ID: 7},
		Questions: []dnsmessage.Question{{
			Name: dnsmessage.MustNewName(name), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET,
		}},
	}
	b, err := m.Pack()
	if err != nil {
		return 0, err
	}
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return 0, err
	}
	if err := writeMessage(c, b); err != nil {
		return 0, err
	}
	if b, err = readMessage(c); err == nil {
		err = m.Unpack(b)
	}
	return m.RCode, err
}

// TestDNSOverTCPReachesServersElsewhere resolves names with servers in a pod of another node, on another node, and
// outside of the cluster. The pod's server sees the client's own address; outside, the client has its node's address.
func TestDNSOverTCPReachesServersElsewhere(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: mode, Options: devnode.Options{
				Args: map[string][]string{devnode.Datapath: {"--masquerade-enabled=true"}},
			}})
			here, there := c.nodes[0], c.nodes[1]
			client, server := here.add(t, "client"), there.add(t, "dns")
			here.identityOf(t, server, there)
			there.identityOf(t, client, here)
			outside := c.plug(t)
			c.enforced(t, dnsAcrossNodes)
			for family, own := range client.Addresses() {
				for what, s := range map[string]struct {
					in   pod.Pod
					at   netip.Addr
					seen netip.Addr // address of the client that the server sees; zero: not checked
				}{
					"a pod of another node": {server, server.Addresses()[family], own},
					"another node":          {there.host(), there.Addresses()[family], netip.Addr{}},
					"outside":               {outside, outside.Addresses()[family], here.Addresses()[family]},
				} {
					clients := serveDNS(t, s.in, s.at)
					servicetest.EventuallyNil(t, fmt.Sprintf("DNS over TCP by %s, %s", what, s.at), func() error {
						conn, err := client.Dial(t.Context(), netip.AddrPortFrom(s.at, 53))
						if err != nil {
							return err
						}
						defer conn.Close()
						if code, err := lookUp(conn, "blocked.example."); err != nil || code != dnsmessage.RCodeRefused {
							return fmt.Errorf("blocked.example: %v, %w", code, err)
						}
						if code, err := lookUp(conn, "allowed.example."); err != nil || code != dnsmessage.RCodeSuccess {
							return fmt.Errorf("allowed.example: %v, %w", code, err)
						}
						return nil
					})
					for seen := range drained(clients) {
						if s.seen.IsValid() && seen.Unmap() != s.seen {
							t.Errorf("%s: the server has seen %s, want %s", what, seen, s.seen)
						}
					}
				}
			}
		})
	}
}

// TestIdentityReachesTheOtherNodeThroughAProxy: the server's node evaluates a connection that the proxy of the client's
// node has opened by the identity of the client.
func TestIdentityReachesTheOtherNodeThroughAProxy(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: mode})
			here, there := c.nodes[0], c.nodes[1]
			client, stranger, server := here.add(t, "client"), here.add(t, "stranger"), there.add(t, "dns")
			here.identityOf(t, server, there)
			there.identityOf(t, client, here)
			there.identityOf(t, stranger, here)
			asStranger := strings.NewReplacer("name: client", "name: stranger", "app: client", "app: stranger")
			c.enforced(t, dnsAcrossNodes+"---"+asStranger.Replace(dnsAcrossNodes)+`---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: dns, namespace: test}
spec:
  podSelector: {matchLabels: {app: dns}}
  ingress: [{from: [{podSelector: {matchLabels: {app: client}}}], ports: [{protocol: TCP, port: 53}]}]
`)
			for _, at := range server.Addresses() {
				serveDNS(t, server, at)
				to := netip.AddrPortFrom(at, 53)
				servicetest.EventuallyNil(t, "the client resolves a name by "+at.String(), func() error {
					conn, err := client.Dial(t.Context(), to)
					if err != nil {
						return err
					}
					defer conn.Close()
					if code, err := lookUp(conn, "allowed.example."); err != nil || code != dnsmessage.RCodeSuccess {
						return fmt.Errorf("allowed.example: %v, %w", code, err)
					}
					return nil
				})
				// The proxy of its node accepts the connection, and cannot open one to the server.
				servicetest.EventuallyNil(t, "the stranger reaches the proxy and not the server "+at.String(), func() error {
					conn, err := stranger.Dial(t.Context(), to)
					if err != nil {
						return err
					}
					defer conn.Close()
					if code, err := lookUp(conn, "blocked.example."); err != nil || code != dnsmessage.RCodeRefused {
						return fmt.Errorf("blocked.example: %v, %w", code, err)
					}
					if code, err := lookUp(conn, "allowed.example."); err == nil {
						return fmt.Errorf("allowed.example: %v, want no answer", code)
					}
					return nil
				})
			}
		})
	}
}

const namesAcrossNodes = `
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client, namespace: test}
spec:
  endpointSelector: {matchLabels: {app: client}}
  egress:
  - toEndpoints: [{matchLabels: {app: dns}}]
    toPorts:
    - ports: [{protocol: UDP, port: "53"}]
      rules: {dns: [{matchPattern: "*.example"}]}
  - toFQDNs: [{matchPattern: "*.example"}]
`

// TestNamesOpenNothingInTheCluster: a server answers with the addresses of a pod of another node, of both nodes and of
// a machine outside. Only the last one is open for the pod that has asked.
func TestNamesOpenNothingInTheCluster(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: mode, Options: devnode.Options{
				Args: map[string][]string{devnode.Datapath: {"--masquerade-enabled=true"}},
			}})
			here, there := c.nodes[0], c.nodes[1]
			client, server, web := here.add(t, "client"), here.add(t, "dns"), there.add(t, "web")
			here.identityOf(t, web, there)
			outside := c.plug(t)
			targets := map[string]netip.Addr{
				"pod.example.": web.IPv4, "this-node.example.": here.Addresses()[0], "other-node.example.": there.Addresses()[0],
				"outside.example.": outside.IPv4,
			}
			for _, p := range []pod.Pod{web, here.host(), there.host(), outside} {
				serveSource(t, p)
			}
			serveRecords(t, server, targets)
			c.enforced(t, namesAcrossNodes)
			reaches := func(name string) error {
				if err := lookUpRecord(client, server.IPv4, name); err != nil {
					return err
				}
				_, _, err := ask(t.Context(), "tcp", client, netip.AddrPortFrom(targets[name], webPort), 10)
				return err
			}
			servicetest.EventuallyNil(t, "the policy is enforced", func() error {
				at := netip.AddrPortFrom(targets["outside.example."], webPort)
				if _, _, err := ask(t.Context(), "tcp", client, at, 10); err == nil {
					return fmt.Errorf("%s is open before a lookup", at)
				}
				return nil
			})
			servicetest.EventuallyNil(t, "the machine outside is open", func() error { return reaches("outside.example.") })
			for name := range targets {
				err := reaches(name)
				if (err == nil) != (name == "outside.example.") {
					t.Errorf("%s, %s: %v", name, targets[name], err)
				}
			}
		})
	}
}

// serveRecords answers queries for names over UDP.
func serveRecords(t *testing.T, in pod.Pod, records map[string]netip.Addr) {
	t.Helper()
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	socket, err := in.ListenPacket(netip.AddrPortFrom(in.IPv4, 53))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.Close() })
	wg.Go(func() {
		buf := make([]byte, 2048)
		for {
			size, from, err := socket.ReadFromUDPAddrPort(buf)
			if err != nil {
				return // the socket was closed
			}
			var m dnsmessage.Message
			if m.Unpack(buf[:size]) != nil || len(m.Questions) != 1 {
				continue
			}
			m.Response = true
			if a, ok := records[m.Questions[0].Name.String()]; ok {
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: m.Questions[0].Name, Class: dnsmessage.ClassINET, TTL: 300},
					Body:   &dnsmessage.AResource{A: a.As4()},
				}}
			}
			if b, err := m.Pack(); err == nil {
				_, _ = socket.WriteToUDPAddrPort(b, from)
			}
		}
	})
}

// lookUpRecord asks for a name over UDP until it gets an answer with a record, for 5 s.
func lookUpRecord(from pod.Pod, server netip.Addr, name string) error {
	c, err := from.DialUDP(netip.AddrPortFrom(server, 53))
	if err != nil {
		return err
	}
	defer c.Close()
	m := dnsmessage.Message{
		Header: dnsmessage.Header{ID: 7},
		Questions: []dnsmessage.Question{{
			Name: dnsmessage.MustNewName(name), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET,
		}},
	}
	query, err := m.Pack()
	if err != nil {
		return err
	}
	buf := make([]byte, 2048)
	for range 5 {
		if _, err = c.Write(query); err != nil {
			return err
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Second))
		var size int
		if size, err = c.Read(buf); err != nil {
			continue
		}
		if err = m.Unpack(buf[:size]); err == nil && len(m.Answers) != 1 {
			err = fmt.Errorf("%s: %v", name, m.RCode)
		}
		return err
	}
	return err
}

// drained returns the values that are in a channel.
func drained(c <-chan netip.Addr) func(yield func(netip.Addr) bool) {
	return func(yield func(netip.Addr) bool) {
		for {
			select {
			case a := <-c:
				if !yield(a) {
					return
				}
			default:
				return
			}
		}
	}
}

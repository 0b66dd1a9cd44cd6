// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// Ports of the services of outsideServices.
const (
	nodePort      = 30080
	localNodePort = 30081
	outsidePort   = 80
	webPort       = 8080
)

// balanced are the load balancer addresses of outsideServices.
var balanced = []netip.Addr{netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("2001:db8:7::7")}

// clusterAddresses are the cluster IPs of the first service.
var clusterAddresses = []netip.Addr{netip.MustParseAddr("10.96.9.10"), netip.MustParseAddr("fd00:96:9::10")}

// outsideServices returns two services with the same pods. The second one has policy Local.
func outsideServices(at map[string]pod.Pod) string {
	var b strings.Builder
	for name, policy := range map[string]string{"web": "Cluster", "near": "Local"} {
		port, addresses := nodePort, fmt.Sprintf(`[{ip: "%s"}, {ip: "%s"}]`, balanced[0], balanced[1])
		if name == "near" {
			port, addresses = localNodePort, "[]"
		}
		fmt.Fprintf(&b, `apiVersion: v1
kind: Service
metadata: {name: %[1]s, namespace: test}
spec:
  type: LoadBalancer
  externalTrafficPolicy: %[2]s
  clusterIP: "10.96.9.%[3]d"
  clusterIPs: ["10.96.9.%[3]d", "fd00:96:9::%[3]d"]
  ipFamilies: [IPv4, IPv6]
  ipFamilyPolicy: RequireDualStack
  selector: {app: web}
  ports:
    - {name: tcp, protocol: TCP, port: %[4]d, targetPort: %[5]d, nodePort: %[6]d}
    - {name: udp, protocol: UDP, port: %[4]d, targetPort: %[5]d, nodePort: %[6]d}
status: {loadBalancer: {ingress: %[7]s}}
---
`, name, policy, port-nodePort+10, outsidePort, webPort, port, addresses)
		for i, family := range []string{"IPv4", "IPv6"} {
			fmt.Fprintf(&b, `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %s-%s, namespace: test, labels: {kubernetes.io/service-name: %[1]s}}
addressType: %[3]s
ports: [{name: tcp, protocol: TCP, port: %[4]d}, {name: udp, protocol: UDP, port: %[4]d}]
endpoints:
`, name, strings.ToLower(family), family, webPort)
			for node, p := range at {
				fmt.Fprintf(&b, "  - {addresses: [%q], nodeName: %q}\n", p.Addresses()[i], node)
			}
			b.WriteString("---\n")
		}
	}
	return b.String()
}

// serve accepts connections and returns the answers of datagram to datagrams, on a port of every address.
func serve(
	t *testing.T, p pod.Pod, port uint16, stream func(*net.TCPConn), datagram func([]byte, netip.AddrPort) []byte,
) {
	t.Helper()
	serveAt(t, p, netip.AddrPortFrom(netip.IPv6Unspecified(), port), stream, datagram)
}

// serveAt is serve on one address.
func serveAt(
	t *testing.T, p pod.Pod, at netip.AddrPort, stream func(*net.TCPConn),
	datagram func([]byte, netip.AddrPort) []byte,
) {
	t.Helper()
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	l, err := p.Listen(at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	u, err := p.ListenPacket(at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = u.Close() })
	wg.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return // the listener was closed
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(patience))
				stream(c)
			})
		}
	})
	for range datagramServers {
		wg.Go(func() {
			buf := make([]byte, 65536)
			for {
				n, from, err := u.ReadFromUDPAddrPort(buf)
				if err != nil {
					return // the socket was closed
				}
				_, _ = u.WriteToUDPAddrPort(datagram(buf[:n], from), from)
			}
		})
	}
}

// datagramServers is the number of servers that share one socket. A single one would be too slow on a busy machine
// with many clients.
const datagramServers = 8

// serveSource answers each connection and datagram with the pod's name, the client's address, and the received data.
func serveSource(t *testing.T, p pod.Pod) {
	t.Helper()
	says := func(from netip.AddrPort) string { return fmt.Sprintf("%s %s ", p.Name, from.Addr().Unmap()) }
	serve(t, p, webPort, func(c *net.TCPConn) {
		_, _ = io.WriteString(c, says(c.RemoteAddr().(*net.TCPAddr).AddrPort()))
		_, _ = io.Copy(c, c)
	}, func(b []byte, from netip.AddrPort) []byte { return append([]byte(says(from)), b...) })
}

// ask sends bytes to an address. It returns the name of the answering pod and the client address that the pod sees.
// It is an error if the returned data differ.
func ask(ctx context.Context, network string, from pod.Pod, to netip.AddrPort, size int) (
	name string, source netip.Addr, err error,
) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	sent := bytes.Repeat([]byte{'x'}, size)
	var got []byte
	if network == "tcp" {
		got, err = askTCP(ctx, from, to, sent)
	} else {
		got, err = askUDP(ctx, from, to, sent)
	}
	if err != nil {
		return "", source, err
	}
	words := strings.SplitN(string(got), " ", 3)
	if len(words) != 3 || words[2] != string(sent) {
		return "", source, fmt.Errorf("%d bytes came back of %d", len(got), size)
	}
	source, err = netip.ParseAddr(words[1])
	return words[0], source, err
}

func askTCP(ctx context.Context, from pod.Pod, to netip.AddrPort, sent []byte) ([]byte, error) {
	c, err := from.Dial(ctx, to)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	_ = c.SetDeadline(deadline)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		_, _ = c.Write(sent)
		_ = c.CloseWrite()
	})
	return io.ReadAll(c)
}

func askUDP(ctx context.Context, from pod.Pod, to netip.AddrPort, sent []byte) ([]byte, error) {
	u, err := from.ListenPacket(netip.AddrPortFrom(netip.IPv6Unspecified(), 0))
	if err != nil {
		return nil, err
	}
	defer u.Close()
	deadline, _ := ctx.Deadline()
	_ = u.SetDeadline(deadline)
	if _, err := u.WriteToUDPAddrPort(sent, to); err != nil {
		return nil, err
	}
	buf := make([]byte, 65536)
	n, answers, err := u.ReadFromUDPAddrPort(buf)
	if answers = netip.AddrPortFrom(answers.Addr().Unmap(), answers.Port()); err == nil && answers != to {
		err = fmt.Errorf("%s answers for %s", answers, to)
	}
	return buf[:n], err
}

// invalid adds an nftables rule to the node that drops and counts packets in conntrack state invalid, and returns a
// function that reads the count.
func (n *node) invalid(t *testing.T) (dropped func() uint64) {
	t.Helper()
	table := &nftables.Table{Name: "strict", Family: nftables.TableFamilyINet}
	chain := &nftables.Chain{
		Name: "forward", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward,
		Priority: nftables.ChainPriorityFilter,
	}
	in := func(do func(*nftables.Conn) error) {
		t.Helper()
		if err := pod.In(n.Netns(), func() error {
			c, err := nftables.New()
			if err != nil {
				return err
			}
			return do(c)
		}); err != nil {
			t.Fatalf("firewall of %s: %v", n.Name(), err)
		}
	}
	in(func(c *nftables.Conn) error {
		c.AddTable(table)
		c.AddChain(chain)
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
			&expr.Bitwise{
				SourceRegister: 1, DestRegister: 1, Len: 4, Xor: make([]byte, 4),
				Mask: binary.NativeEndian.AppendUint32(nil, expr.CtStateBitINVALID),
			},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
			&expr.Counter{},
			&expr.Verdict{Kind: expr.VerdictDrop},
		}})
		return c.Flush()
	})
	return func() (count uint64) {
		in(func(c *nftables.Conn) error {
			rules, err := c.GetRules(table, chain)
			for _, r := range rules {
				for _, e := range r.Exprs {
					if counter, ok := e.(*expr.Counter); ok {
						count += counter.Packets
					}
				}
			}
			return err
		})
		return count
	}
}

// redirects returns the number of ICMP redirects that a host has received.
func redirects(t *testing.T, p pod.Pod) (count int) {
	t.Helper()
	err := pod.In(p.Netns, func() error {
		b, err := os.ReadFile("/proc/net/snmp")
		if err != nil {
			return err
		}
		var names []string
		for line := range strings.Lines(string(b)) {
			words := strings.Fields(line)
			if words[0] != "Icmp:" {
				continue
			}
			if names == nil {
				names = words
				continue
			}
			count, err = strconv.Atoi(words[slices.Index(names, "InRedirects")])
			return err
		}
		return errors.New("no counters of ICMP")
	})
	if err != nil {
		t.Fatal(err)
	}
	return count
}

// TestOutsideReachesServices connects to node ports and load balancer addresses from outside, in both modes and
// families. Each backend answers, on the contacted node and on the other one; policy Local preserves the source; a
// firewall that drops invalid packets drops none (INV-103); and the backend's policy is enforced.
func TestOutsideReachesServices(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: mode})
			here, there := c.nodes[0], c.nodes[1]
			near, far := here.add(t, "web"), there.add(t, "web")
			serveSource(t, near)
			serveSource(t, far)
			outside := c.plug(t)
			for i, a := range append(slices.Clone(balanced), clusterAddresses...) {
				i %= 2
				err := pod.In(outside.Netns, func() error {
					return netlink.RouteAdd(&netlink.Route{
						Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}, Gw: here.Addresses()[i].AsSlice(),
					})
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			manifest := outsideServices(map[string]pod.Pod{here.Name(): near, there.Name(): far})
			path := filepath.Join(c.Hub().ServiceDir(), "services.yaml")
			if err := os.WriteFile(path, []byte(manifest), 0o644); err != nil { //nolint:gosec // the service reads the file
				t.Fatal(err)
			}
			dropped := here.invalid(t)
			for family, client := range outside.Addresses() {
				node := here.Addresses()[family]
				for _, network := range []string{"tcp", "udp"} {
					for _, to := range []netip.AddrPort{
						netip.AddrPortFrom(node, nodePort), netip.AddrPortFrom(balanced[family], outsidePort),
					} {
						answered := map[string]bool{}
						servicetest.EventuallyNil(t, fmt.Sprintf("both backends answer at %s over %s", to, network), func() error {
							name, source, err := ask(t.Context(), network, outside, to, 100)
							if err != nil {
								return err
							}
							if name == near.Name && source != client {
								t.Errorf("%s over %s: %s sees %s, not the client", to, network, name, source)
							}
							if name == far.Name && source == client {
								t.Errorf("%s over %s: %s sees the client, and would answer it directly", to, network, name)
							}
							if answered[name] = true; len(answered) < 2 {
								return fmt.Errorf("only %v", answered)
							}
							return nil
						})
					}
					for range 8 {
						name, source, err := ask(t.Context(), network, outside, netip.AddrPortFrom(node, localNodePort), 100)
						if err != nil || name != near.Name || source != client {
							t.Errorf("policy Local, %s: %q sees %s, %v, want %q to see %s", network, name, source, err, near.Name, client)
						}
					}
				}
				for range 4 {
					if _, _, err := ask(t.Context(), "tcp", outside, netip.AddrPortFrom(node, nodePort), 1<<20); err != nil {
						t.Errorf("a megabyte by node port: %v", err)
					}
				}
			}
			for _, a := range clusterAddresses {
				to := netip.AddrPortFrom(a, outsidePort)
				if name, _, err := ask(t.Context(), "udp", outside, to, 1); err == nil {
					t.Errorf("%q answers clients outside at the cluster IP %s", name, a)
				}
			}
			for _, a := range clusterAddresses {
				to := netip.AddrPortFrom(a, outsidePort+1)
				if _, _, err := ask(t.Context(), "udp", outside, to, 1); err == nil {
					t.Errorf("a client outside got an answer from %s, which no service uses", to)
				}
				if _, _, err := ask(t.Context(), "tcp", near, to, 1); !errors.Is(err, syscall.ECONNREFUSED) {
					t.Errorf("%s from a pod: %v, want %v", to, err, syscall.ECONNREFUSED)
				}
			}
			if got := here.counted(t, "no-service-port"); got == 0 {
				t.Error("no packet to an unused port of a service address was dropped")
			}
			if got := here.counted(t, "service-inside"); got == 0 {
				t.Error("no packet to a cluster IP was dropped")
			}
			if got := redirects(t, outside); got != 0 {
				t.Errorf("the outsider received %d ICMP redirects", got)
			}
			if n := dropped(); n != 0 {
				t.Errorf("a firewall rule for invalid packets has dropped %d packets", n)
			}
			for _, n := range c.nodes {
				if drops := n.drops(t); drops["policy-denied"] != 0 {
					t.Errorf("%s has dropped %v", n.Name(), drops)
				}
			}
			// Either node evaluates the backend's policy.
			c.enforced(t, webAcrossNodes)
			to := netip.AddrPortFrom(here.Addresses()[0], nodePort)
			servicetest.EventuallyNil(t, "the outsider is denied by both backends", func() error {
				if name, _, err := ask(t.Context(), "udp", outside, to, 1); err == nil {
					return fmt.Errorf("%s answers", name)
				}
				for _, n := range c.nodes {
					if n.drops(t)["policy-denied"] == 0 {
						return fmt.Errorf("%s has denied nothing", n.Name())
					}
				}
				return nil
			})
		})
	}
}

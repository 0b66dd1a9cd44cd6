// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// silentWeb lets the client connect to the web, and denies all connections from the web.
const silentWeb = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Ingress, Egress]
  ingress:
  - from: [{podSelector: {matchLabels: {app: client}}}]
    ports: [{protocol: TCP, port: 8080}]
`

// connected is a TCP connection between two pods, with both ends.
type connected struct{ client, server *net.TCPConn }

func connect(t *testing.T, from, to pod.Pod, address netip.Addr, port uint16) connected {
	t.Helper()
	ctx, cancel := deadline(t)
	defer cancel()
	l, err := to.Listen(netip.AddrPortFrom(address, port))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var c connected
	if c.client, err = from.Dial(ctx, netip.AddrPortFrom(address, port)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.client.Close() })
	if c.server, err = l.AcceptTCP(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.server.Close() })
	when, _ := ctx.Deadline()
	_ = c.client.SetDeadline(when)
	_ = c.server.SetDeadline(when)
	return c
}

// push sends a message in one direction and requires it at the other end. The receiver sends only acknowledgements.
func push(t *testing.T, from, to *net.TCPConn, message string) {
	t.Helper()
	if _, err := io.WriteString(from, message); err != nil {
		t.Errorf("push %q: %v", message, err)
		return
	}
	got := make([]byte, len(message))
	if _, err := io.ReadFull(to, got); err != nil || string(got) != message {
		t.Errorf("pushed %q, got %q: %v", message, got, err)
	}
	servicetest.EventuallyNil(t, "the push is acknowledged", func() error {
		if left := unacknowledged(t, from); left > 0 {
			return fmt.Errorf("%d segments are on their way", left)
		}
		return nil
	})
}

// TestKernelEvictedConnectionsAreFoundAgain: after its entry was evicted, a connection is picked up by the next packet
// of the end that may open it. From then on, packets of the other end, which may not open it, also pass.
func TestKernelEvictedConnectionsAreFoundAgain(t *testing.T) {
	n := newNode(t)
	policies := n.policies(t)
	pods := n.addPods(t, "web", "client")
	web, client := pods[0], pods[1]
	enforce(t, policies, silentWeb)
	for _, address := range web.Addresses() {
		c := connect(t, client, web, address, 8080)
		push(t, c.server, c.client, "before")
		before := n.connections(t).GetPickedUp()
		dropped := n.drops(t)
		n.forgetConnections(t)
		push(t, c.client, c.server, "after")
		push(t, c.server, c.client, "after")
		if got := n.connections(t).GetPickedUp(); got != before+1 {
			t.Errorf("over %s: %d connections were picked up, want 1", address, got-before)
		}
		if got := n.drops(t); got != dropped {
			t.Errorf("over %s: %d segments were dropped", address, got-dropped)
		}
	}
}

// forgetConnections empties the connection tables without the datapath's knowledge.
func (n *testNode) forgetConnections(t *testing.T) {
	t.Helper()
	forgotten := 0
	for _, family := range []string{"sl_ct4_*", "sl_ct6_*"} {
		pins, err := filepath.Glob(filepath.Join(n.Paths().BPFDir, family))
		if err != nil || len(pins) != 1 {
			t.Fatalf("pins %s: %v, %v, want one", family, pins, err)
		}
		m, err := ebpf.LoadPinnedMap(pins[0], nil)
		if err != nil {
			t.Fatal(err)
		}
		for {
			key, err := m.NextKeyBytes(nil)
			if err != nil {
				t.Fatal(err)
			}
			if key == nil {
				break
			}
			if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				t.Fatal(err)
			}
			forgotten++
		}
		_ = m.Close()
	}
	if forgotten == 0 {
		t.Fatal("there were no connections to forget")
	}
}

// TestKernelBareSYNIsNoReply: a packet that would open a connection is evaluated, even if it has the addresses and
// ports of a reply in an open connection.
func TestKernelBareSYNIsNoReply(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	policies := n.policies(t)
	pods := n.addPods(t, "web", "client")
	web, client := pods[0], pods[1]
	enforce(t, policies, silentWeb)
	flows := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})
	c := connect(t, client, web, web.IPv4, 8080)
	push(t, c.server, c.client, "before")
	local := c.client.LocalAddr().(*net.TCPAddr)
	mark := flows.mark()
	if err := web.SendSYN(netip.AddrPortFrom(web.IPv4, 8080), netip.AddrPortFrom(client.IPv4,
		uint16(local.Port))); err != nil {
		t.Fatal(err)
	}
	flows.waitFrom(t, mark, "the SYN is dropped by the policy of its sender", func(f *datapathv1.Flow) bool {
		return isFlow(f, web.IPv4, client.IPv4, uint16(local.Port)) &&
			f.GetEgress().GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED
	})
	push(t, c.server, c.client, "after")
	push(t, c.client, c.server, "after")
}

// TestKernelForgedTunnelPacketsAreDropped: a pod cannot send to a node's tunnel port, where it could claim any
// identity, even if its policies allow it.
func TestKernelForgedTunnelPacketsAreDropped(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	client := n.addPods(t, "client")[0]
	flows := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{datapathv1.Reason_REASON_TUNNEL_PORT}})
	for _, text := range n.datapathStatus(t).GetNodeAddresses() {
		address := netip.MustParseAddr(text)
		const vxlan = 4789
		mark := flows.mark()
		sender, err := client.ListenPacket(netip.AddrPortFrom(netip.IPv6Unspecified(), 0))
		if err != nil {
			t.Fatal(err)
		}
		// Flags, a VNI, and a frame that would be valid.
		if _, err := sender.WriteToUDPAddrPort(append([]byte{8, 0, 0, 0, 0, 1, 0, 0}, make([]byte, 60)...),
			netip.AddrPortFrom(address, vxlan)); err != nil {
			t.Error(err)
		}
		_ = sender.Close()
		flows.waitFrom(t, mark, "the forged packet is dropped", func(f *datapathv1.Flow) bool {
			source, _ := sameFamily(client, address)
			return isFlow(f, source, address, vxlan)
		})
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// ingressOf returns a policy that lets pods of one app connect to a TCP port of the web, and the web to everything.
func ingressOf(app string) string {
	return fmt.Sprintf(`
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Ingress]
  ingress:
  - from: [{podSelector: {matchLabels: {app: %s}}}]
    ports: [{protocol: TCP, port: 80}]
`, app)
}

// shortLife lets TCP connections expire after a second.
func shortLife(o *devnode.Options) {
	o.Args = map[string][]string{devnode.Datapath: {"--connections-tcp-established=1s", "--connections-max-interval=1s"}}
}

// TestKernelARevokedConnectionDoesNotComeBack: a TCP connection that is no longer allowed stays blocked after a flood
// of denied packets evicted its entry, or its map was lost, whichever end sends next. It stays blocked even if the
// server may open connections to its client. The client cannot continue it either after its entry has expired and was
// collected.
func TestKernelARevokedConnectionDoesNotComeBack(t *testing.T) {
	for _, c := range []struct {
		name    string
		options []func(*devnode.Options)
		// clients: only the client continues, because no state outlives the lifetime of a connection
		clients bool
		forget  func(t *testing.T, n *testNode, web netip.Addr, expired uint64)
	}{
		{"pushed out", nil, false, func(t *testing.T, n *testNode, web netip.Addr, _ uint64) {
			world := n.outside(t)
			before := n.counters(t)[policyDenied]
			const pairs = 200_000
			n.newWire(t, world, false).flood(t, pairs, 2, func(i int) segment {
				return segment{from: at(world.IPv4, port(i)), to: at(web, port(i/60000)), flags: ack, seq: 1, ack: 1}
			})
			servicetest.EventuallyNil(t, "the flood is over", func() error {
				if got := n.counters(t)[policyDenied] - before; got < 2*pairs*9/10 {
					return fmt.Errorf("%d of %d segments were denied", got, 2*pairs)
				}
				return nil
			})
		}},
		{"collected", []func(*devnode.Options){shortLife}, true, func(t *testing.T, n *testNode, _ netip.Addr,
			expired uint64,
		) {
			servicetest.EventuallyNil(t, "the connections are collected", func() error {
				if got := n.connections(t).GetExpired(); got < expired {
					return fmt.Errorf("%d of %d have expired", got, expired)
				}
				return nil
			})
		}},
		{"lost", nil, false, func(t *testing.T, n *testNode, _ netip.Addr, _ uint64) {
			must(t, n.Kill(t.Context(), devnode.Datapath))
			pins, err := filepath.Glob(filepath.Join(n.Paths().BPFDir, "sl_ct4_*"))
			if err != nil || len(pins) != 1 {
				t.Fatalf("pins of sl_ct4: %v, %v, want one", pins, err)
			}
			must(t, os.Remove(pins[0]))
			must(t, n.Start(t.Context(), devnode.Datapath))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t, c.options...)
			policies := n.policies(t)
			pods := n.addPods(t, "web", "evil")
			web, evil := pods[0], pods[1]
			server := at(web.IPv4, 80)
			enforce(t, policies, ingressOf("evil"))
			var all []*revokedConnection
			for _, denied := range []bool{true, false} {
				for _, serverFirst := range []bool{false, true} {
					held := connect(t, evil, web, web.IPv4, 80)
					push(t, held.client, held.server, "before")
					push(t, held.server, held.client, "before")
					all = append(all, &revokedConnection{
						connected: held, atClient: newInbox(t, held.client), atServer: newInbox(t, held.server),
						local: held.client.LocalAddr().(*net.TCPAddr).AddrPort(), denied: denied, serverFirst: serverFirst,
					})
				}
			}
			enforce(t, policies, ingressOf("client"))
			expired := n.connections(t).GetExpired()
			flows := n.observe(t, &datapathv1.ObserveRequest{Reasons: deniedReasons})
			w := n.newWire(t, evil, false)
			for _, held := range all {
				if !held.denied {
					continue
				}
				mark := flows.mark()
				// Sent without a socket, so that no packet is retransmitted.
				w.send(t, w.frame(segment{from: held.local, to: server, flags: ack}))
				servicetest.EventuallyNil(t, "the connection is cut", func() error {
					return flows.dropped(mark, held.local, server)
				})
			}
			c.forget(t, n, web.IPv4, expired+uint64(len(all)))
			flows = n.observe(t, &datapathv1.ObserveRequest{Reasons: deniedReasons})
			for _, held := range all {
				if c.clients {
					held.goOn(t, flows, server, false)
					continue
				}
				held.goOn(t, flows, server, held.serverFirst)
				held.goOn(t, flows, server, !held.serverFirst)
			}
		})
	}
}

var deniedReasons = []datapathv1.Reason{policyDenied, datapathv1.Reason_REASON_CONNECTION_INVALID}

// revokedConnection counts what arrives at its ends after the revocation.
type revokedConnection struct {
	connected
	atClient, atServer *inbox
	local              netip.AddrPort
	// denied means that a packet of the client was denied after the revocation.
	denied      bool
	serverFirst bool
}

// goOn sends a message from one end, which must be dropped.
func (held *revokedConnection) goOn(t *testing.T, flows *flowLog, server netip.AddrPort, fromServer bool) {
	t.Helper()
	speaker, from, to, in := held.client, held.local, server, held.atServer
	if fromServer {
		speaker, from, to, in = held.server, server, held.local, held.atClient
	}
	mark := flows.mark()
	if _, err := io.WriteString(speaker, "back"); err != nil {
		t.Fatal(err)
	}
	servicetest.EventuallyNil(t, "the message is dropped or arrives", func() error {
		if in.String() != "" {
			return nil
		}
		return flows.dropped(mark, from, to)
	})
	if got := in.String(); got != "" {
		t.Errorf("%q has arrived from %v at %v over a revoked connection; denied before: %v, server first: %v", got, from, to,
			held.denied, held.serverFirst)
	}
}

// dropped returns an error unless a packet was dropped after a mark.
func (l *flowLog) dropped(mark int, from, to netip.AddrPort) error {
	for _, f := range l.since(mark) {
		if f.GetSource().GetPort() == uint32(from.Port()) && isFlow(f, from.Addr(), to.Addr(), to.Port()) &&
			f.GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED {
			return nil
		}
	}
	return errors.New("nothing was dropped")
}

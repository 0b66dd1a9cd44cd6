// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// TestKernelUDPFlowLeavesABackendOfAnotherService: a packet-translated flow moves to another backend when its
// own Service removes the backend, even if another Service still has it, and stays while the backend drains. A
// TCP connection stays.
func TestKernelUDPFlowLeavesABackendOfAnotherService(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	old := newPod(t, n.k, "sl-old", 20, endpointmap.DeliverPeer)
	other := newPod(t, n.k, "sl-other", 21, endpointmap.DeliverPeer)
	for i, own := range client.Addrs() {
		first, second := netip.AddrPortFrom(old.Addrs()[i], 8080), netip.AddrPortFrom(other.Addrs()[i], 8080)
		tell(t, old.ns, first)
		tell(t, other.ns, second)
		vip, blue := serviceAddr(own, 1), serviceAddr(own, 2)
		apply := func(list *frontend.List) {
			t.Helper()
			tx := &frontendtx.Transaction{}
			for _, proto := range []frontend.Protocol{frontend.UDP, frontend.TCP} {
				tx.Upsert(clusterAt(vip, proto, list))
				tx.Upsert(clusterAt(blue, proto, leadsTo(first)))
			}
			_, err := n.k.Frontends().Apply(t.Context(), tx)
			must(t, "apply", err)
			must(t, "wait for programs", n.k.Services.Barrier(t.Context()))
		}
		release := func(want int) {
			t.Helper()
			got, err := n.k.Translations.Release(t.Context(), n.k.Services.Keeps)
			must(t, "release", err)
			if got != want {
				t.Errorf("%v: %d flows were released, want %d", vip, got, want)
			}
		}
		apply(leadsTo(first))
		flow, err := dialIn(t, client.ns, "udp", vip)
		must(t, "open a socket", err)
		beside, err := dialIn(t, client.ns, "udp", blue)
		must(t, "open a socket", err)
		stream, err := dialIn(t, client.ns, "tcp", vip)
		must(t, "connect", err)
		says := func(c interface {
			Write([]byte) (int, error)
			Read([]byte) (int, error)
		},
		) string {
			t.Helper()
			b := make([]byte, 256)
			_, err := c.Write([]byte("ping\n"))
			must(t, "send", err)
			k, err := c.Read(b)
			must(t, "read", err)
			return string(b[:k])
		}
		want := func(what, got string, from netip.AddrPort) {
			t.Helper()
			if !strings.HasPrefix(got, from.String()) {
				t.Errorf("%s: %q answers, want %v", what, got, from)
			}
		}
		want("before", says(flow), first)
		want("another Service, before", says(beside), first)
		want("TCP, before", says(stream), first)

		drains := leadsTo(second)
		drains.Draining = []frontend.Backend{{AddrPort: first}}
		apply(drains)
		release(0)
		want("the backend drains", says(flow), first)

		apply(leadsTo(second))
		release(1)
		want("the backend left this Service", says(flow), second)
		want("another Service", says(beside), first)
		if got := says(stream); !strings.Contains(got, "ping") {
			t.Errorf("%q on the TCP connection to the removed backend", got)
		}
		release(0)
	}
}

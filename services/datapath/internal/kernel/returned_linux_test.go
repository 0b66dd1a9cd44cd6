// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
)

// TestKernelEndedConnectionsReturnTheirTranslations: a pod makes many times as many short connections to a
// Service as it may have translations. None is refused, although no collector runs. Open connections are still
// counted, also on reused ports.
func TestKernelEndedConnectionsReturnTheirTranslations(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	server := newPod(t, n.k, "sl-server", 11, endpointmap.DeliverPeer)
	backend := netip.AddrPortFrom(server.IPv4, 8080)
	tell(t, server.ns, backend)
	vip := serviceAddr(server.IPv4, 1)
	n.lead(vip, feAddress, backend)
	const guarantee = 20
	update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Translations4), bpf.MapsSlBound{Guarantee: guarantee})
	held := func() int { return n.k.Bounds.Held(bound.Translations4, client.Slot) }
	for end, reset := range map[string]bool{"both ends finish": false, "a reset": true} {
		for i := range 10 * guarantee {
			d := net.Dialer{Timeout: 5 * time.Second, Control: reuse}
			if i%2 == 0 { // reuse the same port every time
				d.LocalAddr = &net.TCPAddr{IP: client.IPv4.AsSlice(), Port: 30_000}
			}
			var c net.Conn
			var err error
			inNetns(t, client.ns, func() { c, err = d.DialContext(t.Context(), "tcp4", vip.String()) })
			if err != nil {
				t.Fatalf("%s: connection %d: %v; %d translations are counted", end, i, err, held())
			}
			if _, err := readLine(c); err != nil {
				t.Fatalf("%s: connection %d: %v", end, i, err)
			}
			if got := held(); got == 0 {
				t.Fatalf("%s: connection %d is open, and no translation is counted", end, i)
			}
			if reset || i%2 == 0 { // a port that is reused immediately
				must(t, "set linger", c.(*net.TCPConn).SetLinger(0))
			}
			must(t, "close", c.Close())
		}
	}
	servicetest.Eventually(t, "the end of the last connection", func() bool { return held() <= 2 })
	// a pass of the collector finds the same number
	var open []net.Conn
	for range guarantee / 2 / 3 {
		c, err := dialIn(t, client.ns, "tcp", vip)
		must(t, "connect", err)
		_, err = readLine(c)
		must(t, "read", err)
		open = append(open, c)
	}
	before := held()
	_, err := n.k.Translations.Collect(conntrack.MonotonicSeconds(), n.k.Connections, conntrack.DefaultTimeouts())
	must(t, "collect", err)
	if got := held(); got != before || got != 3*len(open) {
		t.Errorf("%d translations are counted of %d open connections, and %d after a pass", before, len(open), got)
	}
}

// reuse allows a socket to use a port whose former connection has just ended.
func reuse(_, _ string, c syscall.RawConn) error {
	var failed error
	err := c.Control(func(fd uintptr) {
		failed = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
	})
	if err != nil {
		return err
	}
	return failed
}

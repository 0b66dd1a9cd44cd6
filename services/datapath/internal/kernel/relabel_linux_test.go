// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// TestKernelRelabelWithOpenConnectionsAndAuditMode: a and b have connections to each other; their policies
// allow friends. Then b's labels become a stranger's. Without audit mode, no packet of either connection passes
// any more, and after the friend's labels are restored, only new connections pass. With audit mode at the end
// that denies, packets of both connections pass until audit mode ends.
func TestKernelRelabelWithOpenConnectionsAndAuditMode(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for _, audited := range []bool{false, true} {
			t.Run(fmt.Sprintf("IPv6 %t audit mode %t", v6, audited), func(t *testing.T) {
				th := newTheatre(t, v6)
				th.putTables(t)
				setLabels := func(who string, id identity.Numeric) {
					t.Helper()
					must(t, "SetIdentity", setIdentity(t, th.k, th.pods[who].Slot, id))
				}
				setLabels("b", friend)
				update(t, th.k, bpf.MapsMapSlId, uint32(th.pods["a"].Identity), knownWord(9, 0, 2))
				setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: friends, Ingress: friends})
				must(t, "SetAudit", th.k.Endpoints.SetAudit(t.Context(), audited, th.pods["a"].Slot))
				packets := func(when string, want event.Reason, flags byte) {
					t.Helper()
					for _, ports := range [][2]uint16{{4000, 80}, {80, 4001}} {
						th.send(t, when, say("a", "b", segment(ports[0], ports[1], flags), want))
					}
					if flags&flagSYN != 0 {
						return
					}
					for _, ports := range [][2]uint16{{80, 4000}, {4001, 80}} {
						th.send(t, when, say("b", "a", segment(ports[0], ports[1], flags), want))
					}
				}
				begin := func(when string, want event.Reason) {
					t.Helper()
					th.send(t, when, say("a", "b", segment(4000, 80, flagSYN), want))
					th.send(t, when, say("b", "a", segment(4001, 80, flagSYN), want))
					if want != event.ForwardedToPod {
						return
					}
					th.send(t, when, say("b", "a", segment(80, 4000, flagSYN|flagACK), want))
					th.send(t, when, say("a", "b", segment(80, 4001, flagSYN|flagACK), want))
					packets(when, want, flagACK)
				}
				begin("friends", event.ForwardedToPod)
				setLabels("b", stranger)
				if audited {
					packets("a stranger in audit mode", event.ForwardedToPod, flagACK|flagPSH)
					must(t, "SetAudit", th.k.Endpoints.SetAudit(t.Context(), false, th.pods["a"].Slot))
				}
				packets("a stranger", event.PolicyDenied, flagACK|flagPSH)
				begin("a stranger begins", event.PolicyDenied)
				setLabels("b", friend)
				begin("a friend again", event.ForwardedToPod)
			})
		}
	}
}

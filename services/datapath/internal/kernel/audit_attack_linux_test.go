// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// TestKernelAuditModeLeavesAnAttackerNothing: while b, whose policy denies, is in audit mode, a raw socket of a sends it
// every combination of TCP flags and every SCTP chunk type, and forged packets with b's address. The forged packets
// are dropped. After audit mode has ended, no packet of any of these connections passes in either direction, whether
// their entries are still there or were evicted, and no evicted entry is created again.
func TestKernelAuditModeLeavesAnAttackerNothing(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for _, evicted := range []bool{false, true} {
			t.Run(fmt.Sprintf("IPv6 %t evicted %t", v6, evicted), func(t *testing.T) {
				th := newTheatre(t, v6)
				slot := th.pods["b"].Slot
				setPolicy(t, th.k, slot, denying)
				must(t, "SetAudit", th.k.Endpoints.SetAudit(t.Context(), true, slot))
				run := func(a act) event.Reason {
					prog, ctx, in := th.frame(a)
					return th.run(t, prog, in, ctx, 0).reason
				}
				var attacks []act
				for kind := range 256 {
					port := 4000 + uint16(kind)
					for _, packet := range []func(uint16, uint16, byte) l4{segment, chunk} {
						attacks = append(attacks,
							say("a", "b", packet(port, 80, byte(kind)), 0),
							say("b", "a", packet(80, port, byte(kind)), 0))
					}
				}
				passed := 0
				for _, a := range attacks {
					if !run(a).Dropped() {
						passed++
					}
				}
				if passed == 0 {
					t.Fatal("nothing passes in audit mode")
				}
				for flags := range 256 {
					_, ctx, in := th.frame(say("b", "a", segment(80, 5000, byte(flags)), 0))
					sender := th.pods["a"]
					ctx.Ifindex = sender.Ifindex
					copy(in, sender.HostMAC[:])
					copy(in[6:], sender.MAC[:])
					if o := th.run(t, program.FromPod, in, ctx, 0); !o.reason.Dropped() {
						t.Errorf("forged packet with flags %#x: %v", flags, o.reason)
					}
				}
				must(t, "SetAudit", th.k.Endpoints.SetAudit(t.Context(), false, slot))
				if evicted {
					th.forget(t)
				}
				for _, flags := range []byte{flagSYN, flagSYN | flagACK, flagACK | flagPSH, flagFIN | flagACK, flagRST} {
					for kind := range 256 {
						port := 4000 + uint16(kind)
						for _, a := range []act{
							say("a", "b", segment(port, 80, flags), 0), say("b", "a", segment(80, port, flags), 0),
						} {
							if got := run(a); !got.Dropped() {
								t.Errorf("%s to %s, connection %d, flags %#x: %v", a.from, a.to, kind, flags, got)
							}
						}
					}
				}
				for _, a := range attacks {
					if got := run(a); !got.Dropped() {
						t.Errorf("%s to %s again: %v", a.from, a.to, got)
					}
				}
				if all := th.connections(t); evicted && len(all) != 0 {
					t.Errorf("%d connections are created after audit mode", len(all))
				}
			})
		}
	}
}

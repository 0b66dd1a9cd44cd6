// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// TestKernelNothingPassesAfterARelabel: a allows friends. On another CPU, b sends packets of one connection all the
// time, while its labels change from a friend's to a stranger's and back. Whenever b has a stranger's labels, none of
// its packets passes: of that connection, of a half-open one, of a new one, or of one to which a has sent before.
func TestKernelNothingPassesAfterARelabel(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		t.Run(fmt.Sprintf("IPv6 %t", v6), func(t *testing.T) {
			th := newTheatre(t, v6)
			th.putTables(t)
			setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: friends, Ingress: friends})
			setLabels := func(friendly bool) {
				id := stranger
				if friendly {
					id = friend
				}
				must(t, "SetIdentity", setIdentity(t, th.k, th.pods["b"].Slot, id))
			}
			passes := func(from, to string, what l4) bool {
				prog, in, frame := th.frame(say(from, to, what, event.Reason(0)))
				o := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: in, ContextOut: &skbContext{}}
				verdict, err := th.k.program(prog).Run(o)
				if err != nil {
					t.Errorf("run %s: %v", prog, err)
				}
				return verdict != 2 // TC_ACT_SHOT
			}
			setLabels(true)
			ctx, stop := context.WithCancel(t.Context())
			var traffic sync.WaitGroup
			traffic.Go(func() {
				for ctx.Err() == nil {
					passes("b", "a", segment(4000, 80, flagACK|flagPSH))
				}
			})
			for i := range 20 {
				port := 5000 + uint16(i)
				setLabels(true)
				for _, opens := range []bool{
					passes("b", "a", segment(4000, 80, flagSYN)), passes("a", "b", segment(80, 4000, flagSYN|flagACK)),
					passes("b", "a", segment(port, 80, flagSYN)), passes("a", "b", segment(80, port+1000, flagSYN)),
				} {
					if !opens {
						t.Errorf("round %d: a friend's packet is dropped", i)
					}
				}
				setLabels(false)
				for flags := range 64 {
					for _, from := range []uint16{4000, port, port + 1000, port + 2000} {
						if passes("b", "a", segment(from, 80, byte(flags))) {
							t.Errorf("round %d, port %d: a stranger's packet with flags %#x passes", i, from, flags)
						}
					}
				}
			}
			stop()
			traffic.Wait()
		})
	}
}

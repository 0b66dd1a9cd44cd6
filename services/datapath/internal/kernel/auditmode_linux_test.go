// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"sync"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// denying is a policy that denies all traffic with other pods.
var denying = endpointmap.Policy{Egress: nodetable.Pending, Ingress: nodetable.Pending}

// audited puts b, whose policy denies, into audit mode, and opens a connection from a to b.
func audited(t *testing.T) *theatre {
	t.Helper()
	th := newTheatre(t, false)
	slot := th.pods["b"].Slot
	setPolicy(t, th.k, slot, denying)
	must(t, "SetAudit", th.k.Endpoints.SetAudit(t.Context(), true, slot))
	for _, a := range handshake(4000, 80) {
		th.expect(t, a)
	}
	return th
}

func (th *theatre) expectDenied(t *testing.T, want event.Reason) {
	t.Helper()
	th.expect(t, say("a", "b", segment(4000, 80, flagACK|flagPSH), want))
	th.expect(t, say("b", "a", segment(80, 4000, flagACK|flagPSH), want))
}

// TestKernelAuditModeEndsWithWhatItLetPass: connections that only audit mode has allowed are terminated when it
// ends.
func TestKernelAuditModeEndsWithWhatItLetPass(t *testing.T) {
	th := audited(t)
	slot := th.pods["b"].Slot
	must(t, "SetAudit", th.k.Endpoints.SetAudit(t.Context(), false, slot))
	th.expectDenied(t, event.PolicyPending)
	if e, err := th.k.Endpoints.At(slot); err != nil || e.Audit {
		t.Errorf("%+v, %v", e, err)
	}
}

// TestKernelAuditModeLetsRedirectsPassUntilItEnds: the receiver's policy redirects to a proxy. Audit mode
// forwards the connection and reports it, and the end of audit mode terminates the connection.
func TestKernelAuditModeLetsRedirectsPassUntilItEnds(t *testing.T) {
	const redirected = 12 // the port of a rule that redirects
	th := newTheatre(t, false)
	id, slot := nodetable.ID(16), th.pods["b"].Slot
	everyRule(id, 0).put(t, th.k)
	update(t, th.k, bpf.MapsMapSlId, identityIndex(a.Identity), knownWord(7, 0, 0))
	update(t, th.k, bpf.MapsMapSlPeer, bpf.MapsSlPeerKey{PeerSet: uint32(id), NodeClass: 7}, uint32(1))
	setPolicy(t, th.k, slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: id})
	th.expect(t, say("a", "b", segment(4000, redirected, flagSYN), event.NoProxy))
	must(t, "SetAudit", th.k.Endpoints.SetAudit(t.Context(), true, slot))
	for _, a := range handshake(4000, redirected) {
		th.expect(t, a)
	}
	must(t, "SetAudit", th.k.Endpoints.SetAudit(t.Context(), false, slot))
	th.expect(t, say("a", "b", segment(4000, redirected, flagACK|flagPSH), event.NoProxy))
	th.expect(t, say("b", "a", segment(redirected, 4000, flagACK|flagPSH), event.NoProxy))
	th.expect(t, say("a", "b", segment(4001, redirected, flagSYN), event.NoProxy))
}

// TestKernelAuditModeThatWasEndingEndsAtTheNextStart: a process was killed after it had cleared the flag and before it
// bumped the epoch. The next process bumps it.
func TestKernelAuditModeThatWasEndingEndsAtTheNextStart(t *testing.T) {
	th := audited(t)
	slot := th.pods["b"].Slot
	at := int(slot)*int(unsafe.Sizeof(bpf.MapsSlEndpoint{})) + int(unsafe.Offsetof(bpf.MapsSlEndpoint{}.Flags))
	flags := &th.k.Pins.Memory(bpf.MapsMapSlEp)[at]
	*flags = 0x80
	// its cached verdict is still valid
	th.expect(t, say("a", "b", segment(4000, 80, flagACK|flagPSH), event.ForwardedToPod))
	must(t, "SetAudit", th.k.Endpoints.SetAudit(t.Context(), false, slot))
	th.expectDenied(t, event.PolicyPending)
	if *flags != 0 {
		t.Errorf("flags %#x are left", *flags)
	}
}

// TestKernelAuditModeOpensNothingThatIsCut: audit mode does not apply to an endpoint that is being removed,
// because no policy denies its packets.
func TestKernelAuditModeOpensNothingThatIsCut(t *testing.T) {
	th := audited(t)
	must(t, "Cut", th.k.Endpoints.Cut(th.pods["b"].Slot))
	th.expectDenied(t, event.PolicyDenied)
	th.expect(t, say("a", "b", segment(4001, 80, flagSYN), event.PolicyDenied))
}

// TestKernelNothingPassesAfterAuditMode toggles audit mode while another CPU sends packets of the connection.
// After each end of audit mode no packet passes.
func TestKernelNothingPassesAfterAuditMode(t *testing.T) {
	th := audited(t)
	slot := th.pods["b"].Slot
	prog, in, frame := th.frame(say("a", "b", segment(4000, 80, flagACK|flagPSH), 0))
	send := func() {
		o := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: in, ContextOut: &skbContext{}}
		if _, err := th.k.program(prog).Run(o); err != nil {
			t.Errorf("run %s: %v", prog, err)
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	var traffic sync.WaitGroup
	traffic.Go(func() {
		for ctx.Err() == nil {
			send()
		}
	})
	for range 40 {
		must(t, "SetAudit", th.k.Endpoints.SetAudit(t.Context(), true, slot))
		send()
		must(t, "SetAudit", th.k.Endpoints.SetAudit(t.Context(), false, slot))
		c, found, err := th.k.Connections.Lookup(tuple(6, a.IPv4.String()+":4000", b.IPv4.String()+":80"))
		must(t, "Lookup", err)
		now, err := th.k.Endpoints.At(slot)
		must(t, "At", err)
		if found && c.To.Epoch == now.Policy.Epoch {
			t.Fatalf("the verdict of audit mode is still valid: %+v under epoch %d", c, now.Policy.Epoch)
		}
	}
	stop()
	traffic.Wait()
	th.expectDenied(t, event.PolicyPending)
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package event

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// nobody has no endpoints, and names services by their address.
type nobody struct{}

func (nobody) SpecOfSlot(uint16) (endpoint.Spec, bool) { return endpoint.Spec{}, false }

func (nobody) ServiceAt(at netip.AddrPort, protocol uint8) string {
	return fmt.Sprintf("service at %v by %d", at, protocol)
}

func TestObservedNamesTheServiceThatWasAsked(t *testing.T) {
	w := bpf.MapsSlEvent{
		Type: bpf.MapsSlEventTypeSL_EVENT_VERDICT, Family: 4, Proto: 17,
		Src: [16]byte{10, 0, 0, 1}, Dst: [16]byte{10, 0, 0, 2}, Dport: 5353,
		OrigDst: [16]byte{10, 96, 0, 10}, OrigDport: 53,
	}
	e, err := decodeEvent(rawEvent(t, w))
	if err != nil {
		t.Fatal(err)
	}
	o := e.observed(Names{Owners: nobody{}, Services: nobody{}})
	if o.Original != netip.MustParseAddrPort("10.96.0.10:53") || o.Service != "service at 10.96.0.10:53 by 17" ||
		o.Destination != netip.MustParseAddrPort("10.0.0.2:5353") {
		t.Errorf("observed %v by %v of %q", o.Destination, o.Original, o.Service)
	}
	w.OrigDst, w.OrigDport = [16]byte{}, 0
	if e, err = decodeEvent(rawEvent(t, w)); err != nil {
		t.Fatal(err)
	}
	if o := e.observed(Names{Owners: nobody{}, Services: nobody{}}); o.Original.IsValid() || o.Service != "" {
		t.Errorf("a packet without an original destination: by %v of %q", o.Original, o.Service)
	}
}

// policies has one rule, until it is forgotten.
type policies struct{ forgotten bool }

func (p *policies) Revision(slot uint16, epoch uint32) (uint64, bool) {
	return 42, !p.forgotten && slot == 1 && epoch == 21
}

func (p *policies) RuleSources(slot uint16, epoch uint32, egress bool, rule uint16) []string {
	if p.forgotten || slot != 1 || epoch != 21 || !egress || rule != 7 {
		return nil
	}
	return []string{"NetworkPolicy shop/web spec.egress[0]"}
}

func (p *policies) Proxy(uint16, uint32, bool, uint16) uint16 { return 0 }

// TestEventsHaveTheRuleOfTheirTime forgets a rule after an event. Policies of an endpoint are kept for a minute after
// they were replaced, events for longer.
func TestEventsHaveTheRuleOfTheirTime(t *testing.T) {
	p := &policies{}
	names := Names{Owners: nobody{}, Services: nobody{}, Policies: p}
	o := Event{
		SourceSlot: 1, DestinationSlot: 2, Egress: SideVerdict{By: ByRule, Rule: 7, Epoch: 21, Action: ActionAllow},
	}.observed(names)
	p.forgotten = true
	if o.Sender.Revision != 42 || len(o.Sender.Sources) != 1 ||
		o.Sender.Sources[0] != "NetworkPolicy shop/web spec.egress[0]" {
		t.Errorf("sender %+v", o.Sender)
	}
	if o.Receiver.Revision != 0 || o.Receiver.Sources != nil {
		t.Errorf("receiver %+v, which nothing evaluated", o.Receiver)
	}
	// Without a rule there is no name to resolve, and Policies may be nil.
	o = Event{SourceSlot: 1, Egress: SideVerdict{By: ByDefault, Epoch: 21}}.observed(Names{
		Owners:   nobody{},
		Services: nobody{},
	})
	if o.Sender.Revision != 0 || o.Sender.Sources != nil || o.Sender.By == 0 {
		t.Errorf("sender %+v", o.Sender)
	}
}

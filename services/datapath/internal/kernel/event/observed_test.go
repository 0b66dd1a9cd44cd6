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

// nobody has any endpoint, and services that are named by what is asked.
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
	o := e.observed(nobody{}, nobody{})
	if o.Original != netip.MustParseAddrPort("10.96.0.10:53") || o.Service != "service at 10.96.0.10:53 by 17" ||
		o.Destination != netip.MustParseAddrPort("10.0.0.2:5353") {
		t.Errorf("observed %v by %v of %q", o.Destination, o.Original, o.Service)
	}
	w.OrigDst, w.OrigDport = [16]byte{}, 0
	if e, err = decodeEvent(rawEvent(t, w)); err != nil {
		t.Fatal(err)
	}
	if o := e.observed(nobody{}, nobody{}); o.Original.IsValid() || o.Service != "" {
		t.Errorf("a packet that asked for no service: by %v of %q", o.Original, o.Service)
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package filter

import (
	"strings"
	"testing"

	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
)

func TestDNSMessagesAreSelected(t *testing.T) {
	asked := &flow.Flow{
		L4: &flow.Layer4{Protocol: &flow.Layer4_UDP{UDP: &flow.UDP{SourcePort: 40000, DestinationPort: 53}}},
		L7: &flow.Layer7{Record: &flow.Layer7_Dns{Dns: &flow.DNS{Query: "api.example.com."}}},
	}
	for _, c := range []struct {
		filter *flow.FlowFilter
		want   bool
	}{
		{&flow.FlowFilter{DnsQuery: []string{`^api\.`}}, true},
		{&flow.FlowFilter{DnsQuery: []string{`other`, `example\.com\.$`}}, true},
		{&flow.FlowFilter{DnsQuery: []string{`^example`}}, false},
		{&flow.FlowFilter{Protocol: []string{"dns"}}, true},
		{&flow.FlowFilter{Protocol: []string{"udp"}}, true},
		{&flow.FlowFilter{Protocol: []string{"http"}}, false},
	} {
		f, err := New([]*flow.FlowFilter{c.filter}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := f.Match(asked); got != c.want {
			t.Errorf("%v: %t", c.filter, got)
		}
		if f.Match(denied()) {
			t.Errorf("%v matches a flow without a DNS message", c.filter)
		}
	}
	for _, text := range []string{"(", "((a{1000}){1000}){10}", strings.Repeat("(a{900})", 6)} {
		if _, err := New([]*flow.FlowFilter{{DnsQuery: []string{text}}}, nil); err == nil {
			t.Errorf("%s is accepted", text)
		}
	}
}

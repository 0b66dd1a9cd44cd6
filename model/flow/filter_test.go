// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package flow

import (
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
)

func TestFilterForPacketsLeavesRepairsOut(t *testing.T) {
	yes := true
	e := Event{Type: Repair, From: End{Owner: owner("a")}, SourceIdentity: 300}
	nobody := func(uint32) ([]label.Label, bool) { return nil, false }
	for name, c := range map[string]struct {
		f    Criteria
		want bool
	}{
		"empty":     {Criteria{}, true},
		"owner":     {Criteria{Owners: map[workload.Owner]bool{owner("a"): true}}, true},
		"identity":  {Criteria{Identities: map[uint32]bool{300: true}}, true},
		"type":      {Criteria{Types: map[Type]bool{Drop: true}}, false},
		"verdict":   {Criteria{Verdicts: map[Verdict]bool{Dropped: true}}, false},
		"reason":    {Criteria{Reasons: map[uint32]bool{30: true}}, false},
		"direction": {Criteria{Egress: &yes}, false},
		"protocol":  {Criteria{Protocols: map[uint8]bool{0: true}}, false},
		"port":      {Criteria{Ports: map[uint16]bool{0: true}}, false},
		"prefix":    {Criteria{Prefixes: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}}, false},
		"service":   {Criteria{Services: map[string]bool{"": true}}, false},
		"source":    {Criteria{Source: &EndCriteria{Owners: map[workload.Owner]bool{owner("a"): true}}}, false},
		"target":    {Criteria{Destination: &EndCriteria{Owners: map[workload.Owner]bool{{}: true}}}, false},
	} {
		if got := c.f.Match(e, nobody); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestPortOfAProtocolWithoutPortsMatchesNothing(t *testing.T) {
	f := Criteria{Ports: map[uint16]bool{0x0800: true}}
	e := Event{Type: Drop, Protocol: 1, Destination: netip.MustParseAddrPort("10.0.0.1:2048")} // echo request
	nobody := func(uint32) ([]label.Label, bool) { return nil, false }
	if f.Match(e, nobody) {
		t.Error("type and code of ICMP are taken for a port")
	}
	if e.Protocol = 17; !f.Match(e, nobody) {
		t.Error("a port of UDP is not")
	}
}

func TestFilterNeedsOneOfEachKind(t *testing.T) {
	yes, no := true, false
	e := Event{
		Type: Drop, Verdict: Dropped, Reason: 20, Egress: true, From: End{Owner: owner("a")},
		To:       End{Owner: owner("b"), Pod: workload.PodReference{Namespace: "shop", Name: "web-0"}},
		Protocol: 6,
		Source:   netip.MustParseAddrPort("10.0.0.2:1000"), Destination: netip.MustParseAddrPort("10.0.0.3:80"),
		SourceIdentity: 300, DestinationIdentity: 400,
		Original: netip.MustParseAddrPort("10.96.0.1:8000"), Service: "shop/web:http",
	}
	labels := func(identity uint32) ([]label.Label, bool) {
		if identity == 400 {
			return []label.Label{{Source: "k8s", Key: "app", Value: "web"}}, true
		}
		return nil, false
	}
	for name, c := range map[string]struct {
		f    Criteria
		want bool
	}{
		"empty":           {Criteria{}, true},
		"owner":           {Criteria{Owners: map[workload.Owner]bool{owner("a"): true}}, true},
		"other side":      {Criteria{Owners: map[workload.Owner]bool{owner("b"): true}}, true},
		"stranger":        {Criteria{Owners: map[workload.Owner]bool{owner("c"): true}}, false},
		"identity":        {Criteria{Identities: map[uint32]bool{400: true, 1: true}}, true},
		"no identity":     {Criteria{Identities: map[uint32]bool{1: true}}, false},
		"prefix":          {Criteria{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.3/32")}}, true},
		"no prefix":       {Criteria{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}}, false},
		"prefix asked":    {Criteria{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}}, true},
		"port asked":      {Criteria{Ports: map[uint16]bool{8000: true}}, true},
		"service":         {Criteria{Services: map[string]bool{"shop/web": true, "shop/db": true}}, true},
		"other service":   {Criteria{Services: map[string]bool{"shop/db": true, "web": true}}, false},
		"reason":          {Criteria{Reasons: map[uint32]bool{20: true}}, true},
		"other reason":    {Criteria{Reasons: map[uint32]bool{16: true}}, false},
		"direction":       {Criteria{Egress: &yes}, true},
		"other direction": {Criteria{Egress: &no}, false},
		"port":            {Criteria{Ports: map[uint16]bool{80: true}}, true},
		"no port":         {Criteria{Ports: map[uint16]bool{81: true}}, false},
		"verdict":         {Criteria{Verdicts: map[Verdict]bool{Dropped: true, Audited: true}}, true},
		"other verdict":   {Criteria{Verdicts: map[Verdict]bool{Forwarded: true}}, false},
		"type":            {Criteria{Types: map[Type]bool{Drop: true}}, true},
		"other type":      {Criteria{Types: map[Type]bool{Closed: true}}, false},
		"selector":        {Criteria{Selectors: []Selector{{is("", "app", "db")}, {is("", "app", "web")}}}, true},
		"no selector":     {Criteria{Selectors: []Selector{{is("", "app", "db")}}}, false},
		"pod":             {Criteria{Pods: map[Pod]bool{{"shop", "web-0"}: true}}, true},
		"no pod":          {Criteria{Pods: map[Pod]bool{{"shop", "web-1"}: true}}, false},
		"from owner":      {Criteria{Source: &EndCriteria{Owners: map[workload.Owner]bool{owner("a"): true}}}, true},
		"from the other":  {Criteria{Source: &EndCriteria{Owners: map[workload.Owner]bool{owner("b"): true}}}, false},
		"to owner":        {Criteria{Destination: &EndCriteria{Owners: map[workload.Owner]bool{owner("b"): true}}}, true},
		"from one of two names": {Criteria{Source: &EndCriteria{
			Owners: map[workload.Owner]bool{owner("c"): true}, Identities: map[uint32]bool{300: true},
		}}, true},
		"from a pod":  {Criteria{Source: &EndCriteria{Pods: map[Pod]bool{{"shop", "web-0"}: true}}}, false},
		"to a pod":    {Criteria{Destination: &EndCriteria{Pods: map[Pod]bool{{"shop", "web-0"}: true}}}, true},
		"from labels": {Criteria{Source: &EndCriteria{Selectors: []Selector{{is("", "app", "web")}}}}, false},
		"to labels":   {Criteria{Destination: &EndCriteria{Selectors: []Selector{{is("", "app", "web")}}}}, true},
		"from prefix": {Criteria{Source: &EndCriteria{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.2/31")}}}, true},
		"to the original destination": {Criteria{Destination: &EndCriteria{
			Prefixes: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}, Ports: map[uint16]bool{8000: true},
		}}, true},
		"from the original destination": {Criteria{Source: &EndCriteria{
			Prefixes: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")},
		}}, false},
		"from port":        {Criteria{Source: &EndCriteria{Ports: map[uint16]bool{1000: true}}}, true},
		"from the to port": {Criteria{Source: &EndCriteria{Ports: map[uint16]bool{80: true}}}, false},
		"name but not port": {Criteria{Source: &EndCriteria{
			Identities: map[uint32]bool{300: true},
			Ports:      map[uint16]bool{1: true},
		}}, false},
		"from and to": {Criteria{
			Source:      &EndCriteria{Identities: map[uint32]bool{300: true}},
			Destination: &EndCriteria{Identities: map[uint32]bool{300: true}},
		}, false},
		// unknown labels do not match "without the label"
		"unknown labels":   {Criteria{Selectors: []Selector{{isNot("", "app")}}}, false},
		"one of two kinds": {Criteria{Ports: map[uint16]bool{80: true}, Protocols: map[uint8]bool{17: true}}, false},
	} {
		if got := c.f.Match(e, labels); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func owner(container string) workload.Owner {
	return workload.Owner{ContainerID: container, Interface: "eth0"}
}

func TestFilterLeavesOutWhatIsExcludedAndWhatIsLater(t *testing.T) {
	e := Event{
		Type: Drop, Verdict: Dropped, Time: time.Unix(50, 0), Protocol: 6, SourceIdentity: 300, DestinationIdentity: 400,
		Source: netip.MustParseAddrPort("10.0.0.2:1000"), Destination: netip.MustParseAddrPort("10.0.0.3:80"),
	}
	labels := func(identity uint32) ([]label.Label, bool) {
		return []label.Label{{Source: "k8s", Key: "app", Value: "web"}}, identity == 400
	}
	drops := Criteria{Types: map[Type]bool{Drop: true}}
	for name, c := range map[string]struct {
		f    Filter
		want bool
	}{
		"another port": {Filter{Criteria: drops, Excluded: []Criteria{{Ports: map[uint16]bool{81: true}}}}, true},
		"its port": {Filter{Criteria: drops, Excluded: []Criteria{
			{Ports: map[uint16]bool{81: true}},
			{Ports: map[uint16]bool{80: true}},
		}}, false},
		"half of it": {Filter{Excluded: []Criteria{{
			Ports:     map[uint16]bool{80: true},
			Protocols: map[uint8]bool{17: true},
		}}}, true},
		"its labels": {Filter{Excluded: []Criteria{{Destination: &EndCriteria{Selectors: []Selector{{is("", "app",
			"web")}}}}}}, false},
		"unknown labels": {
			Filter{Excluded: []Criteria{{Source: &EndCriteria{Selectors: []Selector{{isNot("", "app")}}}}}},
			true,
		},
		"until now":    {Filter{Until: time.Unix(50, 0)}, true},
		"until before": {Filter{Until: time.Unix(49, 999)}, false},
	} {
		if got := c.f.Match(e, labels); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// TestLossOfWhatWouldNotPassIsNoLoss: a filter reports only losses of events that it might select. The kernel counts
// losses by reason, and separately for closed connections.
func TestLossOfWhatWouldNotPassIsNoLoss(t *testing.T) {
	reasons := Filter{Criteria: Criteria{Reasons: map[uint32]bool{7: true}}}
	closed := Filter{Criteria: Criteria{Types: map[Type]bool{Closed: true}}}
	drops := Filter{Criteria: Criteria{Types: map[Type]bool{Drop: true}}}
	ports := Filter{Criteria: Criteria{Ports: map[uint16]bool{80: true}}}
	for name, c := range map[string]struct {
		filter Filter
		event  Event
		want   bool
	}{
		"nothing is lost":             {Filter{}, Event{Type: Drop, Reason: 7}, false},
		"no criteria":                 {Filter{}, Event{Type: Closed, Reason: 3, KernelLost: 2}, true},
		"the reason":                  {reasons, Event{Type: Drop, Reason: 7, KernelLost: 2}, true},
		"another reason":              {reasons, Event{Type: Drop, Reason: 8, KernelLost: 2}, false},
		"of any reason":               {reasons, Event{KernelLost: 2}, true},
		"closed, which passes":        {closed, Event{Type: Closed, KernelLost: 2}, true},
		"closed, which does not pass": {drops, Event{Type: Closed, KernelLost: 2}, false},
		"another port":                {ports, Event{Type: Drop, KernelLost: 2}, true},
	} {
		if got := c.filter.MayHaveLost(c.event); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

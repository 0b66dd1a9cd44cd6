// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func add(r *Ring, from, to int) {
	for i := from; i < to; i++ {
		r.Add(Event{Length: uint32(i), Time: time.Unix(int64(i), 0)})
	}
}

func TestReaderSeesEveryEventInOrder(t *testing.T) {
	r := NewRing()
	rd := r.Tail()
	add(r, 0, 100)
	for i := range uint32(100) {
		if e, missed, ok, err := rd.Next(t.Context(), false); !ok || err != nil || missed != 0 || e.Length != i {
			t.Fatalf("event %d: %+v, missed %d, %v, %v", i, e, missed, ok, err)
		}
	}
	if _, _, ok, err := rd.Next(t.Context(), false); ok || err != nil {
		t.Errorf("at the end: %v, %v", ok, err)
	}
}

func TestSlowReaderIsToldHowMuchItMissedAndWhere(t *testing.T) {
	r := NewRing()
	rd := r.Tail()
	add(r, 0, Size+10)
	e, missed, ok, err := rd.Next(t.Context(), false)
	if !ok || err != nil || missed != 10 || e.Length != 10 {
		t.Errorf("got %d after %d missed (%v, %v), want 10 after 10", e.Length, missed, ok, err)
	}
	if e, missed, _, _ := rd.Next(t.Context(), false); missed != 0 || e.Length != 11 {
		t.Errorf("then %d after %d missed", e.Length, missed)
	}
}

func TestReaderBeginsWhereItAsked(t *testing.T) {
	r := NewRing()
	add(r, 0, Size+100)
	for since, want := range map[int64]uint32{0: 100, 50: 100, 200: 200, Size + 99: Size + 99} {
		e, missed, ok, _ := r.Read(time.Unix(since, 0)).Next(t.Context(), false)
		if !ok || missed != 0 || e.Length != want {
			t.Errorf("since %d: event %d after %d missed, want %d", since, e.Length, missed, want)
		}
	}
}

func TestWaitingReaderIsWokenAndCanGiveUp(t *testing.T) {
	r := NewRing()
	rd := r.Tail()
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan error, 2)
	go func() {
		e, _, ok, err := rd.Next(ctx, true)
		if err == nil && (!ok || e.Length != 7) {
			err = errors.New("woken without the event")
		}
		got <- err
		_, _, _, err = rd.Next(ctx, true)
		got <- err
	}()
	add(r, 7, 8)
	if err := <-got; err != nil {
		t.Error(err)
	}
	cancel()
	if err := <-got; !errors.Is(err, context.Canceled) {
		t.Errorf("after the end: %v", err)
	}
}

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

func TestEventsHaveIdsOfTheirOwn(t *testing.T) {
	seen := map[[16]byte]bool{}
	for range 2 { // two runs of the process
		ring := NewRing()
		for range Size + 10 {
			ring.Add(Event{Type: Drop})
		}
		for reader := ring.Read(time.Time{}); ; {
			e, _, ok, err := reader.Next(t.Context(), false)
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			if e.ID[6]>>4 != 8 || e.ID[8]>>6 != 2 {
				t.Fatalf("%x is not a UUID of version 8", e.ID)
			}
			if seen[e.ID] {
				t.Fatalf("two events have the id %x", e.ID)
			}
			seen[e.ID] = true
		}
	}
	if len(seen) != 2*Size {
		t.Errorf("%d ids, want %d", len(seen), 2*Size)
	}
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

func TestReaderGoesOnAfterAnEvent(t *testing.T) {
	r := NewRing()
	add(r, 0, 10)
	var ids [][16]byte
	for rd := r.Read(time.Time{}); len(ids) < 10; {
		e, _, _, err := rd.Next(t.Context(), false)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, e.ID)
	}
	rd, known := r.After(ids[4])
	if e, _, ok, _ := rd.Next(t.Context(), false); !known || !ok || e.Length != 5 {
		t.Errorf("known %v, then event %d, want 5", known, e.Length)
	}
	if rd, known = r.After(ids[9]); !known {
		t.Error("the last event is not known")
	}
	if _, _, ok, _ := rd.Next(t.Context(), false); ok {
		t.Error("an event after the last")
	}
	// Events that were overwritten meanwhile are counted as missed.
	rd, _ = r.After(ids[9])
	add(r, 10, Size+20)
	if e, missed, _, _ := rd.Next(t.Context(), false); missed != 10 || e.Length != 20 {
		t.Errorf("event %d after %d missed, want 20 after 10", e.Length, missed)
	}
	// Events of another run, and unassigned IDs, are not in this ring.
	other := NewRing()
	add(other, 100, 103)
	future := ids[3]
	binary.BigEndian.PutUint64(future[8:], 1<<63|1<<40)
	for name, id := range map[string][16]byte{"another run": ids[2], "the future": future, "nothing": {}} {
		rd, known := other.After(id)
		if e, _, _, _ := rd.Next(t.Context(), false); known || e.Length != 100 {
			t.Errorf("%s: known %v, begins with event %d, want the oldest, 100", name, known, e.Length)
		}
	}
}

// TestLossOfWhatWouldNotPassIsNoLoss tests which losses a filter reports: the kernel counts losses by reason, and
// separately for closed connections.
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

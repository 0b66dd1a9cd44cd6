// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"strings"
	"testing"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// enumName returns the name of the API's enum value for a word.
func enumName(prefix, word string) string {
	return prefix + strings.ToUpper(strings.ReplaceAll(word, "-", "_"))
}

func TestReasonsOfTheAPIAreThoseOfThePrograms(t *testing.T) {
	for _, r := range event.Reasons() {
		if got, want := datapathv1.Reason(r).String(), enumName("REASON_", r.String()); got != want {
			t.Errorf("reason %d is %s in the API, want %s", uint32(r), got, want)
		}
	}
	if got, want := len(datapathv1.Reason_name), len(event.Reasons())+1; got != want {
		t.Errorf("the API has %d reasons, want %d", got, want)
	}
}

func TestNumbersOfTheAPIAreThoseOfThePrograms(t *testing.T) {
	for by, want := range map[event.By]netv1.DecidedBy{
		event.ByNobody: netv1.DecidedBy_DECIDED_BY_UNSPECIFIED, event.ByRule: netv1.DecidedBy_DECIDED_BY_RULE,
		event.ByDefault: netv1.DecidedBy_DECIDED_BY_DEFAULT, event.ByHostAllow: netv1.DecidedBy_DECIDED_BY_HOST_ALLOW,
		event.ByUnknownIdentity: netv1.DecidedBy_DECIDED_BY_UNKNOWN_IDENTITY,
		event.ByTable:           netv1.DecidedBy_DECIDED_BY_NO_POLICY,
	} {
		if got := netv1.DecidedBy(by); got != want {
			t.Errorf("what decides with number %d is %s in the API, want %s", by, got, want)
		}
	}
	for d, want := range map[event.Direction]netv1.Direction{
		event.Egress: netv1.Direction_DIRECTION_EGRESS, event.Ingress: netv1.Direction_DIRECTION_INGRESS,
	} {
		if got := netv1.Direction(d); got != want {
			t.Errorf("direction %s is %s in the API, want %s", d, got, want)
		}
	}
}

func TestEveryWordOfAConnectionIsAState(t *testing.T) {
	seen := map[datapathv1.ConnectionState]bool{}
	for flags := range 1 << 16 {
		for i, s := range connectionStates(conntrack.Flags(flags).Names()) {
			if word := conntrack.Flags(flags).Names()[i]; s.String() != enumName("CONNECTION_STATE_", word) {
				t.Fatalf("%q is %s in the API", word, s)
			}
			seen[s] = true
		}
	}
	if got, want := len(seen), len(datapathv1.ConnectionState_name)-1; got != want {
		t.Errorf("connections have %d of the API's %d states", got, want)
	}
}

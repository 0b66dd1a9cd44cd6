// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package stream

import (
	"errors"
	"reflect"
	"testing"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

func TestGoalIsReachedByTheConnectedOnesThatAreWaitedFor(t *testing.T) {
	at := func(name string, policy, address uint64, store int64, cluster uint64) State {
		return State{Name: name, Connected: true, Enforced: Barrier{
			Policy: policy, Address: address,
			IdentityService: peer.Revision{Store: peer.StoreRevision{Cluster: cluster, Revision: store}},
		}}
	}
	away := State{Name: "away"}
	refuses, holds := at("refuses", 3, 0, 7, 1), at("holds", 2, 0, 7, 1)
	refuses.Refusals = map[Refused]Refusal{{Subject: 300}: {Revision: 3, Reason: "it is full"}}
	holds.Hold = &Hold{Reason: "the state is older"}
	goal := Goal{
		Barrier: Barrier{Policy: 3, Address: 2}, Current: 5,
		Who: map[string]bool{"one": true, "two": true, "away": true, "refuses": true, "holds": true, "other": false},
	}
	for name, test := range map[string]struct {
		states   []State
		subjects []identity.Numeric
		want     Progress
		reached  bool
		err      error
	}{
		"all have it": {
			states: []State{at("one", 4, 2, 9, 1), at("two", 3, 2, 8, 1), away}, reached: true,
			want: Progress{
				Revision: 3, Store: peer.StoreRevision{Cluster: 1, Revision: 8}, Enforcing: []string{"one", "two"},
				Disconnected: []string{"away", "holds", "other", "refuses"},
			},
		},
		"the revision is unknown for two stores": {
			states: []State{at("one", 9, 2, 9, 1), at("two", 9, 2, 8, 2), away}, reached: true,
			want: Progress{
				Revision: 5, Enforcing: []string{"one", "two"}, Disconnected: []string{"away", "holds", "other", "refuses"},
			},
		},
		"policy is behind":  {states: []State{at("one", 4, 2, 9, 1), at("two", 2, 2, 9, 1)}},
		"address is behind": {states: []State{at("one", 4, 1, 9, 1)}},
		"a subscriber outside of the wait is behind": {
			states: []State{at("other", 0, 0, 0, 0), at("one", 4, 2, 9, 1)}, reached: true,
			want: Progress{
				Revision: 4, Store: peer.StoreRevision{Cluster: 1, Revision: 9}, Enforcing: []string{"one"},
				Disconnected: []string{"away", "holds", "refuses", "two"},
			},
		},
		"a refusal ends it":                              {states: []State{refuses}, err: failure.ErrRefused},
		"a refusal of the subject ends it":               {states: []State{refuses}, subjects: []identity.Numeric{300}, err: failure.ErrRefused},
		"a refusal of another does not":                  {states: []State{refuses}, subjects: []identity.Numeric{301}},
		"a subscriber that holds an older state ends it": {states: []State{holds}, err: ErrHeld},
	} {
		t.Run(name, func(t *testing.T) {
			goal := goal
			goal.Subjects = test.subjects
			got, reached, err := goal.Reached(test.states)
			if reached != test.reached || !errors.Is(err, test.err) || !reflect.DeepEqual(got, test.want) {
				t.Errorf("reached %v %+v, %v; want %v %+v, %v", reached, got, err, test.reached, test.want, test.err)
			}
		})
	}
}

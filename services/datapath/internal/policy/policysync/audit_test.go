// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

func TestCheckFindsWhatWasChangedBehindItsBackAndRepairsIt(t *testing.T) {
	k := scene()
	a := start(t, k)
	st := testStates()[3]
	if _, err := a.load(newService(1).snapshot(st)); err != nil {
		t.Fatal(err)
	}
	if diffs, err := a.Check(false); err != nil || len(diffs) != 0 {
		t.Fatalf("nothing was changed: %+v, %v", diffs, err)
	}
	epochs := k.epochs()
	k.endpoints[1].Egress = nodetable.Allow
	delete(k.entries, 301)
	k.entries[999] = nodetable.Identity{Class: 1, Known: true}
	for _, repair := range []bool{false, true} {
		diffs, err := a.Check(repair)
		if err != nil || len(diffs) != 3 || diffs[0].Subject != SubjectEndpoint || diffs[1].Key != "301" || diffs[2].Key != "999" {
			t.Fatalf("repair %v: %+v, %v", repair, diffs, err)
		}
	}
	if diffs, err := a.Check(false); err != nil || len(diffs) != 0 {
		t.Errorf("after the repair: %+v, %v", diffs, err)
	}
	qs := questions(k)
	same(t, "repaired", qs, k.answers(qs), st.answers(k, qs))
	if k.endpoints[3].Epoch == epochs[3] {
		t.Error("connections that were allowed by mistake keep their verdict")
	}
	if len(a.History.RuleSources(1, k.endpoints[1].Epoch, true, 1)) == 0 {
		t.Error("the rules of a repaired endpoint are lost")
	}
}

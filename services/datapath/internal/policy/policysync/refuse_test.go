// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/policytable"
)

// TestMessageWithAnUnknownStepIsRefusedAndNothingBehindItCarriedOut: an omitted step may be a deny rule, so no message
// of the stream is applied from that step on. A later stream without unknown steps is applied completely.
func TestMessageWithAnUnknownStepIsRefusedAndNothingBehindItCarriedOut(t *testing.T) {
	states := testStates()
	k := scene()
	a, sc := play(t, k, Config{Wait: true, Timeout: 50 * time.Millisecond})
	sv := newService(1)
	st := next(t, sc.subscribed)
	first := sv.snapshot(states[1])
	st.send(t, first)
	st.expect(t, fmt.Sprint("ack ", first.Seq))
	a.mu.Lock()
	qs := questions(k)
	writes := k.writes
	before := k.answers(qs)
	a.mu.Unlock()

	m := sv.change(states[2])
	m.Steps = slices.Insert(slices.Clone(m.Steps), len(m.Steps)/2, policytable.Step(policytable.UnknownStep{Field: 40}))
	st.send(t, m)
	st.expect(t, fmt.Sprintf("nack %d subject 0", m.Seq))
	later := sv.change(states[3])
	st.send(t, later)
	st.expect(t, fmt.Sprintf("nack %d subject 0", later.Seq))
	a.mu.Lock()
	same(t, "refused", qs, k.answers(qs), before)
	if k.writes != writes {
		t.Errorf("%d writes for refused messages", k.writes-writes)
	}
	a.mu.Unlock()
	if held := a.Status().Held; !strings.Contains(held, "step 40") {
		t.Errorf("the status says %q", held)
	}
	if err := a.Await(context.Background(), 999); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "step 40") {
		t.Errorf("a creation that waits for tables: %v", err)
	}

	st.end <- errors.New("the service is updated")
	st = next(t, sc.subscribed)
	if st.Incarnation != "" {
		t.Errorf("the stream continues after the refused message: %+v", st.Subscription)
	}
	sv = newService(2)
	all := sv.snapshot(states[3])
	st.send(t, all)
	st.expect(t, fmt.Sprint("ack ", all.Seq))
	a.mu.Lock()
	same(t, "understood", qs, k.answers(qs), states[3].answers(k, qs))
	a.mu.Unlock()
	if held := a.Status().Held; held != "" {
		t.Errorf("the status still reports %q", held)
	}
}

// TestIdentityThatEndsInARefusedMessageBecomesUnknown: the number of a removed identity may be reused soon.
func TestIdentityThatEndsInARefusedMessageBecomesUnknown(t *testing.T) {
	k := scene()
	a, sc := play(t, k, Config{Wait: true})
	sv := newService(1)
	st := next(t, sc.subscribed)
	first := sv.snapshot(testStates()[1])
	st.send(t, first)
	st.expect(t, fmt.Sprint("ack ", first.Seq))
	a.mu.Lock()
	_, known := k.entries[300]
	a.mu.Unlock()
	if !known {
		t.Fatal("identity 300 is not known to begin with")
	}
	seq := first.Seq + 1
	st.send(t, policytable.Message{Incarnation: first.Incarnation, Seq: seq, Steps: []policytable.Step{
		policytable.SetIdentity{Identity: 300}, policytable.UnknownStep{Field: 40},
	}})
	st.expect(t, fmt.Sprintf("nack %d subject 0", seq))
	a.mu.Lock()
	defer a.mu.Unlock()
	if w, known := k.entries[300]; known {
		t.Errorf("identity 300 was removed, but has entry %+v", w)
	}
}

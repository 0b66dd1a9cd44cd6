// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	hubblev1 "github.com/sluice-net/sluice/proto/gen/sluice/hubble/v1"
)

// TestFlowsOfANamespaceAreDeleted: the events with either end in the namespace are deleted. All other events and
// reports of losses stay. The stream of the datapath continues after the latest event, even if that was deleted.
func TestFlowsOfANamespaceAreDeleted(t *testing.T) {
	const count = 1000
	b := newBench(t, 8<<20)
	sink := b.recorder()
	r := rand.New(rand.NewPCG(40, uint64(time.Now().UnixNano()))) //nolint:gosec // a test
	var want []string
	deleted := uint64(0)
	namespace := func(e *datapathv1.FlowEnd) string {
		for _, l := range e.GetLabels() {
			if l.GetKey() == "io.kubernetes.pod.namespace" {
				return l.GetValue()
			}
		}
		return ""
	}
	sink.Lost(datapathv1.LossSource_LOSS_SOURCE_KERNEL, 3)
	want = append(want, "LOSS_SOURCE_KERNEL 3")
	for i := range count {
		f := randomEvent(r, i, start.Add(time.Duration(i)*time.Second))
		if i == count-1 {
			f.Source.Labels[0].Key, f.Source.Labels[0].Value = "io.kubernetes.pod.namespace", "team-2"
			f.Source.Pod = nil
		}
		if namespace(f.GetSource()) == "team-2" || namespace(f.GetDestination()) == "team-2" {
			deleted++
		} else {
			want = append(want, f.GetUuid())
		}
		sink.Flow(f)
	}
	s := deletions{history: b.h}
	answer, err := s.DeleteFlows(t.Context(), &hubblev1.DeleteFlowsRequest{Namespace: "team-2"})
	if err != nil || answer.GetDeletedCount() != deleted {
		t.Errorf("%v were deleted, want %d, %v", answer, deleted, err)
	}
	got, err := b.observe(&datapathv1.ObserveRequest{}, 0)
	if err != nil || !slices.Equal(got.texts(), want) {
		t.Errorf("%d events are left, want %d, %v", len(got.got), len(want), err)
	}
	flows, err := b.ask(nil, 0)
	if err != nil || len(flows.got) != len(want) {
		t.Errorf("Hubble's API answers %d messages, want %d, %v", len(flows.got), len(want), err)
	}
	after, err := b.observe(&datapathv1.ObserveRequest{AfterUuid: "event-999"}, 0)
	if err != nil || len(after.got) != 0 {
		t.Errorf("after the deleted latest event: %v, %v", after.texts(), err)
	}
	answer, err = s.DeleteFlows(t.Context(), &hubblev1.DeleteFlowsRequest{Before: at(500), ValidateOnly: true})
	if err != nil || answer.GetDeletedCount() == 0 || answer.GetDeletedCount() > 500 {
		t.Errorf("before a time: %v, %v", answer, err)
	}
}

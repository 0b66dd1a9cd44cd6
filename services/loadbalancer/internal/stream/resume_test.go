// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package stream

import (
	"testing"

	"github.com/sluice-net/sluice/model/frontend"
)

// TestUnfinishedSnapshotBeginsAgain: the connection is lost during a snapshot. The stream must not resume in the
// middle of the snapshot: the subscriber would then remove the frontends of the first part.
func TestUnfinishedSnapshotBeginsAgain(t *testing.T) {
	src := newTable(3 * MaxSteps)
	s := New("a")
	s.Connect(1, 0, src)
	k := newKernel()
	k.all(s, src)
	seq := k.barrier.Seq
	src.change(t, s, 2, key(1))
	s.Disconnect(s.Until)
	// A new process of the subscriber starts without state, and is disconnected during its snapshot.
	s.Connect(2, 0, src)
	s.Next(src)
	if err := s.Ack(seq, 0); err != nil { // a barrier of the previous stream
		t.Fatal(err)
	}
	s.Disconnect(s.Until)
	// The previous process connects again.
	if s.Connect(3, seq, src) {
		t.Error("a stream resumes after a barrier from before an unfinished snapshot")
	}
	k = newKernel()
	k.all(s, src)
	k.same(t, src)
	if !k.barrier.SnapshotComplete {
		t.Error("the stream has not begun with all frontends")
	}
	// A finished snapshot can be resumed.
	seq = k.barrier.Seq
	s.Disconnect(s.Until)
	if !s.Connect(4, seq, src) {
		t.Error("a stream does not resume after its last barrier")
	}
}

// TestFrontendThatChangesWhileItsBatchIsSentIsSentOnce: a frontend changes while its batch is being sent, and was not
// sent yet. Only its latest value is sent.
func TestFrontendThatChangesWhileItsBatchIsSentIsSentOnce(t *testing.T) {
	src := newTable(2 * MaxSteps)
	s := New("a")
	s.Connect(1, 0, src)
	k := newKernel()
	k.take(s.Next(src))
	last := key(2*MaxSteps - 1) // this key is in the second message
	src.change(t, s, 2, last)
	k.all(s, src)
	k.same(t, src)
	if k.upserts != 2*MaxSteps {
		t.Errorf("%d frontends are sent in %d upserts", 2*MaxSteps, k.upserts)
	}
}

// TestBarriersOfTheOlderHalfAreThinned: of the older half of the barriers, only some are kept; of the newer half,
// all. The acknowledgement of a dropped barrier counts for the last kept barrier before it.
func TestBarriersOfTheOlderHalfAreThinned(t *testing.T) {
	src := newTable(1)
	s := New("a")
	s.Connect(1, 0, src)
	k := newKernel()
	for range maxBarriers + 1 {
		src.change(t, s, 1, key(0))
		k.all(s, src)
	}
	if n := len(s.barriers); n != maxBarriers/2+maxBarriers/4+1 {
		t.Errorf("%d barriers are known", n)
	}
	for i := 1; i < len(s.barriers); i++ {
		step := s.barriers[i].Seq - s.barriers[i-1].Seq
		if older := i < maxBarriers/4; older && step != 2 || !older && i > maxBarriers/4 && step != 1 {
			t.Fatalf("barrier %d follows %d", s.barriers[i].Seq, s.barriers[i-1].Seq)
		}
	}
}

// TestKeysThatAreSentAndNotAcknowledgedAreBounded: if too many keys are unacknowledged, the keys after the oldest
// barriers are dropped. A stream cannot resume after these barriers.
func TestKeysThatAreSentAndNotAcknowledgedAreBounded(t *testing.T) {
	src := newTable(0)
	s := New("a")
	s.Connect(1, 0, src)
	k := newKernel()
	k.all(s, src)
	first := k.barrier.Seq
	if err := s.Ack(first, first); err != nil {
		t.Fatal(err)
	}
	for i := 0; i < maxKeys+10; i += 1000 {
		clear(src.has) // removes the frontends without notifying the subscriber, only to reduce their number
		var keys []frontend.Key
		for n := range 1000 {
			keys = append(keys, key(i+n))
		}
		src.change(t, s, 1, keys...)
		k.all(s, src)
	}
	k.all(s, src)
	if len(s.sent) > maxKeys {
		t.Errorf("%d keys are remembered", len(s.sent))
	}
	s.Disconnect(s.Until)
	if s.Connect(2, first, src) {
		t.Error("the stream resumes after a barrier whose later keys are not known any more")
	}
}

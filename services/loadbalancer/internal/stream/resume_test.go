// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package stream

import (
	"testing"

	"github.com/sluice-net/sluice/model/frontend"
)

// TestUnfinishedSnapshotBeginsAgain: the subscriber does not have what was sent of it, and
// what the rest would not name it would remove.
func TestUnfinishedSnapshotBeginsAgain(t *testing.T) {
	src := newTable(3 * MaxSteps)
	s := New("a")
	s.Connect(1, 0, src)
	k := newKernel()
	k.all(s, src)
	seq := k.barrier.Seq
	src.change(t, s, 2, key(1))
	s.Disconnect(s.Until)
	// Another run of the subscriber knows nothing, and is cut in the middle of everything.
	s.Connect(2, 0, src)
	s.Next(src)
	if err := s.Ack(seq, 0); err != nil { // of the stream before
		t.Fatal(err)
	}
	s.Disconnect(s.Until)
	// The run of before comes back.
	if s.Connect(3, seq, src) {
		t.Error("a stream goes on behind a barrier of before an unfinished snapshot")
	}
	k = newKernel()
	k.all(s, src)
	k.same(t, src)
	if !k.barrier.SnapshotComplete {
		t.Error("the stream has not begun with everything")
	}
	// A finished one goes on.
	seq = k.barrier.Seq
	s.Disconnect(s.Until)
	if !s.Connect(4, seq, src) {
		t.Error("a stream does not go on behind its last barrier")
	}
}

// TestFrontendThatChangesWhileItsBatchIsSentIsSentOnce: what is sent is the latest.
func TestFrontendThatChangesWhileItsBatchIsSentIsSentOnce(t *testing.T) {
	src := newTable(2 * MaxSteps)
	s := New("a")
	s.Connect(1, 0, src)
	k := newKernel()
	k.take(s.Next(src))
	last := key(2*MaxSteps - 1) // it is in the second message
	src.change(t, s, 2, last)
	k.all(s, src)
	k.same(t, src)
	if k.upserts != 2*MaxSteps {
		t.Errorf("%d frontends are sent %d times", 2*MaxSteps, k.upserts)
	}
}

// TestBarriersOfTheOlderHalfAreThinned: an acknowledgement of one that is not known counts as
// one of the last known before it, and those of the newer half are known exactly.
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

// TestKeysThatAreSentAndNotAcknowledgedAreBounded: a stream cannot resume behind barriers of
// which it is not known any more what came after.
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
		clear(src.has) // only so that there are few; the subscriber is not told
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
		t.Error("the stream goes on behind a barrier of which it is not known what came after")
	}
}

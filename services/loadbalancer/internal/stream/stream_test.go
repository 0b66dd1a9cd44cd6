// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package stream

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// table is a Source in which each frontend has a version.
type table struct {
	has      map[frontend.Key]int
	backends int // of each frontend
	revision uint64
	complete bool
	seq      uint64
}

func newTable(n int) *table {
	t := &table{has: make(map[frontend.Key]int)}
	for i := range n {
		t.has[key(i)] = 1
	}
	t.revision = 1
	return t
}

func key(i int) frontend.Key {
	return frontend.Key{
		Addr: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), Port: 80,
		Protocol: frontend.TCP,
	}
}

func (t *table) Frontend(k frontend.Key) *frontend.Frontend {
	version, ok := t.has[k]
	if !ok {
		return nil
	}
	f := &frontend.Frontend{Key: k, Service: fmt.Sprint(version), Inside: &frontend.List{}}
	if t.backends > 0 {
		f.Inside.Backends = make([]frontend.Backend, t.backends)
	}
	return f
}

func (t *table) Keys() (out []frontend.Key) {
	for k := range t.has {
		out = append(out, k)
	}
	return out
}

func (t *table) Revision() (uint64, bool) { return t.revision, t.complete }
func (t *table) NextSeq() uint64          { t.seq++; return t.seq }

// change sets or, with version 0, removes keys, and notifies the subscriber.
func (t *table) change(tb testing.TB, s *Subscriber, version int, keys ...frontend.Key) {
	tb.Helper()
	t.revision++
	for _, k := range keys {
		if version == 0 {
			delete(t.has, k)
		} else {
			t.has[k] = version
		}
	}
	if err := s.Mark(keys); err != nil {
		tb.Fatal(err)
	}
}

// kernel is the state that a subscriber builds from the steps.
type kernel struct {
	has     map[frontend.Key]string
	barrier frontend.Barrier
	upserts int
}

func newKernel() *kernel { return &kernel{has: make(map[frontend.Key]string)} }

func (k *kernel) take(steps []frontend.Step) {
	for _, s := range steps {
		switch {
		case s.Barrier != nil:
			k.barrier = *s.Barrier
		case s.Upsert != nil:
			k.upserts++
			k.has[s.Upsert.Key] = s.Upsert.Service
		default:
			delete(k.has, *s.Remove)
		}
	}
}

// all reads messages until there is nothing to send.
func (k *kernel) all(s *Subscriber, t *table) (messages int) {
	for {
		steps := s.Next(t)
		if len(steps) == 0 {
			return messages
		}
		k.take(steps)
		messages++
	}
}

func (k *kernel) same(tb testing.TB, t *table) {
	tb.Helper()
	if len(k.has) != len(t.has) {
		tb.Fatalf("the subscriber has %d frontends, want %d", len(k.has), len(t.has))
	}
	for key, version := range t.has {
		if k.has[key] != fmt.Sprint(version) {
			tb.Fatalf("%s is at version %q, want %d", key, k.has[key], version)
		}
	}
}

func TestMessagesKeepTheirBounds(t *testing.T) {
	for _, c := range []struct{ frontends, backends, least, most int }{
		{0, 0, 1, 1},
		{1, 0, 1, 1},
		{999, 0, 1, 1},
		{1000, 0, 2, 2},
		{2500, 0, 3, 3},
		{10, 10_000, 3, 4},
		{3, 100_000, 3, 4}, // each frontend is larger than a message
	} {
		src, s, k := newTable(c.frontends), New("a"), newKernel()
		src.backends = c.backends
		s.Connect(1, 0, src)
		messages := 0
		for {
			steps := s.Next(src)
			if len(steps) == 0 {
				break
			}
			size, changes := 0, 0
			for _, x := range steps {
				if x.Barrier == nil {
					size, changes = size+Weight(x.Upsert), changes+1
				}
			}
			if len(steps) > MaxSteps || size > MaxBytes && changes > 1 {
				t.Errorf("%+v: a message of %d steps and %d bytes", c, len(steps), size)
			}
			k.take(steps)
			messages++
		}
		if messages < c.least || messages > c.most || !k.barrier.SnapshotComplete || len(k.has) != c.frontends {
			t.Errorf("%+v: %d messages, the barrier %+v, %d frontends", c, messages, k.barrier, len(k.has))
		}
	}
}

// TestChangesAreMergedByKey: a frontend that changes while it waits is sent once, with its latest
// value.
func TestChangesAreMergedByKey(t *testing.T) {
	src, s, k := newTable(10), New("a"), newKernel()
	s.Connect(1, 0, src)
	k.all(s, src)
	k.upserts = 0
	for version := 2; version < 1000; version++ {
		src.change(t, s, version, key(version%3))
	}
	src.change(t, s, 0, key(7))
	src.change(t, s, 1, key(11))
	src.change(t, s, 0, key(11))
	if n := k.all(s, src); n != 1 || k.upserts != 3 || k.barrier.Revision != src.revision || k.barrier.SnapshotComplete {
		t.Errorf("%d messages, %d upserts, the barrier %+v", n, k.upserts, k.barrier)
	}
	k.same(t, src)
	if steps := s.Next(src); steps != nil {
		t.Errorf("without a change: %+v", steps)
	}
	src.revision++ // changes no frontend
	if err := s.Mark(nil); err != nil {
		t.Fatal(err)
	}
	if n := k.all(s, src); n != 1 || k.barrier.Revision != src.revision {
		t.Errorf("%d messages, the barrier %+v", n, k.barrier)
	}
}

// TestBarriersComeWhileEverythingChanges: a batch contains only the keys that were pending when it began. So barriers
// are sent even if all keys change continuously.
func TestBarriersComeWhileEverythingChanges(t *testing.T) {
	src, s, k := newTable(5000), New("a"), newKernel()
	s.Connect(1, 0, src)
	var last uint64
	barriers := 0
	for version := 2; barriers < 4; version++ {
		if version > 100 {
			t.Fatalf("%d barriers after %d messages", barriers, version)
		}
		k.take(s.Next(src))
		if k.barrier.Seq != last {
			last = k.barrier.Seq
			barriers++
		}
		src.change(t, s, version, src.Keys()...)
	}
	k.all(s, src)
	k.same(t, src)
}

// TestFlappingLeavesMemoryFlat: 10,000 endpoints that appear and disappear do not increase the memory for a
// subscriber that reads nothing, or for a subscriber that acknowledges nothing.
func TestFlappingLeavesMemoryFlat(t *testing.T) {
	const n = 10_000
	src, stuck, silent, k := newTable(n), New("stuck"), New("silent"), newKernel()
	stuck.Connect(1, 0, src)
	silent.Connect(2, 0, src)
	k.all(silent, src)
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	flap := func(times int) {
		for i := range times {
			keys := []frontend.Key{key(i % n)}
			src.revision++
			src.has[keys[0]]++
			if err := errors.Join(stuck.Mark(keys), silent.Mark(keys)); err != nil {
				t.Fatal(err)
			}
			if i%16 == 0 {
				k.all(silent, src)
			}
		}
	}
	flap(2 * n)
	before := heap()
	flap(20 * n)
	if grown := heap() - before; grown > 1<<20 {
		t.Errorf("%d changes take %d bytes more", 20*n, grown)
	}
	k.all(silent, src)
	k.same(t, src)
	if w := stuck.Waiting(); w != n {
		t.Errorf("%d keys wait, want %d", w, n)
	}
	runtime.KeepAlive(stuck)
}

func TestStreamResumesBehindABarrier(t *testing.T) {
	src, s, k := newTable(3000), New("a"), newKernel()
	s.Connect(1, 0, src)
	k.all(s, src)
	src.change(t, s, 2, key(1))
	k.all(s, src)
	carried := k.barrier.Seq
	src.change(t, s, 3, key(2)) // sent, and lost with the connection
	s.Next(src)
	src.change(t, s, 4, key(3)) // not sent
	s.Disconnect(time.Time{})
	src.change(t, s, 5, key(4)) // while it is disconnected
	k.upserts = 0
	if !s.Connect(2, carried, src) {
		t.Fatal("the stream does not resume")
	}
	k.all(s, src)
	k.same(t, src)
	if k.upserts != 3 || k.barrier.SnapshotComplete {
		t.Errorf("%d upserts, the barrier %+v", k.upserts, k.barrier)
	}
	// Try to resume after a barrier that was acknowledged earlier, and after a barrier that was never sent.
	if err := s.Ack(k.barrier.Seq, 0); err != nil {
		t.Fatal(err)
	}
	for _, seq := range []uint64{carried, k.barrier.Seq + 1000} {
		if s.Connect(3, seq, src) {
			t.Errorf("the stream resumes behind %d", seq)
		}
		k = newKernel()
		if k.all(s, src); !k.barrier.SnapshotComplete {
			t.Errorf("the barrier %+v", k.barrier)
		}
		k.same(t, src)
	}
	// A snapshot that was not completed cannot be resumed.
	s = New("b")
	s.Connect(1, 0, src)
	s.Next(src)
	if s.Connect(2, src.seq, src) {
		t.Error("an incomplete snapshot is resumed")
	}
}

// TestAnyConnectionComesToTheSame: the subscriber has the current frontends after any sequence of changes, lost
// connections and late acknowledgements.
func TestAnyConnectionComesToTheSame(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 2))
	src, s, k := newTable(50), New("a"), newKernel()
	s.Connect(1, 0, src)
	stable := newKernel() // the state at the last barrier, which a restarted datapath finds in the kernel
	copyTo := func(to, from *kernel) {
		clear(to.has)
		for key, v := range from.has {
			to.has[key] = v
		}
		to.barrier = from.barrier
	}
	for range 20_000 {
		switch r.IntN(8) {
		case 0, 1, 2:
			src.change(t, s, r.IntN(3)*r.IntN(1000), key(r.IntN(80)))
		case 3, 4:
			steps := s.Next(src)
			k.take(steps)
			if len(steps) > 0 && steps[len(steps)-1].Barrier != nil {
				copyTo(stable, k)
			}
		case 5:
			if stable.barrier.Seq > 0 {
				if err := s.Ack(stable.barrier.Seq, 0); err != nil {
					t.Fatal(err)
				}
			}
		case 6:
			s.Disconnect(time.Time{})
			src.change(t, s, 1+r.IntN(1000), key(r.IntN(80)))
			copyTo(k, stable)
			if !s.Connect(2, stable.barrier.Seq, src) {
				if stable.barrier.Seq != 0 {
					t.Fatalf("the stream does not resume behind %d", stable.barrier.Seq)
				}
				clear(k.has)
			}
		default:
			k.all(s, src)
			k.same(t, src)
			copyTo(stable, k)
		}
	}
}

func TestAcknowledgementsAreChecked(t *testing.T) {
	src, s, k := newTable(1), New("a"), newKernel()
	s.Connect(1, 0, src)
	k.all(s, src)
	for _, c := range []struct{ enforced, ended uint64 }{{2, 0}, {1, 2}, {0, 1}} {
		if err := s.Ack(c.enforced, c.ended); !errors.Is(err, failure.ErrAck) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	src.change(t, s, 2, key(0))
	k.all(s, src)
	if err := s.Ack(2, 1); err != nil {
		t.Fatal(err)
	}
	if err := s.Ack(1, 0); err != nil { // the acknowledgement of an older barrier has no effect
		t.Fatal(err)
	}
	if p := s.Progress(); p.Enforced != 2 || p.Ended != 1 {
		t.Errorf("%+v", p)
	}
}

// TestManyBarriersWithoutAcknowledgement: if many barriers are unacknowledged, only some of their revisions are kept.
// The reported revision may be too low, but never too high.
func TestManyBarriersWithoutAcknowledgement(t *testing.T) {
	src, s, k := newTable(1), New("a"), newKernel()
	s.Connect(1, 0, src)
	revisions := map[uint64]uint64{}
	for version := 2; version < 20_000; version++ {
		src.change(t, s, version, key(0))
		k.all(s, src)
		revisions[k.barrier.Seq] = k.barrier.Revision
	}
	if n := len(s.barriers); n > maxBarriers {
		t.Errorf("%d barriers are kept", n)
	}
	for seq := uint64(1); seq <= k.barrier.Seq; seq += 97 {
		if err := s.Ack(seq, 0); err != nil {
			t.Fatal(err)
		}
		if p := s.Progress(); p.Enforced > revisions[seq] {
			t.Fatalf("barrier %d is revision %d, want <= %d", seq, p.Enforced, revisions[seq])
		}
	}
	if err := s.Ack(k.barrier.Seq, k.barrier.Seq); err != nil {
		t.Fatal(err)
	}
	if p := s.Progress(); p.Enforced != src.revision || p.Ended != src.revision {
		t.Errorf("%+v, want %d", p, src.revision)
	}
}

func TestRefusalHoldsUntilTheFrontendIsSentAgain(t *testing.T) {
	src, s, k := newTable(2), New("a"), newKernel()
	of := service.Name{Namespace: "n", Name: "s"}
	refused := func() int { return len(s.Progress().Refusals) }
	s.Connect(1, 0, src)
	k.all(s, src)
	s.Refuse(key(0), of, "full")
	if err := s.Ack(k.barrier.Seq, 0); err != nil {
		t.Fatal(err)
	}
	src.change(t, s, 2, key(1))
	k.all(s, src)
	if refused() != 1 {
		t.Error("a change of another frontend ends the refusal")
	}
	src.change(t, s, 3, key(0))
	k.all(s, src)
	if refused() != 0 {
		t.Error("the frontend was sent again, but is still refused")
	}
	// The refusal of a frontend arrives after a new version was sent. The next acknowledgements show which version
	// was refused.
	first := k.barrier.Seq
	src.change(t, s, 4, key(0))
	k.all(s, src)
	s.Refuse(key(0), of, "full")
	if err := s.Ack(first, 0); err != nil {
		t.Fatal(err)
	}
	if refused() != 1 {
		t.Error("the refusal is dropped before the next frontend is acknowledged")
	}
	if err := s.Ack(k.barrier.Seq, 0); err != nil {
		t.Fatal(err)
	}
	if refused() != 0 {
		t.Error("the refusal of the earlier frontend still counts")
	}
	// Repeat this for both frontends. A single acknowledgement of everything leaves the frontend refused.
	src.change(t, s, 5, key(0))
	k.all(s, src)
	src.change(t, s, 6, key(0))
	k.all(s, src)
	s.Refuse(key(0), of, "full")
	if err := s.Ack(k.barrier.Seq, 0); err != nil {
		t.Fatal(err)
	}
	if refused() != 1 {
		t.Error("a refusal that may concern the last frontend is dropped")
	}
}

func TestKeysThatComeAndGoWithoutEndAreBounded(t *testing.T) {
	src, s := newTable(0), New("a")
	s.Connect(1, 0, src)
	var err error
	for i := 0; i <= maxKeys && err == nil; i++ {
		err = s.Mark([]frontend.Key{key(i)})
	}
	if !errors.Is(err, ErrOverflow) {
		t.Errorf("%v", err)
	}
	if s.Connect(2, 1, src) {
		t.Error("the stream resumes")
	}
	// A disconnected subscriber is not notified, and begins a new stream.
	k := newKernel()
	k.all(s, src)
	s.Disconnect(time.Time{})
	for i := range maxKeys + 2 {
		if err := s.Mark([]frontend.Key{key(i)}); err != nil {
			t.Fatal(err)
		}
	}
	if s.Connect(3, k.barrier.Seq, src) {
		t.Error("the stream resumes")
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fragment

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sluice-net/sluice/services/dns/internal/frame"
	"github.com/sluice-net/sluice/services/dns/internal/frame/frametest"
)

// answer returns a packet of 3,000 bytes.
func answer(id uint32) frametest.Packet {
	return frametest.Packet{
		Tag:    frame.Tag{Set: 9, Endpoint: 7, Role: frame.Responder},
		Source: netip.MustParseAddrPort("10.96.0.10:53"), Destination: netip.MustParseAddrPort("10.244.0.7:40000"),
		Payload: bytes.Repeat([]byte("0123456789"), 300), ID: id,
	}
}

var start = time.Unix(1_000_000, 0)

func add(t *testing.T, p *Packets, b []byte, now time.Time) (frames [][]byte, data []byte, result Result) {
	t.Helper()
	var f frame.Frame
	if err := f.Read(b); err != nil || !f.Fragmented {
		t.Fatalf("%v, %+v", err, f)
	}
	return p.Add(&f, b, now)
}

func (p *Packets) empty(t *testing.T) {
	t.Helper()
	if len(p.packets) != 0 || p.order.Len() != 0 || p.limit.Used() != 0 {
		t.Errorf("%d packets, %d in order, %d bytes are left", len(p.packets), p.order.Len(), p.limit.Used())
	}
}

func TestPacketsAreCompleteInAnyOrder(t *testing.T) {
	for _, padding := range []int{0, 6} {
		pieces := answer(1).Fragments(800)
		for i := range pieces {
			pieces[i] = append(pieces[i], make([]byte, padding)...)
		}
		for _, order := range [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}, {0, 0, 1, 1, 3, 3, 2}} {
			p := New()
			for i, n := range order {
				buffer := slices.Clone(pieces[n])
				frames, data, result := add(t, p, buffer, start)
				clear(buffer) // as the next read overwrites it
				switch {
				case i == len(order)-1:
					if result != Completed || len(frames) != 4 || len(data) != 3008 || !bytes.Equal(data[8:], answer(1).Payload) {
						t.Fatalf("%v: result %d, %d frames, %d bytes", order, result, len(frames), len(data))
					}
					for i, b := range frames {
						if !bytes.Equal(b, pieces[i]) {
							t.Errorf("%v: frame %d was changed or has another place", order, i)
						}
					}
				case i > 0 && order[i-1] == n:
					if result != Repeated {
						t.Errorf("%v: repeated: result %d", order, result)
					}
				case result != Stored:
					t.Errorf("%v: result %d", order, result)
				}
			}
			p.empty(t)
		}
	}
}

func TestConflictingFragmentsDropTheirPacket(t *testing.T) {
	a := answer(1)
	pieces := a.Fragments(800)
	changed := bytes.Repeat([]byte("x"), 800)
	for what, wrong := range map[string][]byte{
		"other data at the same place":   a.Fragment(changed, 800, true),
		"an overlap with the one before": a.Fragment(changed, 792, true),
		"an overlap with the next one":   a.Fragment(changed, 8, true),
		"a part of another one":          a.Fragment(changed[:8], 808, true),
		"one that covers all":            a.Fragment(make([]byte, 3200), 0, true),
		"a nearer end":                   a.Fragment(changed[:8], 400, false),
		"data behind the end":            a.Fragment(changed, 3200, true),
		"another end":                    a.Fragment(changed, 4000, false),
		"the end as a middle one":        a.Fragment(changed[:608], 2400, true),
	} {
		p := New()
		for _, b := range [][]byte{pieces[0], pieces[1], pieces[3]} {
			if _, _, result := add(t, p, b, start); result != Stored {
				t.Fatalf("%s: result %d", what, result)
			}
		}
		if _, _, result := add(t, p, wrong, start); result != Conflict {
			t.Errorf("%s: result %d", what, result)
		}
		for _, b := range pieces { // later fragments do not complete the packet
			if _, _, result := add(t, p, b, start.Add(Time/2)); result != Conflict {
				t.Errorf("%s: then result %d", what, result)
			}
		}
		if p.limit.Used() == 0 {
			t.Errorf("%s: the refused packet counts nothing", what)
		}
		if expired, evicted := p.Expire(start.Add(Time)); expired != 0 || evicted != 0 {
			t.Errorf("%s: %d expired, %d evicted", what, expired, evicted)
		}
		p.empty(t)
	}
}

func TestFragmentsThatNeverEndExpire(t *testing.T) {
	p := New()
	pieces := answer(1).Fragments(800)
	for i, b := range pieces[:3] {
		if _, _, result := add(t, p, b, start.Add(time.Duration(i)*Time/4)); result != Stored {
			t.Fatalf("result %d", result)
		}
	}
	if _, _, result := add(t, p, pieces[3], start.Add(Time)); result != Stored { // a fragment of a new packet
		t.Errorf("after its time: result %d", result)
	}
	if expired, _ := p.Expire(start.Add(2 * Time)); expired != 2 {
		t.Errorf("%d expired", expired)
	}
	p.empty(t)
}

// TestFragmentsOfOnePodAreBounded: a pod sends fragments of 10,000 packets that are never complete. They take no
// capacity from other pods, and memory stays within the limits.
func TestFragmentsOfOnePodAreBounded(t *testing.T) {
	p := New()
	quiet := answer(1)
	quiet.Endpoint = 8
	pieces := quiet.Fragments(800)
	for i := range pieces[:3] {
		if _, _, result := add(t, p, pieces[i], start); result != Stored {
			t.Fatalf("result %d", result)
		}
	}
	for id := range uint32(10_000) {
		noisy := answer(id)
		noisy.Endpoint = uint16(100 + id%20) // together above the limit of all pods
		if _, _, result := add(t, p, noisy.Fragments(800)[id%3], start); result != Stored {
			t.Fatalf("packet %d: result %d", id, result)
		}
		if p.limit.Used() > MaxBytes || len(p.packets) > MaxBytes/(800+overhead)+1 || p.order.Len() != len(p.packets) {
			t.Fatalf("%d bytes, %d packets, %d in order", p.limit.Used(), len(p.packets), p.order.Len())
		}
	}
	if frames, _, result := add(t, p, pieces[3], start); result != Completed || len(frames) != 4 {
		t.Errorf("the quiet pod: result %d", result)
	}
	if _, evicted := p.Expire(start.Add(Time)); evicted == 0 {
		t.Error("no packet was evicted")
	}
	p.empty(t)
}

// TestPacketLargerThanItsPodMayStore: a packet is larger than the limit of a pod, so it is never complete.
func TestPacketLargerThanItsPodMayStore(t *testing.T) {
	p := New()
	a := answer(1)
	for i := range 2000 { // 2,000 fragments of 8 bytes
		_, _, result := add(t, p, a.Fragment(make([]byte, 8), 16+8*i, true), start)
		if result != Stored && result != NoSpace || p.limit.Used() > MaxBytesPerPod {
			t.Fatalf("fragment %d: result %d, %d bytes", i, result, p.limit.Used())
		}
	}
	p.Expire(start.Add(Time))
	p.empty(t)
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package translation

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
)

// TestTranslationStaysWhileItIsUsed: a translation is in use through the connection of a pod, through a connection in
// transit of an external client or, for a pod to itself, through packets alone.
func TestTranslationStaysWhileItIsUsed(t *testing.T) {
	at := netip.MustParseAddrPort
	pod := Translation{
		Source: at("10.244.0.2:40000"), Asked: at("10.96.0.1:80"), Backend: at("10.244.1.3:8080"), Protocol: 6,
	}
	answer := Translation{
		Source: at("10.244.1.3:8080"), Asked: at("192.0.2.10:24711"), Backend: at("198.51.100.7:40000"), Protocol: 6,
		Answer: true,
	}
	record := Translation{
		Source: at("10.244.1.3:8080"), Asked: at("10.244.0.2:40000"), Protocol: 6, Record: true,
	}
	itself, back, copied, bare, flow := pod, pod, pod, pod, pod
	copied.Copy, bare.Source, flow.Protocol = true, at("10.244.0.2:40001"), 17
	itself.Backend, back.Back = at("10.244.0.2:8080"), true
	of := func(x Translation, transit bool) conntrack.Tuple {
		return conntrack.Tuple{Initiator: x.Source, Responder: x.Backend, Protocol: x.Protocol, Transit: transit}
	}
	timeouts := conntrack.DefaultTimeouts()
	long := timeouts.Of(6, conntrack.SeenReply|conntrack.Established)
	for _, c := range []struct {
		what string
		t    Translation
		idle time.Duration
		has  []conntrack.Tuple
		over bool
	}{
		{"whose connection was evicted", pod, Keep - time.Second, nil, false},
		{"whose connection was evicted long ago", pod, Keep, nil, true},
		{"with neither connection nor copy", bare, Rest - time.Second, nil, false},
		{"with neither connection nor copy for some time", bare, Rest, nil, true},
		{"of UDP, without a connection", flow, 119 * time.Second, nil, false},
		{"a copy, with its connection", copied, long * 2, []conntrack.Tuple{of(pod, false)}, false},
		{"a copy, with the connection of a sender outside", copied, long * 2, []conntrack.Tuple{of(pod, true)}, false},
		{"a copy whose connection was evicted", copied, Keep - time.Second, nil, false},
		{"a copy whose connection was evicted long ago", copied, Keep, nil, true},
		{"a record, with its connection", record, long * 2, []conntrack.Tuple{of(pod, false)}, false},
		{"a record whose connection was evicted", record, Keep - time.Second, nil, false},
		{"a record whose connection was evicted long ago", record, Keep, nil, true},
		{"with a connection", pod, long * 2, []conntrack.Tuple{of(pod, false)}, false},
		{"with a connection of a sender outside", pod, long * 2, []conntrack.Tuple{of(pod, true)}, false},
		{"with a connection of another backend", pod, Keep, []conntrack.Tuple{of(itself, false)}, true},
		{"answers with their connection", answer, long * 2, []conntrack.Tuple{of(answer, true)}, false},
		{"answers with another connection", answer, Rest, []conntrack.Tuple{of(answer, false)}, true},
		{"of a pod to itself, in use", itself, long - time.Second, nil, false},
		{"of a pod to itself, idle", itself, long, []conntrack.Tuple{of(itself, false)}, true},
		{"back to a pod itself, in use", back, long - time.Second, nil, false},
		{"back to a pod itself, idle", back, long, nil, true},
	} {
		now := uint32(10_000_000)
		c.t.LastSeen = now - uint32(c.idle/time.Second)
		found := func(x conntrack.Tuple) (bool, error) {
			for _, y := range c.has {
				if x == y {
					return true, nil
				}
			}
			return false, nil
		}
		before := lost{{c.t.Source, c.t.Asked, c.t.Protocol, c.t.Copy}: c.t.LastSeen}
		kept := func(x Translation) (bool, error) { return x.Source != bare.Source, nil }
		collection := collection{now: now, timeouts: timeouts, found: found, kept: kept, before: before, lost: lost{}}
		if over, err := collection.isOver(c.t); err != nil || over != c.over {
			t.Errorf("%s: over %t, %v", c.what, over, err)
		}
	}
	for _, transit := range []bool{false, true} {
		for what, x := range map[string]Translation{"a translation": pod, "a record": record, "a copy": copied} {
			x.LastSeen = 1000
			c := collection{now: 1000, timeouts: timeouts, ended: conntrack.Ended{of(pod, transit): {}}}
			c.found = func(conntrack.Tuple) (bool, error) { return false, nil }
			if over, err := c.isOver(x); err != nil || !over {
				t.Errorf("%s whose connection has ended: over %t, %v", what, over, err)
			}
			c.found = func(conntrack.Tuple) (bool, error) { return true, nil }
			if over, err := c.isOver(x); err != nil || over {
				t.Errorf("%s of a connection that was opened again: over %t, %v", what, over, err)
			}
		}
	}
	broken := collection{now: 1000, found: func(conntrack.Tuple) (bool, error) { return false, errors.New("no map") }}
	if over, err := broken.isOver(pod); err == nil || over {
		t.Errorf("a failed lookup of the connection: over %t, %v", over, err)
	}
	broken.found = func(conntrack.Tuple) (bool, error) { return false, nil }
	broken.kept = func(Translation) (bool, error) { return false, errors.New("no map") }
	if over, err := broken.isOver(pod); err == nil || over {
		t.Errorf("a failed lookup of the copy: over %t, %v", over, err)
	}
}

// TestFlowsLeaveABackendThatTheirFrontDoesNotKeep also tests what stays: TCP, answers of a pod to itself, claims of
// ports and records of answers.
func TestFlowsLeaveABackendThatTheirFrontDoesNotKeep(t *testing.T) {
	at := netip.MustParseAddrPort
	udp := Translation{
		Source: at("192.0.2.7:40000"), Asked: at("192.0.2.1:30080"), Backend: at("10.244.1.3:53"), Protocol: 17,
		Front: 7, Number: 3, Generation: 2,
	}
	with := func(change func(*Translation)) Translation {
		x := udp
		change(&x)
		return x
	}
	keeps := func(front uint32, ipv6 bool, number uint32, generation uint8) bool {
		return front == 7 && !ipv6 && number == 4 && generation == 2
	}
	for _, c := range []struct {
		what   string
		t      Translation
		leaves bool
	}{
		{"a backend that the front lost", udp, true},
		{"a backend that it keeps", with(func(x *Translation) { x.Number = 4 }), false},
		{"another front", with(func(x *Translation) { x.Number, x.Front = 4, 8 }), true},
		{"an earlier generation", with(func(x *Translation) { x.Number, x.Generation = 4, 1 }), true},
		{"IPv6", with(func(x *Translation) { x.Number, x.Backend = 4, at("[fd00::3]:53") }), true},
		{"TCP", with(func(x *Translation) { x.Protocol = 6 }), false},
		{"SCTP", with(func(x *Translation) { x.Protocol = 132 }), false},
		{"back to a pod itself", with(func(x *Translation) { x.Back = true }), false},
		{"the claim of a port", with(func(x *Translation) { x.Answer = true }), false},
		{"the copy of a claim", with(func(x *Translation) { x.Answer, x.Copy = true, true }), false},
		{"a record of answers", with(func(x *Translation) { x.Record = true }), false},
	} {
		if got := c.t.leaves(keeps); got != c.leaves {
			t.Errorf("%s: leaves %t, want %t", c.what, got, c.leaves)
		}
	}
}

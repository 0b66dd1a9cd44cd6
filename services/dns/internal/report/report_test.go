// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package report

import (
	"context"
	"errors"
	"net/netip"
	"testing"
)

// datapath keeps what was reported.
type datapath struct {
	messages []Message
	lost     uint64
	err      error
}

func (d *datapath) Send(_ context.Context, messages []Message, lost uint64) error {
	if d.err != nil {
		return d.err
	}
	d.messages, d.lost = append(d.messages, messages...), d.lost+lost
	return nil
}

// TestOnePodDoesNotUseUpTheReport: a pod with many queries loses only its own messages.
func TestOnePodDoesNotUseUpTheReport(t *testing.T) {
	d := &datapath{}
	r := New(Full, d)
	add := func(pod uint16, n int) {
		for range n {
			if r.Wants(pod) {
				r.Add(pod, Message{Type: pod})
			}
		}
	}
	for noisy := range uint16(6) {
		add(noisy, 1000)
	}
	for quiet := uint16(100); quiet < 110; quiet++ {
		add(quiet, 3)
	}
	r.flush(t.Context())
	count := make(map[uint16]int)
	for _, m := range d.messages {
		count[m.Type]++
	}
	for pod, n := range count {
		if pod >= 100 && n != 3 || n > MaxPerPod {
			t.Errorf("%d messages of pod %d", n, pod)
		}
	}
	if len(count) != 16 || len(d.messages) != Max || d.lost != 6*1000+10*3-Max || r.Lost() != d.lost {
		t.Errorf("%d messages of %d pods, %d lost", len(d.messages), len(count), d.lost)
	}
}

func TestMessagesOfAnUnreachableDatapathAreLost(t *testing.T) {
	d := &datapath{err: errors.ErrUnsupported}
	r := New(Full, d)
	for range 3 {
		r.Add(1, Message{})
	}
	r.flush(t.Context())
	d.err = nil
	r.Add(1, Message{})
	r.flush(t.Context())
	if len(d.messages) != 1 || d.lost != 3 || r.Lost() != 3 {
		t.Errorf("%d messages and %d lost, want 1 and 3", len(d.messages), d.lost)
	}
	r.flush(t.Context())
	if d.lost != 3 {
		t.Errorf("losses are reported again: %d", d.lost)
	}
}

func TestNamesAreRedacted(t *testing.T) {
	m := Message{
		Name: "secret.example.", Type: 1, Code: 3, Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
		Chain: []string{"other.example."}, Server: netip.MustParseAddrPort("192.0.2.53:53"),
	}
	for _, c := range []struct {
		setting  string
		messages int
		name     string
	}{{"full", 1, m.Name}, {"redacted", 1, ""}, {"off", 0, ""}} {
		mode, err := ParseMode(c.setting)
		if err != nil {
			t.Fatal(err)
		}
		d := &datapath{}
		r := New(mode, d)
		if r.Wants(1) != (c.messages > 0) {
			t.Errorf("%s: wants messages: %t", c.setting, c.messages == 0)
		}
		r.Add(1, m)
		r.flush(t.Context())
		if len(d.messages) != c.messages || d.lost != 0 {
			t.Fatalf("%s: %d messages, %d lost", c.setting, len(d.messages), d.lost)
		}
		for _, got := range d.messages {
			hidden := len(got.Addresses)+len(got.Chain) == 0
			if got.Name != c.name || hidden != (c.name == "") || got.Redacted != hidden || got.Type != 1 || got.Code != 3 ||
				got.Server != m.Server {
				t.Errorf("%s: %+v", c.setting, got)
			}
		}
	}
	if _, err := ParseMode("all"); err == nil {
		t.Error("another mode is accepted")
	}
}

// TestListsOfAMessageAreLimited: the lists in a reported message are short, although an answer may have a thousand
// addresses.
func TestListsOfAMessageAreLimited(t *testing.T) {
	d := &datapath{}
	r := New(Full, d)
	r.Add(1, Message{Addresses: make([]netip.Addr, 1000), Chain: make([]string, 16)})
	r.flush(t.Context())
	if m := d.messages[0]; len(m.Addresses) != maxAddresses || len(m.Chain) != maxChain {
		t.Errorf("%d addresses and %d names", len(m.Addresses), len(m.Chain))
	}
}

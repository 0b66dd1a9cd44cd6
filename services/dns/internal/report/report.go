// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package report passes the evaluated queries and answers to sluice-datapath, which passes them to observers. Packets
// do not wait for reports: messages beyond the limits are only counted.
package report

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Limits of the messages between two reports. One pod cannot use up the limits of other pods.
const (
	Interval  = 250 * time.Millisecond
	Max       = 128 // of all pods together
	MaxPerPod = 32
	// maxAddresses and maxChain limit the lists of one message.
	maxAddresses = 16
	maxChain     = 8
)

// callTime is how long one report may take.
const callTime = 5 * time.Second

// Message is an evaluated query or answer.
type Message struct {
	Time           time.Time
	Client, Server netip.AddrPort
	TCP            bool
	Response       bool
	Dropped        bool   // a refused query, or an answer that was dropped
	Name           string // name in the question
	Type           uint16 // type in the question
	Code           uint16 // result code of an answer, or of the reply to a refused query
	Addresses      []netip.Addr
	Chain          []string      // targets of the CNAME records
	TTL            time.Duration // lowest TTL of Addresses
	Redacted       bool
}

// Sender passes messages to sluice-datapath. lost is the number of messages before these that were not reported.
type Sender interface {
	Send(ctx context.Context, messages []Message, lost uint64) error
}

// Mode determines which parts of messages are reported.
type Mode uint8

// The modes.
const (
	Full     Mode = iota
	Redacted      // without names and addresses of answers
	Off
)

// modes are the values of the setting.
var modes = map[string]Mode{"full": Full, "redacted": Redacted, "off": Off}

// ParseMode returns the mode of a value of the setting.
func ParseMode(text string) (Mode, error) {
	m, ok := modes[text]
	if !ok {
		return Off, fmt.Errorf("%q is not full, redacted or off", text)
	}
	return m, nil
}

// Reporter collects messages. It is safe for concurrent use.
type Reporter struct {
	mode   Mode
	sender Sender
	lost   atomic.Uint64 // since the start

	mu      sync.Mutex
	pods    map[uint16][]Message // guarded by mu; by endpoint
	waiting int                  // guarded by mu; messages in pods
	missing uint64               // guarded by mu; messages that the next report counts as lost
}

// New returns a Reporter.
func New(mode Mode, to Sender) *Reporter {
	return &Reporter{mode: mode, sender: to, pods: make(map[uint16][]Message)}
}

// Lost returns the number of messages that were not reported.
func (r *Reporter) Lost() uint64 { return r.lost.Load() }

// Wants reports whether the next message of a pod would be reported. If not, it counts the message as lost, and the
// caller need not compose it.
func (r *Reporter) Wants(endpoint uint16) bool {
	if r.mode == Off {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.space(endpoint) {
		return true
	}
	r.lose(1)
	return false
}

// space reports whether a message of a pod fits into the limits, or another pod has more messages than this pod would
// have.
func (r *Reporter) space(endpoint uint16) bool {
	own := len(r.pods[endpoint])
	if own >= MaxPerPod {
		return false
	}
	if r.waiting < Max {
		return true
	}
	_, most := r.largest()
	return most > own+1
}

// largest returns the pod with the most messages.
func (r *Reporter) largest() (endpoint uint16, most int) {
	for e, list := range r.pods {
		if len(list) > most {
			endpoint, most = e, len(list)
		}
	}
	return endpoint, most
}

func (r *Reporter) lose(n int) {
	r.missing += uint64(n) //nolint:gosec // a count
	r.lost.Add(uint64(n))  //nolint:gosec // a count
}

// Add adds a message of a pod. The Reporter keeps its slices.
func (r *Reporter) Add(endpoint uint16, m Message) {
	if r.mode == Off {
		return
	}
	if r.mode == Redacted {
		m.Name, m.Addresses, m.Chain, m.Redacted = "", nil, nil, true
	}
	m.Addresses, m.Chain = m.Addresses[:min(len(m.Addresses), maxAddresses)], m.Chain[:min(len(m.Chain), maxChain)]
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.space(endpoint) {
		r.lose(1)
		return
	}
	if r.waiting >= Max {
		other, most := r.largest()
		r.pods[other] = r.pods[other][:most-1]
		r.waiting--
		r.lose(1)
	}
	r.pods[endpoint] = append(r.pods[endpoint], m)
	r.waiting++
}

// take returns the messages of all pods, in no particular order, and the number of lost messages.
func (r *Reporter) take() (all []Message, lost uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, list := range r.pods {
		all = append(all, list...)
	}
	clear(r.pods)
	lost, r.waiting, r.missing = r.missing, 0, 0
	return all, lost
}

// Run reports the messages until ctx ends. Messages are lost while sluice-datapath does not answer.
func (r *Reporter) Run(ctx context.Context) error {
	tick := time.NewTicker(Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		r.flush(ctx)
	}
}

func (r *Reporter) flush(ctx context.Context) {
	all, lost := r.take()
	if len(all) == 0 && lost == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	if r.sender.Send(ctx, all, lost) == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.missing += lost
	r.lose(len(all))
}

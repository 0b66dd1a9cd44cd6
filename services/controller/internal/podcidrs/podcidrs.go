// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package podcidrs publishes the podCIDRs of all Nodes to the nodes of the cluster. In mode kubernetes, nodes accept
// no other range from a node.
package podcidrs

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/controller/internal/subject"
)

// Publisher passes the podCIDRs on. The caller may repeat calls.
type Publisher interface {
	// PublishPodCIDRs replaces the podCIDRs of all Nodes.
	PublishPodCIDRs(ctx context.Context, nodes map[string][]netip.Prefix) error
}

// Timing of publications.
const (
	// batch is the time for which changes are collected.
	batch = 200 * time.Millisecond
	// repeat is the interval of calls without a change. They restore keys that were deleted from etcd or are missing
	// in a rebuilt store. They also write the keys after the cluster has switched to mode kubernetes.
	repeat     = 30 * time.Second
	retryFirst = time.Second
	retryMax   = 30 * time.Second
)

// Nodes follows the podCIDRs of Nodes.
type Nodes struct {
	publisher Publisher
	leads     subject.Leadership
	log       *slog.Logger
	requests  subject.Requests
	changed   chan struct{} // has a token after a change

	mu       sync.Mutex
	pending  bool                      // guarded by mu; a change was not published yet
	ranges   map[string][]netip.Prefix // guarded by mu; by Node
	complete bool                      // guarded by mu
	failure  error                     // guarded by mu; why the Nodes cannot be followed
}

// New returns Nodes that publish while the process is elected.
func New(p Publisher, leads subject.Leadership, l *slog.Logger) *Nodes {
	return &Nodes{
		publisher: p, leads: leads, log: l, changed: make(chan struct{}, 1), ranges: map[string][]netip.Prefix{},
	}
}

// Run publishes while the process is elected, until ctx ends; it then returns nil.
func (n *Nodes) Run(ctx context.Context) error {
	n.leads.While(ctx, n.lead)
	return nil
}

// Status returns the number of Nodes with unpublished podCIDRs, and the statistics of the requests.
func (n *Nodes) Status() subject.Status {
	n.mu.Lock()
	pending := 0
	if n.pending {
		pending = len(n.ranges)
	}
	n.mu.Unlock()
	return n.requests.Status("pod CIDRs", pending)
}

// Upsert records the podCIDRs of a Node. Malformed podCIDRs are logged and skipped, so that one Node does not affect
// the others.
func (n *Nodes) Upsert(name string, podCIDRs []string) {
	var ranges []netip.Prefix
	for _, text := range podCIDRs {
		p, err := netip.ParsePrefix(text)
		if err != nil || p != p.Masked() || p.Addr().Is4In6() {
			n.log.Warn("skipping a malformed podCIDR of a Node", "node", name, "podCIDR", text)
			continue
		}
		ranges = append(ranges, p)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if was, ok := n.ranges[name]; ok && slices.Equal(was, ranges) {
		return
	}
	n.ranges[name] = ranges
	n.wake()
}

// Delete records that a Node was deleted.
func (n *Nodes) Delete(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.ranges, name)
	n.wake()
}

// Complete records that all existing Nodes have been reported.
func (n *Nodes) Complete() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.complete = true
	n.wake()
}

// Failed records why the Nodes cannot be followed; nil means that they can. While it is set, no ranges are published.
func (n *Nodes) Failed(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.failure = err
	n.wake()
}

// wake schedules a publication. Called with mu held.
func (n *Nodes) wake() {
	n.pending = true
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// all returns the podCIDRs of all Nodes; ok is false while they are unknown.
func (n *Nodes) all() (nodes map[string][]netip.Prefix, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pending = false
	return maps.Clone(n.ranges), n.complete && n.failure == nil
}

// publish publishes the result of all.
func (n *Nodes) publish(ctx context.Context, nodes map[string][]netip.Prefix) error {
	err := n.requests.Do(ctx, func(ctx context.Context) error { return n.publisher.PublishPodCIDRs(ctx, nodes) })
	if err != nil {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.pending = true
	}
	return err
}

// lead publishes the podCIDRs, and every change, until ctx ends.
func (n *Nodes) lead(ctx context.Context) {
	var logged string
	retry := retryFirst
	for {
		select {
		case <-n.changed: // the call of all below includes the change
		default:
		}
		next := repeat
		if nodes, ok := n.all(); ok {
			err := n.publish(ctx, nodes)
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				next, retry = retry, min(2*retry, retryMax)
				if err.Error() != logged {
					logged = err.Error()
					n.log.Warn("cannot publish the podCIDRs of Nodes, trying again", log.Err(err))
				}
			default:
				logged, retry = "", retryFirst
			}
		}
		select {
		case <-time.After(next):
		case <-n.changed:
			select { // collect further changes
			case <-time.After(batch):
			case <-ctx.Done():
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"context"
	"errors"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
)

const (
	// publishFrom is the least count that is published: a tenant with fewer numbers is
	// far from the end of its first ones.
	publishFrom = firstNumbers / 2
	// publishEvery is the least time between two publications.
	publishEvery = 10 * time.Second
	// numberWait is the time that a new endpoint waits for a number, and numberRetry the interval between tries. It gives
	// up numberMargin before its caller's deadline.
	numberWait, numberMargin, numberRetry = 10 * time.Second, 500 * time.Millisecond, time.Second
)

// Numbers are the counts that the collector publishes: it alone sees which numbers are
// in quarantine, and which label sets had them.
type Numbers struct {
	Revision   int64          `json:"revision"`   // of the store; identities up to it are counted
	Used       int            `json:"used"`       // numbers that are assigned or in quarantine
	Unlabelled int            `json:"unlabelled"` // of them, of namespaces without the tenant label
	Tenants    map[string]int `json:"tenants"`    // by Tenant.String, without tenants that have few
}

// namespaceOf returns the namespace of a label set; empty if it is not of Kubernetes.
func namespaceOf(labels label.Canonical) string {
	ns, _ := labels.Set().Value(label.SourceKubernetes, label.KeyNamespace)
	return ns
}

// awaitNumber calls f again while there is no number for it, within the caller's time.
func awaitNumber(ctx context.Context, f func() (identity.Identity, error)) (identity.Identity, error) {
	end := time.Now().Add(numberWait)
	if deadline, ok := ctx.Deadline(); ok && deadline.Add(-numberMargin).Before(end) {
		end = deadline.Add(-numberMargin)
	}
	for {
		id, err := f()
		if !errors.Is(err, ErrShare) && !errors.Is(err, ErrExhausted) || !time.Now().Add(numberRetry).Before(end) {
			return id, err
		}
		select {
		case <-time.After(numberRetry):
		case <-ctx.Done():
			return id, err
		}
	}
}

// resting is a number in quarantine.
type resting struct {
	namespace string // of the label set that had it; empty: not known
	until     time.Time
}

// numbersNow counts the numbers to publish.
func (c *collector) numbersNow(now time.Time) Numbers {
	c.index.mu.Lock(opCollect)
	defer c.index.mu.Unlock()
	n := Numbers{Revision: c.index.mirror.revision, Used: len(c.index.mirror.known), Tenants: map[string]int{}}
	add := func(ns string, by int) {
		t := c.cfg.tenant(ns)
		if ns == "" || t == shares.System {
			return
		}
		n.Tenants[t.String()] += by
		if !t.HasLabel() {
			n.Unlabelled += by
		}
	}
	for ns, by := range c.index.mirror.living {
		add(ns, by)
	}
	for number, r := range c.resting {
		if !now.Before(r.until) {
			delete(c.resting, number)
			continue
		}
		if _, ok := c.index.mirror.known[number]; ok {
			continue // its deletion has not come yet, or the label set has it again
		}
		n.Used++
		add(r.namespace, 1)
	}
	for t, count := range n.Tenants {
		if count < publishFrom {
			delete(n.Tenants, t)
		}
	}
	return n
}

// publish publishes the counts if they have changed.
func (c *collector) publish(ctx context.Context) error {
	if c.resting == nil {
		numbers, err := within(ctx, c.cfg, c.store.Resting)
		if err != nil {
			return err
		}
		// Only the former collector knew which label sets had them, and since when.
		c.resting = make(map[identity.Numeric]resting, len(numbers))
		for _, n := range numbers {
			c.resting[n] = resting{until: time.Now().Add(c.cfg.Quarantine)}
		}
	}
	n := c.numbersNow(time.Now())
	if c.published != nil && c.published.equal(n) {
		return nil
	}
	err := bounded(ctx, c.cfg, func(ctx context.Context) error { return c.store.PublishNumbers(ctx, n) })
	c.noteDenied(err)
	if err != nil {
		return err
	}
	c.published = &n
	return nil
}

// noteDenied keeps whether the store lacks a grant.
func (c *collector) noteDenied(err error) {
	c.index.mu.Lock(opCollect)
	defer c.index.mu.Unlock()
	c.index.denied = nil
	if errors.Is(err, ErrDenied) {
		c.index.denied = err
	}
}

// equal compares everything but the revision.
func (n Numbers) equal(m Numbers) bool {
	if n.Used != m.Used || n.Unlabelled != m.Unlabelled || len(n.Tenants) != len(m.Tenants) {
		return false
	}
	for t, count := range n.Tenants {
		if m.Tenants[t] != count {
			return false
		}
	}
	return true
}

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
	// publishFrom is the smallest count that is published. A tenant with fewer numbers is far below firstNumbers,
	// which every tenant may have.
	publishFrom = firstNumbers / 2
	// publishEvery is the minimum interval between two publications.
	publishEvery = 10 * time.Second
	// numberWait is how long a new endpoint waits for a number, and numberRetry is the interval between attempts.
	// The wait ends numberMargin before the caller's deadline.
	numberWait, numberMargin, numberRetry = 10 * time.Second, 500 * time.Millisecond, time.Second
)

// Numbers contains the counts that the collector publishes. Only the collector knows which numbers are in quarantine,
// and which label sets had them.
type Numbers struct {
	Revision   int64          `json:"revision"`   // revision of the store up to which identities are counted
	Used       int            `json:"used"`       // numbers that are assigned or in quarantine
	Unlabelled int            `json:"unlabelled"` // how many of them belong to namespaces without the tenant label
	Tenants    map[string]int `json:"tenants"`    // by Tenant.String, without tenants that have less than publishFrom
}

// namespaceOf returns the namespace of a label set; empty if the set does not come from Kubernetes.
func namespaceOf(labels label.Canonical) string {
	ns, _ := labels.Set().Value(label.SourceKubernetes, label.KeyNamespace)
	return ns
}

// awaitNumber calls f repeatedly while it finds no number, until shortly before the caller's deadline.
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
	namespace string // namespace of the label set that had the number; empty: unknown
	until     time.Time
}

// numbersNow returns the counts to publish.
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
			continue // the deletion was not received yet, or the label set has its number again
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
		// Only the former collector knew which label sets had these numbers, and since when they are in
		// quarantine.
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

// noteDenied records whether this node lacks a grant in the store.
func (c *collector) noteDenied(err error) {
	c.index.mu.Lock(opCollect)
	defer c.index.mu.Unlock()
	c.index.denied = nil
	if errors.Is(err, ErrDenied) {
		c.index.denied = err
	}
}

// equal compares everything except the revision.
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

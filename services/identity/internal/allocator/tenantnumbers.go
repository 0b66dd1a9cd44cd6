// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"maps"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
)

const (
	// Each tenant may have firstNumbers numbers and, in addition, 1/freePart of the free numbers.
	firstNumbers, freePart = 256, 4
	// unlabelledNumbers is the count of numbers that all namespaces without the tenant label may have together.
	unlabelledNumbers = identity.ClusterSize / 2
)

// createdNumber describes a number that this node created.
type createdNumber struct {
	revision  int64
	namespace string
}

// bound returns the count of numbers that a tenant may have, given the count of free numbers.
func bound(free int) int { return firstNumbers + max(0, free)/freePart }

// waiting is a label set that got no number because the share of its tenant is used up.
type waiting struct {
	tenant shares.Tenant
	since  time.Time // time of the last attempt
}

const (
	// maxWaiting is the maximum number of waiting label sets that are kept, and waitingFor is how long each is kept
	// after its last attempt.
	maxWaiting, waitingFor = 4096, time.Minute
)

// tenantNumbers limits how many numbers of the cluster a tenant gets. It uses the larger one of two counts. The first
// one counts the label sets in the mirror; it misses numbers in quarantine. The second one is the collector's published
// count plus the numbers that this node has created since; it misses new numbers of other nodes. created contains no
// number that the publication already counts. The caller must hold the lock.
type tenantNumbers struct {
	tenant    func(namespace string) shares.Tenant
	published Numbers            // the collector's last publication
	created   []createdNumber    // numbers of this node that published lacks
	waiting   map[string]waiting // label sets beyond a share, by text; at most maxWaiting
}

func newTenantNumbers(tenant func(namespace string) shares.Tenant) tenantNumbers {
	return tenantNumbers{tenant: tenant, waiting: map[string]waiting{}}
}

// create records a number that this node created, until the collector counts it.
func (t *tenantNumbers) create(revision int64, labels label.Canonical) {
	if t.published.Revision == 0 || len(t.created) >= identity.ClusterSize {
		return // there is no publication of a collector, so only the mirror counts
	}
	t.created = append(t.created, createdNumber{revision, namespaceOf(labels)})
}

// publish records the collector's publication.
func (t *tenantNumbers) publish(n Numbers) {
	t.published = n
	var left []createdNumber
	for _, c := range t.created {
		if c.revision > n.Revision {
			left = append(left, c)
		}
	}
	t.created = left
}

// used returns how many numbers are assigned or in quarantine.
func (t *tenantNumbers) used(m *mirror) int {
	return max(len(m.known), t.published.Used+len(t.created))
}

// admit returns an error if the tenant of a label set may not have another number, and records the set as waiting.
// Otherwise, the set no longer waits. The returned error has no Keys.
func (t *tenantNumbers) admit(m *mirror, labels label.Canonical, now time.Time) *QuotaError {
	ns := namespaceOf(labels)
	tenant := t.tenant(ns)
	if ns == "" || tenant == shares.System {
		return nil
	}
	living, created := tally{of: t.tenant, tenant: tenant}, tally{of: t.tenant, tenant: tenant}
	for ns, n := range m.living {
		living.add(ns, n)
	}
	for _, n := range t.created {
		created.add(n.namespace, 1)
	}
	has := max(living.has, t.published.Tenants[tenant.String()]+created.has)
	unlabelled := max(living.unlabelled, t.published.Unlabelled+created.unlabelled)
	most := bound(identity.ClusterSize - t.used(m))
	var err *QuotaError
	switch {
	case !tenant.HasLabel() && unlabelled >= unlabelledNumbers:
		err = &QuotaError{
			Kind: ErrShare, Of: "all namespaces without a tenant", Used: unlabelled, Limit: unlabelledNumbers,
		}
	case has >= most:
		err = &QuotaError{Kind: ErrShare, Of: tenant.String(), Used: has, Limit: most}
	default:
		delete(t.waiting, labels.Text())
		return nil
	}
	if len(t.waiting) < maxWaiting {
		t.waiting[labels.Text()] = waiting{tenant, now}
	}
	return err
}

// usage returns the numbers that each tenant has and requests. It removes requests that have expired.
func (t *tenantNumbers) usage(m *mirror, now time.Time) shares.Usage {
	has := map[shares.Tenant]int{}
	for ns, n := range m.living {
		has[t.tenant(ns)] += n
	}
	created := map[shares.Tenant]int{}
	for _, n := range t.created {
		created[t.tenant(n.namespace)]++
	}
	asks := map[shares.Tenant]int{}
	for text, w := range t.waiting {
		if now.Sub(w.since) > waitingFor {
			delete(t.waiting, text)
			continue
		}
		asks[w.tenant]++
		if _, ok := has[w.tenant]; !ok {
			has[w.tenant] = 0 // an entry of 0, so that the tenant is listed
		}
	}
	u := shares.Usage{Limit: shares.Limit{Name: "numbers", Size: identity.ClusterSize}, Used: t.used(m)}
	free := identity.ClusterSize - u.Used
	u.Asked = u.Used
	for _, of := range slices.SortedFunc(maps.Keys(has), shares.Tenant.Compare) {
		n := max(has[of], t.published.Tenants[of.String()]+created[of])
		s := shares.Share{Asked: n + asks[of], Admitted: n, Guarantee: firstNumbers, Allotment: max(n, bound(free))}
		if of == shares.System {
			s.Guarantee, s.Allotment = 0, n+max(0, free)
		}
		u.Asked += asks[of]
		u.Tenants = append(u.Tenants, shares.TenantUsage{Tenant: of, Share: s})
	}
	return u
}

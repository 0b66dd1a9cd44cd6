// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import "github.com/sluice-net/sluice/model/shares"

const (
	// A tenant may always use 1/firstQuotaPart of a node's quota and, in addition, 1/freeQuotaPart of the unused
	// quota. A quota below dividedQuota is not divided.
	firstQuotaPart, freeQuotaPart = 16, 2
	dividedQuota                  = 64
)

// places counts the used units of this node's quota of cluster identities: one for each number that the node holds, and
// one for each claim in progress that may add a number. in contains the same counts by namespace, without zero entries.
// The caller must hold the lock.
type places struct {
	quota    int
	tenant   func(namespace string) shares.Tenant
	held     int
	claiming int
	in       map[string]int
}

func newPlaces(quota int, tenant func(namespace string) shares.Tenant) places {
	return places{quota: quota, tenant: tenant, in: map[string]int{}}
}

func (p *places) count(ns string, by int) {
	if p.in[ns] += by; p.in[ns] == 0 {
		delete(p.in, ns)
	}
}

// hold counts a number of a namespace that this node holds.
func (p *places) hold(ns string) {
	p.held++
	p.count(ns, 1)
}

// release removes one number of a namespace from the count.
func (p *places) release(ns string) {
	p.held--
	p.count(ns, -1)
}

// reserve reserves a unit for the claim of a label set of a namespace, until done is called. If moves is set, the
// holder gives up a number of the namespace leaves, which frees a unit. The returned error has no Keys.
func (p *places) reserve(ns string, moves bool, leaves string) *QuotaError {
	used := p.claiming + p.held
	if moves {
		used--
	}
	if used >= p.quota {
		return &QuotaError{Kind: ErrQuota, Used: used, Limit: p.quota}
	}
	if err := p.withinShare(ns, leaves, used); err != nil {
		return err
	}
	p.claiming++
	p.count(ns, 1)
	return nil
}

// done releases the unit that a claim has reserved.
func (p *places) done(ns string) {
	p.claiming--
	p.count(ns, -1)
}

// withinShare returns an error if the tenant of a namespace may have no further number on this node. leaves is the
// namespace of a number that the same holder frees, and used is the number of units in use without that one.
func (p *places) withinShare(ns, leaves string, used int) *QuotaError {
	t := p.tenant(ns)
	if ns == "" || t == shares.System || p.quota < dividedQuota {
		return nil
	}
	c := tally{of: p.tenant, tenant: t}
	for in, n := range p.in {
		if in == leaves {
			n--
		}
		c.add(in, n)
	}
	most := p.quota/firstQuotaPart + max(0, p.quota-used)/freeQuotaPart
	switch {
	case !t.HasLabel() && c.unlabelled >= p.quota/2:
		return &QuotaError{
			Kind: ErrQuota, Of: "all namespaces without a tenant", Used: c.unlabelled, Limit: p.quota / 2,
		}
	case c.has >= most:
		return &QuotaError{Kind: ErrQuota, Of: t.String(), Used: c.has, Limit: most}
	}
	return nil
}

// tally adds up the numbers of namespaces: in has for one tenant, in unlabelled for all namespaces without the tenant
// label. Label sets without a namespace are not counted.
type tally struct {
	of              func(namespace string) shares.Tenant
	tenant          shares.Tenant
	has, unlabelled int
}

func (c *tally) add(ns string, n int) {
	if ns == "" {
		return
	}
	of := c.of(ns)
	if of == c.tenant {
		c.has += n
	}
	if !of.HasLabel() && of != shares.System {
		c.unlabelled += n
	}
}

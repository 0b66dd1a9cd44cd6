// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package names

import (
	"maps"
	"net/netip"
	"time"
)

// Asker is the pod whose query was answered, and pays for what the answer teaches. The zero Asker pays for addresses
// that a call reports without naming a pod.
type Asker struct {
	Endpoint uint32 // number of the endpoint on this node
	Tenant   string // tenant of its namespace
}

// unpaid is the endpoint that pays for addresses of an earlier run of the process. Their askers pay for them again with
// the next answer.
const unpaid = ^uint32(0)

// account is what the table charges to one endpoint.
type account struct {
	tenant string
	used   [2]int // by bound
}

// The bounds.
const (
	ofNames = iota
	ofAddresses
)

// shares divides the bounds in the same way as sluice-dns, so that what sluice-dns learns fits here: each tenant that
// pays for a name has the same part of one half of a bound, and its pods have the same part of that. This part is a
// pod's guarantee. The other half is given out in the order of the answers; once it is used up, only pods above their
// guarantee are refused.
type shares struct {
	max      [2]int
	total    [2]int
	accounts map[uint32]*account
	tenants  map[string]int // number of accounts of each tenant
}

func newShares(names, addresses int) shares {
	return shares{
		max: [2]int{names, addresses}, accounts: map[uint32]*account{unpaid: {}}, tenants: make(map[string]int),
	}
}

// open opens the account of an asker. It closes the accounts that pay for nothing: only here, because a call that uses
// an account may first free everything that the account pays for.
func (s *shares) open(a Asker) {
	maps.DeleteFunc(s.accounts, func(endpoint uint32, acc *account) bool {
		if endpoint == unpaid || endpoint == a.Endpoint || acc.used != [2]int{} {
			return false
		}
		s.leave(acc.tenant)
		return true
	})
	acc := s.accounts[a.Endpoint]
	switch {
	case acc == nil:
		acc = &account{}
		s.accounts[a.Endpoint] = acc
	case acc.tenant == a.Tenant:
		return
	default: // the number belongs to another pod now, or the namespace to another tenant
		s.leave(acc.tenant)
	}
	acc.tenant = a.Tenant
	s.tenants[a.Tenant]++
}

func (s *shares) leave(tenant string) {
	if s.tenants[tenant]--; s.tenants[tenant] == 0 {
		delete(s.tenants, tenant)
	}
}

func (s *shares) charge(endpoint uint32, bound, n int) {
	s.accounts[endpoint].used[bound] += n
	s.total[bound] += n
}

// guarantee returns the guarantee of an endpoint. That of unpaid is 0.
func (s *shares) guarantee(endpoint uint32, bound int) int {
	if endpoint == unpaid {
		return 0
	}
	return s.max[bound] / (2 * len(s.tenants) * s.tenants[s.accounts[endpoint].tenant])
}

// above returns how far an endpoint is above its guarantee with n more places.
func (s *shares) above(endpoint uint32, bound, n int) int {
	return max(0, s.accounts[endpoint].used[bound]+n-s.guarantee(endpoint, bound))
}

// admits reports whether an endpoint may take n more places. If it is within its guarantee, other endpoints may have to
// give up places before.
func (s *shares) admits(endpoint uint32, bound, n int) bool {
	more := s.above(endpoint, bound, n)
	if more == 0 {
		return true
	}
	taken := more - s.above(endpoint, bound, 0)
	for e := range s.accounts {
		taken += s.above(e, bound, 0)
	}
	return taken <= s.max[bound]-s.max[bound]/2
}

// furthest returns the endpoint that is furthest above its guarantee, and how far.
func (s *shares) furthest(bound int) (endpoint uint32, above int) {
	for e := range s.accounts {
		if n := s.above(e, bound, 0); n > above || n == above && n > 0 && e < endpoint {
			endpoint, above = e, n
		}
	}
	return endpoint, above
}

// payers says who pays for a name and its addresses.
type payers struct {
	name uint32
	// others contains the addresses for which another endpoint pays than for the name. There are few, because a pod
	// pays for all addresses of a name that no other pod asks for.
	others map[netip.Addr]uint32
}

func (p *payers) of(a netip.Addr) uint32 {
	if e, ok := p.others[a]; ok {
		return e
	}
	return p.name
}

func (p *payers) set(a netip.Addr, endpoint uint32) {
	if endpoint == p.name {
		delete(p.others, a)
		return
	}
	if p.others == nil {
		p.others = make(map[netip.Addr]uint32)
	}
	p.others[a] = endpoint
}

// rename makes an endpoint pay for the name. The payers of its addresses stay.
func (p *payers) rename(endpoint uint32, addrs map[netip.Addr]time.Time) {
	before := p.name
	for a := range addrs {
		if e := p.of(a); e == before {
			if p.others == nil {
				p.others = make(map[netip.Addr]uint32)
			}
			p.others[a] = before
		}
	}
	p.name = endpoint
	for a, e := range p.others {
		if e == endpoint {
			delete(p.others, a)
		}
	}
}

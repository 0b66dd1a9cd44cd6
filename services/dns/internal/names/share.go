// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package names

// Asker is the pod whose query was answered, and pays for what the answer teaches.
type Asker struct {
	Endpoint uint32 // number of the endpoint on this node; not 0
	Tenant   string // of its namespace, as package shares writes it
}

// unpaid is the endpoint that pays for what pods taught that do not exist any more, and for what root taught.
const unpaid = 0

// account is what the table charges to one endpoint.
type account struct {
	tenant string
	used   [2]int // by bound
	held   bool   // a call of Learn uses it, so it stays although it may pay for nothing meanwhile
}

// The bounds.
const (
	ofNames = iota
	ofAddresses
)

// shares divides the bounds: each tenant with a name has the same part of one half of a bound, and its pods have the
// same part of that. This part is a pod's guarantee. The other half is given out in the order of the answers; once it
// is used up, only pods above their guarantee are refused.
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

// open returns the account of an asker, which counts as active from then on.
func (s *shares) open(a Asker) *account {
	acc := s.accounts[a.Endpoint]
	if acc != nil && (a.Endpoint == unpaid || acc.tenant == a.Tenant) {
		return acc
	}
	if acc == nil {
		acc = &account{}
		s.accounts[a.Endpoint] = acc
	} else {
		s.leave(acc.tenant) // the namespace has another tenant now
	}
	acc.tenant = a.Tenant
	s.tenants[a.Tenant]++
	return acc
}

func (s *shares) leave(tenant string) {
	if s.tenants[tenant]--; s.tenants[tenant] == 0 {
		delete(s.tenants, tenant)
	}
}

// close removes the account of an endpoint if it pays for nothing and no call uses it.
func (s *shares) close(endpoint uint32) {
	if acc := s.accounts[endpoint]; acc != nil && endpoint != unpaid && acc.used == [2]int{} && !acc.held {
		delete(s.accounts, endpoint)
		s.leave(acc.tenant)
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

// within reports whether an endpoint is below its guarantee.
func (s *shares) within(endpoint uint32, bound int) bool {
	return s.accounts[endpoint].used[bound] < s.guarantee(endpoint, bound)
}

// admits reports whether an endpoint may take one more place. If all places are taken, another endpoint must give up
// one before.
func (s *shares) admits(endpoint uint32, bound int) bool {
	shared := s.max[bound] - s.max[bound]/2
	if s.total[bound] < shared || s.within(endpoint, bound) {
		return true
	}
	if s.total[bound] >= s.max[bound] {
		return false
	}
	taken := 0
	for e, acc := range s.accounts {
		taken += max(0, acc.used[bound]-s.guarantee(e, bound))
	}
	return taken < shared
}

// furthest returns the endpoint that is furthest above its guarantee, and how far.
func (s *shares) furthest(bound int) (endpoint uint32, above int) {
	for e, acc := range s.accounts {
		if n := acc.used[bound] - s.guarantee(e, bound); n > above || n == above && n > 0 && e < endpoint {
			endpoint, above = e, n
		}
	}
	return endpoint, above
}

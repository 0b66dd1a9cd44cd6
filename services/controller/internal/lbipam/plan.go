// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package lbipam assigns addresses of pools to Services of type LoadBalancer, with the objects and rules of Cilium's
// LB-IPAM.
//
// The status of a Service is the record of its addresses. A newly elected process begins with this record. An address
// with its Service until the Service requests another one, no longer requests any, or is no longer selected by the
// pool. An address that no pool contains any more stays, too.
package lbipam

import (
	"cmp"
	"fmt"
	"math/big"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// ConditionSatisfied is the type of the condition of a Service that requests addresses.
const ConditionSatisfied = "cilium.io/IPAMRequestSatisfied"

// Reasons of ConditionSatisfied. They are part of the interface.
const (
	ReasonSatisfied        = "satisfied"
	ReasonNoPool           = "no_pool"
	ReasonOutOfAddresses   = "out_of_ips"
	ReasonAlreadyAllocated = "already_allocated"
	ReasonSelectorMismatch = "pool_selector_mismatch"
	ReasonPoolDisabled     = "pool_disabled"
	ReasonInvalid          = "invalid_request"
	ReasonInUse            = "address_in_use" // by a node, a pod or a cluster address
)

// MaxRequested is the number of addresses that one Service may request. More would let the author of one object take
// a whole pool.
const MaxRequested = 16

// Classes are the values of loadBalancerClass of Services that get addresses.
var Classes = []string{"io.cilium/l2-announcer", "io.cilium/bgp-control-plane", "sluice.io/announce"}

// Key names a Service.
type Key struct{ Namespace, Name string }

// Compare orders keys by namespace and name.
func (k Key) Compare(l Key) int {
	return cmp.Or(strings.Compare(k.Namespace, l.Namespace), strings.Compare(k.Name, l.Name))
}

// Families is how many families a Service needs.
type Families uint8

// The values of ipFamilyPolicy.
const (
	Single  Families = iota
	Prefer           // the second family if a pool has it
	Require          // both, or none
)

// Port is a port of a Service.
type Port struct {
	Protocol string
	Number   int32
}

// Service is the part of a Service that addresses depend on.
type Service struct {
	Key
	UID, ResourceVersion string
	Generation           int64
	Created              time.Time
	Labels               map[string]string
	Balanced             bool // type LoadBalancer
	Class                *string
	Deleting             bool
	Bits                 []int // length of the addresses of each family, in order: 32, 128
	Families             Families
	Requested            []string // addresses as written; empty: any
	SharingKey           string
	SharedWith           []string // namespaces whose Services may share the address; "*" means all
	Ports                []Port
	Local                bool   // externalTrafficPolicy: Local
	Backends             string // canonical form of the selector
	ClusterIPs           []netip.Addr
	Ingress              []netip.Addr // addresses in the status
	Hostname             bool         // the status has a host name
	Conditions           []Condition
}

// granted reports whether this or an earlier process has answered a request of the Service.
func (s *Service) granted() bool { return condition(s.Conditions, ConditionSatisfied) != nil }

// ours reports whether the Service gets its addresses here.
func (s *Service) ours(defaultClass bool) bool {
	if !s.Balanced {
		return false
	}
	if s.Class == nil {
		return defaultClass
	}
	return slices.Contains(Classes, *s.Class)
}

// Condition is a condition of a status.
type Condition struct {
	Type               string    `json:"type"`
	Status             string    `json:"status"` // True, False or Unknown
	ObservedGeneration int64     `json:"observedGeneration,omitempty"`
	LastTransitionTime time.Time `json:"lastTransitionTime"`
	Reason             string    `json:"reason"`
	Message            string    `json:"message"`
}

func condition(all []Condition, kind string) *Condition {
	for i := range all {
		if all[i].Type == kind {
			return &all[i]
		}
	}
	return nil
}

// State has the pools and Services of a cluster.
type State struct {
	Pools        []*Pool
	Services     []*Service
	DefaultClass bool // Services without a class get addresses
	// Held are the addresses that were assigned since the process was elected. They are preferred to the status of a
	// Service, which may be older.
	Held map[Key][]netip.Addr
	// Owner returns the owner of an address in the cluster, such as "node n1", and the last address of the range that
	// belongs to this owner. An empty name means none.
	Owner func(netip.Addr) (owner string, last netip.Addr)
}

// Grant is the answer to a Service.
type Grant struct {
	// Leave means that the status of the Service is not changed, because its addresses may not be from a pool.
	Leave bool
	// Release means that the Service no longer requests addresses: its addresses and its condition are removed.
	Release   bool
	Addresses []netip.Addr
	Satisfied bool
	Reason    string
	Message   string
}

// Usage is the state of a pool.
type Usage struct {
	Conflict         string   // why it gives no new addresses; empty: no pool overlaps it
	Total, Available *big.Int // number of addresses
	Used             int      // addresses of Services
}

// Plan assigns addresses. It does not change the state.
func Plan(s State) (grants map[Key]Grant, usage map[string]Usage) {
	p := &plan{
		State: s, holders: make(map[netip.Addr][]*Service), grants: make(map[Key]Grant, len(s.Services)),
		next: make(map[Range]netip.Addr), shared: make(map[string][]netip.Addr),
	}
	p.Pools = slices.SortedFunc(slices.Values(s.Pools), byAge)
	p.conflict = conflicts(p.Pools)
	services := slices.SortedFunc(slices.Values(s.Services), func(a, b *Service) int {
		return cmp.Or(a.Created.Compare(b.Created), a.Compare(b.Key))
	})
	var asking []*Service
	for _, x := range services {
		switch {
		case x.Deleting:
			p.occupy(x, x.Ingress...) // until the object is gone
			p.grants[x.Key] = Grant{Leave: true}
		case !x.ours(s.DefaultClass) && x.granted():
			p.grants[x.Key] = Grant{Release: true}
		case !x.ours(s.DefaultClass) || p.foreign(x):
			p.occupy(x, x.Ingress...)
			p.grants[x.Key] = Grant{Leave: true}
		default:
			asking = append(asking, x)
		}
	}
	for _, x := range asking {
		p.keep(x)
	}
	for _, x := range asking {
		if len(x.Requested) > 0 {
			p.request(x)
		}
	}
	for _, x := range asking {
		if len(x.Requested) == 0 {
			p.any(x)
		}
	}
	usage = make(map[string]Usage, len(p.Pools))
	for _, pool := range p.Pools {
		usage[pool.Name] = p.usage(pool)
	}
	return p.grants, usage
}

// plan is the state of one Plan.
type plan struct {
	State
	conflict map[string]string
	holders  map[netip.Addr][]*Service
	grants   map[Key]Grant
	next     map[Range]netip.Addr    // all addresses of the range before this one are occupied
	shared   map[string][]netip.Addr // by sharing key
}

// foreign reports whether the addresses of a Service come from another controller, or none is to be assigned because
// there is no pool for it.
func (p *plan) foreign(s *Service) bool {
	if s.granted() || len(p.Held[s.Key]) > 0 {
		return false
	}
	if len(s.Ingress) > 0 || s.Hostname {
		return !slices.ContainsFunc(s.Ingress, func(a netip.Addr) bool { return p.pool(a) != nil })
	}
	return len(p.Pools) == 0
}

func (p *plan) occupy(s *Service, addresses ...netip.Addr) {
	for _, a := range addresses {
		if s.SharingKey != "" && !slices.Contains(p.holders[a], s) && len(p.shared[s.SharingKey]) < maxShared {
			p.shared[s.SharingKey] = append(p.shared[s.SharingKey], a)
		}
		p.holders[a] = append(p.holders[a], s)
	}
}

// maxShared limits the addresses of one sharing key that are examined for a Service, because everybody may use a key.
const maxShared = 256

func (p *plan) owner(a netip.Addr) string {
	owner, _ := p.Owner(a)
	return owner
}

// pool returns the oldest pool that contains an address.
func (p *plan) pool(a netip.Addr) *Pool {
	for _, pool := range p.Pools {
		if pool.contains(a) {
			return pool
		}
	}
	return nil
}

// closed returns the reason why a pool gives no new addresses; empty: it gives some.
func (p *plan) closed(pool *Pool) string {
	switch {
	case pool.Disabled:
		return "pool " + pool.Name + " is disabled"
	case len(pool.Faults) > 0:
		return "pool " + pool.Name + " has errors: " + pool.Faults[0]
	case p.conflict[pool.Name] != "":
		return "pool " + pool.Name + " has a conflict: " + p.conflict[pool.Name]
	}
	return ""
}

// keep assigns the present addresses of a Service again, if they are still allowed.
func (p *plan) keep(s *Service) {
	has := p.Held[s.Key]
	if len(has) == 0 {
		has = s.Ingress
	}
	requested := make(map[netip.Addr]bool)
	for _, text := range s.Requested {
		if a, err := netip.ParseAddr(text); err == nil {
			requested[a.Unmap()] = true
		}
	}
	var kept []netip.Addr
	for _, a := range has {
		pool := p.pool(a)
		switch {
		case !slices.Contains(s.Bits, a.BitLen()),
			len(requested) > 0 && !requested[a],
			len(requested) == 0 && slices.ContainsFunc(kept, func(b netip.Addr) bool { return b.BitLen() == a.BitLen() }),
			pool == nil && !s.granted() && len(p.Held[s.Key]) == 0,
			pool != nil && !pool.selects(s),
			p.taken(s, a) != "":
			continue
		}
		kept = append(kept, a)
		p.occupy(s, a)
	}
	p.grants[s.Key] = Grant{Addresses: kept}
}

// taken returns why a Service cannot have an address together with the Services that have it; empty: it can.
func (p *plan) taken(s *Service, a netip.Addr) string {
	for _, other := range p.holders[a] {
		if other == s {
			continue
		}
		if why := separate(s, other); why != "" {
			return fmt.Sprintf("%s is the address of %s, %s", a, other.seenBy(s), why)
		}
	}
	return ""
}

// seenBy names a Service to the author of another one.
func (s *Service) seenBy(other *Service) string {
	if s.Namespace != other.Namespace {
		return "a Service of another namespace"
	}
	return "Service " + s.Name
}

// separate returns why two Services cannot share an address; empty: they can.
func separate(a, b *Service) string {
	switch {
	case a.SharingKey == "" || a.SharingKey != b.SharingKey:
		return "and the two have no common sharing key"
	case a.Namespace != b.Namespace && (!a.sharesWith(b.Namespace) || !b.sharesWith(a.Namespace)):
		return "and the two do not name each other's namespace in lbipam.cilium.io/sharing-cross-namespace"
	case a.Local != b.Local:
		return "and the two have different externalTrafficPolicy"
	case a.Local && a.Backends != b.Backends:
		return "and both have externalTrafficPolicy Local, but select different pods"
	}
	for _, port := range a.Ports {
		if slices.Contains(b.Ports, port) {
			return fmt.Sprintf("and both have port %d/%s", port.Number, port.Protocol)
		}
	}
	return ""
}

func (s *Service) sharesWith(namespace string) bool {
	return slices.Contains(s.SharedWith, "*") || slices.Contains(s.SharedWith, namespace)
}

// request assigns the addresses that a Service requests.
func (p *plan) request(s *Service) {
	g := p.grants[s.Key]
	fail := func(reason, format string, args ...any) {
		if g.Reason == "" {
			g.Reason, g.Message = reason, fmt.Sprintf(format, args...)
		}
	}
	if len(s.Requested) > MaxRequested {
		fail(ReasonInvalid, "requests %d addresses; at most %d are possible", len(s.Requested), MaxRequested)
		p.grants[s.Key] = g
		return
	}
	for _, text := range s.Requested {
		a, err := netip.ParseAddr(text)
		a = a.Unmap()
		switch {
		case err != nil || a.Zone() != "":
			fail(ReasonInvalid, "%q is not an address", text)
			continue
		case slices.Contains(g.Addresses, a):
			continue
		case !slices.Contains(s.Bits, a.BitLen()):
			fail(ReasonInvalid, "the family of %s is not in spec.ipFamilies", a)
			continue
		}
		pool := p.pool(a)
		switch {
		case pool == nil:
			fail(ReasonNoPool, "no pool contains %s", a)
		case !pool.selects(s):
			fail(ReasonSelectorMismatch, "%s belongs to pool %s, which does not select the Service", a, pool.Name)
		case p.closed(pool) != "":
			fail(ReasonPoolDisabled, "%s: %s", a, p.closed(pool))
		case p.owner(a) != "":
			fail(ReasonInUse, "%s is the address of %s", a, p.owner(a))
		case p.taken(s, a) != "":
			fail(ReasonAlreadyAllocated, "%s", p.taken(s, a))
		default:
			g.Addresses = append(g.Addresses, a)
			p.occupy(s, a)
		}
	}
	p.finish(s, g)
}

// any assigns an address of each family that a Service has.
func (p *plan) any(s *Service) {
	g := p.grants[s.Key]
	var found []netip.Addr
	for i, bits := range s.Bits {
		if slices.ContainsFunc(g.Addresses, func(a netip.Addr) bool { return a.BitLen() == bits }) {
			continue
		}
		a, reason, message := p.find(s, bits)
		switch {
		case reason == "":
			found = append(found, a)
		case s.Families == Require || i == 0:
			g.Reason, g.Message = reason, message
		}
	}
	if s.Families == Prefer && len(g.Addresses)+len(found) > 0 {
		g.Reason, g.Message = "", ""
	}
	if s.Families != Require || g.Reason == "" {
		g.Addresses = append(g.Addresses, found...)
		p.occupy(s, found...)
	}
	p.finish(s, g)
}

// finish stores a grant.
func (p *plan) finish(s *Service, g Grant) {
	slices.SortStableFunc(g.Addresses, func(a, b netip.Addr) int {
		return cmp.Compare(slices.Index(s.Bits, a.BitLen()), slices.Index(s.Bits, b.BitLen()))
	})
	if g.Satisfied = g.Reason == ""; g.Satisfied {
		g.Reason = ReasonSatisfied
		for _, a := range g.Addresses {
			if p.pool(a) == nil {
				g.Message = fmt.Sprintf("no pool contains %s any more; the Service keeps it", a)
			}
		}
	}
	p.grants[s.Key] = g
}

// find returns an address for a Service: one that it can share, or the first free one of the oldest pool.
func (p *plan) find(s *Service, bits int) (a netip.Addr, reason, message string) {
	if s.SharingKey != "" {
		for _, addr := range p.shared[s.SharingKey] {
			pool := p.pool(addr)
			if addr.BitLen() == bits && (!a.IsValid() || addr.Less(a)) && pool != nil && pool.selects(s) &&
				p.closed(pool) == "" && p.taken(s, addr) == "" {
				a = addr
			}
		}
		if a.IsValid() {
			return a, "", ""
		}
	}
	reason, message = ReasonNoPool, fmt.Sprintf("no pool with %s addresses selects the Service", family(bits))
	for _, pool := range p.Pools {
		if !pool.has(bits) || !pool.selects(s) {
			continue
		}
		if why := p.closed(pool); why != "" {
			if reason == ReasonNoPool {
				reason, message = ReasonPoolDisabled, why
			}
			continue
		}
		for _, r := range pool.Ranges {
			if r.First.BitLen() != bits {
				continue
			}
			if a, ok := p.free(r); ok {
				return a, "", ""
			}
		}
		reason, message = ReasonOutOfAddresses, fmt.Sprintf("no %s address of pool %s is free", family(bits), pool.Name)
	}
	return netip.Addr{}, reason, message
}

func family(bits int) string {
	if bits == 32 {
		return "IPv4"
	}
	return "IPv6"
}

// free returns the first free address of a range.
func (p *plan) free(r Range) (netip.Addr, bool) {
	a, ok := p.next[r]
	if !ok {
		a = r.First
	}
	for ; r.contains(a); a = a.Next() {
		if len(p.holders[a]) > 0 {
			continue
		}
		owner, last := p.Owner(a)
		if owner == "" {
			p.next[r] = a
			return a, true
		}
		a = last // a range of pods may have 2^64 addresses
	}
	p.next[r] = a // possibly beyond the range, or invalid after the last address of the family
	return netip.Addr{}, false
}

// usage counts the addresses of a pool.
func (p *plan) usage(pool *Pool) Usage {
	u := Usage{Conflict: p.conflict[pool.Name], Total: new(big.Int)}
	for _, r := range pool.Ranges {
		u.Total.Add(u.Total, r.size())
	}
	for a := range p.holders {
		if pool.contains(a) {
			u.Used++
		}
	}
	u.Available = new(big.Int).Sub(u.Total, big.NewInt(int64(u.Used)))
	return u
}

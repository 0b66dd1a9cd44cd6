// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package names

import (
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/identity"
)

// Asker is the pod whose query was answered, and pays for what the answer teaches. The zero Asker pays for addresses
// that a call reports without naming a pod.
type Asker struct {
	Endpoint uint32 // number of the endpoint on this node
	Tenant   string // tenant of its namespace
	// Namespace is the only namespace whose pods may use what the answer teaches; nil: all pods may.
	Namespace *string
	// Identity is its identity; 0: the call does not name one.
	Identity identity.Numeric
}

// Key returns the key of a name that the asker has asked for.
func (a Asker) Key(name string) dnsname.Learned {
	if a.Namespace == nil {
		return dnsname.ForAll(name)
	}
	return dnsname.ForNamespace(name, *a.Namespace)
}

// unpaid is the endpoint that pays for addresses of an earlier run of the process. Their askers pay for them again with
// the next answer.
const unpaid = ^uint32(0)

// The limits that pods share, as package podshares numbers them. sluice-dns divides its limits in the same way, so that
// what sluice-dns learns fits here.
const (
	ofNames = iota
	ofAddresses
)

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

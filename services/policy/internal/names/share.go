// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package names

import (
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/identity"
)

// Asker is the pod whose DNS query was answered. It pays for the learned addresses. The zero Asker pays for addresses
// that a call of LearnNames reports without a pod.
type Asker struct {
	Endpoint uint32 // number of the endpoint on this node
	Tenant   string // tenant of its namespace
	// Namespace is the only namespace whose pods may use the learned addresses; nil: all pods may.
	Namespace *string
	// Identity is the identity of the pod; 0: unknown.
	Identity identity.Numeric
}

// Key returns the key of a name that the asker has asked for.
func (a Asker) Key(name string) dnsname.Learned {
	if a.Namespace == nil {
		return dnsname.ForAll(name)
	}
	return dnsname.ForNamespace(name, *a.Namespace)
}

// unpaid is the payer of addresses that were learned in an earlier run of the process. The next answer with such an
// address charges the pod that asked.
const unpaid = ^uint32(0)

// The limits that pods share, as package podshares numbers them. sluice-dns divides its limits in the same way, so
// that the addresses that it learns fit into this table.
const (
	ofNames = iota
	ofAddresses
)

// payers records who pays for a name and for its addresses.
type payers struct {
	name uint32
	// others contains the addresses whose payer is not the payer of the name. There are few: the payer of the name
	// also pays for all addresses that no other pod asked for.
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

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam

import (
	"net/netip"

	"github.com/sluice-net/sluice/model/workload"
)

// reservedPart: one in this many of the addresses that no owner holds is reserved for namespaces with few addresses in
// quarantine.
const reservedPart = 8

// quarantines counts the addresses in quarantine by the namespace of their last owner, so that one namespace with
// short-lived pods cannot use up the addresses of others. It is only in memory: after a restart, addresses in
// quarantine count for no namespace.
type quarantines struct {
	owners map[workload.Owner]string // namespaces of the owners with addresses
	addrs  map[netip.Addr]string     // the last namespaces of addresses in quarantine
	counts map[Family]map[string]uint64
}

func newQuarantines() *quarantines {
	return &quarantines{
		owners: make(map[workload.Owner]string), addrs: make(map[netip.Addr]string),
		counts: map[Family]map[string]uint64{IPv4: make(map[string]uint64), IPv6: make(map[string]uint64)},
	}
}

// holds notes the namespace of an owner.
func (q *quarantines) holds(o workload.Owner, namespace string) {
	if namespace != "" {
		q.owners[o] = namespace
	}
}

// begin notes that an address of a namespace is in quarantine.
func (q *quarantines) begin(a netip.Addr, namespace string) {
	if namespace != "" {
		q.addrs[a] = namespace
		q.counts[FamilyOf(a)][namespace]++
	}
}

// end notes that the quarantine of an address has ended.
func (q *quarantines) end(a netip.Addr) {
	namespace, ok := q.addrs[a]
	if !ok {
		return
	}
	delete(q.addrs, a)
	count := q.counts[FamilyOf(a)]
	if count[namespace]--; count[namespace] == 0 {
		delete(count, namespace)
	}
}

// refuses reports whether the free addresses are reserved for other namespaces than this one. own is the number of
// addresses in quarantine that count for this namespace, in the number of all addresses in quarantine. A namespace
// takes at most half of the reserved part that it finds.
func refuses(own, free, in uint64) bool {
	return own > 0 && free < (free+in)/reservedPart && own >= free
}

// resume takes over the counts of the former ledger. If a release was not stored, its owner holds the address again.
func (q *quarantines) resume(former *quarantines, l *ledger) {
	for o, namespace := range former.owners {
		if l.held[o] != nil {
			q.owners[o] = namespace
		}
	}
	for a, namespace := range former.addrs {
		switch u := l.addrs[a]; {
		case u.rest != nil:
			q.begin(a, namespace)
		case l.held[u.owner] != nil:
			q.owners[u.owner] = namespace
		}
	}
}

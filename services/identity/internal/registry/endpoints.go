// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"iter"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/identity"
)

// endpoint is a node's record of one of its endpoints. A node stores one for each pod of the cluster, so it does not
// retain the text that it was parsed from.
type endpoint struct {
	addresses   []netip.Addr // sorted
	incarnation string       // the endpoints of a node share the string
	identity    identity.Numeric
	revision    int64 // revision of the last write
}

// endpoints are the endpoints of one node.
type endpoints struct {
	byName map[string]*endpoint
	at     map[netip.Addr]*endpoint   // one of the endpoints that have the address
	also   map[netip.Addr][]*endpoint // further endpoints with the address, nearly always none
	total  int                        // addresses of all
}

func newEndpoints() endpoints {
	return endpoints{byName: map[string]*endpoint{}, at: map[netip.Addr]*endpoint{}, also: map[netip.Addr][]*endpoint{}}
}

// put adds or replaces an endpoint. If the endpoint has the node's incarnation, they share the string.
func (all *endpoints) put(k AddressesKey, incarnation string) *endpoint {
	all.remove(k.Endpoint)
	if k.Value.Incarnation != incarnation {
		incarnation = strings.Clone(k.Value.Incarnation)
	}
	e := &endpoint{
		addresses: slices.Clip(slices.Clone(k.Value.Addresses)), incarnation: incarnation,
		identity: k.Value.Identity, revision: k.Revision,
	}
	slices.SortFunc(e.addresses, netip.Addr.Compare)
	e.addresses = slices.Compact(e.addresses)
	all.byName[strings.Clone(k.Endpoint)] = e
	all.total += len(e.addresses)
	for _, a := range e.addresses {
		if all.at[a] == nil {
			all.at[a] = e
		} else {
			all.also[a] = append(all.also[a], e)
		}
	}
	return e
}

// remove removes an endpoint, and returns its addresses.
func (all *endpoints) remove(name string) []netip.Addr {
	e := all.byName[name]
	if e == nil {
		return nil
	}
	delete(all.byName, name)
	all.total -= len(e.addresses)
	for _, a := range e.addresses {
		others := slices.DeleteFunc(all.also[a], func(o *endpoint) bool { return o == e })
		if all.at[a] == e {
			delete(all.at, a)
			if last := len(others) - 1; last >= 0 {
				all.at[a], others = others[last], others[:last]
			}
		}
		if len(others) > 0 {
			all.also[a] = others
		} else {
			delete(all.also, a)
		}
	}
	return e.addresses
}

// having returns the endpoints that have an address.
func (all *endpoints) having(a netip.Addr) iter.Seq[*endpoint] {
	return func(yield func(*endpoint) bool) {
		if e := all.at[a]; e == nil || !yield(e) {
			return
		}
		for _, e := range all.also[a] {
			if !yield(e) {
				return
			}
		}
	}
}

// last returns the endpoint of an incarnation that was written last with an address; nil without such an endpoint.
func (all *endpoints) last(a netip.Addr, incarnation string) (last *endpoint) {
	for e := range all.having(a) {
		if e.incarnation == incarnation && (last == nil || e.revision > last.revision) {
			last = e
		}
	}
	return last
}

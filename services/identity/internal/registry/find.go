// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
)

// Mapping is the identity of an address: written by a node, or derived from the records of nodes.
type Mapping struct {
	Address  netip.Addr
	Node     string // node that wrote the mapping; "" for an API server outside of all nodes
	Identity identity.Numeric
	Reason   string // why the mapping is not valid; "" if it is
}

// Found describes a known address.
type Found struct {
	Mapping   Mapping // the valid mapping; zero if there is none
	Range     netip.Prefix
	RangeNode string
	Refused   []Mapping
}

// Find returns the owner of an address. It returns ErrNoMapping if the address belongs to no node, and ErrUnlisted as
// long as the registry cannot know that.
func (r *Registry) Find(a netip.Addr) (Found, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f, err := r.view.find(a)
	if err != nil || f.Mapping.Identity == 0 {
		if held, ok := r.inEffect(a, f); ok {
			return held, nil
		}
	}
	return f, err
}

// inEffect adds the mapping or the range of an address that the store lacks but that is still in effect. Otherwise it
// returns false.
func (r *Registry) inEffect(a netip.Addr, f Found) (Found, bool) {
	if _, held := r.view.held[mappingKey(a)]; held {
		if item, ok := r.pub.Get(mappingKey(a)); ok {
			f.Mapping = Mapping{Address: a, Node: item.On, Identity: item.Identity}
		}
	}
	for k := range r.view.held {
		if k.Node == "" || f.RangeNode != "" {
			continue
		}
		item, ok := r.pub.Get(k)
		if !ok || item.Node == nil {
			continue
		}
		for _, p := range item.Node.Record.Ranges {
			if p.Contains(a) {
				f.Range, f.RangeNode = p, k.Node
			}
		}
	}
	return f, f.Mapping.Identity != 0 || f.RangeNode != ""
}

func (v *view) find(a netip.Addr) (f Found, err error) {
	f.Range, f.RangeNode = v.rangeOf(a)
	claimant := v.claimant(a)
	if item, ok := v.want(mappingKey(a)); ok {
		f.Mapping = Mapping{Address: a, Node: item.On, Identity: item.Identity}
	} else if claimant == v.own && claimant != "" {
		f.Mapping = Mapping{Address: a, Node: v.own, Identity: identity.Host}
	}
	for _, name := range slices.Sorted(maps.Keys(v.nodes)) {
		n := v.nodes[name]
		if _, ok := v.claimed[a][name]; ok && claimant != name {
			f.Refused = append(f.Refused, Mapping{
				a, name, v.ofNode(name, false),
				"the address belongs to another node, or to a range of pods",
			})
		}
		for e := range n.endpoints.having(a) {
			m := Mapping{Address: a, Node: name, Identity: e.identity, Reason: v.reason(n, e, a)}
			switch {
			case m.Reason != "":
				f.Refused = append(f.Refused, m)
			case name == v.own:
				f.Mapping = m
			}
		}
	}
	if f.Mapping.Identity == 0 && f.RangeNode == "" && len(f.Refused) == 0 {
		if !v.listed || v.ownAddresses == nil {
			return Found{}, fmt.Errorf("%w: %s", ErrUnlisted, a)
		}
		return Found{}, fmt.Errorf("%w: %s", ErrNoMapping, a)
	}
	return f, nil
}

// EachMapping passes the valid mappings of endpoints to take until take returns an error: of one node or, if node is
// empty, of all nodes, sorted by node and address, as of one point in time. Mappings that the store lacks and that are
// still in effect are valid.
func (r *Registry) EachMapping(node string, take func([]Mapping) error) error {
	r.mu.Lock()
	held := r.heldMappings()
	names := []string{node}
	if node == "" {
		names = r.view.names()
	}
	r.mu.Unlock()
	for _, name := range names {
		r.mu.Lock()
		all := r.view.mappings(name)
		for _, m := range held[name] {
			if _, still := r.view.held[mappingKey(m.Address)]; still {
				all = append(all, m)
			}
		}
		r.mu.Unlock()
		slices.SortFunc(all, func(x, y Mapping) int { return x.Address.Compare(y.Address) })
		if len(all) == 0 {
			continue
		}
		if err := take(all); err != nil {
			return err
		}
	}
	return nil
}

// heldMappings returns, by node, the mappings of endpoints that the store lacks and that are still in effect. Called
// with mu held.
func (r *Registry) heldMappings() map[string][]Mapping {
	all := make(map[string][]Mapping)
	for k := range r.view.held {
		if k.Node != "" {
			continue
		}
		if item, ok := r.pub.Get(k); ok && item.Identity.Scope() == identity.ScopeCluster {
			m := Mapping{Address: k.Prefix.Addr(), Node: item.On, Identity: item.Identity}
			all[item.On] = append(all[item.On], m)
		}
	}
	return all
}

// mappings returns the mappings of a node's endpoints that are valid according to the store.
func (v *view) mappings(node string) (all []Mapping) {
	n := v.nodes[node]
	if n == nil {
		return nil
	}
	for _, e := range n.endpoints.byName {
		for _, a := range e.addresses {
			if v.counts(n, e, a) {
				all = append(all, Mapping{Address: a, Node: node, Identity: e.identity})
			}
		}
	}
	return all
}

// reason returns why a node's mapping of an address is invalid; "" if it is valid.
func (v *view) reason(n *nodeView, e *endpoint, a netip.Addr) string {
	_, holder := v.rangeOf(a)
	switch {
	case v.counts(n, e, a):
		return ""
	case !n.registered:
		return "the node is not registered"
	case e.incarnation != n.record.Incarnation:
		return "the mapping was written by an earlier incarnation of the node"
	case holder == "":
		return "the address lies in no range of the node"
	case holder != n.name:
		return "the address lies in a range of node " + holder
	case v.claimant(a) != "":
		return "the address is the node's own"
	}
	return "a later endpoint of the node has the address"
}

// SetAPIServers sets the addresses of the Kubernetes API servers. The identity of an address applies if the address
// belongs to no node. On another node, the address has identity.KubeAPIServer, whose labels include remote-node, or an
// identity with the labels of the node; for this node's addresses see APIServerHere. The registry keeps the map.
func (r *Registry) SetAPIServers(servers map[netip.Addr]identity.Numeric) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.view.setAPIServers(servers)
	r.locate()
	r.relabel()
	r.publish()
}

// APIServerHere reports whether an API server has an address of this node, and returns a channel that is closed when
// that changes.
func (r *Registry) APIServerHere() (here bool, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.here, r.hereChanged
}

// locate is called with mu held.
func (r *Registry) locate() {
	here := false
	for a := range r.view.apiServers {
		_, own := r.view.ownAddresses[a]
		here = here || own
	}
	if here != r.here {
		r.here = here
		close(r.hereChanged)
		r.hereChanged = make(chan struct{})
	}
}

// setAPIServers sets the addresses of the API servers.
func (v *view) setAPIServers(servers map[netip.Addr]identity.Numeric) {
	for _, all := range []map[netip.Addr]identity.Numeric{v.apiServers, servers} {
		for a := range all {
			v.touch(mappingKey(a))
		}
	}
	v.apiServers = servers
}

// setOwn sets the addresses of this node; nil while they are unknown.
func (v *view) setOwn(u *Underlay) {
	if u == nil {
		return
	}
	touch := func() {
		for a := range v.ownAddresses {
			for other := range v.claimed[a] {
				v.touch(Key{Node: other})
			}
		}
	}
	touch()
	v.ownAddresses = map[netip.Addr]struct{}{}
	for _, a := range slices.Concat(u.Addresses, u.Overlay) {
		v.ownAddresses[a] = struct{}{}
	}
	touch()
	for a := range v.apiServers {
		v.touch(mappingKey(a))
	}
}

// apiServer returns the identity of an API server's address outside of all nodes; none until all nodes, including this
// one, are known.
func (v *view) apiServer(a netip.Addr) (identity.Numeric, bool) {
	_, own := v.ownAddresses[a]
	id, ok := v.apiServers[a]
	return id, ok && v.listed && v.ownAddresses != nil && !own
}

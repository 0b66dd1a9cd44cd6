// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// view contains the records and mappings of all nodes, and which of them are valid. For an update, it evaluates only
// the changed keys; only a change of ranges compares the ranges of all nodes.
type view struct {
	own   string
	nodes map[string]*nodeView
	// claimed has the nodes that have an address in their records, by address.
	claimed map[netip.Addr]map[string]struct{}

	apiServers   map[netip.Addr]identity.Numeric // identities of API servers outside of all nodes, by address
	sets         map[NodeSet]Numbered            // numbers for the labels of nodes
	numbers      bool                            // label sets of nodes get numbers
	ownAddresses map[netip.Addr]struct{}         // addresses of this node; nil: unknown

	ranges    map[netip.Prefix]string // valid range → node; ranges of different nodes do not overlap
	around    map[netip.Prefix]int    // prefixes with valid ranges inside → how many
	lengths   map[bool]map[int]int    // IPv6? → lengths of ranges → how many
	contested bool                    // some range is not valid, because it overlaps another node's
	// pins are the ranges that nodes had before the store was rebuilt, until the nodes return them.
	pins   map[netip.Prefix]string
	former map[netip.Prefix]Former // when this node had claimed its pinned ranges
	// prepared means that the ranges are pinned for the next update.
	prepared bool
	wrote    []netip.Prefix // ranges of this node's record as it was written last
	ipam     IPAMKey        // the cluster's last settings; zero: unknown
	// formerSettings are the former settings, newest first.
	formerSettings []IPAMKey
	assigned       assignments
	resting        quarantine
	at             cluster.Point // point of the last update; zero: no update yet

	touched map[Key]struct{} // keys whose item has to be compared with the published one
	counted map[string]int   // node → mappings of its endpoints that are published
	freed   []netip.Addr     // addresses of this node's removed endpoints, until Observe takes them
	held    map[Key]struct{} // entries missing in the store that stay in effect until a set time
	until   time.Time        // when the losses in held take effect
	listed  bool             // a complete listing came
}

// nodeView contains the keys of one node in the store.
type nodeView struct {
	name       string
	registered bool
	record     Record
	created    int64 // revision of its registration
	revision   int64 // of the last write of the record
	endpoints  endpoints
	slots      map[string]ClaimKey    // by the name of the slot
	ranges     []netip.Prefix         // valid ones, sorted
	since      map[netip.Prefix]int64 // ages of the ranges
	refused    []Refusal
}

func (v *view) init(own string) {
	*v = view{
		own: own, nodes: map[string]*nodeView{}, claimed: map[netip.Addr]map[string]struct{}{},
		former: map[netip.Prefix]Former{}, resting: newQuarantine(),
		ranges: map[netip.Prefix]string{}, around: map[netip.Prefix]int{},
		lengths: map[bool]map[int]int{false: {}, true: {}}, touched: map[Key]struct{}{},
		counted: map[string]int{}, held: map[Key]struct{}{}, assigned: newAssignments(),
	}
}

func mappingKey(a netip.Addr) Key { return Key{Prefix: netip.PrefixFrom(a, a.BitLen())} }

func (v *view) touch(k Key) { v.touched[k] = struct{}{} }

// get returns a node. If the view does not have it, get adds it, unregistered.
func (v *view) get(name string) *nodeView {
	n := v.nodes[name]
	if n == nil {
		n = &nodeView{name: strings.Clone(name), endpoints: newEndpoints(), slots: map[string]ClaimKey{}}
		v.nodes[n.name] = n
	}
	return n
}

// tidy deletes a node that has neither a record nor other keys.
func (v *view) tidy(n *nodeView) {
	if !n.registered && len(n.endpoints.byName) == 0 && len(n.slots) == 0 {
		delete(v.nodes, n.name)
	}
}

// apply applies an update, and reports whether the labels or the addresses of a node may have changed.
func (v *view) apply(u Update) (labels bool) {
	changed := map[*nodeView]struct{}{} // nodes whose claimed ranges have changed
	labels = u.Complete
	if u.Complete {
		if v.rebuilt(u) {
			if !v.prepared {
				v.pin(v.at.Cluster)
			}
			v.rebuiltSettings()
		}
		v.prepared = false
		for _, n := range v.unlisted(u) {
			changed[n] = struct{}{}
		}
		v.resting = newQuarantine()
	}
	if u.Revision != 0 {
		v.at = cluster.Point{Cluster: u.Cluster, Revision: u.Revision}
	}
	if u.IPAM != nil && u.IPAM.Revision != 0 && v.ipam.Revision != u.IPAM.Revision {
		v.setSettings(*u.IPAM)
		for _, n := range v.nodes {
			changed[n] = struct{}{} // the settings of that time may allow other ranges
		}
	}
	for _, k := range u.Resting {
		v.resting.add(k, v.mostResting())
	}
	for _, k := range u.Claims {
		n := v.get(k.Node)
		if was, ok := n.slots[k.Slot.String()]; !ok || was != k {
			n.slots[k.Slot.String()] = k
			changed[n] = struct{}{}
		}
	}
	for _, k := range u.Nodes {
		n := v.get(k.Name)
		labels = labels || !maps.Equal(n.record.Labels, k.Record.Labels) || !n.record.Underlay.equal(k.Record.Underlay)
		if v.register(n, k) {
			changed[n] = struct{}{}
		}
	}
	for _, k := range u.Addresses {
		n := v.get(k.Node)
		v.drop(n, k.Endpoint)
		for _, a := range n.endpoints.put(k, n.record.Incarnation).addresses {
			v.touch(mappingKey(a))
		}
	}
	for _, gone := range u.Removed {
		if gone.Assignment {
			continue // assign takes it
		}
		if gone.Rest.IsValid() {
			v.resting.remove(RestKey{Node: gone.Node, Range: gone.Rest})
			continue
		}
		n := v.nodes[gone.Node]
		if gone.ofRecord() && v.forgotten(gone.Node) {
			for _, other := range v.nodes {
				changed[other] = struct{}{} // another node may claim the ranges now
			}
		}
		if n == nil {
			continue
		}
		switch {
		case gone.Endpoint != "":
			v.drop(n, gone.Endpoint)
		case gone.Slot != "":
			delete(n.slots, gone.Slot)
			changed[n] = struct{}{}
		default:
			labels = true
			if v.unregister(n) {
				changed[n] = struct{}{}
			}
		}
	}
	v.assign(u, changed)
	v.rangesChanged(slices.SortedFunc(maps.Keys(changed), func(a, b *nodeView) int { return cmp.Compare(a.name, b.name) }))
	for _, gone := range u.Removed {
		if n := v.nodes[gone.Node]; n != nil {
			v.tidy(n)
		}
	}
	return labels
}

// rebuilt reports whether the store was emptied, replaced, or restored to an older state since the last update:
// revisions of the listing cannot be compared with earlier ones.
func (v *view) rebuilt(u Update) bool {
	if v.at == (cluster.Point{}) || u.Revision == 0 {
		return false
	}
	return u.Cluster != v.at.Cluster || u.Revision < v.at.Revision
}

// unlisted removes keys that a complete listing lacks, and returns the nodes whose ranges changed.
func (v *view) unlisted(u Update) (changed []*nodeView) {
	nodes := make(map[string]bool, len(u.Nodes))
	for _, k := range u.Nodes {
		nodes[k.Name] = true
	}
	type endpoint struct{ node, endpoint string }
	endpoints := make(map[endpoint]bool, len(u.Addresses))
	for _, k := range u.Addresses {
		endpoints[endpoint{k.Node, k.Endpoint}] = true
	}
	type slot struct{ node, name string }
	slots := make(map[slot]bool, len(u.Claims))
	for _, k := range u.Claims {
		slots[slot{k.Node, k.Slot.String()}] = true
	}
	for _, n := range v.nodes {
		lost := n.registered && !nodes[n.name] && v.unregister(n)
		for name := range n.slots {
			if !slots[slot{n.name, name}] {
				delete(n.slots, name)
				lost = true
			}
		}
		if lost {
			changed = append(changed, n)
		}
		for e := range n.endpoints.byName {
			if !endpoints[endpoint{n.name, e}] {
				v.drop(n, e)
			}
		}
		v.tidy(n)
	}
	return changed
}

// register sets the record of a node, and reports whether ranges changed.
func (v *view) register(n *nodeView, k NodeKey) (ranges bool) {
	ranges = !n.registered || n.created != k.Created || !slices.Equal(n.record.Ranges, k.Record.Ranges)
	if n.record.Incarnation != k.Record.Incarnation {
		v.touchAll(n)
	}
	v.claim(n, false)
	n.registered, n.record, n.created, n.revision = true, k.Record, k.Created, k.Revision
	v.claim(n, true)
	v.touch(Key{Node: n.name})
	return ranges
}

// unregister removes the record of a node, and reports whether ranges changed.
func (v *view) unregister(n *nodeView) (ranges bool) {
	v.claim(n, false)
	ranges = len(n.ranges) > 0 || len(n.refused) > 0
	n.registered, n.record, n.created, n.revision = false, Record{}, 0, 0
	v.touch(Key{Node: n.name})
	v.touchAll(n)
	return ranges
}

// claim adds or removes the addresses in the record of a node.
func (v *view) claim(n *nodeView, add bool) {
	for _, a := range slices.Concat(n.record.Underlay.Addresses, n.record.Underlay.Overlay) {
		v.touch(mappingKey(a))
		for other := range v.claimed[a] { // the address may now be theirs, or no longer
			v.touch(Key{Node: other})
		}
		switch {
		case !add:
			delete(v.claimed[a], n.name)
			if len(v.claimed[a]) == 0 {
				delete(v.claimed, a)
			}
		case v.claimed[a] == nil:
			v.claimed[a] = map[string]struct{}{n.name: {}}
		default:
			v.claimed[a][n.name] = struct{}{}
		}
	}
}

func (v *view) touchAll(n *nodeView) {
	for a := range n.endpoints.at {
		v.touch(mappingKey(a))
	}
}

// drop removes an endpoint of a node.
func (v *view) drop(n *nodeView, endpoint string) {
	for _, a := range n.endpoints.remove(endpoint) {
		v.touch(mappingKey(a))
		if n.name == v.own {
			v.freed = append(v.freed, a)
		}
	}
}

// rangeOf returns the valid range that contains an address, and the node that has it.
func (v *view) rangeOf(a netip.Addr) (netip.Prefix, string) {
	for bits := range v.lengths[a.Is6()] {
		if p, err := a.Prefix(bits); err == nil {
			if node, ok := v.ranges[p]; ok {
				return p, node
			}
		}
	}
	return netip.Prefix{}, ""
}

// claimant returns the node that registered an address as the node's own, not as a pod's; "" without such a node. If
// several nodes registered it, the node whose record was created first wins.
func (v *view) claimant(a netip.Addr) string {
	_, holder := v.rangeOf(a)
	var first *nodeView
	for name := range v.claimed[a] {
		n := v.nodes[name]
		// Inside a range, an address is valid only as the overlay address of the range's node. Outside of all ranges, only
		// addresses of the underlay are valid.
		if (holder == "") == slices.Contains(n.record.Underlay.Overlay, a) || holder != "" && holder != name {
			continue
		}
		if first == nil || n.created < first.created || n.created == first.created && name < first.name {
			first = n
		}
	}
	if first == nil {
		return ""
	}
	return first.name
}

// want returns the item to publish for a key.
func (v *view) want(k Key) (Item, bool) {
	if k.Node != "" {
		n := v.nodes[k.Node]
		if n == nil || !n.registered || k.Node == v.own {
			return Item{}, false
		}
		node := v.node(n)
		return Item{Node: &node}, true
	}
	a := k.Prefix.Addr()
	node := v.claimant(a)
	_, holder := v.rangeOf(a)
	_, api := v.apiServers[a]
	switch {
	case node == v.own && node != "", holder == v.own && holder != "":
		return Item{}, false // the datapath knows the addresses of its own node
	case node != "":
		return Item{On: node, Identity: v.ofNode(node, api)}, true
	case holder != "":
		n := v.nodes[holder]
		if e := n.endpoints.last(a, n.record.Incarnation); e != nil {
			return Item{On: holder, Identity: e.identity}, true
		}
		return Item{}, false
	}
	id, ok := v.apiServer(a)
	return Item{Identity: id}, ok
}

func (v *view) node(n *nodeView) Node {
	out := Node{Name: n.name, Record: n.record, Refused: n.refused}
	out.Record.Ranges = n.ranges
	others := func(a netip.Addr) bool { return v.reached(a) != n.name }
	if slices.ContainsFunc(n.record.Underlay.Addresses, others) {
		out.Record.Underlay.Addresses = slices.DeleteFunc(slices.Clone(n.record.Underlay.Addresses), others)
	}
	return out
}

// reached returns the node that has an address: this node or, of the nodes that registered it, the first. Two nodes
// with one address would break each other's traffic, so packets from it are attributed to one of them.
func (v *view) reached(a netip.Addr) string {
	if _, ok := v.ownAddresses[a]; ok {
		return v.own
	}
	var first *nodeView
	for name := range v.claimed[a] {
		n := v.nodes[name]
		if slices.Contains(n.record.Underlay.Addresses, a) && (first == nil || n.created < first.created ||
			n.created == first.created && name < first.name) {
			first = n
		}
	}
	if first == nil {
		return ""
	}
	return first.name
}

// contestedAddresses returns the addresses that a node registered although another node has them.
func (v *view) contestedAddresses() (out []Overlap) {
	for _, name := range slices.Sorted(maps.Keys(v.nodes)) {
		for _, a := range v.nodes[name].record.Underlay.Addresses {
			holder := v.reached(a)
			if holder == name {
				continue
			}
			why := fmt.Sprintf("node %s registered the address before; if that node is gone, run `sluice node forget %s`",
				holder, holder)
			if holder == v.own {
				why = "it is an address of this node"
			}
			out = append(out, Overlap{Node: name, Claimed: true, Refusal: Refusal{
				Range: netip.PrefixFrom(a, a.BitLen()), Holder: holder, Reason: why,
			}})
		}
	}
	return out
}

// change is a pending publication of a key.
type change struct {
	key  Key
	item Item
	gone bool
}

// changes returns the differences between the published state and the steps since the last call: nodes before
// mappings, and removed nodes last.
func (v *view) changes(published func(Key) (Item, bool)) []change {
	var nodes, mappings, gone []change
	undecided := map[Key]struct{}{}
	for k := range v.touched {
		if v.undecided(k) {
			undecided[k] = struct{}{}
			continue
		}
		want, ok := v.want(k)
		have, had := published(k)
		if _, held := v.held[k]; held && ok {
			delete(v.held, k) // it is back
		} else if held {
			continue
		}
		if ok == had && (!ok || want.Equal(have)) {
			continue
		}
		v.tally(have, -1)
		v.tally(want, 1)
		c := change{key: k, item: want, gone: !ok}
		switch {
		case k.Node == "":
			mappings = append(mappings, c)
		case ok:
			nodes = append(nodes, c)
		default:
			gone = append(gone, c)
		}
	}
	v.touched = undecided // a cleared map would keep the size of a listing
	return slices.Concat(nodes, mappings, gone)
}

// holdBack keeps entries in effect that a complete listing lacks, if they are more than half of the nodes or mappings.
// It returns until when they are kept, and a description of them.
func (v *view) holdBack(published func() []Key, d time.Duration) (until time.Time, lost string) {
	first := !v.listed
	v.listed = true
	if first {
		for a := range v.apiServers {
			v.touch(mappingKey(a))
		}
		return time.Time{}, ""
	}
	var missing []Key
	var nodes, mappings, lostNodes, lostMappings int
	for _, k := range published() {
		_, there := v.want(k)
		if k.Node != "" {
			nodes++
		} else {
			mappings++
		}
		switch {
		case there:
			continue
		case k.Node != "":
			lostNodes++
		default:
			lostMappings++
		}
		missing = append(missing, k)
	}
	if 2*lostNodes <= nodes && 2*lostMappings <= mappings {
		return time.Time{}, ""
	}
	for _, k := range missing {
		v.held[k] = struct{}{}
	}
	v.until = time.Now().Add(d)
	return v.until, fmt.Sprintf("%d of %d nodes, %d of %d mappings", lostNodes, nodes, lostMappings, mappings)
}

// release applies the losses whose delay has passed, and returns their number.
func (v *view) release() (missing int) {
	if time.Now().Before(v.until) {
		return 0
	}
	for k := range v.held {
		v.touch(k)
	}
	missing = len(v.held)
	clear(v.held)
	return missing
}

// tally adds by to the count of a mapping of an endpoint. Addresses of nodes and API servers do not count.
func (v *view) tally(i Item, by int) {
	if i.Identity.Scope() != identity.ScopeCluster {
		return
	}
	if v.counted[i.On] += by; v.counted[i.On] == 0 {
		delete(v.counted, i.On)
	}
}

// count returns the numbers of valid and refused addresses of a node's endpoints.
func (v *view) count(n *nodeView) (counted, refused int) {
	if n.name != v.own {
		counted = v.counted[n.name]
		return counted, max(0, n.endpoints.total-counted) // smaller while removals are held back
	}
	for _, e := range n.endpoints.byName {
		for _, a := range e.addresses {
			if v.counts(n, e, a) {
				counted++
			} else {
				refused++
			}
		}
	}
	return counted, refused
}

// counts reports whether the mapping of an address by an endpoint is valid.
func (v *view) counts(n *nodeView, e *endpoint, a netip.Addr) bool {
	_, holder := v.rangeOf(a)
	return holder == n.name && n.endpoints.last(a, n.record.Incarnation) == e && v.claimant(a) == ""
}

func (v *view) status() (s Status) {
	for _, name := range v.names() {
		if name == v.own {
			continue
		}
		n := v.nodes[name]
		if n != nil && n.registered || v.lost(name) {
			s.Nodes++
		}
		counted, refused := v.counted[name], 0
		if n != nil {
			counted, refused = v.count(n)
		}
		s.Mappings, s.Refused = s.Mappings+counted, s.Refused+refused
	}
	return s
}

// lost reports whether the store lacks the record of a node that is still in effect.
func (v *view) lost(name string) bool {
	_, held := v.held[Key{Node: name}]
	return held
}

// names returns the names, sorted, of the nodes that have keys in the store or entries still in effect.
func (v *view) names() []string {
	all := make(map[string]struct{}, len(v.nodes))
	for name := range v.nodes {
		all[name] = struct{}{}
	}
	for name := range v.counted { // by their mappings
		all[name] = struct{}{}
	}
	for k := range v.held {
		if k.Node != "" {
			all[k.Node] = struct{}{}
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// overlaps returns the invalid claims of other nodes, and the ranges that these nodes had before the store was rebuilt
// and have not claimed again.
func (v *view) overlaps() (out []Overlap) {
	for _, name := range slices.Sorted(maps.Keys(v.nodes)) {
		if name == v.own {
			continue
		}
		for _, f := range v.nodes[name].refused {
			out = append(out, Overlap{Node: name, Claimed: true, Refusal: f})
		}
	}
	for _, p := range v.missing() {
		if node := v.pins[p]; node != v.own {
			out = append(out, Overlap{Node: node, Refusal: Refusal{
				Range: p, Differs: true, Reason: "the node had it before the store was rebuilt, and has not claimed it again",
			}})
		}
	}
	return out
}

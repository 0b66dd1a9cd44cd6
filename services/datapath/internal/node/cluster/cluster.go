// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package cluster follows the identity service's stream of other nodes, and registers this node.
//
// The Follower receives nodes, their pod ranges and the mappings of their endpoints from a source, and writes them to
// the ipcache. It assigns each node a node ID, by which the kernel refers to it. The source may be unavailable or
// restart: an entry is removed only if it is missing in a complete listing.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/node/podrange"
)

// Key names a node or the mapping of an address. Exactly one field is set.
type Key struct {
	Node   string
	Prefix netip.Prefix
}

// Item is the value of a Key.
type Item struct {
	Node     *Node            // of a node
	On       string           // of a mapping: the node that has the address; "": none
	Identity identity.Numeric // of a mapping
}

// Node is another node, as sluice-identity announces it.
type Node struct {
	Incarnation string
	Addresses   []netip.Addr // by which the node is reached, the preferred address of a family first
	Ranges      []netip.Prefix
	Overlay     []netip.Addr // the node's own addresses inside its ranges
	Mode        Mode
	TunnelPort  uint16 // at which it receives tunnel packets; 0: none
	MTU         uint16 // of the largest packet that its pods accept, bytes; 0: unknown
}

// Mode determines how packets between pods of two nodes are carried.
type Mode string

const (
	None    Mode = "none" // no packets travel
	Overlay Mode = "overlay"
	Native  Mode = "native"
)

// Member is a node with its name and node ID.
type Member struct {
	Name   string
	Number uint16
	Node
}

// Router forwards packets to other nodes.
type Router interface {
	// Join adds or updates nodes. It is called before a range or mapping with their node IDs is published. Failed work is
	// retried later, and no packets travel until then.
	Join(members []Member)
	// Hold sets the node ID of each range's node; 0: none. It is called before the range is published.
	Hold(holders map[netip.Prefix]uint16)
	// Leave removes node IDs. It is called after all published entries with them were changed or removed.
	Leave(numbers []uint16)
	// Complete is called when Join has received all existing nodes.
	Complete()
}

// Others are the pod ranges and node addresses of other nodes.
type Others struct {
	Ranges []netip.Prefix
	Nodes  []netip.Addr
}

// Source provides all other nodes and their mappings.
type Source = watch.Source[Key, Item]

// Entries are the ipcache entries of other nodes.
type Entries interface {
	SetRemote(p netip.Prefix, r ipcache.Remote) error
	RemoveRemote(p netip.Prefix) error
	Renumber(from, to uint16) error
	Doubt(nodes map[uint16]struct{}) error
	Keep(keep func(netip.Prefix) bool) error
	InUse(number uint16) bool
}

// maxKeys is the maximum number of nodes and mappings: as many as the ipcache has entries of one family.
const maxKeys = 1 << 19

// FollowerOptions are the dependencies of a Follower. Functions and interfaces are required unless nil is documented.
type FollowerOptions struct {
	Source  Source
	Entries Entries
	Numbers *Numbers

	// Away is called when the source fails, Back when it answers again; nil: not called.
	Away, Back func()

	// NodesByStack sends packets to addresses of other nodes through the host stack, which masquerades them with this
	// node's address.
	NodesByStack bool

	// Router is called with changes of nodes and ranges; nil: no packets travel to other nodes.
	Router Router

	// Earlier is the state of the previous process. Until the first complete listing, it is added to the current state in
	// calls of Moved.
	Earlier Others

	// Local returns the addresses of this node, which no range of another node may contain; nil: unknown.
	Local func() []netip.Addr

	// Known is called with all other nodes by name when they may have changed; nil: not called.
	Known func(nodes map[string]Node)

	// Trusts reports whether the mappings of a node are trusted; nil: all mappings are trusted.
	Trusts func(node string) bool

	// Moved is called with all ranges and addresses of other nodes when they may have changed; nil: not called.
	Moved func(ranges []netip.Prefix, nodes []netip.Addr) error

	Log *slog.Logger
}

// Follower keeps the ipcache equal to the source.
type Follower struct {
	o       FollowerOptions
	earlier Others // of o, until the first complete listing; used only by Apply and its callees
	log     *slog.Logger

	mu       sync.Mutex
	nodes    map[string]Node           // guarded by mu
	local    []netip.Addr              // guarded by mu; last result of Local
	holders  map[netip.Prefix][]string // guarded by mu; sorted names of the nodes that have a range
	refused  map[Key]string            // guarded by mu; rejected entries with the reason
	complete bool                      // guarded by mu; the listing is complete, and the source answers
	err      error                     // guarded by mu; why not
	applied  watch.Origin              // guarded by mu; up to which the ipcache has all changes; zero: unknown
	doubted  map[uint16]struct{}       // guarded by mu; node IDs of the nodes that are not trusted
}

// NewFollower returns a follower. It does nothing before Run.
func NewFollower(o FollowerOptions) *Follower {
	return &Follower{
		o: o, earlier: o.Earlier, log: o.Log.With("source", "cluster"),
		nodes: map[string]Node{}, holders: map[netip.Prefix][]string{}, refused: map[Key]string{},
	}
}

// Run follows the source until ctx ends.
func (f *Follower) Run(ctx context.Context) error {
	return watch.Follow(ctx, f.o.Source, f, watch.FollowOptions{
		Max: maxKeys, RetryMin: 50 * time.Millisecond, RetryMax: 2 * time.Second, Log: f.log,
	})
}

// Apply implements watch.Sink. Nodes are added before mappings on them, and removed after these mappings.
func (f *Follower) Apply(_ context.Context, c watch.Changes[Key, Item]) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var errs []error
	installed := map[string]Installation{}
	ranges := map[netip.Prefix]struct{}{} // ranges whose node may have changed
	changed := false
	if f.o.Local != nil {
		f.local = f.o.Local()
	}
	for k, item := range c.Upserts {
		switch {
		case item.Node != nil:
			changed = true
			installed[k.Node] = Installation{item.Node.Incarnation, tunnelOf(*item.Node)}
			f.hold(k.Node, f.withValidRanges(k, *item.Node), ranges)
		case item.On != "":
			if _, ok := f.o.Numbers.Of(item.On); !ok && installed[item.On] == (Installation{}) {
				installed[item.On] = Installation{} // the message about the node arrives later
			}
		}
	}
	f.checkRanges(c.Upserts, ranges)
	moved := f.o.Numbers.Set(installed)
	f.join(installed, ranges)
	for from, to := range moved {
		errs = append(errs, f.o.Entries.Renumber(from, to))
	}
	errs = append(errs, f.doubt())
	f.save()
	// before packets are forwarded by a new entry
	errs = append(errs, f.tell(changed))
	for p := range ranges {
		errs = append(errs, f.writeRange(p))
	}
	for k, item := range c.Upserts {
		if item.Node == nil {
			errs = append(errs, f.publish(k, item))
		}
	}
	for k := range c.Deletes {
		delete(f.refused, k)
		if k.Node == "" {
			errs = append(errs, f.o.Entries.RemoveRemote(k.Prefix))
		}
	}
	left, gone := slices.Collect(maps.Keys(moved)), false
	for k := range c.Deletes {
		if k.Node == "" {
			continue
		}
		gone = true
		if number, ok := f.o.Numbers.Of(k.Node); ok {
			left = append(left, number)
		}
		errs = append(errs, f.remove(k.Node))
	}
	if f.o.Router != nil {
		f.o.Router.Leave(left)
	}
	f.save()
	err := errors.Join(append(errs, f.tell(gone))...)
	if err == nil {
		f.applied = c.Origin
	}
	return err
}

// Applied returns the store revision up to which the ipcache has all changes; zero if it is unknown.
func (f *Follower) Applied() watch.Origin {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.applied
}

// Reconsider evaluates again which nodes are trusted, and updates the ipcache.
func (f *Follower) Reconsider() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.doubt()
}

// doubt tells the ipcache which nodes are not trusted. Called with mu held.
func (f *Follower) doubt() error {
	if f.o.Trusts == nil {
		return nil
	}
	doubted := map[uint16]struct{}{}
	for name, number := range f.o.Numbers.Names() {
		if !f.o.Trusts(name) {
			doubted[number] = struct{}{}
		}
	}
	if maps.Equal(doubted, f.doubted) {
		return nil
	}
	err := f.o.Entries.Doubt(doubted)
	if err == nil {
		f.doubted = doubted
	}
	return err
}

// join passes the router the nodes and ranges that are about to be published.
func (f *Follower) join(installed map[string]Installation, ranges map[netip.Prefix]struct{}) {
	if f.o.Router == nil {
		return
	}
	var members []Member
	for name := range installed {
		if node, ok := f.nodes[name]; ok {
			number, _ := f.o.Numbers.Of(name)
			members = append(members, Member{name, number, node})
		}
	}
	f.o.Router.Join(members)
	f.hand(ranges)
}

// hand passes the router the nodes that have the given ranges.
func (f *Follower) hand(ranges map[netip.Prefix]struct{}) {
	if f.o.Router == nil || len(ranges) == 0 {
		return
	}
	holders := map[netip.Prefix]uint16{}
	for p := range ranges {
		holders[p] = 0
		if names := f.holders[p]; len(names) > 0 {
			holders[p], _ = f.o.Numbers.Of(names[0])
		}
	}
	f.o.Router.Hold(holders)
}

// tell passes the nodes, ranges and addresses of all other nodes to the subscribers in the options.
func (f *Follower) tell(changed bool) error {
	if changed && f.o.Known != nil {
		f.o.Known(maps.Clone(f.nodes))
	}
	if !changed || f.o.Moved == nil {
		return nil
	}
	ranges, nodes := slices.Clone(f.earlier.Ranges), slices.Clone(f.earlier.Nodes)
	ranges = slices.AppendSeq(ranges, maps.Keys(f.holders))
	for _, n := range f.nodes {
		nodes = append(nodes, n.Addresses...)
	}
	slices.SortFunc(ranges, netip.Prefix.Compare)
	slices.SortFunc(nodes, netip.Addr.Compare)
	return f.o.Moved(slices.Compact(ranges), slices.Compact(nodes))
}

// publish writes one mapping to the ipcache.
func (f *Follower) publish(k Key, item Item) error {
	delete(f.refused, k)
	if why := refusal(k.Prefix, item.Identity); why != "" {
		f.refuse(k, why)
		return f.o.Entries.RemoveRemote(k.Prefix)
	}
	number := uint16(0)
	if item.On != "" {
		number, _ = f.o.Numbers.Of(item.On)
	}
	ofDevice := f.isOfNode(k.Prefix, item)
	return f.o.Entries.SetRemote(k.Prefix, ipcache.Remote{
		Identity: item.Identity, Node: number, ByStack: f.o.NodesByStack && ofDevice, OfDevice: ofDevice,
	})
}

// isOfNode reports whether an address belongs to a device of its node, outside the node's ranges.
func (f *Follower) isOfNode(p netip.Prefix, item Item) bool {
	if item.On == "" || !item.Identity.OfNode() {
		return false
	}
	return !slices.ContainsFunc(f.nodes[item.On].Ranges, func(r netip.Prefix) bool { return r.Contains(p.Addr()) })
}

// refusal returns the reason to reject a mapping, or "". This process has more privileges than the source, and
// validates its data.
func refusal(p netip.Prefix, id identity.Numeric) string {
	switch {
	case !p.IsValid() || !p.IsSingleIP() || p.Addr().Is4In6():
		return fmt.Sprintf("%v is not the prefix of one address", p)
	case !id.OfNode() && id.Scope() != identity.ScopeCluster:
		return fmt.Sprintf("identity %d cannot be on another node", id)
	}
	return ""
}

func (f *Follower) refuse(k Key, why string) {
	f.refused[k] = why
	f.log.Error("invalid entry of the cluster ignored", "node", k.Node, "prefix", k.Prefix, "why", why)
}

// withValidRanges returns the node without its invalid ranges.
func (f *Follower) withValidRanges(k Key, n Node) Node {
	delete(f.refused, k)
	ranges := n.Ranges
	n.Ranges = nil
	for _, p := range ranges {
		err := podrange.Check(p)
		if err == nil {
			err = f.checkAround(p, n)
		}
		if err != nil {
			f.refuse(k, err.Error())
			continue
		}
		n.Ranges = append(n.Ranges, p)
	}
	return n
}

// checkRanges checks existing ranges again that contain an address of a new or changed node.
func (f *Follower) checkRanges(upserts map[Key]Item, ranges map[netip.Prefix]struct{}) {
	for _, item := range upserts {
		if item.Node == nil {
			continue
		}
		for name, n := range f.nodes {
			around := func(p netip.Prefix) bool { return slices.ContainsFunc(item.Node.Addresses, p.Contains) }
			if slices.ContainsFunc(n.Ranges, around) {
				f.hold(name, f.withValidRanges(Key{Node: name}, n), ranges)
			}
		}
	}
}

// checkAround rejects a range that contains an address of a node: packets from that address would be treated as packets
// of a pod.
func (f *Follower) checkAround(p netip.Prefix, n Node) error {
	inside := func(who string, addrs []netip.Addr) error {
		if i := slices.IndexFunc(addrs, p.Contains); i >= 0 {
			return fmt.Errorf("%v contains %v, an address of %s", p, addrs[i], who)
		}
		return nil
	}
	err := inside("the node itself", n.Addresses)
	err = errors.Join(err, inside("this node", f.local))
	for name, other := range f.nodes {
		err = errors.Join(err, inside("node "+name, other.Addresses))
	}
	return err
}

// hold stores a node and adds its old and new ranges to ranges, for writing.
func (f *Follower) hold(name string, n Node, ranges map[netip.Prefix]struct{}) {
	for _, p := range f.nodes[name].Ranges {
		f.holders[p] = slices.DeleteFunc(f.holders[p], func(h string) bool { return h == name })
		if len(f.holders[p]) == 0 {
			delete(f.holders, p)
		}
		ranges[p] = struct{}{}
	}
	for _, p := range n.Ranges {
		if i, found := slices.BinarySearch(f.holders[p], name); !found {
			f.holders[p] = slices.Insert(f.holders[p], i, name)
		}
		ranges[p] = struct{}{}
	}
	f.nodes[name] = n
}

// writeRange writes the node of a range to the ipcache. Two nodes have the same range only while it moves between them.
func (f *Follower) writeRange(p netip.Prefix) error {
	holders := f.holders[p]
	if len(holders) == 0 {
		return f.o.Entries.RemoveRemote(p)
	}
	number, _ := f.o.Numbers.Of(holders[0])
	return f.o.Entries.SetRemote(p, ipcache.Remote{Identity: identity.UnknownInCluster, Node: number})
}

// remove removes a node. Its node ID goes into quarantine, even if the source still has a mapping on it.
func (f *Follower) remove(name string) error {
	var errs []error
	ranges := map[netip.Prefix]struct{}{}
	f.hold(name, Node{}, ranges)
	delete(f.nodes, name)
	f.hand(ranges)
	for p := range ranges {
		errs = append(errs, f.writeRange(p))
	}
	f.o.Numbers.Remove(name)
	return errors.Join(errs...)
}

func (f *Follower) save() {
	if err := f.o.Numbers.Save(); err != nil {
		f.log.Error("node IDs not written", log.Err(err))
	}
}

// Complete implements watch.Sink.
func (f *Follower) Complete(_ context.Context, listed map[Key]struct{}) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var errs []error
	var left []uint16
	for _, name := range slices.Collect(maps.Keys(f.nodes)) {
		if _, ok := listed[Key{Node: name}]; !ok {
			number, _ := f.o.Numbers.Of(name)
			left = append(left, number)
			errs = append(errs, f.remove(name))
		}
	}
	errs = append(errs, f.o.Entries.Keep(func(p netip.Prefix) bool {
		_, mapped := listed[Key{Prefix: p}]
		_, held := f.holders[p]
		return mapped || held
	}))
	for k := range f.refused {
		if _, ok := listed[k]; !ok {
			delete(f.refused, k)
		}
	}
	// Nodes of the previous process that were removed while no process ran.
	for name, number := range f.o.Numbers.Names() {
		if _, ok := f.nodes[name]; !ok && !f.o.Entries.InUse(number) {
			f.o.Numbers.Remove(name)
		}
	}
	f.save()
	f.back()
	f.complete, f.err = true, nil
	f.earlier = Others{}
	if f.o.Router != nil {
		f.o.Router.Leave(left)
		f.o.Router.Complete()
	}
	return errors.Join(append(errs, f.tell(true))...)
}

// Failed implements watch.Sink.
func (f *Follower) Failed(_ context.Context, why error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if why == nil {
		f.back()
	}
	f.complete, f.err = why == nil, why
	if why != nil && f.o.Away != nil {
		f.o.Away()
	}
	return nil
}

// back calls Back if the source answers after a failure. Called with mu held.
func (f *Follower) back() {
	if f.err != nil && f.o.Back != nil {
		f.o.Back()
	}
}

// State is the state of a follower.
type State struct {
	Complete bool  // the listing is complete, and the source answers
	Err      error // why not
	Nodes    int   // other nodes
	Refused  []string
}

// State returns the state of the follower.
func (f *Follower) State() State {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := State{Complete: f.complete, Err: f.err, Nodes: len(f.nodes)}
	for k, why := range f.refused {
		what := "node " + k.Node
		if k.Node == "" {
			what = k.Prefix.String()
		}
		s.Refused = append(s.Refused, what+": "+why)
	}
	slices.Sort(s.Refused)
	return s
}

// Name returns the name of the node with a node ID, "" if it is unknown.
func (f *Follower) Name(number uint16) string { return f.o.Numbers.Name(number) }

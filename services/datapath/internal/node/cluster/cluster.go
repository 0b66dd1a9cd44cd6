// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package cluster follows what the identity service says of other nodes, and
// says what this node is.
//
// The Follower takes nodes, their ranges and the addresses of their endpoints
// from a source and has the ipcache say them; it gives each node a number, by
// which the kernel knows it. The source may be away or begin anew: nothing is
// removed before a complete listing lacks it.
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

// Key names a node or the mapping of an address; one of its fields is set.
type Key struct {
	Node   string
	Prefix netip.Prefix
}

// Item is the value of a Key.
type Item struct {
	Node     *Node            // of a node
	On       string           // of a mapping: the node that it is on; "": none
	Identity identity.Numeric // of a mapping
}

// Node is what the cluster says of another node.
type Node struct {
	Incarnation string
	Addresses   []netip.Addr // by which it is reached, the preferred of a family first
	Ranges      []netip.Prefix
	Overlay     []netip.Addr // of the node itself inside its ranges
	Mode        Mode
	TunnelPort  uint16 // on which it takes packets of the tunnel; 0: on none
	MTU         uint16 // of the largest packet that its pods take, bytes; 0: not known
}

// Mode is how packets travel between pods of two nodes.
type Mode string

// The modes.
const (
	None    Mode = "none" // they do not
	Overlay Mode = "overlay"
	Native  Mode = "native"
)

// Member is a node with its name, and the number by which the kernel knows it.
type Member struct {
	Name   string
	Number uint16
	Node
}

// Fabric leads packets to other nodes.
type Fabric interface {
	// Join takes nodes, before a range or mapping is published that has their
	// numbers. What cannot be done is tried again later, and no packets travel
	// until then.
	Join(members []Member)
	// Hold says which number has a range now; 0: none. It comes before that is
	// published, too.
	Hold(holders map[netip.Prefix]uint16)
	// Leave ends numbers after everything published has another one or is removed.
	Leave(numbers []uint16)
	// Complete says that every node was taken that there is.
	Complete()
}

// Others are the pod ranges and the addresses of other nodes.
type Others struct {
	Ranges []netip.Prefix
	Nodes  []netip.Addr
}

// Source has all other nodes and their mappings.
type Source = watch.Source[Key, Item]

// Entries are those of the ipcache.
type Entries interface {
	SetRemote(p netip.Prefix, r ipcache.Remote) error
	RemoveRemote(p netip.Prefix) error
	Renumber(from, to uint16) error
	Doubt(nodes map[uint16]struct{}) error
	Keep(keep func(netip.Prefix) bool) error
	InUse(number uint16) bool
}

// maxKeys is how many nodes and mappings are believed: as many as the ipcache
// has entries of one family.
const maxKeys = 1 << 19

// FollowerOptions are what a Follower needs. Functions and interfaces without a word about nil
// are required.
type FollowerOptions struct {
	Source  Source
	Entries Entries
	Numbers *Numbers

	// Away is called when the source fails, Back when it answers after that; nil: they
	// are not.
	Away, Back func()

	// NodesByStack says that packets to other nodes themselves go by the host's
	// stack, which gives them the address of this one.
	NodesByStack bool

	// Fabric is told of nodes and ranges; nil: no packets travel to other nodes.
	Fabric Fabric

	// Earlier is what an earlier process knew: until everything is said once, it counts
	// for Moved beside what was.
	Earlier Others

	// Local are the addresses of this node, which no range of another can have; nil:
	// they are not known.
	Local func() []netip.Addr

	// Known is told all other nodes by their names when they may not be those of
	// before; nil: it is not.
	Known func(nodes map[string]Node)

	// Believes reports whether the mappings of a node are believed; nil: all are.
	Believes func(node string) bool

	// Moved is told all ranges and addresses of other nodes when they may not be
	// those of before; nil: it is not.
	Moved func(ranges []netip.Prefix, nodes []netip.Addr) error

	Log *slog.Logger
}

// Follower keeps the ipcache as the source says.
type Follower struct {
	o       FollowerOptions
	earlier Others // of o, until everything was said; only Apply and its callees use it
	log     *slog.Logger

	mu       sync.Mutex
	nodes    map[string]Node           // guarded by mu
	local    []netip.Addr              // guarded by mu; what Local said last
	holders  map[netip.Prefix][]string // guarded by mu; sorted names of the nodes that have a range
	refused  map[Key]string            // guarded by mu; what is not believed, and why
	complete bool                      // guarded by mu; the source has said everything, and is there
	err      error                     // guarded by mu; why not
	applied  watch.Origin              // guarded by mu; up to which the ipcache has everything; zero: not known
	doubted  map[uint16]struct{}       // guarded by mu; numbers of the nodes that are not believed
}

// NewFollower prepares a follower. It does nothing before Run.
func NewFollower(o FollowerOptions) *Follower {
	return &Follower{
		o: o, earlier: o.Earlier, log: o.Log.With("source", "cluster"),
		nodes: map[string]Node{}, holders: map[netip.Prefix][]string{}, refused: map[Key]string{},
	}
}

// Run follows until ctx ends.
func (f *Follower) Run(ctx context.Context) error {
	return watch.Follow(ctx, f.o.Source, f, watch.FollowOptions{
		Max: maxKeys, RetryMin: 50 * time.Millisecond, RetryMax: 2 * time.Second, Log: f.log,
	})
}

// Apply implements watch.Sink. Nodes come before the mappings on them, and go
// after those.
func (f *Follower) Apply(_ context.Context, c watch.Changes[Key, Item]) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var errs []error
	installed := map[string]Installation{}
	ranges := map[netip.Prefix]struct{}{} // whose holder may be another
	changed := false
	if f.o.Local != nil {
		f.local = f.o.Local()
	}
	for k, item := range c.Upserts {
		switch {
		case item.Node != nil:
			changed = true
			installed[k.Node] = Installation{item.Node.Incarnation, tunnelOf(*item.Node)}
			f.hold(k.Node, f.believed(k, *item.Node), ranges)
		case item.On != "":
			if _, ok := f.o.Numbers.Of(item.On); !ok && installed[item.On] == (Installation{}) {
				installed[item.On] = Installation{} // its record comes later
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
	// before a packet goes there by a name
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
	if f.o.Fabric != nil {
		f.o.Fabric.Leave(left)
	}
	f.save()
	err := errors.Join(append(errs, f.tell(gone))...)
	if err == nil {
		f.applied = c.Origin
	}
	return err
}

// Applied returns the point of the store up to which the ipcache has everything; zero: that
// is not known.
func (f *Follower) Applied() watch.Origin {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.applied
}

// Reconsider asks again which nodes are believed.
func (f *Follower) Reconsider() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.doubt()
}

// doubt makes the ipcache doubt the nodes that are not believed. It runs with mu held.
func (f *Follower) doubt() error {
	if f.o.Believes == nil {
		return nil
	}
	doubted := map[uint16]struct{}{}
	for name, number := range f.o.Numbers.Names() {
		if !f.o.Believes(name) {
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

// join tells the fabric which nodes have what is about to be published.
func (f *Follower) join(installed map[string]Installation, ranges map[netip.Prefix]struct{}) {
	if f.o.Fabric == nil {
		return
	}
	var members []Member
	for name := range installed {
		if node, ok := f.nodes[name]; ok {
			number, _ := f.o.Numbers.Of(name)
			members = append(members, Member{name, number, node})
		}
	}
	f.o.Fabric.Join(members)
	f.hand(ranges)
}

// hand tells the fabric whose some ranges are.
func (f *Follower) hand(ranges map[netip.Prefix]struct{}) {
	if f.o.Fabric == nil || len(ranges) == 0 {
		return
	}
	holders := map[netip.Prefix]uint16{}
	for p := range ranges {
		holders[p] = 0
		if names := f.holders[p]; len(names) > 0 {
			holders[p], _ = f.o.Numbers.Of(names[0])
		}
	}
	f.o.Fabric.Hold(holders)
}

// tell says the ranges and addresses of all others to whom it may concern.
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

// publish has the ipcache say one mapping.
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

// isOfNode says whether an address is one of its node's devices, and not one inside a
// range of the node.
func (f *Follower) isOfNode(p netip.Prefix, item Item) bool {
	if item.On == "" || !item.Identity.OfNode() {
		return false
	}
	return !slices.ContainsFunc(f.nodes[item.On].Ranges, func(r netip.Prefix) bool { return r.Contains(p.Addr()) })
}

// refusal says why a mapping is not believed: this process has rights that the
// source has not.
func refusal(p netip.Prefix, id identity.Numeric) string {
	switch {
	case !p.IsValid() || !p.IsSingleIP() || p.Addr().Is4In6():
		return fmt.Sprintf("%v is not the prefix of one address", p)
	case !id.OfNode() && id.Scope() != identity.ScopeCluster:
		return fmt.Sprintf("no address of another node has identity %d", id)
	}
	return ""
}

func (f *Follower) refuse(k Key, why string) {
	f.refused[k] = why
	f.log.Error("what the cluster says is not believed", "node", k.Node, "prefix", k.Prefix, "why", why)
}

// believed is a node without the ranges that no node can have.
func (f *Follower) believed(k Key, n Node) Node {
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

// checkRanges looks again at the ranges that hold an address of a node that came or changed.
func (f *Follower) checkRanges(upserts map[Key]Item, ranges map[netip.Prefix]struct{}) {
	for _, item := range upserts {
		if item.Node == nil {
			continue
		}
		for name, n := range f.nodes {
			around := func(p netip.Prefix) bool { return slices.ContainsFunc(item.Node.Addresses, p.Contains) }
			if slices.ContainsFunc(n.Ranges, around) {
				f.hold(name, f.believed(Key{Node: name}, n), ranges)
			}
		}
	}
}

// checkAround refuses a range around an address by which a node is reached: packets
// from there would be taken for a pod's.
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

// hold notes what a node is, and which ranges have to be looked at.
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

// writeRange has the ipcache say whose a range is. Two nodes have one only while
// it moves between them.
func (f *Follower) writeRange(p netip.Prefix) error {
	holders := f.holders[p]
	if len(holders) == 0 {
		return f.o.Entries.RemoveRemote(p)
	}
	number, _ := f.o.Numbers.Of(holders[0])
	return f.o.Entries.SetRemote(p, ipcache.Remote{Identity: identity.UnknownInCluster, Node: number})
}

// remove ends a node. Its number rests, also while a mapping that the source still
// has is on it.
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
		f.log.Error("numbers of nodes not written", log.Err(err))
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
	// Those of an earlier process that went while this one was not there.
	for name, number := range f.o.Numbers.Names() {
		if _, ok := f.nodes[name]; !ok && !f.o.Entries.InUse(number) {
			f.o.Numbers.Remove(name)
		}
	}
	f.save()
	f.back()
	f.complete, f.err = true, nil
	f.earlier = Others{}
	if f.o.Fabric != nil {
		f.o.Fabric.Leave(left)
		f.o.Fabric.Complete()
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

// back tells that the source answers if it has failed before. It runs with mu held.
func (f *Follower) back() {
	if f.err != nil && f.o.Back != nil {
		f.o.Back()
	}
}

// State is what a follower has.
type State struct {
	Complete bool  // everything was heard, and the source is there
	Err      error // why not
	Nodes    int   // other nodes
	Refused  []string
}

// State of the follower.
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

// Name of the node with a number, as far as it is known.
func (f *Follower) Name(number uint16) string { return f.o.Numbers.Name(number) }

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package registry contains the nodes of a cluster, their ranges of addresses, and the identity of each address in the
// ranges.
//
// This node's record and the addresses of its endpoints are the desired state, this node's keys in the store are the
// actual state, and Run makes them equal whenever the store answers. In the other direction, Observe receives the keys
// of all nodes; the registry decides which of them are valid and publishes these.
//
// A mapping is valid only inside a range of the record of the node that wrote it, and only if the same incarnation of
// that node wrote both. Of overlapping ranges, the ranges of the node that registered first are valid. Therefore
// mappings need neither leases nor locks: a stale mapping of a dead node is harmless until another node claims the
// range, and this claim makes the stale mappings invalid at the same moment.
package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// Errors of the registry and of a Store.
var (
	// ErrForgotten: the store does not have the record of this node as it was written, because the node was forgotten
	// or another incarnation replaced the record.
	ErrForgotten = errors.New("the record of this node is not in the store any more")
	// ErrNoNode: there is no such node.
	ErrNoNode = errors.New("no such node")
	// ErrAlive: the node is alive, so it is not forgotten.
	ErrAlive = errors.New("the node is alive")
	// ErrRecords: the registration could not be written to this node's disk.
	ErrRecords = errors.New("the registration was not written to this node's disk")
	// ErrNotListed: the store has a new history, and its nodes are not known yet.
	ErrNotListed = fmt.Errorf("%w: the nodes in etcd are not listed yet", cluster.ErrUnavailable)
	// ErrNoMapping: no range of a node has the address, and no node wrote a
	// mapping of it.
	ErrNoMapping = errors.New("the address is unknown")
	// ErrUnlisted: the nodes of the cluster were not listed yet, or this node has not registered its addresses yet, so
	// an address without a mapping may belong to any node.
	ErrUnlisted = errors.New("the addresses of the cluster are not known yet")
)

// RoutingMode determines how packets to the pods of a node are carried.
type RoutingMode string

// Routing modes.
const (
	ModeUnset   RoutingMode = ""
	ModeOverlay RoutingMode = "overlay"
	ModeNative  RoutingMode = "native"
)

// Underlay describes where and how a node is reached.
type Underlay struct {
	Addresses  []netip.Addr `json:"addresses,omitempty"` // where other nodes reach it; the preferred of a family first
	Overlay    []netip.Addr `json:"overlay,omitempty"`   // the node's own addresses inside its ranges
	Mode       RoutingMode  `json:"mode,omitempty"`
	TunnelPort uint16       `json:"tunnelPort,omitempty"` // 0: none
	MTU        uint32       `json:"mtu,omitempty"`        // MTU of pods in bytes; 0: unknown
}

func (u Underlay) equal(v Underlay) bool {
	return slices.Equal(u.Addresses, v.Addresses) && slices.Equal(u.Overlay, v.Overlay) &&
		u.Mode == v.Mode && u.TunnelPort == v.TunnelPort && u.MTU == v.MTU
}

// Record is the registration of a node.
type Record struct {
	Incarnation string         `json:"incarnation"`
	Underlay    Underlay       `json:"underlay"`
	Ranges      []netip.Prefix `json:"ranges,omitempty"`
	Version     string         `json:"version,omitempty"`
	// Labels of the node that are part of identities, by key; shared, must not be changed.
	Labels map[string]string `json:"labels,omitempty"`
}

func (r Record) equal(s Record) bool {
	return r.Incarnation == s.Incarnation && r.Underlay.equal(s.Underlay) && slices.Equal(r.Ranges, s.Ranges) &&
		r.Version == s.Version && maps.Equal(r.Labels, s.Labels)
}

// Addresses are the addresses of one endpoint with its identity.
type Addresses struct {
	Addresses   []netip.Addr     `json:"addresses"`
	Identity    identity.Numeric `json:"identity"`
	Incarnation string           `json:"incarnation"` // incarnation of the node that wrote them
}

func (a Addresses) equal(b Addresses) bool {
	return slices.Equal(a.Addresses, b.Addresses) && a.Identity == b.Identity && a.Incarnation == b.Incarnation
}

// Refusal is a range that a node claims but does not have.
type Refusal struct {
	Range  netip.Prefix
	Holder string // node that has the range, or addresses in it
	Reason string // for people
	// Kept means that the node keeps the range with all endpoints in it, but allocates no new addresses from it.
	Kept bool
	// Waits means that the range becomes valid once the store has the assignment of the node.
	Waits bool
	// Differs means that the claim is valid according to the store, but this process keeps the range with the node that
	// had it before the store was rebuilt.
	Differs bool
}

// Node is a node of the cluster, with its valid ranges.
type Node struct {
	Name    string
	Record  Record // with only the valid ranges
	Refused []Refusal
}

// Equal reports whether both are the same.
func (n Node) Equal(m Node) bool {
	return n.Name == m.Name && n.Record.equal(m.Record) && slices.Equal(n.Refused, m.Refused)
}

// Key names a node or the mapping of a prefix; one of its fields is set.
type Key struct {
	Node   string
	Prefix netip.Prefix
}

// Item is the value of a Key. It is small, because there is one for each address in the cluster.
type Item struct {
	Node     *Node            // of a node; shared, must not be changed
	On       string           // of a mapping: the node that has the address; "": none
	Identity identity.Numeric // for a mapping
}

// Equal reports whether both are the same.
func (i Item) Equal(j Item) bool {
	if i.Node == nil || j.Node == nil {
		return i == j
	}
	return i.On == j.On && i.Identity == j.Identity && i.Node.Equal(*j.Node)
}

// Publisher receives and stores the valid nodes and mappings, except this node's own; the registry has no copy.
type Publisher interface {
	Upsert(Key, Item) uint64
	Delete(Key) bool
	Get(Key) (Item, bool)
	Keys() []Key                          // returns the keys of all items that were upserted and not deleted
	Reach(cluster uint64, revision int64) // called when everything up to a revision of the store was passed on
	Loaded()                              // keys that were not upserted do not exist
}

// NodeKey is a node's record in the store.
type NodeKey struct {
	Name    string
	Record  Record
	Created int64 // revision at which the node was registered
	// Revision of the last write.
	Revision int64
}

// Claim is a range that a node claims.
type Claim struct {
	Range  netip.Prefix `json:"range"`
	Former *Former      `json:"former,omitempty"` // nil: the node did not have it in the former store
}

// Former identifies the write of a node's claim of a range, in the store before it was rebuilt.
type Former struct {
	Cluster  uint64 `json:"cluster,string"`
	Revision int64  `json:"revision"`
}

// Slot is a place for one claim of a node. The store records the revision at which it was written.
type Slot struct {
	IPv6   bool
	Number int
}

// String returns the name of the slot.
func (s Slot) String() string {
	if s.IPv6 {
		return fmt.Sprint("ipv6-", s.Number)
	}
	return fmt.Sprint("ipv4-", s.Number)
}

// ParseSlot parses the name of a slot below MostRanges.
func ParseSlot(name string) (s Slot, ok bool) {
	digits, ipv4 := strings.CutPrefix(name, "ipv4-")
	if !ipv4 {
		if digits, s.IPv6 = strings.CutPrefix(name, "ipv6-"); !s.IPv6 {
			return s, false
		}
	}
	n, err := strconv.Atoi(digits)
	s.Number = n
	return s, err == nil && n >= 0 && n < MostRanges && s.String() == name
}

// ClaimKey is a claim in the store.
type ClaimKey struct {
	Node     string
	Slot     Slot
	Claim    Claim
	Revision int64 // revision at which the slot was written: the age of the claim
}

// IPAMKey holds the settings of ipam in the store.
type IPAMKey struct {
	Settings IPAM
	Revision int64
}

// RestKey is a range in quarantine: for a while, only its node may claim it.
type RestKey struct {
	Node  string
	Range netip.Prefix
}

// AddressesKey holds the addresses of an endpoint in the store.
type AddressesKey struct {
	Node     string
	Endpoint string // name of its key below the node's
	Value    Addresses
	Revision int64 // revision of the last write
}

// Removal is a deleted key: of an endpoint, a slot, a range in quarantine or an assignment if the field is set,
// otherwise a node's record.
type Removal struct {
	Node, Endpoint, Slot string
	Rest                 netip.Prefix
	// Assignment: the deleted key is the assignment of Node.
	Assignment bool
	Revision   int64
}

// ofRecord reports whether the key is a node's record.
func (r Removal) ofRecord() bool {
	return r.Endpoint == "" && r.Slot == "" && !r.Rest.IsValid() && !r.Assignment
}

// Update is a listing of the store or a change of it.
type Update struct {
	Complete bool // Nodes and Addresses are everything at Revision
	// Heard is a time up to which the store had no later changes than this update; zero: unknown.
	Heard    time.Time
	Cluster  uint64
	Revision int64
	Nodes    []NodeKey
	Claims   []ClaimKey
	Resting  []RestKey
	IPAM     *IPAMKey // nil: unchanged; in a complete update: the cluster has none
	// Assigned is set if the store has the assignments of all nodes, and Unassigned if the key that marks this was
	// removed.
	Assigned    bool
	Unassigned  bool
	Assignments []AssignmentKey
	Addresses   []AddressesKey
	Removed     []Removal
}

// Change is a write of one endpoint's addresses; Value is nil for a removal.
type Change struct {
	Endpoint string
	Value    *Addresses
}

// Statement is the data that Register writes.
type Statement struct {
	Record       Record
	KeepUnderlay bool  // keep the underlay of the record in the store: none is registered
	IPAM         *IPAM // nil: unknown
	Cluster      Ranges
}

// Ranges tells a Store what this node knows about the ranges of all nodes.
type Ranges interface {
	// Holder returns a valid or pinned range of another node that overlaps p, and that node; "" if there is no such range.
	Holder(p netip.Prefix) (node string, held netip.Prefix)
	// Mine reports whether this node had a range before the store was rebuilt, and returns its claim of that time; nil:
	// unknown.
	Mine(p netip.Prefix) (had bool, former *Former)
	// Settings returns the current and the former settings of ipam in this store that this node
	// knows, newest first.
	Settings() []FormerIPAM
	// Resting reports whether a range is in quarantine for that node.
	Resting(p netip.Prefix, node string) bool
	// Assigned reports whether a range is assigned to this node.
	Assigned(p netip.Prefix) bool
	// Seen returns the point up to which this node has received the changes of the store.
	Seen() cluster.Point
}

// Written is the result of Register.
type Written struct {
	Record   Record // with the ranges that the node got
	Revision int64  // revision of the record, for Publish
	Refused  []Refusal
}

// Store is the shared store of a cluster's nodes. It returns errors of package cluster and of this package.
type Store interface {
	// Register writes the record of this node, and claims its ranges in the same transaction. It leaves out ranges that
	// other nodes hold, or all ranges if the cluster has other ipam settings. It removes the mappings of an earlier
	// incarnation of the node.
	Register(ctx context.Context, s Statement) (Written, error)
	// Own reads the record of this node; zero if the store does not contain it.
	Own(ctx context.Context) (r Record, revision int64, err error)
	// Agrees returns ErrIPAMDiffers if the cluster has different settings.
	Agrees(ctx context.Context, s IPAM) error
	// ClaimRange finds a free block, and adds it to the record in the same transaction. It returns ErrForgotten if the
	// record changed since the claim's revision, ErrIPAMDiffers, and ErrNoFreeRange.
	ClaimRange(ctx context.Context, c RangeClaim) (p netip.Prefix, revision int64, err error)
	// Publish writes addresses of endpoints, at most MaxChanges, in one transaction. It returns ErrForgotten if the
	// record changed since that revision.
	Publish(ctx context.Context, record int64, changes []Change) (revision int64, err error)
	// Forget removes the record and the mappings of a node, puts its ranges into quarantine, and returns the record;
	// with validateOnly nothing changes. Its errors are ErrNoNode and, without force, ErrAlive.
	Forget(ctx context.Context, node string, force, validateOnly bool) (Record, error)
	// Alive returns the names of the nodes that are alive.
	Alive(ctx context.Context) (map[string]bool, error)
	// Assign writes and removes assignments, and marks that the store has the assignments of all nodes.
	Assign(ctx context.Context, put []AssignmentKey, drop []string) error
}

// MaxChanges is the largest number of changes that Publish accepts.
const MaxChanges = 100

// Records saves registrations and pins on this node's disk.
type Records interface {
	SaveRegistration(Registration) error
	SavePins([]Pin) error // replaces the former ones
}

// Registration holds the registrations of this node's other processes. A part that is nil was never registered.
type Registration struct {
	Underlay *Underlay       `json:"underlay,omitempty"`
	Ranges   *[]netip.Prefix `json:"ranges,omitempty"` // sorted
	IPAM     *IPAM           `json:"ipam,omitempty"`
	// Labels that are part of identities, by key.
	Labels *map[string]string `json:"labels,omitempty"`
}

// with returns g, changed by the non-nil parts of said.
func (g Registration) with(said Registration) Registration {
	if said.Underlay != nil {
		g.Underlay = said.Underlay
	}
	if said.Ranges != nil {
		list := sorted(*said.Ranges)
		g.Ranges = &list
	}
	if said.IPAM != nil {
		g.IPAM = said.IPAM
	}
	if said.Labels != nil {
		g.Labels = said.Labels
	}
	return g
}

// labels returns the labels that are part of identities; nil without labels.
func (g Registration) labels() map[string]string {
	if g.Labels == nil {
		return nil
	}
	return *g.Labels
}

func sorted(ranges []netip.Prefix) []netip.Prefix {
	return slices.SortedFunc(slices.Values(ranges), netip.Prefix.Compare)
}

func (g Registration) equal(h Registration) bool {
	if (g.Underlay == nil) != (h.Underlay == nil) || (g.Ranges == nil) != (h.Ranges == nil) ||
		(g.IPAM == nil) != (h.IPAM == nil) || (g.Labels == nil) != (h.Labels == nil) ||
		!maps.Equal(g.labels(), h.labels()) {
		return false
	}
	return (g.IPAM == nil || g.IPAM.Equal(*h.IPAM)) && (g.Underlay == nil || g.Underlay.equal(*h.Underlay)) &&
		(g.Ranges == nil || slices.Equal(*g.Ranges, *h.Ranges))
}

// Config of a Registry. Every field but the last is required.
type Config struct {
	Node        string
	Incarnation string
	Version     string
	Timeout     time.Duration // timeout of one request to the store
	Pause       time.Duration // pause between two writes: changes in between go into the second one
	// Gather is the time that the first endpoint waits for others. The ADD of that endpoint also ends on this node
	// before etcd and every other node process the endpoint.
	Gather      time.Duration
	RetryMin    time.Duration // first pause after the store failed; doubles
	RetryMax    time.Duration // longest pause
	RetryRanges time.Duration // pause between two attempts to claim ranges that other nodes have
	// HoldLosses is the time for which entries stay in effect after a listing that lacks more than half of the nodes or
	// mappings.
	HoldLosses time.Duration
	// StaleMappings is the time for which a node that is cut off from the store may trust its mappings.
	StaleMappings time.Duration
	// NodeLabels is set if SetNodeSets is called whenever Labels changes: addresses of nodes with labels wait for it.
	NodeLabels bool
	Log        *slog.Logger
	// BootTime returns a clock that continues while the machine sleeps. Tests may leave it nil, and then use the clock
	// of package time.
	BootTime func() time.Duration
}

// Registry is the core. Its methods may be called concurrently.
type Registry struct {
	cfg     Config
	store   Store
	records Records
	pub     Publisher
	wake    chan struct{} // capacity 1: there may be something to write
	hurry   chan struct{} // capacity 1: a caller waits for an endpoint whose write is being batched
	expired chan struct{} // capacity 1: some held-back removals may be due

	storing     chan struct{} // capacity 1: one write to the store at a time
	registering sync.Mutex    // serialises changes of the registration

	mu           sync.Mutex
	registration Registration         // guarded by mu
	desired      map[string]Addresses // guarded by mu; addresses of this node's endpoints, by endpoint
	dirty        map[string]struct{}  // guarded by mu; endpoints whose addresses may differ in the store
	touched      time.Time            // guarded by mu; when the first endpoint was added to dirty
	writing      map[string]struct{}  // guarded by mu; endpoints that are being written
	changed      chan struct{}        // guarded by mu; closed when an endpoint was written, or could not be
	up           bool                 // guarded by mu; the node has its name in the store
	written      map[string]int64     // guarded by mu; revision of the last write, until Observe receives it
	observed     int64                // guarded by mu; Observe has received everything up to this revision
	record       Record               // guarded by mu; this node's record as it was written
	revision     int64                // guarded by mu; revision of record; 0: the record has to be written
	refused      []Refusal            // guarded by mu; the ranges that Register refused
	problem      error                // guarded by mu; error of the last write
	view         view                 // guarded by mu
	savedPins    []Pin                // guarded by mu; the pins that the disk has
	assigning    error                // guarded by mu; error of the last Assign
	mappings     mappings             // guarded by mu
	current      current              // guarded by mu; when this process last had all changes in the store
	heard        current              // guarded by mu; when the kernel last had them, too
	// guarded by mu; point up to which the kernel has every change of nodes and mappings; zero: unknown
	applied cluster.Point
	// guarded by mu; some removals up to this revision were held back, so a node that has applied it may not have
	// applied these removals
	lagged int64
	// guarded by mu; revision at which the store had no record of this node; 0: it always had one
	lost        int64
	reached     func()        // guarded by mu; tells readers the point that they have reached; nil: they have been told
	listing     bool          // guarded by mu; readers do not know yet that a complete listing was received
	here        bool          // guarded by mu; an API server has an address of this node
	hereChanged chan struct{} // guarded by mu; closed when here changes
	// guarded by mu; closed when labels of a node, or the nodes with an API server, change
	relabelled chan struct{}
}

// New returns a Registry that begins with the registration of the previous process.
func New(cfg Config, store Store, records Records, pub Publisher, last Registration) *Registry {
	r := &Registry{
		cfg: cfg, store: store, records: records, pub: pub, registration: last,
		wake: make(chan struct{}, 1), hurry: make(chan struct{}, 1), expired: make(chan struct{}, 1),
		changed: make(chan struct{}), storing: make(chan struct{}, 1),
		desired: map[string]Addresses{}, dirty: map[string]struct{}{}, written: map[string]int64{},
		writing: map[string]struct{}{}, mappings: newMappings(),
		hereChanged: make(chan struct{}), relabelled: make(chan struct{}),
	}
	r.view.init(cfg.Node)
	r.view.setOwn(last.Underlay)
	r.view.numbers = cfg.NodeLabels
	return r
}

func (r *Registry) kick() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// recordOf returns the record that this node writes for a registration.
func (r *Registry) recordOf(g Registration) (rec Record) {
	rec = Record{Incarnation: r.cfg.Incarnation, Version: r.cfg.Version, Labels: g.labels()}
	if g.Ranges != nil {
		rec.Ranges = *g.Ranges
	}
	if g.Underlay != nil {
		rec.Underlay = *g.Underlay
	}
	return rec
}

// Register changes the record of this node; a nil part keeps its last value. The change is saved on the disk before
// Register returns; registered reports whether the store, which decides about ranges, has it too. With validateOnly
// nothing changes.
func (r *Registry) Register(ctx context.Context, said Registration, validateOnly bool) (n Node, registered bool,
	err error,
) {
	r.registering.Lock()
	defer r.registering.Unlock()
	r.mu.Lock()
	next := r.registration.with(said)
	same := next.equal(r.registration)
	n = Node{Name: r.cfg.Node, Record: r.recordOf(next), Refused: r.refusals()}
	if !same {
		n.Refused = r.overlaps(n)
	}
	registered = same && r.revision != 0
	r.mu.Unlock()
	if same && !registered && !validateOnly {
		r.kick() // An earlier change may have failed between the write to the disk and the write to the store.
	}
	if same || validateOnly {
		return n, registered, nil
	}
	err = faultRegisterStart.Hit(ctx)
	if err == nil {
		err = r.records.SaveRegistration(next)
	}
	if err != nil {
		return Node{}, false, fmt.Errorf("%w: %w", ErrRecords, err)
	}
	r.mu.Lock()
	r.registration, r.revision = next, 0
	r.view.setOwn(next.Underlay)
	r.locate()
	r.relabel()
	r.publish()
	r.mu.Unlock()
	r.kick()
	if err := faultRegisterSaved.Hit(ctx); err != nil {
		return Node{}, false, fmt.Errorf("%w: %w", ErrRecords, err)
	}
	return n, false, nil
}

// refusals returns the ranges of this node that other nodes have: those that the store refused, and those that
// overlap. Called with mu held.
func (r *Registry) refusals() []Refusal {
	out := slices.Clone(r.refused)
	if own := r.view.nodes[r.cfg.Node]; own != nil {
		for _, f := range own.refused {
			if !f.Waits { // if the range waits for the assignment, this node's ipam knows that
				out = append(out, f)
			}
		}
	}
	return out
}

// overlaps returns which ranges of a node's new registration would be refused, according to the known ranges of
// others. Called with mu held.
func (r *Registry) overlaps(n Node) []Refusal {
	out := n.Refused
	for _, p := range n.Record.Ranges {
		holder, held := r.view.heldByOther(p, r.cfg.Node)
		if holder == "" || slices.ContainsFunc(out, func(f Refusal) bool { return f.Range == p }) {
			continue
		}
		out = append(out, Refusal{Range: p, Holder: holder, Reason: fmt.Sprintf("node %s has %s", holder, held)})
	}
	return out
}

// knownRanges implements Ranges.
type knownRanges struct{ r *Registry }

func (k knownRanges) Holder(p netip.Prefix) (string, netip.Prefix) {
	k.r.mu.Lock()
	defer k.r.mu.Unlock()
	return k.r.view.heldByOther(p, k.r.cfg.Node)
}

func (k knownRanges) Mine(p netip.Prefix) (bool, *Former) {
	k.r.mu.Lock()
	defer k.r.mu.Unlock()
	v := &k.r.view
	had := v.pins[p] == k.r.cfg.Node
	if former, ok := v.former[p]; had && ok {
		return had, &former
	}
	return had, nil
}

func (k knownRanges) Settings() []FormerIPAM {
	k.r.mu.Lock()
	defer k.r.mu.Unlock()
	return k.r.view.settingsUntilNow()
}

func (k knownRanges) Resting(p netip.Prefix, node string) bool {
	k.r.mu.Lock()
	defer k.r.mu.Unlock()
	return k.r.view.resting.has(RestKey{Node: node, Range: p})
}

func (k knownRanges) Assigned(p netip.Prefix) bool {
	k.r.mu.Lock()
	defer k.r.mu.Unlock()
	return slices.Contains(k.r.view.assigned.of[k.r.cfg.Node].Ranges, p)
}

func (k knownRanges) Seen() cluster.Point {
	k.r.mu.Lock()
	defer k.r.mu.Unlock()
	return k.r.view.at
}

// Set sets the addresses and the identity of an endpoint of this node. Without an address, or with an identity that
// other nodes do not know, it has no mapping.
func (r *Registry) Set(endpoint string, addresses []netip.Addr, id identity.Numeric) {
	r.mu.Lock()
	defer r.mu.Unlock()
	have, ok := r.desired[endpoint]
	if len(addresses) == 0 || id.Scope() != identity.ScopeCluster {
		if ok {
			delete(r.desired, endpoint)
			r.touch(endpoint)
		}
		return
	}
	want := Addresses{Addresses: addresses, Identity: id, Incarnation: r.cfg.Incarnation}
	if !ok || !have.equal(want) {
		r.desired[endpoint] = want
		r.touch(endpoint)
	}
}

// Remove removes the mapping of an endpoint of this node.
func (r *Registry) Remove(endpoint string) { r.Set(endpoint, nil, 0) }

// touch is called with mu held.
func (r *Registry) touch(endpoint string) {
	if len(r.dirty) == 0 {
		r.touched = time.Now()
	}
	r.dirty[endpoint] = struct{}{}
	r.kick()
}

// Run writes the record and the mappings of this node until ctx is done. session returns whether the node owns its name
// in the store, and a channel that is closed when that may have changed.
func (r *Registry) Run(ctx context.Context, session func() (up bool, changed <-chan struct{})) error {
	var wait time.Duration
	for ctx.Err() == nil {
		up, changed := session()
		r.setUp(up)
		var err error
		if up {
			err = r.write(ctx)
		}
		var retry <-chan time.Time
		switch {
		case err == nil:
			wait = 0
			if r.refusedRanges() {
				retry = time.After(r.cfg.RetryRanges)
			}
		case ctx.Err() != nil:
			return nil
		default:
			wait = min(max(2*wait, r.cfg.RetryMin), r.cfg.RetryMax)
			retry = time.After(wait)
			changed = nil // the store's state decides when to continue
		}
		r.noteProblem(err)
		wake := r.wake
		if !up || err != nil {
			wake = nil
		}
		select {
		case <-wake:
			r.gather(ctx)
		case <-changed:
		case <-retry:
			r.claimAgain()
		case <-r.expired:
			r.obey()
		case <-ctx.Done():
		}
	}
	return nil
}

// gather waits until the first endpoint has waited for long enough, unless there is
// a record to write.
func (r *Registry) gather(ctx context.Context) {
	r.mu.Lock()
	wait := time.Until(r.touched.Add(r.cfg.Gather))
	if r.revision == 0 || len(r.dirty) == 0 {
		wait = 0
	}
	r.mu.Unlock()
	if wait <= 0 {
		return
	}
	select {
	case <-time.After(wait):
	case <-r.hurry:
	case <-ctx.Done():
	}
}

func (r *Registry) refusedRanges() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.refused) > 0
}

// claimAgain makes Run claim the ranges again that another node had.
func (r *Registry) claimAgain() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.refused) > 0 {
		r.revision = 0
	}
}

func (r *Registry) noteProblem(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil && r.problem == nil && !errors.Is(err, ErrNotListed) {
		r.cfg.Log.Warn("the record or the mappings of this node do not reach etcd; the service tries again", "error",
			err)
	}
	r.problem = err
	r.wakeWaiters()
}

// setUp records whether the node owns its name in the store.
func (r *Registry) setUp(up bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.up = up
	r.noteHeard(up)
	r.wakeWaiters()
}

// wakeWaiters wakes callers that wait for an endpoint. Called with mu held.
func (r *Registry) wakeWaiters() {
	close(r.changed)
	r.changed = make(chan struct{})
}

// Await returns true once the store has the addresses of an endpoint of this node, which are written without batching.
// It returns false if the store does not accept them, or if ctx ends first.
func (r *Registry) Await(ctx context.Context, endpoint string) bool {
	for {
		r.mu.Lock()
		_, dirty := r.dirty[endpoint]
		_, writing := r.writing[endpoint]
		away, settled := !r.up || r.problem != nil, r.changed
		r.mu.Unlock()
		switch {
		case !dirty && !writing:
			return true
		case away:
			return false
		case dirty:
			select {
			case r.hurry <- struct{}{}:
			default:
			}
		}
		select {
		case <-settled:
		case <-ctx.Done():
			return false
		}
	}
}

// write makes the keys of this node in the store equal to its desired state.
func (r *Registry) write(ctx context.Context) error {
	for {
		wrote, err := r.writeSome(ctx)
		if err != nil || !wrote {
			return err
		}
		// Every write causes a message to every node, so changes within the pause share one write.
		select {
		case <-time.After(r.cfg.Pause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// writeSome writes the record, if necessary, and some endpoints, and reports whether it wrote any.
func (r *Registry) writeSome(ctx context.Context) (wrote bool, err error) {
	if err := r.lockStore(ctx); err != nil {
		return false, err
	}
	defer r.unlockStore()
	if err := r.writeRecord(ctx); err != nil {
		return false, err
	}
	record, changes := r.batch()
	if len(changes) == 0 {
		return false, nil
	}
	revision, err := r.publishNow(ctx, record, changes)
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.writing)
	r.wakeWaiters()
	for _, c := range changes {
		if err == nil {
			var addresses []netip.Addr
			if c.Value != nil {
				addresses = c.Value.Addresses
			}
			r.mappings.wrote(c.Endpoint, addresses, removal{time.Now(), revision})
		}
		if err != nil {
			r.dirty[c.Endpoint] = struct{}{}
		} else if revision > r.observed { // otherwise Observe has already received the write
			r.written[c.Endpoint] = revision
		}
	}
	if errors.Is(err, ErrForgotten) {
		r.refresh()
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("publish %d endpoints: %w", len(changes), err)
	}
	return true, nil
}

// publishNow writes a batch of endpoints.
func (r *Registry) publishNow(ctx context.Context, record int64, changes []Change) (revision int64, err error) {
	if err := faultPublishStart.Hit(ctx); err != nil {
		return 0, err
	}
	limited, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	if revision, err = r.store.Publish(limited, record, changes); err != nil {
		return 0, err
	}
	return revision, faultPublishWritten.Hit(ctx)
}

// refresh makes Run write everything again. Called with mu held.
func (r *Registry) refresh() {
	r.revision = 0
	for endpoint := range r.desired {
		r.dirty[endpoint] = struct{}{}
	}
	r.kick()
}

// writeRecord registers this node, unless it is registered or its ranges are unknown. Called with storing held.
func (r *Registry) writeRecord(ctx context.Context) error {
	r.mu.Lock()
	said := r.registration
	r.mu.Unlock()
	s := Statement{
		Record: r.recordOf(said), KeepUnderlay: said.Underlay == nil, IPAM: said.IPAM, Cluster: knownRanges{r},
	}
	r.mu.Lock()
	// Before a listing, the holders of ranges are unknown.
	done := r.revision != 0 || said.Ranges == nil || !r.view.listed
	r.mu.Unlock()
	if done {
		return nil
	}
	limited, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	if err := faultRecordStart.Hit(ctx); err != nil {
		return fmt.Errorf("register this node: %w", err)
	}
	written, err := r.store.Register(limited, s)
	if err == nil {
		err = faultRecordWritten.Hit(ctx)
	}
	if err != nil {
		return fmt.Errorf("register this node: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range written.Refused {
		if !slices.Contains(r.refused, f) {
			r.cfg.Log.Error("a range of this node is refused: endpoints in it are unknown to the cluster", "range",
				f.Range, "holder", f.Holder, "reason", f.Reason)
		}
	}
	r.refused = written.Refused
	if r.registration.equal(said) {
		r.record, r.revision = written.Record, written.Revision
	}
	r.view.wrote = written.Record.Ranges
	return nil
}

// batch returns the next endpoints to write.
func (r *Registry) batch() (record int64, changes []Change) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.revision != 0 && r.lost > r.revision {
		r.refresh() // Observe received the loss of the record before Register returned.
	}
	if r.revision == 0 || !r.view.listed { // Without a listing, every endpoint would seem to be missing in the store.
		return 0, nil
	}
	for endpoint := range r.dirty {
		if len(changes) == MaxChanges {
			break
		}
		delete(r.dirty, endpoint)
		c := Change{Endpoint: endpoint}
		if want, ok := r.desired[endpoint]; ok {
			c.Value = &want
		}
		changes = append(changes, c)
	}
	for _, c := range changes {
		r.writing[c.Endpoint] = struct{}{}
		if c.Value != nil {
			r.mappings.try(c.Endpoint, c.Value.Addresses)
		}
		// Endpoints that an earlier process wrote are in the store, too.
		if own := r.view.nodes[r.cfg.Node]; own != nil && own.endpoints.byName[c.Endpoint] != nil {
			r.mappings.try(c.Endpoint, own.endpoints.byName[c.Endpoint].addresses)
		}
	}
	return r.revision, changes
}

// Observe applies a listing or a change of the keys of all nodes.
func (r *Registry) Observe(u Update) {
	defer r.saveChangedPins()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.compareOwn(u)
	if u.Complete && r.view.rebuilt(u) {
		r.mappings.rebuilt()
		r.applied, r.current = cluster.Point{}, current{}
	}
	if r.view.apply(u) {
		r.relabel()
	}
	r.noteFreed(u.Revision)
	r.noteHeard(r.up)
	if !u.Heard.IsZero() {
		r.current = current{r.bootTime() - time.Since(u.Heard), u.Revision}
	}
	if u.Complete {
		if until, lost := r.view.holdBack(r.pub.Keys, r.cfg.HoldLosses); lost != "" {
			r.cfg.Log.Error("the store lacks most of its former content; missing entries stay in effect for a while",
				"missing", lost, "for", r.cfg.HoldLosses)
			time.AfterFunc(time.Until(until), func() {
				select {
				case r.expired <- struct{}{}:
				default:
				}
			})
		}
	}
	r.reached = func() {
		r.pub.Reach(u.Cluster, u.Revision)
		if r.listing {
			r.listing = false
			r.pub.Loaded()
		}
	}
	r.listing = r.listing || u.Complete
	r.publish()
}

// obey applies the removals that were held back and whose delay has passed.
func (r *Registry) obey() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.view.release(); n > 0 {
		r.lagged = r.observed
		r.cfg.Log.Warn("entries are still missing in the store and are removed", "nodes and mappings", n)
	}
	r.publish()
}

// publish publishes the changes of valid nodes and mappings. It calls reached once no address waits for the number of
// labels. Called with mu held.
func (r *Registry) publish() {
	for _, c := range r.view.changes(r.pub.Get) {
		if c.gone {
			r.pub.Delete(c.key)
		} else {
			r.pub.Upsert(c.key, c.item)
		}
	}
	if r.reached != nil && len(r.view.touched) == 0 {
		r.reached()
		r.reached = nil
	}
}

// compareOwn finds the keys of this node that differ between the store and the desired state. Called with mu held.
func (r *Registry) compareOwn(u Update) {
	r.observed = u.Revision
	seen := map[string]bool{}
	for _, k := range u.Addresses {
		if k.Node != r.cfg.Node {
			continue
		}
		seen[k.Endpoint] = true
		if !r.isNew(k.Endpoint, k.Revision) {
			continue
		}
		if want, ok := r.desired[k.Endpoint]; ok && want.equal(k.Value) {
			delete(r.dirty, k.Endpoint)
		} else {
			r.touch(k.Endpoint)
		}
	}
	registered := false
	for _, n := range u.Nodes {
		if n.Name == r.cfg.Node {
			registered = true
			switch {
			case r.revision == 0:
			case n.Record.Incarnation != r.cfg.Incarnation:
				r.refresh()
			case n.Revision > r.revision && !slices.Equal(n.Record.Ranges, r.record.Ranges):
				// Another node has taken a range of this one.
				r.revision = 0
				r.kick()
			}
		}
	}
	for _, gone := range u.Removed {
		switch {
		case gone.Node != r.cfg.Node, gone.Assignment, gone.Rest.IsValid():
		case gone.Endpoint == "":
			r.lose(gone.Revision)
		case r.isNew(gone.Endpoint, gone.Revision):
			if _, ok := r.desired[gone.Endpoint]; ok {
				r.touch(gone.Endpoint)
			}
		}
	}
	if !u.Complete {
		return
	}
	r.kick()
	for endpoint := range r.desired {
		if !seen[endpoint] && r.isNew(endpoint, u.Revision) {
			r.touch(endpoint)
		}
	}
	r.lost = 0 // the revision may belong to another history
	if !registered {
		r.lose(u.Revision)
	}
}

// lose records that the store had no record of this node at a revision. Called with mu held.
func (r *Registry) lose(at int64) {
	r.lost = at
	if r.revision != 0 && at > r.revision {
		r.refresh()
	}
}

// isNew reports whether a revision of an endpoint in the store is not older than
// this node's own last write. Called with mu held.
func (r *Registry) isNew(endpoint string, revision int64) bool {
	if revision < r.written[endpoint] {
		return false
	}
	delete(r.written, endpoint)
	return true
}

// Status is a summary.
type Status struct {
	Registered bool // the store has the registration of this node
	Nodes      int  // others
	Mappings   int  // valid mappings of other nodes
	Refused    int  // invalid mappings
	Pending    int  // endpoints that wait to be written
	Ranges     []Refusal
	Overlaps   []Overlap // of other nodes
	Problem    error     // why endpoints wait; nil if none waits
	// Unassigned is the reason why claims are not compared with the podCIDRs of Nodes in mode kubernetes.
	Unassigned error
}

// Overlap is a range, or an address of a node itself, that another node claims but does not have. If Claimed is not
// set, the node had it before the store was rebuilt and has not claimed it again.
type Overlap struct {
	Node    string
	Claimed bool
	Refusal
}

// Status returns a summary.
func (r *Registry) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.view.status()
	s.Registered = r.revision != 0
	s.Pending, s.Problem, s.Ranges = len(r.dirty)+len(r.writing), r.problem, r.refusals()
	s.Overlaps, s.Unassigned = append(r.view.overlaps(), r.view.contestedAddresses()...), r.assignmentProblem()
	return s
}

// Known is a node, with the state that this node knows.
type Known struct {
	Node              Node
	Mappings, Refused int
}

// Nodes returns all registered nodes, including this one, sorted by name. It includes nodes that the store lacks and
// that are still in effect.
func (r *Registry) Nodes() []Known {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []Known
	for _, name := range r.view.names() {
		if r.view.lost(name) {
			if item, ok := r.pub.Get(Key{Node: name}); ok {
				out = append(out, Known{Node: *item.Node, Mappings: r.view.counted[name]})
			}
		} else if n := r.view.nodes[name]; n != nil && n.registered {
			counted, refused := r.view.count(n)
			k := Known{Node: r.view.node(n), Mappings: counted, Refused: refused}
			if name == r.cfg.Node {
				k.Node.Refused = r.refusals()
			}
			out = append(out, k)
		}
	}
	return out
}

// Alive returns the names of the nodes that are alive.
func (r *Registry) Alive(ctx context.Context) (map[string]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	return r.store.Alive(ctx)
}

// Forget removes the record and the mappings of a node, and returns the state that this node knew; see Store.Forget.
// The store decides whether the node exists, because the copy on this node may be outdated: a running node that was
// forgotten may have registered again.
func (r *Registry) Forget(ctx context.Context, node string, force, validateOnly bool) (Known, error) {
	known := Known{Node: Node{Name: node}}
	for _, k := range r.Nodes() {
		if k.Node.Name == node {
			known = k
		}
	}
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	record, err := r.store.Forget(ctx, node, force, validateOnly)
	if err != nil {
		return Known{}, err
	}
	if record.Incarnation != "" { // else it could not be read
		known.Node.Record = record
	}
	return known, nil
}

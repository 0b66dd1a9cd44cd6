// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// Errors of a Store that every part of the service has that keeps something in it.
var (
	ErrUnavailable = cluster.ErrUnavailable
	ErrNoSpace     = cluster.ErrNoSpace
	ErrSessionLost = cluster.ErrSessionLost
	ErrNameTaken   = cluster.ErrNameTaken
)

// Errors of a Store of identities.
var (
	// ErrOccupied: the candidate is another label set's, or in quarantine.
	ErrOccupied = errors.New("number is occupied")
	// ErrConflict: the number now has another label set, or the label set another number. It is always a *ConflictError.
	ErrConflict = errors.New("identity conflict")
	// ErrLayout: the store is kept by a newer version.
	ErrLayout = errors.New("layout of the store is newer than this version")
	// ErrCorrupt: the store has content that Sluice never writes.
	ErrCorrupt = errors.New("store content is corrupt")
)

// ConflictError describes what the store has in place of an identity that this node held.
type ConflictError struct {
	Held     identity.Identity
	Occupant identity.Identity // present owner of the number; zero if it is free
	Revision int64             // of the store, at which Occupant got the number
	Moved    identity.Numeric  // present number of the label set; 0 if it has none
}

func (e *ConflictError) Error() string {
	switch {
	case !e.Occupant.Labels.IsZero():
		return fmt.Sprintf("%v: number %d now belongs to %s, not to %s", ErrConflict, e.Held.Number, e.Occupant.Labels,
			e.Held.Labels)
	case e.Moved != 0:
		return fmt.Sprintf("%v: %s has the number %d now, not %d", ErrConflict, e.Held.Labels, e.Moved, e.Held.Number)
	}
	return fmt.Sprintf("%v: number %d is in quarantine after another label set had it", ErrConflict, e.Held.Number)
}

// Is reports whether target is ErrConflict.
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }

// Claim is the result of Store.Claim and Store.Restore.
type Claim struct {
	Number   identity.Numeric
	Revision int64 // of the reference that was written
	Created  bool  // the label set had no number before
}

// Reference is one of this node's references in the store.
type Reference struct {
	Number   identity.Numeric
	Revision int64 // of its last write
	Present  bool  // of the present session; else it ends with the session that wrote it
}

// Candidate is an identity without references, and the revisions that later prove that it is still unused.
type Candidate struct {
	Identity identity.Identity
	Fence    int64 // revision at which a node last referred to the identity
}

// References is one step of Store.FollowReferences.
type References struct {
	Complete bool                     // all references as of Revision; otherwise changes of the former ones
	Revision int64                    // everything up to it is counted
	Numbers  map[identity.Numeric]int // how many nodes refer to a number
	Nodes    map[string]int           // how many numbers a node refers to
}

// Entry is an identity from a listing or a watch of the store.
type Entry struct {
	Identity identity.Identity
	Revision int64
}

// Deletion is a number that was collected.
type Deletion struct {
	Number   identity.Numeric
	Revision int64
}

// Update is one step of Store.Follow.
type Update struct {
	Complete bool   // Upserts is everything there is at Revision
	Reset    bool   // with Complete: older revisions belong to another store's history
	Cluster  uint64 // names the store that Revision is of
	Revision int64  // everything up to it is here, or was before
	Upserts  []Entry
	Deletes  []Deletion
	Beside   bool // the records save other changes together with the known identities
	// Heard is a time up to which this update and earlier ones contain all changes. Zero if unknown.
	Heard time.Time
}

// Store is the memory that all nodes of a cluster share. Revisions grow with
// every change of it.
//
// Every method returns an error that is ErrUnavailable when the store does not
// answer before ctx is done. All may be called concurrently.
type Store interface {
	// Join makes sure that this node has a session. fresh reports a new one: references written before it were or will
	// be deleted. ErrNameTaken if another node has a session of this name.
	Join(ctx context.Context) (fresh bool, err error)
	// Session names the session, so that the next process of this node can continue it.
	Session() string
	// Ping checks the session: nil, ErrSessionLost, ErrNameTaken or ErrUnavailable. The store keeps it alive by
	// itself.
	Ping(ctx context.Context) error
	// Severed returns once the store has no connection, with ErrUnavailable and why,
	// or with ctx's error. A store that is connected and does not answer is found by
	// Ping.
	Severed(ctx context.Context) error
	// Claim refers to the number of a label set, atomically. known is the number that it probably has, or 0. If it has
	// none, it gets candidate; ErrOccupied if that is not free.
	Claim(ctx context.Context, labels label.Canonical, known, candidate identity.Numeric) (Claim, error)
	// Restore refers to an identity that this node held before, and creates it again if it was removed. ErrConflict if
	// the number or the label set belongs to another identity.
	Restore(ctx context.Context, id identity.Identity) (Claim, error)
	// Renew restores the identities that exist unchanged, in few steps, and returns the written references.
	Renew(ctx context.Context, ids []identity.Identity) ([]Claim, error)
	// Release drops references that were not written again since.
	Release(ctx context.Context, refs ...Reference) error
	// References lists this node's references.
	References(ctx context.Context) ([]Reference, error)
	// Follow hands every identity to sink, then every change, in order, and
	// returns only with an error or when ctx is done. A gap in the changes
	// becomes a new complete listing. Update.Heard comes again and again as
	// long as the store answers, also without a change.
	Follow(ctx context.Context, sink func(Update)) error
	// FollowReferences hands the counts of references of all nodes to sink, then
	// every change of them, in order, as Follow does.
	FollowReferences(ctx context.Context, sink func(References)) error
	// Lead makes this node the collector if the cluster has no collector, and reports whether this node is the
	// collector. The role lasts as long as the session.
	Lead(ctx context.Context) (bool, error)
	// Candidates reads the revisions that later prove that identities are still unused.
	Candidates(ctx context.Context, unused []identity.Identity) ([]Candidate, error)
	// Collect removes the candidates that are unchanged since they were listed, and returns their numbers. They are in
	// quarantine for the time rest: no other label set gets them.
	Collect(ctx context.Context, unused []Candidate, rest time.Duration) ([]identity.Numeric, error)
	// Resting lists the numbers that rest.
	Resting(ctx context.Context) ([]identity.Numeric, error)
	// PublishNumbers publishes to all nodes how many numbers tenants have. ErrDenied if the store does not let this
	// node write it.
	PublishNumbers(ctx context.Context, n Numbers) error
	// FollowNumbers hands the published counts to sink, then every change, as Follow does.
	FollowNumbers(ctx context.Context, sink func(Numbers)) error
	// Tidy repairs keys that neither claims nor collection touch. references has the references of all nodes. Its
	// requests have deadlines of their own.
	Tidy(ctx context.Context, references References) error
	// Endpoints names the store for messages.
	Endpoints() []string
}

// Publisher receives the identities that exist.
type Publisher interface {
	Upsert(identity.Numeric, identity.Identity) uint64
	Delete(identity.Numeric) bool
	Reach(cluster uint64, revision int64) // everything up to a revision of the store was published
	Loaded()                              // identities that were not upserted do not exist
}

// EndpointPublisher receives the identities of this node's endpoints, after they were saved.
type EndpointPublisher interface {
	Upsert(Holder, Endpoint) uint64
	Delete(Holder) bool // also holders that are no endpoints
}

// Holds are this node's references to identities; they must survive a restart.
type Holds struct {
	Holders []HolderRecord
	// NextNodeLocal is the number at which the search for a free node-local number begins, so that a freed number stays in
	// quarantine as long as the range allows.
	NextNodeLocal identity.Numeric
	// Session is the session of the store, for the next process.
	Session string
}

// HolderRecord is one holder. The label set is part of it, because answers must not depend on a cache.
type HolderRecord struct {
	Holder   Holder
	Identity identity.Identity
	Workload Workload
}

// Workload describes a holder. Each field may be empty.
type Workload struct {
	Manager   string // who made it, for example "kubernetes"
	Network   string // name of the CNI network
	Pod       workload.PodReference
	Addresses []string // of the endpoint
}

// learn returns w with the non-empty fields of v.
func (w Workload) learn(v Workload) Workload {
	w.Manager, w.Network = cmp.Or(v.Manager, w.Manager), cmp.Or(v.Network, w.Network)
	if v.Pod.Name != "" {
		w.Pod = v.Pod
	}
	if len(v.Addresses) > 0 {
		w.Addresses = slices.Clone(v.Addresses)
	}
	return w
}

func (w Workload) equal(v Workload) bool {
	return w.Manager == v.Manager && w.Network == v.Network && w.Pod == v.Pod && slices.Equal(w.Addresses, v.Addresses)
}

// HoldsChange is the change of the holds since they were last saved.
type HoldsChange struct {
	Put           []HolderRecord // new, or moved
	Drop          []Holder       // hold nothing any more
	NextNodeLocal identity.Numeric
	Session       string
}

// Known is this node's knowledge of the cluster's identities.
type Known struct {
	Identities []identity.Identity
	// Heard is the time at which the store was last heard, as of which Identities is complete. Zero: never.
	Heard time.Time
}

// KnownChange is a change of Known.
type KnownChange struct {
	Put   []identity.Identity
	Drop  []identity.Numeric
	Heard time.Time
}

// Records is the persistent memory of this node. Once a method has returned nil, its argument survives the end of this
// process, however it ends. All methods may be called concurrently.
type Records interface {
	SaveHolds(HoldsChange) error
	// NoteKnown saves a change of the known identities, for this boot of the machine, until SaveKnown has saved it.
	NoteKnown(KnownChange) error
	// SaveKnown saves the change that take returns, together with the other changes noted so far, so that they survive
	// a reboot, too. It calls take once. The first call makes the saved state a complete listing of the cluster.
	SaveKnown(take func() KnownChange) error
}

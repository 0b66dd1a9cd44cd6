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

// Errors of a Store that all packages which store data in it use.
var (
	ErrUnavailable = cluster.ErrUnavailable
	ErrNoSpace     = cluster.ErrNoSpace
	ErrWaits       = cluster.ErrWaits
	ErrRestored    = cluster.ErrRestored
	ErrUnleased    = cluster.ErrUnleased
	ErrSessionLost = cluster.ErrSessionLost
	ErrNameTaken   = cluster.ErrNameTaken
)

// Errors of a Store of identities.
var (
	// ErrZone: the candidate was chosen for another zone than Zone returns now.
	ErrZone = errors.New("the zone of numbers has changed")
	// ErrOccupied: the candidate belongs to another label set or is in quarantine.
	ErrOccupied = errors.New("number is occupied")
	// ErrConflict: the number now has another label set, or the label set another number. It is always a *ConflictError.
	ErrConflict = errors.New("identity conflict")
	// ErrLayout: a newer version of Sluice manages the store.
	ErrLayout = errors.New("layout of the store is newer than this version")
	// ErrCorrupt: the store has content that Sluice never writes.
	ErrCorrupt = errors.New("store content is corrupt")
)

// ConflictError reports that the store contradicts Held, an identity that this node holds: the number belongs to
// another label set or is in quarantine, or the label set has another number.
type ConflictError struct {
	Held     identity.Identity
	Occupant identity.Identity // current owner of the number; zero if it is free
	Revision int64             // revision at which Occupant got the number
	Moved    identity.Numeric  // current number of the label set; 0 if it has none
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
	Revision int64 // revision of the reference that was written
	Created  bool  // the label set had no number before
}

// Reference is one of this node's references in the store.
type Reference struct {
	Number   identity.Numeric
	Revision int64 // revision of the last write of the reference
	Present  bool  // it belongs to the current session; if false, it ends with the session that wrote it
}

// Candidate is an identity without references, with the revisions that show later whether it is still unused.
type Candidate struct {
	Identity identity.Identity
	Fence    int64 // revision of the last write of a reference to the identity
}

// References is one step of Store.FollowReferences.
type References struct {
	Complete bool                     // all references at Revision; if false, changes of the former ones
	Revision int64                    // all changes up to this revision are counted
	Numbers  map[identity.Numeric]int // number of nodes that refer to a number
	Nodes    map[string]int           // number of references of a node
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
	Complete bool   // Upserts contains all identities at Revision
	Reset    bool   // set with Complete if older revisions belong to another history of the store
	Cluster  uint64 // identifies the store to which Revision belongs
	Revision int64  // this and earlier updates contain all changes up to this revision
	Upserts  []Entry
	Deletes  []Deletion
	Beside   bool // some changes belong to other data, which is saved together with the known identities
	// Heard is a time up to which this update and earlier ones contain all changes. Zero if unknown.
	Heard time.Time
}

// Store is the store that all nodes of a cluster share. Its revision increases with every change.
//
// A method returns an error that wraps ErrUnavailable if the store does not answer before ctx ends. All methods may be
// called concurrently.
type Store interface {
	// Join makes sure that this node has a session. fresh is set for a new session: all references that were
	// written before it have been or will be deleted. Join returns ErrNameTaken if another node has a session with
	// this name.
	Join(ctx context.Context) (fresh bool, err error)
	// Session returns the name of the session, with which the next process of this node can continue it.
	Session() string
	// Ping checks the session. It returns nil, ErrSessionLost, ErrNameTaken or ErrUnavailable. The session is kept
	// alive without it.
	Ping(ctx context.Context) error
	// Severed returns an error that wraps ErrUnavailable and contains the reason once the store has no connection,
	// or the error of ctx. It does not detect a store that is connected but does not answer; Ping does.
	Severed(ctx context.Context) error
	// Claim atomically finds the number of a label set and writes this node's reference to it. known is the number
	// that the set probably has, or 0. If the set has no number, it gets candidate; if candidate is not free, Claim
	// returns ErrOccupied, and if the zone of new numbers has changed, ErrZone.
	Claim(ctx context.Context, labels label.Canonical, known, candidate identity.Numeric) (Claim, error)
	// Zone returns the zone of new numbers, as of the last Claim.
	Zone() Zone
	// Restore writes a reference to an identity that this node held before, and creates the identity again if it
	// was removed. It returns ErrConflict if the number or the label set belongs to another identity.
	Restore(ctx context.Context, id identity.Identity) (Claim, error)
	// Renew writes references to the identities that exist unchanged, in few transactions, and returns the written
	// references.
	Renew(ctx context.Context, ids []identity.Identity) ([]Claim, error)
	// Release removes references, except those that were written again since.
	Release(ctx context.Context, refs ...Reference) error
	// References lists this node's references.
	References(ctx context.Context) ([]Reference, error)
	// Follow passes all identities to sink and then every change, in order. It returns only with an error or when
	// ctx ends. If changes were missed, it passes a new complete listing. As long as the store answers, it also
	// sends updates without changes, so that Update.Heard stays current.
	Follow(ctx context.Context, sink func(Update)) error
	// FollowReferences passes the references of all nodes to sink and then every change of them, in order, like
	// Follow.
	FollowReferences(ctx context.Context, sink func(References)) error
	// Lead makes this node the collector if the cluster has no collector, and reports whether this node is the
	// collector. The role lasts as long as the session.
	Lead(ctx context.Context) (bool, error)
	// Candidates reads the revisions that show later whether identities are still unused.
	Candidates(ctx context.Context, unused []identity.Identity) ([]Candidate, error)
	// Collect removes the candidates that have not changed since they were read, and returns their numbers. The
	// numbers are in quarantine for the time rest, in which no other label set gets them.
	Collect(ctx context.Context, unused []Candidate, rest time.Duration) ([]identity.Numeric, error)
	// Resting lists the numbers in quarantine.
	Resting(ctx context.Context) ([]identity.Numeric, error)
	// PublishNumbers publishes to all nodes how many numbers tenants have. It returns ErrDenied if the role of this
	// node may not write them.
	PublishNumbers(ctx context.Context, n Numbers) error
	// FollowNumbers passes the published counts to sink and then every change, like Follow.
	FollowNumbers(ctx context.Context, sink func(Numbers)) error
	// Tidy removes or repairs keys that neither claims nor collections change. references contains the references
	// of all nodes. Each of its requests has its own timeout.
	Tidy(ctx context.Context, references References) error
	// Endpoints returns the addresses of the store for messages.
	Endpoints() []string
}

// Publisher receives the identities of the cluster.
type Publisher interface {
	Upsert(identity.Numeric, identity.Identity) uint64
	Delete(identity.Numeric) bool
	Reach(cluster uint64, revision int64) // everything up to this revision of the store was published
	Loaded()                              // all identities were upserted; others do not exist
}

// EndpointPublisher receives the identities of this node's endpoints, after they were saved.
type EndpointPublisher interface {
	Upsert(Holder, Endpoint) uint64
	Delete(Holder) bool // it is also called for holders that are not endpoints
}

// Holds contains this node's references to identities, which must survive a restart.
type Holds struct {
	Holders []HolderRecord
	// NextNodeLocal is the number at which the search for a free node-local number begins, so that a freed number stays in
	// quarantine as long as the range allows.
	NextNodeLocal identity.Numeric
	// Session is the name of the session with the store, for the next process.
	Session string
}

// HolderRecord is the record of one holder. It contains the label set, because answers must not depend on a cache.
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
	Drop          []Holder       // these holders have no number any more
	NextNodeLocal identity.Numeric
	Session       string
}

// Known contains the identities of the cluster that this node knows.
type Known struct {
	Identities []identity.Identity
	// Heard is the time of the last contact with the store, at which Identities was complete. Zero: never.
	Heard time.Time
}

// KnownChange is a change of Known.
type KnownChange struct {
	Put   []identity.Identity
	Drop  []identity.Numeric
	Heard time.Time
}

// Records stores the state of this node. Once a method has returned nil, its argument survives the process, even if it
// is killed. All methods may be called concurrently.
type Records interface {
	SaveHolds(HoldsChange) error
	// NoteKnown saves a change of the known identities, for this boot of the machine, until SaveKnown has saved it.
	NoteKnown(KnownChange) error
	// SaveKnown saves the change that take returns, together with the other changes noted so far, so that they survive
	// a reboot, too. It calls take once. The first call makes the saved state a complete listing of the cluster.
	SaveKnown(take func() KnownChange) error
}

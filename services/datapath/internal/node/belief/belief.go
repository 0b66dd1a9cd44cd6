// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package belief decides, with native routing, which nodes' mappings the datapath trusts.
//
// A node that is cut off from the store keeps using the mappings that it has. Other nodes wait before they assign an
// address to another endpoint, but not forever. Once this node has been cut off for longer than that, it trusts the
// mappings of another node only if the answers of that node to probes show that it is cut off, too: a node that is cut
// off cannot have assigned its addresses to other endpoints. The mappings of all other nodes are changed to the
// identity unknown-in-cluster, so that deny rules apply to them and label-based allow rules do not.
package belief

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
)

// ErrUnsupported is returned if the identity service is of an earlier version, which does not report when it last heard
// from the store.
var ErrUnsupported = errors.New("sluice-identity does not report when it last heard from the store")

// Answer is the answer of the identity service.
type Answer struct {
	Heard   bool          // the service has heard from the store since it started
	Silence time.Duration // time since this node had the latest state of the store
	Stale   time.Duration // silence after which mappings are no longer trusted
}

// Service is the identity service.
type Service interface {
	// Confirm reports the store revision up to which the kernel has all changes. It returns ErrUnsupported if the service
	// does not have the call.
	Confirm(ctx context.Context, applied watch.Origin) (Answer, error)
}

// Peer is the last answer of another node.
type Peer struct {
	Said bool // the node has answered this process
	// Silence is the time for which that node had been cut off from the store.
	Silence time.Duration
	// Valid is true if the answer is recent: the node cannot have assigned its addresses to other endpoints since.
	Valid bool
}

// Inputs are the data that Run decides on, and the callback for changes.
type Inputs struct {
	Applied func() watch.Origin    // store revision up to which the kernel has all changes
	Peers   func() map[string]Peer // all other nodes, by name
	// Changed is called when results of Trusts may have changed.
	Changed func() error
}

// Options of Beliefs. All but Path and Log are needed.
type Options struct {
	Service Service
	Path    string // file that keeps the state across restarts; "": none
	BootID  string
	// Now is the time since the machine booted, including suspend.
	Now func() time.Duration
	Log *slog.Logger
}

// Time limits.
const (
	// cutOff is the silence after which a node counts as cut off from the store.
	cutOff = time.Minute
	// interval is the time between two calls of the service, callTime the timeout of one call.
	interval, callTime = 5 * time.Second, 2 * time.Second
	// saveEvery is the minimum time between two writes of the file without a change.
	saveEvery = time.Minute
	// settling is the time after the start during which nodes that have not answered a probe yet are trusted as the
	// previous process decided.
	settling = 30 * time.Second
	// usual is the silence limit until the service has reported its own.
	usual = 15 * time.Minute
)

// never is the value of heard if the node has never heard from the store.
const never = time.Duration(-1 << 62)

// Beliefs decides which nodes' mappings this node trusts. Its methods may be called concurrently.
type Beliefs struct {
	o Options

	mu    sync.Mutex
	heard time.Duration // guarded by mu; last contact with the store, by Now; never: none
	known bool          // guarded by mu; this process or a previous one has an answer of the service
	limit time.Duration // guarded by mu
	began time.Duration // guarded by mu; start of this process
	// earlier: an earlier process of this boot has decided, and the file has its decision.
	earlier bool            // guarded by mu
	was     map[string]bool // guarded by mu; nodes that were not trusted at the last write
	stale   bool            // guarded by mu; at the last step
	saved   time.Duration   // guarded by mu
	peers   map[string]Peer // guarded by mu; of the last step
	fails   bool            // guarded by mu; the last write of the file failed
}

var schema = durable.Schema{Name: "sluice.datapath.belief", Version: 1}

// maxFile is the maximum size of the file in bytes.
const maxFile = 16 << 20

type file struct {
	BootID  string        `json:"bootId"`
	Heard   time.Duration `json:"heard"`
	Limit   time.Duration `json:"limit"`
	Doubted []string      `json:"doubted,omitempty"`
}

// Open reads the state of the previous process. Without a file, as after an upgrade, the node counts as having heard
// from the store now. After a reboot it counts as cut off.
func Open(o Options) *Beliefs {
	if o.Log == nil {
		o.Log = log.Discard()
	}
	now := o.Now()
	b := &Beliefs{o: o, heard: now, limit: usual, began: now, was: map[string]bool{}}
	if o.Path == "" {
		return b
	}
	var f file
	switch err := durable.Load(o.Path, maxFile, schema, &f); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		o.Log.Error("cannot read the time of the last contact with the store; treating this node as cut off until "+
			"the next contact", log.Err(err))
		b.heard, b.known = never, true
	case f.BootID != o.BootID:
		b.heard, b.known, b.limit = never, true, f.Limit
	default:
		b.heard, b.known, b.limit, b.earlier = min(f.Heard, now), true, f.Limit, true
		for _, name := range f.Doubted {
			b.was[name] = true
		}
	}
	b.stale = b.silence(now) > b.limit
	return b
}

// silence returns the time since the node heard from the store. Called with mu held.
func (b *Beliefs) silence(now time.Duration) time.Duration {
	if b.heard == never {
		return time.Duration(1<<63 - 1)
	}
	return max(0, now-b.heard)
}

// Silence returns how long ago this node heard from the store; known is false as long as that is unknown.
func (b *Beliefs) Silence() (d time.Duration, known bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.silence(b.o.Now()), b.known
}

// Trusts reports whether the mappings of a node are trusted.
func (b *Beliefs) Trusts(node string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.trusts(node)
}

func (b *Beliefs) trusts(node string) bool {
	if !b.stale {
		return true
	}
	p := b.peers[node]
	if b.earlier && !p.Said && b.o.Now()-b.began < settling {
		return !b.was[node]
	}
	return p.Said && p.Valid && p.Silence >= cutOff
}

// Run calls the service and updates the decision until ctx ends.
func (b *Beliefs) Run(ctx context.Context, in Inputs) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		b.step(ctx, in)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (b *Beliefs) step(ctx context.Context, in Inputs) {
	call, cancel := context.WithTimeout(ctx, callTime)
	asked := b.o.Now()
	a, err := b.o.Service.Confirm(call, in.Applied())
	cancel()
	peers := in.Peers()
	b.mu.Lock()
	switch {
	case errors.Is(err, ErrUnsupported):
		b.heard, b.known = asked, false
	case err == nil:
		b.known, b.limit = true, a.Stale
		if a.Heard {
			b.heard = max(b.heard, asked-a.Silence)
		}
	}
	now, was := b.o.Now(), b.stale
	b.stale, b.peers = b.silence(now) > b.limit, peers
	if b.stale != was {
		if b.stale {
			b.o.Log.Warn("this node has been cut off from the store too long; no longer trusting mappings of nodes that are not cut off",
				"after", b.limit)
		} else {
			b.o.Log.Info("this node is in contact with the store again; trusting all mappings")
		}
	}
	changed := b.stale || was
	b.mu.Unlock()
	if changed {
		if err := in.Changed(); err != nil {
			b.o.Log.Error("cannot update the mappings of other nodes; retrying", log.Err(err))
		}
	}
	b.save(now)
}

// save writes the file if its content changed, or is older than saveEvery.
func (b *Beliefs) save(now time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	doubted := map[string]bool{}
	if b.stale {
		for name := range b.peers {
			if !b.trusts(name) {
				doubted[name] = true
			}
		}
	}
	if b.o.Path == "" || !b.known || maps.Equal(doubted, b.was) && b.saved != 0 && now-b.saved < saveEvery {
		return
	}
	err := durable.Save(b.o.Path, schema, file{
		BootID: b.o.BootID, Heard: b.heard, Limit: b.limit, Doubted: slices.Sorted(maps.Keys(doubted)),
	}, durable.SyncAll)
	if err != nil && !b.fails {
		b.o.Log.Error("cannot write the time at which this node last heard from the store", log.Err(err))
	}
	if b.fails = err != nil; err == nil {
		b.was, b.saved = doubted, now
	}
}

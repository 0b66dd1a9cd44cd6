// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package belief decides, with native routing, which nodes' mappings the datapath
// believes.
//
// A node that does not hear from the store goes on with the mappings that it has. Other
// nodes wait before they give an address to another endpoint, but not for ever. After
// that time this node believes the mappings of another node only if that node does not
// hear from the store either, as its answers to probes say: then it cannot have given its
// addresses to other endpoints. The addresses of endpoints on the other nodes become
// unknown-in-cluster, so that denials apply to them and allowances of selectors do not.
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

// ErrUnsupported says that the identity service is of a version that does not say how
// long ago it heard from the store.
var ErrUnsupported = errors.New("sluice-identity does not say when it heard from the store")

// Answer is what the identity service says.
type Answer struct {
	Heard   bool          // it has heard from the store since it started
	Silence time.Duration // how long ago this node had everything that the store had
	Stale   time.Duration // after which time of silence mappings are doubted
}

// Service is the identity service.
type Service interface {
	// Confirm says up to which point the kernel has everything. It returns
	// ErrUnsupported if the service does not have the call.
	Confirm(ctx context.Context, applied watch.Origin) (Answer, error)
}

// Peer is what another node said last.
type Peer struct {
	Said bool // it has said something to this process
	// Silence is how long that node had not heard from the store.
	Silence time.Duration
	// Valid says that the node said it a short time ago: it cannot have given its
	// addresses to other endpoints since.
	Valid bool
}

// Inputs are what Run decides by, and whom it tells.
type Inputs struct {
	Applied func() watch.Origin    // up to which point the kernel has everything
	Peers   func() map[string]Peer // all other nodes by name
	// Changed is called when Believes may return something else than before.
	Changed func() error
}

// Options of Beliefs. All but Path and Log are needed.
type Options struct {
	Service Service
	Path    string // of the file that keeps the state over restarts; "": none
	BootID  string
	// Now is the time since the machine booted, with that in which it slept.
	Now func() time.Duration
	Log *slog.Logger
}

// Bounds.
const (
	// cutOff is the time of silence after which a node is cut off from the store.
	cutOff = time.Minute
	// interval is how often the service is asked, and callTime how long one call may take.
	interval, callTime = 5 * time.Second, 2 * time.Second
	// saveEvery is the least time between two writes of the file without a change.
	saveEvery = time.Minute
	// settling is how long after the start a node that has not answered yet is believed as
	// by the process before.
	settling = 30 * time.Second
	// usual is the time of silence before the service has said one.
	usual = 15 * time.Minute
)

// never is the time at which a node heard that has never heard.
const never = time.Duration(-1 << 62)

// Beliefs is the state of this node. Its methods may be called concurrently.
type Beliefs struct {
	o Options

	mu    sync.Mutex
	heard time.Duration   // guarded by mu; by Now; never
	known bool            // guarded by mu; this process or one before it has asked the service
	limit time.Duration   // guarded by mu
	began time.Duration   // guarded by mu; of this process
	was   map[string]bool // guarded by mu; nodes that were doubted last
	stale bool            // guarded by mu; at the last step
	saved time.Duration   // guarded by mu
	peers map[string]Peer // guarded by mu; of the last step
	fails bool            // guarded by mu; the file could not be written
}

var schema = durable.Schema{Name: "sluice.datapath.belief", Version: 1}

// maxFile bounds the file, in bytes.
const maxFile = 16 << 20

type file struct {
	BootID  string        `json:"bootId"`
	Heard   time.Duration `json:"heard"`
	Limit   time.Duration `json:"limit"`
	Doubted []string      `json:"doubted,omitempty"`
}

// Open reads what an earlier process left. Without a file, as after an update, the node
// counts as having heard from the store now. After a reboot it has not heard.
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
		o.Log.Error("when this node heard from the store is not known; it counts as cut off until it hears", log.Err(err))
		b.heard, b.known = never, true
	case f.BootID != o.BootID:
		b.heard, b.known, b.limit = never, true, f.Limit
	default:
		b.heard, b.known, b.limit = min(f.Heard, now), true, f.Limit
		for _, name := range f.Doubted {
			b.was[name] = true
		}
	}
	b.stale = b.silence(now) > b.limit
	return b
}

// silence is how long the node has not heard. It runs with mu held.
func (b *Beliefs) silence(now time.Duration) time.Duration {
	if b.heard == never {
		return time.Duration(1<<63 - 1)
	}
	return max(0, now-b.heard)
}

// Silence returns how long ago this node heard from the store; known is false before that
// is known.
func (b *Beliefs) Silence() (d time.Duration, known bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.silence(b.o.Now()), b.known
}

// Believes reports whether the mappings of a node are believed.
func (b *Beliefs) Believes(node string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.believes(node)
}

func (b *Beliefs) believes(node string) bool {
	if !b.stale {
		return true
	}
	p := b.peers[node]
	if !p.Said && b.o.Now()-b.began < settling {
		return !b.was[node]
	}
	return p.Said && p.Valid && p.Silence >= cutOff
}

// Run asks the service, and decides, until ctx ends.
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
			b.o.Log.Warn("this node has not heard from the store for so long that it doubts the mappings of nodes that have",
				"after", b.limit)
		} else {
			b.o.Log.Info("this node hears from the store again and believes all mappings")
		}
	}
	changed := b.stale || was
	b.mu.Unlock()
	if changed {
		if err := in.Changed(); err != nil {
			b.o.Log.Error("the addresses of other nodes are not as they should be; trying again", log.Err(err))
		}
	}
	b.save(now)
}

// save writes the file if there is news.
func (b *Beliefs) save(now time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	doubted := map[string]bool{}
	if b.stale {
		for name := range b.peers {
			if !b.believes(name) {
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
		b.o.Log.Error("when this node heard from the store is not written", log.Err(err))
	}
	if b.fails = err != nil; err == nil {
		b.was, b.saved = doubted, now
	}
}

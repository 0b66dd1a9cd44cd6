// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodegc removes the nodes of the cluster whose Node object was deleted.
//
// Only the deletion of its Node removes a node: neither time does, nor a listing that
// failed. A node that never had a Node here stays, because others may share the
// cluster's etcd. A file keeps the names of the Nodes, so that a deletion while no
// process ran is noticed.
package nodegc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/controller/internal/subject"
)

// Errors of a Registry.
var (
	ErrAlive   = errors.New("the node is alive")
	ErrUnknown = errors.New("no such node")
)

// Registry has the nodes of the cluster.
type Registry interface {
	// Forget removes a node and its mappings, unless it is alive.
	Forget(ctx context.Context, name string) error
}

// API has the Nodes.
type API interface {
	// Exists asks the API server whether there is a Node now.
	Exists(ctx context.Context, name string) (bool, error)
}

// Times and bounds.
const (
	retryFirst = 2 * time.Second
	retryMax   = 5 * time.Minute
	// maxDeparted is how many nodes are remembered: a process that does not lead
	// does not learn which were forgotten.
	maxDeparted = 10_000
	maxFile     = 16 << 20
)

// departure is one node that is to be forgotten.
type departure struct {
	due  time.Time
	wait time.Duration
}

// Nodes follows the Nodes, as a kube.Handler.
type Nodes struct {
	file     string
	api      API
	registry Registry
	leads    subject.Leadership
	log      *slog.Logger
	requests subject.Requests

	changed, wake chan struct{} // have a token when the file is old; when one may be due

	mu       sync.Mutex
	present  map[string]bool // Nodes that exist; false: of an earlier run, not listed yet
	departed map[string]*departure
	complete bool
	failure  error // why the Nodes are not followed now
}

// saved is the content of the file.
type saved struct {
	Nodes []string `json:"nodes"` // that existed, or are to be forgotten
}

// New reads the file; there may be none.
func New(file string, api API, r Registry, leads subject.Leadership, l *slog.Logger) (*Nodes, error) {
	n := &Nodes{
		file: file, api: api, registry: r, leads: leads, log: l,
		changed: make(chan struct{}, 1), wake: make(chan struct{}, 1),
		present: make(map[string]bool), departed: make(map[string]*departure),
	}
	content, err := durable.ReadFile(file, maxFile)
	if errors.Is(err, fs.ErrNotExist) {
		return n, nil
	}
	var s saved
	if err == nil {
		err = json.Unmarshal(content, &s)
	}
	if err != nil {
		return nil, fmt.Errorf("the Nodes of an earlier run: %w; remove %s to begin without them", err, file)
	}
	for _, name := range s.Nodes {
		n.present[name] = false
	}
	return n, nil
}

// Upsert says that there is a Node.
func (n *Nodes) Upsert(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.present[name] {
		n.present[name] = true
		token(n.changed)
	}
	delete(n.departed, name)
}

// Delete says that a Node was deleted.
func (n *Nodes) Delete(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.depart(name)
}

func (n *Nodes) depart(name string) {
	delete(n.present, name)
	if len(n.departed) >= maxDeparted {
		n.log.Warn("too many nodes wait to be forgotten; forget this one by `sluice node forget`", "node", name)
		return
	}
	n.departed[name] = &departure{wait: retryFirst}
	token(n.changed)
	token(n.wake)
}

// Complete says that all Nodes were named.
func (n *Nodes) Complete() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.complete = true
	for name, listed := range n.present {
		if !listed {
			n.depart(name)
		}
	}
}

// Failed says why the Nodes are not followed; nil: they are.
func (n *Nodes) Failed(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.failure = err
	token(n.wake)
}

func token(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Run keeps the file, and forgets nodes while the process is elected, until ctx ends; it then returns nil.
func (n *Nodes) Run(ctx context.Context) error {
	var keeping sync.WaitGroup
	keeping.Go(func() { n.keep(ctx) })
	n.leads.While(ctx, n.lead)
	keeping.Wait()
	return nil
}

// Status returns how many nodes are to be forgotten, and how the requests went.
func (n *Nodes) Status() subject.Status {
	n.mu.Lock()
	pending := len(n.departed)
	n.mu.Unlock()
	return n.requests.Status("node garbage collection", pending)
}

// keep keeps the file until ctx ends.
func (n *Nodes) keep(ctx context.Context) {
	var again <-chan time.Time
	for {
		select {
		case <-n.changed:
		case <-again:
		case <-ctx.Done():
			return
		}
		again = nil
		if err := n.save(); err != nil {
			n.log.Warn("the names of the Nodes are not written; it is tried again", log.Err(err))
			again = time.After(retryFirst)
		}
	}
}

func (n *Nodes) save() error {
	n.mu.Lock()
	s := saved{Nodes: slices.AppendSeq(slices.Collect(maps.Keys(n.present)), maps.Keys(n.departed))}
	n.mu.Unlock()
	slices.Sort(s.Nodes)
	content, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return durable.WriteFile(n.file, content, 0o600, durable.SyncAll)
}

// lead forgets the nodes that departed, until ctx ends.
func (n *Nodes) lead(ctx context.Context) {
	for ctx.Err() == nil {
		name, next := n.due(time.Now())
		if name != "" {
			n.forget(ctx, name)
			continue
		}
		var timer <-chan time.Time
		if !next.IsZero() {
			timer = time.After(time.Until(next))
		}
		select {
		case <-n.wake:
		case <-timer:
		case <-ctx.Done():
		}
	}
}

// due returns a node that is to be forgotten now, or when the next one is.
func (n *Nodes) due(now time.Time) (name string, next time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.complete || n.failure != nil {
		return "", time.Time{} // the Node may exist again
	}
	for k, d := range n.departed {
		if !d.due.After(now) {
			return k, now
		}
		if next.IsZero() || d.due.Before(next) {
			next = d.due
		}
	}
	return "", next
}

// forget asks for one node, unless its Node exists again.
func (n *Nodes) forget(ctx context.Context, name string) {
	exists, unknown := false, false
	err := n.requests.Do(ctx, func(ctx context.Context) (err error) {
		if exists, err = n.api.Exists(ctx, name); err == nil && !exists {
			err = n.registry.Forget(ctx, name)
		}
		if unknown = errors.Is(err, ErrUnknown); unknown {
			err = nil
		}
		return err
	})
	n.mu.Lock()
	defer n.mu.Unlock()
	d := n.departed[name]
	if d == nil {
		return // its Node has come back
	}
	switch {
	case err == nil && (exists || unknown):
		if exists {
			n.present[name] = true
		}
	case err == nil:
		n.log.Info("node forgotten: its Node was deleted", "node", name)
	default:
		if !errors.Is(err, ErrAlive) && ctx.Err() == nil { // one that shuts down is no news
			n.log.Warn("a node whose Node was deleted is not forgotten yet", "node", name, log.Err(err))
		}
		d.due, d.wait = time.Now().Add(d.wait), min(2*d.wait, retryMax)
		return
	}
	delete(n.departed, name)
	token(n.changed)
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodegc removes nodes from the cluster when their Node object is deleted.
//
// Only the deletion of its Node removes a node; a timeout or a failed listing never does. A node that never had a
// Node object in this API server stays, because several clusters may share one etcd. A file keeps the names of the
// Nodes, so that the process notices deletions that happened while it did not run.
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

// Registry holds the registered nodes of the cluster.
type Registry interface {
	// Forget removes a node and its mappings, unless the node is alive.
	Forget(ctx context.Context, name string) error
}

// API reads the Nodes.
type API interface {
	// Exists asks the API server whether a Node exists now.
	Exists(ctx context.Context, name string) (bool, error)
}

// Timing and limits.
const (
	retryFirst = 2 * time.Second
	retryMax   = 5 * time.Minute
	// maxDeparted limits the number of nodes to forget that a process remembers. Processes that are not elected never
	// remove a node from this list, because they do not learn which nodes were forgotten.
	maxDeparted = 10_000
	maxFile     = 16 << 20
)

// departure is a node that is to be forgotten.
type departure struct {
	due  time.Time
	wait time.Duration
}

// Nodes follows the Nodes and implements kube.Handler.
type Nodes struct {
	file     string
	api      API
	registry Registry
	leads    subject.Leadership
	log      *slog.Logger
	requests subject.Requests

	changed, wake chan struct{} // changed has a token when the file is out of date; wake when a departure may be due

	mu       sync.Mutex
	present  map[string]bool // existing Nodes; false: known from an earlier run and not listed yet
	departed map[string]*departure
	complete bool
	failure  error // why the Nodes cannot be followed
}

// saved is the content of the file.
type saved struct {
	Nodes []string `json:"nodes"` // names of Nodes that existed or are to be forgotten
}

// New reads the file, which may be missing.
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
		return nil, fmt.Errorf("read the Nodes of an earlier run: %w; remove %s to start without them", err, file)
	}
	for _, name := range s.Nodes {
		n.present[name] = false
	}
	return n, nil
}

// Upsert reports an existing Node.
func (n *Nodes) Upsert(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.present[name] {
		n.present[name] = true
		token(n.changed)
	}
	delete(n.departed, name)
}

// Delete reports a deleted Node.
func (n *Nodes) Delete(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.depart(name)
}

func (n *Nodes) depart(name string) {
	delete(n.present, name)
	if len(n.departed) >= maxDeparted {
		n.log.Warn("too many nodes wait to be forgotten; remove this one with `sluice node forget`", "node", name)
		return
	}
	n.departed[name] = &departure{wait: retryFirst}
	token(n.changed)
	token(n.wake)
}

// Complete reports that all existing Nodes have been reported.
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

// Failed reports why the Nodes cannot be followed; nil means that they can.
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

// Run keeps the file up to date, and forgets nodes while the process is elected, until ctx ends; it then returns nil.
func (n *Nodes) Run(ctx context.Context) error {
	var keeping sync.WaitGroup
	keeping.Go(func() { n.keep(ctx) })
	n.leads.While(ctx, n.lead)
	keeping.Wait()
	return nil
}

// Status returns the number of nodes to forget, and the statistics of the requests.
func (n *Nodes) Status() subject.Status {
	n.mu.Lock()
	pending := len(n.departed)
	n.mu.Unlock()
	return n.requests.Status("node garbage collection", pending)
}

// keep writes the file after changes until ctx ends.
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
			n.log.Warn("cannot save the names of the Nodes, trying again", log.Err(err))
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

// lead forgets the departed nodes until ctx ends.
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

// due returns a node that is to be forgotten now, or the time at which the next one is due.
func (n *Nodes) due(now time.Time) (name string, next time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.complete || n.failure != nil {
		return "", time.Time{} // the Node may have been recreated
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

// forget asks the registry to forget a node, unless its Node exists again.
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
		return // its Node exists again
	}
	switch {
	case err == nil && (exists || unknown):
		if exists {
			n.present[name] = true
		}
	case err == nil:
		n.log.Info("node forgotten: its Node was deleted", "node", name)
	default:
		if !errors.Is(err, ErrAlive) && ctx.Err() == nil { // ErrAlive is normal while a node shuts down
			n.log.Warn("cannot forget a node whose Node was deleted, trying again", "node", name, log.Err(err))
		}
		d.due, d.wait = time.Now().Add(d.wait), min(2*d.wait, retryMax)
		return
	}
	delete(n.departed, name)
	token(n.changed)
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package poolevents creates Events on Nodes whose pod ranges have no address for new pods, on Nodes that have
// addresses again, and on Nodes whose disks cannot be written.
//
// A node without free addresses sets an annotation of its Node object, which it may write anyway.
// The controller watches the metadata of all Nodes anyway, and creates the Events. So nodes do not need the
// permission to create Events, with which they could create Events about any object.
package poolevents

import (
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/podrange"
	"github.com/sluice-net/sluice/services/controller/internal/subject"
)

// Reasons of Events. They are part of the interface: scripts and alerts refer to them.
const (
	ReasonExhausted = "PodRangeExhausted"
	ReasonAvailable = "PodRangeAvailable"
	ReasonStorage   = "StorageFailed"
	ReasonStored    = "StorageAvailable"
)

// Timing of the Events.
const (
	// spacing is the shortest interval between two Events on one Node, however often its annotation changes.
	spacing = 30 * time.Second
	// newsFor is the time after the end of a shortage during which an Event about it may still be created. By
	// default, the API server keeps Events equally long.
	newsFor      = time.Hour
	firstPause   = time.Second
	longestPause = 30 * time.Second
)

// maxMessage limits the part of a message that an Event contains, in bytes. The API server accepts 1024.
const maxMessage = 1000

// Event is an Event about a Node.
type Event struct {
	Node, UID string
	// Name depends on the Node and the change only. If a process does not know whether it has created the Event, it
	// creates the Event again, and the API server keeps the existing one.
	Name    string
	Reason  string
	Note    string
	Warning bool
}

// Action returns the operation that the Event is about.
func (e Event) Action() string {
	if e.Reason == ReasonStorage || e.Reason == ReasonStored {
		return "StoreState"
	}
	return "AllocateAddress"
}

// API creates Events. An error means that a retry may succeed. A permanent rejection is not an error.
type API interface {
	RecordOnNode(ctx context.Context, e Event) error
}

// Nodes follows the annotations of Nodes.
type Nodes struct {
	api      API
	leads    subject.Leadership
	log      *slog.Logger
	requests subject.Requests
	now      func() time.Time

	wake chan struct{} // has a token when an Event may be due

	mu    sync.Mutex
	nodes map[string]*node  // guarded by mu; Nodes with the annotation
	uids  map[string]string // guarded by mu; all Nodes
	disks map[string]*disk  // guarded by mu; disks that cannot be written, now or earlier in this run
}

// disk is the state of a node's disk.
type disk struct {
	reason  string    // empty: writes succeed again
	said    string    // the name of the last Event
	earlier time.Time // creation time of the last Event
}

// node is a Node with the annotation.
type node struct {
	uid     string
	note    podrange.Note
	said    string    // the name of the last Event
	earlier time.Time // creation time of the last Event
}

// New returns Nodes that create their Events while the process is elected.
func New(api API, leads subject.Leadership, l *slog.Logger) *Nodes {
	return &Nodes{
		api: api, leads: leads, log: l, now: time.Now, wake: make(chan struct{}, 1), nodes: map[string]*node{},
		uids: map[string]string{}, disks: map[string]*disk{},
	}
}

// Upsert reports an existing Node and the value of its annotation; empty if it has none.
func (n *Nodes) Upsert(name, uid, annotation string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.uids[name] != uid {
		delete(n.disks, name) // another Node of the same name
	}
	n.uids[name] = uid
	if annotation == "" {
		delete(n.nodes, name)
		return
	}
	note, err := podrange.Parse(annotation)
	if err != nil {
		n.log.Debug("ignoring a malformed annotation", "node", name, log.Err(err))
		return
	}
	x := n.nodes[name]
	if x == nil || x.uid != uid {
		x = &node{uid: uid}
		n.nodes[name] = x
	}
	x.note = note
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// Delete reports a deleted Node.
func (n *Nodes) Delete(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.nodes, name)
	delete(n.uids, name)
	delete(n.disks, name)
}

// SetStorage reports the nodes whose disks cannot be written, and the reasons.
func (n *Nodes) SetStorage(reasons map[string]string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, reason := range reasons {
		if n.disks[name] == nil {
			n.disks[name] = &disk{}
		}
		n.disks[name].reason = reason
	}
	for name, d := range n.disks {
		if _, ok := reasons[name]; !ok {
			if d.reason = ""; d.said == "" {
				delete(n.disks, name)
			}
		}
	}
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// Run creates Events while the process is elected, until ctx ends; it then returns nil.
func (n *Nodes) Run(ctx context.Context) error {
	n.leads.While(ctx, n.lead)
	return nil
}

// Status returns the number of Nodes for which an Event is due, and the statistics of the requests.
func (n *Nodes) Status() subject.Status {
	n.mu.Lock()
	pending := 0
	for name, x := range n.nodes {
		if e := event(name, x); e.Name != x.said && (e.Warning || n.now().Sub(x.note.Since) <= newsFor) {
			pending++
		}
	}
	for name, d := range n.disks {
		if uid, ok := n.uids[name]; ok && storageEvent(name, uid, d).Name != d.said {
			pending++
		}
	}
	n.mu.Unlock()
	return n.requests.Status("pool events", pending)
}

// lead creates Events until ctx ends.
func (n *Nodes) lead(ctx context.Context) {
	wait := firstPause
	for ctx.Err() == nil {
		e, next := n.due()
		var timer <-chan time.Time
		wake := n.wake
		switch {
		case e != nil:
			err := n.requests.Do(ctx, func(ctx context.Context) error { return n.api.RecordOnNode(ctx, *e) })
			if err == nil {
				wait = firstPause
				n.done(e)
				continue
			}
			if ctx.Err() != nil {
				return
			}
			n.log.Warn("cannot create an Event on a Node", "node", e.Node, log.Err(err), "again", wait)
			timer, wake, wait = time.After(wait), nil, min(2*wait, longestPause)
		case !next.IsZero():
			timer = time.After(next.Sub(n.now()))
		}
		select {
		case <-timer:
		case <-wake:
		case <-ctx.Done():
		}
	}
}

// due returns an Event that is to be created now, or the time at which the next one is due.
func (n *Nodes) due() (e *Event, next time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.now()
	for name, x := range n.nodes {
		e := event(name, x)
		at := x.earlier.Add(spacing)
		switch {
		case e.Name == x.said:
		case !e.Warning && now.Sub(x.note.Since) > newsFor:
		case !at.After(now):
			return &e, now
		case next.IsZero() || at.Before(next):
			next = at
		}
	}
	for name, d := range n.disks {
		uid, ok := n.uids[name]
		if !ok {
			continue
		}
		e := storageEvent(name, uid, d)
		at := d.earlier.Add(spacing)
		switch {
		case e.Name == d.said:
		case !at.After(now):
			return &e, now
		case next.IsZero() || at.Before(next):
			next = at
		}
	}
	return nil, next
}

// storageEvent returns the Event about a node's disk. The reason of a disk contains the time of the failure, so each
// failure has its own Event.
func storageEvent(name, uid string, d *disk) Event {
	e := Event{Node: name, UID: uid, Reason: ReasonStored, Note: "the disk can be written again"}
	about := d.said
	if d.reason != "" {
		e.Reason, e.Warning, about = ReasonStorage, true, d.reason
		e.Note = shorten(d.reason + ": changes are not stored, and what cannot be stored is closed")
	}
	e.Name = eventName(name, fmt.Sprintf("%s storage %s", uid, about))
	if d.reason == "" {
		e.Name += storedSuffix
	}
	return e
}

// storedSuffix is the suffix in the names of Events about disks that can be written again.
const storedSuffix = ".stored"

// eventName returns a name for an Event on a Node. It is different for each value of about.
func eventName(node, about string) string {
	sum := sha256.Sum256([]byte(about))
	const most = 200 // a name has at most 253 characters including the suffix
	return fmt.Sprintf("%s.%x", strings.TrimRight(node[:min(len(node), most)], "-."), sum[:8])
}

func (n *Nodes) done(e *Event) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e.Reason == ReasonStorage || e.Reason == ReasonStored {
		if d := n.disks[e.Node]; d != nil && n.uids[e.Node] == e.UID {
			d.said, d.earlier = e.Name, n.now()
			if d.reason == "" && e.Reason == ReasonStored {
				delete(n.disks, e.Node)
			}
		}
		return
	}
	if x := n.nodes[e.Node]; x != nil && x.uid == e.UID {
		x.said, x.earlier = e.Name, n.now()
	}
}

// event returns the Event for a Node's annotation.
func event(name string, x *node) Event {
	e := Event{Node: name, UID: x.uid, Reason: ReasonAvailable, Note: shorten(x.note.Message)}
	if x.note.State == podrange.Exhausted {
		e.Reason, e.Warning = ReasonExhausted, true
	}
	if e.Note == "" {
		e.Note = "the node gave no details"
	}
	e.Name = eventName(name, fmt.Sprintf("%s %s %d", x.uid, x.note.State, x.note.Since.Unix()))
	return e
}

func shorten(text string) string {
	if len(text) <= maxMessage {
		return text
	}
	return strings.ToValidUTF8(text[:maxMessage], "") + "…"
}

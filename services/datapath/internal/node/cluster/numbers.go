// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"cmp"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/log"
)

// Installation identifies a node together with its name: after a reinstallation, a node of the same name gets another
// node ID.
type Installation struct {
	Incarnation string `json:"incarnation"`
	Tunnel      string `json:"tunnel"` // addresses that packets to the node are sent to
}

// Limits of node IDs.
const (
	MaxNumber = 1<<14 - 1
	// NoNumber is the node ID of a node that got none because all were in use. No packets are sent to it.
	NoNumber = 0xffff
)

// NumberGrace is the minimum time of a node ID's quarantine.
const NumberGrace = time.Minute

// NumbersOptions are the options of Numbers. All except Log and Now are required.
type NumbersOptions struct {
	Path   string // of the file; "": none
	BootID string // numbers of another boot mean nothing
	// InUse reports whether an ipcache entry has the node ID.
	InUse func(uint16) bool
	// Found are the node IDs in the ipcache and in connections at the start.
	Found []uint16
	Log   *slog.Logger // nothing is logged if nil
	Now   func() time.Time
}

// Numbers assigns node IDs, which are local to this node, to other nodes. A released node ID stays in quarantine until
// neither the ipcache nor a connection uses it, so no live entry ever refers to two nodes.
//
// The node IDs are kept in a file across restarts of the process. If the file is lost, nodes get new node IDs, which is
// safe.
type Numbers struct {
	o NumbersOptions

	mu      sync.Mutex
	nodes   map[string]numbered // guarded by mu; by name
	names   map[uint16]string   // guarded by mu; of nodes
	resting map[uint16]rest     // guarded by mu
	last    uint16              // guarded by mu; the node ID that was assigned last
	changed bool                // guarded by mu; the file is outdated
	err     error               // guarded by mu; error of reading the file or of the last write
}

type numbered struct {
	Number uint16 `json:"number"`
	Installation
}

// rest is a node ID in quarantine.
type rest struct {
	name  string // name of the node that had it; "": unknown
	since time.Time
}

var numbersSchema = durable.Schema{Name: "sluice.datapath.nodes", Version: 1}

// maxNumbers is the maximum size of the file in bytes.
const maxNumbers = 16 << 20

type numbersFile struct {
	BootID  string              `json:"bootId"`
	Last    uint16              `json:"last"`
	Nodes   map[string]numbered `json:"nodes"`
	Resting map[uint16]string   `json:"resting"` // names of the nodes that had the node IDs
}

// OpenNumbers reads the file. An unreadable file is logged; then the node IDs in use go into quarantine.
func OpenNumbers(o NumbersOptions) *Numbers {
	if o.Log == nil {
		o.Log = log.Discard()
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	n := &Numbers{o: o, nodes: map[string]numbered{}, names: map[uint16]string{}, resting: map[uint16]rest{}}
	var f numbersFile
	if o.Path != "" {
		n.err = durable.Load(o.Path, maxNumbers, numbersSchema, &f)
	}
	switch {
	case errors.Is(n.err, fs.ErrNotExist):
		n.err = nil
	case n.err != nil:
		o.Log.Error("cannot read the node IDs; assigning new ones", log.Err(n.err))
	case f.BootID == o.BootID:
		n.last = f.Last
		for name, node := range f.Nodes {
			n.nodes[name], n.names[node.Number] = node, name
		}
		for number, name := range f.Resting {
			n.resting[number] = rest{name, o.Now()}
		}
	}
	taken := n.taken()
	for _, number := range o.Found {
		if !taken[number] && number != 0 && number != NoNumber {
			n.resting[number] = rest{since: o.Now()}
		}
	}
	return n
}

func (n *Numbers) taken() map[uint16]bool {
	taken := make(map[uint16]bool, len(n.nodes)+len(n.resting))
	for _, node := range n.nodes {
		taken[node.Number] = true
	}
	for number := range n.resting {
		taken[number] = true
	}
	return taken
}

// Set assigns node IDs. A node that already has one for the same installation keeps it. The result maps node IDs that
// go into quarantine to their replacements.
func (n *Numbers) Set(nodes map[string]Installation) (moved map[uint16]uint16) {
	n.mu.Lock()
	defer n.mu.Unlock()
	moved = map[uint16]uint16{}
	var taken map[uint16]bool
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		was, ok := n.nodes[name]
		if ok && was.Installation == nodes[name] && was.Number != NoNumber {
			continue
		}
		if taken == nil {
			taken = n.taken()
		}
		number := n.free(taken)
		taken[number] = true
		n.nodes[name], n.names[number] = numbered{number, nodes[name]}, name
		if ok && was.Number != number {
			moved[was.Number] = number
			n.rest(was.Number, name)
		}
		n.changed = true
	}
	return moved
}

// free returns the next free node ID: the one that has been unused for the longest time.
func (n *Numbers) free(taken map[uint16]bool) uint16 {
	for range MaxNumber {
		n.last = n.last%MaxNumber + 1
		if !taken[n.last] {
			return n.last
		}
	}
	return NoNumber
}

func (n *Numbers) rest(number uint16, name string) {
	delete(n.names, number)
	if number != NoNumber {
		n.resting[number] = rest{name, n.o.Now()}
		n.changed = true
	}
}

// Remove puts the node ID of a node into quarantine. An unknown name is not an error.
func (n *Numbers) Remove(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if node, ok := n.nodes[name]; ok {
		delete(n.nodes, name)
		n.changed = true
		n.rest(node.Number, name)
	}
}

// Of returns the node ID of a node. Without one it returns NoNumber and false.
func (n *Numbers) Of(name string) (number uint16, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	node, ok := n.nodes[name]
	if !ok {
		return NoNumber, false
	}
	return node.Number, true
}

// Names returns all nodes with their node IDs.
func (n *Numbers) Names() map[string]uint16 {
	n.mu.Lock()
	defer n.mu.Unlock()
	names := make(map[string]uint16, len(n.nodes))
	for name, node := range n.nodes {
		names[name] = node.Number
	}
	return names
}

// Name returns the node that has, or last had, a node ID; "" if it is unknown.
func (n *Numbers) Name(number uint16) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if name, ok := n.names[number]; ok {
		return name
	}
	return n.resting[number].name
}

// Passed ends the quarantine of node IDs that are no longer used. began is the time at which a complete pass over the
// connections started, seen are the node IDs found in them.
func (n *Numbers) Passed(began time.Time, seen map[uint16]struct{}) {
	n.mu.Lock()
	var waiting []uint16
	for number, r := range n.resting {
		if _, ok := seen[number]; !ok && began.Sub(r.since) >= NumberGrace {
			waiting = append(waiting, number)
		}
	}
	n.mu.Unlock()
	for _, number := range waiting {
		used := n.o.InUse(number)
		n.mu.Lock()
		if r, ok := n.resting[number]; ok && used {
			n.resting[number] = rest{r.name, n.o.Now()} // still in use: the quarantine begins again
		} else if ok {
			delete(n.resting, number)
			n.changed = true
		}
		n.mu.Unlock()
	}
}

// Resting returns the number of node IDs in quarantine.
func (n *Numbers) Resting() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.resting)
}

// Save writes the file if something has changed.
func (n *Numbers) Save() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.changed || n.o.Path == "" {
		return nil
	}
	f := numbersFile{BootID: n.o.BootID, Last: n.last, Nodes: n.nodes, Resting: make(map[uint16]string, len(n.resting))}
	for number, r := range n.resting {
		f.Resting[number] = r.name
	}
	n.err = durable.Save(n.o.Path, numbersSchema, f, durable.SyncAll)
	n.changed = n.err != nil
	return n.err
}

// Err returns the error of reading the file or of the last write.
func (n *Numbers) Err() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.err
}

// tunnelOf returns the addresses that packets to a node are sent to: the first of each family.
func tunnelOf(n Node) string {
	var first [2]string
	for _, a := range n.Addresses {
		if at := a.BitLen() / 128; first[at] == "" {
			first[at] = a.String()
		}
	}
	return cmp.Or(first[0], "-") + " " + cmp.Or(first[1], "-")
}

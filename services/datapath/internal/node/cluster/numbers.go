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

// Installation is what a number stands for besides the name of the node: another
// one of the same name has another number.
type Installation struct {
	Incarnation string `json:"incarnation"`
	Tunnel      string `json:"tunnel"` // addresses that packets to the node are sent to
}

// Bounds of numbers.
const (
	MaxNumber = 1<<14 - 1
	// NoNumber stands for a node for which no number was left. Nothing is sent to it.
	NoNumber = 0xffff
)

// NumberGrace is how long a number rests at least before another node gets it.
const NumberGrace = time.Minute

// NumbersOptions of Numbers. All but Log and Now are needed.
type NumbersOptions struct {
	Path   string // of the file; "": none is kept
	BootID string // numbers of another boot mean nothing
	// InUse says whether the ipcache has a number.
	InUse func(uint16) bool
	// Found are the numbers that the ipcache and connections have at the start.
	Found []uint16
	Log   *slog.Logger // nothing is logged if nil
	Now   func() time.Time
}

// Numbers are the numbers by which the kernel knows other nodes, of this node
// alone. A number that a node has lost rests until neither the ipcache nor a
// connection has it: it never means two nodes to anything that lives.
//
// They are kept in a file over restarts of the process. Without it everything is
// safe all the same: nodes get other numbers.
type Numbers struct {
	o NumbersOptions

	mu      sync.Mutex
	nodes   map[string]numbered // guarded by mu; by name
	names   map[uint16]string   // guarded by mu; of nodes
	resting map[uint16]rest     // guarded by mu
	last    uint16              // guarded by mu; the number that was given last
	changed bool                // guarded by mu; the file differs
	err     error               // guarded by mu; why the file could not be read or written
}

type numbered struct {
	Number uint16 `json:"number"`
	Installation
}

// rest is a number that no node has.
type rest struct {
	name  string // of the node that had it; "": not known
	since time.Time
}

var numbersSchema = durable.Schema{Name: "sluice.datapath.nodes", Version: 1}

// maxNumbers bounds the file, in bytes.
const maxNumbers = 16 << 20

// numbersFile is the content of the file.
type numbersFile struct {
	BootID  string              `json:"bootId"`
	Last    uint16              `json:"last"`
	Nodes   map[string]numbered `json:"nodes"`
	Resting map[uint16]string   `json:"resting"` // names of the nodes that had them
}

// OpenNumbers reads the file. What cannot be read is reported, and its numbers
// rest as far as they are in use.
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
		o.Log.Error("numbers of nodes not read, nodes get new ones", log.Err(n.err))
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

// Set gives nodes numbers. One that has a number as this installation keeps it.
// Moved leads from numbers that rest from now on to those that take their place.
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

// free is the next number that is not taken: the one that was not used for the
// longest time.
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

// Remove has the number of a node rest. A name without one is not an error.
func (n *Numbers) Remove(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if node, ok := n.nodes[name]; ok {
		delete(n.nodes, name)
		n.changed = true
		n.rest(node.Number, name)
	}
}

// Of is the number of a node; NoNumber: it has none.
func (n *Numbers) Of(name string) (number uint16, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	node, ok := n.nodes[name]
	if !ok {
		return NoNumber, false
	}
	return node.Number, true
}

// Names are the nodes with their numbers.
func (n *Numbers) Names() map[string]uint16 {
	n.mu.Lock()
	defer n.mu.Unlock()
	names := make(map[string]uint16, len(n.nodes))
	for name, node := range n.nodes {
		names[name] = node.Number
	}
	return names
}

// Name is the node that has, or had last, a number; "" if it is not known.
func (n *Numbers) Name(number uint16) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if name, ok := n.names[number]; ok {
		return name
	}
	return n.resting[number].name
}

// Passed ends the rest of numbers that nothing has any more. Began is when the
// connections were read, from one end to the other, and seen are the numbers in
// them.
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
			n.resting[number] = rest{r.name, n.o.Now()} // a program may just have read it
		} else if ok {
			delete(n.resting, number)
			n.changed = true
		}
		n.mu.Unlock()
	}
}

// Resting is how many numbers rest.
func (n *Numbers) Resting() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.resting)
}

// Save writes the file if anything has changed.
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

// Err is why the file could not be read, or not be written the last time.
func (n *Numbers) Err() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.err
}

// tunnelOf are the addresses that packets to a node are sent to: the first of
// each family.
func tunnelOf(n Node) string {
	var first [2]string
	for _, a := range n.Addresses {
		if at := a.BitLen() / 128; first[at] == "" {
			first[at] = a.String()
		}
	}
	return cmp.Or(first[0], "-") + " " + cmp.Or(first[1], "-")
}

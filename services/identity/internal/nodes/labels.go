// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodes

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// rest is how long the number of an unused label set is kept: by then, all readers have received the number that
// replaced it.
const rest = time.Minute

// reference is the prefix of the references that hold the numbers of nodes' label sets.
const reference = "sluice.io/node/"

// Labels maintains the identities of nodes with labels.
type Labels struct {
	allocator *allocator.Allocator
	registry  *registry.Registry
	log       *slog.Logger

	sets     map[registry.NodeSet]held // by the last apply
	unused   map[string]time.Time      // references whose number no node uses any more → since when
	problems map[string]bool           // that were logged
}

// held is the number of a label set, and the reference that holds it.
type held struct {
	registry.Numbered
	reference string
}

// NewLabels returns Labels, and assigns identities to the known nodes.
func NewLabels(ctx context.Context, a *allocator.Allocator, r *registry.Registry, l *slog.Logger) *Labels {
	f := &Labels{allocator: a, registry: r, log: l, unused: map[string]time.Time{}, problems: map[string]bool{}}
	f.apply(ctx)
	return f
}

// Run updates the identities until ctx is done; it then returns nil.
func (f *Labels) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		_, _, changed := f.registry.Labels()
		_, moved := f.registry.APIServerHere()
		var again <-chan time.Time
		if !f.apply(ctx) {
			again = time.After(retry)
		}
		select {
		case <-changed:
		case <-moved:
		case <-again:
		case <-ctx.Done():
		}
	}
	return nil
}

// apply assigns identities to all nodes; done means that all nodes have one.
func (f *Labels) apply(ctx context.Context) (done bool) {
	own, others, _ := f.registry.Labels()
	here, _ := f.registry.APIServerHere()
	problems := map[string]bool{}
	problem := func(what string, err error) {
		if ctx.Err() != nil {
			return
		}
		text := what + ": " + err.Error()
		if problems[text] = true; !f.problems[text] {
			f.log.Error("policies do not see the current labels of nodes", "what", what, log.Err(err))
		}
	}
	host, err := setOf(identity.NameHost, here, own)
	if err != nil {
		problem("rules do not select this node by its labels", err)
	}
	f.allocator.SetHostLabels(host)

	sets, numbers := map[registry.NodeSet]held{}, map[registry.NodeSet]registry.Numbered{}
	wanted := map[string]bool{}
	for node, of := range others {
		// Most nodes are unchanged, so a change of one node costs little more than that node.
		h := f.sets[node]
		if h.Number == 0 || !maps.Equal(h.Labels, of) {
			var err error
			if h, err = f.hold(ctx, node, of); err != nil {
				problem(fmt.Sprintf("rules do not select node %s by its labels", node.Node), err)
			}
		}
		sets[node], numbers[node], wanted[h.reference] = h, h.Numbered, true
	}
	f.sets = sets
	f.registry.SetNodeSets(numbers)
	f.problems = problems
	return f.release(ctx, wanted, problem) && len(problems) == 0
}

// hold assigns a number to the labels of a node. The number is 0 if it returns an error.
func (f *Labels) hold(ctx context.Context, node registry.NodeSet, of map[string]string) (held, error) {
	h := held{Numbered: registry.Numbered{Labels: of}}
	labels, err := setOf(identity.NameRemoteNode, node.APIServer, of)
	if err != nil {
		return h, err
	}
	h.reference = referenceOf(labels)
	id, err := f.allocator.HoldNodeLocal(ctx, allocator.ReferenceHolder(h.reference), labels)
	h.Number = id.Number
	return h, err
}

// release releases numbers that no node has had for a while, and reports whether no such number remains.
func (f *Labels) release(ctx context.Context, wanted map[string]bool, problem func(string, error)) (done bool) {
	before := f.unused
	f.unused = map[string]time.Time{}
	for _, name := range f.allocator.References() {
		if !strings.HasPrefix(name, reference) || wanted[name] {
			continue
		}
		since, ok := before[name]
		if !ok {
			since = time.Now()
		}
		if time.Since(since) < rest {
			f.unused[name] = since
			continue
		}
		if _, err := f.allocator.Release(ctx, allocator.ReferenceHolder(name)); err != nil {
			f.unused[name] = since
			problem("the number of labels that no node has was not given back", err)
		}
	}
	return len(f.unused) == 0
}

// referenceOf returns the name of the reference that holds the number of a label set.
func referenceOf(labels label.Canonical) string {
	sum := sha256.Sum256([]byte(labels.Text()))
	return reference + hex.EncodeToString(sum[:16])
}

// setOf returns the label set of a node. If it returns an error, the set is the set of a node without labels.
func setOf(name string, api bool, of map[string]string) (label.Canonical, error) {
	reserved := []label.Label{label.Reserved(name)}
	if api {
		reserved = append(reserved, label.Reserved(identity.NameKubeAPIServer))
	}
	all := reserved
	for key, value := range of {
		all = append(all, label.Label{Source: label.SourceNode, Key: key, Value: value})
	}
	c, err := label.Canonicalize(all...)
	if err == nil {
		return c, nil
	}
	plain, failed := label.Canonicalize(reserved...)
	if failed != nil {
		panic(failed) // these names are short
	}
	return plain, err
}

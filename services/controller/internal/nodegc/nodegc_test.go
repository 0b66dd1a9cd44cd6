// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodegc

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// cluster is an API and a Registry.
type cluster struct {
	nodes map[string]bool  // Nodes
	known map[string]error // registered nodes, and the result of forgetting them
	tries int
	away  error // error of the API
}

func (c *cluster) Exists(_ context.Context, name string) (bool, error) { return c.nodes[name], c.away }

func (c *cluster) Forget(_ context.Context, name string) error {
	c.tries++
	err, ok := c.known[name]
	switch {
	case !ok:
		return ErrUnknown
	case err == nil:
		delete(c.known, name)
	}
	return err
}

// always is the Leadership of the only candidate.
type always struct{}

func (always) While(ctx context.Context, lead func(context.Context)) { lead(ctx) }

func TestOnlyDeletedNodesAreForgotten(t *testing.T) {
	all := []string{"a", "b", "outside"}
	for _, c := range []struct {
		name  string
		do    func(*Nodes, *cluster)
		known []string // at the end, out of a, b and outside
	}{
		{"a deletion", func(n *Nodes, _ *cluster) { n.Delete("a") }, []string{"b", "outside"}},
		{"before all were listed", func(n *Nodes, _ *cluster) { n.complete = false; n.Delete("a") }, all},
		{"while the listing fails", func(n *Nodes, _ *cluster) { n.Delete("a"); n.Failed(os.ErrClosed) }, all},
		{"after the listing failed", func(n *Nodes, _ *cluster) {
			n.Failed(os.ErrClosed)
			n.Delete("a")
			n.Failed(nil)
		}, []string{"b", "outside"}},
		{"it came back", func(n *Nodes, _ *cluster) { n.Delete("a"); n.Upsert("a") }, all},
		{"it came back unseen", func(n *Nodes, c *cluster) { n.Delete("a"); c.nodes["a"] = true }, all},
		{"the API does not answer", func(n *Nodes, c *cluster) { n.Delete("a"); c.away = os.ErrDeadlineExceeded }, all},
		{"it is alive", func(n *Nodes, c *cluster) { n.Delete("a"); c.known["a"] = ErrAlive }, all},
		{"both", func(n *Nodes, c *cluster) { n.Delete("a"); n.Delete("b"); delete(c.nodes, "b") }, []string{"outside"}},
		{"a Node that is not a node of the cluster", func(n *Nodes, _ *cluster) { n.Upsert("c"); n.Delete("c") }, all},
	} {
		synctest.Test(t, func(t *testing.T) {
			cl := &cluster{nodes: map[string]bool{"b": true}, known: map[string]error{"a": nil, "b": nil, "outside": nil}}
			n, err := New(filepath.Join(t.TempDir(), "nodes.json"), cl, cl, always{}, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			n.Upsert("a")
			n.Upsert("b")
			n.Complete()
			c.do(n, cl)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { n.lead(ctx); close(done) }()
			time.Sleep(time.Hour) // the clock of the test
			cancel()
			<-done
			if got := slices.Sorted(maps.Keys(cl.known)); !slices.Equal(got, c.known) {
				t.Errorf("%s: %v are known, want %v", c.name, got, c.known)
			}
			if c.name == "it is alive" && (cl.tries < 10 || cl.tries > 30) { // 2 s, doubled up to 5 min
				t.Errorf("%d tries in an hour", cl.tries)
			}
		})
	}
}

func TestDeletionWithoutAProcessIsNoticed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "nodes.json")
	start := func(cl *cluster) *Nodes {
		n, err := New(file, cl, cl, always{}, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	save := func(n *Nodes) {
		if err := n.save(); err != nil {
			t.Fatal(err)
		}
	}
	cl := &cluster{known: map[string]error{"a": nil, "b": nil, "outside": nil}}
	n := start(cl)
	for _, name := range []string{"a", "b", "c"} {
		n.Upsert(name)
	}
	n.Complete()
	n.Delete("b") // but it is not forgotten in this run
	save(n)

	n = start(cl) // meanwhile a was deleted; c still exists
	n.Upsert("c")
	if name, _ := n.due(time.Now()); name != "" {
		t.Errorf("%s is to be forgotten before all were listed", name)
	}
	n.Complete()
	for range 2 {
		name, _ := n.due(time.Now())
		n.forget(t.Context(), name)
	}
	if got := slices.Sorted(maps.Keys(cl.known)); !slices.Equal(got, []string{"outside"}) {
		t.Errorf("%v are known, want only the node that never had a Node", got)
	}
	save(n)
	n = start(cl)
	n.Upsert("c")
	n.Complete()
	if name, _ := n.due(time.Now()); name != "" {
		t.Errorf("%s is to be forgotten again", name)
	}

	if err := os.WriteFile(file, []byte(`{"nodes":[`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := New(file, cl, cl, always{}, slog.New(slog.DiscardHandler)); err == nil || errors.Is(err, os.ErrNotExist) {
		t.Errorf("a truncated file: %v", err)
	}
}

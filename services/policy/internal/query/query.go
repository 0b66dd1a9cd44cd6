// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package query answers what is asked about policies without changing them:
// the tables of an identity, the verdict on a connection, and what a change would
// make different. It works on an engine that it is handed: that of the owner in
// one of its turns, or a copy that the caller has for itself.
package query

import (
	"fmt"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

// View is what the owner has in one of its turns.
type View struct {
	Engine     *engine.Engine
	Identities map[identity.Numeric]peer.Identity
	Cluster    string
	NodeLabels bool               // rules select nodes by their labels
	Revision   uint64             // of the policies
	Store      peer.StoreRevision // of the identities
}

// Query may need tables that the engine of the owner does not have.
type Query interface {
	// Begin finds out who is spoken of, in a turn of the owner; all that was found
	// before is void. It reports whether the engine has all of the tables.
	Begin(v View) (complete bool, err error)
	// Fork makes an engine that has them.
	Fork(d engine.Draft) (*engine.Engine, error)
	// Evaluate asks an engine that has the tables.
	Evaluate(e *engine.Engine) error
}

// Evaluated are the tables of a subject.
type Evaluated struct {
	Bound    [2]bool // by policytable.Direction; false: nothing is enforced
	Tables   [2]policytable.DefineTable
	Sources  [2][][]policytable.Source
	Revision uint64
	Store    peer.StoreRevision // of the identities
}

// Table is the question by which tables an identity is evaluated.
type Table struct {
	Identity identity.Numeric
	Answer   Evaluated
}

// Begin implements Question.
func (t *Table) Begin(v View) (complete bool, err error) {
	if _, ok := v.Engine.Identity(t.Identity); !ok {
		return false, fmt.Errorf("identity %d is %w", t.Identity, failure.ErrNotFound)
	}
	t.Answer = Evaluated{Revision: v.Revision, Store: v.Store}
	return v.Engine.IsSubject(t.Identity), nil
}

// Fork implements Question.
func (t *Table) Fork(d engine.Draft) (*engine.Engine, error) { return d.Fork(nil, t.Identity) }

// Evaluate implements Question.
func (t *Table) Evaluate(e *engine.Engine) error {
	for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
		t.Answer.Tables[d], t.Answer.Bound[d] = e.BoundTable(t.Identity, d)
		b, _ := e.Bound(t.Identity, d)
		t.Answer.Sources[d] = b.Sources
	}
	return nil
}

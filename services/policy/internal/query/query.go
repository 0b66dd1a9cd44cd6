// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package query answers queries about policies without changing them: the tables of an identity, the verdict on a
// connection, and the effect of a change. The caller provides the engine: the owner's engine during a turn of the
// owner, or a private copy.
package query

import (
	"fmt"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

// View is the owner's state during one of its turns.
type View struct {
	Engine     *engine.Engine
	Identities map[identity.Numeric]peer.Identity
	Cluster    string
	NodeLabels bool               // rules may select nodes by label
	Revision   uint64             // revision of the policies
	Store      peer.StoreRevision // revision of the identities
}

// Query is a query that may need tables that the owner's engine does not have.
type Query interface {
	// Begin resolves the identities, in a turn of the owner, and discards earlier results. complete reports whether
	// the owner's engine has all tables that the query needs.
	Begin(v View) (complete bool, err error)
	// Fork creates an engine with the needed tables.
	Fork(d engine.Draft) (*engine.Engine, error)
	// Evaluate evaluates the query with an engine that has the tables.
	Evaluate(e *engine.Engine) error
}

// Evaluated holds the tables of a subject.
type Evaluated struct {
	Bound    [2]bool // by policytable.Direction; false: the direction is not enforced
	Tables   [2]policytable.DefineTable
	Sources  [2][][]policytable.Source
	Revision uint64
	Store    peer.StoreRevision // revision of the identities
}

// Table is a query for the tables that evaluate an identity.
type Table struct {
	Identity identity.Numeric
	Answer   Evaluated
}

// Begin implements Query.
func (t *Table) Begin(v View) (complete bool, err error) {
	if _, ok := v.Engine.Identity(t.Identity); !ok {
		return false, fmt.Errorf("identity %d is %w", t.Identity, failure.ErrNotFound)
	}
	t.Answer = Evaluated{Revision: v.Revision, Store: v.Store}
	return v.Engine.IsSubject(t.Identity), nil
}

// Fork implements Query.
func (t *Table) Fork(d engine.Draft) (*engine.Engine, error) { return d.Fork(nil, t.Identity) }

// Evaluate implements Query.
func (t *Table) Evaluate(e *engine.Engine) error {
	for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
		t.Answer.Tables[d], t.Answer.Bound[d] = e.BoundTable(t.Identity, d)
		b, _ := e.Bound(t.Identity, d)
		t.Answer.Sources[d] = b.Sources
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package query

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/port"
)

// Peer is one end of a connection in a query. A Peer with an address and neither identity nor labels is outside of
// the cluster: the caller must resolve all other addresses first.
type Peer struct {
	Identity identity.Numeric // 0: given by labels, or outside of the cluster
	Labels   []label.Label
	Addr     netip.Addr
}

// Side is the evaluation of a connection on one side.
type Side struct {
	Evaluated bool          // the peer on this side is a workload
	Subject   peer.Identity // Number is 0 if no identity has the given labels
	Peer      peer.Identity
	engine.Explanation
}

// Explained is the result of Explain.
type Explained struct {
	Action   policytable.Action
	Egress   Side
	Ingress  Side
	Revision uint64
	// DNS explains the query for Name; nil without a name, or if the sender is not a workload.
	DNS *engine.NameExplanation
}

// Explain is a query about the verdicts on a connection, at its sender and its receiver.
type Explain struct {
	From, To Peer
	At       port.Point
	Name     string // DNS name that the sender looks up at the receiver; empty: none
	Answer   Explained

	src, dst peer.Identity
	extra    []peer.Identity // identities with a temporary number
	subjects []identity.Numeric
}

// selectable reports whether policies can select the identity on this node.
func selectable(id peer.Identity) bool {
	switch id.Kind {
	case identity.KindInCluster, identity.KindHost, identity.KindOther:
		return true
	}
	return false
}

// Begin implements Query.
func (x *Explain) Begin(v View) (complete bool, err error) {
	*x = Explain{From: x.From, To: x.To, At: x.At, Name: x.Name, Answer: Explained{Revision: v.Revision}}
	if x.src, err = x.resolve(v, "from", x.From); err != nil {
		return false, err
	}
	if x.dst, err = x.resolve(v, "to", x.To); err != nil {
		return false, err
	}
	complete = len(x.extra) == 0
	for _, id := range []peer.Identity{x.src, x.dst} {
		if selectable(id) {
			x.subjects = append(x.subjects, id.Number)
			complete = complete && v.Engine.IsSubject(id.Number)
		}
	}
	return complete, nil
}

// Fork implements Query.
func (x *Explain) Fork(d engine.Draft) (*engine.Engine, error) {
	return d.Fork(x.extra, x.subjects...)
}

// Evaluate implements Query.
func (x *Explain) Evaluate(e *engine.Engine) (err error) {
	x.Answer.Action = policytable.Allow
	if x.Answer.Egress, err = x.side(e, policytable.Egress, x.src, x.dst, x.To.Addr); err != nil {
		return err
	}
	if x.Answer.Ingress, err = x.side(e, policytable.Ingress, x.dst, x.src, x.From.Addr); err != nil {
		return err
	}
	if x.Name == "" || !x.Answer.Egress.Evaluated {
		return nil
	}
	explained, err := e.ExplainName(x.src.Number, x.Answer.Egress.Explanation, x.Name)
	if x.Answer.Ingress.Evaluated && x.Answer.Ingress.Verdict.Action == policytable.Deny {
		explained.Outcome = engine.QueryDenied
	}
	x.Answer.DNS = &explained
	return err
}

func (x *Explain) side(e *engine.Engine, d policytable.Direction, subject, peer peer.Identity, addr netip.Addr) (Side, error) {
	s := Side{Subject: x.shown(subject), Peer: x.shown(peer)}
	if !selectable(subject) {
		return s, nil
	}
	s.Evaluated = true
	var err error
	s.Explanation, err = e.Explain(subject.Number, d, peer.Number, addr, x.At)
	// Explain answers with the strictest verdict of the two sides.
	x.Answer.Action = min(x.Answer.Action, s.Verdict.Action)
	return s, err
}

func (x *Explain) resolve(v View, field string, p Peer) (peer.Identity, error) {
	switch {
	case p.Identity != 0:
		id, ok := v.Engine.Identity(p.Identity)
		if !ok {
			return id, fmt.Errorf("%s.identity: identity %d is %w", field, p.Identity, failure.ErrNotFound)
		}
		return id, nil
	case len(p.Labels) > 0:
		set := label.NewSet(p.Labels...)
		for _, id := range v.Identities {
			if slices.Equal(id.Labels.All(), set.All()) {
				return id, nil
			}
		}
		// Use an unused number as a temporary identity.
		for free := identity.MaxNodeLocal; ; free-- {
			taken := func(id peer.Identity) bool { return id.Number == free }
			if _, ok := v.Engine.Identity(free); ok || slices.ContainsFunc(x.extra, taken) {
				continue
			}
			id, err := peer.New(free, set)
			if err != nil {
				return id, &failure.FieldError{Field: field + ".labels", Err: err}
			}
			id = id.Complete(v.Cluster).Node(v.NodeLabels)
			x.extra = append(x.extra, id)
			return id, nil
		}
	case p.Addr.IsValid():
		number := identity.WorldIPv4
		if p.Addr.Is6() {
			number = identity.WorldIPv6
		}
		for _, try := range []identity.Numeric{number, identity.World} {
			if id, ok := v.Engine.Identity(try); ok {
				return id, nil
			}
		}
		return peer.Identity{}, fmt.Errorf("%s.address: the identity of the world, %d, is %w",
			field, number, failure.ErrNotFound)
	}
	err := errors.New("neither identity, labels nor address is given")
	return peer.Identity{}, &failure.FieldError{Field: field, Err: err}
}

// shown returns an identity without its temporary number.
func (x *Explain) shown(id peer.Identity) peer.Identity {
	if slices.ContainsFunc(x.extra, func(e peer.Identity) bool { return e.Number == id.Number }) {
		id.Number = 0
	}
	return id
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/batch"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
)

// Bounds of a transaction of several claims.
const (
	maxClaims = maxOps / 2 // etcd also counts the operations of nested transactions
	// maxClaimText bounds the label sets of a transaction: each claim contains its own up to four times, and etcd
	// accepts 1.5 MiB.
	maxClaimText = 256 << 10
	// claimsAtOnce is the number of concurrent transactions of claims: etcd receives the second while it syncs the
	// first.
	claimsAtOnce = 2
)

// claim is one step of a claim: a transaction for one number and one label set, with its result.
type claim struct {
	ctx    context.Context
	what   string
	number identity.Numeric // 0: it only reads
	labels label.Canonical

	when         []clientv3.Cmp
	then, orElse []clientv3.Op

	succeeded bool
	responses []*etcdserverpb.ResponseOp
	revision  int64
	err       error
}

// claimSteps commits steps of claims.
type claimSteps struct {
	session *session.Session
	group   *batch.Group[*claim]
}

func newClaimSteps(s *session.Session) *claimSteps {
	c := &claimSteps{session: s}
	c.group = &batch.Group[*claim]{Do: c.commitAll, Fits: disjoint, AtOnce: claimsAtOnce}
	return c
}

// commit executes a step, in one transaction with concurrent steps. Each step succeeds or fails independently.
func (s *claimSteps) commit(ctx context.Context, c *claim) error {
	c.ctx = ctx
	if err := s.group.Call(ctx, c); err != nil {
		return s.session.Fault(ctx, c.what, err)
	}
	return c.err
}

// disjoint reports whether a step may be in one transaction with others: etcd
// evaluates all conditions before it writes, and refuses to write a key twice.
func disjoint(with []*claim, c *claim) bool {
	text := len(c.labels.Text())
	for _, x := range with {
		text += len(x.labels.Text())
	}
	return len(with) < maxClaims && text <= maxClaimText && !slices.ContainsFunc(with, func(x *claim) bool {
		return x.number == c.number && c.number != 0 || x.labels.Text() == c.labels.Text()
	})
}

// commitAll executes steps that are disjoint.
func (s *claimSteps) commitAll(all []*claim) {
	if len(all) == 1 {
		s.commitOne(all[0])
		return
	}
	ctx, cancel := lasting(all)
	defer cancel()
	ops := make([]clientv3.Op, len(all))
	for i, c := range all {
		ops[i] = clientv3.OpTxn(c.when, c.then, c.orElse)
	}
	resp, err := s.session.Commit(ctx, "claim identities", s.session.Txn(ctx).Then(ops...))
	switch {
	case err == nil:
		for i, c := range all {
			r := resp.Responses[i].GetResponseTxn()
			c.succeeded, c.responses, c.revision = r.GetSucceeded(), r.GetResponses(), resp.Header.Revision
		}
	case errors.Is(err, allocator.ErrUnavailable), errors.Is(err, allocator.ErrSessionLost),
		errors.Is(err, allocator.ErrNoSpace):
		for _, c := range all {
			c.err = err
		}
	default: // One of the claims fails, so each claim gets a transaction of its own.
		for _, c := range all {
			s.commitOne(c)
		}
	}
}

func (s *claimSteps) commitOne(c *claim) {
	resp, err := s.session.Commit(c.ctx, c.what, s.session.Txn(c.ctx).If(c.when...).Then(c.then...).Else(c.orElse...))
	if err != nil {
		c.err = err
		return
	}
	c.succeeded, c.responses, c.revision = resp.Succeeded, resp.Responses, resp.Header.Revision
}

// lasting returns a context that ends with the last of the claims' contexts.
func lasting(all []*claim) (context.Context, context.CancelFunc) {
	ctx := context.WithoutCancel(all[0].ctx)
	var last time.Time
	for _, c := range all {
		end, ok := c.ctx.Deadline()
		if !ok {
			return ctx, func() {}
		}
		if end.After(last) {
			last = end
		}
	}
	return context.WithDeadline(ctx, last)
}

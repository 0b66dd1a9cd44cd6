// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
)

// What the owner does of a long operation before it looks at other calls.
const (
	subjectsAtOnce   = 16
	identitiesAtOnce = 512
)

// prepared makes a change of policies whose tables are compiled beforehand, some
// subjects at a time, so that the owner is never busy for as long as compiling
// all of them takes. What comes of coming decides nothing: if the change turns
// out to be another, it compiles what it needs itself. One change is prepared at
// a time, since the tables of before and after are there together.
func (o *Owner) prepared(ctx context.Context, coming func() engine.Change, change func() (Outcome, error)) (out Outcome, err error) {
	select {
	case o.preparing <- struct{}{}:
	case <-ctx.Done():
		return out, ctx.Err()
	case <-o.done:
		return out, ErrStopped
	}
	defer func() { <-o.preparing }()
	p, err := ask(ctx, o, func() (*engine.Preparation, error) {
		o.operation = opPrepare
		return o.engine.Prepare(coming()), nil
	})
	if err != nil {
		return out, err
	}
	if p.Subjects() <= subjectsAtOnce {
		return ask(ctx, o, change)
	}
	for more := true; more && err == nil; {
		more, err = ask(ctx, o, func() (bool, error) {
			o.operation = opPrepare
			return p.Step(subjectsAtOnce), nil
		})
	}
	if err == nil {
		out, err = ask(ctx, o, change)
	}
	// Also without a caller that waits. An owner that has ended has no tables.
	for more := true; more; {
		var ended error
		if more, ended = ask(context.WithoutCancel(ctx), o, func() (bool, error) {
			o.operation = opPrepare
			return p.Release(2 * subjectsAtOnce), nil
		}); ended != nil {
			break
		}
	}
	return out, err
}

// approach brings a subscriber nearer to the subjects that it wants, by some at a
// time, and reports whether any are left.
func (o *Owner) approach(s *subscriber, want map[identity.Numeric]struct{}) bool {
	var add, remove []identity.Numeric
	for x := range s.subjects {
		if _, ok := want[x]; !ok && len(remove) < subjectsAtOnce {
			remove = append(remove, x)
		}
	}
	for x := range want {
		if _, ok := s.subjects[x]; !ok && len(add) < subjectsAtOnce {
			add = append(add, x)
		}
	}
	if len(remove) > 0 {
		add = nil // room first
	}
	o.interest(s, add, remove, nil, nil)
	return len(add)+len(remove) > 0
}

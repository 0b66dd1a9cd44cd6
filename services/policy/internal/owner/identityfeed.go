// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"

	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/source"
)

// SetIdentities applies changes of the identity service.
func (o *Owner) SetIdentities(ctx context.Context, set []peer.Identity, gone []identity.Numeric) error {
	err := o.loop.Do(ctx, opIdentity, func() {
		o.setIdentities(set, gone)
	})
	return err
}

// Narrows reports whether the policies would allow an identity with other labels less than now. It is false until
// every source was complete once.
func (o *Owner) Narrows(ctx context.Context, n identity.Numeric, labels label.Set) (bool, error) {
	next, err := peer.New(n, labels)
	if err != nil {
		return false, err
	}
	return loop.Ask(ctx, o.loop, opRead, func() (bool, error) {
		return o.ready && o.engine.Narrows(n, o.identities.complete(next)), nil
	})
}

// setIdentities passes identity changes to the engine, and compiles subjects that waited for their identity.
func (o *Owner) setIdentities(set []peer.Identity, gone []identity.Numeric) {
	c, rec := o.identities.take(set, gone)
	if len(c.AddIdentities)+len(c.RemoveIdentities) == 0 {
		return
	}
	o.publisher.barrier.Identity += uint64(len(c.AddIdentities) + len(c.RemoveIdentities))
	o.problems.Note("identities", o.compiler.apply(c))
	subjects := make([]identity.Numeric, 0, len(c.AddIdentities))
	for _, id := range c.AddIdentities {
		subjects = append(subjects, id.Number)
	}
	o.compiler.addSubjects(subjects)
	o.storage.save(rec)
}

// TakeIdentities is SetIdentities, and records the revision of the identity service up to which the owner has every
// change; zero means unknown.
func (o *Owner) TakeIdentities(ctx context.Context, set []peer.Identity, gone []identity.Numeric, at peer.Revision) error {
	err := o.loop.Do(ctx, opOther, func() {
		o.setIdentities(set, gone)
		o.publisher.barrier.IdentityService = at
	})
	return err
}

// CompleteIdentities reports that listed contains all existing identities.
func (o *Owner) CompleteIdentities(ctx context.Context, listed map[identity.Numeric]struct{}) error {
	for more := true; more; {
		var err error
		if more, err = loop.Ask(ctx, o.loop, opIdentity, func() (bool, error) {
			gone := o.identities.others(listed)
			if len(gone) > identitiesAtOnce {
				o.setIdentities(nil, gone[:identitiesAtOnce])
				return true, nil
			}
			o.setIdentities(nil, gone)
			o.sources.completed(source.Identity)
			return false, nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policyhistory"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// subject returns the subject of an identity, and creates it if needed.
func (a *Applier) subject(id uint32) *subject {
	s, fresh := a.endpoints.subject(id)
	if fresh {
		// The service may already have sent the tables of this subject: the subject was dropped a moment ago, or while
		// the service was not connected.
		if a.model != nil && a.model.binds[id] != nil {
			if err := a.flipSubject(newWork(context.Background()), id, s); err != nil {
				a.log.Error("cannot apply the policy tables of a subject", "subject", id, log.Err(err))
			}
		}
	}
	return s
}

// Await returns when the kernel has the tables of an identity and other tables include the identity;
// at once if they already do. Without Config.Wait it only subscribes to them. ErrUnavailable if
// they do not arrive in time; ErrNoCapacity if they do not fit.
func (a *Applier) Await(ctx context.Context, identity uint32) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.await(ctx, identity, a.cfg.Wait)
}

// await is called with the lock held, and releases it while it waits. When it returns, nothing has
// changed since its last check.
func (a *Applier) await(ctx context.Context, identity uint32, wait bool) error {
	s := a.subject(identity)
	s.use()
	defer a.endpoints.release(s)
	if !wait || a.enforceable(identity, s) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, a.cfg.Timeout)
	defer cancel()
	for {
		if s.refusal != "" {
			return fmt.Errorf("policy of identity %d: %w: %s", identity, nodetable.ErrNoCapacity, s.refusal)
		}
		changed := a.changed
		a.mu.Unlock()
		var late bool
		select {
		case <-changed:
		case <-ctx.Done():
			late = true
		}
		a.mu.Lock()
		if a.enforceable(identity, s) {
			return nil
		}
		if late {
			if _, err := a.session.State(); err != nil {
				return fmt.Errorf("policy of identity %d: %w: %w", identity, ErrUnavailable, err)
			}
			if why := cmp.Or(a.next.held, a.refused); why != "" {
				return fmt.Errorf("policy of identity %d: %w: %w: %s", identity, ErrUnavailable, ErrHeld, why)
			}
			return fmt.Errorf("policy of identity %d: %w: %w", identity, ErrUnavailable, a.silence(ctx))
		}
	}
}

// silenceTime is the timeout of the request that asks the service why it has sent nothing.
const silenceTime = 500 * time.Millisecond

// silence returns why the service has not sent tables. It is called with the lock held, and
// releases it while it asks the service.
func (a *Applier) silence(ctx context.Context) error {
	a.mu.Unlock()
	defer a.mu.Lock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), silenceTime)
	defer cancel()
	if p, ok := a.cfg.Service.(interface{ Ping(context.Context) error }); ok {
		if err := p.Ping(ctx); errors.Is(err, policystream.ErrWaits) {
			return err
		}
	}
	return errors.New("the policy service has not sent its tables")
}

// enforceable reports whether an endpoint of the identity may start: the kernel has its tables, and
// other tables include the identity, or have no capacity for it.
func (a *Applier) enforceable(identity uint32, s *subject) bool {
	if !s.ready {
		return false
	}
	if _, known := a.identities.entries[identity]; known || a.model == nil {
		return true
	}
	_, waits := a.model.entry(identity)
	return waits
}

// PublishFunc publishes an endpoint to the programs. It returns its ID and epoch.
type PublishFunc func(egress, ingress nodetable.ID) (slot uint16, epoch uint32, err error)

// Begin publishes a new endpoint with its tables by calling publish under the lock, so that the
// tables cannot change in between. If the service removed them since Await, because the subject had
// no endpoints, it waits for them again.
func (a *Applier) Begin(ctx context.Context, identity uint32, addrs []netip.Addr, publish PublishFunc) (uint16, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.await(ctx, identity, a.cfg.Wait); err != nil {
		return 0, err
	}
	return a.publish(identity, addrs, publish)
}

// Publish is like Begin, but for an endpoint that existed before: until its tables are known, it allows only the local
// node.
func (a *Applier) Publish(identity uint32, addrs []netip.Addr, publish PublishFunc) (uint16, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.publish(identity, addrs, publish)
}

func (a *Applier) publish(identity uint32, addrs []netip.Addr, publish PublishFunc) (uint16, error) {
	s := a.subject(identity)
	egress, ingress := nodetable.Pending, nodetable.Pending
	if s.ready {
		egress, ingress = s.egress, s.ingress
	}
	n, epoch, err := publish(egress, ingress)
	if err != nil {
		if s.users == 0 && s.until.IsZero() {
			s.users++
			a.endpoints.release(s)
		}
		return 0, err
	}
	e := &slot{Binding: nodetable.Binding{
		Slot: n, Identity: identity, Addrs: addrs, Egress: egress, Ingress: ingress, Epoch: epoch,
	}}
	a.endpoints.slots[n] = e
	s.use()
	if a.cfg.Audit || a.auditAll {
		if err := a.cfg.Kernel.SetAudit(context.Background(), true, n); err != nil {
			a.log.Error("failed to set the audit mode", "slot", n, log.Err(err))
		} else {
			e.audit = true
		}
	}
	a.History.Set(n, a.endpoints.policyOf(n), a.cfg.Now())
	a.endpoints.subscriptionChanged()
	return n, nil
}

// Drop stops changing the policy of an endpoint, and calls cut, which stops its traffic. It may be
// repeated.
func (a *Applier) Drop(n uint16, cut func() error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	e := a.endpoints.slots[n]
	if e == nil {
		return cut()
	}
	if err := cut(); err != nil {
		return err
	}
	delete(a.endpoints.slots, n)
	a.History.Drop(n, a.cfg.Now())
	if s := a.endpoints.subjects[e.Identity]; s != nil {
		a.endpoints.release(s)
	}
	return nil
}

// SetIdentityFunc changes the identity of an endpoint in the kernel together with its tables, by
// one store. Its epoch is not 0 if they are changed, even with an error.
type SetIdentityFunc func(egress, ingress nodetable.ID) (epoch uint32, err error)

// SetIdentity changes the identity of an endpoint by calling set with the tables of the new
// identity. It waits for the tables as Await does, even without Config.Wait; until then the
// endpoint keeps its identity and its tables. ErrNoEndpoint if no endpoint has the ID.
func (a *Applier) SetIdentity(ctx context.Context, n uint16, identity uint32, set SetIdentityFunc) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.await(ctx, identity, true); err != nil {
		return err
	}
	s := a.subject(identity)
	return a.setIdentity(n, identity, s.egress, s.ingress, set)
}

// SetIdentityOrIsolate is like SetIdentity, but for a change that must not be delayed: if the tables of the identity do
// not fit, or policies are not adopted, the endpoint gets the identity and is isolated in each direction without a
// table. It gets the missing tables as soon as they exist. reason is empty if the endpoint has all tables.
func (a *Applier) SetIdentityOrIsolate(ctx context.Context, n uint16, identity uint32, set SetIdentityFunc,
) (reason string, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.subject(identity)
	if reason = cmp.Or(s.refusal, a.next.held, a.refused); reason == "" || a.enforceable(identity, s) {
		reason = ""
		err = a.await(ctx, identity, true)
		s = a.subject(identity)
		if s.refusal != "" { // the refusal was set while this call waited
			reason, err = s.refusal, nil
		}
	}
	if err != nil {
		return "", err
	}
	egress, ingress := nodetable.Pending, nodetable.Pending
	if s.ready || s.refusal != "" {
		egress, ingress = s.egress, s.ingress
	}
	return reason, a.setIdentity(n, identity, egress, ingress, set)
}

func (a *Applier) setIdentity(n uint16, identity uint32, egress, ingress nodetable.ID, set SetIdentityFunc) error {
	e, s := a.endpoints.slots[n], a.subject(identity)
	if e == nil {
		return fmt.Errorf("endpoint ID %d: %w", n, ErrNoEndpoint)
	}
	old := a.endpoints.subjects[e.Identity]
	s.use()
	var after error
	err := a.History.Flip(n, a.cfg.Now(), func() (p policyhistory.Policy, err error) {
		epoch, err := set(egress, ingress)
		if epoch == 0 {
			return p, err
		}
		after = err
		e.Identity, e.Egress, e.Ingress, e.Epoch = identity, egress, ingress, epoch
		return a.endpoints.policyOf(n), nil
	})
	if err != nil {
		a.endpoints.release(s)
		return fmt.Errorf("look up the identity of endpoint ID %d: %w", n, err)
	}
	if old != nil {
		a.endpoints.release(old)
	}
	a.endpoints.subscriptionChanged()
	return after
}

// Prepare returns when the kernel has the tables of an identity, as Await does, even without
// Config.Wait.
func (a *Applier) Prepare(ctx context.Context, identity uint32) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.await(ctx, identity, true)
}

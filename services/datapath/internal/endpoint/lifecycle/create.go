// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/kit/deadline"
	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/reaper"
)

// step is one step of a creation and its undo. undo must also work if do failed half-way; it is not
// called if do was not.
type step struct {
	name  string
	do    func(context.Context) error
	undo  func() error
	after *fault.Point // nil: no fault point
}

// Fault points after the steps, named after the completed step.
var (
	faultIntent    = fault.Register("datapath/create/intent")
	faultLease     = fault.Register("datapath/create/lease")
	faultIdentity  = fault.Register("datapath/create/identity")
	faultPolicy    = fault.Register("datapath/create/policy")
	faultDevice    = fault.Register("datapath/create/device")
	faultConfigure = fault.Register("datapath/create/configure")
	faultPublish   = fault.Register("datapath/create/publish")
	faultAttach    = fault.Register("datapath/create/attach")
	faultActivate  = fault.Register("datapath/create/activate")
	faultHostPorts = fault.Register("datapath/create/host-ports")
	faultReady     = fault.Register("datapath/create/ready")
)

// Create creates the endpoint of s and returns when it is completely set up. A repeated call with
// the same content returns the same endpoint. With validateOnly it only checks what can be checked
// without changes.
//
// If a step fails, the steps before it are undone in reverse order. Restore finds an incomplete
// creation of a killed process by the record that the first step writes.
func (l *Lifecycle) Create(ctx context.Context, s endpoint.Spec, validateOnly bool) (_ endpoint.Endpoint, err error) {
	s = s.Normalise()
	if err := s.Validate(); err != nil {
		return endpoint.Endpoint{}, err
	}
	if err := l.inRange(s); err != nil {
		return endpoint.Endpoint{}, err
	}
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	leave, err := l.registry.locks.LockWith(ctx, s.Owner, abort)
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	defer leave()

	ns, err := l.cfg.Links.OpenNamespace(s.Netns)
	if err != nil {
		return endpoint.Endpoint{}, namespaceField(err)
	}
	defer ns.Close()

	if u, bad := l.registry.unreadableOf(s.Owner); bad {
		return endpoint.Endpoint{}, fmt.Errorf("endpoint of %s: %w: %w; %s", s.Owner, endpoint.ErrUnreadable, u.Err, wayOut)
	}
	if old, ok := l.registry.record(s.Owner); ok && old.Phase != endpoint.PhaseDeleted {
		switch {
		case !l.hasDevice(old) || l.halfDeleted(old):
			// The device no longer exists: it was removed with its namespace, or by an operator. So there is no
			// endpoint to return, and no traffic to protect. Namespace inodes are reused at once, so a new namespace
			// may look like the old one. If an earlier deletion failed half-way, it is completed.
			if validateOnly {
				break
			}
			if err := l.dispose(ctx, old); err != nil {
				return endpoint.Endpoint{}, err
			}
		case old.Phase == endpoint.PhaseReady && old.Spec.SameContent(s) && old.Namespace == ns.ID():
			if err := l.learn(old, s, validateOnly); err != nil {
				return endpoint.Endpoint{}, err
			}
			return l.registry.Get(s.Owner)
		case !l.orphaned(old):
			return endpoint.Endpoint{}, old.Spec.Exists(s)
		case validateOnly:
		default:
			if err := l.dispose(ctx, old); err != nil {
				return endpoint.Endpoint{}, err
			}
		}
	}
	r := endpoint.Record{
		Phase: endpoint.PhaseCreating, BootID: l.cfg.BootID, Spec: s, Namespace: ns.ID(), Device: l.cfg.device(s),
	}
	if !s.LeaseExpiry.IsZero() && !l.cfg.Now().Before(s.LeaseExpiry) {
		return endpoint.Endpoint{}, fmt.Errorf("%w: it expired at %s",
			endpoint.ErrLease, s.LeaseExpiry.UTC().Format("15:04:05.000Z"))
	}
	if validateOnly {
		return l.registry.endpoint(r, endpoint.WaitingForIdentity), l.resolver.askTenant(ctx, s, l.cfg.HostPorts.Check)
	}
	return l.create(ctx, ns, r)
}

// learn adds manager and pod to a record that lacks them. The caller holds the owner's mutex.
func (l *Lifecycle) learn(r endpoint.Record, s endpoint.Spec, validateOnly bool) error {
	known := r.Spec.Learn(s)
	if validateOnly || known.Scope() == r.Spec.Scope() && known.Pod == r.Spec.Pod {
		return nil
	}
	r.Spec = known
	if err := l.cfg.Records.Save(r); err != nil {
		return err
	}
	l.registry.set(r, endpoint.Ready)
	return nil
}

// creation is an endpoint that is being created.
type creation struct {
	*Lifecycle
	ns           endpoint.Namespace
	r            endpoint.Record
	needsRelease bool // the lease may be confirmed, so it has to be released
	claims       *claim
	published    chan struct{} // closed when other nodes can know the addresses; nil: nothing to wait for
}

func (l *Lifecycle) create(ctx context.Context, ns endpoint.Namespace, r endpoint.Record) (endpoint.Endpoint, error) {
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	n := &creation{Lifecycle: l, ns: ns, r: r}
	if err := n.carryOut(ctx, n.steps(abort)); err != nil {
		return endpoint.Endpoint{}, err
	}
	l.registry.setUnrepaired(r.Spec.Owner, nil)
	l.registry.set(n.r, endpoint.Ready)
	if n.published != nil {
		<-n.published
	}
	return l.registry.Get(r.Spec.Owner)
}

// steps returns the steps of the creation. abort cancels the claims.
func (n *creation) steps(abort context.CancelCauseFunc) []step {
	return []step{
		{"write the intent", n.intend, n.rollBack, faultIntent},

		// Call the other services while the device is created, which does not depend on their
		// answers: nothing can be sent before it is up.
		{"claim lease, identity and policy", func(ctx context.Context) error {
			n.needsRelease = true
			n.claims = n.claim(ctx, n.r.Spec)
			return nil
		}, func() error {
			abort(errUndone)
			<-n.claims.done
			return nil
		}, nil},

		{"create the device", func(context.Context) (err error) {
			made, err := n.cfg.Links.Create(n.ns, n.r.Device)
			if errors.Is(err, endpoint.ErrNameTaken) {
				// The device of a deleted endpoint may still use the name, until its namespace vanishes or the reaper
				// removes it.
				n.Reaper.Reap(reaper.Everything)
				made, err = n.cfg.Links.Create(n.ns, n.r.Device)
			}
			if err == nil {
				n.r.Device = made
			}
			return err
		}, func() error {
			if n.r.Device.HostIndex == 0 {
				return nil
			}
			return n.cfg.Links.Remove([]endpoint.HostDevice{{Name: n.r.Device.HostName, Index: n.r.Device.HostIndex}})
		}, faultDevice},

		{"configure the device", func(context.Context) error {
			return n.cfg.Links.Configure(n.ns, n.r.Device)
		}, nil, faultConfigure},

		{"await lease, identity and policy", func(ctx context.Context) error {
			<-n.claims.done
			n.r.Identity = n.claims.identity
			if n.claims.err == nil {
				n.awaitPublication(ctx)
			}
			return n.claims.err
		}, nil, nil},

		{"publish the endpoint", func(ctx context.Context) error {
			e, err := n.entry()
			if err == nil {
				n.r.Slot, err = n.cfg.Maps.Publish(ctx, e)
			}
			return err
		}, func() error {
			if n.r.Slot == 0 {
				return nil
			}
			return ignore(n.cfg.Maps.Unpublish(n.r.Slot), endpoint.ErrNotFound)
		}, faultPublish},

		{"attach the programs", func(context.Context) error { return n.cfg.Links.Attach(n.r.Device) }, nil, faultAttach},

		{"set the device up", func(context.Context) error {
			up, err := n.cfg.Links.Activate(n.ns, n.r.Device)
			if err == nil && len(up.SourceRouted) > len(n.r.Device.SourceRouted) && n.Reaper.Any() {
				// A deleted endpoint's device may still have the default routes of the namespace.
				n.Reaper.Reap(reaper.Everything)
				up, err = n.cfg.Links.Activate(n.ns, n.r.Device)
			}
			if err == nil {
				n.r.Device = up
			}
			return err
		}, func() error { return n.cfg.Links.Deactivate(n.ns, n.r.Device) }, faultActivate},

		{"forward the host ports", func(ctx context.Context) error {
			return n.cfg.HostPorts.Lead(ctx, n.r.Spec.Owner)
		}, func() error { return n.cfg.HostPorts.Release(n.r.Spec.Owner) }, faultHostPorts},

		{"write the record", func(context.Context) error {
			n.r.Phase, n.r.Created, n.r.Evaluated = endpoint.PhaseReady, n.cfg.Now().UTC(), n.cfg.Policies != nil
			return n.cfg.Records.Save(n.r)
		}, nil, faultReady},
	}
}

// intend reserves addresses and host ports, and writes the record.
func (n *creation) intend(ctx context.Context) (err error) {
	var devices []endpoint.HostDevice
	if n.registry.mayShare(n.r) { // a listing costs more than the rest of the step
		if devices, err = n.cfg.Links.Devices(); err != nil {
			return err
		}
	}
	if err = n.reserve(devices); err != nil {
		return err
	}
	if err = n.resolver.askTenant(ctx, n.r.Spec, n.cfg.HostPorts.Claim); err == nil {
		err = n.cfg.Records.Save(n.r)
	}
	if err != nil {
		n.registry.forget(n.r.Spec.Owner)
		return errors.Join(err, n.cfg.HostPorts.Release(n.r.Spec.Owner))
	}
	return nil
}

// reserve reserves the addresses for the owner, unless a live endpoint has one. The first attachment of a namespace
// gets the default routes of its address families; the addresses of later ones become source-routed. devices are the
// node's devices. They are nil if mayShare returned false: an attachment whose creation has started since has no
// device yet.
func (n *creation) reserve(devices []endpoint.HostDevice) error {
	n.registry.mu.Lock()
	defer n.registry.mu.Unlock()
	r := n.r
	if err := n.inRange(r.Spec); err != nil {
		return err
	}
	for _, a := range r.Spec.Addrs {
		if holder, ok := n.registry.holders[a]; ok && holder != r.Spec.Owner {
			return &endpoint.HeldError{Addr: a, Holder: holder}
		}
	}
	for o := range n.registry.namespaces[r.Namespace] {
		other := n.registry.records[o]
		if o == r.Spec.Owner || !other.Shares(r, devices) {
			continue
		}
		if n.cfg.RefuseSecond {
			return fmt.Errorf("%w: %s; secondInterfaces allows more", endpoint.ErrSecond, o)
		}
		for _, a := range r.Spec.Addrs {
			if other.Leads(a) && !slices.Contains(r.Device.SourceRouted, a) {
				r.Device.SourceRouted = append(r.Device.SourceRouted, a)
			}
		}
	}
	slices.SortFunc(r.Device.SourceRouted, netip.Addr.Compare)
	n.r = r
	n.registry.setLocked(r, endpoint.WaitingForIdentity)
	return nil
}

// entry returns the map entry of a new endpoint.
func (n *creation) entry() (e endpoint.Entry, err error) {
	e = n.r.Entry()
	e.New = true
	if n.cfg.Sockets {
		e.Cookie, err = n.ns.Cookie()
	}
	return e, err
}

// awaitPublication starts to wait until other nodes can know the addresses, while the remaining
// steps run.
func (n *creation) awaitPublication(ctx context.Context) {
	if n.cfg.Published == nil {
		return
	}
	published, owner := make(chan struct{}), n.r.Spec.Owner // the steps change the record
	n.published = published
	go func() {
		defer close(published)
		n.cfg.Published(ctx, owner)
	}()
}

// carryOut runs the steps. If one fails, it undoes that step and the steps before it.
func (n *creation) carryOut(ctx context.Context, steps []step) error {
	for i, st := range steps {
		err := context.Cause(ctx)
		last := i - 1 // the last step that was started
		if err == nil {
			last = i
			err = st.do(ctx)
			if err == nil && st.after != nil {
				err = st.after.Hit(ctx)
			} else if err != nil && i == 0 {
				return fmt.Errorf("%s: %w", st.name, err)
			}
			if cause := context.Cause(ctx); err != nil && cause != nil {
				err = fmt.Errorf("%w (%w)", cause, err)
			}
		}
		if err == nil {
			continue
		}
		err = fmt.Errorf("%s: %w", st.name, err)
		for ; last >= 0; last-- {
			if steps[last].undo == nil {
				continue
			}
			if uerr := steps[last].undo(); uerr != nil {
				// not an error for the caller: the record stays, and Restore or the audit tries
				// again
				n.cfg.Log.ErrorContext(ctx, "cannot undo a failed creation completely",
					"owner", n.r.Spec.Owner.String(), "step", steps[last].name, log.Err(uerr))
			}
		}
		return err
	}
	return nil
}

// errUndone cancels the claims of a creation that is undone.
var errUndone = errors.New("the creation was undone")

// claim holds the results of the calls to other services.
type claim struct {
	done     chan struct{}     // closed when the other fields are valid
	identity endpoint.Identity // may be set even if err is not nil
	err      error
}

// claim confirms the lease and concurrently resolves the identity and waits for its tables, so that
// the endpoint starts with them. The first error cancels the other call, whose outcome is then
// unknown: the tombstone releases both.
//
// The two calls need no order, because the record is written before both: a power failure that loses the record also
// loses the reference to the identity, and the reconciliation with sluice-ipam finds a confirmed address. Releases have
// an order: the identity first.
func (n *creation) claim(ctx context.Context, s endpoint.Spec) *claim {
	cl := &claim{done: make(chan struct{})}
	ctx, cancel := deadline.Answerable(ctx)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		if err := n.cfg.Leases.Confirm(ctx, s.Owner, s.Addrs); err != nil {
			return fmt.Errorf("confirm the lease: %w", err)
		}
		return faultLease.Hit(ctx)
	})
	g.Go(func() (err error) {
		if cl.identity, err = n.resolver.resolve(ctx, s); err != nil {
			return fmt.Errorf("resolve the identity: %w", err)
		}
		if err := faultIdentity.Hit(ctx); err != nil || n.cfg.Policies == nil {
			return err
		}
		n.registry.awaits(s.Owner, endpoint.WaitingForPolicy)
		if err := n.cfg.Policies.Await(ctx, cl.identity.Number); err != nil {
			return fmt.Errorf("await the policy: %w", err)
		}
		return faultPolicy.Hit(ctx)
	})
	go func() {
		defer close(cl.done)
		defer cancel()
		cl.err = g.Wait()
	}()
	return cl
}

// rollBack ends a creation that was undone. It writes a tombstone if something has to be released,
// else it removes the record.
func (n *creation) rollBack() error {
	// The record stays as long as host ports may be forwarded to the endpoint.
	o := n.r.Spec.Owner
	if err := n.cfg.HostPorts.Release(o); err != nil {
		return err
	}
	if !n.needsRelease {
		err := n.cfg.Records.Remove(o)
		if err == nil {
			n.registry.forget(o)
		}
		return err
	}
	return n.markDeleted(n.r)
}

// markDeleted replaces a record by a tombstone.
func (l *Lifecycle) markDeleted(r endpoint.Record) error {
	t := endpoint.Record{Phase: endpoint.PhaseDeleted, BootID: l.cfg.BootID, Spec: endpoint.Spec{Owner: r.Spec.Owner}}
	if err := l.cfg.Records.Save(t); err != nil {
		return err
	}
	l.registry.set(t, endpoint.Disconnecting)
	wake(l.allocations.wake)
	return nil
}

// orphaned reports whether the container of a record is gone: its path holds no namespace, or
// another one, and its device is gone, too.
func (l *Lifecycle) orphaned(r endpoint.Record) bool {
	ns, err := l.cfg.Links.OpenNamespace(r.Spec.Netns)
	if err == nil {
		defer ns.Close()
		if ns.ID() == r.Namespace {
			return false
		}
	} else if !errors.Is(err, endpoint.ErrNamespaceGone) && !errors.Is(err, endpoint.ErrNamespace) {
		return false
	}
	return !l.hasDevice(r)
}

// halfDeleted reports whether a deletion or repair was not completed.
func (l *Lifecycle) halfDeleted(r endpoint.Record) bool {
	return r.Phase == endpoint.PhaseReady && (r.Slot == 0 || l.registry.disconnecting(r.Spec.Owner))
}

// hasDevice reports whether the node has a device of the record's name. It returns true if the
// devices cannot be listed.
func (l *Lifecycle) hasDevice(r endpoint.Record) bool {
	devices, err := l.cfg.Links.Devices()
	if err != nil {
		return true
	}
	return slices.ContainsFunc(devices, func(d endpoint.HostDevice) bool { return d.Name == r.Device.HostName })
}

// namespaceField turns an error about the namespace into an ErrInvalid that names the field. The
// original error is kept for its detail.
func namespaceField(err error) error {
	if errors.Is(err, endpoint.ErrNamespace) || errors.Is(err, endpoint.ErrNamespaceGone) {
		return fmt.Errorf("%w: %w", &endpoint.FieldError{Field: "network_namespace", Reason: "cannot be used"}, err)
	}
	return err
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kit/log"
)

// Times of an election. A holder that cannot renew its lease stops leading after
// renewDeadline since it last began a renewal that succeeded. Another process
// takes the lease after leaseDuration since it saw the last renewal, which is
// later. So the clocks of the two need not agree, only run about equally fast.
const (
	leaseDuration = 15 * time.Second
	renewDeadline = 10 * time.Second
	leaseRetry    = 2 * time.Second // between two renewals, and between two looks at another's lease
)

// Election has one process lead among those that name the same Lease. The record
// is that of k8s.io/client-go/tools/leaderelection, which is not used: it links
// the types and clients of the whole API.
type Election struct {
	client          *rest.RESTClient
	namespace, name string
	identity        string
	log             *slog.Logger

	// seen is the last record, at is when it was first seen.
	seen string
	at   time.Time
}

// Election returns an election by a Lease. The identity tells the processes apart.
func (c *Client) Election(namespace, name, identity string) (*Election, error) {
	client, err := c.REST(coordinationv1.SchemeGroupVersion, coordinationv1.AddToScheme)
	if err != nil {
		return nil, err
	}
	l := c.log.With("lease", namespace+"/"+name)
	return &Election{client: client, namespace: namespace, name: name, identity: identity, log: l}, nil
}

// Run calls lead whenever this process is elected, and again after a loss, until
// ctx ends; it then gives the lease back and returns nil. The context of lead ends
// when the lease may be lost. Run waits for lead to return before anything else:
// lead has to return as soon as its context has ended.
func (e *Election) Run(ctx context.Context, lead func(ctx context.Context)) error {
	var failure string
	for {
		began := time.Now()
		lease, err := e.acquire(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			if failure != err.Error() {
				failure = err.Error()
				e.log.Warn("the lease cannot be read or taken", log.Err(err))
			}
		case lease != nil:
			failure = ""
			e.log.Info("elected")
			e.hold(ctx, lease, began, lead)
		}
		if !pause(ctx, leaseRetry) {
			return nil
		}
	}
}

// acquire takes the lease if it is free. It returns nil if another process has it.
func (e *Election) acquire(ctx context.Context) (*coordinationv1.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, renewDeadline/2)
	defer cancel()
	lease, err := e.get(ctx)
	if apierrors.IsNotFound(err) {
		lease = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: e.name}}
		e.claim(lease)
		lease, err = e.create(ctx, lease)
		if apierrors.IsAlreadyExists(err) {
			return nil, nil // another process was faster
		}
		return lease, err
	}
	if err != nil || !e.free(lease, time.Now()) {
		return nil, err
	}
	e.claim(lease)
	lease, err = e.update(ctx, lease)
	if apierrors.IsConflict(err) {
		return nil, nil // another process was faster
	}
	return lease, err
}

// free reports whether the lease may be taken: it has no holder, this process has
// it, or its holder has not renewed it for its time since it was seen.
func (e *Election) free(lease *coordinationv1.Lease, now time.Time) bool {
	if lease.ResourceVersion != e.seen {
		e.seen, e.at = lease.ResourceVersion, now
	}
	holder, lasts := lease.Spec.HolderIdentity, lease.Spec.LeaseDurationSeconds
	if holder == nil || *holder == "" || *holder == e.identity {
		return true
	}
	duration := leaseDuration
	if lasts != nil {
		duration = time.Duration(*lasts) * time.Second
	}
	return now.Sub(e.at) > duration
}

// claim writes this process into the record.
func (e *Election) claim(lease *coordinationv1.Lease) {
	s := &lease.Spec
	now, seconds := metav1.NowMicro(), int32(leaseDuration/time.Second)
	if s.HolderIdentity == nil || *s.HolderIdentity != e.identity {
		transitions := int32(0)
		if s.LeaseTransitions != nil {
			transitions = *s.LeaseTransitions + 1
		}
		s.LeaseTransitions, s.AcquireTime = &transitions, &now
	}
	s.HolderIdentity, s.LeaseDurationSeconds, s.RenewTime = &e.identity, &seconds, &now
}

// hold leads and renews the lease until ctx ends or the lease may be lost.
func (e *Election) hold(
	ctx context.Context, lease *coordinationv1.Lease, renewed time.Time, lead func(context.Context),
) {
	leading, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		lead(leading)
	}()
	defer func() {
		stop()
		<-done
		if ctx.Err() != nil {
			e.release(lease)
		}
	}()
	for pauseUntil(ctx, leaseRetry, renewed.Add(renewDeadline)) {
		began := time.Now()
		left := renewDeadline - began.Sub(renewed)
		if left <= 0 {
			e.log.Warn("not leading any more: the lease was not renewed in time")
			return
		}
		next, err := e.renew(ctx, lease, left)
		switch {
		case err == nil && next == nil:
			e.log.Warn("not leading any more: another process has the lease")
			return
		case err == nil:
			lease, renewed = next, began
		case ctx.Err() == nil:
			e.log.Warn("the lease was not renewed yet", log.Err(err))
		}
	}
}

// renew returns nil if another process has the lease. It takes no longer than left.
func (e *Election) renew(
	ctx context.Context, lease *coordinationv1.Lease, left time.Duration,
) (*coordinationv1.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	mine := lease.DeepCopy()
	e.claim(mine)
	next, err := e.update(ctx, mine)
	if !apierrors.IsConflict(err) {
		return next, err
	}
	// A renewal whose answer was lost, or something else that changed the object.
	now, err := e.get(ctx)
	if err != nil {
		return nil, err
	}
	if now.Spec.HolderIdentity == nil || *now.Spec.HolderIdentity != e.identity {
		return nil, nil
	}
	e.claim(now)
	return e.update(ctx, now)
}

// release gives the lease back, so that another process need not wait for its end.
func (e *Election) release(lease *coordinationv1.Lease) {
	ctx, cancel := context.WithTimeout(context.Background(), leaseRetry)
	defer cancel()
	free, nobody, second := lease.DeepCopy(), "", int32(1)
	free.Spec.HolderIdentity, free.Spec.LeaseDurationSeconds = &nobody, &second
	if _, err := e.update(ctx, free); err != nil {
		e.log.Info("the lease is not given back; it ends by its time", log.Err(err))
	}
}

func (e *Election) get(ctx context.Context) (*coordinationv1.Lease, error) {
	out := &coordinationv1.Lease{}
	err := e.client.Get().Namespace(e.namespace).Resource("leases").Name(e.name).Do(ctx).Into(out)
	return answered(out, "read the lease", err)
}

func (e *Election) create(ctx context.Context, lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	out := &coordinationv1.Lease{}
	err := e.client.Post().Namespace(e.namespace).Resource("leases").Body(lease).Do(ctx).Into(out)
	return answered(out, "create the lease", err)
}

func (e *Election) update(ctx context.Context, lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	out := &coordinationv1.Lease{}
	err := e.client.Put().Namespace(e.namespace).Resource("leases").Name(e.name).Body(lease).Do(ctx).Into(out)
	return answered(out, "write the lease", err)
}

func answered(lease *coordinationv1.Lease, what string, err error) (*coordinationv1.Lease, error) {
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return lease, nil
}

// pause waits about so long. It returns false when ctx has ended.
func pause(ctx context.Context, d time.Duration) bool {
	return sleep(ctx, d+rand.N(d/5))
}

// pauseUntil is pause, but ends at a time.
func pauseUntil(ctx context.Context, d time.Duration, end time.Time) bool {
	return sleep(ctx, min(d+rand.N(d/5), time.Until(end)))
}

// sleep waits. It returns false when ctx has ended.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

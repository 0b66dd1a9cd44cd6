// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package election

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// lock is a Lease that reports the result of each request. Its methods are called by one goroutine.
type lock struct {
	resourcelock.Interface
	answered func(holder string, err error)

	// renewed and taken are the callbacks of a term. renewed is called after each successful write, with the start
	// time of the request. taken is called when another process has taken the Lease from this process.
	renewed func(began time.Time)
	taken   func()
	held    bool
}

// begin sets the callbacks of the next term.
func (l *lock) begin(renewed func(began time.Time), taken func()) {
	l.renewed, l.taken, l.held = renewed, taken, false
}

// Get implements resourcelock.Interface.
func (l *lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := l.Interface.Get(ctx)
	switch {
	case err == nil:
		l.answered(record.HolderIdentity, nil)
		if l.held && record.HolderIdentity != l.Identity() {
			l.taken()
		}
	case apierrors.IsNotFound(err):
		l.answered("", nil)
	case ctx.Err() == nil:
		l.answered("", err)
	}
	return record, raw, err
}

// Create implements resourcelock.Interface.
func (l *lock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.write(ctx, r, l.Interface.Create)
}

// Update implements resourcelock.Interface.
func (l *lock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.write(ctx, r, l.Interface.Update)
}

func (l *lock) write(
	ctx context.Context, r resourcelock.LeaderElectionRecord,
	write func(context.Context, resourcelock.LeaderElectionRecord) error,
) error {
	began := time.Now()
	err := write(ctx, r)
	switch {
	case err == nil:
		l.answered(r.HolderIdentity, nil)
		l.held = true
		l.renewed(began)
	case apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err): // another process was faster
	case ctx.Err() == nil:
		l.answered("", err)
	}
	return err
}

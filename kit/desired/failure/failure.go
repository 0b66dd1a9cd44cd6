// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package failure has the reasons why a service of desired state does not do what it
// is asked for. Each has a code and a reason of its own in the API of the service;
// package answer has the codes.
package failure

import (
	"errors"

	"github.com/sluice-net/sluice/kit/desired/loop"
)

// What callers branch on.
var (
	// ErrNotFound says that there is no object of that name.
	ErrNotFound = errors.New("not found")
	// ErrOwned says that another source or manager has the object.
	ErrOwned = errors.New("another source or manager has the object")
	// ErrForeign says that the object is not the caller's to delete.
	ErrForeign = errors.New("the object belongs to another source or manager")
	// ErrChanged says that the state is not the one that the caller decided by.
	ErrChanged = errors.New("the state has changed")
	// ErrLimit says that something has no room. Everything is as it was.
	ErrLimit = errors.New("no room")
	// ErrEmpty says that every object of a manager would be deleted, which the caller
	// has not confirmed.
	ErrEmpty = errors.New("no object would stay; allow_empty confirms that")
	// ErrRevision says that there is no such revision yet.
	ErrRevision = errors.New("no such revision yet")
	// ErrRefused says that a subscriber does not enforce what was asked about.
	ErrRefused = errors.New("refused by a subscriber")
	// ErrStorage says that stable storage did not take a change. Everything is as it
	// was.
	ErrStorage = errors.New("storage")
	// ErrStopped says that the loop that owns the state has ended.
	ErrStopped = loop.ErrStopped
	// ErrReplaced says that a newer connection has the name of a subscriber.
	ErrReplaced = errors.New("a newer connection has the name of this subscriber")
	// ErrAck says that a subscriber acknowledges what was never sent to it.
	ErrAck = errors.New("a message that was not sent is acknowledged")
)

// FieldError says that an argument makes no sense, whatever the state.
type FieldError struct {
	Field string // as the API names it
	Err   error
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Err.Error() }

// Unwrap returns what is wrong with the field.
func (e *FieldError) Unwrap() error { return e.Err }

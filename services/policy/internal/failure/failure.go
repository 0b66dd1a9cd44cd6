// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package failure has the reasons why the owner of policy does not do what it is
// asked for. Each has a code of its own in the API.
package failure

import (
	"errors"

	"github.com/sluice-net/sluice/kit/desired/loop"
)

// What callers branch on.
var (
	// ErrNotFound: the identity is not known.
	ErrNotFound = errors.New("not found")
	// ErrUnresolved: an address is given without an identity, and sluice-identity does
	// not say which one it has.
	ErrUnresolved = errors.New("sluice-identity does not say who has the address")
	// ErrOwned: another source or manager has the policy.
	ErrOwned = errors.New("another source has the policy")
	// ErrForeign: the policy is not the caller's to delete.
	ErrForeign = errors.New("the policy belongs to another source")
	// ErrChanged: the state is not the one that the caller decided by.
	ErrChanged = errors.New("the state has changed")
	// ErrLimit: something has no room. Everything is as it was.
	ErrLimit = errors.New("no room")
	// ErrEmpty: every policy of a manager would be deleted, and that is not said to
	// be meant.
	ErrEmpty = errors.New("no policy would stay; allow_empty confirms that")
	// ErrNotMissing: nothing waits for the file that a caller accepts as missing.
	ErrNotMissing = errors.New("nothing waits for it")
	// ErrRevision: there is no such revision yet.
	ErrRevision = errors.New("no such revision yet")
	// ErrHeld: a subscriber goes on enforcing an earlier state.
	ErrHeld = errors.New("an earlier state stays enforced")
	// ErrRefused: a subscriber does not enforce what was asked about.
	ErrRefused = errors.New("refused by a subscriber")
	// ErrStorage: stable storage did not take a change, which was undone.
	ErrStorage = errors.New("storage")
	// ErrStopped: the owner is not running any more.
	ErrStopped = loop.ErrStopped
)

// FieldError says that an argument makes no sense, whatever the state.
type FieldError struct {
	Field string // as the API names it
	Err   error
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Err.Error() }

// Unwrap returns what is wrong with the field.
func (e *FieldError) Unwrap() error { return e.Err }

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package failure declares the errors with which a desired-state service refuses a call. Each error has its own code
// and reason in the API of the service; package answer maps them.
package failure

import (
	"errors"

	"github.com/sluice-net/sluice/kit/desired/loop"
)

// Errors that callers branch on.
var (
	// ErrNotFound is returned if no object of that name exists.
	ErrNotFound = errors.New("not found")
	// ErrOwned is returned if another source or manager owns the object.
	ErrOwned = errors.New("another source or manager has the object")
	// ErrForeign is returned if the caller may not delete the object, because another source or
	// manager owns it.
	ErrForeign = errors.New("the object belongs to another source or manager")
	// ErrChanged is returned if the state differs from the state that the caller expected.
	ErrChanged = errors.New("the state has changed")
	// ErrLimit is returned if a limit would be exceeded. Nothing was changed.
	ErrLimit = errors.New("limit exceeded")
	// ErrEmpty is returned if a change would delete every object of a manager without AllowEmpty.
	ErrEmpty = errors.New("no object would stay; allow_empty confirms that")
	// ErrRevision is returned for a revision that does not exist yet.
	ErrRevision = errors.New("no such revision yet")
	// ErrRefused is returned if a subscriber has refused the object, so that it is not enforced.
	ErrRefused = errors.New("refused by a subscriber")
	// ErrStorage is returned if a change could not be written to stable storage. Nothing was
	// changed.
	ErrStorage = errors.New("storage")
	// ErrStopped is returned after the loop that owns the state has ended.
	ErrStopped = loop.ErrStopped
	// ErrReplaced ends the session of a subscriber whose name is used by a newer connection.
	ErrReplaced = errors.New("a newer connection uses the name of this subscriber")
	// ErrAck is returned for an acknowledgement of a message that was never sent.
	ErrAck = errors.New("a message that was not sent is acknowledged")
)

// FieldError reports an argument that is invalid in any state.
type FieldError struct {
	Field string // field name in the API
	Err   error
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Err.Error() }

// Unwrap returns Err.
func (e *FieldError) Unwrap() error { return e.Err }

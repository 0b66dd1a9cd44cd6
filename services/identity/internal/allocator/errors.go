// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/labels"
)

// Errors of an Allocator. It also returns errors of its Store.
var (
	// ErrHolder: the holder is not saved, because ParseHolder would refuse it.
	ErrHolder = errors.New("not a holder")
	// ErrHeldOther: the holder has a reference to the identity of another label set.
	ErrHeldOther = errors.New("holder has the identity of another label set")
	// ErrQuota: this node holds its maximum number of identities. It is always a *QuotaError.
	ErrQuota = errors.New("quota of identities is used up")
	// ErrExhausted: every number of the range is taken or in quarantine. It is always a *QuotaError.
	ErrExhausted = errors.New("identity numbers are used up")
	// ErrShare: the tenant of the label set has its maximum number of numbers. It is always a *QuotaError.
	ErrShare = errors.New("share of identity numbers is used up")
	// ErrDenied: the store refuses a write, because the etcd role of this node lacks a permission that earlier versions
	// did not need.
	ErrDenied = errors.New("etcd lacks a grant")
	// ErrUnconfirmed: the last move of the endpoint is not confirmed yet.
	ErrUnconfirmed = errors.New("endpoint has not confirmed its last identity")
	// ErrContended: other nodes have taken every candidate that was tried. The caller may retry.
	ErrContended = errors.New("lost too many races for a number")
	// ErrNotFound: this node does not know the number.
	ErrNotFound = errors.New("no such identity")
	// ErrRecords: the state could not be written to the disk.
	ErrRecords = errors.New("state was not written")
)

// StoreError is returned if the call needs the store, and the store does not answer.
type StoreError struct {
	Endpoints []string
	Labels    label.Canonical
	Err       error // may be nil: no attempt has ended yet
}

func (e *StoreError) Error() string {
	if errors.Is(e.Err, ErrNameTaken) {
		return fmt.Sprintf("label set %s gets no identity: %v", clip(e.Labels.Text(), 200), e.Err)
	}
	if errors.Is(e.Err, ErrNoSpace) {
		return fmt.Sprintf("label set %s gets no identity: %s", clip(e.Labels.Text(), 200), noSpace(e.Endpoints, e.Err))
	}
	if errors.Is(e.Err, errListing) {
		return fmt.Sprintf("label set %s gets no identity: %v", clip(e.Labels.Text(), 200), e.Err)
	}
	s := fmt.Sprintf("label set %s is not known on this node and etcd (%s) does not answer", clip(e.Labels.Text(), 200), strings.Join(e.Endpoints, ", "))
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// noSpace returns the message with the operator's next step.
func noSpace(endpoints []string, err error) string {
	return fmt.Sprintf("etcd (%s) has no space left; compact and defragment it, then disarm its alarm: %v", strings.Join(endpoints, ", "), err)
}

func (e *StoreError) Unwrap() error { return e.Err }

// Is reports whether target is ErrUnavailable.
func (e *StoreError) Is(target error) bool { return target == ErrUnavailable }

// StaleError is returned if this node's copy of the label set is too old to be trusted, so that the call needs the
// store.
type StaleError struct {
	Labels label.Canonical
	Number identity.Numeric // number at the last contact with the store
	Age    time.Duration    // time since the last contact
	Never  bool             // the time of the last contact is unknown
	Limit  time.Duration    // maximum age at which the copy is trusted
	Err    error            // of the store
}

func (e *StaleError) Error() string {
	age := e.Age.Round(time.Second).String() + " ago"
	if e.Never {
		age = "at an unknown time"
	}
	return fmt.Sprintf("label set %s had the number %d when etcd was last heard, %s; after gc.quarantine (%s) "+
		"it may be another set's: %v",
		clip(e.Labels.Text(), 200), e.Number, age, e.Limit, e.Err)
}

func (e *StaleError) Unwrap() error { return e.Err }

// Is reports whether target is ErrUnavailable.
func (e *StaleError) Is(target error) bool { return target == ErrUnavailable }

// QuotaError describes the exhausted limit, and the label keys with the most different values.
type QuotaError struct {
	Kind  error  // ErrQuota, ErrShare or ErrExhausted
	Of    string // the tenant, for ErrShare
	Used  int
	Limit int
	Keys  []labels.KeyCount // the keys with the most values, largest count first
}

func (e *QuotaError) Error() string {
	s := fmt.Sprintf("%v: %d of %d", e.Kind, e.Used, e.Limit)
	if e.Of != "" {
		s = fmt.Sprintf("%v: %s has %d, at most %d", e.Kind, e.Of, e.Used, e.Limit)
	}
	if len(e.Keys) > 0 {
		keys := make([]string, len(e.Keys))
		for i, k := range e.Keys {
			keys[i] = fmt.Sprintf("%s (%d)", k.Key, k.Values)
		}
		s += "; the labels with the most values are " + strings.Join(keys,
			", ") + ": exclude with labels.exclude what policies do not select"
	}
	return s
}

// Unwrap returns the kind.
func (e *QuotaError) Unwrap() error { return e.Kind }

func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return s[:n] + "…"
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import "errors"

// availability records whether the cluster's identities are known, the store answers
// and takes writes, and the disk takes records. A node that is connected is not refused
// and has no storeErr. A refused node keeps the refusal in storeErr until a session is
// up. Every change of what Allocator.Ready, Numbers or Connected returns closes changed
// and replaces it. The caller locks.
type availability struct {
	ready      bool          // the identities of the cluster are known
	connected  bool          // a session is up, and its references equal the holds
	refused    bool          // another node has this node's name
	refusedNow bool          // the last answer of the store was that
	storeErr   error         // why it is not connected; nil: no attempt has ended yet
	full       error         // why the store accepts no writes although it answers
	diskErr    error         // why the records of this node are not written
	changed    chan struct{} // closed at the next change
}

func newAvailability() availability { return availability{changed: make(chan struct{})} }

func (v *availability) notify() {
	close(v.changed)
	v.changed = make(chan struct{})
}

// answers reports whether label sets that this node knows get their numbers.
func (v *availability) answers() bool { return v.ready && !v.refused }

// numbers reports whether label sets without a number get one.
func (v *availability) numbers() bool {
	return v.answers() && v.connected && v.full == nil && v.diskErr == nil
}

// loaded records that the identities of the cluster are known, and returns false if they
// were before.
func (v *availability) loaded() bool {
	if v.ready {
		return false
	}
	v.ready = true
	v.notify()
	return true
}

// up records a session.
func (v *availability) up() {
	if !v.connected {
		v.connected, v.storeErr, v.refused, v.refusedNow = true, nil, false, false
		v.notify()
	}
}

// down records that there is no session, and returns whether that is worth a log line.
func (v *availability) down(err error) (isNew bool) {
	taken := errors.Is(err, ErrNameTaken)
	switch {
	case taken:
		isNew = !v.refused
		v.refused = true
	default:
		isNew = v.connected || v.storeErr == nil
		if v.refused {
			err = v.storeErr // until a session is up, the refused name takes precedence
		}
	}
	v.connected, v.storeErr, v.refusedNow = false, err, taken
	v.notify()
	return isNew
}

// space records whether the store takes writes, nil: it does, and returns whether that
// has changed.
func (v *availability) space(err error) (isNew bool) {
	isNew = (err == nil) != (v.full == nil)
	v.full = err
	if isNew {
		v.notify()
	}
	return isNew
}

// disk records how a write of the records ended.
func (v *availability) disk(err error) {
	isNew := (err == nil) != (v.diskErr == nil)
	v.diskErr = err
	if isNew {
		v.notify()
	}
}

// problem describes to an operator why the store accepts no writes; empty: it takes them.
func (v *availability) problem(endpoints []string) string {
	switch {
	case v.connected && v.full != nil:
		return noSpace(endpoints, v.full)
	case v.connected:
		return ""
	case v.storeErr != nil:
		return v.storeErr.Error()
	}
	return "there is no connection yet"
}

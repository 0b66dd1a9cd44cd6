// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import "errors"

// availability records whether the cluster's identities are known, whether the store responds and accepts writes, and
// whether the disk accepts records. If connected is set, refused is not set and storeErr is nil. If refused is set,
// storeErr contains the refusal until a session is established. Each change of a result of View.Ready, Numbers or
// Connected closes the channel changed and replaces it. The caller must hold the lock.
type availability struct {
	ready      bool          // the identities of the cluster are known
	connected  bool          // a session is established, and its references equal the holders'
	refused    bool          // another node has this node's name
	refusedNow bool          // the store's last answer was that another node has the name
	storeErr   error         // why the node is not connected; nil: no attempt has ended yet
	full       error         // why the store accepts no writes although it responds
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

// numbers reports whether new label sets can get a number.
func (v *availability) numbers() bool {
	return v.answers() && v.connected && v.full == nil && v.diskErr == nil
}

// loaded records that the identities of the cluster are known. It returns false if they were already known.
func (v *availability) loaded() bool {
	if v.ready {
		return false
	}
	v.ready = true
	v.notify()
	return true
}

// up records that a session is established.
func (v *availability) up() {
	if !v.connected {
		v.connected, v.storeErr, v.refused, v.refusedNow = true, nil, false, false
		v.notify()
	}
}

// down records that there is no session, and reports whether the error is new and must be logged.
func (v *availability) down(err error) (isNew bool) {
	taken := errors.Is(err, ErrNameTaken)
	switch {
	case taken:
		isNew = !v.refused
		v.refused = true
	default:
		isNew = v.connected || v.storeErr == nil
		if v.refused {
			err = v.storeErr // a refused name takes precedence until a session is established
		}
	}
	v.connected, v.storeErr, v.refusedNow = false, err, taken
	v.notify()
	return isNew
}

// space records whether the store accepts writes (err is nil), and reports whether that has changed.
func (v *availability) space(err error) (isNew bool) {
	isNew = (err == nil) != (v.full == nil)
	v.full = err
	if isNew {
		v.notify()
	}
	return isNew
}

// disk records the result of a write of the records.
func (v *availability) disk(err error) {
	isNew := (err == nil) != (v.diskErr == nil)
	v.diskErr = err
	if isNew {
		v.notify()
	}
}

// problem returns a text for operators that describes why the store accepts no writes; empty if it accepts them.
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

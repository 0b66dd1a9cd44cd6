// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package cluster defines the errors and types of the store that the nodes of a cluster share. The packages that store
// data in it use them, and so does the package that connects to it. It depends on neither the data nor the type of the
// store.
package cluster

import (
	"errors"
	"fmt"
	"time"
)

var (
	// ErrUnavailable: the store does not answer. It is unknown whether it executed the request.
	ErrUnavailable = errors.New("store unavailable")
	// ErrNoSpace: the store responds, but accepts only deletions until its operator frees space.
	ErrNoSpace = errors.New("store has no space")
	// ErrWaits: sluice-store allocates no new numbers and ranges now; the rest works. It also is ErrUnavailable.
	ErrWaits = fmt.Errorf("%w: no new numbers and ranges are allocated for now", ErrUnavailable)
	// ErrRestored: sluice-store continues with restored data, or without data. Nodes first claim what they hold.
	ErrRestored = fmt.Errorf("%w: sluice-store was restored, and nodes have a minute to claim the ones that they hold",
		ErrWaits)
	// ErrUnleased: sluice-store in Kubernetes has not renewed its Lease.
	ErrUnleased = fmt.Errorf("%w: sluice-store has not renewed its Lease in Kubernetes, so another one may take its "+
		"place", ErrWaits)
	// ErrSessionLost: the session has ended, and every key of this node was removed with it. The caller must join
	// again and write the keys again.
	ErrSessionLost = errors.New("store session lost")
	// ErrNameTaken: the name of this node belongs to another running node. It is always a *NameError.
	ErrNameTaken = errors.New("the name of this node is taken")
)

// NameError reports that another node owns this node's name.
type NameError struct {
	Node        string
	Incarnation string        // incarnation of the other node
	Boot        string        // boot ID of the other node
	Wait        time.Duration // how long it takes until the name is free after the other node has stopped
}

func (e *NameError) Error() string {
	return fmt.Sprintf("%v: another machine, or another state directory, is alive as %q (incarnation %s, boot %s); give one of the two another name (--node), or switch the other off and wait %s",
		ErrNameTaken, e.Node, e.Incarnation, e.Boot, e.Wait)
}

// Is reports whether target is ErrNameTaken or ErrUnavailable.
func (e *NameError) Is(target error) bool { return target == ErrNameTaken || target == ErrUnavailable }

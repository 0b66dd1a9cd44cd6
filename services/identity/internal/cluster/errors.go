// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package cluster has the errors and types of the store that the nodes of a cluster share, for packages that store
// data in it and for the package that connects to it. It depends on neither the data nor the kind of store.
package cluster

import (
	"errors"
	"fmt"
	"time"
)

var (
	// ErrUnavailable: the store does not answer. It is unknown whether it executed the request.
	ErrUnavailable = errors.New("store unavailable")
	// ErrNoSpace: the store answers and accepts no writes, only deletions, until
	// its operator frees space.
	ErrNoSpace = errors.New("store has no space")
	// ErrSessionLost: the session ended, and with it every key of this node.
	// Join again and write them again.
	ErrSessionLost = errors.New("store session lost")
	// ErrNameTaken: another node with the name of this one is alive. It is
	// always a *NameError.
	ErrNameTaken = errors.New("the name of this node is taken")
)

// NameError reports that another node owns this node's name.
type NameError struct {
	Node        string
	Incarnation string        // of the other
	Boot        string        // of the other
	Wait        time.Duration // how long it takes to free the name once the other is off
}

func (e *NameError) Error() string {
	return fmt.Sprintf("%v: another machine, or another state directory, is alive as %q (incarnation %s, boot %s); give one of the two another name (--node), or switch the other off and wait %s",
		ErrNameTaken, e.Node, e.Incarnation, e.Boot, e.Wait)
}

// Is makes it an ErrNameTaken, and so an ErrUnavailable.
func (e *NameError) Is(target error) bool { return target == ErrNameTaken || target == ErrUnavailable }

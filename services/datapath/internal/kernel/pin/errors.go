// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// Errors that callers distinguish.
var (
	// ErrExists: the key already has another value.
	ErrExists = errors.New("already in use")
	// ErrFull: there is no free endpoint ID, or a map is full. It is the same error as
	// nodetable.ErrNoCapacity.
	ErrFull = nodetable.ErrNoCapacity
	// ErrValidateOnly: a change of maps that were opened read-only, for validation.
	ErrValidateOnly = errors.New("opened for validation only")
	// ErrClosed: Close was called.
	ErrClosed = errors.New("closed")
	// ErrNoMap: there is no map with the name; the text lists the existing ones.
	ErrNoMap = errors.New("no such map")
	// ErrInvalid: an argument is out of range; the text names it.
	ErrInvalid = errors.New("invalid argument")
)

// MapError wraps errors of the kernel in the errors of this package.
func MapError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ebpf.ErrKeyExist):
		return fmt.Errorf("%w: %w", ErrExists, err)
	case errors.Is(err, unix.E2BIG), errors.Is(err, unix.ENOSPC), errors.Is(err, unix.ENOMEM):
		return fmt.Errorf("%w: %w", ErrFull, err)
	}
	return err
}

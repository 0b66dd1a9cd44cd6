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

// Sentinels that a caller branches on.
var (
	// ErrExists says that a key already leads to something else.
	ErrExists = errors.New("already in use")
	// ErrFull says that no slot is free, or that a map is full. It is what those
	// who write policies know it as, too.
	ErrFull = nodetable.ErrNoCapacity
	// ErrValidateOnly answers every change of maps that were opened to look.
	ErrValidateOnly = errors.New("opened for validation only")
	// ErrClosed says that Close was called.
	ErrClosed = errors.New("closed")
	// ErrNoMap says that no map has the name; the text lists those there are.
	ErrNoMap = errors.New("no such map")
	// ErrInvalid says that an argument is out of range; the text names it.
	ErrInvalid = errors.New("invalid argument")
)

// MapError adds the sentinels of this package to what the kernel answers.
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

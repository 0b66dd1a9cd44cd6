// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package durable

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestLockIsHeldByOneUntilItIsClosed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, err := Lock(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(path, 0); !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), path) {
		t.Errorf("a second Lock: %v, want ErrLocked with the path", err)
	}
	got := make(chan error)
	go func() {
		second, err := Lock(path, time.Minute)
		if err == nil {
			err = second.Close()
		}
		got <- err
	}()
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	if err := <-got; err != nil {
		t.Errorf("the waiting Lock: %v", err)
	}
	if _, err := Lock(filepath.Join(path, "x"), time.Minute); err == nil {
		t.Error("a lock below a file was taken")
	}
}

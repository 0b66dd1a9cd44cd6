// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package wait retries until a condition is met.
package wait

import (
	"fmt"
	"time"
)

// Until returns when try succeeds, or after the timeout with try's last error.
func Until(timeout time.Duration, try func() error) error {
	for deadline := time.Now().Add(timeout); ; time.Sleep(20 * time.Millisecond) {
		err := try()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("still after %s: %w", timeout, err)
		}
	}
}

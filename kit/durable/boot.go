// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package durable

import (
	"fmt"
	"os"
	"strings"
)

// BootID returns the kernel's identifier of the current boot.
func BootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot ID: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}

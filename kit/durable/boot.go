// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package durable

import (
	"fmt"
	"os"
	"strings"
)

// BootID reads the name that Linux gave to the running boot.
func BootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("identifier of the boot: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}

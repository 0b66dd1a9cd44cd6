// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build !linux

package dirwatch

// Watch returns a watcher without events; the caller scans periodically.
func Watch() Watcher { return None() }

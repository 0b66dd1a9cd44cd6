// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build !linux

package directory

// watch leaves it to the scans from time to time.
func watch(string) (watcher, error) { return noWatcher(), nil }

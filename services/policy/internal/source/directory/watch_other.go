// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build !linux

package directory

import (
	"os"
	"time"
)

// watch leaves it to the scans from time to time.
func watch(string) (watcher, error) { return noWatcher(), nil }

// changeTime is when the file was changed, as far as it says.
func changeTime(fi os.FileInfo) time.Time { return fi.ModTime() }

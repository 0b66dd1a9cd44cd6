// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build !linux

package directory

import "os"

// stampOf is the stamp of a file, as far as the system says.
func stampOf(fi os.FileInfo) stamp { return stamp{size: fi.Size(), changed: fi.ModTime()} }

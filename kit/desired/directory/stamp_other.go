// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build !linux

package directory

import "os"

// stampOf is when the file was changed, as far as it says.
func stampOf(fi os.FileInfo) stamp { return stamp{changed: fi.ModTime(), weak: true} }

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build !linux

package directory

import "os"

// stampOf returns a weak stamp: only the modification time is portable.
func stampOf(fi os.FileInfo) stamp { return stamp{changed: fi.ModTime(), weak: true} }

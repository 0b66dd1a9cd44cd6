// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package directory

import (
	"os"
	"syscall"
	"time"
)

func stampOf(fi os.FileInfo) stamp {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return stamp{changed: fi.ModTime(), weak: true}
	}
	return stamp{
		device: st.Dev, inode: st.Ino, size: st.Size,
		modified: time.Unix(st.Mtim.Unix()), changed: time.Unix(st.Ctim.Unix()),
	}
}

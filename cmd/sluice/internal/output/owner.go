// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package output

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// CheckOwner refuses a file that another user could read or change whatever its mode becomes: its owner, who may
// have made it beforehand in a directory like /tmp, and all who see it under another name.
func CheckOwner(info fs.FileInfo) error {
	st, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !ok:
		return nil // no file of this system
	case int64(st.Uid) != int64(os.Geteuid()):
		return fmt.Errorf("it is there, and belongs to uid %d; remove it or take another name", st.Uid)
	case st.Nlink > 1:
		return fmt.Errorf("it is there under %d names; remove it or take another name", st.Nlink)
	}
	return nil
}

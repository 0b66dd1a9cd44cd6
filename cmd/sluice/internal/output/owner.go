// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package output

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// CheckKind refuses a file that is neither empty nor begins with the bytes by which files of one kind, for example "a
// gzip archive", are known: somebody else's file is not replaced.
func CheckKind(f io.ReaderAt, kind string, begin []byte) error {
	have := make([]byte, len(begin))
	n, err := f.ReadAt(have, 0)
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return err
	case n > 0 && (n < len(begin) || !bytes.Equal(have, begin)):
		return fmt.Errorf("it is there, and is not %s; remove it, take another name, or use --force", kind)
	}
	return nil
}

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

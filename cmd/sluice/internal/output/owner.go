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

// CheckKind returns an error if a file is neither empty nor begins with the magic bytes of a kind, for example "a gzip
// archive", so that files of other kinds are not replaced.
func CheckKind(f io.ReaderAt, kind string, begin []byte) error {
	have := make([]byte, len(begin))
	n, err := f.ReadAt(have, 0)
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return err
	case n > 0 && (n < len(begin) || !bytes.Equal(have, begin)):
		return fmt.Errorf("it exists and is not %s; remove it, choose another name, or use --force", kind)
	}
	return nil
}

// CheckOwner returns an error if another user could access the file regardless of its mode: if that user owns the file,
// for example because the user created it in /tmp beforehand, or if the file has more than one hard link.
func CheckOwner(info fs.FileInfo) error {
	st, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !ok:
		return nil // the file system does not report an owner
	case int64(st.Uid) != int64(os.Geteuid()):
		return fmt.Errorf("it exists and belongs to uid %d; remove it or choose another name", st.Uid)
	case st.Nlink > 1:
		return fmt.Errorf("it exists with %d hard links; remove it or choose another name", st.Nlink)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package report

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
)

// Stdout is the file name for standard output.
const Stdout = "-"

// Flag adds the flags --file and --force.
func Flag(f *pflag.FlagSet, to *string, force *bool, name string) {
	f.StringVarP(to, "file", "w", "",
		"write the archive to FILE with mode 0600; - for standard output (default: "+name+" in this directory)")
	f.BoolVar(force, "force", false, "replace the file even if it is not a gzip archive")
}

// gzipBegin is the magic of a gzip archive.
var gzipBegin = []byte{0x1f, 0x8b}

// Target is the destination of an archive. A file is renamed to its name only when it is complete.
type Target struct {
	file      string
	force     bool // overwrite any regular file
	out       io.Writer
	temporary *os.File // nil: standard output, or already written
}

// Open checks that an archive can be written to a file, before the archive is collected. An existing file must be empty
// or a gzip archive; with force, any regular file is replaced. The caller must call Discard at the end.
func Open(file string, stdout io.Writer, force bool) (*Target, error) {
	t := &Target{file: file, out: stdout, force: force}
	if file == Stdout {
		return t, nil
	}
	if err := t.replaceable(); err != nil {
		return nil, fmt.Errorf("write %s: %w", file, err)
	}
	temporary, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+".*.tmp") // mode 0600
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", file, err)
	}
	t.out, t.temporary = temporary, temporary
	return t, nil
}

// replaceable returns an error if the target exists and must not be replaced.
func (t *Target) replaceable() error {
	// Links, devices and pipes are never replaced, and links are not followed.
	switch info, err := os.Lstat(t.file); {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return errors.New("it exists and is not a regular file")
	case t.force:
		return nil
	}
	f, err := os.OpenFile(t.file, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return output.CheckKind(f, "a gzip archive", gzipBegin)
}

// Write writes the archive. directory is the name of the directory in it.
func (t *Target) Write(a *Archive, directory string) error {
	if err := a.write(t.out, directory); err != nil {
		return fmt.Errorf("write %s: %w", t.file, err)
	}
	if t.temporary == nil {
		return nil
	}
	if err := t.temporary.Close(); err != nil {
		return fmt.Errorf("write %s: %w", t.file, err)
	}
	if err := t.replaceable(); err != nil { // another file may have been created meanwhile
		return fmt.Errorf("write %s: %w", t.file, err)
	}
	if err := os.Rename(t.temporary.Name(), t.file); err != nil {
		return fmt.Errorf("write %s: %w", t.file, err)
	}
	t.temporary = nil
	return nil
}

// Discard removes an incomplete archive.
func (t *Target) Discard() error {
	if t.temporary == nil {
		return nil
	}
	t.temporary.Close() // may already be closed
	err := os.Remove(t.temporary.Name())
	t.temporary = nil
	return err
}

// Show prints a summary of the archive to standard output, or to standard error if the archive is on standard output.
// It prints the missing files to standard error.
func Show(inv *invocation.Invocation, file string, m Manifest, summary string) error {
	shown := *inv
	if file == Stdout {
		shown.Out = inv.ErrOut
	}
	if err := shown.Show(struct {
		Archive string `json:"archive"`
		Manifest
	}{file, m}, func(w io.Writer) { fmt.Fprintln(w, output.Printable(file+": "+summary)) }); err != nil {
		return err
	}
	if inv.Format == "json" {
		return nil
	}
	for _, x := range m.Missing {
		fmt.Fprintln(inv.ErrOut, output.Printable(fmt.Sprintf("missing: %s: %s", x.Name, x.Reason)))
	}
	return nil
}

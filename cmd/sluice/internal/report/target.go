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

// Stdout is the name of a file that stands for standard output.
const Stdout = "-"

// Flag adds the name of the archive to a command, and whether it replaces a file of any kind.
func Flag(f *pflag.FlagSet, to *string, force *bool, name string) {
	f.StringVarP(to, "file", "w", "",
		"the archive, readable for its owner alone; - for standard output (default: "+name+" in this directory)")
	f.BoolVar(force, "force", false, "replace the file even if it is not a gzip archive")
}

// gzipBegin is how a gzip archive begins.
var gzipBegin = []byte{0x1f, 0x8b}

// Target is where an archive goes. A file appears under its name when it is complete.
type Target struct {
	file      string
	force     bool // replaces a file of any kind
	out       io.Writer
	temporary *os.File // nil: standard output, or it is written
}

// Open finds out whether an archive can be written to a file, before anything is collected for it. It replaces only an
// empty file or a gzip archive, with force every regular file. The caller discards the target at the end.
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

// replaceable returns an error if a file exists at the path of the target that must not be replaced.
func (t *Target) replaceable() error {
	// A link, a device or a pipe is never replaced, and no link is followed.
	switch info, err := os.Lstat(t.file); {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return errors.New("it is there, and is no regular file")
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

// Write writes an archive whose files lie below a directory.
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
	if err := t.replaceable(); err != nil { // it came meanwhile
		return fmt.Errorf("write %s: %w", t.file, err)
	}
	if err := os.Rename(t.temporary.Name(), t.file); err != nil {
		return fmt.Errorf("write %s: %w", t.file, err)
	}
	t.temporary = nil
	return nil
}

// Discard removes what was written of an archive that is not complete.
func (t *Target) Discard() error {
	if t.temporary == nil {
		return nil
	}
	t.temporary.Close() // it may be closed
	err := os.Remove(t.temporary.Name())
	t.temporary = nil
	return err
}

// Show says on standard output what an archive has, or on standard error if the archive is on standard output, and on
// standard error what is missing.
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

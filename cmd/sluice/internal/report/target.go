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

	"github.com/spf13/pflag"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
)

// Stdout is the name of a file that stands for standard output.
const Stdout = "-"

// Flag adds the name of the archive to a command.
func Flag(f *pflag.FlagSet, to *string, name string) {
	f.StringVarP(to, "file", "w", "",
		"the archive, readable for its owner alone; - for standard output (default: "+name+" in this directory)")
}

// Target is where an archive goes. A file appears under its name when it is complete.
type Target struct {
	file      string
	out       io.Writer
	temporary *os.File // nil: standard output, or it is written
}

// Open finds out whether an archive can be written to a file, before anything is collected for it. The caller discards
// the target at the end.
func Open(file string, stdout io.Writer) (*Target, error) {
	if file == Stdout {
		return &Target{file: file, out: stdout}, nil
	}
	// A link, a device or a pipe is never replaced, and no link is followed.
	switch info, err := os.Lstat(file); {
	case err == nil && !info.Mode().IsRegular():
		return nil, fmt.Errorf("write %s: it is there, and is no regular file", file)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("write %s: %w", file, err)
	}
	temporary, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+".*.tmp") // mode 0600
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", file, err)
	}
	return &Target{file: file, out: temporary, temporary: temporary}, nil
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

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package report writes an archive of diagnostics of a node or a cluster. It redacts secrets and lists missing files
// with the reasons. Its callers collect the files.
package report

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/flate"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/version"
)

// FileLimit is the largest size of one file in bytes.
const FileLimit = 16 << 20

// Manifest is the content of `manifest.json`.
type Manifest struct {
	Created time.Time `json:"created"`
	Program string    `json:"program"` // version of the command that wrote the report
	Nodes   []string  `json:"nodes"`
	Files   []Entry   `json:"files"`
	Missing []Missing `json:"missing"`
}

// Entry is a file of the archive with its origin.
type Entry struct {
	Name    string `json:"name"`
	Command string `json:"command"`
	Bytes   int    `json:"bytes"`
	// Truncated is true if the end of the output is missing.
	Truncated bool `json:"truncated,omitempty"`
	// Error is the error of a command whose output is nevertheless included.
	Error string `json:"error,omitempty"`
}

// Missing is a file that could not be collected.
type Missing struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

// Archive collects the files of a report in any order, and finally writes them sorted by name. Its methods are safe for
// concurrent use, except Close.
type Archive struct {
	dir   string // directory of the files; empty: they are in memory
	limit int64  // largest size of all files in bytes; 0: no limit

	mu       sync.Mutex
	manifest Manifest          // guarded by mu
	size     int64             // guarded by mu
	files    map[string][]byte // compressed; guarded by mu
}

// New returns an archive for files of at most limit bytes in total. It keeps the files compressed in memory, because
// the disk may be full. If limit is 0, the size is not limited, and the files are kept in a temporary directory. The
// caller closes the archive.
func New(now time.Time, limit int64) (*Archive, error) {
	a := &Archive{limit: limit, files: map[string][]byte{}, manifest: Manifest{
		Created: now, Program: version.Get().String(), Nodes: []string{}, Files: []Entry{}, Missing: []Missing{},
	}}
	if limit > 0 {
		return a, nil
	}
	var err error
	a.dir, err = os.MkdirTemp("", "sluice-bugreport-") // mode 0700
	return a, err
}

// Close removes the temporary directory.
func (a *Archive) Close() error {
	if a.dir == "" {
		return nil
	}
	return os.RemoveAll(a.dir)
}

// Node adds the name of a node to the manifest.
func (a *Archive) Node(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.manifest.Nodes = append(a.manifest.Nodes, name)
}

// Keep adds the redacted output of a command. It keeps the output of a failed command, too: for example, `sluice
// status` prints the problems and fails.
func (a *Archive) Keep(name, command string, out []byte, err error) {
	if err != nil && len(bytes.TrimSpace(out)) == 0 {
		a.Miss(name, err)
		return
	}
	e := Entry{Name: name, Command: Text(command)}
	if err != nil {
		e.Error = Text(err.Error())
	}
	out = Output(out)
	if len(out) > FileLimit {
		out, e.Truncated = out[:FileLimit], true
	}
	e.Bytes = len(out)
	if err := a.add(name, out); err != nil {
		a.Miss(name, err)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.manifest.Files = append(a.manifest.Files, e)
	if e.Error != "" && !answered(err) {
		a.manifest.Missing = append(a.manifest.Missing, Missing{name, "incomplete: " + e.Error})
	}
}

// answered reports whether a command exited by itself, so that its output is complete.
func answered(err error) bool {
	var exit interface {
		error
		ExitCode() int
	}
	return errors.As(err, &exit)
}

// Miss records why a file is missing.
func (a *Archive) Miss(name string, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.manifest.Missing = append(a.manifest.Missing, Missing{name, Text(err.Error())})
}

func (a *Archive) add(name string, content []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.limit > 0 && a.size+int64(len(content)) > a.limit {
		return fmt.Errorf("%d more bytes would make the report larger than %d MiB", len(content), a.limit>>20)
	}
	a.size += int64(len(content))
	if a.dir == "" {
		var b bytes.Buffer
		w, err := flate.NewWriter(&b, flate.BestSpeed)
		if err != nil {
			return err
		}
		_, err = w.Write(content)
		if err := errors.Join(err, w.Close()); err != nil {
			return err
		}
		a.files[name] = b.Bytes()
		return nil
	}
	path := a.path(name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(path, content, 0o600); err != nil {
		return errors.Join(err, os.RemoveAll(path))
	}
	return nil
}

func (a *Archive) path(name string) string { return filepath.Join(a.dir, filepath.FromSlash(name)) }

func (a *Archive) read(name string) ([]byte, error) {
	if a.dir != "" {
		return os.ReadFile(a.path(name))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return io.ReadAll(flate.NewReader(bytes.NewReader(a.files[name])))
}

// Manifest returns the manifest, sorted by name.
func (a *Archive) Manifest() Manifest {
	a.mu.Lock()
	defer a.mu.Unlock()
	m := a.manifest
	m.Files, m.Missing = slices.Clone(m.Files), slices.Clone(m.Missing)
	slices.SortFunc(m.Files, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(m.Missing, func(a, b Missing) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Reason, b.Reason))
	})
	return m
}

// write writes the files and the manifest as a tar.gz, sorted by name, in one directory.
func (a *Archive) write(w io.Writer, directory string) error {
	m := a.Manifest()
	manifest, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	const index = "manifest.json"
	names := []string{index}
	for _, e := range m.Files {
		names = append(names, e.Name)
	}
	slices.Sort(names)
	compressed := gzip.NewWriter(w)
	archive := tar.NewWriter(compressed)
	for _, name := range names {
		content := append(escape(manifest), '\n')
		if name != index {
			if content, err = a.read(name); err != nil {
				return err
			}
		}
		if err := archive.WriteHeader(&tar.Header{
			Typeflag: tar.TypeReg, Name: directory + "/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: m.Created,
			Format: tar.FormatPAX,
		}); err != nil {
			return err
		}
		if _, err := archive.Write(content); err != nil {
			return err
		}
	}
	return errors.Join(archive.Close(), compressed.Close())
}

// FileName returns a name that is safe as a file name, for a name that the command did not choose.
func FileName(name string) string {
	return strings.TrimLeft(strings.Map(func(c rune) rune {
		if c == '/' || c == '\\' || c < ' ' {
			return '_'
		}
		return c
	}, name), ".")
}

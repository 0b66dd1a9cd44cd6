// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package report makes an archive of files without secrets, for people who look into a fault: those of one node, or
// those of a cluster. It names what could not be had with the reason, and collects nothing by itself.
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

// FileLimit bounds each file.
const FileLimit = 16 << 20

// Manifest is what `manifest.json` says.
type Manifest struct {
	Created time.Time `json:"created"`
	Program string    `json:"program"` // version of the command that made the report
	Nodes   []string  `json:"nodes"`
	Files   []Entry   `json:"files"`
	Missing []Missing `json:"missing"`
}

// Entry is a file and where it comes from.
type Entry struct {
	Name    string `json:"name"`
	Command string `json:"command"`
	Bytes   int    `json:"bytes"`
	// Truncated says that the end of what the command printed is missing.
	Truncated bool `json:"truncated,omitempty"`
	// Error is how the command ended, if what it printed is here all the same.
	Error string `json:"error,omitempty"`
}

// Missing is a file that could not be had.
type Missing struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

// Archive holds the files of a report until they are written in order: parts come in any. Its methods may be called by
// several goroutines at once, but for Close and WriteTo.
type Archive struct {
	dir   string // the files, by their names; empty: they are in memory
	limit int64  // bytes of all files; 0: no bound

	mu       sync.Mutex
	manifest Manifest          // guarded by mu
	size     int64             // guarded by mu
	files    map[string][]byte // compressed; guarded by mu
}

// New makes an archive whose files together have limit bytes at most. They are in memory, compressed: a report may be
// made because a disk is full. Without a bound, 0, they lie in a temporary directory. The caller closes the archive.
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

// Close removes what the archive held.
func (a *Archive) Close() error {
	if a.dir == "" {
		return nil
	}
	return os.RemoveAll(a.dir)
}

// Node adds the name of a node that the report is about.
func (a *Archive) Node(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.manifest.Nodes = append(a.manifest.Nodes, name)
}

// Keep adds what a command printed, without secrets. One that failed may have printed what is worth keeping: the exit
// code of `sluice status` says what is in its output.
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

// answered says that a command ended by itself: its exit code is part of its answer.
func answered(err error) bool {
	var exit interface {
		error
		ExitCode() int
	}
	return errors.As(err, &exit)
}

// Miss says why a file is not there.
func (a *Archive) Miss(name string, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.manifest.Missing = append(a.manifest.Missing, Missing{name, Text(err.Error())})
}

// add keeps a file.
func (a *Archive) add(name string, content []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.limit > 0 && a.size+int64(len(content)) > a.limit {
		return fmt.Errorf("with %d bytes more the report would be larger than %d MiB", len(content), a.limit>>20)
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

// read returns a file that was added.
func (a *Archive) read(name string) ([]byte, error) {
	if a.dir != "" {
		return os.ReadFile(a.path(name))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return io.ReadAll(flate.NewReader(bytes.NewReader(a.files[name])))
}

// Manifest is what the archive has, in order.
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

// write writes the files and the manifest into an archive below one directory, sorted by name.
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

// FileName keeps a name that others chose from leading elsewhere.
func FileName(name string) string {
	return strings.TrimLeft(strings.Map(func(c rune) rune {
		if c == '/' || c == '\\' || c < ' ' {
			return '_'
		}
		return c
	}, name), ".")
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package storetest corrupts state directories for the tests of their services.
package storetest

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"

	"github.com/sluice-net/sluice/kit/durable"
)

// State is a closed state directory, with the functions to check it.
type State struct {
	Dir string
	// Open opens the directory as the service does at its start, returns a description of what it
	// read, and closes it.
	Open func(dir string) (contents string, err error)
	// Replaceable lists files whose loss is no error: the service starts with less state, which the returned
	// contents show.
	Replaceable []string
	// PutAside maps files that the service replaces to the name under which it keeps the corrupt
	// file. Open still returns the corruption as its error.
	PutAside map[string]string
}

// Sweep corrupts each file of the directory in many ways: truncated at each sector, emptied,
// removed, filled with zeros, text or random bytes, with flipped bits, without one page, and as a
// newer or an older version. The service must either read exactly the original content, or refuse
// the file with an error that names the file and a command to recover, and leave the file
// unchanged.
func Sweep(t *testing.T, s State) {
	t.Helper()
	want, err := s.Open(s.Dir)
	if err != nil {
		t.Fatalf("the undamaged state: %v", err)
	}
	if want == "" {
		t.Fatal("the undamaged state is empty: the test could not detect its loss")
	}
	entries, err := os.ReadDir(s.Dir)
	if err != nil {
		t.Fatal(err)
	}
	w := &sweep{State: s, want: want, files: map[string][]byte{}}
	for _, e := range entries {
		if e.Name() == "lock" {
			continue
		}
		b, err := os.ReadFile(filepath.Join(s.Dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		w.files[e.Name()] = b
	}
	if len(w.files) == 0 {
		t.Fatal("the state has no files")
	}
	for name, good := range w.files {
		t.Run(name, func(t *testing.T) { w.file(t, name, good) })
	}
}

type sweep struct {
	State
	want  string
	files map[string][]byte
}

const sector = 512

func (w *sweep) file(t *testing.T, name string, good []byte) {
	random := rand.New(rand.NewPCG(1, uint64(len(good)))) //nolint:gosec // the same corruption in each run
	if !slices.Contains(w.Replaceable, name) {
		w.check(t, name, "removed", nil)
	}
	w.check(t, name, "emptied", []byte{})
	w.check(t, name, "text", []byte("hello\n"))
	w.check(t, name, "zeros", make([]byte, len(good)))
	noise := make([]byte, len(good))
	for i := range noise {
		noise[i] = byte(random.Uint32())
	}
	w.check(t, name, "random bytes", noise)
	step := sector
	for len(good)/step > 100 { // large files are truncated at each page, or at every n-th
		step *= 2
	}
	for n := step; n < len(good); n += step {
		w.check(t, name, fmt.Sprintf("cut to %d bytes", n), good[:n])
		w.check(t, name, fmt.Sprintf("cut to %d bytes", n-1), good[:n-1])
	}
	w.check(t, name, "cut by a byte", good[:len(good)-1])
	for page := 0; page < len(good); page += 4096 {
		lost := bytes.Clone(good)
		clear(lost[page:min(page+4096, len(lost))])
		w.check(t, name, fmt.Sprintf("zeros from %d", page), lost)
	}
	for range 100 {
		at, bit := random.IntN(len(good)), random.IntN(8)
		flipped := bytes.Clone(good)
		flipped[at] ^= 1 << bit
		w.check(t, name, fmt.Sprintf("bit %d of byte %d flipped", bit, at), flipped)
	}
	for what, version := range map[string]uint32{"newer version": 99, "older version": 0} {
		if other := ofVersion(t, good, version); other != nil {
			if err := w.open(t, name, what, other); err == nil || !strings.Contains(err.Error(), "version") {
				t.Errorf("%s: %v, want a refusal with this reason", what, err)
			}
		}
	}
}

// check opens a copy of the state in which one file has other content.
func (w *sweep) check(t *testing.T, name, what string, content []byte) {
	t.Helper()
	_ = w.open(t, name, what, content) // open checks the result
}

// open is check, but also returns the error with which the service refused the file.
func (w *sweep) open(t *testing.T, name, what string, content []byte) error {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	mode, err := os.Stat(w.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, mode.Mode().Perm()); err != nil {
		t.Fatal(err)
	}
	for other, b := range w.files {
		if other == name {
			b = content
		}
		if b == nil {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, other), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, name)
	kept, aside := path, false // the path where the corrupt file must be
	if to, ok := w.PutAside[name]; ok {
		kept, aside = filepath.Join(dir, to), true
	}
	got, err := w.Open(dir)
	switch {
	case err == nil && got != w.want:
		t.Errorf("%s %s was opened with other contents:\n%.600s\nwant\n%.600s", name, what, got, w.want)
	case err != nil && !strings.Contains(err.Error(), path):
		t.Errorf("%s %s: the error does not name %s: %v", name, what, path, err)
	case err != nil && !aside && !strings.Contains(err.Error(), "rm ") && !strings.Contains(err.Error(), "mv ") && !strings.Contains(err.Error(), "start the version"):
		t.Errorf("%s %s: the error names no step to recover: %v", name, what, err)
	case err != nil:
		now, rerr := os.ReadFile(kept)
		if content != nil && !bytes.Equal(now, content) || content == nil && !os.IsNotExist(rerr) {
			t.Errorf("%s %s: the refused file was changed", name, what)
		}
	}
	return err
}

// ofVersion returns a file of kit/store or kit/durable as another version of its service would
// write it; nil for other files.
func ofVersion(t *testing.T, good []byte, version uint32) []byte {
	var record struct {
		Schema string          `json:"schema"`
		Data   json.RawMessage `json:"data"`
	}
	if json.Unmarshal(good, &record) == nil {
		if version == 0 {
			return nil // kit/durable does not write such a file
		}
		b, err := durable.Encode(durable.Schema{Name: record.Schema, Version: int(version)}, record.Data)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	path := filepath.Join(t.TempDir(), "other")
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if len(good) < 8192 {
		return nil
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{NoFreelistSync: true, FreelistType: bolt.FreelistMapType})
	if err != nil {
		return nil
	}
	defer db.Close()
	for range 2 {
		if err := db.Update(func(tx *bolt.Tx) error {
			return tx.Bucket([]byte("meta")).Put([]byte("schema"), binary.BigEndian.AppendUint32(nil, version))
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

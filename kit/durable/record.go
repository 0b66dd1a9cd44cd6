// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package durable

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

var (
	// ErrCorrupt is returned if the content differs from what was written.
	ErrCorrupt = errors.New("corrupt record")
	// ErrForeign is returned for a record of another schema.
	ErrForeign = errors.New("record of another schema")
	// ErrVersion is returned for a record in a version that this program does not read.
	ErrVersion = errors.New("record of an unsupported version")
)

// Schema identifies a kind of record.
type Schema struct {
	Name    string // such as "sluice.example.v1"; never changed
	Version int    // the version that is written, from 1
	Oldest  int    // the oldest version that is read; Version if 0
}

// RecordError reports an unusable record and the faulty field. It wraps one of the errors above, or
// an error of the file system.
type RecordError struct {
	File  string // empty if the record did not come from a file
	Field string // empty if the record as a whole is unusable
	Err   error
}

func (e *RecordError) Error() string {
	s := ""
	if e.File != "" {
		s = e.File + ": "
	}
	if e.Field != "" {
		s += e.Field + ": "
	}
	return s + e.Err.Error()
}

func (e *RecordError) Unwrap() error { return e.Err }

type envelope struct {
	Schema  string          `json:"schema"`
	Version int             `json:"version"`
	CRC32C  string          `json:"crc32c"`
	Data    json.RawMessage `json:"data"`
}

// castagnoli is built on first use: the CNI plugin, which runs for a few milliseconds, writes files
// but no records.
var castagnoli = sync.OnceValue(func() *crc32.Table { return crc32.MakeTable(crc32.Castagnoli) })

// The checksum also covers schema and version. Otherwise a flipped bit could make a record appear to have another
// version.
func checksum(schema string, version int, data []byte) string {
	h := crc32.New(castagnoli())
	fmt.Fprintf(h, "%s\n%d\n", schema, version)
	h.Write(data)
	return fmt.Sprintf("%08x", h.Sum32())
}

// Encode returns v in the envelope of the schema.
func Encode(s Schema, v any) ([]byte, error) {
	if s.Name == "" || s.Version < 1 {
		return nil, fmt.Errorf("schema %+v has no name or no version", s)
	}
	data, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", s.Name, err)
	}
	b, err := json.Marshal(envelope{Schema: s.Name, Version: s.Version, CRC32C: checksum(s.Name, s.Version, data), Data: data})
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", s.Name, err)
	}
	return append(b, '\n'), nil
}

// Open verifies the envelope and returns its version and JSON data, for callers that read several
// versions.
func Open(b []byte, s Schema) (version int, data []byte, err error) {
	var e envelope
	if err := strict(b, &e); err != nil {
		return 0, nil, &RecordError{Err: fmt.Errorf("%w: %w", ErrCorrupt, err)}
	}
	// The checksum is computed over the compact form, which Encode writes.
	var compact bytes.Buffer
	if len(e.Data) == 0 {
		return 0, nil, &RecordError{Field: "data", Err: fmt.Errorf("%w: missing", ErrCorrupt)}
	}
	if err := json.Compact(&compact, e.Data); err != nil {
		return 0, nil, &RecordError{Field: "data", Err: fmt.Errorf("%w: %w", ErrCorrupt, err)}
	}
	if want := checksum(e.Schema, e.Version, compact.Bytes()); e.CRC32C != want {
		return 0, nil, &RecordError{Field: "crc32c", Err: fmt.Errorf("%w: it says %q, the content gives %q", ErrCorrupt, clip(e.CRC32C), want)}
	}
	if e.Schema != s.Name {
		return 0, nil, &RecordError{Field: "schema", Err: fmt.Errorf("%w: %q, want %q", ErrForeign, clip(e.Schema), s.Name)}
	}
	oldest := cmp.Or(s.Oldest, s.Version)
	if e.Version < oldest || e.Version > s.Version {
		return 0, nil, &RecordError{Field: "version", Err: fmt.Errorf("%w: %d, this program reads %d to %d", ErrVersion, e.Version, oldest, s.Version)}
	}
	return e.Version, compact.Bytes(), nil
}

// Decode reads a record into v. Its version must be readable by the schema, and unknown fields are
// refused.
func Decode(b []byte, s Schema, v any) error {
	_, data, err := Open(b, s)
	if err != nil {
		return err
	}
	if err := strict(data, v); err != nil {
		field := "data"
		if te, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && te.Field != "" {
			field = "data." + te.Field
		}
		return &RecordError{Field: field, Err: fmt.Errorf("%w: %w", ErrCorrupt, err)}
	}
	return nil
}

func strict(b []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return errors.New("it ends too early")
		}
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("unexpected data after the record")
	}
	return nil
}

func clip(s string) string {
	if len(s) > 64 {
		return s[:64] + "…"
	}
	return s
}

// Save writes v to path. Only the owner can read the file.
func Save(path string, s Schema, v any, sync Sync) error {
	b, err := Encode(s, v)
	if err != nil {
		return err
	}
	return WriteFile(path, b, 0o600, sync)
}

// Load reads path, of at most limit bytes, into v. It returns fs.ErrNotExist for a missing file and
// a *RecordError for any other problem.
func Load(path string, limit int64, s Schema, v any) error {
	b, err := ReadFile(path, limit)
	if errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err != nil {
		return &RecordError{File: path, Err: err}
	}
	return inFile(path, Decode(b, s, v))
}

func inFile(path string, err error) error {
	if re, ok := errors.AsType[*RecordError](err); ok {
		return &RecordError{File: path, Field: re.Field, Err: re.Err}
	}
	return err
}

// Record is the content of one file of a directory.
type Record[T any] struct {
	Name  string // file name without the suffix
	Value T
}

// List reads every file of dir that ends in suffix. It returns unreadable records as *RecordError
// in bad, together with the readable ones; their files stay in place. A missing directory has no
// records. err reports a failure to read the directory itself.
func List[T any](dir, suffix string, limit int64, s Schema) (records []Record[T], bad []error, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), suffix)
		if !ok || isTemp(e.Name()) {
			continue
		}
		var v T
		switch err := Load(filepath.Join(dir, e.Name()), limit, s, &v); {
		case errors.Is(err, fs.ErrNotExist): // removed meanwhile
		case err != nil:
			bad = append(bad, err)
		default:
			records = append(records, Record[T]{Name: name, Value: v})
		}
	}
	return records, bad, nil
}

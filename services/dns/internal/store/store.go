// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package store keeps the learned names in a file of kit/store until the machine boots. After a boot, the endpoints
// in the records and all connections no longer exist.
//
// The file saves work after a restart, and keeps the shares of pods correct. Nothing else depends on it. So a corrupt
// file is put aside, and the service starts without names.
package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/services/dns/internal/names"
)

// AsideName is the name of the last file that was put aside.
const AsideName = "refused.db"

const bucketNames = "names"

var options = store.Options{
	Name:   "names.db",
	Layout: store.Layout{Format: "sluice-dns", Version: 1, Buckets: []string{bucketNames}},
	Boot:   true,
	Loss:   "answers may be held once more",
	Doc:    "docs/reference/dns.md",
}

// Store is an open file.
type Store struct {
	dir  *store.Dir
	file *store.Store
}

// Open opens the file in a directory, which it creates with mode 0700 if it is missing. It returns the stored names.
// aside is the reason why a file was put aside; the store is then empty.
func Open(dir string) (s *Store, list []names.Name, aside, err error) {
	d, err := store.OpenDir(dir, 0o700)
	if err != nil {
		return nil, nil, nil, err
	}
	s, list, err = open(d)
	var refusal *store.Refusal
	if errors.As(err, &refusal) {
		aside = err
		if err = os.Rename(refusal.Path, filepath.Join(dir, AsideName)); err == nil {
			s, list, err = open(d)
		}
	}
	if err != nil {
		return nil, nil, aside, errors.Join(err, d.Close())
	}
	return s, list, aside, nil
}

func open(d *store.Dir) (*Store, []names.Name, error) {
	f, err := d.Open(options)
	if err != nil {
		return nil, nil, err
	}
	s := &Store{dir: d, file: f}
	var list []names.Name
	err = f.View(func(t *store.Tx) error {
		return t.ForEach(bucketNames, func(k, v []byte) error {
			n, err := decode(string(k), v)
			if err != nil {
				return f.Refuse(fmt.Errorf("record of %.100q: %w", k, err))
			}
			list = append(list, n)
			return nil
		})
	})
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return s, list, nil
}

// Close closes the file and unlocks the directory for the next process.
func (s *Store) Close() error { return errors.Join(s.file.Close(), s.dir.Close()) }

// Problem returns the error of the last Save; nil if it succeeded.
func (s *Store) Problem() error { return s.file.Problem() }

// Size returns the size of the file in bytes.
func (s *Store) Size() int64 { return s.file.Size() }

// Save writes the records of names and removes the records of the names in gone, in one transaction.
func (s *Store) Save(records []names.Name, gone []string) error {
	if len(records)+len(gone) == 0 {
		return s.file.Probe()
	}
	return s.file.Update(func(t *store.Tx) error {
		for _, r := range records {
			t.Put(bucketNames, []byte(r.Name), encode(r))
		}
		for _, name := range gone {
			t.Delete(bucketNames, []byte(name))
		}
		return nil
	})
}

// The record of a name contains, in network byte order: the pods that pay, each with its endpoint and tenant; the
// index of the pod that pays for the name; the CNAME chain; and for each address its 16 bytes, its expiry time in
// Unix seconds, and the index of the pod that pays for it. A text begins with a length of two bytes, and a list with
// a count of two bytes.

func encode(r names.Name) []byte {
	numbers := make(map[names.Asker]uint16)
	var askers []names.Asker
	number := func(a names.Asker) uint16 {
		n, ok := numbers[a]
		if !ok {
			n = uint16(len(askers)) //nolint:gosec // at most one more than addresses
			numbers[a] = n
			askers = append(askers, a)
		}
		return n
	}
	body := binary.BigEndian.AppendUint16(nil, number(r.Payer))
	body = appendCount(body, len(r.Chain))
	for _, c := range r.Chain {
		body = appendText(body, c)
	}
	body = appendCount(body, len(r.Entries))
	for _, e := range r.Entries {
		key := e.Addr.As16()
		body = append(body, key[:]...)
		body = binary.BigEndian.AppendUint64(body, uint64(e.Expires.Unix())) //nolint:gosec // after 1970
		body = binary.BigEndian.AppendUint16(body, number(e.Payer))
	}
	out := appendCount(nil, len(askers))
	for _, a := range askers {
		out = appendText(binary.BigEndian.AppendUint32(out, a.Endpoint), a.Tenant)
	}
	return append(out, body...)
}

func appendCount(b []byte, n int) []byte {
	return binary.BigEndian.AppendUint16(b, uint16(min(n, math.MaxUint16))) //nolint:gosec // limited
}

func appendText(b []byte, text string) []byte {
	text = text[:min(len(text), math.MaxUint16)]
	return append(appendCount(b, len(text)), text...)
}

var errRecord = errors.New("it is not a record of this version")

// fields parses a record. After the first error, all methods return zero values.
type fields struct {
	b      []byte
	failed bool
}

func (f *fields) take(n int) []byte {
	if f.failed || len(f.b) < n {
		f.failed = true
		return make([]byte, n)
	}
	out := f.b[:n]
	f.b = f.b[n:]
	return out
}

func (f *fields) uint16() uint16 { return binary.BigEndian.Uint16(f.take(2)) }
func (f *fields) uint32() uint32 { return binary.BigEndian.Uint32(f.take(4)) }
func (f *fields) uint64() uint64 { return binary.BigEndian.Uint64(f.take(8)) }
func (f *fields) text() string   { return string(f.take(int(f.uint16()))) }

func decode(name string, b []byte) (names.Name, error) {
	f := &fields{b: b}
	askers := make([]names.Asker, f.uint16())
	for i := range askers {
		if f.failed {
			return names.Name{}, errRecord
		}
		askers[i] = names.Asker{Endpoint: f.uint32(), Tenant: f.text()}
	}
	asker := func() names.Asker {
		if n := int(f.uint16()); n < len(askers) {
			return askers[n]
		}
		f.failed = true
		return names.Asker{}
	}
	out := names.Name{Name: name, Payer: asker()}
	for range f.uint16() {
		if f.failed {
			break
		}
		out.Chain = append(out.Chain, f.text())
	}
	for range f.uint16() {
		if f.failed {
			break
		}
		e := names.Entry{Addr: netip.AddrFrom16([16]byte(f.take(16))).Unmap()}
		seconds := f.uint64()
		if seconds > math.MaxInt32*1000 { // far later than any time that is written
			return names.Name{}, errRecord
		}
		e.Expires = time.Unix(int64(seconds), 0) //nolint:gosec // checked
		e.Payer = asker()
		out.Entries = append(out.Entries, e)
	}
	if f.failed || len(f.b) > 0 || len(out.Entries) == 0 {
		return names.Name{}, errRecord
	}
	return out, nil
}

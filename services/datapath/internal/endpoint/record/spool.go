// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/deletion"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Spool is the directory in which the CNI plugin leaves deletions while the datapath does not
// answer, in the format of package deletion. The plugin writes the files; the datapath removes each
// file after executing the deletion.
type Spool struct {
	dir string
	log *slog.Logger
}

// OpenSpool uses the directory dir, which need not exist.
func OpenSpool(dir string, l *slog.Logger) *Spool { return &Spool{dir: dir, log: l} }

// List reads the entries. Unreadable entries are returned in bad and stay.
func (s *Spool) List() (deletions []deletion.Entry, bad []*SpoolError, err error) {
	entries, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("list spooled deletions: %w", err)
	}
	for _, e := range entries {
		if !deletion.IsEntry(e.Name()) {
			continue
		}
		d, err := s.read(e.Name())
		switch {
		case errors.Is(err, fs.ErrNotExist): // removed meanwhile
		case err != nil:
			bad = append(bad, &SpoolError{filepath.Join(s.dir, e.Name()), err})
		default:
			deletions = append(deletions, d)
		}
	}
	return deletions, bad, nil
}

func (s *Spool) read(name string) (deletion.Entry, error) {
	b, err := durable.ReadFile(filepath.Join(s.dir, name), deletion.MaxSize)
	if err != nil {
		return deletion.Entry{}, err
	}
	return deletion.Parse(name, b)
}

// SpoolError is an error of one entry.
type SpoolError struct {
	Path string
	Err  error
}

func (e *SpoolError) Error() string { return e.Path + ": " + e.Err.Error() }

// Key returns the Owner.Key of the entry's owner, from the name of the file.
func (e *SpoolError) Key() string { return filepath.Base(e.Path) }

// Unwrap returns the cause.
func (e *SpoolError) Unwrap() error { return e.Err }

// SetAside renames an unreadable entry, so that it is reported once and can be examined.
func (s *Spool) SetAside(e *SpoolError) error { return os.Rename(e.Path, deletion.Bad(e.Path)) }

// Has reports whether the owner's entry exists. The plugin removes an entry when it has executed
// the deletion itself.
func (s *Spool) Has(o workload.Owner) (bool, error) {
	_, err := os.Lstat(filepath.Join(s.dir, o.Key()))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Done removes the owner's entry.
func (s *Spool) Done(o workload.Owner) error {
	_, err := durable.Remove(filepath.Join(s.dir, o.Key()), durable.SyncNone)
	return err
}

// Owners are the owners of endpoints.
type Owners interface {
	// OwnerOf finds the owner of an endpoint by its Owner.Key.
	OwnerOf(key string) (workload.Owner, bool)
}

// Deleter executes spooled deletions.
type Deleter interface {
	DeleteSpooled(ctx context.Context, o workload.Owner, d endpoint.Spooled) (existed bool, err error)
}

// Replay executes the spooled deletions. An unreadable entry is executed for the owner in its file
// name, then reported and set aside.
func (s *Spool) Replay(ctx context.Context, owners Owners, endpoints Deleter) error {
	deletions, bad, err := s.List()
	if err != nil {
		return err
	}
	var errs []error
	for _, b := range bad {
		o, found := owners.OwnerOf(b.Key())
		var err error
		if found {
			_, err = endpoints.DeleteSpooled(ctx, o, endpoint.Spooled{
				Waits: func() (bool, error) { return s.Has(o) },
				Done:  func() error { return s.SetAside(b) },
			})
		} else {
			err = s.SetAside(b)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("spooled deletion %w: execute by file name and set aside: %w", b, err))
			continue
		}
		s.log.Error("spooled deletion is unreadable; it was executed by its file name and set aside",
			"owner", o.String(), "existed", found, log.Err(b))
	}
	done := 0
	for _, d := range deletions {
		_, err := endpoints.DeleteSpooled(ctx, d.Owner, endpoint.Spooled{
			Waits: func() (bool, error) { return s.Has(d.Owner) },
			Done:  func() error { return s.Done(d.Owner) },
		})
		if errors.Is(err, endpoint.ErrInvalid) {
			err = s.Done(d.Owner) // the owner is invalid, so it has no endpoint
		}
		if err != nil {
			// It stays in the spool, and the other deletions continue.
			errs = append(errs, fmt.Errorf("delete %s: %w", d.Owner, err))
			continue
		}
		done++
	}
	if done > 0 {
		s.log.Info("spooled deletions done", "count", done)
	}
	return errors.Join(errs...)
}

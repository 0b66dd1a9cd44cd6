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

// Spool is the directory in which the CNI plugin leaves deletions that came
// while the datapath was away, in the form of package deletion. The plugin writes
// the files, the datapath removes them when it has done what they say.
type Spool struct {
	dir string
	log *slog.Logger
}

// OpenSpool describes the spool; the directory need not exist.
func OpenSpool(dir string, l *slog.Logger) *Spool { return &Spool{dir: dir, log: l} }

// List reads the entries. What cannot be read is in bad and stays.
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
		case errors.Is(err, fs.ErrNotExist): // taken back meanwhile
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

// SpoolError is about one entry.
type SpoolError struct {
	Path string
	Err  error
}

func (e *SpoolError) Error() string { return e.Path + ": " + e.Err.Error() }

// Key is Owner.Key of the owner whose deletion it is, by the name of the file.
func (e *SpoolError) Key() string { return filepath.Base(e.Path) }

// Unwrap is the cause.
func (e *SpoolError) Unwrap() error { return e.Err }

// SetAside renames an entry that cannot be read, so that it is reported once
// and can be looked at.
func (s *Spool) SetAside(e *SpoolError) error { return os.Rename(e.Path, deletion.Bad(e.Path)) }

// Has says whether the owner's entry is there: the plugin takes it back when it
// has carried it out itself.
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

// Deleter does what a spooled deletion says.
type Deleter interface {
	// OwnerOf finds the owner of an endpoint by its Owner.Key.
	OwnerOf(key string) (workload.Owner, bool)
	DeleteSpooled(ctx context.Context, o workload.Owner, d endpoint.Spooled) (existed bool, err error)
}

// Replay does the deletions that came while nobody listened. One that cannot be
// read is reported and set aside once it is done: its name says whose it is.
func (s *Spool) Replay(ctx context.Context, endpoints Deleter) error {
	deletions, bad, err := s.List()
	if err != nil {
		return err
	}
	var errs []error
	for _, b := range bad {
		o, found := endpoints.OwnerOf(b.Key())
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
			errs = append(errs, fmt.Errorf("spooled deletion %w: delete by the name of the file, set aside: %w", b, err))
			continue
		}
		s.log.Error("spooled deletion is unreadable; it was done by its name and set aside",
			"owner", o.String(), "existed", found, log.Err(b))
	}
	done := 0
	for _, d := range deletions {
		_, err := endpoints.DeleteSpooled(ctx, d.Owner, endpoint.Spooled{
			Waits: func() (bool, error) { return s.Has(d.Owner) },
			Done:  func() error { return s.Done(d.Owner) },
		})
		if errors.Is(err, endpoint.ErrInvalid) {
			err = s.Done(d.Owner) // of no endpoint that there could be
		}
		if err != nil {
			// It stays in the spool, and the others need not wait for it.
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

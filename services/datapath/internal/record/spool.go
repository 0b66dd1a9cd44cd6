// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/model/workload"
)

// Spool is the directory in which the CNI plugin leaves deletions that came
// while the datapath was away: one file per owner, named by Owner.Key, with
//
//	{"version":1,"containerId":"…","interfaceName":"eth0","time":"2026-01-02T03:04:05Z"}
//
// Names that begin with "." are not entries. The plugin writes the files, the
// datapath removes them when it has done what they say.
type Spool struct{ dir string }

// OpenSpool describes the spool; the directory need not exist.
func OpenSpool(dir string) *Spool { return &Spool{dir: dir} }

const (
	spoolVersion = 1
	spoolMaxSize = 4 << 10
	// badSuffix is added to the name of an entry that cannot be read.
	badSuffix = ".bad"
)

type spooled struct {
	Version       int       `json:"version"`
	ContainerID   string    `json:"containerId"`
	InterfaceName string    `json:"interfaceName"`
	Time          time.Time `json:"time"`
}

// Deletion is an entry of the spool.
type Deletion struct {
	Owner workload.Owner
	// Time is when the plugin was asked, by the machine's clock: for people.
	Time time.Time
}

// List reads the entries. What cannot be read is in bad and stays.
func (s *Spool) List() (deletions []Deletion, bad []*SpoolError, err error) {
	entries, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("list spooled deletions: %w", err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") || strings.HasSuffix(e.Name(), badSuffix) {
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

func (s *Spool) read(name string) (Deletion, error) {
	b, err := durable.ReadFile(filepath.Join(s.dir, name), spoolMaxSize)
	if err != nil {
		return Deletion{}, err
	}
	return parseSpooled(name, b)
}

func parseSpooled(name string, b []byte) (Deletion, error) {
	var e spooled
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&e); err != nil {
		return Deletion{}, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Deletion{}, errors.New("more follows after the entry")
	}
	if e.Version != spoolVersion {
		return Deletion{}, fmt.Errorf("version: %d, this program reads %d", e.Version, spoolVersion)
	}
	o := workload.Owner{ContainerID: e.ContainerID, Interface: e.InterfaceName}
	if o.Key() != name {
		return Deletion{}, fmt.Errorf("containerId, interfaceName: the file is not that of %q", o)
	}
	if e.Time.IsZero() {
		return Deletion{}, errors.New("time: missing")
	}
	return Deletion{Owner: o, Time: e.Time}, nil
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
func (s *Spool) SetAside(e *SpoolError) error { return os.Rename(e.Path, e.Path+badSuffix) }

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

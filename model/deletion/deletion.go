// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package deletion holds the form of a spooled deletion: a DEL that came while
// the datapath was away.
//
// The CNI plugin writes one file per owner, and the datapath reads the directory
// at its start and while it serves. A file is named by the owner's key, so
// writing twice is writing once; its content is one line,
//
//	{"version":1,"containerId":"…","interfaceName":"eth0","time":"2026-01-02T03:04:05Z"}
//
// Both processes may be of different versions, so the form changes only together
// with Version.
package deletion

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-net/sluice/model/workload"
)

// Version is the form that is written, and the one that is read.
const Version = 1

// MaxSize bounds the content of a file in bytes.
const MaxSize = 4 << 10

// badSuffix is added to the name of an entry that cannot be read.
const badSuffix = ".bad"

// Entry is one deletion.
type Entry struct {
	Owner workload.Owner
	Time  time.Time // of the DEL, by the machine's clock: for people
}

// content is the content of a file.
type content struct {
	Version int `json:"version"`
	workload.Owner
	Time time.Time `json:"time"`
}

// Dir is the spool's directory below an instance's state directory.
func Dir(stateDir string) string { return filepath.Join(stateDir, "cni", "deletes") }

// IsEntry reports whether a file of the directory is an entry by its name. Names
// that begin with "." are being written, and those of Bad have been set aside.
func IsEntry(name string) bool {
	return !strings.HasPrefix(name, ".") && !strings.HasSuffix(name, badSuffix)
}

// Bad is the path of an entry that is set aside because it cannot be read.
func Bad(path string) string { return path + badSuffix }

// Format returns the content of the entry's file, which Owner.Key names.
func (e Entry) Format() ([]byte, error) {
	b, err := json.Marshal(content{Version, e.Owner, e.Time.UTC()})
	return append(b, '\n'), err
}

// Parse reads the content of the file of that name.
func Parse(name string, b []byte) (Entry, error) {
	var c content
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		return Entry{}, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Entry{}, errors.New("more follows after the entry")
	}
	switch {
	case c.Version != Version:
		return Entry{}, fmt.Errorf("version: %d, this program reads %d", c.Version, Version)
	case c.Key() != name:
		return Entry{}, fmt.Errorf("containerId, interfaceName: the file is not that of %q", c.Owner)
	case c.Time.IsZero():
		return Entry{}, errors.New("time: missing")
	}
	return Entry{Owner: c.Owner, Time: c.Time}, nil
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package deletion defines the file format of a spooled deletion: a DEL that the CNI plugin received while the
// datapath was down.
//
// The CNI plugin writes one file per owner. The datapath reads the directory when it starts and while it serves. The
// file name is the owner's key, so repeating a DEL rewrites the same file. The content is one line:
//
//	{"version":1,"containerId":"…","interfaceName":"eth0","time":"2026-01-02T03:04:05Z"}
//
// The two processes may have different versions, so the format changes only together with Version.
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

// Version is the only version of the format that is written and read.
const Version = 1

// MaxSize limits the content of a file, in bytes.
const MaxSize = 4 << 10

// badSuffix is appended to the name of a file that cannot be read.
const badSuffix = ".bad"

// Entry is one deletion.
type Entry struct {
	Owner workload.Owner
	Time  time.Time // of the DEL, by the machine's clock; informational
}

// content is the JSON form of an entry.
type content struct {
	Version int `json:"version"`
	workload.Owner
	Time time.Time `json:"time"`
}

// Dir returns the spool directory below an instance's state directory.
func Dir(stateDir string) string { return filepath.Join(stateDir, "cni", "deletes") }

// IsEntry reports whether a file name in the directory is the name of an entry. Files whose names begin with "." are
// still being written, and names made by Bad belong to corrupt files.
func IsEntry(name string) bool {
	return !strings.HasPrefix(name, ".") && !strings.HasSuffix(name, badSuffix)
}

// Bad returns the path to which an unreadable entry is renamed.
func Bad(path string) string { return path + badSuffix }

// Format returns the content of the entry's file. The name of the file is Owner.Key.
func (e Entry) Format() ([]byte, error) {
	b, err := json.Marshal(content{Version, e.Owner, e.Time.UTC()})
	return append(b, '\n'), err
}

// Parse reads an entry from the name and the content of its file.
func Parse(name string, b []byte) (Entry, error) {
	var c content
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		return Entry{}, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Entry{}, errors.New("data after the entry")
	}
	switch {
	case c.Version != Version:
		return Entry{}, fmt.Errorf("version: %d, this program reads %d", c.Version, Version)
	case c.Key() != name:
		return Entry{}, fmt.Errorf("containerId, interfaceName: the file name is not the key of %q", c.Owner)
	case c.Time.IsZero():
		return Entry{}, errors.New("time: missing")
	}
	return Entry{Owner: c.Owner, Time: c.Time}, nil
}

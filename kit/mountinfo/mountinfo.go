// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package mountinfo says which mount a path lies on, and whether mounts that are
// made later elsewhere reach it.
package mountinfo

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Mount is one mount of the process's mount namespace.
type Mount struct {
	// Point is where it is mounted.
	Point string
	// Shared says that mounts below it reach its peers, and theirs reach it.
	Shared bool
	// Slave says that mounts below its master reach it, but not the reverse.
	Slave bool
}

// Receives says whether mounts that another mount namespace makes below the
// mount are seen here.
func (m Mount) Receives() bool { return m.Shared || m.Slave }

// Of is the mount that a path lies on, which must exist.
func Of(path string) (Mount, error) {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return Mount{}, err
	}
	content, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return Mount{}, err
	}
	m, ok := holding(string(content), path)
	if !ok {
		return Mount{}, fmt.Errorf("no mount holds %s", path)
	}
	return m, nil
}

// unescape undoes how the kernel writes a path in a line of words.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// holding finds the mount of a path without links: the longest point above it,
// and the last of several there, which covers the others.
func holding(mountinfo, path string) (found Mount, ok bool) {
	for line := range strings.Lines(mountinfo) {
		fields := strings.Fields(line)
		if len(fields) < 7 {
			continue
		}
		m := Mount{Point: unescape.Replace(fields[4])}
		below := path == m.Point || strings.HasPrefix(path, strings.TrimSuffix(m.Point, "/")+"/")
		if !below || len(m.Point) < len(found.Point) {
			continue
		}
		for _, tag := range fields[6:] {
			if tag == "-" {
				break
			}
			m.Shared = m.Shared || strings.HasPrefix(tag, "shared:")
			m.Slave = m.Slave || strings.HasPrefix(tag, "master:")
		}
		found, ok = m, true
	}
	return found, ok
}

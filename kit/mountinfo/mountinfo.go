// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package mountinfo finds the mount that contains a path, and reports whether mounts that are made later in other
// namespaces propagate to it.
package mountinfo

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Mount is one mount of the process's mount namespace.
type Mount struct {
	// Point is the mount point.
	Point string
	// Shared means that mounts below it propagate to and from its peers.
	Shared bool
	// Slave means that mounts propagate to it from its master, but not in the other direction.
	Slave bool
}

// Receives reports whether a mount that is made below this one in another mount namespace propagates to this one.
func (m Mount) Receives() bool { return m.Shared || m.Slave }

// Of returns the mount that contains a path. The path must exist.
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

// unescape reverses the kernel's octal escapes in paths.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// holding finds the mount that contains a path without links: the mount with the longest mount point above the path. If
// several mounts have that mount point, the last one covers the others.
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

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package version returns the version of the build. It has no dependencies, because the command
// line prints its version and runs no service.
package version

import (
	"cmp"
	"runtime/debug"
	"strings"
)

// Build identifies a build.
type Build struct {
	Version  string // version of the module, "devel" for a working copy
	Revision string // revision of the repository; empty if it was not recorded
	Modified bool   // the working copy had uncommitted changes
}

// linkVersion is set with -ldflags "-X github.com/sluice-net/sluice/kit/version.linkVersion=v1.2.3".
var linkVersion string

// Get returns the build information from the linker.
func Get() Build {
	v := Build{Version: linkVersion}
	info, ok := debug.ReadBuildInfo()
	if ok {
		v.Version = cmp.Or(v.Version, strings.Trim(info.Main.Version, "()"))
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				v.Revision = s.Value
			case "vcs.modified":
				v.Modified = s.Value == "true"
			}
		}
	}
	v.Version = cmp.Or(v.Version, "devel")
	return v
}

// String returns version and revision, as in logs and answers.
func (v Build) String() string {
	s := v.Version
	if v.Revision != "" {
		s += " (" + v.Revision[:min(12, len(v.Revision))]
		if v.Modified {
			s += ", modified"
		}
		s += ")"
	}
	return s
}

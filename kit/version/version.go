// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package version says what was built. It links nothing, because the command
// line tells its version and runs no service.
package version

import (
	"cmp"
	"runtime/debug"
	"strings"
)

// Build says what was built.
type Build struct {
	Version  string // of the module, "devel" for a working copy
	Revision string // of the repository; "" if it was not recorded
	Modified bool   // the working copy had changes
}

// linkVersion is set with -ldflags "-X github.com/sluice-net/sluice/kit/version.linkVersion=v1.2.3".
var linkVersion string

// Get returns what the linker recorded.
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

// String is the version with the revision, as logs and answers have it.
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

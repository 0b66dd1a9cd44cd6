// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"fmt"
	"log/slog"
)

// watermark is the highest policy revision that was carried out. A service keeps its revision
// over restarts, so one with a lower revision has lost what it kept, and what it says now may
// be that there are no policies: that is carried out like any other revision, but not in
// silence.
type watermark struct {
	revision uint64
	lost     bool // the service is behind it
}

// reach notes that a revision was carried out. It returns what is lost, if the service is
// behind, and logs when that begins. named says that the service names its state: then decide
// has compared it with what was enforced before.
func (m *watermark) reach(revision uint64, named bool, l *slog.Logger) string {
	if named {
		m.lost, m.revision = false, revision
		return ""
	}
	lost := revision < m.revision
	if lost && !m.lost {
		l.Error("policy service has lost policies", "revision", revision, "enforced", m.revision)
	}
	m.lost, m.revision = lost, max(m.revision, revision)
	if !lost {
		return ""
	}
	return fmt.Sprintf("policies up to revision %d: the policy service has lost them and is at revision %d; apply them again",
		m.revision, revision)
}

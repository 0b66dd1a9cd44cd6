// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"fmt"
	"log/slog"
)

// watermark is the highest policy revision that was applied. A service keeps its revision over restarts. So a service
// with a lower revision has lost state, perhaps all policies. Its state is applied like any other, but the loss is
// logged.
type watermark struct {
	revision uint64
	lost     bool // the service is behind it
}

// reach records an applied revision. If the service is behind, it returns what is lost, and logs
// the first time. named: the service sends the name of its state, so decide has already compared it
// with the enforced state.
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

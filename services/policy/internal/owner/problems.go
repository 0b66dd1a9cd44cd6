// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"log/slog"

	"github.com/sluice-net/sluice/kit/log"
)

// problems holds the present problems, by part of the owner.
type problems struct {
	log   *slog.Logger
	texts map[string]string
}

func newProblems(l *slog.Logger) *problems { return &problems{log: l, texts: make(map[string]string)} }

// note records the problem of a part, and logs it if it is new; nil clears it.
func (p *problems) note(part string, err error) {
	if err == nil {
		delete(p.texts, part)
		return
	}
	text := err.Error()
	if p.texts[part] == text {
		return
	}
	p.texts[part] = text
	p.log.Error("problem in the policy service", "part", part, log.Err(err))
}

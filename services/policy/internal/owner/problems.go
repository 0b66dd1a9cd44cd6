// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"log/slog"

	"github.com/sluice-net/sluice/kit/log"
)

// problems are what is wrong now, by the part of the owner that it concerns.
type problems struct {
	log   *slog.Logger
	texts map[string]string
}

func newProblems(l *slog.Logger) *problems { return &problems{log: l, texts: make(map[string]string)} }

// note notes the problem of a part and logs it if it is new; nil ends it.
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
	p.log.Error("policy is not as it should be", "part", part, log.Err(err))
}

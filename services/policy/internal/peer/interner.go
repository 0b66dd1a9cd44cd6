// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package peer

import (
	"strings"

	"github.com/sluice-net/sluice/model/label"
)

// Interner keeps only one copy of equal label texts, because the identities of a cluster repeat a few texts very often.
// It must be used by one goroutine. The zero value is ready.
type Interner struct{ texts map[string]string }

// maxInterned limits the remembered texts; above it, the interner starts empty again.
const maxInterned = 1 << 15

// Label returns an equal label with shared texts.
func (in *Interner) Label(l label.Label) label.Label {
	return label.Label{Source: in.text(l.Source), Key: in.text(l.Key), Value: in.text(l.Value)}
}

func (in *Interner) text(s string) string {
	if known, ok := in.texts[s]; ok {
		return known
	}
	if in.texts == nil || len(in.texts) >= maxInterned {
		in.texts = make(map[string]string)
	}
	s = strings.Clone(s)
	in.texts[s] = s
	return s
}

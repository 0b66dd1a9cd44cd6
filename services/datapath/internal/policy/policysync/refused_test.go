// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/sluice-net/sluice/model/policytable"
)

// TestLongRefusalEndsBehindAWholeCharacter: a protobuf string must be valid UTF-8, and the API
// allows at most 1,024 characters.
func TestLongRefusalEndsBehindAWholeCharacter(t *testing.T) {
	for pad := range 4 {
		name := strings.Repeat("x", pad) + strings.Repeat("€", 800)
		b := binding{
			table: &serviceTable{err: errors.New("too large")},
			rules: [][]policytable.Source{{{Kind: "NetworkPolicy", Namespace: "shop", Name: name}}},
		}
		text := refused(policytable.Egress, b)
		if !utf8.ValidString(text) || !strings.HasSuffix(text, "€…") || utf8.RuneCountInString(text) > 1024 {
			t.Errorf("with %d bytes before: %d characters that end with %q",
				pad, utf8.RuneCountInString(text), text[len(text)-8:])
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/sluice-net/sluice/services/policy/internal/fields"
)

// listFields prints all fields of all kinds of policy and how Sluice treats them, one JSON object per line. It needs no
// running service. `sluice policy explain-field` executes it, because only this program contains the decoders of the
// kinds.
func listFields(args []string, stdout, stderr io.Writer) int {
	if len(args) > 0 {
		fmt.Fprintf(stderr, "sluice-policy fields: takes no argument, not %q\n", args[0])
		return 2
	}
	encoder := json.NewEncoder(stdout)
	encoder.SetEscapeHTML(false)
	for _, f := range fields.All() {
		if err := encoder.Encode(f); err != nil {
			fmt.Fprintln(stderr, "sluice-policy fields:", err)
			return 1
		}
	}
	return 0
}

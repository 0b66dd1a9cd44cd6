// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
)

// TestMistakesInFlagsAreSaidInWords: the errors of Go's parsers are replaced by readable messages.
func TestMistakesInFlagsAreSaidInWords(t *testing.T) {
	command := func(*Invocation) *cobra.Command {
		cmd := &cobra.Command{Use: "x", RunE: func(*cobra.Command, []string) error { return nil }}
		f := cmd.Flags()
		f.Uint("last", 0, "")
		f.Uint32("limit", 0, "")
		f.Int("lines", 0, "")
		f.UintSlice("port", nil, "")
		f.Bool("all", false, "")
		f.Duration("for", time.Second, "")
		return cmd
	}
	for args, want := range map[string]string{
		"--last=-1":                   `--last: "-1" is not a whole number from 0 on`,
		"--last -1":                   `--last: "-1" is not a whole number from 0 on`,
		"--limit=1.5":                 `--limit: "1.5" is not a whole number from 0 on`,
		"--limit=4294967296":          `--limit: "4294967296" is out of range`,
		"--lines=many":                `--lines: "many" is not a whole number`,
		"--port=80,x":                 `--port: "80,x" is not a whole number from 0 on`,
		"--all=perhaps":               `--all: "perhaps" is not true or false`,
		"--for=5":                     `--for: "5" is not a duration with a unit, such as 10s or 5m`,
		"--timeout=5":                 `--timeout: "5" is not a duration with a unit, such as 10s or 5m`,
		"--absent":                    "unknown flag: --absent",
		"--last=18446744073709551616": `--last: "18446744073709551616" is out of range`,
	} {
		var out, errOut bytes.Buffer
		code := Run(append([]string{"x"}, strings.Fields(args)...), &out, &errOut, command)
		if code != ExitUsage || !strings.Contains(errOut.String(), want) || strings.Contains(errOut.String(), "strconv") {
			t.Errorf("%s: exit code %d, %q, want %q", args, code, errOut.String(), want)
		}
	}
}

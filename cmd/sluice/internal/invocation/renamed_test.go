// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"bytes"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// TestFormerNamesWorkAndNameTheNewOne: former names of commands and flags print the new name to standard error.
func TestFormerNamesWorkAndNameTheNewOne(t *testing.T) {
	for args, want := range map[string]struct {
		revision uint64
		told     string
	}{
		"check --expect-revision 7": {7, ""},
		"check --if-revision 7":     {7, "--if-revision is now called --expect-revision"},
		"audit --expect-revision=7": {7, "audit is now called check"},
		"check":                     {0, ""},
	} {
		var out, errOut bytes.Buffer
		var got *uint64
		command := func(*Invocation) *cobra.Command {
			var r Revision
			cmd := &cobra.Command{Use: "check", RunE: func(*cobra.Command, []string) error {
				got = r.Expected()
				return nil
			}}
			r.Flag(cmd, "the revision")
			return cmd
		}
		root := &cobra.Command{Use: "sluice"}
		root.AddCommand(command(nil), RenamedCommand("audit", command)(nil))
		root.SetArgs(strings.Fields(args))
		root.SetOut(&out)
		root.SetErr(&errOut)
		if err := root.Execute(); err != nil {
			t.Fatalf("%s: %v", args, err)
		}
		if (got == nil) != (want.revision == 0) || got != nil && *got != want.revision {
			t.Errorf("%s: revision %v, want %d", args, got, want.revision)
		}
		told := errOut.String()
		if out.Len() > 0 || !strings.Contains(told, want.told) || strings.Count(told, "\n") != min(1, len(want.told)) {
			t.Errorf("%s: printed %q, and %q as errors, want one line with %q", args, &out, told, want.told)
		}
	}
	var r Revision
	for _, bad := range []string{"", "x", "-1", "18446744073709551615"} {
		if err := r.Set(bad); err == nil {
			t.Errorf("revision %q is taken", bad)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policy applies, checks and explains network policies.
package policy

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/manifest"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// Command is `policy`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.WithAlias("netpol", invocation.Group("policy", "Apply, check and explain network policies",
		applyCommand(inv), deleteCommand(inv), confirmCommand(inv), sourceCommand(inv), listCommand(inv), getCommand(inv),
		explainCommand(inv), explainFieldCommand(inv), diffCommand(inv), validateCommand(inv), tableCommand(inv)))
}

// client shortens the calls of package invocation.
type client = policyv1.PolicyServiceClient

// manifestFlags adds the flags of commands that send manifests.
func manifestFlags(cmd *cobra.Command, allowUnknown, skipOthers *bool) {
	cmd.Flags().BoolVar(allowUnknown, "allow-unknown-fields", false,
		"ignore unknown fields with a warning")
	cmd.Flags().BoolVar(skipOthers, "skip-other-kinds", false, "skip objects that are not policies")
}

// readPolicies reads manifests. With skipOthers it skips objects that are not policies.
func readPolicies(inv *invocation.Invocation, files []string, stdin io.Reader, skipOthers bool) ([]manifest.Document,
	error,
) {
	docs, err := manifest.Read(files, stdin)
	if !skipOthers {
		return docs, err
	}
	kept, others := manifest.Only(docs, policykind.IsPolicy, "a policy")
	for _, text := range others {
		fmt.Fprintln(inv.ErrOut, "note: "+text)
	}
	if err == nil && len(kept) == 0 {
		err = errors.New("no policy found among the objects")
	}
	return kept, err
}

// onlyFiles refuses arguments: the command takes files with -f.
func onlyFiles(cmd *cobra.Command, a []string) error {
	if a = invocation.WithoutWait(cmd, a); len(a) > 0 {
		return invocation.Usagef("%s takes no argument; name files with -f, as in `%s -f %s`", cmd.CommandPath(),
			cmd.CommandPath(), a[0])
	}
	return nil
}

// noteText returns "field: text".
func noteText(n *policyv1.PolicyNote) string {
	if n.GetField() == "" {
		return n.GetText()
	}
	return n.GetField() + ": " + n.GetText()
}

// noteLabel returns the severity of a note.
func noteLabel(n *policyv1.PolicyNote) string {
	switch n.GetKind() {
	case policyv1.PolicyNoteKind_POLICY_NOTE_KIND_SELECTS_NOTHING, policyv1.PolicyNoteKind_POLICY_NOTE_KIND_NO_EFFECT:
		return "note: "
	}
	return "warning: "
}

// withOmitted appends a note with the number of notes that the service left out.
func withOmitted(notes []*policyv1.PolicyNote, omitted uint32) []*policyv1.PolicyNote {
	if omitted == 0 {
		return notes
	}
	return append(slices.Clone(notes), &policyv1.PolicyNote{Text: fmt.Sprintf("%d more notes are left out", omitted)})
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policy applies, checks and explains network policies.
package policy

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/manifest"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// Command is `policy`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("policy", "Apply, check and explain network policies",
		applyCommand(inv), deleteCommand(inv), confirmCommand(inv), sourceCommand(inv), listCommand(inv), getCommand(inv),
		explainCommand(inv), explainFieldCommand(inv), diffCommand(inv), validateCommand(inv), tableCommand(inv))
}

// client is the policy service's, for the calls of invocation.
type client = policyv1.PolicyServiceClient

// manifestFlags are flags of commands that send manifests.
func manifestFlags(cmd *cobra.Command, allowUnknown, skipOthers *bool) {
	cmd.Flags().BoolVar(allowUnknown, "allow-unknown-fields", false,
		"warn of fields that a kind does not have, and ignore them")
	cmd.Flags().BoolVar(skipOthers, "skip-other-kinds", false, "leave out objects that are no policies")
}

// readPolicies is readManifests without objects that are no policies, if those
// are to be left out.
func readPolicies(inv *invocation.Invocation, files []string, stdin io.Reader, skipOthers bool) ([]manifest.Document,
	error,
) {
	docs, err := manifest.Read(files, stdin)
	if !skipOthers {
		return docs, err
	}
	kept, others := manifest.Only(docs, policykind.IsPolicy, "no policy")
	for _, text := range others {
		fmt.Fprintln(inv.ErrOut, "note: "+text)
	}
	if err == nil && len(kept) == 0 {
		err = errors.New("there is no policy among the objects")
	}
	return kept, err
}

// onlyFiles refuses arguments where files are named with -f.
func onlyFiles(cmd *cobra.Command, a []string) error {
	if a = invocation.WithoutWait(cmd, a); len(a) > 0 {
		return invocation.Usagef("%s takes no argument; name files with -f, as in `%s -f %s`", cmd.CommandPath(),
			cmd.CommandPath(), a[0])
	}
	return nil
}

// note is something about an accepted policy that its author should know.
type note struct {
	Kind  string `json:"kind"`
	Field string `json:"field,omitempty"`
	Text  string `json:"text"`
}

// String is "field: text".
func (n note) String() string {
	if n.Field == "" {
		return n.Text
	}
	return n.Field + ": " + n.Text
}

// label is how much attention a note wants.
func (n note) label() string {
	if n.Kind == noteSelectsNothing || n.Kind == noteNoEffect {
		return "note: "
	}
	return "warning: "
}

// Kinds of notes: on a policy without an endpoint, on a field on which no verdict
// depends, and on one that is converted to what allows less.
const (
	noteSelectsNothing = "selects-nothing"
	noteNoEffect       = "no-effect"
	noteUnsupported    = "unsupported"
)

// notesOf are the notes of the service, with one on those that it left out.
func notesOf(list []*policyv1.PolicyNote, omitted uint32) []note {
	var all []note
	for _, n := range list {
		all = append(all, note{output.Enum(n.GetKind(), "POLICY_NOTE_KIND_"), n.GetField(), n.GetText()})
	}
	if omitted > 0 {
		all = append(all, note{Kind: "omitted", Text: fmt.Sprintf("%d more notes are left out", omitted)})
	}
	return all
}

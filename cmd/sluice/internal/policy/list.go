// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/peer"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

func listCommand(inv *invocation.Invocation) *cobra.Command {
	var (
		kind, namespace, subject string
		short                    bool
	)
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List policies with their state, and refused policies",
		Args:  invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			req := &policyv1.ListPoliciesRequest{Namespace: namespace}
			if kind != "" {
				k, err := policykind.Named(kind)
				if err != nil {
					return err
				}
				req.Kind = k.Name
			}
			if subject != "" {
				p, err := peer.Resolve(cmd.Context(), inv, subject, "")
				if err != nil {
					return err
				}
				if p.Identity == 0 {
					return invocation.Usagef("--subject: %q is not a pod or an identity", subject)
				}
				if p.Note != "" {
					inv.Note(p.Note)
				}
				req.Subject = p.Identity
			}
			return printList(cmd.Context(), inv, req, short)
		},
	}
	f := cmd.Flags()
	f.StringVar(&kind, "kind", "", "only this kind")
	f.StringVarP(&namespace, "namespace", "n", "", "only this namespace")
	f.StringVar(&subject, "subject", "", "only policies that select this pod or identity")
	f.BoolVar(&short, "refused", false, "only refused policies")
	return cmd
}

// columns are the columns of `policy list`.
var columns = []output.Column[*policyv1.Policy]{
	{Header: "POLICY", Cell: func(p *policyv1.Policy) any { return title(p) }},
	{Header: "STATE", Cell: func(p *policyv1.Policy) any { return stateText(p) }},
	{Header: "REVISION", Cell: func(p *policyv1.Policy) any { return p.GetRevision() }},
	{Header: "SELECTS", Cell: func(p *policyv1.Policy) any { return identitiesText(len(p.GetSubjects())) }},
	{Header: "RULES", Cell: func(p *policyv1.Policy) any { return p.GetRules() }},
	{Header: "AGE", Cell: func(p *policyv1.Policy) any { return output.Since(output.When(p.GetUpdateTime())) }},
	{Header: "SOURCE", Cell: func(p *policyv1.Policy) any { return sourceText(p) }},
}

// stateText returns the state of a policy in a few words.
func stateText(p *policyv1.Policy) string {
	switch {
	case p.GetAccepted() && p.GetError() != "":
		return "outdated" // a newer version of the policy was refused
	case !p.GetAccepted():
		return "refused"
	}
	converted, dropped := 0, len(p.GetDroppedFields())
	for _, n := range p.GetNotes() {
		if n.GetKind() == policyv1.PolicyNoteKind_POLICY_NOTE_KIND_UNSUPPORTED {
			converted++
		}
	}
	parts := []string{"accepted"}
	add := func(n int, one, many string) {
		switch {
		case n == 1:
			parts = append(parts, "1 "+one)
		case n > 1:
			parts = append(parts, fmt.Sprintf("%d %s", n, many))
		}
	}
	add(converted, "field converted", "fields converted")
	add(dropped, "field ignored", "fields ignored")
	add(len(remarks(p))-converted-dropped, "note", "notes")
	return strings.Join(parts, ", ")
}

// remarks returns the notes on a policy and its ignored fields. It omits the note that a policy selects nothing, which
// the column SELECTS shows.
func remarks(p *policyv1.Policy) []string {
	var all []string
	for _, field := range p.GetDroppedFields() {
		all = append(all, field+": no such field; it is ignored")
	}
	for _, n := range withOmitted(p.GetNotes(), p.GetOmittedNoteCount()) {
		if n.GetKind() != policyv1.PolicyNoteKind_POLICY_NOTE_KIND_SELECTS_NOTHING || n.GetField() != "" {
			all = append(all, noteText(n))
		}
	}
	return all
}

// title returns the name of the policy, or the file if it could not be parsed.
func title(p *policyv1.Policy) string {
	if p.GetKey().GetName() == "" {
		return sourceText(p)
	}
	return policykind.KeyText(p.GetKey())
}

func sourceText(p *policyv1.Policy) string {
	switch {
	case p.GetOrigin() != "":
		return p.GetSource() + ":" + p.GetOrigin()
	case p.GetManager() != "":
		return p.GetSource() + ":" + p.GetManager()
	}
	return p.GetSource()
}

func list(ctx context.Context, inv *invocation.Invocation, req *policyv1.ListPoliciesRequest) (
	all []*policyv1.Policy, err error,
) {
	err = invocation.Each(ctx, inv, invocation.Policy, client.ListPolicies, req,
		func(m *policyv1.ListPoliciesResponse) {
			if m.GetPolicy() != nil {
				all = append(all, m.GetPolicy())
			}
		})
	return all, err
}

func printList(ctx context.Context, inv *invocation.Invocation, req *policyv1.ListPoliciesRequest, refused bool) error {
	all, err := list(ctx, inv, req)
	if err != nil {
		return err
	}
	if refused {
		all = slices.DeleteFunc(all, func(p *policyv1.Policy) bool { return p.GetError() == "" })
	}
	return inv.Show(message.List(all), func(w io.Writer) {
		output.FoldedTable(w, inv.Wide(), columns, all)
		first := true
		line := func(text string) {
			if first {
				fmt.Fprintln(w)
				first = false
			}
			fmt.Fprintln(w, output.Printable(strings.TrimSpace(text)))
		}
		for _, p := range all {
			switch {
			case p.GetError() != "" && p.GetAccepted():
				line(title(p) + " keeps its previous version; the new version was refused: " + p.GetError())
			case p.GetError() != "":
				line(title(p) + " was refused: " + p.GetError())
			}
			for _, text := range remarks(p) {
				line(title(p) + ": " + text)
			}
		}
	})
}

func identitiesText(n int) string {
	if n == 1 {
		return "1 identity"
	}
	return fmt.Sprintf("%d identities", n)
}

func getCommand(inv *invocation.Invocation) *cobra.Command {
	var namespace string
	cmd := &cobra.Command{
		Use:   "get (KIND [NAMESPACE/]NAME | KIND/[NAMESPACE/]NAME)",
		Short: "Print the manifest of a policy; with -o json also its state",
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, a []string) error {
			keys, err := policykind.KeysNamed(a, namespace)
			switch {
			case err != nil:
				return err
			case len(keys) != 1:
				return invocation.Usagef("%s takes one policy, such as NetworkPolicy shop/web", cmd.CommandPath())
			}
			return printOne(cmd.Context(), inv, keys[0])
		},
	}
	cmd.Flags().StringVarP(&namespace, "namespace", "n", "", "namespace, if the name has none (default \"default\")")
	return cmd
}

func printOne(ctx context.Context, inv *invocation.Invocation, key *policyv1.PolicyKey) error {
	all, err := list(ctx, inv, &policyv1.ListPoliciesRequest{
		Kind: key.GetKind(), Namespace: key.GetNamespace(),
		Name: key.GetName(), WithManifests: true,
	})
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return invocation.NotFound(key.GetKind(), policykind.NameText(key), "policy list")
	}
	if inv.Format == "json" {
		return inv.Show(message.Of(all[0]), nil)
	}
	for _, p := range all {
		if p.GetError() != "" {
			fmt.Fprintln(inv.ErrOut, output.Printable("warning: a newer version was refused: "+p.GetError()))
		}
		for _, text := range remarks(p) {
			fmt.Fprintln(inv.ErrOut, output.Printable("warning: "+text))
		}
	}
	text := string(all[0].GetManifest())
	if !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	_, err = io.WriteString(inv.Out, text)
	return err
}

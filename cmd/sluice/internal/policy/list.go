// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
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
		Short: "List policies with their state, and what was refused",
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
	f.BoolVar(&short, "refused", false, "only what was refused")
	return cmd
}

// state is what is shown of one policy.
type state struct {
	Kind      string     `json:"kind"`
	Namespace string     `json:"namespace,omitempty"`
	Name      string     `json:"name"`
	Source    string     `json:"source"`
	Manager   string     `json:"manager,omitempty"`
	Origin    string     `json:"origin,omitempty"`
	Accepted  bool       `json:"accepted"`
	Error     string     `json:"error,omitempty"`
	Revision  uint64     `json:"revision"`
	Subjects  []uint32   `json:"subjects"`
	Rules     uint32     `json:"rules"`
	Updated   *time.Time `json:"updateTime,omitempty"`
	Dropped   []string   `json:"droppedFields,omitempty"`
	Notes     []note     `json:"notes,omitempty"`
	Manifest  string     `json:"manifest,omitempty"`
}

func stateOf(p *policyv1.Policy) state {
	s := state{
		Kind: p.GetKey().GetKind(), Namespace: p.GetKey().GetNamespace(), Name: p.GetKey().GetName(),
		Source: p.GetSource(), Manager: p.GetManager(), Origin: p.GetOrigin(), Accepted: p.GetAccepted(), Error: p.GetError(),
		Revision: p.GetRevision(),
		Subjects: p.GetSubjects(), Rules: p.GetRules(), Updated: output.When(p.GetUpdateTime()),
		Dropped: p.GetDroppedFields(),
		Notes:   notesOf(p.GetNotes(), p.GetOmittedNoteCount()), Manifest: string(p.GetManifest()),
	}
	if s.Subjects == nil {
		s.Subjects = []uint32{}
	}
	return s
}

// state is what became of a policy, in a word or two.
func (p state) state() string {
	switch {
	case p.Accepted && p.Error != "":
		return "outdated" // a newer form was refused
	case !p.Accepted:
		return "refused"
	}
	converted := 0
	for _, n := range p.Notes {
		if n.Kind == noteUnsupported {
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
	add(len(p.Dropped), "field ignored", "fields ignored")
	add(len(p.remarks())-converted-len(p.Dropped), "note", "notes")
	return strings.Join(parts, ", ")
}

// remarks are the notes on a policy, and the fields that it lost. That it selects
// no endpoint of this node is in a column of its own.
func (p state) remarks() []string {
	var all []string
	for _, field := range p.Dropped {
		all = append(all, field+": no such field; it is ignored")
	}
	for _, n := range p.Notes {
		if n.Kind != noteSelectsNothing || n.Field != "" {
			all = append(all, n.String())
		}
	}
	return all
}

// title is the policy's name; of a file that could not be read as one, the
// file's.
func (p state) title() string {
	if p.Name == "" {
		return p.source()
	}
	return policykind.KeyText(&policyv1.PolicyKey{Kind: p.Kind, Namespace: p.Namespace, Name: p.Name})
}

func (p state) source() string {
	switch {
	case p.Origin != "":
		return p.Source + ":" + p.Origin
	case p.Manager != "":
		return p.Source + ":" + p.Manager
	}
	return p.Source
}

func list(ctx context.Context, inv *invocation.Invocation, req *policyv1.ListPoliciesRequest) ([]state, error) {
	all := []state{}
	err := invocation.Each(ctx, inv, invocation.Policy, client.ListPolicies, req,
		func(m *policyv1.ListPoliciesResponse) {
			if m.GetPolicy() != nil {
				all = append(all, stateOf(m.GetPolicy()))
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
		all = slices.DeleteFunc(all, func(p state) bool { return p.Error == "" })
	}
	return inv.Show(all, func(w io.Writer) {
		output.Row(w, "POLICY", "STATE", "REVISION", "SELECTS", "RULES", "AGE", "SOURCE")
		for _, p := range all {
			output.Row(w, p.title(), p.state(), p.Revision, identitiesText(len(p.Subjects)), p.Rules, output.Since(p.Updated),
				p.source())
		}
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
			case p.Error != "" && p.Accepted:
				line(p.title() + " stays as it is; a newer form was refused: " + p.Error)
			case p.Error != "":
				line(p.title() + " was refused: " + p.Error)
			}
			for _, text := range p.remarks() {
				line(p.title() + ": " + text)
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
		Short: "Print the manifest of a policy; with -o json its state too",
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, a []string) error {
			keys, err := policykind.KeysNamed(a, namespace)
			switch {
			case err != nil:
				return err
			case len(keys) != 1:
				return invocation.Usagef("%s wants one policy, such as NetworkPolicy shop/web", cmd.CommandPath())
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
		return inv.Show(all[0], nil)
	}
	for _, p := range all {
		if p.Error != "" {
			fmt.Fprintln(inv.ErrOut, output.Printable("warning: a newer form was refused: "+p.Error))
		}
		for _, text := range p.remarks() {
			fmt.Fprintln(inv.ErrOut, output.Printable("warning: "+text))
		}
	}
	text := all[0].Manifest
	if !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	_, err = io.WriteString(inv.Out, text)
	return err
}

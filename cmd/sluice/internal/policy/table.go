// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"cmp"
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
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

func tableCommand(inv *invocation.Invocation) *cobra.Command {
	return &cobra.Command{
		Use:   "table PEER",
		Short: "Print the compiled policy tables of a pod or an identity",
		Long: `Print the compiled policy tables of a pod or an identity: the rules in order of
evaluation, and for each peer class the rule that decides at each range of ports. Admin
rules are evaluated before all others: the output shows the first match among the Admin
rules and the first match among the other rules.`,
		Args: invocation.Args(1, "a pod or an identity number"),
		RunE: func(cmd *cobra.Command, a []string) error {
			p, err := peer.Resolve(cmd.Context(), inv, a[0], "")
			if err != nil {
				return err
			}
			if p.Identity == 0 {
				return invocation.Usagef("%q is not a pod or an identity", a[0])
			}
			if p.Note != "" {
				inv.Note(p.Note)
			}
			return printTables(cmd.Context(), inv, p.Identity)
		},
	}
}

func printTables(ctx context.Context, inv *invocation.Invocation, subject uint32) error {
	request := &policyv1.GetPolicyTableRequest{Subject: subject}
	r, err := invocation.Ask(ctx, inv, invocation.Policy, client.GetPolicyTable, request)
	if err != nil {
		return err
	}
	return inv.Show(message.Of(r, message.Fact{Key: "subject", Value: subject}), func(w io.Writer) {
		fmt.Fprintf(w, "Identity %d, policy revision %d\n", subject, r.GetRevision())
		tableLines(w, "Egress", r.GetEgress(), r.GetEgressRules(), r.GetOmittedEgressRuleCount())
		tableLines(w, "Ingress", r.GetIngress(), r.GetIngressRules(), r.GetOmittedIngressRuleCount())
	})
}

// withGaps returns the ranges with the ports between them, which no rule matches.
func withGaps(ranges []*policyv1.PortRange) (all []*policyv1.PortRange) {
	next := uint32(0)
	for _, r := range ranges {
		if r.GetFirst() > ports.LastPoint {
			break
		}
		if r.GetFirst() > next {
			all = append(all, &policyv1.PortRange{First: next, Last: r.GetFirst() - 1})
		}
		all = append(all, &policyv1.PortRange{
			First: r.GetFirst(), Last: min(r.GetLast(), ports.LastPoint), Admin: r.GetAdmin(), Rest: r.GetRest(),
		})
		if r.GetLast() >= ports.LastPoint {
			return all
		}
		next = r.GetLast() + 1
	}
	return append(all, &policyv1.PortRange{First: next, Last: ports.LastPoint})
}

// rulesText returns the rules that decide at a range of ports.
func rulesText(r *policyv1.PortRange) string {
	var rules []string
	for _, n := range []uint32{r.GetAdmin(), r.GetRest()} {
		if n != 0 {
			rules = append(rules, fmt.Sprintf("rule %d", n))
		}
	}
	if len(rules) == 0 {
		return "default"
	}
	return strings.Join(rules, ", else ")
}

func tableLines(w io.Writer, title string, t *policyv1.PolicyTable, sources []*policyv1.RuleSources, omitted uint32) {
	if t == nil {
		fmt.Fprintf(w, "\n%s: no policy is enforced\n", title)
		return
	}
	otherwise := "denied"
	switch {
	case t.GetDefaultAllow():
		otherwise = "allowed"
	case t.GetHostAllow():
		otherwise = "denied, except for the local node"
	}
	fmt.Fprintf(w, "\n%s: connections that match no rule are %s\n", title, otherwise)
	for i, r := range t.GetRules() {
		var texts []string
		if i < len(sources) {
			texts = sourceTexts(sources[i].GetSources())
		}
		output.Row(w, fmt.Sprintf("  rule %d", i+1), output.Enum(r.GetAction(), "ACTION_"),
			output.Enum(r.GetTier(), "TIER_"), strings.Join(texts, ", "))
	}
	if omitted > 0 {
		fmt.Fprintf(w, "  The source locations of the last %d of %d rules are left out.\n", omitted, len(t.GetRules()))
	}
	// An empty line ends the alignment of the rows before it.
	fmt.Fprintln(w)
	for class, c := range t.GetClasses() {
		name := fmt.Sprintf("class %d", class)
		for _, r := range withGaps(c.GetRanges()) {
			at := ports.Intervals{{First: r.GetFirst(), Last: r.GetLast()}}.Texts()
			fmt.Fprintf(w, "  %s\t%s\t%s\n", name, output.Printable(strings.Join(at, ", ")), rulesText(r))
			name = ""
		}
	}
	fmt.Fprintln(w)
	classText := func(class uint32) string { return fmt.Sprintf("class %d", class) }
	for _, p := range sorted(t.GetPeers(), (*policyv1.PeerRow).GetIdentityClass) {
		output.Row(w, fmt.Sprintf("  identity class %d", p.GetIdentityClass()), classText(p.GetClass()))
	}
	kind := func(c *policyv1.KindClass) string { return output.Enum(c.GetKind(), "PEER_KIND_") }
	scope := func(c *policyv1.ScopeClass) string { return output.Enum(c.GetScope(), "PEER_SCOPE_") }
	for _, c := range sorted(t.GetDefaultClasses(), kind) {
		output.Row(w, "  other peers, "+kind(c), classText(c.GetClass()))
	}
	for _, p := range t.GetPrefixes() {
		var classes []string
		for _, c := range sorted(p.GetClasses(), scope) {
			classes = append(classes, scope(c)+": "+classText(c.GetClass()))
		}
		output.Row(w, "  "+p.GetPrefix(), strings.Join(classes, ", "))
	}
	if t.GetHasAddresses() {
		for _, c := range sorted(t.GetAddressClasses(), scope) {
			output.Row(w, "  other addresses, "+scope(c), classText(c.GetClass()))
		}
	}
}

// sorted returns a copy of the messages, sorted by a key.
func sorted[M any, K cmp.Ordered](all []M, key func(M) K) []M {
	return slices.SortedFunc(slices.Values(all), func(a, b M) int { return cmp.Compare(key(a), key(b)) })
}

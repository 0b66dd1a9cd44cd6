// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/peer"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

func tableCommand(inv *invocation.Invocation) *cobra.Command {
	return &cobra.Command{
		Use:   "table PEER",
		Short: "Print the compiled tables by which a pod or an identity is evaluated",
		Long: `Print the compiled tables by which a pod or an identity is evaluated: the rules in
the order in which they are asked, and for each class of peers the ports at which
each decides. Of Admin rules, which are asked first, and of the others the best
one is given.`,
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

// tables is what `policy table` prints.
type tables struct {
	Subject  uint32        `json:"subject"`
	Revision uint64        `json:"revision"`
	Egress   *compiledSide `json:"egress,omitempty"`
	Ingress  *compiledSide `json:"ingress,omitempty"`
}

type compiledSide struct {
	Hash           string          `json:"structureHash"`
	DefaultAllow   bool            `json:"defaultAllow"`
	HostAllow      bool            `json:"hostAllow"`
	Rules          []compiledRule  `json:"rules"`
	Omitted        uint32          `json:"omittedRuleSources,omitempty"` // of the last rules
	Classes        []peerClass     `json:"classes"`
	DefaultClasses map[string]int  `json:"defaultClasses"`
	AddressClasses map[string]int  `json:"addressClasses,omitempty"`
	Peers          map[uint32]int  `json:"peers"` // identity class to class
	Prefixes       []prefixClasses `json:"prefixes,omitempty"`
}

type compiledRule struct {
	Number  int      `json:"number"`
	Action  string   `json:"action"`
	Tier    string   `json:"tier"`
	Sources []string `json:"sources"`
}

type peerClass struct {
	Class     int             `json:"class"`
	Intervals []classInterval `json:"intervals"`
}

// classInterval names the best rule of each slot at some ports; 0: none.
type classInterval struct {
	Ports string `json:"ports"`
	Admin uint32 `json:"adminRule,omitempty"`
	Rule  uint32 `json:"rule,omitempty"`
}

type prefixClasses struct {
	Prefix  string            `json:"prefix"`
	Classes map[string]uint32 `json:"classes"`
}

func printTables(ctx context.Context, inv *invocation.Invocation, subject uint32) error {
	request := &policyv1.GetPolicyTableRequest{Subject: subject}
	r, err := invocation.Ask(ctx, inv, invocation.Policy, client.GetPolicyTable, request)
	if err != nil {
		return err
	}
	t := tables{
		Subject: subject, Revision: r.GetRevision(),
		Egress:  compiledSideOf(r.GetEgress(), r.GetEgressRules(), r.GetOmittedEgressRuleCount()),
		Ingress: compiledSideOf(r.GetIngress(), r.GetIngressRules(), r.GetOmittedIngressRuleCount()),
	}
	return inv.Show(t, func(w io.Writer) {
		fmt.Fprintf(w, "Identity %d, policy revision %d\n", t.Subject, t.Revision)
		t.Egress.lines(w, "Egress")
		t.Ingress.lines(w, "Ingress")
	})
}

func compiledSideOf(t *policyv1.PolicyTable, sources []*policyv1.RuleSources, omitted uint32) *compiledSide {
	if t == nil {
		return nil
	}
	s := &compiledSide{
		Hash: hex.EncodeToString(t.GetStructureHash()), DefaultAllow: t.GetDefaultAllow(), HostAllow: t.GetHostAllow(),
		Rules: []compiledRule{}, Omitted: omitted, Classes: []peerClass{},
		DefaultClasses: map[string]int{}, Peers: map[uint32]int{},
	}
	for i, r := range t.GetRules() {
		rule := compiledRule{
			Number: i + 1, Action: output.Enum(r.GetAction(), "ACTION_"), Tier: output.Enum(r.GetTier(), "TIER_"),
			Sources: []string{},
		}
		if i < len(sources) {
			rule.Sources = sourceTexts(sources[i].GetSources())
		}
		s.Rules = append(s.Rules, rule)
	}
	for class, c := range t.GetClasses() {
		s.Classes = append(s.Classes, peerClass{Class: class, Intervals: intervalsOf(c.GetRanges())})
	}
	for _, c := range t.GetDefaultClasses() {
		s.DefaultClasses[output.Enum(c.GetKind(), "PEER_KIND_")] = int(c.GetClass())
	}
	if t.GetHasAddresses() {
		s.AddressClasses = map[string]int{}
		for _, c := range t.GetAddressClasses() {
			s.AddressClasses[output.Enum(c.GetScope(), "PEER_SCOPE_")] = int(c.GetClass())
		}
	}
	for _, p := range t.GetPeers() {
		s.Peers[p.GetIdentityClass()] = int(p.GetClass())
	}
	for _, b := range t.GetPrefixes() {
		classes := prefixClasses{Prefix: b.GetPrefix(), Classes: map[string]uint32{}}
		for _, c := range b.GetClasses() {
			classes.Classes[output.Enum(c.GetScope(), "PEER_SCOPE_")] = c.GetClass()
		}
		s.Prefixes = append(s.Prefixes, classes)
	}
	return s
}

// intervalsOf lists all ports in order, those without a rule too.
func intervalsOf(ranges []*policyv1.PortRange) []classInterval {
	var out []classInterval
	add := func(first, last, admin, rule uint32) {
		if first <= last {
			out = append(out, classInterval{
				Ports: strings.Join(ports.Intervals{{First: first, Last: last}}.Texts(), ", "), Admin: admin, Rule: rule,
			})
		}
	}
	next := uint32(0)
	for _, r := range ranges {
		if r.GetFirst() > ports.LastPoint {
			break
		}
		if r.GetFirst() > next {
			add(next, r.GetFirst()-1, 0, 0)
		}
		add(r.GetFirst(), min(r.GetLast(), ports.LastPoint), r.GetAdmin(), r.GetRest())
		if r.GetLast() >= ports.LastPoint {
			return out
		}
		next = r.GetLast() + 1
	}
	add(next, ports.LastPoint, 0, 0)
	return out
}

func (s *compiledSide) lines(w io.Writer, title string) {
	if s == nil {
		fmt.Fprintf(w, "\n%s: nothing is enforced\n", title)
		return
	}
	otherwise := "denied"
	switch {
	case s.DefaultAllow:
		otherwise = "allowed"
	case s.HostAllow:
		otherwise = "denied, but for the local node"
	}
	fmt.Fprintf(w, "\n%s: what no rule decides is %s\n", title, otherwise)
	for _, r := range s.Rules {
		output.Row(w, fmt.Sprintf("  rule %d", r.Number), r.Action, r.Tier, strings.Join(r.Sources, ", "))
	}
	if s.Omitted > 0 {
		fmt.Fprintf(w, "  The source locations of the last %d of %d rules are left out.\n", s.Omitted, len(s.Rules))
	}
	// An empty line ends the columns of a table.
	fmt.Fprintln(w)
	for _, c := range s.Classes {
		for i, in := range c.Intervals {
			name := ""
			if i == 0 {
				name = fmt.Sprintf("class %d", c.Class)
			}
			var rules []string
			if in.Admin != 0 {
				rules = append(rules, fmt.Sprintf("rule %d", in.Admin))
			}
			if in.Rule != 0 {
				rules = append(rules, fmt.Sprintf("rule %d", in.Rule))
			}
			if len(rules) == 0 {
				rules = []string{"default"}
			}
			fmt.Fprintf(w, "  %s\t%s\t%s\n", name, output.Printable(in.Ports), strings.Join(rules, ", else "))
		}
	}
	fmt.Fprintln(w)
	for node, class := range output.Ordered(s.Peers) {
		output.Row(w, fmt.Sprintf("  identity class %d", node), fmt.Sprintf("class %d", class))
	}
	for kind, class := range output.Ordered(s.DefaultClasses) {
		output.Row(w, "  other peers, "+kind, fmt.Sprintf("class %d", class))
	}
	for _, b := range s.Prefixes {
		var classes []string
		for scope, class := range output.Ordered(b.Classes) {
			classes = append(classes, fmt.Sprintf("%s: class %d", scope, class))
		}
		output.Row(w, "  "+b.Prefix, strings.Join(classes, ", "))
	}
	for scope, class := range output.Ordered(s.AddressClasses) {
		output.Row(w, "  other addresses, "+scope, fmt.Sprintf("class %d", class))
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/peer"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

func explainCommand(inv *invocation.Invocation) *cobra.Command {
	var o peer.Flags
	name := ""
	cmd := &cobra.Command{
		Use:   "explain --from PEER --to PEER --port PORT",
		Short: "Evaluate a connection against the policies, and list the matching rules",
		Long: `Evaluate a connection against the compiled policies on both sides, and list every
matching rule with its location in a manifest. No packet is sent. ` + "`sluice explain`" + `
asks the datapath instead.

A peer is ` + peer.Forms + `.
An address is evaluated as the identity that it has in the cluster. Labels select the
only identity that has them; if there is none or more than one, the labels are evaluated
as those of a hypothetical pod, and a note shows the nearest identity.

Both sides are evaluated by the policies of this node. If one of the pods is on another
node, that node enforces its own policies, and the verdict states that it was not asked.
Lines break at 100 columns, except with -o wide.

With --dns, a DNS query for the name is explained: which rules allow or refuse it, and to
which learned addresses of the name the sender may connect.`,
		Example: `  sluice policy explain --from shop/client --to shop/web --port 80
  sluice policy explain -n shop --from app=client --to shop/dns --port 53/udp
  sluice policy explain --from shop/client --to 192.0.2.7 --icmp echo
  sluice policy explain --from shop/client --to kube-system/coredns --dns api.example.com`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if name != "" {
				return ExplainLookup(cmd.Context(), inv, o, name)
			}
			conn, err := peer.ResolveConnection(cmd.Context(), inv, o, peer.Resolve)
			if err != nil {
				return err
			}
			return explain(cmd.Context(), inv, conn)
		},
	}
	o.Add(cmd)
	AddDNSFlag(cmd, &name)
	return cmd
}

// sourceTexts returns locations such as "NetworkPolicy shop/web spec.ingress[0]".
func sourceTexts(sources []*policyv1.RuleSource) []string {
	texts := make([]string, 0, len(sources))
	for _, s := range sources {
		texts = append(texts, strings.TrimSpace(policykind.KeyText(&policyv1.PolicyKey{
			Kind:      s.GetKind(),
			Namespace: s.GetNamespace(), Name: s.GetName(),
		})+" "+s.GetPath()))
	}
	return texts
}

// verdictWords maps actions to the words for verdicts.
var verdictWords = map[policyv1.Action]string{
	policyv1.Action_ACTION_ALLOW: "allowed", policyv1.Action_ACTION_DENY: "denied",
	policyv1.Action_ACTION_REDIRECT: "redirected",
}

func verdictWord(a policyv1.Action) string {
	if w, ok := verdictWords[a]; ok {
		return w
	}
	return output.Enum(a, "ACTION_")
}

// factsOf returns what the JSON of an explanation states in addition to the answer of the policy service: the
// connection, the nodes that were not asked, and the notes.
func factsOf(conn peer.Connection, notAsked []peer.NotAsked) []message.Fact {
	facts := []message.Fact{
		{Key: "from", Value: conn.From.Name(conn.V6)},
		{Key: "to", Value: conn.To.Name(conn.V6)},
		{Key: "protocol", Value: ports.ProtocolText(conn.Protocol)},
		{Key: "port", Value: conn.Port},
	}
	if len(notAsked) > 0 {
		facts = append(facts, message.Fact{Key: "notAsked", Value: notAsked})
	}
	if notes := conn.Notes(); len(notes) > 0 {
		facts = append(facts, message.Fact{Key: "notes", Value: notes})
	}
	return facts
}

func explain(ctx context.Context, inv *invocation.Invocation, conn peer.Connection) error {
	if err := peer.RefuseService(ctx, inv, conn); err != nil {
		return err
	}
	r, err := invocation.Ask(ctx, inv, invocation.Policy, client.Explain, &policyv1.ExplainRequest{
		From: conn.From.Proto(conn.V6), To: conn.To.Proto(conn.V6),
		Protocol: netv1.Protocol(conn.Protocol), Port: conn.Port,
	})
	if err != nil {
		return err
	}
	egress, ingress := r.GetEgress(), r.GetIngress()
	// If this node denies the connection, the verdict of other nodes does not matter.
	var notAsked []peer.NotAsked
	if conn.From.OtherNode() != "" || egress.GetAction() != policyv1.Action_ACTION_DENY {
		notAsked = conn.NotAsked()
	}
	if conn.To.OtherNode() == "" && ingress.GetAction() == policyv1.Action_ACTION_DENY {
		notAsked = nil
	}
	// The policy service evaluates hypothetical labels under a temporary number, which is not shown.
	if egress != nil && conn.From.Identity == 0 {
		egress.Subject = 0
	}
	if ingress != nil && conn.To.Identity == 0 {
		ingress.Subject = 0
	}
	from, to, notes := conn.From.Name(conn.V6), conn.To.Name(conn.V6), conn.Notes()
	return inv.Show(message.Of(r, factsOf(conn, notAsked)...), func(w io.Writer) {
		p := printer{w: w, wide: inv.Wide()}
		p.line(fmt.Sprintf("%s -> %s, %s: %s by policy revision %d%s%s", from, to,
			ports.ServiceText(conn.Protocol, conn.Port), strings.ToUpper(verdictWord(r.GetVerdict())), r.GetRevision(),
			outcome(r, conn.Protocol), peer.NotAskedText(notAsked)))
		for _, note := range notes {
			p.line("Note: " + note)
		}
		p.side(egress, "Egress", "what %s may send")
		p.side(ingress, "Ingress", "what %s may receive")
		if egress == nil && ingress == nil {
			fmt.Fprintln(w, "\nNeither end is a workload, so no policy applies.")
		}
	})
}

// outcome returns what the datapath does with redirected packets, as `sluice explain` prints it. There are proxies only
// for what pods send: DNS over UDP or TCP, and HTTP and TLS over TCP.
func outcome(r *policyv1.ExplainResponse, protocol uint32) string {
	if r.GetVerdict() != policyv1.Action_ACTION_REDIRECT {
		return ""
	}
	if r.GetIngress().GetAction() != policyv1.Action_ACTION_REDIRECT {
		switch kind := r.GetEgress().GetProxy(); {
		case kind == netv1.Proxy_PROXY_DNS && protocol != uint32(netv1.Protocol_PROTOCOL_SCTP):
			return ", to sluice-dns, which evaluates the query; DROPPED (no-proxy) if sluice-dns never ran, " +
				"or without the setting dns.proxy"
		case kind == netv1.Proxy_PROXY_HTTP && protocol == uint32(netv1.Protocol_PROTOCOL_TCP):
			return ", to sluice-http, which evaluates each request; DROPPED (no-proxy) if sluice-http never ran, " +
				"or without the setting http.proxy"
		case kind == netv1.Proxy_PROXY_TLS && protocol == uint32(netv1.Protocol_PROTOCOL_TCP):
			return ", to sluice-http, which evaluates the server name; DROPPED (no-proxy) if sluice-http never ran, " +
				"or without the setting http.proxy"
		}
	}
	return ", and DROPPED (no-proxy): no proxy evaluates such packets"
}

// matchColumns are the columns of the rules that match a connection.
var matchColumns = []output.Column[*policyv1.MatchingRule]{
	{Cell: func(m *policyv1.MatchingRule) any {
		if m.GetDecides() {
			return fmt.Sprintf(" > %d", m.GetNumber())
		}
		return fmt.Sprintf("   %d", m.GetNumber())
	}},
	{Cell: func(m *policyv1.MatchingRule) any { return output.Enum(m.GetAction(), "ACTION_") }},
	{Cell: func(m *policyv1.MatchingRule) any { return output.Enum(m.GetTier(), "TIER_") }},
	{Cell: func(m *policyv1.MatchingRule) any { return strings.Join(sourceTexts(m.GetSources()), ", ") }},
	{Cell: func(m *policyv1.MatchingRule) any {
		switch {
		case m.AllowsName == nil:
			return m.GetText()
		case m.GetAllowsName():
			return m.GetText() + "; allows the name"
		}
		return m.GetText() + "; does not allow the name"
	}},
}

// printer writes an explanation.
type printer struct {
	w    io.Writer
	wide bool // do not break long lines
}

func (p printer) line(text string) {
	if text = output.Printable(text); !p.wide {
		text = output.Fold(text)
	}
	fmt.Fprintln(p.w, text)
}

func (p printer) side(s *policyv1.SideExplanation, title, what string) {
	if s == nil {
		return
	}
	fmt.Fprintln(p.w)
	p.line(fmt.Sprintf("%s, "+what+": %s%s", title,
		workload.IdentityText(s.GetSubject(), workload.LabelTextsInOrder(s.GetSubjectLabels())),
		verdictWord(s.GetAction()), because(s)))
	p.matches(s.GetMatches())
}

// matches writes rules.
func (p printer) matches(rules []*policyv1.MatchingRule) {
	// The rows are aligned before long ones are broken.
	var rows strings.Builder
	t := output.Aligned(&rows)
	output.Rows(t, matchColumns, rules...)
	t.Flush() //nolint:errcheck // a strings.Builder does not fail
	for row := range strings.Lines(rows.String()) {
		p.line(strings.TrimSuffix(row, "\n"))
	}
}

// because returns the reason for the verdict.
func because(s *policyv1.SideExplanation) string {
	proxy := ""
	if p := output.Enum(s.GetProxy(), "PROXY_"); p != "" {
		proxy = " to the " + p + " proxy"
	}
	switch s.GetDecidedBy() {
	case netv1.DecidedBy_DECIDED_BY_RULE:
		return fmt.Sprintf("%s by rule %d", proxy, s.GetRule())
	case netv1.DecidedBy_DECIDED_BY_DEFAULT:
		if s.GetAction() == policyv1.Action_ACTION_ALLOW {
			return ", because no rule denies it"
		}
		return ", because no rule allows it"
	case netv1.DecidedBy_DECIDED_BY_HOST_ALLOW:
		return ", because the local node is always allowed"
	case netv1.DecidedBy_DECIDED_BY_UNKNOWN_IDENTITY:
		return fmt.Sprintf(", because sluice-policy does not know identity %d yet", s.GetPeer())
	case netv1.DecidedBy_DECIDED_BY_NO_POLICY:
		return ", because no policy selects it"
	default:
		return proxy
	}
}

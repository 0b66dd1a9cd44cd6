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
	"github.com/sluice-net/sluice/cmd/sluice/internal/peer"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

func explainCommand(inv *invocation.Invocation) *cobra.Command {
	var o peer.Flags
	cmd := &cobra.Command{
		Use:   "explain --from PEER --to PEER --port PORT",
		Short: "Evaluate a connection by the policies, and name every rule that matches it",
		Long: `Evaluate a connection by the policies as they are compiled, on both sides, and name
every rule that matches it with the place that it was written in. No packet is
sent. ` + "`sluice explain`" + ` asks the kernel's tables instead.

A peer is ` + peer.Forms + `.
An address is evaluated as the identity that the cluster gives it. Labels are those of
the only identity that has them; otherwise they are evaluated as given, as those of a
pod that does not exist, and a note names the nearest identity.

Both sides are evaluated by the policies of this node. If a pod is on another node,
that node enforces its own, and the first line says that it was not asked.`,
		Example: `  sluice policy explain --from 4caf --to 10.244.0.2 --port 80
  sluice policy explain -n shop --from app=client --to 4caf --port 53/udp
  sluice policy explain --from 4caf --to 192.0.2.7 --icmp echo`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			conn, err := peer.ResolveConnection(cmd.Context(), inv, o, peer.Resolve)
			if err != nil {
				return err
			}
			return explain(cmd.Context(), inv, conn)
		},
	}
	o.Add(cmd)
	return cmd
}

// explanation is what `policy explain` prints.
type explanation struct {
	From     string           `json:"from"`
	To       string           `json:"to"`
	Protocol string           `json:"protocol"`
	Port     uint32           `json:"port"`
	Verdict  string           `json:"verdict"`
	Egress   *sideExplanation `json:"egress,omitempty"`
	Ingress  *sideExplanation `json:"ingress,omitempty"`
	Revision uint64           `json:"revision"`
	// NotAsked are the other nodes that enforce a side by their own policies.
	NotAsked []peer.NotAsked `json:"notAsked,omitempty"`
	Notes    []string        `json:"notes,omitempty"` // how the peers were found
}

type sideExplanation struct {
	Subject       uint32         `json:"subject,omitempty"`
	SubjectLabels []string       `json:"subjectLabels"`
	Peer          uint32         `json:"peer"`
	PeerLabels    []string       `json:"peerLabels"`
	Action        string         `json:"action"`
	Proxy         string         `json:"proxy,omitempty"`
	DecidedBy     string         `json:"decidedBy"`
	Rule          uint32         `json:"rule,omitempty"`
	Enforced      bool           `json:"enforced"`
	Matches       []matchingRule `json:"matches"`
}

type matchingRule struct {
	Number  uint32   `json:"number"`
	Action  string   `json:"action"`
	Tier    string   `json:"tier"`
	Sources []string `json:"sources"`
	Text    string   `json:"text"`
	Decides bool     `json:"decides"`
}

func sideExplanationOf(s *policyv1.SideExplanation) *sideExplanation {
	if s == nil {
		return nil
	}
	shown := &sideExplanation{
		Subject: s.GetSubject(), SubjectLabels: workload.LabelTextsInOrder(s.GetSubjectLabels()),
		Peer: s.GetPeer(), PeerLabels: workload.LabelTextsInOrder(s.GetPeerLabels()),
		Action: output.Enum(s.GetAction(), "ACTION_"), DecidedBy: output.Enum(s.GetDecidedBy(), "DECIDED_BY_"),
		Proxy: output.Enum(s.GetProxy(), "PROXY_"),
		Rule:  s.GetRule(), Enforced: s.GetEnforced(), Matches: []matchingRule{},
	}
	for _, m := range s.GetMatches() {
		shown.Matches = append(shown.Matches, matchingRule{
			Number: m.GetNumber(), Action: output.Enum(m.GetAction(), "ACTION_"),
			Tier:    output.Enum(m.GetTier(), "TIER_"),
			Sources: sourceTexts(m.GetSources()), Text: m.GetText(), Decides: m.GetDecides(),
		})
	}
	return shown
}

// sourceTexts are "NetworkPolicy shop/web spec.ingress[0]".
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

// verdictWords are the actions as verdicts.
var verdictWords = map[string]string{"allow": "allowed", "deny": "denied", "redirect": "redirected"}

func verdictWord(action string) string {
	if w, ok := verdictWords[action]; ok {
		return w
	}
	return action
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
	x := explanation{
		From: conn.From.Name(conn.V6), To: conn.To.Name(conn.V6), Protocol: ports.ProtocolText(conn.Protocol),
		Port:    conn.Port,
		Verdict: verdictWord(output.Enum(r.GetVerdict(), "ACTION_")), Egress: sideExplanationOf(r.GetEgress()),
		Ingress: sideExplanationOf(r.GetIngress()), Revision: r.GetRevision(), Notes: conn.Notes(),
	}
	// A denial of this node is final: other nodes do not change it.
	if e := x.Egress; conn.From.OtherNode() != "" || e == nil || e.Action != "deny" {
		x.NotAsked = conn.NotAsked()
	}
	if i := x.Ingress; conn.To.OtherNode() == "" && i != nil && i.Action == "deny" {
		x.NotAsked = nil
	}
	// Labels that nobody has stand for an identity that exists for the answer
	// alone.
	if x.Egress != nil && conn.From.Identity == 0 {
		x.Egress.Subject = 0
	}
	if x.Ingress != nil && conn.To.Identity == 0 {
		x.Ingress.Subject = 0
	}
	return inv.Show(x, func(w io.Writer) {
		fmt.Fprintln(w, output.Printable(fmt.Sprintf("%s -> %s, %s: %s by policy revision %d%s%s", x.From, x.To,
			ports.ServiceText(conn.Protocol, conn.Port), strings.ToUpper(x.Verdict), x.Revision, x.outcome(),
			peer.NotAskedText(x.NotAsked))))
		for _, note := range x.Notes {
			fmt.Fprintln(w, output.Printable("Note: "+note))
		}
		x.Egress.lines(w, "Egress", "what %s may send")
		x.Ingress.lines(w, "Ingress", "what %s may receive")
		if x.Egress == nil && x.Ingress == nil {
			fmt.Fprintln(w, "\nNeither end is a workload, so no policy has a say.")
		}
	})
}

// outcome is what becomes of the packets where the verdict alone does not say it: `sluice
// explain` asks the programs, and says the same.
func (x *explanation) outcome() string {
	if x.Verdict != verdictWords["redirect"] {
		return ""
	}
	return ", and DROPPED (no-proxy): there is no proxy yet"
}

func (s *sideExplanation) lines(w io.Writer, title, what string) {
	if s == nil {
		return
	}
	fmt.Fprintf(w, "\n%s\n", output.Printable(fmt.Sprintf("%s, "+what+": %s%s", title,
		workload.IdentityText(s.Subject, s.SubjectLabels), verdictWord(s.Action), s.because())))
	for _, m := range s.Matches {
		mark := " "
		if m.Decides {
			mark = ">"
		}
		output.Row(w, fmt.Sprintf(" %s %d", mark, m.Number), m.Action, m.Tier, strings.Join(m.Sources, ", "), m.Text)
	}
}

// because says what decided, where the list of rules does not.
func (s *sideExplanation) because() string {
	proxy := ""
	if s.Proxy != "" {
		proxy = " to the " + s.Proxy + " proxy"
	}
	switch s.DecidedBy {
	case "rule":
		return fmt.Sprintf("%s by rule %d", proxy, s.Rule)
	case "default":
		if s.Action == "allow" {
			return ", because no rule denies it"
		}
		return ", because no rule allows it"
	case "host-allow":
		return ", because the local node may"
	case "unknown-identity":
		return fmt.Sprintf(", because sluice-policy does not know identity %d yet", s.Peer)
	case "no-policy":
		return ", because no policy selects it"
	default:
		return proxy
	}
}

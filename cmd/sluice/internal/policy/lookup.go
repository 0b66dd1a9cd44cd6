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
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// dnsPort is the port of DNS servers.
const dnsPort = "53/udp"

// AddDNSFlag adds the flag for the name of a DNS query.
func AddDNSFlag(cmd *cobra.Command, name *string) {
	cmd.Flags().StringVar(name, "dns", "",
		"explain a DNS query for this name to --to, and the connections to its addresses; --port is "+dnsPort+" by default")
}

// ExplainLookup shows which rules allow or refuse a DNS query, and to which addresses of the name its sender may
// connect.
func ExplainLookup(ctx context.Context, inv *invocation.Invocation, o peer.Flags, name string) error {
	o.SetDefaultPort(dnsPort)
	conn, err := peer.ResolveConnection(ctx, inv, o, peer.Resolve)
	if err != nil {
		return err
	}
	if p := netv1.Protocol(conn.Protocol); p != netv1.Protocol_PROTOCOL_UDP && p != netv1.Protocol_PROTOCOL_TCP {
		return invocation.Usagef("--dns: queries are sent over UDP or TCP; give --port as %s or 53/tcp", dnsPort)
	}
	if err := peer.RefuseService(ctx, inv, conn); err != nil {
		return err
	}
	r, err := invocation.Ask(ctx, inv, invocation.Policy, client.Explain, &policyv1.ExplainRequest{
		From: conn.From.Proto(conn.V6), To: conn.To.Proto(conn.V6),
		Protocol: netv1.Protocol(conn.Protocol), Port: conn.Port, DnsName: name,
	})
	if err != nil {
		return err
	}
	// The node of the server evaluates its own side, which is not known here.
	notAsked := conn.NotAsked()
	from, to, notes := conn.From.Name(conn.V6), conn.To.Name(conn.V6), conn.Notes()
	if s := r.GetEgress(); s != nil && conn.From.Identity == 0 {
		s.Subject = 0 // a temporary number
	}
	return inv.Show(message.Of(r, factsOf(conn, notAsked)...), func(w io.Writer) {
		p := printer{w: w, wide: inv.Wide()}
		x := r.GetDns()
		if x == nil {
			p.line(from + " is not a workload, so no policy applies to its queries.")
			return
		}
		p.line(fmt.Sprintf("%s -> %s, %s, query for %s: %s by policy revision %d%s", from, to,
			ports.ServiceText(conn.Protocol, conn.Port), x.GetName(), outcomeText(x.GetOutcome()), r.GetRevision(),
			peer.NotAskedText(notAsked)))
		for _, note := range notes {
			p.line("Note: " + note)
		}
		p.side(r.GetEgress(), "Egress", "what %s may send")
		p.side(r.GetIngress(), "Ingress", "what %s may receive")
		p.lookup(x)
	})
}

// outcomeText returns what happens to a query.
func outcomeText(o policyv1.QueryOutcome) string {
	switch o {
	case policyv1.QueryOutcome_QUERY_OUTCOME_DENIED:
		return "DROPPED (policy-denied)"
	case policyv1.QueryOutcome_QUERY_OUTCOME_ALLOWED:
		return "ALLOWED by sluice-dns, which learns from the answer"
	case policyv1.QueryOutcome_QUERY_OUTCOME_REFUSED:
		return "REFUSED by sluice-dns"
	case policyv1.QueryOutcome_QUERY_OUTCOME_NOT_EVALUATED:
		return "FORWARDED without sluice-dns, so the answer teaches no address"
	case policyv1.QueryOutcome_QUERY_OUTCOME_NO_PROXY:
		return "DROPPED (no-proxy)"
	}
	return output.Enum(o, "QUERY_OUTCOME_")
}

// lookup writes the rules that select the name, and its addresses.
func (p printer) lookup(x *policyv1.LookupExplanation) {
	fmt.Fprintln(p.w)
	if len(x.GetRules()) == 0 {
		p.line("No rule allows connections by this name: no toFQDNs or domainNames selects it.")
		return
	}
	p.line("Rules that allow connections by this name:")
	p.matches(x.GetRules())
	fmt.Fprintln(p.w)
	if len(x.GetAddresses()) == 0 {
		p.line("No address of the name is learned, so no connection is allowed by it; see `sluice fqdn explain`.")
		return
	}
	output.Row(p.w, "ADDRESS", "ALLOWED PORTS")
	for _, a := range x.GetAddresses() {
		list := a.GetPorts()
		if len(list) == 0 {
			list = []string{"none"}
		}
		output.Row(p.w, a.GetAddress(), strings.Join(list, ", "))
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fqdn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	dnsv1 "github.com/sluice-net/sluice/proto/gen/sluice/dns/v1"
)

func explainCommand(inv *invocation.Invocation) *cobra.Command {
	return &cobra.Command{
		Use:   "explain NAME",
		Short: "Explain which addresses of a DNS name are allowed, and why others are not",
		Long: `Show the addresses of a DNS name that sluice-policy has learned, and the policy rules that
select the name. If sluice-dns runs, also show the names for which the addresses were in DNS
answers, and the addresses in answers that were not learned, with the reason.`,
		Args: func(cmd *cobra.Command, a []string) error {
			if len(a) != 1 {
				return invocation.Usagef("%s takes one NAME", cmd.CommandPath())
			}
			return checkName(a[0])
		},
		RunE: func(cmd *cobra.Command, a []string) error { return explain(cmd.Context(), inv, a[0]) },
	}
}

func explain(ctx context.Context, inv *invocation.Invocation, name string) error {
	known, err := list(ctx, inv, name, "")
	if err != nil {
		return err
	}
	facts := []message.Fact{{Key: "policy", Value: message.List(known)}}
	seen, away, err := answers(ctx, inv, name)
	switch {
	case err != nil:
		return err
	case seen != nil:
		facts = append(facts, message.Fact{Key: "dns", Value: message.Of(seen)})
	case away != nil:
		facts = append(facts, message.Fact{Key: "dnsError", Value: away.Error()})
	}
	return inv.Show(message.Join(facts...), func(w io.Writer) {
		if len(known) == 0 {
			fmt.Fprintf(w, "sluice-policy has no addresses for %s, so no policy allows a connection by this name.\n", name)
		} else {
			writeNames(w, known)
		}
		switch {
		case seen != nil:
			writeSeen(w, seen)
		case away != nil:
			fmt.Fprintln(w, output.Printable("sluice-dns does not answer, so what it knows is not shown: "+away.Error()))
		default:
			fmt.Fprintln(w, "sluice-dns does not run on this node: only `sluice fqdn learn` and LearnNames add addresses.")
		}
	})
}

// answers returns what sluice-dns knows about a name. Without sluice-dns on this node, it returns nil. If sluice-dns
// has a socket and does not answer, away is the reason: after a crash the socket remains until the process starts
// again.
func answers(
	ctx context.Context, inv *invocation.Invocation, name string,
) (seen *dnsv1.ExplainNameResponse, away, err error) {
	if !invocation.Runs(inv, invocation.DNS) {
		return nil, nil, nil
	}
	seen, err = invocation.Ask(ctx, inv, invocation.DNS, dnsv1.DNSServiceClient.ExplainName,
		&dnsv1.ExplainNameRequest{Name: name})
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Unimplemented:
		if ctx.Err() == nil && !errors.Is(err, syscall.EACCES) {
			return nil, err, nil
		}
	}
	return seen, nil, err
}

func writeSeen(w io.Writer, seen *dnsv1.ExplainNameResponse) {
	name := seen.GetName()
	switch n := len(name.GetAddresses()); n {
	case 0:
		fmt.Fprintln(w, "sluice-dns has no valid answer for the name.")
	default:
		fmt.Fprintf(w, "sluice-dns has %s from answers.\n", output.Plural(n, "valid address", "valid addresses"))
	}
	if len(name.GetChain()) > 0 {
		fmt.Fprintf(w, "The last answer led to %s by CNAME.\n", strings.Join(name.GetChain(), " and "))
	}
	if !seen.GetWanted() {
		fmt.Fprintln(w, "No policy selects the name, so its addresses are not learned.")
	}
	fmt.Fprintf(w, "Of %s, %d allow queries for the name.\n",
		output.Plural(len(seen.GetAllowingSets())+int(seen.GetRefusingSetCount()), "rule set", "rule sets"),
		len(seen.GetAllowingSets()))
	if len(seen.GetRefused()) == 0 {
		return
	}
	output.Row(w, "NOT LEARNED", "ENDPOINT", "TENANT", "LAST ANSWER", "REASON")
	for _, r := range seen.GetRefused() {
		endpoint := ""
		if r.GetAsker() != nil {
			endpoint = fmt.Sprint(r.GetAsker().GetEndpointIndex())
		}
		ago := time.Since(r.GetTime().AsTime()).Round(time.Second)
		output.Row(w, r.GetAddress(), endpoint, r.GetAsker().GetTenant(), fmt.Sprintf("%s ago", ago), why(r.GetReason()))
	}
}

// why returns a reason for people.
func why(r dnsv1.RefusalReason) string {
	switch r {
	case dnsv1.RefusalReason_REFUSAL_REASON_SPECIAL_ADDRESS:
		return "loopback, link-local, multicast or another special address"
	case dnsv1.RefusalReason_REFUSAL_REASON_CLUSTER_ADDRESS:
		return "address of a node, a pod or an API server"
	case dnsv1.RefusalReason_REFUSAL_REASON_CONFIGURED:
		return "in the setting neverLearn of sluice-dns"
	case dnsv1.RefusalReason_REFUSAL_REASON_NAME_FULL:
		return "the name has 1,024 valid addresses"
	case dnsv1.RefusalReason_REFUSAL_REASON_NAMES_SHARE:
		return "no place for another name: the pod has more than its share"
	case dnsv1.RefusalReason_REFUSAL_REASON_ADDRESSES_SHARE:
		return "no place for another address: the pod has more than its share"
	case dnsv1.RefusalReason_REFUSAL_REASON_SERVER:
		return "the server is not in the setting learnFrom of sluice-dns"
	case dnsv1.RefusalReason_REFUSAL_REASON_NOT_SELECTED:
		return "no egress rule of the pod that asked selects the name"
	case dnsv1.RefusalReason_REFUSAL_REASON_NOT_ENFORCED:
		return "sluice-policy had no space, or did not answer in time"
	}
	return r.String()
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fqdn

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

func learnCommand(inv *invocation.Invocation) *cobra.Command {
	var (
		ttl    time.Duration
		dryRun bool
	)
	cmd := &cobra.Command{
		Use:   "learn NAME ADDRESS...",
		Short: "Add addresses of a DNS name, as an answer would",
		Long: `Add addresses of a DNS name, as an answer of its DNS server would (RPC LearnNames), and wait
until the kernel has them. Policies that select the name by toFQDNs or domainNames then allow
connections to the addresses. Repeat the command before --ttl has passed to keep them.`,
		Args: func(cmd *cobra.Command, a []string) error {
			if len(a) < 2 {
				return invocation.Usagef("%s takes a NAME and its addresses", cmd.CommandPath())
			}
			return checkName(a[0])
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			req := &policyv1.LearnNamesRequest{Name: a[0], Ttl: durationpb.New(ttl), ValidateOnly: dryRun}
			for _, text := range a[1:] {
				addr, err := netip.ParseAddr(text)
				if err != nil || addr.Zone() != "" {
					return invocation.Usagef("%q is not an address, such as 192.0.2.7", text)
				}
				req.Addresses = append(req.Addresses, addr.String())
			}
			if ttl <= 0 {
				return invocation.Usagef("--ttl: %s is not positive", ttl)
			}
			return learn(cmd.Context(), inv, req)
		},
	}
	cmd.Flags().DurationVar(&ttl, "ttl", time.Hour, "validity of the addresses; at least 1m and at most 168h are used")
	invocation.ValidateFlag(cmd, &dryRun, "show whether a policy selects the name; add nothing")
	return cmd
}

// checkName returns an error for a text that is not a DNS name.
func checkName(text string) error {
	if text == "" || strings.Contains(text, "*") || checkPattern(text) != nil {
		return invocation.Usagef("%q is not a DNS name, such as api.example.com", text)
	}
	return nil
}

func learn(ctx context.Context, inv *invocation.Invocation, req *policyv1.LearnNamesRequest) error {
	out, err := invocation.Ask(ctx, inv, invocation.Policy, client.LearnNames, req)
	if err != nil {
		return err
	}
	done := message.Of(out, message.Fact{Key: "validateOnly", Value: req.GetValidateOnly()})
	return inv.Show(done, func(w io.Writer) {
		addresses := output.Plural(len(req.GetAddresses()), "address", "addresses")
		switch {
		case req.GetValidateOnly() && out.GetUsed():
			fmt.Fprintf(w, "Nothing was added: --dry-run. Policies of this node select %s.\n", req.GetName())
		case req.GetValidateOnly():
			fmt.Fprintf(w, "Nothing was added: --dry-run. No policy of this node selects %s.\n", req.GetName())
		case out.GetUsed():
			fmt.Fprintf(w, "Added %s to %s, also to the kernel.\n", addresses, req.GetName())
		default:
			fmt.Fprintf(w, "Added %s to %s. No policy of this node selects the name.\n", addresses, req.GetName())
		}
		invocation.AskLocalNode(ctx, inv).WriteOnly(w)
	})
}

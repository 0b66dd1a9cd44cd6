// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package fqdn shows, adds and deletes the DNS names that the policy service has learned.
package fqdn

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	dnsv1 "github.com/sluice-net/sluice/proto/gen/sluice/dns/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// Command is `fqdn`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("fqdn", "Show, add and delete learned DNS names",
		listCommand(inv), explainCommand(inv), learnCommand(inv), deleteCommand(inv))
}

// client shortens the calls of package invocation.
type client = policyv1.PolicyServiceClient

const patternHelp = `NAME is a DNS name or a pattern as in matchPattern of a policy: "*" matches characters of one
label, "**." at the start matches one or more labels, "*" alone matches every name.`

func listCommand(inv *invocation.Invocation) *cobra.Command {
	var address string
	cmd := &cobra.Command{
		Use:   "list [NAME]",
		Short: "List learned DNS names with their addresses, validity and the rules that select them",
		Long: `List the learned DNS names, their addresses, how long each address is valid, and the policy
rules that select the name. Addresses from the DNS answer to a pod are allowed only to pods
of the same namespace. An expired address stays allowed for a while for connections that use
it.

` + patternHelp,
		Args: optionalName,
		RunE: func(cmd *cobra.Command, a []string) error {
			all, err := list(cmd.Context(), inv, nameOf(a), address)
			if err != nil {
				return err
			}
			return inv.Show(message.List(all), func(w io.Writer) { writeNames(w, all) })
		},
	}
	cmd.Flags().StringVar(&address, "address", "", "only names that have this address")
	return cmd
}

func deleteCommand(inv *invocation.Invocation) *cobra.Command {
	var (
		address string
		dryRun  bool
	)
	cmd := &cobra.Command{
		Use:   "delete [NAME]",
		Short: "Delete learned DNS names, or one of their addresses",
		Long: `Delete learned DNS names with all of their addresses, or only the address of --address, and
wait until the kernel has deleted them, too. If no rule allows a connection to a deleted
address any more, the connection is terminated with its next packet. The next DNS answer or
LearnNames call with the name adds it again.

` + patternHelp,
		Args: optionalName,
		RunE: func(cmd *cobra.Command, a []string) error {
			if len(a) == 0 && address == "" {
				return invocation.Usagef(`nothing to delete: give a NAME, such as api.example.com or "*", or --address`)
			}
			return forget(cmd.Context(), inv, &policyv1.ForgetNamesRequest{
				Pattern: nameOf(a), Address: address, ValidateOnly: dryRun,
			})
		},
	}
	cmd.Flags().StringVar(&address, "address", "", "delete only this address, from all names if no NAME is given")
	invocation.ValidateFlag(cmd, &dryRun, "show what would be deleted; delete nothing")
	return cmd
}

// optionalName accepts at most one argument and refuses an empty one, so that a script with an unset variable does
// not select every name.
func optionalName(cmd *cobra.Command, a []string) error {
	if len(a) > 1 || len(a) == 1 && a[0] == "" {
		return invocation.Usagef("%s takes one NAME", cmd.CommandPath())
	}
	return checkPattern(nameOf(a))
}

// checkPattern returns an error for a text that is not a DNS name or pattern.
func checkPattern(text string) error {
	name := strings.TrimSuffix(strings.TrimPrefix(text, "**."), ".")
	for part := range strings.SplitSeq(name, ".") {
		invalid := strings.IndexFunc(part, func(r rune) bool {
			return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyz0123456789-_*", unicode.ToLower(r))
		}) >= 0
		if text != "" && (part == "" || len(part) > 63 || invalid) {
			return invocation.Usagef("%q is not a DNS name or pattern, such as api.example.com or *.example.com", text)
		}
	}
	return nil
}

func nameOf(a []string) string { return strings.Join(a, "") }

func list(ctx context.Context, inv *invocation.Invocation, pattern, addr string) ([]*policyv1.LearnedName, error) {
	var all []*policyv1.LearnedName
	req := &policyv1.ListNamesRequest{Pattern: pattern, Address: addr}
	err := invocation.Each(ctx, inv, invocation.Policy, client.ListNames, req, func(m *policyv1.ListNamesResponse) {
		all = append(all, m.GetName())
	})
	return all, err
}

func writeNames(w io.Writer, all []*policyv1.LearnedName) {
	output.Row(w, "NAME", "FOR PODS OF", "ADDRESS", "VALID FOR", "FORGOTTEN IN", "USED BY")
	for _, n := range all {
		uses := make([]string, 0, len(n.GetUsedBy()))
		for _, u := range n.GetUsedBy() {
			key := &policyv1.PolicyKey{Kind: u.GetKind(), Namespace: u.GetNamespace(), Name: u.GetName()}
			uses = append(uses, policykind.KeyText(key)+" "+u.GetPath())
		}
		if omitted := n.GetOmittedUseCount(); omitted > 0 {
			uses = append(uses, fmt.Sprintf("%d more", omitted))
		}
		name, pods, used := n.GetName(), podsOf(n), strings.Join(uses, ", ")
		for _, a := range n.GetAddresses() {
			output.Row(w, name, pods, a.GetAddress(), left(a.GetExpireTime(), "over"), left(a.GetForgetTime(), "now"), used)
			name, pods, used = "", "", "" // only in the first row of a name
		}
	}
}

// podsOf returns the pods that may use the addresses of a name.
func podsOf(n *policyv1.LearnedName) string {
	switch {
	case n.Namespace == nil:
		return "all namespaces"
	case n.GetNamespace() == "":
		return "no namespace"
	}
	return n.GetNamespace()
}

// left returns the time that is left until t as text, or the text past if t is in the past.
func left(t *timestamppb.Timestamp, past string) string {
	if t == nil {
		return ""
	}
	if d := time.Until(t.AsTime()); d > 0 {
		return d.Round(time.Second).String()
	}
	return past
}

func forget(ctx context.Context, inv *invocation.Invocation, req *policyv1.ForgetNamesRequest) error {
	out, err := invocation.Ask(ctx, inv, invocation.Policy, client.ForgetNames, req)
	if err != nil {
		return err
	}
	// Afterwards, so that sluice-dns does not regard an address as enforced that sluice-policy has just deleted.
	if !req.GetValidateOnly() && invocation.Runs(inv, invocation.DNS) {
		if _, err := invocation.Ask(ctx, inv, invocation.DNS, dnsv1.DNSServiceClient.DeleteNames, &dnsv1.DeleteNamesRequest{
			Pattern: req.GetPattern(), Address: req.GetAddress(),
		}); err != nil {
			return fmt.Errorf("deleted from sluice-policy and the kernel, but sluice-dns may still have the names: %w", err)
		}
	}
	done := message.Of(out, message.Fact{Key: "validateOnly", Value: req.GetValidateOnly()})
	return inv.Show(done, func(w io.Writer) {
		if req.GetValidateOnly() {
			fmt.Fprintf(w, "Nothing was deleted: --dry-run. Would delete %s with %s.\n",
				output.Plural(out.GetNameCount(), "name", "names"),
				output.Plural(out.GetAddressCount(), "address", "addresses"))
		} else {
			fmt.Fprintf(w, "Deleted %s with %s, also from the kernel.\n",
				output.Plural(out.GetNameCount(), "name", "names"),
				output.Plural(out.GetAddressCount(), "address", "addresses"))
		}
		invocation.AskLocalNode(ctx, inv).WriteOnly(w)
	})
}

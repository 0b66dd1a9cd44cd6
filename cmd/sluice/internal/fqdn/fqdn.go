// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package fqdn shows and forgets the DNS names that the policy service has
// learned.
package fqdn

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// Command is `fqdn`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("fqdn", "Show and forget the DNS names that policies were told of",
		listCommand(inv), deleteCommand(inv))
}

// client is the policy service's, for the calls of invocation.
type client = policyv1.PolicyServiceClient

const patternHelp = `NAME is a DNS name or a pattern, as matchPattern of a policy: "*" stands for characters
of one label, "**." at the start for one or more labels, "*" alone for every name.`

func listCommand(inv *invocation.Invocation) *cobra.Command {
	var address string
	cmd := &cobra.Command{
		Use:   "list [NAME]",
		Short: "List learned names with their addresses, how long they are valid, and the rules that select them",
		Long: `List the DNS names that LearnNames was called with, their addresses, how long each is
valid, and the rules of policies that select the name. An address whose time is over
stays for a while for connections that use it.

` + patternHelp,
		Args: optionalName,
		RunE: func(cmd *cobra.Command, a []string) error {
			all, err := list(cmd.Context(), inv, nameOf(a), address)
			if err != nil {
				return err
			}
			return inv.Show(all, func(w io.Writer) { writeNames(w, all) })
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
		Short: "Forget learned names, or one of their addresses; it opens nothing",
		Long: `Forget the DNS names, all of their addresses or the one of --address, and wait until
the kernel has forgotten them too. That opens nothing. A connection to an address that
no rule allows any more ends with its next packet. The next LearnNames has the name
again.

` + patternHelp,
		Args: optionalName,
		RunE: func(cmd *cobra.Command, a []string) error {
			if len(a) == 0 && address == "" {
				return invocation.Usagef(`nothing to forget: give a NAME, such as api.example.com or "*", or --address`)
			}
			return forget(cmd.Context(), inv, &policyv1.ForgetNamesRequest{
				Pattern: nameOf(a), Address: address, ValidateOnly: dryRun,
			})
		},
	}
	cmd.Flags().StringVar(&address, "address", "", "forget this address of the names, of all if no NAME is given")
	invocation.ValidateFlag(cmd, &dryRun, "say what would be forgotten, and forget nothing")
	return cmd
}

// optionalName accepts one name that is not empty: a script that lost it must not
// mean every name.
func optionalName(cmd *cobra.Command, a []string) error {
	if len(a) > 1 || len(a) == 1 && a[0] == "" {
		return invocation.Usagef("%s takes one NAME", cmd.CommandPath())
	}
	return nil
}

func nameOf(a []string) string { return strings.Join(a, "") }

// learned is what is shown of one name.
type learned struct {
	Name        string    `json:"name"`
	Addresses   []address `json:"addresses"`
	UsedBy      []use     `json:"usedBy"`
	OmittedUses uint32    `json:"omittedUses,omitempty"`
}

type address struct {
	Address string     `json:"address"`
	Expires *time.Time `json:"expireTime"`
	Forget  *time.Time `json:"forgetTime"`
}

// use is a rule that selects a name.
type use struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	Path      string `json:"path"`
}

func list(ctx context.Context, inv *invocation.Invocation, pattern, addr string) ([]learned, error) {
	all := []learned{}
	req := &policyv1.ListNamesRequest{Pattern: pattern, Address: addr}
	err := invocation.Each(ctx, inv, invocation.Policy, client.ListNames, req, func(m *policyv1.ListNamesResponse) {
		n := m.GetName()
		one := learned{Name: n.GetName(), Addresses: []address{}, UsedBy: []use{}, OmittedUses: n.GetOmittedUseCount()}
		for _, a := range n.GetAddresses() {
			one.Addresses = append(one.Addresses, address{
				a.GetAddress(), output.When(a.GetExpireTime()), output.When(a.GetForgetTime()),
			})
		}
		for _, u := range n.GetUsedBy() {
			one.UsedBy = append(one.UsedBy, use{u.GetKind(), u.GetNamespace(), u.GetName(), u.GetPath()})
		}
		all = append(all, one)
	})
	return all, err
}

func writeNames(w io.Writer, all []learned) {
	output.Row(w, "NAME", "ADDRESS", "VALID FOR", "FORGOTTEN IN", "USED BY")
	for _, n := range all {
		uses := make([]string, 0, len(n.UsedBy))
		for _, u := range n.UsedBy {
			key := &policyv1.PolicyKey{Kind: u.Kind, Namespace: u.Namespace, Name: u.Name}
			uses = append(uses, policykind.KeyText(key)+" "+u.Path)
		}
		if n.OmittedUses > 0 {
			uses = append(uses, fmt.Sprintf("%d more", n.OmittedUses))
		}
		name, used := n.Name, strings.Join(uses, ", ")
		for _, a := range n.Addresses {
			output.Row(w, name, a.Address, left(a.Expires, "over"), left(a.Forget, "now"), used)
			name, used = "", "" // once for each name
		}
	}
}

// left is how long it is until then.
func left(t *time.Time, past string) string {
	if t == nil {
		return ""
	}
	if d := time.Until(*t); d > 0 {
		return d.Round(time.Second).String()
	}
	return past
}

// forgotten is what `fqdn delete -o json` prints.
type forgotten struct {
	DryRun    bool   `json:"dryRun"`
	Names     uint32 `json:"names"`
	Addresses uint32 `json:"addresses"`
}

func forget(ctx context.Context, inv *invocation.Invocation, req *policyv1.ForgetNamesRequest) error {
	out, err := invocation.Ask(ctx, inv, invocation.Policy, client.ForgetNames, req)
	if err != nil {
		return err
	}
	f := forgotten{DryRun: req.GetValidateOnly(), Names: out.GetNameCount(), Addresses: out.GetAddressCount()}
	return inv.Show(f, func(w io.Writer) {
		if f.DryRun {
			fmt.Fprintf(w, "Nothing was forgotten: --validate-only. Names that would be: %d, with %d addresses.\n",
				f.Names, f.Addresses)
			return
		}
		fmt.Fprintf(w, "Names forgotten, by the kernel too: %d, with %d addresses.\n", f.Names, f.Addresses)
	})
}

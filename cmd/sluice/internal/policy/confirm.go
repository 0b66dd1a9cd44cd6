// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

func confirmCommand(inv *invocation.Invocation) *cobra.Command {
	var validate bool
	cmd := &cobra.Command{
		Use:   "confirm",
		Short: "Enforce the stored policies after the state of the policy service was lost",
		Long: fmt.Sprintf(`Confirm that the policies in `+"`sluice policy list`"+` are complete, and wait until the
kernel enforces them.

After the state of the policy service was lost, reset or restored from a backup, the
kernel continues to enforce the previous policies, because missing policies would allow
connections that they denied. Apply the missing policies before you confirm. If nothing
was lost, confirm changes nothing. The exit code is %d if the kernel does not enforce the
policies (yet).`, invocation.ExitNotReady),
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error { return confirm(cmd.Context(), inv, validate) },
	}
	invocation.ValidateFlag(cmd, &validate, "show what would be enforced; confirm nothing")
	return cmd
}

func confirm(ctx context.Context, inv *invocation.Invocation, validate bool) error {
	began := time.Now()
	request := &policyv1.ConfirmPoliciesRequest{ValidateOnly: validate}
	r, err := invocation.Ask(ctx, inv, invocation.Policy, client.ConfirmPolicies, request)
	if err != nil {
		return err
	}
	pending := ""
	if !validate {
		if err := awaitRevision(ctx, inv, r.GetRevision(), inv.Timeout); err != nil {
			pending = err.Error()
		}
	}
	took := time.Since(began).Round(time.Millisecond)
	if err := inv.Show(message.Of(r,
		message.Fact{Key: "validateOnly", Value: validate},
		message.Fact{Key: "enforced", Value: !validate && pending == ""},
		message.Fact{Key: "pending", Value: pending},
	), func(w io.Writer) {
		for _, held := range r.GetHeld() {
			fmt.Fprintln(w, "Before: "+output.Printable(held))
		}
		if len(r.GetHeld()) == 0 {
			fmt.Fprintln(w, "The kernel already followed the policy service: there was nothing to confirm.")
		}
		switch {
		case validate:
			fmt.Fprintf(w, "Nothing was changed: --dry-run. Revision %d with %s would be enforced.\n",
				r.GetRevision(), output.Plural(r.GetPolicies(), "policy", "policies"))
		case pending != "":
			fmt.Fprintln(w, output.Printable(fmt.Sprintf("Revision %d is confirmed, but the kernel does not enforce it: %s.",
				r.GetRevision(), pending)))
		default:
			fmt.Fprintf(w, "The kernel enforces revision %d with %s, after %s.\n", r.GetRevision(),
				output.Plural(r.GetPolicies(), "policy", "policies"), took)
		}
		invocation.AskLocalNode(ctx, inv).WriteOnly(w)
	}); err != nil {
		return err
	}
	if pending != "" {
		return invocation.ErrNotReady
	}
	return nil
}

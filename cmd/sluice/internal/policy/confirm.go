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
		Short: "Have the kernel take over policies that are behind what it enforces",
		Long: fmt.Sprintf(`Say that the policies of the policy service, as `+"`sluice policy list`"+` shows them,
are what shall be enforced, and wait until the kernel enforces them.

After the state of the policy service was lost, reset, or restored from a
backup, the kernel goes on enforcing what it enforced before: policies that are
missing would open what they closed. Apply what is missing first. Without such
a difference nothing changes. The exit code is %d if the kernel does not enforce
the policies (yet).`, invocation.ExitNotReady),
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error { return confirm(cmd.Context(), inv, validate) },
	}
	invocation.ValidateFlag(cmd, &validate, "say what would be enforced, but confirm nothing")
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
			fmt.Fprintln(w, "Until now "+output.Printable(held))
		}
		if len(r.GetHeld()) == 0 {
			fmt.Fprintln(w, "The kernel was not behind the policy service: nothing was held.")
		}
		switch {
		case validate:
			fmt.Fprintf(w, "Nothing was changed: --validate-only. Revision %d, of %d policies, would be enforced.\n",
				r.GetRevision(), r.GetPolicies())
		case pending != "":
			fmt.Fprintln(w, output.Printable(fmt.Sprintf("Revision %d is confirmed, but the kernel does not enforce it: %s.",
				r.GetRevision(), pending)))
		default:
			fmt.Fprintf(w, "The kernel enforces revision %d, of %d policies, after %s.\n", r.GetRevision(), r.GetPolicies(),
				took)
		}
	}); err != nil {
		return err
	}
	if pending != "" {
		return invocation.ErrNotReady
	}
	return nil
}

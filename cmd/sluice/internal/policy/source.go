// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

func sourceCommand(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("source", "Manage sources of policies", acceptCommand(inv))
}

func acceptCommand(inv *invocation.Invocation) *cobra.Command {
	var validate bool
	cmd := &cobra.Command{
		Use:   "accept-without FILE",
		Short: "Allow containers to start without the policies of a file that was never read",
		Long: fmt.Sprintf(`Stop waiting for a policy file, or for the policy directory, that could not be read since
the start. Containers are then connected without the policies in it, so connections that
these policies deny are allowed. The policy service records this decision, and enforces the
policies as soon as it can read them. `+"`sluice status`"+` lists the missing files and the
reasons. The exit code is %d if containers still cannot be connected for another reason.`, invocation.ExitNotReady),
		Args: invocation.Args(1, "FILE"),
		RunE: func(cmd *cobra.Command, a []string) error { return accept(cmd.Context(), inv, a[0], validate) },
	}
	invocation.ValidateFlag(cmd, &validate, "show what is missing; accept nothing")
	return cmd
}

func accept(ctx context.Context, inv *invocation.Invocation, file string, validate bool) error {
	r, err := invocation.Ask(ctx, inv, invocation.Policy, client.AcceptWithoutFile, &policyv1.AcceptWithoutFileRequest{
		File: file, ValidateOnly: validate,
	})
	if err != nil {
		return err
	}
	waits := len(r.GetWaitingFor()) > 0
	if err := inv.Show(message.Of(r, message.Fact{Key: "validateOnly", Value: validate}), func(w io.Writer) {
		fmt.Fprintln(w, output.Printable(fmt.Sprintf("%s was never read: %s", r.GetFile(), r.GetReason())))
		switch {
		case validate:
			fmt.Fprintln(w, "Nothing was changed: --dry-run.")
		case !waits:
			fmt.Fprintln(w, "It is accepted as missing. Containers are connected without its policies.")
		default:
			fmt.Fprintln(w, "It is accepted as missing. Containers are still not connected:")
			for _, text := range r.GetWaitingFor() {
				fmt.Fprintln(w, "  "+output.Printable(text))
			}
		}
		invocation.AskLocalNode(ctx, inv).WriteOnly(w)
	}); err != nil {
		return err
	}
	if !validate && waits {
		return invocation.ErrNotReady
	}
	return nil
}

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
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

func sourceCommand(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("source", "Act on the sources of policies", acceptCommand(inv))
}

// acceptance is what `policy source accept-without` prints.
type acceptance struct {
	File      string   `json:"file"`
	Reason    string   `json:"reason"`
	Validated bool     `json:"validatedOnly,omitempty"`
	Waiting   []string `json:"waitingFor"`
}

func acceptCommand(inv *invocation.Invocation) *cobra.Command {
	var validate bool
	cmd := &cobra.Command{
		Use:   "accept-without FILE",
		Short: "Connect containers without the policies of a file that was never read",
		Long: fmt.Sprintf(`End the waiting for a file of policies, or for the directory, that was never read:
containers are connected without its policies, and what these deny is allowed.
The policy service records it, and takes the policies over as soon as it can read
them. `+"`sluice status`"+` names the files that are missing, and why. The exit code
is %d if containers are not connected for another reason.`, invocation.ExitNotReady),
		Args: invocation.Args(1, "FILE"),
		RunE: func(cmd *cobra.Command, a []string) error { return accept(cmd.Context(), inv, a[0], validate) },
	}
	invocation.ValidateFlag(cmd, &validate, "say what is missing, but accept nothing")
	return cmd
}

func accept(ctx context.Context, inv *invocation.Invocation, file string, validate bool) error {
	r, err := invocation.Ask(ctx, inv, invocation.Policy, client.AcceptWithoutFile, &policyv1.AcceptWithoutFileRequest{
		File: file, ValidateOnly: validate,
	})
	if err != nil {
		return err
	}
	done := acceptance{
		File: r.GetFile(), Reason: r.GetReason(), Validated: validate, Waiting: append([]string{}, r.GetWaitingFor()...),
	}
	if err := inv.Show(&done, done.table); err != nil {
		return err
	}
	if !validate && len(done.Waiting) > 0 {
		return invocation.ErrNotReady
	}
	return nil
}

func (d *acceptance) table(w io.Writer) {
	fmt.Fprintln(w, output.Printable(fmt.Sprintf("%s was never read: %s", d.File, d.Reason)))
	switch {
	case d.Validated:
		fmt.Fprintln(w, "Nothing was changed: --validate-only.")
	case len(d.Waiting) == 0:
		fmt.Fprintln(w, "It is accepted as missing. Containers are connected without its policies.")
	default:
		fmt.Fprintln(w, "It is accepted as missing. Containers are still not connected:")
		for _, text := range d.Waiting {
			fmt.Fprintln(w, "  "+output.Printable(text))
		}
	}
}

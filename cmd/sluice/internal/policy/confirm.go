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
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// confirmation is what `policy confirm` prints.
type confirmation struct {
	Revision  uint64   `json:"revision"`
	Policies  uint32   `json:"policies"`
	Held      []string `json:"held"` // subscribers that went on enforcing an earlier state, with why
	Validated bool     `json:"validatedOnly,omitempty"`
	Enforced  bool     `json:"enforced"`
	Pending   string   `json:"pending,omitempty"` // why not
	Took      string   `json:"-"`
}

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
	done := confirmation{Held: []string{}, Validated: validate}
	request := &policyv1.ConfirmPoliciesRequest{ValidateOnly: validate}
	r, err := invocation.Ask(ctx, inv, invocation.Policy, client.ConfirmPolicies, request)
	if err != nil {
		return err
	}
	done.Revision, done.Policies, done.Held = r.GetRevision(), r.GetPolicies(), append(done.Held, r.GetHeld()...)
	if validate {
		return inv.Show(&done, done.table)
	}
	if err := awaitRevision(ctx, inv, done.Revision, inv.Timeout); err != nil {
		done.Pending = err.Error()
	}
	done.Enforced, done.Took = done.Pending == "", time.Since(began).Round(time.Millisecond).String()
	if err := inv.Show(&done, done.table); err != nil {
		return err
	}
	if !done.Enforced {
		return invocation.ErrNotReady
	}
	return nil
}

func (d *confirmation) table(w io.Writer) {
	for _, held := range d.Held {
		fmt.Fprintln(w, "Until now "+output.Printable(held))
	}
	if len(d.Held) == 0 {
		fmt.Fprintln(w, "The kernel was not behind the policy service: nothing was held.")
	}
	if d.Validated {
		fmt.Fprintf(w, "Nothing was changed: --validate-only. Revision %d, of %d policies, would be enforced.\n",
			d.Revision, d.Policies)
		return
	}
	if !d.Enforced {
		fmt.Fprintln(w, output.Printable(fmt.Sprintf("Revision %d is confirmed, but the kernel does not enforce it: %s.",
			d.Revision, d.Pending)))
		return
	}
	fmt.Fprintf(w, "The kernel enforces revision %d, of %d policies, after %s.\n", d.Revision, d.Policies, d.Took)
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package observe shows what the eBPF programs report of packets.
package observe

import (
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// Command is `observe`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var o Flags
	untilInputEnds := false
	cmd := &cobra.Command{
		Use:   "observe",
		Short: "Show what happens to packets",
		Long: `Show what the eBPF programs report: drops with their reason, the policies' verdicts
on connections with the deciding rule, and the ends of connections. Without
--follow it shows what is remembered and ends. With it, it stays, also while the
datapath restarts, and says what may be missing then.

Criteria of different kinds must all hold; of one kind, one must hold. --not turns
the criterion that follows it, and only that one, into its opposite: an event that
meets it is left out, whatever else it meets. Events that were lost are shown where
they are missing.

What --from and --to take: a container (the start of its id, or CONTAINER/INTERFACE),
a pod of this node as NAMESPACE/NAME, an address or prefix, the number of an identity,
or labels as kubectl selects them (app=web, k8s:app, reserved:host). Each may be
repeated; the sender of a reply is the other end of the connection.`,
		Example: `  sluice observe --follow --verdict dropped
  sluice observe --last 20 --from app=client --to-port 80
  sluice observe --since 10:15:00 --until 10:16:00 --not --port 53
  sluice observe --follow --output-file /var/log/sluice/flows.json --max-size 64MiB --max-files 4`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			req, err := o.request(time.Now(), &names{note: inv.Note, list: func() ([]*datapathv1.Endpoint, error) {
				return endpoint.List(ctx, inv)
			}})
			if err != nil {
				return err
			}
			if untilInputEnds {
				var stop func()
				ctx, stop = invocation.EndWith(ctx, cmd.InOrStdin())
				defer stop()
			}
			out, err := o.Open(inv)
			if err != nil {
				return err
			}
			w := watch{inv: inv, out: out}
			return errors.Join(w.run(ctx, req), out.Close())
		},
	}
	o.Add(cmd.Flags())
	invocation.ExitOnStdinEOFFlag(cmd, &untilInputEnds)
	return cmd
}

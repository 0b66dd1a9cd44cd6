// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package observe shows the events that the eBPF programs report: drops, verdicts and ended connections.
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
		Short: "Show drops, policy verdicts and ended connections",
		Long: `Show the events of the eBPF programs: drops with their reason, policy verdicts on
connections with the deciding rule, and the ends of connections. Without --follow, the
command shows the events that the datapath has in memory, and exits. With --follow, it also
shows new events, also after restarts of the datapath, and prints a line where events may be
missing. With --since or --until, it asks sluice-hubble, if it runs on the node: its files
contain the events of several days.

An event is shown if it matches every kind of filter; of several filters of one kind, it
needs to match only one. --not inverts only the next filter: events that match this filter
are left out. Where events were lost, a line shows their number. Lines break at 100 columns;
with -o wide, each event is one line.

--from and --to take a container or a pod of this node, an address or prefix, an identity
number, or a label selector in the syntax of kubectl (app=web, k8s:app, reserved:host).
Both may be repeated. The sender of a reply is the responder of the connection.
` + endpoint.NameHelp,
		Example: `  sluice observe --follow --verdict dropped
  sluice observe --last 20 --from app=client --to-port 80
  sluice observe --since 10:15:00 --until 10:16:00 --not --port 53
  sluice observe --since 8h --verdict dropped --pod shop/web-0
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
			w := watch{inv: inv, out: out, service: datapath}
			if o.since != "" || o.until != "" {
				w.service = keeper(inv)
			}
			return errors.Join(w.run(ctx, req), out.Close())
		},
	}
	o.Add(cmd.Flags())
	invocation.ExitOnStdinEOFFlag(cmd, &untilInputEnds)
	return cmd
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package hubble manages sluice-hubble.
package hubble

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/observe"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	hubblev1 "github.com/sluice-net/sluice/proto/gen/sluice/hubble/v1"
)

// Command is `hubble`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("hubble", "Manage sluice-hubble",
		invocation.Group("history", "Manage the stored events of sluice-hubble", deleteCommand(inv)), uiCommand(inv))
}

func uiCommand(inv *invocation.Invocation) *cobra.Command {
	return &cobra.Command{
		Use:   "ui",
		Short: "Print the address of the web page of sluice-hubble",
		Long: `Print the address of the web page that sluice-hubble serves on this node, with the token that
opens it. The page shows flows, a map of connections, the rules that denied a connection, and
the effect of policies. sluice-hubble serves it if page.address is set, on a loopback address.
Each start of sluice-hubble makes a new token.`,
		Example: `  sluice hubble ui
  sluice hubble ui --output json`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			answer, err := invocation.Ask(cmd.Context(), inv, invocation.Page, hubblev1.PageServiceClient.GetPage,
				&hubblev1.GetPageRequest{})
			if err != nil {
				return err
			}
			return inv.Show(message.Of(answer), func(w io.Writer) { fmt.Fprintln(w, output.Printable(answer.GetUrl())) })
		},
	}
}

func deleteCommand(inv *invocation.Invocation) *cobra.Command {
	var (
		namespace, before string
		dryRun            bool
	)
	cmd := &cobra.Command{
		Use:   "delete",
		Short: "Delete stored events of a namespace, or before a time",
		Long: `Delete events that sluice-hubble has stored on this node: with --namespace, events whose
source or destination is in the namespace; with --before, events before a time; with both
flags, events that match both. When the command ends, the files and the memory of
sluice-hubble no longer contain the events. The datapath still has its latest 4,096 events
in memory, and other nodes have their own stored events.`,
		Example: `  sluice hubble history delete --namespace shop
  sluice hubble history delete --before 24h --dry-run`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			r := &hubblev1.DeleteFlowsRequest{Namespace: namespace, ValidateOnly: dryRun}
			if namespace == "" && before == "" {
				return invocation.Usagef("nothing to delete: give --namespace or --before")
			}
			if before != "" {
				t, err := observe.TimeOf("--before", before, time.Now())
				if err != nil {
					return err
				}
				r.Before = timestamppb.New(t)
			}
			conn, client, err := invocation.Connect(inv, invocation.History)
			if err != nil {
				return err
			}
			defer conn.Close()
			// The files of days take longer than --timeout.
			ctx, cancel := context.WithTimeout(cmd.Context(), 10*time.Minute)
			defer cancel()
			answer, err := client.DeleteFlows(ctx, r)
			if err != nil {
				return err
			}
			return inv.Show(message.Of(answer), func(w io.Writer) {
				done := "deleted"
				if dryRun {
					done = "to delete"
				}
				fmt.Fprintf(w, "%s: %s\n", done, output.Plural(answer.GetDeletedCount(), "event", "events"))
			})
		},
	}
	cmd.Flags().StringVar(&namespace, "namespace", "", "only events whose source or destination is in this namespace")
	cmd.Flags().StringVar(&before, "before", "", "only events before this time, or older than this, in the forms of "+
		"sluice observe --since")
	invocation.ValidateFlag(cmd, &dryRun, "show how many events would be deleted; delete nothing")
	return cmd
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

func flushCommand(inv *invocation.Invocation) *cobra.Command {
	var o filter
	var all, validate bool
	cmd := &cobra.Command{
		Use:   "flush",
		Short: "Remove connections from the connection table",
		Long: `Remove the matching connections from the connection table. This does not close them: a TCP
connection continues with the next segment from either end if the policies allow the
original connection. For other protocols, the next packet is evaluated in its own
direction, so a reply may be dropped until the initiator sends again. Connections that a
policy has terminated stay in the table, so that they cannot continue as new ones.

The datapath records the direction of up to 6,144 flushed TCP connections per family, each
until its next packet or its idle timeout. If this space is full, further TCP connections
are not flushed; the command prints their number and exits with code 1. Then flush again
later, or flush fewer connections by means of filters.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return flush(cmd.Context(), inv, &o, all, validate)
		},
	}
	o.add(cmd.Flags())
	cmd.Flags().BoolVar(&all, "all", false, "flush all connections of the node")
	invocation.ValidateFlag(cmd, &validate, "count what would be flushed; flush nothing")
	return cmd
}

// atLeast is the minimum timeout of a flush, because a full table takes longer than other calls.
const atLeast = time.Minute

func flush(ctx context.Context, inv *invocation.Invocation, o *filter, all, validate bool) error {
	if !all && o.empty() {
		return invocation.Usagef("no filter: give one, or --all to flush every connection")
	}
	req, err := o.request(ctx, inv)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, max(inv.Timeout, atLeast))
	defer cancel()
	r, err := invocation.Ask(ctx, inv, invocation.Connections, datapathv1.ConnectionServiceClient.FlushConnections,
		&datapathv1.FlushConnectionsRequest{Filter: req, All: all, ValidateOnly: validate})
	if err != nil {
		return inFlags(err)
	}
	done := message.Of(r, message.Fact{Key: "validateOnly", Value: validate})
	if err := inv.Show(done, func(w io.Writer) {
		if validate {
			fmt.Fprintf(w, "Nothing was flushed: --dry-run. %s would be flushed.\n", counted(r.GetFlushedCount()))
		} else {
			fmt.Fprintf(w, "%s flushed.\n", counted(r.GetFlushedCount()))
		}
		for _, stays := range []struct {
			count uint64
			why   string
		}{
			{r.GetTerminatedCount(), "a policy has terminated them"},
			{r.GetUnrememberedCount(), "the datapath cannot remember the direction of more TCP connections of the " +
				"family; flush again later"},
			{r.GetBusyCount(), "packets changed them during the flush; flush again"},
		} {
			if stays.count > 0 {
				fmt.Fprintf(w, "Not flushed: %s, because %s.\n", counted(stays.count), stays.why)
			}
		}
		invocation.AskLocalNode(ctx, inv).WriteOnly(w)
	}); err != nil {
		return err
	}
	if !validate && r.GetUnrememberedCount()+r.GetBusyCount() > 0 {
		return invocation.ErrReported
	}
	return nil
}

func counted(n uint64) string {
	if n == 1 {
		return "1 connection"
	}
	return fmt.Sprintf("%d connections", n)
}

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
		Short: "Remove connections from the table",
		Long: `Remove the connections that meet the criteria from the table. None is ended by that: a
TCP connection goes on with the next segment of either end, if the policies allow it as
the connection that it was. The next packet of another protocol is evaluated in its own
direction: an answer may be dropped until the initiator sends again. What a policy has
terminated stays, so that it cannot go on as another connection.

The direction of 6,144 flushed TCP connections of each family is remembered, of each
until its next packet or the end of its idle time. More of them stay as they are, are
counted, and end the command with exit code 1: flush again when those that were
flushed have sent something, or leave out by criteria what need not be flushed.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return flush(cmd.Context(), inv, &o, all, validate)
		},
	}
	o.add(cmd.Flags())
	cmd.Flags().BoolVar(&all, "all", false, "every connection is meant, of the whole node")
	invocation.ValidateFlag(cmd, &validate, "count what would be flushed, but flush nothing")
	return cmd
}

// atLeast is how long a flush may take, whatever --timeout says: a full table takes
// longer than other calls.
const atLeast = time.Minute

func flush(ctx context.Context, inv *invocation.Invocation, o *filter, all, validate bool) error {
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
			fmt.Fprintf(w, "Nothing was flushed: --validate-only. %s would be.\n", counted(r.GetFlushedCount()))
		} else {
			fmt.Fprintf(w, "%s flushed.\n", counted(r.GetFlushedCount()))
		}
		for _, stays := range []struct {
			count uint64
			why   string
		}{
			{r.GetTerminatedCount(), "a policy has terminated them"},
			{r.GetUnrememberedCount(), "the direction of no more TCP connections of the family can be remembered until " +
				"their next packet; they stay as they were; flush again later"},
			{r.GetBusyCount(), "packets change them all the time; flush again"},
		} {
			if stays.count > 0 {
				fmt.Fprintf(w, "Not flushed: %s, because %s.\n", counted(stays.count), stays.why)
			}
		}
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

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// listedAtOnce is the default of --limit.
const listedAtOnce = 1000

func listCommand(inv *invocation.Invocation) *cobra.Command {
	var o filter
	limit := uint32(0)
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List tracked connections",
		Long: `List tracked connections, unordered. A connection is listed if it matches every kind of
filter; of several filters of one kind, it needs to match only one. With -o wide, ASKED is
the service address to which packets of the connection are sent; it is empty if the service
was translated in the connect call of a socket. If more connections than --limit match, the
command prints how many are not shown. With -o json, each line is one object.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			req, err := o.request(cmd.Context(), inv)
			if err != nil {
				return err
			}
			return list(cmd.Context(), inv, &datapathv1.ListConnectionsRequest{Filter: req, Limit: limit})
		},
	}
	o.add(cmd.Flags())
	cmd.Flags().Uint32Var(&limit, "limit", listedAtOnce, "show at most this many connections; 0: all")
	return cmd
}

// columns are the columns of `conntrack list`.
var columns = []output.Column[*datapathv1.TrackedConnection]{
	{Header: "PROTOCOL", Cell: func(t *datapathv1.TrackedConnection) any {
		return ports.ProtocolText(uint32(t.GetConnection().GetProtocol()))
	}},
	{Header: "INITIATOR", Cell: func(t *datapathv1.TrackedConnection) any {
		c := t.GetConnection()
		return endText(c.GetInitiatorAddress(), c.GetInitiatorPort(), t.GetInitiator())
	}},
	{Header: "RESPONDER", Cell: func(t *datapathv1.TrackedConnection) any {
		c := t.GetConnection()
		return endText(c.GetResponderAddress(), c.GetResponderPort(), t.GetResponder())
	}},
	{Header: "STATE", Cell: func(t *datapathv1.TrackedConnection) any { return stateText(t) }},
	{Header: "LAST SEEN", Cell: func(t *datapathv1.TrackedConnection) any {
		return output.Since(output.When(t.GetConnection().GetLastSeenTime()))
	}},
	{Header: "ASKED", Wide: true, Cell: func(t *datapathv1.TrackedConnection) any { return askedText(t) }},
}

// endText returns "10.244.0.2:4000 (shop/web-0)".
func endText(address string, port uint32, e *datapathv1.ConnectionEnd) string {
	who := strconv.FormatUint(uint64(e.GetIdentity()), 10)
	switch {
	case e.GetPod() != nil:
		who = workload.PodText(e.GetPod())
	case e.GetOwner() != nil:
		who = workload.OwnerOf(e.GetOwner()).String()
	case e.GetLocalNode():
		who = "local node"
	}
	return hostPort(address, port) + " (" + who + ")"
}

func hostPort(address string, port uint32) string {
	return net.JoinHostPort(address, strconv.FormatUint(uint64(port), 10))
}

// stateText returns the state of a connection with its marks.
func stateText(t *datapathv1.TrackedConnection) string {
	c := t.GetConnection()
	var states []string
	for _, s := range c.GetStates() {
		states = append(states, output.Enum(s, statePrefix))
	}
	for _, special := range []struct {
		is   bool
		text string
	}{{!c.GetCurrent(), "to-be-evaluated"}, {c.GetInTransit(), "in-transit"}, {t.GetEarlierLayout(), "earlier-layout"}} {
		if special.is {
			states = append(states, special.text)
		}
	}
	return strings.Join(states, ",")
}

// askedText returns the service address, "10.96.0.1:80 (shop/web:http)", and the source address that the responder
// sees.
func askedText(t *datapathv1.TrackedConnection) string {
	text, c := "", t.GetConnection()
	if t.GetAskedAddress() != "" {
		text = hostPort(t.GetAskedAddress(), t.GetAskedPort())
	}
	if t.GetService() != "" {
		text += " (" + t.GetService() + ")"
	}
	if c.GetSourceAddress() != "" {
		text = strings.TrimSpace(text + " as " + hostPort(c.GetSourceAddress(), c.GetSourcePort()))
	}
	return text
}

// rowsAtOnce is the number of rows that are aligned together.
const rowsAtOnce = 1000

func list(ctx context.Context, inv *invocation.Invocation, req *datapathv1.ListConnectionsRequest) error {
	// There may be a million connections, so they are printed as they arrive.
	out := bufio.NewWriter(inv.Out)
	table := output.Aligned(output.Folding(out))
	if inv.Wide() {
		table = output.Aligned(out)
	}
	columns := output.Shown(columns, inv.Wide())
	shown, omitted := 0, uint64(0)
	err := invocation.Stream(ctx, inv, invocation.Connections, datapathv1.ConnectionServiceClient.ListConnections, req,
		func(m *datapathv1.ListConnectionsResponse) error {
			omitted = m.GetOmittedConnectionCount()
			if shown++; inv.Format == "json" {
				line := message.Of(m.GetConnection(), message.Fact{Key: "omittedConnectionCount", Value: omitted})
				return message.WriteLine(out, line)
			}
			if shown == 1 {
				output.Header(table, columns)
			}
			output.Rows(table, columns, m.GetConnection())
			if shown%rowsAtOnce == 0 {
				return table.Flush()
			}
			return nil
		})
	if err == nil && shown == 0 && inv.Format != "json" {
		fmt.Fprintln(table, "No connection is tracked that meets the criteria.")
	}
	err = cmp.Or(inFlags(err), table.Flush(), out.Flush()) // print what has arrived, and return the first error
	if omitted > 0 {
		fmt.Fprintf(inv.ErrOut, "note: %s not shown because of --limit\n",
			output.Plural(omitted, "more connection is", "more connections are"))
	}
	return err
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package bpfmap shows the eBPF maps and their entries.
package bpfmap

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/kit/nearest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// Command is `map`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var limit uint32
	dump := &cobra.Command{
		Use: "dump NAME", Short: "Print the decoded entries of a map; with -o json one object per line",
		Args: invocation.Args(1, "the name of a map; see `sluice map list`"),
		RunE: func(cmd *cobra.Command, a []string) error { return dump(cmd.Context(), inv, a[0], limit) },
	}
	dump.Flags().Uint32Var(&limit, "limit", 0, "at most this many entries; 0: all")
	return invocation.Group("map", "Show the eBPF maps", dump,
		&cobra.Command{
			Use: "list", Short: "List the maps with their entries, capacity and memory", Args: invocation.Args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return printList(cmd.Context(), inv) },
		},
	)
}

// columns are the columns of `map list`. For some types of maps, the kernel does not report the number of entries.
var columns = []output.Column[*datapathv1.MapUsage]{
	{Header: "MAP", Cell: func(m *datapathv1.MapUsage) any { return m.GetName() }},
	{Header: "ENTRIES", Cell: func(m *datapathv1.MapUsage) any {
		if m.GetEntries() < 0 {
			return "?"
		}
		return m.GetEntries()
	}},
	{Header: "OF", Cell: func(m *datapathv1.MapUsage) any { return m.GetMaxEntries() }},
	{Header: "MEMORY", Cell: func(m *datapathv1.MapUsage) any { return output.Bytes(m.GetBytes()) }},
}

func printList(ctx context.Context, inv *invocation.Invocation) error {
	r, err := invocation.Ask(ctx, inv, invocation.Datapath, datapathv1.DatapathServiceClient.GetStatus,
		&datapathv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	return inv.Show(message.List(r.GetMaps()), func(w io.Writer) {
		output.Table(w, columns, r.GetMaps())
		var sum uint64
		for _, m := range r.GetMaps() {
			sum += m.GetBytes()
		}
		output.Row(w, output.Plural(len(r.GetMaps()), "map", "maps"), "", "", output.Bytes(sum))
	})
}

func dump(ctx context.Context, inv *invocation.Invocation, name string, limit uint32) error {
	// Maps have up to a million entries, so they are printed as they arrive.
	out := bufio.NewWriter(inv.Out)
	omitted := uint64(0)
	call, request := datapathv1.DatapathServiceClient.DumpMap, &datapathv1.DumpMapRequest{Name: name, Limit: limit}
	err := invocation.Stream(ctx, inv, invocation.Datapath, call, request, func(m *datapathv1.DumpMapResponse) error {
		if inv.Format == "json" {
			return message.WriteLine(out, message.Of(m))
		}
		omitted = m.GetOmittedEntryCount()
		_, err := fmt.Fprintf(out, "%s  =>  %s\n", output.Printable(m.GetKey()), output.Printable(m.GetValue()))
		return err
	})
	err = cmp.Or(err, out.Flush()) // print what has arrived, and return the first error
	if omitted > 0 {
		fmt.Fprintf(inv.ErrOut, "note: %s not shown because of --limit\n",
			output.Plural(omitted, "more entry is", "more entries are"))
	}
	if status.Code(err) != codes.NotFound {
		return err
	}
	hint := ""
	if r, err := invocation.Ask(ctx, inv, invocation.Datapath, datapathv1.DatapathServiceClient.GetStatus,
		&datapathv1.GetStatusRequest{}); err == nil {
		var names []string
		for _, m := range r.GetMaps() {
			names = append(names, m.GetName())
		}
		hint = nearest.Hint(name, names)
	}
	return invocation.OrNotFound(err, "map", name, "map list", hint)
}

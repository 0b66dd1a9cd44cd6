// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

func (c *command) mapCommand() *cobra.Command {
	var limit uint32
	dump := &cobra.Command{
		Use: "dump NAME", Short: "Print the entries of a map in words; JSON comes one object a line", Args: args(1, "the name of a map; see `sluice map list`"),
		RunE: func(cmd *cobra.Command, a []string) error { return c.mapDump(cmd.Context(), a[0], limit) },
	}
	dump.Flags().Uint32Var(&limit, "limit", 0, "at most this many entries; 0: all")
	return group("map", "Show the eBPF maps", dump,
		&cobra.Command{
			Use: "list", Short: "List the maps, how full they are and the memory they take", Args: args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return c.mapList(cmd.Context()) },
		},
	)
}

// mapUsage is how full a map is.
type mapUsage struct {
	Name       string `json:"name"`
	Entries    int64  `json:"entries"` // -1: the kernel cannot say
	MaxEntries uint32 `json:"maxEntries"`
	Bytes      uint64 `json:"bytes"`
}

func mapUsagesOf(all []*datapathv1.MapUsage) []mapUsage {
	shown := make([]mapUsage, 0, len(all))
	for _, m := range all {
		shown = append(shown, mapUsage{m.GetName(), m.GetEntries(), m.GetMaxEntries(), m.GetBytes()})
	}
	return shown
}

// bytesText is a size for people.
func bytesText(n uint64) string {
	switch {
	case n < 1<<10:
		return strconv.FormatUint(n, 10) + " B"
	case n < 1<<20:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	default:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
}

func (c *command) mapList(ctx context.Context) error {
	conn, err := c.dial("datapath")
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	r, err := datapathv1.NewDatapathServiceClient(conn).GetStatus(ctx, &datapathv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	all := mapUsagesOf(r.GetMaps())
	return c.show(all, func(w io.Writer) {
		row(w, "MAP", "ENTRIES", "OF", "MEMORY")
		var sum uint64
		for _, m := range all {
			entries := strconv.FormatInt(m.Entries, 10)
			if m.Entries < 0 {
				entries = "?"
			}
			row(w, m.Name, entries, m.MaxEntries, bytesText(m.Bytes))
			sum += m.Bytes
		}
		row(w, fmt.Sprintf("%d maps", len(all)), "", "", bytesText(sum))
	})
}

func (c *command) mapDump(ctx context.Context, name string, limit uint32) error {
	conn, err := c.dial("datapath")
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := datapathv1.NewDatapathServiceClient(conn).DumpMap(ctx, &datapathv1.DumpMapRequest{Name: name, Limit: limit})
	if err != nil {
		return err
	}
	// Maps have up to a million entries, so they are printed as they come.
	out := bufio.NewWriter(c.out)
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return out.Flush()
		}
		if err != nil {
			_ = out.Flush() // what came stays, and the reason is the other one
			return err
		}
		if c.format == "json" {
			err = encoder.Encode(map[string]string{"key": m.GetKey(), "value": m.GetValue()})
		} else {
			_, err = fmt.Fprintf(out, "%s  =>  %s\n", printable(m.GetKey()), printable(m.GetValue()))
		}
		if err != nil {
			return err
		}
	}
}

func (c *command) auditCommand() *cobra.Command {
	var repair bool
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Compare the kernel with what should be there",
		Long: `Compare maps, pins, programs, filters, routes, rules and sysctls with what should
be there, and with --repair make it so. The exit code is 1 if a difference
remains. The datapath does the same by itself from time to time.`,
		Args: args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error { return c.audit(cmd.Context(), repair) },
	}
	cmd.Flags().BoolVar(&repair, "repair", false, "repair what is found")
	return cmd
}

// auditResult is one difference.
type auditResult struct {
	Subject  string `json:"subject"`
	Key      string `json:"key"`
	Want     string `json:"want"`
	Have     string `json:"have"`
	Repaired bool   `json:"repaired"`
	Error    string `json:"error,omitempty"`
}

func (c *command) audit(ctx context.Context, repair bool) error {
	conn, err := c.dial("datapath")
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := datapathv1.NewDatapathServiceClient(conn).AuditMaps(ctx, &datapathv1.AuditMapsRequest{Repair: repair})
	if err != nil {
		return err
	}
	all := []auditResult{}
	remain := 0
	if err := each(stream, func(m *datapathv1.AuditMapsResponse) {
		d := m.GetDifference()
		all = append(all, auditResult{d.GetSubject(), d.GetKey(), d.GetWant(), d.GetHave(), m.GetRepaired(), m.GetError()})
		if !m.GetRepaired() {
			remain++
		}
	}); err != nil {
		return err
	}
	if err := c.show(all, func(w io.Writer) {
		if len(all) == 0 {
			fmt.Fprintln(w, "The kernel is as it should be.")
			return
		}
		row(w, "WHAT", "WHICH", "WANT", "HAVE", "REPAIRED")
		for _, d := range all {
			repaired := "no"
			switch {
			case d.Repaired:
				repaired = "yes"
			case d.Error != "":
				repaired = "no: " + d.Error
			}
			row(w, d.Subject, d.Key, d.Want, d.Have, repaired)
		}
	}); err != nil {
		return err
	}
	if remain > 0 {
		return errReported
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

func historyCommand(inv *invocation.Invocation) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "history [NAME]",
		Short: "Show the latest changes of endpoints, also of deleted ones",
		Long: `Show how endpoints were created, changed and deleted, oldest first. The datapath remembers
the last 1,024 changes since its start; endpoint events shows new ones. NAME limits the
output to ` + NameForms + `.
` + NameHelp,
		Example: `  sluice endpoint history
  sluice endpoint history shop/web`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return invocation.Usagef("sluice endpoint history takes at most one argument: %s", NameForms)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			var all []*datapathv1.ListEndpointEventsResponse
			err := invocation.Each(cmd.Context(), inv, invocation.Datapath,
				datapathv1.DatapathServiceClient.ListEndpointEvents, &datapathv1.ListEndpointEventsRequest{},
				func(m *datapathv1.ListEndpointEventsResponse) { all = append(all, m) })
			if err != nil {
				return err
			}
			if len(args) == 1 {
				if all, err = changesOfName(all, args[0]); err != nil {
					return err
				}
			}
			return showHistory(inv, all)
		},
	}
	return cmd
}

// lastState returns the endpoint after a change, or before its deletion.
func lastState(m *datapathv1.ListEndpointEventsResponse) *datapathv1.Endpoint {
	if m.GetEndpoint() != nil {
		return m.GetEndpoint()
	}
	return m.GetPrevious()
}

// changesOfName returns the changes of the endpoints with a name. Several endpoints may have had the name, one after
// the other.
func changesOfName(all []*datapathv1.ListEndpointEventsResponse, text string) (
	[]*datapathv1.ListEndpointEventsResponse, error,
) {
	name, err := ParseName(text)
	if err != nil {
		return nil, err
	}
	var endpoints []*datapathv1.Endpoint
	for _, m := range all {
		endpoints = append(endpoints, lastState(m))
	}
	found, _, err := name.Find(endpoints)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("no recorded change of container or pod %s; see `sluice endpoint history`",
			output.Printable(text))
	}
	named := map[workload.Owner]bool{}
	for _, e := range found {
		named[workload.OwnerOf(e.GetOwner())] = true
	}
	return slices.DeleteFunc(all, func(m *datapathv1.ListEndpointEventsResponse) bool {
		return !named[workload.OwnerOf(lastState(m).GetOwner())]
	}), nil
}

func showHistory(inv *invocation.Invocation, all []*datapathv1.ListEndpointEventsResponse) error {
	events, objects := []event{}, []message.Object{}
	for _, m := range all {
		e := event{time: m.GetTime().AsTime().Local(), event: eventChanged, endpoint: lastState(m)}
		switch {
		case m.GetPrevious() == nil:
			e.event = eventCreated
		case m.GetEndpoint() == nil:
			e.event = eventDeleted
		default:
			if e.changes = changesOf(m.GetPrevious(), m.GetEndpoint()); len(e.changes) == 0 {
				continue // a change of fields that commands do not show
			}
		}
		events, objects = append(events, e), append(objects, e.object())
	}
	return inv.Show(objects, func(w io.Writer) {
		for _, e := range events {
			line := e.time.Format(time.DateOnly) + " " + e.line()
			if !inv.Wide() && len(line) > output.Width {
				// A folded line is not aligned with others.
				line = output.Fold(strings.Replace(line, fmt.Sprintf("%-12s", e.event), e.event, 1))
			}
			fmt.Fprintln(w, line)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// listedAtOnce is how many connections are listed unless --limit says otherwise.
const listedAtOnce = 1000

func listCommand(inv *invocation.Invocation) *cobra.Command {
	var o filter
	limit := uint32(0)
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List tracked connections",
		Long: `List the connections that the kernel tracks, in no order. Criteria of different kinds
must all hold; of one kind, one must hold. ASKED is the address of a service that the
connection was led from; a service that was translated when a socket connected leaves
no trace in the connection. What --limit leaves out is counted. JSON comes one object
a line.`,
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
	cmd.Flags().Uint32Var(&limit, "limit", listedAtOnce, "how many connections are shown at most; 0: all")
	return cmd
}

// connection is a tracked one.
type connection struct {
	Protocol  string `json:"protocol"`
	Initiator end    `json:"initiator"`
	Responder end    `json:"responder"`
	// States begin with the stage.
	States   []string   `json:"states"`
	LastSeen *time.Time `json:"lastSeenTime"`
	// Current says that the verdicts of both sides stand; if not, the next packet is
	// evaluated anew.
	Current     bool   `json:"current"`
	EgressRule  uint32 `json:"egressRule,omitempty"`
	IngressRule uint32 `json:"ingressRule,omitempty"`
	// Asked is the address and port that the initiator asked for, and Service whose
	// it is.
	Asked   string `json:"asked,omitempty"`
	Service string `json:"service,omitempty"`
	// Source is what the responder sees in place of the initiator.
	Source        string `json:"source,omitempty"`
	InTransit     bool   `json:"inTransit,omitempty"`
	Node          string `json:"node,omitempty"`
	EarlierLayout bool   `json:"earlierLayout,omitempty"`
	// Omitted is in the last one: how many --limit leaves out.
	Omitted uint64 `json:"omittedConnections,omitempty"`
}

// end is one end of a connection.
type end struct {
	Address  string          `json:"address"`
	Port     uint32          `json:"port"`
	Identity uint32          `json:"identity"`
	Owner    *workload.Owner `json:"owner,omitempty"`
	Pod      string          `json:"pod,omitempty"`
	Local    bool            `json:"localNode,omitempty"`
}

func endOf(address string, port uint32, e *datapathv1.ConnectionEnd) end {
	shown := end{Address: address, Port: port, Identity: e.GetIdentity(), Local: e.GetLocalNode()}
	if e.GetOwner() != nil {
		o := workload.OwnerOf(e.GetOwner())
		shown.Owner = &o
	}
	if p := e.GetPod(); p != nil {
		shown.Pod = p.GetNamespace() + "/" + p.GetName()
	}
	return shown
}

// text is "10.244.0.2:4000 (shop/web-0)".
func (e end) text() string {
	who := strconv.FormatUint(uint64(e.Identity), 10)
	switch {
	case e.Pod != "":
		who = e.Pod
	case e.Owner != nil:
		who = e.Owner.String()
	case e.Local:
		who = "local node"
	}
	return hostPort(e.Address, e.Port) + " (" + who + ")"
}

func hostPort(address string, port uint32) string {
	return net.JoinHostPort(address, strconv.FormatUint(uint64(port), 10))
}

func connectionOf(t *datapathv1.TrackedConnection) connection {
	c := t.GetConnection()
	shown := connection{
		Protocol:  ports.ProtocolText(uint32(c.GetProtocol())),
		Initiator: endOf(c.GetInitiatorAddress(), c.GetInitiatorPort(), t.GetInitiator()),
		Responder: endOf(c.GetResponderAddress(), c.GetResponderPort(), t.GetResponder()),
		LastSeen:  output.When(c.GetLastSeenTime()), Current: c.GetCurrent(), EgressRule: c.GetEgressRule(),
		IngressRule: c.GetIngressRule(), Service: t.GetService(), InTransit: c.GetInTransit(), Node: t.GetNodeName(),
		EarlierLayout: t.GetEarlierLayout(), States: []string{},
	}
	for _, s := range c.GetStates() {
		shown.States = append(shown.States, output.Enum(s, statePrefix))
	}
	if t.GetAskedAddress() != "" {
		shown.Asked = hostPort(t.GetAskedAddress(), t.GetAskedPort())
	}
	if c.GetSourceAddress() != "" {
		shown.Source = hostPort(c.GetSourceAddress(), c.GetSourcePort())
	}
	return shown
}

// stateText is the stage and what is special.
func (c connection) stateText() string {
	states := c.States
	if !c.Current {
		states = append(states, "to-be-evaluated")
	}
	if c.InTransit {
		states = append(states, "in-transit")
	}
	if c.EarlierLayout {
		states = append(states, "earlier-layout")
	}
	return strings.Join(states, ",")
}

// askedText is "10.96.0.1:80 (shop/web:http)", and what the responder sees.
func (c connection) askedText() string {
	text := c.Asked
	if c.Service != "" {
		text += " (" + c.Service + ")"
	}
	if c.Source != "" {
		text = strings.TrimSpace(text + " as " + c.Source)
	}
	return text
}

// rowsAtOnce is how many rows are aligned with each other.
const rowsAtOnce = 1000

func list(ctx context.Context, inv *invocation.Invocation, req *datapathv1.ListConnectionsRequest) error {
	// There may be a million, so they are printed as they come.
	out := bufio.NewWriter(inv.Out)
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	table := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	shown, omitted := 0, uint64(0)
	err := invocation.Stream(ctx, inv, invocation.Connections, datapathv1.ConnectionServiceClient.ListConnections, req,
		func(m *datapathv1.ListConnectionsResponse) error {
			c := connectionOf(m.GetConnection())
			c.Omitted, omitted = m.GetOmittedConnectionCount(), m.GetOmittedConnectionCount()
			if shown++; inv.Format == "json" {
				return encoder.Encode(c)
			}
			if shown == 1 {
				output.Row(table, "PROTOCOL", "INITIATOR", "RESPONDER", "STATE", "LAST SEEN", "ASKED")
			}
			output.Row(table, c.Protocol, c.Initiator.text(), c.Responder.text(), c.stateText(), output.Since(c.LastSeen),
				c.askedText())
			if shown%rowsAtOnce == 0 {
				return table.Flush()
			}
			return nil
		})
	if err == nil && shown == 0 && inv.Format != "json" {
		fmt.Fprintln(table, "No connection is tracked that meets the criteria.")
	}
	err = cmp.Or(inFlags(err), table.Flush(), out.Flush()) // what came stays, and the first error is the reason
	if omitted > 0 {
		fmt.Fprintf(inv.ErrOut, "note: --limit leaves out %d more\n", omitted)
	}
	return err
}

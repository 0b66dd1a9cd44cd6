// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package proxy shows the proxies that evaluate the content of connections.
package proxy

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// Command is `proxy`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("proxy", "Show the proxies for layer 7 rules", statusCommand(inv))
}

func statusCommand(inv *invocation.Invocation) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show which proxies run, and what happened to the packets for them",
		Long: `Show which proxies are connected to the datapath, and how many packets were redirected to
them since the eBPF maps were created.

While no proxy is connected, packets of a rule that allows everything, such as a DNS rule
for every name, pass. Other packets for the proxy are dropped.

A proxy writes a heartbeat every 20 ms. An old heartbeat means that the proxy is stopped, or
gets too little CPU time.

The column TCP names the device over which connections reach the proxy's sockets. After a
proxy has ended, connections wait a few seconds for the next proxy; after that, new
connections are dropped.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			status, err := invocation.Ask(cmd.Context(), inv, invocation.Datapath,
				datapathv1.DatapathServiceClient.GetStatus, &datapathv1.GetStatusRequest{})
			if err != nil {
				return err
			}
			return inv.Show(message.List(status.GetProxies()), func(w io.Writer) { write(w, status) })
		},
	}
}

var columns = []output.Column[*datapathv1.ProxyStatus]{
	{Header: "PROXY", Cell: func(p *datapathv1.ProxyStatus) any { return output.Enum(p.GetProxy(), "PROXY_") }},
	{Header: "ATTACHED", Cell: func(p *datapathv1.ProxyStatus) any { return attached(p) }},
	{Header: "PID", Cell: func(p *datapathv1.ProxyStatus) any { return number(p.GetPid()) }},
	{Header: "DEVICE", Cell: func(p *datapathv1.ProxyStatus) any { return p.GetDevice() }},
	{Header: "HEARTBEAT", Cell: func(p *datapathv1.ProxyStatus) any { return heartbeat(p) }},
	{Header: "TCP", Cell: func(p *datapathv1.ProxyStatus) any { return tcp(p) }},
	{Header: "ATTACHMENTS", Cell: func(p *datapathv1.ProxyStatus) any { return p.GetAttachments() }},
}

func attached(p *datapathv1.ProxyStatus) string {
	if !p.GetAttached() {
		return "no"
	}
	return "for " + output.Since(output.When(p.GetAttachedSince()))
}

func tcp(p *datapathv1.ProxyStatus) string {
	switch {
	case p.GetTcpAttached():
		return "by " + p.GetTcpDevice()
	case p.GetTcpWaiting():
		return "waiting"
	}
	return "no"
}

func heartbeat(p *datapathv1.ProxyStatus) string {
	if p.GetHeartbeatAge() == nil {
		return ""
	}
	return p.GetHeartbeatAge().AsDuration().Round(time.Millisecond).String() + " ago"
}

func number(n uint32) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprint(n)
}

// counted are the reasons of packets for proxies, in the order in which they are shown.
var counted = []struct {
	reason datapathv1.Reason
	text   string
}{
	{datapathv1.Reason_REASON_FORWARDED_TO_PROXY, "forwarded to a proxy"},
	{datapathv1.Reason_REASON_PROXY_AWAY, "dropped: the proxy did not run"},
	{datapathv1.Reason_REASON_PROXY_BUDGET, "dropped: beyond the share of the queue"},
	{datapathv1.Reason_REASON_PROXY_FORGED, "dropped: from a proxy, without a redirected connection"},
	{datapathv1.Reason_REASON_NO_PROXY, "dropped: there is no proxy for the rule"},
}

func write(w io.Writer, status *datapathv1.GetStatusResponse) {
	if len(status.GetProxies()) == 0 {
		fmt.Fprintln(w, "This datapath has no proxies.")
		return
	}
	output.Table(w, columns, status.GetProxies())
	for _, p := range status.GetProxies() {
		if p.GetProblem() != "" {
			output.Row(w, "Problem", output.Enum(p.GetProxy(), "PROXY_")+": "+p.GetProblem())
		}
		if p.GetTcpProblem() != "" {
			output.Row(w, "Problem", output.Enum(p.GetProxy(), "PROXY_")+", TCP: "+p.GetTcpProblem())
		}
	}
	sums := make(map[datapathv1.Reason]uint64)
	for _, c := range status.GetPacketCounters() {
		sums[c.GetReason()] += c.GetPackets()
	}
	fmt.Fprintln(w)
	output.Row(w, "PACKETS", "RESULT")
	for _, c := range counted {
		output.Row(w, sums[c.reason], c.text)
	}
}

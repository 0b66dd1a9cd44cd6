// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package explain shows how the datapath would handle a connection, step by step.
package explain

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/peer"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policy"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/service"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	"github.com/sluice-net/sluice/model/identity"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// Command is `explain`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var o peer.Flags
	at, name := "", ""
	cmd := &cobra.Command{
		Use:   "explain --from POD --to POD --port PORT",
		Short: "Show how the datapath would handle a connection, step by step",
		Long: `Show how the datapath would handle a connection, step by step: the eBPF programs evaluate
its first packet on the live maps, or with --source-port the next packet of an existing
connection. Nothing is changed and no packet is sent.
If the destination is the frontend of a service, such as a cluster IP, each of its
backends is evaluated, because policies see the backend and not the service.

The command asks only this node. If one of the two pods is on another node, that node
enforces the policies of this pod, and the first line of the output names the node.
` + "`sluice policy explain`" + ` asks the policy service instead, which knows the text of the
rules.

With --at, nothing is evaluated: the command shows the latest verdict on such a connection
that sluice-hubble has stored before that time, with the rule and the policy revision that
decided. sluice-hubble must run on the node.

With --dns, sluice-policy explains a DNS query for the name: which policy and rule allow or
refuse it, and to which learned addresses of the name the sender may connect.

--from and --to take a pod NAMESPACE/NAME or a container of this node, an address, or the
identity or labels of exactly one pod of this node.`,
		Example: `  sluice explain --from shop/client --to 10.244.0.2 --port 80
  sluice explain --from k8s:app=client --to k8s:app=web --port 53/udp -6
  sluice explain --from shop/client --to shop/web --port 80 --at 1h
  sluice explain --from shop/client --to kube-system/coredns --dns api.example.com`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case at != "" && name != "":
				return invocation.Usagef("--dns cannot be combined with --at, because only the present policies explain a query")
			case name != "" && o.SourcePort != 0:
				return invocation.Usagef("--dns cannot be combined with --source-port")
			case name != "":
				return policy.ExplainLookup(cmd.Context(), inv, o, name)
			case at != "":
				return runStored(cmd.Context(), inv, o, at, time.Now())
			}
			conn, err := peer.ResolveConnection(cmd.Context(), inv, o, resolveLocal)
			if err != nil {
				return err
			}
			return run(cmd.Context(), inv, conn)
		},
	}
	o.Add(cmd)
	o.AddSourcePort(cmd.Flags())
	policy.AddDNSFlag(cmd, &name)
	cmd.Flags().StringVar(&at, "at", "",
		"show the stored verdict before this time, or this long ago, in the forms of sluice observe --since")
	return cmd
}

// resolveLocal resolves a peer to an address, which the kernel maps to an identity.
func resolveLocal(ctx context.Context, inv *invocation.Invocation, text, namespace string) (peer.Peer, error) {
	p := peer.Peer{Text: text}
	switch {
	case peer.IsAddress(text):
		a, err := netip.ParseAddr(text)
		if err != nil || a.Zone() != "" {
			return p, invocation.Usagef("%q: an address of a peer has no zone", text)
		}
		p.Addresses = []netip.Addr{a.Unmap()}
		return p, nil
	case peer.IsLabels(text):
		labels, err := peer.ParseLabels(text, namespace)
		if err != nil {
			return p, err
		}
		p.Labels = labels
	default:
		var err error
		if p, err = peer.Resolve(ctx, inv, text, namespace); err != nil || len(p.Addresses) > 0 {
			return p, err
		}
	}
	endpoints, err := endpoint.List(ctx, inv)
	if err != nil {
		return p, err
	}
	var found []peer.Peer
	var names []string
	for _, e := range endpoints {
		texts := workload.LabelTexts(e.GetLabels())
		all := p.Identity != 0 && e.GetIdentity() == p.Identity || p.Identity == 0
		for _, want := range workload.LabelTexts(p.Labels) {
			all = all && slices.Contains(texts, want)
		}
		if all {
			found = append(found, p.At(e))
			names = append(names, workload.OwnerOf(e.GetOwner()).String())
		}
	}
	switch len(found) {
	case 0:
		return p, invocation.Usagef("no pod of this node is %s; the datapath evaluates addresses, so give a pod of this "+
			"node or an address",
			text)
	case 1:
		return found[0], nil
	default:
		return p, invocation.Usagef("%s could be %s", text, strings.Join(names, " or "))
	}
}

// Explanation is the answer of one node, in the form of `explain -o json`.
type Explanation struct {
	*datapathv1.ExplainResponse

	asked
}

// asked is the connection to explain, and the nodes that were not asked about it.
type asked struct {
	From     string `json:"from"`
	To       string `json:"to"`
	Protocol string `json:"protocol"`
	Port     uint32 `json:"port"`
	// NotAsked are other nodes that enforce the policies of an end.
	NotAsked []peer.NotAsked `json:"notAsked"`
}

// MarshalJSON implements json.Marshaler.
func (x Explanation) MarshalJSON() ([]byte, error) {
	facts := []message.Fact{
		{Key: "from", Value: x.From},
		{Key: "to", Value: x.To},
		{Key: "protocol", Value: x.Protocol},
		{Key: "port", Value: x.Port},
	}
	if len(x.NotAsked) > 0 {
		facts = append(facts, message.Fact{Key: "notAsked", Value: x.NotAsked})
	}
	return message.Of(x.ExplainResponse, facts...).MarshalJSON()
}

// UnmarshalJSON implements json.Unmarshaler.
func (x *Explanation) UnmarshalJSON(data []byte) error {
	x.ExplainResponse = &datapathv1.ExplainResponse{}
	if err := json.Unmarshal(data, &x.asked); err != nil {
		return err
	}
	return message.Unmarshal(data, x.ExplainResponse)
}

// endText returns "10.244.0.2:80".
func endText(address string, port uint32) string {
	return net.JoinHostPort(address, strconv.FormatUint(uint64(port), 10))
}

func run(ctx context.Context, inv *invocation.Invocation, conn peer.Connection) error {
	from, _ := conn.From.Address(conn.V6)
	to, _ := conn.To.Address(conn.V6)
	r, err := invocation.Ask(ctx, inv, invocation.Observer, datapathv1.ObserverServiceClient.Explain,
		&datapathv1.ExplainRequest{
			SourceAddress: from.String(), DestinationAddress: to.String(), Protocol: netv1.Protocol(conn.Protocol),
			SourcePort: conn.SourcePort, DestinationPort: conn.Port,
		})
	if err != nil {
		return err
	}
	x := Explanation{r, asked{
		From: from.String(), To: to.String(), Protocol: ports.ProtocolText(conn.Protocol), Port: conn.Port,
	}}
	switch r.GetVerdict() {
	case datapathv1.Verdict_VERDICT_FORWARDED, datapathv1.Verdict_VERDICT_AUDITED:
		x.NotAsked = peer.NotAskedOf(OtherNode(r.GetSource()), OtherNode(r.GetDestination()))
	}
	return inv.Show(x, func(w io.Writer) { x.lines(w, conn) })
}

func (x Explanation) lines(w io.Writer, conn peer.Connection) {
	what := ports.ServiceText(conn.Protocol, conn.Port)
	fmt.Fprintln(w, output.Printable(fmt.Sprintf("%s -> %s, %s: %s", x.From, x.To, what, x.Headline())))
	serviceLines(w, x.GetService(), conn.Protocol)
	fmt.Fprintln(w)
	output.Row(w, "END", "POD", "IDENTITY", "IDENTITY CLASS", "IPCACHE", "LABELS")
	row(w, "from", x.GetSource())
	row(w, "to", x.GetDestination())
	if Translated(x.GetService()) {
		for _, b := range x.GetService().GetBackends() {
			row(w, "to "+service.AddressText(b.GetAddress(), b.GetPort()), b.GetPeer())
		}
		verdicts(w, x.GetService(), conn.SourcePort != 0)
		return
	}
	sideLines(w, "Egress, the sender's policy", x.GetEgress())
	sideLines(w, "Ingress, the receiver's policy", x.GetIngress())
	if x.GetDestination() == nil || x.GetVerdict() == datapathv1.Verdict_VERDICT_UNSPECIFIED {
		return // no packet was evaluated
	}
	fmt.Fprintln(w)
	switch t := x.GetConnection(); {
	case t == nil && conn.SourcePort == 0:
		fmt.Fprintln(w, "Connection: not shown; --source-port selects one")
	case t == nil:
		fmt.Fprintln(w, "Connection: none is tracked")
	default:
		connectionLines(w, t)
	}
}

// Headline returns the node's verdict on the connection, with the reason.
func (x Explanation) Headline() string {
	if x.GetService() != nil && x.GetReason() == datapathv1.Reason_REASON_UNSPECIFIED {
		return serviceHeadline(x.GetService(), x.GetVerdict())
	}
	if len(x.NotAsked) > 0 {
		return fmt.Sprintf("%s by this node (%s)%s", verdictText(x.GetVerdict()), reasonText(x.GetReason()),
			peer.NotAskedText(x.NotAsked))
	}
	return VerdictText(x.GetVerdict(), x.GetReason())
}

// VerdictText returns a verdict with its reason: "DROPPED (policy-denied)".
func VerdictText(v datapathv1.Verdict, r datapathv1.Reason) string {
	return verdictText(v) + " (" + reasonText(r) + ")"
}

func verdictText(v datapathv1.Verdict) string { return strings.ToUpper(output.Enum(v, "VERDICT_")) }

func reasonText(r datapathv1.Reason) string { return output.Enum(r, "REASON_") }

// OtherNode returns the other node that enforces the policies of an end; empty if this node does, or if the end is
// not a pod.
func OtherNode(p *datapathv1.ExplainedPeer) string {
	if p.GetOwner() != nil {
		return ""
	}
	if id := identity.Numeric(p.GetIdentity()); id.OfNode() || id == identity.UnknownInCluster {
		return ""
	}
	return p.GetNodeName()
}

// row writes one end of the connection as a row of a table.
func row(w io.Writer, end string, p *datapathv1.ExplainedPeer) {
	if p == nil {
		return
	}
	pod := "none of this node"
	switch {
	case p.GetPod() != nil:
		pod = endpoint.PodText(p.GetPod())
	case p.GetOwner() != nil:
		pod = workload.OwnerOf(p.GetOwner()).String()
	case p.GetIdentity() == uint32(identity.Host):
		pod = "this node"
	case p.GetNodeName() != "":
		pod = "on " + p.GetNodeName()
	}
	number, class := fmt.Sprint(p.GetIdentity()), fmt.Sprint(p.GetIdentityClass())
	switch {
	case p.GetIdentity() == 0:
		number, class = "not asked", "-"
	case !p.GetKnown():
		class = "not known"
	}
	labels := workload.Text(workload.LabelTextsInOrder(p.GetLabels()))
	output.Row(w, end, pod, number, class, p.GetIpcachePrefix(), labels)
}

func connectionLines(w io.Writer, c *datapathv1.Connection) {
	var states []string
	for _, s := range c.GetStates() {
		states = append(states, output.Enum(s, "CONNECTION_STATE_"))
	}
	if c.GetInTransit() {
		states = append(states, "in transit")
	}
	fmt.Fprintln(w, output.Printable(fmt.Sprintf("Connection: %s -> %s %s, %s",
		endText(c.GetInitiatorAddress(), c.GetInitiatorPort()), endText(c.GetResponderAddress(), c.GetResponderPort()),
		ports.ProtocolText(uint32(c.GetProtocol())), strings.Join(states, ", "))))
	if c.GetSourceAddress() != "" {
		output.Row(w, "  backend sees", endText(c.GetSourceAddress(), c.GetSourcePort()))
	}
	output.Row(w, "  last packet", output.Since(output.When(c.GetLastSeenTime()))+" ago")
	output.Row(w, "  next packet", VerdictText(c.GetNextVerdict(), c.GetNextReason()))
	if c.GetInTransit() {
		return // no policy was evaluated
	}
	standing := "valid: packets are not evaluated again"
	if !c.GetCurrent() {
		standing = "outdated: the next packet is evaluated again"
	}
	output.Row(w, "  verdict", standing)
	output.Row(w, "  rules", fmt.Sprintf("egress %s, ingress %s", ruleNumber(c.GetEgressRule()),
		ruleNumber(c.GetIngressRule())))
}

func ruleNumber(n uint32) string {
	if n == 0 {
		return "default"
	}
	return strconv.FormatUint(uint64(n), 10)
}

func sideLines(w io.Writer, title string, s *datapathv1.ExplainedSide) {
	if s == nil {
		return
	}
	v := s.GetVerdict()
	fmt.Fprintf(w, "\n%s\n", output.Printable(title+": "+verdict.Text(v)))
	output.Row(w, "  table", verdict.TableText(v.GetTable()))
	output.Row(w, "  epoch", v.GetEpoch())
	if v.GetRevision() != 0 {
		output.Row(w, "  policy revision", v.GetRevision())
	}
	if v.GetTable() <= verdict.TableWaiting {
		return
	}
	from := "by default for its kind"
	if s.GetIdentityRow() {
		from = "by a row of the table"
	}
	output.Row(w, "  class by identity", fmt.Sprintf("%d, %s", s.GetIdentityClass(), from))
	if s.GetAddressPrefix() != "" || s.GetAddressClass() != 0 {
		prefix := "in no prefix"
		if s.GetAddressPrefix() != "" {
			prefix = "in " + s.GetAddressPrefix()
		}
		output.Row(w, "  class by address", fmt.Sprintf("%d, %s", s.GetAddressClass(), prefix))
	}
	output.Row(w, "  rule", ruleNumber(v.GetRule()))
}

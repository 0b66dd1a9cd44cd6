// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package explain shows the steps by which the kernel's own tables decide on a connection.
package explain

import (
	"context"
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
	"github.com/sluice-net/sluice/cmd/sluice/internal/peer"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	"github.com/sluice-net/sluice/model/identity"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// Command is `explain`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var o peer.Flags
	cmd := &cobra.Command{
		Use:   "explain --from POD --to POD --port PORT",
		Short: "Say what the kernel's own tables say to a connection, step by step",
		Long: `Say what the kernel's own tables say to a connection, step by step: the eBPF
programs evaluate a first packet on the live maps, and the next packet of the
connection that --source-port names; nothing is changed and no packet is sent.
If the destination is the frontend of a service, such as a cluster IP, each of its
backends is evaluated, because policies see the backend and not the service.
Only this node is asked. If an end is a pod of another node, the first line says
that the other node, which enforces the policies of that pod, was not asked.
` + "`sluice policy explain`" + ` asks the policy service instead, which knows the rules'
text.

Each end is a pod (the start of its container's id), an address, or the identity
or labels of exactly one pod of this node.`,
		Example: `  sluice explain --from 4caf --to 10.244.0.2 --port 80
  sluice explain --from k8s:app=client --to k8s:app=web --port 53/udp -6`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			conn, err := peer.ResolveConnection(cmd.Context(), inv, o, resolveLocal)
			if err != nil {
				return err
			}
			return run(cmd.Context(), inv, conn)
		},
	}
	o.Add(cmd)
	o.AddSourcePort(cmd.Flags())
	return cmd
}

// resolveLocal finds a peer that has an address. The kernel's tables map the address to an identity.
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
		return p, invocation.Usagef("no pod of this node is %s; the kernel evaluates addresses, so name a pod or an address",
			text)
	case 1:
		return found[0], nil
	default:
		return p, invocation.Usagef("%s could be %s", text, strings.Join(names, " or "))
	}
}

// Explanation is the answer of one node, as `explain` prints it.
type Explanation struct {
	From       string             `json:"from"`
	To         string             `json:"to"`
	Protocol   string             `json:"protocol"`
	Port       uint32             `json:"port"`
	Verdict    string             `json:"verdict"`
	Reason     string             `json:"reason"`
	Source     explainedPeer      `json:"source"`
	Dest       *explainedPeer     `json:"destination,omitempty"` // not set for a service that is translated
	Egress     *explainedSide     `json:"egress,omitempty"`
	Ingress    *explainedSide     `json:"ingress,omitempty"`
	Connection *trackedConnection `json:"connection,omitempty"`
	Service    *explainedService  `json:"service,omitempty"`
	// NotAsked are the other nodes that decide on a side.
	NotAsked []peer.NotAsked `json:"notAsked,omitempty"`
}

type explainedPeer struct {
	Identity      uint32          `json:"identity"`
	Known         bool            `json:"known"`
	IdentityClass uint32          `json:"identityClass"`
	Owner         *workload.Owner `json:"owner,omitempty"`
	EndpointID    uint32          `json:"endpointId"`
	IPCachePrefix string          `json:"ipcachePrefix,omitempty"`
	Labels        []string        `json:"labels,omitempty"`
	Node          string          `json:"node,omitempty"`
}

type explainedSide struct {
	Verdict       verdict.Side `json:"verdict"`
	IdentityClass uint32       `json:"identityClass"`
	IdentityRow   bool         `json:"identityRow"`
	AddressClass  uint32       `json:"addressClass"`
	AddressPrefix string       `json:"addressPrefix,omitempty"`
}

type trackedConnection struct {
	Initiator   string     `json:"initiator"`
	Responder   string     `json:"responder"`
	Protocol    string     `json:"protocol"`
	State       []string   `json:"state"`
	LastSeen    *time.Time `json:"lastSeen,omitempty"`
	Current     bool       `json:"current"`
	EgressRule  uint32     `json:"egressRule,omitempty"`
	IngressRule uint32     `json:"ingressRule,omitempty"`
	NextVerdict string     `json:"nextVerdict"`
	NextReason  string     `json:"nextReason"`
	InTransit   bool       `json:"inTransit,omitempty"`
	Source      string     `json:"source,omitempty"` // of this node, that the responder sees in transit
}

// endText is one end of a connection, "10.244.0.2:80".
func endText(address string, port uint32) string {
	return net.JoinHostPort(address, strconv.FormatUint(uint64(port), 10))
}

// explainedPeerOf shows an end; nil if there is none.
func explainedPeerOf(p *datapathv1.ExplainedPeer) *explainedPeer {
	if p == nil {
		return nil
	}
	shown := &explainedPeer{
		Identity: p.GetIdentity(), Known: p.GetKnown(), IdentityClass: p.GetIdentityClass(), EndpointID: p.GetEndpointIndex(),
		IPCachePrefix: p.GetIpcachePrefix(), Labels: workload.LabelTextsInOrder(p.GetLabels()),
		Node: p.GetNodeName(),
	}
	if p.GetOwner() != nil {
		o := workload.OwnerOf(p.GetOwner())
		shown.Owner = &o
	}
	return shown
}

func explainedSideOf(s *datapathv1.ExplainedSide) *explainedSide {
	if s == nil {
		return nil
	}
	shown := &explainedSide{
		IdentityClass: s.GetIdentityClass(), IdentityRow: s.GetIdentityRow(),
		AddressClass: s.GetAddressClass(), AddressPrefix: s.GetAddressPrefix(),
	}
	if v := verdict.SideOf(s.GetVerdict()); v != nil {
		shown.Verdict = *v
	}
	return shown
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
	x := Explanation{
		From: from.String(), To: to.String(), Protocol: ports.ProtocolText(conn.Protocol), Port: conn.Port,
		Verdict: output.Enum(r.GetVerdict(), "VERDICT_"), Reason: output.Enum(r.GetReason(), "REASON_"),
		Source: *explainedPeerOf(r.GetSource()), Dest: explainedPeerOf(r.GetDestination()),
		Egress: explainedSideOf(r.GetEgress()), Ingress: explainedSideOf(r.GetIngress()),
		Connection: connectionOf(r.GetConnection()), Service: explainedServiceOf(r.GetService(), conn.Protocol),
	}
	if x.Verdict == "forwarded" || x.Verdict == "audited" {
		x.NotAsked = peer.NotAskedOf(x.Source.otherNode(), x.Dest.otherNode())
	}
	return inv.Show(x, func(w io.Writer) { x.lines(w, ports.ServiceText(conn.Protocol, conn.Port), conn.SourcePort) })
}

func connectionOf(t *datapathv1.Connection) *trackedConnection {
	if t == nil {
		return nil
	}
	shown := &trackedConnection{
		Initiator: endText(t.GetInitiatorAddress(), t.GetInitiatorPort()),
		Responder: endText(t.GetResponderAddress(), t.GetResponderPort()),
		Protocol:  ports.ProtocolText(uint32(t.GetProtocol())),
		LastSeen:  output.When(t.GetLastSeenTime()),
		Current:   t.GetCurrent(), EgressRule: t.GetEgressRule(), IngressRule: t.GetIngressRule(),
		NextVerdict: output.Enum(t.GetNextVerdict(), "VERDICT_"), NextReason: output.Enum(t.GetNextReason(), "REASON_"),
	}
	for _, s := range t.GetStates() {
		shown.State = append(shown.State, output.Enum(s, "CONNECTION_STATE_"))
	}
	shown.InTransit = t.GetInTransit()
	if t.GetSourceAddress() != "" {
		shown.Source = endText(t.GetSourceAddress(), t.GetSourcePort())
	}
	return shown
}

func (x Explanation) lines(w io.Writer, service string, sourcePort uint32) {
	fmt.Fprintln(w, output.Printable(fmt.Sprintf("%s -> %s, %s: %s", x.From, x.To, service, x.Headline())))
	x.Service.lines(w)
	fmt.Fprintln(w)
	output.Row(w, "END", "POD", "IDENTITY", "IDENTITY CLASS", "IPCACHE", "LABELS")
	x.Source.row(w, "from")
	x.Dest.row(w, "to")
	if x.Service.Translated() {
		for _, b := range x.Service.Backends {
			b.Peer.row(w, "to "+b.text())
		}
		x.Service.verdicts(w, sourcePort != 0)
		return
	}
	x.Egress.lines(w, "Egress, what the sender's policy says")
	x.Ingress.lines(w, "Ingress, what the receiver's policy says")
	if x.Dest == nil || x.Verdict == "" {
		return // no packet was evaluated
	}
	fmt.Fprintln(w)
	switch t := x.Connection; {
	case t == nil && sourcePort == 0:
		fmt.Fprintln(w, "Connection: not asked for; --source-port names one")
	case t == nil:
		fmt.Fprintln(w, "Connection: none is tracked")
	default:
		t.lines(w)
	}
}

// Headline returns the verdict of the node on the connection.
func (x Explanation) Headline() string {
	if x.Service != nil && x.Reason == "" {
		return x.Service.headline(x.Verdict)
	}
	if len(x.NotAsked) > 0 {
		return fmt.Sprintf("%s by this node (%s)%s", strings.ToUpper(x.Verdict), x.Reason, peer.NotAskedText(x.NotAsked))
	}
	return fmt.Sprintf("%s (%s)", strings.ToUpper(x.Verdict), x.Reason)
}

// otherNode is the other node that enforces the policies of the end; empty: this node does, or the end is no pod.
func (p *explainedPeer) otherNode() string {
	if p == nil || p.Owner != nil {
		return ""
	}
	if id := identity.Numeric(p.Identity); id.OfNode() || id == identity.UnknownInCluster {
		return ""
	}
	return p.Node
}

// row is a line of the table of ends.
func (p *explainedPeer) row(w io.Writer, end string) {
	if p == nil {
		return
	}
	pod := "none of this node"
	switch {
	case p.Owner != nil:
		pod = p.Owner.String()
	case p.Identity == uint32(identity.Host):
		pod = "this node"
	case p.Node != "":
		pod = "on " + p.Node
	}
	class := fmt.Sprint(p.IdentityClass)
	if !p.Known {
		class = "not known"
	}
	number := fmt.Sprint(p.Identity)
	if p.Identity == 0 {
		number, class = "not asked", "-"
	}
	output.Row(w, end, pod, number, class, p.IPCachePrefix, workload.Text(p.Labels))
}

func (t *trackedConnection) lines(w io.Writer) {
	state := strings.Join(t.State, ", ")
	if t.InTransit {
		state += ", in transit"
	}
	line := fmt.Sprintf("Connection: %s -> %s %s, %s", t.Initiator, t.Responder, t.Protocol, state)
	fmt.Fprintln(w, output.Printable(line))
	if t.Source != "" {
		output.Row(w, "  backend sees", t.Source)
	}
	output.Row(w, "  last packet", output.Since(t.LastSeen)+" ago")
	standing := "stands: packets are not evaluated again"
	if !t.Current {
		standing = "outdated: the next packet is evaluated again"
	}
	next := fmt.Sprintf("%s (%s)", strings.ToUpper(t.NextVerdict), t.NextReason)
	output.Row(w, "  next packet", output.Printable(next))
	if t.InTransit {
		return // no policy was asked
	}
	output.Row(w, "  verdict", standing)
	output.Row(w, "  rules", fmt.Sprintf("egress %s, ingress %s", ruleNumber(t.EgressRule), ruleNumber(t.IngressRule)))
}

func ruleNumber(n uint32) string {
	if n == 0 {
		return "default"
	}
	return strconv.FormatUint(uint64(n), 10)
}

func (s *explainedSide) lines(w io.Writer, title string) {
	if s == nil {
		return
	}
	fmt.Fprintf(w, "\n%s\n", output.Printable(fmt.Sprintf("%s: %s %s", title, s.Verdict.Verdict, s.Verdict.Because())))
	output.Row(w, "  table", verdict.TableText(s.Verdict.Table))
	output.Row(w, "  epoch", s.Verdict.Epoch)
	if s.Verdict.Revision != 0 {
		output.Row(w, "  policy revision", s.Verdict.Revision)
	}
	if s.Verdict.Table <= verdict.TableWaiting {
		return
	}
	from := "by default for its kind"
	if s.IdentityRow {
		from = "by a row of the table"
	}
	output.Row(w, "  class by identity", fmt.Sprintf("%d, %s", s.IdentityClass, from))
	if s.AddressPrefix != "" || s.AddressClass != 0 {
		prefix := "in no prefix"
		if s.AddressPrefix != "" {
			prefix = "in " + s.AddressPrefix
		}
		output.Row(w, "  class by address", fmt.Sprintf("%d, %s", s.AddressClass, prefix))
	}
	output.Row(w, "  rule", ruleNumber(s.Verdict.Rule))
}

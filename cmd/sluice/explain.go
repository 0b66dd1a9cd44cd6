// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

func (c *command) explainCommand() *cobra.Command {
	var o connectionFlags
	cmd := &cobra.Command{
		Use:   "explain --from POD --to POD --port PORT",
		Short: "Say what the kernel's own tables say to a connection, step by step",
		Long: `Say what the kernel's own tables say to a connection, step by step: the lookup of
the eBPF programs is done on the live maps, nothing is changed and no packet is
sent. ` + "`sluice policy explain`" + ` asks the policy service instead, which knows the
rules' text.

Each end is a pod (the start of its container's id), an address, or the identity
or labels of exactly one pod of this node.`,
		Example: `  sluice explain --from 4caf --to 10.244.0.2 --port 80
  sluice explain --from k8s:app=client --to k8s:app=web --port 53/udp -6`,
		Args: args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			conn, err := c.resolveConnection(cmd.Context(), o, func(ctx context.Context, c *command, text string) (peer, error) { return c.resolveLocal(ctx, text) })
			if err != nil {
				return err
			}
			return c.explainInKernel(cmd.Context(), conn)
		},
	}
	o.add(cmd)
	cmd.Flags().UintVar(&o.sourcePort, "source-port", 0, "source port (ICMP: identifier), to find the state of one connection")
	return cmd
}

// resolveLocal finds a peer that has an address.
func (c *command) resolveLocal(ctx context.Context, text string) (peer, error) {
	p, err := c.resolvePeer(ctx, text)
	if err != nil || len(p.addresses) > 0 {
		return p, err
	}
	endpoints, err := c.endpoints(ctx)
	if err != nil {
		return p, err
	}
	var found []peer
	var names []string
	for _, e := range endpoints {
		texts := labelTexts(e.GetLabels())
		all := p.identity != 0 && e.GetIdentity() == p.identity || p.identity == 0
		for _, want := range labelTexts(p.labels) {
			all = all && slices.Contains(texts, want)
		}
		if all {
			found = append(found, p.at(e))
			names = append(names, ownerOf(e.GetOwner()).String())
		}
	}
	switch len(found) {
	case 0:
		return p, usagef("no pod of this node is %s; the kernel judges addresses, so name a pod or an address", text)
	case 1:
		return found[0], nil
	default:
		return p, usagef("%s could be %s", text, strings.Join(names, " or "))
	}
}

// kernelExplanation is what `explain` prints.
type kernelExplanation struct {
	From       string             `json:"from"`
	To         string             `json:"to"`
	Protocol   string             `json:"protocol"`
	Port       uint32             `json:"port"`
	Verdict    string             `json:"verdict"`
	Reason     string             `json:"reason"`
	Source     explainedPeer      `json:"source"`
	Dest       explainedPeer      `json:"destination"`
	Egress     *explainedSide     `json:"egress,omitempty"`
	Ingress    *explainedSide     `json:"ingress,omitempty"`
	Connection *trackedConnection `json:"connection,omitempty"`
}

type explainedPeer struct {
	Identity     uint32   `json:"identity"`
	Known        bool     `json:"known"`
	NodeClass    uint32   `json:"nodeClass"`
	Owner        *owner   `json:"owner,omitempty"`
	Slot         uint32   `json:"slot"`
	IPCacheEntry string   `json:"ipcacheEntry,omitempty"`
	Labels       []string `json:"labels,omitempty"`
}

type explainedSide struct {
	Verdict       sideVerdict `json:"verdict"`
	IdentityClass uint32      `json:"identityClass"`
	IdentityRow   bool        `json:"identityRow"`
	AddressClass  uint32      `json:"addressClass"`
	AddressBlock  string      `json:"addressBlock,omitempty"`
}

// sideVerdict is what one side's policy said.
type sideVerdict struct {
	Verdict    string   `json:"verdict"`
	DecidedBy  string   `json:"decidedBy"`
	Rule       uint32   `json:"rule,omitempty"`
	Sources    []string `json:"ruleSources,omitempty"`
	Table      uint32   `json:"table"`
	Generation uint32   `json:"generation"`
	Revision   uint64   `json:"revision"`
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
}

func sideVerdictOf(v *datapathv1.SideVerdict) *sideVerdict {
	if v == nil {
		return nil
	}
	return &sideVerdict{
		Verdict: enum(v.GetVerdict(), "VERDICT_"), DecidedBy: v.GetDecidedBy(), Rule: v.GetRule(), Sources: v.GetRuleSources(),
		Table: v.GetTable(), Generation: v.GetGeneration(), Revision: v.GetRevision(),
	}
}

// because is what decided, in words.
func (v sideVerdict) because() string {
	switch v.DecidedBy {
	case "rule":
		if len(v.Sources) > 0 {
			return "by " + strings.Join(v.Sources, " and ")
		}
		return fmt.Sprintf("by rule %d of table %d", v.Rule, v.Table)
	case "default":
		if v.Verdict == "forwarded" {
			return "because no rule denies it"
		}
		return "because no rule allows it"
	case "host-allow":
		return "because the own node may"
	case "unknown-identity":
		return "because the identity is not known"
	case "no-table":
		switch v.Table {
		case tableAllow:
			return "because no policy selects it"
		case tableWaiting:
			return "because its policy is not known yet"
		default:
			return "because it has no table"
		}
	default:
		return strings.TrimSpace(v.DecidedBy)
	}
}

// Numbers of tables that are no tables.
const (
	tableDeny    = 0
	tableAllow   = 1
	tableWaiting = 2
)

func tableText(n uint32) string {
	switch n {
	case tableDeny:
		return "0 (denies everything)"
	case tableAllow:
		return "1 (allows everything)"
	case tableWaiting:
		return "2 (waits for a policy)"
	default:
		return strconv.FormatUint(uint64(n), 10)
	}
}

func explainedPeerOf(p *datapathv1.ExplainedPeer) explainedPeer {
	shown := explainedPeer{
		Identity: p.GetIdentity(), Known: p.GetKnown(), NodeClass: p.GetNodeClass(), Slot: p.GetSlot(), IPCacheEntry: p.GetIpcacheEntry(), Labels: p.GetLabels(),
	}
	if p.GetOwner() != nil {
		o := ownerOf(p.GetOwner())
		shown.Owner = &o
	}
	return shown
}

func explainedSideOf(s *datapathv1.ExplainedSide) *explainedSide {
	if s == nil {
		return nil
	}
	shown := &explainedSide{IdentityClass: s.GetIdentityClass(), IdentityRow: s.GetIdentityRow(), AddressClass: s.GetAddressClass(), AddressBlock: s.GetAddressBlock()}
	if v := sideVerdictOf(s.GetVerdict()); v != nil {
		shown.Verdict = *v
	}
	return shown
}

func (c *command) explainInKernel(ctx context.Context, conn connection) error {
	from, _ := conn.from.address(conn.v6)
	to, _ := conn.to.address(conn.v6)
	dial, err := c.dial("datapath")
	if err != nil {
		return err
	}
	defer dial.Close()
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	r, err := datapathv1.NewObserverServiceClient(dial).Explain(ctx, &datapathv1.ExplainRequest{
		SourceAddress: from.AsSlice(), DestinationAddress: to.AsSlice(), Protocol: conn.protocol, SourcePort: conn.sourcePort, DestinationPort: conn.port,
	})
	if err != nil {
		return err
	}
	x := kernelExplanation{
		From: from.String(), To: to.String(), Protocol: protocolText(conn.protocol), Port: conn.port,
		Verdict: enum(r.GetVerdict(), "VERDICT_"), Reason: r.GetReason(),
		Source: explainedPeerOf(r.GetSource()), Dest: explainedPeerOf(r.GetDestination()),
		Egress: explainedSideOf(r.GetEgress()), Ingress: explainedSideOf(r.GetIngress()),
	}
	if t := r.GetConnection(); t != nil {
		x.Connection = &trackedConnection{
			Initiator: t.GetInitiator(), Responder: t.GetResponder(), Protocol: protocolText(t.GetProtocol()), State: t.GetState(), LastSeen: when(t.GetLastSeen()),
			Current: t.GetCurrent(), EgressRule: t.GetEgressRule(), IngressRule: t.GetIngressRule(),
		}
	}
	return c.show(x, func(w io.Writer) { x.lines(w, serviceText(conn.protocol, conn.port), conn.sourcePort) })
}

func (x kernelExplanation) lines(w io.Writer, service string, sourcePort uint32) {
	fmt.Fprintln(w, printable(fmt.Sprintf("%s -> %s, %s: %s (%s)", x.From, x.To, service, strings.ToUpper(x.Verdict), x.Reason)))
	fmt.Fprintln(w)
	row(w, "END", "POD", "IDENTITY", "NODE CLASS", "IPCACHE", "LABELS")
	for _, end := range []struct {
		name string
		peer explainedPeer
	}{{"from", x.Source}, {"to", x.Dest}} {
		pod := "none of this node"
		switch {
		case end.peer.Owner != nil:
			pod = end.peer.Owner.String()
		case end.peer.Identity == identityHost:
			pod = "this node"
		}
		class := fmt.Sprint(end.peer.NodeClass)
		if !end.peer.Known {
			class = "not known"
		}
		row(w, end.name, pod, end.peer.Identity, class, end.peer.IPCacheEntry, workloadText(end.peer.Labels))
	}
	x.Egress.lines(w, "Egress, what the sender's policy says")
	x.Ingress.lines(w, "Ingress, what the receiver's policy says")
	fmt.Fprintln(w)
	t := x.Connection
	switch {
	case t == nil && sourcePort == 0:
		fmt.Fprintln(w, "Connection: not asked for; --source-port names one")
		return
	case t == nil:
		fmt.Fprintln(w, "Connection: none is tracked")
		return
	}
	fmt.Fprintln(w, printable(fmt.Sprintf("Connection: %s -> %s %s, %s", t.Initiator, t.Responder, t.Protocol, strings.Join(t.State, ", "))))
	row(w, "  last packet", since(t.LastSeen)+" ago")
	standing := "stands: packets pass without a lookup"
	if !t.Current {
		standing = "outdated: the next packet is judged anew"
	}
	row(w, "  verdict", standing)
	row(w, "  rules", fmt.Sprintf("egress %s, ingress %s", ruleNumber(t.EgressRule), ruleNumber(t.IngressRule)))
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
	fmt.Fprintf(w, "\n%s\n", printable(fmt.Sprintf("%s: %s %s", title, s.Verdict.Verdict, s.Verdict.because())))
	row(w, "  table", tableText(s.Verdict.Table))
	row(w, "  generation", s.Verdict.Generation)
	if s.Verdict.Revision != 0 {
		row(w, "  policy revision", s.Verdict.Revision)
	}
	if s.Verdict.Table <= tableWaiting {
		return
	}
	from := "by default for its kind"
	if s.IdentityRow {
		from = "by a row of the table"
	}
	row(w, "  class by identity", fmt.Sprintf("%d, %s", s.IdentityClass, from))
	if s.AddressBlock != "" || s.AddressClass != 0 {
		block := "in no block"
		if s.AddressBlock != "" {
			block = "in " + s.AddressBlock
		}
		row(w, "  class by address", fmt.Sprintf("%d, %s", s.AddressClass, block))
	}
	row(w, "  rule", ruleNumber(s.Verdict.Rule))
}

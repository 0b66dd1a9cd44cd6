// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package explain shows how the nodes of both ends would handle a connection.
package explain

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	nodeexplain "github.com/sluice-net/sluice/cmd/sluice/internal/explain"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/peer"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

const forms = "a pod NAMESPACE/NAME, or an address"

// Command is `kubernetes explain`.
func Command(inv *invocation.Invocation, client *kubectl.Client) *cobra.Command {
	var from, to string
	var service peer.Flags
	cmd := &cobra.Command{
		Use:   "explain --from POD --to POD|ADDRESS --port PORT",
		Short: "Show how the nodes of sender and receiver would handle a connection",
		Long: `Show how the nodes of sender and receiver would handle a connection. The command runs
` + "`sluice explain`" + ` on both nodes: the sender's node evaluates the egress policies, the
receiver's node the ingress policies, each in its own kernel. No packet is sent. If the
destination is a Service, the sender's node returns the backends, and the node of each
backend evaluates the connection to it.

Sender or receiver must be a pod NAMESPACE/NAME; the other one may be an address. The first
line has the combined verdict. If a node does not answer, its line has the reason, and the
exit code is 1.`,
		Example: `  kubectl sluice explain --from shop/client --to shop/web --port 8080
  kubectl sluice explain --from shop/client --to 10.96.0.10 --port 53/udp`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			q := query{inv: inv, client: client}
			if err := q.resolve(cmd.Context(), from, to, service); err != nil {
				return err
			}
			return q.run(cmd.Context())
		},
	}
	f := cmd.Flags()
	f.StringVar(&from, "from", "", "initiator of the connection: "+forms)
	f.StringVar(&to, "to", "", "responder of the connection; the same forms as --from")
	service.AddService(f)
	service.AddSourcePort(f)
	return cmd
}

// Explanation is the output of `kubernetes explain -o json`.
type Explanation struct {
	From     string `json:"from"`
	To       string `json:"to"`
	Protocol string `json:"protocol"`
	Port     uint32 `json:"port"`
	// Verdict combines the answers of all nodes: forwarded, audited, dropped, depends (on the backend) or unknown.
	Verdict string   `json:"verdict"`
	Answers []Answer `json:"answers"` // the sender's node first
}

// Answer is the answer of one node.
type Answer struct {
	Node        string                   `json:"node"`
	Has         string                   `json:"has"` // sender, receiver, sender and receiver, or backend
	From        string                   `json:"from"`
	To          string                   `json:"to"`
	Explanation *nodeexplain.Explanation `json:"explanation,omitempty"`
	Error       string                   `json:"error,omitempty"` // why there is no answer
}

// question is a call of `sluice explain` to make on a node.
type question struct {
	node, has string
	from, to  string
	port      uint32 // 0: the port of the connection
}

type query struct {
	inv    *invocation.Invocation
	client *kubectl.Client

	conn      peer.Connection
	nodes     map[string]kubectl.Node
	from, to  kubectl.Workload // zero for an address
	questions []question       // all questions so far
}

// resolve determines both ends and the nodes that have them.
func (q *query) resolve(ctx context.Context, from, to string, service peer.Flags) (err error) {
	pods := 0
	for _, end := range []struct {
		flag, text string
		peer       *peer.Peer
		pod        *kubectl.Workload
	}{{"--from", from, &q.conn.From, &q.from}, {"--to", to, &q.conn.To, &q.to}} {
		end.peer.Text = end.text
		switch namespace, name, slash := strings.Cut(end.text, "/"); {
		case peer.IsAddress(end.text):
			a, err := peer.ParseAddress(end.text)
			if err != nil {
				return err
			}
			end.peer.Addresses = []netip.Addr{a}
			continue
		case !slash || namespace == "" || name == "" || strings.Contains(name, "/"):
			return invocation.Usagef("%s: %q is not %s", end.flag, end.text, forms)
		}
		pods++
		if *end.pod, err = q.client.Pod(ctx, end.text); err != nil {
			return err
		}
		for _, text := range end.pod.Addresses {
			if a, err := netip.ParseAddr(text); err == nil {
				end.peer.Addresses = append(end.peer.Addresses, a.Unmap())
			}
		}
		if end.pod.Node == "" || len(end.peer.Addresses) == 0 {
			return fmt.Errorf("the pod %s has no address yet: its phase is %s", end.text, end.pod.Phase)
		}
		if end.pod.HostNetwork {
			q.inv.Note(fmt.Sprintf("the pod %s uses the network of its node %s; policies do not apply to it", end.text,
				end.pod.Node))
		}
	}
	if pods == 0 {
		return invocation.Usagef("one end must be a pod NAMESPACE/NAME: a node explains connections of its own pods")
	}
	if err := service.Complete(&q.conn); err != nil {
		return err
	}
	cluster, err := q.client.Cluster(ctx)
	if err != nil {
		return err
	}
	q.nodes = map[string]kubectl.Node{}
	for _, n := range cluster.Nodes {
		q.nodes[n.Name] = n
	}
	return nil
}

// run asks the nodes of both ends, and then the nodes that their answers mention.
func (q *query) run(ctx context.Context) error {
	a, _ := q.conn.From.Address(q.conn.V6)
	b, _ := q.conn.To.Address(q.conn.V6)
	from, to := a.String(), b.String()
	sender, receiver := node(q.from), node(q.to)
	for _, n := range peer.NotAskedOf(sender, receiver) {
		q.add(question{node: n.Node, has: n.Has, from: from, to: to})
	}
	x := Explanation{
		From: q.name(q.conn.From, from), To: q.name(q.conn.To, to), Protocol: ports.ProtocolText(q.conn.Protocol),
		Port: q.conn.Port,
	}
	for asked := 0; asked < len(q.questions); {
		round := q.questions[asked:]
		asked = len(q.questions)
		nodes := make([]kubectl.Node, len(round))
		for i := range round {
			nodes[i] = q.nodes[round[i].node]
		}
		answers := make([]Answer, len(round))
		q.client.Each(nodes, func(i int, n kubectl.Node) { answers[i] = q.ask(ctx, n, round[i]) })
		if ctx.Err() != nil {
			return ctx.Err()
		}
		for i, answer := range answers {
			x.Answers = append(x.Answers, answer)
			q.addQuestions(round[i], answer)
		}
	}
	x.order()
	x.Verdict = x.verdict()
	service := ports.ServiceText(q.conn.Protocol, q.conn.Port)
	if err := q.inv.Show(x, func(w io.Writer) { x.lines(w, service) }); err != nil {
		return err
	}
	return x.failed()
}

// node returns the name of the node that enforces the policies of a pod; empty if none does.
func node(w kubectl.Workload) string {
	if w.HostNetwork {
		return ""
	}
	return w.Node
}

func (q *query) name(p peer.Peer, address string) string {
	if p.Text == address {
		return address
	}
	return p.Text + " " + address
}

func (q *query) add(one question) {
	if !slices.ContainsFunc(q.questions, func(had question) bool {
		return had.node == one.node && had.from == one.from && had.to == one.to && had.port == one.port
	}) {
		q.questions = append(q.questions, one)
	}
}

// ask runs `sluice explain` on a node.
func (q *query) ask(ctx context.Context, n kubectl.Node, one question) Answer {
	answer := Answer{Node: one.node, Has: one.has, From: one.from, To: one.to}
	fail := func(err error) Answer {
		answer.Error = err.Error()
		return answer
	}
	if n.Name == "" {
		return fail(errors.New("the node is not in the cluster or not in --node"))
	}
	args := append([]string{"explain", "--from=" + one.from, "--to=" + one.to}, q.conn.ServiceArgs(one.port)...)
	out, err := q.client.Sluice(ctx, n, append(args, "--output=json", "--timeout="+q.client.Timeout().String())...)
	if err != nil {
		return fail(err)
	}
	if err := json.Unmarshal(out, &answer.Explanation); err != nil {
		return fail(fmt.Errorf("the answer is not an explanation: %w", err))
	}
	return answer
}

// addQuestions adds the questions for other nodes that an answer raises.
func (q *query) addQuestions(one question, answer Answer) {
	x := answer.Explanation
	// The sender's node has already answered for all backends of the Service.
	if x == nil || one.has == "backend" {
		return
	}
	for _, n := range x.NotAsked {
		q.add(question{node: n.Node, has: n.Has, from: one.from, to: one.to, port: one.port})
	}
	if !nodeexplain.Translated(x.GetService()) {
		return
	}
	for _, b := range x.GetService().GetBackends() {
		node := nodeexplain.OtherNode(b.GetPeer())
		if node != "" && b.GetVerdict() != datapathv1.Verdict_VERDICT_DROPPED {
			q.add(question{node: node, has: "backend", from: one.from, to: b.GetAddress(), port: b.GetPort()})
		}
	}
}

// order sorts the answers: the sender's node first, nodes of backends last.
func (x *Explanation) order() {
	slices.SortStableFunc(x.Answers, func(a, b Answer) int { return rank(a.Has) - rank(b.Has) })
}

func rank(has string) int {
	return slices.Index([]string{"sender and receiver", "sender", "receiver", "backend"}, has)
}

// row is a row of the table: the verdict of one node on the connection to one destination.
type row struct {
	node, has, to, verdict, text, because string
}

func (x *Explanation) rows() (rows []row) {
	for _, a := range x.Answers {
		e := a.Explanation
		switch {
		case e == nil:
			rows = append(rows, row{a.Node, a.Has, a.To, "unknown", "NO ANSWER", a.Error})
		case nodeexplain.Translated(e.GetService()):
			for _, b := range e.GetService().GetBackends() {
				rows = append(rows, rowOf(a, b.GetAddress(), b, nodeexplain.BackendHeadline(b)))
			}
		default:
			rows = append(rows, rowOf(a, a.To, e, e.Headline()))
		}
	}
	return rows
}

// outcome is a node's verdict on the connection, or on the connection to one backend.
type outcome interface {
	GetVerdict() datapathv1.Verdict
	GetReason() datapathv1.Reason
	GetEgress() *datapathv1.ExplainedSide
	GetIngress() *datapathv1.ExplainedSide
}

// rowOf returns the verdict with its reason, or the headline if one of them is missing.
func rowOf(a Answer, to string, o outcome, headline string) row {
	r := row{node: a.Node, has: a.Has, to: to, verdict: output.Enum(o.GetVerdict(), "VERDICT_"), text: headline}
	if r.verdict != "" && o.GetReason() != datapathv1.Reason_REASON_UNSPECIFIED {
		r.text = nodeexplain.VerdictText(o.GetVerdict(), o.GetReason())
	}
	var parts []string
	if text := verdict.Text(o.GetEgress().GetVerdict()); text != "" {
		parts = append(parts, "egress "+text)
	}
	if text := verdict.Text(o.GetIngress().GetVerdict()); text != "" {
		parts = append(parts, "ingress "+text)
	}
	r.because = strings.Join(parts, "; ")
	return r
}

// verdict returns the combined verdict of all nodes: dropped if one node drops.
func (x *Explanation) verdict() string {
	severity := []string{"", "forwarded", "audited", "unknown", "dropped"}
	worst := map[string]string{} // by destination
	for _, r := range x.rows() {
		v := r.verdict
		if !slices.Contains(severity, v) {
			v = "unknown"
		}
		if slices.Index(severity, v) >= slices.Index(severity, worst[r.to]) {
			worst[r.to] = v
		}
	}
	all := ""
	for _, v := range worst {
		switch {
		case all == "":
			all = v
		case v != "" && v != all:
			return "depends"
		}
	}
	if all == "" {
		return "unknown"
	}
	return all
}

func (x *Explanation) lines(w io.Writer, service string) {
	headline := map[string]string{
		"forwarded": "FORWARDED", "audited": "AUDITED", "dropped": "DROPPED", "depends": "DEPENDS ON THE BACKEND",
		"unknown": "UNKNOWN",
	}[x.Verdict]
	var droppedBy, nodes []string
	for _, r := range x.rows() {
		if !slices.Contains(nodes, r.node) {
			nodes = append(nodes, r.node)
		}
		text := r.node + " " + strings.TrimPrefix(r.text, "DROPPED ")
		if r.verdict == "dropped" && !slices.Contains(droppedBy, text) {
			droppedBy = append(droppedBy, text)
		}
	}
	switch {
	case x.Verdict == "dropped":
		headline += " by " + strings.Join(droppedBy, ", ")
	case x.Verdict == "forwarded" || x.Verdict == "audited":
		headline += " by " + strings.Join(nodes, " and ")
	case len(x.rows()) == 1 && x.Answers[0].Explanation != nil:
		headline = x.rows()[0].text // a Service without backends
	}
	fmt.Fprintln(w, output.Printable(fmt.Sprintf("%s -> %s, %s: %s", x.From, x.To, service, headline)))
	fmt.Fprintln(w)
	output.Row(w, "NODE", "HAS", "TO", "VERDICT", "BECAUSE")
	for _, r := range x.rows() {
		output.Row(w, r.node, r.has, r.to, r.text, r.because)
	}
}

// failed returns an error with the nodes that did not answer.
func (x *Explanation) failed() error {
	var errs []error
	for _, a := range x.Answers {
		if a.Explanation == nil {
			errs = append(errs, fmt.Errorf("%s: sluice explain: %s", a.Node, a.Error))
		}
	}
	return errors.Join(errs...)
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package overview shows the status of every node of a cluster on one screen.
package overview

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
)

// Command is `kubernetes status`.
func Command(inv *invocation.Invocation, client *kubectl.Client) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show the status of all nodes of the cluster",
		Long: fmt.Sprintf(`Show all nodes of the cluster on one screen: the ready containers of the node's pod, counts
from its `+"`sluice status`"+`, and problems. Nodes that do not answer in time and nodes
without a pod of Sluice are listed with the reason. The exit code is %d if there are
problems. Objects of `+"`cilium.io`"+` that have no effect are warnings, which do not change the
exit code. With -o json, the output has the whole status of each node.`, invocation.ExitNotReady),
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), inv, client) },
	}
}

// clusterStatus is the output of `kubernetes status -o json`.
type clusterStatus struct {
	Ready     bool         `json:"ready"` // no problems
	Problems  []string     `json:"problems"`
	Warnings  []string     `json:"warnings"` // they do not count for Ready
	DaemonSet daemonSet    `json:"daemonSet"`
	Nodes     []nodeStatus `json:"nodes"`
}

type daemonSet struct {
	Name    string `json:"name"`
	Image   string `json:"image"`
	Desired int    `json:"desired"`
	Ready   int    `json:"ready"`
	Updated int    `json:"updated"`
}

// nodeStatus describes one node, with data from the API and from the node's own services.
type nodeStatus struct {
	Name     string          `json:"name"`
	Pod      string          `json:"pod,omitempty"`
	Selected bool            `json:"selected"` // the DaemonSet wants a pod here
	Ready    map[string]bool `json:"containersReady,omitempty"`
	// Problems lists problems that Status does not contain.
	Problems []string `json:"problems"`
	// Status is the output of the node's `sluice status -o json`.
	Status json.RawMessage `json:"status,omitempty"`

	containers []string
	status     *answer // nil if the node did not answer
}

// answer contains the fields of a node's status that the command needs. Earlier releases use other keys for the
// services, so their counts are unknown.
type answer struct {
	Problems, Warnings []string
	Services           []struct{}
	Datapath           struct{ Endpoints []struct{ Count uint32 } }
	Policy             *struct{ Policies uint32 }
	LoadBalancer       *struct{ Services uint32 }
}

func run(ctx context.Context, inv *invocation.Invocation, client *kubectl.Client) error {
	cluster, err := client.Cluster(ctx)
	if err != nil {
		return err
	}
	s := clusterStatus{Nodes: make([]nodeStatus, len(cluster.Nodes)), Problems: []string{}}
	s.Warnings = ineffective(ctx, client)
	client.Each(cluster.Nodes, func(i int, n kubectl.Node) { s.Nodes[i] = ask(ctx, client, n) })
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.assess(cluster)
	if err := inv.Show(s, s.table); err != nil {
		return err
	}
	if !s.Ready {
		return invocation.ErrNotReady
	}
	return nil
}

// ask gets the status of a node from its pod, if there is one.
func ask(ctx context.Context, client *kubectl.Client, n kubectl.Node) nodeStatus {
	s := nodeStatus{Name: n.Name, Selected: n.Selected || n.Pod != nil, Problems: []string{}}
	if n.Problem != "" {
		s.Problems = append(s.Problems, n.Problem)
	}
	if n.Pod == nil {
		if n.Selected {
			s.Problems = append(s.Problems, "the node has no pod of Sluice")
		}
		return s
	}
	s.Pod, s.Ready = n.Pod.Name, n.Pod.Ready()
	s.lookAt(n.Pod.Containers)
	if _, err := n.Container(); err != nil {
		return s // the problems of the containers explain the missing answer
	}
	out, err := client.Sluice(ctx, n, "status", "--output=json", "--timeout="+client.Timeout().String())
	s.read(out, err)
	return s
}

// lookAt adds a problem for the containers that do not run, grouped by reason.
func (s *nodeStatus) lookAt(containers []kubectl.Container) {
	var reasons []string
	waiting := map[string][]string{}
	for _, c := range containers {
		s.containers = append(s.containers, c.Name)
		if c.Running {
			continue
		}
		if waiting[c.Waits] == nil {
			reasons = append(reasons, c.Waits)
		}
		waiting[c.Waits] = append(waiting[c.Waits], c.Name)
	}
	for _, reason := range reasons {
		names := waiting[reason]
		switch {
		case len(names) == 1:
			s.Problems = append(s.Problems, fmt.Sprintf("container %s does not run: %s", names[0], reason))
		case len(names) == len(containers):
			s.Problems = append(s.Problems, "no container of the pod runs: "+reason)
		default:
			s.Problems = append(s.Problems, fmt.Sprintf("containers %s do not run: %s", strings.Join(names, ", "), reason))
		}
	}
}

// read parses the answer of a node. A non-zero exit code is expected if the status has problems.
func (s *nodeStatus) read(out []byte, err error) {
	var got answer
	decoded := json.Unmarshal(out, &got)
	if _, other := errors.AsType[*json.UnmarshalTypeError](decoded); other {
		decoded = nil // from another release; the other fields were decoded
	}
	// A command that was killed may have printed an incomplete object.
	if decoded == nil && len(got.Services) > 0 {
		s.Status, s.status = out, &got
		return
	}
	if err == nil {
		err = errors.New("the answer is not a status")
	}
	s.Problems = append(s.Problems, "sluice status: "+err.Error())
}

// assess adds the problems of the whole cluster, and decides whether it is ready.
func (s *clusterStatus) assess(c kubectl.Cluster) {
	d := c.DaemonSet
	s.DaemonSet = daemonSet{Name: d.Name, Image: d.Image, Desired: d.Desired, Ready: d.Ready, Updated: d.Updated}
	if c.Unlisted != nil {
		s.Problems = append(s.Problems, "nodes without a pod are not shown: "+c.Unlisted.Error())
	}
	if d.Ready < d.Desired || d.Updated < d.Desired {
		s.Problems = append(s.Problems, fmt.Sprintf("DaemonSet %s: %d pods are wanted, %d are ready, %d are of its newest "+
			"revision", d.Name, d.Desired, d.Ready, d.Updated))
	}
	s.Ready = len(s.Problems) == 0
	for _, n := range s.Nodes {
		s.Ready = s.Ready && n.healthy()
	}
}

// healthy reports whether the node has no problems.
func (s nodeStatus) healthy() bool { return s.state() == "ok" || s.state() == notSelected }

const notSelected = "not selected"

// state returns the state of a node in a few words.
func (s nodeStatus) state() string {
	problems := len(s.Problems)
	warnings := 0
	if s.status != nil {
		problems += len(s.status.Problems)
		warnings = len(s.status.Warnings)
	}
	switch {
	case s.Pod == "" && !s.Selected && problems == 0:
		return notSelected
	case s.Pod == "" && s.Selected:
		return "no pod"
	case s.Pod != "" && s.status == nil:
		return "no answer"
	case problems > 0:
		return count(problems, "problem")
	case slices.Contains(slices.Collect(maps.Values(s.Ready)), false):
		return "not ready"
	case warnings > 0:
		return count(warnings, "warning")
	}
	return "ok"
}

// count returns a number with a noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

func (s *clusterStatus) table(w io.Writer) {
	containers := s.containers()
	header := []any{"NODE", "POD"}
	for _, name := range containers {
		header = append(header, strings.ToUpper(name))
	}
	output.Row(w, append(header, "ENDPOINTS", "POLICIES", "SERVICES", "STATE")...)
	for _, n := range s.Nodes {
		row := []any{n.Name, n.Pod}
		for _, name := range containers {
			row = append(row, n.ready(name))
		}
		endpoints, policies, services := n.counts()
		output.Row(w, append(row, endpoints, policies, services, n.state())...)
	}
	fmt.Fprintln(w)
	fmt.Fprintln(w, output.Printable(s.summary()))
	for _, line := range s.lines() {
		fmt.Fprintln(w, output.Printable(line))
	}
}

// containers returns the names of the containers of all pods, in the order of their manifests.
func (s *clusterStatus) containers() []string {
	var all []string
	for _, n := range s.Nodes {
		for _, name := range n.containers {
			if !slices.Contains(all, name) {
				all = append(all, name)
			}
		}
	}
	return all
}

func (s nodeStatus) ready(container string) string {
	switch ready, there := s.Ready[container]; {
	case !there:
		return ""
	case ready:
		return "yes"
	}
	return "no"
}

// counts returns counts for the table; empty if unknown.
func (s nodeStatus) counts() (endpoints, policies, services string) {
	if s.status == nil {
		return "", "", ""
	}
	if all := s.status.Datapath.Endpoints; all != nil {
		n := uint32(0)
		for _, e := range all {
			n += e.Count
		}
		endpoints = fmt.Sprint(n)
	}
	if p := s.status.Policy; p != nil {
		policies = fmt.Sprint(p.Policies)
	}
	if b := s.status.LoadBalancer; b != nil {
		services = fmt.Sprint(b.Services)
	}
	return endpoints, policies, services
}

// summary returns the number of nodes in each state.
func (s *clusterStatus) summary() string {
	states := map[string]int{}
	for _, n := range s.Nodes {
		state := n.state()
		switch {
		case strings.HasSuffix(state, "problem"), strings.HasSuffix(state, "problems"):
			state = "with problems"
		case strings.HasSuffix(state, "warning"), strings.HasSuffix(state, "warnings"):
			state = "with warnings"
		}
		states[state]++
	}
	text := count(len(s.Nodes), "node")
	separator := ": "
	for _, state := range []string{
		"ok", "with warnings", "with problems", "not ready", "no answer", "no pod", notSelected,
	} {
		if n := states[state]; n > 0 {
			text += fmt.Sprintf("%s%d %s", separator, n, state)
			separator = ", "
		}
	}
	return text
}

// lines returns each problem once, with the nodes that have it.
func (s *clusterStatus) lines() []string {
	at := map[string][]string{}
	var order []string
	say := func(kind, node, text string) {
		line := kind + "\x00" + text
		if at[line] == nil {
			order = append(order, line)
		}
		at[line] = append(at[line], node)
	}
	for _, text := range s.Problems {
		say("Problem", "", text)
	}
	for _, kind := range []string{"Problem", "Warning"} {
		for _, n := range s.Nodes {
			for _, text := range n.texts(kind) {
				say(kind, n.Name, text)
			}
		}
	}
	for _, text := range s.Warnings {
		say("Warning", "", text)
	}
	lines := make([]string, 0, len(order))
	for _, line := range order {
		kind, text, _ := strings.Cut(line, "\x00")
		lines = append(lines, kind+": "+strings.TrimPrefix(nodesText(at[line])+": ", ": ")+text)
	}
	return lines
}

// texts returns a node's problems or warnings.
func (s nodeStatus) texts(kind string) []string {
	own := cmp.Or(s.status, &answer{})
	if kind == "Problem" {
		return slices.Concat(s.Problems, own.Problems)
	}
	return own.Warnings
}

// named limits the number of node names in a line.
const named = 5

func nodesText(nodes []string) string {
	if len(nodes) <= named {
		return strings.Join(nodes, ", ")
	}
	return fmt.Sprintf("%s and %d more nodes", strings.Join(nodes[:named], ", "), len(nodes)-named)
}

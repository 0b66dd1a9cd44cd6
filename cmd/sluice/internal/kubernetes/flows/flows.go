// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package flows shows what happens to packets on all nodes of a cluster, by time.
package flows

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
	"github.com/sluice-net/sluice/cmd/sluice/internal/observe"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
)

const (
	// hold is how long an event waits for those of other nodes that were before it.
	hold = 500 * time.Millisecond
	// settle is how long it waits at the start, when nodes tell what they remember.
	settle = 3 * time.Second
	// heldLimit bounds the events that wait.
	heldLimit = 20000
	// followed is how many nodes are followed at most: each has a process of kubectl.
	followed = 64
	// look is how often the pods are listed, to find those that were replaced.
	look = 5 * time.Second
	// again is how long after the end of a stream the pods are listed.
	again = time.Second
)

// Command is `kubernetes observe`.
func Command(inv *invocation.Invocation, client *kubectl.Client) *cobra.Command {
	var criteria observe.Flags
	cmd := &cobra.Command{
		Use:   "observe",
		Short: "Show what happens to packets on all nodes, by time",
		Long: `Show what the eBPF programs of all nodes report, by time, each line with its
node; the criteria are those of ` + "`sluice observe`" + `. Without --follow it shows
what the nodes remember and ends; a node that does not answer is named, and the
exit code is 1 then. With --follow it stays until it is interrupted, follows a node
whose pod is replaced to the new pod, and says so: what happens in between is
missing. Times are those of the nodes' clocks; an event that comes half a second
late, or 3 s at the start, is shown out of order. --last is of all nodes together,
without --follow. A pod NAMESPACE/NAME of --pod, --from or --to is known by its name
at its own node; at others kubectl's answer gives the addresses that it has when the
command begins.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := criteria.Check(); err != nil {
				return err
			}
			o, err := newObserver(cmd.Context(), inv, client, &criteria)
			if err != nil {
				return err
			}
			if criteria.Follow {
				return errors.Join(o.watch(cmd.Context()), o.close())
			}
			return errors.Join(o.remembered(cmd.Context()), o.close())
		},
	}
	criteria.Add(cmd.Flags())
	return cmd
}

// observer runs `sluice observe` on nodes.
type observer struct {
	inv    *invocation.Invocation
	client *kubectl.Client
	args   func(node string) ([]string, error) // of the command in the pod of a node
	last   int                                 // events of all nodes together that are remembered; 0: all
	until  time.Time
	file   observe.Output // nil: standard output
	today  time.Time

	width int // of the column with the node
}

func newObserver(
	ctx context.Context, inv *invocation.Invocation, client *kubectl.Client, criteria *observe.Flags,
) (*observer, error) {
	o := &observer{inv: inv, client: client, last: int(criteria.Last), today: time.Now()}
	pods, err := o.podLocations(ctx, criteria.PodNames())
	if err != nil {
		return nil, err
	}
	o.args = func(node string) ([]string, error) {
		args, err := criteria.ArgsOn(node, pods)
		return append(append([]string{"observe"}, args...), "--output=json"), err
	}
	// A mistake is the same for every node.
	if _, err := o.args(""); err != nil {
		return nil, err
	}
	if o.until, _, err = criteria.Until(o.today); err != nil {
		return nil, err
	}
	if criteria.ToFile() {
		o.file, err = criteria.Open(inv)
	}
	return o, err
}

// podLocations asks the API where pods are. One that it does not know may have gone, and is left to the nodes.
func (o *observer) podLocations(ctx context.Context, names []string) (map[string]observe.PodPlace, error) {
	places := map[string]observe.PodPlace{}
	for _, name := range names {
		p, err := o.client.Pod(ctx, name)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err != nil:
			o.inv.Note(fmt.Sprintf("%v; only the node of a pod that is called so has it in its events", err))
		case p.HostNetwork:
			o.inv.Note(fmt.Sprintf("the pod %s has the addresses of its node and is in no event by its name: name an "+
				"address, or %s", name, "reserved:host"))
		default:
			places[name] = observe.PodPlace{Node: p.Node, Addresses: p.Addresses}
		}
	}
	return places, nil
}

func (o *observer) close() error {
	if o.file == nil {
		return nil
	}
	return o.file.Close()
}

// remembered shows what all nodes remember.
func (o *observer) remembered(ctx context.Context) error {
	cluster, err := o.client.Cluster(ctx)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	var all []*event // guarded by mu
	times := clock{} // guarded by mu
	failed := false  // guarded by mu
	o.client.Each(cluster.Nodes, func(_ int, n kubectl.Node) {
		if n.Pod == nil && !n.Selected {
			return
		}
		args, _ := o.args(n.Name) // newObserver found the mistakes
		out, err := o.client.Sluice(ctx, n, append(args, "--timeout="+o.client.Timeout().String())...)
		mu.Lock()
		defer mu.Unlock()
		for line := range strings.Lines(string(out)) {
			e, parsed := parse(n.Name, []byte(line))
			if parsed != nil {
				if err == nil {
					err = parsed
				}
				break
			}
			times.set(e)
			all = append(all, e)
		}
		if err != nil && ctx.Err() == nil {
			failed = true
			o.note(n.Name, err.Error())
		}
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	o.setWidth(cluster.Nodes)
	byTime(all)
	if o.last > 0 && len(all) > o.last {
		all = all[len(all)-o.last:]
	}
	if err := o.show(all); err != nil {
		return err
	}
	if failed {
		return invocation.ErrReported
	}
	return nil
}

func parse(node string, line []byte) (*event, error) {
	e := &event{node: node}
	if err := json.Unmarshal(line, &e.flow); err != nil {
		return e, fmt.Errorf("an event cannot be read: %w", err)
	}
	e.flow.SetNode(node)
	return e, nil
}

func (o *observer) setWidth(nodes []kubectl.Node) {
	for _, n := range nodes {
		o.width = max(o.width, len(n.Name))
	}
}

// show prints events, each with its node.
func (o *observer) show(events []*event) error {
	for _, e := range events {
		if o.file != nil {
			if err := o.file.Write(e.flow); err != nil {
				return err
			}
			continue
		}
		if o.inv.Format == "json" {
			if err := message.WriteLine(o.inv.Out, e.flow); err != nil {
				return err
			}
			continue
		}
		if _, err := fmt.Fprintf(o.inv.Out, "%-*s  %s\n", o.width, e.node, e.flow.Line(o.today)); err != nil {
			return err
		}
	}
	return nil
}

// note says on standard error what became of a node.
func (o *observer) note(node, text string) {
	if o.inv.Format == "json" {
		_ = json.NewEncoder(o.inv.ErrOut).Encode(map[string]string{"nodeName": node, "note": text})
		return
	}
	fmt.Fprintln(o.inv.ErrOut, output.Printable(fmt.Sprintf("--- %s: %s ---", node, text)))
}

// ended says that the stream of a node has ended, and why.
type ended struct {
	node string
	err  error
}

// following is the state of follow, which one goroutine owns.
type following struct {
	*observer

	events  chan *event
	ends    chan ended
	clock   clock
	pods    map[string]string // node → UID of the pod that is followed
	before  map[string]string // node → UID of the pod that was
	said    map[string]string // node → the last note
	streams sync.WaitGroup
}

// watch shows new events until ctx ends.
func (o *observer) watch(ctx context.Context) error {
	cluster, err := o.client.Cluster(ctx)
	if err != nil {
		return err
	}
	if len(cluster.Nodes) > followed {
		return invocation.Usagef("--follow has a process of kubectl for each node, and the cluster has %d nodes: choose "+
			"%d at most by --node", len(cluster.Nodes), followed)
	}
	ctx, cancel := context.WithCancel(ctx)
	if !o.until.IsZero() {
		ctx, cancel = context.WithDeadline(ctx, o.until.Add(hold)) // the streams end then, and events wait for others
	}
	f := following{
		observer: o, events: make(chan *event, 1024), ends: make(chan ended), clock: clock{},
		pods: map[string]string{}, before: map[string]string{}, said: map[string]string{},
	}
	defer f.streams.Wait()
	defer cancel()
	merged := merger{hold: settle, limit: heldLimit, clock: f.clock}
	f.reconcile(ctx, cluster)
	settled := time.After(settle)
	listing := time.NewTimer(look)
	defer listing.Stop()
	tick := time.NewTicker(hold / 5)
	defer tick.Stop()
	listed := make(chan kubectl.Cluster)
	for {
		select {
		case <-ctx.Done():
			return o.show(merged.held) // the person has seen enough
		case e := <-f.events:
			merged.push(e, time.Now())
		case e := <-f.ends:
			f.end(e)
			listing.Reset(again)
		case <-settled:
			merged.hold = hold
		case <-tick.C:
			if err := o.show(merged.due(time.Now())); err != nil {
				return err
			}
		case <-listing.C:
			f.streams.Go(func() { f.list(ctx, listed) })
		case cluster := <-listed:
			f.reconcile(ctx, cluster)
			listing.Reset(look)
		}
	}
}

// list lists the pods without making the events wait for them.
func (f *following) list(ctx context.Context, to chan<- kubectl.Cluster) {
	cluster, err := f.client.Cluster(ctx)
	if err != nil {
		cluster = kubectl.Cluster{} // the streams go on, and the next listing may succeed
	}
	select {
	case to <- cluster:
	case <-ctx.Done():
	}
}

// reconcile starts the streams of the nodes that have none.
func (f *following) reconcile(ctx context.Context, cluster kubectl.Cluster) {
	f.setWidth(cluster.Nodes)
	for _, n := range cluster.Nodes {
		if f.pods[n.Name] != "" || n.Pod == nil && !n.Selected {
			continue
		}
		args, _ := f.observer.args(n.Name) // newObserver found the mistakes
		args, err := f.client.SluiceArgs(n, true, append(args, "--"+invocation.UntilInputEnds)...)
		if err != nil {
			f.tell(n.Name, err.Error())
			continue
		}
		switch before := f.before[n.Name]; before {
		case "":
		case n.Pod.UID:
			f.tell(n.Name, "followed again")
		default:
			f.tell(n.Name, "the pod was replaced, "+n.Pod.Name+" is followed now")
		}
		f.pods[n.Name] = n.Pod.UID
		after := f.clock[n.Name]
		f.streams.Go(func() { f.stream(ctx, n.Name, after, args) })
	}
}

// stream hands on the events of a node after a time, until its stream ends: a node that is followed again tells anew
// what it remembers.
func (f *following) stream(ctx context.Context, node string, after time.Time, args []string) {
	replays := !after.IsZero()
	err := f.client.Stream(ctx, func(line []byte) error {
		e, err := parse(node, line)
		if err != nil {
			return err
		}
		if replays = replays && !e.flow.At().After(after); replays {
			return nil
		}
		select {
		case f.events <- e:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}, args...)
	select {
	case f.ends <- ended{node, err}:
	case <-ctx.Done():
	}
}

// end takes note of the end of a stream.
func (f *following) end(e ended) {
	f.before[e.node] = f.pods[e.node]
	delete(f.pods, e.node)
	if !f.until.IsZero() && !time.Now().Before(f.until) {
		return // as it was asked to
	}
	text := "the stream has ended"
	if e.err != nil {
		text += ": " + e.err.Error()
	}
	f.tell(e.node, text+"; events may be missing from here on")
}

// tell notes what is new about a node.
func (f *following) tell(node, text string) {
	if f.said[node] != text {
		f.note(node, text)
	}
	f.said[node] = text
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package flows shows the events of all nodes of a cluster, sorted by time.
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
	// hold is how long an event is held back for earlier events of other nodes.
	hold = 500 * time.Millisecond
	// settle replaces hold at the start, while nodes still send the events that they remember.
	settle = 3 * time.Second
	// heldLimit limits the number of held events.
	heldLimit = 20000
	// followed is the maximum number of followed nodes, because each needs a kubectl process.
	followed = 64
	// look is the interval at which the pods are listed, to find replaced ones.
	look = 5 * time.Second
	// again is the delay before the pods are listed after a stream has ended.
	again = time.Second
)

// Command is `kubernetes observe`.
func Command(inv *invocation.Invocation, client *kubectl.Client) *cobra.Command {
	var criteria observe.Flags
	cmd := &cobra.Command{
		Use:   "observe",
		Short: "Show drops, policy verdicts and ended connections on all nodes",
		Long: `Show the events of the eBPF programs of all nodes, sorted by time, each line with its node.
The filters are the same as for ` + "`sluice observe`" + `. Without --follow, the command shows the
events that the nodes remember and exits, with code 1 if a node does not answer. With
--follow, it runs until interrupted. If the pod of a node is replaced, the command prints a
note and follows the new pod; events in between are missing. Times are from the clocks of
the nodes; events that arrive more than half a second late (3 s at the start) are shown out
of order. Without --follow, --last counts the events of all nodes together. For a pod
NAMESPACE/NAME in --pod, --from or --to, its own node matches the name; other nodes match the
addresses that the pod has when the command starts.`,
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
	args   func(node string) ([]string, error) // arguments of `sluice` in the pod of a node
	last   int                                 // number of stored events to show; 0: all
	until  time.Time
	file   observe.Output // nil: standard output
	today  time.Time

	width int // width of the column with the node
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
	// Report mistakes in the flags once, because they are the same for every node.
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

// podLocations asks the API for the nodes and addresses of pods. It skips unknown pods, which may have been deleted;
// the nodes may still remember them.
func (o *observer) podLocations(ctx context.Context, names []string) (map[string]observe.PodPlace, error) {
	places := map[string]observe.PodPlace{}
	for _, name := range names {
		p, err := o.client.Pod(ctx, name)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err != nil:
			o.inv.Note(fmt.Sprintf("%v; only the node of a pod with this name can match it", err))
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

// remembered prints the events that the nodes remember.
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
		args, _ := o.args(n.Name) // newObserver has checked the flags
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

// show prints events with their nodes.
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
		line := fmt.Sprintf("%-*s  %s", o.width, e.node, e.flow.Line(o.today))
		if !o.inv.Wide() {
			line = output.Fold(line)
		}
		if _, err := fmt.Fprintln(o.inv.Out, line); err != nil {
			return err
		}
	}
	return nil
}

// note prints a note about a node to standard error.
func (o *observer) note(node, text string) {
	if o.inv.Format == "json" {
		_ = json.NewEncoder(o.inv.ErrOut).Encode(map[string]string{"nodeName": node, "note": text})
		return
	}
	fmt.Fprintln(o.inv.ErrOut, output.Printable(fmt.Sprintf("--- %s: %s ---", node, text)))
}

// ended is the end of a node's stream with its error.
type ended struct {
	node string
	err  error
}

// following is the state of --follow. One goroutine owns it.
type following struct {
	*observer

	events  chan *event
	ends    chan ended
	clock   clock
	pods    map[string]string // node → UID of the followed pod
	before  map[string]string // node → UID of the previously followed pod
	said    map[string]string // node → last printed note
	streams sync.WaitGroup
}

// watch prints new events until ctx ends.
func (o *observer) watch(ctx context.Context) error {
	cluster, err := o.client.Cluster(ctx)
	if err != nil {
		return err
	}
	if len(cluster.Nodes) > followed {
		return invocation.Usagef("--follow runs one kubectl process for each node, and the cluster has %d nodes: "+
			"select at most %d with --node", len(cluster.Nodes), followed)
	}
	ctx, cancel := context.WithCancel(ctx)
	if !o.until.IsZero() {
		// The streams end at o.until. The merger holds their last events for up to hold before they are
		// printed.
		ctx, cancel = context.WithDeadline(ctx, o.until.Add(hold))
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
			return o.show(merged.held) // interrupted
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

// list lists the pods in the background, so that events are not delayed.
func (f *following) list(ctx context.Context, to chan<- kubectl.Cluster) {
	cluster, err := f.client.Cluster(ctx)
	if err != nil {
		cluster = kubectl.Cluster{} // the streams continue; the next listing may succeed
	}
	select {
	case to <- cluster:
	case <-ctx.Done():
	}
}

// reconcile starts streams for nodes without one.
func (f *following) reconcile(ctx context.Context, cluster kubectl.Cluster) {
	f.setWidth(cluster.Nodes)
	for _, n := range cluster.Nodes {
		if f.pods[n.Name] != "" || n.Pod == nil && !n.Selected {
			continue
		}
		args, _ := f.observer.args(n.Name) // newObserver has checked the flags
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

// stream forwards the events of a node whose time is later than after. A node that is followed again first resends
// events that it remembers; these were already printed.
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

// end handles the end of a stream.
func (f *following) end(e ended) {
	f.before[e.node] = f.pods[e.node]
	delete(f.pods, e.node)
	if !f.until.IsZero() && !time.Now().Before(f.until) {
		return // the stream ended because of --until
	}
	text := "the stream has ended"
	if e.err != nil {
		text += ": " + e.err.Error()
	}
	f.tell(e.node, text+"; events may be missing from here on")
}

// tell prints a note about a node unless it is the same as the last one.
func (f *following) tell(node, text string) {
	if f.said[node] != text {
		f.note(node, text)
	}
	f.said[node] = text
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

func eventsCommand(inv *invocation.Invocation) *cobra.Command {
	existing := false
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Show changes of endpoints as they happen",
		Long: `Show endpoints as they are created, changed and deleted, until interrupted. If the
datapath restarts, the command prints a line, reconnects and shows the changes that it
missed. --timeout limits the wait for the first answer. With -o json, each line is one
object.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			w := watcher{inv: inv, known: map[workload.Owner]*datapathv1.Endpoint{}, existing: existing}
			return w.run(cmd.Context())
		},
	}
	cmd.Flags().BoolVar(&existing, "existing", false, "show the existing endpoints first")
	return cmd
}

// Types of events.
const (
	eventExisting     = "existing"
	eventCreated      = "created"
	eventChanged      = "changed"
	eventDeleted      = "deleted"
	eventDisconnected = "disconnected" // from the datapath
	eventConnected    = "connected"    // connected again
)

// event is a change of an endpoint, or of the connection to the datapath.
type event struct {
	time  time.Time
	event string
	// changes lists the differences, each as "WHAT: OLD -> NEW".
	changes []string
	// endpoint is the endpoint after the change, or before its deletion; nil for events of the connection.
	endpoint *datapathv1.Endpoint
	err      string
}

// object returns the event as JSON, without keys for absent values.
func (e event) object() message.Object {
	facts := []message.Fact{{Key: "time", Value: e.time}, {Key: "event", Value: e.event}}
	if len(e.changes) > 0 {
		facts = append(facts, message.Fact{Key: "changes", Value: e.changes})
	}
	if e.endpoint != nil {
		facts = append(facts, message.Fact{Key: "endpoint", Value: message.Of(e.endpoint)})
	}
	if e.err != "" {
		facts = append(facts, message.Fact{Key: "error", Value: e.err})
	}
	return message.Join(facts...)
}

// line returns the event as text.
func (e event) line() string {
	parts := []string{e.time.Format("15:04:05.000"), fmt.Sprintf("%-12s", e.event)}
	if p := e.endpoint; p != nil {
		parts = append(parts, workload.OwnerOf(p.GetOwner()).String())
		if e.event == eventChanged {
			parts = append(parts, strings.Join(e.changes, ", "))
		} else {
			parts = append(parts, stateText(p), identityText(p), strings.Join(p.GetAddresses(), ","))
		}
	}
	if e.err != "" {
		parts = append(parts, e.err)
	}
	for i := range parts {
		parts[i] = output.Printable(parts[i])
	}
	return strings.TrimRight(strings.Join(parts, " "), " ")
}

// watcher prints changes of endpoints, across restarts of the datapath.
type watcher struct {
	inv      *invocation.Invocation
	existing bool // print the endpoints of the first listing

	known    map[workload.Owner]*datapathv1.Endpoint
	token    []byte
	complete bool // the first listing has been received
	lost     bool // disconnected, and the event was printed
	// listed contains the endpoints received so far in a listing that is not complete; nil if there is none.
	listed map[workload.Owner]struct{}
}

// firstPause and longestPause bound the backoff between attempts to reconnect.
const firstPause, longestPause = 100 * time.Millisecond, 500 * time.Millisecond

func (w *watcher) run(ctx context.Context) error {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		err := w.watch(ctx, func() { pause = firstPause })
		if ctx.Err() != nil {
			return nil // interrupted
		}
		var fatal *printError
		switch code := status.Code(err); {
		case errors.As(err, &fatal):
			return fatal.err
		case !w.complete, code == codes.PermissionDenied, code == codes.Unimplemented, code == codes.InvalidArgument:
			return err
		case code == codes.OutOfRange: // the datapath has restarted, or the token is too old
			w.token = nil
		}
		if !w.lost {
			w.lost = true
			text := "the datapath ended the stream"
			if err != nil {
				text = status.Convert(err).Message()
			}
			if err := w.print(event{event: eventDisconnected, err: text}); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// printError is an error of the output. It ends the watch.
type printError struct{ err error }

func (e *printError) Error() string { return e.err.Error() }

// watch prints the changes of one stream until the stream ends.
func (w *watcher) watch(ctx context.Context, answered func()) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	slow := time.AfterFunc(w.inv.Timeout, func() {
		cancel(status.Errorf(codes.DeadlineExceeded, "the datapath has not answered within %s", w.inv.Timeout))
	})
	defer slow.Stop()
	w.listed = nil
	if w.token == nil {
		w.listed = map[workload.Owner]struct{}{}
	}
	err := invocation.Stream(ctx, w.inv, invocation.Datapath, datapathv1.DatapathServiceClient.WatchEndpoints,
		&datapathv1.WatchEndpointsRequest{ResumeToken: w.token},
		func(m *datapathv1.WatchEndpointsResponse) error {
			if slow.Stop() {
				answered()
			}
			if err := w.take(m); err != nil {
				return &printError{err}
			}
			return nil
		})
	if late := context.Cause(ctx); err != nil && late != nil && ctx.Err() != nil {
		return late
	}
	return err
}

// take prints the change of one message.
func (w *watcher) take(m *datapathv1.WatchEndpointsResponse) error {
	if w.lost {
		w.lost = false
		if err := w.print(event{event: eventConnected}); err != nil {
			return err
		}
	}
	var err error
	switch {
	case m.GetUpsert() != nil:
		if w.listed != nil {
			w.listed[workload.OwnerOf(m.GetUpsert().GetOwner())] = struct{}{}
		}
		err = w.upsert(m.GetUpsert())
	case m.GetDelete() != nil:
		err = w.remove(workload.OwnerOf(m.GetDelete()))
	case m.GetBookmark().GetSnapshotComplete() && w.listed != nil:
		for _, o := range w.owners() {
			if _, there := w.listed[o]; there || err != nil {
				continue
			}
			err = w.remove(o)
		}
		w.listed, w.complete = nil, true
	}
	// A token received during a listing would resume in the middle of it, without its beginning.
	if w.listed == nil && err == nil {
		w.token = m.GetResumeToken()
	}
	return err
}

func (w *watcher) owners() []workload.Owner {
	owners := make([]workload.Owner, 0, len(w.known))
	for o := range w.known {
		owners = append(owners, o)
	}
	slices.SortFunc(owners, func(a, b workload.Owner) int { return strings.Compare(a.String(), b.String()) })
	return owners
}

func (w *watcher) upsert(e *datapathv1.Endpoint) error {
	owner := workload.OwnerOf(e.GetOwner())
	before, there := w.known[owner]
	w.known[owner] = e
	switch {
	case !there && !w.complete && !w.existing:
		return nil
	case !there && !w.complete:
		return w.print(event{event: eventExisting, endpoint: e})
	case !there:
		return w.print(event{event: eventCreated, endpoint: e})
	}
	changes := changesOf(before, e)
	if len(changes) == 0 {
		return nil
	}
	return w.print(event{event: eventChanged, changes: changes, endpoint: e})
}

func (w *watcher) remove(o workload.Owner) error {
	before, there := w.known[o]
	if !there {
		return nil
	}
	delete(w.known, o)
	return w.print(event{event: eventDeleted, endpoint: before})
}

func (w *watcher) print(e event) error {
	e.time = time.Now()
	if w.inv.Format == "json" {
		return message.WriteLine(w.inv.Out, e.object())
	}
	_, err := io.WriteString(w.inv.Out, e.line()+"\n")
	return err
}

// changesOf describes the differences between two states of an endpoint, without fields that commands do not show.
func changesOf(before, after *datapathv1.Endpoint) (changes []string) {
	add := func(what string, text func(*datapathv1.Endpoint) string) {
		if old, now := text(before), text(after); old != now {
			changes = append(changes, fmt.Sprintf("%s: %s -> %s", what, orNone(old), orNone(now)))
		}
	}
	add("state", stateText)
	add("identity", identityText)
	add("addresses", func(e *datapathv1.Endpoint) string { return strings.Join(e.GetAddresses(), ",") })
	add("device", func(e *datapathv1.Endpoint) string { return e.GetHostInterface().GetName() })
	add("endpoint ID", func(e *datapathv1.Endpoint) string { return indexText(e.GetEndpointIndex()) })
	add("named ports", portsText)
	add("policy", func(e *datapathv1.Endpoint) string { return policyText(e.GetPolicy()) })
	if before.GetPolicy() != nil && after.GetPolicy() != nil {
		add("egress table", func(e *datapathv1.Endpoint) string {
			return verdict.TableText(e.GetPolicy().GetEgressTable())
		})
		add("ingress table", func(e *datapathv1.Endpoint) string {
			return verdict.TableText(e.GetPolicy().GetIngressTable())
		})
		add("refused", func(e *datapathv1.Endpoint) string { return e.GetPolicy().GetRefusal() })
	}
	return changes
}

func indexText(n uint32) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatUint(uint64(n), 10)
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

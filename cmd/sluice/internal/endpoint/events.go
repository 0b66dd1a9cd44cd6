// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"context"
	"encoding/json"
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
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

func eventsCommand(inv *invocation.Invocation) *cobra.Command {
	existing := false
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Show changes of endpoints as they happen",
		Long: `Show endpoints as they are created, change and are deleted, until interrupted. When the
datapath ends or restarts, a line says so; afterwards the command goes on, beginning with
what has changed meanwhile. --timeout bounds how long the first answer may take. JSON
comes one object a line.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			w := watcher{inv: inv, known: map[workload.Owner]endpoint{}, existing: existing}
			return w.run(cmd.Context())
		},
	}
	cmd.Flags().BoolVar(&existing, "existing", false, "begin with the endpoints that exist")
	return cmd
}

// The kinds of events.
const (
	eventExisting     = "existing"
	eventCreated      = "created"
	eventChanged      = "changed"
	eventDeleted      = "deleted"
	eventDisconnected = "disconnected" // from the datapath
	eventConnected    = "connected"    // again
)

// event is what happened to an endpoint, or to the connection to the datapath.
type event struct {
	Time  time.Time `json:"time"`
	Event string    `json:"event"`
	// Changes say what is different, each as "WHAT: OLD -> NEW".
	Changes []string `json:"changes,omitempty"`
	// Endpoint is it afterwards, of one that was deleted before; nil for events of the
	// connection.
	Endpoint *endpoint `json:"endpoint,omitempty"`
	Error    string    `json:"error,omitempty"`
}

// line is the event for people.
func (e event) line() string {
	parts := []string{e.Time.Format("15:04:05.000"), fmt.Sprintf("%-12s", e.Event)}
	if p := e.Endpoint; p != nil {
		parts = append(parts, p.Owner.String())
		if e.Event == eventChanged {
			parts = append(parts, strings.Join(e.Changes, ", "))
		} else {
			parts = append(parts, p.State, workload.IdentityText(p.Identity, p.Labels), strings.Join(p.Addresses, ","))
		}
	}
	if e.Error != "" {
		parts = append(parts, e.Error)
	}
	for i := range parts {
		parts[i] = output.Printable(parts[i])
	}
	return strings.TrimRight(strings.Join(parts, " "), " ")
}

// watcher shows the changes of a watch that goes on over restarts of the datapath.
type watcher struct {
	inv      *invocation.Invocation
	existing bool // what exists at the beginning is shown

	known    map[workload.Owner]endpoint
	token    []byte
	complete bool // a listing was complete once
	lost     bool // disconnected, and said so
	// listed is what the listing that is under way has; nil: none is.
	listed map[workload.Owner]struct{}
}

// firstPause and longestPause bound the pause between attempts to connect again.
const firstPause, longestPause = 100 * time.Millisecond, 500 * time.Millisecond

func (w *watcher) run(ctx context.Context) error {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		err := w.watch(ctx, func() { pause = firstPause })
		if ctx.Err() != nil {
			return nil // the person has seen enough
		}
		var fatal *printError
		switch code := status.Code(err); {
		case errors.As(err, &fatal):
			return fatal.err
		case !w.complete, code == codes.PermissionDenied, code == codes.Unimplemented, code == codes.InvalidArgument:
			return err
		case code == codes.OutOfRange: // the datapath is another process, or too much has happened since
			w.token = nil
		}
		if !w.lost {
			w.lost = true
			text := "the datapath ended the stream"
			if err != nil {
				text = status.Convert(err).Message()
			}
			if err := w.print(event{Event: eventDisconnected, Error: text}); err != nil {
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

// printError ends the watch: what would be shown goes nowhere.
type printError struct{ err error }

func (e *printError) Error() string { return e.err.Error() }

// watch shows what one stream says until that ends.
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

// take shows what a message says.
func (w *watcher) take(m *datapathv1.WatchEndpointsResponse) error {
	if w.lost {
		w.lost = false
		if err := w.print(event{Event: eventConnected}); err != nil {
			return err
		}
	}
	var err error
	switch {
	case m.GetUpsert() != nil:
		e := shown(m.GetUpsert())
		if w.listed != nil {
			w.listed[e.Owner] = struct{}{}
		}
		err = w.upsert(e)
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
	// a token from within a listing leads on in that listing, whose beginning is lost
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

func (w *watcher) upsert(e endpoint) error {
	before, there := w.known[e.Owner]
	w.known[e.Owner] = e
	switch {
	case !there && !w.complete && !w.existing:
		return nil
	case !there && !w.complete:
		return w.print(event{Event: eventExisting, Endpoint: &e})
	case !there:
		return w.print(event{Event: eventCreated, Endpoint: &e})
	}
	changes := changesOf(before, e)
	if len(changes) == 0 {
		return nil
	}
	return w.print(event{Event: eventChanged, Changes: changes, Endpoint: &e})
}

func (w *watcher) remove(o workload.Owner) error {
	before, there := w.known[o]
	if !there {
		return nil
	}
	delete(w.known, o)
	return w.print(event{Event: eventDeleted, Endpoint: &before})
}

func (w *watcher) print(e event) error {
	e.Time = time.Now()
	if w.inv.Format == "json" {
		encoder := json.NewEncoder(w.inv.Out)
		encoder.SetEscapeHTML(false)
		return encoder.Encode(e)
	}
	_, err := io.WriteString(w.inv.Out, e.line()+"\n")
	return err
}

// changesOf are the differences of what a person sees of an endpoint.
func changesOf(before, after endpoint) (changes []string) {
	add := func(what, old, now string) {
		if old != now {
			changes = append(changes, fmt.Sprintf("%s: %s -> %s", what, orNone(old), orNone(now)))
		}
	}
	add("state", before.State, after.State)
	add("identity", workload.IdentityText(before.Identity, before.Labels),
		workload.IdentityText(after.Identity, after.Labels))
	add("addresses", strings.Join(before.Addresses, ","), strings.Join(after.Addresses, ","))
	add("device", before.Host.Name, after.Host.Name)
	add("endpoint ID", indexText(before.ID), indexText(after.ID))
	add("named ports", strings.Join(before.NamedPorts, " "), strings.Join(after.NamedPorts, " "))
	add("policy", before.Policy.text(), after.Policy.text())
	if b, a := before.Policy, after.Policy; b != nil && a != nil {
		add("egress table", verdict.TableText(b.EgressTable), verdict.TableText(a.EgressTable))
		add("ingress table", verdict.TableText(b.IngressTable), verdict.TableText(a.IngressTable))
		add("refused", b.Refusal, a.Refusal)
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

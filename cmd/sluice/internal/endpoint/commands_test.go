// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func TestEndpointCheckNamesEveryDifference(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "endpoint", "check", "0123")
	nodetest.WantLines(t, out, "No differences found.")
	n.Differences = []*datapathv1.Difference{
		{Subject: "container route", Key: "default", Want: "via 169.254.1.1", Target: &datapathv1.DifferenceTarget{
			Kind: datapathv1.TargetKind_TARGET_KIND_ROUTE, InContainer: true,
		}},
		{Subject: "sl_ep", Key: "1", Want: "a\x1b[2J", Have: "b"},
	}
	out, _ = n.Want(t, invocation.ExitFailed, "endpoint", "check", "0123/eth0")
	nodetest.WantLines(t, out, "WHAT WHICH WANT HAVE", "container route default via 169.254.1.1 -",
		`sl_ep 1 a\x1b[2J b`)
	out, _ = n.Want(t, invocation.ExitFailed, "endpoint", "check", "0123", "-o", "json")
	var all []struct {
		Have   string
		Target struct {
			Kind        string
			InContainer bool
		}
	}
	if err := nodetest.UnmarshalItems(out, &all); err != nil || len(all) != 2 || all[0].Target.Kind != "route" ||
		!all[0].Target.InContainer || all[1].Have != "b" {
		t.Errorf("%v: %+v", err, all)
	}
	n.Want(t, invocation.ExitFailed, "endpoint", "check", "9")
	n.Want(t, invocation.ExitUsage, "endpoint", "check")
}

func TestEndpointDeleteKeepsWhatIsInUse(t *testing.T) {
	n := nodetest.New(t, Command)
	_, errOut := n.Want(t, invocation.ExitFailed, "endpoint", "delete", "0123")
	if !strings.Contains(errOut, "/run/netns/x still exists\n") || !strings.Contains(errOut, "--force") ||
		strings.Contains(errOut, "rpc error") {
		t.Errorf("refusal: %q", errOut)
	}
	_, errOut = n.Want(t, invocation.ExitFailed, "endpoint", "delete", "0123", "-o", "json")
	if !strings.Contains(errOut, `"reason":"ENDPOINT_IN_USE"`) {
		t.Errorf("refusal as JSON: %q", errOut)
	}
	out, _ := n.Want(t, 0, "endpoint", "delete", "0123", "--force")
	nodetest.WantLines(t, out, `The endpoint of 0123456789abc/eth0 was deleted: identity app=web\x1b]0;x\a (300), `+
		`addresses 10.244.0.2 fd00:244::2, device sl0.`)
	if r := n.Deleted; r.GetUnlessInUse() || r.GetValidateOnly() || r.GetOwner().GetContainerId() != nodetest.LongID {
		t.Errorf("request %v", r)
	}
	out, _ = n.Want(t, 0, "endpoint", "delete", "evil", "--dry-run")
	if !strings.HasPrefix(out, "Nothing was deleted: --dry-run. The endpoint of evil") ||
		!n.Deleted.GetValidateOnly() || !n.Deleted.GetUnlessInUse() || strings.Contains(out, "\x1b") {
		t.Errorf("%q after %v", out, n.Deleted)
	}
	out, _ = n.Want(t, 0, "endpoint", "delete", "evil", "-o", "json")
	gone := &datapathv1.DeleteEndpointResponse{}
	if err := message.Unmarshal([]byte(out), gone); err != nil || !gone.GetExisted() ||
		gone.GetEndpoint().GetIdentity() != 300 || !strings.Contains(out, `"deleted": true`) {
		t.Errorf("%v: %s", err, out)
	}
}

// TestEndpointDeleteTakesAWholeNameThatIsNotListed: endpoints with a corrupt record are not listed, but can be deleted
// by their whole name.
func TestEndpointDeleteTakesAWholeNameThatIsNotListed(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "endpoint", "delete", "unreadable/eth0")
	nodetest.WantLines(t, out, "The endpoint of unreadable/eth0 was deleted; its record cannot be read.")
	n.Want(t, invocation.ExitFailed, "endpoint", "delete", "missing/eth0")
	n.Deleted = nil
	n.Want(t, invocation.ExitFailed, "endpoint", "delete", "unreadable")
	if n.Deleted != nil {
		t.Errorf("without an interface it asks to delete %v", n.Deleted)
	}
}

func TestAuditModeEndsByItself(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "endpoint", "audit-mode", "0123", "on")
	until := time.Unix(1e9, 0).Local().Format("2006-01-02 15:04:05 MST")
	nodetest.WantLines(t, out,
		"0123456789abc/eth0 is in audit mode until "+until+": packets that policies deny are forwarded and reported.",
		"Containers in audit mode: 1.")
	if r := n.Audited; r.GetDuration().AsDuration() != time.Hour || r.GetOwner().GetContainerId() != nodetest.LongID {
		t.Errorf("asked %v", r)
	}
	out, _ = n.Want(t, 0, "endpoint", "audit-mode", "--node", "on", "--for", "10m", "--dry-run")
	if !strings.Contains(out, "The node is in audit mode until "+until) || !n.Audited.GetNode() ||
		!n.Audited.GetValidateOnly() || n.Audited.GetDuration().AsDuration() != 10*time.Minute {
		t.Errorf("%q after %v", out, n.Audited)
	}
	out, _ = n.Want(t, 0, "endpoint", "audit-mode", "0123", "off")
	nodetest.WantLines(t, out, "0123456789abc/eth0 is not in audit mode: its policies are enforced.")
	if n.Audited.GetDuration() != nil || n.Audited.GetEnabled() {
		t.Errorf("asked %v", n.Audited)
	}
	for _, wrong := range [][]string{
		{},
		{"0123"},
		{"on"},
		{"0123", "yes"},
		{"0123", "on", "--node"},
		{"--node"},
		{"0123", "off", "--for", "1m"},
		{"0123", "on", "--for", "0s"},
	} {
		n.Want(t, invocation.ExitUsage, append([]string{"endpoint", "audit-mode"}, wrong...)...)
	}
}

func upsert(id string, identity uint32, state datapathv1.EndpointState) *datapathv1.WatchEndpointsResponse {
	return &datapathv1.WatchEndpointsResponse{
		ResumeToken: fmt.Appendf(nil, "%s %d", id, identity),
		Event: &datapathv1.WatchEndpointsResponse_Upsert{Upsert: &datapathv1.Endpoint{
			Owner: &workloadv1.Owner{ContainerId: id, InterfaceName: "eth0"}, Identity: identity, State: state,
			Addresses: []string{"10.244.0.2"},
		}},
	}
}

func complete(token string) *datapathv1.WatchEndpointsResponse {
	return &datapathv1.WatchEndpointsResponse{
		ResumeToken: []byte(token),
		Event:       &datapathv1.WatchEndpointsResponse_Bookmark{Bookmark: &datapathv1.Bookmark{SnapshotComplete: true}},
	}
}

func removed(id string) *datapathv1.WatchEndpointsResponse {
	return &datapathv1.WatchEndpointsResponse{
		ResumeToken: []byte("removed " + id),
		Event: &datapathv1.WatchEndpointsResponse_Delete{
			Delete: &workloadv1.Owner{ContainerId: id, InterfaceName: "eth0"},
		},
	}
}

// events runs the command until it has printed n lines, and returns them without times.
func events(t *testing.T, n *nodetest.Node, lines int, args ...string) []string {
	t.Helper()
	inv := &invocation.Invocation{RunDir: n.RunDir, Format: "table", Timeout: 10 * time.Second, ErrOut: io.Discard}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := &lineWriter{want: lines, done: cancel}
	inv.Out = out
	cmd := Command(inv)
	cmd.SetArgs(append([]string{"events"}, args...))
	cmd.SetOut(io.Discard)
	cmd.SetErr(io.Discard)
	if err := cmd.ExecuteContext(ctx); err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(out.text.String()) {
		_, text, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		got = append(got, strings.Join(strings.Fields(text), " "))
	}
	return got
}

// lineWriter calls done after a number of lines.
type lineWriter struct {
	text bytes.Buffer
	want int
	done func()
}

func (w *lineWriter) Write(p []byte) (int, error) {
	n, err := w.text.Write(p)
	if bytes.Count(w.text.Bytes(), []byte("\n")) >= w.want {
		w.done()
	}
	return n, err
}

const (
	ready   = datapathv1.EndpointState_ENDPOINT_STATE_READY
	waiting = datapathv1.EndpointState_ENDPOINT_STATE_WAITING_FOR_POLICY
)

type messages = []*datapathv1.WatchEndpointsResponse

// TestEndpointEventsGoOnOverARestart: the new process refuses the resume token, so the command compares the new listing
// with the endpoints that it knows.
func TestEndpointEventsGoOnOverARestart(t *testing.T) {
	n := nodetest.New(t, Command)
	n.GiveEndpointStreams([]nodetest.EndpointStream{
		{Messages: messages{
			upsert("a", 300, ready), upsert("b", 300, ready), complete("t1"), upsert("c", 301, waiting),
			upsert("c", 301, waiting), upsert("c", 301, ready), removed("b"), removed("never"),
		}, End: status.Error(codes.Unavailable, "going\x1b[2J away")},
		{End: status.Error(codes.OutOfRange, "another run")},
		{Messages: messages{upsert("a", 302, ready)}, End: status.Error(codes.Unavailable, "within the listing")},
		{Messages: messages{upsert("a", 302, ready), upsert("d", 300, ready), complete("t2"), removed("a")}},
	}...)
	got := events(t, n, 11)
	want := []string{
		"created c/eth0 waiting-for-policy identity 301 10.244.0.2",
		"changed c/eth0 state: waiting-for-policy -> ready",
		"deleted b/eth0 ready identity 300 10.244.0.2",
		`disconnected going\x1b[2J away`,
		"connected",
		"changed a/eth0 identity: identity 300 -> identity 302",
		"disconnected within the listing",
		"connected",
		"created d/eth0 ready identity 300 10.244.0.2",
		"deleted c/eth0 ready identity 301 10.244.0.2",
		"deleted a/eth0 ready identity 302 10.244.0.2",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	var tokens []string
	for _, r := range n.WatchedEndpoints() {
		tokens = append(tokens, string(r.GetResumeToken()))
	}
	if want := []string{"", "removed never", "", ""}; fmt.Sprint(tokens[:4]) != fmt.Sprint(want) {
		t.Errorf("tokens %q, want %q", tokens, want)
	}
}

func TestEndpointEventsMayBeginWithWhatExists(t *testing.T) {
	n := nodetest.New(t, Command)
	n.GiveEndpointStreams(nodetest.EndpointStream{Messages: messages{upsert("a", 300, ready), complete("t1")}})
	if got := events(t, n, 1, "--existing"); got[0] != "existing a/eth0 ready identity 300 10.244.0.2" {
		t.Errorf("got %q", got)
	}
}

// TestEndpointEventsFailAtTheBeginning: the command does not wait for a datapath that was never reachable, and never
// longer than --timeout.
func TestEndpointEventsFailAtTheBeginning(t *testing.T) {
	n := nodetest.New(t, Command)
	_, errOut := n.Want(t, invocation.ExitFailed, "endpoint", "events", "--timeout", "50ms")
	if !strings.Contains(errOut, "not answered within 50ms") {
		t.Errorf("a service that says nothing: %q", errOut)
	}
	n.GiveEndpointStreams(nodetest.EndpointStream{End: status.Error(codes.PermissionDenied, "no")})
	n.Want(t, invocation.ExitFailed, "endpoint", "events")
	n.Stop("datapath")
	_, errOut = n.Want(t, invocation.ExitFailed, "endpoint", "events")
	if !strings.Contains(errOut, "Does it run?") {
		t.Errorf("an absent service: %q", errOut)
	}
}

type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, errPipe }

var errPipe = errors.New("broken pipe")

// TestEndpointEventsEndWhenNothingReadsThem, and the command does not reconnect.
func TestEndpointEventsEndWhenNothingReadsThem(t *testing.T) {
	n := nodetest.New(t, Command)
	n.GiveEndpointStreams(nodetest.EndpointStream{Messages: messages{complete("t1"), upsert("a", 300, ready)}})
	inv := &invocation.Invocation{RunDir: n.RunDir, Format: "json", Timeout: 10 * time.Second, Out: brokenPipe{}}
	cmd := Command(inv)
	cmd.SetArgs([]string{"events"})
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	if err := cmd.ExecuteContext(t.Context()); !errors.Is(err, errPipe) {
		t.Errorf("ended with %v", err)
	}
	if asked := len(n.WatchedEndpoints()); asked != 1 {
		t.Errorf("asked %d times", asked)
	}
}

// TestHistoryShowsChangesAlsoOfDeletedEndpoints: a name selects every endpoint that had it.
func TestHistoryShowsChangesAlsoOfDeletedEndpoints(t *testing.T) {
	n := nodetest.New(t, Command)
	kinds := func(args ...string) string {
		t.Helper()
		out, _ := n.Want(t, 0, append([]string{"endpoint", "history", "-o", "wide"}, args...)...)
		var all []string
		for line := range strings.Lines(out) {
			all = append(all, strings.Fields(line)[2]+" "+strings.Fields(line)[3])
		}
		return strings.Join(all, ", ")
	}
	const web, gone = "0123456789abc/eth0", "gone/eth0"
	if got, want := kinds(), "created "+gone+", created "+web+", changed "+web+", deleted "+gone; got != want {
		t.Errorf("all: %s, want %s", got, want)
	}
	for _, name := range []string{"shop/gone", "gone", "go"} {
		if got, want := kinds(name), "created "+gone+", deleted "+gone; got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	out, _ := n.Want(t, 0, "endpoint", "history", "0123", "-o", "wide")
	if !strings.Contains(out, "changed") || !strings.Contains(out, "identity: ") || !strings.Contains(out, "(999)") {
		t.Errorf("a change:\n%s", out)
	}
	out, _ = n.Want(t, 0, "endpoint", "history", "-o", "json")
	var list struct {
		Items []struct {
			Time, Event string
			Changes     []string
			Endpoint    struct{ EndpointID int }
		}
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list.Items) != 4 || list.Items[2].Event != "changed" ||
		len(list.Items[2].Changes) != 1 || list.Items[3].Endpoint.EndpointID != 2 ||
		list.Items[0].Time != "2026-11-27T10:00:00Z" {
		t.Errorf("JSON: %v\n%s", err, out)
	}
	_, errOut := n.Want(t, invocation.ExitFailed, "endpoint", "history", "shop/absent")
	if !strings.Contains(errOut, "no recorded change of container or pod shop/absent") {
		t.Errorf("an unknown name: %s", errOut)
	}
	n.Want(t, invocation.ExitUsage, "endpoint", "history", "a", "b")
}

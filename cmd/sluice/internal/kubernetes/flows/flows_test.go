// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package flows

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/observe"
)

var epoch = time.Unix(1e9, 0)

// of returns an event of a node at a second; without a time if the second is negative.
func of(node string, second int) *event {
	e := &event{node: node}
	if second >= 0 {
		e.flow.Noted = epoch.Add(time.Duration(second) * time.Second)
	}
	return e
}

func text(events []*event) string {
	var texts []string
	for _, e := range events {
		texts = append(texts, fmt.Sprintf("%s%d", e.node, int(e.at.Sub(epoch).Seconds())))
	}
	return strings.Join(texts, " ")
}

func newMerger() merger { return merger{hold: time.Second, limit: 3, clock: clock{}} }

func TestEventsWaitForThoseOfOtherNodes(t *testing.T) {
	m, now := newMerger(), epoch
	m.push(of("a", 5), now)
	if got := text(m.due(now.Add(time.Second - 1))); got != "" {
		t.Errorf("an event did not wait: %s", got)
	}
	m.push(of("b", 3), now.Add(time.Second/2))
	m.push(of("b", 9), now.Add(time.Second/2))
	// The event of 3 has not been held for long, but precedes one that has.
	if got := text(m.due(now.Add(time.Second))); got != "b3 a5" {
		t.Errorf("got %q, want b3 a5", got)
	}
	if got := text(m.due(now.Add(2 * time.Second))); got != "b9" {
		t.Errorf("got %q, want b9", got)
	}
}

func TestMoreEventsThanTheLimitDoNotWait(t *testing.T) {
	m := newMerger()
	for second := range 5 {
		m.push(of("a", second), epoch)
	}
	if got := text(m.due(epoch)); got != "a0 a1" {
		t.Errorf("got %q, want the oldest two of five with a limit of three", got)
	}
}

func TestAnEventWithoutATimeFollowsTheOneBeforeItOnItsNode(t *testing.T) {
	m := newMerger()
	m.push(of("a", 4), epoch)
	m.push(of("b", 1), epoch)
	m.push(of("b", -1), epoch)
	if got := text(m.held); got != "b1 b1 a4" || !m.held[1].flow.At().IsZero() {
		t.Errorf("got %q, want what b lost after b1", got)
	}
}

// TestMergerOrdersAsSortingDoes compares the output with a stable sort.
func TestMergerOrdersAsSortingDoes(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		m := merger{hold: time.Hour, limit: 1000, clock: clock{}}
		var all []*event
		times := clock{}
		for range random.IntN(60) {
			node, second := string(rune('a'+random.IntN(3))), random.IntN(20)-2
			m.push(of(node, second), epoch)
			e := of(node, second)
			times.set(e)
			all = append(all, e)
		}
		byTime(all)
		if got, want := text(m.held), text(all); got != want {
			t.Fatalf("got  %s\nwant %s", got, want)
		}
	}
}

func TestCriteriaReachThePodsAsTheyWereGiven(t *testing.T) {
	parse := func(args ...string) []string {
		var criteria observe.Flags
		flags := pflag.NewFlagSet("observe", pflag.ContinueOnError)
		criteria.Add(flags)
		if err := flags.Parse(args); err != nil {
			t.Fatal(err)
		}
		if err := criteria.Check(); err != nil {
			t.Fatal(err)
		}
		given, err := criteria.Args()
		if err != nil {
			t.Fatal(err)
		}
		return given
	}
	got := parse(
		"-f", "--since=1m", "--label", "app in (a,b),!x", "--not", "--label=tier", "--port", "80,53", "--verdict=dropped",
		"--direction=egress", "--not", "--from", "shop/web-0", "--last", "5", "--until", "2099-01-02T03:04:05+01:00",
		"--output-file", "/tmp/x", "--max-files=3")
	want := []string{
		"--follow", "--last=5", "--since=1m", "--until=2099-01-02T03:04:05+01:00", "--label=app in (a,b),!x", "--not",
		"--label=tier", "--port=80,53", "--verdict=dropped", "--direction=egress", "--not", "--from=shop/web-0",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	// Parsing the arguments again gives the same filters.
	if again := parse(got...); !slices.Equal(again, got) {
		t.Errorf("got %q, and from these %q", got, again)
	}
	// A time of day is in the local time zone.
	day := parse("--since", "10:15")[0]
	at, err := time.Parse(time.RFC3339, strings.TrimPrefix(day, "--since="))
	if err != nil || at.In(time.Local).Format("15:04:05") != "10:15:00" {
		t.Errorf("%q: %v", day, err)
	}
}

func TestPodsOfOtherNodesAreAskedForByTheirAddresses(t *testing.T) {
	pods := map[string]observe.PodPlace{
		"shop/web":  {Node: "n1", Addresses: []string{"10.0.0.1", "fd00::1"}},
		"shop/db":   {Node: "n2", Addresses: []string{"10.0.0.2"}},
		"default/x": {Node: "n2", Addresses: []string{"10.0.0.3"}},
	}
	for _, c := range []struct{ given, want1, want2 string }{
		{
			"--from=shop/web --to=shop/db", "--from=shop/web --to=shop/db --to=10.0.0.2",
			"--from=shop/web --from=10.0.0.1 --from=fd00::1 --to=shop/db",
		},
		{"--not --to=shop/web", "--not --to=shop/web", "--not --to=shop/web --not --to=10.0.0.1 --not --to=fd00::1"},
		{"--pod=shop/web", "--pod=shop/web", "--address=10.0.0.1 --address=fd00::1"},
		{"--pod=x,shop/db", "--address=10.0.0.3 --address=10.0.0.2", "--pod=x,shop/db"},
		{
			"--not --pod=x,shop/web", "--not --pod=x,shop/web --not --address=10.0.0.3",
			"--not --pod=x,shop/web --not --address=10.0.0.1 --not --address=fd00::1",
		},
		// Both --pod and --address must match.
		{"--pod=shop/web --address=10.0.0.9", "--pod=shop/web --address=10.0.0.9", "--pod=shop/web --address=10.0.0.9"},
		// Unknown pods, and names that are not pods.
		{"--pod=shop/gone --pod=shop/db", "--pod=shop/gone --pod=shop/db", "--pod=shop/gone --pod=shop/db"},
		{
			"--from=shop/gone --from=app --from=10.0.0.0/8 --from=a=b --to=7",
			"--from=shop/gone --from=app --from=10.0.0.0/8 --from=a=b --to=7",
			"--from=shop/gone --from=app --from=10.0.0.0/8 --from=a=b --to=7",
		},
	} {
		var criteria observe.Flags
		flags := pflag.NewFlagSet("observe", pflag.ContinueOnError)
		criteria.Add(flags)
		if err := flags.Parse(strings.Fields(c.given)); err != nil {
			t.Fatal(err)
		}
		for node, want := range map[string]string{"n1": c.want1, "n2": c.want2} {
			got, err := criteria.ArgsOn(node, pods)
			if err != nil || strings.Join(got, " ") != want {
				t.Errorf("%s on %s: %q, %v, want %s", c.given, node, got, err, want)
			}
			// The program in the pods accepts the arguments.
			var again observe.Flags
			flags := pflag.NewFlagSet("observe", pflag.ContinueOnError)
			again.Add(flags)
			if err := flags.Parse(got); err != nil || again.Check() != nil {
				t.Errorf("%q: %v, %v", got, err, again.Check())
			}
		}
	}
	var criteria observe.Flags
	flags := pflag.NewFlagSet("observe", pflag.ContinueOnError)
	criteria.Add(flags)
	if err := flags.Parse([]string{
		"--pod=web,shop/db", "--from=10.0.0.0/8", "--from=id", "--to=k in (a/b)", "--to=shop/db", "--to=fd00::/64",
		"--service=shop/svc", "--not", "--to=x/y/z", "--from=/a",
	}); err != nil {
		t.Fatal(err)
	}
	if got := criteria.PodNames(); !slices.Equal(got, []string{"default/web", "shop/db"}) {
		t.Errorf("pods %q", got)
	}
}

func TestLinesNameTheirNode(t *testing.T) {
	var out, errOut bytes.Buffer
	o := observer{inv: &invocation.Invocation{Format: "wide", Out: &out, ErrOut: &errOut}, width: 8}
	e, err := parse("node1", []byte(`{"time":"2026-11-27T10:00:00Z","nodeName":"other","verdict":"dropped",`+
		`"reason":"policy-denied","direction":"ingress","source":{"address":"10.244.0.2"},"destination":{"address":"10.244.0.3"},`+
		`"protocol":"icmp"}`+"\n"))
	if err != nil {
		t.Fatal(err)
	}
	lost, err := parse("node2", []byte(`{"lost":12,"lostBy":"kernel"}`))
	if err != nil {
		t.Fatal(err)
	}
	if err := o.show([]*event{e, lost}); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(out.String(), "\n")
	if !strings.HasPrefix(lines[0], "node1     ") || !strings.Contains(lines[0], "policy-denied") ||
		lines[1] != "node2     --- 12 events were lost by the kernel ---" {
		t.Errorf("got %q", lines)
	}
	// Without -o wide, a long line is broken.
	o.inv.Format = "table"
	out.Reset()
	if err := o.show([]*event{e}); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Split(out.String(), "\n"); len(lines[0]) > 100 || lines[1] != "    icmp" {
		t.Errorf("got %q", lines)
	}
	// Events of another day show the date; notes about the stream are shown, too.
	out.Reset()
	at := time.Date(2026, 11, 26, 10, 0, 0, 0, time.Local)
	noted := &event{node: "node1", flow: observe.Event{Noted: at, Note: "datapath is unavailable"}}
	if err := o.show([]*event{noted}); err != nil ||
		out.String() != "node1     --- 2026-11-26 10:00:00.000 datapath is unavailable ---\n" {
		t.Errorf("got %q, %v", out.String(), err)
	}
	out.Reset()
	o.inv.Format = "json"
	if err := o.show([]*event{e, lost}); err != nil {
		t.Fatal(err)
	}
	if got := out.String(); strings.Count(got, "\n") != 2 || strings.Contains(got, "other") ||
		!strings.Contains(got, `{"nodeName":"node2","lost":12,"lostBy":"kernel"}`) {
		t.Errorf("JSON: %s", got)
	}
	if _, err := parse("node1", []byte("Error: unknown flag")); err == nil {
		t.Error("what is no event was taken for one")
	}
}

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

// of makes the event of a node at a second; without a time if the second is negative.
func of(node string, second int) *event {
	e := &event{node: node, flow: observe.Flow{Node: node}}
	if second >= 0 {
		at := epoch.Add(time.Duration(second) * time.Second)
		e.flow.Time = &at
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
	// That of 3 has not waited for long, and is before one that has.
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
	if got := text(m.held); got != "b1 b1 a4" || m.held[1].flow.Time != nil {
		t.Errorf("got %q, want what b lost after b1", got)
	}
}

// TestMergerOrdersAsSortingDoes compares what comes out at the end with a stable sort.
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
	var criteria observe.Flags
	flags := pflag.NewFlagSet("observe", pflag.ContinueOnError)
	criteria.Add(flags)
	// As a command does, which has further flags.
	command := pflag.NewFlagSet("command", pflag.ContinueOnError)
	command.AddFlagSet(flags)
	if err := command.Parse([]string{
		"-f", "--since=1m", "--label", "app in (a,b),!x", "--label=tier", "--port", "80,53", "--verdict=dropped",
		"--direction=egress",
	}); err != nil {
		t.Fatal(err)
	}
	got := given(flags)
	// A second parse gives the same criteria, in whatever order they are.
	var again observe.Flags
	second := pflag.NewFlagSet("observe", pflag.ContinueOnError)
	again.Add(second)
	if err := second.Parse(got[1:]); err != nil {
		t.Fatal(err)
	}
	if text := given(second); !slices.Equal(text, got) {
		t.Errorf("got %q, and from these %q", got, text)
	}
	for _, want := range []string{
		"--follow=true", "--since=1m0s", "--label=app in (a,b),!x", "--label=tier", "--port=80", "--port=53",
		"--verdict=dropped", "--direction=egress",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("no %q in %q", want, got)
		}
	}
	if len(got) != 9 || got[0] != "observe" {
		t.Errorf("got %q", got)
	}
}

func TestLinesNameTheirNode(t *testing.T) {
	var out, errOut bytes.Buffer
	o := observer{inv: &invocation.Invocation{Format: "table", Out: &out, ErrOut: &errOut}, width: 8}
	e, err := parse("node1", []byte(`{"time":"2026-11-27T10:00:00Z","nodeName":"other","verdict":"dropped",`+
		`"reason":"policy-denied","direction":"ingress","sourceAddress":"10.244.0.2","destinationAddress":"10.244.0.3",`+
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

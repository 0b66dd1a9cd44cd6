// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// test is a test function of a package.
type test struct{ pkg, name string }

func (t test) String() string { return t.pkg + " " + t.name }

// event contains the used fields of a line of `go test -json`.
type event struct {
	Time    time.Time `json:"Time,omitzero"`
	Action  string
	Package string `json:",omitempty"`
	Test    string `json:",omitempty"`
	Output  string `json:",omitempty"`
}

// results summarise the events of a run.
type results struct {
	ran     map[test]bool   // started tests, without subtests
	failed  map[string]bool // packages that failed: a panic or a timeout ends a package before all its tests have started
	skipped []string        // skipped tests and subtests
}

// readEvents reads a stream of events. It ignores lines that are not events, such as linker output.
func readEvents(in io.Reader) (*results, error) {
	r := &results{ran: map[test]bool{}, failed: map[string]bool{}}
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		var e event
		if json.Unmarshal(line, &e) == nil {
			r.add(e)
		}
		if err != nil {
			return r, nil
		}
	}
}

func (r *results) add(e event) {
	switch {
	case e.Action == "fail" && e.Test == "":
		r.failed[e.Package] = true
	case e.Action == "skip" && e.Test != "": // an event without a test: the package has no tests
		r.skipped = append(r.skipped, test{e.Package, e.Test}.String())
	case e.Action == "run" && !strings.Contains(e.Test, "/"):
		r.ran[test{e.Package, e.Test}] = true
	}
}

// missing lists the declared tests that did not run. It leaves out failed packages, because they fail the run anyway.
func (r *results) missing(t *tree) (missing []string) {
	if len(t.declared) == 0 {
		return []string{"the directory declares no tests"}
	}
	for _, d := range t.declared {
		if !r.ran[d] && !r.failed[d.pkg] {
			missing = append(missing, d.String())
		}
	}
	slices.Sort(missing)
	return missing
}

// check is one requirement of a run, and its violations.
type check struct {
	name     string
	findings []string
}

// reporter is the name of the package to which the checks belong as tests.
const reporter = "github.com/sluice-net/sluice/scripts/test"

// report writes the checks as test events.
func report(out io.Writer, checks []check) error {
	w := json.NewEncoder(out)
	verdict, now := "pass", time.Now()
	var errs []error
	for _, c := range checks {
		action := "pass"
		errs = append(errs, w.Encode(event{Time: now, Action: "run", Package: reporter, Test: c.name}))
		for _, f := range c.findings {
			action, verdict = "fail", "fail"
			errs = append(errs, w.Encode(event{
				Time: now, Action: "output", Package: reporter, Test: c.name, Output: fmt.Sprintf("    %s\n", f),
			}))
		}
		errs = append(errs, w.Encode(event{Time: now, Action: action, Package: reporter, Test: c.name}))
	}
	return errors.Join(append(errs, w.Encode(event{Time: now, Action: verdict, Package: reporter}))...)
}

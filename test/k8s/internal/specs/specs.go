// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package specs compares what the specs of a suite did with what is known of them.
package specs

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Known has the specs that do not pass, by their full names, each with the
// reason.
type Known map[string]string

const (
	passed = "passed"
	absent = "absent"
)

// Result is what is said of one spec.
type Result struct {
	// Name is the spec's: its containers' texts and its own.
	Name string
	// State is Ginkgo's word, among them passed, failed and skipped, or "absent" for
	// a known spec that the suite lacks.
	State string
	// Took is how long it ran.
	Took time.Duration
	// Message is the spec's own about its failure, or why it was skipped; Output is
	// what it logged.
	Message, Output string
	// Reason is why it is known to fail; empty if it is not.
	Reason string
	// Err is why the result is not the expected one; nil if it is.
	Err error
}

// Ginkgo reads the selected specs of a JSON report of Ginkgo.
func Ginkgo(file string, selected func(name string) bool) ([]Result, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var reports []struct {
		SpecReports []struct {
			ContainerHierarchyTexts    []string
			LeafNodeType, LeafNodeText string
			State                      string
			RunTime                    time.Duration
			Failure                    struct{ Message string }
			CapturedGinkgoWriterOutput string
		}
	}
	if err := json.Unmarshal(content, &reports); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	var results []Result
	for _, r := range reports {
		for _, s := range r.SpecReports {
			name := strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
			switch {
			case s.LeafNodeType == "It" && selected(name):
				results = append(results, Result{
					Name: name, State: s.State, Took: s.RunTime, Message: s.Failure.Message, Output: s.CapturedGinkgoWriterOutput,
				})
			case s.LeafNodeType != "It" && s.State != passed:
				// A suite that did not start skips its specs.
				return nil, fmt.Errorf("%s %s %s: %s", s.LeafNodeType, name, s.State, s.Failure.Message)
			}
		}
	}
	return results, nil
}

// goTest is how a test of Go says what became of it.
var goTest = regexp.MustCompile(`^    --- (PASS|FAIL|SKIP): [^/ ]+/([^/ ]+) \(([0-9.]+s)\)$`)

// GoTest reads the subtests of the one test of a program, from its output with
// -test.v. What a subtest logged is not told apart.
func GoTest(file string) ([]Result, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	states := map[string]string{"PASS": passed, "FAIL": "failed", "SKIP": "skipped"}
	var results []Result
	for line := range strings.Lines(string(content)) {
		m := goTest.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		if m == nil {
			continue
		}
		took, err := time.ParseDuration(m[3])
		if err != nil {
			return nil, fmt.Errorf("%s: %q: %w", file, line, err)
		}
		results = append(results, Result{Name: m[2], State: states[m[1]], Took: took})
	}
	return results, nil
}

// Compare says which results are not the expected ones: a spec must pass, or be
// known; a known one must not pass, and there must be such a spec.
func Compare(results []Result, known Known) ([]Result, error) {
	if len(results) == 0 {
		return nil, errors.New("the report has none of the selected specs")
	}
	for name := range known {
		if !slices.ContainsFunc(results, func(r Result) bool { return r.Name == name }) {
			results = append(results, Result{Name: name, State: absent})
		}
	}
	for i := range results {
		r := &results[i]
		r.Reason = known[r.Name]
		switch {
		case r.State == absent:
			r.Err = errors.New("is known to fail, but the suite has no such spec: take it off the list")
		case r.State == passed && r.Reason != "":
			r.Err = fmt.Errorf("passes, but is known to fail: take it off the list (%s)", r.Reason)
		case r.State != passed && r.Reason == "":
			r.Err = fmt.Errorf("is not known to fail: %s: %s", r.State, r.Message)
		}
	}
	return results, nil
}

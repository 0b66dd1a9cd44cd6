// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package specs compares the results of a test suite's specs with the known failures.
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

// Known contains the specs that are known to fail, by full name, with the reasons.
type Known map[string]string

const (
	passed = "passed"
	absent = "absent"
)

// Result is the result of one spec.
type Result struct {
	// Name is the spec's full name, including the texts of its containers.
	Name string
	// State is Ginkgo's state, such as passed, failed and skipped, or "absent" for a known spec that is not in the
	// suite.
	State string
	// Took is the duration of the spec.
	Took time.Duration
	// Message explains a failure or a skip. Output is the spec's log.
	Message, Output string
	// Reason is the reason of a known failure; empty for other specs.
	Reason string
	// Err is set if the result is not the expected one.
	Err error
}

// Ginkgo reads the selected specs from a JSON report of Ginkgo.
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
				// A suite that did not start reports its specs as skipped.
				return nil, fmt.Errorf("%s %s %s: %s", s.LeafNodeType, name, s.State, s.Failure.Message)
			}
		}
	}
	return results, nil
}

// goTest matches the result line of a Go test.
var goTest = regexp.MustCompile(`^    --- (PASS|FAIL|SKIP): [^/ ]+/([^/ ]+) \(([0-9.]+s)\)$`)

// GoTest reads the subtests of a program's only test from its output with -test.v. The log is not divided by
// subtests.
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

// Compare reports unexpected results: a spec must pass or be known to fail, and a known spec must exist and not pass.
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

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package specs compares what specs of Ginkgo did with what is known of them.
package specs

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// Known has the specs that do not pass, by their full names, each with the
// reason.
type Known map[string]string

// Result is what is said of one spec.
type Result struct {
	// Name is the spec's: its containers' texts and its own.
	Name string
	// State is Ginkgo's word, or "absent" for a known spec that the suite lacks.
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

// report is the part of Ginkgo's JSON report that is read here.
type report struct {
	SpecReports []struct {
		ContainerHierarchyTexts    []string
		LeafNodeType, LeafNodeText string
		State                      string
		RunTime                    time.Duration
		Failure                    struct{ Message string }
		CapturedGinkgoWriterOutput string
	}
}

// Compare reads a JSON report of Ginkgo, and returns a result for each selected
// spec and each known one. A spec must pass, or be known; a known one must not
// pass, and there must be such a spec.
func Compare(file string, selected func(name string) bool, known Known) ([]Result, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var reports []report
	if err := json.Unmarshal(content, &reports); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	var results []Result
	for _, r := range reports {
		for _, s := range r.SpecReports {
			name := strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
			switch {
			case s.LeafNodeType == "It" && selected(name):
				results = append(results, judge(Result{
					Name: name, State: s.State, Took: s.RunTime, Message: s.Failure.Message,
					Output: s.CapturedGinkgoWriterOutput, Reason: known[name],
				}))
			case s.LeafNodeType != "It" && s.State != "passed":
				// A suite that did not start skips its specs.
				return nil, fmt.Errorf("%s %s %s: %s", s.LeafNodeType, name, s.State, s.Failure.Message)
			}
		}
	}
	if len(results) == 0 {
		return nil, fmt.Errorf("%s has none of the selected specs", file)
	}
	for name, reason := range known {
		if selected(name) && !slices.ContainsFunc(results, func(r Result) bool { return r.Name == name }) {
			results = append(results, judge(Result{Name: name, State: "absent", Reason: reason}))
		}
	}
	slices.SortFunc(results, func(a, b Result) int { return strings.Compare(a.Name, b.Name) })
	return results, nil
}

func judge(r Result) Result {
	switch known := r.Reason != ""; {
	case r.State == "absent":
		r.Err = errors.New("is known to fail, but the suite has no such spec: take it off the list")
	case r.State == "passed" && known:
		r.Err = fmt.Errorf("passes, but is known to fail: take it off the list (%s)", r.Reason)
	case r.State != "passed" && !known:
		r.Err = fmt.Errorf("is not known to fail: %s: %s", r.State, r.Message)
	}
	return r
}

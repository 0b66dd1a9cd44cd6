// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Testcheck compares a run of the tests with the tests that the tree declares. It reads the run's events, as `go test
// -json` writes them, and writes its own findings in the same form, so that the runner counts them as failed tests:
//
//	testcheck [-all DIR] EVENTS
//	testcheck -merge STREAM...
//
// A skipped test is a finding. With -all, two more are findings: a test that is declared below DIR and did not run,
// and a test file with a build constraint that no known run satisfies.
//
// With -merge, testcheck copies the lines of several streams, such as two simultaneous runs, to standard output,
// without mixing parts of lines.
package main

import (
	"flag"
	"fmt"
	"os"
)

func main() {
	all := flag.String("all", "", "the `directory` of the tree whose tests must all have run")
	merging := flag.Bool("merge", false, "copy the lines of several streams to standard output")
	flag.Parse()
	if *merging {
		if err := merge(os.Stdout, flag.Args()); err != nil {
			fmt.Fprintln(os.Stderr, "testcheck:", err)
			os.Exit(2)
		}
		return
	}
	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	found, err := run(*all, flag.Arg(0))
	if err != nil {
		fmt.Fprintln(os.Stderr, "testcheck:", err)
		os.Exit(2)
	}
	if err := report(os.Stdout, found); err != nil {
		fmt.Fprintln(os.Stderr, "testcheck:", err)
		os.Exit(2)
	}
	for _, c := range found {
		if len(c.findings) > 0 {
			os.Exit(1)
		}
	}
}

func run(tree, events string) ([]check, error) {
	in, err := os.Open(events)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	r, err := readEvents(in)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", events, err)
	}
	found := []check{{name: "TestNoTestIsSkipped", findings: r.skipped}}
	if tree == "" {
		return found, nil
	}
	t, err := readTree(tree)
	if err != nil {
		return nil, err
	}
	return append(found,
		check{name: "TestEveryDeclaredTestRuns", findings: r.missing(t)},
		check{name: "TestBuildConstraintsAreKnown", findings: t.constraints}), nil
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command policy-vectors writes tables and queries with the answers of the policy engine to standard output, for
// tests of another implementation of the lookup. The format is length-delimited frames of
// proto/sluice/policyvector/v1.
//
//	policy-vectors vectors [-every N] [DIR]
//	policy-vectors random [-n PAIRS] [-seed S]
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sluice-net/sluice/services/policy/internal/test/vectors/frames"
)

const usage = `usage: policy-vectors vectors [-every N] [DIR]
       policy-vectors random [-n PAIRS] [-seed S]

Frames go to standard output, figures to standard error. DIR is that of
POLICY_VECTORS, or the project's own if run at its top.
`

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	fail := func(code int, format string, a ...any) int {
		fmt.Fprintf(os.Stderr, "policy-vectors: "+format+"\n", a...)
		return code
	}
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return 2
	}
	set := flag.NewFlagSet(args[0], flag.ContinueOnError)
	set.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	var write func() (frames.Figures, error)
	switch args[0] {
	case "vectors":
		every := set.Int("every", 1, "use every N-th probe")
		if set.Parse(args[1:]) != nil || set.NArg() > 1 {
			return 2
		}
		if *every <= 0 {
			return fail(2, "-every %d: want at least 1", *every)
		}
		dir := set.Arg(0)
		if dir == "" {
			dir = os.Getenv("POLICY_VECTORS")
		}
		if dir == "" {
			dir = filepath.Join("services", "policy", "testdata", "policy-vectors")
		}
		write = func() (frames.Figures, error) { return frames.Vectors(os.Stdout, dir, *every) }
	case "random":
		pairs := set.Int("n", 50000, "pairs")
		seed := set.Uint64("seed", 0, "seed")
		if set.Parse(args[1:]) != nil || set.NArg() > 0 {
			return 2
		}
		if *pairs <= 0 {
			return fail(2, "-n %d: want at least 1", *pairs)
		}
		write = func() (frames.Figures, error) { return frames.Random(os.Stdout, *pairs, *seed) }
	default:
		fmt.Fprint(os.Stderr, usage)
		return 2
	}
	figures, err := write()
	if err != nil {
		return fail(1, "%s: %v", args[0], err)
	}
	fmt.Fprintf(os.Stderr, "policy-vectors: %s: %s\n", args[0], figures)
	return 0
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command policy-bench measures the policy engine on synthetic clusters: time, operations, and the memory of a process
// that contains only the engine. Each row is measured in a separate process, because a process does not return to its
// former memory use.
//
//	policy-bench [-rounds N] [-service FILE]
//
// With -service it also measures the service, as a process with an identity service and a subscriber.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"text/tabwriter"

	"github.com/sluice-net/sluice/services/policy/internal/test/synthetic"
)

// line is one measured value.
type line struct{ What, Value string }

// shapes are the sizes of the measured clusters.
var shapes = []struct {
	name string
	synthetic.Shape
}{
	{"2,000 policies, subjects of 25 namespaces", synthetic.Shape{Namespaces: 200, Apps: 50, Policies: 2000, Subjects: 500, SubjectNamespaces: 25}},
	{"2,000 policies, subjects of any namespace", synthetic.Shape{Namespaces: 200, Apps: 50, Policies: 2000, Subjects: 500}},
	{"10,000 policies, subjects of 25 namespaces", synthetic.Shape{Namespaces: 200, Apps: 50, Policies: 10000, Subjects: 500, SubjectNamespaces: 25}},
	{"10,000 policies, subjects of any namespace", synthetic.Shape{Namespaces: 200, Apps: 50, Policies: 10000, Subjects: 500}},
}

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	set := flag.NewFlagSet("policy-bench", flag.ContinueOnError)
	rounds := set.Int("rounds", 20000, "number of identities to add and remove for each percentile")
	part := set.String("part", "", "measure one part in this process and print JSON; set by the program itself")
	index := set.Int("shape", 0, "shape of the part")
	service := set.String("service", "", "path of the service binary, to benchmark it as well")
	only := set.Bool("only-service", false, "measure nothing else")
	if set.Parse(args) != nil {
		return 2
	}
	if *rounds < 100 || set.NArg() > 0 || *index < 0 || *index >= len(shapes) {
		fmt.Fprintln(os.Stderr, "usage: policy-bench [-rounds N] [-service FILE [-only-service]], N at least 100")
		return 2
	}
	if *part != "" {
		lines, err := measure(*part, shapes[*index].Shape, *rounds)
		if err == nil {
			err = json.NewEncoder(os.Stdout).Encode(lines)
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "policy-bench: %s: %v\n", *part, err)
			return 1
		}
		return 0
	}
	fmt.Printf("%s %s/%s, %d CPUs; 200 namespaces × 50 apps = 10,000 identities, 500 subjects\n", runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
	for i, s := range shapes {
		fmt.Printf("\n%s\n", s.name)
		if *service != "" {
			lines, err := measureService(*service, s.Shape)
			if err == nil {
				err = show(lines)
			}
			if err != nil {
				fmt.Fprintf(os.Stderr, "policy-bench: %s: %v\n", *service, err)
				return 1
			}
		}
		if *only {
			continue
		}
		for _, part := range []string{"time", "owner", "memory"} {
			if err := child(part, i, *rounds); err != nil {
				fmt.Fprintf(os.Stderr, "policy-bench: %v\n", err)
				return 1
			}
		}
	}
	if *only {
		return 0
	}
	for _, x := range []struct{ part, title string }{
		{"prefixes", "one policy with 5,000 prefixes with one exception each, one subject"},
		{"ports", "one policy with 40 ports for 5,000 of 10,000 peers, one subject"},
	} {
		fmt.Printf("\n%s\n", x.title)
		if err := child(x.part, 0, *rounds); err != nil {
			fmt.Fprintf(os.Stderr, "policy-bench: %v\n", err)
			return 1
		}
	}
	return 0
}

// child measures a part in a separate process and prints the results.
func child(part string, shape, rounds int) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	c := exec.Command(self, "-part", part, "-shape", fmt.Sprint(shape), "-rounds", fmt.Sprint(rounds))
	c.Stderr = os.Stderr
	out, err := c.Output()
	if err != nil {
		return fmt.Errorf("%s: %w", part, err)
	}
	var lines []line
	if err := json.Unmarshal(out, &lines); err != nil {
		return fmt.Errorf("%s: %w", part, err)
	}
	return show(lines)
}

func show(lines []line) error {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	for _, l := range lines {
		fmt.Fprintf(w, "  %s\t%s\n", l.What, strings.TrimSpace(l.Value))
	}
	return w.Flush()
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Findings checks the record of findings and attacks in docs/record, and the tables that docs/reference/rounds.md and
// docs/causes.md contain of it:
//
//	findings [-root DIR] [-write] [ID…]
//
// Without arguments it prints each mistake in the record and each table that differs from it, and exits with 1 if
// there is one. With -write it writes the tables first. With the ids of findings or attacks it prints these and the
// commands that run their tests, with the id of a cause or the number of a round its findings.
package main

import (
	"flag"
	"fmt"
	"os"
)

func main() {
	root := flag.String("root", ".", "the `directory` of the repository")
	write := flag.Bool("write", false, "write the tables of the documents")
	flag.Parse()
	problems, err := run(*root, *write, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "findings:", err)
		os.Exit(2)
	}
	for _, p := range problems {
		fmt.Println(p)
	}
	if len(problems) > 0 {
		os.Exit(1)
	}
}

// run returns the mistakes that it finds, or prints the rows with the given ids.
func run(root string, write bool, ids []string) ([]string, error) {
	rec, err := readRecord(root)
	if err != nil {
		return nil, err
	}
	declared, err := readTests(root)
	if err != nil {
		return nil, err
	}
	if len(ids) > 0 {
		return nil, show(os.Stdout, rec, declared, ids)
	}
	if len(rec.problems) > 0 {
		// The tables of an invalid record are not compared.
		return rec.problems, nil
	}
	problems := rec.check(declared)
	for _, p := range pages {
		more, err := p.compare(root, rec, write)
		if err != nil {
			return nil, err
		}
		problems = append(problems, more...)
	}
	return problems, nil
}

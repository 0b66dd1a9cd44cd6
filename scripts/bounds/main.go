// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Bounds writes docs/reference/bounds.md from model/bounds:
//
//	go run scripts/bounds/main.go            writes the page
//	go run scripts/bounds/main.go -check     compares it, and the list with settings and tests
//
// It runs in the root of the tree.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/bounds"
)

const page = "docs/reference/bounds.md"

const head = `# Limits

This page is generated from model/bounds. It lists the limits that several tenants use. [shares.md](../shares.md)
explains tenants and how a limit is divided. "Divided by" says who has a guarantee: each *tenant*, *namespace*, or
*endpoint* of a node, or each *object*, because the limit is one of a single object. When a limit is used up, the
*endpoint that uses most* of it loses its oldest part. Tenants have no part of a limit that *root alone* uses by calls
and files. A limit that is *not divided* can be used up by one tenant.

`

func main() {
	check := flag.Bool("check", false, "compare, and write nothing")
	flag.Parse()
	if err := run(*check); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(check bool) error {
	want := render()
	if !check {
		if err := os.MkdirAll(filepath.Dir(page), 0o755); err != nil { //nolint:gosec // documents are for all
			return err
		}
		return os.WriteFile(page, want, 0o644) //nolint:gosec // documents are for all
	}
	have, err := os.ReadFile(page)
	if err == nil && !bytes.Equal(have, want) {
		err = fmt.Errorf("%s differs from model/bounds: run `go run scripts/bounds/main.go`", page)
	}
	return errors.Join(err, settings(), tests(), programs())
}

func render() []byte {
	var b bytes.Buffer
	b.WriteString(head)
	process := ""
	for _, x := range bounds.All {
		if x.Process != process {
			process = x.Process
			fmt.Fprintf(&b, "## %s\n\n", process)
			b.WriteString("| limit | setting | default | divided by | beyond it | shown by |\n")
			b.WriteString("|---|---|---|---|---|---|\n")
		}
		setting := "fixed"
		if x.Setting != "" {
			setting = "`" + x.Setting + "`"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", x.Name, setting, x.Default, x.Divided, x.Beyond, x.Shown)
		if next := slices.Index(names(), x.Name) + 1; next == len(bounds.All) || bounds.All[next].Process != process {
			b.WriteString("\nTests:\n\n")
			for _, of := range bounds.All {
				if of.Process == process {
					writeTests(&b, of)
				}
			}
			b.WriteString("\n")
		}
	}
	return append(bytes.TrimRight(b.Bytes(), "\n"), '\n')
}

// writeTests writes the tests of a limit as an item of a list, one line for each test.
func writeTests(b *bytes.Buffer, of bounds.Bound) {
	for i, t := range of.Tests {
		if i == 0 {
			fmt.Fprintf(b, "- %s:\n", of.Name)
		}
		fmt.Fprintf(b, "  `%s`\n", t)
	}
}

func names() (all []string) {
	for _, x := range bounds.All {
		all = append(all, x.Name)
	}
	return all
}

// row matches the row of a setting that is a limit, in a Markdown table.
var row = regexp.MustCompile(
	"(?m)^\\| `((?:limits|names|history)\\.[A-Za-z.]+|quota|maxBlocksPerNode|flowMetrics\\.maxSeries)` \\|")

// documents has the pages with the settings of processes.
var documents = map[string]string{
	"policy": "sluice-policy", "loadbalancer": "sluice-loadbalancer", "identity": "sluice-identity", "ipam": "sluice-ipam",
	"dns": "sluice-dns", "hubble": "sluice-hubble", "store": "sluice-store",
}

// noLimits are settings with the name of a group of limits that limit nothing, or belong to the row of another one.
var noLimits = []string{
	"names.grace", "history.maxAge", "history.export.file", "history.export.allow", "history.export.deny",
	"history.export.fields", "history.export.backups",
}

// settings returns an error for each limit of the settings without a row in the list.
func settings() error {
	listed := make(map[string]bool)
	for _, x := range bounds.All {
		listed[x.Process+" "+x.Setting] = true
	}
	var errs []error
	for document, process := range documents {
		text, err := os.ReadFile("docs/reference/" + document + ".md") //nolint:gosec // one of the list
		if err != nil {
			return err
		}
		for _, m := range row.FindAllSubmatch(text, -1) {
			setting := string(m[1])
			if slices.Contains(noLimits, setting) {
				continue
			}
			if !listed[process+" "+setting] {
				errs = append(errs, fmt.Errorf("model/bounds has no row for the setting %s of %s", setting, process))
			}
		}
	}
	return errors.Join(errs...)
}

// Maps that programs fill, and the numbers of limits and rates.
var (
	filled = regexp.MustCompile(`(?:bpf_map_update_elem|bpf_ringbuf_reserve)\(&(sl_\w+)`)
	number = regexp.MustCompile(`(?m)^#define (SL_(?:BOUND|RATE)_\w+) \d`)
)

// programs returns an error for each map that programs fill, and for each number of a limit, that no limit in the list
// names.
func programs() error {
	listed := make(map[string]bool)
	for _, x := range bounds.All {
		for _, name := range x.In {
			listed[name] = true
		}
	}
	files, err := filepath.Glob("bpf/include/sluice/*.h")
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no programs in bpf: %w", err)
	}
	used := map[string]bool{"SL_RATE_WINDOW": true} // no limit
	var errs []error
	for _, name := range files {
		text, err := os.ReadFile(name) //nolint:gosec // of the tree
		if err != nil {
			return err
		}
		for _, m := range append(filled.FindAllSubmatch(text, -1), number.FindAllSubmatch(text, -1)...) {
			if of := string(m[1]); !listed[of] && !used[of] {
				used[of] = true
				errs = append(errs, fmt.Errorf("model/bounds has no limit in %s of %s", of, name))
			}
		}
	}
	return errors.Join(errs...)
}

// tests returns an error for each named test that is not declared, and for each divided limit
// without a test.
func tests() error {
	declared := make(map[string]bool)
	out, err := exec.Command("git", "ls-files", "--cached", "--others", "--exclude-standard", "*_test.go").Output()
	if err != nil {
		return err
	}
	function := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	for _, name := range strings.Fields(string(out)) {
		text, err := os.ReadFile(name) //nolint:gosec // of the tree
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		for _, m := range function.FindAllSubmatch(text, -1) {
			declared[string(m[1])] = true
		}
	}
	var errs []error
	for _, x := range bounds.All {
		if len(x.Tests) == 0 && x.Divided != bounds.Undivided {
			errs = append(errs, fmt.Errorf("model/bounds: %q of %s has no test", x.Name, x.Process))
		}
		for _, t := range x.Tests {
			if name, _, _ := strings.Cut(t, "/"); !declared[name] {
				errs = append(errs, fmt.Errorf("model/bounds: %q of %s names %s, which is not declared", x.Name, x.Process, t))
			}
		}
	}
	return errors.Join(errs...)
}

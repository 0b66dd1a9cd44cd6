// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package guide reads documents whose commands are executed by tests, and compares the commands' output with the
// document.
package guide

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
)

// Step is a command of a document, with its output in the document.
type Step struct {
	Line    int // line number in the document
	Command string
	Output  []string
}

// Read returns the commands in the blocks of a document that are marked as console. It ignores other blocks.
func Read(path string) (steps []Step, err error) {
	content, err := os.ReadFile(path) //nolint:gosec // a document that a test names
	if err != nil {
		return nil, err
	}
	var inside, open bool // inside a block; inside a command of several lines
	for number, line := range strings.Split(string(content), "\n") {
		last := len(steps) - 1
		switch {
		case !inside:
			inside = line == "```console"
		case open:
			steps[last].Command += "\n" + line
			open = continues(steps[last].Command)
		case line == "```":
			inside = false
		case strings.HasPrefix(line, "$ "):
			steps = append(steps, Step{Line: number + 1, Command: strings.TrimPrefix(line, "$ ")})
			open = continues(steps[last+1].Command)
		case last < 0:
			return nil, fmt.Errorf("%s:%d: output without a command before it", path, number+1)
		default:
			steps[last].Output = append(steps[last].Output, line)
		}
	}
	switch {
	case open:
		return nil, fmt.Errorf("%s:%d: the command does not end", path, steps[len(steps)-1].Line)
	case inside:
		return nil, fmt.Errorf("%s: the last console block is not closed", path)
	case len(steps) == 0:
		return nil, fmt.Errorf("%s has no commands", path)
	}
	return steps, nil
}

// continues reports whether a command continues in the next line.
func continues(command string) bool {
	if strings.Contains(command, "<<'EOF'") {
		return !strings.HasSuffix(command, "\nEOF")
	}
	return strings.HasSuffix(command, `\`) || strings.HasSuffix(command, "|") || strings.Count(command, "'")%2 == 1
}

// differs replaces parts that change from one run to the next.
var differs = []struct {
	pattern *regexp.Regexp
	same    string
}{
	{regexp.MustCompile(`fd00:244(:[0-9a-f]+)?::`), "fd00:244::"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT[\d:.]+Z`), "TIME"},
	{regexp.MustCompile(`([0-9a-f]{2}:){5}[0-9a-f]{2}`), "MAC"},
	{regexp.MustCompile(`sl[0-9a-f]{11}`), "DEVICE"},
	{regexp.MustCompile(`\b[0-9a-f]{11,64}\b`), "HASH"},
	{regexp.MustCompile(`"(resumeToken|incarnation)": "[^"]*"`), `"$1": "BYTES"`},
	{regexp.MustCompile(`\d+`), "0"},
}

// shape returns a line without the parts that change from one run to the next.
func shape(line string) string {
	for _, d := range differs {
		line = d.pattern.ReplaceAllString(line, d.same)
	}
	return strings.Join(strings.Fields(line), " ")
}

// SameShape compares the output of a command with a document. A line that contains only … matches any number of
// lines. Numbers, times and similar values may differ, and empty lines are ignored.
func SameShape(want []string, printed string) error {
	var have []string
	for _, line := range strings.Split(printed, "\n") {
		if s := shape(line); s != "" {
			have = append(have, s)
		}
	}
	want = slices.DeleteFunc(slices.Clone(want), func(line string) bool { return strings.TrimSpace(line) == "" })
	anywhere := false // the part may begin at any later line
	for len(want) > 0 {
		end := slices.IndexFunc(want, func(line string) bool { return strings.TrimSpace(line) == "…" })
		if end == 0 {
			anywhere, want = true, want[1:]
			continue
		}
		if end < 0 {
			end = len(want)
		}
		part := make([]string, 0, end)
		for _, line := range want[:end] {
			part = append(part, shape(line))
		}
		at := 0
		for anywhere && at+len(part) < len(have) && !slices.Equal(have[at:at+len(part)], part) {
			at++
		}
		if at+len(part) > len(have) || !slices.Equal(have[at:at+len(part)], part) {
			return fmt.Errorf("it does not print:\n%s", strings.Join(want[:end], "\n"))
		}
		have, want, anywhere = have[at+len(part):], want[end:], false
	}
	if !anywhere && len(have) > 0 {
		return fmt.Errorf("it prints more: %s", have[0])
	}
	return nil
}

// Blocks returns the blocks of a document that are marked with a kind.
func Blocks(document, kind string) (blocks []string) {
	var block *strings.Builder
	for line := range strings.Lines(document) {
		switch {
		case block == nil && line == "```"+kind+"\n":
			block = new(strings.Builder)
		case block != nil && line == "```\n":
			blocks = append(blocks, block.String())
			block = nil
		case block != nil:
			block.WriteString(line)
		}
	}
	return blocks
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// step is a command of a document, with what the document says that it prints.
type step struct {
	line    int // in the document
	command string
	output  []string
}

// readGuide gives the commands in the blocks of a document that are marked as
// console. Other blocks are not executed.
func readGuide(t *testing.T, path string) (steps []step) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(repository(t), path))
	if err != nil {
		t.Fatal(err)
	}
	var inside, open bool // of a block; of a command that goes on
	for number, line := range strings.Split(string(content), "\n") {
		last := len(steps) - 1
		switch {
		case !inside:
			inside = line == "```console"
		case open:
			steps[last].command += "\n" + line
			open = continues(steps[last].command)
		case line == "```":
			inside = false
		case strings.HasPrefix(line, "$ "):
			steps = append(steps, step{line: number + 1, command: strings.TrimPrefix(line, "$ ")})
			open = continues(steps[last+1].command)
		case last < 0:
			t.Fatalf("%s:%d: an output before the first command", path, number+1)
		default:
			steps[last].output = append(steps[last].output, line)
		}
	}
	if inside || open || len(steps) == 0 {
		t.Fatalf("%s has %d commands, and a block without an end: %t", path, len(steps), inside)
	}
	return steps
}

// continues says whether a command goes on in the next line.
func continues(command string) bool {
	if strings.Contains(command, "<<'EOF'") {
		return !strings.HasSuffix(command, "\nEOF")
	}
	return strings.HasSuffix(command, `\`) || strings.HasSuffix(command, "|") || strings.Count(command, "'")%2 == 1
}

// differs from one run to the next, and says nothing about the shape.
var differs = []struct {
	pattern *regexp.Regexp
	same    string
}{
	{regexp.MustCompile(`fd00:244(:[0-9a-f]+)?::`), "fd00:244::"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT[\d:.]+Z`), "TIME"},
	{regexp.MustCompile(`([0-9a-f]{2}:){5}[0-9a-f]{2}`), "MAC"},
	{regexp.MustCompile(`sl[0-9a-f]{11}`), "DEVICE"},
	{regexp.MustCompile(`"(resumeToken|incarnation)": "[^"]*"`), `"$1": "BYTES"`},
	{regexp.MustCompile(`\d+`), "0"},
}

// shape is a line without what differs from one run to the next.
func shape(line string) string {
	for _, d := range differs {
		line = d.pattern.ReplaceAllString(line, d.same)
	}
	return strings.Join(strings.Fields(line), " ")
}

// sameShape compares what a command printed with what a document says: a line with
// … alone stands for any number of lines that the document leaves out.
func sameShape(want []string, printed string) error {
	var have []string
	for _, line := range strings.Split(printed, "\n") {
		if s := shape(line); s != "" {
			have = append(have, s)
		}
	}
	anywhere := false // the part may stand further down
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

// follow executes a document in the directory of the sources, with a node for
// development. replace are pairs of words that are not the same for this node.
func (n *testNode) follow(t *testing.T, steps []step, replace ...string) {
	t.Helper()
	programs, err := filepath.Abs(binDir())
	if err != nil {
		t.Fatal(err)
	}
	to := strings.NewReplacer(replace...)
	back := slices.Clone(replace)
	slices.Reverse(back)
	from := strings.NewReplacer(back...)
	for _, s := range steps {
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		cmd := exec.CommandContext(ctx, "bash", "-c", to.Replace(s.command)) //nolint:gosec // a document of the repository
		cmd.Dir = repository(t)
		cmd.Env = append(os.Environ(), "S="+n.Paths().RunDir, "SLUICE_INSTANCE="+n.Instance(), "LC_ALL=C",
			"PATH="+programs+":"+filepath.Join(programs, "tools")+":"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			t.Fatalf("line %d: %s: it has no end: %s", s.line, s.command, out)
		}
		cancel()
		if err := sameShape(s.output, from.Replace(string(out))); err != nil {
			t.Fatalf("line %d: %s: %v (%v)\nit prints:\n%s", s.line, s.command, err, cmd.ProcessState, out)
		}
		if len(s.output) == 0 && err != nil {
			t.Fatalf("line %d: %s: %v", s.line, s.command, err)
		}
	}
}

// TestGuidesAreComparedByShape: what the tests of the documents rely on.
func TestGuidesAreComparedByShape(t *testing.T) {
	if err := sameShape([]string{"a 1", "…", "c 10.244.0.2"}, "a 2\nb\nc 10.244.7.3\n"); err != nil {
		t.Error(err)
	}
	for what, c := range map[string]struct {
		want    []string
		printed string
	}{
		"a line is missing":    {[]string{"a", "…", "c"}, "a\nb\n"},
		"another word":         {[]string{"state: READY"}, "state: DAMAGED"},
		"a line more":          {[]string{"a"}, "a\nb"},
		"a line between":       {[]string{"a", "c"}, "a\nb\nc"},
		"nothing is printed":   {[]string{"a"}, ""},
		"something is printed": {nil, "a"},
		"another order":        {[]string{"…", "b", "…", "a", "…"}, "a\nb\n"},
	} {
		if err := sameShape(c.want, c.printed); err == nil {
			t.Errorf("%s, and it counts as the same", what)
		}
	}
}

// TestKernelTourWithGrpcurlIsTrue executes docs/grpcurl.md.
func TestKernelTourWithGrpcurlIsTrue(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	replace := []string{"/tmp/tour-service.yaml", filepath.Join(t.TempDir(), "service.yaml")}
	for _, p := range []string{"tour-web", "tour-client"} {
		unique := name(t, p+"-")
		replace = append(replace, p, unique)
		t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", unique).Run() }) //nolint:gosec // if the tour ends early
	}
	n.follow(t, readGuide(t, "docs/grpcurl.md"), append(replace, n.addressesOf(t)...)...)
	n.wantNothingHeld(t)
}

// addressesOf are pairs of what the addresses of the first node begin with that
// runs on a machine, as documents show it, and what those of this node do.
func (n *testNode) addressesOf(t *testing.T) (replace []string) {
	t.Helper()
	for _, p := range n.datapathStatus(t).GetPodPrefixes() {
		prefix := netip.MustParsePrefix(p)
		document := "10.244.0."
		if prefix.Addr().Is6() {
			document = "fd00:244::"
		}
		replace = append(replace, document, strings.TrimSuffix(prefix.Addr().Next().String(), "1"))
	}
	return replace
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
)

var update = flag.Bool("update", false, "write the files below testdata/ that the tests compare with")

// TestCommandsAndFlagsAreThoseListed compares every command with its help text, and every flag with its type and
// default, with a golden file. A change of the command line is then visible in a diff.
func TestCommandsAndFlagsAreThoseListed(t *testing.T) {
	t.Setenv("SLUICE_INSTANCE", "")
	var got strings.Builder
	root := (&invocation.Invocation{}).Root(commands...)
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	page := strings.Builder{}
	page.WriteString(commandsPage)
	listCommand(t, &got, &page, root)
	compareWithFile(t, "commands.txt", got.String())
	compareWithFile(t, "../../../docs/reference/commands.md", page.String())
}

// commandsPage is the beginning of docs/reference/commands.md.
const commandsPage = `# Commands

This page is generated from the help texts. [sluice.md](../sluice.md) explains the commands by task.
` + "`kubectl sluice` has the subcommands of `sluice kubernetes`" + `. Each command also has the flags of
` + "`sluice`" + ` itself.
`

// globalFlags matches the flags of the root command in the help of a subcommand, and the line about more help.
var globalFlags = regexp.MustCompile("\n(Global Flags:\n(  .*\n)+|Use \"sluice.*\" for more information about .*\n)")

// compareWithFile fails at the first difference from a file in testdata/.
func compareWithFile(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	gotLines, wantLines := strings.Split(got, "\n"), strings.Split(string(content), "\n")
	for i := range max(len(gotLines), len(wantLines)) {
		if i >= len(gotLines) || i >= len(wantLines) || gotLines[i] != wantLines[i] {
			t.Fatalf("line %d differs from %s:\ngot  %q\nwant %q\n`go test . -run Listed -update` updates the file", i+1,
				file, lineOf(gotLines, i), lineOf(wantLines, i))
		}
	}
}

func lineOf(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return ""
}

// listCommand writes a command, its flags and its subcommands. It also writes the help of commands that are not hidden
// to page.
func listCommand(t *testing.T, w, page *strings.Builder, cmd *cobra.Command) {
	t.Helper()
	fmt.Fprintf(w, "==== %s\n", cmd.CommandPath())
	var out, errOut bytes.Buffer
	args := append(strings.Fields(cmd.CommandPath())[1:], "--help")
	if code := invocation.Run(args, &out, &errOut, commands...); code != 0 || errOut.Len() > 0 {
		t.Fatalf("%s: exit code %d: %s", strings.Join(args, " "), code, errOut.String())
	}
	w.Write(out.Bytes())
	if page != nil && !cmd.Hidden {
		fmt.Fprintf(page, "\n## %s\n\n```text\n%s\n```\n", cmd.CommandPath(),
			strings.TrimSpace(globalFlags.ReplaceAllString(out.String(), "")))
	} else {
		page = nil // also for its subcommands
	}
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		fmt.Fprintf(w, "---- --%s -%s type=%s default=%q without-value=%q hidden=%v\n", f.Name, f.Shorthand, f.Value.Type(),
			f.DefValue, f.NoOptDefVal, f.Hidden)
	})
	if len(cmd.ValidArgs) > 0 {
		fmt.Fprintf(w, "---- arguments %q\n", cmd.ValidArgs)
	}
	for _, sub := range cmd.Commands() {
		listCommand(t, w, page, sub)
	}
}

// TestPluginHasTheCommandsOfKubernetes: `kubectl sluice status` is `sluice kubernetes status`.
func TestPluginHasTheCommandsOfKubernetes(t *testing.T) {
	list := func(root *cobra.Command) string {
		var names []string
		for _, cmd := range root.Commands() {
			for _, sub := range append([]*cobra.Command{cmd}, cmd.Commands()...) {
				names = append(names, strings.TrimPrefix(sub.CommandPath(), root.CommandPath()))
				sub.LocalFlags().VisitAll(func(f *pflag.Flag) { names = append(names, "--"+f.Name) })
			}
		}
		return strings.Join(names, "\n")
	}
	plugin := list(kubernetes.Plugin(&invocation.Invocation{}))
	if own := list(kubernetes.Command(&invocation.Invocation{})); plugin != own || !strings.Contains(own, " status") {
		t.Errorf("the plugin has\n%s\nand `sluice kubernetes`\n%s", plugin, own)
	}
	var out, errOut bytes.Buffer
	if code := invocation.RunRoot([]string{"--help"}, &out, &errOut, kubernetes.Plugin); code != 0 ||
		!strings.Contains(out.String(), "kubectl sluice [command]") {
		t.Errorf("exit code %d, %s%s", code, out.String(), errOut.String())
	}
	if code := invocation.RunRoot([]string{"status", "--instance=x"}, &out, &errOut,
		kubernetes.Plugin); code != invocation.ExitUsage {
		t.Errorf("an instance of this machine: exit code %d", code)
	}
}

func mustExecutable(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return self
}

func TestMistakesOnTheCommandLineAreExitCode2(t *testing.T) {
	n := nodetest.New(t, commands...)
	for _, bad := range [][]string{
		{"nonsense"},
		{"endpoint", "nonsense"},
		{"endpoint", "list", "x"},
		{"--nonsense"},
		{"status", "-o", "yaml"},
		{"status", "--timeout", "0s"},
		{"bugreport", "x"},
		{"bugreport", "--log-lines", "0"},
		{"dev", "nonsense"},
		{"dev", "up"}, // with --run-dir, which dev refuses
		{"kubernetes", "nonsense"},
		{"kubernetes", "status"}, // likewise
	} {
		_, errOut := n.Want(t, invocation.ExitUsage, bad...)
		if !strings.HasPrefix(errOut, "sluice: ") {
			t.Errorf("%q: standard error %q", bad, errOut)
		}
	}
	var out, errOut bytes.Buffer
	if code := invocation.Run([]string{"--instance", "../x", "status"}, &out, &errOut,
		commands...); code != invocation.ExitUsage {
		t.Errorf("a bad instance: exit code %d", code)
	}
	for _, bad := range [][]string{
		{"status", "--kubectl", "/nonsense"},
		{"status", "--kubectl", "/bin/true", "--parallel", "0"},
		{"status", "--kubectl", "/bin/true", "--namespace", ""},
		{"observe", "--kubectl", "/bin/true", "--verdict", "lost"},
		{"bugreport", "--kubectl", "/bin/true", "--log-lines", "0"},
		{"connectivity", "test", "--kubectl", "/bin/true", "--external", "example.com"},
		{"connectivity", "test", "--kubectl", "/bin/true", "--host-port", "70000"},
	} {
		out.Reset()
		errOut.Reset()
		if code := invocation.Run(append([]string{"kubernetes"}, bad...), &out, &errOut,
			commands...); code != invocation.ExitUsage || !strings.HasPrefix(errOut.String(), "sluice: --") {
			t.Errorf("%q: exit code %d, %s", bad, code, errOut.String())
		}
	}
}

// TestHelpOfNoCommandIsAMistake: without this check, cobra would print the help of the parent command.
func TestHelpOfNoCommandIsAMistake(t *testing.T) {
	n := nodetest.New(t, commands...)
	for _, bad := range [][]string{{"nonsense", "--help"}, {"policy", "nonsense", "--help"}, {
		"policy", "nonsense",
		"-h",
	}} {
		out, errOut := n.Want(t, invocation.ExitUsage, bad...)
		if out != "" || !strings.Contains(errOut, `has no command "nonsense"`) {
			t.Errorf("%q: %s%s", bad, out, errOut)
		}
	}
	for _, good := range [][]string{
		{"--help"},
		{"policy", "--help"},
		{"policy", "apply", "--help"},
		{"help", "policy"},
		{"help"},
		{"--version"},
		{"version"},
	} {
		n.Want(t, 0, good...)
	}
}

// TestMistakesAreJSONWhereThatIsAskedFor, including errors that end the flag parser before --output.
func TestMistakesAreJSONWhereThatIsAskedFor(t *testing.T) {
	n := nodetest.New(t, commands...)
	n.Stop("datapath")
	for _, bad := range [][]string{
		{"--nonsense", "-o", "json"},
		{"nonsense", "-o", "json"},
		{"observe", "--last", "x", "--output=json"},
		{"-ojson", "endpoint", "nonsense"},
		{"status", "-o", "json", "--timeout", "x"},
		{"policy", "apply", "--wait=x", "-o=json"},
		{"identity", "get", "--output", "json"},
		{"policy", "explain", "-o", "json"},
		{"observe", "--port", "1,x", "-o", "json"},
		{"endpoint", "list", "-o", "json"}, // the service does not run
	} {
		code, out, errOut := n.Sluice(bad...)
		var got struct {
			Error string `json:"error"`
		}
		want := invocation.ExitUsage
		if bad[1] == "list" {
			want = invocation.ExitFailed
		}
		if err := json.Unmarshal([]byte(errOut), &got); err != nil || got.Error == "" || code != want || out != "" ||
			strings.Count(errOut, "\n") != 1 {
			t.Errorf("%q: exit code %d, standard error %q, output %q", bad, code, errOut, out)
		}
	}
	// An invalid value of --output gives an error as text, and so does "-o json" after "--".
	for _, bad := range [][]string{{"status", "-o", "yaml"}, {"nonsense", "--", "-o", "json"}} {
		if _, errOut := n.Want(t, invocation.ExitUsage, bad...); !strings.HasPrefix(errOut, "sluice: ") {
			t.Errorf("%q: %s", bad, errOut)
		}
	}
}

func TestAnAbsentServiceIsExplained(t *testing.T) {
	n := nodetest.New(t, commands...)
	n.Stop("datapath")
	_, errOut := n.Want(t, invocation.ExitFailed, "endpoint", "list")
	for _, want := range []string{"datapath.sock", "Does it run?", n.RunDir} {
		if !strings.Contains(errOut, want) {
			t.Errorf("no %q in %q", want, errOut)
		}
	}
}

// TestCommandsHaveAliasesAndSuggestions: users of kubectl and cilium type short names, or mistype names.
func TestCommandsHaveAliasesAndSuggestions(t *testing.T) {
	n := nodetest.New(t, commands...)
	for _, alias := range []string{"ep", "svc", "ct", "netpol"} {
		n.Want(t, 0, alias, "list")
	}
	for line, want := range map[string]string{
		"stauts": "did you mean status?", "endpoint lst": "did you mean list?",
		"policy get netpoll x":       "did you mean netpol?",
		"observe --verdict forwardd": "did you mean forwarded?", "conntrack list --state closng": "did you mean closing?",
		"config ipan":              "did you mean ipam?",
		"observe --verdct dropped": "did you mean --verdict?",
		"status -o jsn":            "did you mean json?",
		"help polcy":               "did you mean policy?",
		"help policy applyx":       "did you mean apply?",
		"explain --from reserved:hots --to 10.0.0.1 --port 80": "did you mean reserved:host?",
	} {
		if _, errOut := n.Want(t, invocation.ExitUsage, strings.Fields(line)...); !strings.Contains(errOut, want) {
			t.Errorf("%s: %s, want %q", line, errOut, want)
		}
	}
	for line, want := range map[string]string{
		"dev up --routing natve":         "did you mean native?",
		"dev up --policy-mode requiredx": "did you mean required?",
	} {
		var errOut strings.Builder
		code := invocation.Run(strings.Fields(line), io.Discard, &errOut, commands...)
		if code != invocation.ExitUsage || !strings.Contains(errOut.String(), want) {
			t.Errorf("%s: exit code %d, %s, want %q", line, code, errOut.String(), want)
		}
	}
}

// TestChangesOfOneNodeNameIt: commands that change or compare one node name it, if the cluster has others.
func TestChangesOfOneNodeNameIt(t *testing.T) {
	n := nodetest.New(t, commands...)
	n.Policy.Missing = map[string]string{"a.yaml": "no YAML"}
	services := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebService)
	n.Want(t, 0, "service", "apply", "-f", services)
	for _, line := range []string{
		"service diff -f " + services, "conntrack flush --all", "conntrack flush --all --dry-run",
		"fqdn learn api.example.com 192.0.2.7", "fqdn delete api.example.com", "policy confirm",
		"policy source accept-without a.yaml",
	} {
		var out, errOut strings.Builder
		args := append(strings.Fields(line), "--run-dir", n.RunDir)
		invocation.Run(args, &out, &errOut, commands...)
		if !strings.Contains(out.String(), "this node (node-a), not 1 other node of the cluster.") {
			t.Errorf("%s: %s%s", line, out.String(), errOut.String())
		}
	}
}

// TestTablesFitInTheWidthOfATerminal: -o wide has one line for each object.
func TestTablesFitInTheWidthOfATerminal(t *testing.T) {
	n := nodetest.New(t, commands...)
	for _, line := range []string{
		"endpoint list", "identity list", "node list", "ipam list", "ipam check", "conntrack list", "policy list",
		"service list", "backend list", "map list",
	} {
		var out, errOut strings.Builder
		invocation.Run(append(strings.Fields(line), "--run-dir", n.RunDir), &out, &errOut, commands...)
		if out.Len() == 0 {
			t.Errorf("%s: %s", line, errOut.String())
		}
		for row := range strings.Lines(out.String()) {
			if len(row) > output.Width+1 {
				t.Errorf("%s: a row has %d columns: %s", line, len(row)-1, row)
			}
		}
	}
}

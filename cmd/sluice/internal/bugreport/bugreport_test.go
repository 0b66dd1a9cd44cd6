// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package bugreport

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policy"
	archive "github.com/sluice-net/sluice/cmd/sluice/internal/report"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// private is in every secret of the tests.
const private = "hunter2"

// newNode returns a node with the commands `bugreport` and `policy`.
func newNode(t *testing.T) *nodetest.Node {
	t.Helper()
	t.Setenv("SLUICE_INSTANCE", "")
	return nodetest.New(t, Command, policy.Command)
}

// reportOf makes a report and returns its files by name.
func reportOf(t *testing.T, n *nodetest.Node, args ...string) (files map[string]string, m archive.Manifest,
	stderr string,
) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "r.tar.gz")
	stdout, stderr := n.Want(t, 0, append([]string{"bugreport", "-w", file}, args...)...)
	for len(n.Observed) > 0 {
		<-n.Observed // the channel has a capacity of 1
	}
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(stdout, file+": ") {
		t.Errorf("printed %q", stdout)
	}
	files, m = unpack(t, content)
	return files, m, stderr
}

func unpack(t *testing.T, content []byte) (files map[string]string, m archive.Manifest) {
	t.Helper()
	compressed, err := gzip.NewReader(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	files = map[string]string{}
	for a := tar.NewReader(compressed); ; {
		header, err := a.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(a)
		if err != nil {
			t.Fatal(err)
		}
		_, name, _ := strings.Cut(header.Name, "/")
		files[name] = string(text)
	}
	if err := json.Unmarshal([]byte(files["manifest.json"]), &m); err != nil {
		t.Fatal(err)
	}
	return files, m
}

// reason returns why a file is missing; empty if it is not missing.
func reason(m archive.Manifest, name string) string {
	for _, x := range m.Missing {
		if x.Name == name {
			return x.Reason
		}
	}
	return ""
}

func TestReportHasWhatServicesAnswer(t *testing.T) {
	n := newNode(t)
	files, m, _ := reportOf(t, n)
	for name, want := range map[string]string{
		"status.json":                `"identity"`,
		"version.json":               `"version"`,
		"endpoints.json":             nodetest.LongID,
		"identities.json":            `k8s:app=web`,
		"nodes.json":                 `"node-b"`,
		"pools.json":                 `10.244.0.0/`,
		"allocations.json":           `10.244.0.`,
		"policies.json":              `[`,
		"services.json":              `{`,
		"backends.json":              `[`,
		"maps.json":                  `sl_peer`,
		"check.json":                 `[`,
		"connections.json":           `{"connections":3}`,
		"settings/ipam.json":         `"log.level"`,
		"settings/datapath.json":     `(secret)`,
		"processes/datapath.txt":     "VmRSS:",
		"network/namespace.txt":      "the namespace of this command",
		"network/sysctls.txt":        "net/ipv4/ip_forward = ",
		"machine/kernel.txt":         "Linux version",
		"machine/mounts.txt":         "blocks of",
		"processes/loadbalancer.txt": "Max open files",
	} {
		if !strings.Contains(files[name], want) {
			t.Errorf("%s has no %q: %.300q; missing: %q", name, want, files[name], reason(m, name))
		}
	}
	for _, e := range m.Files {
		if e.Command == "" || len(files[e.Name]) != e.Bytes {
			t.Errorf("%+v has %d bytes", e, len(files[e.Name]))
		}
	}
}

func TestReportNamesWhatIsMissing(t *testing.T) {
	n := newNode(t)
	n.Stop("ipam")
	// A stopped process: its socket accepts connections, but nothing answers.
	n.Stop("datapath")
	l, err := net.Listen("unix", filepath.Join(n.RunDir, "datapath", "datapath.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	files, m, stderr := reportOf(t, n, "--timeout=2s")
	for name, want := range map[string]string{
		"pools.json":             "ipam.sock",
		"metrics/identity.txt":   "metrics.sock",
		"processes/ipam.txt":     "ipam.sock",
		"endpoints.json":         "no answer within 2s",
		"maps.json":              "no answer within 2s",
		"check.json":             "skipped: the 2 parts before it timed out",
		"settings/datapath.json": "skipped",
		"status.json":            "",
	} {
		if got := reason(m, name); !strings.Contains(got, want) || (got == "") != (want == "") {
			t.Errorf("%s is missing because of %q, want %q", name, got, want)
		}
		if want != "" && !strings.Contains(stderr, "missing: "+name+": ") {
			t.Errorf("standard error does not name %s: %s", name, stderr)
		}
	}
	if !strings.Contains(files["status.json"], "no answer within 2s") {
		t.Errorf("the status does not name who gave no answer: %s", files["status.json"])
	}
	if !strings.Contains(files["processes/datapath.txt"], "VmRSS:") {
		t.Error("the process without an answer is not described")
	}
}

func TestReportOfNoNodeFails(t *testing.T) {
	n := newNode(t)
	for _, service := range invocation.Services {
		n.Stop(service)
	}
	file := filepath.Join(t.TempDir(), "r.tar.gz")
	_, stderr := n.Want(t, invocation.ExitFailed, "bugreport", "-w", file)
	if !strings.Contains(stderr, "no service answered") || !strings.Contains(stderr, n.RunDir) {
		t.Errorf("standard error: %s", stderr)
	}
	if _, err := os.Stat(file); err != nil {
		t.Error(err) // the other output may help
	}
}

func TestReportHasManifestsUnlessTheyAreLeftOut(t *testing.T) {
	n := newNode(t)
	manifest := strings.Replace(nodetest.WebPolicy, "{name: web,",
		"{name: web, annotations: {example.com/password: "+private+"},", 1)
	n.Want(t, 0, "policy", "apply", "-f", nodetest.Write(t, t.TempDir(), "web.yaml", manifest))
	files, m, _ := reportOf(t, n)
	var shown struct {
		Kind, Name string
		Manifest   struct{ Spec map[string]any }
	}
	if err := json.Unmarshal([]byte(files["manifests.json"]), &shown); err != nil || shown.Kind != "NetworkPolicy" ||
		shown.Name != "web" || shown.Manifest.Spec["podSelector"] == nil {
		t.Errorf("%s %s, %v", files["manifests.json"], reason(m, "manifests.json"), err)
	}
	for name, text := range files {
		if strings.Contains(text, private) {
			t.Errorf("%s has the secret: %s", name, text)
		}
	}
	files, m, _ = reportOf(t, n, "--without-manifests")
	if _, ok := files["manifests.json"]; ok || reason(m, "manifests.json") != "" {
		t.Error("the manifests are not left out")
	}
	if !strings.Contains(files["policies.json"], `"web"`) {
		t.Errorf("no state of the policy: %s", files["policies.json"])
	}
}

// TestReportTakesLogsThatAreFiles: only regular files are read. Only root should be able to write to the log directory,
// but the report does not rely on it.
func TestReportTakesLogsThatAreFiles(t *testing.T) {
	n := newNode(t)
	dir := filepath.Join(n.RunDir, "log")
	if err := os.Mkdir(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	log := strings.Repeat("line\n", 10) + "token=" + private + " \x1b[2J\nlast\n"
	nodetest.Write(t, dir, "policy.log", log)
	if err := errors.Join(syscall.Mkfifo(filepath.Join(dir, "pipe.log"), 0o600),
		os.Symlink("/etc/passwd", filepath.Join(dir, "link.log"))); err != nil {
		t.Fatal(err)
	}
	files, m, _ := reportOf(t, n, "--log-lines=3")
	if want := "line\ntoken=REDACTED \\u001b[2J\nlast\n"; files["logs/policy.log"] != want {
		t.Errorf("the log is %q, want %q", files["logs/policy.log"], want)
	}
	for _, name := range []string{"logs/pipe.log", "logs/link.log"} {
		if _, ok := files[name]; ok || reason(m, name) == "" {
			t.Errorf("%s is taken", name)
		}
	}
}

func TestReportTalksToNoTerminal(t *testing.T) {
	n := newNode(t)
	n.Endpoints = []*datapathv1.Endpoint{{
		Owner:  &workloadv1.Owner{ContainerId: "evil\x1b[2J", InterfaceName: "eth0"},
		Labels: []*workloadv1.Label{nodetest.Label("app", "\u009b2J\x07")},
	}}
	files, _, stderr := reportOf(t, n)
	files["standard error"] = stderr
	control := func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0 }
	for name, text := range files {
		if i := strings.IndexFunc(text, control); i >= 0 {
			t.Errorf("%s has %q", name, text[i:min(len(text), i+20)])
		}
	}
	if !strings.Contains(files["endpoints.json"], "evil") {
		t.Errorf("endpoints: %s", files["endpoints.json"])
	}
}

// TestFloodOfAnswersIsCut: memory and archive are limited, even if a service sends any amount of data.
func TestFloodOfAnswersIsCut(t *testing.T) {
	const fileLimit, answerLimit = 1 << 20, 2 << 20
	n := nodetest.New(t, func(inv *invocation.Invocation) *cobra.Command {
		return command(inv, fileLimit, answerLimit)
	})
	long := strings.Repeat("x", 4000)
	flow := &datapathv1.Flow{Source: &datapathv1.FlowEnd{Address: "10.0.0.1", Labels: []*workloadv1.Label{
		nodetest.Label("app", long),
	}}}
	n.Flows = slices.Repeat([]*datapathv1.Flow{flow}, 3*fileLimit/2/len(long))
	n.Endpoints = slices.Repeat([]*datapathv1.Endpoint{{
		Owner:  &workloadv1.Owner{ContainerId: "a", InterfaceName: "eth0"},
		Labels: []*workloadv1.Label{nodetest.Label("app", long)},
	}}, 3*answerLimit/2/len(long))
	files, m, _ := reportOf(t, n, "--timeout=2m")
	if got := len(files["events.json"]); got > fileLimit || got < fileLimit/2 ||
		!strings.Contains(reason(m, "events.json"), "cut at 1 MiB") {
		t.Errorf("%d bytes of events, %q", got, reason(m, "events.json"))
	}
	if got := reason(m, "endpoints.json"); files["endpoints.json"] != "" || !strings.Contains(got, "longer than") {
		t.Errorf("%d bytes of endpoints, %q", len(files["endpoints.json"]), got)
	}
	if files["connections.json"] == "" {
		t.Error("the flood kept the rest from coming")
	}
}

func TestReportGoesToStandardOutput(t *testing.T) {
	n := newNode(t)
	stdout, stderr := n.Want(t, 0, "bugreport", "-w", "-")
	files, m := unpack(t, []byte(stdout))
	if files["status.json"] == "" || len(m.Nodes) != 1 || !strings.Contains(stderr, "-: ") {
		t.Errorf("%d files, nodes %q, standard error %q", len(files), m.Nodes, stderr)
	}
	_, stderr = n.Want(t, invocation.ExitFailed, "bugreport", "-w", "/dev/full")
	if !strings.Contains(stderr, "not a regular file") {
		t.Errorf("a device: %s", stderr)
	}
	n.Want(t, invocation.ExitUsage, "bugreport", "--log-lines=0")
}

// TestReportOfAFullDisk: a report to another destination needs no disk space on the node, and a failed write is an
// error.
func TestReportOfAFullDisk(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	n := newNode(t)
	t.Setenv("TMPDIR", "/dev/full")
	var errOut bytes.Buffer
	code := invocation.Run([]string{"--run-dir", n.RunDir, "bugreport", "-w", "-"}, full, &errOut, Command)
	if code != invocation.ExitFailed || !strings.Contains(errOut.String(), "no space left") {
		t.Errorf("exit code %d, %s", code, errOut.String())
	}
	<-n.Observed
	n.Want(t, 0, "bugreport", "-w", "-")
}

// TestPanicOfACommandIsAMissingPart: a report is also required in unforeseen states, so a panic only omits one part.
func TestPanicOfACommandIsAMissingPart(t *testing.T) {
	r := &report{inv: &invocation.Invocation{Timeout: time.Second}, fileLimit: 100, answerLimit: 100}
	before := commands
	t.Cleanup(func() { commands = before })
	commands = []func(*invocation.Invocation) *cobra.Command{func(*invocation.Invocation) *cobra.Command {
		return &cobra.Command{Use: "x", Run: func(*cobra.Command, []string) { panic("at the disco") }}
	}}
	if _, err := r.within(t.Context(), r.sluice("x.json", "x")); err == nil || !strings.Contains(err.Error(), "disco") {
		t.Errorf("got %v", err)
	}
}

// withJournalctl makes a report of the installed node with a shell script as journalctl.
func withJournalctl(t *testing.T, script string, timeout time.Duration) *report {
	t.Helper()
	t.Setenv("PATH", t.TempDir()+":"+os.Getenv("PATH"))
	program := filepath.Join(strings.Split(os.Getenv("PATH"), ":")[0], "journalctl")
	if err := os.WriteFile(program, []byte("#!/bin/sh\n"+script), 0o755); err != nil { //nolint:gosec // executed
		t.Fatal(err)
	}
	a, err := archive.New(time.Now(), together)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return &report{
		inv: &invocation.Invocation{Timeout: timeout}, logLines: 7, fileLimit: 1 << 20, answerLimit: 1 << 20,
		grace: time.Second, archive: a,
	}
}

func TestReportTakesTheJournalOfTheUnits(t *testing.T) {
	r := withJournalctl(t, `case "$1" in
--unit=sluice-ipam.service) exit 0 ;;
--unit=sluice-policy.service) echo "Failed to search journal" >&2; exit 1 ;;
esac
echo "2026-11-28T03:20:10+0000 node $1: $* password: `+private+`"
`, time.Minute)
	r.take(t.Context(), r.journal())
	var b bytes.Buffer
	target, err := archive.Open(archive.Stdout, &b, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := target.Write(r.archive, "x"); err != nil {
		t.Fatal(err)
	}
	files, m := unpack(t, b.Bytes())
	for _, unit := range []string{"prepare", "identity", "loadbalancer", "datapath"} {
		text := files["logs/sluice-"+unit+".journal"]
		for _, want := range []string{
			"--unit=sluice-" + unit + ".service", "--lines=7", "--no-pager", "password: REDACTED",
		} {
			if !strings.Contains(text, want) {
				t.Errorf("the journal of %s has no %q: %q", unit, want, text)
			}
		}
	}
	for unit, want := range map[string]string{
		"ipam": "the journal has no entries of the unit", "policy": "exit status 1: Failed to search journal",
	} {
		if got := reason(m, "logs/sluice-"+unit+".journal"); got != want {
			t.Errorf("the journal of %s is missing because of %q, want %q", unit, got, want)
		}
	}
	if !r.came.Load() {
		t.Error("a report with a journal counts as one without logs")
	}
}

// TestJournalThatHangsIsLeftOut: journalctl hangs and ignores signals, and its child process keeps the output open.
func TestJournalThatHangsIsLeftOut(t *testing.T) {
	children := filepath.Join(t.TempDir(), "children")
	script := "trap '' TERM INT\nsleep 1000 & echo $! >> " + children + "\nwait; wait\n"
	r := withJournalctl(t, script, 10*time.Millisecond)
	r.take(t.Context(), r.journal())
	pids, err := os.ReadFile(children)
	if err != nil {
		t.Fatal(err)
	}
	for pid := range strings.FieldsSeq(string(pids)) {
		n, err := strconv.Atoi(pid)
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(n, syscall.SIGKILL); err != nil {
			t.Errorf("what the stub has started: %v", err)
		}
	}
	m := r.archive.Manifest()
	for i, unit := range append([]string{"prepare"}, invocation.Services...) {
		want := "no answer within 10ms"
		if i >= silent {
			want = "skipped: the 2 parts before it timed out"
		}
		if got := reason(m, "logs/sluice-"+unit+".journal"); !strings.Contains(got, want) {
			t.Errorf("the journal of %s is missing because of %q, want %q", unit, got, want)
		}
	}
	if r.came.Load() {
		t.Error("a journal without an answer counts as a log")
	}
}

func TestTailHasWholeLines(t *testing.T) {
	for _, c := range []struct {
		text  string
		lines int
		part  bool
		want  string
	}{
		{"", 3, false, ""},
		{"a\nb\nc\n", 2, false, "b\nc\n"},
		{"a\nb\nc", 2, false, "b\nc"},
		{"a\nb\n", 5, false, "a\nb\n"},
		{"art\nb\nc\n", 5, true, "b\nc\n"},
		{"art\nb\nc\n", 1, true, "c\n"},
		{"art", 5, true, ""},
		{"\n\n\n", 2, false, "\n\n"},
	} {
		if got := string(lastLines([]byte(c.text), c.lines, c.part)); got != c.want {
			t.Errorf("%q, %d lines, part %v: got %q, want %q", c.text, c.lines, c.part, got, c.want)
		}
	}
}

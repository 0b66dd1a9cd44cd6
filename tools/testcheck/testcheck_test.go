// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// module makes a module from the files in a new directory.
func module(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	files["go.mod"] = "module example.org/m\n\ngo 1.26\n"
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// events runs the tests of a module as scripts/test does, and writes the events to a file.
func events(t *testing.T, dir string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "test", "-json", "-vet=off", "./...")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
	out, err := cmd.Output()
	if len(out) == 0 {
		t.Fatalf("no events: %v", err)
	}
	file := filepath.Join(t.TempDir(), "events.json")
	if err := os.WriteFile(file, out, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

const passes = "package p\n\nimport \"testing\"\n\nfunc TestPasses(t *testing.T) {}\n"

func TestWhatATestFileHidesIsFound(t *testing.T) {
	const pkg = "example.org/m/p "
	for _, test := range []struct {
		name, file, source string
		want               map[string][]string // findings by check
	}{
		{name: "nothing", file: "p/a_test.go", source: passes},
		{
			name: "a skip in a subtest", file: "p/a_test.go",
			source: "package p\n\nimport \"testing\"\n\n" +
				"func TestSub(t *testing.T) { t.Run(\"x\", func(t *testing.T) { t.SkipNow() }) }\n",
			want: map[string][]string{"TestNoTestIsSkipped": {pkg + "TestSub/x"}},
		},
		{
			name: "a skip in a fuzz target", file: "p/a_test.go",
			source: "package p\n\nimport \"testing\"\n\nfunc FuzzIt(f *testing.F) { f.Skip() }\n",
			want:   map[string][]string{"TestNoTestIsSkipped": {pkg + "FuzzIt"}},
		},
		{
			name: "a main function that runs nothing", file: "p/a_test.go",
			source: passes + "\nfunc TestMain(m *testing.M) {}\n",
			want:   map[string][]string{"TestEveryDeclaredTestRuns": {pkg + "TestPasses"}},
		},
		{
			name: "a main function that runs some", file: "p/a_test.go",
			source: strings.Replace(passes, "\"testing\"", "(\n\"flag\"\n\"testing\"\n)", 1) +
				"\nfunc TestOther(t *testing.T) {}\n\nfunc FuzzIt(f *testing.F) {}\n" +
				"\nfunc TestMain(m *testing.M) { flag.Set(\"test.run\", \"Passes\"); m.Run() }\n",
			want: map[string][]string{"TestEveryDeclaredTestRuns": {pkg + "FuzzIt", pkg + "TestOther"}},
		},
		{
			name: "a file for another system", file: "p/a_windows_test.go", source: passes,
			want: map[string][]string{"TestEveryDeclaredTestRuns": {pkg + "TestPasses"}},
		},
		{
			name: "a build constraint", file: "p/a_test.go", source: "//go:build integration\n\n" + passes,
			want: map[string][]string{"TestBuildConstraintsAreKnown": {"p/a_test.go: //go:build integration"}},
		},
		{name: "a constraint of another run", file: "p/a_test.go", source: "//go:build modules\n\n" + passes},
		{
			name: "functions that are no tests", file: "p/a_test.go",
			source: passes + "\nfunc Testify(t *testing.T) {}\n\nfunc TestOf(t *testing.T, n int) {}\n\ntype s struct{}\n\n" +
				"func (s) TestMethod(t *testing.T) {}\n\nfunc TestHelper() {}\n",
		},
		{name: "a directory of data", file: "p/testdata/a_test.go", source: "not Go"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := module(t, map[string]string{
				test.file: test.source, "q/q_test.go": strings.Replace(passes, "package p", "package q", 1),
			})
			checks, err := run(dir, events(t, dir))
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range checks {
				for i, f := range c.findings {
					c.findings[i] = strings.TrimPrefix(f, dir+"/")
				}
				if !slices.Equal(c.findings, test.want[c.name]) {
					t.Errorf("%s: %q, want %q", c.name, c.findings, test.want[c.name])
				}
			}
			if len(checks) != 3 {
				t.Errorf("%d checks, want 3", len(checks))
			}
		})
	}
}

func TestAPackageThatFailedHidesNothing(t *testing.T) {
	r, err := readEvents(strings.NewReader(`{"Action":"start","Package":"example.org/m/p"}
# what a linker prints
{"Action":"run","Package":"example.org/m/p","Test":"TestFirst"}
{"Action":"fail","Package":"example.org/m/p"}
{"Action":"pass","Package":"example.org/m/q"}`))
	if err != nil {
		t.Fatal(err)
	}
	declared := &tree{declared: []test{
		{"example.org/m/p", "TestFirst"}, {"example.org/m/p", "TestSecond"}, {"example.org/m/q", "TestThird"},
	}}
	if got, want := r.missing(declared), []string{"example.org/m/q TestThird"}; !slices.Equal(got, want) {
		t.Errorf("missing are %q, want %q", got, want)
	}
}

func TestATreeWithoutTestsIsAFinding(t *testing.T) {
	if got := (&results{}).missing(&tree{}); len(got) != 1 {
		t.Errorf("%q, want one finding", got)
	}
}

func TestFindingsAreEventsOfFailedTests(t *testing.T) {
	var out bytes.Buffer
	checks := []check{{name: "TestOne"}, {name: "TestTwo", findings: []string{"p TestX", "p TestY"}}}
	if err := report(&out, checks); err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range bytes.Lines(out.Bytes()) {
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		got = append(got, strings.TrimSpace(e.Action+" "+e.Test+" "+strings.TrimSpace(e.Output)))
	}
	want := []string{
		"run TestOne", "pass TestOne",
		"run TestTwo", "output TestTwo p TestX", "output TestTwo p TestY", "fail TestTwo", "fail",
	}
	if !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
}

func TestMergedStreamsKeepTheirLines(t *testing.T) {
	dir := t.TempDir()
	var names []string
	want := make(map[string]int)
	for i, letter := range []string{"a", "b", "c"} {
		line := strings.Repeat(letter, 10_000*(i+1))
		want[line] = 200
		names = append(names, filepath.Join(dir, letter))
		if err := os.WriteFile(names[i], []byte(strings.Repeat(line+"\n", 200)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	if err := merge(&out, names); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out.String()) {
		want[strings.TrimSuffix(line, "\n")]--
	}
	for line, left := range want {
		if left != 0 {
			t.Errorf("a line of %d bytes that begins with %.3s: %d too few", len(line), line, left)
		}
	}
	if err := merge(&out, []string{filepath.Join(dir, "absent")}); err == nil {
		t.Error("a stream that is not there is no error")
	}
}

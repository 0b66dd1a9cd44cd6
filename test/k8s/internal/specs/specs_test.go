// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package specs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// spec returns an entry of a report.
func spec(text, state string) string {
	return fmt.Sprintf(`{"ContainerHierarchyTexts": ["[sig-network] Netpol", "between pods"], "LeafNodeType": "It",
		"LeafNodeText": %q, "State": %q, "RunTime": 2000000000, "Failure": {"Message": "had wrong results"}}`, text, state)
}

func write(t *testing.T, specs ...string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "report.json")
	content := `[{"SuiteSucceeded": false, "SpecReports": [` + strings.Join(specs, ",") + `]}]`
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func netpol(name string) bool { return strings.Contains(name, "Netpol") }

func TestEverySpecPassesOrIsKnownToFail(t *testing.T) {
	const prefix = "[sig-network] Netpol between pods "
	file := write(
		t,
		`{"LeafNodeType": "SynchronizedBeforeSuite", "State": "passed"}`,
		`{"ContainerHierarchyTexts": ["[sig-apps] Job"], "LeafNodeType": "It", "LeafNodeText": "runs", "State": "skipped"}`,
		spec("passes", "passed"),
		spec("fails as known", "failed"),
		spec("is skipped as known", "skipped"),
		spec("passes though known", "passed"),
		spec("fails", "failed"),
		spec("panics", "panicked"),
		spec("takes too long", "timedout"),
		spec("is skipped", "skipped"),
	)
	results, err := Ginkgo(file, netpol)
	if err != nil {
		t.Fatal(err)
	}
	results, err = Compare(results, Known{
		prefix + "fails as known": "no virtual IPs", prefix + "is skipped as known": "no SCTP",
		prefix + "passes though known": "no virtual IPs", prefix + "was renamed": "no virtual IPs",
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"passes": "", "fails as known": "", "is skipped as known": "",
		"passes though known": "take it off the list (no virtual IPs)", "was renamed": "the suite has no such spec",
		"fails": "failed: had wrong results", "panics": "panicked", "takes too long": "timedout", "is skipped": "skipped",
	}
	for _, r := range results {
		name := strings.TrimPrefix(r.Name, prefix)
		part, ok := want[name]
		delete(want, name)
		switch {
		case !ok:
			t.Errorf("a result for %q, which is not selected", r.Name)
		case part == "" && r.Err != nil:
			t.Errorf("%s: %v, want it to be as expected", name, r.Err)
		case part != "" && (r.Err == nil || !strings.Contains(r.Err.Error(), part)):
			t.Errorf("%s: %v, want an error with %q", name, r.Err, part)
		}
		if r.State != "absent" && r.Took != 2*time.Second {
			t.Errorf("%s took %s, want 2s", name, r.Took)
		}
	}
	if len(want) > 0 {
		t.Errorf("no result for %v", want)
	}
}

func TestReportOfASuiteThatDidNotRunIsAnError(t *testing.T) {
	for name, file := range map[string]string{
		"the suite did not start": write(t,
			`{"LeafNodeType": "SynchronizedBeforeSuite", "State": "failed"}`, spec("passes", "skipped")),
		"no spec":               write(t),
		"no selected spec":      write(t, `{"LeafNodeType": "It", "LeafNodeText": "runs", "State": "passed"}`),
		"no report":             filepath.Join(t.TempDir(), "absent"),
		"a report that was cut": cutShort(t, write(t, spec("passes", "passed"))),
	} {
		results, err := Ginkgo(file, netpol)
		if err == nil {
			results, err = Compare(results, nil)
		}
		if err == nil {
			t.Errorf("%s: %+v, want an error", name, results)
		}
	}
}

// cutShort removes the last bytes of the file.
func cutShort(t *testing.T, file string) string {
	t.Helper()
	info, err := os.Stat(file)
	if err == nil {
		err = os.Truncate(file, info.Size()-3)
	}
	if err != nil {
		t.Fatal(err)
	}
	return file
}

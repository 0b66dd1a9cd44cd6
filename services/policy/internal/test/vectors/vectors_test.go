// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package vectors

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// TestVectors runs every file of the directory in POLICY_VECTORS, by default the module's own copy. It prints counts
// per file and the names of the failed cases. The test fails if the number of cases and probes in a file differs from
// the README of the directory. Without a README, it fails if a file is empty.
func TestVectors(t *testing.T) {
	dir := os.Getenv("POLICY_VECTORS")
	if dir == "" {
		dir = filepath.Join("..", "..", "..", "testdata", "policy-vectors")
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		t.Fatalf("no *.jsonl.gz in %s", dir)
	}
	slices.Sort(files)
	want, err := listed(filepath.Join(dir, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	for name := range want {
		if !slices.Contains(files, filepath.Join(dir, name+".jsonl.gz")) {
			t.Errorf("%s.jsonl.gz is listed but missing", name)
		}
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			var cases, probes, failures int
			var failed []string
			err := Read(file, func(c *Case) error {
				cases++
				n, bad := runCase(c)
				probes += n
				if len(bad) > 0 {
					failures += len(bad)
					failed = append(failed, c.Name)
					if len(failed) <= 20 {
						for _, b := range bad[:min(len(bad), 5)] {
							t.Logf("%s: %s", c.Name, b)
						}
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			fmt.Printf("vectors %-28s cases %5d  probes %7d  failures %6d\n", filepath.Base(file), cases, probes, failures)
			if cases == 0 {
				t.Errorf("%s holds no case", file)
			}
			got, name := [2]int{cases, probes}, strings.TrimSuffix(filepath.Base(file), ".jsonl.gz")
			if want != nil && got != want[name] {
				t.Errorf("%d cases and %d probes, the README lists %v", cases, probes, want[name])
			}
			if len(failed) > 0 {
				t.Errorf("%d of %d cases failed: %q", len(failed), cases, failed)
			}
		})
	}
}

// listed returns the number of cases and probes of each file, from the table of a README; nil if there is no README.
func listed(readme string) (map[string][2]int, error) {
	text, err := os.ReadFile(readme)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	counts := map[string][2]int{}
	for _, row := range regexp.MustCompile(`(?m)^\| ([a-z-]+) \| (\d+) \| (\d+) \|`).FindAllStringSubmatch(string(text), -1) {
		cases, err := strconv.Atoi(row[2])
		if err != nil {
			return nil, err
		}
		probes, err := strconv.Atoi(row[3])
		if err != nil {
			return nil, err
		}
		counts[row[1]] = [2]int{cases, probes}
	}
	if len(counts) == 0 {
		return nil, fmt.Errorf("%s has no table of files", readme)
	}
	return counts, nil
}

// runCase returns the number of probes and the failures.
func runCase(c *Case) (probes int, bad []string) {
	switch c.Kind {
	case "Validation":
		return 0, runValidation(c)
	case "FQDNMatch":
		return 0, runNames(c)
	case "DNSQuery":
		return runQueries(c)
	}
	w := NewWorld(c)
	fail := func(format string, args ...any) { bad = append(bad, fmt.Sprintf(format, args...)) }
	refused := 0
	for i := range c.Steps {
		s := &c.Steps[i]
		n, err := w.Step(s, c.Tagged("crd-rejects"))
		if err != nil {
			fail("step %d: %v", i, err)
			return probes, bad
		}
		refused += n
		// Compile once from the difference to the previous step, and once from scratch.
		for _, how := range []string{"incremental", "from scratch"} {
			if how == "from scratch" {
				if i == 0 {
					continue
				}
				w.Reset()
			}
			if err := w.Settle(); err != nil {
				fail("step %d: %v", i, err)
				return probes, bad
			}
			for j := range s.Probes {
				p := &s.Probes[j]
				a, err := w.Ask(p)
				if err != nil {
					fail("step %d, probe %+v: %v", i, *p, err)
					continue
				}
				if !c.Wants(p, a) {
					fail("step %d %s: %s → %s %s %d: egress %q want %q (%+v), ingress %q want %q (%+v), overall %q want %q",
						i, how, p.From, p.To, p.Proto, p.Port, a.Egress, p.Egress, a.EgressWhy, a.Ingress, p.Ingress, a.IngressWhy, a.Overall, p.Expect)
				}
			}
		}
		probes += len(s.Probes)
	}
	// Manifests with this tag must be rejected because of the schema. The verdicts above use their intended meaning.
	if c.Tagged("crd-rejects") && refused == 0 {
		fail("no manifest was refused")
	}
	return probes, bad
}

func runValidation(c *Case) []string {
	got := "accept"
	docs, err := manifest.Parse(c.Manifest)
	if err == nil && len(docs) == 1 {
		_, err = policy.Decode(docs[0], rule.Options{Cluster: "default", LocalClusterOnly: true, HostRules: true})
	}
	if err != nil {
		got = "reject"
	}
	if got != c.Validation.Overall {
		return []string{fmt.Sprintf("%s, want %s: %v\n%s", got, c.Validation.Overall, err, c.Manifest)}
	}
	return nil
}

func runNames(c *Case) (bad []string) {
	var m struct {
		MatchName    *string         `json:"matchName"`
		MatchPattern *string         `json:"matchPattern"`
		Matches      map[string]bool `json:"matches"`
	}
	if err := json.Unmarshal(c.Manifest, &m); err != nil {
		return []string{err.Error()}
	}
	var p dnsname.Pattern
	var err error
	if m.MatchName != nil {
		p, err = dnsname.Name(*m.MatchName)
	} else {
		p, err = dnsname.Parse(*m.MatchPattern)
	}
	if err != nil {
		return []string{err.Error()}
	}
	for name, want := range m.Matches {
		if got := p.Matches(name); got != want {
			bad = append(bad, fmt.Sprintf("%s matches %q: %t, want %t", p, name, got, want))
		}
	}
	return bad
}

// runQueries evaluates DNS queries against the rule sets that several policies have for the same pods, peers and
// ports.
func runQueries(c *Case) (probes int, bad []string) {
	var m struct {
		Policies []json.RawMessage `json:"policies"`
		Queries  map[string]bool   `json:"queries"`
	}
	if err := json.Unmarshal(c.Manifest, &m); err != nil {
		return 0, []string{err.Error()}
	}
	var rules []*layer7.Rules
	for i, list := range m.Policies {
		object, err := decodeOne(fmt.Sprintf(`{"apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
			"metadata": {"name": "p%d", "namespace": "n"}, "spec": {"endpointSelector": {}, "egress": [{
			"toEndpoints": [{}], "toPorts": [{"ports": [{"port": "53", "protocol": "ANY"}],
			"rules": {"dns": %s}}]}]}}`, i, list))
		if err != nil {
			return 0, []string{err.Error()}
		}
		for _, r := range object.Specs[0].Rules {
			if r.Action != policytable.Redirect || r.Proxy != policytable.ProxyDNS {
				bad = append(bad, "the rule does not redirect: "+r.Content())
			}
			rules = append(rules, r.Layer7)
		}
	}
	set := layer7.Union(policytable.ProxyDNS, false, rules...)
	for name, want := range m.Queries {
		if got := layer7.NewMatcher(set).AllowsQuery(name); got != want {
			bad = append(bad, fmt.Sprintf("%s allows %q: %t, want %t", set.DNS, name, got, want))
		}
	}
	return len(m.Queries), bad
}

func decodeOne(text string) (policy.Object, error) {
	docs, err := manifest.Parse([]byte(text))
	if err != nil {
		return policy.Object{}, err
	}
	if len(docs) != 1 {
		return policy.Object{}, fmt.Errorf("%d documents", len(docs))
	}
	return policy.Decode(docs[0], rule.Options{Cluster: "default"})
}

// TestLabelsAreChosenAsByTheIdentityService: the vectors keep and drop the same labels as the identity service, whose
// tests use the same file.
func TestLabelsAreChosenAsByTheIdentityService(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../../../identity/internal/labels/testdata/default-filter.json")
	if err != nil {
		t.Fatal(err)
	}
	var want struct {
		Include, Exclude []string
		Kept             map[string]bool
	}
	if err := json.Unmarshal(data, &want); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(keptLabels, want.Include) || !slices.Equal(droppedLabels, want.Exclude) {
		t.Errorf("rules %q and %q, in the file %q and %q", keptLabels, droppedLabels, want.Include, want.Exclude)
	}
	if len(want.Kept) == 0 {
		t.Fatal("the file has no labels")
	}
	for key, kept := range want.Kept {
		if got := relevant(key); got != kept {
			t.Errorf("%s is kept: %t, in the file %t", key, got, kept)
		}
	}
}

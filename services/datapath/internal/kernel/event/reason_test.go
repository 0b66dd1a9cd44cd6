// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package event

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
)

// Every number of the programs has a name here, every name is explained.
func TestReasonsOfTheProgramsAreNamedAndExplained(t *testing.T) {
	generated, err := os.ReadFile("../../bpf/maps_bpfel.go")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../../../../docs/datapath.md")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]Reason{}
	for _, m := range regexp.MustCompile(`SL_(FWD|REPLY|STACK|DROP|QUIET)_\w+ +MapsSlReason = (\d+)`).FindAllStringSubmatch(string(generated), -1) {
		var n uint32
		if _, err := fmt.Sscan(m[2], &n); err != nil {
			t.Fatal(err)
		}
		r := Reason(n)
		name := r.String()
		if strings.HasPrefix(name, "reason-") {
			t.Errorf("%s has no name", m[0])
			continue
		}
		if other, taken := names[name]; taken {
			t.Errorf("%d and %d are both called %s", other, r, name)
		}
		names[name] = r
		if !strings.Contains(string(doc), fmt.Sprintf("| %d | `%s` |", n, name)) {
			t.Errorf("docs/datapath.md does not explain %d, %s", n, name)
		}
		if want := m[1] == "DROP" || m[1] == "QUIET"; r.Dropped() != want {
			t.Errorf("%s: dropped %v, want %v", name, r.Dropped(), want)
		}
		if want := m[1] == "QUIET"; r.Quiet() != want {
			t.Errorf("%s: quiet %v, want %v", name, r.Quiet(), want)
		}
	}
	if len(names) != len(Reasons()) {
		t.Errorf("the programs have %d reasons, this package names %d", len(names), len(Reasons()))
	}
}

func TestUnknownReasonsAndDirectionsShowTheirNumber(t *testing.T) {
	if got := Reason(255).String(); got != "reason-255" {
		t.Errorf("reason 255 is %q", got)
	}
	if got := Direction(0).String(); got != "direction-0" {
		t.Errorf("direction 0 is %q", got)
	}
}

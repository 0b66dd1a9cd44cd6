// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package event

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// TestReasonsAreThoseOfThePrograms compares the reasons with the list that the programs were compiled with.
func TestReasonsAreThoseOfThePrograms(t *testing.T) {
	generated, err := os.ReadFile("../../bpf/maps_bpfel.go")
	if err != nil {
		t.Fatal(err)
	}
	programs := map[Reason]string{}
	constant := regexp.MustCompile(`SL_REASON_(\w+) +MapsSlReason = (\d+)`)
	for _, m := range constant.FindAllStringSubmatch(string(generated), -1) {
		n, err := strconv.ParseUint(m[2], 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		programs[Reason(n)] = strings.ReplaceAll(strings.ToLower(m[1]), "_", "-")
	}
	if len(programs) != len(Reasons()) {
		t.Errorf("the programs have %d reasons, this package %d", len(programs), len(Reasons()))
	}
	for _, r := range Reasons() {
		if programs[r] != r.String() {
			t.Errorf("reason %d is %q in the programs and %q here", r, programs[r], r)
		}
		quiet := r >= ARP && r <= Broadcast
		if r.Quiet() != quiet || r.Dropped() != (r >= NotIP) {
			t.Errorf("%v: quiet %v, dropped %v", r, r.Quiet(), r.Dropped())
		}
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

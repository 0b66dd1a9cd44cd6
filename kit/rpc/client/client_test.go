// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"os/exec"
	"strings"
	"testing"
)

func TestBadOptionsAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		path string
		o    Options
	}{
		"relative path": {"x.sock", Options{}},
		"long path":     {"/" + strings.Repeat("x", 107), Options{}},
	} {
		if cc, err := Dial(c.path, c.o); err == nil {
			cc.Close()
			t.Errorf("%s was accepted", name)
		}
	}
}

func TestDialSucceedsWhileNothingListens(t *testing.T) {
	cc, err := Dial("/nonexistent/x.sock", Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := cc.Close(); err != nil {
		t.Error(err)
	}
}

// A short-lived process pays for every package at each start.
func TestHeavyPackagesAreNotImported(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, dep := range strings.Fields(string(out)) {
		for _, heavy := range []string{"prometheus", "protovalidate", "cel.dev", "go-grpc-middleware", "sluice/kit/rpc$", "yaml", "reflection"} {
			if strings.Contains(dep+"$", heavy) {
				t.Errorf("imports %s", dep)
			}
		}
	}
}

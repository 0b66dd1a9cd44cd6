// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package dev

import (
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
)

// TestStatusFitsAndShowsTheLogOfWhatDoesNotServe: the table contains the paths of logs only with -o wide. Without it,
// they are shown for services that do not serve.
func TestStatusFitsAndShowsTheLogOfWhatDoesNotServe(t *testing.T) {
	service := func(name string) shownService {
		return shownService{
			Name: name, PID: 27602, Serving: true, Socket: "/run/sluice-dev-1/" + name + "/" + name + ".sock",
			Log: "/var/lib/sluice-dev-1/log/" + name + ".log",
		}
	}
	away := service("datapath")
	away.PID, away.Serving, away.Error = 0, false, "dial unix "+away.Socket+": connect: no such file or directory"
	all := append(processes("dev", []shownService{service("etcd")}),
		processes("dev-1", []shownService{service("loadbalancer"), away})...)
	text := func(wide bool, all []process) string {
		var b strings.Builder
		w := output.Aligned(&b)
		table(w, wide, all)
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	got := text(false, all)
	for line := range strings.Lines(got) {
		if len(strings.TrimSuffix(line, "\n")) > output.Width {
			t.Errorf("a line is longer than %d columns: %s", output.Width, line)
		}
	}
	want := "dev-1 datapath: dial unix " + away.Socket + ": connect: no such file or directory; log: " + away.Log
	if folded := strings.Join(strings.Fields(got), " "); !strings.HasSuffix(folded, want) {
		t.Errorf("no %q at the end of\n%s", want, got)
	}
	if strings.Contains(got, service("etcd").Log) || !strings.Contains(text(true, all), service("etcd").Log) {
		t.Error("the log of a service that serves is in the table with -o wide, and only there")
	}
	if one := text(false, processes("", []shownService{service("etcd")})); strings.Contains(one, "INSTANCE") {
		t.Errorf("one node has a column of instances:\n%s", one)
	}
}

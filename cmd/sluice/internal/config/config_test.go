// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package config

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
)

func TestConfigShowsWhatAProcessUses(t *testing.T) {
	n := nodetest.New(t, Command)
	for _, name := range append([]string{"sluice-policy"}, invocation.Components...) {
		out, _ := n.Want(t, 0, "config", name)
		nodetest.WantLines(t, out, "log.level info default", "etcd.password (secret) /etc/sluice/x.yaml",
			`node a\x1b[2J flag`, "Ignored: SLUICE_X_PORT is not a setting")
	}
	out, _ := n.Want(t, 0, "config", "ipam", "--changed", "-o", "json")
	var c struct {
		Component, Instance string
		Settings            []struct{ Key, Value, Source string }
	}
	if err := json.Unmarshal([]byte(out), &c); err != nil || c.Component != "ipam" || c.Instance != "x" ||
		len(c.Settings) != 2 || fmt.Sprint(c.Settings[0]) != "{etcd.password (secret) file}" {
		t.Errorf("%v: %+v", err, c)
	}
	for _, bad := range [][]string{{"config"}, {"config", "etcd"}, {"config", "ipam", "policy"}, {"config", "../ipam"}} {
		if _, errOut := n.Want(t, invocation.ExitUsage, bad...); !strings.Contains(errOut, "loadbalancer") {
			t.Errorf("%q: %q does not say which there are", bad, errOut)
		}
	}
}

// TestLogLevelIsShownAndChanged: default restores the level of the setting.
func TestLogLevelIsShownAndChanged(t *testing.T) {
	n := nodetest.New(t, Command, LogLevelCommand)
	shown := func(want string) {
		t.Helper()
		if out, _ := n.Want(t, 0, "log-level", "datapath"); out != want+"\n" {
			t.Errorf("the level is %q, want %s", out, want)
		}
	}
	const note = "The log level is debug until the process ends; see `sluice log-level`"
	shown("info")
	if out, _ := n.Want(t, 0, "config", "datapath"); strings.Contains(out, "The log level") {
		t.Errorf("config has a note at the level of the setting:\n%s", out)
	}
	out, _ := n.Want(t, 0, "log-level", "datapath", "debug", "--dry-run")
	nodetest.WantLines(t, out, "Nothing was changed: --dry-run. sluice-datapath would log at level debug; now: info.")
	shown("info")
	out, _ = n.Want(t, 0, "log-level", "sluice-datapath", "debug")
	nodetest.WantLines(t, out, "sluice-datapath logs at level debug until it ends; before: info.")
	shown("debug")
	out, _ = n.Want(t, 0, "config", "datapath")
	nodetest.WantLines(t, out, note)
	out, _ = n.Want(t, 0, "log-level", "datapath", "default", "-o", "json")
	var changed struct{ Component, Previous, Level string }
	if err := json.Unmarshal([]byte(out), &changed); err != nil || changed.Component != "datapath" ||
		changed.Previous != "debug" || changed.Level != "info" {
		t.Errorf("%v: %s", err, out)
	}
	shown("info")
	for want, bad := range map[string][]string{
		"did you mean warn?":                   {"datapath", "warm"},
		"is not one of debug, info, warn":      {"datapath", "trace"},
		`no component "etcd"`:                  {"etcd", "debug"},
		"wants a component (identity, ipam":    {},
		"and a level to change it (debug, inf": {"ipam", "info", "debug"},
	} {
		_, errOut := n.Want(t, invocation.ExitUsage, append([]string{"log-level"}, bad...)...)
		if !strings.Contains(errOut, want) {
			t.Errorf("%q: no %q in %s", bad, want, errOut)
		}
	}
}

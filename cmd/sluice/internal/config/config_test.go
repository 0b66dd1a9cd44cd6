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

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

// TestPluginAnswersAPerson: with the single argument --version, --help or -h, the plugin prints a text for people. It
// ignores other arguments; a runtime passes none.
func TestPluginAnswersAPerson(t *testing.T) {
	for _, arg := range []string{"--version", "--help", "-h"} {
		if text, ok := about([]string{arg}); !ok || !strings.HasPrefix(text, "sluice-cni ") {
			t.Errorf("%s: %q, %v", arg, text, ok)
		}
	}
	for _, args := range [][]string{nil, {}, {"ADD"}, {"--version", "--help"}} {
		if text, ok := about(args); ok {
			t.Errorf("%q: %q", args, text)
		}
	}
}

// TestRefusalsAnswerInTheVersionOfTheConfiguration: a runtime of CNI 1.0.0 reads an error of 1.0.0, also if the plugin
// refuses the configuration or the environment.
func TestRefusalsAnswerInTheVersionOfTheConfiguration(t *testing.T) {
	valid := map[string]string{
		"CNI_COMMAND": "ADD", "CNI_CONTAINERID": "c1", "CNI_IFNAME": "eth0", "CNI_NETNS": "/run/netns/c1",
		"CNI_PATH": "/opt/cni/bin",
	}
	for name, tt := range map[string]struct {
		ifname, version, more, want string
	}{
		"an unsupported capability":     {"eth0", `"1.0.0"`, `"capabilities":{"bandwidth":true}`, "1.0.0"},
		"an unknown key":                {"eth0", `"0.4.0"`, `"nosuch":1`, "0.4.0"},
		"an invalid environment":        {"", `"0.3.1"`, `"mtu":1500`, "0.3.1"},
		"a version that is unsupported": {"eth0", `"9.9.9"`, `"mtu":1500`, "1.1.0"},
		"a version that is a number":    {"eth0", `1`, `"mtu":1500`, "1.1.0"},
		"no version":                    {"eth0", `null`, `"mtu":1500`, "1.1.0"},
		"no JSON":                       {"eth0", `"1.0.0"`, `{`, "1.1.0"},
	} {
		stdin := `{"cniVersion":` + tt.version + `,"name":"x","type":"sluice-cni",` + tt.more + `}`
		getenv := func(k string) string {
			if k == "CNI_IFNAME" {
				return tt.ifname
			}
			return valid[k]
		}
		var out, errOut bytes.Buffer
		if code := run(getenv, strings.NewReader(stdin), &out, &errOut); code != 1 {
			t.Errorf("%s: exit code %d, want 1", name, code)
		}
		var answer struct {
			CNIVersion string `json:"cniVersion"`
			Code       uint   `json:"code"`
		}
		if err := json.Unmarshal(out.Bytes(), &answer); err != nil || answer.Code == 0 || answer.CNIVersion != tt.want {
			t.Errorf("%s: %s, want an error in version %s", name, out.String(), tt.want)
		}
	}
}

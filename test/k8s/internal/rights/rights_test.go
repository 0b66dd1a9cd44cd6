// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rights

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
)

const manifest = `{"name": "datapath", "securityContext": {
	"runAsUser": 0, "runAsGroup": 65700, "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
	"capabilities": {"drop": ["ALL"], "add": ["SETUID", "NET_ADMIN", "BPF"]},
	"seccompProfile": {"type": "RuntimeDefault"}}}`

// status has 0x8000001080: BPF is bit 39, NET_ADMIN 12, SETUID 7.
const status = `Name:	sluice-datapath
Uid:	65706	65706	65706	65706
Gid:	65700	65700	65700	65700
CapPrm:	0000008000001000
CapEff:	0000008000001000
CapBnd:	0000008000001080
NoNewPrivs:	1
Seccomp:	2
`

func container(t *testing.T) (c Container) {
	t.Helper()
	if err := json.Unmarshal([]byte(manifest), &c); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestEveryDifferenceIsFound(t *testing.T) {
	no, yes, other := false, true, 1
	tests := map[string]struct {
		status   []string // old, new
		manifest func(*Container)
		want     string
	}{
		"as it should be":    {},
		"another user":       {status: []string{"Uid:	65706	65706", "Uid:	65706	0"}, want: "user 0"},
		"another group":      {manifest: func(c *Container) { c.SecurityContext.RunAsGroup = &other }, want: "group 65700"},
		"a wider bound":      {status: []string{"CapBnd:	0000008", "CapBnd:	000000a"}, want: "is bound by"},
		"a narrower bound":   {status: []string{"1080", "0080"}, want: "is bound by"},
		"more in effect":     {status: []string{"CapEff:	0000008", "CapEff:	0000009"}, want: "holds"},
		"more permitted":     {status: []string{"CapPrm:	0000008", "CapPrm:	0000009"}, want: "holds"},
		"no filter":          {status: []string{"Seccomp:	2", "Seccomp:	0"}, want: "no seccomp filter"},
		"new privileges":     {status: []string{"NoNewPrivs:	1", "NoNewPrivs:	0"}, want: "may gain privileges"},
		"privileged":         {manifest: func(c *Container) { c.SecurityContext.Privileged = &yes }, want: "is privileged"},
		"a writable root":    {manifest: func(c *Container) { c.SecurityContext.ReadOnlyRootFilesystem = &no }, want: "root"},
		"an open profile":    {manifest: func(c *Container) { c.SecurityContext.SeccompProfile.Type = "" }, want: "profile"},
		"nothing is dropped": {manifest: func(c *Container) { c.SecurityContext.Capabilities.Drop = nil }, want: "drops"},
		"escalation is open": {
			manifest: func(c *Container) { c.SecurityContext.AllowPrivilegeEscalation = nil },
			want:     "allows privilege escalation",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			text, c := status, container(t)
			if test.status != nil {
				if text = strings.Replace(text, test.status[0], test.status[1], 1); text == status {
					t.Fatalf("nothing to replace: %q", test.status)
				}
			}
			if test.manifest != nil {
				test.manifest(&c)
			}
			p, err := Parse(text)
			if err != nil {
				t.Fatal(err)
			}
			got := Differences(c, p, 65706)
			if test.want == "" && len(got) > 0 {
				t.Errorf("differences %q, want none", got)
			}
			if test.want != "" && !slices.ContainsFunc(got, func(d string) bool { return strings.Contains(d, test.want) }) {
				t.Errorf("differences %q, want one with %q", got, test.want)
			}
		})
	}
}

func TestParseReadsTheKernelsFile(t *testing.T) {
	content, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	p, err := Parse(string(content))
	if err != nil {
		t.Fatal(err)
	}
	if p.UID != os.Geteuid() || p.GID != os.Getegid() {
		t.Errorf("%+v, want user %d and group %d", p, os.Geteuid(), os.Getegid())
	}
	if _, err := Parse("Name: x\n"); err == nil {
		t.Error("a status without rights was accepted")
	}
}

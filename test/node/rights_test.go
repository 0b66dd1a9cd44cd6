// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/privilege/privilegetest"
)

// metricsOf returns the metrics page of a service.
func metricsOf(t *testing.T, n *testNode, service string) string {
	t.Helper()
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", n.Paths().MetricsSocket(service))
	}
	client := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	ctx, cancel := deadline(t)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://x/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	page, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(page)
}

// TestKernelServicesRunConfined proves that every thread of every service has exactly the rights in
// docs/privileges.md.
func TestKernelServicesRunConfined(t *testing.T) {
	n := newNode(t)
	for service, want := range map[string]struct {
		uid          string
		capabilities string
	}{
		devnode.Identity: {"65701", "0000000000000000"},
		devnode.IPAM:     {"65702", "0000000000000000"},
		devnode.Policy:   {"65703", "0000000000000000"},
		devnode.Datapath: {"65706", "000000c000201000"},
		devnode.DNS:      {"65710", "0000000000000000"},
	} {
		pid, err := n.PID(service)
		if err != nil {
			t.Fatal(err)
		}
		for _, have := range privilegetest.Threads(t, pid) {
			for key, value := range map[string]string{
				"Uid":    strings.Join([]string{want.uid, want.uid, want.uid, want.uid}, "\t"),
				"CapPrm": want.capabilities, "CapEff": want.capabilities, "CapBnd": want.capabilities,
				"CapInh": "0000000000000000", "CapAmb": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2",
			} {
				if have[key] != value {
					t.Errorf("%s, thread %s: %s is %q, want %q", service, have["Pid"], key, have[key], value)
				}
			}
		}
		page := metricsOf(t, n, service)
		for _, layer := range []string{"seccomp", "landlock"} {
			if line := fmt.Sprintf("sluice_%s_sandbox_enforced{layer=%q} 1\n", service, layer); !strings.Contains(page, line) {
				t.Errorf("the metrics of %s lack %s", service, line)
			}
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
)

// completed returns the completions. It fails the test if the shell would complete file names.
func completed(t *testing.T, n *nodetest.Node, args ...string) (found []string) {
	t.Helper()
	var out, errOut bytes.Buffer
	code := invocation.RunRoot(append([]string{"__complete", "--run-dir", n.RunDir}, args...), &out, &errOut, rootOf)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	// Cobra prints the meaning of the directive to standard error, which the shell scripts discard.
	if code != 0 || lines[len(lines)-1] != ":4" ||
		strings.TrimSpace(errOut.String()) != "Completion ended with directive: ShellCompDirectiveNoFileComp" {
		t.Errorf("%q: exit code %d, %q, standard error %q", args, code, lines, errOut.String())
	}
	for _, line := range lines[:len(lines)-1] {
		value, _, _ := strings.Cut(line, "\t")
		found = append(found, value)
	}
	return found
}

func TestShellCompletesNamesOfTheNode(t *testing.T) {
	n := nodetest.New(t, commands...)
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebService)
	n.Want(t, 0, "service", "apply", "-f", file)
	policies := nodetest.Write(t, t.TempDir(), "policy.yaml", nodetest.WebPolicy)
	n.Want(t, 0, "policy", "apply", "-f", policies)
	for line, want := range map[string]string{
		"observe --verdict ":                   "audited dropped forwarded redirected",
		"observe --verdict forwarded,":         "forwarded,audited forwarded,dropped forwarded,redirected",
		"observe --not --type=pol":             "policy-verdict",
		"observe --direction ":                 "egress ingress",
		"observe --protocol ic":                "icmp icmpv6",
		"observe --reason spoofed-m":           "spoofed-mac",
		"observe --container ":                 nodetest.LongID, // not the one whose name has control characters
		"observe --from reserved:h":            "reserved:health reserved:host",
		"observe --to 0123":                    nodetest.LongID,
		"observe --identity 3":                 "300",
		"observe --output-file x --direction ": "egress ingress",
		"observe ":                             "",
		"observe --port ":                      "",
		"observe -o ":                          "json table wide",
		"endpoint get ":                        nodetest.LongID,
		"endpoint get x ":                      "",
		"capture ":                             nodetest.LongID,
		"endpoint audit-mode x ":               "on off",
		"ipam release ":                        nodetest.LongID,
		"identity get ":                        "300 1",
		"map dump sl_p":                        "sl_peer",
		"node get node-":                       "node-a node-b",
		"service get shop/":                    "shop/web",
		"service delete shop/web ":             "shop/web",
		"policy get cilium":                    "CiliumNetworkPolicy CiliumClusterwideNetworkPolicy CiliumCIDRGroup",
		"policy get netpol ":                   "shop/web",
		"policy get nonsense ":                 "",
		"policy list --kind Net":               "NetworkPolicy",
		"policy table 01":                      nodetest.LongID,
		"explain --from 0":                     nodetest.LongID,
		"kubernetes observe --container ":      "",
		"kubernetes observe --verdict a":       "audited",
		"dev up --routing n":                   "native none",
		"status --timeout ":                    "",
	} {
		got := completed(t, n, strings.Split(line, " ")...)
		wanted := strings.Fields(want)
		slices.Sort(got)
		slices.Sort(wanted)
		if !slices.Equal(got, wanted) {
			t.Errorf("%q: %q, want %q", line, got, wanted)
		}
	}
	// The shell completes file names.
	for _, line := range []string{"observe --output-file ", "policy apply -f ", "capture x -w "} {
		var out, errOut bytes.Buffer
		invocation.RunRoot(append([]string{"__complete"}, strings.Split(line, " ")...), &out, &errOut, rootOf)
		if !strings.HasSuffix(strings.TrimSpace(out.String()), ":0") {
			t.Errorf("%q: %q, want files", line, out.String())
		}
	}
}

// TestShellIsSilentWhileAServiceIsAway: an error printed by a completion would garble the command line.
func TestShellIsSilentWhileAServiceIsAway(t *testing.T) {
	n := nodetest.New(t, commands...)
	for _, service := range []string{"datapath", "identity", "policy", "loadbalancer"} {
		n.Stop(service)
	}
	for _, line := range []string{
		"endpoint get ", "identity get ", "map dump ", "node get ", "service get ", "policy get netpol ", "observe --pod ",
		"observe --service ",
	} {
		if got := completed(t, n, strings.Split(line, " ")...); len(got) > 0 {
			t.Errorf("%q: %q", line, got)
		}
	}
}

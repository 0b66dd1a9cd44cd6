// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/test/internal/pod"
)

// TestKernelRecipeOfDevUpMakesAPodThatPoliciesSelect runs the commands that `sluice dev up` prints for connecting a
// network namespace by hand. Only the pod's name is replaced.
func TestKernelRecipeOfDevUpMakesAPodThatPoliciesSelect(t *testing.T) {
	t.Parallel()
	instance, pod1 := name(t, "t"), name(t, "pod")
	run := func(program string, args ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		defer cancel()
		out, err := exec.CommandContext(ctx, program, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s %q: %v: %s", program, args, err, out)
		}
		return string(out)
	}
	sluice := func(args ...string) string {
		t.Helper()
		return run(filepath.Join(binDir(), "sluice"), append([]string{"--instance", instance}, args...)...)
	}
	bin, err := filepath.Abs(binDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		out, err := exec.Command(filepath.Join(binDir(), "sluice"), "--instance", instance, "dev", "down").CombinedOutput()
		if err != nil {
			t.Errorf("take the node down: %v: %s", err, out)
		}
		if err := pod.DeleteNetns(pod.NetnsPath(pod1)); err != nil {
			t.Error(err)
		}
	})
	printed := sluice("dev", "up", "--bin-dir", bin)
	_, rest, found := strings.Cut(printed, "Connect a network namespace as the pod")
	_, rest, _ = strings.Cut(rest, "\n")
	recipe, _, ended := strings.Cut(rest, "\n\n")
	if !found || !ended {
		t.Fatalf("no recipe:\n%s", printed)
	}
	run("/bin/sh", "-ec", strings.ReplaceAll(recipe, "pod1", pod1))
	manifest := filepath.Join(t.TempDir(), "deny.yaml")
	if err := os.WriteFile(manifest, []byte(`apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: deny}
spec: {podSelector: {matchLabels: {app: `+pod1+`}}}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	if out := sluice("policy", "apply", "-f", manifest); strings.Contains(out, "selects no") {
		t.Errorf("apply: %s", out)
	}
	if out := sluice("policy", "list"); !strings.Contains(out, "1 identity") {
		t.Errorf("the policy selects nothing:\n%s", out)
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/guide"
)

// follow executes a document in the directory of the sources, against a development node. replace are pairs of
// strings that differ for this node.
func (n *testNode) follow(t *testing.T, document string, replace ...string) {
	t.Helper()
	steps, err := guide.Read(filepath.Join(repository(t), document))
	if err != nil {
		t.Fatal(err)
	}
	programs, err := filepath.Abs(binDir())
	if err != nil {
		t.Fatal(err)
	}
	to := strings.NewReplacer(replace...)
	back := slices.Clone(replace)
	slices.Reverse(back)
	from := strings.NewReplacer(back...)
	for _, s := range steps {
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		cmd := exec.CommandContext(ctx, "bash", "-c", to.Replace(s.Command)) //nolint:gosec // a document of the repository
		cmd.Dir = repository(t)
		cmd.Env = append(os.Environ(), "S="+n.Paths().RunDir, "SLUICE_INSTANCE="+n.Instance(), "LC_ALL=C",
			"PATH="+programs+":"+filepath.Join(programs, "tools")+":"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			t.Fatalf("%s:%d: %s: it has no end: %s", document, s.Line, s.Command, out)
		}
		cancel()
		if err := guide.SameShape(s.Output, from.Replace(string(out))); err != nil {
			t.Fatalf("%s:%d: %s: %v (%v)\nit prints:\n%s", document, s.Line, s.Command, err, cmd.ProcessState, out)
		}
		if len(s.Output) == 0 && err != nil {
			t.Fatalf("%s:%d: %s: %v", document, s.Line, s.Command, err)
		}
	}
}

// TestKernelTourWithGrpcurlIsTrue executes docs/grpcurl.md.
func TestKernelTourWithGrpcurlIsTrue(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	replace := []string{"/tmp/tour-service.yaml", filepath.Join(t.TempDir(), "service.yaml")}
	for _, p := range []string{"tour-web", "tour-client"} {
		unique := name(t, p+"-")
		replace = append(replace, p, unique)
		t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", unique).Run() }) //nolint:gosec // if the tour ends early
	}
	n.follow(t, "docs/grpcurl.md", append(replace, n.addressesOf(t)...)...)
	n.wantNothingHeld(t)
}

// addressesOf returns pairs of address prefixes: the prefixes in documents, which belong to the first node on a
// machine, and the prefixes of this node.
func (n *testNode) addressesOf(t *testing.T) (replace []string) {
	t.Helper()
	for _, p := range n.datapathStatus(t).GetPodPrefixes() {
		prefix := netip.MustParsePrefix(p)
		document := "10.244.0."
		if prefix.Addr().Is6() {
			document = "fd00:244::"
		}
		replace = append(replace, document, strings.TrimSuffix(prefix.Addr().Next().String(), "1"))
	}
	return replace
}

// TestKernelPoliciesOfTheGuideAreAccepted executes the commands of
// docs/policies-without-kubernetes.md and validates its manifests.
func TestKernelPoliciesOfTheGuideAreAccepted(t *testing.T) {
	t.Parallel()
	const document = "docs/policies-without-kubernetes.md"
	content, err := os.ReadFile(filepath.Join(repository(t), document))
	if err != nil {
		t.Fatal(err)
	}
	manifests := guide.Blocks(string(content), "yaml")
	if len(manifests) < 6 {
		t.Errorf("%s has %d manifests", document, len(manifests))
	}
	for i, manifest := range manifests {
		file := filepath.Join(t.TempDir(), "manifest.yaml")
		if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
			t.Fatal(err)
		}
		program := filepath.Join(binDir(), "sluice")
		validate := exec.CommandContext(t.Context(), program, "policy", "validate", "-f", file) //nolint:gosec // of the build
		out, err := validate.CombinedOutput()
		if err != nil || strings.Contains(string(out), "not supported") || strings.Contains(string(out), "selects nothing") {
			t.Errorf("manifest %d of %s: %v: %s\n%s", i+1, document, err, out, manifest)
		}
	}
	n := newNode(t)
	n.follow(t, document, "/tmp/guide-db.yaml", filepath.Join(t.TempDir(), "db.yaml"))
}

// TestKernelFirstHourIsTrue executes docs/tutorials/first-hour.md.
func TestKernelFirstHourIsTrue(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	replace := []string{"/tmp/hour-service.yaml", filepath.Join(t.TempDir(), "service.yaml")}
	for _, p := range []string{"hour-web", "hour-client"} {
		unique := name(t, p+"-")
		replace = append(replace, p, unique)
		t.Cleanup(func() { // if the tutorial ends early
			end := "ip netns pids " + unique + " | xargs -r kill; ip netns del " + unique
			_ = exec.Command("bash", "-c", end).Run() //nolint:gosec // a namespace of this test
		})
	}
	n.follow(t, "docs/tutorials/first-hour.md", append(replace, n.addressesOf(t)...)...)
	n.wantNothingHeld(t)
}

// TestKernelAnHourAgoIsTrue executes docs/tutorials/an-hour-ago.md.
func TestKernelAnHourAgoIsTrue(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(o *devnode.Options) { o.Hubble = true })
	var replace []string
	for _, p := range []string{"ago-web", "ago-client"} {
		unique := name(t, p+"-")
		replace = append(replace, p, unique)
		t.Cleanup(func() { // if the tutorial ends early
			end := "ip netns pids " + unique + " | xargs -r kill; ip netns del " + unique
			_ = exec.Command("bash", "-c", end).Run() //nolint:gosec // a namespace of this test
		})
	}
	n.follow(t, "docs/tutorials/an-hour-ago.md", append(replace, n.addressesOf(t)...)...)
	n.wantNothingHeld(t)
}

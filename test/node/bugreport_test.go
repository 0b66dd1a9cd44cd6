// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/instance"
)

// bugreport is a report of a node, made by some user.
type bugreport struct {
	files   map[string]string
	missing map[string]string // reasons by file name
}

// report makes a report within a timeout, as root or as a user in the group.
func (n *testNode) report(t *testing.T, user *syscall.Credential, args ...string) bugreport {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()
	// Every user may execute the programs below the run directory.
	cmd := exec.CommandContext(ctx, filepath.Join(n.Paths().RunDir, "bin", "sluice"),
		append([]string{"--instance", n.Instance(), "bugreport", "-w", "-"}, args...)...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.Dir = &out, &errOut, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: user}
	if err := cmd.Run(); err != nil {
		t.Fatalf("bugreport: %v: %s", err, errOut.String())
	}
	b := bugreport{files: map[string]string{"standard error": errOut.String()}, missing: map[string]string{}}
	compressed, err := gzip.NewReader(&out)
	if err != nil {
		t.Fatal(err)
	}
	for archive := tar.NewReader(compressed); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		_, name, _ := strings.Cut(header.Name, "/")
		b.files[name] = string(content)
	}
	var manifest struct {
		Missing []struct{ Name, Reason string }
	}
	if err := json.Unmarshal([]byte(b.files["manifest.json"]), &manifest); err != nil {
		t.Fatal(err)
	}
	for _, m := range manifest.Missing {
		b.missing[m.Name] = m.Reason
		if !strings.Contains(errOut.String(), "missing: "+m.Name+": ") {
			t.Errorf("standard error does not name %s: %s", m.Name, errOut.String())
		}
	}
	return b
}

// wantFiles fails the test if files lack expected content.
func (b bugreport) wantFiles(t *testing.T, want map[string]string) {
	t.Helper()
	for name, text := range want {
		if !strings.Contains(b.files[name], text) {
			t.Errorf("%s has no %q: %.1000q; missing: %q", name, text, b.files[name], b.missing[name])
		}
	}
}

// TestKernelBugreportOfANodeThatHangs makes reports of a node with a secret in its settings and in a policy: while
// its processes answer, while its datapath is stopped, and as a user in the group.
func TestKernelBugreportOfANodeThatHangs(t *testing.T) {
	t.Parallel()
	const secret = "hunter2-of-the-test"
	n := newNode(t, func(o *devnode.Options) {
		o.Args = map[string][]string{devnode.Identity: {"--etcd-prefix=/password=" + secret}}
	})
	pods := n.addPods(t, "web")
	enforce(t, n.policies(t), "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\n"+
		"metadata: {name: web, namespace: test, annotations: {example.com/token: "+secret+"}}\nspec: {podSelector: {}}\n")
	noSecret := func(b bugreport) {
		t.Helper()
		for name, text := range b.files {
			if at := strings.Index(text, secret); at >= 0 {
				t.Errorf("%s has the secret: %q", name, text[max(0, at-200):at])
			}
		}
	}

	whole := n.report(t, nil)
	noSecret(whole)
	for name, reason := range whole.missing {
		t.Errorf("on a healthy node %s is missing: %s", name, reason)
	}
	whole.wantFiles(t, map[string]string{
		"endpoints.json": pods[0].Name, "settings/identity.json": "/password=REDACTED", "manifests.json": "REDACTED",
		"logs/identity.log": "/password=REDACTED", "processes/identity.txt": "--etcd-prefix=/password=REDACTED",
		"metrics/datapath.txt": "go_goroutines", "logs/cni.log": "", "network/routes4.txt": "10.244.",
		"network/links.txt": ": sl", "network/nftables.txt": "", "network/sysctls.txt": "net/ipv4/ip_forward = 1",
		"network/namespace.txt": n.Netns(), "connections.json": `{"connections":`, "check.json": "[",
	})

	pid, err := n.PID(devnode.Datapath)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	goOn := func() {
		if err := unix.Kill(pid, unix.SIGCONT); err != nil {
			t.Error(err)
		}
	}
	defer goOn() // also if the test fails first
	stopped := n.report(t, nil, "--timeout=5s")
	noSecret(stopped)
	stopped.wantFiles(t, map[string]string{
		"status.json": "no answer within 5s", "pools.json": "10.244.", "policies.json": "web", "identities.json": "app=web",
		"processes/datapath.txt": "T (stopped)", "logs/datapath.log": "endpoint", "network/routes4.txt": "10.244.",
	})
	for name, want := range map[string]string{
		"endpoints.json": "no answer within 5s", "maps.json": "no answer", "events.json": "skipped",
		"metrics/datapath.txt": "skipped",
	} {
		if !strings.Contains(stopped.missing[name], want) {
			t.Errorf("%s is missing because of %q, want %q", name, stopped.missing[name], want)
		}
	}
	goOn()

	member := n.report(t, &syscall.Credential{Uid: 65799, Gid: instance.GroupID, Groups: []uint32{instance.GroupID}})
	noSecret(member)
	member.wantFiles(t, map[string]string{
		"endpoints.json": pods[0].Name, "policies.json": "web", "settings/identity.json": "REDACTED",
	})
	for name, want := range map[string]string{
		"check.json": "root", "network/links.txt": "not permitted", "processes/datapath.txt": "denied",
	} {
		if !strings.Contains(member.missing[name], want) {
			t.Errorf("as a member of the group %s is missing because of %q, want %q", name, member.missing[name], want)
		}
	}
}

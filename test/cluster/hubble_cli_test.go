// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build hubble

package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// hubbleProgram returns a program that `make test-hubble` builds.
func hubbleProgram(name string) string { return filepath.Join(binDir(), "hubble", name) }

// startRelay runs hubble-relay with arguments until the test ends, and returns its address.
func startRelay(t *testing.T, args ...string) (address string) {
	t.Helper()
	free, err := net.Listen("tcp", "127.0.0.1:0") // the relay listens only on TCP, and does not say at which port
	if err != nil {
		t.Fatal(err)
	}
	address = free.Addr().String()
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	args = append([]string{"serve"}, args...)
	args = append(args, "--listen-address="+address, "--health-listen-address=127.0.0.1:0")
	//nolint:gosec // a program that the target of this test builds
	relay := exec.CommandContext(ctx, hubbleProgram("hubble-relay"), args...)
	var log bytes.Buffer
	relay.Stdout, relay.Stderr = &log, &log
	if err := relay.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = relay.Wait() // it was killed
		if t.Failed() {
			t.Logf("log of hubble-relay:\n%s", log.String())
		}
	})
	return address
}

// hubbleCLI runs the CLI and returns its output.
func hubbleCLI(t *testing.T, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	//nolint:gosec // a program that the target of this test builds
	cmd := exec.CommandContext(ctx, hubbleProgram("hubble"), args...)
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("hubble %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}

// TestHubbleCLIReadsTheRelayOfTheManifest: hubble-relay runs with the arguments, names and certificates of the
// component hubble-relay. It reaches the nodes over TCP, and its clients need a certificate.
func TestHubbleCLIReadsTheRelayOfTheManifest(t *testing.T) {
	content, err := os.ReadFile(filepath.Join("..", "..", "deploy", "kubernetes", "components", "hubble-relay",
		"deployment.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var manifest appsv1.Deployment
	if err := yaml.UnmarshalStrict(content, &manifest); err != nil {
		t.Fatal(err)
	}
	c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Options: devnode.Options{Hubble: true}})
	ca := newAuthority(t)
	const peer = "hubble-peer.sluice-system.svc"
	for _, n := range c.nodes {
		ca.listensAs(t, n.Node, []string{peer, "hubble-peer.default.hubble-grpc.cilium.io"}, "--listen-server-name="+peer)
	}
	dir := filepath.Join(t.TempDir(), "relay")
	const server = "hubble-relay.sluice-system.svc"
	ca.issue(t, dir, os.Getuid(), server)
	replace := strings.NewReplacer("=/etc/hubble-relay", "="+dir, peer+":4244", hubbleAddress(c.nodes[0].Node))
	var args []string
	for _, a := range manifest.Spec.Template.Spec.Containers[0].Args {
		if a != "serve" && !strings.Contains(a, "listen-address=") {
			args = append(args, replace.Replace(a))
		}
	}
	address := startRelay(t, args...)
	tls := []string{
		"--server=tls://" + address, "--tls-server-name=" + server, "--tls-ca-cert-files=" + filepath.Join(dir, "ca.crt"),
	}
	me := ca.client(t, "reader.example")
	certificate := slices.Concat(tls, []string{
		"--tls-client-cert-file=" + filepath.Join(me.dir, "tls.crt"),
		"--tls-client-key-file=" + filepath.Join(me.dir, "tls.key"),
	})
	servicetest.EventuallyNil(t, "the relay is connected to both nodes", func() error {
		out, err := hubbleCLI(t, append([]string{"list", "nodes"}, certificate...)...)
		for _, n := range c.nodes {
			if err == nil && !strings.Contains(out, n.Name()+"   Connected") {
				err = errors.New(out)
			}
		}
		return err
	})
	if out, err := hubbleCLI(t, append([]string{"list", "nodes"}, tls...)...); err == nil {
		t.Errorf("a client without a certificate gets %s", out)
	}
}

// TestHubbleCLIReadsTwoNodesOverTheRelay: the unchanged hubble-relay connects to both nodes over TLS, and the unchanged
// CLI shows the flows of both.
func TestHubbleCLIReadsTwoNodesOverTheRelay(t *testing.T) {
	c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Options: devnode.Options{Hubble: true}})
	ca := newAuthority(t)
	client := ca.client(t, "relay")
	var pods []pod.Pod
	for i, n := range c.nodes {
		ca.listens(t, n.Node)
		pods = append(pods, n.add(t, fmt.Sprint("app-", i)))
	}
	servicetest.EventuallyNil(t, "the pods reach each other", func() error {
		return exchange(t.Context(), pods[0], pods[1], pods[1].IPv4)
	})
	address := startRelay(t, "--peer-service=unix://"+c.nodes[0].Socket(devnode.Hubble), "--disable-server-tls",
		"--retry-timeout=1s", "--tls-hubble-server-ca-files="+filepath.Join(client.dir, "ca.crt"),
		"--tls-hubble-client-cert-file="+filepath.Join(client.dir, "tls.crt"),
		"--tls-hubble-client-key-file="+filepath.Join(client.dir, "tls.key"))
	hubble := func(args ...string) (string, error) { return hubbleCLI(t, append(args, "--server="+address)...) }
	first, second := c.nodes[0].Name(), c.nodes[1].Name()
	for _, x := range []struct {
		args string
		want []string // parts of the output
	}{
		{"list nodes", []string{first + "   Connected", second + "   Connected"}},
		{"list namespaces", []string{"test"}},
		{"status", []string{"Healthcheck", "Ok", "Connected Nodes: 2/2"}},
		{"observe --last 1000 -o compact --print-node-name", []string{
			"[" + first + "]", "[" + second + "]", "test/" + pods[0].Name,
		}},
		{"observe --last 1000 -o json --node-name " + second, []string{`"node_name":"` + second + `"`, pods[1].Name}},
		{"observe --last 1000 -o jsonpb --verdict FORWARDED", []string{first, second}},
		{"observe --last 1000 -o dict --protocol tcp", []string{"TIMESTAMP", "VERDICT: FORWARDED"}},
		{"observe --last 1000 -o table --to-ip " + pods[1].IPv4.String(), []string{"DESTINATION", pods[1].Name}},
		{"observe --since 1h --namespace test --pod test/" + pods[0].Name, []string{pods[0].Name}},
	} {
		servicetest.EventuallyNil(t, "hubble "+x.args, func() error {
			out, err := hubble(strings.Fields(x.args)...)
			for _, part := range x.want {
				if err == nil && !strings.Contains(out, part) {
					err = fmt.Errorf("%q is missing in\n%s", part, out)
				}
			}
			return err
		})
	}
	// The relay shows that a node is unavailable, and the other one answers.
	if err := c.nodes[1].Kill(t.Context(), devnode.Hubble); err != nil {
		t.Fatal(err)
	}
	servicetest.EventuallyNil(t, "the relay shows the unavailable node", func() error {
		out, err := hubble("list", "nodes")
		if err == nil && (!strings.Contains(out, second+"   Unavailable") && !strings.Contains(out, second+"   Error") ||
			!strings.Contains(out, first+"   Connected")) {
			err = errors.New(out)
		}
		return err
	})
	if err := c.nodes[1].Start(t.Context(), devnode.Hubble); err != nil {
		t.Fatal(err)
	}
	servicetest.EventuallyNil(t, "the relay connects to it again", func() error {
		out, err := hubble("list", "nodes")
		if err == nil && !strings.Contains(out, second+"   Connected") {
			err = errors.New(out)
		}
		return err
	})
}

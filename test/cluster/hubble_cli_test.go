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
	"strings"
	"testing"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// hubbleProgram returns a program that `make test-hubble` builds.
func hubbleProgram(name string) string { return filepath.Join(binDir(), "hubble", name) }

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
	dir := t.TempDir()
	free, err := net.Listen("tcp", "127.0.0.1:0") // the relay listens only on TCP, and does not say at which port
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	//nolint:gosec // a program that the target of this test builds
	relay := exec.CommandContext(ctx, hubbleProgram("hubble-relay"), "serve",
		"--peer-service=unix://"+c.nodes[0].Socket(devnode.Hubble), "--listen-address="+address,
		"--health-listen-address=127.0.0.1:0", "--disable-server-tls", "--retry-timeout=1s",
		"--tls-hubble-server-ca-files="+filepath.Join(client.dir, "ca.crt"),
		"--tls-hubble-client-cert-file="+filepath.Join(client.dir, "tls.crt"),
		"--tls-hubble-client-key-file="+filepath.Join(client.dir, "tls.key"))
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
	hubble := func(args ...string) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		cmd := exec.CommandContext(ctx, hubbleProgram("hubble"), args...) //nolint:gosec // likewise
		cmd.Env = append(os.Environ(), "HUBBLE_SERVER="+address, "HOME="+dir)
		out, err := cmd.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("hubble %s: %w: %s", strings.Join(args, " "), err, out)
		}
		return string(out), err
	}
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

//go:build browser

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/servicetest"
	hubblev1 "github.com/sluice-net/sluice/proto/gen/sluice/hubble/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
)

// policies simulates the part of sluice-policy that the page asks.
type policies struct {
	policyv1.UnimplementedPolicyServiceServer
}

const manifest = `apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: shop}
spec:
  podSelector: {}
  ingress:
  - from:
    - podSelector: {matchLabels: {app: first}}
  - from:
    - podSelector: {matchLabels: {app: second}}
    ports: [{port: 8080}]
  policyTypes: [Ingress]
`

func (policies) ListPolicies(
	r *policyv1.ListPoliciesRequest, s grpc.ServerStreamingServer[policyv1.ListPoliciesResponse],
) error {
	if r.GetKind() != "NetworkPolicy" || r.GetNamespace() != "shop" || r.GetName() != "web" || !r.GetWithManifests() {
		return status.Errorf(codes.InvalidArgument, "asked for %v", r)
	}
	return s.Send(&policyv1.ListPoliciesResponse{Policy: &policyv1.Policy{
		Source: "file", Origin: "web.yaml", Revision: 9, Manifest: []byte(manifest),
	}})
}

func (policies) Diff(r *policyv1.DiffRequest, s grpc.ServerStreamingServer[policyv1.DiffResponse]) error {
	if string(r.GetManifests()) != manifest {
		return status.Error(codes.InvalidArgument, "document 1: not the policy of the test")
	}
	label := func(value string) []*workloadv1.Label {
		return []*workloadv1.Label{{Source: "k8s", Key: "app", Value: value}}
	}
	return s.Send(&policyv1.DiffResponse{
		Subject: 17_001, SubjectLabels: label("web"), Direction: netv1.Direction_DIRECTION_INGRESS,
		Peers: []*policyv1.DiffPeer{{Identity: 17_000, Labels: label("client")}},
		Ports: []*policyv1.DiffPorts{{
			FirstProtocol: 6, LastProtocol: 6, FirstPort: 8080, LastPort: 8080,
			Before: policyv1.Action_ACTION_DENY, After: policyv1.Action_ACTION_ALLOW,
		}},
	})
}

// TestBrowserShowsThePage opens the page of a real process with chromium: it filters flows, opens a drop, draws the
// map, and compares a pasted policy. internal/server/page/ui/browser.mjs has the steps.
func TestBrowserShowsThePage(t *testing.T) {
	b := newBench(t)
	socket := filepath.Join(b.Mkdir("policy"), "policy.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(socket, int(instance.PolicyID), int(instance.GroupID)); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(socket, 0o660); err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	policyv1.RegisterPolicyServiceServer(server, policies{})
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})

	p := b.start("--page-address", "127.0.0.1:0", "--policy", socket)
	b.happen(100)
	p.wants(100, 0, &observer.GetFlowsRequest{})
	page, err := hubblev1.NewPageServiceClient(p.Conn).GetPage(servicetest.Context(t), &hubblev1.GetPageRequest{})
	if err != nil {
		t.Fatal(err)
	}
	shots := os.Getenv("SLUICE_SCREENSHOTS")
	if shots == "" {
		shots = t.TempDir()
	}
	profile := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "node", "../../bin/page-ui/browser.mjs", page.GetUrl(), shots)
	cmd.Env = append(os.Environ(), "HOME="+profile, "SLUICE_MANIFEST="+manifest)
	out, err := cmd.CombinedOutput()
	t.Logf("%s", strings.TrimSpace(string(out)))
	if err != nil {
		t.Fatal(err)
	}
}

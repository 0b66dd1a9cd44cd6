// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// webAndClient returns policies for both sides that let the client connect to the web's ports: a NetworkPolicy for
// the web, and a CiliumNetworkPolicy for the client.
func webAndClient(ports ...int) string {
	var kubernetes, cilium []string
	for _, p := range ports {
		for _, protocol := range []string{"TCP", "UDP"} {
			kubernetes = append(kubernetes, fmt.Sprintf("{protocol: %s, port: %d}", protocol, p))
			cilium = append(cilium, fmt.Sprintf(`{protocol: %s, port: "%d"}`, protocol, p))
		}
	}
	return fmt.Sprintf(`
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Ingress]
  ingress:
  - from: [{podSelector: {matchLabels: {app: client}}}]
    ports: [%s]
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client}
spec:
  endpointSelector: {matchLabels: {app: client}}
  egress:
  - toEndpoints: [{matchLabels: {app: web}}]
    toPorts: [{ports: [%s, {protocol: TCP, port: "8443"}]}]
  egressDeny:
  - toEndpoints: [{matchLabels: {app: web}}]
    toPorts: [{ports: [{protocol: TCP, port: "8443"}]}]
`, strings.Join(kubernetes, ", "), strings.Join(cilium, ", "))
}

// TestKernelPoliciesDecideWhoTalks: two kinds of policies, one for each side. Allowed connections succeed, denied
// packets are dropped, and the event contains the rule.
func TestKernelPoliciesDecideWhoTalks(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	policies := n.policies(t)
	pods := n.addPods(t, "web", "client", "stranger")
	web, client, stranger := pods[0], pods[1], pods[2]
	serve(t, web, 8080, 8081, 8443)
	flows := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})

	// Without a policy, all connections are allowed.
	wantAllowed(t, client, web, 8081)
	wantAllowed(t, stranger, web, 8080)
	revision := enforce(t, policies, webAndClient(8080))

	wantAllowed(t, client, web, 8080)
	wantAllowed(t, stranger, client, mustServe(t, client))
	for _, c := range []struct {
		from    pod.Pod
		port    uint16
		egress  bool
		mention string
	}{
		// A drop by the implicit isolation of a NetworkPolicy is attributed to that policy.
		{from: stranger, port: 8080, mention: "NetworkPolicy test/web"},
		// An explicit deny on the sender's side.
		{from: client, port: 8443, egress: true, mention: "CiliumNetworkPolicy test/client"},
		// The default deny of a Cilium policy is not a rule.
		{from: client, port: 8081, egress: true},
	} {
		for _, flow := range n.wantDenied(t, flows, c.from, web, c.port) {
			side := flow.GetIngress()
			if c.egress {
				side = flow.GetEgress()
			}
			sources := strings.Join(side.GetRuleSources(), "; ")
			if !strings.Contains(sources, c.mention) || (c.mention == "") != (sources == "") {
				t.Errorf("%s to port %d: denied by %q, want a rule of %q: %v", c.from.Name, c.port, sources, c.mention, flow)
			}
			if side.GetVerdict() != datapathv1.Verdict_VERDICT_DROPPED || side.GetRevision() != revision {
				t.Errorf("%s to port %d: side %v, want it dropped by revision %d", c.from.Name, c.port, side, revision)
			}
			if got, want := flow.GetSource().GetIdentity(), n.identityOf(t, c.from); got != want {
				t.Errorf("%s to port %d: source identity %d, want %d", c.from.Name, c.port, got, want)
			}
		}
	}

	withdraw(t, policies, "NetworkPolicy/web", "CiliumNetworkPolicy/client")
	wantAllowed(t, client, web, 8081)
	wantAllowed(t, client, web, 8443)
	wantAllowed(t, stranger, web, 8080)
	for _, p := range pods {
		n.del(t, p)
	}
	n.wantNothingHeld(t)
}

// mustServe serves on a free port of a pod and returns the port.
func mustServe(t *testing.T, p pod.Pod) uint16 {
	t.Helper()
	const port = 9999
	serve(t, p, port)
	return port
}

// TestKernelRevokedPermissionCutsTheNextPacket: a revoked permission blocks open connections from the next packet on.
// Connections that stay allowed are not disturbed: no packet is lost or retransmitted, and no connection is reset.
func TestKernelRevokedPermissionCutsTheNextPacket(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	policies := n.policies(t)
	pods := n.addPods(t, "web", "client")
	web, client := pods[0], pods[1]
	serve(t, web, 8080)
	flows := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})
	for _, address := range web.Addresses() {
		enforce(t, policies, webAndClient(8080, 8081))
		ctx, cancel := deadline(t)
		kept, err := client.Dial(ctx, netip.AddrPortFrom(address, 8080))
		if err != nil {
			t.Fatal(err)
		}
		listener, err := web.Listen(netip.AddrPortFrom(address, 8081))
		if err != nil {
			t.Fatal(err)
		}
		cut, err := client.Dial(ctx, netip.AddrPortFrom(address, 8081))
		if err != nil {
			t.Fatal(err)
		}
		server, err := listener.AcceptTCP()
		if err != nil {
			t.Fatal(err)
		}
		// Everything that arrives at the server of the revoked connection.
		arrived := make(chan []byte, 1)
		go func() {
			all, _ := io.ReadAll(server)
			arrived <- all
		}()
		if _, err := io.WriteString(cut, "before"); err != nil {
			t.Fatal(err)
		}
		servicetest.EventuallyNil(t, "the server has acknowledged everything", func() error {
			if left := unacknowledged(t, cut); left > 0 {
				return fmt.Errorf("%d segments are on their way", left)
			}
			return nil
		})
		if err := say(ctx, kept, "before"); err != nil {
			t.Fatal(err)
		}
		revoked, dropped := n.connections(t).GetRevoked(), n.drops(t, policyDenied)

		enforce(t, policies, webAndClient(8080))
		mark := flows.mark()
		if _, err := io.WriteString(cut, "after"); err != nil {
			t.Errorf("write to a cut connection: %v; a drop is silent", err)
		}
		flows.waitFrom(t, mark, "the next packet of the revoked connection is dropped", func(f *datapathv1.Flow) bool {
			source, _ := sameFamily(client, address)
			return isFlow(f, source, address, 8081)
		})
		for i := range 100 {
			if err := say(ctx, kept, fmt.Sprintf("message %d", i)); err != nil {
				t.Fatalf("the connection that stays allowed: %v", err)
			}
		}
		// Retransmissions of the kernel depend on the machine's load, drops by the programs do not.
		if got := n.drops(t, policyDenied); got != dropped {
			t.Errorf("%d packets were dropped for another reason than the policy", got-dropped)
		}
		for _, f := range flows.since(mark) {
			if f.GetSource().GetPort() == 8080 || f.GetDestination().GetPort() == 8080 {
				t.Errorf("a packet of the connection that stays allowed was dropped: %v", f)
			}
		}
		if got := n.connections(t).GetRevoked(); got != revoked+1 {
			t.Errorf("%d connections were counted as revoked, want 1; since then denied: %v", got-revoked, flows.since(mark))
		}
		_, _, _ = server.Close(), cut.Close(), listener.Close()
		if got := <-arrived; string(got) != "before" {
			t.Errorf("the server received %q over %s, want only what was sent before", got, address)
		}
		if err := kept.Close(); err != nil {
			t.Error(err)
		}
		cancel()
	}
}

// TestKernelPolicyServiceMayBeAway: while the policy service is unavailable, traffic continues and policies stay
// enforced. A pod with known labels can be added; a pod with new labels has to wait. When the service is available
// again, the datapath rewrites no entries.
func TestKernelPolicyServiceMayBeAway(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	policies := n.policies(t)
	pods := n.addPods(t, "web", "client", "stranger")
	web, client, stranger := pods[0], pods[1], pods[2]
	serve(t, web, 8080)
	enforce(t, policies, webAndClient(8080))
	flows := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})
	ctx, cancel := deadline(t)
	defer cancel()
	open, err := client.Dial(ctx, netip.AddrPortFrom(web.IPv4, 8080))
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	if err := say(ctx, open, "before"); err != nil {
		t.Fatal(err)
	}

	if err := n.Kill(ctx, devnode.Policy); err != nil {
		t.Fatal(err)
	}
	if err := say(ctx, open, "meanwhile"); err != nil {
		t.Errorf("an open connection: %v", err)
	}
	wantAllowed(t, client, web, 8080)
	n.wantDenied(t, flows, stranger, web, 8080)

	another := n.add(t, newPod(t, "client"), n.config(t, "1.0.0", labels("app", "client")))
	wantAllowed(t, another, web, 8080)
	n.del(t, another)

	before := n.enforcedState(t, pods)
	if err := n.Start(ctx, devnode.Policy); err != nil {
		t.Fatal(err)
	}
	n.waitConnected(t, policies)
	// Changes are applied in order: when this policy, which selects no local pod, is enforced, all changes before it
	// have been applied.
	enforce(t, policies, `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: nobody, namespace: elsewhere}
spec: {podSelector: {}, policyTypes: [Ingress]}
`)
	after := n.enforcedState(t, pods)
	for _, line := range before {
		if !slices.Contains(after, line) {
			t.Errorf("the restart of the policy service took from the kernel: %s", line)
		}
	}
	for _, line := range after {
		if !slices.Contains(before, line) {
			t.Errorf("the restart of the policy service wrote into the kernel: %s", line)
		}
	}
	if err := say(ctx, open, "after"); err != nil {
		t.Errorf("an open connection: %v", err)
	}

	if err := n.Kill(ctx, devnode.Policy); err != nil {
		t.Fatal(err)
	}
	unknown := newPod(t, "unknown")
	short, cancelShort := context.WithTimeout(ctx, patience)
	_, err = n.call(short, "ADD", unknown, n.config(t, "1.0.0",
		mergeConfig(labels("app", "unknown"), map[string]any{"timeout": "2s"})))
	cancelShort()
	var object *cni.Error
	const tryAgain = 11
	if !errors.As(err, &object) || object.Code != tryAgain {
		t.Errorf("ADD of a subject without a table: %v, want code %d", err, tryAgain)
	}
	n.del(t, unknown)
	if err := n.Start(ctx, devnode.Policy); err != nil {
		t.Fatal(err)
	}
	late := n.add(t, unknown, n.config(t, "1.0.0", labels("app", "unknown")))
	n.wantDenied(t, flows, late, web, 8080)
}

// TestKernelPoliciesOutliveALostStateOfTheService: the policy service loses its state, and processes are killed in
// every order. Ports that only its policies closed stay closed until an operator confirms the new state.
func TestKernelPoliciesOutliveALostStateOfTheService(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	policies := n.policies(t)
	pods := n.addPods(t, "web", "client", "stranger")
	web, client, stranger := pods[0], pods[1], pods[2]
	serve(t, web, 8080)
	enforce(t, policies, webAndClient(8080))
	state := n.Paths().ServiceStateDir(devnode.Policy)
	for _, order := range [][]string{
		{devnode.Policy},
		{devnode.Policy, devnode.Datapath},
		{devnode.Datapath, devnode.Policy},
	} {
		for _, service := range order {
			if err := n.Kill(t.Context(), service); err != nil {
				t.Fatal(err)
			}
		}
		files, err := os.ReadDir(state)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if err := os.RemoveAll(filepath.Join(state, f.Name())); err != nil {
				t.Fatal(err)
			}
		}
		// Start waits until the datapath is ready, which needs the policy service.
		for _, service := range slices.Backward(slices.Sorted(slices.Values(order))) {
			if err := n.Start(t.Context(), service); err != nil {
				t.Fatal(err)
			}
		}
		servicetest.EventuallyNil(t, "the datapath reports that it holds the earlier state", func() error {
			st := n.datapathStatus(t)
			if st.GetAddReady() || !slices.ContainsFunc(st.GetService().GetProblems(),
				func(p *statusv1.Problem) bool { return strings.Contains(p.GetText(), "sluice policy confirm") }) {
				return fmt.Errorf("ready %t, problems %v", st.GetAddReady(), st.GetService().GetProblems())
			}
			return nil
		})
		wantAllowed(t, client, web, 8080)
		// The event stream ends when the datapath stops, so each round opens a new one.
		flows := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})
		n.wantDenied(t, flows, stranger, web, 8080)

		ctx, cancel := deadline(t)
		answer, err := policies.UpsertPolicies(ctx, &policyv1.UpsertPoliciesRequest{
			Manifests:        []byte(webAndClient(8080)),
			DefaultNamespace: "test",
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := policies.WaitForRevision(ctx,
			&policyv1.WaitForRevisionRequest{Revision: answer.GetRevision()}); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("after %v: wait for revision %d: %v, want FAILED_PRECONDITION", order, answer.GetRevision(), err)
		}
		if confirmed, err := policies.ConfirmPolicies(ctx, &policyv1.ConfirmPoliciesRequest{}); err != nil ||
			len(confirmed.GetHeld()) != 1 {
			t.Errorf("after %v: confirmation %v, %v; want that one subscriber held", order, confirmed, err)
		}
		cancel()
		awaitRevision(t, policies, answer.GetRevision())
		if st := n.datapathStatus(t); !st.GetAddReady() {
			t.Errorf("after the confirmation: problems %v", st.GetService().GetProblems())
		}
		wantAllowed(t, client, web, 8080)
		n.wantDenied(t, flows, stranger, web, 8080)
	}
}

// mergeConfig returns a configuration with the keys of both.
func mergeConfig(all ...map[string]any) map[string]any {
	merged := make(map[string]any)
	for _, one := range all {
		for k, v := range one {
			merged[k] = v
		}
	}
	return merged
}

// enforcedState returns everything in the kernel that evaluates the pods: their entries, with the generation that
// grows with every store, and all maps of policy tables.
func (n *testNode) enforcedState(t *testing.T, pods []pod.Pod) []string {
	t.Helper()
	var all []string
	for _, p := range pods {
		policy := n.endpoint(t, p).GetPolicy()
		all = append(all, fmt.Sprintf("%s: tables %d and %d, generation %d", p.Name, policy.GetEgressTable(),
			policy.GetIngressTable(), policy.GetEpoch()))
	}
	for _, m := range append([]string{"sl_id"}, tableMaps...) {
		for _, e := range n.dumpMap(t, m) {
			all = append(all, m+": "+e)
		}
	}
	return all
}

// TestKernelPodsOfOneSubjectShareTables: pods with the same policy share its tables, which are removed with the last
// pod.
func TestKernelPodsOfOneSubjectShareTables(t *testing.T) {
	t.Parallel()
	n := newNode(t, shortLinger)
	policies := n.policies(t)
	empty := n.tableUsage(t)
	enforce(t, policies, webAndClient(8080))
	config := n.config(t, "1.0.0", labels("app", "web"))
	pods := []pod.Pod{n.add(t, newPod(t, "web"), config)}
	one := n.tableUsage(t)
	if one["sl_table"] <= empty["sl_table"] {
		t.Fatalf("a pod under a policy has no table: %v before, %v with it", empty, one)
	}
	for range 9 {
		pods = append(pods, n.add(t, newPod(t, "web"), config))
	}
	if got := n.tableUsage(t); !equalUsage(got, one) {
		t.Errorf("with ten pods the tables use %v, want %v as with one", got, one)
	}
	first := n.endpoint(t, pods[0]).GetPolicy()
	for _, p := range pods {
		policy := n.endpoint(t, p).GetPolicy()
		if policy.GetIngressTable() != first.GetIngressTable() || policy.GetIngressTable() < 16 {
			t.Errorf("%s is evaluated by table %d, want %d like the others", p.Name, policy.GetIngressTable(),
				first.GetIngressTable())
		}
		n.del(t, p)
	}
	servicetest.EventuallyNil(t, "the tables are removed with the last pod", func() error {
		if got := n.tableUsage(t); !equalUsage(got, empty) {
			return fmt.Errorf("they take %v, want %v", got, empty)
		}
		return nil
	})
	n.wantNothingHeld(t)
}

func equalUsage(a, b map[string]int64) bool {
	for name := range a {
		if a[name] != b[name] {
			return false
		}
	}
	return len(a) == len(b)
}

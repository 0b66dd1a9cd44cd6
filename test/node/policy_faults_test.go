// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/fault/faulttest"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// talkPort is a port that every revision of these tests allows.
const talkPort = 8090

// applying reports whether a fault point is between two writes of a policy change, and not in ADD or DEL.
func applying(point string) bool { return strings.HasPrefix(point, "datapath/policy/") }

// change is an action that changes state in the policy service and the datapath.
type change struct {
	name string
	make func(ctx context.Context, n *testNode, policies policyv1.PolicyServiceClient) error
}

// named lets the web be reached from names and from peers of three selectors, so that all kinds of writes occur.
const named = `
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: named}
spec:
  endpointSelector: {matchLabels: {app: web}}
  ingress:
  - fromEndpoints: [{matchLabels: {tier: gold}}]
    toPorts: [{ports: [{protocol: TCP, port: "8082"}]}]
  - fromEndpoints: [{matchLabels: {stage: late}}]
    toPorts: [{ports: [{protocol: TCP, port: "8083"}]}]
  egress:
  - toFQDNs: [{matchPattern: "*.service.example"}]
    toPorts: [{ports: [{protocol: TCP, port: "443"}]}]
`

// learned is the number of addresses that the changes have learned.
var learned atomic.Int32

// changes cause every kind of step of the table stream, and restore the initial state at the end.
var changes = []change{
	{"more ports", upsert(webAndClient(8080, talkPort, 8081))},
	{"more selectors, and names", upsert(webAndClient(8080, talkPort, 8081) + named)},
	{"a learned name", func(ctx context.Context, _ *testNode, policies policyv1.PolicyServiceClient) error {
		// Learned addresses are stored, so use new ones.
		_, err := policies.LearnNames(ctx, &policyv1.LearnNamesRequest{
			Name:      "api.service.example",
			Addresses: []string{fmt.Sprintf("203.0.113.%d", byte(learned.Add(1)))}, Ttl: durationpb.New(3600e9),
		})
		return err
	}},
	{"identities of new kinds", func(ctx context.Context, n *testNode, _ policyv1.PolicyServiceClient) error {
		for _, labels := range [][]string{
			{"tier", "gold"},
			{"stage", "late"},
			{"tier", "gold", "stage", "late"},
			{"app", "client", "tier", "gold"},
		} {
			set := []*workloadv1.Label{{Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: "test"}}
			for i := 0; i < len(labels); i += 2 {
				set = append(set, &workloadv1.Label{Source: "k8s", Key: labels[i], Value: labels[i+1]})
			}
			_, err := n.identity.AllocateIdentity(ctx, &identityv1.AllocateIdentityRequest{
				Labels:    set,
				Reference: strings.Join(labels, "-"),
			})
			if err != nil {
				return err
			}
		}
		return nil
	}},
	{"many blocks", upsert(prefixPolicy(40, 8080, talkPort) + named)},
	{"one port less", upsert(prefixPolicy(3, 8080, talkPort) + named)},
	{"more policies than one commit takes", upsert(idlePolicies())},
	{"all of them gone", func(ctx context.Context, _ *testNode, policies policyv1.PolicyServiceClient) error {
		req := &policyv1.DeletePoliciesRequest{}
		for i := range idle {
			req.Keys = append(req.Keys,
				&policyv1.PolicyKey{Kind: "NetworkPolicy", Namespace: "test", Name: fmt.Sprint("idle-", i)})
		}
		_, err := policies.DeletePolicies(ctx, req)
		return err
	}},
	{"policies gone", func(ctx context.Context, n *testNode, policies policyv1.PolicyServiceClient) error {
		_, err := policies.DeletePolicies(ctx, &policyv1.DeletePoliciesRequest{Keys: []*policyv1.PolicyKey{
			{Kind: "CiliumNetworkPolicy", Namespace: "test", Name: "named"},
			{Kind: "NetworkPolicy", Namespace: "test", Name: "blocks"},
		}})
		return err
	}},
	{"as it began", upsert(webAndClient(8080, talkPort))},
}

// idle is more policies than the policy service writes in one transaction.
const idle = 300

// idlePolicies returns policies that select no pod.
func idlePolicies() string {
	var b strings.Builder
	for i := range idle {
		fmt.Fprintf(&b, `---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: idle-%d}
spec: {podSelector: {matchLabels: {app: none}}}
`, i)
	}
	return b.String()
}

func upsert(manifests string) func(context.Context, *testNode, policyv1.PolicyServiceClient) error {
	return func(ctx context.Context, _ *testNode, policies policyv1.PolicyServiceClient) error {
		_, err := policies.UpsertPolicies(ctx, &policyv1.UpsertPoliciesRequest{
			Manifests:        []byte(manifests),
			DefaultNamespace: "test",
		})
		return err
	}
}

// TestFaultKillDatapathBetweenAnyTwoWritesOfAChange: the datapath is killed between any two writes of a policy change.
// An open connection that every revision allows continues. At the end the last revision is enforced, and no entries of
// earlier revisions remain.
func TestFaultKillDatapathBetweenAnyTwoWritesOfAChange(t *testing.T) {
	t.Parallel()
	n := newNode(t, shortLinger)
	policies := n.policies(t)
	points := n.faultPoints(t, devnode.Datapath)
	points = slices.DeleteFunc(points, func(p string) bool { return !applying(p) })
	if len(points) == 0 {
		t.Fatal("the datapath has no fault points in applying policies")
	}
	killWhileApplying(t, n, policies, devnode.Datapath, points)
}

// TestFaultKillPolicyServiceAtAnyPointOfAChange: the policy service is killed at any point of a policy change, with the
// same expectations.
func TestFaultKillPolicyServiceAtAnyPointOfAChange(t *testing.T) {
	t.Parallel()
	n := newNode(t, shortLinger)
	policies := n.policies(t)
	points := n.faultPoints(t, devnode.Policy)
	if len(points) == 0 {
		t.Fatal("the policy service has no fault points")
	}
	killWhileApplying(t, n, policies, devnode.Policy, points)
}

func killWhileApplying(t *testing.T, n *testNode, policies policyv1.PolicyServiceClient, service string,
	points []string,
) {
	t.Helper()
	pods := n.addPods(t, "web", "client", "stranger")
	web, client, stranger := pods[0], pods[1], pods[2]
	serve(t, web, 8080, 8081)
	revision := enforce(t, policies, webAndClient(8080, talkPort))
	n.settled(t, policies, revision)
	usage := n.tableUsage(t)

	for _, point := range points {
		ok := t.Run(strings.ReplaceAll(point, "/", "."), func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			talks, wait := converse(ctx, t, client, web, talkPort, 1)
			open := talks[0]
			n.killAtEachChange(t, policies, service, point)
			n.settled(t, policies, enforce(t, policies, webAndClient(8080, talkPort)))

			exchanged := open.exchanged.Load()
			servicetest.EventuallyNil(t, "the open connection goes on", func() error {
				if got := open.exchanged.Load(); got <= exchanged {
					return fmt.Errorf("%d exchanges", got)
				}
				return nil
			})
			cancel()
			if err := wait(); err != nil {
				t.Errorf("the open connection, allowed by every revision: %v", err)
			}
			wantAllowed(t, client, web, 8080)
			flows := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})
			n.wantDenied(t, flows, client, web, 8081)
			n.wantDenied(t, flows, stranger, web, 8080)
			servicetest.EventuallyNil(t, "the tables have their earlier size", func() error {
				if got := n.tableUsage(t); !equalUsage(got, usage) {
					return fmt.Errorf("%v, want %v", got, usage)
				}
				return nil
			})
			n.wantOnly(t, pods)
		})
		if !ok {
			t.FailNow()
		}
	}
	for _, p := range pods {
		n.del(t, p)
	}
	n.wantNothingHeld(t)
}

// killAtEachChange makes the changes one by one. The service is killed in the first change that reaches the point,
// and started again afterwards.
func (n *testNode) killAtEachChange(t *testing.T, policies policyv1.PolicyServiceClient, service, point string) {
	t.Helper()
	if err := n.Kill(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	controller, files := newController(t)
	// Start the service before the changes: a start may also reach the point.
	if err := n.Start(t.Context(), service, files...); err != nil {
		t.Fatal(err)
	}
	controller.Started()
	n.waitConnected(t, policies)
	controller.KillAt(point, 0)
	hit := false
	for _, c := range changes {
		if hit {
			// Make the remaining changes without a kill.
			n.carryOut(t, policies, c, nil, "")
			continue
		}
		n.carryOut(t, policies, c, controller, point)
		if controller.Hits(point) > 0 {
			hit = true
			if err := n.Kill(t.Context(), service); err != nil {
				t.Fatal(err)
			}
			if err := n.Start(t.Context(), service); err != nil {
				t.Fatal(err)
			}
			// Repeat the unanswered call, as callers do.
			n.carryOut(t, policies, c, nil, "")
		}
	}
	if !hit {
		t.Errorf("fault point %s is in none of the changes", point)
	}
	n.releaseIdentities(t)
}

// carryOut makes a change and waits until it is enforced, or until the service dies at the point.
func (n *testNode) carryOut(t *testing.T, policies policyv1.PolicyServiceClient, c change,
	controller *faulttest.Controller, point string,
) {
	t.Helper()
	ctx, cancel := deadline(t)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- c.make(ctx, n, policies) }()
	dead := func() bool { return controller != nil && controller.Hits(point) > 0 }
	servicetest.EventuallyNil(t, c.name+" is enforced", func() error {
		if dead() {
			return nil
		}
		select {
		case err := <-done:
			done <- err // for the next check
			if err != nil && !dead() {
				return err
			}
		default:
			return errors.New("no answer yet")
		}
		if dead() {
			return nil
		}
		short, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		status, err := policies.GetStatus(short, &policyv1.GetStatusRequest{}, grpc.WaitForReady(!dead()))
		if err != nil {
			return err
		}
		if len(status.GetSubscribers()) == 0 {
			return errors.New("nobody subscribes")
		}
		for _, s := range status.GetSubscribers() {
			if !s.GetConnected() || s.GetBehind() > 0 || s.GetRevision() < status.GetRevision() {
				return fmt.Errorf("subscriber %v, revision %d", s, status.GetRevision())
			}
		}
		return nil
	})
	if dead() {
		cancel() // the call gets no answer
	}
	<-done
}

// waitConnected waits until the datapath has received all of the stream.
func (n *testNode) waitConnected(t *testing.T, policies policyv1.PolicyServiceClient) {
	t.Helper()
	n.carryOut(t, policies, change{name: "the state", make: func(context.Context, *testNode,
		policyv1.PolicyServiceClient,
	) error {
		return nil
	}}, nil, "")
}

// settled waits until the revision is enforced and no change is pending.
func (n *testNode) settled(t *testing.T, policies policyv1.PolicyServiceClient, revision uint64) {
	t.Helper()
	awaitRevision(t, policies, revision)
	n.waitConnected(t, policies)
}

// releaseIdentities releases the identities of the changes.
func (n *testNode) releaseIdentities(t *testing.T) {
	t.Helper()
	ctx, cancel := deadline(t)
	defer cancel()
	for _, reference := range []string{"tier-gold", "stage-late", "tier-gold-stage-late", "app-client-tier-gold"} {
		_, err := n.identity.ReleaseIdentity(ctx, &identityv1.ReleaseIdentityRequest{
			Holder: &identityv1.ReleaseIdentityRequest_Reference{Reference: reference},
		})
		if err != nil {
			t.Errorf("release %s: %v", reference, err)
		}
	}
}

// shortLinger shortens the time for which a subject's tables stay after its last pod.
func shortLinger(o *devnode.Options) {
	o.Args = map[string][]string{devnode.Datapath: {"--policy-linger=1s"}}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// phases lets clients with phase=even connect to the web's evenPort, clients with phase=odd to oddPort, and both to
// openPort. For closedPort, egress is allowed to even clients and ingress from odd ones, so neither can connect.
const phases = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Ingress]
  ingress:
  - from: [{podSelector: {matchLabels: {phase: even}}}]
    ports: [{protocol: UDP, port: 7001}, {protocol: UDP, port: 7003}, {protocol: TCP, port: 8090}]
  - from: [{podSelector: {matchLabels: {phase: odd}}}]
    ports: [{protocol: UDP, port: 7002}, {protocol: UDP, port: 7003}, {protocol: UDP, port: 7004},
      {protocol: TCP, port: 8090}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: even}
spec:
  podSelector: {matchLabels: {phase: even}}
  policyTypes: [Egress]
  egress:
  - to: [{podSelector: {matchLabels: {app: web}}}]
    ports: [{protocol: UDP, port: 7001}, {protocol: UDP, port: 7003}, {protocol: UDP, port: 7004},
      {protocol: TCP, port: 8090}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: odd}
spec:
  podSelector: {matchLabels: {phase: odd}}
  policyTypes: [Egress]
  egress:
  - to: [{podSelector: {matchLabels: {app: web}}}]
    ports: [{protocol: UDP, port: 7002}, {protocol: UDP, port: 7003}, {protocol: TCP, port: 8090}]
`

func phaseAfter(change int) string {
	if change%2 == 0 {
		return "even"
	}
	return "odd"
}

// relabel sets the labels of a connected pod, with one changed.
func (n *testNode) relabel(ctx context.Context, p pod.Pod, key, value string) (*datapathv1.Endpoint, error) {
	got, err := n.datapath.GetEndpoint(ctx, &datapathv1.GetEndpointRequest{Owner: owner(p.Name)})
	if err != nil {
		return nil, err
	}
	e := got.GetEndpoint()
	source := e.GetGivenLabels()[0].GetSource()
	labels := slices.DeleteFunc(e.GetGivenLabels(), func(l *workloadv1.Label) bool { return l.GetKey() == key })
	answer, err := n.datapath.UpdateEndpoint(ctx, &datapathv1.UpdateEndpointRequest{
		Owner: e.GetOwner(), Manager: e.GetManager(),
		Labels: &datapathv1.GivenLabels{
			Labels: append(labels, &workloadv1.Label{Source: source, Key: key, Value: value}),
		},
	})
	return answer.GetEndpoint(), err
}

// mustRelabel is relabel that must succeed.
func (n *testNode) mustRelabel(t *testing.T, p pod.Pod, key, value string) *datapathv1.Endpoint {
	t.Helper()
	ctx, cancel := deadline(t)
	defer cancel()
	e, err := n.relabel(ctx, p, key, value)
	if err != nil {
		t.Fatalf("label %s of %s: %v", key, p.Name, err)
	}
	return e
}

// TestKernelPacketsOfAPodThatChangesItsLabelsAreOldOrNew proves INV-70: a client alternates between two identities
// under a flood. Every packet is evaluated with the identity before or after a change. No packet passes that both
// identities deny, even if egress is allowed for one identity and ingress for the other. No packet is dropped that both
// allow.
func TestKernelPacketsOfAPodThatChangesItsLabelsAreOldOrNew(t *testing.T) {
	const changes = 100
	n := newNode(t)
	policies := n.policies(t)
	pods := n.addPods(t, "web", "client")
	web, client := pods[0], pods[1]
	enforce(t, policies, phases)
	first := n.mustRelabel(t, client, "phase", phaseAfter(0)).GetIdentity()

	var enforced, begun atomic.Int64
	flood := newFlood(t, client, web, &enforced, &begun)
	for i := 1; i <= changes && !t.Failed(); i++ {
		begun.Store(int64(i))
		e := n.mustRelabel(t, client, "phase", phaseAfter(i))
		enforced.Store(int64(i))
		if (e.GetIdentity() == first) != (i%2 == 0) {
			t.Errorf("after change %d its identity is %d, and was %d at first", i, e.GetIdentity(), first)
		}
	}
	sent, received := flood.end(t)
	t.Logf("%d changes; sent %v, received %v by port", changes, sent, received)
	if sent[openPort] != received[openPort] {
		t.Errorf("%d of %d datagrams arrived at the port that both identities may reach", received[openPort], sent[openPort])
	}
	if received[closedPort] > 0 {
		t.Errorf("%d datagrams arrived at the port that neither identity may reach", received[closedPort])
	}
	if received[evenPort] == 0 || received[oddPort] == 0 {
		t.Errorf("nothing arrived at a port that was open half of the time: %v", received)
	}
}

// TestKernelManyPodsChangeTheirLabelsAtOnce: a change of a namespace's labels changes the labels of all its pods.
func TestKernelManyPodsChangeTheirLabelsAtOnce(t *testing.T) {
	const many = 100
	n := newNode(t)
	policies := n.policies(t)
	web := n.addPods(t, "web")[0]
	serve(t, web, talkPort)
	enforce(t, policies, phases)
	pods := make([]pod.Pod, many)
	var wg sync.WaitGroup
	places := make(chan struct{}, 4)
	for i := range pods {
		pods[i] = newPod(t, "client")
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			pods[i] = n.add(t, pods[i], n.config(t, "1.0.0", labels("app", "client", "set", fmt.Sprint(i%4))))
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	began := time.Now()
	identities := make([]uint32, many)
	for i, p := range pods {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
			defer cancel()
			e, err := n.relabel(ctx, p, "phase", phaseAfter(i))
			if err != nil {
				t.Errorf("label %s: %v", p.Name, err)
				return
			}
			identities[i] = e.GetIdentity()
		})
	}
	wg.Wait()
	t.Logf("%d pods have other labels after %s", many, time.Since(began))
	distinct := map[uint32]bool{}
	for i, p := range pods {
		distinct[identities[i]] = true
		e := n.endpoint(t, p)
		if e.GetIdentity() != identities[i] || e.GetState() != datapathv1.EndpointState_ENDPOINT_STATE_READY {
			t.Errorf("%s is %v with identity %d, want %d", p.Name, e.GetState(), e.GetIdentity(), identities[i])
		}
	}
	if len(distinct) != 4 { // the labels of a pod have one phase
		t.Errorf("identities %v, want 4", distinct)
	}
	wantAllowed(t, pods[0], web, talkPort)
	wantAllowed(t, pods[many-1], web, talkPort)
	answer, err := n.datapath.GetStatus(t.Context(), &datapathv1.GetStatusRequest{})
	if err != nil || answer.GetIdentityStream().GetChanged() < many || !answer.GetIdentityStream().GetComplete() {
		t.Errorf("status: %v, %v", answer.GetIdentityStream(), err)
	}
}

// TestKernelAPodKeepsItsIdentityWhileThePolicyServiceIsAway: the old identity stays fully enforced until the tables
// of the new one arrive.
func TestKernelAPodKeepsItsIdentityWhileThePolicyServiceIsAway(t *testing.T) {
	n := newNode(t)
	policies := n.policies(t)
	pods := n.addPods(t, "web", "client")
	web, client := pods[0], pods[1]
	serve(t, web, talkPort)
	enforce(t, policies, phases)
	before := n.mustRelabel(t, client, "phase", "even")
	wantAllowed(t, client, web, talkPort)
	if err := n.Kill(t.Context(), devnode.Policy); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	_, err := n.relabel(ctx, client, "phase", "none")
	cancel()
	if code := status.Code(err); code != codes.Unavailable && code != codes.DeadlineExceeded {
		t.Errorf("another label set without the policy service: %v", err)
	}
	if e := n.endpoint(t, client); e.GetIdentity() != before.GetIdentity() ||
		e.GetPolicy().GetEgressTable() != before.GetPolicy().GetEgressTable() {
		t.Errorf("identity %d, table %d; before %d, %d", e.GetIdentity(), e.GetPolicy().GetEgressTable(),
			before.GetIdentity(), before.GetPolicy().GetEgressTable())
	}
	wantAllowed(t, client, web, talkPort)
	if err := n.Start(t.Context(), devnode.Policy); err != nil {
		t.Fatal(err)
	}
	n.waitConnected(t, policies)
	flows := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})
	n.mustRelabel(t, client, "phase", "none")
	n.wantDenied(t, flows, client, web, talkPort)
}

// TestFaultKillDatapathAtEveryStepOfAChangeOfLabels proves INV-71: the datapath is killed at each step. A connection
// that both identities allow continues. Afterwards the endpoint has one of the two identities, and repeating the call
// sets the new one.
func TestFaultKillDatapathAtEveryStepOfAChangeOfLabels(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	policies := n.policies(t)
	points := slices.DeleteFunc(n.faultPoints(t, devnode.Datapath), func(p string) bool { return !relabelling(p) })
	if len(points) < 5 {
		t.Fatalf("the datapath has these fault points in changing labels: %v", points)
	}
	pods := n.addPods(t, "web", "client")
	web, client := pods[0], pods[1]
	enforce(t, policies, phases)
	old := n.mustRelabel(t, client, "phase", phaseAfter(0)).GetIdentity()
	for i, point := range points {
		ok := t.Run(strings.ReplaceAll(point, "/", "."), func(t *testing.T) {
			if err := n.Kill(t.Context(), devnode.Datapath); err != nil {
				t.Fatal(err)
			}
			controller, files := newController(t)
			if err := n.Start(t.Context(), devnode.Datapath, files...); err != nil {
				t.Fatal(err)
			}
			controller.Started()
			n.waitConnected(t, policies)
			ctx, cancel := context.WithCancel(t.Context())
			talks, wait := converse(ctx, t, client, web, talkPort, 1)

			controller.KillAt(point, 0)
			hits, cancelHits := context.WithTimeout(t.Context(), patience)
			var call sync.WaitGroup
			call.Go(func() { _, _ = n.relabel(hits, client, "phase", phaseAfter(i+1)) }) // the call gets no answer
			if err := controller.WaitHits(hits, point, 1); err != nil {
				t.Error(err)
			}
			cancelHits()
			call.Wait()
			exchanged := talks[0].exchanged.Load()
			if err := n.Kill(t.Context(), devnode.Datapath); err != nil {
				t.Fatal(err)
			}
			if err := n.Start(t.Context(), devnode.Datapath); err != nil {
				t.Fatal(err)
			}
			e := n.mustRelabel(t, client, "phase", phaseAfter(i+1))
			if e.GetIdentity() == old {
				t.Errorf("its identity is still %d", old)
			}
			old = e.GetIdentity()
			servicetest.EventuallyNil(t, "the open connection goes on", func() error {
				if got := talks[0].exchanged.Load(); got <= exchanged {
					return fmt.Errorf("%d exchanges", got)
				}
				return nil
			})
			cancel()
			if err := wait(); err != nil {
				t.Errorf("the open connection, which both identities allow: %v", err)
			}
			answer, err := n.datapath.GetStatus(t.Context(), &datapathv1.GetStatusRequest{})
			if err != nil || answer.GetIdentityStream().GetPending() != 0 {
				t.Errorf("pending: %v, %v", answer.GetIdentityStream(), err)
			}
			n.wantOnly(t, pods)
		})
		if !ok {
			t.FailNow()
		}
	}
}

// relabelling reports whether a fault point is between two steps of a change of labels, and not in ADD or DEL.
func relabelling(point string) bool { return strings.HasPrefix(point, "datapath/relabel/") }

// TestKernelNamedPortsOfAPodChange: an update without a change keeps the epoch, and policies with named ports follow
// a change.
func TestKernelNamedPortsOfAPodChange(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	policies := n.policies(t)
	pods := n.addPods(t, "web", "client")
	web, client := pods[0], pods[1]
	serve(t, web, 8080, 8081)
	enforce(t, policies, `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Ingress]
  ingress: [{ports: [{protocol: TCP, port: http}]}]
`)
	flows := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})
	n.wantDenied(t, flows, client, web, 8080)
	call := func(port uint32) *datapathv1.Endpoint {
		t.Helper()
		ctx, cancel := deadline(t)
		defer cancel()
		answer, err := n.datapath.UpdateEndpoint(ctx, &datapathv1.UpdateEndpointRequest{
			Owner: owner(web.Name), Manager: "cni",
			NamedPorts: &datapathv1.GivenPorts{NamedPorts: []*workloadv1.NamedPort{
				{Name: "http", Port: port, Protocol: netv1.Protocol_PROTOCOL_TCP},
			}},
		})
		if err != nil {
			t.Fatal(err)
		}
		return answer.GetEndpoint()
	}
	first := call(8080)
	wantAllowed(t, client, web, 8080)
	n.wantDenied(t, flows, client, web, 8081)
	if again := call(8080); again.GetPolicy().GetEpoch() != first.GetPolicy().GetEpoch() {
		t.Errorf("the same named ports again changed the epoch from %d to %d",
			first.GetPolicy().GetEpoch(), again.GetPolicy().GetEpoch())
	}
	call(8081)
	wantAllowed(t, client, web, 8081)
	n.wantDenied(t, flows, client, web, 8080)

	ctx, cancel := deadline(t)
	defer cancel()
	_, err := n.datapath.UpdateEndpoint(ctx, &datapathv1.UpdateEndpointRequest{
		Owner: owner(web.Name), Manager: "another", Labels: &datapathv1.GivenLabels{},
	})
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("by another manager: %v", err)
	}
	_, err = n.datapath.UpdateEndpoint(ctx, &datapathv1.UpdateEndpointRequest{Owner: owner(web.Name), Manager: "cni"})
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("without a change: %v", err)
	}
}

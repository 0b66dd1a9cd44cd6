// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc/client"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// exceeding returns for each limit whether a tenant exceeds its share of it.
func (n *tenantNode) exceeding() (limits map[string]bool, out []byte, err error) {
	out, err = exec.Command(program("sluice"), "shares", "--exceeded", "--instance="+n.instance).CombinedOutput()
	limits = make(map[string]bool)
	for line := range strings.Lines(string(out)) {
		// Each limit also has a line about all tenants.
		if f := strings.Fields(line); len(f) > 2 && f[2] != "all" {
			_, limit, _ := strings.Cut(f[0], "/")
			limits[limit] = true
		}
	}
	return limits, out, err
}

// exceeded waits until a tenant exceeds its share of each of these limits.
func (n *tenantNode) exceeded(limits ...string) {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("the noisy tenant has exhausted %v", limits), func() error {
		all, out, err := n.exceeding()
		for _, limit := range limits {
			if err == nil && !all[limit] {
				err = fmt.Errorf("no tenant exceeds its share of %s:\n%s", limit, out)
			}
		}
		return err
	})
}

// within waits until no tenant exceeds its share of any of these limits.
func (n *tenantNode) within(limits ...string) {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("no tenant exceeds its share of %v", limits), func() error {
		all, out, err := n.exceeding()
		for _, limit := range limits {
			if err == nil && all[limit] {
				err = fmt.Errorf("a tenant exceeds its share of %s:\n%s", limit, out)
			}
		}
		return err
	})
}

// Sizes of the noisy tenant in TestAPITenantKeepsItsTablesBesideANoisyOne: its pods have 2*noisyPods policy tables.
const (
	noisyPods  = 64
	noisyBits  = 11 // labels that distinguish its identities, so that each has a separate class
	noisyRules = 1600
	noisyCIDRs = 900 // of a family
)

// noisyPolicy selects all pods of a namespace, in both directions.
func noisyPolicy(entries []object) object {
	egress := make([]object, len(entries))
	for i, e := range entries {
		egress[i] = object{}
		for key, value := range e {
			if key == "from" {
				key = "to"
			}
			egress[i][key] = value
		}
	}
	return object{
		"metadata": object{"name": "noisy"},
		"spec": object{
			"podSelector": object{}, "policyTypes": []string{"Ingress", "Egress"}, "ingress": entries, "egress": egress,
		},
	}
}

// port returns a list of ports with one port.
func port(n int) []object { return []object{{"protocol": "TCP", "port": n}} }

// TestAPITenantKeepsItsTablesBesideANoisyOne is TestAPITenantKeepsWhatItHasBesideANoisyOne for identity numbers, the
// rate of label changes, and the limits that policy tables share on a node. It does not exhaust the number of tables,
// which TestKernelTenantThatFillsTheMapsLeavesRoomForAnother does without 1,600 pods.
func TestAPITenantKeepsItsTablesBesideANoisyOne(t *testing.T) {
	a := newAPI(t)
	a.crds()
	n := newTenantNode(t, a, nil)
	n.namespace("victim", object{"sluice.io/tenant": "victim"})
	a.do(http.MethodPost, "/apis/cilium.io/v2/ciliumclusterwidenetworkpolicies", manifest("cilium.io/v2",
		"CiliumClusterwideNetworkPolicy", "", "quarantine",
		`{"endpointSelector": {"matchLabels": {"quarantine": "true"}}, "ingressDeny": [{"fromEntities": ["all"]}]}`))
	n.victim(0)
	noisy := func(i int) string { return fmt.Sprintf("noisy-%02d", i) }
	for i := range noisyPods {
		n.namespace(noisy(i), nil)
		if _, err := n.add(noisy(i), "pod", object{"app": "noisy"}); err != nil {
			t.Fatal(err)
		}
	}

	t.Log("round 1: rates of label changes")
	changing, stop := context.WithCancel(t.Context())
	var changes sync.WaitGroup
	for worker := range 4 {
		changes.Go(func() {
			for k := 0; changing.Err() == nil; k++ {
				pod := noisy((4*k + worker) % noisyPods)
				a.call(http.MethodPatch, "/api/v1/namespaces/"+pod+"/pods/pod", object{
					"metadata": object{"labels": object{"change": fmt.Sprint(worker, "-", k)}},
				})
			}
		})
	}
	n.victim(1)
	stop()
	changes.Wait()

	t.Log("round 2: identity numbers")
	conn, err := client.Dial(filepath.Join(n.run, "identity", "identity.sock"), client.Options{Timeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	identities := identityv1.NewIdentityServiceClient(conn)
	var had, refused atomic.Int64
	many(1<<noisyBits+noisyPods, func(i int) {
		if err := allocateNoisy(t.Context(), identities, noisy(i%noisyPods), i); status.Code(err) == codes.ResourceExhausted {
			refused.Add(1)
		} else if err != nil {
			t.Error(err)
		} else {
			had.Add(1)
		}
	})
	t.Logf("the tenant got %d more identities, and was refused %d", had.Load(), refused.Load())
	if had.Load() < 1<<(noisyBits-1) || refused.Load() == 0 {
		t.Fatal("the identity numbers of the noisy tenant are not exhausted")
	}
	n.victim(2)

	policies := func(i int) string {
		return "/apis/networking.k8s.io/v1/namespaces/" + noisy(i) + "/networkpolicies"
	}
	for round, flood := range []struct {
		limits  []string
		entries func(pod int) []object
	}{
		{[]string{"peer-classes", "peer-rows"}, func(pod int) (all []object) {
			for bit := range noisyBits {
				all = append(all, object{"ports": port(10_000 + bit), "from": []object{{
					"namespaceSelector": object{},
					"podSelector":       object{"matchLabels": object{fmt.Sprint("bit-", bit): "1"}},
				}}})
			}
			return append(all, object{"ports": port(20_000 + pod)})
		}},
		{[]string{"table-rules", "port-nodes"}, func(pod int) (all []object) {
			for i := range noisyRules {
				all = append(all, object{"ports": port(1 + 32*i + pod%32), "from": []object{{
					"namespaceSelector": object{},
					"podSelector":       object{"matchLabels": object{fmt.Sprint("bit-", pod%noisyBits): "1"}},
				}}})
			}
			return append(all, object{"ports": port(20_000 + pod)})
		}},
		{[]string{"prefixes-ipv4", "prefixes-ipv6"}, func(pod int) (all []object) {
			var blocks []object
			for i := range noisyCIDRs {
				blocks = append(blocks,
					object{"ipBlock": object{"cidr": fmt.Sprintf("198.18.%d.%d/32", i/256+4*pod, i%256)}},
					object{"ipBlock": object{"cidr": fmt.Sprintf("2001:db8:%x::%x/128", pod, i)}})
			}
			return []object{{"from": blocks}}
		}},
	} {
		many(noisyPods, func(i int) { a.call(http.MethodPost, policies(i), noisyPolicy(flood.entries(i))) })
		t.Logf("round %d: %v", 3+round, flood.limits)
		n.exceeded(flood.limits...)
		n.victim(3 + round)
		if round < 2 {
			many(noisyPods, func(i int) { a.call(http.MethodDelete, policies(i)+"/noisy", nil) })
		}
	}

	t.Log("the services start again")
	for _, service := range []string{"policy", "datapath", "identity"} {
		restart := exec.Command(program("sluice"), "dev", "restart", service, "--instance="+n.instance)
		restart.Env = n.env
		if out, err := restart.CombinedOutput(); err != nil {
			t.Fatalf("restart %s: %v: %s", service, err, out)
		}
	}
	n.victim(6)
}

// allocateNoisy requests the identity of the i-th label set of a namespace.
func allocateNoisy(ctx context.Context, c identityv1.IdentityServiceClient, namespace string, i int) error {
	labels := []*workloadv1.Label{
		{Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: namespace},
		{Source: "k8s", Key: "io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name", Value: namespace},
		{Source: "k8s", Key: "set", Value: fmt.Sprint(i)},
	}
	for bit := range noisyBits {
		if i>>bit&1 == 1 {
			labels = append(labels, &workloadv1.Label{Source: "k8s", Key: fmt.Sprint("bit-", bit), Value: "1"})
		}
	}
	_, err := c.AllocateIdentity(ctx, &identityv1.AllocateIdentityRequest{
		Labels: labels, Reference: fmt.Sprint("noisy-", i),
	})
	return err
}

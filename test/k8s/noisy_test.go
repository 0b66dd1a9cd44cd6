// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/test/k8s/cluster"
)

// noisyNamespaces is the number of namespaces of the tenant without a label.
const noisyNamespaces = 500

// noisyName returns the name of the namespace of the i-th object.
func noisyName(i int) string { return fmt.Sprintf("noisy-%03d", i%noisyNamespaces) }

// create creates objects with one call of kubectl.
func (n sluiceNode) create(count int, object func(i int) object) {
	n.Helper()
	var all bytes.Buffer
	for i := range count {
		text, err := json.Marshal(object(i))
		n.must(err)
		all.Write(append(text, "\n---\n"...))
	}
	command, err := n.c.KubectlCommand(n.Context(), "create", "--output=name", "--filename=-")
	n.must(err)
	command.Stdin = &all
	if out, err := command.CombinedOutput(); err != nil {
		n.Fatalf("%v: %s", err, out[max(0, len(out)-2000):])
	}
}

// labelledTenant is a tenant that uses every feature that a tenant can use.
type labelledTenant struct {
	sluiceNode
	round int
}

func newLabelledTenant(n sluiceNode) *labelledTenant {
	n.Helper()
	n.apply(`
{apiVersion: v1, kind: Namespace, metadata: {name: tenant, labels: {sluice.io/tenant: quiet}}}
---
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: quarantine}
spec: {endpointSelector: {matchLabels: {quarantine: "true"}}, ingressDeny: [{fromEntities: [all]}]}
`)
	n.eventually("the namespace has its account", func() error {
		_, err := n.c.Kubectl(n.Context(), "--namespace=tenant", "get", "serviceaccount", "default")
		return err
	})
	n.apply(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: rolled, namespace: tenant}
spec:
  replicas: 2
  selector: {matchLabels: {app: rolled}}
  template:
    metadata: {labels: {app: rolled}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
        - name: agnhost
          image: "%s"
          args: [netexec, --http-port=8080]
          readinessProbe: {periodSeconds: 1, httpGet: {port: 8080, path: /healthz}}
---
apiVersion: v1
kind: Service
metadata: {name: rolled, namespace: tenant}
spec: {selector: {app: rolled}, ports: [{port: 80, targetPort: 8080}]}
`, image)
	n.kubectl("--namespace=tenant", "rollout", "status", "--timeout=3m", "deployment/rolled")
	return &labelledTenant{sluiceNode: n}
}

// reaches waits until a connection is made, or times out.
func (v *labelledTenant) reaches(what string, from kubePod, to string, want bool) {
	v.Helper()
	v.eventually(what, func() error {
		err := v.connects(from, to)
		switch {
		case want:
			return err
		case err == nil:
			return errors.New("it connects")
		case !strings.Contains(err.Error(), "TIMEOUT"):
			return fmt.Errorf("%w, want TIMEOUT", err)
		}
		return nil
	})
}

// usesAll uses every feature with a client on one node and a server on another. Each operation must have its result
// in an empty cluster.
func (v *labelledTenant) usesAll(when, clientNode, serverNode string) {
	v.Helper()
	begin := time.Now()
	client, web := fmt.Sprint("client-", v.round), fmt.Sprint("web-", v.round)
	v.round++
	v.serverOn(clientNode, "tenant", client)
	v.serverOn(serverNode, "tenant", web)
	from, to := v.ready("tenant", client), v.ready("tenant", web)
	direct := net.JoinHostPort(to.address(), "8080")
	v.reaches(when+": before any policy", from, direct, true)

	// This connection uses DNS and the API server's Service.
	v.reaches(when+": the API server by its name", from, "kubernetes.default.svc.cluster.local:443", true)

	v.apply(`
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: isolate-%[1]s, namespace: tenant}
spec: {podSelector: {matchLabels: {app: %[1]s}}, policyTypes: [Ingress]}
`, web)
	v.reaches(when+": a policy that isolates", from, direct, false)
	v.apply(`
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: allow-%[1]s, namespace: tenant}
spec:
  podSelector: {matchLabels: {app: %[1]s}}
  ingress: [{from: [{podSelector: {matchLabels: {app: %[2]s}}}]}]
`, web, client)
	v.reaches(when+": a policy that allows", from, direct, true)

	v.apply(`
apiVersion: v1
kind: Service
metadata: {name: %[1]s, namespace: tenant}
spec: {selector: {app: %[1]s}, ports: [{port: 80, targetPort: 8080}]}
`, web)
	v.reaches(when+": a new Service", from, net.JoinHostPort(v.serviceAddress(web), "80"), true)

	v.kubectl("--namespace=tenant", "rollout", "restart", "deployment/rolled")
	v.kubectl("--namespace=tenant", "rollout", "status", "--timeout=3m", "deployment/rolled")
	v.kubectl("--namespace=tenant", "wait", "--for=delete", "--timeout=3m", "pod",
		"--selector=app=rolled,pod-template-hash!="+v.templateHash())
	rolled := net.JoinHostPort(v.serviceAddress("rolled"), "80")
	v.reaches(when+": a rolling update", from, rolled, true)
	for range 5 { // no earlier pod is left
		if err := v.connects(from, rolled); err != nil {
			v.Errorf("%s: after a rolling update: %v", when, err)
		}
	}

	v.kubectl("--namespace=tenant", "label", "pod", web, "quarantine=true")
	v.reaches(when+": the quarantine label", from, direct, false)
	v.kubectl("--namespace=tenant", "delete", "--wait=false", "pod/"+client, "pod/"+web, "service/"+web,
		"networkpolicy/isolate-"+web, "networkpolicy/allow-"+web)
	v.Logf("%s: all results are right, after %.1f s", when, time.Since(begin).Seconds())
}

func (v *labelledTenant) serviceAddress(name string) string {
	v.Helper()
	return v.kubectl("--namespace=tenant", "get", "service", name, "--output=jsonpath={.spec.clusterIP}")
}

// templateHash returns the hash of the Deployment's current pod template.
func (v *labelledTenant) templateHash() string {
	v.Helper()
	var sets struct {
		Items []struct {
			Metadata struct{ Labels map[string]string }
			Spec     struct{ Replicas int }
		}
	}
	v.must(v.c.Get(v.Context(), &sets, "replicasets", "--namespace=tenant", "--selector=app=rolled"))
	for _, s := range sets.Items {
		if s.Spec.Replicas > 0 {
			return s.Metadata.Labels["pod-template-hash"]
		}
	}
	v.Fatalf("no ReplicaSet has replicas: %+v", sets)
	return ""
}

// exceeded waits until both nodes report that demand exceeds the limits.
func (v *labelledTenant) exceeded(limits ...string) {
	v.Helper()
	for i := range 2 {
		node := sluiceNode{v.TB, v.c, i}
		v.eventually(fmt.Sprintf("%s has exhausted %v", node.name(), limits), func() error {
			out, err := node.sluice("shares", "--exceeded")
			for _, limit := range limits {
				if err == nil && !strings.Contains(out, "/"+limit+" ") {
					err = fmt.Errorf("no tenant exceeds its share of %s:\n%s", limit, out)
				}
			}
			return err
		})
	}
}

// TestTenantKeepsWhatItHasBesideANoisyOne exhausts each limit that tenants share, one after the other, from 500
// namespaces of a tenant without a label. Meanwhile a tenant with the label uses policies, Services, rolling updates,
// label changes and pods on two nodes. Then all processes restart, and a node joins.
func TestTenantKeepsWhatItHasBesideANoisyOne(t *testing.T) {
	late := func(c *cluster.Cluster) {
		if _, err := c.Kubectl(t.Context(), "label", "node", "node3", joinsLater+"=yes"); err != nil {
			t.Fatal(err)
		}
	}
	c := startSluiceAs(t, "noisy", cluster.Options{Nodes: 3, Mounts: []string{programs()}}, late)
	n := sluiceNode{t, c, 0}
	n.kubectl("apply", "--server-side", "--kustomize=../../deploy/kubernetes/crds")
	n.eventually("the kinds are served", func() error {
		_, err := c.Kubectl(t.Context(), "get", "ciliumclusterwidenetworkpolicies")
		return err
	})
	v := newLabelledTenant(n)
	v.usesAll("an empty cluster", "node1", "node2")

	n.create(noisyNamespaces, func(i int) object {
		return object{"apiVersion": "v1", "kind": "Namespace", "metadata": object{"name": noisyName(i)}}
	})
	policy := func(i int, name string, ingress []object) object {
		return object{
			"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
			"metadata": object{"name": fmt.Sprint(name, "-", i), "namespace": noisyName(i)},
			"spec":     object{"podSelector": object{}, "ingress": ingress},
		}
	}
	of := func(apiVersion, kind string, o object) object {
		o["apiVersion"], o["kind"] = apiVersion, kind
		return o
	}
	wide := make([]object, 60)
	for i := range wide {
		wide[i] = object{"ipBlock": object{"cidr": fmt.Sprintf("198.18.%d.0/24", i)}}
	}
	for _, flood := range []struct {
		limits []string
		count  int
		object func(i int) object
	}{
		{[]string{"policies"}, 600, func(i int) object { return policy(i, "small", nil) }},
		{[]string{"manifests"}, 600, func(i int) object { return policy(i, "wide", []object{{"from": wide}}) }},
		{[]string{"frontends"}, 60, func(i int) object {
			service, _ := tenantService(noisyName(i), fmt.Sprint("many-ports-", i), "", 10)
			delete(service["spec"].(object), "clusterIP") //nolint:forcetypeassert // of tenantService
			return of("v1", "Service", service)
		}},
		{[]string{"services"}, 600, func(i int) object {
			service, _ := tenantService(noisyName(i), fmt.Sprint("headless-", i), "None", 1)
			return of("v1", "Service", service)
		}},
		{[]string{"endpointSlices", "backends"}, 600, func(i int) object {
			_, slice := tenantService(noisyName(i), fmt.Sprint("many-ports-", i%60), "", 1)
			slice["metadata"].(object)["name"] = fmt.Sprint("slice-", i) //nolint:forcetypeassert // of tenantService
			var endpoints []object
			for k := range 5 {
				endpoints = append(endpoints, object{"addresses": []string{fmt.Sprintf("10.9.%d.%d", i%256, 10+k+i/256*5)}})
			}
			slice["endpoints"] = endpoints
			return of("discovery.k8s.io/v1", "EndpointSlice", slice)
		}},
	} {
		n.create(flood.count, flood.object)
		v.exceeded(flood.limits...)
		v.usesAll(strings.Join(flood.limits, " and ")+" exhausted", "node1", "node2")
	}

	n.kubectl("--namespace=sluice-system", "rollout", "restart", "daemonset/sluice")
	n.kubectl("--namespace=sluice-system", "rollout", "status", "--timeout=5m", "daemonset/sluice")
	v.usesAll("all processes started again", "node2", "node1")
	v.exceeded("policies", "manifests", "frontends", "services", "endpointSlices", "backends")

	n.kubectl("label", "node", "node3", joinsLater+"-")
	n.kubectl("wait", "--for=condition=Ready", "--timeout=5m", "node/node3")
	v.usesAll("a client on a node that joined", "node3", "node1")
	v.usesAll("a server on a node that joined", "node2", "node3")
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/test/k8s/cluster"
)

// TestSluiceRunsItsOwnEtcd installs Sluice on two nodes without an external etcd. Traffic, policies and identities
// must survive each loss of the store.
func TestSluiceRunsItsOwnEtcd(t *testing.T) {
	c := startSluiceAs(t, "store", cluster.Options{Nodes: 2, Mounts: []string{programs()}})
	for _, s := range []struct {
		name string
		run  func(sluiceNode)
	}{
		{"Credentials", testStoreCredentials},
		{"Rights", func(n sluiceNode) {
			testRights(n.TB.(*testing.T), n.c, "sluice-system", "app.kubernetes.io/name=sluice-store", nil)
		}},
		{"Traffic", testTwoNodes},
		{"ContainerKilled", testStoreContainerKilled},
		{"PodReplaced", testStorePodReplaced},
		{"Away", testStoreAway},
		{"Snapshot", testStoreSnapshot},
		{"APIServerAway", testAPIServerAway},
		{"Rollout", testRolloutAcrossNodes},
	} {
		t.Run(s.name, func(t *testing.T) {
			n := sluiceNode{t, c, 0}
			begin := time.Now()
			s.run(n)
			n.kubectl("delete", "namespace", "--selector=scenario", "--ignore-not-found", "--wait")
			for i := range 2 {
				sluiceNode{t, c, i}.exact()
			}
			t.Logf("took %.1f s", time.Since(begin).Seconds())
		})
	}
	t.Run("Uninstall", func(t *testing.T) { testUninstall(sluiceNode{t, c, 0}, sluiceNode{t, c, 1}) })
}

// storeStatus is the tested part of the output of `sluice store status`.
type storeStatus struct {
	Service struct{ Problems []struct{ Text string } }
	Epoch   uint64
	Nodes   []struct {
		Name       string
		ExpiryTime time.Time
	}
}

// inStore runs a command in the pod of the store.
func (n sluiceNode) inStore(args ...string) (string, error) {
	out, err := n.c.Kubectl(n.Context(), append([]string{
		"--namespace=sluice-system", "exec", "deployment/sluice-store", "--",
	}, args...)...)
	return string(out), err
}

// store returns the status of the store when both nodes are enrolled.
func (n sluiceNode) store() (s storeStatus) {
	n.Helper()
	n.eventually("both nodes have credentials", func() error {
		out, err := n.inStore("sluice", "store", "status", "--output=json")
		if err != nil {
			return err
		}
		s = storeStatus{}
		if err := json.Unmarshal([]byte(out), &s); err != nil {
			return err
		}
		if len(s.Nodes) != 2 || len(s.Service.Problems) > 0 {
			return errors.New(out)
		}
		return nil
	})
	return s
}

// storePod returns the running pod of the store.
func (n sluiceNode) storePod() kubePod {
	n.Helper()
	n.kubectl("--namespace=sluice-system", "rollout", "status", "--timeout=3m", "deployment/sluice-store")
	var pods struct{ Items []kubePod }
	n.must(n.c.Get(n.Context(), &pods, "pods", "--namespace=sluice-system",
		"--selector=app.kubernetes.io/name=sluice-store"))
	for _, p := range pods.Items {
		if p.Metadata.DeletionTimestamp == nil && p.Status.Phase == "Running" {
			return p
		}
	}
	n.Fatalf("no pod of the store: %+v", pods)
	return kubePod{}
}

// numbers returns the identities of the pods of a namespace on all nodes.
func (n sluiceNode) numbers(namespace string) (map[string]uint64, error) {
	numbers := map[string]uint64{}
	for i := range n.c.Nodes() {
		var all []endpoint
		if err := (sluiceNode{n.TB, n.c, i}).list(&all, "endpoint", "list"); err != nil {
			return nil, err
		}
		for _, e := range all {
			if e.Pod.Namespace == namespace {
				numbers[e.Pod.Name] = e.Identity
			}
		}
	}
	return numbers, nil
}

// sameNumbers waits until pods have the identities that they had before.
func (n sluiceNode) sameNumbers(when, namespace string, before map[string]uint64) {
	n.Helper()
	n.eventually(when+": the identities of the pods", func() error {
		now, err := n.numbers(namespace)
		if err != nil {
			return err
		}
		for name, number := range before {
			if now[name] != number {
				return fmt.Errorf("%s was the identity %d, and is %d", name, number, now[name])
			}
		}
		return nil
	})
}

// testStoreCredentials: each node has a certificate of its own, and a client without one is refused.
func testStoreCredentials(n sluiceNode) {
	out := n.kubectl("--namespace=sluice-system", "get", "secrets,deployments", "--output=name")
	if strings.Contains(out, "etcd-dev") || strings.Contains(out, "secret/") {
		n.Errorf("there is another etcd, or a Secret: %s", out)
	}
	status := n.store()
	keys := map[string]bool{}
	var clients []string
	for i := range n.c.Nodes() {
		node := sluiceNode{n.TB, n.c, i}
		const path = "/var/lib/sluice/identity/store.json"
		content, err := node.run("cat", path)
		n.must(err)
		var file struct {
			Data struct {
				Node, Certificate, Key string
				Clients                []string
			}
		}
		n.must(json.Unmarshal([]byte(content), &file))
		has := file.Data
		clients = has.Clients
		block, _ := pem.Decode([]byte(has.Certificate))
		if block == nil {
			n.Fatalf("%s: no certificate in %s", node.name(), path)
		}
		certificate, err := x509.ParseCertificate(block.Bytes)
		n.must(err)
		if has.Node != node.name() || certificate.Subject.CommonName != "node:"+node.name() || keys[has.Key] {
			n.Errorf("%s has credentials of %s with the subject %s", node.name(), has.Node, certificate.Subject)
		}
		keys[has.Key] = true
		if status.Nodes[i].Name != node.name() || !status.Nodes[i].ExpiryTime.Equal(certificate.NotAfter) ||
			time.Until(certificate.NotAfter) > 24*time.Hour {
			n.Errorf("the certificate of %s is valid until %s, the store has %+v", node.name(), certificate.NotAfter,
				status.Nodes[i])
		}
		if mode, err := node.run("stat", "--format=%a %u", path); err != nil || mode != "600 65701\n" {
			n.Errorf("%s: %s has the mode and user %q, %v", node.name(), path, mode, err)
		}
	}
	for _, at := range clients {
		out, err := n.run("curl", "--insecure", "--silent", "--max-time", "5", "https://"+at+"/version")
		if err == nil || out != "" {
			n.Errorf("a client without a certificate: %q, %v", out, err)
		}
	}
}

// testStoreContainerKilled: the store continues with its data and its epoch.
func testStoreContainerKilled(n sluiceNode) {
	s := n.pair()
	before, epoch := n.storePod(), n.store().Epoch
	_, id, _ := strings.Cut(before.Status.ContainerStatuses[0].ContainerID, "://")
	at := n.of(before)
	at.kill(at.task(id))
	n.eventually("the container runs again", func() error {
		now := n.pod("sluice-system", before.Metadata.Name).Status.ContainerStatuses[0]
		if now.RestartCount == 0 || !now.Ready {
			return fmt.Errorf("%+v", now)
		}
		return nil
	})
	n.fresh("after-kill")
	if after := n.store().Epoch; after != epoch {
		n.Errorf("epoch %d after epoch %d: the data are lost", after, epoch)
	}
	s.unbroken("the container of the store killed")
}

// fresh starts a pod with labels that no other pod has, and removes it with its namespace.
func (n sluiceNode) fresh(name string) {
	n.Helper()
	n.namespace(name)
	n.server(name, "web", "node1")
	begin := time.Now()
	n.ready(name, "web")
	n.Logf("a pod with new labels was Ready after %.1f s", time.Since(begin).Seconds())
}

// testStorePodReplaced: the data are lost with the pod. In the next epoch the numbers are the same, a policy
// stays enforced, and pods with known labels start at once.
func testStorePodReplaced(n sluiceNode) {
	s := n.pair()
	n.serverOn("node2", "pair", "closed")
	n.policy("pair", "closed", "{podSelector: {matchLabels: {app: closed}}, policyTypes: [Ingress], ingress: "+
		"[{from: [{podSelector: {matchLabels: {app: none}}}]}]}")
	n.kubectl("--namespace=pair", "delete", "networkpolicy", "within")
	client, web, closed := n.ready("pair", "client"), n.ready("pair", "web"), n.ready("pair", "closed")
	open, shut := net.JoinHostPort(web.address(), "8080"), net.JoinHostPort(closed.address(), "8080")
	enforced := func(when string) {
		n.Helper()
		if err := n.connects(client, open); err != nil {
			n.Errorf("%s: %v", when, err)
		}
		n.denied(client, shut)
	}
	enforced("before")
	numbers, err := n.numbers("pair")
	n.must(err)
	epoch, pod := n.store().Epoch, n.storePod().Metadata.Name

	begin := time.Now()
	n.kubectl("--namespace=sluice-system", "delete", "pod", pod, "--wait")
	n.starts("known-labels")
	enforced("without the store")
	n.fresh("after-loss")
	n.Logf("%.1f s after the pod of the store was deleted", time.Since(begin).Seconds())
	after := n.store()
	if after.Epoch == epoch {
		n.Errorf("epoch %d, as before the data were lost", after.Epoch)
	}
	n.sameNumbers("the next epoch", "pair", numbers)
	enforced("in the next epoch")
	s.unbroken("the store lost its data")
}

// testStoreAway: without the store, pods with known labels start. Others wait, and start afterwards without help.
func testStoreAway(n sluiceNode) {
	s := n.pair()
	n.namespace("waits")
	scale := func(to int) {
		n.kubectl("--namespace=sluice-system", "scale", "deployment/sluice-store", fmt.Sprintf("--replicas=%d", to))
	}
	scale(0)
	n.Cleanup(func() {
		_, _ = n.c.Kubectl(contextOf(n.TB), "--namespace=sluice-system", "scale", "deployment/sluice-store", "--replicas=1")
	})
	n.kubectl("--namespace=sluice-system", "wait", "--for=delete", "--timeout=2m", "pod",
		"--selector=app.kubernetes.io/name=sluice-store")
	n.starts("known-labels")
	n.server("waits", "new-labels")
	for deadline := time.Now().Add(*outage); time.Now().Before(deadline); time.Sleep(time.Second) {
		s.alive()
		if p := n.pod("waits", "new-labels"); p.Status.Phase != "Pending" {
			n.Fatalf("a pod with labels without an identity is %s", p.Status.Phase)
		}
	}
	scale(1)
	begin := time.Now()
	n.ready("waits", "new-labels")
	n.Logf("a pod with new labels was Ready %.1f s after the store was started", time.Since(begin).Seconds())
	n.store()
	s.unbroken("the store unavailable")
}

// testStoreSnapshot saves the data of the store, and restores them in a store on a machine: it has the nodes and their
// keys.
func testStoreSnapshot(n sluiceNode) {
	n.pair().stop()
	want := n.store()
	out, err := n.inStore("sluice", "store", "snapshot", "save", "-")
	n.must(err)
	const file = "/tmp/snapshot.db"
	n.must(n.write(out, "sh", "-c", "cat >"+file))

	// A store without an address has no ports, which the other store may have.
	const instance, run, state = "--instance=restored", "/run/sluice-restored", "/var/lib/sluice-restored"
	n.look("install", "--directory", run, state)
	n.look("install", "--directory", "--mode=0700", "--owner=65712", "--group=65700", run+"/store", state+"/store")
	defer n.look("rm", "-r", run, state, file)
	start := func() (end func()) {
		n.Helper()
		cmd, err := n.c.NodeCommand(n.Context(), 0, "setpriv", "--reuid=65712", "--regid=65700", "--clear-groups",
			filepath.Join(programs(), "sluice-store"), instance)
		n.must(err)
		n.must(cmd.Start())
		n.eventually("the store on the machine serves", func() error {
			_, err := n.sluice("store", "status", instance)
			return err
		})
		return func() {
			n.Helper()
			_, err := n.run("pkill", "-TERM", "-f", "[s]luice-store "+instance)
			n.must(errors.Join(err, cmd.Wait()))
		}
	}
	start()()
	if out, err := n.sluice("store", "snapshot", "restore", file, instance); err != nil {
		n.Fatalf("%v: %s", err, out)
	}
	end := start()
	defer end()
	text, err := n.sluice("store", "status", instance, "--output=json")
	n.must(err)
	var has storeStatus
	n.must(json.Unmarshal([]byte(text), &has))
	names := map[string]bool{}
	for _, node := range has.Nodes {
		names[node.Name] = true
	}
	for _, node := range want.Nodes {
		if !names[node.Name] {
			n.Errorf("the restored store has the nodes %v, without %s", names, node.Name)
		}
	}
}

// TestAnExternalEtcdIsReplacedByTheStore moves two nodes from an etcd to the store and back, as docs/reference/store.md
// describes. Traffic, policies and identities must stay the same.
func TestAnExternalEtcdIsReplacedByTheStore(t *testing.T) {
	c := startSluiceAs(t, "overlay", cluster.Options{Nodes: 2, Mounts: []string{programs()}})
	n := sluiceNode{t, c, 0}
	const ours = "--namespace=sluice-system"
	s := n.pair()
	n.serverOn("node2", "pair", "closed")
	n.policy("pair", "closed", "{podSelector: {matchLabels: {app: closed}}, policyTypes: [Ingress], ingress: []}")
	n.kubectl("--namespace=pair", "delete", "networkpolicy", "within")
	client, web, closed := n.ready("pair", "client"), n.ready("pair", "web"), n.ready("pair", "closed")
	numbers, err := n.numbers("pair")
	n.must(err)
	same := func(when string) {
		t.Helper()
		n.eventually(when+": a pod of the other node answers", func() error {
			return n.connects(client, net.JoinHostPort(web.address(), "8080"))
		})
		n.denied(client, net.JoinHostPort(closed.address(), "8080"))
		n.sameNumbers(when, "pair", numbers)
		s.alive()
	}
	scale := func(deployment string, to int) {
		t.Helper()
		n.kubectl(ours, "scale", "deployment/"+deployment, fmt.Sprintf("--replicas=%d", to))
		if to == 0 {
			n.kubectl(ours, "wait", "--for=delete", "--timeout=2m", "pod", "--selector=app.kubernetes.io/name="+deployment)
			return
		}
		n.kubectl(ours, "rollout", "status", "--timeout=3m", "deployment/"+deployment)
	}
	move := func(to string) {
		t.Helper()
		n.kubectl(ours, "patch", "configmap", "sluice", fmt.Sprintf(`--patch={"data":{"etcdEndpoints":%q}}`, to))
		n.kubectl(ours, "delete", "pods", "--selector=app.kubernetes.io/name=sluice", "--wait")
		same("without a store")
	}
	ready := func(name string) {
		t.Helper()
		n.kubectl(ours, "rollout", "status", "--timeout=4m", "daemonset/sluice")
		n.fresh(name)
		same(name)
		for i := range 2 {
			sluiceNode{t, c, i}.exact()
		}
	}

	n.kubectl("apply", "--kustomize=testdata/store-beside")
	n.kubectl(ours, "rollout", "status", "--timeout=4m", "daemonset/sluice")
	// A pod that stands by is Ready, too. With the ConfigMap the first epoch has begun.
	n.kubectl(ours, "wait", "--for=create", "--timeout=3m", "configmap/sluice-store")
	same("the store beside an etcd")

	scale("sluice-store", 0)
	scale("etcd-dev", 0)
	move("")
	scale("sluice-store", 1)
	ready("in-the-store")
	if status := n.store(); status.Epoch != 2 {
		t.Errorf("the nodes claim in epoch %d, want 2, which allocates no identity in its first minute", status.Epoch)
	}

	scale("sluice-store", 0)
	move("http://10.200.0.1:64715")
	scale("etcd-dev", 1)
	ready("back-in-etcd")
	s.unbroken("moved to the store, and back")
}

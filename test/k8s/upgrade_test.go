// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/sluice-net/sluice/test/k8s/cluster"
)

// TestClusterIsUpgraded upgrades a cluster from an earlier version to this version, downgrades it, and upgrades it
// again. The images and manifests of the earlier version are in the checkout SLUICE_OLD (scripts/test-k8s-upgrade). A
// TCP connection must survive, new connections must succeed while this version replaces the earlier one, and pods that
// are created during each step must start. After each step, the processes of that version under the same Deployment
// and Lease write the status of policies.
func TestClusterIsUpgraded(t *testing.T) {
	old := os.Getenv("SLUICE_OLD")
	if old == "" {
		t.Fatal("SLUICE_OLD is not set: see make test-k8s-upgrade")
	}
	var images []string
	for _, name := range []string{"sluice", "sluice-devetcd"} {
		images = append(images, filepath.Join(os.Getenv("SLUICE_BIN"), "images", name+"-"+runtime.GOARCH+".tar"),
			filepath.Join(old, "upgrade", name+"-earlier.tar"))
	}
	c := start(t, cluster.Options{NoCNI: true, Mounts: []string{programs()}, Images: images})
	n := sluiceNode{t, c, 0}
	apply := func(kustomization string) {
		n.Helper()
		n.kubectl("apply", "--kustomize="+kustomization)
		for _, what := range []string{"deployment/etcd-dev", "daemonset/sluice", "deployment/sluice-status"} {
			n.kubectl("--namespace=sluice-system", "rollout", "status", "--timeout=3m", what)
		}
	}
	n.kubectl("apply", "--server-side", "--kustomize=../../deploy/kubernetes/crds")
	earlier := filepath.Join(old, "upgrade")
	apply(earlier)
	n.kubectl("wait", "--for=condition=Ready", "--timeout=2m", "node", "--all")
	n.kubectl("--namespace=kube-system", "rollout", "status", "--timeout=2m", "deployment/coredns")
	s := n.pair()
	client := n.ready("pair", "client")
	asked := n.attempts()
	writer := n.writesStatus("before", "sluice-policy", "")
	for i, step := range []struct{ name, kustomization string }{
		{"to this version", "testdata/cluster"}, {"back", earlier}, {"to this version again", "testdata/cluster"},
	} {
		var during []string
		for j := range 3 {
			during = append(during, fmt.Sprintf("during-%d-%d", i, j))
		}
		end := func(string) {}
		if step.kustomization != earlier { // the earlier version refuses connections while it starts
			end = asked.begin()
		}
		n.kubectl("apply", "--kustomize="+step.kustomization)
		for _, name := range during {
			n.server("pair", name)
		}
		apply(step.kustomization)
		for _, name := range during {
			p := n.ready("pair", name)
			if err := n.connects(client, p.address()+":8080"); err != nil {
				t.Errorf("%s: %s, which was made meanwhile: %v", step.name, name, err)
			}
		}
		end(step.name)
		s.alive()
		program := "sluice-controller"
		if step.kustomization == earlier {
			program = "sluice-policy"
		}
		writer = n.writesStatus(fmt.Sprintf("step-%d", i), program, writer)
		if step.kustomization != earlier {
			n.exact()
		}
		t.Logf("%s: done", step.name)
	}
	s.unbroken("upgraded, back, and upgraded again")
}

// writesStatus fails unless the processes of the Deployment sluice-status are of one program, one of them holds the
// Lease, and it writes the condition of a new policy with a name. It returns the holder, which must not be the former
// one: another program means other processes.
func (n sluiceNode) writesStatus(name, program, former string) (holder string) {
	n.Helper()
	const lease = "lease/sluice-status"
	n.eventually("only "+program+" is left in the Deployment", func() error {
		var pods struct {
			Items []struct {
				Spec struct{ Containers []struct{ Command []string } }
			}
		}
		if err := n.c.Get(n.Context(), &pods, "pods", "--namespace=sluice-system",
			"--selector=app.kubernetes.io/name=sluice-status"); err != nil {
			return err
		}
		for _, p := range pods.Items {
			if got := p.Spec.Containers[0].Command; len(got) != 1 || got[0] != program {
				return fmt.Errorf("a pod runs %v", got)
			}
		}
		if len(pods.Items) == 0 {
			return errors.New("there is no pod")
		}
		return nil
	})
	type record struct {
		Spec struct {
			HolderIdentity string
			RenewTime      time.Time
		}
	}
	var first record
	n.eventually("another process than the former one holds the Lease", func() error {
		if err := n.c.Get(n.Context(), &first, lease, "--namespace=sluice-system"); err != nil {
			return err
		}
		if h := first.Spec.HolderIdentity; h == "" || h == former {
			return fmt.Errorf("the holder is %q", h)
		}
		return nil
	})
	n.apply(`
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: "%s", namespace: pair}
spec:
  endpointSelector: {matchLabels: {app: none}}
  ingress: [{fromEntities: [world]}]
`, name)
	n.eventually("the policy has a condition", func() error {
		var p withStatus
		if err := n.c.Get(n.Context(), &p, "ciliumnetworkpolicy/"+name, "--namespace=pair"); err != nil {
			return err
		}
		for _, c := range p.Status.Conditions {
			if c.Type == accepted && c.Status == "True" && c.ObservedGeneration == p.Metadata.Generation {
				return nil
			}
		}
		return fmt.Errorf("the conditions are %+v", p.Status.Conditions)
	})
	n.eventually("the holder renews the Lease", func() error {
		var now record
		if err := n.c.Get(n.Context(), &now, lease, "--namespace=sluice-system"); err != nil {
			return err
		}
		if now.Spec.HolderIdentity != first.Spec.HolderIdentity {
			return fmt.Errorf("the holder is %s, and was %s", now.Spec.HolderIdentity, first.Spec.HolderIdentity)
		}
		if !now.Spec.RenewTime.After(first.Spec.RenewTime) {
			return fmt.Errorf("the last time is %v", now.Spec.RenewTime)
		}
		return nil
	})
	return first.Spec.HolderIdentity
}

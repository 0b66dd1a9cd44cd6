// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"crypto/x509/pkix"
	"fmt"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/sluice-net/sluice/test/k8s/cluster"
	"github.com/sluice-net/sluice/test/k8s/internal/pki"
)

// etcdSecret writes the Secret of the component etcd-tls, with certificates of a new authority.
func etcdSecret(n sluiceNode) {
	n.Helper()
	dir := n.TempDir()
	authority, err := pki.New(dir)
	n.must(err)
	n.must(authority.Issue("tls", pkix.Name{CommonName: "sluice"}, "127.0.0.1"))
	args := []string{
		"--namespace=sluice-system", "create", "secret", "generic", "sluice-etcd", "--dry-run=client", "--output=yaml",
	}
	for _, file := range []string{"ca.crt", "tls.crt", "tls.key"} {
		args = append(args, "--from-file="+filepath.Join(dir, file))
	}
	n.must(n.c.Apply(n.Context(), []byte(n.kubectl(args...))))
}

// TestSluiceReachesEtcdByTLS: kubelet mounts the Secret so that only identity can read it, and a change of the
// certificate authority reaches the process without a restart.
func TestSluiceReachesEtcdByTLS(t *testing.T) {
	secret := func(c *cluster.Cluster) {
		n := sluiceNode{t, c, 0}
		n.kubectl("apply", "--filename=../../deploy/kubernetes/base/namespace.yaml")
		etcdSecret(n)
	}
	n := sluiceNode{t, startSluiceAs(t, "etcd-tls", cluster.Options{Mounts: []string{programs()}}, secret), 0}
	reached := regexp.MustCompile(`(?m)^etcd +reached$`)
	connected := func(want bool) func() error {
		return func() error {
			out, err := n.sluice("status")
			if reached.MatchString(out) != want {
				return fmt.Errorf("%v: %s", err, out)
			}
			return nil
		}
	}
	n.eventually("etcd is reached by TLS", connected(true))

	n.kubectl("--namespace=sluice-system", "scale", "deployment/etcd-dev", "--replicas=0")
	n.eventually("etcd is unavailable", connected(false))
	etcdSecret(n)
	n.kubectl("--namespace=sluice-system", "scale", "deployment/etcd-dev", "--replicas=1")
	// kubelet updates the files of a running pod about once a minute.
	n.eventually("etcd is reached by certificates of another authority", connected(true))
	n.kubectl("create", "namespace", "rotated")
	n.serverOn("node1", "rotated", "after")
	n.kubectl("--namespace=rotated", "wait", "--for=condition=Ready", "--timeout=2m", "pod/after")
	restarts := n.kubectl("--namespace=sluice-system", "get", "pods", "--selector=app.kubernetes.io/name=sluice",
		`--output=jsonpath={.items[*].status.containerStatuses[?(@.name=="identity")].restartCount}`)
	if restarts != "0" {
		t.Errorf("identity was restarted %s times", restarts)
	}
}

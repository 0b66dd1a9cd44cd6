// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestAPITakesEachKustomization applies the base, and then applies each other kustomization as a dry run, which
// decodes and validates it completely.
func TestAPITakesEachKustomization(t *testing.T) {
	const deploy = "../../deploy/kubernetes/"
	a := newAPI(t)
	a.kubectl("apply", "--kustomize="+deploy+"base")
	for _, dir := range []string{
		"etcd-dev", "overlays/native", "overlays/overlay", "overlays/single-node", "uninstall",
	} {
		out := a.kubectl("apply", "--dry-run=server", "--kustomize="+deploy+dir)
		for line := range strings.Lines(out) {
			if !strings.Contains(line, "(server dry run)") {
				t.Errorf("%s: %s", dir, line)
			}
		}
	}
	a.crd("PodMonitor", "podmonitors", "monitoring.coreos.com", "Namespaced", "v1")
	a.crd("PrometheusRule", "prometheusrules", "monitoring.coreos.com", "Namespaced", "v1")
	root, err := filepath.Abs(deploy)
	if err != nil {
		t.Fatal(err)
	}
	cluster := t.TempDir()
	to, err := filepath.Rel(cluster, root) // kustomize accepts only relative paths
	if err != nil {
		t.Fatal(err)
	}
	kustomization := fmt.Sprintf(`apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [%[1]s/overlays/native]
components: [%[1]s/components/etcd-tls, %[1]s/components/monitoring]
`, to)
	if err := os.WriteFile(filepath.Join(cluster, "kustomization.yaml"), []byte(kustomization), 0o600); err != nil {
		t.Fatal(err)
	}
	out := a.kubectl("apply", "--dry-run=server", "--kustomize="+cluster)
	for _, want := range []string{
		"daemonset.apps/sluice", "podmonitor", "prometheusrule", "configmap/sluice-dashboard",
		"deployment.apps/sluice-store",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %s with the components:\n%s", want, out)
		}
	}
	a.flows()
}

// flows: requests of Sluice's account use Sluice's FlowSchema and priority level. Requests of another account in the
// namespace do not.
func (a *apiServer) flows() {
	a.t.Helper()
	const group = "/apis/flowcontrol.apiserver.k8s.io/v1/"
	uid := func(path string) string {
		a.t.Helper()
		var of struct {
			Metadata struct{ UID string } `json:"metadata"`
		}
		if err := json.Unmarshal(a.do(http.MethodGet, group+path, nil), &of); err != nil || of.Metadata.UID == "" {
			a.t.Fatalf("%s: no UID: %v", path, err)
		}
		return of.Metadata.UID
	}
	schema, level := uid("flowschemas/sluice"), uid("prioritylevelconfigurations/sluice")
	// The administrator's client has a certificate, which takes precedence over a token.
	transport := &http.Transport{TLSClientConfig: a.http.Transport.(*http.Transport).TLSClientConfig.Clone()}
	transport.TLSClientConfig.Certificates = nil
	client := &http.Client{Transport: transport}
	defer client.CloseIdleConnections()
	tokens := map[string]string{}
	ask := func(account, path string) (schema, level string) {
		a.t.Helper()
		token, ok := tokens[account]
		if !ok {
			token = strings.TrimSpace(a.kubectl("create", "token", account, "--namespace=sluice-system"))
			tokens[account] = token
		}
		request, err := http.NewRequestWithContext(a.t.Context(), http.MethodGet, a.ready.Server+path, nil)
		if err != nil {
			a.t.Fatal(err)
		}
		request.Header.Set("Authorization", "Bearer "+token)
		response, err := client.Do(request)
		if err != nil {
			a.t.Fatal(err)
		}
		defer response.Body.Close()
		const header = "X-Kubernetes-Pf-"
		return response.Header.Get(header + "Flowschema-Uid"), response.Header.Get(header + "Prioritylevel-Uid")
	}
	// A server uses a new schema within seconds.
	for _, path := range []string{"/api/v1/pods?limit=1", "/api/v1/nodes/none", "/apis"} {
		eventually(a.t, "the schema of Sluice for "+path, func() error {
			if s, l := ask("sluice", path); s != schema || l != level {
				return fmt.Errorf("schema %q, level %q, want %q, %q", s, l, schema, level)
			}
			return nil
		})
	}
	a.kubectl("create", "serviceaccount", "other", "--namespace=sluice-system")
	if s, l := ask("other", "/apis"); s == "" || s == schema || l == level {
		a.t.Errorf("another account has Sluice's schema %q or level %q", s, l)
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// impersonate sends one request as a user.
func (a *apiServer) impersonate(user, method, path string, body object) (status int, answer string) {
	a.t.Helper()
	data, err := json.Marshal(body)
	if err != nil {
		a.t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(a.t.Context(), method, a.ready.Server+path, bytes.NewReader(data))
	if err != nil {
		a.t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		request.Header.Set("Content-Type", "application/merge-patch+json")
	}
	request.Header.Set("Impersonate-User", user)
	response, err := a.http.Do(request)
	if err != nil {
		a.t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		a.t.Fatal(err)
	}
	return response.StatusCode, string(text)
}

// TestAPITenantLabelNeedsItsVerb: a user who may write Namespaces and their status may change everything except the
// tenant label, which requires the verb set on tenants.sluice.io.
func TestAPITenantLabelNeedsItsVerb(t *testing.T) {
	const deploy, namespaces = "../../deploy/kubernetes/base/", "/api/v1/namespaces"
	a := newAPI(t)
	for name, rules := range map[string][]object{
		"writer": {{
			"apiGroups": []string{""}, "resources": []string{"namespaces", "namespaces/status", "namespaces/finalize"},
			"verbs": []string{"*"},
		}},
		"setter": {{"apiGroups": []string{"sluice.io"}, "resources": []string{"tenants"}, "verbs": []string{"set"}}},
	} {
		a.do(http.MethodPost, "/apis/rbac.authorization.k8s.io/v1/clusterroles", object{
			"metadata": object{"name": name}, "rules": rules,
		})
	}
	for user, roles := range map[string][]string{"alice": {"writer"}, "bob": {"writer", "setter"}} {
		for _, role := range roles {
			a.do(http.MethodPost, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", object{
				"metadata": object{"name": user + "-" + role},
				"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
				"subjects": []object{{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}},
			})
		}
	}
	a.kubectl("apply", "--filename="+deploy+"tenant-label-policy.yaml",
		"--filename="+deploy+"tenant-label-policy-binding.yaml")
	named := func(name string, labels object) object {
		return object{"metadata": object{"name": name, "labels": labels}}
	}
	tenant := func(value any) object { return object{"sluice.io/tenant": value} }
	// A server enforces a new admission policy within seconds.
	tries := 0
	eventually(t, "the policy", func() error {
		tries++
		namespace := named(fmt.Sprint("try-", tries), tenant("shop"))
		status, answer := a.impersonate("alice", http.MethodPost, namespaces, namespace)
		if status != http.StatusForbidden || !strings.Contains(answer, "tenants.sluice.io") {
			return fmt.Errorf("%d: %s", status, answer)
		}
		return nil
	})
	a.do(http.MethodPost, namespaces, named("shop", tenant("shop")))
	for _, v := range []struct {
		user, method, path string
		body               object
		allowed            bool
	}{
		{"alice", http.MethodPost, namespaces, named("plain", object{"team": "red"}), true},
		{"alice", http.MethodPatch, namespaces + "/plain", named("plain", object{"team": "blue"}), true},
		{"alice", http.MethodPatch, namespaces + "/plain", named("plain", tenant("shop")), false},
		{"alice", http.MethodPatch, namespaces + "/plain/status", named("plain", tenant("shop")), false},
		{"alice", http.MethodPatch, namespaces + "/shop", named("shop", tenant("other")), false},
		{"alice", http.MethodPatch, namespaces + "/shop", named("shop", tenant(nil)), false},
		{"alice", http.MethodPatch, namespaces + "/shop", named("shop", object{"team": "red"}), true},
		{"bob", http.MethodPatch, namespaces + "/plain", named("plain", tenant("shop")), true},
		{"bob", http.MethodPatch, namespaces + "/shop", named("shop", tenant(nil)), true},
		{"bob", http.MethodPost, namespaces, named("third", tenant("shop")), true},
		{"alice", http.MethodDelete, namespaces + "/third", nil, true},
	} {
		status, answer := a.impersonate(v.user, v.method, v.path, v.body)
		if allowed := status/100 == 2; allowed != v.allowed || !allowed && status != http.StatusForbidden {
			t.Errorf("%s %s %s %v: %d: %s", v.user, v.method, v.path, v.body, status, answer)
		}
	}
}

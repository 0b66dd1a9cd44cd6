// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// as sends requests with a token.
type as struct {
	a      *apiServer
	client *http.Client
	token  string
}

func (a *apiServer) as(token string) as {
	a.t.Helper()
	// The administrator's client has a certificate, which takes precedence over a token.
	transport := &http.Transport{TLSClientConfig: a.http.Transport.(*http.Transport).TLSClientConfig.Clone()}
	transport.TLSClientConfig.Certificates = nil
	client := &http.Client{Transport: transport}
	a.t.Cleanup(client.CloseIdleConnections)
	return as{a, client, token}
}

// patch sends a strategic merge patch, or a JSON patch if the body is a list.
func (s as) patch(path, body string) error {
	kind := "application/strategic-merge-patch+json"
	if strings.HasPrefix(body, "[") {
		kind = "application/json-patch+json"
	}
	return s.do(http.MethodPatch, path, kind, body)
}

func (s as) do(method, path, kind, body string) error {
	request, err := http.NewRequestWithContext(s.a.t.Context(), method, s.a.ready.Server+path, strings.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+s.token)
	request.Header.Set("Content-Type", kind)
	response, err := s.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode/100 != 2 {
		err = fmt.Errorf("%d: %s", response.StatusCode, answer)
	}
	return err
}

// TestAPITokenChangesOnlyWhatIpamWritesOnItsNode uses a real API server with the admission policy of the base. Each
// refused patch would change something.
func TestAPITokenChangesOnlyWhatIpamWritesOnItsNode(t *testing.T) {
	a := newAPI(t)
	a.account()
	const own, other = "/api/v1/nodes/node-a", "/api/v1/nodes/node-b"
	for _, name := range []string{"node-a", "node-b"} {
		a.do(http.MethodPost, "/api/v1/nodes", object{
			"metadata": object{
				"name": name, "labels": object{"zone": "a"}, "annotations": object{"kept": "yes"},
				"finalizers": []string{"kept.example/yes"},
			},
			"spec": object{"podCIDRs": []string{"10.0.1.0/24"}, "podCIDR": "10.0.1.0/24", "taints": []object{
				{"key": "other", "effect": "NoSchedule"},
				{"key": "node.sluice.io/not-ready", "effect": "NoSchedule"},
				{"key": "node.sluice.io/not-ready", "effect": "NoExecute"},
			}},
		})
		a.do(http.MethodPatch, "/api/v1/nodes/"+name+"/status", object{"status": object{
			"conditions": []object{
				{"type": "Ready", "status": "True"}, {"type": "NetworkUnavailable", "status": "True", "reason": "NoRoute"},
			},
			"addresses": []object{{"type": "InternalIP", "address": "192.0.2.1"}},
		}})
	}
	sluice, elsewhere := a.as(a.tokenOn("node-a")), a.as(a.tokenOn("node-b"))
	ours := func(value string) string {
		return `{"metadata":{"annotations":{"node.sluice.io/pod-ranges":` + value + `}}}`
	}
	eventually(t, "the policy is enforced", func() error {
		if err := sluice.patch(other, ours(`"x"`)); err == nil || !strings.Contains(err.Error(), "may only change the Node") {
			return fmt.Errorf("a patch of another Node: %v", err)
		}
		return nil
	})
	unbound := a.as(strings.TrimSpace(a.kubectl("create", "token", "sluice", "--namespace=sluice-system")))
	for what, try := range map[string]func() error{
		"a token without a node": func() error { return unbound.patch(own, ours(`"x"`)) },
		"another node's token":   func() error { return elsewhere.patch(own, ours(`"x"`)) },
		"the deletion of a Node": func() error { return sluice.do(http.MethodDelete, own, "application/json", "") },
		"a new Node": func() error {
			return sluice.do(http.MethodPost, "/api/v1/nodes", "application/json", `{"metadata":{"name":"node-c"}}`)
		},
	} {
		if err := try(); err == nil || !strings.Contains(err.Error(), "orbid") && !strings.Contains(err.Error(), "denied") {
			t.Errorf("%s: %v, want a refusal", what, err)
		}
	}

	before := a.do(http.MethodGet, own, nil)
	for _, c := range []struct{ what, path, patch string }{
		{"another label", own, `{"metadata":{"labels":{"tried":"yes"}}}`},
		{"a label less", own, `{"metadata":{"labels":{"zone":null}}}`},
		{"another annotation", own, `{"metadata":{"annotations":{"node.sluice.io/tried":"yes"}}}`},
		{"a changed annotation", own, `{"metadata":{"annotations":{"kept":"no"}}}`},
		{"an annotation less", own, `{"metadata":{"annotations":{"kept":null}}}`},
		{"a finalizer", own, `{"metadata":{"finalizers":["tried.example/yes"]}}`},
		{"no finalizer", own, `[{"op":"remove","path":"/metadata/finalizers"}]`},
		{"an owner", own, `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"p","uid":"u"}]}}`},
		{"cordon", own, `{"spec":{"unschedulable":true}}`},
		{"a provider", own, `{"spec":{"providerID":"tried"}}`},
		{"a taint", own, `[{"op":"add","path":"/spec/taints/-","value":{"key":"tried","effect":"NoExecute"}}]`},
		{
			"its own taint again", own,
			`[{"op":"add","path":"/spec/taints/-","value":{"key":"node.sluice.io/not-ready","effect":"PreferNoSchedule"}}]`,
		},
		{"another taint less", own, `[{"op":"remove","path":"/spec/taints/0"}]`},
		{"all taints less", own, `[{"op":"remove","path":"/spec/taints"}]`},
		{"another effect", own, `[{"op":"replace","path":"/spec/taints/1/effect","value":"PreferNoSchedule"}]`},
		{"its addresses", own + "/status", `{"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.9"}]}}`},
		{"one address more", own + "/status", `{"status":{"addresses":[{"type":"ExternalIP","address":"192.0.2.9"}]}}`},
		{"kubelet's port", own + "/status", `{"status":{"daemonEndpoints":{"kubeletEndpoint":{"Port":1}}}}`},
		{"its capacity", own + "/status", `{"status":{"capacity":{"cpu":"100"}}}`},
		{"another condition", own + "/status", `{"status":{"conditions":[{"type":"Tried","status":"True"}]}}`},
		{"another status", own + "/status", `{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`},
		{
			"no network, in other words", own + "/status",
			`{"status":{"conditions":[{"type":"NetworkUnavailable","status":"Unknown"}]}}`,
		},
		{"no condition", own + "/status", `[{"op":"remove","path":"/status/conditions"}]`},
		{"a condition less", own + "/status", `[{"op":"remove","path":"/status/conditions/1"}]`},
		{"labels by the status", own + "/status", `{"metadata":{"labels":{"tried":"yes"}}}`},
		{"finalizers by the status", own + "/status", `{"metadata":{"finalizers":["tried.example/yes"]}}`},
	} {
		if err := sluice.patch(c.path, c.patch); err == nil || !strings.Contains(err.Error(), "sluice-node-restriction") {
			t.Errorf("%s: %v, want a refusal", c.what, err)
		}
	}
	if after := a.do(http.MethodGet, own, nil); string(after) != string(before) {
		t.Errorf("the Node was\n%s\nand is now\n%s", before, after)
	}

	for _, c := range []struct{ what, path, patch string }{
		{"its ranges", own, ours(`"10.0.1.0/24"`)},
		{"no ranges", own, ours("null")},
		{
			"its other annotations", own,
			`{"metadata":{"annotations":{"node.sluice.io/draining-pod-ranges":"a","node.sluice.io/pod-addresses":"b"}}}`,
		},
		{"its taint", own, `[{"op":"remove","path":"/spec/taints/1"}]`},
		{"its taint of the other effect", own, `[{"op":"remove","path":"/spec/taints/1"}]`},
		{
			"its condition", own + "/status",
			`{"status":{"conditions":[{"type":"NetworkUnavailable","status":"False","reason":"SluiceHasRanges"}]}}`,
		},
	} {
		if err := sluice.patch(c.path, c.patch); err != nil {
			t.Errorf("%s: %v", c.what, err)
		}
	}
	var node struct {
		Spec   struct{ Taints []struct{ Key string } }
		Status struct {
			Conditions []struct{ Type, Status string }
		}
	}
	if err := json.Unmarshal(a.do(http.MethodGet, own, nil), &node); err != nil {
		t.Fatal(err)
	}
	const want = "[{other} {node.kubernetes.io/not-ready}] [{Ready True} {NetworkUnavailable False}]"
	if got := fmt.Sprint(node.Spec.Taints, node.Status.Conditions); got != want {
		t.Errorf("taints and conditions are %s, want %s", got, want)
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package compile_test

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// kubeProxyCases is testdata/kubeproxy.json; tools/fixtures/kubeproxycases writes it, and describes
// its texts.
type kubeProxyCases struct {
	Kubernetes string
	Policies   []string
	Cases      []kubeProxyCase
}

type kubeProxyCase struct {
	Node, Zone string
	Endpoints  []string
	Verdicts   []string
}

// String formats the case without its verdicts.
func (c kubeProxyCase) String() string {
	return fmt.Sprintf("%q on node %q in zone %q", c.Endpoints, c.Node, c.Zone)
}

// TestFrontendsLeadWhereThoseOfKubeProxyDo: for each case and traffic policy, frontends have the same backends as in
// kube-proxy.
func TestFrontendsLeadWhereThoseOfKubeProxyDo(t *testing.T) {
	data, err := os.ReadFile("testdata/kubeproxy.json")
	if err != nil {
		t.Fatal(err)
	}
	var all kubeProxyCases
	if err := json.Unmarshal(data, &all); err != nil {
		t.Fatal(err)
	}
	compared, wrong := 0, 0
	for _, c := range all.Cases {
		slice := read(t, sliceText(c)).Slice
		for i, policy := range all.Policies {
			compared++
			got, want := listsOf(t, c, policy, slice), wantedLists(c.Verdicts[i], policy)
			if got == want {
				continue
			}
			if wrong++; wrong <= 20 {
				t.Errorf("%s, %v\n got: %s\nwant: %s", policy, c, got, want)
			}
		}
	}
	if wrong > 20 {
		t.Errorf("%d verdicts differ from %s's", wrong, all.Kubernetes)
	}
	const atLeast = 8000
	if compared < atLeast {
		t.Errorf("%d verdicts compared, want %d at least", compared, atLeast)
	}
}

// read decodes one JSON manifest.
func read(t *testing.T, text string) manifest.Object {
	t.Helper()
	objects, err := manifest.Options{}.Decode([]byte(text))
	if err != nil || len(objects) != 1 {
		t.Fatalf("%s: %d objects, %v", text, len(objects), err)
	}
	return objects[0]
}

func sliceText(c kubeProxyCase) string {
	var endpoints []string
	for i, text := range c.Endpoints {
		words := strings.Fields(text)
		var conditions []string
		for at, name := range []string{"ready", "serving", "terminating"} {
			if value := words[0][at]; value != '-' {
				conditions = append(conditions, fmt.Sprintf("%q: %t", name, value == 'y'))
			}
		}
		fields := []string{
			fmt.Sprintf(`"addresses": ["10.0.0.%d"]`, i+1), `"conditions": {` + strings.Join(conditions, ", ") + `}`,
		}
		if words[1] != "-" {
			fields = append(fields, fmt.Sprintf(`"nodeName": %q`, words[1]))
		}
		var hints []string
		for _, w := range words[2:] {
			kind, names, _ := strings.Cut(w, "=")
			var refs []string
			for name := range strings.SplitSeq(names, ",") {
				refs = append(refs, fmt.Sprintf(`{"name": %q}`, name))
			}
			field := map[string]string{"nodes": "forNodes", "zones": "forZones"}[kind]
			hints = append(hints, fmt.Sprintf(`%q: [%s]`, field, strings.Join(refs, ", ")))
		}
		if len(hints) > 0 {
			fields = append(fields, `"hints": {`+strings.Join(hints, ", ")+`}`)
		}
		endpoints = append(endpoints, "{"+strings.Join(fields, ", ")+"}")
	}
	return `{"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
		"metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
		"ports": [{"name": "http", "port": 8080}], "endpoints": [` + strings.Join(endpoints, ", ") + `]}`
}

// serviceText returns a service with the policies "TYPE INTERNAL [EXTERNAL]".
func serviceText(policy string) string {
	words := strings.Fields(policy)
	external, nodePort := "", ""
	if len(words) > 2 {
		external, nodePort = fmt.Sprintf(`"externalTrafficPolicy": %q,`, words[2]), `, "nodePort": 30080`
	}
	return fmt.Sprintf(`{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": "shop"},
		"spec": {"type": %q, "clusterIP": "10.96.0.1", "internalTrafficPolicy": %q, %s
		"ports": [{"name": "http", "port": 80%s}]}}`, words[0], words[1], external, nodePort)
}

// listsOf returns the lists of the frontends of a service: of its cluster IP, and of its node port
// inside and outside.
func listsOf(t *testing.T, c kubeProxyCase, policy string, slice *service.Slice) string {
	t.Helper()
	node := compile.Node{Name: c.Node, Zone: c.Zone}
	v := compile.View{Service: read(t, serviceText(policy)).Service, Slices: []*service.Slice{slice}}
	var out []string
	for _, f := range node.Of(v, nil) {
		kind := map[frontend.Kind]string{frontend.ClusterIP: "ClusterIP", frontend.NodePort: "NodePort"}[f.Kind]
		out = append(out, kind+" "+listText(f.Inside))
		if f.Kind != frontend.ClusterIP {
			outside := f.Outside
			if outside == nil {
				outside = f.Inside
			}
			out = append(out, "outside "+listText(outside))
		}
	}
	return strings.Join(out, ", ")
}

func listText(l *frontend.List) string {
	var out []string
	for _, b := range l.Backends {
		out = append(out, fmt.Sprint(b.Addr().As4()[3]-1))
	}
	if len(out) == 0 {
		return map[bool]string{false: "reject", true: "drop"}[l.Drop]
	}
	return strings.Join(out, " ")
}

// wantedLists returns the expected result of listsOf. Cluster IPs follow internalTrafficPolicy. Node ports follow
// externalTrafficPolicy for clients outside the cluster, and use all endpoints for clients inside. If no endpoint is
// selected, connections are refused if no node has an endpoint, and dropped otherwise.
func wantedLists(verdict, policy string) string {
	parts := strings.Split(verdict, ";")
	list := func(policy string) string {
		text := parts[0]
		if policy == "Local" {
			text = parts[1]
		}
		switch {
		case text != "":
			return strings.ReplaceAll(text, ",", " ")
		case parts[2] == "any":
			return "drop"
		}
		return "reject"
	}
	words := strings.Fields(policy)
	out := "ClusterIP " + list(words[1])
	if len(words) > 2 {
		out += ", NodePort " + list("Cluster") + ", outside " + list(words[2])
	}
	return out
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

const whole = `apiVersion: v1
kind: Service
metadata:
  name: web
  namespace: shop
  creationTimestamp: 2026-01-02T03:04:05Z
  annotations: {sluice.io/load-balancing-algorithm: table}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.1
  clusterIPs: [10.96.0.1, "fd00::1"]
  ipFamilies: [IPv4, IPv6]
  externalIPs: [198.51.100.1, 198.51.100.1]
  loadBalancerSourceRanges: [192.0.2.1/24]
  externalTrafficPolicy: Local
  internalTrafficPolicy: Local
  healthCheckNodePort: 30001
  sessionAffinity: ClientIP
  sessionAffinityConfig: {clientIP: {timeoutSeconds: 60}}
  selector: {app: web}
  ports:
  - {name: http, port: 80, nodePort: 30080, targetPort: web}
  - {name: dns, port: 53, protocol: UDP, nodePort: 30053}
status:
  loadBalancer: {ingress: [{ip: 203.0.113.1, ipMode: Proxy}, {hostname: lb.example}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-abc, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}, {name: dns, protocol: UDP, port: 5353}]
endpoints:
- addresses: [10.0.0.1]
  nodeName: a
  zone: east
  conditions: {ready: true, serving: true, terminating: false}
  hints: {forZones: [{name: west}, {name: east}], forNodes: [{name: a}]}
- {addresses: [10.0.0.2], conditions: {ready: false, serving: true, terminating: true}}
- {addresses: [10.0.0.3]}
- {addresses: [10.0.0.4], conditions: {ready: false}}
- {addresses: [10.0.0.5], conditions: {ready: false, serving: false}}
`

func TestObjectsAreReadWhole(t *testing.T) {
	got, err := Options{}.Decode([]byte(whole))
	if err != nil || len(got) != 2 {
		t.Fatalf("%d objects, %v", len(got), err)
	}
	s := got[0].Service
	want := &service.Service{
		Name: service.Name{Namespace: "shop", Name: "web"}, Created: 1767323045e9, Type: service.LoadBalancer,
		ClusterIPs:   []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00::1")},
		ExternalIPs:  []netip.Addr{netip.MustParseAddr("198.51.100.1")},
		Ingress:      []service.Ingress{{Addr: netip.MustParseAddr("203.0.113.1"), Proxy: true}},
		SourceRanges: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, IPv4: true, IPv6: true,
		Ports: []service.Port{
			{Name: "http", Protocol: service.TCP, Port: 80, NodePort: 30080},
			{Name: "dns", Protocol: service.UDP, Port: 53, NodePort: 30053},
		},
		InternalLocal: true, ExternalLocal: true, AffinitySeconds: 60, HealthCheckNodePort: 30001, Table: true,
	}
	if s == nil || !s.Equal(want) || len(got[0].Notes) > 0 {
		t.Errorf("the service is %+v, notes %q\nwant %+v", s, got[0].Notes, want)
	}
	x := got[1].Slice
	if x == nil || x.Service != "web" || x.IPv6 || len(x.Ports) != 2 ||
		x.Ports[1] != (service.SlicePort{Name: "dns", Protocol: service.UDP, Port: 5353}) {
		t.Fatalf("the slice is %+v", x)
	}
	states := []service.State{
		service.Ready | service.Serving, service.Serving | service.Terminating,
		service.Ready | service.Serving, service.Serving, 0,
	}
	if len(x.Endpoints) != len(states) {
		t.Fatalf("%d endpoints, want %d", len(x.Endpoints), len(states))
	}
	for i, e := range x.Endpoints {
		if e.State() != states[i] || e.Addr() != netip.MustParseAddr(fmt.Sprint("10.0.0.", i+1)) {
			t.Errorf("endpoint %d is %+v, want state %d", i, e, states[i])
		}
	}
	if w := x.Endpoints[0].About(); w != (service.About{
		State: states[0], Node: "a", Zone: "east", ForNodes: "a",
		ForZones: "east,west",
	}) {
		t.Errorf("the first is at %+v", w)
	}
}

func TestDefaults(t *testing.T) {
	got, err := Options{Namespace: "shop"}.Decode([]byte("apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: " +
		"{clusterIP: 'fd00::1', sessionAffinity: ClientIP, ports: [{port: 80}]}"))
	if err != nil {
		t.Fatal(err)
	}
	s := got[0].Service
	if s.Name.Namespace != "shop" || s.IPv4 || !s.IPv6 || s.AffinitySeconds != 10_800 ||
		s.Ports[0].Protocol != service.TCP || s.Created != 0 {
		t.Errorf("%+v", s)
	}
}

func TestListsAndJSON(t *testing.T) {
	const item = `{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "%s"}, ` +
		`"spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}}`
	bare := strings.Replace(item, `"apiVersion": "v1", "kind": "Service", `, "", 1)
	a, b := fmt.Sprintf(item, "a"), fmt.Sprintf(item, "b")
	for name, text := range map[string]string{
		"one":           a,
		"two documents": a + "\n---\n" + b,
		"JSON and YAML": a +
			"\n---\napiVersion: v1\nkind: Service\nmetadata: {name: b}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n",
		"a list": `{"apiVersion": "v1", "kind": "List", "items": [` + a + "," + b + "]}",
		"of one kind": `{"apiVersion": "v1", "kind": "ServiceList", "metadata": {}, "items": [` +
			fmt.Sprintf(bare, "a") + "," + b + "]}",
		"a list in YAML": "apiVersion: v1\nkind: List\nitems:\n- " + a + "\n- &x " + b,
	} {
		got, err := Options{}.Decode([]byte(text))
		want := 2
		if name == "one" {
			want = 1
		}
		if err != nil || len(got) != want || got[want-1].Key.Name.Name != string(rune('a'+want-1)) {
			t.Errorf("%s: %d objects, %v", name, len(got), err)
		}
	}
	if got, err := (Options{}).Decode([]byte("# nothing\n---\n")); err != nil || len(got) != 0 {
		t.Errorf("an empty document has %d objects, %v", len(got), err)
	}
}

// manifests returns the text of an object with one line replaced.
func manifests(kind, line string) string {
	service := []string{
		"apiVersion: v1", "kind: Service", "metadata: {name: a}", "spec:", "  type: NodePort", "  clusterIP: " +
			"10.96.0.1", "  ports: [{port: 80, nodePort: 30080}]",
	}
	slice := []string{
		"apiVersion: discovery.k8s.io/v1", "kind: EndpointSlice", "metadata: {name: a, labels: " +
			"{kubernetes.io/service-name: a}}",
		"addressType: IPv4", "ports: [{port: 8080}]", "endpoints: [{addresses: [10.0.0.1]}]",
	}
	lines := service
	if kind == "EndpointSlice" {
		lines = slice
	}
	key, _, _ := strings.Cut(strings.TrimSpace(line), ":")
	done := false
	for i := range lines {
		if have, _, _ := strings.Cut(strings.TrimSpace(lines[i]), ":"); have == key {
			lines[i], done = line, true
		}
	}
	if !done {
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

func TestMistakesNameTheField(t *testing.T) {
	for _, c := range []struct{ kind, line, path, text string }{
		{"Service", "spce: {}", "spce", "no such field; did you mean spec?"},
		{"Service", "kind: Servcie", "kind", "did you mean Service?"},
		{"Service", "  port: 80", "spec.port", "no such field"},
		{"Service", "  ports: [{port: 80, prot: UDP}]", "spec.ports[0].prot", "no such field"},
		{"Service", "  ports: [{port: 80, protocolx: UDP}]", "spec.ports[0].protocolx", "did you mean protocol?"},
		{"Service", "kind: Pod", "kind", "is not supported"},
		{"Service", "kind: ''", "kind", "is missing"},
		{"Service", "apiVersion: v2", "kind", "is not supported"},
		{"Service", "metadata: {}", "metadata.name", "is missing"},
		{"Service", "metadata: {name: A}", "metadata.name", "lowercase"},
		{"Service", "metadata: {name: a, namespace: A}", "metadata.namespace", "lowercase"},
		{"Service", "metadata: {name: a, name: b}", "metadata.name", "is given twice"},
		{"Service", "  type: Nodeport", "spec.type", "is not ClusterIP"},
		{"Service", "  clusterIP: 10.96.0", "spec.clusterIPs[0]", "is not an address"},
		{"Service", "  clusterIP: 127.0.0.1", "spec.clusterIPs[0]", "loopback"},
		{"Service", "  clusterIP: None", "spec.clusterIP", "needs spec.type ClusterIP"},
		{"Service", "  clusterIPs: [10.96.0.2]", "spec.clusterIPs[0]", "is not spec.clusterIP"},
		{"Service", "  clusterIPs: [10.96.0.1, 10.96.0.2]", "spec.clusterIPs[1]", "second address of its family"},
		{"Service", "  ipFamilies: [IPv6]", "spec.clusterIPs", "ipFamilies does not contain"},
		{"Service", "  ipFamilies: [IPv5]", "spec.ipFamilies[0]", "is not IPv4 or IPv6"},
		{"Service", "  ipFamilyPolicy: Both", "spec.ipFamilyPolicy", "is not SingleStack"},
		{"Service", "  externalIPs: [169.254.0.1]", "spec.externalIPs[0]", "link-local"},
		{
			"Service", "  loadBalancerSourceRanges: [10.0.0.0/8]", "spec.loadBalancerSourceRanges",
			"needs spec.type LoadBalancer",
		},
		{"Service", "  loadBalancerSourceRanges: [10.0.0.0]", "spec.loadBalancerSourceRanges[0]", "is not a prefix"},
		{"Service", "  sessionAffinity: Cookie", "spec.sessionAffinity", "is not None or ClientIP"},
		{
			"Service", "metadata: {name: a, annotations: {sluice.io/load-balancing-algorithm: maglev}}",
			"metadata.annotations[sluice.io/load-balancing-algorithm]", `"maglev" is not table`,
		},
		{
			"Service", `metadata: {name: a, annotations: {sluice.io/load-balancing-algorithm: ""}}`,
			"metadata.annotations[sluice.io/load-balancing-algorithm]", `"" is not table`,
		},
		{"Service", "  internalTrafficPolicy: Zone", "spec.internalTrafficPolicy", "is not Cluster or Local"},
		{"Service", "  externalTrafficPolicy: Zone", "spec.externalTrafficPolicy", "is not Cluster or Local"},
		{"Service", "  healthCheckNodePort: 30001", "spec.healthCheckNodePort", "needs spec.type LoadBalancer"},
		{"Service", "  healthCheckNodePort: 70000", "spec.healthCheckNodePort", "is not between 0 and 65535"},
		{"Service", "  ports: []", "spec.ports", "is missing"},
		{"Service", "  ports: [{port: 0}]", "spec.ports[0].port", "is not between 1 and 65535"},
		{"Service", "  ports: [{port: 65536}]", "spec.ports[0].port", "is not between 1 and 65535"},
		{"Service", "  ports: [{port: -1}]", "spec.ports[0].port", "is not between 1 and 65535"},
		{"Service", "  ports: [{port: 80, nodePort: -1}]", "spec.ports[0].nodePort", "is not between 0 and 65535"},
		{"Service", "  ports: [{port: 80, nodePort: 65536}]", "spec.ports[0].nodePort", "is not between 0 and 65535"},
		{"Service", "  ports: [{port: http}]", "spec.ports.port", "must be a whole number"},
		{"Service", "  ports: [{port: 80, protocol: ICMP}]", "spec.ports[0].protocol", "is not TCP"},
		{"Service", "  ports: [{port: 80}, {port: 81}]", "spec.ports[0].name", "is missing"},
		{"Service", "  ports: [{port: 80, name: a}, {port: 81, name: a}]", "spec.ports[1].name", "is given twice"},
		{"Service", "  ports: [{port: 80, name: a}, {port: 80, name: b}]", "spec.ports[1].port", "is given twice"},
		{
			"Service", "  ports: [{port: 80, name: a, nodePort: 1}, {port: 81, name: b, nodePort: 1}]",
			"spec.ports[1].nodePort", "is given twice",
		},
		{"Service", "  ports: {port: 80}", "spec.ports", "must be a list"},
		{
			"Service", "status: {loadBalancer: {ingress: [{ip: 10.0.0.1, ipMode: Direct}]}}",
			"status.loadBalancer.ingress[0].ipMode", "is not VIP or Proxy",
		},
		{"EndpointSlice", "addressType: IPv5", "addressType", "is not IPv4"},
		{
			"EndpointSlice", "metadata: {name: a, labels: {kubernetes.io/service-name: A}}",
			"metadata.labels[kubernetes.io/service-name]", "lowercase",
		},
		{"EndpointSlice", "endpoints: [{addresses: []}]", "endpoints[0].addresses", "has 0 addresses"},
		{"EndpointSlice", "endpoints: [{addresses: ['fd00::1']}]", "endpoints[0].addresses[0]", "family of addressType"},
		{
			"EndpointSlice", "endpoints: [{addresses: [10.0.0.1]}, {addresses: [127.0.0.1]}]", "endpoints[1].addresses[0]",
			"loopback",
		},
		{"EndpointSlice", "endpoints: [{addresses: [224.0.0.1]}]", "endpoints[0].addresses[0]", "multicast"},
		{"EndpointSlice", "endpoints: [{addresses: [0.0.0.0]}]", "endpoints[0].addresses[0]", "unspecified"},
		{
			"EndpointSlice", "endpoints: [{addresses: [10.0.0.1], hints: {forZones: [{name: 'a,b'}]}}]",
			"endpoints[0].hints.forZones[0].name", "is not a name",
		},
		{"EndpointSlice", "endpoints: [{address: 10.0.0.1}]", "endpoints[0].address", "no such field"},
		{
			"EndpointSlice", "endpoints: [{addresses: [10.0.0.1], conditions: {ready: 'yes'}}]",
			"endpoints.conditions.ready", "must be true or false",
		},
		{"EndpointSlice", "ports: [{port: 0}]", "ports[0].port", "is not between 1 and 65535"},
		{"EndpointSlice", "ports: [{port: 65536}]", "ports[0].port", "is not between 1 and 65535"},
		{"EndpointSlice", "ports: [{port: 80.5}]", "ports.port", "must be a whole number"},
		{"EndpointSlice", "ports: [{port: 1}, {port: 2}]", "ports[1].name", "is given twice"},
	} {
		text := manifests(c.kind, c.line)
		text = "apiVersion: v1\nkind: Service\nmetadata: {name: ok}\nspec: {clusterIP: None}\n---\n" + text
		_, err := Options{}.Decode([]byte(text))
		var bad *Error
		if !errors.As(err, &bad) || len(bad.Violations) == 0 {
			t.Errorf("%s with %q is accepted: %v", c.kind, c.line, err)
			continue
		}
		if v := bad.Violations[0]; v.Document != 1 || v.Path != c.path || !strings.Contains(v.Text, c.text) {
			t.Errorf("%s with %q: document %d, %q: %q; want 1, %q: %q", c.kind, c.line, v.Document, v.Path, v.Text, c.path,
				c.text)
		}
	}
}

func TestItemsOfListsNameTheField(t *testing.T) {
	text := "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Service, metadata: {name: a}, spec: " +
		"{clusterIP: None}}\n- {apiVersion: v1, kind: Service, metadata: {name: b}, spec: {typ: x}}\n"
	_, err := Options{}.Decode([]byte(text))
	if err == nil || err.Error() != "document 1: items[1].spec.typ: no such field; did you mean type?" {
		t.Errorf("%v", err)
	}
}

func TestUnknownFieldsMayBeDropped(t *testing.T) {
	got, err := Options{AllowUnknown: true}.Decode([]byte(manifests("Service", "  color: red")))
	if err != nil || len(got) != 1 || len(got[0].Dropped) != 1 || got[0].Dropped[0] != "spec.color" {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := (Options{AllowUnknown: true}).Decode([]byte(manifests("Service", "  type: X"))); err == nil {
		t.Error("an invalid value is dropped, too")
	}
}

func TestFieldsWithoutEffectAreNotes(t *testing.T) {
	for _, c := range []struct{ kind, line, want string }{
		{"Service", "  clusterIP: ''", "assigns no cluster IPs"},
		{"Service", "  ports: [{port: 80}]", "assigns no node ports"},
		{"Service", "metadata: {name: a, labels: {service.kubernetes.io/service-proxy-name: x}}", "serves this service"},
		{"Service", "metadata: {name: a, annotations: {service.beta.kubernetes.io/load-balancer-source-ranges: " +
			"10.0.0.0/8}}", "write spec.loadBalancerSourceRanges"},
		{"EndpointSlice", "metadata: {name: a}", "belongs to no service"},
		{"EndpointSlice", "ports: [{}]", "mean all ports"},
		{"EndpointSlice", "ports: []", "not backends"},
		{"EndpointSlice", "endpoints: [{addresses: [10.0.0.1, 10.0.0.2]}]", "only the first is used"},
	} {
		text := manifests(c.kind, c.line)
		got, err := Options{}.Decode([]byte(text))
		if err != nil || len(got) != 1 || len(got[0].Notes) != 1 || !strings.Contains(got[0].Notes[0], c.want) {
			t.Errorf("%s with %q: %+v, %v; want the note %q", c.kind, c.line, got, err, c.want)
		}
	}
	got, err := Options{}.Decode([]byte("apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: a, " +
		"labels: {kubernetes.io/service-name: a}}\naddressType: FQDN\nendpoints: [{addresses: [x.example]}]"))
	if err != nil || len(got[0].Notes) != 1 || len(got[0].Slice.Endpoints) != 0 {
		t.Errorf("a slice of names: %+v, %v", got, err)
	}
}

func TestHostileTextsAreRefusedWithinBounds(t *testing.T) {
	laughs := "a: &a [x,x,x,x,x,x,x,x,x]\n"
	for c := 'b'; c < 'k'; c++ {
		laughs += fmt.Sprintf("%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n", c, c, c-1, c-1, c-1, c-1, c-1, c-1, c-1, c-1)
	}
	for name, text := range map[string]string{
		"aliases":      laughs,
		"an own alias": "a: &a [*a]\n",
		"depth":        strings.Repeat("[", 10_000),
		"flat":         "a: [" + strings.Repeat("[],", 1<<20) + "]",
		"flat JSON": `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","endpoints":[` +
			strings.Repeat("{},", 900_000) + `{}]}`,
		"a large one":    `{"kind":"` + strings.Repeat("x", 4<<20) + `"}`,
		"no object":      "- a\n",
		"a text":         "hello",
		"a tag":          "a: !!binary aGVsbG8=\n",
		"a merge":        "a: &a {b: 1}\nc: {<<: *a}\n",
		"not JSON's":     "a: .inf\n",
		"null in a list": `{"apiVersion":"v1","kind":"List","items":[null]}`,
		"a list's field": `{"apiVersion":"v1","kind":"List","itmes":[]}`,
		"not UTF-8":      "a: \xff\xfe\n",
	} {
		if got, err := (Options{}).Decode([]byte(text)); err == nil {
			t.Errorf("%s: %d objects", name, len(got))
		} else if len(err.Error()) > 64<<10 {
			t.Errorf("%s: an error of %d bytes", name, len(err.Error()))
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(whole))
	f.Add([]byte(`{"apiVersion":"v1","kind":"List","items":[{"kind":"Service"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := Options{}.Decode(data)
		var bad *Error
		if err != nil && !errors.As(err, &bad) {
			t.Fatalf("the error is %T", err)
		}
		for _, x := range got {
			if x.Key.Namespace == "" || x.Key.Name.Name == "" || (x.Service == nil) == (x.Slice == nil) {
				t.Fatalf("%+v", x)
			}
		}
	})
}

func TestOpaquePartsMayBeAnything(t *testing.T) {
	for _, value := range []string{"null", "1", "x", "[1, {a: b}]", "{matchLabels: {a: b}}"} {
		got, err := Options{}.Decode([]byte(manifests("Service", "  selector: "+value)))
		if err != nil || len(got) != 1 {
			t.Errorf("selector: %s: %d objects, %v", value, len(got), err)
		}
	}
}

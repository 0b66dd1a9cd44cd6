// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
)

func TestValidateChecksEveryDocument(t *testing.T) {
	const good = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: web, namespace: shop}\nspec: {podSelector: {}}\n"
	var large, groups strings.Builder
	for range 52 {
		groups.WriteString("{toGroups: [{}]},")
	}
	for i := range 1100 {
		fmt.Fprintf(&large, "{from: [{ipBlock: {cidr: 10.%d.%d.0/24}}], ports: [{port: %d}]},", i>>8, i&255, 1000+i)
	}
	for _, c := range []struct {
		name, in string
		code     int
		want     string
	}{
		{"good", good, 0, `{"problems":[]}` + "\n"},
		{
			"a misspelt field", strings.Replace(good, "podSelector", "podSelecter", 1), 0,
			`{"problems":["spec.podSelecter: no such field; did you mean podSelector?"]}` + "\n",
		},
		{
			"a wrong field in the second", good + "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: db}\nspec: {podSelector: {}, ingress: [{ports: [{port: 70000}]}]}\n",
			0, `{"problems":[]}` + "\n" + `{"problems":["spec.ingress[0].ports[0].port: `,
		},
		{
			"a field that is not supported", "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: a}\nspec: {endpointSelector: {}, egress: [{toGroups: [{}]}]}\n",
			0, `{"problems":[],"notes":[{"kind":"unsupported","field":"spec.egress[0].toGroups","text":"not supported by Sluice: `,
		},
		{
			"more than a table holds, though no pod is here", "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: web}\nspec: {podSelector: {}, ingress: [" + large.String() + "]}\n",
			0, `{"problems":["spec: the ingress rules alone, for any subject: table needs 1025 address classes, the limit is 1024"]}`,
		},
		{
			"notes and a rejected document",
			"apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: a}\n" +
				"spec: {endpointSelector: {}, egress: [{toGroups: [{}]}]}\n---\napiVersion: v1\nkind: Pod\n",
			0, `{"problems":[],"notes":[{"kind":"unsupported","field":"spec.egress[0].toGroups","text":"not supported by Sluice: `,
		},
		{
			"a label that identities leave out",
			strings.Replace(good, "podSelector: {}", "podSelector: {matchLabels: {job-name: a}}", 1),
			0, `{"problems":[],"notes":[{"kind":"unsupported","field":"spec","text":"not supported by Sluice: ` +
				`the label key \"job-name\", which identities leave out (rule \"job-name\"): ` +
				`every pod that it may select is isolated; labels.include of sluice-identity includes the key"}]}`,
		},
		{
			"a protocol that Cilium had",
			"apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: a}\nspec: {endpointSelector: {}, " +
				"ingress: [{toPorts: [{ports: [{port: '1'}], rules: {kafka: [{topic: a}], http: []}}]}]}\n",
			0, `{"problems":["spec.ingress[0].toPorts[0].rules.kafka: no such field: ` +
				`rules of other protocols than HTTP and DNS, which Cilium had up to 1.19, are not implemented"]}`,
		},
		{
			"a field that needs a setting",
			"apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: a}\n" +
				"spec: {endpointSelector: {}, ingress: [{fromNodes: [{}]}]}\n",
			0, `{"problems":["spec.ingress[0].fromNodes: needs the setting cluster.nodeLabels"]}`,
		},
		{
			"names without a DNS rule",
			"apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: a}\n" +
				"spec: {endpointSelector: {}, egress: [{toFQDNs: [{matchName: a.b}]}]}\n",
			0, `{"problems":[],"notes":[{"kind":"no-dns-rule","field":"spec.egress[0].toFQDNs","text":"no DNS rule selects these pods, `,
		},
		{
			"names with a DNS rule in another document",
			"apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: a}\n" +
				"spec: {endpointSelector: {}, egress: [{toFQDNs: [{matchName: a.b}]}]}\n---\n" +
				"apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: b}\n" +
				"spec: {endpointSelector: {}, egress: [{toEntities: [all], toPorts: [{ports: [{port: '53'}], " +
				"rules: {dns: [{matchName: c.d}]}}]}]}\n",
			0, `{"problems":[]}` + "\n" + `{"problems":[]}` + "\n",
		},
		{"no kind of policy", "apiVersion: v1\nkind: Pod\n", 0, `{"problems":["kind: `},
		{
			"the same twice", good + "---\n" + good, 0, strings.Repeat(`{"problems":["metadata.name: another document has the same kind and name"]}`+"\n", 2),
		},
		{
			"no YAML hides no other", "{\n---\n" + good,
			0, `{"problems":["yaml: line 1: did not find expected node content"]}` + "\n" + `{"problems":[]}` + "\n",
		},
		{
			"too large hides no other", strings.Repeat("#", 3<<20+1) + "\n---\n- a list\n---\n" + good,
			0, `{"problems":["is not an object but a list"]}` + "\n" + `{"problems":[]}` + "\n",
		},
		{
			"a key twice hides no other", good + "spec: {}\n---\n" + good,
			0, `{"problems":["spec: is given twice"]}` + "\n" + `{"problems":[]}` + "\n",
		},
		{
			"too large", "a: " + strings.Repeat("x", 3<<20),
			0, `{"problems":["manifest of 3145731 bytes is larger than 3145728"]}` + "\n",
		},
	} {
		var out, errOut bytes.Buffer
		code := validate([]string{"--namespace=shop"}, strings.NewReader(c.in), &out, &errOut)
		if got := out.String() + errOut.String(); code != c.code || !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: exit code %d, %s\nwant %d, %s", c.name, code, got, c.code, c.want)
		}
	}
	var out, errOut bytes.Buffer
	misspelt := strings.Replace(good, "podSelector", "podSelecter", 1)
	// The spec is empty without the unknown field, which leads to a note.
	const dropped = `{"problems":[],"droppedFields":["spec.podSelecter"],"notes":[{"kind":"canonical","field":"spec",`
	code := validate([]string{"--allow-unknown-fields"}, strings.NewReader(misspelt), &out, &errOut)
	if code != 0 || !strings.HasPrefix(out.String(), dropped) {
		t.Errorf("unknown fields allowed: exit code %d, %s%s", code, out.String(), errOut.String())
	}
	out.Reset()
	noted := "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: a}\n" +
		"spec: {endpointSelector: {}, egress: [" + groups.String() + "]}\n"
	code = validate(nil, strings.NewReader(noted), &out, &errOut)
	last := `{"kind":"omitted","text":"12 more notes are left out"}]}` + "\n"
	if code != 0 || !strings.HasSuffix(out.String(), last) {
		t.Errorf("52 notes: exit code %d, %s%s", code, out.String(), errOut.String())
	}
	out.Reset()
	nodes := "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: a}\n" +
		"spec: {endpointSelector: {}, ingress: [{fromNodes: [{matchLabels: {a: b}}]}]}\n"
	code = validate([]string{"--cluster-node-labels"}, strings.NewReader(nodes), &out, &errOut)
	if code != 0 || out.String() != `{"problems":[]}`+"\n" {
		t.Errorf("with cluster.nodeLabels: exit code %d, %s%s", code, out.String(), errOut.String())
	}
	out.Reset()
	names := "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: a}\n" +
		"spec: {endpointSelector: {}, egress: [{toPorts: [{ports: [{port: '53', protocol: UDP}], " +
		"rules: {dns: [{matchName: a.test}]}}]}]}\n"
	for args, want := range map[string]string{
		"--dns-proxy=true": "",
		"--dns-proxy=false": `,"notes":[{"kind":"unsupported","field":"spec.egress[0].toPorts[0].rules.dns",` +
			`"text":"not supported by Sluice: DNS rules; packets that match are redirected to no proxy, and dropped"}]`,
	} {
		out.Reset()
		code = validate([]string{args}, strings.NewReader(names), &out, &errOut)
		if code != 0 || out.String() != `{"problems":[]`+want+"}\n" {
			t.Errorf("%s: exit code %d, %s%s", args, code, out.String(), errOut.String())
		}
	}
	plain := "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: a}\n" +
		"spec: {endpointSelector: {}, egress: [{toEntities: [all]}, {toFQDNs: [{matchName: a.test}]}]}\n"
	for args, noted := range map[string]bool{"--dns-implicit=false": true, "--dns-implicit": false} {
		out.Reset()
		code = validate([]string{args}, strings.NewReader(plain), &out, &errOut)
		if code != 0 || strings.Contains(out.String(), "no-dns-rule") != noted {
			t.Errorf("%s: exit code %d, %s%s", args, code, out.String(), errOut.String())
		}
	}
	if code := validate([]string{"web.yaml"}, strings.NewReader(""), &out, &errOut); code != 2 || !strings.Contains(errOut.String(), "standard input") {
		t.Errorf("a file as argument: exit code %d, %s", code, errOut.String())
	}
}

func TestFieldsAreOneLineEach(t *testing.T) {
	var out, errOut bytes.Buffer
	if code := listFields(nil, &out, &errOut); code != 0 || errOut.Len() > 0 {
		t.Fatalf("exit code %d: %s", code, errOut.String())
	}
	const want = `{"kind":"CiliumNetworkPolicy","versions":["cilium.io/v2"],"path":"spec.ingress.fromGroups","type":"list of any","required":false,` +
		`"support":"converted","becomes":"the rule allows nothing","about":"Groups of a cloud provider."}` + "\n"
	if !strings.Contains(out.String(), want) {
		t.Errorf("no %s", want)
	}
	if code := listFields([]string{"x"}, &out, &errOut); code != 2 || !strings.Contains(errOut.String(), `not "x"`) {
		t.Errorf("with an argument: exit code %d, %s", code, errOut.String())
	}
}

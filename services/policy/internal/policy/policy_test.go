// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

var options = rule.Options{Cluster: "here", LocalClusterOnly: true, WithoutDNSProxy: true}

func decodeText(text string) (Object, error) {
	docs, err := manifest.Parse([]byte(text))
	if err != nil || len(docs) == 0 {
		return Object{}, err
	}
	return Decode(docs[0], options)
}

func TestErrorsNameTheField(t *testing.T) {
	cnp := func(spec string) string {
		return "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: a}\nspec: {endpointSelector: {}, " + spec + "}"
	}
	knp := func(spec string) string {
		return "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: a}\nspec: {podSelector: {}, " + spec + "}"
	}
	kcnp := func(spec string) string {
		return "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: p}\nspec: {tier: Admin, priority: 1, subject: {namespaces: {}}, " + spec + "}"
	}
	anp := func(spec string) string {
		return "apiVersion: policy.networking.k8s.io/v1alpha1\nkind: AdminNetworkPolicy\nmetadata: {name: p}\nspec: {priority: 1, subject: {namespaces: {}}, " + spec + "}"
	}
	for _, tc := range []struct{ text, want string }{
		{cnp(`ingress: [{toPorts: [{ports: [{port: "80"}]}, {ports: [{port: "x_y"}]}]}]`), `spec.ingress[0].toPorts[1].ports[0].port: "x_y" is neither`},
		{cnp(`egress: [{toCIDRSet: [{cidr: 10.0.0.0/8, except: [11.0.0.0/8]}]}]`), `spec.egress[0].toCIDRSet[0].except[0]: "11.0.0.0/8" is not inside`},
		{cnp(`ingressDeny: [{fromEntities: [wrld]}]`), `fromEntities[0]: "wrld" is not an entity; did you mean world?`},
		{cnp(`ingress: [{fromEntities: [internet]}]`), `"internet" is not an entity; the entities are all, world, `},
		{cnp(`ingress: [{fromEndpoints: [{matchExpressions: [{key: a, operator: Is}]}]}]`), `spec.ingress[0].fromEndpoints[0].matchExpressions[0].operator: "Is" is not one of`},
		{cnp(`egress: [{toEndpoints: [{}], toEntities: [world]}]`), `spec.egress[0]: combines toEndpoints and toEntities`},
		{cnp(`egress: [{icmps: [{fields: [{type: Nonsense}]}]}]`), `spec.egress[0].icmps[0].fields[0].type: "Nonsense" is not an ICMP type of IPv4`},
		{cnp(`ingress: [{toPorts: [{ports: [{port: 80}]}]}]`), `spec.ingress[0].toPorts[0].ports[0].port: must be a string, is the number 80`},
		{cnp(`ingress: []`), `spec: has no rule`},
		{knp(`ingress: [{ports: [{port: 80, endPort: 79}]}]`), `spec.ingress[0].ports[0].endPort: 79 is below port 80`},
		{knp(`egress: [{to: [{ipBlock: {cidr: 10.0.0.1/8}}]}]`), `spec.egress[0].to[0].ipBlock.cidr: "10.0.0.1/8" has bits beyond its prefix length; it means 10.0.0.0/8`},
		{knp(`policyTypes: [ingress]`), `spec.policyTypes[0]: "ingress" is neither`},
		{kcnp(`ingress: [{action: Allow}]`), `spec.ingress[0].action: "Allow" is not one of Accept, Deny, Pass`},
		{kcnp(`egress: [{action: Deny, to: [{networks: [10.0.0.0/8], namespaces: {}}]}]`), `spec.egress[0].to[0]: needs exactly one of its fields, has 2`},
		{kcnp(`egress: [{action: Deny, to: [{domainNames: ["*.example.com"]}]}]`), `spec.egress[0].to[0].domainNames: is only supported with action Accept`},
		{"apiVersion: policy.networking.k8s.io/v1alpha1\nkind: BaselineAdminNetworkPolicy\nmetadata: {name: p}\nspec: {subject: {namespaces: {}}, ingress: [{action: Pass, from: [{namespaces: {}}]}]}", `spec.ingress[0].action: "Pass" is not one of Allow, Deny`},
		{"apiVersion: cilium.io/v2\nkind: CiliumCIDRGroup\nmetadata: {name: g}\nspec: {externalCIDRs: [10.0.0.0/8, nonsense]}", `spec.externalCIDRs[1]: "nonsense" is not a prefix`},
		{
			cnp(`egress: [{toEndpoints: [{}], toPorts: [{ports: [{port: "53"}], rules: {dns: [{matchPattern: "*.a"}]}}]}, ` +
				`{toEndpoints: [{}], toPorts: [{ports: [{port: "1", endPort: 99, protocol: TCP}], rules: {http: [{}]}}]}]`),
			`spec.egress[0].toPorts[0]: redirects to the proxy for dns, but spec.egress[1].toPorts[0] redirects the same ports of the same peers to the ` +
				`proxy for http`,
		},
		{
			cnp(`egress: [{toPorts: [{ports: [{port: web, protocol: TCP}], rules: {http: [{}]}}]}, {toPorts: [{ports: [{port: WEB, protocol: TCP}], listener: {name: l, envoyConfig: {name: e}}}]}]`),
			`spec.egress[1].toPorts[0]: redirects to the proxy for listener, but spec.egress[0].toPorts[0] redirects the same ports of the same peers ` +
				`to the proxy for http`,
		},
		// Requirements of the kinds' schemas.
		{kcnp(`ingress: [{action: Accept}]`), `spec.ingress[0].from: needs at least one peer`},
		{kcnp(`ingress: [{action: Deny, from: []}]`), `spec.ingress[0].from: needs at least one peer`},
		{kcnp(`egress: [{action: Accept}]`), `spec.egress[0].to: needs at least one peer`},
		{kcnp(`egress: [{action: Pass, to: []}]`), `spec.egress[0].to: needs at least one peer`},
		{kcnp(`ingress: [{action: Accept, from: [{namespaces: {}}], protocols: []}]`), `spec.ingress[0].protocols: is empty`},
		{kcnp(`egress: [{action: Accept, to: [{networks: [10.0.0.0/8]}], protocols: [{destinationNamedPort: web}]}]`), `spec.egress[0]: combines a named port with networks`},
		{kcnp(`egress: [{action: Accept, to: [{namespaces: {}}, {domainNames: [a.b]}], protocols: [{destinationNamedPort: web}]}]`), `spec.egress[0]: combines a named port with networks`},
		{kcnp(`ingress: [{action: Accept, from: [{pods: {namespaceSelector: {}}}]}]`), `spec.ingress[0].from[0].pods.podSelector: is required`},
		{kcnp(`egress: [{action: Accept, to: [{domainNames: [-a.b]}]}]`), `spec.egress[0].to[0].domainNames[0]: "-a.b" is not a DNS name`},
		{anp(`egress: [{action: Allow, to: [{networks: [10.0.0.0/8]}], ports: [{namedPort: web}]}]`), `spec.egress[0]: combines a named port with networks`},
		{anp(`egress: [{action: Allow, to: [{namespaces: {}}], ports: []}]`), `spec.egress[0].ports: is empty`},
		{anp(`ingress: [{action: Allow, from: [{networks: [10.0.0.0/8]}]}]`), `spec.ingress[0].from[0]: nodes, networks and domainNames are for egress`},
		{cnp(`ingress: [{toPorts: [{ports: [{port: "80", protocol: VRRP}]}]}]`), `spec.ingress[0].toPorts[0].ports[0].port: VRRP has no ports`},
		{cnp(`ingressDeny: [{toPorts: [{ports: [{port: "1", protocol: IGMP}]}]}]`), `spec.ingressDeny[0].toPorts[0].ports[0].port: IGMP has no ports`},
		{cnp(`egress: [{toPorts: [{ports: [{port: "00", protocol: GRE}]}]}]`), `spec.egress[0].toPorts[0].ports[0].port: GRE has no ports`},
		{cnp(`egress: [{toPorts: [{ports: [{port: "80"}], listener: {name: l, priority: 0, envoyConfig: {name: e}}}]}]`), `listener.priority: 0 is not from 1 to 100`},
		{cnp(`ingress: [{}], labels: [{value: x}]`), `spec.labels[0].key: is required`},
		{cnp(`ingress: [{}], log: {value: "a\u0007"}`), `spec.log.value: "a\a" has a control character`},
		{"apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: a}", `spec: is required`},
		{"apiVersion: cilium.io/v2\nkind: CiliumCIDRGroup\nmetadata: {name: g}", `spec.externalCIDRs: is required`},
		{"apiVersion: v1\nkind: Pod\nmetadata: {name: p}", `v1 Pod is not a kind of policy`},
		{"metadata: {name: p}", `apiVersion and kind are missing`},
		{"apiVersion: v1\nmetadata: {name: p}", `kind: is missing; apiVersion is v1`},
		{"kind: Pod\nmetadata: {name: p}", `apiVersion: is missing; kind is Pod`},
		{"apiVersion: v1\nkind: 5\n", `kind: must be a string, is the number 5`},
		{
			"apiVersion: v1\nkind: yes\n",
			`kind: must be a string, is the truth value yes, as kubectl and YAML 1.1 read it: ` +
				`put it into quotes to have it as text`,
		},
		{
			"apiVersion: extensions/v1beta1\nkind: NetworkPolicy\n",
			`NetworkPolicy is not supported in version extensions/v1beta1, only in networking.k8s.io/v1`,
		},
		{
			"apiVersion: cilium.io/v2\nkind: CiliumEgressGatewayPolicy\n",
			`cilium.io/v2 CiliumEgressGatewayPolicy is a kind of Cilium that Sluice does not implement; ` +
				`it has no effect`,
		},
		{"kind: NetworkPolicy\nmetadata: {name: p}", `apiVersion: is missing; it is networking.k8s.io/v1 for NetworkPolicy`},
	} {
		_, err := decodeText(tc.text)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s\nerror %v\nwant %s", tc.text, err, tc.want)
		}
	}
}

func TestWhatTheSchemasAllowIsAccepted(t *testing.T) {
	cnp := func(spec string) string {
		return "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: a}\n" + spec
	}
	kcnp := func(spec string) string {
		return "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: p}\nspec: {tier: Admin, priority: 1, subject: {namespaces: {}}, " + spec + "}"
	}
	for _, text := range []string{
		cnp(`specs: []`),
		cnp(`spec: {endpointSelector: {}, ingress: [{toPorts: [{ports: [{protocol: VRRP}, {port: "0", protocol: IGMP}]}]}], labels: [{key: a, value: b, source: c}]}`),
		cnp(`spec: {endpointSelector: {}, ingress: [{}], log: {value: "ä ö ü ä ö ü ä ö ü ä ö ü ä ö ü ä"}}`),
		kcnp(`egress: [{action: Accept, to: [{domainNames: ["*.Example.com", _dns.example.com, a_b.c., x.y]}]}]`),
		kcnp(`ingress: [{action: Accept, from: [{pods: {podSelector: {}}}], protocols: [{destinationNamedPort: web}]}]`),
		"apiVersion: policy.networking.k8s.io/v1alpha1\nkind: AdminNetworkPolicy\nmetadata: {name: p}\nspec: {priority: 1, subject: {namespaces: {}}, egress: [{action: Allow, to: [{domainNames: [a.b]}]}]}",
		"apiVersion: cilium.io/v2\nkind: CiliumCIDRGroup\nmetadata: {name: g}\nspec: {externalCIDRs: []}",
	} {
		if o, err := decodeText(text); err != nil || len(o.Unknown) > 0 {
			t.Errorf("%s\n%v, unknown %q", text, err, o.Unknown)
		}
	}
}

func TestNamespacedSubjectNeverLeavesItsNamespace(t *testing.T) {
	for _, c := range []struct {
		selector string
		own      bool // selects a pod of its namespace
	}{
		{`{}`, true},
		{`{matchLabels: {"k8s:io.kubernetes.pod.namespace": other}}`, true}, // replaced by the policy's namespace
		{`{matchLabels: {"k8s:io.kubernetes.pod.namespace": a}}`, true},
		{`{matchLabels: {"k8s:io.kubernetes.pod.namespace": ""}}`, true},
		{`{matchLabels: {io.kubernetes.pod.namespace: other}}`, false},
		{`{matchExpressions: [{key: "k8s:io.kubernetes.pod.namespace", operator: In, values: [other]}]}`, false},
		{`{matchExpressions: [{key: "k8s:io.kubernetes.pod.namespace", operator: In, values: [other, a]}]}`, true},
		{`{matchExpressions: [{key: io.kubernetes.pod.namespace, operator: In, values: [other]}]}`, false},
		{`{matchExpressions: [{key: "k8s:io.kubernetes.pod.namespace", operator: NotIn, values: [a]}]}`, false},
		{`{matchExpressions: [{key: "k8s:io.kubernetes.pod.namespace", operator: DoesNotExist}]}`, false},
	} {
		o, err := decodeText("apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: a}\nspec: {endpointSelector: " + c.selector + ", ingress: [{}]}")
		if err != nil {
			t.Errorf("%s: %v", c.selector, err)
			continue
		}
		for ns, want := range map[string]bool{"a": c.own, "other": false} {
			pod := label.NewSet(label.Kubernetes("app", "x"), label.Kubernetes(label.KeyNamespace, ns))
			if got := o.Specs[0].Subject.Matches(pod); got != want {
				t.Errorf("%s selects a pod of %s: %t", c.selector, ns, got)
			}
		}
	}
}

func TestDecodeKeepsWhatOnlyTheSchemaRefuses(t *testing.T) {
	o, err := decodeText("apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: a}\nspec: {endpointSelector: {}, egress: [{toCIDR: [192.0.2.1]}]}")
	var problems manifest.Problems
	if !errors.As(err, &problems) || !problems.SchemaOnly() || len(o.Specs) != 1 || o.Specs[0].Rules[0].Peers.Networks[0].Prefix.String() != "192.0.2.1/32" {
		t.Fatalf("%+v, %v", o, err)
	}
}

func TestUnknownFieldsAreReported(t *testing.T) {
	o, err := decodeText("apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: a}\nspec: {endpointSelector: {}, ingress: [{fromEndpoint: [{}]}]}")
	if err != nil || len(o.Unknown) != 1 || o.Unknown[0] != "spec.ingress[0].fromEndpoint" {
		t.Fatalf("%v, %v", o.Unknown, err)
	}
	// The rest of the rule is empty: it allows nothing.
	if len(o.Specs[0].Rules) != 0 || !o.Specs[0].DefaultDeny[policytable.Ingress] {
		t.Fatalf("%+v", o.Specs[0])
	}
}

// TestProxiesThatGoTogetherAreAccepted: rules for two proxies may share a port if their peers are written
// differently, or if one proxy can serve both rules.
func TestProxiesThatGoTogetherAreAccepted(t *testing.T) {
	for _, egress := range []string{
		`{toEndpoints: [{}], toPorts: [{ports: [{port: "53"}], rules: {dns: [{matchPattern: "*.a"}]}}]}, ` +
			`{toEntities: [world], toPorts: [{ports: [{port: "53", protocol: TCP}], rules: {http: [{}]}}]}`,
		`{toEndpoints: [{}], toPorts: [{ports: [{port: "53"}], rules: {dns: [{matchPattern: "*.a"}]}}]}, ` +
			`{toEndpoints: [{}], toPorts: [{ports: [{port: "54", protocol: TCP}], rules: {http: [{}]}}]}`,
		`{toEndpoints: [{}], toPorts: [{ports: [{port: "443", protocol: TCP}], serverNames: [a.b]}]}, {toEndpoints: [{}], toPorts: [{ports: [{port: "443", protocol: TCP}], rules: {http: [{}]}}]}`,
		`{toEndpoints: [{}], toPorts: [{ports: [{port: web, protocol: UDP}], rules: {dns: [{matchPattern: "*.a"}]}}]}, ` +
			`{toEndpoints: [{}], toPorts: [{ports: [{port: web, protocol: TCP}], rules: {http: [{}]}}]}`,
	} {
		if _, err := decodeText("apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: a}\nspec: {endpointSelector: {}, egress: [" + egress + "]}"); err != nil {
			t.Errorf("%s: %v", egress, err)
		}
	}
}

func TestUnsupportedFieldsAreNamedAndNeverWiden(t *testing.T) {
	const (
		dnsForwarded = "spec.egress[0].toPorts[0].rules.dns: allows every name: " +
			"DNS is forwarded without a proxy, and the addresses in the answers are not learned"
		dnsDropped = "spec.egress[0].toPorts[0].rules.dns: not supported by Sluice: DNS rules; " +
			"packets that match are redirected to no proxy, and dropped"
	)
	head := "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: a}\nspec: {endpointSelector: {}, "
	for _, c := range []struct{ spec, note, rule string }{
		{`ingress: [{fromEndpoints: [{}], authentication: {mode: required}}]`, "spec.ingress[0].authentication: not supported by Sluice: mutual authentication; the rule allows nothing", ""},
		{`ingress: [{authentication: {mode: test-always-fail}, toPorts: [{ports: [{port: "80"}]}]}]`, "spec.ingress[0].authentication: not supported by Sluice: mutual authentication; the rule allows nothing", ""},
		{`egress: [{toEntities: [all], authentication: {mode: required}}]`, "spec.egress[0].authentication: not supported by Sluice: mutual authentication; the rule allows nothing", ""},
		{`ingress: [{fromEntities: [world], authentication: {mode: disabled}}]`, "", "allow selectors"},
		{`ingress: [{fromGroups: [{aws: {}}]}]`, "spec.ingress[0].fromGroups: not supported by Sluice: groups of a cloud provider; the rule allows nothing", ""},
		{`egress: [{toGroups: [{}]}]`, "spec.egress[0].toGroups: not supported by Sluice: groups of a cloud provider; the rule allows nothing", ""},
		{`egress: [{toServices: [{k8sService: {serviceName: s}}]}]`, "spec.egress[0].toServices: not supported by Sluice: services as peers; the rule allows nothing", ""},
		{`ingressDeny: [{fromGroups: [{}]}]`, "spec.ingressDeny[0].fromGroups: not supported by Sluice: groups of a cloud provider; the rule denies all peers", "deny any"},
		{`egressDeny: [{toGroups: [{}]}]`, "spec.egressDeny[0].toGroups: not supported by Sluice: groups of a cloud provider; the rule denies all peers", "deny any"},
		{`egressDeny: [{toServices: [{}], toPorts: [{ports: [{port: "80", protocol: TCP}]}]}]`, "spec.egressDeny[0].toServices: not supported by Sluice: services as peers; the rule denies all peers", "deny any"},
		// An empty list selects no peer, whether its kind of peers is supported or not.
		{`egressDeny: [{toGroups: []}]`, "", ""},
		{`egressDeny: [{toServices: []}]`, "", ""},
		{`egress: [{toFQDNs: [{matchName: a.b}]}]`, "spec.egress[0].toFQDNs: not supported by Sluice: learning addresses from DNS answers; the rule allows the addresses that LearnNames was called with", "allow names"},
		{`ingress: [{fromEntities: [all], toPorts: [{ports: [{port: "80", protocol: TCP}], rules: {http: [{method: GET}]}}]}]`, "spec.ingress[0].toPorts[0].rules.http: not supported by Sluice: HTTP rules; packets that match are redirected to no proxy, and dropped", "redirect any"},
		{`ingress: [{fromEntities: [all], toPorts: [{ports: [{port: "80", protocol: TCP}], rules: {http: []}}]}]`, "", "allow any"},
		{
			`egress: [{toEntities: [all], toPorts: [{ports: [{port: "53"}], rules: {dns: [{matchPattern: "*"}]}}]}]`,
			dnsForwarded, "allow any",
		},
		{
			`egress: [{toEntities: [all], toPorts: [{ports: [{port: "53"}], ` +
				`rules: {dns: [{matchName: a.b}, {matchPattern: "*"}]}}]}]`,
			dnsForwarded, "allow any",
		},
		{
			`egress: [{toEntities: [all], toPorts: [{ports: [{port: "53"}], rules: {dns: [{matchPattern: "*.*"}]}}]}]`,
			dnsDropped, "redirect any",
		},
		{
			`egress: [{toEntities: [all], toPorts: [{ports: [{port: "53"}], rules: {dns: [{matchPattern: "**.a"}]}}]}]`,
			dnsDropped, "redirect any",
		},
		{
			`egress: [{toEntities: [all], toPorts: [{ports: [{port: "53"}], ` +
				`rules: {dns: [{matchPattern: "*.a.b"}, {matchName: c.d}]}}]}]`,
			dnsDropped, "redirect any",
		},
		{
			`egress: [{toEntities: [all], toPorts: [{ports: [{port: "853", protocol: TCP}], ` +
				`originatingTLS: {secret: {name: x}}, rules: {dns: [{matchPattern: "*"}]}}]}]`,
			dnsForwarded + "\nspec.egress[0].toPorts[0].originatingTLS: not supported by Sluice: TLS origination; " +
				"packets that match are redirected to no proxy, and dropped",
			"redirect any",
		},
		{`egress: [{toEntities: [all], toPorts: [{ports: [{port: "443", protocol: TCP}], serverNames: [a.b]}]}]`, "spec.egress[0].toPorts[0].serverNames: not supported by Sluice: TLS server names; packets that match are redirected to no proxy, and dropped", "redirect any"},
		{`egress: [{toEntities: [all], toPorts: [{ports: [{port: "443", protocol: TCP}], originatingTLS: {secret: {name: x}}}]}]`, "spec.egress[0].toPorts[0].originatingTLS: not supported by Sluice: TLS origination; packets that match are redirected to no proxy, and dropped", "redirect any"},
		{
			`egress: [{toEntities: [all], toPorts: [{ports: [{port: "443", protocol: TCP}], ` +
				`listener: {name: x, envoyConfig: {name: z}}}]}]`,
			"spec.egress[0].toPorts[0].listener: not supported by Sluice: proxies of the user; " +
				"packets that match are redirected to no proxy, and dropped",
			"redirect any",
		},
		{`ingress: [{fromEntities: [all]}], log: {value: x}`, "spec.log: has no effect: events of Sluice carry no texts of policies", "allow any"},
	} {
		o, err := decodeText(head + c.spec + "}")
		if err != nil {
			t.Errorf("%s: %v", c.spec, err)
			continue
		}
		var notes, rules []string
		for _, n := range o.Notes {
			notes = append(notes, n.String())
		}
		for _, r := range o.Specs[0].Rules {
			peers := "selectors"
			if r.Peers.Any {
				peers = "any"
			} else if len(r.Peers.Names) > 0 {
				peers = "names"
			}
			rules = append(rules, r.Action.String()+" "+peers)
		}
		if got := strings.Join(notes, "\n"); got != c.note {
			t.Errorf("%s: noted\n%s\nwant\n%s", c.spec, got, c.note)
		}
		if got := strings.Join(rules, ", "); got != c.rule {
			t.Errorf("%s: rules %q, want %q", c.spec, got, c.rule)
		}
		if s := o.Specs[0]; s.DefaultDeny == [2]bool{} {
			t.Errorf("%s: no side is in default deny", c.spec)
		}
		if len(o.Unknown) > 0 {
			t.Errorf("%s: unknown are %q", c.spec, o.Unknown)
		}
	}
	const host = "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {name: p}\nspec: {nodeSelector: {}, ingress: [{fromEntities: [all]}]}"
	if _, err := decodeText(host); err == nil || !strings.Contains(err.Error(), "spec.nodeSelector: not supported by Sluice: rules for nodes") {
		t.Errorf("a rule for nodes: %v", err)
	}
}

func TestRulesKnowWhereTheyWereWritten(t *testing.T) {
	o, err := decodeText(`apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: p, namespace: a}
specs:
- endpointSelector: {}
  ingress: [{fromEndpoints: [{}], toPorts: [{ports: [{port: "80"}]}, {ports: [{port: "81"}]}]}]
- endpointSelector: {}
  egressDeny: [{toEntities: [world]}]`)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range o.Specs {
		for _, r := range s.Rules {
			got = append(got, r.Source.String())
		}
	}
	want := "CiliumNetworkPolicy a/p specs[0].ingress[0].toPorts[0] CiliumNetworkPolicy a/p specs[0].ingress[0].toPorts[1] CiliumNetworkPolicy a/p specs[1].egressDeny[0]"
	if strings.Join(got, " ") != want {
		t.Errorf("sources %v", got)
	}
}

func TestVersionsOfAKindMeanTheSame(t *testing.T) {
	for kind, fields := range map[string]string{
		"CiliumCIDRGroup": "spec: {externalCIDRs: [10.0.0.0/8, 'fd00::/8']}",
		"ClusterNetworkPolicy": "spec: {tier: Admin, priority: 3, subject: {namespaces: {}}, ingress: [{action: Deny, from: [{namespaces: {}}]}], " +
			"egress: [{action: Accept, to: [{namespaces: {}}], protocols: [{destinationNamedPort: web}]}]}",
	} {
		versions := Versions(kind)
		if len(versions) < 2 {
			t.Errorf("%s is supported only in %q", kind, versions)
		}
		var first Object
		for i, version := range versions {
			o, err := decodeText("apiVersion: " + version + "\nkind: " + kind + "\nmetadata: {name: p}\n" + fields)
			if err != nil {
				t.Fatalf("%s: %v", version, err)
			}
			if i == 0 {
				first = o
			}
			if !reflect.DeepEqual(o.Specs, first.Specs) || !reflect.DeepEqual(o.Group, first.Group) {
				t.Errorf("%s is read as %+v, %s as %+v", version, o, versions[0], first)
			}
		}
	}
}

// FuzzDecode searches for inputs that crash, or that are accepted but cannot be converted.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{
		"apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p}\nspec: {podSelector: {}, egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}}], ports: [{port: http, protocol: UDP}]}]}",
		"apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p}\nspec: {endpointSelector: {}, egress: [{toFQDNs: [{matchPattern: \"*.x\"}], toPorts: [{ports: [{port: \"0x1\", endPort: 7}], rules: {dns: [{matchName: a}]}}]}], ingressDeny: [{icmps: [{fields: [{type: Echo}, {family: IPv6, type: 300}]}]}]}",
		"apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {name: p}\nspecs: [{nodeSelector: {}, ingress: [{fromCIDRSet: [{cidrGroupRef: g, except: [10.0.0.0/8]}, {cidr: '::ffff:10.0.0.0/104'}]}]}]",
		"apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: p}\nspec: {tier: Baseline, priority: 3, subject: {pods: {namespaceSelector: {}, podSelector: {}}}, egress: [{action: Accept, to: [{domainNames: ['*.a.b']}], protocols: [{tcp: {destinationPort: {range: {start: 1, end: 2}}}}]}]}",
		"apiVersion: policy.networking.k8s.io/v1alpha1\nkind: AdminNetworkPolicy\nmetadata: {name: p}\nspec: {priority: 3, subject: {namespaces: {}}, ingress: [{action: Allow, from: [{pods: {namespaces: {namespaceSelector: {}}, podSelector: {}}}], ports: [{namedPort: x}]}]}",
		"apiVersion: cilium.io/v2\nkind: CiliumCIDRGroup\nmetadata: {name: g, labels: {a: b}}\nspec: {externalCIDRs: [10.0.0.0/8]}",
		"a: &a [*a]\n---\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		docs, err := manifest.Parse(data)
		if err != nil {
			return
		}
		for _, d := range docs {
			o, err := Decode(d, options)
			if err != nil {
				continue
			}
			if o.Key.Name == "" || o.Key.Kind == "" || o.Group == nil && len(o.Specs) == 0 {
				t.Fatalf("accepted %+v", o)
			}
			for _, s := range o.Specs {
				for _, r := range s.Rules {
					if r.Content() == "" || r.Peers.Nobody() && r.Tier == policytable.Normal && r.Source.Kind != "NetworkPolicy" {
						t.Fatalf("rule %+v", r)
					}
				}
			}
		}
	})
}

// TestEmptySpecsAreNoted: Kubernetes accepts a NetworkPolicy without a spec. It isolates the whole namespace, so it
// gets a note.
func TestEmptySpecsAreNoted(t *testing.T) {
	for spec, noted := range map[string]bool{
		"spec:": true, "spec: null": true, "spec: {}": true, "": true, "spec: {ingress: []}": true,
		"spec: {podSelector: {}}": false, "spec: {policyTypes: [Ingress]}": false, "spec: {egress: [{}]}": false,
	} {
		text := "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: shop}\n" +
			spec + "\n"
		docs, err := manifest.Parse([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		ob, err := Decode(docs[0], rule.Options{})
		if err != nil {
			t.Errorf("%q: %v", spec, err)
		}
		const want = "spec: is empty; it means podSelector: {} and policyTypes: [Ingress], so that no pod of " +
			"namespace shop receives anything"
		if got := len(ob.Notes) == 1 && ob.Notes[0].String() == want; got != noted || len(ob.Notes) > 1 {
			t.Errorf("%q: notes %v, want one: %t", spec, ob.Notes, noted)
		}
	}
}

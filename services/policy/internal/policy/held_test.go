// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
)

func held(t *testing.T, text string) Object {
	t.Helper()
	docs, err := manifest.Parse([]byte(text))
	if err != nil || len(docs) != 1 {
		t.Fatalf("%s: %v", text, err)
	}
	o, err := DecodeHeld(docs[0], options)
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return o
}

func TestHeldObjectsAreTakenByTheirMeaning(t *testing.T) {
	const head = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: a}\nspec: {podSelector: {}, "
	for cidr, want := range map[string]string{
		"10.0.0.1/24":           "10.0.0.0/24",
		"010.001.0.0/16":        "10.1.0.0/16",
		"10.0.0.0/08":           "10.0.0.0/8",
		"::ffff:10.0.0.0/120":   "10.0.0.0/24",
		"::ffff:010.0.0.1/0120": "10.0.0.0/24",
		"::ffff:0:0/96":         "0.0.0.0/0",
		"::ffff:a00:1/104":      "10.0.0.0/8",
		"::ffff:0:0/64":         "::/64",
		"2001:db8::1/64":        "2001:db8::/64",
	} {
		text := head + `ingress: [{from: [{ipBlock: {cidr: "` + cidr + `"}}]}]}`
		o := held(t, text)
		networks := o.Specs[0].Rules[0].Peers.Networks
		if o.Isolates != "" || len(networks) != 1 || networks[0].Prefix.String() != want {
			t.Errorf("%s: %v, isolates %q, want %s", cidr, networks, o.Isolates, want)
		}
		if len(o.Notes) != 1 || o.Notes[0].Kind != manifest.NoteCanonical || o.Notes[0].Path != "spec.ingress[0].from[0].ipBlock.cidr" || !strings.Contains(o.Notes[0].Text, "it means "+want) {
			t.Errorf("%s: noted %v", cidr, o.Notes)
		}
		// In files and calls, the value is an error, as in new objects.
		if _, err := decodeText(text); err == nil || !strings.Contains(err.Error(), "it means "+want) {
			t.Errorf("%s in a file: %v", cidr, err)
		}
	}
	o := held(t, head+`ingress: [{from: [{ipBlock: {cidr: 10.0.0.1/8, except: [10.1.0.1/16]}}]}]}`)
	if n := o.Specs[0].Rules[0].Peers.Networks[0]; n.Prefix.String() != "10.0.0.0/8" || len(n.Except) != 1 || n.Except[0].String() != "10.1.0.0/16" {
		t.Errorf("an exception: %v", n)
	}
	// No label has such a value, so the requirement is never met.
	o = held(t, head+`ingress: [{from: [{podSelector: {matchExpressions: [{key: app, operator: In, values: ["a b", web]}]}}]}]}`)
	if o.Isolates != "" || !o.Specs[0].Rules[0].Peers.Selectors[0].Matches(pod("app", "web", "a")) {
		t.Errorf("a value that no label has: %+v", o)
	}
	o = held(t, "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: a, novel: 1}\nspec: {podSelector: {}}\nnovel: 1")
	if o.Isolates != "" || len(o.Unknown) != 2 {
		t.Errorf("unknown fields outside the spec: %+v", o)
	}
}

func pod(key, value, namespace string) label.Set {
	return label.NewSet(label.Kubernetes(key, value), label.Kubernetes(label.KeyNamespace, namespace), label.Kubernetes(label.KeyCluster, "here"))
}

func TestIsolatingRulesAreInOneOrder(t *testing.T) {
	const meta = "metadata: {name: p, namespace: a}\n"
	for _, text := range []string{
		"apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\n" + meta + "spec: {podSelector: {}, policyTypes: [Novel]}",
		"apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\n" + meta + "spec: {endpointSelector: {}}",
		"apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: p}\nspec: {tier: Admin, priority: 7, subject: {novel: {}}}",
	} {
		for range 50 { // if the order depended on a map, one of the iterations would show it
			rules := held(t, text).Specs[0].Rules
			if len(rules) != 2 || rules[0].Direction != policytable.Ingress || rules[1].Direction != policytable.Egress {
				t.Fatalf("%s: %d rules, of which the first is for %s", text, len(rules), rules[0].Direction)
			}
		}
	}
}

func TestObjectsThatCannotBeConvertedIsolate(t *testing.T) {
	knp := "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: a}\n"
	cnp := "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: a}\n"
	ccnp := "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {name: p}\n"
	kcnp := "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: p}\n"
	anp := "apiVersion: policy.networking.k8s.io/v1alpha1\nkind: BaselineAdminNetworkPolicy\nmetadata: {name: default}\n"
	const (
		web   = "web"   // only app=web in namespace a
		space = "space" // all pods in namespace a
		all   = "all"
		none  = "none"
	)
	for _, c := range []struct{ text, selects, rules string }{
		{knp + `spec: {podSelector: {matchLabels: {app: web}}, ingress: [{from: [{ipBlock: {cidr: nonsense}}]}]}`, web, "ingress Isolation 0"},
		{knp + `spec: {podSelector: {matchLabels: {app: web}}, egress: [{to: [{ipBlock: {cidr: nonsense}}]}]}`, web, "ingress Isolation 0, egress Isolation 0"},
		{knp + `spec: {podSelector: {matchLabels: {app: web}}, policyTypes: [Egress], egress: [{to: [{ipBlock: {}}]}]}`, web, "egress Isolation 0"},
		{knp + `spec: {podSelector: {matchLabels: {app: web}}, policyTypes: [Egress, Novel]}`, web, "ingress Isolation 0, egress Isolation 0"},
		{knp + `spec: {podSelector: {matchLabels: {app: web}}, ingress: [{novel: 1}]}`, web, "ingress Isolation 0"},
		{knp + `spec: {podSelector: {matchLabels: {app: web}}, novel: 1}`, web, "ingress Isolation 0"},
		{knp + `spec: {podSelector: {matchLabels: {app: 1}}}`, space, "ingress Isolation 0"},
		{knp + `spec: {podSelector: {matchLabels: {app: web}, novel: 1}}`, space, "ingress Isolation 0"},
		{knp + `spec: {podSelector: {matchExpressions: [{key: app, operator: Near, values: [web]}]}}`, space, "ingress Isolation 0"},
		{knp + `spec: nonsense`, space, "ingress Isolation 0, egress Isolation 0"},
		{cnp + `spec: {endpointSelector: {matchLabels: {app: web}}, ingress: [{fromEntities: [novel]}]}`, web, "ingress Isolation 0"},
		{cnp + `spec: {endpointSelector: {matchLabels: {app: web}}, ingress: [{}], egressDeny: [{toEntities: [novel]}]}`, web, "ingress Normal 0, egress Normal 0"},
		{cnp + `spec: {endpointSelector: {matchLabels: {app: web}}, egressDeny: nonsense}`, web, "egress Normal 0"},
		{cnp + `spec: {endpointSelector: {matchLabels: {app: web}}}`, web, "ingress Isolation 0, egress Isolation 0"},
		{cnp + `spec: {endpointSelector: [], ingress: [{}]}`, space, "ingress Isolation 0"},
		{cnp + `specs: nonsense`, space, "ingress Normal 0, egress Normal 0"},
		{cnp + `specs: [{endpointSelector: {matchLabels: {app: web}}, egress: [{toCIDR: [x]}]}]`, web, "egress Isolation 0"},
		{ccnp + `spec: {nodeSelector: {}, ingressDeny: [{}]}`, none, ""},
		{ccnp + `spec: {endpointSelector: {matchLabels: {app: 1}}, egress: [{}]}`, all, "egress Isolation 0"},
		{kcnp + `spec: {tier: Admin, priority: 7, subject: {pods: {podSelector: {matchLabels: {app: web}}, namespaceSelector: {}}}, ingress: [{action: Deny, from: [{novel: {}}]}]}`, web, "ingress Admin 7"},
		{kcnp + `spec: {tier: Novel, priority: 7, subject: {novel: {}}, ingress: [{action: Accept, from: [{namespaces: {}}]}]}`, all, "ingress Admin 7"},
		{anp + `spec: {subject: {namespaces: {}}, egress: [{action: Novel}]}`, all, "egress Baseline 0"},
	} {
		o := held(t, c.text)
		if o.Isolates == "" || len(o.Notes) != 1 || o.Notes[0].Kind != manifest.NoteIsolates || o.Key.Name == "" {
			t.Errorf("%s\nisolates %q, notes %v, key %v", c.text, o.Isolates, o.Notes, o.Key)
		}
		var rules []string
		selected := none
		for _, s := range o.Specs {
			for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
				for _, r := range s.Rules {
					if r.Direction != d {
						continue
					}
					rules = append(rules, d.String()+" "+r.Tier.String()+" "+strconv.Itoa(int(r.Priority)))
					if r.Action != policytable.Deny || !r.AllPorts || !r.Peers.Any || r.Peers.ExceptOwn != (d == policytable.Ingress) || !s.Selects[d] {
						t.Errorf("%s\nrule %s", c.text, r.Content())
					}
				}
			}
			switch {
			case s.Subject.Matches(pod("app", "db", "b")):
				selected = all
			case s.Subject.Matches(pod("app", "db", "a")):
				selected = space
			case s.Subject.Matches(pod("app", "web", "a")):
				selected = web
			}
		}
		if got := strings.Join(rules, ", "); got != c.rules || selected != c.selects {
			t.Errorf("%s\nselects %s with %q, want %s with %q", c.text, selected, got, c.selects, c.rules)
		}
	}
	for _, text := range []string{
		"apiVersion: v1\nkind: Pod\nmetadata: {name: p}",
		"apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: [p], namespace: a}\nspec: {podSelector: {}}",
		"apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: [a]}\nspec: {podSelector: {}}",
		"apiVersion: cilium.io/v2\nkind: CiliumCIDRGroup\nmetadata: {name: [g]}\nspec: {externalCIDRs: [x]}",
	} {
		docs, err := manifest.Parse([]byte(text))
		if err == nil {
			_, err = DecodeHeld(docs[0], options)
		}
		if err == nil {
			t.Errorf("%s: no error", text)
		}
	}
}

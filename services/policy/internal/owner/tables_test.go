// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// tenant adds pods 300 (namespace shop) and 301 (namespace evil), to whose tables a datapath subscribes.
func tenant(t *testing.T, o *Owner) {
	t.Helper()
	var ids []peer.Identity
	for i, namespace := range []string{"shop", "evil"} {
		labels := label.NewSet(label.Kubernetes("app", "web"), label.Kubernetes(label.KeyNamespace, namespace))
		id, err := peer.New(identity.Numeric(300+i), labels)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	if err := o.Identities().SetIdentities(t.Context(), ids, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := o.Subscribers().Subscribe(t.Context(), Subscription{
		Name: "datapath", Role: RoleEnforces, Interest: Interest{Subjects: []identity.Numeric{300, 301}},
	}); err != nil {
		t.Fatal(err)
	}
}

// full returns policies of the namespace evil that use the whole prefix capacity of the tables of its pods.
func full(prefixes int) map[policy.Key]policy.Written {
	all := make(map[policy.Key]policy.Written)
	const each = 1024
	for n := 0; n < prefixes; n += each {
		var blocks []string
		for i := n; i < min(n+each, prefixes); i++ {
			blocks = append(blocks, fmt.Sprintf(`{"ipBlock":{"cidr":"10.%d.%d.%d/32"}}`, i>>15, i>>7&255, 2*(i&127)))
		}
		k := policy.Key{Kind: "NetworkPolicy", Namespace: "evil", Name: fmt.Sprintf("p%05d", n)}
		all[k] = object("networking.k8s.io/v1", k,
			`"spec":{"podSelector":{},"ingress":[{"from":[`+strings.Join(blocks, ",")+`]}]}`)
	}
	return all
}

// TestTablesOfOneTenantKeepOutNoPolicyOfTheCluster: policies of one namespace use the whole capacity for the tables
// of its pods. A cluster-wide deny policy of the administrator must apply to all other pods. For the pods of that
// namespace, no more may be allowed than with the deny policy.
func TestTablesOfOneTenantKeepOutNoPolicyOfTheCluster(t *testing.T) {
	deny := policy.Key{Kind: "CiliumClusterwideNetworkPolicy", Name: "block"}
	spec := object("cilium.io/v2", deny, `"spec":{"endpointSelector":{},`+
		`"enableDefaultDeny":{"ingress":false,"egress":false},"ingressDeny":[`+
		`{"fromCIDR":["203.0.113.7/32"]},`+
		`{"fromEndpoints":[{"matchLabels":{"k8s:io.kubernetes.pod.namespace":"evil"}}]}]}`)
	for _, prefixes := range []int{0, 16384} {
		t.Run(fmt.Sprint(prefixes, " prefixes"), func(t *testing.T) {
			d, _ := objects(t, t.TempDir())
			d.complete() // subscribers wait until the source is complete
			tenant(t, d.owner)
			all := full(prefixes)
			for k, x := range all {
				d.apply(map[policy.Key]policy.Written{k: x})
			}
			if !passes(t, d.owner, 301, 300) {
				t.Fatal("evil does not reach shop before the policy")
			}
			d.apply(map[policy.Key]policy.Written{deny: spec})
			judged, err := d.Judged(t.Context(), []policy.Key{deny})
			if err != nil {
				t.Fatal(err)
			}
			if passes(t, d.owner, 301, 300) {
				t.Errorf("a cluster-wide deny applies to no pod of the node, "+
					"because the tables of one tenant are full: %s", judged[deny].Refused)
			}
		})
	}
}

// TestStatusOfAPolicyThatDoesNotFitOnANode: the process that writes the status of policies has no subjects and
// therefore no tables. It must not report "enforced as written" for a policy that a node refuses.
func TestStatusOfAPolicyThatDoesNotFitOnANode(t *testing.T) {
	deny := policy.Key{Kind: "CiliumClusterwideNetworkPolicy", Name: "block"}
	spec := object("cilium.io/v2", deny, `"spec":{"endpointSelector":{},`+
		`"enableDefaultDeny":{"ingress":false,"egress":false},"ingressDeny":[`+
		`{"fromCIDR":["203.0.113.7/32"]}]}`)
	refused := make(map[bool]string)
	for _, node := range []bool{true, false} {
		d, _ := objects(t, t.TempDir())
		d.complete()
		if node {
			tenant(t, d.owner)
		} else { // the process that writes the status knows the identities of the cluster, too
			pods(t, d.owner, "evil")
		}
		for k, x := range full(16384) {
			d.apply(map[policy.Key]policy.Written{k: x})
		}
		d.apply(map[policy.Key]policy.Written{deny: spec})
		judged, err := d.Judged(t.Context(), []policy.Key{deny})
		if err != nil {
			t.Fatal(err)
		}
		refused[node] = judged[deny].Refused
	}
	if refused[true] != "" && refused[false] == "" {
		t.Errorf("a node refuses the policy (%.80s…), but its status is enforced as written", refused[true])
	}
}

// TestTooLargeTablesKeepNoPodOutOfQuarantine: a tenant makes the tables for a quarantine label too large before any
// pod has the label. When a pod gets the label, the pod must be isolated, and must not keep its former tables.
func TestTooLargeTablesKeepNoPodOutOfQuarantine(t *testing.T) {
	d, _ := objects(t, t.TempDir())
	d.complete()
	tenant(t, d.owner)
	quarantine := policy.Key{Kind: "CiliumClusterwideNetworkPolicy", Name: "quarantine"}
	d.apply(map[policy.Key]policy.Written{quarantine: object("cilium.io/v2", quarantine,
		`"spec":{"endpointSelector":{"matchLabels":{"quarantine":"true"}},`+
			`"ingressDeny":[{"fromEntities":["all"]}],"egressDeny":[{"toEntities":["all"]}]}`)})
	for k, x := range full(2 * 16384) {
		// Each of these policies selects only pods that will later get the quarantine label.
		x.Text = []byte(strings.Replace(string(x.Text),
			`"podSelector":{}`, `"podSelector":{"matchLabels":{"quarantine":"true"}}`, 1))
		d.apply(map[policy.Key]policy.Written{k: x})
	}
	id, err := peer.New(302, label.NewSet(label.Kubernetes("app", "web"), label.Kubernetes("quarantine", "true"),
		label.Kubernetes(label.KeyNamespace, "evil")))
	if err != nil {
		t.Fatal(err)
	}
	if err := d.owner.Identities().SetIdentities(t.Context(), []peer.Identity{id}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := d.owner.Reader().Table(t.Context(), 302); err != nil {
		t.Errorf("a pod in quarantine gets no tables, so it keeps its former ones: %v", err)
	}
}

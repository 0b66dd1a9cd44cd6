// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/labelfilter"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// TestSelectorsOverLabelsThatIdentitiesLeaveOutOpenNothing: by default, identities do not include some labels of pods
// (job-name, *.kubernetes.io/*, *.k8s.io/*, pod-template-hash). A policy of an API server that selects by such a
// label must not allow connections that Kubernetes denies, and its author must be informed.
func TestSelectorsOverLabelsThatIdentitiesLeaveOutOpenNothing(t *testing.T) {
	for what, c := range map[string]struct{ spec string }{
		// The pod app=db (301) belongs to the Job "migrate", so in Kubernetes it is isolated.
		"the pods of a Job are isolated": {
			`"spec":{"podSelector":{"matchLabels":{"batch.kubernetes.io/job-name":"migrate"}}}`,
		},
		"the pod of a StatefulSet is isolated": {
			`"spec":{"podSelector":{"matchLabels":{"statefulset.kubernetes.io/pod-name":"db-0"}}}`,
		},
		// The pod app=web (300) belongs to a Job, so in Kubernetes it is not allowed.
		"everything except Jobs is allowed": {`"spec":{"podSelector":{"matchLabels":{"app":"db"}},"ingress":[{"from":[` +
			`{"podSelector":{"matchExpressions":[{"key":"batch.kubernetes.io/job-name","operator":"DoesNotExist"}]}}]}]}`},
		"everything except one Job is allowed": {`"spec":{"podSelector":{"matchLabels":{"app":"db"}},"ingress":[{"from":[` +
			`{"podSelector":{"matchExpressions":[{"key":"job-name","operator":"NotIn","values":["import"]}]}}]}]}`},
	} {
		t.Run(what, func(t *testing.T) {
			d, _ := objects(t, t.TempDir())
			// The identities that sluice-identity creates for pods with these labels and app=web or app=db.
			var ids []peer.Identity
			for i, app := range []string{"web", "db"} {
				id, err := peer.New(identity.Numeric(300+i), label.NewSet(label.Kubernetes("app", app),
					label.Kubernetes(label.KeyNamespace, "shop")))
				if err != nil {
					t.Fatal(err)
				}
				ids = append(ids, id)
			}
			if err := d.owner.Identities().SetIdentities(t.Context(), ids, nil); err != nil {
				t.Fatal(err)
			}
			k := network("db")
			d.apply(map[policy.Key]policy.Written{k: object("networking.k8s.io/v1", k, c.spec)})
			d.complete(k)
			judged, err := d.Judged(t.Context(), []policy.Key{k})
			if err != nil {
				t.Fatal(err)
			}
			if passes(t, d.owner, 300, 301) || len(judged[k].Notes) == 0 ||
				!strings.Contains(judged[k].Notes[0].Text, "labels.include of sluice-identity") {
				t.Errorf("web to db passes: %t, notes %v", passes(t, d.owner, 300, 301), judged[k].Notes)
			}
		})
	}
}

// TestFilterOfTheIdentityServiceDecidesWhichLabelsCount: policies follow the label filter of the identity service,
// even if it changes while they are enforced. After a restart, the last filter still applies.
func TestFilterOfTheIdentityServiceDecidesWhichLabelsCount(t *testing.T) {
	dir := t.TempDir()
	o, stop := run(t, dir)
	pods(t, o, "shop")
	const manifest = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: db, namespace: shop}\n" +
		"spec: {podSelector: {matchLabels: {job-name: none}}, policyTypes: [Ingress]}\n"
	if _, err := o.Upsert(t.Context(), []byte(manifest), "", false); err != nil {
		t.Fatal(err)
	}
	if passes(t, o, 300, 301) || len(only(t, o).Notes) < 1 {
		t.Error("the default excludes job-name, but the pods that it may select are not isolated")
	}
	for _, c := range []struct {
		rules []labelfilter.Rule
		open  bool
	}{
		{[]labelfilter.Rule{{Text: "job-name", Counts: true}}, true},
		{[]labelfilter.Rule{{Text: "job-name", Counts: false}}, false},
		{nil, true},
	} {
		if err := o.Identities().SetLabelFilter(t.Context(), c.rules, nil); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if passes(t, o, 300, 301) != c.open {
				t.Errorf("%v: web to db passes: %t", c.rules, !c.open)
			}
			stop()
			o, stop = run(t, dir)
		}
	}
	stop()
	if err := os.WriteFile(filepath.Join(dir, filterFile), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	o, stop = run(t, dir)
	if passes(t, o, 300, 301) {
		t.Error("an unreadable file opens connections that the default denies")
	}
	stop()
}

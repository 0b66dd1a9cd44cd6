// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

// TestNoOperationCompilesMoreThanAFewTables: no operation compiles more than a few tables in one turn, because all
// other calls wait for the end of the turn.
func TestNoOperationCompilesMoreThanAFewTables(t *testing.T) {
	const pods = 300
	o, _ := run(t, t.TempDir())
	var all []peer.Identity
	var want Interest
	var policies, more strings.Builder
	for i := range pods {
		id, err := peer.New(identity.Numeric(1000+i), label.NewSet(label.Kubernetes("app", fmt.Sprint("p", i)),
			label.Kubernetes(label.KeyNamespace, "shop"), label.Kubernetes(label.KeyCluster, "default")))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, id)
		want.Subjects = append(want.Subjects, id.Number)
		policies.WriteString("---\n" + text("shop", fmt.Sprint("p", i), 1000+i))
		more.WriteString("---\n" + strings.Replace(text("shop", fmt.Sprint("p", i), 5000+i), "name: p", "name: q", 1))
	}
	if err := o.Identities().SetIdentities(t.Context(), all, nil); err != nil {
		t.Fatal(err)
	}
	subscribe := func(want Interest) {
		t.Helper()
		session, err := o.Subscribers().Subscribe(t.Context(), Subscription{Name: "datapath", Interest: want})
		if err != nil {
			t.Fatal(err)
		}
		o.Subscribers().Unsubscribe("datapath", session)
	}
	upsert := func(manifests string) {
		t.Helper()
		if _, err := o.Upsert(t.Context(), []byte(manifests), "", false); err != nil {
			t.Fatal(err)
		}
	}
	upsert(policies.String())
	subscribe(want)
	// A policy for every pod changes all tables.
	upsert("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: all, namespace: shop}\nspec: {podSelector: {}, ingress: [{ports: [{port: 53}]}]}\n")
	subscribe(Interest{})
	subscribe(want)
	files := o.Feed(managed.SourceFile)
	for _, listing := range [][]directory.File{{{Origin: "all.yaml", Data: []byte(more.String())}}, nil} {
		if err := files.Set(t.Context(), listing); err != nil {
			t.Fatal(err)
		}
	}
	st, err := o.Reader().Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if st.Size.Subjects != pods || st.Counters.Tables < 5*pods {
		t.Fatalf("%d subjects, %d tables compiled: the test covers nothing", st.Size.Subjects, st.Counters.Tables)
	}
	seen := 0
	for _, b := range st.Busy {
		if b.Most > 2*subjectsAtOnce {
			t.Errorf("%s: one operation compiled %d tables, limit %d", b.Operation, b.Most, 2*subjectsAtOnce)
		}
		seen += b.Most
	}
	if seen == 0 {
		t.Error("no operation compiled anything")
	}
}

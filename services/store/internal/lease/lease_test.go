// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lease

import (
	"context"
	"encoding/pem"
	"reflect"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-net/sluice/store"
)

func TestEpochBelongsToOneProcess(t *testing.T) {
	const next = "next" // ID of new data
	none := Data{}
	for what, c := range map[string]struct {
		held, published, own Data
		now                  Data // none: the process stands by
		later                Data // after the Lease was unchanged for long enough
	}{
		"the first start":                       {none, none, none, none, Data{1, next}},
		"a restart":                             {Data{3, "a"}, Data{3, "a"}, Data{3, "a"}, Data{3, "a"}, Data{3, "a"}},
		"a restart before the ConfigMap":        {Data{3, "a"}, Data{2, "b"}, Data{3, "a"}, Data{3, "a"}, Data{3, "a"}},
		"another process, no data":              {Data{3, "a"}, Data{3, "a"}, none, none, Data{4, next}},
		"another process, former data":          {Data{3, "a"}, Data{3, "a"}, Data{2, "b"}, none, Data{4, next}},
		"another process has the epoch":         {Data{3, "a"}, Data{3, "a"}, Data{3, "b"}, none, Data{4, next}},
		"the Lease was deleted":                 {none, Data{5, "a"}, Data{5, "a"}, Data{5, "a"}, Data{5, "a"}},
		"the Lease was deleted, no data":        {none, Data{5, "a"}, none, none, Data{6, next}},
		"both were deleted":                     {none, none, Data{5, "a"}, Data{5, "a"}, Data{5, "a"}},
		"the API server was restored":           {Data{3, "b"}, Data{3, "b"}, Data{5, "a"}, Data{5, "a"}, Data{5, "a"}},
		"the ConfigMap has a later epoch":       {Data{5, "a"}, Data{6, "b"}, Data{5, "a"}, none, Data{7, next}},
		"the ConfigMap has the epoch of others": {none, Data{5, "b"}, Data{5, "a"}, none, Data{6, next}},
	} {
		s := seen{held: c.held, published: store.Published{Epoch: c.published.Epoch, ID: c.published.ID}}
		if d, ok := decide(s, c.own, next, false); d != c.now || ok != (c.now != none) {
			t.Errorf("%s: %v, %t, want %v", what, d, ok, c.now)
		}
		if d, ok := decide(s, c.own, next, true); d != c.later || !ok {
			t.Errorf("%s, after the time: %v, %t, want %v", what, d, ok, c.later)
		}
	}
}

// TestLeaseMustBeSeenUnchanged: a change, another Lease of the name and a failed request begin the time anew.
func TestLeaseMustBeSeenUnchanged(t *testing.T) {
	const takeover = 30 * time.Second
	at := func(uid types.UID, version string) seen {
		return seen{lease: &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{UID: uid, ResourceVersion: version}}}
	}
	begin := time.Unix(1_000_000, 0)
	for what, disturb := range map[string]func(*watch, time.Time){
		"another one": func(w *watch, now time.Time) { w.sees(at("b", "1"), now) },
		"a renewal":   func(w *watch, now time.Time) { w.sees(at("a", "2"), now) },
		"a failure":   func(w *watch, _ time.Time) { w.failed() },
		"its absence": func(w *watch, now time.Time) { w.sees(seen{}, now) },
	} {
		w := &watch{takeover: takeover}
		if w.sees(at("a", "1"), begin) || w.sees(at("a", "1"), begin.Add(takeover-1)) {
			t.Fatal("the time ends early")
		}
		disturb(w, begin.Add(takeover-1))
		if w.sees(at("a", "1"), begin.Add(takeover)) {
			t.Errorf("%s does not begin the time anew", what)
		}
		if !w.sees(at("a", "1"), begin.Add(2*takeover)) {
			t.Errorf("after %s the time does not end", what)
		}
	}
}

func TestAnotherProcessOfTheSameEpochIsLater(t *testing.T) {
	own := Data{3, "a"}
	for d, want := range map[Data]bool{{}: false, {2, "b"}: false, own: false, {3, "b"}: true, {4, "b"}: true} {
		if later(d, own) != want {
			t.Errorf("%v is later than %v: %t", d, own, !want)
		}
	}
}

// TestStoreOfTheLeaseIsAskedWithoutAConfigMap: it serves nodes, and its Lease is not renewed.
func TestStoreOfTheLeaseIsAskedWithoutAConfigMap(t *testing.T) {
	p := store.Published{
		Epoch: 3, ID: "a", Clients: []string{"192.0.2.1:23790"}, Enrol: []string{"192.0.2.1:23810"},
		CA: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("ca")})),
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{"other": "kept"}}}
	annotate(lease, p)
	var asked []store.Published
	l := &Lease{o: Options{Answers: func(_ context.Context, p store.Published) bool {
		asked = append(asked, p)
		return p.Epoch == 3
	}}}
	if !l.answers(t.Context(), seen{lease: lease, holder: holderOf(lease)}) {
		t.Error("without the ConfigMap, the store of the Lease does not answer")
	}
	if !reflect.DeepEqual(asked, []store.Published{p}) {
		t.Errorf("asked %v, want %v", asked, p)
	}
	if !l.answers(t.Context(), seen{published: store.Published{Epoch: 2}, holder: holderOf(lease)}) {
		t.Error("with the ConfigMap of an earlier epoch, the store of the Lease is not asked")
	}
	// The next epoch is not at the address of the former one.
	annotate(lease, store.Published{})
	if h := holderOf(lease); h.Epoch != 0 || lease.Annotations["other"] != "kept" {
		t.Errorf("the Lease of the next epoch names %v, and has %v", h, lease.Annotations)
	}
	if l.answers(t.Context(), seen{lease: lease, holder: holderOf(lease)}) {
		t.Error("a store that nothing names answers")
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/services/policy/internal/cilium"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/test/vectors"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// served returns a manifest in the form of an API server, with additional fields.
func served(t *testing.T, raw []byte, inList bool) *object {
	t.Helper()
	var whole map[string]any
	if err := json.Unmarshal(raw, &whole); err != nil {
		t.Fatal(err)
	}
	metadata, ok := whole["metadata"].(map[string]any)
	if !ok {
		t.Fatalf("%s has no metadata", raw)
	}
	metadata["resourceVersion"], metadata["uid"], metadata["generation"] = "4711", "6b1f", 3
	metadata["managedFields"] = []any{map[string]any{"manager": "kubectl", "fieldsV1": map[string]any{"f:spec": 1}}}
	metadata["annotations"] = map[string]any{"kubectl.kubernetes.io/last-applied-configuration": string(raw)}
	whole["status"] = map[string]any{"conditions": []any{map[string]any{"type": "Valid", "status": "True"}}}
	if inList {
		delete(whole, "apiVersion")
		delete(whole, "kind")
	}
	data, err := json.Marshal(whole)
	if err != nil {
		t.Fatal(err)
	}
	o := new(object)
	if err := json.Unmarshal(data, o); err != nil {
		t.Fatal(err)
	}
	if o.ResourceVersion != "4711" || len(o.Annotations) > 0 || len(o.ManagedFields) > 0 {
		t.Fatalf("metadata %+v", o.ObjectMeta)
	}
	return o
}

func TestVectorsAsObjectsAreThePoliciesOfTheirManifests(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "..", "..", "testdata", "policy-vectors", "*.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	options := rule.Options{Cluster: "default", LocalClusterOnly: true}
	seen, known := make(map[string]int), make(map[string]bool)
	look := func(raw []byte) {
		docs, err := manifest.Parse(raw)
		if err != nil || len(docs) != 1 || !policy.IsKind(docs[0].APIVersion, docs[0].Kind) || known[string(raw)] {
			return // not an object: some vectors have such manifests
		}
		known[string(raw)] = true
		doc := docs[0]
		var head struct {
			Metadata struct{ Name, Namespace string } `json:"metadata"`
		}
		if json.Unmarshal(raw, &head) != nil || head.Metadata.Name == "" {
			return // every object of an API server has a name
		}
		if policy.Namespaced(doc.Kind) && head.Metadata.Namespace == "" {
			head.Metadata.Namespace = "default"
			doc = doc.WithNamespace("default")
		}
		key := policy.Key{Kind: doc.Kind, Namespace: head.Metadata.Namespace, Name: head.Metadata.Name}
		o := served(t, raw, len(known)%2 == 0)
		o.Namespace = key.Namespace
		w := o.written(key.Kind, doc.APIVersion)
		want, wantErr := policy.Decode(doc, options)
		if got, err := policy.Decode(w, options); !reflect.DeepEqual(got, want) || !reflect.DeepEqual(err, wantErr) {
			t.Fatalf("%s: %+v, %v\nwant %+v, %v", raw, got, err, want, wantErr)
		}
		if wantErr != nil { // if both fail, they agree
			want, wantErr = policy.DecodeHeld(doc, options)
			if got, err := policy.DecodeHeld(w, options); !reflect.DeepEqual(got, want) || !reflect.DeepEqual(err, wantErr) {
				t.Fatalf("held %s: %+v, %v\nwant %+v, %v", raw, got, err, want, wantErr)
			}
		}
		seen[doc.Kind]++
	}
	for _, file := range files {
		if err := vectors.Read(file, func(c *vectors.Case) error {
			look(c.Manifest)
			for _, s := range c.Steps {
				for _, raw := range s.Apply {
					look(raw)
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	for kind, least := range map[string]int{
		"NetworkPolicy": 300, "CiliumNetworkPolicy": 500, "CiliumClusterwideNetworkPolicy": 10, "CiliumCIDRGroup": 1,
		"ClusterNetworkPolicy": 10,
	} {
		if seen[kind] < least {
			t.Errorf("%d objects of kind %s, want %d: %v", seen[kind], kind, least, seen)
		}
	}
}

func TestTextOfAnObjectIsThatOfItsSpecAndLabels(t *testing.T) {
	text := func(data string) string {
		t.Helper()
		o := new(object)
		if err := json.Unmarshal([]byte(data), o); err != nil {
			t.Fatal(err)
		}
		return string(o.written("CiliumNetworkPolicy", "cilium.io/v2").Text)
	}
	const want = `{"apiVersion":"cilium.io/v2","kind":"CiliumNetworkPolicy",` +
		`"metadata":{"labels":{"a":"b"},"name":"db","namespace":"shop"},"novel":1,"spec":{"b":[1, 2],"a":{}}}`
	compact := strings.ReplaceAll(want, " ", "") + "\n"
	for _, data := range []string{
		want,
		`{"metadata":{"name":"db","namespace":"shop","labels":{"a":"b"},"resourceVersion":"7","managedFields":[{}]},` +
			`"spec":{"b":[1,2],"a":{}},"status":{"x":1},"novel":1}`,
	} {
		if got := text(data); got != compact {
			t.Errorf("%s\nbecomes %s\nwant    %s", data, got, compact)
		}
	}
	const head = `{"metadata":{"name":"db","namespace":"shop"},`
	if text(head+`"spec":{}}`) == text(head+`"spec":{"x":1}}`) {
		t.Error("another spec has the same text")
	}
}

func TestBytesThatAreNoCharactersAreReplaced(t *testing.T) {
	if got := string(printable([]byte("a\xffb\xc3(\u00e9"))); got != "a\ufffdb\ufffd(\u00e9" {
		t.Errorf("%q", got)
	}
}

// FuzzDescription searches for texts that an API server accepts and that Sluice decodes differently or not at all.
func FuzzDescription(f *testing.F) {
	for _, s := range []string{
		"plain", "<a&b>", "\u2028\u2029", "\x7f\u0080\u0085\u009f", "\ufeffx\ufffe\uffff", "\U0001f600",
		"a\tb\nc\x00\x1b", "\xff\xfe", "# : - ? {}[],&*!|>'\"%@`", "\\u0041",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if len(s) > 10_000 {
			return
		}
		data, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"name": "db", "namespace": "shop"},
			"spec": map[string]any{
				"endpointSelector": map[string]any{}, "ingress": []any{map[string]any{}}, "description": s,
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		o := new(object)
		if err := json.Unmarshal(data, o); err != nil {
			t.Fatal(err)
		}
		w := o.written("CiliumNetworkPolicy", "cilium.io/v2")
		var p cilium.NetworkPolicy
		unknown, err := w.Decode(&p)
		if err != nil || len(unknown) > 0 || p.Spec == nil || p.Spec.Description != s && utf8.ValidString(s) {
			t.Fatalf("%q is read as %+v of %s: %v", s, p.Spec, w.Text, err)
		}
	})
}

func TestResourcesAreThoseOfTheKinds(t *testing.T) {
	const want = "[adminnetworkpolicies baselineadminnetworkpolicies ciliumcidrgroups " +
		"ciliumclusterwidenetworkpolicies ciliumnetworkpolicies clusternetworkpolicies networkpolicies]"
	if got := fmt.Sprint(resources()); got != want {
		t.Errorf("the resources are %s, want %s", got, want)
	}
}

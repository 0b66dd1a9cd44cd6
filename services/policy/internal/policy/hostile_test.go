// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"encoding/json"
	"fmt"
	"reflect"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/services/policy/internal/adminpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/cilium"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/networkpolicy"
)

// wrong returns a value whose type is wrong for a field, or nil if the field accepts any value.
func wrong(t reflect.Type) any {
	if t == reflect.TypeFor[manifest.Number]() {
		return []int{1}
	}
	switch t.Kind() {
	case reflect.Pointer:
		return wrong(t.Elem())
	case reflect.String:
		return 7
	case reflect.Bool, reflect.Int64:
		return "seven"
	case reflect.Slice:
		return map[string]int{}
	case reflect.Struct, reflect.Map:
		return []int{}
	}
	return nil
}

// fields calls f for every field below a type, with its path and a function that sets a value there.
func fields(t reflect.Type, path string, put func(any) any, f func(path string, t reflect.Type, put func(any) any)) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case t == reflect.TypeFor[manifest.Number]():
	case t.Kind() == reflect.Slice:
		put := func(v any) any { return put([]any{v}) }
		f(path+"[0]", t.Elem(), put)
		fields(t.Elem(), path+"[0]", put, f)
	case t.Kind() == reflect.Map:
		f(path+".k", t.Elem(), func(v any) any { return put(map[string]any{"k": v}) })
	case t.Kind() == reflect.Struct:
		for i := range t.NumField() {
			field := t.Field(i)
			if field.Anonymous {
				fields(field.Type, path, put, f)
				continue
			}
			name := field.Tag.Get("json")
			at := strings.TrimPrefix(path+"."+name, ".")
			put := func(v any) any { return put(map[string]any{name: v}) }
			f(at, field.Type, put)
			fields(field.Type, at, put, f)
		}
	}
}

func TestAWrongTypeInAnyFieldIsRefusedByItsPath(t *testing.T) {
	for name, kind := range map[string]struct {
		version string
		t       reflect.Type
	}{
		"NetworkPolicy":                  {"networking.k8s.io/v1", reflect.TypeFor[networkpolicy.NetworkPolicy]()},
		"CiliumNetworkPolicy":            {"cilium.io/v2", reflect.TypeFor[cilium.NetworkPolicy]()},
		"CiliumClusterwideNetworkPolicy": {"cilium.io/v2", reflect.TypeFor[cilium.NetworkPolicy]()},
		"CiliumCIDRGroup":                {"cilium.io/v2", reflect.TypeFor[cilium.CIDRGroup]()},
		"ClusterNetworkPolicy":           {"policy.networking.k8s.io/v1alpha2", reflect.TypeFor[adminpolicy.Policy]()},
		"AdminNetworkPolicy":             {"policy.networking.k8s.io/v1alpha1", reflect.TypeFor[adminpolicy.OldPolicy]()},
		"BaselineAdminNetworkPolicy":     {"policy.networking.k8s.io/v1alpha1", reflect.TypeFor[adminpolicy.OldPolicy]()},
	} {
		n := 0
		fields(kind.t, "", func(v any) any { return v }, func(path string, ft reflect.Type, put func(any) any) {
			value := wrong(ft)
			if value == nil || path == "kind" || path == "apiVersion" {
				return
			}
			n++
			o := put(value).(map[string]any)
			o["apiVersion"], o["kind"] = kind.version, name
			text, err := json.Marshal(o)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := decodeText(string(text)); err == nil || !strings.Contains(err.Error(), path+": must be ") {
				t.Errorf("%s %s: %.200v\n%s", name, path, err, text)
			}
		})
		if n < 10 {
			t.Errorf("%s: %d fields", name, n)
		}
	}
}

// TestHostilePoliciesCostBoundedMemory: small objects that would expand to large ones are refused, or need little
// memory.
func TestHostilePoliciesCostBoundedMemory(t *testing.T) {
	cnp := func(spec string) string {
		return "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: a}\nspec: {endpointSelector: {}, " + spec + "}"
	}
	list := func(n int, format string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, format, i)
		}
		return strings.TrimSuffix(b.String(), ",")
	}
	cidrs := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "10.%d.%d.0/24,", i/256%256, i%256)
		}
		return strings.TrimSuffix(b.String(), ",")
	}
	for _, tc := range []struct{ name, text, want string }{
		{
			"40,000 prefixes for each of 9,000 lists of ports", cnp("egress: [{toCIDR: [" + cidrs(40000) + "], toPorts: [" + list(9000, `{ports: [{port: "%d"}]},`) + "]}]"),
			"spec.egress[0].toPorts[9]: is too large: together with the rules before it, it lists more than 400000 peers and ports",
		},
		{"100,000 prefixes", cnp("egress: [{toCIDR: [" + cidrs(100000) + "]}]"), "the document has more than 100000 values"},
		{"90,000 invalid prefixes", cnp("egress: [{toCIDR: [" + list(90000, "x%d,") + "]}]"), `spec.egress[0].toCIDR[0]: "x0" is not a prefix`},
		{"100,000 ports", cnp("ingress: [{toPorts: [{ports: [" + list(100000, "{port: '%d'},") + "]}]}]"), "more than"},
		{"30,000 ports", cnp("ingress: [{toPorts: [{ports: [" + list(30000, "{port: '%d'},") + "]}]}]"), "spec.ingress[0].toPorts[0].ports: has 30000 entries, more than 40"},
		{"90,000 times an entity", cnp("ingress: [{fromEntities: [" + strings.Repeat("cluster,", 90000) + "]}]"), ""},
		{"90,000 values in a requirement", cnp("ingress: [{fromEndpoints: [{matchExpressions: [{key: a, operator: In, values: [" + list(90000, "v%d,") + "]}]}]}]"), ""},
		{"90,000 labels in a selector", cnp("ingress: [{fromEndpoints: [{matchLabels: {" + list(49000, "k%d: v,") + "}}]}]"), ""},
		{"a pattern that repeats repetitions", cnp(`ingress: [{toPorts: [{ports: [{port: "80", protocol: TCP}], rules: {http: [{path: "` + strings.Repeat("((a{100}){10})", 20) + `"}]}}]}]`), ""},
		{"a pattern that repeats too much", cnp(`ingress: [{toPorts: [{ports: [{port: "80", protocol: TCP}], rules: {http: [{path: "(((a{100}){100}){100})"}]}}]}]`), "spec.ingress[0].toPorts[0].rules.http[0].path: error parsing regexp"},
		{"a pattern of many stars", cnp(`egress: [{toFQDNs: [{matchPattern: "` + strings.Repeat("*a", 127) + `"}]}]`), ""},
		{"a name that is too long", cnp(`egress: [{toFQDNs: [{matchName: "` + strings.Repeat("a", 100000) + `"}]}]`), "spec.egress[0].toFQDNs[0].matchName: is longer than 255 characters"},
		{"a name with a byte of zero", cnp(`egress: [{toFQDNs: [{matchName: "a\0b"}]}]`), "spec.egress[0].toFQDNs[0].matchName:"},
		{"a label with a byte of zero", cnp(`ingress: [{fromEndpoints: [{matchLabels: {a: "\0"}}]}]`), `spec.ingress[0].fromEndpoints[0].matchLabels[a]: "\x00" is not a label value`},
		{"an ICMP type beyond all", cnp(`ingress: [{icmps: [{fields: [{type: 9223372036854775807}]}]}]`), ""},
		{"a port beyond all", cnp(`ingress: [{toPorts: [{ports: [{port: "18446744073709551616"}]}]}]`), `spec.ingress[0].toPorts[0].ports[0].port: "18446744073709551616" is neither`},
		{"the last port beyond all", cnp(`ingress: [{toPorts: [{ports: [{port: "1", endPort: 9223372036854775807}]}]}]`), "spec.ingress[0].toPorts[0].ports[0].endPort: 9223372036854775807 is not from 0 to 65535"},
		{"a name of an object that is too long", "apiVersion: cilium.io/v2\nkind: CiliumCIDRGroup\nmetadata: {name: " + strings.Repeat("a", 100000) + "}\nspec: {externalCIDRs: []}", "metadata.name:"},
	} {
		peak := peakHeap(func() {
			o, err := decodeText(tc.text)
			switch {
			case tc.want == "" && err != nil:
				t.Errorf("%s: %.300v", tc.name, err)
			case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
				t.Errorf("%s: %.300v\nwant %s", tc.name, err, tc.want)
			case err != nil && len(err.Error()) > 50*800:
				t.Errorf("%s: a message of %d bytes", tc.name, len(err.Error()))
			}
			runtime.KeepAlive(o)
		})
		if peak > 64<<20 {
			t.Errorf("%s: took %d MB", tc.name, peak>>20)
		}
	}
}

// peakHeap runs f with frequent garbage collections, and returns the largest observed growth of the heap.
func peakHeap(f func()) uint64 {
	defer debug.SetGCPercent(debug.SetGCPercent(25))
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	read := func() uint64 {
		metrics.Read(sample)
		return sample[0].Value.Uint64()
	}
	runtime.GC()
	before := read()
	done, peak := make(chan struct{}), make(chan uint64)
	go func() {
		tick := time.NewTicker(200 * time.Microsecond)
		defer tick.Stop()
		for most := before; ; {
			most = max(most, read())
			select {
			case <-done:
				peak <- most
				return
			case <-tick.C:
			}
		}
	}()
	f()
	close(done)
	return <-peak - before
}

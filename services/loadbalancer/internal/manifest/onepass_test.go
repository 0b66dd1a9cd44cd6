// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/yamlstream"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/jsonscan"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest/wire"
)

// jsonOf returns the documents of a YAML stream as JSON.
func jsonOf(t testing.TB, stream string) (out []string) {
	t.Helper()
	roots, err := yamlstream.Parse([]byte(stream))
	if err != nil {
		t.Fatal(err)
	}
	for _, root := range roots {
		text, err := toJSON(root)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, string(text))
	}
	return out
}

// everyField returns a value of a type in which every field is set.
func everyField(of reflect.Type, name string) any {
	texts := map[string]string{
		"apiVersion": "v1", "kind": "Service", "creationTimestamp": "2026-01-02T03:04:05Z", "clusterIP": "10.96.0.1",
		"clusterIPs": "10.96.0.1", "type": "LoadBalancer", "externalIPs": "192.0.2.1", "sessionAffinity": "ClientIP",
		"loadBalancerSourceRanges": "192.0.2.0/24", "externalTrafficPolicy": "Local", "ipFamilies": "IPv4",
		"ipFamilyPolicy": "SingleStack", "internalTrafficPolicy": "Local", "protocol": "UDP", "ip": "192.0.2.2",
		"ipMode": "Proxy", "addressType": "IPv4", "addresses": "10.0.0.1",
	}
	switch {
	case of == reflect.TypeFor[wire.Opaque]():
		return map[string]any{"a": []any{"\"é\n", 1.5, nil, true, map[string]any{"a": 1, "b": "\u2028"}}}
	case of.Kind() == reflect.Pointer:
		return everyField(of.Elem(), name)
	case of.Kind() == reflect.Slice:
		return []any{everyField(of.Elem(), name)}
	case of.Kind() == reflect.Map:
		return map[string]any{
			labelServiceName: "web", labelOtherProxy: "other", annotationAlgorithm: algorithmTable, annotationRanges: "x",
			"other": "{\"a\": \"b\"}",
		}
	case of.Kind() == reflect.String:
		if text, ok := texts[name]; ok {
			return text
		}
		return strings.ToLower(name)
	case of.Kind() == reflect.Bool:
		return true
	case of.Kind() == reflect.Int32:
		return 30_080
	}
	out := map[string]any{}
	for _, f := range reflect.VisibleFields(of) {
		if tag := f.Tag.Get("json"); tag != "" {
			out[tag] = everyField(f.Type, tag)
		}
	}
	return out
}

// onePassTexts returns JSON documents that onePass can read.
func onePassTexts(t testing.TB) []string {
	t.Helper()
	marshal := func(x any) string {
		text, err := json.Marshal(x)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	web := everyField(reflect.TypeFor[wire.Service](), "").(map[string]any)
	slice := everyField(reflect.TypeFor[wire.Slice](), "").(map[string]any)
	slice["apiVersion"], slice["kind"] = "discovery.k8s.io/v1", "EndpointSlice"
	out := append(jsonOf(t, whole), marshal(web), marshal(slice))
	items := []any{web, slice, web, slice}
	out = append(out, marshal(map[string]any{
		"apiVersion": "v1", "kind": "List", "metadata": web["metadata"], "items": items,
	}))
	delete(web, "apiVersion")
	delete(web, "kind")
	out = append(out, `{"kind":"ServiceList","apiVersion":"v1","metadata":null,"items":[`+marshal(web)+"]}")
	return append(out, `{"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4",
		"ports": null, "metadata": {"name": "a.b", "creationTimestamp": null, "labels": null}, "endpoints": []}`)
}

// agree compares onePass with the decoder that finds mistakes, and reports whether onePass could read the document.
func agree(t *testing.T, text string) bool {
	t.Helper()
	once := &decoder{options: Options{Namespace: "default"}}
	ok := once.readOnce(3, []byte(text))
	if !ok {
		if len(once.objects)+len(once.violations) > 0 {
			t.Errorf("one pass gave up on %s and left %+v, %+v", text, once.objects, once.violations)
		}
		return false
	}
	if !json.Valid([]byte(text)) {
		t.Errorf("one pass reads %s, which is not JSON", text)
	}
	examined := &decoder{options: Options{Namespace: "default"}}
	examined.examine(3, []byte(text))
	if len(examined.violations) > 0 || !reflect.DeepEqual(once.objects, examined.objects) {
		t.Errorf("of %s\none pass reads %s\nthe decoder reads %s, %+v", text, objectsText(once.objects),
			objectsText(examined.objects), examined.violations)
	}
	return true
}

func objectsText(all []Object) string {
	var out []string
	for _, o := range all {
		out = append(out, fmt.Sprintf("%v %+v %+v %q %q", o.Key, o.Service, o.Slice, o.Notes, o.Dropped))
	}
	return strings.Join(out, "\n")
}

// TestOnePassReadsEveryField fails if a field is added to package wire but not to onePass: the slow decoder would
// then read every document with the field.
func TestOnePassReadsEveryField(t *testing.T) {
	for _, text := range onePassTexts(t) {
		if !agree(t, text) {
			t.Errorf("one pass does not read %s", text)
		}
	}
}

// TestOnePassReadsWhatTheDecoderReads corrupts each document at each byte and compares the two decoders.
func TestOnePassReadsWhatTheDecoderReads(t *testing.T) {
	read := 0
	for _, text := range onePassTexts(t) {
		if len(text) > 4096 { // the list
			continue
		}
		for i := range text {
			damages := []string{"", "x", "0", "\"", ",", "}", "null", "\\", text[i:min(i+12, len(text))]}
			for n := range 2 { // corrupting all documents at each byte would take a minute with the race detector
				if agree(t, text[:i]+damages[(2*i+n)%len(damages)]+text[i+1:]) {
					read++
				}
			}
		}
	}
	if read == 0 {
		t.Error("one pass reads no document")
	}
}

// TestOnePassFindsRepeatedFields repeats each field of each object.
func TestOnePassFindsRepeatedFields(t *testing.T) {
	var repeat func(x any, put func(text string))
	repeat = func(x any, put func(text string)) {
		text := func(x any) string {
			b, _ := json.Marshal(x)
			return string(b)
		}
		switch x := x.(type) {
		case map[string]any:
			whole := text(x)
			for key, value := range x {
				put(fmt.Sprintf("{%q:%s,%s", key, text(value), whole[1:]))
				if key == "selector" || key == "targetRef" {
					continue
				}
				repeat(value, func(below string) {
					rest := map[string]any{}
					for k, v := range x {
						if k != key {
							rest[k] = v
						}
					}
					put(fmt.Sprintf("{%q:%s,%s", key, below, text(rest)[1:]))
				})
			}
		case []any:
			for i := range x {
				repeat(x[i], func(below string) { put("[" + below + "]") })
			}
		}
	}
	for _, text := range onePassTexts(t)[:2] {
		var x map[string]any
		if err := json.Unmarshal([]byte(text), &x); err != nil {
			t.Fatal(err)
		}
		repeat(x, func(text string) {
			if agree(t, text) {
				t.Errorf("one pass reads %s, which has a field twice", text)
			}
		})
	}
}

func FuzzOnePass(f *testing.F) {
	for _, text := range onePassTexts(f) {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) { agree(t, text) })
}

// TestStreamsAreReadOnce reads streams of several documents, one of them with a mistake in its last document.
func TestStreamsAreReadOnce(t *testing.T) {
	all := jsonOf(t, whole)
	stream := "---\n" + all[0] + "\n---\n\n--- " + all[1] + "\n"
	d := &decoder{options: Options{Namespace: "default"}}
	if !d.readAllOnce([]byte(stream)) || len(d.objects) != 2 || d.objects[1].Document != 1 {
		t.Errorf("%d objects of %s", len(d.objects), stream)
	}
	objects, err := Options{}.Decode([]byte(stream + "---\n{}"))
	if err == nil || len(objects) > 0 || !strings.Contains(err.Error(), "document 3") {
		t.Errorf("%d objects, %v", len(objects), err)
	}
	kept, bad := Options{}.DecodeEach([]byte(stream + "---\n{}"))
	if len(kept) != 2 || len(bad) != 1 {
		t.Errorf("%d objects and %d unreadable ones, want 2 and 1", len(kept), len(bad))
	}
}

// TestLongListsAreReadInHalves: two goroutines read a long list, and their result equals the result of the complete
// decoder. They give up on a list with a mistake in one half, and on a list whose middle is not found.
func TestLongListsAreReadInHalves(t *testing.T) {
	slice := func(name, more string) string {
		return `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"` + name + `"` + more +
			`,"labels":{"kubernetes.io/service-name":"web"}},"addressType":"IPv4","ports":[{"port":80}],` +
			`"endpoints":[{"addresses":["10.0.0.1"]},{"addresses":["10.0.0.2"]}]}`
	}
	owners := `,"ownerReferences":[` + strings.Repeat(`{"apiVersion":"v1","kind":"Service","name":"web"},`, largeList/40) +
		`{"apiVersion":"v1"}]`
	list := func(items ...string) string {
		return `{"apiVersion":"v1","kind":"List","items":[` + strings.Join(items, ",") + `]}`
	}
	var many []string
	for n := range largeList / 200 {
		many = append(many, slice(fmt.Sprint("web-", n), ""))
	}
	halved := func(text string) bool {
		p := (&decoder{options: Options{Namespace: "default"}}).onePass(3, text)
		p.Scanner, p.halve = jsonscan.New(text), true
		p.document()
		return p.halved && p.End() && len(p.of.violations) == 0
	}
	for name, c := range map[string]struct {
		text           string
		halved, passes bool
	}{
		"many":   {list(many...), true, true},
		"spaces": {strings.ReplaceAll(list(many...), "]}]},{", "]}]} ,{"), true, true},
		"no item begins in the middle": {
			strings.ReplaceAll(list(many...), ",{\"apiVersion\"", ", {\"apiVersion\""), false, true,
		},
		"an owner near the middle":     {list(slice("a", ""), slice("b", owners), slice("c", "")), false, true},
		"two lists":                    {list(many...) + list(many...), false, false},
		"a mistake in the first half":  {list(append([]string{`{"kind":"Pod"}`}, many...)...), false, false},
		"a mistake in the second half": {list(append(many[:len(many):len(many)], `{"kind":"Pod"}`)...), false, false},
		"no end":                       {strings.TrimSuffix(list(many...), "]}"), false, false},
		"a comma at the end":           {strings.TrimSuffix(list(many...), "]}") + ",]}", false, false},
		"two commas in the middle": {
			strings.Replace(list(many...), many[len(many)/2], many[len(many)/2]+",", 1), false, false,
		},
		"an open bracket in the middle": {
			strings.Replace(list(many...), many[len(many)/2], many[len(many)/2]+",[", 1), false, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			if len(c.text) < largeList {
				t.Fatalf("%d bytes are no long list", len(c.text))
			}
			if got := halved(c.text); got != c.halved {
				t.Errorf("read in halves: %t, want %t", got, c.halved)
			}
			if got := agree(t, c.text); got != c.passes {
				t.Errorf("read by one pass: %t, want %t", got, c.passes)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"fmt"
	"reflect"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"testing"
	"time"
)

type inner struct {
	Name  string `json:"name"`
	Limit *int64 `json:"limit"`
}

type embedded struct {
	Kind string `json:"kind"`
}

type object struct {
	embedded
	Spec struct {
		List   []inner           `json:"list"`
		Labels map[string]string `json:"labels"`
		Flag   *bool             `json:"flag"`
		Port   *Number           `json:"port"`
		Extra  any               `json:"extra"`
	} `json:"spec"`
}

func decode(t testing.TB, text string) (object, []string, error) {
	t.Helper()
	docs, err := Parse([]byte(text))
	if err != nil {
		return object{}, nil, err
	}
	if len(docs) != 1 {
		t.Fatalf("%d documents", len(docs))
	}
	var o object
	unknown, err := docs[0].Decode(&o)
	return o, unknown, err
}

func TestDecodeReadsYAMLAndJSON(t *testing.T) {
	for _, text := range []string{
		"kind: K\nspec:\n  list: [{name: a, limit: 3}]\n  labels: {x: z}\n" +
			"  flag: true\n  port: http\n  extra: {any: thing}\n",
		`{"kind":"K","spec":{"list":[{"name":"a","limit":3}],"labels":{"x":"z"},` +
			`"flag":true,"port":"http","extra":{"any":"thing"}}}`,
	} {
		o, unknown, err := decode(t, text)
		if err != nil || len(unknown) > 0 {
			t.Fatalf("%s: %v, unknown %v", text, err, unknown)
		}
		if o.Kind != "K" || len(o.Spec.List) != 1 || o.Spec.List[0].Name != "a" || *o.Spec.List[0].Limit != 3 ||
			o.Spec.Labels["x"] != "z" || !*o.Spec.Flag || !o.Spec.Port.IsString || o.Spec.Port.String != "http" ||
			o.Spec.Extra == nil {
			t.Errorf("%s: %+v", text, o)
		}
	}
}

func TestDecodeTellsAnAbsentListFromAnEmptyOne(t *testing.T) {
	for text, want := range map[string]bool{"spec: {}": false, "spec: {list: null}": false, "spec: {list: []}": true} {
		o, _, err := decode(t, text)
		if err != nil {
			t.Fatal(err)
		}
		if got := o.Spec.List != nil; got != want {
			t.Errorf("%s: list present is %t", text, got)
		}
	}
}

func TestDecodeNamesTheFieldThatIsWrong(t *testing.T) {
	for text, want := range map[string]string{
		"spec: {list: [{name: a}, {name: 5}]}":          `spec.list[1].name: must be a string, is the number 5`,
		"spec: {list: {}}":                              `spec.list: must be a list, is an object`,
		"spec: {list: [{limit: 1.5}]}":                  `spec.list[0].limit: must be a whole number, is the number 1.5`,
		"spec: {list: [{limit: 99999999999999999999}]}": `spec.list[0].limit: must be a whole number`,
		"spec: {labels: {a: true}}":                     `spec.labels.a: must be a string, is the truth value true`,
		"spec: {flag: \"yes\"}":                         `spec.flag: must be true or false, is the string "yes"`,
		"spec: {port: 80.5}":                            `spec.port: must be a whole number or a string`,
		"spec: []":                                      `spec: must be an object, is a list`,
		"spec: {flag: true, flag: false}":               `spec.flag: is given twice`,
		"spec: {labels: {a: b, a: c}}":                  `spec.labels.a: is given twice`,
		"spec: {extra: {x: {z: 1, z: 2}}}":              `spec.extra.x.z: is given twice`,
		"spec: {unknown: [{x: 1, x: 2}]}":               `spec.unknown[0].x: is given twice`,
		"spec: {? [a] : b}":                             `spec: has a key that is a list`,
		"base: &b {flag: true}\nspec:\n  <<: *b":        `spec: uses a merge key`,
		"a: &a [x]\nspec: {list: *a}":                   `spec.list[0]: must be an object, is the string "x"`,
		"spec: {extra: " + strings.Repeat("[", 100) + strings.Repeat("]", 100) + "}": `is nested more than 64 deep`,
	} {
		_, _, err := decode(t, text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: error %v, want %s", text, err, want)
		}
	}
}

func TestDecodeReportsUnknownFields(t *testing.T) {
	_, unknown, err := decode(t, "spec: {list: [{name: a, nam: b}], foo: 1}\nbar: {}")
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"spec.list[0].nam", "spec.foo", "bar"}; !reflect.DeepEqual(unknown, want) {
		t.Errorf("unknown %v, want %v", unknown, want)
	}
}

func TestParseSplitsDocuments(t *testing.T) {
	docs, err := Parse([]byte("---\n# nothing\n---\napiVersion: v1\nkind: A\n---\napiVersion: v2\nkind: B\n"))
	if err != nil || len(docs) != 2 || docs[0].Kind != "A" || docs[1].APIVersion != "v2" {
		t.Fatalf("%+v, %v", docs, err)
	}
	for _, text := range []string{"- a\n- b", "just text", "a: [", "\x00"} {
		if _, err := Parse([]byte(text)); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}

// lines returns n lines, each with its number.
func lines(n int, format string) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, format, i)
	}
	return b.String()
}

// bomb returns a few lines whose aliases expand to an astronomical number of values.
func bomb() string {
	b := "a0: &a0 [x]\n"
	for i := 1; i < 30; i++ {
		b += fmt.Sprintf("a%d: &a%d [*a%d, *a%d, *a%d, *a%d]\n", i, i, i-1, i-1, i-1, i-1)
	}
	return b + "spec: {extra: *a29}\n"
}

// TestHostileInputIsRefusedInBoundedMemory: the decoder rejects input that would expand to a huge document. The
// message contains the reason and the location, and is short. The decoder uses little memory.
func TestHostileInputIsRefusedInBoundedMemory(t *testing.T) {
	const limit = 96 << 20 // bytes of heap for inputs of up to 10 MB, with garbage, which a busy machine collects late
	long := fill("k", 500_000)
	for _, tc := range []struct{ name, text, want string }{
		{"10 MB of one text", "spec: {extra: \"" + fill("x", 10<<20) + "\"}", "manifest of 10485777 bytes is larger than 3145728"},
		{"10 MB of nothing", fill("\n", 10<<20), "is larger than 3145728"},
		{"aliases that grow", bomb(), "the document has more than 100000 values"},
		{"an alias to what holds it", "spec: &s {extra: *s}", "anchor 's' value contains itself|is nested more than 64 deep"},
		{"a list in itself, twice", "spec: {extra: &l [*l, *l]}", "contains itself|more than"},
		{"two anchors in each other", "spec: {extra: &a [&b [*a], *b]}", "contains itself|more than"},
		{"100,000 labels", "spec:\n  labels:\n" + lines(100_000, "    k%d: v\n"), "the document has more than 100000 values|characters that can begin a value"},
		{"a million labels", "spec:\n  labels:\n" + lines(200_000, " k%d: \n"), "characters that can begin a value, more than 120000"},
		{"200,000 objects in a list", "spec: {list: [" + fill("{},", 600_000) + "]}", "characters that can begin a value, more than 120000"},
		{"values as small as they get", "spec: {extra: [" + fill("a,", 3_000_000) + "]}", "characters that can begin a value"},
		{"just as many values as are read", "spec: {extra: {" + fill("a,", 238_000) + "}}", "spec.extra.a: is given twice"},
		{"a million documents", fill("---\n", 3_000_000), "characters that can begin a value"},
		{"deep lists", "spec: {extra: " + fill("[", 5000) + fill("]", 5000) + "}", "is nested more than 64 deep"},
		{"deeper lists", fill("[", 100_000), "exceeded max depth"},
		{"deep objects", fill("{a: ", 200_000), "exceeded max depth"},
		{"deep keys", fill("? ", 100_000), "exceeded max depth"},
		{"deep blocks", "a:\n" + fill("- - ", 200_000), "exceeded max depth"},
		{"100,000 anchors", "spec: {extra: [" + lines(100_000, "&a%d x,") + "]}", "the document has more than 100000 values"},
		{"a key of half a megabyte", `{"spec": {? "` + long + `" : 1}}`, "spec." + long[:150] + "…: is a key of 500000 bytes, more than 1024"},
		{"long keys behind aliases", "x: &x {\"" + long[:1000] + "\": &y [a, b]}\n" + lines(60, "x%d: [*x, *x]\n") + "spec: {labels: *x}", "must be a string, is a list"},
		{"a string of a megabyte", "spec: {list: [{name: \"" + fill("x", 1_000_000) + "\"}]}", "spec.list[0].name: is a text of 1000000 bytes, more than 262144"},
		{"a port of a megabyte", "spec: {port: \"" + fill("x", 1_000_000) + "\"}", "spec.port: is a text of 1000000 bytes"},
		{"a number of a megabyte", "spec: {list: [{limit: " + fill("9", 1_000_000) + "}]}", "spec.list[0].limit: must be a whole number"},
		{"a number beyond 64 bits", "spec: {list: [{limit: 9223372036854775808}]}", "spec.list[0].limit: must be a whole number, is the number 9223372036854775808"},
		{"a number in the notation of science", "spec: {list: [{limit: 1e999999999}]}", "spec.list[0].limit: must be a whole number"},
		{"not a number", "spec: {list: [{limit: .nan}]}", "spec.list[0].limit: must be a whole number, is the number .nan"},
		{"30,000 wrong fields", "spec: {list: [" + fill("{name: 1},", 300_000) + "]}", "spec.list[0].name: must be a string, is the number 1"},
		{"an alias that has no anchor", "spec: *nowhere", "unknown anchor 'nowhere' referenced"},
		{"a key that is an alias of an object", "k: &k {a: b}\nspec: {*k : c}", "spec: has a key that is an object"},
		{"a key that is given twice at the top", "spec: {}\nspec: {}", "spec: is given twice"},
		{"a key that is given twice in another spelling", `{"spec": {"flag": true, "fl\u0061g": false}}`, "spec.flag: is given twice"},
		{"a key that is given twice deep in what is dropped", "other: [[{a: [{b: {c: 1, c: 1}}]}]]", "other[0][0].a[0].b.c: is given twice"},
		{"a merge", "a: &a {flag: true}\nspec: {<<: *a}", "spec: uses a merge key"},
		{"a byte of zero", "spec: {list: [{name: \"a\x00b\"}]}", "control characters are not allowed"},
		{"another control character", "spec: {list: [{name: \"a\x1bb\"}]}", "control characters are not allowed"},
		{"half a character", "spec: {list: [{name: \"\xff\xfe\"}]}", "UTF-8"},
		{"a surrogate", "spec: {list: [{name: \"\xed\xa0\x80\"}]}", "invalid Unicode character"},
		{"a tag of Go", "spec: !!python/object/apply:os.system [\"true\"]", "spec: must be an object, is a list"},
		{"binary", "spec: {list: [{name: !!binary AAAA}]}", "spec.list[0].name: must be a string"},
		{"a directive of another version", "%YAML 9.9\n---\na: b", "incompatible YAML document"},
		{"many directives", fill("%TAG !a! b\n", 3_000_000), "duplicate %TAG directive"},
	} {
		peak := peakHeap(func() {
			_, _, err := decode(t, tc.text)
			if err == nil {
				t.Errorf("%s: accepted", tc.name)
				return
			}
			found := false
			for _, want := range strings.Split(tc.want, "|") {
				found = found || strings.Contains(err.Error(), want)
			}
			if !found {
				t.Errorf("%s: %.300v\nwant %s", tc.name, err, tc.want)
			}
			if n := len(err.Error()); n > 50*800 {
				t.Errorf("%s: a message of %d bytes", tc.name, n)
			}
		})
		if peak > limit {
			t.Errorf("%s: took %d MB", tc.name, peak>>20)
		}
	}
}

// TestTheLargestManifestsFitIntoBoundedMemory: the largest manifests that are allowed stay within the same memory
// limit.
func TestTheLargestManifestsFitIntoBoundedMemory(t *testing.T) {
	for name, text := range map[string]string{
		"comments":         fill("#\n", MaxBytes-10) + "a: b",
		"one long comment": "a: b # " + fill("x", MaxBytes-10),
		"escapes":          `a: "` + fill(`\x41`, MaxBytes-10) + `"`,
		"folded lines":     "a: \"" + fill("x\n", MaxBytes-10) + "\"",
		"blank lines":      "a: >\n" + fill(" \n", MaxBytes-10),
		"plain lines":      "a: x" + fill("\n x", MaxBytes-10),
		"keys":             "x:\n" + lines(50_000, " k%d: v\n"),
		"a flow of keys":   "x: {" + lines(90_000, "k%d,") + "}",
		"tags":             "x: [" + fill("!x y,", 5*90_000) + "]",
	} {
		if peak := peakHeap(func() {
			if _, _, err := decode(t, text); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}); peak > 96<<20 {
			t.Errorf("%s: took %d MB", name, peak>>20)
		}
	}
}

func fill(s string, size int) string { return strings.Repeat(s, size/len(s)) }

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

func TestSchemaOnly(t *testing.T) {
	var ps Problems
	if ps.SchemaOnly() || ps.Err() != nil {
		t.Error("an empty list counts as problems of the schema")
	}
	ps.AddSchema("a", "x")
	if !ps.SchemaOnly() {
		t.Error("a problem outside of the schema counts as a problem of the schema")
	}
	ps.Add("b", "y")
	if ps.SchemaOnly() || ps.Err() == nil || ps.Error() != "a: x; b: y" {
		t.Errorf("%v", ps)
	}
}

// FuzzDecode searches for input that crashes the decoder, takes long, or causes an unbounded message.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{
		"kind: K\nspec: {list: [{name: a, limit: 3}], labels: {x: z}, flag: true, port: http, extra: [1, {a: b}]}",
		"spec: &s {extra: *s}", "? a\n: b\n---\n'x': !!int \"3\"\n...\n%YAML 1.1\n---\n- x", "{\"spec\":{\"port\":80.0}}", "spec: {<<: {flag: true}}",
		"spec: {list: [{limit: 0x1F}, {limit: 0o17}, {limit: 1_000}, {limit: ~}]}", "\xff\xfea\x00:\x00b\x00", bomb(),
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		docs, err := Parse(data)
		for i, d := range docs {
			var o object
			unknown, derr := d.Decode(&o)
			if len(unknown) > 20 {
				t.Fatalf("document %d: %d unknown fields", i, len(unknown))
			}
			if err == nil {
				err = derr
			}
		}
		if err != nil && (err.Error() == "" || len(err.Error()) > maxProblems*(maxPath+maxMessage+100)) {
			t.Fatalf("a message of %d bytes", len(err.Error()))
		}
	})
}

// TestWordsAreReadAsKubectlReadsThem: words are parsed as YAML 1.1, as in kubectl. If a word means true, false or a
// number in YAML 1.1, it is not text; a date is text.
func TestWordsAreReadAsKubectlReadsThem(t *testing.T) {
	const (
		quote = ", as kubectl and YAML 1.1 read it: put it into quotes to have it as text"
		isKey = "is a key that kubectl and YAML 1.1 read as "
	)
	for in, want := range map[string]string{
		"labels: {x: yes}":        "spec.labels.x: must be a string, is the truth value yes" + quote,
		"labels: {x: OFF}":        "spec.labels.x: must be a string, is the truth value OFF" + quote,
		"labels: {x: n}":          "spec.labels.x: must be a string, is the truth value n" + quote,
		"labels: {x: oN}":         "",
		"labels: {x: 'yes'}":      "",
		"labels: {x: \"no\"}":     "",
		"labels: {x: !!str no}":   "",
		"labels: {x: 2024-01-01}": "",
		"labels: {x: 0o17}":       "spec.labels.x: must be a string, is the number 0o17",
		"port: on": "spec.port: must be a whole number or a string, " +
			"is the truth value on" + quote,
		"flag: yes":                "",
		"flag: Off":                "",
		"flag: 'yes'":              `spec.flag: must be true or false, is the string "yes"`,
		"labels: {on: x}":          "spec.labels.on: " + isKey + `"true": put it into quotes`,
		"labels: {'on': x}":        "",
		"labels: {True: x}":        "spec.labels.True: " + isKey + `"true": put it into quotes`,
		"labels: {true: x, 12: x}": "",
		"labels: {010: x}":         "spec.labels.010: " + isKey + `"8": put it into quotes`,
		"labels: {~: x}":           "spec.labels.~: " + isKey + `"null": put it into quotes`,
		"labels: {x: y, x: y}": "spec.labels.x: must be a string, is the truth value y" + quote +
			"; spec.labels.x: is given twice",
		"labels: {<<: {x: z}}": "spec.labels: uses a merge key (<<), which is not supported: " +
			"write the keys of the merged object instead",
		"labels: {x: z}, extra: {on: 1, y: 2}": "",
	} {
		_, _, err := decode(t, "kind: K\nspec: {"+in+"}\n")
		if got := fmt.Sprint(err); want == "" && err != nil || want != "" && got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
		docs, err := Parse([]byte("kind: K\nspec: {" + in + "}\n"))
		if err != nil {
			t.Fatal(err)
		}
		var o object
		if _, err := docs[0].PlainWords().Decode(&o); err != nil && strings.Contains(err.Error(), "YAML 1.1") {
			t.Errorf("%s, with plain words: %v", in, err)
		}
	}
}

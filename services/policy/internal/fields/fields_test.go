// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fields

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// bases maps the name of a Go struct to YAML: the fields that an object of the struct needs in addition to the tested
// field.
var bases = map[string]string{
	"networkpolicy.NetworkPolicySpec": "podSelector: {}",
	"cilium.Rule":                     "endpointSelector: {}",
	"cilium.CIDRGroupSpec":            "externalCIDRs: []",
	"adminpolicy.Spec":                "tier: Admin, priority: 1, subject: {namespaces: {}}",
	"adminpolicy.IngressRule":         "action: Accept, from: [{namespaces: {}}]",
	"adminpolicy.EgressRule":          "action: Accept, to: [{namespaces: {}}]",
	"adminpolicy.OldSpec":             "subject: {namespaces: {}}",
	"adminpolicy.OldIngressRule":      "action: Allow, from: [{namespaces: {}}]",
	"adminpolicy.OldEgressRule":       "action: Allow, to: [{namespaces: {}}]",
}

func value(t *testing.T, text string) any {
	t.Helper()
	var v any
	if err := yaml.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return v
}

// nameOf returns a valid name for an object of the kind.
func nameOf(kind string) string {
	if strings.HasPrefix(kind, "Baseline") {
		return "default"
	}
	return "p"
}

// absent is the value of a field that is left out.
type absent struct{}

// manifestWith returns a policy with the given value of a field, and with the required fields around it.
func manifestWith(t *testing.T, f *Field, v any) string {
	t.Helper()
	outer := ""
	for ; ; f = f.around {
		object := map[string]any{}
		add := func(text string) {
			if text != "" {
				maps.Copy(object, value(t, "{"+text+"}").(map[string]any))
			}
		}
		owner := f.field.Owners[0].String()
		add(bases[owner])
		if owner == "adminpolicy.OldSpec" && f.Kind == "AdminNetworkPolicy" {
			add("priority: 1")
		}
		if f.around == nil {
			add(fmt.Sprintf("apiVersion: %s, kind: %s, metadata: {name: %s}",
				policy.Versions(f.Kind)[0], f.Kind, nameOf(f.Kind)))
			top := find(f.Kind, "spec", manifest.Field{Name: "spec", Owners: f.field.Owners[:1]})
			add("spec: " + top.example)
			if f.Path == "specs" {
				delete(object, "spec")
			}
		}
		if owner == "networkpolicy.ObjectMeta" {
			add("name: " + nameOf(f.Kind))
		}
		add(cmp.Or(outer, f.row.beside))
		outer = f.row.outer
		name := f.field.Name
		if _, gone := v.(absent); gone {
			delete(object, name)
			add(f.row.instead)
		} else {
			object[name] = v
			if name == "nodeSelector" { // a rule may have only one of the two
				delete(object, "endpointSelector")
			}
		}
		if f.around == nil {
			text, err := yaml.Marshal(object)
			if err != nil {
				t.Fatal(err)
			}
			return string(text)
		}
		v = any(object)
		if strings.HasPrefix(f.around.Type, "list of ") {
			v = []any{v}
		}
	}
}

func (f *Field) example(t *testing.T) any {
	t.Helper()
	names := strings.NewReplacer("VERSION", policy.Versions(f.Kind)[0], "KIND", f.Kind, "NAME", nameOf(f.Kind))
	return value(t, names.Replace(f.row.example))
}

// at returns the path of the field in the manifests of manifestWith.
func (f *Field) at() string {
	var names []string
	for g := f; g != nil; g = g.around {
		name := g.field.Name
		if g != f && strings.HasPrefix(g.Type, "list of ") {
			name += "[0]"
		}
		names = append(names, name)
	}
	slices.Reverse(names)
	// Problems with fields in the form of API version 0.1.0 name the path of the current form.
	return strings.NewReplacer(".pods.namespaces.namespaceSelector", ".pods.namespaceSelector",
		".pods.namespaces", ".pods.namespaceSelector", ".namespaces.namespaceSelector", ".namespaces").
		Replace(strings.Join(names, "."))
}

// outcome is the result of decoding a manifest.
type outcome struct {
	object   policy.Object
	problems []string // paths
	err      error
}

func outcomeOf(text string, o rule.Options) outcome {
	decoded, err := decode.Options{Rules: o}.Decode([]byte(text))
	var bad *decode.Error
	switch {
	case errors.As(err, &bad) && bad.Whole == nil:
		out := outcome{err: err}
		for _, v := range bad.Violations {
			out.problems = append(out.problems, v.Path)
		}
		return out
	case err != nil:
		return outcome{err: err, problems: []string{""}}
	}
	return outcome{object: *decoded[0].Object}
}

// meaning returns everything in an object that affects verdicts.
func (o outcome) meaning() string {
	if o.err != nil {
		return "refused"
	}
	var b strings.Builder
	fmt.Fprintln(&b, o.object.Key)
	for _, s := range o.object.Specs {
		fmt.Fprintln(&b, "spec", s.Subject, s.Namespace, s.Host, s.Selects, s.DefaultDeny)
		for _, r := range s.Rules {
			fmt.Fprintln(&b, r.Tier, r.Priority, r.Index, r.Content())
		}
	}
	if g := o.object.Group; g != nil {
		fmt.Fprintln(&b, "group", g.Name, g.Labels, g.Prefixes)
	}
	return b.String()
}

// concerns reports whether the outcome has a problem at the path, below it or above it.
func (o outcome) concerns(path string) bool {
	return slices.ContainsFunc(o.problems, func(p string) bool {
		return manifest.Within(p, path) || manifest.Within(path, p)
	})
}

func (o outcome) unsupported() map[string]string {
	out := map[string]string{}
	for _, n := range o.object.Notes {
		if n.Kind == manifest.NoteUnsupported {
			out[n.Path] = n.Text
		}
	}
	return out
}

func TestEveryFieldOfTheDecoderHasARow(t *testing.T) {
	used := map[string]bool{}
	for _, f := range All() {
		if f.About == "" || f.row.example == "" {
			t.Errorf("%s.%s, a field of %s, has no row with a text and an example: add one to rows",
				f.Kind, f.Path, f.field.Owners[0])
		}
		for _, owner := range f.field.Owners {
			for _, context := range append(strings.Split(f.Path, "."), f.Kind, "") {
				key := keyOf(owner, f.field.Name, context)
				if r := rows[key]; r.about != "" && r.about == f.About && r.support == f.row.support {
					used[key] = true
				}
			}
		}
	}
	for key := range rows {
		if !used[key] {
			t.Errorf("the row %q belongs to no field", key)
		}
	}
	if n := len(All()); n < 600 {
		t.Errorf("there are %d fields, fewer than 600", n)
	}
}

// typed records the type that Decode fills.
type typed struct {
	version, kind string
	into          reflect.Type
}

func (f *typed) Type() (string, string) { return f.version, f.kind }
func (f *typed) Decode(into any) ([]string, error) {
	f.into = reflect.TypeOf(into).Elem()
	return nil, manifest.Problems{{Text: "enough"}}
}

func TestFieldsAreThoseOfTheStructsThatAreDecoded(t *testing.T) {
	for _, kind := range policy.Kinds() {
		f := typed{version: policy.Versions(kind)[0], kind: kind}
		if _, err := policy.Decode(&f, rule.Options{}); err == nil || f.into != policy.Struct(kind) {
			t.Errorf("%s is decoded into %v, but its fields come from %v (%v)", kind, f.into, policy.Struct(kind), err)
		}
	}
	if policy.Struct("Pod") != nil || Of("Pod") != nil {
		t.Error("Pod has fields")
	}
}

// TestEachFieldDoesWhatItsRowSays decodes a manifest for each field of each kind, and compares the result with the
// field's row.
func TestEachFieldDoesWhatItsRowSays(t *testing.T) {
	counts := map[Support]int{}
	for _, f := range All() {
		counts[f.Support]++
		t.Run(f.Kind+"."+f.Path, func(t *testing.T) {
			options := rule.Options{HTTPProxy: true, Cluster: "default"}
			text := manifestWith(t, &f, f.example(t))
			if f.Setting != "" {
				if without := outcomeOf(text, options); !without.concerns(f.at()) {
					t.Errorf("without %s: problems at %q (%v)\n%s", f.Setting, without.problems, without.err, text)
				}
				options.NodeLabels = true
			}
			got := outcomeOf(text, options)
			if f.Support != Refused && got.err != nil {
				t.Fatalf("refused: %v\n%s", got.err, text)
			}
			switch f.Support {
			case Enforced:
				checkEnforced(t, &f, got, text, options)
			case Converted:
				checkConverted(t, &f, got, text)
			case Refused:
				if !got.concerns(f.at()) {
					t.Errorf("problems at %q (%v), want one at %s\n%s", got.problems, got.err, f.at(), text)
				}
				whole := cmp.Or(f.of, &f)
				if control := outcomeOf(manifestWith(t, whole, absent{}), options); control.err != nil {
					t.Errorf("without it: %v", control.err)
				}
			case NoEffect:
				without := outcomeOf(manifestWith(t, cmp.Or(f.of, &f), absent{}), options)
				if without.err != nil || got.meaning() != without.meaning() {
					t.Errorf("with it:\n%s\nwithout it (%v):\n%s", got.meaning(), without.err, without.meaning())
				}
			}
			if f.Required {
				without := outcomeOf(manifestWith(t, &f, absent{}), options)
				if !without.concerns(f.at()) && (f.Path != "apiVersion" || without.err == nil) {
					t.Errorf("required, and without it there are problems at %q (%v)", without.problems, without.err)
				}
			}
			checkValues(t, &f, options)
		})
	}
	for _, s := range []Support{Enforced, Converted, Refused, NoEffect} {
		if counts[s] < 20 {
			t.Errorf("%d fields are %s", counts[s], s)
		}
	}
}

// checkEnforced checks that another value of the field gives another policy, and that no note reports the field as
// unsupported.
func checkEnforced(t *testing.T, f *Field, got outcome, text string, options rule.Options) {
	t.Helper()
	if notes := got.unsupported(); len(notes) > 0 {
		t.Errorf("noted %v\n%s", notes, text)
	}
	var other any = absent{}
	if f.row.other != "" {
		other = value(t, f.row.other)
	}
	elsewhere := manifestWith(t, f, other)
	o := outcomeOf(elsewhere, options)
	top := slices.Contains([]string{"apiVersion", "kind", "metadata"}, f.Path) || f.Path == "metadata.name" && len(f.Values) > 0
	if o.err != nil && !top && f.row.other != "" {
		t.Errorf("the other value is refused: %v\n%s", o.err, elsewhere)
	}
	if o.meaning() == got.meaning() {
		t.Errorf("the same policy as with %v:\n%s\n%s", other, text, got.meaning())
	}
}

// checkConverted checks that a note names the field, and that the part with the field allows less or denies more.
func checkConverted(t *testing.T, f *Field, got outcome, text string) {
	t.Helper()
	whole := cmp.Or(f.of, f)
	becomes, _, _ := strings.Cut(strings.ReplaceAll(whole.row.becomes, ";", ","), ",")
	note, path := "", ""
	for p, n := range got.unsupported() { // further notes can say why the value could not be used
		if manifest.Within(p, whole.at()) && !strings.Contains(note, becomes) {
			note, path = n, p
		}
	}
	if note == "" || !strings.Contains(note, becomes) {
		t.Errorf("noted %v, want one at %s with %q\n%s", got.unsupported(), whole.at(), becomes, text)
	}
	at, _, _ := strings.Cut(path, ".toPorts") // the rule
	if i := strings.LastIndexByte(at, '.'); at == path && i >= 0 {
		at = at[:i]
	}
	found := 0
	for _, s := range got.object.Specs {
		for _, r := range s.Rules {
			within := manifest.Within(r.Source.Path, at) || manifest.Within(at, r.Source.Path)
			if !within {
				continue
			}
			found++
			switch {
			case r.Action == policytable.Deny && r.Peers.Any && strings.HasPrefix(whole.row.becomes, deniesAll):
			case r.Action == policytable.Redirect &&
				slices.Contains([]string{dropped, refused, httpNothing}, whole.row.becomes):
			default:
				t.Errorf("becomes a rule: %s\n%s", r.Content(), text)
			}
		}
	}
	if nothing := strings.HasPrefix(whole.row.becomes, allowsNothing); nothing != (found == 0) {
		t.Errorf("becomes %d rules\n%s", found, text)
	}
}

// checkValues checks that exactly the listed values are accepted.
func checkValues(t *testing.T, f *Field, options rule.Options) {
	t.Helper()
	if len(f.Values) == 0 {
		return
	}
	for _, v := range append([]string{"bogus"}, f.Values...) {
		value, path := any(v), f.at()
		if strings.HasPrefix(f.Type, "list of ") {
			value, path = []any{v}, path+"[0]"
		}
		got := outcomeOf(manifestWith(t, f, value), options)
		if bad := slices.Contains(got.problems, path); bad != (v == "bogus") {
			t.Errorf("%q: problems at %q (%v)", v, got.problems, got.err)
		}
	}
}

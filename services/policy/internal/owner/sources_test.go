// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/source"
)

// fromFiles starts an owner whose subscribers wait for the files of a directory.
func fromFiles(t *testing.T, dir string, change ...func(*Config)) (*Owner, func()) {
	t.Helper()
	change = append(change, func(c *Config) { c.Directory = "/etc/policies" })
	return runWith(t, dir, []string{source.Identity, managed.SourceFile}, change...)
}

// isolatingText returns a policy that isolates the pods of an app.
func isolatingText(app string) string {
	return fmt.Sprintf("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: %s, namespace: shop}\n"+
		"spec: {podSelector: {matchLabels: {app: %s}}, policyTypes: [Ingress]}\n", app, app)
}

// waiting returns the reasons for which subscribers wait, from GetStatus.
func waiting(t *testing.T, o *Owner) string {
	t.Helper()
	st, err := o.Reader().Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(st.WaitsFor, "\n")
}

// TestSubscribersWaitUntilEachFileWasReadOnce: a policy in an unread file may deny traffic, so subscribers get no
// tables before each file was read once. Later runs do not wait, because the state contains the enforced policies.
func TestSubscribersWaitUntilEachFileWasReadOnce(t *testing.T) {
	text := func(s string) []directory.File { return []directory.File{{Origin: "a.yaml", Data: []byte(s)}} }
	for what, c := range map[string]struct {
		files []directory.File
		fails error
		want  string // part of the reason; empty: subscribers do not wait
		part  string
	}{
		"no file":                {},
		"good":                   {files: text(isolatingText("web"))},
		"another kind":           {files: text("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n")},
		"a document that is bad": {files: text(strings.Replace(isolatingText("web"), "[Ingress]", "[Ingres]", 1))},
		"no YAML": {
			files: text(isolatingText("web") + "---\n{"), part: "a.yaml",
			want: "the file a.yaml was never read: document 2 (line 6): yaml: line 6: ",
		},
		"no object": {
			files: text("- a\n"), part: "a.yaml",
			want: "document 1 (line 1): is not an object but a list",
		},
		"no namespace": {
			files: text(strings.Replace(isolatingText("web"), "shop", "5", 1)), part: "a.yaml",
			want: "metadata.namespace: must be a string",
		},
		"a file without read permission": {
			files: []directory.File{{Origin: "a.yaml", Err: errors.New("permission denied")}}, part: "a.yaml",
			want: "the file a.yaml was never read: permission denied",
		},
		"a file being written": {
			files: []directory.File{{Origin: "a.yaml", Keep: true}}, part: "a.yaml",
			want: "the file a.yaml was never read: is being written",
		},
		"no directory": {
			fails: errors.New("no such directory"), part: "/etc/policies",
			want: "the file /etc/policies was never read: no such directory",
		},
	} {
		t.Run(what, func(t *testing.T) {
			dir := t.TempDir()
			o, stop := fromFiles(t, dir)
			if !waits(t, o) || !strings.Contains(waiting(t, o), "/etc/policies was never read: is not read yet") {
				t.Errorf("before the first listing, subscribers do not wait: %s", waiting(t, o))
			}
			listing := func(o *Owner) {
				t.Helper()
				err := o.Feed(managed.SourceFile).Failed(t.Context(), c.fails)
				if c.fails == nil {
					err = errors.Join(err, o.Feed(managed.SourceFile).Set(t.Context(), c.files))
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			listing(o)
			if waits(t, o) != (c.want != "") || !strings.Contains(waiting(t, o), c.want) {
				t.Errorf("waits %t: %s; want %q", waits(t, o), waiting(t, o), c.want)
			}
			stop()
			o, stop = fromFiles(t, dir)
			if waits(t, o) != (c.want != "") {
				t.Errorf("after a restart a subscriber waits: %t", waits(t, o))
			}
			if c.want != "" {
				listing(o)
				_, err := o.AcceptWithout(t.Context(), "other.yaml", false)
				if !errors.Is(err, ErrNotMissing) || !strings.Contains(err.Error(), c.part) {
					t.Errorf("another file is accepted as missing: %v", err)
				}
				if _, err := o.AcceptWithout(t.Context(), c.part, true); err != nil || !waits(t, o) {
					t.Errorf("validate only: %v, waits %t", err, waits(t, o))
				}
				got, err := o.AcceptWithout(t.Context(), filepath.Join("/etc/policies", c.part), false)
				if c.part == "/etc/policies" {
					got, err = o.AcceptWithout(t.Context(), c.part, false)
				}
				if err != nil || got.File != c.part || len(got.Waiting) > 0 || waits(t, o) {
					t.Errorf("accepted: %+v, %v, waits %t", got, err, waits(t, o))
				}
				if _, err := o.AcceptWithout(t.Context(), c.part, false); !errors.Is(err, ErrNotMissing) {
					t.Errorf("accepted again: %v", err)
				}
				stop()
				if o, stop = fromFiles(t, dir); waits(t, o) {
					t.Error("after a restart a subscriber waits for an accepted file")
				}
			}
			stop()
		})
	}
}

// TestFileThatCannotBeReadAnyMoreStays: if a file cannot be read any more, its last text stays enforced, and
// subscribers do not wait for it.
func TestFileThatCannotBeReadAnyMoreStays(t *testing.T) {
	dir := t.TempDir()
	o, stop := fromFiles(t, dir)
	pods(t, o, "shop")
	set := func(feed *Feed, text string) {
		t.Helper()
		if err := feed.Set(t.Context(), []directory.File{{Origin: "a.yaml", Data: []byte(text)}}); err != nil {
			t.Fatal(err)
		}
	}
	feed := o.Feed(managed.SourceFile)
	set(feed, isolatingText("db"))
	for range 2 {
		set(feed, strings.Replace(isolatingText("db"), "shop", "5", 1))
		st, err := o.Reader().Status(t.Context())
		if err != nil || waits(t, o) || passes(t, o, 300, 301) || len(st.Problems) != 1 ||
			!strings.Contains(st.Problems[0].Text, "file a.yaml is refused: document 1 (line 1): ") {
			t.Errorf("waits %t, web to db %t, %q, %v", waits(t, o), passes(t, o, 300, 301), st.Problems, err)
		}
		stop()
		o, stop = fromFiles(t, dir)
		feed = o.Feed(managed.SourceFile)
	}
	set(feed, "# nothing\n")
	if !passes(t, o, 300, 301) {
		t.Error("the policy was removed from the file, but is still enforced")
	}
	stop()
}

// TestAnotherDirectoryIsReadFirst: when another directory is configured, the state contains only the policies of the
// former directory. Subscribers wait until the new directory was read, because its policies may deny more.
func TestAnotherDirectoryIsReadFirst(t *testing.T) {
	dir := t.TempDir()
	in := func(directory string) (*Owner, func()) {
		return runWith(t, dir, []string{source.Identity, managed.SourceFile}, func(c *Config) { c.Directory = directory })
	}
	o, stop := in("/etc/policies")
	if err := o.Feed(managed.SourceFile).Set(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	stop()
	if o, stop = in("/etc/policies/"); waits(t, o) {
		t.Errorf("a subscriber waits for the same directory: %s", waiting(t, o))
	}
	stop()
	o, stop = in("/srv/policies")
	if !waits(t, o) || !strings.Contains(waiting(t, o), "/srv/policies was never read") {
		t.Errorf("a subscriber passes before another directory was read: %q", waiting(t, o))
	}
	if err := o.Feed(managed.SourceFile).Set(t.Context(), nil); err != nil || waits(t, o) {
		t.Errorf("a subscriber waits for a directory that was read: %v, %s", err, waiting(t, o))
	}
	stop()
}

// groupText returns a group of addresses.
func groupText(cidr string) string {
	return fmt.Sprintf("apiVersion: cilium.io/v2\nkind: CiliumCIDRGroup\nmetadata: {name: bad}\n"+
		"spec: {externalCIDRs: [%s]}\n", cidr)
}

// TestSecondGroupOfANameIsWaitedFor: two documents define the same CIDR group, to which rules may deny traffic. A
// group selects no pods that could be isolated instead. So the source does not complete.
func TestSecondGroupOfANameIsWaitedFor(t *testing.T) {
	one, two := groupText("192.0.2.0/24"), groupText("198.51.100.0/24")
	file := func(origin, text string) directory.File { return directory.File{Origin: origin, Data: []byte(text)} }
	for what, c := range map[string]struct {
		files, repaired []directory.File
		want            string
	}{
		"of one file": {
			[]directory.File{file("a.yaml", one+"---\n"+two)},
			[]directory.File{file("a.yaml", two)},
			"a.yaml was never read: document 2 (line 6): CiliumCIDRGroup bad is in document 1 already",
		},
		"of two files": {
			[]directory.File{file("a.yaml", one), file("b.yaml", two+"---\n"+isolatingText("db"))},
			[]directory.File{file("b.yaml", two+"---\n"+isolatingText("db"))},
			"b.yaml was never read: document 1 (line 1): CiliumCIDRGroup bad is in a.yaml already",
		},
		"the same text": {[]directory.File{file("a.yaml", one+"---\n"+one)}, []directory.File{file("a.yaml", one)}, ""},
	} {
		t.Run(what, func(t *testing.T) {
			o, stop := fromFiles(t, t.TempDir())
			pods(t, o, "shop")
			feed := o.Feed(managed.SourceFile)
			for range 2 {
				if err := feed.Set(t.Context(), c.files); err != nil {
					t.Fatal(err)
				}
				if waits(t, o) != (c.want != "") || !strings.Contains(waiting(t, o), c.want) {
					t.Errorf("waits %t: %q; want %q", waits(t, o), waiting(t, o), c.want)
				}
			}
			if len(c.files) > 1 && passes(t, o, 300, 301) {
				t.Error("the other documents of the file are not enforced")
			}
			if err := feed.Set(t.Context(), c.repaired); err != nil || waits(t, o) {
				t.Errorf("repaired: %v, %s", err, waiting(t, o))
			}
			stop()
		})
	}
}

// TestStateOfAnEarlierVersionIsComplete: an earlier version did not record which files it had read, but its state has
// all policies. The source counts as complete.
func TestStateOfAnEarlierVersionIsComplete(t *testing.T) {
	dir := t.TempDir()
	o, stop := fromFiles(t, dir)
	files := []directory.File{{Origin: "a.yaml", Data: []byte(isolatingText("db"))}}
	if err := o.Feed(managed.SourceFile).Set(t.Context(), files); err != nil {
		t.Fatal(err)
	}
	stop()
	mark := filepath.Join(dir, "file.listed")
	text, err := os.ReadFile(mark)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(mark); err != nil {
		t.Fatal(err)
	}
	if o, stop = fromFiles(t, dir); waits(t, o) {
		t.Error("a subscriber waits although the state has the policies of the files")
	}
	stop()
	state, directory, _ := strings.Cut(string(text), " ")
	if err := os.WriteFile(mark, []byte(state), 0o600); err != nil || directory != "/etc/policies" {
		t.Fatalf("the mark is %q: %v", text, err)
	}
	if o, stop = fromFiles(t, dir); waits(t, o) {
		t.Error("a subscriber waits although the mark, which names no directory, is of this state")
	}
	stop()
	// With this content, the mark means that the state may lack policies.
	if err := os.WriteFile(mark, []byte("incomplete"), 0o600); err != nil {
		t.Fatal(err)
	}
	if o, stop = fromFiles(t, dir); !waits(t, o) {
		t.Error("a subscriber passes although the state may lack policies")
	}
	stop()
}

// TestSubscribersWaitForManagersThatAreConfigured: subscribers wait until each configured manager has completed once.
func TestSubscribersWaitForManagersThatAreConfigured(t *testing.T) {
	dir := t.TempDir()
	start := func() (*Owner, func()) {
		return runWith(t, dir, []string{source.Identity}, func(c *Config) { c.Managers = []string{"argo"} })
	}
	o, stop := start()
	if _, err := o.Complete(t.Context(), managed.Caller{Manager: "other"}, o.Incarnation()); err != nil {
		t.Fatal(err)
	}
	if !waits(t, o) || !strings.Contains(waiting(t, o), `the manager "argo" has not completed`) {
		t.Errorf("a subscriber passes: %s", waiting(t, o))
	}
	if _, err := o.Complete(t.Context(), managed.Caller{Manager: "argo"}, o.Incarnation()); err != nil || waits(t, o) {
		t.Errorf("a subscriber waits after the manager has completed: %v", err)
	}
	stop()
	if o, stop = start(); waits(t, o) {
		t.Error("a subscriber waits after a restart")
	}
	stop()
}

// TestDocumentThatCannotBeAppliedIsolates: such a document isolates the pods that it selects, or its namespace, even
// after a restart, until it can be applied.
func TestDocumentThatCannotBeAppliedIsolates(t *testing.T) {
	good := isolatingText("db")
	for what, c := range map[string]struct {
		text             string
		webToDB, dbToWeb bool
	}{
		"an unknown field": {strings.Replace(good, "policyTypes", "types: [x], policyTypes", 1), false, true},
		"an invalid value": {
			strings.Replace(good, "[Ingress]", "[Ingress], ingress: [{ports: [{port: 70000}]}]", 1), false, true,
		},
		"an invalid direction":    {strings.Replace(good, "[Ingress]", "[Ingres]", 1), false, false},
		"an invalid selector":     {strings.Replace(good, "app: db", "app: 5", 1), false, false},
		"a key twice":             {good + "spec: {podSelector: {}}\n", false, false},
		"no name":                 {strings.Replace(good, "name: db, ", "", 1), false, false},
		"an outdated version":     {strings.Replace(good, "networking.k8s.io/v1", "extensions/v1beta1", 1), false, false},
		"no version":              {strings.Replace(good, "apiVersion: networking.k8s.io/v1\n", "", 1), false, false},
		"a kind that is misspelt": {strings.Replace(good, "kind: NetworkPolicy", "kind: NetworkPolcy", 1), false, false},
		"a plural": {
			strings.Replace(good, "kind: NetworkPolicy", "kind: NetworkPolicies", 1), false, false,
		},
		"a kind that is a number": {strings.Replace(good, "kind: NetworkPolicy", "kind: 5", 1), false, false},
		"a name twice": {
			strings.Replace(good, "app: db", "app: none", 1) + "---\n" + good, false, true,
		},
		"another namespace": {
			strings.Replace(strings.Replace(good, "shop", "other", 1), "[Ingress]", "[Ingres]", 1), true, true,
		},
		"an API group that is misspelt": {
			strings.Replace(good, "networking.k8s.io", "networking.k8.io", 1), false, false,
		},
		"a policy of another project": {
			strings.Replace(good, "networking.k8s.io/v1", "projectcalico.org/v3", 1), true, true,
		},
		"another kind": {
			"apiVersion: cilium.io/v2\nkind: CiliumEgressGatewayPolicy\nmetadata: {name: g, namespace: shop}\n---\n" +
				strings.Replace(good, "[Ingress]", "[Ingress]", 1), false, true,
		},
		"values of a chart": {"policies: {enabled: true}\n", true, true},
	} {
		t.Run(what, func(t *testing.T) {
			dir := t.TempDir()
			o, stop := fromFiles(t, dir)
			pods(t, o, "shop")
			set := func(text string) {
				t.Helper()
				listing := []directory.File{{Origin: "a.yaml", Data: []byte(text)}}
				if err := o.Feed(managed.SourceFile).Set(t.Context(), listing); err != nil {
					t.Fatal(err)
				}
			}
			check := func(when string, webToDB, dbToWeb bool) {
				t.Helper()
				if a, b := passes(t, o, 300, 301), passes(t, o, 301, 300); a != webToDB || b != dbToWeb {
					t.Errorf("%s: web to db %t, db to web %t; want %t, %t", when, a, b, webToDB, dbToWeb)
				}
			}
			set(c.text)
			if waits(t, o) {
				t.Errorf("a subscriber waits: %s", waiting(t, o))
			}
			check("at first", c.webToDB, c.dbToWeb)
			list, _, err := o.Reader().List(t.Context(), Filter{})
			if err != nil {
				t.Fatal(err)
			}
			for _, l := range list {
				if !l.Accepted && !strings.Contains(l.Error, "a.yaml: document ") {
					t.Errorf("%s does not have its position in the message: %s", l.Key, l.Error)
				}
			}
			stop()
			o, stop = fromFiles(t, dir)
			check("after a restart", c.webToDB, c.dbToWeb)
			set(c.text)
			check("after a restart, read again", c.webToDB, c.dbToWeb)
			set("# nothing\n")
			check("removed", true, true)
			stop()
		})
	}
}

// TestPolicyOfTwoFilesIsolatesWhatTheSecondSelects: two files define the same policy. The document in the second file
// isolates the pods that it selects, and the message names both files.
func TestPolicyOfTwoFilesIsolatesWhatTheSecondSelects(t *testing.T) {
	o, stop := fromFiles(t, t.TempDir())
	pods(t, o, "shop")
	feed := o.Feed(managed.SourceFile)
	open := strings.Replace(isolatingText("db"), "policyTypes: [Ingress]", "ingress: [{}]", 1)
	set := func(second string) {
		t.Helper()
		files := []directory.File{{Origin: "a.yaml", Data: []byte(open)}, {Origin: "b.yaml", Data: []byte(second)}}
		if err := feed.Set(t.Context(), files); err != nil {
			t.Fatal(err)
		}
	}
	set(isolatingText("db"))
	list, _, err := o.Reader().List(t.Context(), Filter{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, l := range list {
		got = append(got, l.Origin+" "+l.Key.String()+" "+l.Error)
	}
	want := []string{
		"a.yaml NetworkPolicy shop/db ",
		"b.yaml NetworkPolicy shop/db NetworkPolicy shop/db is in a.yaml already (b.yaml: document 1 (line 1))",
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	set("# none\n")
	db := policy.Key{Kind: "NetworkPolicy", Namespace: "shop", Name: "db"}
	if list, _, err := o.Reader().List(t.Context(), Filter{}); err != nil || len(list) != 1 || list[0].Key != db {
		t.Errorf("%d policies, %v", len(list), err)
	}
	stop()
}

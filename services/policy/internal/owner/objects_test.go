// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/summary"
)

// deltas is a feed of objects under test.
type deltas struct {
	*Objects
	t *testing.T
}

func network(name string) policy.Key {
	return policy.Key{Kind: "NetworkPolicy", Namespace: "shop", Name: name}
}

// object returns the text of an object with a key.
func object(version string, k policy.Key, rest string) policy.Written {
	const head = `{"apiVersion":%q,"kind":%q,"metadata":{"name":%q,"namespace":%q},%s}`
	text := fmt.Appendf(nil, head, version, k.Kind, k.Name, k.Namespace, rest)
	return policy.Written{Key: k, APIVersion: version, Text: text}
}

// isolating returns a policy that denies all ingress to the pods with app=NAME.
func isolating(name string) policy.Written {
	spec := fmt.Sprintf(`"spec":{"podSelector":{"matchLabels":{"app":%q}}}`, name)
	return object("networking.k8s.io/v1", network(name), spec)
}

func (d deltas) apply(upserts map[policy.Key]policy.Written, deletes ...policy.Key) {
	d.t.Helper()
	c := watch.Changes[policy.Key, policy.Written]{Upserts: upserts, Deletes: make(map[policy.Key]struct{})}
	for _, k := range deletes {
		c.Deletes[k] = struct{}{}
	}
	if err := d.Apply(d.t.Context(), c); err != nil {
		d.t.Fatal(err)
	}
}

func (d deltas) complete(keys ...policy.Key) {
	d.t.Helper()
	listed := make(map[policy.Key]struct{})
	for _, k := range keys {
		listed[k] = struct{}{}
	}
	if err := d.Complete(d.t.Context(), listed); err != nil {
		d.t.Fatal(err)
	}
}

// want compares the policies, as "SOURCE KIND NAMESPACE/NAME", with ": ERROR" for refused ones.
func (d deltas) want(what string, want ...string) {
	d.t.Helper()
	list, _, err := d.owner.Reader().List(d.t.Context(), Filter{})
	if err != nil {
		d.t.Fatal(err)
	}
	var got []string
	for _, l := range list {
		name := l.Key.String()
		if l.Key.Name == "" {
			name = l.Origin
		}
		text := l.Source + " " + name
		if l.Error != "" {
			text += ": " + l.Error
		}
		got = append(got, text)
	}
	slices.Sort(got)
	if !slices.EqualFunc(got, want, func(got, want string) bool {
		if w, ok := strings.CutSuffix(want, "…"); ok {
			return strings.HasPrefix(got, w)
		}
		return got == want
	}) {
		d.t.Errorf("%s: %q, want %q", what, got, want)
	}
}

func objects(t *testing.T, dir string, change ...func(*Config)) (deltas, func()) {
	o, stop := runWith(t, dir, []string{source.Identity, managed.SourceFile, managed.SourceKubernetes}, change...)
	return deltas{o.Objects(managed.SourceKubernetes), t}, stop
}

// TestObjectsThatAreNotNamedStayUntilTheSourceIsComplete proves INV-61.
func TestObjectsThatAreNotNamedStayUntilTheSourceIsComplete(t *testing.T) {
	dir := t.TempDir()
	d, stop := objects(t, dir)
	pods(t, d.owner, "shop")
	group := policy.Key{Kind: "CiliumCIDRGroup", Name: "office"}
	cluster := policy.Key{Kind: "CiliumClusterwideNetworkPolicy", Name: "all"}
	d.apply(map[policy.Key]policy.Written{
		network("db"): isolating("db"), network("web"): isolating("web"),
		group: object("cilium.io/v2", group, `"spec":{"externalCIDRs":[]}`),
	})
	d.want("before it is complete", "kubernetes CiliumCIDRGroup office", "kubernetes NetworkPolicy shop/db", "kubernetes NetworkPolicy shop/web")
	if passes(t, d.owner, 300, 301) {
		t.Error("the policy of an incomplete source is not enforced")
	}
	d.complete(network("db"), network("web"), group)
	stop()

	d, stop = objects(t, dir)
	d.want("after a restart", "kubernetes CiliumCIDRGroup office", "kubernetes NetworkPolicy shop/db", "kubernetes NetworkPolicy shop/web")
	_, revision, err := d.owner.Reader().List(t.Context(), Filter{})
	if err != nil {
		t.Fatal(err)
	}
	d.apply(map[policy.Key]policy.Written{network("db"): isolating("db")})
	d.apply(nil)
	if _, again, err := d.owner.Reader().List(t.Context(), Filter{}); err != nil || again != revision {
		t.Errorf("the same object again is revision %d, %v, want %d", again, err, revision)
	}
	if err := d.Failed(t.Context(), errors.New("groups are forbidden")); err != nil {
		t.Fatal(err)
	}
	d.want("one kind cannot be listed", "kubernetes CiliumCIDRGroup office", "kubernetes NetworkPolicy shop/db", "kubernetes NetworkPolicy shop/web")
	st, err := d.owner.Reader().Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if i := slices.IndexFunc(st.Sources, func(s summary.SourceStatus) bool { return s.Name == managed.SourceKubernetes }); st.Sources[i].Synced || st.Sources[i].Error != "groups are forbidden" {
		t.Errorf("the source is %+v", st.Sources[i])
	}
	all := object("cilium.io/v2", cluster, `"spec":{"endpointSelector":{},"ingress":[{"fromEntities":["all"]}]}`)
	d.apply(map[policy.Key]policy.Written{cluster: all}, network("web"))
	d.want("a deletion that is named", "kubernetes CiliumCIDRGroup office", "kubernetes CiliumClusterwideNetworkPolicy all", "kubernetes NetworkPolicy shop/db")
	d.complete(cluster, network("db"))
	d.want("complete", "kubernetes CiliumClusterwideNetworkPolicy all", "kubernetes NetworkPolicy shop/db")
	d.complete()
	d.want("complete and empty")
	if !passes(t, d.owner, 300, 301) {
		t.Error("no policies are left, but the pods are isolated")
	}
	stop()
}

// TestRenamedFileThatCannotBeReadKeepsItsPolicies: a file is renamed and becomes unreadable. Its policies stay,
// whether the source sees the two changes in one listing or in two.
func TestRenamedFileThatCannotBeReadKeepsItsPolicies(t *testing.T) {
	o, _ := runWith(t, t.TempDir(), []string{source.Identity, managed.SourceFile})
	feed := o.Feed(managed.SourceFile)
	want := func(what string, names string, files ...directory.File) {
		t.Helper()
		if err := feed.Set(t.Context(), files); err != nil {
			t.Fatal(err)
		}
		list, _, err := o.Reader().List(t.Context(), Filter{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, l := range list {
			if l.inForce() {
				got = append(got, l.Origin+":"+l.Key.Name)
			}
		}
		if strings.Join(got, " ") != names {
			t.Errorf("%s: %q, want %q", what, got, names)
		}
	}
	one, two, three := text("shop", "one", 80), text("shop", "two", 80), text("shop", "three", 80)
	unreadable := errors.New("permission denied")
	want("at first", "a.yaml:one a.yaml:two", directory.File{Origin: "a.yaml", Data: []byte(one + "---\n" + two)})
	const stay = "a.yaml:one a.yaml:two"
	want("renamed", stay, directory.File{Origin: "b.yaml", Err: unreadable, Former: "a.yaml"})
	want("again", stay, directory.File{Origin: "b.yaml", Err: unreadable})
	want("being written", stay, directory.File{Origin: "b.yaml", Keep: true})
	want("renamed again", stay, directory.File{Origin: "c.yaml", Data: []byte("{"), Former: "b.yaml"})
	want("partly", "a.yaml:one c.yaml:three c.yaml:two",
		directory.File{Origin: "c.yaml", Data: []byte(two + "---\n" + three + "---\n{")})
	want("readable", "c.yaml:three", directory.File{Origin: "c.yaml", Data: []byte(three)})
	want("unreadable under its name", "c.yaml:three", directory.File{Origin: "c.yaml", Err: unreadable})
	want("removed while unreadable", "", directory.File{Origin: "d.yaml", Err: unreadable})
}

// TestPoliciesOfRenamedFilesStayOverARestart: the service does not see a rename while it does not run. If a file
// cannot be read afterwards, it may be a renamed file, so the policies of all missing files stay.
func TestPoliciesOfRenamedFilesStayOverARestart(t *testing.T) {
	dir := t.TempDir()
	var feed *Feed
	var o *Owner
	stop := func() {}
	run := func() {
		t.Helper()
		stop()
		o, stop = runWith(t, dir, []string{source.Identity, managed.SourceFile})
		feed = o.Feed(managed.SourceFile)
	}
	want := func(what string, names string, files ...directory.File) {
		t.Helper()
		if err := feed.Set(t.Context(), files); err != nil {
			t.Fatal(err)
		}
		list, _, err := o.Reader().List(t.Context(), Filter{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, l := range list {
			if l.inForce() {
				got = append(got, l.Origin+":"+l.Key.Name+strings.Repeat("!", min(1, len(l.Broken))))
			}
		}
		if strings.Join(got, " ") != names {
			t.Errorf("%s: %q, want %q", what, got, names)
		}
	}
	file := func(origin string, names ...string) directory.File {
		var data []string
		for _, name := range names {
			data = append(data, text("shop", name, 80))
		}
		return directory.File{Origin: origin, Data: []byte(strings.Join(data, "---\n"))}
	}
	unreadable := func(origin, former string) directory.File {
		return directory.File{Origin: origin, Err: errors.New("permission denied"), Former: former}
	}
	run()
	want("at first", "a.yaml:one b.yaml:two", file("a.yaml", "one"), file("b.yaml", "two"))
	want("renamed", "a.yaml:one b.yaml:two", unreadable("c.yaml", "a.yaml"), file("b.yaml", "two"))
	run()
	want("and restarted", "a.yaml:one b.yaml:two", unreadable("c.yaml", ""), file("b.yaml", "two"))
	run()
	want("two renamed while it is down", "a.yaml:one b.yaml:two", unreadable("c.yaml", ""), unreadable("d.yaml", ""))
	want("one is readable", "a.yaml:one c.yaml:two", file("c.yaml", "two"), unreadable("d.yaml", ""))
	want("and being written", "a.yaml:one c.yaml:two", file("c.yaml", "two"), directory.File{Origin: "d.yaml", Keep: true})
	want("both", "d.yaml:three c.yaml:two", file("c.yaml", "two"), file("d.yaml", "three"))
	want("another file cannot be read", "c.yaml:two", file("c.yaml", "two"), unreadable("e.yaml", ""))
	run()
	want("removed or renamed while it is down", "c.yaml:two", unreadable("f.yaml", ""))
	want("readable", "f.yaml:one", file("f.yaml", "one"))
	stop()
}

// TestObjectsTouchNoPolicyOfAnotherSource proves INV-61.
func TestObjectsTouchNoPolicyOfAnotherSource(t *testing.T) {
	d, _ := objects(t, t.TempDir())
	files := d.owner.Feed(managed.SourceFile)
	set := func(files2 ...directory.File) {
		t.Helper()
		if err := files.Set(t.Context(), files2); err != nil {
			t.Fatal(err)
		}
	}
	set(directory.File{Origin: "db.yaml", Data: []byte(text("shop", "db", 80))})
	d.apply(map[policy.Key]policy.Written{network("db"): isolating("db"), network("web"): isolating("web")})
	const belongs = "kubernetes NetworkPolicy shop/db: NetworkPolicy shop/db belongs to the source file"
	d.want("one belongs to a file", "file NetworkPolicy shop/db", belongs, "kubernetes NetworkPolicy shop/web")
	d.apply(map[policy.Key]policy.Written{network("other"): isolating("other")})
	d.complete(network("db"), network("web"), network("other"))
	d.want("another changed", "file NetworkPolicy shop/db", belongs, "kubernetes NetworkPolicy shop/other", "kubernetes NetworkPolicy shop/web")
	set()
	d.apply(nil)
	d.want("the file is removed", "kubernetes NetworkPolicy shop/db", "kubernetes NetworkPolicy shop/other",
		"kubernetes NetworkPolicy shop/web")
	set(directory.File{Origin: "db.yaml", Data: []byte(text("shop", "db", 80))})
	d.apply(nil, network("never was"), network("other"))
	d.want("a file with the same", "file NetworkPolicy shop/db: NetworkPolicy shop/db belongs…", "kubernetes NetworkPolicy shop/db", "kubernetes NetworkPolicy shop/web")
	d.complete()
	d.want("all objects are removed", "file NetworkPolicy shop/db: NetworkPolicy shop/db belongs…")
	set(directory.File{Origin: "db.yaml", Data: []byte(text("shop", "db", 81))})
	d.apply(map[policy.Key]policy.Written{network("db"): isolating("db")})
	d.apply(nil, network("db"))
	d.complete()
	d.want("a refused object is removed", "file NetworkPolicy shop/db")
}

// TestObjectWithThePolicyOfAnotherSourceIsolates: a file and an object of the API server define the same policy. Only
// connections that both of them allow are allowed.
func TestObjectWithThePolicyOfAnotherSourceIsolates(t *testing.T) {
	dir := t.TempDir()
	d, stop := objects(t, dir)
	pods(t, d.owner, "shop")
	set := func(files ...directory.File) {
		t.Helper()
		if err := d.owner.Feed(managed.SourceFile).Set(t.Context(), files); err != nil {
			t.Fatal(err)
		}
	}
	isolated := func(what string, want bool) {
		t.Helper()
		got := !passes(t, d.owner, 301, 300) // from db to web
		if got != want || !passes(t, d.owner, 300, 301) {
			t.Errorf("%s: web is isolated %t, want %t; web to db %t", what, got, want, passes(t, d.owner, 300, 301))
		}
	}
	judged := func(what string, inForce, broken bool) {
		t.Helper()
		all, err := d.Judged(t.Context(), []policy.Key{network("db")})
		reported, rerr := d.owner.Reader().Unenforced(t.Context())
		j, reason := all[network("db")], reported[network("db")]
		if err != nil || rerr != nil || j.InForce != inForce || (j.Broken != "") != broken || j.Broken != reason.Why ||
			(reason.Code == OtherSource) != broken {
			t.Errorf("%s: %+v, reported %q, %v %v", what, j, reason, err, rerr)
		}
	}
	// The policy in the file selects other pods than the object, which selects the pods with app=web.
	file := directory.File{Origin: "db.yaml", Data: []byte(text("shop", "db", 80))}
	set(file)
	isolated("only the file", false)
	const spec = `"spec":{"podSelector":{"matchLabels":{"app":"web"}}}`
	first := object("networking.k8s.io/v1", network("db"), spec)
	d.apply(map[policy.Key]policy.Written{network("db"): first})
	isolated("the object", true)
	judged("the object", true, true)
	stop()

	d, stop = objects(t, dir)
	isolated("after a restart", true)
	if held, err := d.Held(t.Context()); err != nil || !slices.Equal(held, []policy.Key{network("db")}) {
		t.Errorf("held after a restart: %v, %v", held, err)
	}
	set(file)
	d.apply(map[policy.Key]policy.Written{network("db"): first})
	isolated("listed again", true)
	d.apply(nil, network("db"))
	isolated("the object is removed", false)
	d.apply(map[policy.Key]policy.Written{network("db"): first})
	d.complete()
	isolated("the object is not listed", false)
	// The API server accepts this value, but in a file it is an error. The object must not isolate more pods because
	// of it.
	const odd = `"spec":{"podSelector":{"matchLabels":{"app":"web"}},` +
		`"ingress":[{"from":[{"ipBlock":{"cidr":"10.0.0.1/24"}}]}]}`
	d.apply(map[policy.Key]policy.Written{network("db"): object("networking.k8s.io/v1", network("db"), odd)})
	isolated("another version of the object", true)
	set()
	isolated("the file is removed", true)
	d.apply(nil)
	isolated("the object is applied", true)
	judged("the object is applied", true, false)
	d.apply(nil, network("db"))
	isolated("the applied object is removed", false)
	if list, _, err := d.owner.Reader().List(t.Context(), Filter{}); err != nil || len(list) > 0 {
		t.Errorf("%d policies are left, %v", len(list), err)
	}
	stop()
}

func TestEachRefusedObjectIsReportedAndTheOthersAreTaken(t *testing.T) {
	d, _ := objects(t, t.TempDir())
	pods(t, d.owner, "shop")
	bad := isolating("Not A Name")
	d.apply(map[policy.Key]policy.Written{
		network("web"): isolating("web"), network("Not A Name"): bad, network("elsewhere"): isolating("db"),
		network("broken"): {Key: network("broken"), APIVersion: "networking.k8s.io/v2"},
	})
	d.want("refused", "kubernetes NetworkPolicy shop/Not A Name: …",
		"kubernetes NetworkPolicy shop/broken: NetworkPolicy is not supported in version networking.k8s.io/v2, "+
			"only in networking.k8s.io/v1",
		"kubernetes NetworkPolicy shop/elsewhere: is NetworkPolicy shop/db, but the source lists it as NetworkPolicy shop/elsewhere", "kubernetes NetworkPolicy shop/web")
	// An object of an API server that cannot be converted isolates the pods that it selects.
	const spec = `"spec":{"podSelector":{"matchLabels":{"app":"db"}},"policyTypes":["Novel"]}`
	odd := object("networking.k8s.io/v1", network("db"), spec)
	d.apply(map[policy.Key]policy.Written{network("db"): odd})
	if passes(t, d.owner, 300, 301) {
		t.Error("an object that cannot be converted does not isolate")
	}
	// If an object is refused, its earlier version stays enforced.
	d.apply(map[policy.Key]policy.Written{network("web"): {Key: network("web")}})
	if passes(t, d.owner, 301, 300) {
		t.Error("the earlier policy of a refused object is no longer enforced")
	}
	d.apply(nil, network("Not A Name"), network("elsewhere"), network("broken"))
	d.complete(network("web"), network("db"))
	d.want("less", "kubernetes NetworkPolicy shop/db: spec.policyTypes[0]…", "kubernetes NetworkPolicy shop/web: …")
}

func TestObjectBeyondTheShareIsEnforcedWhenThereIsRoom(t *testing.T) {
	c := &clock{now: time.Now()}
	d, _ := objects(t, t.TempDir(), func(cfg *Config) { cfg.MaxPolicies, cfg.Now = 3, c.Now })
	if err := d.owner.Feed(managed.SourceFile).Set(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	all := make(map[policy.Key]policy.Written)
	var keys []policy.Key
	for i := range 5 {
		k := network(fmt.Sprint("p", i))
		all[k], keys = isolating(k.Name), append(keys, k)
	}
	d.apply(all)
	d.complete(keys...)
	taken := func(what string, want ...string) {
		t.Helper()
		list, _, err := d.owner.Reader().List(t.Context(), Filter{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, l := range list {
			if l.Accepted {
				got = append(got, l.Key.Name)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q are enforced as written, want %q", what, got, want)
		}
	}
	taken("three fit", "p0", "p1", "p2")
	d.apply(nil, network("p0"))
	taken("one was deleted", "p1", "p2")
	settle(t, d.owner, c)
	taken("the next levels", "p1", "p2", "p3")
	d.apply(nil, network("p1"), network("p2"))
	settle(t, d.owner, c)
	taken("two more were deleted", "p3", "p4")
}

// settle advances the clock until the limits are divided again.
func settle(t *testing.T, o *Owner, c *clock) {
	t.Helper()
	for {
		done, err := loop.Ask(t.Context(), o.loop, opOther, func() (<-chan struct{}, error) {
			if o.leveling || !o.levelAt().IsZero() {
				return o.leveled, nil
			}
			return nil, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if done == nil {
			return
		}
		c.add(shares.LevelInterval)
		if _, err := o.Reader().Shares(t.Context()); err != nil { // makes the owner read the clock
			t.Fatal(err)
		}
		select {
		case <-done:
		case <-t.Context().Done():
			t.Fatal("the limits are not divided")
		}
	}
}

func TestOwnerIsReadyWhenTheObjectsAreComplete(t *testing.T) {
	o, _ := runWith(t, t.TempDir(), []string{source.Identity, managed.SourceKubernetes})
	d := deltas{o.Objects(managed.SourceKubernetes), t}
	if err := o.Identities().CompleteIdentities(t.Context(), map[identity.Numeric]struct{}{}); err != nil {
		t.Fatal(err)
	}
	d.apply(map[policy.Key]policy.Written{network("db"): isolating("db")})
	select {
	case <-o.Ready():
		t.Error("ready before the objects are complete")
	default:
	}
	d.complete(network("db"))
	select {
	case <-o.Ready(): // closed after the call has returned
	case <-time.After(time.Minute):
		t.Error("not ready although the objects are complete")
	}
}

// TestOutcomeFollowsTheDNSRulesOfOtherObjects: sluice-controller, which writes the conditions, updates the note about
// DNS names without a DNS rule when other objects change.
func TestOutcomeFollowsTheDNSRulesOfOtherObjects(t *testing.T) {
	d, _ := objects(t, t.TempDir())
	d.complete()
	names := policy.Key{Kind: "CiliumNetworkPolicy", Namespace: "shop", Name: "names"}
	dns := policy.Key{Kind: "CiliumClusterwideNetworkPolicy", Name: "dns"}
	want := func(what string, missing bool) {
		t.Helper()
		judged, err := d.Judged(t.Context(), []policy.Key{names, dns})
		if err != nil {
			t.Fatal(err)
		}
		noted := slices.ContainsFunc(judged[names].Notes, func(n manifest.Note) bool {
			return n.Kind == manifest.NoteNoDNSRule
		})
		if noted != missing || !judged[names].UsesNames || judged[names].HasDNSRule || judged[dns].HasDNSRule == missing {
			t.Errorf("%s: %+v and %+v, want a note: %t", what, judged[names], judged[dns], missing)
		}
	}
	d.apply(map[policy.Key]policy.Written{names: object("cilium.io/v2", names,
		`"spec":{"endpointSelector":{},"egress":[{"toFQDNs":[{"matchName":"a.b"}]}]}`)})
	want("alone", true)
	d.apply(map[policy.Key]policy.Written{dns: object("cilium.io/v2", dns, `"spec":{"endpointSelector":{},"egress":[`+
		`{"toEntities":["all"],"toPorts":[{"ports":[{"port":"53"}],"rules":{"dns":[{"matchPattern":"*"}]}}]}]}`)})
	want("with a DNS rule", false)
}

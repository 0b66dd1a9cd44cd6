// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// TestObjectThatCannotBeReadClosesWhatWasInForce: a new version of an object cannot be read. The previous version is
// not used any more, because its pods may be deleted and their addresses reused.
func TestObjectThatCannotBeReadClosesWhatWasInForce(t *testing.T) {
	limits := Limits{Services: 100, Slices: 100, Frontends: 100, Backends: 100, BackendsPerService: 50}
	config := testConfig(&clock{now: time.Unix(1e9, 0)})
	config.Limits = limits
	dir := t.TempDir()
	o := start(t, config, dir, managed.SourceKubernetes)
	apply := func(o *running, upserts map[service.ObjectKey]Given) {
		t.Helper()
		c := watch.Changes[service.ObjectKey, Given]{Upserts: upserts}
		if err := o.Objects(managed.SourceKubernetes).Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	const led = "10.96.0.1:80/tcp of shop/web:p0 inside 10.244.0.5:8080"
	const closed = "10.96.0.1:80/tcp of shop/web:p0 inside reject"
	web := service.ObjectKey{Kind: service.KindService, Name: service.Name{Namespace: "shop", Name: "web"}}
	ends := service.ObjectKey{Kind: service.KindSlice, Name: service.Name{Namespace: "shop", Name: "web-x"}}
	good := func() map[service.ObjectKey]Given {
		return givenOf(t, serviceText("shop", "web", "10.96.0.1", 1), sliceText("shop", "web", 1, "10.244.0.5"))
	}
	for _, bad := range []struct {
		what  string
		given map[service.ObjectKey]Given
	}{
		{"a slice", map[service.ObjectKey]Given{ends: {Err: errors.New("metadata.name: is missing")}}},
		{"a slice of another name", map[service.ObjectKey]Given{ends: good()[web]}},
		{"a Service", map[service.ObjectKey]Given{web: {Err: errors.New("metadata.name: is missing")}}},
	} {
		apply(o, good())
		if got := o.servedAt("10.96.0.1"); got != led {
			t.Fatalf("before %s: %s", bad.what, got)
		}
		apply(o, bad.given)
		if got := o.servedAt("10.96.0.1"); got != closed {
			t.Errorf("%s that cannot be read: %q, want %q", bad.what, got, closed)
		}
		_, refused, _, err := o.Reader().List(t.Context(), Filter{})
		if err != nil || len(refused) != 1 {
			t.Errorf("%s: refused %+v, %v", bad.what, refused, err)
		}
	}
	o.stop()
	o = start(t, config, dir, managed.SourceKubernetes)
	if got := o.servedAt("10.96.0.1"); got != closed {
		t.Errorf("after a restart: %q, want %q", got, closed)
	}
}

// TestUnreadableDocumentsOfAFileLeaveTheOthersInForce uses a file with readable and unreadable documents. An unreadable
// Service refuses connections, an unreadable slice is not used, and each is reported with file, document and line. If
// a document does not identify its object, all previous objects of the file stay.
func TestUnreadableDocumentsOfAFileLeaveTheOthersInForce(t *testing.T) {
	dir := t.TempDir()
	o := start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), dir, managed.SourceFile)
	f := o.Feed(managed.SourceFile)
	good := map[string]string{
		"web":   serviceText("shop", "web", "10.96.0.1", 1),
		"ends":  sliceText("shop", "web", 1, "10.244.0.5"),
		"db":    serviceText("shop", "db", "10.96.0.2", 1),
		"dbend": sliceText("shop", "db", 1, "10.244.0.6"),
	}
	set := func(texts ...string) {
		t.Helper()
		all := directory.File{Origin: "all.yaml", Data: []byte(strings.Join(texts, "---\n"))}
		if err := f.Set(t.Context(), []directory.File{all}); err != nil {
			t.Fatal(err)
		}
	}
	want := func(when, web, db string, refused ...string) {
		t.Helper()
		if got := o.servedAt("10.96.0.1"); got != web {
			t.Errorf("%s: web is %q, want %q", when, got, web)
		}
		if got := o.servedAt("10.96.0.2"); got != db {
			t.Errorf("%s: db is %q, want %q", when, got, db)
		}
		_, all, _, err := o.Reader().List(t.Context(), Filter{})
		if err != nil {
			t.Fatal(err)
		}
		text := ""
		for _, r := range all {
			text += r.Origin + ": " + r.Err
		}
		for _, r := range refused {
			if !strings.Contains(text, r) {
				t.Errorf("%s: refused %q, want %q", when, text, r)
			}
		}
		if len(refused) == 0 && text != "" {
			t.Errorf("%s: refused %q", when, text)
		}
	}
	const (
		webLed    = "10.96.0.1:80/tcp of shop/web:p0 inside 10.244.0.5:8080"
		webClosed = "10.96.0.1:80/tcp of shop/web:p0 inside reject"
		dbLed     = "10.96.0.2:80/tcp of shop/db:p0 inside 10.244.0.6:8080"
	)
	set(good["web"], good["ends"], good["db"], good["dbend"])
	want("good", webLed, dbLed)

	badPort := strings.Replace(good["web"], "port: 80", "port: 800000", 1)
	set(badPort, good["ends"], good["db"], good["dbend"])
	want("a Service with a wrong port", webClosed, dbLed,
		"all.yaml: document 1, line 1, Service shop/web: spec.ports[0].port")
	o.stop()
	o = start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), dir, managed.SourceFile)
	f = o.Feed(managed.SourceFile)
	if got := o.servedAt("10.96.0.1"); got != webClosed {
		t.Errorf("after a restart: %q", got)
	}
	set(good["web"], good["ends"], good["db"], good["dbend"])
	want("good again", webLed, dbLed)

	badType := strings.Replace(good["web"], "spec:\n", "spec:\n  type: [1]\n", 1)
	set(badType, good["ends"], good["db"], good["dbend"])
	want("a Service with a value of another type", webClosed, dbLed, "Service shop/web: spec.type: must be")

	badSlice := strings.Replace(good["ends"], "10.244.0.5", "nowhere", 1)
	set(good["web"], badSlice, good["db"], good["dbend"])
	want("a slice with a wrong address", webClosed, dbLed, "document 2, line", "EndpointSlice shop/web-x: endpoints[0]")

	set(good["web"], good["ends"], good["db"], good["dbend"])
	set("kind: [\n", good["db"], good["dbend"])
	want("a document without a name", webLed, dbLed, "document 1")
	set(good["db"], good["dbend"])
	want("without it", "", dbLed)

	if err := f.Set(t.Context(), []directory.File{
		{Origin: "all.yaml", Data: []byte(good["db"] + "---\n" + good["dbend"])},
		{Origin: "more.yaml", Data: []byte(good["db"] + "---\n" + good["web"] + "---\n" + good["ends"])},
	}); err != nil {
		t.Fatal(err)
	}
	want("a file with a Service of another file", webLed, dbLed,
		"more.yaml: document 1: Service shop/db is already in all.yaml")
}

// TestUnreadableServiceOfANewFileRefuses uses an unreadable Service that was never accepted: connections to its address
// are refused, and do not leave the node.
func TestUnreadableServiceOfANewFileRefuses(t *testing.T) {
	o := start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), t.TempDir(), managed.SourceFile)
	text := strings.Replace(serviceText("shop", "web", "10.96.0.1", 1), "spec:\n",
		"spec:\n  sessionAffinity: Sometimes\n", 1)
	files := []directory.File{{Origin: "a.yaml", Data: []byte(text)}}
	if err := o.Feed(managed.SourceFile).Set(t.Context(), files); err != nil {
		t.Fatal(err)
	}
	if got, want := o.servedAt("10.96.0.1"), "10.96.0.1:80/tcp of shop/web:p0 inside reject"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestRenamedFileThatCannotBeReadKeepsItsServices: a file is renamed and cannot be read. Its services stay under the
// former name of the file until the file can be read or another file has the services. This also applies after a
// restart.
func TestRenamedFileThatCannotBeReadKeepsItsServices(t *testing.T) {
	dir := t.TempDir()
	var o *running
	var f *Feed
	run := func() {
		if o != nil {
			o.stop()
		}
		o = start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), dir, managed.SourceFile)
		f = o.Feed(managed.SourceFile)
	}
	want := func(what, names string, files ...directory.File) {
		t.Helper()
		if err := f.Set(t.Context(), files); err != nil {
			t.Fatal(err)
		}
		list, _, _, err := o.Reader().List(t.Context(), Filter{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, l := range list {
			got = append(got, l.Origin+":"+l.Service.Name.Name)
		}
		if strings.Join(got, " ") != names {
			t.Errorf("%s: %q, want %q", what, got, names)
		}
	}
	file := func(origin string, names ...string) directory.File {
		var data []string
		for i, name := range names {
			if name == "?" {
				data = append(data, "kind: [\n")
				continue
			}
			data = append(data, serviceText("shop", name, fmt.Sprintf("10.96.%d.%d", name[0], i+1), 1))
		}
		return directory.File{Origin: origin, Data: []byte(strings.Join(data, "---\n"))}
	}
	unreadable := func(origin, former string) directory.File {
		return directory.File{Origin: origin, Err: errors.New("permission denied"), Former: former}
	}
	run()
	want("at first", "a.yaml:one a.yaml:two", file("a.yaml", "one", "two"))
	want("renamed", "a.yaml:one a.yaml:two", unreadable("b.yaml", "a.yaml"))
	want("being written", "a.yaml:one a.yaml:two", directory.File{Origin: "b.yaml", Keep: true})
	run()
	want("restarted", "a.yaml:one a.yaml:two", unreadable("b.yaml", ""))
	again := file("c.yaml", "two", "?")
	again.Former = "b.yaml"
	want("renamed again, and partly readable", "a.yaml:one c.yaml:two", again)
	want("another file has a service", "d.yaml:one c.yaml:two", again, file("d.yaml", "one"))
	want("readable", "c.yaml:three", file("c.yaml", "three"))
	want("removed while another file cannot be read", "", unreadable("e.yaml", ""))
}

// TestUnreadableObjectTakesTheOneOfASourceThatIsGone: the source of an object is no longer configured and delivers no
// newer version. An object of another source replaces it, even if that object is unreadable.
func TestUnreadableObjectTakesTheOneOfASourceThatIsGone(t *testing.T) {
	const led = "10.96.0.1:80/tcp of shop/web:p0 inside 10.244.0.5:8080"
	const closed = "10.96.0.1:80/tcp of shop/web:p0 inside reject"
	both := []string{serviceText("shop", "web", "10.96.0.1", 1), sliceText("shop", "web", 1, "10.244.0.5")}
	web := service.ObjectKey{Kind: service.KindService, Name: service.Name{Namespace: "shop", Name: "web"}}
	give := func(o *running, given map[service.ObjectKey]Given) error {
		return o.Objects(managed.SourceKubernetes).Apply(t.Context(), watch.Changes[service.ObjectKey, Given]{Upserts: given})
	}
	set := func(o *running, text string) error {
		files := []directory.File{{Origin: "a.yaml", Data: []byte(text)}}
		return o.Feed(managed.SourceFile).Set(t.Context(), files)
	}
	for from, to := range map[string]string{
		managed.SourceKubernetes: managed.SourceFile, managed.SourceFile: managed.SourceKubernetes,
	} {
		dir := t.TempDir()
		config := testConfig(&clock{now: time.Unix(1e9, 0)})
		o := start(t, config, dir, from)
		var err error
		if from == managed.SourceFile {
			err = set(o, strings.Join(both, "---\n"))
		} else {
			err = give(o, givenOf(t, both...))
		}
		if got := o.servedAt("10.96.0.1"); err != nil || got != led {
			t.Fatalf("from %s: %q, %v", from, got, err)
		}
		o.stop()
		o = start(t, config, dir, to)
		if to == managed.SourceFile {
			err = set(o, strings.Replace(both[0], "port: 80", "port: 800000", 1))
		} else {
			err = give(o, map[service.ObjectKey]Given{web: {Err: errors.New("spec.type: is odd")}})
		}
		if got := o.servedAt("10.96.0.1"); err != nil || got != closed {
			t.Errorf("to %s: %q, want %q, %v", to, got, closed, err)
		}
		list, _, _, err := o.Reader().List(t.Context(), Filter{})
		if err != nil || len(list) != 1 || list[0].Source != to {
			t.Errorf("to %s: %+v, %v", to, list, err)
		}
		// The closed Service belongs to the source that delivers it now.
		o.stop()
		o = start(t, config, dir, from)
		if to == managed.SourceFile {
			err = give(o, map[service.ObjectKey]Given{web: {Err: errors.New("spec.type: is odd")}})
			err = errors.Join(err, o.Objects(from).Apply(t.Context(), watch.Changes[service.ObjectKey, Given]{
				Deletes: map[service.ObjectKey]struct{}{web: {}},
			}))
		} else {
			err = errors.Join(set(o, strings.Replace(both[0], "port: 80", "port: 800000", 1)), set(o, ""))
		}
		if got := o.servedAt("10.96.0.1"); err != nil || got != "" {
			t.Errorf("back to %s and removed: %q, %v", from, got, err)
		}
	}
}

// TestUnreadableSliceOfAFileReplacesTheOneOfASourceThatIsGone: a slice of a source that is no longer configured is
// replaced by an unreadable slice of a file. Its endpoints are not used any more.
func TestUnreadableSliceOfAFileReplacesTheOneOfASourceThatIsGone(t *testing.T) {
	dir := t.TempDir()
	config := testConfig(&clock{now: time.Unix(1e9, 0)})
	svc, slice := serviceText("shop", "web", "10.96.0.1", 1), sliceText("shop", "web", 1, "10.244.0.5")
	o := start(t, config, dir, managed.SourceKubernetes)
	c := watch.Changes[service.ObjectKey, Given]{Upserts: givenOf(t, svc, slice)}
	if err := o.Objects(managed.SourceKubernetes).Apply(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	o.stop()
	o = start(t, config, dir, managed.SourceFile)
	bad := strings.Replace(slice, "10.244.0.5", "10.244.0.500", 1)
	file := directory.File{Origin: "a.yaml", Data: []byte(svc + "---\n" + bad)}
	err := o.Feed(managed.SourceFile).Set(t.Context(), []directory.File{file})
	if got := o.servedAt("10.96.0.1"); err != nil || got != "10.96.0.1:80/tcp of shop/web:p0 inside reject" {
		t.Errorf("%q, %v", got, err)
	}
}

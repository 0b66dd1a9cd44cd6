// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// TestServiceWhoseNameAnotherSourceHasRefuses: a Service is left out because another source has a Service of the same
// name. Its addresses refuse connections, also after a restart. An address that both Services have leads to the
// backends of the other Service.
func TestServiceWhoseNameAnotherSourceHasRefuses(t *testing.T) {
	dir := t.TempDir()
	config := testConfig(&clock{now: time.Unix(1e9, 0)})
	var o *running
	var api *Objects
	run := func() {
		if o != nil {
			o.stop()
		}
		o = start(t, config, dir, managed.SourceFile, managed.SourceKubernetes)
		api = o.Objects(managed.SourceKubernetes)
	}
	web := service.ObjectKey{Kind: service.KindService, Name: service.Name{Namespace: "shop", Name: "web"}}
	set := func(text ...string) error {
		files := []directory.File{{Origin: "a.yaml", Data: []byte(strings.Join(text, "---\n"))}}
		return o.Feed(managed.SourceFile).Set(t.Context(), files)
	}
	give := func(ip string) error {
		c := watch.Changes[service.ObjectKey, Given]{Upserts: givenOf(t, serviceText("shop", "web", ip, 1))}
		return errors.Join(api.Apply(t.Context(), c), api.Complete(t.Context(), map[service.ObjectKey]struct{}{web: {}}))
	}
	want := func(what string, err error, addresses map[string]string) {
		t.Helper()
		for addr, want := range addresses {
			if want != "" {
				want = addr + ":80/tcp of " + want
			}
			if got := o.servedAt(addr); err != nil || got != want {
				t.Errorf("%s: %q, want %q, %v", what, got, want, err)
			}
		}
	}
	const led, closed = "shop/web:p0 inside 10.244.0.5:8080", "shop/web@kubernetes:p0 inside reject"
	own, slice := serviceText("shop", "web", "10.96.0.1", 1), sliceText("shop", "web", 1, "10.244.0.5")
	run()
	want("of a file", set(own, slice), map[string]string{"10.96.0.1": led})
	want("and of an API server", give("10.96.0.2"), map[string]string{"10.96.0.1": led, "10.96.0.2": closed})
	run()
	want("after a restart", nil, map[string]string{"10.96.0.1": led, "10.96.0.2": closed})
	want("another address", give("10.96.0.3"), map[string]string{"10.96.0.1": led, "10.96.0.2": "", "10.96.0.3": closed})
	want("the same address", give("10.96.0.1"), map[string]string{"10.96.0.1": led, "10.96.0.3": ""})
	err := errors.Join(give("10.96.0.2"), set(), api.Apply(t.Context(), watch.Changes[service.ObjectKey, Given]{}))
	want("the file is empty", err, map[string]string{"10.96.0.1": "", "10.96.0.2": "shop/web:p0 inside reject"})
	want("the file is second", set(own, slice), map[string]string{
		"10.96.0.1": "shop/web@a.yaml:p0 inside reject", "10.96.0.2": led, // slices of all sources count
	})
	run()
	want("the file is empty again", set(), map[string]string{"10.96.0.1": "", "10.96.0.2": "shop/web:p0 inside reject"})
	err = errors.Join(set(own, slice), api.Apply(t.Context(), watch.Changes[service.ObjectKey, Given]{
		Deletes: map[service.ObjectKey]struct{}{web: {}},
	}), set(own, slice), give("10.96.0.2"))
	want("the API server is second again", err, map[string]string{"10.96.0.1": led, "10.96.0.2": closed})
	err = api.Complete(t.Context(), nil)
	want("and has it no longer", err, map[string]string{"10.96.0.1": led, "10.96.0.2": ""})
	err = errors.Join(give("10.96.0.2"), api.Apply(t.Context(), watch.Changes[service.ObjectKey, Given]{
		Deletes: map[service.ObjectKey]struct{}{web: {}},
	}))
	want("and deletes it", err, map[string]string{"10.96.0.1": led, "10.96.0.2": ""})
}

// TestServiceWhoseNameAnotherFileHasRefuses: the addresses of a Service refuse connections if another file, or an
// earlier document of the same file, has a Service of the same name.
func TestServiceWhoseNameAnotherFileHasRefuses(t *testing.T) {
	o := start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), t.TempDir(), managed.SourceFile)
	f := o.Feed(managed.SourceFile)
	file := func(origin string, ips ...string) directory.File {
		var text []string
		for _, ip := range ips {
			text = append(text, serviceText("shop", "web", ip, 1))
		}
		return directory.File{Origin: origin, Data: []byte(strings.Join(text, "---\n"))}
	}
	for _, c := range []struct {
		files []directory.File
		want  map[string]string // the Service that refuses connections at an address
	}{
		{
			[]directory.File{file("a.yaml", "10.96.0.1", "10.96.0.2"), file("b.yaml", "10.96.0.3"), file("c.yaml", "10.96.0.4")},
			map[string]string{"1": "web", "2": "web@a.yaml", "3": "web@b.yaml", "4": "web@c.yaml"},
		},
		{
			[]directory.File{file("b.yaml", "10.96.0.3"), file("c.yaml", "10.96.0.1")},
			map[string]string{"1": "web@c.yaml", "2": "", "3": "web", "4": ""},
		},
		{[]directory.File{file("c.yaml", "10.96.0.1")}, map[string]string{"1": "web", "3": ""}},
	} {
		if err := f.Set(t.Context(), c.files); err != nil {
			t.Fatal(err)
		}
		for host, want := range c.want {
			if want != "" {
				want = "10.96.0." + host + ":80/tcp of shop/" + want + ":p0 inside reject"
			}
			if got := o.servedAt("10.96.0." + host); got != want {
				t.Errorf("%d files: %q, want %q", len(c.files), got, want)
			}
		}
	}
}

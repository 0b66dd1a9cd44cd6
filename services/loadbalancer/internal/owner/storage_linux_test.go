// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// TestRemovedBackendsLeaveThoughTheDiskIsFull: while the disk is full, a removed pod stops being a backend, because
// another pod may get its address before the disk has space again. The next change that is stored contains all
// changes before it.
func TestRemovedBackendsLeaveThoughTheDiskIsFull(t *testing.T) {
	c := &clock{now: time.Unix(1e9, 0)}
	root := t.TempDir()
	dir := filepath.Join(root, "state")
	sources := []string{managed.SourceKubernetes, managed.SourceFile}
	o := start(t, testConfig(c), dir, sources...)
	api := &apiSource{running: o, Objects: o.Objects(managed.SourceKubernetes), clock: c}
	files := o.Feed(managed.SourceFile)
	file := func(texts ...string) []directory.File {
		var all []byte
		for _, text := range texts {
			all = append(all, "---\n"+text...)
		}
		return []directory.File{{Origin: "a.yaml", Data: all}}
	}
	api.give(serviceText("shop", "web", "10.96.0.1", 1), sliceText("shop", "web", 1, "10.244.0.5", "10.244.0.6"),
		serviceText("shop", "db", "10.96.0.2", 1), sliceText("shop", "db", 1, "10.244.0.7"))
	ofFile := serviceText("machine", "dns", "10.96.0.3", 1)
	both := file(ofFile, sliceText("machine", "dns", 1, "10.244.0.8", "10.244.0.9"))
	if err := files.Set(t.Context(), both); err != nil {
		t.Fatal(err)
	}
	is := func(what string, web, db, dns string) {
		t.Helper()
		for address, want := range map[string]string{
			"10.96.0.1": "10.96.0.1:80/tcp of shop/web:p0 inside" + web,
			"10.96.0.2": "10.96.0.2:80/tcp of shop/db:p0 inside" + db,
			"10.96.0.3": "10.96.0.3:80/tcp of machine/dns:p0 inside" + dns,
		} {
			if got := api.servedAt(address); got != want {
				t.Errorf("%s: %q, want %q", what, got, want)
			}
		}
	}
	is("at first", " 10.244.0.5:8080 10.244.0.6:8080", " 10.244.0.7:8080", " 10.244.0.8:8080 10.244.0.9:8080")

	fewer := watch.Changes[service.ObjectKey, Given]{Upserts: givenOf(t, sliceText("shop", "web", 1, "10.244.0.6"))}
	gone := watch.Changes[service.ObjectKey, Given]{
		Deletes: map[service.ObjectKey]struct{}{keyOf(service.KindSlice, "shop", "db-x"): {}},
	}
	fewerFiles := file(ofFile, sliceText("machine", "dns", 1, "10.244.0.9"))
	give := func(what string, want error) {
		for _, change := range []func() error{
			func() error { return api.Objects.Apply(t.Context(), fewer) },
			func() error { return api.Objects.Apply(t.Context(), gone) },
			func() error { return files.Set(t.Context(), fewerFiles) },
		} {
			if err := change(); !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", what, err, want)
			}
		}
	}
	disk := disktest.New(t, root)
	disk.Run(t, func() {
		disk.Fail(func(o disktest.Op) error {
			if o.Kind == disktest.Write || o.Kind == disktest.Truncate {
				return unix.ENOSPC
			}
			return nil
		})
		for range 2 {
			give("the disk is full", failure.ErrStorage)
			is("the disk is full", " 10.244.0.6:8080", " reject", " 10.244.0.9:8080")
		}
		disk.Fail(nil)
		give("with space", nil)
	})
	o.stop()
	api.running = start(t, testConfig(c), dir, sources...)
	is("after a restart", " 10.244.0.6:8080", " reject", " 10.244.0.9:8080")
}

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
)

func TestFilesAreTakenOver(t *testing.T) {
	dir := t.TempDir()
	o := start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), dir, managed.SourceFile)
	select {
	case <-o.Ready():
		t.Error("the owner is ready before the files were listed")
	default:
	}
	x := o.subscribe("a", [16]byte{}, 0)
	x.until(0)
	if x.barrier.SourcesComplete {
		t.Error("the sources are complete before the files were listed")
	}
	f := o.Feed(managed.SourceFile)
	set := func(files ...directory.File) {
		t.Helper()
		if err := f.Set(t.Context(), files); err != nil {
			t.Fatal(err)
		}
	}
	names := func() string {
		t.Helper()
		list, _, _, err := o.Reader().List(t.Context(), Filter{})
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, l := range list {
			out = append(out, l.Service.Name.Name+" of "+l.Origin)
		}
		return strings.Join(out, ", ")
	}
	file := func(origin, text string) directory.File { return directory.File{Origin: origin, Data: []byte(text)} }
	set(file("a.yaml", web), directory.File{Origin: "b.yaml", Keep: true})
	select {
	case <-o.Ready():
		t.Error("the owner is ready although a file was never read")
	default:
	}
	set(file("a.yaml", web), file("b.yaml", strings.Replace(api, "10.96.0.1", "10.96.0.2", 1)))
	<-o.Ready()
	x.until(2)
	if !x.barrier.SourcesComplete || len(x.has) != 2 {
		t.Errorf("the barrier is %+v, of %s", x.barrier, show(x.has))
	}
	if got := names(); got != "api of b.yaml, web of a.yaml" {
		t.Errorf("services %s", got)
	}
	set(file("a.yaml", web+"---\nkind: x\n"), directory.File{Origin: "b.yaml", Err: errors.New("unreadable")},
		file("c.yaml", web))
	if got := names(); got != "api of b.yaml, web of a.yaml, web@c.yaml of c.yaml" {
		t.Errorf("with refused files: services %s", got)
	}
	st, err := o.Reader().Status(t.Context())
	if err != nil || st.Refused != 3 || st.ProblemCount != 3 {
		t.Errorf("%d are refused, %d problems: %+v, %v", st.Refused, st.ProblemCount, st.Problems, err)
	}
	set(file("c.yaml", web)) // it was moved
	if got := names(); got != "web of c.yaml" {
		t.Errorf("after a move: services %s", got)
	}
	set(directory.File{Origin: "c.yaml", Same: true})
	o.stop()
	// The files were listed in this state, so another run does not wait.
	o = start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), dir, managed.SourceFile)
	<-o.Ready()
	f = o.Feed(managed.SourceFile)
	set()
	if got := names(); got != "" {
		t.Errorf("without files: services %s", got)
	}
}

func TestFilesWithoutRoomAreRefusedOneByOne(t *testing.T) {
	config := testConfig(&clock{now: time.Unix(1e9, 0)})
	config.Limits.Services = 2
	o := start(t, config, t.TempDir(), managed.SourceFile)
	f := o.Feed(managed.SourceFile)
	var files []directory.File
	for i := range 4 {
		text := fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: s%d}\nspec: {clusterIP: 10.96.0.%d, ports: "+
			"[{port: 80}]}\n", i, i+1)
		files = append(files, directory.File{Origin: fmt.Sprintf("%d.yaml", i), Data: []byte(text)})
	}
	if err := f.Set(t.Context(), files); err != nil {
		t.Fatal(err)
	}
	list, refused, _, err := o.Reader().List(t.Context(), Filter{})
	if err != nil || len(list) != 2 || len(refused) != 2 || !strings.Contains(refused[0].Err, "limits.services") {
		t.Errorf("%d services, refused %+v, %v", len(list), refused, err)
	}
	if err := f.Set(t.Context(), files[2:]); err != nil {
		t.Fatal(err)
	}
	list, refused, _, err = o.Reader().List(t.Context(), Filter{})
	if err != nil || len(list) != 2 || list[0].Origin != "2.yaml" || len(refused) != 0 {
		t.Errorf("%+v, refused %+v, %v", list, refused, err)
	}
}

// TestRenamedFileWithoutRoomKeepsItsServices: a file is renamed, and exceeds a limit in the same listing.
// Its former Services stay, as under the same name.
func TestRenamedFileWithoutRoomKeepsItsServices(t *testing.T) {
	config := testConfig(&clock{now: time.Unix(1e9, 0)})
	config.Limits.Services = 2
	o := start(t, config, t.TempDir(), managed.SourceFile)
	f := o.Feed(managed.SourceFile)
	file := func(origin, former string, names ...string) directory.File {
		var text []string
		for _, name := range names {
			text = append(text, serviceText("shop", name, fmt.Sprintf("10.96.0.%d", name[0]), 1))
		}
		return directory.File{Origin: origin, Former: former, Data: []byte(strings.Join(text, "---\n"))}
	}
	for _, c := range []struct {
		what, want string
		files      []directory.File
	}{
		{"at first", "b.yaml:b b.yaml:c", []directory.File{file("b.yaml", "", "b", "c")}},
		{"renamed and too large", "b.yaml:b b.yaml:c", []directory.File{file("d.yaml", "b.yaml", "b", "c", "d")}},
		{"again", "b.yaml:b b.yaml:c", []directory.File{{Origin: "d.yaml", Same: true}}},
		{"with another", "b.yaml:b b.yaml:c", []directory.File{{Origin: "d.yaml", Same: true}, file("a.yaml", "", "a")}},
		{"smaller", "d.yaml:b d.yaml:e", []directory.File{file("d.yaml", "", "b", "e")}},
	} {
		if err := f.Set(t.Context(), c.files); err != nil {
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
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}
}

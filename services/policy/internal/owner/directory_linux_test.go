// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/dirwatch/dirwatchtest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	enginepolicy "github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
	"github.com/sluice-net/sluice/services/policy/internal/summary"
)

// place is a directory with a source that feeds a real owner.
type place struct {
	t     *testing.T
	dir   string // directory of the test; the source's directory is below it
	owner *owner.Owner
}

func newPlace(t *testing.T, change ...func(*directory.Source)) *place {
	t.Helper()
	p := &place{t: t, dir: t.TempDir()}
	var err error
	p.owner, err = owner.New(owner.Config{
		Engine: engine.Config{Cluster: "default"}, MaxPolicies: 1000, MaxManifestBytes: 64 << 20, MaxNames: 4, MaxAddresses: 4,
		Stream: stream.Defaults(), Log: log.Discard(),
	}, t.TempDir(), []string{managed.SourceFile})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := p.owner.Run(ctx); err != nil {
			t.Errorf("owner: %v", err)
		}
	})
	failed := p.owner.Feed(managed.SourceFile).Failed
	source := directory.New(filepath.Join(p.dir, "policies"), "policies", p.owner.Feed(managed.SourceFile), failed, log.Discard())
	source.Rescan = time.Hour // so that only kernel events cause scans
	for _, c := range change {
		c(source)
	}
	wg.Go(func() {
		if err := source.Run(ctx); err != nil {
			t.Errorf("source: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait(); p.owner.Close() })
	return p
}

// state returns the policies and refusals as lines: NAME PORT, or FILE: error.
func (p *place) state() []string {
	p.t.Helper()
	list, _, err := p.owner.Reader().List(p.t.Context(), owner.Filter{})
	if err != nil {
		p.t.Fatal(err)
	}
	var out []string
	for _, l := range list {
		line := l.Origin + ":"
		if l.Key.Name != "" {
			line += " " + l.Key.Name
		}
		if l.Accepted {
			_, port, _ := bytes.Cut(l.Manifest, []byte("port: "))
			port, _, _ = bytes.Cut(port, []byte("}"))
			line += " " + string(port)
		}
		if l.Error != "" {
			line += " !" + l.Error
		}
		out = append(out, line)
	}
	slices.Sort(out)
	return out
}

// want waits for lines; a line that ends in … is a prefix.
func (p *place) want(what string, lines ...string) {
	p.t.Helper()
	matches := func(got, want string) bool {
		if w, ok := strings.CutSuffix(want, "…"); ok {
			return strings.HasPrefix(got, w)
		}
		return got == want
	}
	servicetest.EventuallyNil(p.t, what, func() error {
		if got := p.state(); !slices.EqualFunc(got, lines, matches) {
			return fmt.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(lines, "\n"))
		}
		return nil
	})
}

func (p *place) path(name string) string { return filepath.Join(p.dir, "policies", name) }

func (p *place) do(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

func (p *place) write(name, content string) {
	p.t.Helper()
	p.do(os.WriteFile(p.path(name), []byte(content), 0o644))
}

// writeFile writes a file and creates its directory.
func writeFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func policy(name string, port int) string {
	return fmt.Sprintf("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: %s}\nspec:\n  podSelector: {}\n  ingress: [{ports: [{port: %d}]}]\n", name, port)
}

func TestFilesBecomePolicies(t *testing.T) {
	p := newPlace(t)
	p.want("no directory yet")
	p.do(os.Mkdir(p.path(""), 0o755))
	p.write("a.yaml", policy("a", 1)+"---\n"+policy("b", 2))
	p.write("c.json", `{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"c"},"spec":{"podSelector":{},"ingress":[{"ports":[{"port": 3}]}]}}`)
	p.write(".a.yaml.swp", "not looked at")
	p.write("README", "not looked at")
	p.do(os.Mkdir(p.path("below"), 0o755))
	p.write("below/d.yaml", policy("d", 4))
	p.write("empty.yaml", "# nothing\n")
	p.want("all of them", "a.yaml: a 1", "a.yaml: b 2", `c.json: c …`)
	p.write("a.yaml", policy("a", 5))
	p.want("a changed and b gone", "a.yaml: a 5", "c.json: c …")
	p.do(os.Remove(p.path("a.yaml")))
	p.want("a gone", "c.json: c …")
	p.do(os.Rename(p.path("c.json"), p.path("e.json")))
	p.want("c moved", "e.json: c …")
}

// TestKernelPoliciesAreEnforcedThoughTheDirectoryCannotBeWatched: the limits of inotify are exhausted, as other
// programs on the machine may do. Policies are still enforced.
func TestKernelPoliciesAreEnforcedThoughTheDirectoryCannotBeWatched(t *testing.T) {
	limit, inside := dirwatchtest.Limited(t)
	if !inside {
		return
	}
	for _, x := range []struct{ instances, watches int }{{0, 1000}, {1000, 0}} {
		limit(x.instances, x.watches)
		p := newPlace(t)
		p.want("no directory yet")
		p.do(os.Mkdir(p.path(""), 0o755))
		p.write("a.yaml", policy("a", 1))
		p.want("a policy", "a.yaml: a 1")
		p.write("a.yaml", policy("a", 2))
		p.want("a change", "a.yaml: a 2")
		p.write("b.yaml", policy("b", 3))
		p.want("another policy", "a.yaml: a 2", "b.yaml: b 3")
		p.do(os.Remove(p.path("a.yaml")))
		p.want("a removal", "b.yaml: b 3")
	}
}

// TestBadFileIsReportedAndItsLastGoodStateStays writes documents that cannot be applied. A bad document isolates the
// pods that it selects, and other documents are not affected. If even the namespace of the bad document cannot be
// read, the earlier policies of its file stay.
func TestBadFileIsReportedAndItsLastGoodStateStays(t *testing.T) {
	p := newPlace(t)
	p.do(os.Mkdir(p.path(""), 0o755))
	p.write("a.yaml", policy("a", 1)+"---\n"+policy("b", 2))
	p.want("good", "a.yaml: a 1", "a.yaml: b 2")
	p.write("a.yaml", policy("a", 3)+"---\n"+policy("b", 70000))
	const why = " !a.yaml: document 2 (line 8): NetworkPolicy default/b: spec.ingress[0].ports[0].port…"
	p.want("bad", "a.yaml: a 3", "a.yaml: b"+why)
	p.write("a.yaml", strings.Replace(policy("a", 3), "ports", "prots", 1))
	p.want("misspelt",
		"a.yaml: a !a.yaml: document 1 (line 1): NetworkPolicy default/a: spec.ingress[0].prots: "+
			"no such field; did you mean ports?")
	p.write("a.yaml", policy("a", 3)+"---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n---\n"+
		"apiVersion: cilium.io/v2\nkind: CiliumEgressGatewayPolicy\nmetadata: {name: g}\n---\n"+policy("b", 70000))
	p.want("beside other kinds", "a.yaml: a 3",
		"a.yaml: b !a.yaml: document 4 (line 16): NetworkPolicy default/b: spec.ingress[0].ports[0].port…")
	p.write("new.yaml", "{")
	p.write("a.yaml", policy("a", 3)+"---\n"+policy("b", 4))
	p.want("another that cannot be read", "a.yaml: a 3", "a.yaml: b 4", "new.yaml: !document 1 (line 1): yaml: …")
	p.write("a.yaml", policy("a", 5)+"---\n- a list\n")
	const unread = " !document 2 (line 8): is not an object but a list"
	p.want("an unreadable part",
		"a.yaml: a 5"+unread, "a.yaml: b 4"+unread, "new.yaml: !document 1 (line 1): yaml: …")
	p.write("a.yaml", policy("a", 4))
	p.do(os.Remove(p.path("new.yaml")))
	p.want("good again", "a.yaml: a 4")
	p.do(os.Symlink("nowhere", p.path("l.yaml")))
	p.do(os.Mkdir(p.path("d.yaml"), 0o755))
	p.want("no files", "a.yaml: a 4", "d.yaml: !not a regular file", "l.yaml: !open …")
}

func TestListInAFileIsItsItems(t *testing.T) {
	p := newPlace(t)
	list := "apiVersion: v1\nkind: List\nitems:\n"
	for i, name := range []string{"a", "b"} {
		list += "- " + strings.ReplaceAll(strings.TrimSpace(policy(name, i+1)), "\n", "\n  ") + "\n"
	}
	p.ready(map[string]string{"l.yaml": list, "c.yaml": policy("c", 3)})
	p.want("a list", "c.yaml: c 3", "l.yaml: a 1", "l.yaml: b 2")
	p.write("l.yaml", list+"- {apiVersion: v1, kind: Service}\n- {kind: NetworkPolicy, metadata: {name: d}}\n")
	p.want("other kinds in it", "c.yaml: c 3", "l.yaml: a 1", "l.yaml: b 2",
		"l.yaml: d !l.yaml: document 1 (line 17): NetworkPolicy d: items[3].apiVersion: is missing; "+
			"it is networking.k8s.io/v1 for NetworkPolicy")
}

func TestSecondDocumentWithAPolicyIsolates(t *testing.T) {
	p := newPlace(t)
	p.do(os.Mkdir(p.path(""), 0o755))
	p.write("m.yaml", policy("a", 1))
	p.want("one", "m.yaml: a 1")
	// b.yaml sorts before m.yaml, but m.yaml had the policy first.
	p.write("b.yaml", policy("x", 7)+"---\n"+policy("a", 2))
	p.want("the second", "b.yaml: a !NetworkPolicy default/a is in m.yaml already (b.yaml: document 2 (line 8))",
		"b.yaml: x 7", "m.yaml: a 1")
	p.do(os.Remove(p.path("m.yaml")))
	p.want("its turn", "b.yaml: a 2", "b.yaml: x 7")
	p.write("b.yaml", policy("a", 2)+"---\n"+policy("a", 3)+"---\n"+policy("a", 2))
	p.want("twice in a file",
		"b.yaml: a !NetworkPolicy default/a is in document 1 already (b.yaml: document 2 (line 8))", "b.yaml: a 2")
}

func TestPolicyOfAnotherSourceIsLeftAlone(t *testing.T) {
	p := newPlace(t)
	if _, err := p.owner.Upsert(t.Context(), []byte(policy("a", 9)), "", false); err != nil {
		t.Fatal(err)
	}
	p.do(os.Mkdir(p.path(""), 0o755))
	p.write("a.yaml", policy("a", 1))
	p.want("refused", ": a 9",
		"a.yaml: a !NetworkPolicy default/a belongs to the source grpc (a.yaml: document 1 (line 1))")
}

func TestEditorsAndVolumesAreFollowed(t *testing.T) {
	p := newPlace(t)
	p.do(os.Mkdir(p.path(""), 0o755))
	p.write("a.yaml", policy("a", 1))
	p.want("at first", "a.yaml: a 1")

	// Write to another file and rename it, as an editor does.
	p.write(".a.tmp", policy("a", 2))
	p.do(os.Rename(p.path(".a.tmp"), p.path("a.yaml")))
	p.want("renamed over", "a.yaml: a 2")

	// Write slowly: in between, the file contains a complete policy.
	f, err := os.OpenFile(p.path("a.yaml"), os.O_WRONLY|os.O_TRUNC, 0)
	p.do(err)
	for _, part := range []string{policy("a", 3), "---\n", policy("b", 4)} {
		_, err := f.WriteString(part)
		p.do(err)
	}
	p.do(f.Close())
	p.want("written in parts", "a.yaml: a 3", "a.yaml: b 4")
	p.do(os.Remove(p.path("a.yaml")))

	// Like a Kubernetes volume: each file name is a symbolic link through a directory link that is replaced.
	for i, dir := range []string{"..v1", "..v2"} {
		p.do(os.Mkdir(p.path(dir), 0o755))
		p.write(dir+"/v.yaml", policy("v", 10+i))
	}
	p.do(os.Symlink("..v1", p.path("..data")))
	p.do(os.Symlink("..data/v.yaml", p.path("v.yaml")))
	p.want("first volume", "v.yaml: v 10")
	p.do(os.Symlink("..v2", p.path("..data_tmp")))
	p.do(os.Rename(p.path("..data_tmp"), p.path("..data")))
	p.want("swapped", "v.yaml: v 11")
}

// ready writes files as one change, so that the source cannot read some of them before the others.
func (p *place) ready(files map[string]string) {
	p.t.Helper()
	next := filepath.Join(p.dir, "next")
	p.do(os.Mkdir(next, 0o755))
	for name, content := range files {
		p.do(os.WriteFile(filepath.Join(next, name), []byte(content), 0o644))
	}
	p.do(os.Rename(next, p.path("")))
}

func TestFinishedRenameActsAtOnce(t *testing.T) {
	p := newPlace(t, func(s *directory.Source) { s.Quiet, s.Patience = time.Hour, time.Hour }) // no other triggers
	// The source watches for the directory before it reports that it is missing. Files that exist before the watch
	// would count as being written.
	servicetest.Eventually(t, "the directory to be missed", func() bool {
		st, err := p.owner.Reader().Status(t.Context())
		return err == nil && slices.ContainsFunc(st.Sources, func(s summary.SourceStatus) bool {
			return s.Name == managed.SourceFile && strings.Contains(s.Error, "no such file")
		})
	})
	p.ready(map[string]string{"a.yaml": policy("a", 1), "b.yaml": policy("b", 1)})
	p.want("the directory", "a.yaml: a 1", "b.yaml: b 1")
	p.write(".a.tmp", policy("a", 2))
	p.do(os.Rename(p.path(".a.tmp"), p.path("a.yaml")))
	p.want("renamed over", "a.yaml: a 2", "b.yaml: b 1")
	p.do(os.Rename(p.path("a.yaml"), p.path("c.yaml")))
	p.want("renamed", "b.yaml: b 1", "c.yaml: a 2")

	// Like an editor that removes a file before it writes the new one. Other events in between must not make the file
	// count as deleted.
	p.do(os.Rename(p.path("c.yaml"), p.path("c.yaml~")))
	p.write(".b.tmp", policy("b", 2))
	p.do(os.Rename(p.path(".b.tmp"), p.path("b.yaml")))
	p.want("another file", "b.yaml: b 2", "c.yaml: a 2")
	p.do(os.Rename(p.path("c.yaml~"), p.path("c.yaml")))

	// A file that is being written in place is not read, and neither is a symbolic link to it.
	p.do(os.Symlink("b.yaml", p.path("d.yaml")))
	p.write("b.yaml", policy("b", 3))
	p.write(".e.tmp", policy("e", 1))
	p.do(os.Rename(p.path(".e.tmp"), p.path("e.yaml")))
	p.want("a third file", "b.yaml: b 2", "c.yaml: a 2", "e.yaml: e 1")

	// A Kubernetes volume.
	for i, dir := range []string{"..v1", "..v2"} {
		p.do(os.Mkdir(p.path(dir), 0o755))
		p.write(dir+"/v.yaml", policy("v", 10+i))
	}
	p.do(os.Symlink("..v1", p.path("..data")))
	p.do(os.Symlink("..data/v.yaml", p.path(".link")))
	p.do(os.Rename(p.path(".link"), p.path("v.yaml")))
	p.want("a volume", "b.yaml: b 2", "c.yaml: a 2", "e.yaml: e 1", "v.yaml: v 10")
	p.do(os.Symlink("..v2", p.path("..data_tmp")))
	p.do(os.Rename(p.path("..data_tmp"), p.path("..data")))
	p.want("the volume swapped", "b.yaml: b 2", "c.yaml: a 2", "e.yaml: e 1", "v.yaml: v 11")
}

func TestFileThatIsOpenKeepsWhatItHad(t *testing.T) {
	// The directory exists before the source starts: a directory that is created later may be listed once before it
	// is watched, and the source would then not notice that the file is open for writing.
	p := newPlace(t, func(s *directory.Source) {
		s.Patience = 2 * s.Quiet
		files := map[string]string{"a.yaml": policy("a", 1) + "---\n" + policy("b", 1), "c.yaml": policy("c", 1)}
		for name, content := range files {
			writeFile(t, filepath.Join(s.Path, name), content)
		}
	})
	p.want("at first", "a.yaml: a 1", "a.yaml: b 1", "c.yaml: c 1")
	f, err := os.OpenFile(p.path("a.yaml"), os.O_WRONLY|os.O_TRUNC, 0)
	p.do(err)
	defer f.Close()
	_, err = f.WriteString(policy("a", 2))
	p.do(err)
	const why = " !is open for writing: its previous objects stay until it is closed"
	p.want("half written, and reported", "a.yaml: a 1"+why, "a.yaml: b 1"+why, "c.yaml: c 1")
	p.write("c.yaml", policy("c", 2))
	p.want("the other files are still followed", "a.yaml: a 1"+why, "a.yaml: b 1"+why, "c.yaml: c 2")
	_, err = f.WriteString("---\n" + policy("b", 2))
	p.do(err)
	p.do(f.Close())
	p.want("closed", "a.yaml: a 2", "a.yaml: b 2", "c.yaml: c 2")
}

func (p *place) fileError() string {
	p.t.Helper()
	st, err := p.owner.Reader().Status(p.t.Context())
	p.do(err)
	i := slices.IndexFunc(st.Sources, func(s summary.SourceStatus) bool { return s.Name == managed.SourceFile })
	return st.Sources[i].Error
}

func TestDirectoryThatBecomesEmptyKeepsItsPoliciesForAWhile(t *testing.T) {
	p := newPlace(t, func(s *directory.Source) { s.Empty = time.Hour })
	p.ready(map[string]string{"a.yaml": policy("a", 1), "b.yaml": policy("b", 1)})
	p.want("at first", "a.yaml: a 1", "b.yaml: b 1")
	p.do(os.Remove(p.path("a.yaml")))
	p.want("one is removed", "b.yaml: b 1")
	p.do(os.Remove(p.path("b.yaml")))
	servicetest.EventuallyNil(t, "the announcement", func() error {
		if e := p.fileError(); !strings.Contains(e, "has no files any more; if it stays empty, its 1 policies are deleted after 1h0m0s") {
			return fmt.Errorf("the error of the source is %q", e)
		}
		return nil
	})
	p.want("empty", "b.yaml: b 1")
	p.write("c.yaml", policy("c", 1))
	p.want("mounted", "c.yaml: c 1")
	if e := p.fileError(); e != "" {
		t.Errorf("the error of the source is still %q", e)
	}

	// The time before a restart counts as well.
	other := directory.New(t.TempDir(), "policies", p.owner.Feed(managed.SourceFile), nil, log.Discard())
	for range 2 {
		if err := other.Scan(t.Context()); err == nil {
			t.Error("an empty directory at the start: no error")
		}
	}
	p.want("not mounted", "c.yaml: c 1")
	other.Empty = 0
	p.do(other.Scan(t.Context()))
	p.want("empty for long enough")
}

func TestDirectoryMayItselfBeSwapped(t *testing.T) {
	p := newPlace(t)
	for i, dir := range []string{"one", "two"} {
		p.do(os.Mkdir(filepath.Join(p.dir, dir), 0o755))
		p.do(os.WriteFile(filepath.Join(p.dir, dir, "a.yaml"), []byte(policy("a", 1+i)), 0o644))
	}
	p.do(os.Symlink("one", filepath.Join(p.dir, "policies")))
	p.want("first", "a.yaml: a 1")
	p.do(os.Symlink("two", filepath.Join(p.dir, "next")))
	p.do(os.Rename(filepath.Join(p.dir, "next"), filepath.Join(p.dir, "policies")))
	p.want("swapped", "a.yaml: a 2")
	p.write("a.yaml", policy("a", 3))
	p.want("the new one is watched", "a.yaml: a 3")
	// A missing directory does not count as empty.
	p.do(os.Remove(filepath.Join(p.dir, "policies")))
	servicetest.Eventually(t, "an error about the missing directory", func() bool { return p.fileError() != "" })
	p.want("gone", "a.yaml: a 3")
}

func TestFileOfLimitIsRefusedAndTheOthersAreTaken(t *testing.T) {
	p := newPlace(t)
	p.do(os.Mkdir(p.path(""), 0o755))
	// The first scan reads everything that exists, including the first half of a file that is being written.
	p.write(".big.yaml", policy("big", 1)+"# "+strings.Repeat("x", 4<<20))
	p.do(os.Rename(p.path(".big.yaml"), p.path("big.yaml")))
	p.write("a.yaml", policy("a", 1))
	p.want("too large", "a.yaml: a 1", "big.yaml: !document 1 (line 1): manifest of 4194439 bytes is larger than 3145728")
}

// TestRefusedFileIsTriedAgainWithoutAChange: a file was refused for a reason that ends without a change in the
// directory. The source then applies it.
func TestRefusedFileIsTriedAgainWithoutAChange(t *testing.T) {
	p := newPlace(t)
	if _, err := p.owner.Upsert(t.Context(), []byte(policy("a", 1)), "", false); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	p.do(os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(policy("a", 2)), 0o644))
	s := directory.New(dir, "policies", p.owner.Feed(managed.SourceFile), nil, log.Discard())
	p.do(s.Scan(t.Context()))
	p.want("of calls", ": a 1",
		"a.yaml: a !NetworkPolicy default/a belongs to the source grpc (a.yaml: document 1 (line 1))")
	list, _, err := p.owner.Reader().List(t.Context(), owner.Filter{Name: "a"})
	p.do(err)
	_, err = p.owner.Delete(t.Context(), []enginepolicy.Key{list[0].Key}, false)
	p.do(err)
	p.do(s.Scan(t.Context()))
	p.want("of nobody else", "a.yaml: a 2")
}

func TestOddFilesAreRefusedAndTheOthersAreTaken(t *testing.T) {
	p := newPlace(t)
	p.do(os.Mkdir(p.path(""), 0o755))
	p.do(syscall.Mkfifo(p.path("fifo.yaml"), 0o644))
	p.do(os.Mkdir(p.path("dir.yaml"), 0o755))
	p.do(os.Symlink("loop.yaml", p.path("loop.yaml")))
	p.do(os.Symlink("nowhere", p.path("dangling.yaml")))
	p.do(os.Symlink("/dev/zero", p.path("endless.yaml")))
	p.write("a.yaml", policy("a", 1))
	p.want("odd files", "a.yaml: a 1", "dangling.yaml: !open …", "dir.yaml: !not a regular file", "endless.yaml: !not a regular file",
		"fifo.yaml: !not a regular file", "loop.yaml: !open …")
}

// unread counts the files that a listing contains without content, because the source did not read them again.
type unread struct {
	directory.Feed
	files int
}

func (u *unread) Set(ctx context.Context, files []directory.File) error {
	u.files = 0
	for _, f := range files {
		if f.Same {
			u.files++
		}
	}
	return u.Feed.Set(ctx, files)
}

// TestRefusedFileIsTriedAgainWithoutReadingIt: a refused file is applied again from memory.
func TestRefusedFileIsTriedAgainWithoutReadingIt(t *testing.T) {
	p := newPlace(t)
	if _, err := p.owner.Upsert(t.Context(), []byte(policy("a", 1)), "", false); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	same := &unread{Feed: p.owner.Feed(managed.SourceFile)}
	s := directory.New(dir, "policies", same, nil, log.Discard())
	s.Grain = 0
	p.do(os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(policy("a", 2)), 0o644))
	p.do(os.WriteFile(filepath.Join(dir, "b.yaml"), []byte("{"), 0o644))
	p.do(s.Scan(t.Context()))
	p.do(s.Scan(t.Context()))
	if same.files != 2 {
		t.Errorf("%d of 2 files were not read again", same.files)
	}
	p.want("of calls", ": a 1", "a.yaml: a !NetworkPolicy default/a belongs to the source grpc…", "b.yaml: !document 1…")
	list, _, err := p.owner.Reader().List(t.Context(), owner.Filter{Name: "a"})
	p.do(err)
	_, err = p.owner.Delete(t.Context(), []enginepolicy.Key{list[0].Key}, false)
	p.do(err)
	p.do(s.Scan(t.Context()))
	p.want("of the file", "a.yaml: a 2", "b.yaml: !document 1…")
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protodelim"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	vectorv1 "github.com/sluice-net/sluice/proto/gen/sluice/policyvector/v1"
	"github.com/sluice-net/sluice/proto/wire/policywire"
	"github.com/sluice-net/sluice/services/policy/internal/table"
	"github.com/sluice-net/sluice/services/policy/internal/wire"
	"github.com/sluice-net/sluice/services/policy/internal/wire/wiretest"
)

// reader keeps only the tables of a stream.
type reader struct {
	words  map[uint32]table.Entry
	tables map[uint64]*table.Table
	bound  map[[2]uint32]uint64
	steps  map[string]int
}

func (r *reader) forget() {
	r.words, r.tables, r.bound = make(map[uint32]table.Entry), make(map[uint64]*table.Table), make(map[[2]uint32]uint64)
}

func define(d *policyv1.PolicyTable) *table.Table {
	t := &table.Table{Peers: make(map[policytable.IdentityClass]policytable.Class)}
	for flag, on := range map[table.Flags]bool{table.DefaultAllow: d.DefaultAllow, table.HostAllow: d.HostAllow, table.HasAddresses: d.HasAddresses} {
		if on {
			t.Flags |= flag
		}
	}
	for _, c := range d.DefaultClasses {
		t.Default[c.Kind-1] = policytable.Class(c.Class)
	}
	t.Address = wiretest.PrefixClasses(d.AddressClasses)
	for _, x := range d.Rules {
		t.Rules = append(t.Rules, policytable.Rule{Action: policytable.Action(x.Action - 1), Tier: policytable.Tier(x.Tier - 1), Proxy: policytable.Proxy(x.Proxy)})
	}
	wiretest.Grow(t, d.Classes)
	for _, x := range d.Peers {
		t.Peers[policytable.IdentityClass(x.IdentityClass)] = policytable.Class(x.Class)
	}
	for _, b := range d.Prefixes {
		t.Prefixes.Set(netip.MustParsePrefix(b.Prefix), wiretest.PrefixClasses(b.Classes))
	}
	return t
}

func (r *reader) step(t *testing.T, s *policyv1.Step) {
	count := func(what string) { r.steps[what]++ }
	switch x := s.Step.(type) {
	case *policyv1.Step_SetIdentity:
		count("identity")
		u := x.SetIdentity
		if u.IdentityClass == 0 {
			delete(r.words, u.Identity)
			return
		}
		r.words[u.Identity] = table.Entry{
			IdentityClass: policytable.IdentityClass(u.IdentityClass), Kind: identity.Kind(u.Kind - 1), Scope: identity.PeerScope(u.Scope - 1), Known: true,
		}
	case *policyv1.Step_DefineTable:
		count("define")
		r.tables[x.DefineTable.Table] = define(x.DefineTable)
	case *policyv1.Step_GrowTable:
		count("grow")
		wiretest.Grow(r.tables[x.GrowTable.Table], x.GrowTable.Classes)
	case *policyv1.Step_RetireTable:
		count("retire")
		delete(r.tables, x.RetireTable.Table)
	case *policyv1.Step_SetPeer:
		count("row")
		r.tables[x.SetPeer.Table].Peers[policytable.IdentityClass(x.SetPeer.Row.IdentityClass)] = policytable.Class(x.SetPeer.Row.Class)
	case *policyv1.Step_DeletePeer:
		count("delete row")
		delete(r.tables[x.DeletePeer.Table].Peers, policytable.IdentityClass(x.DeletePeer.IdentityClass))
	case *policyv1.Step_SetPrefix:
		count("prefix")
		p := x.SetPrefix.Prefix
		r.tables[x.SetPrefix.Table].Prefixes.Set(netip.MustParsePrefix(p.Prefix), wiretest.PrefixClasses(p.Classes))
	case *policyv1.Step_DeletePrefix:
		count("delete prefix")
		r.tables[x.DeletePrefix.Table].Prefixes.Delete(netip.MustParsePrefix(x.DeletePrefix.Prefix))
	case *policyv1.Step_BindSubject:
		count("bind")
		if tab := r.tables[x.BindSubject.Table]; x.BindSubject.Table != 0 && len(tab.Rules) != len(x.BindSubject.Rules) {
			t.Fatalf("table %d has %d rules, the binding places of %d", x.BindSubject.Table, len(tab.Rules), len(x.BindSubject.Rules))
		}
		r.bound[[2]uint32{x.BindSubject.Subject, uint32(x.BindSubject.Direction)}] = x.BindSubject.Table
	case *policyv1.Step_RemoveSubject:
		count("gone")
		for _, d := range []netv1.Direction{netv1.Direction_DIRECTION_INGRESS, netv1.Direction_DIRECTION_EGRESS} {
			delete(r.bound, [2]uint32{x.RemoveSubject.Subject, uint32(d)})
		}
	case *policyv1.Step_DefineIdentityClass:
		count("class")
	case *policyv1.Step_RetireIdentityClass:
		count("retire class")
	case *policyv1.Step_Barrier:
		count("barrier")
	case *policyv1.Step_SnapshotComplete:
		count("complete")
	default:
		t.Fatalf("step %T", x)
	}
}

// ask answers a query from the tables of the stream.
func (r *reader) ask(t *testing.T, q *vectorv1.Question) {
	id, ok := r.bound[[2]uint32{q.Subject, uint32(q.Direction)}]
	if !ok {
		t.Fatalf("%s: subject %d is not bound", q.Name, q.Subject)
	}
	a, ok := netip.AddrFromSlice(q.PeerAddress)
	if !ok || len(q.SubjectAddress) != len(q.PeerAddress) {
		t.Fatalf("%s: addresses %x and %x", q.Name, q.SubjectAddress, q.PeerAddress)
	}
	v := table.Verdict{Action: policytable.Allow}
	if id != 0 {
		v = r.tables[id].Lookup(r.words[q.Peer], a, uint32(q.Protocol)<<16|q.Port)
	}
	if policywire.Action(v.Action) != q.Action || wire.DecidedBy(v, id != 0) != q.DecidedBy || uint32(v.Rule) != q.Rule {
		t.Fatalf("%s: %v: the tables of the stream give %+v", q.Name, q, v)
	}
}

// readAll answers every query of a stream and counts its content.
func readAll(t *testing.T, in io.Reader) (views, questions int, steps map[string]int, by map[netv1.DecidedBy]int, protocols map[netv1.Protocol]int) {
	t.Helper()
	r := &reader{steps: make(map[string]int)}
	by, protocols = make(map[netv1.DecidedBy]int), make(map[netv1.Protocol]int)
	b := bufio.NewReader(in)
	for {
		f := new(vectorv1.Frame)
		if err := protodelim.UnmarshalFrom(b, f); errors.Is(err, io.EOF) {
			return views, questions, r.steps, by, protocols
		} else if err != nil {
			t.Fatal(err)
		}
		switch x := f.Frame.(type) {
		case *vectorv1.Frame_View:
			r.forget()
			views++
			if x.View.Text == "" {
				t.Fatalf("view %s %s has no text", x.View.File, x.View.Case)
			}
		case *vectorv1.Frame_Tables:
			for _, s := range x.Tables.Steps {
				r.step(t, s)
			}
		case *vectorv1.Frame_Question:
			questions++
			by[x.Question.DecidedBy]++
			protocols[x.Question.Protocol]++
			r.ask(t, x.Question)
		}
	}
}

// TestARandomStreamGivesTheEnginesAnswers answers each query from the tables in the same stream. A random stream has
// every kind of step, answer and protocol.
func TestARandomStreamGivesTheEnginesAnswers(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	figures, err := Random(&out, 20000, 3)
	if err != nil {
		t.Fatal(err)
	}
	views, questions, steps, by, protocols := readAll(t, &out)
	t.Log(figures, steps, by)
	if views != figures.Views || questions != 20000 || figures.Questions != 20000 {
		t.Errorf("%d views and %d questions were read, %+v written", views, questions, figures)
	}
	for _, what := range []string{
		"identity", "define", "grow", "retire", "row", "delete row", "prefix", "delete prefix", "bind", "gone", "class", "retire class", "barrier", "complete",
	} {
		if steps[what] == 0 {
			t.Errorf("no step of kind %q", what)
		}
	}
	for n := range netv1.DecidedBy_name {
		if d := netv1.DecidedBy(n); d != netv1.DecidedBy_DECIDED_BY_UNSPECIFIED && by[d] == 0 {
			t.Errorf("nothing was decided by %s", d)
		}
	}
	for _, p := range []netv1.Protocol{1, 6, 17, 58, 132, 47, 255} {
		if protocols[p] == 0 {
			t.Errorf("no question of protocol %d", p)
		}
	}
}

func TestARandomStreamDependsOnTheSeedOnly(t *testing.T) {
	t.Parallel()
	var a, b, c bytes.Buffer
	for out, seed := range map[*bytes.Buffer]uint64{&a: 5, &b: 5, &c: 6} {
		if _, err := Random(out, 3000, seed); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(a.Bytes(), b.Bytes()) {
		t.Error("two streams of one seed differ")
	}
	if bytes.Equal(a.Bytes(), c.Bytes()) {
		t.Error("streams of two seeds are equal")
	}
}

// directory returns a directory with some of the project's files.
func directory(t *testing.T, files ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range files {
		file, err := filepath.Abs(filepath.Join("..", "..", "..", "..", "testdata", "policy-vectors", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(file, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestAStreamOfVectorsAnswersItself(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	figures, err := Vectors(&out, directory(t, "kcnp.jsonl.gz", "npa-conformance.jsonl.gz", "validation.jsonl.gz"), 1)
	if err != nil {
		t.Fatal(err)
	}
	views, questions, _, _, _ := readAll(t, &out)
	if views != figures.Views || questions != figures.Questions || questions < 10000 {
		t.Errorf("%d views and %d questions were read, %+v written", views, questions, figures)
	}
}

// TestAStreamOfSomeProbesAnswersItself writes only every fifth probe. For each of these, the tables in the stream
// give the answer in the stream.
func TestAStreamOfSomeProbesAnswersItself(t *testing.T) {
	t.Parallel()
	const every = 5
	dir := directory(t, "npa-conformance.jsonl.gz")
	all, err := Vectors(io.Discard, dir, 1)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	figures, err := Vectors(&out, dir, every)
	if err != nil {
		t.Fatal(err)
	}
	_, questions, _, _, _ := readAll(t, &out)
	if questions != figures.Questions || questions < all.Questions/every/2 || questions > 2*all.Questions/every {
		t.Errorf("%d questions were read, %d written; want about one in %d of %d", questions, figures.Questions, every,
			all.Questions)
	}
}

func TestADirectoryWithoutQuestionsIsAnError(t *testing.T) {
	t.Parallel()
	for _, files := range [][]string{nil, {"validation.jsonl.gz"}} {
		if _, err := Vectors(io.Discard, directory(t, files...), 1); !errors.Is(err, ErrVectors) {
			t.Errorf("%q: %v", files, err)
		}
	}
}

// rewritten returns the cases of a file, with one case changed.
func rewritten(t *testing.T, file string, change func(n int, line string) string) string {
	t.Helper()
	in, err := os.Open(filepath.Join(directory(t, file), file))
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	unzipped, err := gzip.NewReader(in)
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(unzipped)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	zipped := gzip.NewWriter(&out)
	for n, line := range strings.SplitAfter(string(data), "\n") {
		if _, err := io.WriteString(zipped, change(n, line)); err != nil {
			t.Fatal(err)
		}
	}
	if err := zipped.Close(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, file), out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestAVectorThatDiffersDoesNotEndTheStream: a vector with a different expected answer, or with an impossible step,
// does not affect other vectors.
func TestAVectorThatDiffersDoesNotEndTheStream(t *testing.T) {
	t.Parallel()
	const file = "npa-conformance.jsonl.gz"
	all, err := Vectors(io.Discard, directory(t, file), 1)
	if err != nil {
		t.Fatal(err)
	}
	swap := strings.NewReplacer(`"expect":"allow"`, `"expect":"deny"`, `"expect":"deny"`, `"expect":"allow"`)
	for _, test := range []struct {
		name   string
		change func(n int, line string) string
		want   string
		all    bool // all queries are present
	}{
		{"one case expects the opposite", func(n int, line string) string {
			if n == 1 {
				return swap.Replace(line)
			}
			return line
		}, "differ from the engine, the first are: ", true},
		{"one case has a probe of no protocol", func(n int, line string) string {
			if n == 1 {
				return strings.Replace(line, `"proto":"TCP"`, `"proto":"XXX"`, 1)
			}
			return line
		}, "1 answers differ from the engine, the first are: ", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			got, err := Vectors(&out, rewritten(t, file, test.change), 1)
			if !errors.Is(err, ErrVectors) || !strings.Contains(err.Error(), file+": ") || !strings.Contains(err.Error(), test.want) {
				t.Errorf("the error is %v, want one with %q", err, test.want)
			}
			if test.all && got.Questions != all.Questions || got.Questions < all.Questions/2 {
				t.Errorf("%d questions were written, %d if all are as expected", got.Questions, all.Questions)
			}
			if _, questions, _, _, _ := readAll(t, &out); questions != got.Questions {
				t.Errorf("%d questions were read, %d written", questions, got.Questions)
			}
		})
	}
}

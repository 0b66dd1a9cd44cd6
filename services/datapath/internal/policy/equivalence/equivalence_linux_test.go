// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package equivalence

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protodelim"

	vectorv1 "github.com/sluice-net/sluice/proto/gen/sluice/policyvector/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// Environment variables of the tests.
const (
	// Directory of two files of frames, vectors and random, instead of running the engine.
	framesEnv = "SLUICE_POLICY_FRAMES"
	// Directory of vectors; default: the project's own.
	vectorsEnv = "POLICY_VECTORS"
	// Number of random pairs, and their seed.
	pairsEnv = "SLUICE_EQUIVALENCE_PAIRS"
	seedEnv  = "SLUICE_EQUIVALENCE_SEED"
	// Every n-th question about a pod becomes a packet.
	everyEnv = "SLUICE_EQUIVALENCE_EVERY"
)

// figures are the results for one file of vectors.
type figures struct {
	cases     map[string]bool // value: it has a failure
	questions int             // answered by the evaluating function
	packets   int             // answered by a pod's program
	quiet     int             // of these, packets that passed without an event, which do not show what decided
	elsewhere map[event.Reason]int
	failures  int
}

// maxShown bounds the failures that are printed in full; the figures count all.
const maxShown = 5

// examiner asks the questions of a stream and compares the answers.
type examiner struct {
	t     testing.TB
	n     *node
	state *state
	view  *vectorv1.View
	text  string
	// every: each n-th question about pods becomes a packet; 1: all of them
	every   int
	asked   int
	waiting []*vectorv1.Question // questions that become packets, grouped by subject
	files   map[string]*figures
	shown   int
	// broken is set after an error in the view; its remaining frames are skipped.
	broken bool
}

func (x *examiner) figures() *figures {
	f := x.files[x.view.GetFile()]
	if f == nil {
		f = &figures{cases: map[string]bool{}, elsewhere: map[event.Reason]int{}}
		x.files[x.view.GetFile()] = f
	}
	return f
}

// fail reports a question with everything that is needed to understand it.
func (x *examiner) fail(q *vectorv1.Question, who string, got fmt.Stringer, err error) {
	f := x.figures()
	f.failures++
	f.cases[x.view.GetCase()] = true
	if x.shown++; x.shown > maxShown {
		x.t.Fail()
		return
	}
	subject, _ := netip.AddrFromSlice(q.GetSubjectAddress())
	peer, _ := netip.AddrFromSlice(q.GetPeerAddress())
	text := x.text
	if text == "" {
		text = x.view.GetText()
	}
	x.t.Errorf(`%s, case %s, step %d, node %s: %s
%s of subject %d at %v, peer %d at %v, protocol %d, port %d (%#x)
engine: %s
%s: %v (%v)
%s`, x.view.GetFile(), x.view.GetCase(), x.view.GetStep(), x.view.GetNode(), q.GetName(),
		q.GetDirection(), q.GetSubject(), subject, q.GetPeer(), peer, q.GetProtocol(), q.GetPort(), q.GetPort(),
		wanted(q), who, got, err, text)
}

// abandon stops the current view. The next view starts again.
func (x *examiner) abandon(err error) {
	if x.view == nil {
		x.t.Errorf("before the first view: %v", err)
		return
	}
	f := x.figures()
	f.failures++
	f.cases[x.view.GetCase()] = true
	x.waiting, x.broken = x.waiting[:0], true
	if x.shown++; x.shown > maxShown {
		x.t.Fail()
		return
	}
	x.t.Errorf("%s, case %s, step %d, node %s: the view cannot go on: %v", x.view.GetFile(), x.view.GetCase(), x.view.GetStep(), x.view.GetNode(), err)
}

// frame handles one frame.
func (x *examiner) frame(ctx context.Context, f *vectorv1.Frame) error {
	switch f := f.GetFrame().(type) {
	case *vectorv1.Frame_View:
		if err := x.endView(); err != nil {
			x.abandon(err)
		}
		x.view, x.text, x.broken = f.View, "", false
		var err error
		x.state, err = x.n.begin(ctx)
		return err
	case *vectorv1.Frame_Tables:
		if x.broken {
			return nil
		}
		if x.state == nil {
			return errors.New("tables before a view")
		}
		x.packets()
		return x.state.tables(f.Tables)
	case *vectorv1.Frame_Question:
		if x.broken {
			return nil
		}
		if x.state == nil {
			return errors.New("a question before a view")
		}
		x.ask(f.Question)
		return nil
	}
	return errors.New("a frame of unknown kind")
}

func (x *examiner) ask(q *vectorv1.Question) {
	if q.GetText() != "" {
		x.packets() // waiting questions belong to the previous text
		x.text = q.GetText()
	}
	fs := x.figures()
	fs.cases[x.view.GetCase()] = fs.cases[x.view.GetCase()]
	fs.questions++
	if got, err := x.state.askAlone(q); err != nil || got != wanted(q) {
		x.fail(q, "evaluation", got, err)
	}
	if !q.GetPod() {
		return
	}
	if x.asked++; x.asked%x.every == 0 {
		x.waiting = append(x.waiting, q)
	}
}

// packets sends the waiting questions as packets, one subject after the other.
func (x *examiner) packets() {
	slices.SortStableFunc(x.waiting, func(a, b *vectorv1.Question) int {
		if c := int(a.GetSubject()) - int(b.GetSubject()); c != 0 {
			return c
		}
		return bytes.Compare(a.GetSubjectAddress(), b.GetSubjectAddress())
	})
	for _, q := range x.waiting {
		fs := x.figures()
		got, reason, err := x.state.askProgram(q)
		if errors.Is(err, errElsewhere) {
			fs.elsewhere[reason]++
			continue
		}
		fs.packets++
		want := wanted(q)
		if got.by == 0 && err == nil {
			// it passed without an entry, so without an event: ask the function what decided
			fs.quiet++
			got, err = x.state.askAlone(q)
		}
		if err != nil || got != want {
			x.fail(q, "program", got, err)
		}
	}
	x.waiting = x.waiting[:0]
}

func (x *examiner) endView() error {
	if x.state == nil {
		return nil
	}
	x.packets()
	s := x.state
	x.state = nil
	if err := s.end(); err != nil {
		return fmt.Errorf("end of the view: %w", err)
	}
	return nil
}

// examine reads a stream to its end. It continues after a failed question or view.
func (x *examiner) examine(ctx context.Context, in io.Reader) error {
	r := bufio.NewReaderSize(in, 1<<20)
	for {
		f := new(vectorv1.Frame)
		switch err := protodelim.UnmarshalFrom(r, f); {
		case errors.Is(err, io.EOF):
			if err := x.endView(); err != nil {
				x.abandon(err)
			}
			return nil
		case err != nil:
			return fmt.Errorf("read a frame: %w", err)
		}
		if err := x.frame(ctx, f); err != nil {
			if ctx.Err() != nil {
				return err
			}
			x.abandon(err)
		}
	}
}

// report prints the figures of each file and the failed cases. A file without questions fails.
func (x *examiner) report(took time.Duration) {
	total := &figures{elsewhere: map[event.Reason]int{}}
	for _, name := range slices.Sorted(maps.Keys(x.files)) {
		f := x.files[name]
		x.t.Logf("%-28s %5d cases %7d probes %7d packets %4d failures", name, len(f.cases), f.questions, f.packets, f.failures)
		var failed []string
		for _, c := range slices.Sorted(maps.Keys(f.cases)) {
			if f.cases[c] {
				failed = append(failed, c)
			}
		}
		if len(failed) > 0 {
			x.t.Logf("  failed: %s", strings.Join(failed, "; "))
		}
		if f.questions == 0 || f.packets == 0 {
			x.t.Errorf("%s asks nothing", name)
		}
		total.questions += f.questions
		total.packets += f.packets
		total.quiet += f.quiet
		total.failures += f.failures
		for reason, n := range f.elsewhere {
			total.elsewhere[reason] += n
		}
	}
	var unasked []string
	others := 0
	for _, reason := range slices.Sorted(maps.Keys(total.elsewhere)) {
		name := reason.String()
		if reason == 0 {
			name = "quietly dropped"
		}
		unasked = append(unasked, fmt.Sprintf("%d %s", total.elsewhere[reason], name))
		others += total.elsewhere[reason]
	}
	if len(unasked) > 0 {
		x.t.Logf("packets that no policy evaluated: %s", strings.Join(unasked, ", "))
	}
	perSecond := float64(total.questions+total.packets) / took.Seconds()
	x.t.Logf("equal %d questions to the evaluating function and %d packets to the programs, of which %d passed "+
		"without an event, %d failures, %.0f a second",
		total.questions, total.packets, total.quiet, total.failures, perSecond)
	if total.questions == 0 || total.packets == 0 {
		x.t.Error("nothing was asked")
	}
	// such packets must be rare, or the programs are not tested
	if others > total.packets/4 {
		x.t.Errorf("%d packets were not evaluated by a policy, %d were", others, total.packets)
	}
}

// producer returns the engine's program, built for this test.
func producer(t testing.TB) string {
	t.Helper()
	if built := os.Getenv("SLUICE_POLICY_VECTORS"); built != "" { // where Go is not available
		return built
	}
	out := filepath.Join(t.TempDir(), "policy-vectors")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", out, "./internal/test/policy-vectors")
	cmd.Dir = filepath.Join("..", "..", "..", "..", "policy")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // as the service is built, to reuse the build cache
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the engine's side: %v\n%s", err, text)
	}
	return out
}

// run examines the engine's output, and returns how long that took.
func (x *examiner) run(args ...string) time.Duration {
	x.t.Helper()
	cmd := exec.CommandContext(x.t.Context(), producer(x.t), args...)
	cmd.Dir = filepath.Join("..", "..", "..", "..", "..")
	var text bytes.Buffer
	cmd.Stderr = &text
	out, err := cmd.StdoutPipe()
	if err != nil {
		x.t.Fatal(err)
	}
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		x.t.Fatal(err)
	}
	err = x.examine(x.t.Context(), out)
	if err != nil {
		_ = cmd.Process.Kill()
	}
	if werr := cmd.Wait(); err == nil && werr != nil {
		err = fmt.Errorf("%w: %s", werr, text.Bytes())
	}
	if err != nil {
		x.t.Error(err) // the figures of the questions asked follow
	}
	return time.Since(begin)
}

func newExaminer(t *testing.T, every int) *examiner {
	t.Helper()
	return &examiner{t: t, n: newNode(t), every: every, files: map[string]*figures{}}
}

// Fractions of questions that become packets, and of probes of vectors that become questions. A
// probe has one or two questions, one for each direction; odd numbers select both directions
// equally.
const everyRandom, everyVector, everyProbe = 8, 3, 5

// TestKernelTablesDecideTheVectorsAsTheEngine asks the evaluating function all questions of the
// policy vectors, and the programs, with real packets, the questions about pods: all of them in
// `make test-vectors-kernel`, otherwise a fifth and a fifteenth.
//
// INV-64
func TestKernelTablesDecideTheVectorsAsTheEngine(t *testing.T) {
	if dir := os.Getenv(framesEnv); dir != "" {
		examineFile(t, filepath.Join(dir, "vectors"))
		return
	}
	x := newExaminer(t, everyOr(t, everyVector))
	args := []string{"vectors"}
	if os.Getenv(everyEnv) == "" {
		args = append(args, "-every", strconv.Itoa(everyProbe))
	}
	if dir := os.Getenv(vectorsEnv); dir != "" {
		abs, err := filepath.Abs(dir)
		if err != nil {
			t.Fatal(err)
		}
		args = append(args, abs)
	}
	x.report(x.run(args...))
}

// everyOr returns the fraction of questions that become packets.
func everyOr(t *testing.T, every int) int {
	t.Helper()
	if s := os.Getenv(everyEnv); s != "" {
		var err error
		if every, err = strconv.Atoi(s); err != nil || every < 1 {
			t.Fatalf("%s=%s: want a number from 1 on", everyEnv, s)
		}
	}
	return every
}

// examineFile examines a file of frames.
func examineFile(t *testing.T, name string) {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	x := newExaminer(t, everyOr(t, 1))
	begin := time.Now()
	if err := x.examine(t.Context(), f); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	x.report(time.Since(begin))
}

// TestKernelTablesDecideRandomPoliciesAsTheEngine asks about random policies and packets, while
// policies, pods and addresses are added and removed.
//
// INV-64
func TestKernelTablesDecideRandomPoliciesAsTheEngine(t *testing.T) {
	if dir := os.Getenv(framesEnv); dir != "" {
		examineFile(t, filepath.Join(dir, "random"))
		return
	}
	pairs, seed := 50_000, rand.Uint64()
	for _, v := range []struct {
		env string
		set func(string) error
	}{
		{pairsEnv, func(s string) (err error) { pairs, err = strconv.Atoi(s); return err }},
		{seedEnv, func(s string) (err error) { seed, err = strconv.ParseUint(s, 10, 64); return err }},
	} {
		if s := os.Getenv(v.env); s != "" {
			if err := v.set(s); err != nil {
				t.Fatalf("%s=%s: %v", v.env, s, err)
			}
		}
	}
	t.Logf("seed %d (%s)", seed, seedEnv)
	x := newExaminer(t, everyOr(t, everyRandom))
	x.report(x.run("random", "-n", strconv.Itoa(pairs), "-seed", strconv.FormatUint(seed, 10)))
}

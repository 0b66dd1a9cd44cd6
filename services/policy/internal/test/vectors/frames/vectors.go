// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	vectorv1 "github.com/sluice-net/sluice/proto/gen/sluice/policyvector/v1"
	"github.com/sluice-net/sluice/services/policy/internal/test/vectors"
)

// ErrVectors means that the engine's answer differs from the expected answer of a vector, or that a directory has no
// vectors with queries.
var ErrVectors = errors.New("policy vectors")

// Vectors writes every query about a connection in the files of a directory, each side for the node that evaluates
// it. It writes the answers of the engine, and compares them with the expected answers of the vectors. A different
// answer does not end the run. A step that fails ends only its case. The error contains the first differences of each
// file and their number.
//
// Only every n-th probe is written, where n is the argument every. All steps and tables are written.
func Vectors(out io.Writer, dir string, every int) (Figures, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.jsonl.gz"))
	if err != nil {
		return Figures{}, err
	}
	slices.Sort(files)
	w := newWriter(out)
	w.every = every
	var failed []error
	for _, file := range files {
		var differ differences
		err := vectors.Read(file, func(c *vectors.Case) error {
			if !c.Asks() {
				return nil
			}
			if err := w.vectorCase(filepath.Base(file), c, &differ); err != nil {
				differ.add(c, err)
			}
			return w.err
		})
		if w.err != nil {
			return w.figures, w.err
		}
		if err = errors.Join(differ.err(), err); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", filepath.Base(file), err))
		}
	}
	f, err := w.end()
	if err == nil && f.Questions == 0 {
		err = fmt.Errorf("%w: no query in %s", ErrVectors, dir)
	}
	return f, errors.Join(append(failed, err)...)
}

// maxShown limits the listed differences of a file.
const maxShown = 5

// differences are the differences in the cases of a file.
type differences struct {
	n     int
	shown []error
}

func (d *differences) add(c *vectors.Case, err error) {
	if d.n++; d.n <= maxShown {
		d.shown = append(d.shown, fmt.Errorf("%s: %w", c.Name, err))
	}
}

func (d *differences) err() error {
	if d.n == 0 {
		return nil
	}
	return fmt.Errorf("%w: %d answers differ from the engine, the first are: %w", ErrVectors, d.n, errors.Join(d.shown...))
}

func (w *writer) vectorCase(file string, c *vectors.Case, differ *differences) error {
	world := vectors.NewWorld(c)
	for i := range c.Steps {
		s := &c.Steps[i]
		if _, err := world.Step(s, c.Tagged("crd-rejects")); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		if err := world.Settle(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		views := make(map[string][]question)
		for j := range s.Probes {
			if w.probes++; w.probes%w.every != 0 {
				continue
			}
			p := &s.Probes[j]
			sides, err := world.Sides(p)
			if err != nil {
				return fmt.Errorf("step %d, probe %+v: %w", i, *p, err)
			}
			if a := vectors.Combine(p, sides); !c.Wants(p, a) {
				differ.add(c, fmt.Errorf("step %d, probe %+v: the engine answers %+v", i, *p, a))
			}
			for _, side := range sides {
				views[side.Node] = append(views[side.Node], question{
					name:    fmt.Sprintf("%s → %s %s %d, %s", p.From, p.To, p.Proto, p.Port, side.Direction),
					subject: side.Subject, subjectAddr: side.SubjectAddr, pod: side.Pod,
					direction: side.Direction, peer: side.Peer, addr: side.PeerAddr, point: side.Point,
					enforced: side.Enforced, verdict: side.Verdict,
				})
			}
		}
		text := manifests(c, i)
		for _, node := range slices.Sorted(maps.Keys(views)) {
			w.view(&vectorv1.View{File: file, Case: c.Name, Step: uint32(i), Node: node, Text: text + world.Describe(node)})
			world.Engine(node).Snapshot(w.event)
			w.barrier()
			for _, q := range views[node] {
				w.question(q)
			}
		}
	}
	return nil
}

// manifests returns the manifests that a case applies up to a step.
func manifests(c *vectors.Case, step int) string {
	var b strings.Builder
	for i := range step + 1 {
		s := &c.Steps[i]
		for _, d := range s.Delete {
			fmt.Fprintf(&b, "step %d deletes %+v\n", i, d)
		}
		for _, m := range s.Apply {
			fmt.Fprintf(&b, "step %d applies %s\n", i, m)
		}
		for _, d := range s.DNS {
			fmt.Fprintf(&b, "step %d learns %s %v\n", i, d.Name, d.IPs)
		}
	}
	return b.String()
}

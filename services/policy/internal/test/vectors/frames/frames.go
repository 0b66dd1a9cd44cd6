// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package frames writes tables and queries with known answers, to test another implementation of the lookup. The
// format of a stream is described in proto/sluice/policyvector/v1.
package frames

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"

	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	vectorv1 "github.com/sluice-net/sluice/proto/gen/sluice/policyvector/v1"
	"github.com/sluice-net/sluice/proto/wire/policywire"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/table"
	"github.com/sluice-net/sluice/services/policy/internal/wire"
)

// maxMessage is the approximate maximum size of a message of steps, in bytes. A step is never divided, and no step is
// larger than three times this size.
const maxMessage = 1 << 20

// Figures count the written elements.
type Figures struct {
	Views, Steps, Questions int
}

// String returns one line.
func (f Figures) String() string {
	return fmt.Sprintf("%d views, %d steps, %d questions", f.Views, f.Steps, f.Questions)
}

// writer writes one stream.
type writer struct {
	out      *bufio.Writer
	seq      uint64 // within the view
	revision uint64 // within the view
	steps    []*policyv1.Step
	size     int
	figures  Figures
	err      error
	every    int // use every n-th probe of the vectors
	probes   int // number of probes seen
}

func newWriter(w io.Writer) *writer { return &writer{out: bufio.NewWriterSize(w, 1<<20)} }

func (w *writer) frame(f *vectorv1.Frame) {
	if w.err == nil {
		_, w.err = protodelim.MarshalTo(w.out, f)
	}
}

// view starts a view.
func (w *writer) view(v *vectorv1.View) {
	w.seq, w.revision = 0, 0
	w.figures.Views++
	w.frame(&vectorv1.Frame{Frame: &vectorv1.Frame_View{View: v}})
}

func (w *writer) event(st policytable.Step) {
	if b, ok := st.(policytable.BindSubject); ok {
		b.Revision = w.revision + 1
		st = b
	}
	w.step(policywire.Step(st))
}

func (w *writer) step(s *policyv1.Step) {
	w.steps = append(w.steps, s)
	w.figures.Steps++
	if w.size += proto.Size(s); w.size > maxMessage {
		w.flush()
	}
}

// barrier ends the steps of a revision.
func (w *writer) barrier() {
	w.revision++
	if w.revision == 1 {
		w.step(policywire.Step(policytable.SnapshotComplete{}))
	}
	w.step(policywire.Step(policytable.Barrier{
		PolicyRevision: w.revision, IdentityRevision: w.revision, AddressRevision: w.revision,
	}))
	w.flush()
}

func (w *writer) flush() {
	if len(w.steps) == 0 {
		return
	}
	w.seq++
	w.frame(&vectorv1.Frame{Frame: &vectorv1.Frame_Tables{Tables: &policyv1.WatchPolicyTablesResponse{
		Format:      policywire.Format,
		Incarnation: []byte("0123456789abcdef"), Seq: w.seq, Steps: w.steps,
	}}})
	w.steps, w.size = nil, 0
}

// question is a query about one side of a connection, with its answer.
type question struct {
	name, text        string
	subject, peer     identity.Numeric
	subjectAddr, addr netip.Addr
	direction         policytable.Direction
	point             port.Point
	enforced, pod     bool
	verdict           table.Verdict
}

func (w *writer) question(q question) {
	w.figures.Questions++
	w.frame(&vectorv1.Frame{Frame: &vectorv1.Frame_Question{Question: &vectorv1.Question{
		Name: q.name, Text: q.text,
		Subject: uint32(q.subject), Direction: policywire.Direction(q.direction), Peer: uint32(q.peer),
		PeerAddress: q.addr.AsSlice(), SubjectAddress: q.subjectAddr.AsSlice(),
		Protocol: netv1.Protocol(q.point >> 16), Port: q.point & 0xFFFF,
		Action: policywire.Action(q.verdict.Action), DecidedBy: wire.DecidedBy(q.verdict, q.enforced), Rule: uint32(q.verdict.Rule),
		Pod: q.pod,
	}}})
}

func (w *writer) end() (Figures, error) {
	if w.err == nil {
		w.err = w.out.Flush()
	}
	return w.figures, w.err
}

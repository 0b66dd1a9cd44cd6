// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package export writes flows into files of JSON lines, as the static exporter of Hubble does.
//
// The exporter is a reader of its own: it delays neither the datapath nor other readers. If it falls behind, or the
// disk is full, only its files lack flows, and a line says how many.
package export

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/filter"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/mask"
	"github.com/sluice-net/sluice/services/hubble/internal/server/flowstream"
)

// Selection selects flows and their fields.
type Selection struct {
	// Allow and Deny are filters of Hubble's API as JSON objects, separated by blanks. A flow is exported if a filter of
	// Allow matches, or Allow is empty, and no filter of Deny matches.
	Allow, Deny string
	// Fields are the fields of a flow; all if empty.
	Fields []string
}

// request returns the request of Hubble's API for the selection.
func (s Selection) request() (*observer.GetFlowsRequest, error) {
	r := &observer.GetFlowsRequest{Follow: true}
	var err error
	if r.Whitelist, err = filters(s.Allow); err != nil {
		return nil, fmt.Errorf("allow: %w", err)
	}
	if r.Blacklist, err = filters(s.Deny); err != nil {
		return nil, fmt.Errorf("deny: %w", err)
	}
	if _, err := filter.New(r.GetWhitelist(), r.GetBlacklist()); err != nil {
		return nil, err
	}
	if len(s.Fields) > 0 {
		r.FieldMask = &fieldmaskpb.FieldMask{Paths: s.Fields}
		if _, err := mask.New(r.GetFieldMask()); err != nil {
			return nil, fmt.Errorf("fields: %w", err)
		}
	}
	return r, nil
}

// Validate returns an error if a filter or a field is not valid.
func (s Selection) Validate() error {
	_, err := s.request()
	return err
}

func filters(text string) (list []*flow.FlowFilter, err error) {
	decoder := json.NewDecoder(bytes.NewReader([]byte(text)))
	for {
		var one json.RawMessage
		if err := decoder.Decode(&one); errors.Is(err, io.EOF) {
			return list, nil
		} else if err != nil {
			return nil, err
		}
		f := new(flow.FlowFilter)
		if err := protojson.Unmarshal(one, f); err != nil {
			return nil, err
		}
		list = append(list, f)
	}
}

// retryAfter is the time after which a failed exporter tries again.
const retryAfter = time.Second

// Options describe an Exporter. All exported fields but Selection are required.
type Options struct {
	File string
	Selection

	MaxBytes int64 // of the file; then it is renamed, and another one begins
	Backups  int   // renamed files that are kept
	Flows    flowstream.Flows
	Log      *slog.Logger

	retry time.Duration // 0: retryAfter
}

// Exporter writes flows into files.
type Exporter struct {
	o       Options
	request *observer.GetFlowsRequest
	written prometheus.Counter
	problem prometheus.Gauge

	file *os.File
	size int64
	last time.Time // of the latest flow in the files
}

// New returns an Exporter.
func New(o Options) (*Exporter, error) {
	r, err := o.request()
	if err != nil {
		return nil, err
	}
	return &Exporter{
		o: o, request: r,
		written: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "sluice_hubble_export_lines_total", Help: "Lines that were written into the export file.",
		}),
		problem: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "sluice_hubble_export_problem", Help: "1 while flows are not exported; the log has the reason.",
		}),
	}, nil
}

// Describe implements prometheus.Collector.
func (e *Exporter) Describe(ch chan<- *prometheus.Desc) {
	e.written.Describe(ch)
	e.problem.Describe(ch)
}

// Collect implements prometheus.Collector.
func (e *Exporter) Collect(ch chan<- prometheus.Metric) {
	e.written.Collect(ch)
	e.problem.Collect(ch)
}

// Run exports until ctx ends. It continues after the last flow in the file, from the history.
func (e *Exporter) Run(ctx context.Context) error {
	defer e.close()
	for {
		err := e.export(ctx)
		if ctx.Err() != nil {
			return nil
		}
		e.problem.Set(1)
		e.o.Log.Warn("flows are not exported", "file", e.o.File, log.Err(err))
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(cmp.Or(e.o.retry, retryAfter)):
		}
	}
}

func (e *Exporter) export(ctx context.Context) error {
	if err := e.open(); err != nil {
		return err
	}
	r := &observer.GetFlowsRequest{
		Follow: true, Whitelist: e.request.GetWhitelist(), Blacklist: e.request.GetBlacklist(),
		FieldMask: e.request.GetFieldMask(),
	}
	if !e.last.IsZero() {
		r.Since = timestamppb.New(e.last.Add(1))
	}
	return e.o.Flows(r, flowstream.To(ctx, e.write))
}

// write appends a message to the file. A line is written as a whole or cut off again.
func (e *Exporter) write(m *observer.GetFlowsResponse) error {
	line, err := flowstream.Line(m)
	if err != nil {
		return err
	}
	if e.size > 0 && e.size+int64(len(line)) > e.o.MaxBytes {
		if err := e.rotate(); err != nil {
			return err
		}
	}
	if _, err := e.file.Write(line); err != nil {
		return errors.Join(err, e.file.Truncate(e.size))
	}
	e.size += int64(len(line))
	e.written.Inc()
	e.problem.Set(0)
	if m.GetFlow() != nil && m.GetTime().AsTime().After(e.last) {
		e.last = m.GetTime().AsTime()
	}
	return nil
}

// open opens the file, and finds the last flow in it. It cuts off a line that a killed process has not completed.
func (e *Exporter) open() error {
	e.close()
	f, err := os.OpenFile(e.o.File, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	tail := int64(64 << 10)
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return errors.Join(err, f.Close())
	}
	from := max(0, size-tail)
	content := make([]byte, size-from)
	if _, err := f.ReadAt(content, from); err != nil {
		return errors.Join(err, f.Close())
	}
	whole := bytes.LastIndexByte(content, '\n') + 1
	if cut := int64(len(content) - whole); cut > 0 {
		size -= cut
		if err := f.Truncate(size); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	for line := range bytes.Lines(content[:whole]) {
		m := new(observer.GetFlowsResponse)
		if protojson.Unmarshal(line, m) == nil && m.GetFlow() != nil && m.GetTime().AsTime().After(e.last) {
			e.last = m.GetTime().AsTime()
		}
	}
	e.file, e.size = f, size
	return nil
}

func (e *Exporter) close() {
	if e.file != nil {
		_ = e.file.Close() // every line was written already
		e.file = nil
	}
}

// rotate renames the file to FILE.1, FILE.1 to FILE.2, and so on, and begins another file.
func (e *Exporter) rotate() error {
	name := func(n int) string {
		if n == 0 {
			return e.o.File
		}
		return fmt.Sprintf("%s.%d", e.o.File, n)
	}
	if err := os.Remove(name(e.o.Backups)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for n := e.o.Backups - 1; n >= 0; n-- {
		if err := os.Rename(name(n), name(n+1)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return e.open()
}

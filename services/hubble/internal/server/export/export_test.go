// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package export

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var begin = time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC)

// source answers calls with flows, one in each second, and then waits for the end of the call.
type source struct {
	flows    int
	requests []*observer.GetFlowsRequest
	sent     chan struct{} // receives when all flows were sent
}

func (s *source) Flows(
	r *observer.GetFlowsRequest, stream grpc.ServerStreamingServer[observer.GetFlowsResponse],
) error {
	s.requests = append(s.requests, r)
	for i := range s.flows {
		at := begin.Add(time.Duration(i) * time.Second)
		if r.GetSince() != nil && at.Before(r.GetSince().AsTime()) {
			continue
		}
		if err := stream.Send(&observer.GetFlowsResponse{
			NodeName: "here", Time: timestamppb.New(at),
			ResponseTypes: &observer.GetFlowsResponse_Flow{Flow: &flow.Flow{Uuid: strconv.Itoa(i)}},
		}); err != nil {
			return err
		}
	}
	s.sent <- struct{}{}
	<-stream.Context().Done()
	return stream.Context().Err()
}

// run exports the flows of a source, and returns the metrics' owner.
func run(t *testing.T, s *source, o Options) *Exporter {
	t.Helper()
	s.sent = make(chan struct{}, 1)
	o.Flows, o.Log, o.retry = s.Flows, slog.New(slog.DiscardHandler), time.Millisecond
	e, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	<-s.sent
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return e
}

// uuids returns the flows in files, and fails if a line is not JSON of Hubble.
func uuids(t *testing.T, files ...string) (list []string) {
	t.Helper()
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(content)) {
			_, rest, ok := strings.Cut(line, `{"flow":{"uuid":"`)
			id, rest, _ := strings.Cut(rest, `"`)
			if !ok || !strings.HasSuffix(rest, "}\n") || !strings.Contains(rest, `"node_name":"here"`) {
				t.Fatalf("%s has the line %q", file, line)
			}
			list = append(list, id)
		}
	}
	return list
}

func wantNumbers(t *testing.T, got []string, from, to int) {
	t.Helper()
	var want []string
	for i := from; i < to; i++ {
		want = append(want, strconv.Itoa(i))
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("the files have %v, want %d to %d", got, from, to-1)
	}
}

func TestExportContinuesAfterTheLastFlow(t *testing.T) {
	file := filepath.Join(t.TempDir(), "flows.json")
	s, o := &source{flows: 10}, Options{File: file, MaxBytes: 1 << 20, Backups: 1}
	if e := run(t, s, o); testutil.ToFloat64(e.written) != 10 {
		t.Errorf("%v lines were counted", testutil.ToFloat64(e.written))
	}
	if stat, err := os.Stat(file); err != nil || stat.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", stat.Mode(), err)
	}
	// A killed process leaves a part of a line.
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"flow":{"uuid":"10"`); err != nil || f.Close() != nil {
		t.Fatal(err)
	}
	s.flows = 15
	run(t, s, o)
	wantNumbers(t, uuids(t, file), 0, 15)
}

func TestExportRotatesItsFiles(t *testing.T) {
	file := filepath.Join(t.TempDir(), "flows.json")
	s, o := &source{flows: 100}, Options{File: file, MaxBytes: 1000, Backups: 2}
	run(t, s, o)
	all := uuids(t, file+".2", file+".1", file)
	first, err := strconv.Atoi(all[0])
	if err != nil || first == 0 {
		t.Errorf("the first flow is %s, %v: no file was removed", all[0], err)
	}
	wantNumbers(t, all, first, 100)
	for _, name := range []string{file, file + ".1", file + ".2"} {
		if stat, err := os.Stat(name); err != nil || stat.Size() > o.MaxBytes {
			t.Errorf("%s: %v, %v", name, stat.Size(), err)
		}
	}
	if _, err := os.Stat(file + ".3"); err == nil {
		t.Error("there are more files than backups")
	}
}

func TestExportWaitsForAFileThatCanBeWritten(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "missing")
	s := &source{flows: 5, sent: make(chan struct{}, 1)}
	e, err := New(Options{
		File: filepath.Join(dir, "flows.json"), MaxBytes: 1 << 20, Backups: 1, Flows: s.Flows,
		Log: slog.New(slog.DiscardHandler), retry: time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	for testutil.ToFloat64(e.problem) == 0 {
		select {
		case err := <-done:
			t.Fatal(err)
		case <-time.After(time.Millisecond): // until the first attempt has failed
		}
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	<-s.sent
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	wantNumbers(t, uuids(t, filepath.Join(dir, "flows.json")), 0, 5)
	if testutil.ToFloat64(e.problem) != 0 {
		t.Error("the problem is still reported")
	}
}

func TestSelectionIsARequestOfHubble(t *testing.T) {
	s := &source{flows: 1}
	run(t, s, Options{
		File: filepath.Join(t.TempDir(), "flows.json"), MaxBytes: 1 << 20, Backups: 1, Selection: Selection{
			Allow: `{"verdict":["DROPPED"]} {"source_pod":["shop/"]}`, Deny: `{"destination_port":["53"]}`,
			Fields: []string{"uuid", "source.pod_name"},
		},
	})
	r := s.requests[0]
	if len(r.GetWhitelist()) != 2 || r.GetWhitelist()[1].GetSourcePod()[0] != "shop/" || len(r.GetBlacklist()) != 1 ||
		len(r.GetFieldMask().GetPaths()) != 2 || !r.GetFollow() {
		t.Errorf("asked for %v", r)
	}
	for _, wrong := range []Selection{
		{Allow: `{"verdict":`}, {Deny: `{"unknown":1}`}, {Allow: `{"source_ip":["x"]}`}, {Fields: []string{"unknown"}},
	} {
		if err := wrong.Validate(); err == nil || errors.Is(err, context.Canceled) {
			t.Errorf("%+v: %v", wrong, err)
		}
	}
}

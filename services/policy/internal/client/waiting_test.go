// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// waitingLabels sends label changes and receives admissions.
type waitingLabels struct {
	identityv1.UnimplementedIdentityServiceServer
	send     chan *identityv1.WatchWaitingLabelsResponse // nil ends the stream
	admitted chan uint64
}

func (w *waitingLabels) WatchWaitingLabels(
	_ *identityv1.WatchWaitingLabelsRequest, stream grpc.ServerStreamingServer[identityv1.WatchWaitingLabelsResponse],
) error {
	for {
		select {
		case m := <-w.send:
			if m == nil {
				return errors.New("ended by the test")
			}
			if err := stream.Send(m); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		}
	}
}

func (w *waitingLabels) AdmitLabels(
	_ context.Context, req *identityv1.AdmitLabelsRequest,
) (*identityv1.AdmitLabelsResponse, error) {
	w.admitted <- req.GetChange()
	return &identityv1.AdmitLabelsResponse{}, nil
}

// TestChangesThatNarrowAreAdmitted: a label change that only removes permissions is admitted, also after the stream
// was interrupted.
func TestChangesThatNarrowAreAdmitted(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	w := &waitingLabels{send: make(chan *identityv1.WatchWaitingLabelsResponse), admitted: make(chan uint64)}
	srv, done := grpc.NewServer(), make(chan error, 1)
	identityv1.RegisterIdentityServiceServer(srv, w)
	go func() { done <- srv.Serve(l) }()
	conn, err := client.Dial(socket, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); srv.Stop(); <-done })
	narrows := func(_ context.Context, n identity.Numeric, labels label.Set) (bool, error) {
		return n == 300 && labels.Has(label.Kubernetes("quarantine", "true")), nil
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- AdmitNarrowing(ctx, conn, narrows, slog.New(slog.DiscardHandler)) }()
	change := func(number uint64, id uint32, key string) *identityv1.WatchWaitingLabelsResponse {
		return &identityv1.WatchWaitingLabelsResponse{
			Change: number, Identity: id, Labels: []*workloadv1.Label{{Source: "k8s", Key: key, Value: "true"}},
		}
	}
	for round := range uint64(2) {
		w.send <- &identityv1.WatchWaitingLabelsResponse{}
		w.send <- change(10*round+1, 300, "other")
		w.send <- change(10*round+2, 301, "quarantine")
		w.send <- change(10*round+3, 300, "quarantine")
		if got := <-w.admitted; got != 10*round+3 {
			t.Errorf("change %d is admitted", got)
		}
		w.send <- nil
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

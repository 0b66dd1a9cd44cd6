// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package watch

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// serveBlocked runs Serve with a send that blocks like gRPC's Send to a client that does not read:
// it returns only after the handler has returned.
func serveBlocked(t *testing.T, h *Hub[string, int], blockAt int) (ended chan error, entered *atomic.Int32, release func()) {
	t.Helper()
	ended, entered = make(chan error, 1), new(atomic.Int32)
	over := make(chan struct{})
	go func() {
		ended <- Serve(t.Context(), h, nil, func(Event[string, int]) error {
			if int(entered.Add(1)) == blockAt {
				<-over
			}
			return nil
		})
	}()
	return ended, entered, func() { close(over) }
}

func TestServeEndsAReaderThatIsBehindWhileItsSendBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub[string, int](Options[int]{Pending: 4})
		ended, entered, release := serveBlocked(t, h, 2)
		h.Upsert("first", 1)
		synctest.Wait()
		for _, k := range []string{"a", "b", "c", "d", "e"} {
			h.Upsert(k, 1)
		}
		synctest.Wait()
		select {
		case err := <-ended:
			if status.Code(err) != codes.ResourceExhausted {
				t.Errorf("Serve ended with %v, want RESOURCE_EXHAUSTED", err)
			}
		default:
			t.Errorf("Serve has not ended: %d readers, 5 keys are pending, the limit is 4", h.Readers())
		}
		if h.Readers() != 0 {
			t.Errorf("%d readers are open, want 0", h.Readers())
		}
		release()
		synctest.Wait()
		if n := entered.Load(); n != 2 {
			t.Errorf("send was called %d times, want 2: no send after the end", n)
		}
	})
}

func TestServeEndsAReaderThatAcceptsNothingForTooLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub[string, int](Options[int]{})
		ended, _, release := serveBlocked(t, h, 1)
		time.Sleep(SendTimeout - time.Nanosecond)
		synctest.Wait()
		select {
		case err := <-ended:
			t.Errorf("Serve ended early, with %v", err)
		default:
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		select {
		case err := <-ended:
			if status.Code(err) != codes.ResourceExhausted {
				t.Errorf("Serve ended with %v, want RESOURCE_EXHAUSTED", err)
			}
		default:
			t.Errorf("Serve has not ended %v after a send began", SendTimeout)
		}
		release()
	})
}

func TestServeLeavesAReaderAloneThatIsSlowAndReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub[string, int](Options[int]{})
		for _, k := range []string{"a", "b", "c", "d", "e"} {
			h.Upsert(k, 1)
		}
		n := 0
		done := errors.New("everything was sent")
		err := Serve(t.Context(), h, nil, func(Event[string, int]) error {
			time.Sleep(SendTimeout - time.Second)
			if n++; n == 6 {
				return done
			}
			return nil
		})
		if !errors.Is(err, done) {
			t.Errorf("Serve ended after %d events with %v", n, err)
		}
	})
}

// TestServeFreesTheHandlerOfAClientThatNeverReads: the client of a real connection keeps it alive, but never reads the
// stream.
func TestServeFreesTheHandlerOfAClientThatNeverReads(t *testing.T) {
	h := NewHub[int, []byte](Options[[]byte]{Pending: 64})
	handlers := make(chan error, 1)
	dir, err := os.MkdirTemp("", "watch-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	srv.RegisterService(&grpc.ServiceDesc{
		ServiceName: "test.Watch",
		HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{StreamName: "Watch", ServerStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
			err := Serve(s.Context(), h, nil, func(e Event[int, []byte]) error { return s.SendMsg(wrapperspb.Bytes(e.Value)) })
			handlers <- err
			return err
		}}},
	}, struct{}{})
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	stream, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, "/test.Watch/Watch")
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	var ended error
	for i := 0; ended == nil; i++ {
		h.Upsert(i%256, make([]byte, 64<<10))
		select {
		case ended = <-handlers:
		default:
		}
		if i == 1_000_000 {
			t.Fatal("the handler has not ended after a million changes")
		}
	}
	if status.Code(ended) != codes.ResourceExhausted || h.Readers() != 0 {
		t.Errorf("the handler ended with %v, %d readers are open; want RESOURCE_EXHAUSTED and 0", ended, h.Readers())
	}
	// A client that later reads receives the events that were sent, and then the reason.
	for err == nil {
		err = stream.RecvMsg(&wrapperspb.BytesValue{})
	}
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("the client got %v, want RESOURCE_EXHAUSTED", err)
	}
	conn.Close()
	srv.Stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

func TestServeBatchesSendsWhatWaitsInOneMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub[string, int](Options[int]{})
		for _, k := range []string{"a", "b", "c", "d", "e"} {
			h.Upsert(k, 1)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var sizes []int
		var last Event[string, int]
		//nolint:errcheck // it ends with the context
		go ServeBatches(ctx, h, nil, 4, func(events []Event[string, int]) error {
			sizes = append(sizes, len(events))
			last = events[len(events)-1]
			return nil
		})
		synctest.Wait()
		if want := []int{4, 2}; !slices.Equal(sizes, want) { // five keys and the bookmark
			t.Errorf("messages of %v events, want %v", sizes, want)
		}
		if last.Kind != Bookmark || !last.SnapshotComplete {
			t.Errorf("the last event is %+v, want the bookmark of the listing", last)
		}
		h.Upsert("f", 1)
		synctest.Wait()
		if want := []int{4, 2, 1}; !slices.Equal(sizes, want) || last.Key != "f" {
			t.Errorf("messages of %v events, the last one of %q, want %v and f", sizes, last.Key, want)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// raw passes messages as bytes.
type raw struct{}

func (raw) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil } //nolint:forcetypeassert // tests pass no other

func (raw) Unmarshal(b []byte, v any) error {
	*v.(*[]byte) = bytes.Clone(b) //nolint:forcetypeassert // tests pass no other
	return nil
}

func (raw) Name() string { return "raw" }

// repeat is a service whose methods repeat messages. The method "fail" ends with an error after the first one.
func repeat(_ any, s grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(s)
	md, _ := metadata.FromIncomingContext(s.Context())
	s.SetTrailer(metadata.Pairs("method", method, "key-bin", string([]byte{0, 255, 7})))
	if err := s.SendHeader(metadata.Pairs("echo", strings.Join(md.Get("word"), ","))); err != nil {
		return err
	}
	for {
		var b []byte
		if err := s.RecvMsg(&b); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if strings.HasSuffix(method, "/fail") {
			return status.Error(codes.DataLoss, "50 % lost: ä")
		}
		if strings.HasSuffix(method, "/wait") {
			<-s.Context().Done()
			return s.Context().Err()
		}
		if err := s.SendMsg(&b); err != nil {
			return err
		}
	}
}

func grpcServer(t testing.TB) string {
	t.Helper()
	address, _ := startGRPC(t)
	return address
}

func startGRPC(t testing.TB) (string, *grpc.Server) {
	t.Helper()
	l := listen(t)
	s := grpc.NewServer(grpc.UnknownServiceHandler(repeat), grpc.ForceServerCodec(raw{}))
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	return l.Addr().String(), s
}

func grpcClient(t testing.TB, address string) *grpc.ClientConn {
	t.Helper()
	c, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{})), grpc.WithDisableRetry())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

var both = &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}

func TestGRPCStreamsAndTrailers(t *testing.T) {
	n := relayTo(t, grpcServer(t), &Options{Decide: public})
	c := grpcClient(t, n.address)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "word", "one", "blob-bin", "\x00\xff")

	t.Run("unary", func(t *testing.T) {
		in, out := []byte("hello"), []byte(nil)
		var header, trailer metadata.MD
		err := c.Invoke(ctx, "/grpc.open/unary", &in, &out, grpc.Header(&header), grpc.Trailer(&trailer))
		if err != nil || string(out) != "hello" || header.Get("echo")[0] != "one" ||
			trailer.Get("method")[0] != "/grpc.open/unary" || trailer.Get("key-bin")[0] != "\x00\xff\x07" {
			t.Errorf("%v, %q, %v, %v", err, out, header, trailer)
		}
	})
	t.Run("large messages", func(t *testing.T) {
		in, out := bytes.Repeat([]byte{7}, 3<<20), []byte(nil)
		if err := c.Invoke(ctx, "/grpc.open/unary", &in, &out); err != nil || !bytes.Equal(in, out) {
			t.Errorf("%v, %d bytes", err, len(out))
		}
	})
	t.Run("streams at the same time", func(t *testing.T) {
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() {
				s, err := c.NewStream(ctx, both, "/grpc.open/stream")
				if err != nil {
					t.Error(err)
					return
				}
				for k := range 50 {
					in, out := []byte(strings.Repeat(fmt.Sprint(i), k*100)), []byte(nil)
					if err := errors.Join(s.SendMsg(&in), s.RecvMsg(&out)); err != nil || !bytes.Equal(in, out) {
						t.Errorf("%d, %d: %v", i, k, err)
						return
					}
				}
				var out []byte
				if err := errors.Join(s.CloseSend(), s.RecvMsg(&out)); !errors.Is(err, io.EOF) {
					t.Errorf("%d: %v", i, err)
				}
				if s.Trailer().Get("method")[0] != "/grpc.open/stream" {
					t.Errorf("%d: trailers %v", i, s.Trailer())
				}
			})
		}
		wg.Wait()
	})
	t.Run("an error of the server", func(t *testing.T) {
		in, out := []byte("hello"), []byte(nil)
		err := c.Invoke(ctx, "/grpc.open/fail", &in, &out)
		if s := status.Convert(err); s.Code() != codes.DataLoss || s.Message() != "50 % lost: ä" {
			t.Errorf("%v", err)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		short, cancel := context.WithCancel(ctx)
		s, err := c.NewStream(short, both, "/grpc.open/wait")
		if err != nil {
			t.Fatal(err)
		}
		in, out := []byte("hello"), []byte(nil)
		_, _ = s.Header()
		if err := s.SendMsg(&in); err != nil {
			t.Error(err)
		}
		cancel()
		if err := s.RecvMsg(&out); status.Code(err) != codes.Canceled {
			t.Errorf("%v", err)
		}
	})
	t.Run("refused", func(t *testing.T) {
		for range 3 {
			in, out := bytes.Repeat([]byte{7}, 1<<20), []byte(nil)
			err := c.Invoke(ctx, "/grpc.closed/unary", &in, &out)
			if s := status.Convert(err); s.Code() != codes.PermissionDenied || s.Message() != "Access denied" {
				t.Errorf("unary: %v", err)
			}
			s, err := c.NewStream(ctx, both, "/grpc.closed/stream")
			if err != nil {
				t.Fatal(err)
			}
			if err := s.RecvMsg(&out); status.Code(err) != codes.PermissionDenied {
				t.Errorf("stream: %v", err)
			}
		}
	})
	t.Run("goes on after refusals", func(t *testing.T) {
		in, out := []byte("again"), []byte(nil)
		if err := c.Invoke(ctx, "/grpc.open/unary", &in, &out); err != nil || string(out) != "again" {
			t.Errorf("%v, %q", err, out)
		}
	})
}

// TestGOAWAYOfTheServerPasses: a server that stops lets an open stream end, and takes no new one.
func TestGOAWAYOfTheServerPasses(t *testing.T) {
	address, server := startGRPC(t)
	n := relayTo(t, address, &Options{Decide: public})
	c := grpcClient(t, n.address)
	s, err := c.NewStream(t.Context(), both, "/grpc.open/stream")
	if err != nil {
		t.Fatal(err)
	}
	exchange := func() {
		t.Helper()
		in, out := []byte("hello"), []byte(nil)
		if err := errors.Join(s.SendMsg(&in), s.RecvMsg(&out)); err != nil || string(out) != "hello" {
			t.Errorf("%v, %q", err, out)
		}
	}
	exchange()
	stopped := make(chan struct{})
	go func() {
		server.GracefulStop()
		close(stopped)
	}()
	// The client leaves the connection once it reads GOAWAY.
	for state := connectivity.Ready; c.GetState() == state; {
		if !c.WaitForStateChange(t.Context(), state) {
			t.Fatal("the client goes on")
		}
	}
	exchange()
	var out []byte
	if err := errors.Join(s.CloseSend(), s.RecvMsg(&out)); !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
	<-stopped
	for _, err := range n.errors() {
		if err != nil {
			t.Error(err)
		}
	}
}

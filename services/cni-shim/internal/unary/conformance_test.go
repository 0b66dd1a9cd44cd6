// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package unary

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/requestid"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/cni-shim/internal/message"
)

// handlers is a datapath whose calls a test carries out. Without a handler it gives
// back the owners that it was given.
type handlers struct {
	datapathv1.UnimplementedDatapathServiceServer
	reclaim func(ctx context.Context) error
}

func (h *handlers) ReclaimEndpoints(ctx context.Context,
	r *datapathv1.ReclaimEndpointsRequest,
) (*datapathv1.ReclaimEndpointsResponse, error) {
	if h.reclaim != nil {
		if err := h.reclaim(ctx); err != nil {
			return nil, err
		}
	}
	return &datapathv1.ReclaimEndpointsResponse{Reclaimed: r.GetValidOwners()}, nil
}

func socket(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "u") // t.TempDir may be too long
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "s")
}

// serve starts grpc-go's server on the socket.
func serve(t testing.TB, path string, reclaim func(context.Context) error, opts ...grpc.ServerOption) *grpc.Server {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(opts...)
	datapathv1.RegisterDatapathServiceServer(s, &handlers{reclaim: reclaim})
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s
}

func client(t testing.TB, path string) Client {
	t.Helper()
	c, err := New(path, 16<<20)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// patience is for what must happen.
func patience(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// reclaim makes the call that the tests make.
func reclaim(ctx context.Context, c Client, owners ...string) ([]string, error) {
	req, resp := &message.ReclaimEndpointsRequest{Manager: "cni"}, &message.ReclaimEndpointsResponse{}
	for _, o := range owners {
		req.ValidOwners = append(req.ValidOwners, &message.Owner{ContainerID: o})
	}
	err := c.Call(ctx, message.ReclaimEndpoints, req, resp)
	var back []string
	for _, o := range resp.Reclaimed {
		back = append(back, o.ContainerID)
	}
	return back, err
}

// reference makes it by grpc-go.
func reference(ctx context.Context, t testing.TB, path string, owners ...string) error {
	t.Helper()
	cc, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDisableRetry(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxReceive)))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	req := &datapathv1.ReclaimEndpointsRequest{}
	for _, o := range owners {
		req.ValidOwners = append(req.ValidOwners, &workloadv1.Owner{ContainerId: o})
	}
	_, err = datapathv1.NewDatapathServiceClient(cc).ReclaimEndpoints(ctx, req)
	return err
}

func asError(t testing.TB, err error) *Error {
	t.Helper()
	e, ok := errors.AsType[*Error](err)
	if !ok {
		t.Fatalf("%v is no *Error", err)
	}
	return e
}

func TestAnswersOfTheRealServerAreRead(t *testing.T) {
	text := "100% of \"ä\" 😀\n\x00\tis used"
	answers := []error{errors.New("no status"), context.DeadlineExceeded, status.Error(codes.Code(99), "unheard of")}
	for code := codes.OK; code <= codes.Unauthenticated; code++ {
		answers = append(
			answers, status.Error(code, text), status.Error(code, ""), status.Error(code, strings.Repeat("%", 4000)),
			rpcerr.New(code, rpcerr.Of(datapathv1.ErrorReason_ERROR_REASON_LEASE_LOST), fmt.Errorf("%s: %w", text,
				syscall.ENOSPC),
				rpcerr.Retry(1500*time.Millisecond), rpcerr.Field("mtu", "is 7"), rpcerr.Field("labels", "are many"),
				rpcerr.Quota("pool:10.0.0.0/24", "full"),
				rpcerr.Metadata(map[string]string{"file": "/state", "ä": ""}), rpcerr.Resource("x", "y", "z")),
		)
	}
	// The longest that services send: several frames of headers.
	big := &errdetails.BadRequest{}
	for range rpcerr.MaxViolations {
		big.FieldViolations = append(big.FieldViolations, &errdetails.BadRequest_FieldViolation{
			Field: strings.Repeat("f", rpcerr.MaxWords), Description: strings.Repeat("d", rpcerr.MaxWords),
			Reason: strings.Repeat("r", rpcerr.MaxWords),
		})
	}
	answers = append(answers, rpcerr.New(codes.InvalidArgument,
		rpcerr.Of(datapathv1.ErrorReason_ERROR_REASON_INVALID_REQUEST),
		errors.New(strings.Repeat("x", rpcerr.MaxText)), big))

	var answer error
	path := socket(t)
	serve(t, path, func(context.Context) error { return answer })
	c := client(t, path)
	for _, answer = range answers {
		_, err := reclaim(patience(t), c)
		want := reference(patience(t), t, path)
		st := status.Convert(want)
		if CodeOf(err) != Code(st.Code()) {
			t.Errorf("%v: code %s, want %s", answer, CodeOf(err), st.Code())
		}
		if want == nil || err == nil {
			if want != nil || err != nil {
				t.Errorf("%v: error %v, want %v", answer, err, want)
			}
			continue
		}
		if e := asError(t, err); e.Message != st.Message() || e.Unsent || err.Error() != want.Error() {
			t.Errorf("message %q, unsent %v; want %q", e.Message, e.Unsent, st.Message())
		}
		reason, facts, ok := Reason(err)
		if r, has := rpcerr.ReasonIn(want); has != ok || has && r.String() != reason {
			t.Errorf("%v: reason %s, want %s", answer, reason, r)
		}
		if f := rpcerr.Facts(want); len(f) != len(facts) || len(f) > 0 && (facts["errno"] != f["errno"] ||
			facts["file"] != f["file"]) {
			t.Errorf("%v: facts %v, want %v", answer, facts, f)
		}
		delay, retry := RetryDelay(err)
		if d, has := rpcerr.RetryDelay(want); has != retry || d != delay {
			t.Errorf("%v: delay %s, want %s", answer, delay, d)
		}
		fields, quotas := rpcerr.Fields(want), rpcerr.Quotas(want)
		if len(fields) != len(Fields(err)) || len(quotas) != len(Quotas(err)) {
			t.Fatalf("%v: %d fields and %d quotas, want %d and %d", answer, len(Fields(err)), len(Quotas(err)),
				len(fields), len(quotas))
		}
		for i, f := range Fields(err) {
			if f.Field != fields[i].GetField() || f.Description != fields[i].GetDescription() {
				t.Errorf("field %v, want %v", f, fields[i])
			}
		}
		for i, q := range Quotas(err) {
			if q.Subject != quotas[i].GetSubject() || q.Description != quotas[i].GetDescription() {
				t.Errorf("quota %v, want %v", q, quotas[i])
			}
		}
	}
}

func TestOtherErrorsHaveNoAnswer(t *testing.T) {
	wrapped := fmt.Errorf("add: %w", &Error{Code: Aborted, Message: "race"})
	for err, want := range map[error]Code{
		nil: OK, errors.New("x"): Unknown, wrapped: Aborted,
		context.DeadlineExceeded: Unknown,
	} {
		if _, _, ok := Reason(err); ok || CodeOf(err) != want {
			t.Errorf("%v: code %s, a reason: %v", err, CodeOf(err), ok)
		}
		if _, ok := RetryDelay(err); ok || Fields(err) != nil || Quotas(err) != nil {
			t.Errorf("%v has details", err)
		}
	}
	for c := codes.OK; c < 20; c++ {
		if Code(c).String() != c.String() {
			t.Errorf("%d is %s, want %s", c, Code(c), c)
		}
	}
	if Code(-1).String() != "Code(-1)" {
		t.Errorf("-1 is %s", Code(-1))
	}
	negative := &Error{Details: []*message.Any{{
		TypeURL: "type.googleapis.com/google.rpc.RetryInfo",
		Value:   []byte{0x0a, 0x02, 0x10, 0x05},
	}}}
	if d, ok := RetryDelay(negative); !ok || d != 5 {
		t.Errorf("delay %s, %v", d, ok)
	}
}

func TestMessagesOfAnySizeGoBothWays(t *testing.T) {
	for name, opts := range map[string][]grpc.ServerOption{
		"as they are": {grpc.MaxRecvMsgSize(32 << 20), grpc.MaxSendMsgSize(32 << 20)},
		// The server opens windows as the data come.
		"fixed windows": {
			grpc.MaxRecvMsgSize(32 << 20), grpc.StaticStreamWindowSize(1 << 16),
			grpc.StaticConnWindowSize(1 << 16),
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := socket(t)
			serve(t, path, nil, opts...)
			c := client(t, path)
			for _, size := range []int{
				0, 1, 1000, 16<<10 - 100, 16 << 10, 65530, 65536, 1 << 20, 15 << 20,
				15 << 20, 3,
			} {
				owners := []string{strings.Repeat("o", size), "second"}
				back, err := reclaim(patience(t), c, owners...)
				if err != nil || !slices.Equal(back, owners) {
					t.Fatalf("%d bytes: %v, %d owners", size, err, len(back))
				}
			}
			if _, err := reclaim(patience(t), c, strings.Repeat("o", 16<<20)); CodeOf(err) != ResourceExhausted ||
				!asError(t, err).Unsent {
				t.Errorf("a request above the limit: %v", err)
			}
			c.maxSend = 32 << 20
			if _, err := reclaim(patience(t), c, strings.Repeat("o", MaxReceive)); CodeOf(err) != ResourceExhausted {
				t.Errorf("an answer above the limit: %v", err)
			}
			if back, err := reclaim(patience(t), c, "after"); err != nil || len(back) != 1 {
				t.Errorf("the call after it: %v", err)
			}
		})
	}
}

// TestEarlyAnswerEndsALargeRequest: the server answers before it has read the whole request, and does not read the
// rest.
func TestEarlyAnswerEndsALargeRequest(t *testing.T) {
	path := socket(t)
	serve(t, path, nil) // takes 4 MiB
	c := client(t, path)
	for range 3 {
		_, err := reclaim(patience(t), c, strings.Repeat("o", 12<<20))
		if want := reference(patience(t), t, path, strings.Repeat("o", 4<<20)); CodeOf(err) != Code(status.Code(want)) {
			t.Fatalf("%v, want the code of %v", err, want)
		}
	}
	if _, err := reclaim(patience(t), c); err != nil {
		t.Error(err)
	}
}

func TestHeadersOfTheServerMayBeLarge(t *testing.T) {
	path := socket(t)
	round := 0
	serve(t, path, func(ctx context.Context) error {
		round++
		// Repeated ones come from the table, new ones are put into it.
		return errors.Join(
			grpc.SetHeader(ctx, metadata.Pairs("a", strings.Repeat("a", 40_000), "same", "value", "new",
				fmt.Sprint(round))),
			grpc.SetTrailer(ctx, metadata.Pairs("b-bin", strings.Repeat("\x00", 60_000), "same", "value",
				fmt.Sprint("name", round), "x")))
	})
	c := client(t, path)
	for range 20 {
		if back, err := reclaim(patience(t), c, "o"); err != nil || len(back) != 1 {
			t.Fatal(err)
		}
	}
}

func TestRequestIDAndDeadlineReachTheServer(t *testing.T) {
	path := socket(t)
	type seen struct {
		ids      []string
		deadline time.Time
		has      bool
	}
	calls := make(chan seen, 1)
	serve(t, path, func(ctx context.Context) error {
		var s seen
		md, _ := metadata.FromIncomingContext(ctx)
		s.ids = md.Get(requestid.Key)
		s.deadline, s.has = ctx.Deadline()
		calls <- s
		return nil
	})
	c := client(t, path)
	for _, timeout := range []time.Duration{
		0, 30 * time.Second, 10 * time.Minute, 200 * time.Hour,
		20_000 * time.Hour,
	} {
		ctx := requestid.Into(t.Context(), "r1")
		if timeout == 0 {
			ctx = t.Context()
		} else {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, timeout)
			defer cancel()
		}
		if _, err := reclaim(ctx, c); err != nil {
			t.Fatal(err)
		}
		s := <-calls
		if timeout == 0 {
			if s.has || len(s.ids) > 0 {
				t.Errorf("deadline %v, id %v without them", s.has, s.ids)
			}
			continue
		}
		want, _ := ctx.Deadline()
		if late := s.deadline.Sub(want); !slices.Equal(s.ids, []string{"r1"}) || !s.has || late < -time.Second ||
			late > time.Minute {
			t.Errorf("%s: the server's deadline is %s after the caller's, id %v", timeout, late, s.ids)
		}
	}
	for d, want := range map[time.Duration]string{
		1: "1n", 99_999_999: "99999999n", 100_000_000: "100000u", 100_000_001: "100001u", 30 * time.Second: "30000000u",
		10 * time.Minute: "600000m", 1<<63 - 1: "99999999S", 99_999_999 * time.Second: "99999999S",
	} {
		if got := timeoutText(d); got != want {
			t.Errorf("%s is %s, want %s", d, got, want)
		}
	}
}

func TestCallEndsWithItsContext(t *testing.T) {
	path := socket(t)
	began, over := make(chan struct{}, 1), make(chan struct{}, 1)
	stuck := true
	serve(t, path, func(ctx context.Context) error {
		if !stuck {
			return nil
		}
		began <- struct{}{}
		<-ctx.Done()
		over <- struct{}{}
		return ctx.Err()
	})
	c := client(t, path)

	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-began; cancel() }()
	_, err := reclaim(ctx, c)
	if e := asError(t, err); e.Code != Canceled || e.Unsent {
		t.Errorf("cancelled: %v", err)
	}
	<-over // the server was told

	for range 3 {
		ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, err = reclaim(ctx, c)
		cancel()
		if e := asError(t, err); e.Code != DeadlineExceeded {
			t.Errorf("too late: %v", err)
		}
		<-began
		<-over
	}
	for _, ctx := range []context.Context{ctx, func() context.Context {
		ctx,
			cancel := context.WithCancel(t.Context())
		cancel()
		return ctx
	}()} {
		if _, err := reclaim(ctx, c); CodeOf(err) != Code(status.FromContextError(ctx.Err()).Code()) || !asError(t,
			err).Unsent {
			t.Errorf("a context that has ended: %v", err)
		}
	}
	stuck = false
	if _, err := reclaim(patience(t), c); err != nil {
		t.Errorf("the call after those: %v", err)
	}
}

// TestCallToAStuckServerEndsAtItsDeadline: the server does not accept connections.
func TestCallToAStuckServerEndsAtItsDeadline(t *testing.T) {
	path := socket(t)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, size := range []int{1, 8 << 20} { // a full buffer blocks the write
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		c := client(t, path)
		if _, err := reclaim(ctx, c, strings.Repeat("o", size)); CodeOf(err) != DeadlineExceeded {
			t.Errorf("%d bytes: %v", size, err)
		}
		cancel()
	}
}

func TestServerThatEndsDuringACall(t *testing.T) {
	path := socket(t)
	var s *grpc.Server
	var ready sync.WaitGroup
	ready.Add(1)
	began, release := make(chan struct{}, 1), make(chan struct{})
	graceful := true
	s = serve(t, path, func(ctx context.Context) error {
		ready.Wait()
		began <- struct{}{}
		if graceful {
			<-release
			return nil
		}
		<-ctx.Done()
		return ctx.Err()
	})
	ready.Done()
	// A graceful stop lets the call end well.
	c := client(t, path)
	stopped := make(chan struct{})
	go func() {
		<-began
		go func() { s.GracefulStop(); close(stopped) }()
		for { // the server has said GOAWAY when it takes no connection
			c, err := net.Dial("unix", path)
			if err != nil {
				break
			}
			c.Close()
		}
		close(release)
	}()
	if back, err := reclaim(patience(t), c, "o"); err != nil || len(back) != 1 {
		t.Errorf("a call during a graceful stop: %v", err)
	}
	<-stopped
	graceful = false
	s = serve(t, path, func(ctx context.Context) error { began <- struct{}{}; <-ctx.Done(); return nil })
	go func() { <-began; s.Stop() }()
	_, err := reclaim(patience(t), c)
	if e := asError(t, err); e.Code != Unavailable || e.Unsent {
		t.Errorf("a server that ends: %v, unsent %v", err, e.Unsent)
	}
}

func TestAbsentServerIsNamedInTheKernelsWords(t *testing.T) {
	path := socket(t)
	c := client(t, path)
	want := func(errno syscall.Errno) {
		t.Helper()
		_, err := reclaim(patience(t), c)
		if e := asError(t, err); e.Code != Unavailable || !e.Unsent || !errors.Is(err, errno) ||
			e.Message != "dial unix "+path+": connect: "+errno.Error() {
			t.Errorf("%v, want %v", err, errno)
		}
		if err := c.Probe(); !errors.Is(err, errno) {
			t.Errorf("probe: %v", err)
		}
	}
	want(syscall.ENOENT)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := c.Probe(); err != nil {
		t.Error(err)
	}
	l.Close()
	want(syscall.ECONNREFUSED)
	for _, bad := range []string{"x.sock", "/" + strings.Repeat("x", 107)} {
		if _, err := New(bad, 1); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

// TestFullQueueIsUnavailable: the client does not wait for a full accept queue.
func TestFullQueueIsUnavailable(t *testing.T) {
	path := socket(t)
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}), syscall.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	first, err := dial(path)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if _, err := reclaim(patience(t), client(t, path)); CodeOf(err) != Unavailable || !errors.Is(err, syscall.EAGAIN) {
		t.Errorf("%v", err)
	}
}

func TestCompressedAnswerIsRefused(t *testing.T) {
	path := socket(t)
	serve(t, path, nil, grpc.RPCCompressor(grpc.NewGZIPCompressor())) //nolint:staticcheck // that nobody asked for
	if _, err := reclaim(patience(t), client(t, path), strings.Repeat("o", 1000)); CodeOf(err) != Internal ||
		!strings.Contains(err.Error(), "gzip") {
		t.Errorf("%v", err)
	}
}

func TestUnknownMethodIsUnimplemented(t *testing.T) {
	path := socket(t)
	serve(t, path, nil)
	c := client(t, path)
	for range 2 {
		err := c.Call(patience(t), "/no.Service/Method", &message.GetStatusRequest{}, &message.ReleaseResponse{})
		if CodeOf(err) != Unimplemented {
			t.Errorf("%v", err)
		}
	}
}

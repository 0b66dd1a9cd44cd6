// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package page

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/leaktest"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// answers simulates the stream of a call of sluice-policy.
type answers[T any] struct {
	grpc.ClientStream
	left []*T
}

func (a *answers[T]) Recv() (*T, error) {
	if len(a.left) == 0 {
		return nil, io.EOF
	}
	m := a.left[0]
	a.left = a.left[1:]
	return m, nil
}

// policies simulates sluice-policy.
type policies struct{ listed *policyv1.ListPoliciesRequest }

func (p *policies) ListPolicies(_ context.Context, r *policyv1.ListPoliciesRequest, _ ...grpc.CallOption) (
	grpc.ServerStreamingClient[policyv1.ListPoliciesResponse], error,
) {
	p.listed = r
	return &answers[policyv1.ListPoliciesResponse]{left: []*policyv1.ListPoliciesResponse{
		{Policy: &policyv1.Policy{Source: "file", Revision: 7, Manifest: []byte("kind: NetworkPolicy\n")}},
	}}, nil
}

func (*policies) Diff(_ context.Context, r *policyv1.DiffRequest, _ ...grpc.CallOption) (
	grpc.ServerStreamingClient[policyv1.DiffResponse], error,
) {
	if !strings.Contains(string(r.GetManifests()), "NetworkPolicy") {
		return nil, status.Error(codes.InvalidArgument, "document 1: no policy")
	}
	return &answers[policyv1.DiffResponse]{left: []*policyv1.DiffResponse{{Subject: 17_000}}}, nil
}

// serve runs a server whose calls for flows answer with one flow and then, if release is not nil, wait for it or for
// the end of the call.
func serve(t *testing.T, release chan struct{}) *Server {
	t.Helper()
	s, err := Listen(Options{
		Address: "127.0.0.1:0", Policies: &policies{}, Log: slog.New(slog.DiscardHandler),
		Flows: func(r *observer.GetFlowsRequest, stream grpc.ServerStreamingServer[observer.GetFlowsResponse]) error {
			if len(r.GetWhitelist()) > 64 {
				return status.Error(codes.InvalidArgument, "too many filters")
			}
			if err := stream.Send(&observer.GetFlowsResponse{ResponseTypes: &observer.GetFlowsResponse_Flow{
				Flow: &flow.Flow{NodeName: "here", Verdict: flow.Verdict_DROPPED},
			}}); err != nil {
				return err
			}
			if release != nil {
				select {
				case <-release:
				case <-stream.Context().Done():
				}
			}
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		http.DefaultClient.CloseIdleConnections()
	})
	return s
}

// ask makes a request. change may be nil.
func (s *Server) ask(t *testing.T, method, path, body string, change func(*http.Request)) *http.Response {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // an answer that must not follow may never end
	t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, method, "http://"+s.listener.Addr().String()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+s.token)
	if change != nil {
		change(r)
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { answer.Body.Close() })
	return answer
}

// want makes a request, and compares the status and a part of the answer.
func (s *Server) want(t *testing.T, code int, text, method, path, body string, change func(*http.Request)) {
	t.Helper()
	answer := s.ask(t, method, path, body, change)
	got, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	// protojson adds blanks at random.
	packed := func(text string) string { return strings.ReplaceAll(text, " ", "") }
	if answer.StatusCode != code || !strings.Contains(packed(string(got)), packed(text)) {
		t.Errorf("%s %s: %d %q, want %d with %q", method, path, answer.StatusCode, got, code, text)
	}
}

func TestPageAnswersOnlyWithTheToken(t *testing.T) {
	s := serve(t, nil)
	for path, method := range map[string]string{
		"/api/flows": http.MethodPost, "/api/diff": http.MethodPost,
		"/api/policies?kind=NetworkPolicy&name=web": http.MethodGet,
	} {
		s.want(t, http.StatusUnauthorized, "token", method, path, "{}", func(r *http.Request) {
			r.Header.Del("Authorization")
		})
		s.want(t, http.StatusUnauthorized, "token", method, path, "{}", func(r *http.Request) {
			r.Header.Set("Authorization", "Bearer "+s.token[:len(s.token)-1])
		})
	}
	s.want(t, http.StatusUnauthorized, "token", http.MethodPost, "/api/flows?token="+s.token, "{}", func(r *http.Request) {
		r.Header.Del("Authorization")
		r.AddCookie(&http.Cookie{Name: "token", Value: s.token})
	})
	s.want(t, http.StatusOK, `"verdict":"DROPPED"`, http.MethodPost, "/api/flows", `{"number":"5"}`, nil)
	s.want(t, http.StatusOK, `"manifest":"kind: NetworkPolicy\n"`, http.MethodGet,
		"/api/policies?kind=NetworkPolicy&name=web", "", nil)
	s.want(t, http.StatusOK, `"subject":17000`, http.MethodPost, "/api/diff", "kind: NetworkPolicy", nil)
	if other := serve(t, nil); other.token == s.token {
		t.Error("two servers have the same token")
	}
	if !strings.HasSuffix(s.URL(), "/#"+s.token) {
		t.Errorf("the URL %s does not have the token in its fragment", s.URL())
	}
}

func TestPageIsServedToItsOwnHostsOnly(t *testing.T) {
	s := serve(t, nil)
	_, port, err := net.SplitHostPort(s.listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for host, code := range map[string]int{
		"localhost:" + port: http.StatusOK, "127.0.0.1:" + port: http.StatusOK,
		"attacker.example:" + port: http.StatusMisdirectedRequest, "attacker.example": http.StatusMisdirectedRequest,
		"127.0.0.1:1": http.StatusMisdirectedRequest, "127.0.0.1": http.StatusMisdirectedRequest,
	} {
		s.want(t, code, "", http.MethodGet, "/", "", func(r *http.Request) { r.Host = host })
		s.want(t, code, "", http.MethodPost, "/api/flows", "{}", func(r *http.Request) { r.Host = host })
	}
	for _, path := range []string{"/", "/app.js", "/missing", "/api/flows"} {
		answer := s.ask(t, http.MethodGet, path, "", nil)
		for name, value := range headers {
			// Browsers store no error without a header that allows it.
			if answer.StatusCode != http.StatusOK && name == "Cache-Control" {
				continue
			}
			if got := answer.Header; got.Get(name) != value {
				t.Errorf("%s: %s is %q", path, name, got.Get(name))
			}
		}
	}
	for _, address := range []string{"0.0.0.0:80", "10.0.0.1:80", "[::]:80", "node:80", "127.0.0.1", ":80", "127.0.0.1:"} {
		if Check(address) == nil {
			t.Errorf("%s is accepted", address)
		}
	}
}

func TestPageRefusesInvalidRequests(t *testing.T) {
	s := serve(t, nil)
	s.want(t, http.StatusBadRequest, "", http.MethodPost, "/api/flows", `{"unknown":1}`, nil)
	s.want(t, http.StatusBadRequest, "number", http.MethodPost, "/api/flows", `{"number":"10001"}`, nil)
	s.want(t, http.StatusBadRequest, "too many filters", http.MethodPost, "/api/flows",
		`{"whitelist":[`+strings.Repeat("{},", 64)+`{}]}`, nil)
	s.want(t, http.StatusRequestEntityTooLarge, "", http.MethodPost, "/api/flows", strings.Repeat(" ", maxRequest+1), nil)
	s.want(t, http.StatusRequestEntityTooLarge, "", http.MethodPost, "/api/diff", strings.Repeat(" ", maxManifest+1), nil)
	s.want(t, http.StatusBadRequest, "document 1", http.MethodPost, "/api/diff", "kind: Pod", nil)
	s.want(t, http.StatusBadRequest, "required", http.MethodGet, "/api/policies?kind=NetworkPolicy", "", nil)
	for _, method := range []string{http.MethodPut, http.MethodDelete, http.MethodPatch, http.MethodPost} {
		s.want(t, http.StatusMethodNotAllowed, "", method, "/api/policies", "", nil)
	}
	s.want(t, http.StatusNotFound, "", http.MethodGet, "/api/diff", "", nil)
}

// TestConnectionsWithoutTheTokenEndNoCall: any process of the node can open connections, but a call goes on.
func TestConnectionsWithoutTheTokenEndNoCall(t *testing.T) {
	release := make(chan struct{})
	s := serve(t, release)
	var calls []*bufio.Reader
	for range maxCalls {
		answer := s.ask(t, http.MethodPost, "/api/flows", `{"follow":true}`, nil)
		r := bufio.NewReader(answer.Body)
		if line, err := r.ReadString('\n'); err != nil || !strings.Contains(line, "DROPPED") {
			t.Fatalf("%q, %v", line, err)
		}
		calls = append(calls, r)
	}
	s.want(t, http.StatusServiceUnavailable, "8 calls", http.MethodPost, "/api/flows", "{}", nil)
	for range 3 * maxConns {
		c, err := net.Dial("tcp", s.listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
	}
	s.want(t, http.StatusServiceUnavailable, "8 calls", http.MethodPost, "/api/flows", "{}", nil)
	s.conns.mu.Lock()
	open := len(s.conns.open)
	s.conns.mu.Unlock()
	if open > maxConns {
		t.Errorf("%d connections are open", open)
	}
	close(release)
	for i, r := range calls {
		if rest, err := io.ReadAll(r); err != nil || len(rest) > 0 {
			t.Errorf("call %d ended with %q, %v", i, rest, err)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package page serves a web page with the flows of the node on a loopback address.
//
// The page changes nothing. Every request for data needs a token, which only clients of the unix socket get. The token
// is in the fragment of the page's URL, so browsers send it to no server, and not a cookie, so that other servers of
// the same host do not get it either.
package page

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"embed"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"google.golang.org/grpc"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/server/flowstream"
)

//go:embed assets
var assets embed.FS

const (
	maxCalls    = 8                // calls for data at the same time
	maxHeader   = 16 << 10         // bytes of the header of a request
	headerTime  = 5 * time.Second  // until the header of a request has arrived
	bodyTime    = 10 * time.Second // until a request has arrived
	idleTime    = time.Minute      // of a connection without a request
	sendTime    = 10 * time.Second // until a client has taken one message of an answer
	tokenLength = 32
)

// Policies are the calls of sluice-policy that the page makes. None of them changes anything.
type Policies interface {
	ListPolicies(context.Context, *policyv1.ListPoliciesRequest, ...grpc.CallOption) (
		grpc.ServerStreamingClient[policyv1.ListPoliciesResponse], error)
	Diff(context.Context, *policyv1.DiffRequest, ...grpc.CallOption) (
		grpc.ServerStreamingClient[policyv1.DiffResponse], error)
}

// Options describe a Server. All fields are required.
type Options struct {
	Address  string // a loopback address and a port
	Flows    flowstream.Flows
	Policies Policies
	Log      *slog.Logger
}

// Server serves the page.
type Server struct {
	o        Options
	token    string
	listener net.Listener
	hosts    map[string]bool // values of the header Host that are served
	calls    chan struct{}
	conns    *conns
}

// Check returns an error unless the address is a loopback address with a port.
func Check(address string) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil || port == "" {
		return fmt.Errorf("%q is not host:port", address)
	}
	if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() {
		return fmt.Errorf("%q is not a loopback address", host)
	}
	return nil
}

// Listen opens the port, and makes a new token.
func Listen(o Options) (*Server, error) {
	if err := Check(o.Address); err != nil {
		return nil, err
	}
	secret := make([]byte, tokenLength)
	if _, err := rand.Read(secret); err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", o.Address)
	if err != nil {
		return nil, err
	}
	s := &Server{
		o: o, token: base64.RawURLEncoding.EncodeToString(secret), listener: l,
		hosts: make(map[string]bool), calls: make(chan struct{}, maxCalls), conns: newConns(l),
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	s.hosts[l.Addr().String()] = true
	s.hosts["localhost:"+port] = true
	return s, nil
}

// URL returns the address of the page with the token.
func (s *Server) URL() string { return "http://" + s.listener.Addr().String() + "/#" + s.token }

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	server := &http.Server{
		Handler: s.handler(), MaxHeaderBytes: maxHeader, ReadHeaderTimeout: headerTime, ReadTimeout: bodyTime,
		IdleTimeout: idleTime, BaseContext: func(net.Listener) context.Context { return ctx },
		ConnContext: withConn, ErrorLog: slog.NewLogLogger(s.o.Log.Handler(), slog.LevelDebug),
	}
	stopped := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stopped()
	if err := server.Serve(s.conns); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// headers are in every answer. The page loads nothing from other hosts, and no other page can contain it.
var headers = map[string]string{
	"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; " +
		"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
	"X-Content-Type-Options":       "nosniff",
	"Referrer-Policy":              "no-referrer",
	"Cache-Control":                "no-store",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Cross-Origin-Opener-Policy":   "same-origin",
}

func (s *Server) handler() http.Handler {
	files, err := fs.Sub(assets, "assets")
	if err != nil {
		panic(err) // the directory is embedded
	}
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(files))
	mux.Handle("POST /api/flows", s.call(s.flows))
	mux.Handle("GET /api/policies", s.call(s.policies))
	mux.Handle("POST /api/diff", s.call(s.diff))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for name, value := range headers {
			w.Header().Set(name, value)
		}
		// A web site whose name resolves to the loopback address would otherwise read the answers (DNS rebinding).
		if !s.hosts[strings.ToLower(r.Host)] {
			http.Error(w, "open the page at the address that \"sluice hubble ui\" prints", http.StatusMisdirectedRequest)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// call checks the token, and limits the number of calls. Requests without the token occupy no call.
func (s *Server) call(f func(http.ResponseWriter, *http.Request)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		if !ok || subtle.ConstantTimeCompare([]byte(token), []byte(s.token)) != 1 {
			http.Error(w, "the token is missing or old: sluice-hubble makes a new one at each start; "+
				"open the page that \"sluice hubble ui\" prints", http.StatusUnauthorized)
			return
		}
		select {
		case s.calls <- struct{}{}:
			defer func() { <-s.calls }()
		default:
			http.Error(w, fmt.Sprintf("%d calls are running; close other pages", maxCalls), http.StatusServiceUnavailable)
			return
		}
		defer s.conns.use(r.Context())()
		f(w, r)
	})
}

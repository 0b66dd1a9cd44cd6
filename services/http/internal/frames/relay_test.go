// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// patience limits waits that only a fault can reach.
const patience = time.Minute

// node relays the connections to a server.
type node struct {
	address string
	mu      sync.Mutex
	errs    []error
	done    sync.WaitGroup
}

// errors returns how the connections have ended.
func (n *node) errors() []error {
	n.done.Wait()
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.errs
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// relayTo starts a relay before the server at an address.
func relayTo(t testing.TB, server string, o *Options) *node {
	t.Helper()
	l := listen(t)
	n := &node{address: l.Addr().String()}
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			n.done.Go(func() {
				up, err := net.Dial("tcp", server)
				if err != nil {
					_ = client.Close()
					return
				}
				err = Relay(client, up, nil, o)
				n.mu.Lock()
				n.errs = append(n.errs, err)
				n.mu.Unlock()
			})
		}
	}()
	return n
}

// serve starts a server of HTTP/2 in clear text.
func serve(t testing.TB, h http.Handler) string {
	t.Helper()
	l := listen(t)
	s := &http.Server{Handler: h, Protocols: clearText(), ReadHeaderTimeout: patience}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close() })
	return l.Addr().String()
}

// clearText is HTTP/2 by prior knowledge.
func clearText() *http.Protocols {
	p := &http.Protocols{}
	p.SetUnencryptedHTTP2(true)
	return p
}

// client returns a client that has one connection.
func client(t testing.TB, address string) *http.Client {
	t.Helper()
	dialled := false
	tr := &http.Transport{
		Protocols:          clearText(),
		DisableCompression: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			if dialled {
				return nil, errors.New("a second connection")
			}
			dialled = true
			return (&net.Dialer{}).DialContext(ctx, network, address)
		},
	}
	t.Cleanup(tr.CloseIdleConnections)
	c := &http.Client{Transport: tr, Timeout: patience}
	get(t, c, "http://a.example/first") // refused, so the server does not see it
	return c
}

// public allows paths below /public, and all of gRPC except a service.
func public(r *Request) Verdict {
	return Verdict{Allowed: strings.HasPrefix(r.Path, "/public") || strings.HasPrefix(r.Path, "/grpc.open/")}
}

func get(t testing.TB, c *http.Client, url string) (status int, text string) {
	t.Helper()
	a, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	if err != nil {
		t.Fatal(err)
	}
	return a.StatusCode, string(b)
}

// echo answers with what it got.
func echo(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Trailer", "X-Sum")
	w.Header().Set("X-Method", r.Method)
	w.Header().Set("X-Uri", r.RequestURI)
	w.Header().Set("X-Host", r.Host)
	h := sha256.New()
	_, err := io.Copy(io.MultiWriter(w, h), r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	for k, v := range r.Trailer {
		w.Header()[http.TrailerPrefix+"Echo-"+k] = v
	}
	w.Header().Set("X-Sum", fmt.Sprintf("%x", h.Sum(nil)))
}

func TestRequestsAreEvaluated(t *testing.T) {
	var mu sync.Mutex
	var answers []string
	n := relayTo(t, serve(t, http.HandlerFunc(echo)), &Options{
		Decide: func(r *Request) Verdict {
			v := public(r)
			v.Token = r.Method + " " + r.Path
			return v
		},
		Answered: func(token any, status int) {
			mu.Lock()
			defer mu.Unlock()
			answers = append(answers, fmt.Sprint(token, " ", status))
		},
	})
	c := client(t, n.address)
	if status, _ := get(t, c, "http://a.example/public/x?y=z"); status != 200 {
		t.Errorf("status %d", status)
	}
	if status, text := get(t, c, "http://a.example/secret"); status != 403 || text != "Access denied" {
		t.Errorf("status %d, %q", status, text)
	}
	a, err := c.Post("http://a.example/public", "text/plain", strings.NewReader("hello"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(a.Body)
	_ = a.Body.Close()
	if err != nil || string(b) != "hello" || a.Header.Get("X-Host") != "a.example" || a.Header.Get("X-Uri") != "/public" ||
		a.Trailer.Get("X-Sum") != fmt.Sprintf("%x", sha256.Sum256(b)) {
		t.Errorf("%v, %q, %v, %v", err, b, a.Header, a.Trailer)
	}
	c.CloseIdleConnections()
	for _, err := range n.errors() {
		if err != nil {
			t.Error(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	want := "GET /first 403, GET /public/x?y=z 200, GET /secret 403, POST /public 200"
	if got := strings.Join(answers, ", "); got != want {
		t.Errorf("answers: %s, want %s", got, want)
	}
}

func TestLargeBodiesPassBothWays(t *testing.T) {
	n := relayTo(t, serve(t, http.HandlerFunc(echo)), &Options{Decide: public})
	c := client(t, n.address)
	body := bytes.Repeat([]byte("0123456789abcdef"), 512<<10) // 8 MiB
	want := sha256.Sum256(body)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			a, err := c.Post("http://a.example/public", "text/plain", bytes.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			defer a.Body.Close()
			b, err := io.ReadAll(a.Body)
			if err != nil || sha256.Sum256(b) != want {
				t.Errorf("%d bytes, %v", len(b), err)
			}
		})
	}
	wg.Wait()
}

func TestRefusedStreamStallsNoOther(t *testing.T) {
	const size = 32 << 20
	sums := make(chan int64, 5)
	n := relayTo(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		sums <- n
	})), &Options{Decide: public})
	c := client(t, n.address)
	var wg sync.WaitGroup
	for i := range 5 {
		wg.Go(func() {
			path, want := "/public", 200
			if i%2 == 1 {
				path, want = "/secret", 403
			}
			// A body of unknown length that ignores the answer.
			a, err := c.Post("http://a.example"+path, "text/plain", io.LimitReader(zeros{}, size))
			if err != nil {
				t.Errorf("%s: %v", path, err)
				return
			}
			_ = a.Body.Close()
			if a.StatusCode != want {
				t.Errorf("%s: status %d", path, a.StatusCode)
			}
		})
	}
	wg.Wait()
	for range 3 {
		if n := <-sums; n != size {
			t.Errorf("the server got %d bytes", n)
		}
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

func TestManyParallelStreams(t *testing.T) {
	n := relayTo(t, serve(t, http.HandlerFunc(echo)), &Options{Decide: public})
	c := client(t, n.address)
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			for k := range 20 {
				if i == 0 && k > 0 {
					continue // few refusals, below the limit of a second
				}
				path, want := fmt.Sprintf("/public/%d/%d", i, k), 200
				if i == 0 {
					path, want = "/secret", 403
				}
				text := fmt.Sprint(path, strings.Repeat("x", i*100))
				a, err := c.Post("http://a.example"+path, "text/plain", strings.NewReader(text))
				if err != nil {
					t.Error(err)
					return
				}
				b, err := io.ReadAll(a.Body)
				_ = a.Body.Close()
				if err != nil || a.StatusCode != want || want == 200 && string(b) != text {
					t.Errorf("%s: %d, %v, %d bytes", path, a.StatusCode, err, len(b))
				}
			}
		})
	}
	wg.Wait()
}

func TestACancelledRequestEndsAtTheServer(t *testing.T) {
	started, ended := make(chan struct{}), make(chan struct{})
	n := relayTo(t, serve(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(started)
		<-r.Context().Done()
		close(ended)
	})), &Options{Decide: public})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-started
		cancel()
	}()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://a.example/public", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	c := client(t, n.address)
	a, err := c.Do(r)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err == nil {
		_ = a.Body.Close()
	}
	select {
	case <-ended:
	case <-time.After(patience):
		t.Error("the server goes on")
	}
}

func TestTrailersOfTheClientPass(t *testing.T) {
	n := relayTo(t, serve(t, http.HandlerFunc(echo)), &Options{Decide: public})
	c := client(t, n.address)
	body := strings.NewReader("body")
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://a.example/public", body)
	if err != nil {
		t.Fatal(err)
	}
	r.ContentLength = -1
	r.Trailer = http.Header{"Checksum": {"17"}}
	a, err := c.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	if err != nil || string(b) != "body" || a.Trailer.Get("Echo-Checksum") != "17" {
		t.Errorf("%q, %v, %v", b, err, a.Trailer)
	}
}

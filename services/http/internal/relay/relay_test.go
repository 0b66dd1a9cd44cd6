// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package relay

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/proxy/sockets"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// proxy relays the connections to an address to a server.
type proxy struct {
	t      testing.TB
	at     string
	server string

	mu     sync.Mutex
	rules  layer7.Rules
	events []Event
}

func connOf(t testing.TB, c net.Conn) *sockets.Conn {
	t.Helper()
	f, err := c.(*net.TCPConn).File()
	if err == nil {
		err = c.Close()
	}
	if err == nil {
		err = syscall.SetNonblock(int(f.Fd()), true)
	}
	if err != nil {
		t.Fatal(err)
	}
	// Fd makes the file blocking; a copy of the descriptor is not.
	fd, err := syscall.Dup(int(f.Fd()))
	if err == nil {
		err = errors.Join(syscall.SetNonblock(fd, true), f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	return &sockets.Conn{File: sockets.File(fd, "test"), Local: c.LocalAddr(), Remote: c.RemoteAddr()}
}

func start(t testing.TB, server string, rules layer7.Rules) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{t: t, at: l.Addr().String(), server: server, rules: rules}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() { l.Close(); cancel(); running.Wait() })
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			running.Go(func() { Serve(ctx, p.options(connOf(t, c))) })
		}
	})
	return p
}

func (p *proxy) options(client *sockets.Conn) Options {
	return Options{
		Client: client,
		Connect: func(context.Context) (*sockets.Conn, error) {
			c, err := net.Dial("tcp", p.server)
			if err != nil {
				return nil, err
			}
			return connOf(p.t, c), nil
		},
		Rules: func(context.Context) (Evaluator, error) {
			p.mu.Lock()
			defer p.mu.Unlock()
			return layer7.NewMatcher(layer7.Union(policytable.ProxyHTTP, false, &p.rules)), nil
		},
		ServerNames: func(Evaluator) bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return len(p.rules.ServerNames) > 0
		},
		Report: func(e Event) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.events = append(p.events, e)
		},
	}
}

func (p *proxy) allow(rules layer7.Rules) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = rules
}

// wantEvent waits for an event with these parts.
func (p *proxy) wantEvent(outcome Outcome, status int, reason string) {
	p.t.Helper()
	servicetest.EventuallyNil(p.t, "an event", func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, e := range p.events {
			if e.Outcome == outcome && e.Status == status && strings.Contains(e.Reason, reason) {
				return nil
			}
		}
		return fmt.Errorf("no event %s, %d, %q among %+v", outcome, status, reason, p.events)
	})
}

func paths(all ...string) (r layer7.Rules) {
	for _, path := range all {
		r.HTTP = append(r.HTTP, layer7.HTTP{Path: path})
	}
	return r
}

func (p *proxy) dial() net.Conn {
	p.t.Helper()
	c, err := net.Dial("tcp", p.at)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(servicetest.Patience)); err != nil {
		p.t.Fatal(err)
	}
	return c
}

// raw is a server that gives each of its connections to a function.
func raw(t *testing.T, serve func(c *net.TCPConn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	t.Cleanup(func() { l.Close(); running.Wait() })
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(servicetest.Patience))
				serve(c.(*net.TCPConn))
			})
		}
	})
	return l.Addr().String()
}

func exchangeOf(t *testing.T, c net.Conn, in *bufio.Reader, method, text string) (int, string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	r, err := http.ReadResponse(in, &http.Request{Method: method})
	if err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

func TestRequestsOfAConnection(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s %s %q", r.Method, r.RequestURI, r.Host, b)
	}))
	defer s.Close()
	p := start(t, s.Listener.Addr().String(), paths("/public/.*"))
	c := p.dial()
	in := bufio.NewReader(c)
	const deny = "Access denied\r\n"
	for _, x := range []struct {
		text, method string
		status       int
		body         string
	}{
		{"GET /public/a HTTP/1.1\r\nHost: a.test\r\n\r\n", "GET", 200, `GET /public/a a.test ""`},
		{"GET /secret HTTP/1.1\r\nHost: a.test\r\n\r\n", "GET", 403, deny},
		{"HEAD /secret HTTP/1.1\r\nHost: a.test\r\n\r\n", "HEAD", 403, ""},
		{"GET /public/../secret HTTP/1.1\r\nHost: a.test\r\n\r\n", "GET", 403, deny},
		{"GET /public/%2e%2E/secret HTTP/1.1\r\nHost: a.test\r\n\r\n", "GET", 403, deny},
		{"GET /x/..//public/%7ea?b=../c HTTP/1.1\r\nHost: a.test\r\n\r\n", "GET", 200, `GET /public/~a?b=../c a.test ""`},
		{
			"POST /public/b HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n\r\nabc", "POST", 200,
			`POST /public/b a.test "abc"`,
		},
		{"POST /secret HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n\r\nabc", "POST", 403, deny},
		{
			"POST /public/c HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\n\r\n", "POST",
			200, `POST /public/c a.test "abc"`,
		},
		{"HEAD /public/d HTTP/1.1\r\nHost: a.test\r\n\r\n", "HEAD", 200, ""},
		{"GET http://a.test/public/e HTTP/1.1\r\nHost: a.test\r\n\r\n", "GET", 200, `GET /public/e a.test ""`},
	} {
		status, body := exchangeOf(t, c, in, x.method, x.text)
		if status != x.status || body != x.body {
			t.Errorf("%q: %d %q, want %d %q", x.text, status, body, x.status, x.body)
		}
	}
	// several at once: the responses come in their order
	if _, err := io.WriteString(c, strings.Repeat("GET /public/1 HTTP/1.1\r\nHost: a\r\n\r\n"+
		"GET /no HTTP/1.1\r\nHost: a\r\n\r\n", 20)); err != nil {
		t.Fatal(err)
	}
	for i := range 40 {
		if status, _ := exchangeOf(t, c, in, "GET", ""); status != []int{200, 403}[i%2] {
			t.Errorf("response %d: %d", i, status)
		}
	}
	// the next request obeys the new rules
	p.allow(paths("/secret"))
	if status, _ := exchangeOf(t, c, in, "GET", "GET /public/a HTTP/1.1\r\nHost: a\r\n\r\n"); status != 403 {
		t.Errorf("after a change of the rules: %d", status)
	}
	if status, _ := exchangeOf(t, c, in, "GET", "GET /secret HTTP/1.0\r\n\r\n"); status != 200 {
		t.Errorf("HTTP/1.0: %d", status)
	}
	if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("after HTTP/1.0: %v, want the end", err)
	}
	p.wantEvent(Refused, 403, "no rule")
	p.wantEvent(Forwarded, 200, "")
}

func TestInvalidRequestsAreAnsweredAndEndTheConnection(t *testing.T) {
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	p := start(t, s.Listener.Addr().String(), paths(".*"))
	for text, status := range map[string]int{
		"GET / HTTP/1.1\r\n\r\n":                                                      400,
		"GET /%2f HTTP/1.1\r\nHost: a\r\n\r\n":                                        400,
		"SSH-2.0-OpenSSH_9.2\r\n":                                                     400,
		"GET / HTTP/2.0\r\nHost: a\r\n\r\n":                                           505,
		"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n":                501,
		"GET / HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("x", 70_000) + "\r\n\r\n": 431,
	} {
		c := p.dial()
		in := bufio.NewReader(c)
		if got, _ := exchangeOf(t, c, in, "GET", text); got != status {
			t.Errorf("%.40q: %d, want %d", text, got, status)
		}
		if _, err := in.ReadByte(); err == nil {
			t.Errorf("%.40q: the connection goes on", text)
		}
		p.wantEvent(Invalid, status, "")
	}
}

func TestHeaderMatchesAct(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, strings.Join(r.Header.Values("X-Team"), ","))
	}))
	defer s.Close()
	for mismatch, want := range map[layer7.Mismatch]string{
		layer7.Log: "200 other", layer7.Add: "200 other,blue", layer7.Delete: "200 ", layer7.Replace: "200 blue",
		layer7.Refuse: "403 Access denied\r\n",
	} {
		p := start(t, s.Listener.Addr().String(), layer7.Rules{HTTP: []layer7.HTTP{{
			Matches: []layer7.HeaderMatch{{Name: "x-team", Value: "blue", Mismatch: mismatch}},
		}}})
		c := p.dial()
		status, body := exchangeOf(t, c, bufio.NewReader(c), "GET", "GET / HTTP/1.1\r\nHost: a\r\nX-Team: other\r\n\r\n")
		if got := fmt.Sprint(status, " ", body); got != want {
			t.Errorf("%q: %q, want %q", mismatch, got, want)
		}
	}
}

// TestResponsesStream: bytes do not wait for later ones, and a response may be as long as it wants.
func TestResponsesStream(t *testing.T) {
	next := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for i := range 3 {
			fmt.Fprintf(w, "part %d\n", i)
			w.(http.Flusher).Flush()
			<-next
		}
		_, _ = w.Write(bytes.Repeat([]byte("x"), 5<<20))
	}))
	defer s.Close()
	p := start(t, s.Listener.Addr().String(), paths(".*"))
	r, err := http.Get("http://" + p.at)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	in := bufio.NewReader(r.Body)
	for i := range 3 {
		if line, err := in.ReadString('\n'); err != nil || line != fmt.Sprintf("part %d\n", i) {
			t.Errorf("%q, %v", line, err)
		}
		next <- struct{}{}
	}
	if b, err := io.ReadAll(in); err != nil || len(b) != 5<<20 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestUpgradeIsSpliced(t *testing.T) {
	server := raw(t, func(c *net.TCPConn) {
		in := bufio.NewReader(c)
		q, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		switch q.Header.Get("Upgrade") {
		case "websocket":
			_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n"+
				"Upgrade: websocket\r\n\r\nhello")
			_, _ = io.Copy(c, in)
		default:
			_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
			_, _ = io.Copy(io.Discard, in)
		}
	})
	p := start(t, server, paths("/chat"))
	c := p.dial()
	in := bufio.NewReader(c)
	if _, err := io.WriteString(c, "GET /chat HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"+
		"GET /no HTTP/1.1\r\n"); err != nil { // bytes of the tunnel that look like a request
		t.Fatal(err)
	}
	r, err := http.ReadResponse(in, nil)
	if err != nil || r.StatusCode != 101 {
		t.Fatalf("%v, %v", r, err)
	}
	want := "helloGET /no HTTP/1.1\r\n"
	b := make([]byte, len(want))
	if _, err := io.ReadFull(in, b); err != nil || string(b) != want {
		t.Errorf("%q, %v", b, err)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(in); err != nil || len(rest) > 0 {
		t.Errorf("after FIN: %q, %v", rest, err)
	}
	p.wantEvent(Forwarded, 101, "")

	refused := p.dial()
	if status, _ := exchangeOf(t, refused, bufio.NewReader(refused), "GET",
		"GET /other HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"); status != 403 {
		t.Errorf("another path: %d", status)
	}
	// A server that changes the protocol unasked would hide what follows.
	hidden := p.dial()
	if status, _ := exchangeOf(t, hidden, bufio.NewReader(hidden), "GET",
		"GET /chat HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n",
	); status != 502 {
		t.Errorf("a change to HTTP/2: %d", status)
	}
}

func TestConnectIsSplicedAfterItsCheck(t *testing.T) {
	server := raw(t, func(c *net.TCPConn) {
		in := bufio.NewReader(c)
		if _, err := http.ReadRequest(in); err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		_, _ = io.Copy(c, in)
	})
	p := start(t, server, layer7.Rules{HTTP: []layer7.HTTP{{Method: "CONNECT", Host: "a.test:443"}}})
	c := p.dial()
	in := bufio.NewReader(c)
	if _, err := io.WriteString(c, "CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if r, err := http.ReadResponse(in, &http.Request{Method: "CONNECT"}); err != nil || r.StatusCode != 200 {
		t.Fatalf("%v, %v", r, err)
	}
	if _, err := io.WriteString(c, "bytes"); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(in, b); err != nil || string(b) != "bytes" {
		t.Errorf("%q, %v", b, err)
	}
	other := p.dial()
	if status, _ := exchangeOf(t, other, bufio.NewReader(other), "CONNECT",
		"CONNECT b.test:443 HTTP/1.1\r\nHost: b.test:443\r\n\r\n"); status != 403 {
		t.Errorf("another host: %d", status)
	}
}

func TestResetAndFINPassOn(t *testing.T) {
	accepted := make(chan *net.TCPConn)
	done := make(chan struct{})
	server := raw(t, func(c *net.TCPConn) {
		in := bufio.NewReader(c)
		q, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		if q.URL.Path == "/answered" {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		}
		accepted <- c
		<-done
	})
	p := start(t, server, paths(".*"))
	open := func(path string) (net.Conn, *net.TCPConn) {
		t.Helper()
		c := p.dial()
		if _, err := io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: a\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		s := <-accepted
		if path == "/answered" {
			b := make([]byte, len("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"))
			if _, err := io.ReadFull(c, b); err != nil {
				t.Fatalf("%q, %v", b, err)
			}
		}
		return c, s
	}
	read := func(c net.Conn) error { _, err := c.Read(make([]byte, 1)); return err }
	for _, path := range []string{"/answered", "/waiting"} {
		t.Run("the server ends after "+path, func(t *testing.T) {
			c, s := open(path)
			s.Close()
			want := io.EOF
			if path == "/waiting" {
				want = syscall.ECONNRESET // no truncated or invented response
			}
			if err := read(c); !errors.Is(err, want) {
				t.Errorf("%v, want %v", err, want)
			}
			done <- struct{}{}
		})
		t.Run("the server resets after "+path, func(t *testing.T) {
			c, s := open(path)
			if err := s.SetLinger(0); err != nil {
				t.Fatal(err)
			}
			s.Close()
			if err := read(c); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%v, want a reset", err)
			}
			done <- struct{}{}
		})
		t.Run("the client ends after "+path, func(t *testing.T) {
			c, s := open(path)
			if err := c.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if err := read(s); !errors.Is(err, io.EOF) {
				t.Errorf("%v, want the end", err)
			}
			done <- struct{}{}
		})
		t.Run("the client resets after "+path, func(t *testing.T) {
			c, s := open(path)
			if err := c.(*net.TCPConn).SetLinger(0); err != nil {
				t.Fatal(err)
			}
			c.Close()
			if err := read(s); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%v, want a reset", err)
			}
			done <- struct{}{}
		})
	}
}

// TestInvalidResponsesReachNoClient: a response that two programs may read differently could carry another one.
func TestInvalidResponsesReachNoClient(t *testing.T) {
	for _, text := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
		"HTTP/1.1 200 OK\nContent-Length: 0\r\n\r\n", "HTTP/1.1 2000 OK\r\n\r\n", "HTTP/1.1 099 No\r\n\r\n",
		"ICY 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nX y: z\r\n\r\n",
	} {
		server := raw(t, func(c *net.TCPConn) {
			if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
				_, _ = io.WriteString(c, text)
			}
		})
		p := start(t, server, paths(".*"))
		c := p.dial()
		status, body := exchangeOf(t, c, bufio.NewReader(c), "GET", "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		if status != 502 || body != "" {
			t.Errorf("%q: %d %q", text, status, body)
		}
		p.wantEvent(Failed, 502, "not valid")
	}
}

func TestTLSNeedsAnAllowedServerName(t *testing.T) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "secure") }))
	defer s.Close()
	name, err := dnsname.Parse("example.com")
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, s.Listener.Addr().String(), layer7.Rules{ServerNames: []dnsname.Pattern{name}})
	roots := s.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	get := func(name string) (string, error) {
		c, err := tls.Dial("tcp", p.at, &tls.Config{ServerName: name, RootCAs: roots})
		if err != nil {
			return "", err
		}
		defer c.Close()
		fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", name)
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			return "", err
		}
		b, err := io.ReadAll(r.Body)
		return string(b), err
	}
	if body, err := get("example.com"); err != nil || body != "secure" {
		t.Errorf("an allowed name: %q, %v", body, err)
	}
	p.wantEvent(Forwarded, 0, "")
	for _, name := range []string{"other.example", "127.0.0.1"} {
		if body, err := get(name); err == nil {
			t.Errorf("%s: %q", name, body)
		}
	}
	p.wantEvent(Refused, 0, "no rule allows the server name")
	// in clear text, Host is the name
	for host, want := range map[string]int{"example.com": 400, "other.example": 403} { // 400: the server speaks TLS only
		c := p.dial()
		text := "GET / HTTP/1.1\r\nHost: " + host + "\r\n\r\n"
		if status, _ := exchangeOf(t, c, bufio.NewReader(c), "GET", text); status != want {
			t.Errorf("Host %s: %d, want %d", host, status, want)
		}
	}
	p.allow(paths(".*"))
	if body, err := get("example.com"); err == nil {
		t.Errorf("TLS on a port with HTTP rules: %q", body)
	}
	p.wantEvent(Invalid, 0, "TLS, but the rules name no servers")
}

func TestHTTP2IsRelayed(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s", r.Proto, r.URL.Path)
	}))
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	defer s.Close()
	p := start(t, s.Listener.Addr().String(), paths("/public/.*"))
	transport := &http.Transport{Protocols: s.Config.Protocols}
	defer transport.CloseIdleConnections()
	for path, want := range map[string]string{
		"/public/a": "200 HTTP/2.0 /public/a", "/secret": "403 Access denied", "/public/../secret": "403 Access denied",
	} {
		r, err := (&http.Client{Transport: transport}).Get("http://" + p.at + path)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r.Body)
		r.Body.Close()
		if got := fmt.Sprint(r.StatusCode, " ", strings.TrimSpace(string(b))); err != nil || got != want {
			t.Errorf("%s: %q, %v, want %q", path, got, err, want)
		}
	}
	p.wantEvent(Forwarded, 200, "")
	p.wantEvent(Refused, 403, "no rule")
}

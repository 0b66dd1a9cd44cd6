// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package relay

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/sluice-net/sluice/model/layer7"
)

// TestRulesAddNoRequest: the author of a policy cannot send requests in the name of the pods that it selects.
func TestRulesAddNoRequest(t *testing.T) {
	var requests atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { requests.Add(1) }))
	defer s.Close()
	const hidden = "y\r\n\r\nGET /secret HTTP/1.1\r\nHost: a"
	for _, m := range []layer7.HeaderMatch{
		{Name: "X-Team", Value: hidden, Mismatch: layer7.Add},
		{Name: "X-Team", Value: hidden, Mismatch: layer7.Replace},
		{Name: "X-Team: a\r\nX", Value: "y", Mismatch: layer7.Add},
		{Name: "Content-Length", Value: "5", Mismatch: layer7.Add},
		{Name: "Host", Value: "b", Mismatch: layer7.Replace},
		{Name: "Connection", Value: "x", Mismatch: layer7.Add},
	} {
		p := start(t, s.Listener.Addr().String(), layer7.Rules{HTTP: []layer7.HTTP{{Matches: []layer7.HeaderMatch{m}}}})
		c := p.dial()
		status, body := exchangeOf(t, c, bufio.NewReader(c), "GET", "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		if status != http.StatusForbidden || body != "Access denied\r\n" {
			t.Errorf("%q: %d %q, want a refusal", m, status, body)
		}
	}
	if n := requests.Load(); n > 0 {
		t.Errorf("the server got %d requests", n)
	}
}

// TestBytesBeforeTheUpgradeAreRequests: what a client sends behind an upgrade is evaluated, unless the server has
// changed the protocol.
func TestBytesBeforeTheUpgradeAreRequests(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.URL.Path)
	}))
	defer s.Close()
	p := start(t, s.Listener.Addr().String(), paths("/public"))
	for _, first := range []string{
		"GET /public HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
		"POST /public HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: tcp\r\nContent-Length: 2\r\n\r\n{}",
		"GET /public HTTP/1.1\r\nHost: a\r\nConnection: upgrade, http2-settings\r\nUpgrade: h2c\r\n" +
			"HTTP2-Settings: AAMAAABk\r\n\r\n",
	} {
		c := p.dial()
		in := bufio.NewReader(c)
		status, body := exchangeOf(t, c, in, "GET", first+"GET /secret HTTP/1.1\r\nHost: a\r\n\r\n")
		if status != http.StatusOK || body != "/public" {
			t.Errorf("%q: %d %q", first, status, body)
		}
		if status, body := exchangeOf(t, c, in, "GET", ""); status != http.StatusForbidden {
			t.Errorf("behind %q: %d %q, want a refusal", first, status, body)
		}
	}
}

// TestEventsHaveNoSecrets: an event has neither the query of a request nor its fields, and no long text.
func TestEventsHaveNoSecrets(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer s.Close()
	p := start(t, s.Listener.Addr().String(), paths("/public.*"))
	c := p.dial()
	in := bufio.NewReader(c)
	const fields = " HTTP/1.1\r\nHost: a\r\nAuthorization: token\r\n\r\n"
	for _, first := range []string{
		"GET /public?token", "GET /private?token", "GET /public/" + strings.Repeat("l", 300) + "?token",
		strings.Repeat("M", 300) + " /private",
	} {
		exchangeOf(t, c, in, "GET", first+fields)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.events) != 4 {
		t.Fatalf("%d events, want 4", len(p.events))
	}
	for i, path := range []string{"/public?", "/private?", "/public/" + strings.Repeat("l", 248), "/private"} {
		e := p.events[i]
		if e.Path != path || e.Host != "a" || len(e.Method) > 32 || strings.Contains(fmt.Sprint(e), "token") {
			t.Errorf("event %+v, want path %q", e, path)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

func withHTTP(o *devnode.Options) { o.HTTP = true }

// awaitHTTP returns when connections reach sluice-http.
func (n *testNode) awaitHTTP(t *testing.T) {
	t.Helper()
	servicetest.EventuallyNil(t, "sluice-http is attached", func() error {
		st, err := n.datapath.GetStatus(servicetest.Context(t), &datapathv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		for _, p := range st.GetProxies() {
			if p.GetProxy() == netv1.Proxy_PROXY_HTTP && p.GetTcpAttached() {
				return nil
			}
		}
		return fmt.Errorf("proxies %v", st.GetProxies())
	})
}

// web is a server that answers with the request and the address of its client.
func web(t *testing.T, in pod.Pod, at netip.AddrPort, secure bool) *httptest.Server {
	t.Helper()
	l, err := in.Listen(at)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "%s %s %s from %s", r.Proto, r.Method, r.RequestURI, r.RemoteAddr)
	}))
	s.Listener.Close()
	s.Listener = l
	if secure {
		s.StartTLS()
	} else {
		s.Config.Protocols = new(http.Protocols)
		s.Config.Protocols.SetHTTP1(true)
		s.Config.Protocols.SetUnencryptedHTTP2(true)
		s.Start()
	}
	t.Cleanup(s.Close)
	return s
}

// browser is a client in a pod.
func browser(t *testing.T, from pod.Pod, second bool) *http.Client {
	t.Helper()
	transport := &http.Transport{
		Protocols: new(http.Protocols),
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			to, err := netip.ParseAddrPort(addr)
			if err != nil {
				return nil, err
			}
			return from.Dial(ctx, to)
		},
	}
	transport.Protocols.SetHTTP1(!second)
	transport.Protocols.SetUnencryptedHTTP2(second)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: patience}
}

// fetch returns the status and the body of a request.
func fetch(c *http.Client, method, url string) (int, string, error) {
	q, err := http.NewRequest(method, url, http.NoBody)
	if err != nil {
		return 0, "", err
	}
	r, err := c.Do(q)
	if err != nil {
		return 0, "", err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	return r.StatusCode, string(b), err
}

const webPolicy = `
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: browser}
spec:
  endpointSelector: {matchLabels: {app: browser}}
  egress:
  - toEndpoints: [{matchLabels: {app: web}}]
    toPorts:
    - ports: [{protocol: TCP, port: "80"}]
      rules: {http: [{method: GET, path: "/public/.*"}]}
    - ports: [{protocol: TCP, port: "443"}]
      serverNames: ["good.example"]
  - toCIDR: [203.0.113.2/32, "2001:db8:ffff::2/128"]
    toPorts:
    - ports: [{protocol: TCP, port: "8080"}]
      rules: {http: [{method: GET, path: "/public/.*"}]}
`

// TestHTTPRules: requests that a rule allows reach the server with the client's address and port, by HTTP/1 and HTTP/2,
// over both families, to a pod and to a server outside. Others get status 403. TLS connections need an allowed server
// name.
func TestHTTPRules(t *testing.T) {
	t.Parallel()
	n := newNode(t, withHTTP)
	pods := n.addPods(t, "browser", "web")
	client, outside := pods[0], n.outside(t)
	n.awaitHTTP(t)
	enforce(t, n.policies(t), webPolicy)
	for _, place := range []struct {
		in   pod.Pod
		port uint16
	}{{pods[1], 80}, {outside, 8080}} {
		for i, at := range place.in.Addresses() {
			s := web(t, place.in, netip.AddrPortFrom(at, place.port), false)
			for _, second := range []bool{false, true} {
				c := browser(t, client, second)
				url := "http://" + s.Listener.Addr().String()
				for _, x := range []struct {
					method, path string
					status       int
					body         string
				}{
					{"GET", "/public/a", 200, " GET /public/a from " + netip.AddrPortFrom(client.Addresses()[i], 0).String()},
					{"POST", "/public/a", 403, "Access denied"},
					{"GET", "/secret", 403, "Access denied"},
					{"GET", "/public/%2e%2e/secret", 403, "Access denied"},
					{"GET", "/x/../public/b", 200, " GET /public/b from"},
				} {
					status, body, err := fetch(c, x.method, url+x.path)
					want, _, _ := strings.Cut(x.body, ":0") // the port of the client
					if err != nil || status != x.status || !strings.Contains(body, strings.TrimSuffix(want, "]")) {
						t.Errorf("%s %s%s, HTTP/2 %t: %d %q, %v, want %d %q", x.method, url, x.path, second, status, body, err,
							x.status, want)
					}
				}
			}
		}
	}

	secure := web(t, pods[1], netip.AddrPortFrom(pods[1].IPv4, 443), true)
	for name, allowed := range map[string]bool{"good.example": true, "bad.example": false, "": false} {
		err := func() error {
			ctx, cancel := deadline(t)
			defer cancel()
			c, err := client.Dial(ctx, netip.MustParseAddrPort(secure.Listener.Addr().String()))
			if err != nil {
				return err
			}
			defer c.Close()
			config := &tls.Config{ServerName: name, InsecureSkipVerify: true} //nolint:gosec // a test server
			return tls.Client(c, config).HandshakeContext(ctx)
		}()
		if allowed != (err == nil) || !allowed && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("server name %q: %v", name, err)
		}
	}
}

// TestChangedHTTPRuleActsOnTheNextConnection: a change of the rules resets open connections of its pods, and the next
// ones obey the new rules.
func TestChangedHTTPRuleActsOnTheNextConnection(t *testing.T) {
	t.Parallel()
	n := newNode(t, withHTTP)
	pods := n.addPods(t, "browser", "web")
	n.awaitHTTP(t)
	enforce(t, n.policies(t), webPolicy)
	s := web(t, pods[1], netip.AddrPortFrom(pods[1].IPv4, 80), false)
	c := browser(t, pods[0], false)
	url := "http://" + s.Listener.Addr().String()
	if status, _, err := fetch(c, "GET", url+"/public/a"); err != nil || status != 200 {
		t.Fatalf("%d, %v", status, err)
	}
	enforce(t, n.policies(t), strings.ReplaceAll(webPolicy, "/public/", "/other/"))
	for path, want := range map[string]int{"/public/a": 403, "/other/a": 200} {
		servicetest.EventuallyNil(t, "the new rule", func() error {
			status, _, err := fetch(c, "GET", url+path)
			if err != nil || status != want {
				return fmt.Errorf("%s: %d, %w", path, status, err)
			}
			return nil
		})
	}
}

// TestFaultKillHTTP kills sluice-http. Connections end and are never passed on without evaluation; new ones wait for
// the next process.
func TestFaultKillHTTP(t *testing.T) {
	t.Parallel()
	n := newNode(t, withHTTP)
	pods := n.addPods(t, "browser", "web")
	n.awaitHTTP(t)
	enforce(t, n.policies(t), webPolicy)
	s := web(t, pods[1], netip.AddrPortFrom(pods[1].IPv4, 80), false)
	url := "http://" + s.Listener.Addr().String()
	for round := range 3 {
		stop := make(chan struct{})
		done := make(chan error, 1)
		go func() {
			for {
				select {
				case <-stop:
					done <- nil
					return
				case <-time.After(5 * time.Millisecond): // a request each
				}
				c := browser(t, pods[0], false)
				status, _, err := fetch(c, "GET", url+"/secret")
				c.CloseIdleConnections()
				if err == nil && status != 403 {
					done <- fmt.Errorf("/secret: %d", status)
					return
				}
			}
		}()
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		if err := n.Restart(ctx, devnode.HTTP); err != nil {
			t.Fatalf("restart %s: %v", devnode.HTTP, err)
		}
		cancel()
		servicetest.EventuallyNil(t, "requests pass again", func() error {
			status, _, err := fetch(browser(t, pods[0], false), "GET", url+"/public/a")
			if err != nil || status != 200 {
				return fmt.Errorf("%d, %w", status, err)
			}
			return nil
		})
		close(stop)
		if err := <-done; err != nil {
			t.Errorf("round %d: %v", round, err)
		}
	}
}

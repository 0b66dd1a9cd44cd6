// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package health

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestOnlyLoopbackAddressesAreTaken(t *testing.T) {
	for _, good := range []string{"127.0.0.1:64701", "127.1.2.3:0", "[::1]:64706"} {
		if err := CheckAddress(good); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	for _, bad := range []string{
		"", "off", ":80", "0.0.0.0:80", "[::]:80", "192.0.2.1:80", "localhost:80", "127.0.0.1", "127.0.0.1:x",
	} {
		if CheckAddress(bad) == nil {
			t.Errorf("%q was accepted", bad)
		}
		if l, err := Listen(bad); err == nil {
			t.Errorf("%q is listened on", bad)
			l.Close()
		}
	}
}

func TestProbesSayWhetherAndWhyNot(t *testing.T) {
	l, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var state atomic.Pointer[error]
	ready := func() error { return *state.Load() }
	stop := Serve(l, ready, log.Discard())
	for _, c := range []struct {
		state error
		path  string
		code  int
		body  string
	}{
		{nil, "/livez", 200, "ok\n"},
		{nil, "/readyz", 200, "ok\n"},
		{errors.New("waiting for etcd"), "/livez", 200, "ok\n"},
		{errors.New("waiting for etcd"), "/readyz", 503, "waiting for etcd\n"},
		{nil, "/", 404, "404 page not found\n"},
	} {
		state.Store(&c.state)
		r, err := http.Get("http://" + l.Addr().String() + c.path)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err != nil || r.StatusCode != c.code || string(body) != c.body {
			t.Errorf("%s while %v: %d %q, %v, want %d %q", c.path, c.state, r.StatusCode, body, err, c.code, c.body)
		}
	}
	stop()
	if c, err := net.Dial("tcp", l.Addr().String()); err == nil {
		t.Error("the server answers after stop")
		c.Close()
	}
}

// TestSilentConnectionsDoNotKeepProbesAway: every user of the machine can open connections to the
// port.
func TestSilentConnectionsDoNotKeepProbesAway(t *testing.T) {
	l, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer Serve(l, func() error { return nil }, log.Discard())()
	for range 2 * maxConns {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	r, err := http.Get("http://" + l.Addr().String() + "/livez")
	if err != nil {
		t.Fatal(err)
	}
	r.Body.Close()
	if r.StatusCode != 200 {
		t.Errorf("behind %d silent connections: %s", 2*maxConns, r.Status)
	}
}

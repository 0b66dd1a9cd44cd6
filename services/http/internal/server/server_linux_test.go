// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/proxy/pods"
	"github.com/sluice-net/sluice/services/http/internal/relay"
	"github.com/sluice-net/sluice/services/http/internal/rules"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// world is a Server with listeners whose connections belong to an endpoint and a rule set, as in a proxy namespace.
type world struct {
	*Server
	t        *testing.T
	rules    *rules.Rules
	pods     *pods.Pods
	requests *Requests
	mu       sync.Mutex
	reports  []string // guarded by mu
}

func newWorld(t *testing.T, connections int) *world {
	t.Helper()
	w := &world{t: t, rules: rules.New(), pods: pods.New(shares.Settings{}, func(uint16) {}), requests: NewRequests()}
	w.Server = New(Options{
		Rules: w.rules, Pods: w.pods, Connections: connections, Log: slog.New(slog.DiscardHandler),
		Take: func(context.Context, bool) (int, error) { return -1, errors.New("no socket") },
		Report: func(namespace string, e relay.Event) {
			w.requests.Report(namespace, e)
			w.mu.Lock()
			defer w.mu.Unlock()
			w.reports = append(w.reports, fmt.Sprint(namespace, " ", e.Outcome, " ", e.Status))
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return w
}

// listener returns a listener whose sockets have the mark of an endpoint with a rule set.
func (w *world) listener(endpoint, set uint16) (fd int, at string) {
	w.t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err == nil {
		err = errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(endpoint)<<16|int(set)),
			unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 1024),
		)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		w.t.Fatal(err)
	}
	port := sa.(*unix.SockaddrInet4).Port
	return fd, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(port)).String()
}

func (w *world) dial(at string) net.Conn {
	w.t.Helper()
	c, err := net.Dial("tcp", at)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(servicetest.Patience)); err != nil {
		w.t.Fatal(err)
	}
	return c
}

func (w *world) wantReport(want string) {
	w.t.Helper()
	servicetest.EventuallyNil(w.t, "a report", func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, r := range w.reports {
			if r == want {
				return nil
			}
		}
		return fmt.Errorf("%q is not among %q", want, w.reports)
	})
}

func status(t *testing.T, c net.Conn) int {
	t.Helper()
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0
	}
	r.Body.Close()
	return r.StatusCode
}

// TestRequestsWaitForTheirRules: a request is not evaluated before its set is known, nor after its pod has gone.
func TestRequestsWaitForTheirRules(t *testing.T) {
	w := newWorld(t, 100)
	shop := workload.Owner{ContainerID: "a", Interface: "eth0"}
	w.pods.Upsert(shop, pods.Endpoint{ID: 5, Namespace: "shop"})
	fd, at := w.listener(5, 7)
	w.Listen([]int{fd})
	c := w.dial(at)
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	servicetest.EventuallyNil(t, "the connection is served", func() error {
		if w.Len() != 1 {
			return errors.New("not served")
		}
		return nil
	})
	w.rules.Upsert(7, false, &layer7.Rules{})
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil || r.StatusCode != http.StatusForbidden {
		t.Fatalf("%v, %v", r, err)
	}
	w.wantReport("shop refused 403")
	if n := testutil.ToFloat64(w.requests.total.WithLabelValues("refused", "4xx", "shop")); n != 1 {
		t.Errorf("sluice_http_requests_total is %v", n)
	}
	other := w.dial(at)
	if got := status(t, other); got != http.StatusForbidden {
		t.Errorf("another connection: %d", got)
	}
	w.pods.Delete(shop)
	if got := status(t, other); got != http.StatusServiceUnavailable {
		t.Errorf("after the pod was deleted: %d", got)
	}
}

// TestOnePodTakesNoConnectionOfAnother: a pod with too many connections loses its own oldest ones.
func TestOnePodTakesNoConnectionOfAnother(t *testing.T) {
	w := newWorld(t, 8)
	noisy, noisyAt := w.listener(1, 7)
	quiet, quietAt := w.listener(2, 7)
	w.Listen([]int{noisy, quiet})
	w.rules.Upsert(7, false, &layer7.Rules{})
	own := w.dial(quietAt)
	if got := status(t, own); got != http.StatusForbidden {
		t.Fatalf("status %d", got)
	}
	var all []net.Conn
	for range 50 {
		all = append(all, w.dial(noisyAt))
	}
	last := all[len(all)-1]
	if got := status(t, last); got != http.StatusForbidden {
		t.Errorf("the last connection: %d", got)
	}
	if _, err := all[0].Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
		t.Errorf("the first connection: %v, want a reset", err)
	}
	if got := status(t, own); got != http.StatusForbidden {
		t.Errorf("the quiet pod: %d", got)
	}
	if w.Share.Load() == 0 || w.Len() > 3 {
		t.Errorf("%d connections, %d ended by the limit", w.Len(), w.Share.Load())
	}
}

func TestConnectionsFitIntoTheLimitOfDescriptors(t *testing.T) {
	for files, want := range map[uint64]int{0: 4, 100: 4, 1024: 448, 1 << 20: MaxConnections} {
		if got := Connections(files); got != want {
			t.Errorf("%d descriptors: %d connections, want %d", files, got, want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package healthport

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// services is a fake of Services.
type services struct {
	changed chan struct{}

	mu       sync.Mutex
	all      []owner.Local
	problems map[string]error
}

func (s *services) Locals(context.Context) ([]owner.Local, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all, nil
}

func (s *services) LocalsChanged() <-chan struct{} { return s.changed }

func (s *services) Report(_ context.Context, what string, why error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.problems[what] = why; why == nil {
		delete(s.problems, what)
	}
	return nil
}

func (s *services) set(all ...owner.Local) {
	s.mu.Lock()
	s.all = all
	s.mu.Unlock()
	s.changed <- struct{}{}
}

func (s *services) problem() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprint(s.problems)
}

// freePort returns a port on which nothing listens at the moment.
func freePort(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return uint16(l.Addr().(*net.TCPAddr).Port)
}

func run(t *testing.T) (*services, *Ports) {
	t.Helper()
	s, p, _ := runWith(t, "")
	return s, p
}

// runWith runs ports with a state file, until the end of the test or until stop.
func runWith(t *testing.T, path string) (*services, *Ports, func()) {
	t.Helper()
	s := &services{changed: make(chan struct{}), problems: make(map[string]error)}
	p := New(s, Options{Address: "127.0.0.1", Path: path, Log: log.Discard()})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return s, p, stop
}

// addresses returns n addresses.
func addresses(n int) (all []netip.Addr) {
	for i := range n {
		all = append(all, netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}))
	}
	return all
}

// ask returns the status, the weight and the body of a port's answer.
func ask(port uint16) (answer string, err error) {
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Get(fmt.Sprintf("http://127.0.0.1:%d/healthz", port))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return fmt.Sprintf("%d %s %s", resp.StatusCode, resp.Header.Get("X-Load-Balancing-Endpoint-Weight"),
		strings.TrimSpace(string(body))), err
}

// TestSilentConnectionsKeepNoLoadBalancerOut: one client or many clients hold the maximum number of connections of a
// port and send nothing. A load balancer still gets an answer.
func TestSilentConnectionsKeepNoLoadBalancerOut(t *testing.T) {
	s, _ := run(t)
	port := freePort(t)
	s.set(owner.Local{
		Name: service.Name{Namespace: "shop", Name: "web"}, Port: port, Ready: addresses(1), Enforced: owner.Enforced,
	})
	servicetest.EventuallyNil(t, "the port to answer", func() error { _, err := ask(port); return err })
	for what, from := range map[string]func(i int) byte{
		"one sender":   func(int) byte { return 2 },
		"many senders": func(i int) byte { return byte(2 + i) },
	} {
		for i := range 2 * maxConns {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, from(i))}}
			c, err := d.Dial("tcp", fmt.Sprint("127.0.0.1:", port))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
		}
		if answer, err := ask(port); err != nil || !strings.HasPrefix(answer, "200 1 ") {
			t.Errorf("with the connections of %s: %q, %v", what, answer, err)
		}
	}
}

// TestRequestOfAnAcceptedConnectionIsAnsweredDuringTheEnd: the process ends after the kernel has accepted a
// connection. It still answers the request, because no other process can. Idle connections do not delay the end.
func TestRequestOfAnAcceptedConnectionIsAnsweredDuringTheEnd(t *testing.T) {
	p := New(&services{}, Options{Address: "127.0.0.1", Log: log.Discard()})
	at, err := p.listen(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	p.open[0] = at
	connect := func() net.Conn {
		c, err := net.Dial("tcp", at.listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	get := func(c net.Conn) {
		if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: node\r\n\r\n"); err != nil {
			t.Error(err)
		}
		if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || resp.StatusCode != 503 {
			t.Errorf("answer %v, %v, want one without endpoints", resp, err)
		}
	}
	idle, early := connect(), connect()
	get(idle)
	servicetest.Eventually(t, "both connections are accepted", func() bool {
		at.connections.mu.Lock()
		defer at.connections.mu.Unlock()
		return len(at.connections.open) == 2
	})
	ended := make(chan struct{})
	go func() { defer close(ended); p.end() }()
	if _, err := idle.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the idle connection: %v, want EOF", err)
	}
	get(early)
	<-ended
	if n := len(at.connections.open); n != 0 {
		t.Errorf("%d connections after the end", n)
	}
}

func TestPortAnswersWhatTheNodeHas(t *testing.T) {
	s, p := run(t)
	l := owner.Local{Name: service.Name{Namespace: "shop", Name: "web"}, Port: freePort(t)}
	for _, c := range []struct {
		ready    int
		enforced owner.Enforcement
		want     string
	}{
		{
			1, owner.EnforcementUnknown,
			`503 1 {"service":{"namespace":"shop","name":"web"},"localEndpoints":1,"serviceProxyHealthy":false}`,
		},
		{
			0, owner.NotEnforced,
			`503 0 {"service":{"namespace":"shop","name":"web"},"localEndpoints":0,"serviceProxyHealthy":true}`,
		},
		{
			2, owner.Enforced,
			`200 2 {"service":{"namespace":"shop","name":"web"},"localEndpoints":2,"serviceProxyHealthy":true}`,
		},
		{
			2, owner.NotEnforced,
			`503 2 {"service":{"namespace":"shop","name":"web"},"localEndpoints":2,"serviceProxyHealthy":false}`,
		},
		{
			1, owner.Enforced,
			`200 1 {"service":{"namespace":"shop","name":"web"},"localEndpoints":1,"serviceProxyHealthy":true}`,
		},
	} {
		l.Ready, l.Enforced = addresses(c.ready), c.enforced
		s.set(l)
		servicetest.EventuallyNil(t, "the answer", func() error {
			if got, err := ask(l.Port); err != nil || got != c.want {
				return fmt.Errorf("%s, %w; want %s", got, err, c.want)
			}
			return nil
		})
	}
	if p.Open() != 1 {
		t.Errorf("%d ports are open", p.Open())
	}
	s.set()
	servicetest.Eventually(t, "the port is closed", func() bool {
		_, err := ask(l.Port)
		return err != nil && p.Open() == 0
	})
}

func TestPortThatCannotBeOpenedIsAProblem(t *testing.T) {
	s, p := run(t)
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	taken := uint16(other.Addr().(*net.TCPAddr).Port)
	a := owner.Local{Name: service.Name{Namespace: "n", Name: "a"}, Port: taken}
	b := owner.Local{
		Name: service.Name{Namespace: "n", Name: "b"}, Port: freePort(t), Ready: addresses(1), Enforced: owner.Enforced,
	}
	c := owner.Local{Name: service.Name{Namespace: "n", Name: "c"}, Port: b.Port}
	s.set(a, b, c)
	servicetest.Eventually(t, "the problems", func() bool {
		text := s.problem()
		return strings.Contains(text, "service n/a: ") && strings.Contains(text, "address already in use") &&
			strings.Contains(text, fmt.Sprintf("service n/c has the health check port %d of service n/b", b.Port))
	})
	if got, err := ask(b.Port); err != nil || !strings.HasPrefix(got, "200 ") {
		t.Errorf("%s, %v", got, err)
	}
	if p.Open() != 1 {
		t.Errorf("%d ports are open", p.Open())
	}
	other.Close()
	s.set(a, b)
	servicetest.Eventually(t, "no problem", func() bool { return s.problem() == "map[]" && p.Open() == 2 })
}

// TestAnswerStaysWhileNothingIsKnown: the datapath subscribes again, or this process has just started. The answer
// stays the same, because the kernel still forwards to the previous backends.
func TestAnswerStaysWhileNothingIsKnown(t *testing.T) {
	path := filepath.Join(t.TempDir(), "health-checks.json")
	s, _, stop := runWith(t, path)
	l := owner.Local{Name: service.Name{Namespace: "shop", Name: "web"}, Port: freePort(t)}
	want := func(s *services, what string, enforced owner.Enforcement, code string, ready ...netip.Addr) {
		t.Helper()
		l.Ready, l.Enforced = ready, enforced
		s.set(l)
		servicetest.EventuallyNil(t, what, func() error {
			if got, err := ask(l.Port); err != nil || !strings.HasPrefix(got, fmt.Sprintf("%s %d ", code, len(ready))) {
				return fmt.Errorf("%s, %w; want %s with %d addresses", got, err, code, len(ready))
			}
			return nil
		})
	}
	a := addresses(3)
	want(s, "enforced", owner.Enforced, "200", a[0], a[1])
	want(s, "the datapath is disconnected", owner.EnforcementUnknown, "200", a[0], a[1])
	want(s, "a pod is added meanwhile", owner.EnforcementUnknown, "200", a[1], a[2])
	want(s, "the addresses in the kernel are removed", owner.EnforcementUnknown, "503", a[2])
	want(s, "one comes back", owner.EnforcementUnknown, "200", a[0])
	want(s, "the datapath is behind", owner.NotEnforced, "503", a[0])
	want(s, "it is unavailable again", owner.EnforcementUnknown, "503", a[0])
	want(s, "enforced again", owner.Enforced, "200", a[0])

	stop()
	s, _, stop = runWith(t, path)
	s.set() // its service is not listed yet
	want(s, "after a restart", owner.EnforcementUnknown, "200", a[0])
	want(s, "another address after a restart", owner.EnforcementUnknown, "503", a[1])
	stop()

	if err := os.WriteFile(path, []byte(`{"schema":"sluice.loadbalancer.healthchecks"`), 0o600); err != nil {
		t.Fatal(err)
	}
	s, _, stop = runWith(t, path)
	want(s, "after a restart with a corrupt file", owner.EnforcementUnknown, "503", a[0])
	want(s, "enforced after that", owner.Enforced, "200", a[0])
	stop()

	m, err := openMemory(path)
	if err != nil {
		t.Fatal(err)
	}
	m.boot, m.led = "another boot", nil
	if err := m.update([]owner.Local{{Name: l.Name, Ready: a, Enforced: owner.Enforced}}); err != nil {
		t.Fatal(err)
	}
	s, _, stop = runWith(t, path)
	defer stop()
	want(s, "after a boot", owner.EnforcementUnknown, "503", a[0])
}

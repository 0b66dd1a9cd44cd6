// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package healthport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/listeners"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// keeper is a store of listeners, which outlives the ports.
type keeper struct {
	*listeners.Store
	t    *testing.T
	path string
	stop func()
}

func newKeeper(t *testing.T) *keeper {
	t.Helper()
	dir, err := os.MkdirTemp("", "keeper")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	k := &keeper{t: t, path: filepath.Join(dir, "listeners.sock")}
	k.start()
	return k
}

func (k *keeper) start() {
	k.t.Helper()
	k.Store = listeners.NewStore(listeners.StoreOptions{
		Listen: func() (net.Listener, error) { return rpc.Listen(k.path, rpc.ListenOptions{Packets: true}) },
		Users:  []uint32{uint32(os.Getuid())},
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- k.Run(ctx) }()
	servicetest.EventuallyNil(k.t, "the store is there", func() error { _, err := os.Stat(k.path); return err })
	k.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			k.t.Error(err)
		}
	})
	k.t.Cleanup(k.stop)
}

// keeps waits until the store has n listeners.
func (k *keeper) keeps(n int) {
	k.t.Helper()
	servicetest.EventuallyNil(k.t, "listeners in the store", func() error {
		if have := k.Len(); have != n {
			return fmt.Errorf("%d, want %d", have, n)
		}
		return nil
	})
}

// ports runs ports with the store until the returned stop is called.
func (k *keeper) ports(change func(*Ports)) (s *services, p *Ports, stop func()) {
	k.t.Helper()
	s = &services{changed: make(chan struct{}), problems: make(map[string]error)}
	p = New(s, Options{Address: "127.0.0.1", Store: k.path, Log: log.Discard()})
	if change != nil {
		change(p)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			k.t.Error(err)
		}
	})
	k.t.Cleanup(stop)
	return s, p, stop
}

// request connects to a port and sends a request.
func request(t *testing.T, port uint16) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", fmt.Sprint("127.0.0.1:", port))
	if err == nil {
		_, err = io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")
	}
	if err != nil {
		t.Fatalf("port %d: %v", port, err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func answers(t *testing.T, c net.Conn, want string) {
	t.Helper()
	if b, err := io.ReadAll(c); err != nil || !strings.HasPrefix(string(b), "HTTP/1.1 "+want) {
		t.Errorf("answer %q, %v; want %s", b, err, want)
	}
}

func local(name string, port uint16) owner.Local {
	return owner.Local{
		Name: service.Name{Namespace: "shop", Name: name}, Port: port, Ready: addresses(1), Enforced: owner.Enforced,
	}
}

// TestRequestsWaitForTheNextProcess: a health check port refuses no connection while no process serves it, and the
// next process answers. The first process still answers connections that it has accepted.
func TestRequestsWaitForTheNextProcess(t *testing.T) {
	k := newKeeper(t)
	s, _, stop := k.ports(nil)
	web, port := freePort(t), freePort(t)
	s.set(local("web", web), local("shop", port))
	k.keeps(2)
	accepted := request(t, web)
	stop()
	answers(t, accepted, "200")
	waiting := []net.Conn{request(t, web), request(t, port)}
	s, p, stop := k.ports(nil)
	s.set() // the services are not listed yet
	s.set(local("web", web))
	answers(t, waiting[0], "200")
	s.set(local("web", web), local("shop", port))
	answers(t, waiting[1], "200")
	if p.Open() != 2 || s.problem() != "map[]" {
		t.Errorf("%d ports are open, problems %s", p.Open(), s.problem())
	}
	s.set(local("web", web))
	k.keeps(1) // the service was removed
	stop()
}

// TestPortOfAServiceThatIsGoneIsClosed: a service was removed while no process ran. Its port refuses connections
// after a while. A listener at an address that is no longer configured is closed.
func TestPortOfAServiceThatIsGoneIsClosed(t *testing.T) {
	k := newKeeper(t)
	s, _, stop := k.ports(nil)
	port := freePort(t)
	s.set(local("web", port))
	k.keeps(1)
	stop()
	_, _, stop = k.ports(func(p *Ports) { p.unclaimed = 20 * time.Millisecond })
	k.keeps(0)
	if _, err := ask(port); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("port of a service that has gone: %v", err)
	}
	stop()

	s, _, stop = k.ports(nil)
	s.set(local("web", port))
	k.keeps(1)
	stop()
	s, p, _ := k.ports(func(p *Ports) { p.address = "127.0.0.2" })
	s.set(local("web", port))
	servicetest.Eventually(t, "the port is open", func() bool { return p.Open() == 1 })
	if _, err := ask(port); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("the former address: %v", err)
	}
	k.keeps(1)
}

// TestListenersAreKeptByTheNextStore: the store is another process, which may restart, too. The next store gets the
// listeners again.
func TestListenersAreKeptByTheNextStore(t *testing.T) {
	k := newKeeper(t)
	s, _, stop := k.ports(nil)
	port := freePort(t)
	s.set(local("web", port))
	k.keeps(1)
	for range 2 {
		k.stop()
		if got, err := ask(port); err != nil || !strings.HasPrefix(got, "200 ") {
			t.Errorf("without the store: %s, %v", got, err)
		}
		k.start()
		k.keeps(1)
	}
	stop()
	waiting := request(t, port)
	s, _, stop = k.ports(nil)
	s.set(local("web", port))
	answers(t, waiting, "200")
	stop()
	k.stop()
	s, _, _ = k.ports(nil) // there is no store
	s.set(local("web", port))
	servicetest.EventuallyNil(t, "the port answers", func() error { _, err := ask(port); return err })
}

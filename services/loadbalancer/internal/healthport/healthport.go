// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package healthport serves the health check ports of services. Load balancers in front of the
// cluster use them to find the nodes with endpoints of a service whose external traffic policy is
// Local.
//
// A port answers 200 while the node has a ready endpoint of the service that the datapath enforces,
// otherwise 503. While the datapath or this process restarts, it keeps its previous answer, because
// the kernel keeps forwarding.
package healthport

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// Services are the services with health check ports.
type Services interface {
	Locals(ctx context.Context) ([]owner.Local, error)
	// LocalsChanged has a token when Locals may have changed.
	LocalsChanged() <-chan struct{}
	// Report reports a problem; nil clears it.
	Report(ctx context.Context, what string, why error) error
}

const (
	// retry is the pause before another attempt to open a port.
	retry = 5 * time.Second
	// timeout bounds a request; answers are short.
	timeout = 5 * time.Second
	// maxConns bounds the concurrent connections of a port.
	maxConns = 64
)

// Ports are the open ports.
type Ports struct {
	services Services
	address  string
	log      *slog.Logger
	memory   *memory
	unsaved  string // last logged error of saving the memory
	open     map[uint16]*port
	retry    time.Duration     // pause between attempts
	failed   map[uint16]string // reported problems of ports that are not open
	count    atomic.Int64
}

// port is one open port.
type port struct {
	server *http.Server
	done   chan struct{}
	state  atomic.Pointer[state]
}

// state determines what a port answers.
type state struct {
	name  service.Name
	ready int  // number of addresses on this node
	led   bool // the datapath enforces one of them
}

// New returns ports on an address of this machine; empty: on all addresses. The file at path keeps
// their answers across a restart; "": they are not kept.
func New(services Services, address, path string, l *slog.Logger) *Ports {
	m, err := openMemory(path)
	if err != nil {
		l.Warn("health check ports answer 503 until the datapath has subscribed", log.Err(err))
	}
	return &Ports{
		services: services, address: address, log: l, memory: m, open: make(map[uint16]*port),
		failed: make(map[uint16]string), retry: retry,
	}
}

// Open returns the number of open ports.
func (p *Ports) Open() int { return int(p.count.Load()) }

// Run serves the ports until the context ends.
func (p *Ports) Run(ctx context.Context) error {
	defer func() {
		for n := range p.open {
			p.close(n)
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-p.services.LocalsChanged():
		case <-timer.C:
		case <-ctx.Done():
			return nil
		}
		if err := p.serve(ctx); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		if len(p.failed) > 0 {
			timer.Reset(p.retry)
		}
	}
}

// serve opens, changes and closes ports to match the services.
func (p *Ports) serve(ctx context.Context) error {
	all, err := p.services.Locals(ctx)
	if err != nil {
		return err
	}
	want := make(map[uint16]owner.Local, len(all))
	taken := make(map[uint16]service.Name)
	problems := make(map[uint16]error)
	for _, l := range all { // sorted by name: the first service keeps a port
		if first, ok := taken[l.Port]; ok {
			problems[l.Port] = fmt.Errorf("service %s has the health check port %d of service %s", l.Name, l.Port, first)
			continue
		}
		taken[l.Port], want[l.Port] = l.Name, l
	}
	for n := range p.open {
		if _, ok := want[n]; !ok {
			p.close(n)
		}
	}
	for n, l := range want {
		at := p.open[n]
		if at == nil {
			if at, err = p.listen(ctx, n); err != nil {
				problems[n] = fmt.Errorf("service %s: %w", l.Name, err)
				continue
			}
			p.open[n] = at
		}
		at.state.Store(&state{l.Name, len(l.Ready), p.memory.leads(l)})
	}
	p.count.Store(int64(len(p.open)))
	p.learn(all)
	return p.report(ctx, problems)
}

// learn saves the answers for the next process. Without them, a port answers 503 for a moment after
// a restart.
func (p *Ports) learn(all []owner.Local) {
	why := ""
	if err := p.memory.learn(all); err != nil {
		why = err.Error()
	}
	if why != "" && why != p.unsaved {
		p.log.Error("cannot save the state of health check ports for a restart", "error", why)
	}
	p.unsaved = why
}

// report reports problems of ports, and clears resolved ones.
func (p *Ports) report(ctx context.Context, problems map[uint16]error) error {
	what := func(n uint16) string { return fmt.Sprintf("health check port %d", n) }
	for n := range p.failed {
		if problems[n] == nil {
			delete(p.failed, n)
			if err := p.services.Report(ctx, what(n), nil); err != nil {
				return err
			}
		}
	}
	for n, why := range problems {
		if p.failed[n] == why.Error() {
			continue
		}
		p.failed[n] = why.Error()
		if err := p.services.Report(ctx, what(n), why); err != nil {
			return err
		}
	}
	return nil
}

func (p *Ports) listen(ctx context.Context, n uint16) (*port, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(p.address, strconv.Itoa(int(n))))
	if err != nil {
		return nil, err
	}
	at := &port{done: make(chan struct{})}
	at.state.Store(&state{})
	at.server = &http.Server{
		Handler: http.HandlerFunc(at.answer), MaxHeaderBytes: 8 << 10,
		ReadTimeout: timeout, WriteTimeout: timeout, IdleTimeout: timeout,
		ErrorLog: slog.NewLogLogger(p.log.Handler(), slog.LevelDebug),
	}
	go func() {
		defer close(at.done)
		err := at.server.Serve(&bounded{Listener: l})
		if !errors.Is(err, http.ErrServerClosed) {
			p.log.Error("health check port stopped unexpectedly", "port", n, log.Err(err))
		}
	}()
	return at, nil
}

func (p *Ports) close(n uint16) {
	at := p.open[n]
	delete(p.open, n)
	p.count.Store(int64(len(p.open)))
	at.server.Close() //nolint:errcheck // its error does not matter
	<-at.done
}

// answer has kube-proxy's format, which load balancers read.
func (at *port) answer(w http.ResponseWriter, _ *http.Request) {
	now := at.state.Load()
	type name struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	}
	body, err := json.Marshal(struct {
		Service             name `json:"service"`
		LocalEndpoints      int  `json:"localEndpoints"`
		ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
	}{name{now.name.Namespace, now.name.Name}, now.ready, now.led || now.ready == 0})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(now.ready))
	code := http.StatusServiceUnavailable
	if now.led {
		code = http.StatusOK
	}
	w.WriteHeader(code)
	w.Write(append(body, '\n')) //nolint:errcheck // the client has gone
}

// bounded is a listener with a limited number of connections. Anyone may connect, so a further
// connection replaces the oldest one of the sender with the most: a sender that holds connections
// keeps no load balancer out, and senders with one each have to be faster than an answer.
type bounded struct {
	net.Listener

	mu   sync.Mutex
	open []*boundedConn // guarded by mu; the oldest first
}

// Accept implements net.Listener.
func (b *bounded) Accept() (net.Conn, error) {
	c, err := b.Listener.Accept()
	if err != nil {
		return nil, err
	}
	added := &boundedConn{Conn: c, from: sender(c.RemoteAddr()), of: b}
	if over := b.add(added); over != nil {
		over.Close() //nolint:errcheck // replaced
	}
	return added, nil
}

// add adds a connection, and returns the one to close; nil: none.
func (b *bounded) add(c *boundedConn) *boundedConn {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open = append(b.open, c)
	if len(b.open) <= maxConns {
		return nil
	}
	has, most := make(map[netip.Addr]int), 0
	for _, x := range b.open {
		has[x.from]++
		most = max(most, has[x.from])
	}
	i := slices.IndexFunc(b.open, func(x *boundedConn) bool { return has[x.from] == most })
	return b.open[i]
}

// sender returns the address that identifies a sender; an IPv6 sender is its /64.
func sender(a net.Addr) netip.Addr {
	at, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	from := at.AddrPort().Addr().Unmap()
	if from.Is6() {
		from = netip.PrefixFrom(from, 64).Masked().Addr()
	}
	return from
}

// boundedConn is a connection that leaves its listener when it is closed.
type boundedConn struct {
	net.Conn
	from netip.Addr
	of   *bounded
}

// Close implements net.Conn.
func (c *boundedConn) Close() error {
	c.of.mu.Lock()
	if i := slices.Index(c.of.open, c); i >= 0 {
		c.of.open = slices.Delete(c.of.open, i, i+1)
	}
	c.of.mu.Unlock()
	return c.Conn.Close()
}

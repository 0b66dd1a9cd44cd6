// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package healthport serves the health check node ports of Services with external traffic policy Local. A load
// balancer in front of the cluster uses these ports to find the nodes that have endpoints of a Service.
//
// A port answers 200 while the node has a ready endpoint of the Service that the datapath enforces, and otherwise
// 503. While the datapath or this process restarts, the answer stays the same, because the kernel continues to
// forward. The datapath keeps the listeners open while this process restarts. New connections wait in the kernel, and
// the next process answers them.
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

	"github.com/sluice-net/sluice/kit/listeners"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// Services gives access to the services with health check ports.
type Services interface {
	Locals(ctx context.Context) ([]owner.Local, error)
	// LocalsChanged returns a channel with a token when the result of Locals may have changed.
	LocalsChanged() <-chan struct{}
	// Report reports the reason for the problem what; nil clears the problem.
	Report(ctx context.Context, what string, why error) error
}

const (
	// retry is the pause before another attempt to open a port.
	retry = 5 * time.Second
	// timeout is the maximum duration of a request; answers are short.
	timeout = 5 * time.Second
	// ending is the time limit for open requests when the process ends.
	ending = time.Second
	// maxConns is the maximum number of concurrent connections of a port.
	maxConns = 64
)

// Ports are the open ports.
type Ports struct {
	services Services
	address  string
	log      *slog.Logger
	memory   *memory
	unsaved  string // last logged error of writing the memory file
	open     map[uint16]*port
	retry    time.Duration     // pause between attempts
	failed   map[uint16]string // reported problems of ports that are not open
	count    atomic.Int64

	store   string // path of the store's socket; "": listeners are not kept
	client  *listeners.Client
	kept    map[uint16]*net.TCPListener // listeners of the previous process, until a service with the port is known
	adopted time.Time                   // time of the last connection to the store

	unclaimed time.Duration // how long kept listeners stay open
}

// port is one open port.
type port struct {
	listener    *net.TCPListener
	connections *bounded // of listener
	server      *http.Server
	done        chan struct{}
	state       atomic.Pointer[state]
}

// state determines the answer of a port.
type state struct {
	name  service.Name
	ready int  // number of ready addresses on this node
	led   bool // the datapath enforces one of them
}

// Options are the options of Ports.
type Options struct {
	Address string // of this machine, on which the ports listen; "": all addresses
	Path    string // file that keeps the answers across a restart; "": none
	Store   string // socket of the store that keeps the listeners across a restart; "": none
	Log     *slog.Logger
}

// New returns ports, which Run opens.
func New(services Services, o Options) *Ports {
	m, err := openMemory(o.Path)
	if err != nil {
		o.Log.Warn("health check ports answer 503 until the datapath has subscribed", log.Err(err))
	}
	return &Ports{
		services: services, address: o.Address, log: o.Log, memory: m, open: make(map[uint16]*port),
		failed: make(map[uint16]string), retry: retry, store: o.Store, kept: make(map[uint16]*net.TCPListener),
		unclaimed: unclaimed,
	}
}

// Open returns the number of open ports.
func (p *Ports) Open() int { return int(p.count.Load()) }

// Run serves the ports until the context ends.
func (p *Ports) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	stores, connecting := make(chan connected), make(chan struct{})
	go func() {
		defer close(connecting)
		if p.store != "" {
			p.connect(ctx, stores)
		}
	}()
	defer func() {
		cancel()
		<-connecting
		p.end()
	}()
	if p.store != "" {
		select {
		case c := <-stores:
			p.adopt(c)
		case <-ctx.Done():
			return nil
		}
	}
	timer, claims := time.NewTimer(0), time.NewTicker(p.unclaimed/4)
	defer timer.Stop()
	defer claims.Stop()
	for {
		select {
		case <-p.services.LocalsChanged():
		case <-timer.C:
		case c := <-stores:
			p.adopt(c)
		case <-claims.C:
			p.expire()
			continue
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

// serve opens, changes and closes ports until they match the services.
func (p *Ports) serve(ctx context.Context) error {
	all, err := p.services.Locals(ctx)
	if err != nil {
		return err
	}
	want := make(map[uint16]owner.Local, len(all))
	taken := make(map[uint16]service.Name)
	problems := make(map[uint16]error)
	for _, l := range all { // sorted by name: if several services have the same port, the first one gets it
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
	p.save(all)
	return p.report(ctx, problems)
}

// save writes the state of the services to the memory file. The next process answers from this file until the
// datapath has subscribed. Without the file, a health check port would answer 503 for a moment after a restart.
func (p *Ports) save(all []owner.Local) {
	why := ""
	if err := p.memory.update(all); err != nil {
		why = err.Error()
	}
	if why != "" && why != p.unsaved {
		p.log.Error("cannot save the state of health check ports for a restart", "error", why)
	}
	p.unsaved = why
}

// report reports the problems of ports, and clears resolved problems.
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
	l := p.claim(n)
	if l == nil {
		own, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(p.address, strconv.Itoa(int(n))))
		if err != nil {
			return nil, err
		}
		l = own.(*net.TCPListener) //nolint:forcetypeassert // a TCP network has TCP listeners
		p.keep(n, l)
	}
	at := &port{listener: l, connections: &bounded{Listener: l}, done: make(chan struct{})}
	at.state.Store(&state{})
	at.server = &http.Server{
		Handler: http.HandlerFunc(at.answer), MaxHeaderBytes: 8 << 10,
		ReadTimeout: timeout, WriteTimeout: timeout, IdleTimeout: timeout,
		ErrorLog: slog.NewLogLogger(p.log.Handler(), slog.LevelDebug),
	}
	go func() {
		defer close(at.done)
		err := at.server.Serve(at.connections)
		if !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			p.log.Error("health check port stopped unexpectedly", "port", n, log.Err(err))
		}
	}()
	return at, nil
}

// close closes a port whose service was removed.
func (p *Ports) close(n uint16) {
	at := p.open[n]
	delete(p.open, n)
	p.count.Store(int64(len(p.open)))
	p.drop(n, at.listener)
	at.server.Close() //nolint:errcheck // the port is closed anyway
	<-at.done
}

// end stops all ports at the end of the process. Requests that were accepted are answered. The store keeps the
// listeners open, so later connections wait for the next process.
func (p *Ports) end() {
	ctx, cancel := context.WithTimeout(context.Background(), ending)
	defer cancel()
	var ends sync.WaitGroup
	for _, at := range p.open {
		ends.Go(func() {
			p.closeCopy(at.listener)
			<-at.done // the server has seen each accepted connection
			at.finish(ctx)
		})
	}
	ends.Wait()
	clear(p.open)
	p.count.Store(0)
	last := connected{client: p.client}
	for _, l := range p.kept {
		last.kept = append(last.kept, l)
	}
	p.disconnect(last)
	clear(p.kept)
	p.client = nil
}

// finish closes the connections of a port that accepts no further connections. It closes idle connections at once,
// other connections after their answer, and all when ctx ends. Server.Shutdown cannot be used: it closes connections
// whose request it has not read yet without an answer.
func (at *port) finish(ctx context.Context) {
	at.server.SetKeepAlivesEnabled(false)
	select {
	case <-at.connections.empty():
	case <-ctx.Done():
	}
	at.server.Close() //nolint:errcheck // the port is closed anyway
}

// answer uses kube-proxy's format, which load balancers can parse.
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
	w.Write(append(body, '\n')) //nolint:errcheck // fails only if the client has closed the connection
}

// bounded is a listener with a limited number of connections. Every host may connect. At the limit, a new connection
// replaces the oldest connection of the sender with the most connections. So a sender that keeps many connections
// open cannot block a load balancer. Many senders with one connection each could block it only by connecting faster
// than the port answers.
type bounded struct {
	net.Listener

	mu      sync.Mutex
	open    []*boundedConn // guarded by mu; the oldest first
	emptied chan struct{}  // guarded by mu; closed when open becomes empty; nil: no caller waits
}

// empty returns a channel that is closed when no connection is open. It may be called only once, after the last
// Accept.
func (b *bounded) empty() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	emptied := make(chan struct{})
	b.emptied = emptied
	b.signal()
	return emptied
}

// signal closes emptied if no connection is open. The caller holds mu.
func (b *bounded) signal() {
	if b.emptied != nil && len(b.open) == 0 {
		close(b.emptied)
		b.emptied = nil
	}
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

// add adds a connection, and returns the connection to close instead, or nil.
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

// sender returns the prefix that identifies a sender: its IPv4 address or its IPv6 /64.
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

// boundedConn is a connection that is removed from its listener when it is closed.
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
		c.of.signal()
	}
	c.of.mu.Unlock()
	return c.Conn.Close()
}

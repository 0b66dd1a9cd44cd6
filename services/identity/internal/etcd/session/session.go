// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package session connects a node to etcd: it maintains the leases of the node's keys, claims the node's name, and
// detects that etcd has lost its history.
//
// A session has two leases: a long one for this node's keys, and a short one for alive/<node>, the claim of the node's
// name. The package knows no other keys. Callers write their keys with Commit, and attach keys that must be deleted
// with the node to Lease.
//
// The value of alive/<node> is "<incarnation> <boot id>"; the incarnation identifies the state directory. A process
// takes the name over from a process of the same incarnation at once: no two processes use a state directory, so the
// other one has ended. A node with another state directory gets the name when the lease has run out. After its start, a
// process takes the name over only from its own boot, so that two copies of one machine's disk do not take it from each
// other repeatedly.
package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// Config of a Session.
type Config struct {
	Client  Client
	Prefix  string        // prefix of all keys, for example "/sluice/v1/identity"
	Node    string        // name of this node in the cluster; without '/'
	TTL     time.Duration // how long the keys of this node outlive its last sign of life; whole seconds
	Timeout time.Duration // timeout of the session's own requests
	Listen  time.Duration // interval at which Follow asks etcd for its current revision
	// AliveTTL is the time for which the claim of the name outlives the last sign of life; whole seconds.
	AliveTTL    time.Duration
	Incarnation string // identifies the state directory; another node with the same name has another value
	Boot        string // of the machine
	Last        string // result of Name in the former process; empty if unknown
	Log         *slog.Logger
}

// Session is a node's presence in etcd. All methods may be called concurrently.
type Session struct {
	cfg    Config
	client *clientv3.Client
	tls    *handshake      // state of the client's last TLS handshake
	ctx    context.Context // context of the goroutines that renew leases; Close ends it
	cancel context.CancelFunc
	wg     sync.WaitGroup // of the same

	mu      sync.Mutex
	keys    lease            // guarded by mu; lease of the node's keys; zero without a session
	last    clientv3.LeaseID // guarded by mu; lease of the last session, perhaps of the former process; 0: none
	alive   lease            // guarded by mu; lease of the node's name; zero while the name is not claimed
	named   bool             // guarded by mu; this process had the name
	pos     position         // guarded by mu
	history chan struct{}    // guarded by mu; closed when etcd turns out to have lost its history
	witness witness          // guarded by mu
}

// Open returns a Session that connects when it is first used. The caller closes it.
func Open(cfg Config) (*Session, error) {
	if cfg.Node == "" || strings.ContainsAny(cfg.Node, "/\x00") {
		return nil, fmt.Errorf("node name %q: want a name without '/'", cfg.Node)
	}
	if !strings.HasPrefix(cfg.Prefix, "/") || strings.HasSuffix(cfg.Prefix, "/") {
		return nil, fmt.Errorf("key prefix %q: want a path that begins with '/' and does not end in one", cfg.Prefix)
	}
	if cfg.Listen <= 0 || cfg.Timeout <= 0 {
		return nil, fmt.Errorf("listen interval %s, timeout %s: want more than 0", cfg.Listen, cfg.Timeout)
	}
	if cfg.TTL < time.Second || cfg.AliveTTL < time.Second {
		return nil, fmt.Errorf("session lease of %s, node name lease of %s: both must be at least 1s", cfg.TTL,
			cfg.AliveTTL)
	}
	if cfg.Incarnation == "" || strings.ContainsAny(cfg.Incarnation+cfg.Boot, " /") {
		return nil, fmt.Errorf("incarnation %q, boot %q: must not contain spaces or '/', and the incarnation must "+
			"not be empty", cfg.Incarnation, cfg.Boot)
	}
	client, handshake, err := cfg.Client.dial()
	if err != nil {
		return nil, err
	}
	s := &Session{cfg: cfg, client: client, tls: handshake, history: make(chan struct{})}
	s.last, _ = parseName(cfg.Last)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s, nil
}

// Close closes the connection. The leases and the keys stay for the next process.
func (s *Session) Close() error {
	s.cancel()
	s.wg.Wait()
	err := s.client.Close()
	if errors.Is(err, context.Canceled) { // the client's error after Close
		return nil
	}
	return err
}

// Move replaces the endpoints of etcd, and closes connections to former endpoints.
func (s *Session) Move(endpoints []string) { s.client.SetEndpoints(endpoints...) }

// Endpoints returns the current endpoints of etcd.
func (s *Session) Endpoints() []string { return s.client.Endpoints() }

// Config returns the session's configuration.
func (s *Session) Config() Config { return s.cfg }

// lease is a lease that is kept alive.
type lease struct {
	id   clientv3.LeaseID
	stop context.CancelFunc
}

// aliveKey returns the key that claims this node's name.
func (s *Session) aliveKey() string { return s.AliveKey(s.cfg.Node) }

// AliveKey returns the key that exists while a node keeps its lease alive; for an empty name, the prefix of all such
// keys.
func (s *Session) AliveKey(node string) string { return s.cfg.Prefix + "/alive/" + node }

// Alive reads AliveKey; nil: the node is silent.
func (s *Session) Alive(ctx context.Context, node string) (*mvccpb.KeyValue, error) {
	resp, err := s.Get(ctx, "read whether a node is alive", s.AliveKey(node))
	if err != nil || len(resp.Kvs) == 0 {
		return nil, err
	}
	return resp.Kvs[0], nil
}

// Named returns a condition for this node's transactions: they fail once another node owns its name.
func (s *Session) Named() clientv3.Cmp {
	return clientv3.Compare(clientv3.Value(s.aliveKey()), "=", s.aliveValue())
}

func (s *Session) aliveValue() string { return s.cfg.Incarnation + " " + s.cfg.Boot }

// Join makes sure that this node owns its name and has a lease for its keys. fresh reports a new lease: keys of the
// former lease were or will be deleted. Before Join claims the name for a new session, it calls prepare, whose error
// it returns.
func (s *Session) Join(ctx context.Context, prepare func(context.Context) error) (fresh bool, err error) {
	if id, err := s.Lease(); err == nil {
		alive, err := s.isAlive(ctx, id)
		if err != nil {
			return false, err
		}
		if alive {
			return false, s.Ping(ctx)
		}
		s.expired(id)
	}
	if err := prepare(ctx); err != nil {
		return false, err
	}
	if err := s.claimName(ctx); err != nil {
		return false, err
	}
	s.mu.Lock()
	last := s.last
	s.mu.Unlock()
	id := last
	alive, err := s.isAlive(ctx, last)
	if err != nil {
		return false, err
	}
	if !alive {
		if id, err = s.Grant(ctx, s.cfg.TTL); err != nil {
			return false, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keys, s.last = s.keep(id, s.cfg.TTL), id
	return !alive, nil
}

// Name returns the name claim for Config.Last of the next process.
func (s *Session) Name() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprintf("%x %x", int64(s.last), int64(s.alive.id))
}

// parseName parses the result of Name; unreadable parts give no lease.
func parseName(name string) (refs, alive clientv3.LeaseID) {
	first, second, _ := strings.Cut(name, " ")
	parse := func(text string) clientv3.LeaseID {
		id, err := strconv.ParseInt(text, 16, 64)
		if err != nil {
			return 0
		}
		return clientv3.LeaseID(id)
	}
	return parse(first), parse(second)
}

// isAlive reports whether a lease exists, and renews it.
func (s *Session) isAlive(ctx context.Context, id clientv3.LeaseID) (bool, error) {
	if id == 0 {
		return false, nil
	}
	resp, err := s.client.KeepAliveOnce(ctx, id)
	switch {
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		return false, nil
	case err != nil:
		return false, s.Fault(ctx, "keep lease alive", err)
	}
	return resp.TTL > 0, nil
}

// Grant creates a lease of at least the given time. It is not renewed.
func (s *Session) Grant(ctx context.Context, ttl time.Duration) (clientv3.LeaseID, error) {
	resp, err := s.client.Grant(ctx, int64((ttl+time.Second-1)/time.Second))
	if err != nil {
		return 0, s.Fault(ctx, "grant lease", err)
	}
	return resp.ID, nil
}

// keep renews a lease after each third of its time, on the one stream that the client has for all leases, until the
// lease is gone or the renewal is stopped. Called with mu held.
func (s *Session) keep(id clientv3.LeaseID, ttl time.Duration) lease {
	ctx, cancel := context.WithCancel(s.ctx)
	s.wg.Go(func() {
		defer cancel()
		for s.renew(ctx, id, ttl) {
		}
		if ctx.Err() == nil {
			s.expired(id)
		}
	})
	return lease{id: id, stop: cancel}
}

// renew keeps a lease alive until the client gives up, and reports whether to continue. The client also gives up if the
// first answer takes longer than its connection timeout, although the lease exists. Then renew asks etcd, and repeats
// the request until etcd answers or the time of the lease is over.
func (s *Session) renew(ctx context.Context, id clientv3.LeaseID, ttl time.Duration) bool {
	lived := time.Now()
	renewed, err := s.client.KeepAlive(ctx, id)
	if err != nil {
		return false // the client is closed
	}
	for range renewed {
		lived = time.Now()
	}
	for ctx.Err() == nil {
		alive, err := s.ask(ctx, id)
		if err == nil {
			return alive
		}
		// Until its time is over, the lease may still exist.
		if time.Since(lived) >= ttl {
			return false
		}
		select {
		case <-time.After(askAgain):
		case <-ctx.Done():
		}
	}
	return false
}

// askAgain is the pause between two requests that check whether a lease exists.
const askAgain = time.Second

// ask is isAlive with the timeout of a request.
func (s *Session) ask(ctx context.Context, id clientv3.LeaseID) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	return s.isAlive(ctx, id)
}

// expired removes an expired lease.
func (s *Session) expired(id clientv3.LeaseID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys.id == id {
		s.leave()
	}
	if s.alive.id == id {
		s.alive.stop()
		s.alive = lease{}
	}
}

// leave ends the session. Called with mu held.
func (s *Session) leave() {
	if s.keys.stop != nil {
		s.keys.stop()
	}
	s.keys = lease{}
}

// Ping detects changes that leases do not show: etcd has another history, or the name has another owner. It returns
// ErrSessionLost without a session.
func (s *Session) Ping(ctx context.Context) error {
	if _, err := s.Lease(); err != nil {
		return err
	}
	return s.claimName(ctx)
}

// maxRaces bounds how often one call starts again after a conflict with another call. With each conflict, the other
// call has succeeded.
const maxRaces = 16

// claimName claims the node's name for this process. It writes nothing if the process already owns it.
func (s *Session) claimName(ctx context.Context) error {
	for range maxRaces {
		have, err := s.readName(ctx)
		if err != nil {
			return err
		}
		s.mu.Lock()
		id, named := s.alive.id, s.named
		s.mu.Unlock()
		if have == nil {
			ok, err := s.takeName(ctx, Unchanged(s.aliveKey(), nil))
			if err != nil || ok {
				return err
			}
			continue
		}
		if string(have.Value) == s.aliveValue() && clientv3.LeaseID(have.Lease) == s.lastAlive(id) {
			if id != 0 {
				return nil
			}
			// The previous process wrote the key. If its lease ends now, the next ping claims the name again.
			s.mu.Lock()
			s.alive, s.named = s.keep(clientv3.LeaseID(have.Lease), s.cfg.AliveTTL), true
			s.mu.Unlock()
			return nil
		}
		incarnation, boot, _ := strings.Cut(string(have.Value), " ")
		if incarnation != s.cfg.Incarnation || named && boot != s.cfg.Boot {
			return &cluster.NameError{Node: s.cfg.Node, Incarnation: incarnation, Boot: boot, Wait: s.cfg.AliveTTL}
		}
		ok, err := s.takeName(ctx, Unchanged(s.aliveKey(), have))
		if err != nil || ok {
			return err
		}
	}
	return fmt.Errorf("%w: %s changed during each of %d attempts", cluster.ErrUnavailable, s.aliveKey(), maxRaces)
}

// lastAlive returns the expected lease of alive/<node>: this process's or the previous process's lease.
func (s *Session) lastAlive(id clientv3.LeaseID) clientv3.LeaseID {
	if id != 0 {
		return id
	}
	_, last := parseName(s.cfg.Last)
	return last
}

// takeName writes alive/<node> under a condition.
func (s *Session) takeName(ctx context.Context, condition clientv3.Cmp) (bool, error) {
	s.mu.Lock()
	id, history := s.alive.id, s.history
	s.mu.Unlock()
	if id == 0 {
		var err error
		if id, err = s.Grant(ctx, s.cfg.AliveTTL); err != nil {
			return false, err
		}
		s.mu.Lock()
		s.alive = s.keep(id, s.cfg.AliveTTL)
		s.mu.Unlock()
	}
	resp, err := s.Commit(ctx, "claim name", s.client.Txn(ctx).If(condition).
		Then(clientv3.OpPut(s.aliveKey(), s.aliveValue(), clientv3.WithLease(id))))
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		s.expired(id)
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if resp.Succeeded {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.named = true
		if history == s.history {
			s.received(&mvccpb.KeyValue{
				Key: []byte(s.aliveKey()), Value: []byte(s.aliveValue()), ModRevision: resp.Header.Revision,
			})
		}
	}
	return resp.Succeeded, nil
}

// Lease returns the lease of this node's keys; ErrSessionLost without a session.
func (s *Session) Lease() (clientv3.LeaseID, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys.id == 0 {
		return 0, cluster.ErrSessionLost
	}
	return s.keys.id, nil
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/services/identity/internal/allocator"
)

// A session is two leases: a long one, which the references of this node live
// on, and a short one for alive/<node>, the claim of the node's name.
//
// The value of alive/<node> is "<incarnation> <boot id>": the incarnation is of
// the state directory. A process takes the name over from one of the same
// incarnation at once, because that one has ended: no two processes use a state
// directory. A node with another state directory gets the name when the lease
// has run out. After its start a process takes it over only from its own boot,
// so that two copies of one machine's disk do not take it from each other again
// and again.

// lease is a lease that is kept alive.
type lease struct {
	id   clientv3.LeaseID
	stop context.CancelFunc
}

// aliveKey is the name of this node.
func (s *Store) aliveKey() string { return s.cfg.Prefix + "/alive/" + s.cfg.Node }

func (s *Store) aliveValue() string { return s.cfg.Incarnation + " " + s.cfg.Boot }

// Join implements allocator.Store.
func (s *Store) Join(ctx context.Context) (fresh bool, err error) {
	if id, err := s.session(); err == nil {
		alive, err := s.isAlive(ctx, id)
		if err != nil {
			return false, err
		}
		if alive {
			return false, s.Ping(ctx)
		}
		s.expired(id)
	}
	if err := s.readLayout(ctx); err != nil {
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
		if id, err = s.grant(ctx, s.cfg.TTL); err != nil {
			return false, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refs, s.last = s.keep(id), id
	return !alive, nil
}

// Session implements allocator.Store: the leases in the form that Config.Session takes.
func (s *Store) Session() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprintf("%x %x", int64(s.last), int64(s.alive.id))
}

// parseSession reads what Session wrote; what it cannot read is no lease.
func parseSession(session string) (refs, alive clientv3.LeaseID) {
	first, second, _ := strings.Cut(session, " ")
	parse := func(text string) clientv3.LeaseID {
		id, err := strconv.ParseInt(text, 16, 64)
		if err != nil {
			return 0
		}
		return clientv3.LeaseID(id)
	}
	return parse(first), parse(second)
}

// isAlive says whether a lease exists, and renews it.
func (s *Store) isAlive(ctx context.Context, id clientv3.LeaseID) (bool, error) {
	if id == 0 {
		return false, nil
	}
	resp, err := s.client.KeepAliveOnce(ctx, id)
	switch {
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		return false, nil
	case err != nil:
		return false, s.fault(ctx, "keep lease alive", err)
	}
	return resp.TTL > 0, nil
}

func (s *Store) grant(ctx context.Context, ttl time.Duration) (clientv3.LeaseID, error) {
	resp, err := s.client.Grant(ctx, int64((ttl+time.Second-1)/time.Second))
	if err != nil {
		return 0, s.fault(ctx, "grant lease", err)
	}
	return resp.ID, nil
}

// keep renews a lease whenever a third of its time is over, on the one stream
// that the client has for all leases, until it is stopped or the lease is gone.
// It runs with mu held.
func (s *Store) keep(id clientv3.LeaseID) lease {
	ctx, cancel := context.WithCancel(s.ctx)
	s.wg.Go(func() {
		defer cancel()
		renewed, err := s.client.KeepAlive(ctx, id)
		if err != nil {
			return // the client is closed
		}
		for range renewed { //nolint:revive // only the end says something
		}
		if ctx.Err() == nil {
			s.expired(id)
		}
	})
	return lease{id: id, stop: cancel}
}

// expired forgets a lease that is gone.
func (s *Store) expired(id clientv3.LeaseID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refs.id == id {
		s.leave()
	}
	if s.alive.id == id {
		s.alive.stop()
		s.alive = lease{}
	}
}

// leave ends the session. It runs with mu held.
func (s *Store) leave() {
	if s.refs.stop != nil {
		s.refs.stop()
	}
	s.refs = lease{}
}

// Ping implements allocator.Store. It finds out what no lease tells: that etcd
// has another history, or the name another owner.
func (s *Store) Ping(ctx context.Context) error {
	if _, err := s.session(); err != nil {
		return err
	}
	return s.claimName(ctx)
}

// claimName makes the name of this node that of this process. It writes nothing
// if it is so already.
func (s *Store) claimName(ctx context.Context) error {
	for range maxRaces {
		resp, err := s.get(ctx, "read name", s.aliveKey())
		if err != nil {
			return err
		}
		s.mu.Lock()
		id, named := s.alive.id, s.named
		s.mu.Unlock()
		if len(resp.Kvs) == 0 {
			ok, err := s.takeName(ctx, unchanged(s.aliveKey(), nil))
			if err != nil || ok {
				return err
			}
			continue
		}
		have := resp.Kvs[0]
		if string(have.Value) == s.aliveValue() && clientv3.LeaseID(have.Lease) == s.lastAlive(id) {
			if id != 0 {
				return nil
			}
			// Of the process before this one. If the lease ends just now, the
			// next ping claims the name anew.
			s.mu.Lock()
			s.alive, s.named = s.keep(clientv3.LeaseID(have.Lease)), true
			s.mu.Unlock()
			return nil
		}
		incarnation, boot, _ := strings.Cut(string(have.Value), " ")
		if incarnation != s.cfg.Incarnation || named && boot != s.cfg.Boot {
			return &allocator.NameError{Node: s.cfg.Node, Incarnation: incarnation, Boot: boot, Wait: s.cfg.AliveTTL}
		}
		ok, err := s.takeName(ctx, unchanged(s.aliveKey(), have))
		if err != nil || ok {
			return err
		}
	}
	return fmt.Errorf("%w: %s changes all the time", allocator.ErrUnavailable, s.aliveKey())
}

// lastAlive is the lease that alive/<node> should have: ours, or that of the
// process before.
func (s *Store) lastAlive(id clientv3.LeaseID) clientv3.LeaseID {
	if id != 0 {
		return id
	}
	_, last := parseSession(s.cfg.Session)
	return last
}

// takeName writes alive/<node> under a condition.
func (s *Store) takeName(ctx context.Context, condition clientv3.Cmp) (bool, error) {
	s.mu.Lock()
	id := s.alive.id
	s.mu.Unlock()
	if id == 0 {
		var err error
		if id, err = s.grant(ctx, s.cfg.AliveTTL); err != nil {
			return false, err
		}
		s.mu.Lock()
		s.alive = s.keep(id)
		s.mu.Unlock()
	}
	resp, err := s.commit(ctx, "claim name", s.client.Txn(ctx).If(condition).
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
		s.named = true
		s.mu.Unlock()
	}
	return resp.Succeeded, nil
}

// session returns the lease of the references.
func (s *Store) session() (clientv3.LeaseID, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refs.id == 0 {
		return 0, allocator.ErrSessionLost
	}
	return s.refs.id, nil
}

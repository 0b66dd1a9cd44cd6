// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package etcd keeps the identities of a cluster in etcd, as the allocator's Store.
//
// It owns the keys below one prefix, and the lease of this node:
//
//	id/<number>          the label set of the number, as canonical text
//	labels/<sha256>      "<number> <canonical text>" of the set with that hash
//	ref/<node>/<number>  that node refers to the number; dies with the node's lease
//	rest/<number>        the hash of the set that had the number until it was collected; expires
//	collector            the node that collects; dies with its lease
//
// id and labels are written and deleted together, in one transaction. There
// are no locks. What makes collection safe is that every transaction that
// writes a reference also writes labels/<sha256> again: a collector deletes
// only when the revision of that key is the one it saw when it saw no
// reference. Nobody watches labels/, so this costs no node anything.
package etcd

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/identity"
)

// Config of a Store.
type Config struct {
	Client  Client
	Prefix  string        // of all keys, "/sluice/v1/identity" for example
	Node    string        // name of this node in the cluster; without '/'
	TTL     time.Duration // how long references outlive the last sign of life; whole seconds
	Timeout time.Duration // of what the store asks by itself
	Listen  time.Duration // between two questions of Follow up to when it has heard everything
	Log     *slog.Logger
}

// Store is the allocator's Store in etcd.
type Store struct {
	cfg    Config
	client *clientv3.Client

	mu       sync.Mutex
	lease    clientv3.LeaseID // guarded by mu; 0 without a session
	revision int64            // guarded by mu; the newest that etcd told
	history  chan struct{}    // guarded by mu; closed when etcd turns out to have lost its history
}

// New returns a Store that connects when it is first used. The caller closes it.
func New(cfg Config) (*Store, error) {
	if cfg.Node == "" || strings.ContainsAny(cfg.Node, "/\x00") {
		return nil, fmt.Errorf("node name %q: want a name without '/'", cfg.Node)
	}
	if !strings.HasPrefix(cfg.Prefix, "/") || strings.HasSuffix(cfg.Prefix, "/") {
		return nil, fmt.Errorf("key prefix %q: want a path that begins with '/' and does not end in one", cfg.Prefix)
	}
	if cfg.Listen <= 0 || cfg.Timeout <= 0 {
		return nil, fmt.Errorf("listen interval %s, timeout %s: want more than 0", cfg.Listen, cfg.Timeout)
	}
	if cfg.TTL < time.Second {
		return nil, fmt.Errorf("lease of %s: want at least 1s", cfg.TTL)
	}
	client, err := cfg.Client.dial()
	if err != nil {
		return nil, err
	}
	return &Store{cfg: cfg, client: client, history: make(chan struct{})}, nil
}

// Close cuts the connection. The lease and the references stay: they are for
// the process that comes next.
func (s *Store) Close() error {
	err := s.client.Close()
	if errors.Is(err, context.Canceled) { // what the client returns for its own end
		return nil
	}
	return err
}

// Endpoints names the store for messages.
func (s *Store) Endpoints() []string { return s.cfg.Client.Endpoints }

func (s *Store) idKey(n identity.Numeric) string {
	return s.cfg.Prefix + "/id/" + strconv.FormatUint(uint64(n), 10)
}

func (s *Store) restKey(n identity.Numeric) string {
	return s.cfg.Prefix + "/rest/" + strconv.FormatUint(uint64(n), 10)
}

func (s *Store) labelsKey(l identity.Labels) string {
	return s.cfg.Prefix + "/labels/" + hashText(l)
}

func (s *Store) refPrefix() string { return s.cfg.Prefix + "/ref/" + s.cfg.Node + "/" }

func (s *Store) refKey(n identity.Numeric) string {
	return s.refPrefix() + strconv.FormatUint(uint64(n), 10)
}

func hashText(l identity.Labels) string {
	sum := l.Hash()
	return hex.EncodeToString(sum[:])
}

func labelsValue(n identity.Numeric, l identity.Labels) string {
	return strconv.FormatUint(uint64(n), 10) + " " + l.Text()
}

func parseNumber(s string) (identity.Numeric, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || identity.Numeric(n).Scope() != identity.ScopeCluster || strconv.FormatUint(n, 10) != s {
		return 0, fmt.Errorf("%w: %q is not the number of a cluster identity", allocator.ErrCorrupt, s)
	}
	return identity.Numeric(n), nil
}

// parseLabelsValue reads a value of labels/ and says whose number it is.
func parseLabelsValue(kv *mvccpb.KeyValue) (n identity.Numeric, text string, err error) {
	number, text, ok := strings.Cut(string(kv.Value), " ")
	if !ok {
		return 0, "", fmt.Errorf("%w: value of %s", allocator.ErrCorrupt, kv.Key)
	}
	if n, err = parseNumber(number); err != nil {
		return 0, "", fmt.Errorf("%s: %w", kv.Key, err)
	}
	return n, text, nil
}

// parseID reads a key below id/.
func (s *Store) parseID(kv *mvccpb.KeyValue) (identity.Identity, error) {
	n, err := parseNumber(strings.TrimPrefix(string(kv.Key), s.cfg.Prefix+"/id/"))
	if err != nil {
		return identity.Identity{}, fmt.Errorf("%s: %w", kv.Key, err)
	}
	labels, err := identity.ParseLabels(string(kv.Value))
	if err != nil {
		return identity.Identity{}, fmt.Errorf("%s: %w: %w", kv.Key, allocator.ErrCorrupt, err)
	}
	if labels.Has(identity.SourceReserved) {
		// Nobody becomes the host or the world by a key in etcd.
		return identity.Identity{}, fmt.Errorf("%s: %w: reserved labels %s", kv.Key, allocator.ErrCorrupt, labels)
	}
	return identity.Identity{Number: n, Labels: labels}, nil
}

// saw notes the revision of an answer, and what it tells about etcd's history.
func (s *Store) saw(h *etcdserverpb.ResponseHeader) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.GetRevision() > s.revision {
		s.revision = h.GetRevision()
	}
}

// Join implements allocator.Store.
func (s *Store) Join(ctx context.Context) (fresh bool, err error) {
	if err := s.Ping(ctx); err == nil || !errors.Is(err, allocator.ErrSessionLost) {
		return false, err
	}
	resp, err := s.client.Grant(ctx, int64((s.cfg.TTL+time.Second-1)/time.Second))
	if err != nil {
		return false, s.fault(ctx, "grant lease", err)
	}
	// Going backwards means another data directory, and watches that wait for
	// revisions which will be something else when they come.
	get, err := s.client.Get(ctx, s.cfg.Prefix+"/collector", clientv3.WithKeysOnly())
	if err != nil {
		return false, s.fault(ctx, "read revision", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lease = resp.ID
	if get.Header.Revision < s.revision {
		s.revision = get.Header.Revision
		close(s.history)
		s.history = make(chan struct{})
	}
	return true, nil
}

// Ping implements allocator.Store.
func (s *Store) Ping(ctx context.Context) error {
	lease, err := s.session()
	if err != nil {
		return err
	}
	resp, err := s.client.KeepAliveOnce(ctx, lease)
	if err != nil {
		return s.fault(ctx, "keep lease alive", err)
	}
	if resp.TTL <= 0 {
		s.drop(lease)
		return allocator.ErrSessionLost
	}
	return nil
}

func (s *Store) session() (clientv3.LeaseID, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease == 0 {
		return 0, allocator.ErrSessionLost
	}
	return s.lease, nil
}

// drop forgets a lease that is gone.
func (s *Store) drop(lease clientv3.LeaseID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease == lease {
		s.lease = 0
	}
}

// fault gives an error of the client its meaning.
func (s *Store) fault(ctx context.Context, what string, err error) error {
	switch {
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		s.mu.Lock()
		s.lease = 0
		s.mu.Unlock()
		return fmt.Errorf("%s: %w", what, allocator.ErrSessionLost)
	case errors.Is(ctx.Err(), context.Canceled):
		return fmt.Errorf("%s: %w", what, ctx.Err())
	case errors.Is(err, rpctypes.ErrRequestTooLarge), errors.Is(err, rpctypes.ErrTooManyOps), status.Code(err) == codes.InvalidArgument:
		return fmt.Errorf("%s: %w", what, err)
	}
	return fmt.Errorf("%s: %w: %w", what, allocator.ErrUnavailable, err)
}

// put are the writes that make an identity referred to by this node.
func (s *Store) put(n identity.Numeric, l identity.Labels, lease clientv3.LeaseID, create bool) []clientv3.Op {
	ops := []clientv3.Op{
		clientv3.OpPut(s.labelsKey(l), labelsValue(n, l)),
		clientv3.OpPut(s.refKey(n), "", clientv3.WithLease(lease)),
	}
	if create {
		ops = append(ops, clientv3.OpPut(s.idKey(n), l.Text()))
	}
	return ops
}

// refer refers to an identity that exists just so; ok is false if it does not.
func (s *Store) refer(ctx context.Context, n identity.Numeric, l identity.Labels, lease clientv3.LeaseID) (_ allocator.Claim, ok bool, err error) {
	resp, err := s.client.Txn(ctx).If(
		clientv3.Compare(clientv3.Value(s.labelsKey(l)), "=", labelsValue(n, l)),
		clientv3.Compare(clientv3.Value(s.idKey(n)), "=", l.Text()),
	).Then(s.put(n, l, lease, false)...).Commit()
	if err != nil {
		return allocator.Claim{}, false, s.fault(ctx, "refer to identity", err)
	}
	s.saw(resp.Header)
	return allocator.Claim{Number: n, Revision: resp.Header.Revision}, resp.Succeeded, nil
}

// maxRaces bounds how often one call starts over because somebody changed what
// it had just read. Each time somebody else got on.
const maxRaces = 16

// state is what etcd has about a label set and a number.
type state struct {
	labels, id, rest *mvccpb.KeyValue // nil: no such key
}

func stateOf(resp []*etcdserverpb.ResponseOp) state {
	first := func(i int) *mvccpb.KeyValue {
		if kvs := resp[i].GetResponseRange().GetKvs(); len(kvs) > 0 {
			return kvs[0]
		}
		return nil
	}
	return state{labels: first(0), id: first(1), rest: first(2)}
}

func (s *Store) gets(n identity.Numeric, l identity.Labels) []clientv3.Op {
	return []clientv3.Op{
		clientv3.OpGet(s.labelsKey(l)),
		clientv3.OpGet(s.idKey(n)),
		clientv3.OpGet(s.restKey(n)),
	}
}

// numberOf reads which number the label set has by labels/. Two sets with one
// hash would be damage or the end of SHA-256; either way nobody gets the
// other's number.
func numberOf(kv *mvccpb.KeyValue, l identity.Labels) (identity.Numeric, error) {
	n, text, err := parseLabelsValue(kv)
	if err != nil {
		return 0, err
	}
	if text != l.Text() {
		return 0, fmt.Errorf("%w: %s belongs to the label set %s, whose hash should not be that of %s", allocator.ErrCorrupt, kv.Key, text, l)
	}
	return n, nil
}

// Claim implements allocator.Store.
func (s *Store) Claim(ctx context.Context, l identity.Labels, known, candidate identity.Numeric) (allocator.Claim, error) {
	lease, err := s.session()
	if err != nil {
		return allocator.Claim{}, err
	}
	if known != 0 {
		if c, ok, err := s.refer(ctx, known, l, lease); err != nil || ok {
			return c, err
		}
	}
	for range maxRaces {
		// One round trip creates it, or tells why not. Without a candidate it
		// only tells: number 0 is never created.
		txn := s.client.Txn(ctx)
		if candidate != 0 {
			txn = txn.If(
				clientv3.Compare(clientv3.CreateRevision(s.labelsKey(l)), "=", 0),
				clientv3.Compare(clientv3.CreateRevision(s.idKey(candidate)), "=", 0),
				clientv3.Compare(clientv3.CreateRevision(s.restKey(candidate)), "=", 0),
			).Then(s.put(candidate, l, lease, true)...).Else(s.gets(candidate, l)...)
		} else {
			txn = txn.Then(s.gets(candidate, l)...)
		}
		resp, err := txn.Commit()
		if err != nil {
			return allocator.Claim{}, s.fault(ctx, "allocate identity", err)
		}
		s.saw(resp.Header)
		if resp.Succeeded && candidate != 0 {
			return allocator.Claim{Number: candidate, Revision: resp.Header.Revision, Created: true}, nil
		}
		switch have := stateOf(resp.Responses); {
		case have.labels != nil:
			n, err := numberOf(have.labels, l)
			if err != nil {
				return allocator.Claim{}, err
			}
			if c, ok, err := s.refer(ctx, n, l, lease); err != nil || ok {
				return c, err
			}
		case candidate == 0, have.id != nil:
			return allocator.Claim{}, allocator.ErrOccupied
		case have.rest != nil && string(have.rest.Value) != hashText(l):
			return allocator.Claim{}, allocator.ErrOccupied
		default:
			// It rests after this very set, which may have it back.
			if c, ok, err := s.create(ctx, candidate, l, lease, have); err != nil || ok {
				return c, err
			}
		}
	}
	return allocator.Claim{}, fmt.Errorf("%w: %s and %s do not agree, or change all the time", allocator.ErrCorrupt, s.labelsKey(l), s.idKey(candidate))
}

// create writes an identity if nothing about it has changed since it was read.
func (s *Store) create(ctx context.Context, n identity.Numeric, l identity.Labels, lease clientv3.LeaseID, have state) (_ allocator.Claim, ok bool, err error) {
	unchanged := func(key string, kv *mvccpb.KeyValue) clientv3.Cmp {
		var revision int64 // that of a key that does not exist
		if kv != nil {
			revision = kv.ModRevision
		}
		return clientv3.Compare(clientv3.ModRevision(key), "=", revision)
	}
	resp, err := s.client.Txn(ctx).If(
		unchanged(s.labelsKey(l), have.labels),
		unchanged(s.idKey(n), have.id),
		unchanged(s.restKey(n), have.rest),
	).Then(append(s.put(n, l, lease, true), clientv3.OpDelete(s.restKey(n)))...).Commit()
	if err != nil {
		return allocator.Claim{}, false, s.fault(ctx, "create identity", err)
	}
	s.saw(resp.Header)
	return allocator.Claim{Number: n, Revision: resp.Header.Revision, Created: have.id == nil}, resp.Succeeded, nil
}

// Restore implements allocator.Store.
func (s *Store) Restore(ctx context.Context, id identity.Identity) (allocator.Claim, error) {
	lease, err := s.session()
	if err != nil {
		return allocator.Claim{}, err
	}
	for range maxRaces {
		if c, ok, err := s.refer(ctx, id.Number, id.Labels, lease); err != nil || ok {
			return c, err
		}
		resp, err := s.client.Txn(ctx).Then(s.gets(id.Number, id.Labels)...).Commit()
		if err != nil {
			return allocator.Claim{}, s.fault(ctx, "restore identity", err)
		}
		s.saw(resp.Header)
		have := stateOf(resp.Responses)
		conflict := &allocator.ConflictError{Held: id}
		if have.labels != nil {
			n, err := numberOf(have.labels, id.Labels)
			if err != nil {
				return allocator.Claim{}, err
			}
			if n != id.Number {
				conflict.Moved = n
			}
		}
		if have.id != nil && string(have.id.Value) != id.Labels.Text() {
			if conflict.Occupant, err = s.parseID(have.id); err != nil {
				return allocator.Claim{}, err
			}
		}
		rests := have.rest != nil && string(have.rest.Value) != hashText(id.Labels)
		if conflict.Moved != 0 || !conflict.Occupant.Labels.IsZero() || rests {
			return allocator.Claim{}, conflict
		}
		// Gone, wholly or in part: nobody else has the number, so it is as it was.
		if c, ok, err := s.create(ctx, id.Number, id.Labels, lease, have); err != nil || ok {
			return c, err
		}
	}
	return allocator.Claim{}, fmt.Errorf("%w: %s changes all the time", allocator.ErrUnavailable, s.idKey(id.Number))
}

// Release implements allocator.Store.
func (s *Store) Release(ctx context.Context, ref allocator.Reference) error {
	key := s.refKey(ref.Number)
	resp, err := s.client.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(key), "=", ref.Revision)).
		Then(clientv3.OpDelete(key)).Commit()
	if err != nil {
		return s.fault(ctx, "release identity", err)
	}
	s.saw(resp.Header)
	return nil
}

// References implements allocator.Store.
func (s *Store) References(ctx context.Context) ([]allocator.Reference, error) {
	var refs []allocator.Reference
	_, err := s.list(ctx, s.refPrefix(), 0, true, func(kv *mvccpb.KeyValue) {
		n, err := parseNumber(strings.TrimPrefix(string(kv.Key), s.refPrefix()))
		if err != nil {
			s.cfg.Log.Error("foreign key among the references of this node", "key", string(kv.Key))
			return
		}
		refs = append(refs, allocator.Reference{Number: n, Revision: kv.ModRevision})
	})
	return refs, err
}

// pageSize bounds one answer of etcd to a listing.
const pageSize = 1000

// list hands every key below a prefix to f, all as of one revision: the given
// one, or the present one if that is 0. It returns the revision.
func (s *Store) list(ctx context.Context, prefix string, revision int64, keysOnly bool, f func(*mvccpb.KeyValue)) (int64, error) {
	from, end := prefix, clientv3.GetPrefixRangeEnd(prefix)
	for {
		opts := []clientv3.OpOption{clientv3.WithRange(end), clientv3.WithLimit(pageSize), clientv3.WithRev(revision)}
		if keysOnly {
			opts = append(opts, clientv3.WithKeysOnly())
		}
		resp, err := s.client.Get(ctx, from, opts...)
		if err != nil {
			return 0, s.fault(ctx, "list "+prefix, err)
		}
		s.saw(resp.Header)
		if revision == 0 {
			revision = resp.Header.Revision
		}
		for _, kv := range resp.Kvs {
			f(kv)
		}
		if !resp.More || len(resp.Kvs) == 0 {
			return revision, nil
		}
		from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
}

// dialOptions make a lost connection come back within seconds: gRPC's own
// pauses grow to two minutes.
func dialOptions() []grpc.DialOption {
	return []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
		Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
		MinConnectTimeout: 2 * time.Second,
	})}
}

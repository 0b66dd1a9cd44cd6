// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package etcd keeps the identities of a cluster in etcd, as the allocator's Store.
//
// It owns the keys below one prefix, and the lease of this node:
//
//	layout               version of this layout, 2
//	id/<number>          the label set of the number, as canonical text
//	labels/<sha256>      the number of the set with that hash
//	fence/<number>       written again with every reference to the number
//	ref/<node>/<number>  that node refers to the number; dies with the node's lease
//	rest/<number>        the hash of the set that had the number until it was collected; expires
//	alive/<node>         "<incarnation> <boot id>" of who has the node's name; dies a minute after it
//	collector            the node that collects; dies with its lease
//
// id and labels are written and deleted together, in one transaction. There
// are no locks. What makes collection safe is that every transaction that
// writes a reference also writes fence/<number>: a collector deletes only when
// the revision of that key is the one it saw when it saw no reference. Only
// id/ is watched by every node, so this costs the other nodes nothing.
//
// In layout 1 labels/<sha256> is "<number> <canonical text>", and the fence
// itself. As long as nodes of that version may run, identities are made in
// that form, and a reference to one writes both fences; see layout.go.
package etcd

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
)

// Config of a Store.
type Config struct {
	Client  session.Client
	Prefix  string        // of all keys, "/sluice/v1/identity" for example
	Node    string        // name of this node in the cluster; without '/'
	TTL     time.Duration // how long references outlive the last sign of life; whole seconds
	Timeout time.Duration // of what the store asks by itself
	Listen  time.Duration // between two questions of Follow up to when it has heard everything
	// AliveTTL is how long the name outlives the last sign of life; whole seconds.
	AliveTTL    time.Duration
	Incarnation string // of the state directory: another node with this name has another
	Boot        string // of the machine
	Session     string // of the process before, as Store.Session said; empty if there was none
	Log         *slog.Logger
}

// Store is the allocator's Store in etcd.
type Store struct {
	cfg    Config
	client *clientv3.Client
	ctx    context.Context // of what keeps leases alive; ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // of the same

	mu      sync.Mutex
	refs    lease            // guarded by mu; of the references; zero without a session
	last    clientv3.LeaseID // guarded by mu; that of the last session, perhaps of the process before; 0: none
	alive   lease            // guarded by mu; of the node's name; zero while it is not claimed
	named   bool             // guarded by mu; this process had the name
	pos     position         // guarded by mu
	layout  int              // guarded by mu; that identities are made in; 0: not read yet
	history chan struct{}    // guarded by mu; closed when etcd turns out to have lost its history
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
	if cfg.TTL < time.Second || cfg.AliveTTL < time.Second {
		return nil, fmt.Errorf("lease of %s, lease of the name %s: want at least 1s", cfg.TTL, cfg.AliveTTL)
	}
	if cfg.Incarnation == "" || strings.ContainsAny(cfg.Incarnation+cfg.Boot, " /") {
		return nil, fmt.Errorf("incarnation %q, boot %q: want words", cfg.Incarnation, cfg.Boot)
	}
	client, err := cfg.Client.Dial()
	if err != nil {
		return nil, err
	}
	s := &Store{cfg: cfg, client: client, history: make(chan struct{})}
	s.last, _ = parseSession(cfg.Session)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s, nil
}

// Close cuts the connection. The lease and the references stay: they are for
// the process that comes next.
func (s *Store) Close() error {
	s.cancel()
	s.wg.Wait()
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

func (s *Store) fenceKey(n identity.Numeric) string {
	return s.cfg.Prefix + "/fence/" + strconv.FormatUint(uint64(n), 10)
}

func (s *Store) collectorKey() string { return s.cfg.Prefix + "/collector" }

func (s *Store) restKey(n identity.Numeric) string {
	return s.cfg.Prefix + "/rest/" + strconv.FormatUint(uint64(n), 10)
}

func (s *Store) labelsKey(l label.Canonical) string {
	return s.cfg.Prefix + "/labels/" + hashText(l)
}

func (s *Store) refPrefix() string { return s.cfg.Prefix + "/ref/" + s.cfg.Node + "/" }

func (s *Store) refKey(n identity.Numeric) string {
	return s.refPrefix() + strconv.FormatUint(uint64(n), 10)
}

func hashText(l label.Canonical) string {
	sum := l.Hash()
	return hex.EncodeToString(sum[:])
}

func parseNumber(s string) (identity.Numeric, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || identity.Numeric(n).Scope() != identity.ScopeCluster || strconv.FormatUint(n, 10) != s {
		return 0, fmt.Errorf("%w: %q is not the number of a cluster identity", allocator.ErrCorrupt, s)
	}
	return identity.Numeric(n), nil
}

// parseID reads a key below id/.
func (s *Store) parseID(kv *mvccpb.KeyValue) (identity.Identity, error) {
	n, err := parseNumber(strings.TrimPrefix(string(kv.Key), s.cfg.Prefix+"/id/"))
	if err != nil {
		return identity.Identity{}, fmt.Errorf("%s: %w", kv.Key, err)
	}
	labels, err := label.Parse(string(kv.Value))
	if err != nil {
		return identity.Identity{}, fmt.Errorf("%s: %w: %w", kv.Key, allocator.ErrCorrupt, err)
	}
	if labels.Set().HasSource(label.SourceReserved) {
		// Nobody becomes the host or the world by a key in etcd.
		return identity.Identity{}, fmt.Errorf("%s: %w: reserved labels %s", kv.Key, allocator.ErrCorrupt, labels)
	}
	return identity.Identity{Number: n, Labels: labels}, nil
}

// position is how far etcd has come, as this process knows.
type position struct {
	history  uint64 // counts how often etcd was found to have another past
	cluster  uint64
	revision int64
}

func (s *Store) position() position {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pos
}

// errHistory: etcd has another past than what this process saw of it, because
// its data was put back to an older state or is another cluster's. With it went
// whatever this process knows: it is an ErrSessionLost.
var errHistory = fmt.Errorf("etcd has another history than before: %w", allocator.ErrSessionLost)

// saw compares the answer to a linearised request with where etcd was when the
// request was made. Leases say nothing: they are part of a backup too. A watch
// would wait in silence for revisions that etcd has not reached yet, and which
// will be something else when they come.
func (s *Store) saw(before position, h *etcdserverpb.ResponseHeader) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if before.history != s.pos.history {
		return errHistory // an answer about the past, or to a session of the past
	}
	if before.cluster != 0 && (before.cluster != h.GetClusterId() || h.GetRevision() < before.revision) {
		s.cfg.Log.Error("etcd went back to an older state, or is another cluster; everything is read again and held identities are claimed again",
			"cluster", fmt.Sprintf("%x", h.GetClusterId()), "revision", h.GetRevision(),
			"was_cluster", fmt.Sprintf("%x", before.cluster), "was_revision", before.revision)
		s.pos = position{history: s.pos.history + 1, cluster: h.GetClusterId(), revision: h.GetRevision()}
		s.leave()
		s.last = 0 // a lease of that past may have the references of that past
		close(s.history)
		s.history = make(chan struct{})
		return errHistory
	}
	s.pos.cluster = h.GetClusterId()
	s.pos.revision = max(s.pos.revision, h.GetRevision())
	return nil
}

// get is a linearised read.
func (s *Store) get(ctx context.Context, what, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	before := s.position()
	resp, err := s.client.Get(ctx, key, opts...)
	if err != nil {
		return nil, s.fault(ctx, what, err)
	}
	if err := s.saw(before, resp.Header); err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return resp, nil
}

// commit runs a transaction.
func (s *Store) commit(ctx context.Context, what string, txn clientv3.Txn) (*clientv3.TxnResponse, error) {
	before := s.position()
	resp, err := txn.Commit()
	if err != nil {
		return nil, s.fault(ctx, what, err)
	}
	if err := s.saw(before, resp.Header); err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return resp, nil
}

// fault gives an error of the client its meaning.
func (s *Store) fault(ctx context.Context, what string, err error) error {
	switch {
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		s.mu.Lock()
		s.leave()
		s.mu.Unlock()
		return fmt.Errorf("%s: %w: %w", what, allocator.ErrSessionLost, err)
	case errors.Is(err, rpctypes.ErrNoSpace):
		return fmt.Errorf("%s: %w: %w", what, allocator.ErrNoSpace, err)
	case errors.Is(ctx.Err(), context.Canceled):
		return fmt.Errorf("%s: %w", what, ctx.Err())
	case errors.Is(err, rpctypes.ErrRequestTooLarge), errors.Is(err, rpctypes.ErrTooManyOps), status.Code(err) == codes.InvalidArgument:
		return fmt.Errorf("%s: %w", what, err)
	}
	return fmt.Errorf("%s: %w: %w", what, allocator.ErrUnavailable, err)
}

// Release implements allocator.Store.
func (s *Store) Release(ctx context.Context, refs ...allocator.Reference) error {
	for some := range slices.Chunk(refs, maxOps/2) {
		var ops []clientv3.Op
		for _, ref := range some {
			key := s.refKey(ref.Number)
			ops = append(ops, clientv3.OpTxn(
				[]clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(key), "=", ref.Revision)},
				[]clientv3.Op{clientv3.OpDelete(key)}, nil))
		}
		if _, err := s.commit(ctx, "release identities", s.client.Txn(ctx).Then(ops...)); err != nil {
			return err
		}
	}
	return nil
}

// References implements allocator.Store.
func (s *Store) References(ctx context.Context) ([]allocator.Reference, error) {
	lease, err := s.session()
	if err != nil {
		return nil, err
	}
	var refs []allocator.Reference
	_, err = s.list(ctx, s.refPrefix(), true, func(kv *mvccpb.KeyValue) {
		n, err := parseNumber(strings.TrimPrefix(string(kv.Key), s.refPrefix()))
		if err != nil {
			s.cfg.Log.Error("foreign key among the references of this node", "key", string(kv.Key))
			return
		}
		refs = append(refs, allocator.Reference{Number: n, Revision: kv.ModRevision, Present: kv.Lease != 0 && clientv3.LeaseID(kv.Lease) == lease})
	})
	return refs, err
}

// Keys in one answer of etcd to a listing. With each page etcd counts all that
// is left, so that small pages cost the square of what is listed. Keys alone
// are short enough for large ones.
const (
	pageSize = 1000
	keysSize = 10_000
)

// list hands every key below a prefix to f, all as of one revision, which it
// returns. Each page has a deadline of its own, the configured timeout.
func (s *Store) list(ctx context.Context, prefix string, keysOnly bool, f func(*mvccpb.KeyValue)) (revision int64, err error) {
	from, end := prefix, clientv3.GetPrefixRangeEnd(prefix)
	for {
		opts := []clientv3.OpOption{clientv3.WithRange(end), clientv3.WithLimit(pageSize), clientv3.WithRev(revision)}
		if keysOnly {
			opts = append(opts, clientv3.WithKeysOnly(), clientv3.WithLimit(keysSize))
		}
		page, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
		resp, err := s.get(page, "list "+prefix, from, opts...)
		cancel()
		if err != nil {
			return 0, err
		}
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

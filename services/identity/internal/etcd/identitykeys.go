// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
)

// identityKeys returns the keys of identities. A method without a number or a label set returns the prefix of all keys
// of its kind.
type identityKeys struct {
	prefix string
	node   string // this node
}

func (k identityKeys) all() string                          { return k.prefix + "/id/" }
func (k identityKeys) id(n identity.Numeric) string         { return k.all() + decimal(n) }
func (k identityKeys) allLabels() string                    { return k.prefix + "/labels/" }
func (k identityKeys) labels(l label.Canonical) string      { return k.allLabels() + hashText(l) }
func (k identityKeys) fences() string                       { return k.prefix + "/fence/" }
func (k identityKeys) fence(n identity.Numeric) string      { return k.fences() + decimal(n) }
func (k identityKeys) quarantines() string                  { return k.prefix + "/rest/" }
func (k identityKeys) quarantine(n identity.Numeric) string { return k.quarantines() + decimal(n) }

// allReferences returns the prefix of the references of all nodes.
func (k identityKeys) allReferences() string { return k.prefix + "/ref/" }

// references returns the prefix of the references of this node.
func (k identityKeys) references() string { return k.allReferences() + k.node + "/" }

func (k identityKeys) reference(n identity.Numeric) string { return k.references() + decimal(n) }

// restoredKey returns the key that exists while nodes claim what they hold in a restored sluice-store. Only the store
// writes it.
func restoredKey(prefix string) string { return prefix + "/restored" }

// allocateKey returns a key that only the store writes. While it is missing, a store in Kubernetes allocates no new
// numbers and ranges.
func allocateKey(prefix string) string { return prefix + "/allocate" }

// waiting returns the conditions under which new numbers and ranges may be allocated, and the reads from which refused
// finds out which condition does not hold.
func waiting(cfg session.Config) (when []clientv3.Cmp, reads []clientv3.Op) {
	restored, allocate := restoredKey(cfg.Prefix), allocateKey(cfg.Prefix)
	when = []clientv3.Cmp{session.Unchanged(restored, nil)}
	if s := cfg.Client.Store; s != nil && s.InKubernetes() {
		when = append(when, clientv3.Compare(clientv3.CreateRevision(allocate), ">", 0))
	}
	return when, []clientv3.Op{clientv3.OpGet(restored), clientv3.OpGet(allocate)}
}

// refused returns why no new numbers and ranges are allocated, from the responses to the reads of waiting; nil if they
// are.
func refused(cfg session.Config, reads []*etcdserverpb.ResponseOp) error {
	s := cfg.Client.Store
	switch {
	case len(reads[0].GetResponseRange().GetKvs()) > 0:
		return allocator.ErrRestored
	case s != nil && s.InKubernetes() && len(reads[1].GetResponseRange().GetKvs()) == 0:
		return allocator.ErrUnleased
	}
	return nil
}

// epochKey returns the key with the epoch of sluice-store, which decides the zone of new numbers. Only the store writes
// it; another etcd does not have it.
func epochKey(prefix string) string { return prefix + "/epoch" }

func decimal(n identity.Numeric) string { return strconv.FormatUint(uint64(n), 10) }

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

// read decodes a key below id/.
func (k identityKeys) read(kv *mvccpb.KeyValue) (identity.Identity, error) {
	n, err := parseNumber(strings.TrimPrefix(string(kv.Key), k.all()))
	if err != nil {
		return identity.Identity{}, fmt.Errorf("%s: %w", kv.Key, err)
	}
	labels, err := label.Parse(string(kv.Value))
	if err != nil {
		return identity.Identity{}, fmt.Errorf("%s: %w: %w", kv.Key, allocator.ErrCorrupt, err)
	}
	if labels.Set().HasSource(label.SourceReserved) {
		// A key in etcd must not give a pod the labels of a reserved identity such as host or world.
		return identity.Identity{}, fmt.Errorf("%s: %w: reserved labels %s", kv.Key, allocator.ErrCorrupt, labels)
	}
	return identity.Identity{Number: n, Labels: labels}, nil
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodes assigns identities to nodes and to the API servers of Kubernetes, so that policies can select them.
//
// An API server on another node has the reserved identity kube-apiserver, which also has the label remote-node. An API
// server outside of all nodes belongs to the world and can be selected by prefixes, so it has a label set with a
// node-local number. An API server on this node adds the label to the host's own identity.
//
// Addresses of another node with labels have a label set with a node-local number. The set contains the labels of a
// remote node or, at an address with an API server, the labels of an API server, and the node's own labels. In overlay
// mode, packets still carry the identity remote-node, and the receiver finds the node by its address. This node's
// labels belong to the host identity.
package nodes

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// retry is the pause after the numbers could not be saved.
const retry = 2 * time.Second

// Servers returns the addresses of the API servers, and a channel that is closed when they may have changed.
type Servers func() (addresses []netip.Addr, changed <-chan struct{})

// APIServers maintains the identities of the API servers.
type APIServers struct {
	servers   Servers
	allocator *allocator.Allocator
	registry  *registry.Registry
	log       *slog.Logger
}

// NewAPIServers returns APIServers, and assigns identities to the current addresses at once, so that readers go from
// the last process's state to the current one directly. If that fails, Run retries.
func NewAPIServers(ctx context.Context, s Servers, a *allocator.Allocator, r *registry.Registry,
	l *slog.Logger,
) *APIServers {
	f := &APIServers{servers: s, allocator: a, registry: r, log: l}
	if err := f.apply(ctx); err != nil {
		l.Error("the API servers have no identities yet", log.Err(err))
	}
	return f
}

// Label sets.
var (
	worldAPI4 = set(identity.NameWorldIPv4, identity.NameKubeAPIServer)
	worldAPI6 = set(identity.NameWorldIPv6, identity.NameKubeAPIServer)
)

func set(names ...string) label.Canonical {
	var all []label.Label
	for _, name := range names {
		all = append(all, label.Reserved(name))
	}
	c, err := label.Canonicalize(all...)
	if err != nil {
		panic(err) // these names are short
	}
	return c
}

// apply assigns identities to the current addresses. If a number cannot be saved, all addresses keep their former
// identities.
func (f *APIServers) apply(ctx context.Context) error {
	all, _ := f.servers()
	numbers := map[netip.Addr]identity.Numeric{}
	for _, a := range all {
		if !a.IsValid() || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() {
			continue // a pod cannot reach an API server at such an address
		}
		holder, labels := allocator.ReferenceHolder("sluice.io/kube-apiserver/ipv4"), worldAPI4
		if a.Is6() {
			holder, labels = allocator.ReferenceHolder("sluice.io/kube-apiserver/ipv6"), worldAPI6
		}
		id, err := f.allocator.HoldNodeLocal(ctx, holder, labels)
		if err != nil {
			return err
		}
		numbers[a] = id.Number
	}
	f.registry.SetAPIServers(numbers)
	return nil
}

// Run updates the identities until ctx is done; it then returns nil.
func (f *APIServers) Run(ctx context.Context) error {
	failed := false
	for ctx.Err() == nil {
		_, changed := f.servers()
		var again <-chan time.Time
		if err := f.apply(ctx); err != nil {
			if !failed && ctx.Err() == nil {
				f.log.Error("the identities of API servers could not be changed; retrying", log.Err(err))
			}
			again = time.After(retry)
			failed = true
		} else {
			failed = false
		}
		select {
		case <-changed:
		case <-again:
		case <-ctx.Done():
		}
	}
	return nil
}

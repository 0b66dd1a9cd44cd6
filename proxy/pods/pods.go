// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package pods records which pod has an endpoint ID now. The tags of packets and the marks of sockets contain endpoint
// IDs.
package pods

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
)

// MaxEndpoint is the highest endpoint ID.
const MaxEndpoint = 4095

// Client is the pod that begins a connection.
type Client struct {
	Endpoint  uint32 // ID of the endpoint on this node; not 0
	Tenant    string // tenant of its namespace, in the form of package shares
	Namespace string // empty without one
	Identity  uint32 // 0: unknown
}

// Unknown is the client for all unknown endpoints, whose use of limits counts for its share. No endpoint has this ID.
var Unknown = Client{Endpoint: MaxEndpoint + 1, Tenant: "unknown endpoints"}

// Pod is the pod of an endpoint.
type Pod struct {
	Client

	owner   workload.Owner
	created time.Time
	gone    atomic.Bool
}

// Gone reports whether the pod no longer exists. Its endpoint ID may then belong to another pod.
func (p *Pod) Gone() bool { return p.gone.Load() }

// Endpoint describes an endpoint of sluice-datapath.
type Endpoint struct {
	ID        uint32
	Identity  uint32
	Namespace string // namespace label of its identity; empty if it has none
	Tenant    string // value of the tenant label of its namespace; empty if it has none
	Created   time.Time
}

// Pods maps endpoint IDs to pods. It is safe for concurrent use.
type Pods struct {
	unknown Pod
	ids     [MaxEndpoint + 1]atomic.Pointer[Pod]
	leave   func(endpoint uint16)
	tenants shares.Settings

	mu     sync.Mutex
	owners map[workload.Owner]uint32 // guarded by mu; endpoint IDs
	added  chan struct{}             // guarded by mu; closed and replaced when a pod is added
}

// New returns Pods without a pod. It calls leave when a pod loses its endpoint ID, before another pod can get the ID.
func New(s shares.Settings, leave func(endpoint uint16)) *Pods {
	return &Pods{
		unknown: Pod{Client: Unknown}, leave: leave, tenants: s, owners: make(map[workload.Owner]uint32),
		added: make(chan struct{}),
	}
}

// Knows reports whether sluice-datapath has reported the pod.
func (p *Pods) Knows(pod *Pod) bool { return pod != &p.unknown }

// Wait waits until the pod of an endpoint is known, or ctx ends. The second result reports whether the pod is known.
func (p *Pods) Wait(ctx context.Context, endpoint uint16) (*Pod, bool) {
	for {
		p.mu.Lock()
		added := p.added
		p.mu.Unlock()
		if pod := p.Get(endpoint); p.Knows(pod) {
			return pod, true
		}
		select {
		case <-added:
		case <-ctx.Done():
			return nil, false
		}
	}
}

// Get returns the pod of an endpoint. All unknown endpoints share one pod.
func (p *Pods) Get(endpoint uint16) *Pod {
	if endpoint <= MaxEndpoint {
		if pod := p.ids[endpoint].Load(); pod != nil {
			return pod
		}
	}
	return &p.unknown
}

// Upsert adds or replaces the endpoint of an owner.
func (p *Pods) Upsert(owner workload.Owner, e Endpoint) {
	if e.ID == 0 || e.ID > MaxEndpoint {
		p.Delete(owner)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if id, ok := p.owners[owner]; ok && id != e.ID {
		p.remove(owner)
	}
	pod := &Pod{
		Client: Client{
			Endpoint: e.ID, Tenant: p.tenants.TenantOf(e.Namespace, e.Tenant).String(), Namespace: e.Namespace,
			Identity: e.Identity,
		},
		owner: owner, created: e.Created,
	}
	if was := p.ids[e.ID].Load(); was != nil {
		if was.owner == owner && was.created.Equal(e.Created) && was.Client == pod.Client {
			return
		}
		p.remove(was.owner)
	}
	p.owners[owner] = e.ID
	p.ids[e.ID].Store(pod)
	close(p.added)
	p.added = make(chan struct{})
}

// Delete removes the endpoint of an owner.
func (p *Pods) Delete(owner workload.Owner) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.remove(owner)
}

// Keep removes all endpoints whose owners are not in listed.
func (p *Pods) Keep(listed map[workload.Owner]struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for owner := range p.owners {
		if _, ok := listed[owner]; !ok {
			p.remove(owner)
		}
	}
}

func (p *Pods) remove(owner workload.Owner) {
	id, ok := p.owners[owner]
	if !ok {
		return
	}
	delete(p.owners, owner)
	if pod := p.ids[id].Swap(nil); pod != nil {
		pod.gone.Store(true)
	}
	p.leave(uint16(id)) //nolint:gosec // at most MaxEndpoint
}

// Len returns the number of pods.
func (p *Pods) Len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.owners)
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package pods knows which pod has an endpoint ID at present. The IDs are in the tags of packets.
package pods

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/dns/internal/names"
)

// MaxEndpoint is the highest endpoint ID.
const MaxEndpoint = 4095

// Unknown pays for what unknown endpoints learn. No endpoint has this ID.
var Unknown = names.Asker{Endpoint: MaxEndpoint + 1, Tenant: "unknown endpoints"}

// Pod is the pod of an endpoint.
type Pod struct {
	Asker names.Asker

	owner   workload.Owner
	created time.Time
	gone    atomic.Bool
}

// Gone reports whether the pod does not exist any more. Its ID may be the ID of another pod then.
func (p *Pod) Gone() bool { return p.gone.Load() }

// Endpoint describes an endpoint of sluice-datapath.
type Endpoint struct {
	ID        uint32
	Identity  uint32
	Namespace string // label of its identity; empty without one
	Tenant    string // value of the tenant label of its namespace; empty without one
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

// New returns Pods without a pod. leave is called when a pod does not have its ID any more, and before another pod has
// it.
func New(s shares.Settings, leave func(endpoint uint16)) *Pods {
	return &Pods{
		unknown: Pod{Asker: Unknown}, leave: leave, tenants: s, owners: make(map[workload.Owner]uint32),
		added: make(chan struct{}),
	}
}

// Knows reports whether a pod is one that sluice-datapath has reported.
func (p *Pods) Knows(pod *Pod) bool { return pod != &p.unknown }

// Wait waits until the pod of an endpoint is known, or ctx ends. It reports whether it is known.
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

// Get returns the pod of an endpoint. All unknown endpoints are one pod.
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
		Asker: names.Asker{
			Endpoint: e.ID, Tenant: p.tenants.TenantOf(e.Namespace, e.Tenant).String(), Namespace: e.Namespace,
			Identity: e.Identity,
		},
		owner: owner, created: e.Created,
	}
	if was := p.ids[e.ID].Load(); was != nil {
		if was.owner == owner && was.created.Equal(e.Created) && was.Asker == pod.Asker {
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

// Keep removes all endpoints whose owners are not listed.
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

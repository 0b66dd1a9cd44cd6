// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package hostport forwards ports of the node to containers that requested them at creation. It keeps the claims, which
// assign ports to endpoints, and filters the transactions of sluice-loadbalancer: a transaction of services neither
// takes nor removes a frontend that an endpoint has claimed.
//
// A claim starts before the frontend is in the kernel and ends after it is removed, so that a key never belongs to an
// endpoint and to a service at the same time. Claims are stored in the endpoint records; this package stores none.
package hostport

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// Kernel applies frontends.
type Kernel interface {
	// Apply applies a transaction of services or of host ports.
	Apply(ctx context.Context, tx *frontendtx.Transaction) (frontendtx.Result, error)
	// Barrier returns when every program run that began before has ended.
	Barrier(ctx context.Context) error
	// Keys returns the keys of all frontends.
	Keys() ([]frontend.Key, error)
	// NameOf returns the service of a frontend, "" if it is unknown. ok is false if the frontend does not exist.
	NameOf(k frontend.Key) (service string, ok bool, err error)
}

// Ender ends sockets that send to a removed backend.
type Ender interface {
	End(ctx context.Context) error
}

// systemNamespace is the namespace of the cluster's own pods. It belongs to the tenant shares.System.
const systemNamespace = "kube-system"

// keptTenants is the number of cached tenants of namespaces without claims.
const keptTenants = 64

// part is the fraction of the elements that is reserved for host ports. frontsEach is the number of fronts of a host
// port: one for connections from inside, one for outside.
const (
	part       = 16
	frontsEach = 2
)

// Divide divides the capacity of the kernel between services and host ports. It returns the capacity for services and
// the maximum number of host ports.
func Divide(c frontend.Capacity) (services frontend.Capacity, hostPorts int) {
	hostPorts = c.Frontends / part / frontsEach
	c.Frontends -= hostPorts * frontsEach
	c.Backends -= hostPorts
	c.Members -= hostPorts
	return c, hostPorts
}

// Options are the options and dependencies of Ports.
type Options struct {
	Kernel Kernel
	Ender  Ender
	// Own reports whether an address belongs to the node.
	Own func(a netip.Addr) (bool, error)
	// Closed are UDP ports of the node that containers may not use, because packets between nodes use them.
	Closed []uint16
	// Room is the number of frontends that all endpoints together may claim, shared by the tenants. Each mapping needs one
	// per address of the endpoint. 0: no limit.
	Room int
	Log  *slog.Logger
}

// Ports manages the host ports of the node's endpoints. Its methods may be called concurrently, but changes for one
// owner only by one caller at a time.
type Ports struct {
	o Options
	// held is closed once an endpoint has claimed a port.
	held chan struct{}
	// freed receives when a port was released that a service wants.
	freed chan struct{}
	// left receives when a frontend was removed that sockets may still use.
	left chan struct{}

	// applying is held while a transaction of services is applied, and while a claim is checked: a transaction
	// first checks the keys of claims, and a claim the keys of services.
	applying sync.Mutex

	mu     sync.Mutex                          // taken after applying
	claims map[frontend.Key]*claim             // guarded by mu
	owners map[workload.Owner][]frontend.Key   // guarded by mu; keys of claims
	wanted map[frontend.Key]struct{}           // guarded by mu; keys refused to services
	failed map[workload.Owner]map[string]error // guarded by mu; by frontend, why the host port is not in effect
	counts map[string]int                      // guarded by mu; number of claims by pod namespace
	// tenants are the tenants of namespaces, if known from the identity service.
	tenants map[string]shares.Tenant // guarded by mu
}

// claim is a port that an endpoint has claimed.
type claim struct {
	owner     workload.Owner
	namespace string
	frontend  *frontend.Frontend
}

// New returns Ports without claims.
func New(o Options) *Ports {
	p := &Ports{
		o: o, held: make(chan struct{}), freed: make(chan struct{}, 1), left: make(chan struct{}, 1),
		claims: map[frontend.Key]*claim{}, owners: map[workload.Owner][]frontend.Key{},
		wanted: map[frontend.Key]struct{}{}, failed: map[workload.Owner]map[string]error{}, counts: map[string]int{},
		tenants: map[string]shares.Tenant{},
	}
	p.left <- struct{}{} // by a previous process, possibly
	return p
}

// Held is closed once an endpoint has claimed a port.
func (p *Ports) Held() <-chan struct{} { return p.held }

// Freed receives when a port was released that was refused to a service.
func (p *Ports) Freed() <-chan struct{} { return p.freed }

// nameOf returns the pod of an endpoint, or its owner if it has none.
func nameOf(s endpoint.Spec) string {
	if s.Pod.Name != "" {
		return s.Pod.Namespace + "/" + s.Pod.Name
	}
	return s.Owner.String()
}

// frontendsOf returns the frontends of an endpoint's port mappings.
func frontendsOf(s endpoint.Spec) []*frontend.Frontend {
	var fs []*frontend.Frontend
	for _, m := range s.PortMappings {
		for _, a := range s.Addrs {
			asked, ok := m.Asked(a)
			if !ok {
				continue
			}
			list := func() *frontend.List {
				return &frontend.List{Backends: []frontend.Backend{{AddrPort: netip.AddrPortFrom(a, m.ContainerPort)}}}
			}
			fs = append(fs, &frontend.Frontend{
				Key: frontend.Key{
					Addr: asked, Port: m.HostPort, Protocol: frontend.Protocol(m.Protocol), Node: asked.IsUnspecified(),
				},
				Kind: frontend.HostPort, Service: nameOf(s), Inside: list(), Outside: list(),
			})
		}
	}
	return fs
}

// Check implements endpoint.HostPorts.
func (p *Ports) Check(s endpoint.Spec) error {
	if len(s.PortMappings) == 0 {
		return nil
	}
	p.applying.Lock()
	defer p.applying.Unlock()
	return p.check(s, frontendsOf(s))
}

// check implements Check with applying held.
func (p *Ports) check(s endpoint.Spec, fs []*frontend.Frontend) error {
	for _, m := range s.PortMappings {
		if m.Protocol == workload.UDP && slices.Contains(p.o.Closed, m.HostPort) {
			return &endpoint.FieldError{
				Field: "port_mappings", Reason: fmt.Sprintf("%v: the node uses that port for packets between nodes", m),
			}
		}
		if !m.HostIP.IsValid() || m.HostIP.IsUnspecified() || m.HostIP.IsLoopback() {
			continue
		}
		own, err := p.o.Own(m.HostIP)
		if err != nil {
			return err
		}
		if !own {
			return &endpoint.FieldError{
				Field: "port_mappings", Reason: fmt.Sprintf("%v: not an address of this node", m),
			}
		}
	}
	added := 0
	for _, f := range fs {
		if holder, ok := p.holder(f.Key); ok {
			if holder == s.Owner {
				continue
			}
			return fmt.Errorf("port %v: %w by endpoint %s", f.Key, endpoint.ErrHostPort, holder)
		}
		service, ok, err := p.o.Kernel.NameOf(f.Key)
		switch {
		case err != nil:
			return err
		case ok && service == "":
			return fmt.Errorf("port %v: %w by a service that sluice-loadbalancer has not sent since the start",
				f.Key, endpoint.ErrHostPort)
		case ok:
			return fmt.Errorf("port %v: %w by service %s", f.Key, endpoint.ErrHostPort, service)
		}
		added++
	}
	return p.fits(s.Pod.Namespace, added)
}

// SetTenant implements endpoint.HostPorts.
func (p *Ports) SetTenant(namespace string, t shares.Tenant) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tenants[namespace] = t
	if len(p.tenants) > len(p.counts)+keptTenants {
		maps.DeleteFunc(p.tenants, func(ns string, _ shares.Tenant) bool { return ns != namespace && p.counts[ns] == 0 })
	}
}

// tenantOf returns the tenant of a namespace. Containers without a namespace belong to the system tenant. Called with
// mu held.
func (p *Ports) tenantOf(namespace string) shares.Tenant {
	if namespace == "" || namespace == systemNamespace {
		return shares.System
	}
	if t, ok := p.tenants[namespace]; ok {
		return t
	}
	return shares.Namespace(namespace)
}

// fits returns ErrFull if the tenant of a namespace may not claim added more frontends.
func (p *Ports) fits(namespace string, added int) error {
	if p.o.Room == 0 || added == 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	used, has, tenant := shares.Held{Size: p.o.Room}, 0, p.tenantOf(namespace)
	for ns, n := range p.counts {
		t := p.tenantOf(ns)
		if used.Add(t, n); t == tenant {
			has += n
		}
	}
	most := used.Most(tenant, has)
	if has+added <= most {
		return nil
	}
	return fmt.Errorf("%w for %d more host ports: %s has %d on this node and may have %d, and all have %d of %d",
		endpoint.ErrFull, added, tenant, has, most, used.Used(), p.o.Room)
}

// holder returns the endpoint owner that has claimed a key.
func (p *Ports) holder(k frontend.Key) (workload.Owner, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, ok := p.claims[k]
	if !ok {
		return workload.Owner{}, false
	}
	return c.owner, true
}

// Claim implements endpoint.HostPorts.
func (p *Ports) Claim(s endpoint.Spec) error {
	if len(s.PortMappings) == 0 {
		return nil
	}
	p.applying.Lock()
	defer p.applying.Unlock()
	fs := frontendsOf(s)
	if err := p.check(s, fs); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range fs {
		p.keep(s, f)
	}
	return nil
}

// keep assigns a frontend to an endpoint. Called with mu held.
func (p *Ports) keep(s endpoint.Spec, f *frontend.Frontend) {
	if before := p.claims[f.Key]; before == nil {
		p.owners[s.Owner] = append(p.owners[s.Owner], f.Key)
	} else {
		p.count(before, -1)
	}
	c := &claim{s.Owner, s.Pod.Namespace, f}
	p.claims[f.Key] = c
	p.count(c, 1)
	select {
	case <-p.held:
	default:
		close(p.held)
	}
}

// count changes the number of claims of the claim's namespace. Called with mu held.
func (p *Ports) count(c *claim, by int) {
	if p.counts[c.namespace] += by; p.counts[c.namespace] == 0 {
		delete(p.counts, c.namespace)
	}
}

// Restore implements endpoint.HostPorts. It does not check the ports of services or the addresses of the node, because
// the kernel may already have these frontends.
func (p *Ports) Restore(rs []endpoint.Record) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ready := range []bool{true, false} {
		for _, r := range rs {
			if (r.Phase == endpoint.PhaseReady) == ready {
				p.restore(r.Spec)
			}
		}
	}
}

// restore claims the ports of one endpoint. Called with mu held.
func (p *Ports) restore(s endpoint.Spec) {
	for _, f := range frontendsOf(s) {
		if other := p.claims[f.Key]; other != nil && other.owner != s.Owner {
			err := fmt.Errorf("port %v: %w by endpoint %s", f.Key, endpoint.ErrHostPort, other.owner)
			p.o.Log.Error("cannot restore a host port after a restart", "owner", s.Owner.String(), log.Err(err))
			p.fail(s.Owner, f.Key, err)
			continue
		}
		p.keep(s, f)
	}
}

// fail records why a frontend is not in effect; nil: it is. Called with mu held.
func (p *Ports) fail(o workload.Owner, k frontend.Key, err error) {
	if err != nil && p.failed[o] == nil {
		p.failed[o] = map[string]error{}
	}
	if err != nil {
		p.failed[o][k.String()] = err
	} else if delete(p.failed[o], k.String()); len(p.failed[o]) == 0 {
		delete(p.failed, o)
	}
}

// Lead implements endpoint.HostPorts.
func (p *Ports) Lead(ctx context.Context, o workload.Owner) error {
	return p.lead(ctx, []workload.Owner{o})
}

// LeadAll implements endpoint.HostPorts.
func (p *Ports) LeadAll(ctx context.Context) {
	p.mu.Lock()
	owners := slices.Collect(maps.Keys(p.owners))
	p.mu.Unlock()
	p.leadLogged(ctx, owners)
}

// leadLogged is like lead, but for callers that retry failures later.
func (p *Ports) leadLogged(ctx context.Context, owners []workload.Owner) {
	if err := p.lead(ctx, owners); err != nil && ctx.Err() == nil {
		p.o.Log.WarnContext(ctx, "cannot program host ports; retrying", log.Err(err))
	}
}

func (p *Ports) lead(ctx context.Context, owners []workload.Owner) error {
	tx := &frontendtx.Transaction{Partial: true}
	p.mu.Lock()
	for _, o := range owners {
		for _, k := range p.owners[o] {
			c := p.claims[k]
			f := *c.frontend
			f.Tenant = p.tenantOf(c.namespace)
			tx.Upsert(&f)
		}
	}
	p.mu.Unlock()
	if len(tx.Changes()) == 0 {
		return nil
	}
	res, err := p.o.Kernel.Apply(ctx, tx)
	if err != nil {
		return fmt.Errorf("host ports: %w", err)
	}
	refused := map[frontend.Key]error{}
	for _, r := range res.Refused {
		refused[r.Key] = r.Err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, c := range tx.Changes() {
		err := refused[c.Key]
		if err != nil {
			var room *frontendtx.NoRoomError
			if errors.As(err, &room) {
				err = fmt.Errorf("%w: %w", endpoint.ErrFull, err)
			}
			err = fmt.Errorf("host port %v: %w", c.Key, err)
			errs = append(errs, err)
		}
		if held := p.claims[c.Key]; held != nil {
			p.fail(held.owner, c.Key, err)
		}
	}
	return errors.Join(errs...)
}

// Release implements endpoint.HostPorts. It has no context, because the next owner of the port waits for it.
func (p *Ports) Release(o workload.Owner) error {
	tx := &frontendtx.Transaction{Partial: true}
	p.mu.Lock()
	keys := slices.Clone(p.owners[o])
	delete(p.failed, o)
	p.mu.Unlock()
	if len(keys) == 0 {
		return nil
	}
	for _, k := range keys {
		tx.Remove(k)
	}
	res, err := p.o.Kernel.Apply(context.Background(), tx)
	if err != nil {
		return fmt.Errorf("remove the host ports of %s: %w", o, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range keys {
		p.count(p.claims[k], -1)
		delete(p.claims, k)
		if _, ok := p.wanted[k]; ok {
			delete(p.wanted, k)
			wake(p.freed)
		}
	}
	delete(p.owners, o)
	if res.Changed > 0 {
		wake(p.left)
	}
	return nil
}

// wake sends to a channel with a buffer of one, without blocking.
func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// Warnings lists host ports that are not in effect, one line each, sorted.
func (p *Ports) Warnings() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var lines []string
	for o, fs := range p.failed {
		for _, err := range fs {
			lines = append(lines, fmt.Sprintf("endpoint %s: %v; the endpoint runs without this host port", o, err))
		}
	}
	slices.Sort(lines)
	return lines
}

// settlePause is the pause before a failed attempt to end sockets is repeated; leadPause is the pause before host ports
// that did not fit into the maps are tried again.
const (
	settlePause = time.Second
	leadPause   = 30 * time.Second
)

// Run ends sockets that use released host ports, and retries host ports that did not fit, until ctx ends.
func (p *Ports) Run(ctx context.Context) error {
	again := time.NewTicker(leadPause)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-again.C:
			p.leadAgain(ctx)
			continue
		case <-p.left:
		}
		err := p.o.Kernel.Barrier(ctx)
		if err == nil {
			err = p.o.Ender.End(ctx)
		}
		if err == nil || ctx.Err() != nil {
			continue
		}
		p.o.Log.ErrorContext(ctx, "cannot terminate the sockets of removed host ports; retrying", log.Err(err))
		wake(p.left)
		select {
		case <-ctx.Done():
		case <-time.After(settlePause):
		}
	}
}

// leadAgain retries the host ports that are not in effect.
func (p *Ports) leadAgain(ctx context.Context) {
	p.mu.Lock()
	owners := slices.Collect(maps.Keys(p.failed))
	p.mu.Unlock()
	p.leadLogged(ctx, owners)
}

// Services is the kernel's set of frontends without host ports, as sluice-loadbalancer manages it.
type Services struct{ p *Ports }

// Services returns the frontends of the kernel without host ports.
func (p *Ports) Services() Services { return Services{p} }

// heldError is returned if an endpoint has claimed the key of a service's frontend.
type heldError struct {
	owner workload.Owner
	name  string
}

func (e *heldError) Error() string {
	text := "the port is a host port of endpoint " + e.owner.String()
	if strings.Contains(e.name, "/") && e.name != e.owner.String() {
		text += ", pod " + e.name
	}
	return text + "; the service gets the port when the endpoint is deleted"
}

// Apply applies a transaction of services. It refuses frontends with the key of a host port, and does not remove host
// ports.
func (s Services) Apply(ctx context.Context, tx *frontendtx.Transaction) (frontendtx.Result, error) {
	p := s.p
	p.applying.Lock()
	defer p.applying.Unlock()
	theirs, refused := p.filter(tx)
	res, err := p.o.Kernel.Apply(ctx, theirs)
	if err == nil && len(refused) > 0 {
		res.Refused = append(res.Refused, refused...)
		frontendtx.SortRefusals(res.Refused)
	}
	return res, err
}

// filter removes the keys that endpoints have claimed from a transaction.
func (p *Ports) filter(tx *frontendtx.Transaction) (theirs *frontendtx.Transaction, refused []frontend.Refusal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	touches := func(c frontendtx.Change) bool { return p.claims[c.Key] != nil }
	if len(p.claims) == 0 || !slices.ContainsFunc(tx.Changes(), touches) {
		return tx, nil
	}
	theirs = &frontendtx.Transaction{Partial: tx.Partial}
	for _, c := range tx.Changes() {
		held := p.claims[c.Key]
		switch {
		case held == nil && c.Frontend != nil:
			theirs.Upsert(c.Frontend)
		case held == nil:
			theirs.Remove(c.Key)
		case c.Frontend != nil:
			p.wanted[c.Key] = struct{}{}
			refused = append(refused, frontend.Refusal{Key: c.Key, Err: &heldError{held.owner, held.frontend.Service}})
		default:
			delete(p.wanted, c.Key)
		}
	}
	return theirs, refused
}

// Barrier returns when every program run that began before has ended.
func (s Services) Barrier(ctx context.Context) error { return s.p.o.Kernel.Barrier(ctx) }

// Keys returns the keys of all frontends except host ports, including frontends of previous processes.
func (s Services) Keys() ([]frontend.Key, error) {
	keys, err := s.p.o.Kernel.Keys()
	if err != nil {
		return nil, err
	}
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	return slices.DeleteFunc(keys, func(k frontend.Key) bool { return s.p.claims[k] != nil }), nil
}

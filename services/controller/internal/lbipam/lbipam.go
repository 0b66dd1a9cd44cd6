// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lbipam

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/controller/internal/policystatus"
	"github.com/sluice-net/sluice/services/controller/internal/subject"
)

// Conditions of pools.
const (
	ConditionConflict  = "cilium.io/PoolConflict"
	ConditionTotal     = "cilium.io/IPsTotal"
	ConditionAvailable = "cilium.io/IPsAvailable"
	ConditionUsed      = "cilium.io/IPsUsed"
)

// Timing.
const (
	collect = 100 * time.Millisecond // changes within this time are planned together
	again   = time.Second            // after an object was changed by somebody else
	refused = 5 * time.Minute        // after a request that the API server rejected
)

// API writes the status of Services and pools, with the errors of package policystatus. It returns the new resource
// version.
type API interface {
	// SetService replaces the addresses and the conditions of a Service that still has the given resource version.
	SetService(ctx context.Context, k Key, uid, version string, ingress, conditions []byte) (string, error)
	// SetPool replaces the conditions of a pool that still has the given resource version.
	SetPool(ctx context.Context, name, uid, version string, conditions []byte) (string, error)
}

// Node is the part of a Node that is compared with addresses.
type Node struct {
	Addresses []netip.Addr
	Pods      []netip.Prefix
}

// Allocator assigns addresses to Services while the process is elected. Its methods are safe for concurrent use.
type Allocator struct {
	api          API
	leads        subject.Leadership
	log          *slog.Logger
	defaultClass bool
	requests     subject.Requests
	queue        *subject.Queue[Key] // the namespace of a pool is empty
	changed      chan struct{}       // has a token after a change
	now          func() time.Time

	mu       sync.Mutex
	services map[Key]*Service     // guarded by mu
	pools    map[string]*Pool     // guarded by mu
	nodes    map[string]Node      // guarded by mu
	listed   [3]bool              // guarded by mu; services, pools and nodes are complete
	held     map[Key][]netip.Addr // guarded by mu; see State
	grants   map[Key]Grant        // guarded by mu; of the last plan
	usage    map[string]Usage     // guarded by mu; likewise
}

// Kinds of objects that must be listed before addresses are assigned.
const (
	Services = iota
	Pools
	Nodes
)

// New returns an Allocator. defaultClass: Services without loadBalancerClass get addresses. tenant returns the tenant
// of a namespace.
func New(
	api API, defaultClass bool, tenant func(string) shares.Tenant, leads subject.Leadership, l *slog.Logger,
) *Allocator {
	a := &Allocator{
		api: api, leads: leads, log: l, defaultClass: defaultClass, changed: make(chan struct{}, 1), now: time.Now,
		services: make(map[Key]*Service), pools: make(map[string]*Pool), nodes: make(map[string]Node),
		held: make(map[Key][]netip.Addr),
	}
	of := func(k Key) shares.Tenant {
		if k.Namespace == "" {
			return shares.System
		}
		return tenant(k.Namespace)
	}
	a.queue = subject.NewQueue(Key.Compare, of, time.Now)
	return a
}

// UpsertService reports a new or changed Service.
func (a *Allocator) UpsertService(s *Service) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if old := a.services[s.Key]; old != nil {
		switch {
		case old.UID != s.UID:
			delete(a.held, s.Key)
		case older(s.ResourceVersion, old.ResourceVersion):
			return // this process has written a newer version
		}
	}
	a.services[s.Key] = s
	a.change()
}

// DeleteService reports a deleted Service.
func (a *Allocator) DeleteService(k Key) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.services, k)
	delete(a.held, k)
	a.change()
}

// UpsertPool reports a new or changed pool.
func (a *Allocator) UpsertPool(p *Pool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if old := a.pools[p.Name]; old != nil && old.UID == p.UID && older(p.ResourceVersion, old.ResourceVersion) {
		return
	}
	a.pools[p.Name] = p
	a.change()
}

// DeletePool reports a deleted pool.
func (a *Allocator) DeletePool(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.pools, name)
	a.change()
}

// UpsertNode reports a new or changed Node. Kubelets change their Nodes often, and their addresses hardly ever.
func (a *Allocator) UpsertNode(name string, n Node) {
	a.mu.Lock()
	defer a.mu.Unlock()
	old, known := a.nodes[name]
	if known && slices.Equal(old.Addresses, n.Addresses) && slices.Equal(old.Pods, n.Pods) {
		return
	}
	a.nodes[name] = n
	a.change()
}

// DeleteNode reports a deleted Node.
func (a *Allocator) DeleteNode(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.nodes, name)
	a.change()
}

// SetListed reports whether all objects of a kind are known. While one kind is not, no address is assigned or removed.
// If listed is false, the objects of the kind are forgotten.
func (a *Allocator) SetListed(kind int, listed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.listed[kind] = listed
	switch {
	case !listed && kind == Services:
		clear(a.services)
		clear(a.held)
	case !listed && kind == Pools:
		clear(a.pools)
	}
	a.change()
}

// older reports whether a resource version is older than another one. Versions that are not numbers have no order.
func older(v, than string) bool {
	a, err := strconv.ParseUint(v, 10, 64)
	b, err2 := strconv.ParseUint(than, 10, 64)
	return err == nil && err2 == nil && a < b
}

// change makes lead plan again.
func (a *Allocator) change() {
	select {
	case a.changed <- struct{}{}:
	default:
	}
}

// Run assigns addresses while the process is elected, until ctx ends; it then returns nil.
func (a *Allocator) Run(ctx context.Context) error {
	a.leads.While(ctx, a.lead)
	return nil
}

func (a *Allocator) lead(ctx context.Context) {
	a.mu.Lock()
	clear(a.held) // another process may have assigned others since
	a.change()
	a.mu.Unlock()
	var writing sync.WaitGroup
	defer writing.Wait()
	writing.Go(func() { a.queue.Lead(ctx, a.log, "load balancer addresses", a.write) })
	for {
		select {
		case <-a.changed:
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(collect):
		case <-ctx.Done():
			return
		}
		a.plan()
	}
}

// plan assigns addresses, and queues the objects whose status differs.
func (a *Allocator) plan() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.listed[Services] || !a.listed[Pools] || !a.listed[Nodes] {
		return
	}
	a.grants, a.usage = Plan(State{
		Pools: slices.Collect(maps.Values(a.pools)), Services: slices.Collect(maps.Values(a.services)),
		DefaultClass: a.defaultClass, Held: a.held, Owner: a.owners(),
	})
	for k, g := range a.grants {
		delete(a.held, k)
		if len(g.Addresses) > 0 {
			a.held[k] = g.Addresses
		}
		if a.differs(a.services[k], g) {
			a.queue.Soon(k)
		}
	}
	for name, p := range a.pools {
		if !equal(p.Conditions, a.poolConditions(p)) {
			a.queue.Soon(Key{Name: name})
		}
	}
}

// owners returns State.Owner. Called with mu held.
func (a *Allocator) owners() func(netip.Addr) (owner string, last netip.Addr) {
	exact := make(map[netip.Addr]string)
	var pods []podRange
	for name, n := range a.nodes {
		for _, addr := range n.Addresses {
			exact[addr] = "node " + name
		}
		for _, p := range n.Pods {
			pods = append(pods, podRange{p, name})
		}
	}
	for k, s := range a.services {
		for _, addr := range s.ClusterIPs {
			exact[addr] = "Service " + k.Namespace + "/" + k.Name + " in the cluster"
		}
	}
	return func(addr netip.Addr) (owner string, end netip.Addr) {
		if owner := exact[addr]; owner != "" {
			return owner, addr
		}
		for _, r := range pods {
			if r.Contains(addr) {
				return "pods on node " + r.node, last(r.Prefix)
			}
		}
		return "", addr
	}
}

type podRange struct {
	netip.Prefix
	node string
}

// differs reports whether the status of a Service differs from its grant.
func (a *Allocator) differs(s *Service, g Grant) bool {
	switch {
	case s == nil || g.Leave:
		return false
	case g.Release:
		return s.granted()
	}
	return !slices.Equal(s.Ingress, g.Addresses) || s.Hostname || !equal(s.Conditions, a.serviceConditions(s, g))
}

// equal compares conditions apart from the times of their transitions.
func equal(a, b []Condition) bool {
	return slices.EqualFunc(a, b, func(x, y Condition) bool {
		x.LastTransitionTime = y.LastTransitionTime
		return x == y
	})
}

// write writes the status of one object.
func (a *Allocator) write(ctx context.Context, k Key) (requested bool, err error) {
	if k.Namespace == "" {
		return a.writePool(ctx, k.Name)
	}
	a.mu.Lock()
	s, g := a.services[k], a.grants[k]
	if !a.differs(s, g) {
		a.mu.Unlock()
		return false, nil
	}
	uid, version, conditions := s.UID, s.ResourceVersion, a.serviceConditions(s, g)
	addresses := g.Addresses
	a.mu.Unlock()

	type entry struct {
		IP     string `json:"ip"`
		IPMode string `json:"ipMode"`
	}
	ingress := []entry{} // an empty list replaces the former one; null would, too
	for _, addr := range addresses {
		ingress = append(ingress, entry{addr.String(), "VIP"})
	}
	body, err := json.Marshal(ingress)
	if err != nil {
		return false, err
	}
	kept, err := json.Marshal(conditions)
	if err != nil {
		return false, err
	}
	err = a.requests.Do(ctx, func(ctx context.Context) (err error) {
		version, err = a.api.SetService(ctx, k, uid, version, body, kept)
		return err
	})
	if err == nil {
		a.mu.Lock()
		defer a.mu.Unlock()
		if now := a.services[k]; now == s { // otherwise a newer version is known
			written := *s
			written.ResourceVersion, written.Ingress, written.Hostname = version, addresses, false
			written.Conditions = conditions
			a.services[k] = &written
		}
		return true, nil
	}
	return true, a.failed(k, fmt.Sprintf("service %s/%s", k.Namespace, k.Name), err)
}

func (a *Allocator) writePool(ctx context.Context, name string) (requested bool, err error) {
	a.mu.Lock()
	p := a.pools[name]
	if p == nil || equal(p.Conditions, a.poolConditions(p)) {
		a.mu.Unlock()
		return false, nil
	}
	uid, version, conditions := p.UID, p.ResourceVersion, a.poolConditions(p)
	a.mu.Unlock()
	body, err := json.Marshal(conditions)
	if err != nil {
		return false, err
	}
	err = a.requests.Do(ctx, func(ctx context.Context) (err error) {
		version, err = a.api.SetPool(ctx, name, uid, version, body)
		return err
	})
	if err == nil {
		a.mu.Lock()
		defer a.mu.Unlock()
		if now := a.pools[name]; now == p {
			written := *p
			written.ResourceVersion, written.Conditions = version, conditions
			a.pools[name] = &written
		}
		return true, nil
	}
	return true, a.failed(Key{Name: name}, "pool "+name, err)
}

// failed decides when an object is written again. It returns an error if the API server did not respond.
func (a *Allocator) failed(k Key, what string, err error) error {
	switch {
	case errors.Is(err, policystatus.ErrGone):
	case errors.Is(err, policystatus.ErrChanged):
		a.queue.Later(k, again)
	case errors.Is(err, policystatus.ErrRefused), errors.Is(err, policystatus.ErrNoStatus):
		a.log.Warn("the API server rejected a status", "object", what, log.Err(err))
		a.queue.Later(k, refused)
	default:
		return err
	}
	return nil
}

// serviceConditions returns the conditions of a Service with a grant. Conditions of others stay.
func (a *Allocator) serviceConditions(s *Service, g Grant) []Condition {
	if g.Release {
		return slices.DeleteFunc(slices.Clone(s.Conditions), func(c Condition) bool {
			return c.Type == ConditionSatisfied
		})
	}
	return a.with(s.Conditions, Condition{
		Type: ConditionSatisfied, Status: truth(g.Satisfied), Reason: g.Reason,
		Message: subject.Shorten(g.Message, maxMessage), ObservedGeneration: s.Generation,
	})
}

// maxMessage limits the message of a condition, in bytes.
const maxMessage = 1000

// poolConditions returns the conditions of a pool. Called with mu held.
func (a *Allocator) poolConditions(p *Pool) []Condition {
	u, ok := a.usage[p.Name]
	if !ok {
		return p.Conditions
	}
	conflict := Condition{Type: ConditionConflict, Status: "False", Reason: "resolved"}
	switch {
	case len(p.Faults) > 0:
		conflict.Status, conflict.Reason, conflict.Message = "True", "invalid_block", p.Faults[0]
	case u.Conflict != "":
		conflict.Status, conflict.Reason, conflict.Message = "True", "cidr_overlap", u.Conflict
	}
	conflict.Message = subject.Shorten(conflict.Message, maxMessage)
	all := p.Conditions
	for _, c := range []Condition{
		conflict,
		{Type: ConditionTotal, Status: "Unknown", Reason: "noreason", Message: u.Total.String()},
		{Type: ConditionAvailable, Status: "Unknown", Reason: "noreason", Message: u.Available.String()},
		{Type: ConditionUsed, Status: "Unknown", Reason: "noreason", Message: strconv.Itoa(u.Used)},
	} {
		c.ObservedGeneration = p.Generation
		all = a.with(all, c)
	}
	return all
}

func truth(yes bool) string {
	if yes {
		return "True"
	}
	return "False"
}

// with returns conditions in which c replaces the condition of its type.
func (a *Allocator) with(all []Condition, c Condition) []Condition {
	c.LastTransitionTime = a.now().UTC().Truncate(time.Second)
	all = slices.Clone(all)
	if old := condition(all, c.Type); old != nil {
		if old.Status == c.Status {
			c.LastTransitionTime = old.LastTransitionTime
		}
		*old = c
		return all
	}
	return append(all, c)
}

// Status returns the objects that wait for a request, and the statistics of the requests.
func (a *Allocator) Status() subject.Status {
	return a.requests.Status("load balancer addresses", a.queue.Pending())
}

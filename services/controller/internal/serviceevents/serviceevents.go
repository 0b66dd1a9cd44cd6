// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package serviceevents makes Events about Services that exceed the share of their tenant. A Service has no condition
// of Sluice.
//
// The nodes report these Services. An Event is made when a Service begins to exceed the share and when it no longer
// does. The number of Events is limited by tenant, and tenants take turns, so that a tenant with very many Services
// neither delays the Events of others nor fills the store of the API server.
package serviceevents

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/controller/internal/policystatus"
	"github.com/sluice-net/sluice/services/controller/internal/subject"
	"github.com/sluice-net/sluice/services/policy/evaluation"
)

// Reasons of Events. They are part of the interface: scripts and alerts refer to them.
const (
	ReasonExceeds = policystatus.ExceedsShare
	ReasonWithin  = "WithinShare"
)

// Limits of the Events.
const (
	// maxEvents is the number of Events about the Services of one tenant within refill. By default the API server
	// keeps an Event for the same time.
	maxEvents = 100
	refill    = time.Hour
	// spacing is the shortest interval between two Events on one Service.
	spacing = 30 * time.Second
	// again is the delay before a request that the API server rejected is repeated.
	again = 5 * time.Minute
	// maxNote limits the text of an Event, in bytes. The API server accepts 1024.
	maxNote = 1000
)

const kind = "Service"

// label matches names of Services and namespaces.
var label = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// API reads Services and creates Events, with the errors of package policystatus.
type API interface {
	// ServiceUID returns the UID of a Service.
	ServiceUID(ctx context.Context, namespace, name string) (string, error)
	// Record creates an Event on an object. An existing Event of the same name is kept, without an error.
	Record(ctx context.Context, o policystatus.Object, e policystatus.Event) error
}

// Services makes Events about Services.
type Services struct {
	api      API
	leads    subject.Leadership
	log      *slog.Logger
	tenant   func(namespace string) shares.Tenant
	requests subject.Requests
	now      func() time.Time
	queue    *subject.Queue[evaluation.Key]

	mu       sync.Mutex
	services map[evaluation.Key]*service     // guarded by mu
	events   map[shares.Tenant]*rate.Limiter // guarded by mu; tenants with Events within refill
}

// service is a Service that exceeds a share, or about which an Event said so.
type service struct {
	exceeds bool
	nodes   policystatus.Nodes // which say so
	said    bool               // what the last Event of this run says
	uid     string             // of the Service in the last Event
	changes int                // number of Events of this run about a Service within its share
	earlier time.Time          // creation time of the last Event
}

// New returns Services that make their Events while the process is elected. tenant returns the tenant of a namespace.
func New(api API, tenant func(namespace string) shares.Tenant, leads subject.Leadership, l *slog.Logger) *Services {
	s := &Services{
		api: api, leads: leads, log: l, tenant: tenant, now: time.Now,
		services: make(map[evaluation.Key]*service), events: make(map[shares.Tenant]*rate.Limiter),
	}
	of := func(k evaluation.Key) shares.Tenant { return tenant(k.Namespace) }
	s.queue = subject.NewQueue(evaluation.Key.Compare, of, time.Now)
	return s
}

// SetRefused replaces the set of Services that nodes report. others are the nodes that may report further ones.
func (s *Services) SetRefused(refused map[evaluation.Key]policystatus.Nodes, others policystatus.Nodes) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	maps.DeleteFunc(s.events, func(_ shares.Tenant, l *rate.Limiter) bool { return l.TokensAt(now) >= maxEvents })
	for k, nodes := range refused {
		if k.Kind != kind || !label.MatchString(k.Namespace) || !label.MatchString(k.Name) {
			continue // no Service: a node may report anything
		}
		x := s.services[k]
		if x == nil {
			x = &service{}
			s.services[k] = x
		}
		x.nodes = nodes
		if !x.exceeds {
			x.exceeds = true
			s.queue.Soon(k)
		}
	}
	if others.UnknownCount+others.UnreadableCount > 0 {
		return // a Service that is not reported may be left out
	}
	for k, x := range s.services {
		if _, ok := refused[k]; ok || !x.exceeds {
			continue
		}
		if x.exceeds = false; x.said {
			s.queue.Soon(k)
		} else {
			s.forget(k)
		}
	}
}

// forget removes a Service. Called with mu held.
func (s *Services) forget(k evaluation.Key) {
	delete(s.services, k)
	s.queue.Forget(k)
}

// Run makes Events while the process is elected, until ctx ends; it then returns nil.
func (s *Services) Run(ctx context.Context) error {
	s.leads.While(ctx, func(ctx context.Context) { s.queue.Lead(ctx, s.log, "Events of Services", s.write) })
	return nil
}

// Status returns the number of Services for which an Event is due, and the statistics of the requests.
func (s *Services) Status() subject.Status {
	return s.requests.Status("service events", s.queue.Pending())
}

// write makes the Event about a Service if one is due. It returns an error only if the API server does not respond.
func (s *Services) write(ctx context.Context, k evaluation.Key) (requested bool, err error) {
	s.mu.Lock()
	x := s.services[k]
	if x == nil || x.exceeds == x.said {
		s.mu.Unlock()
		return false, nil
	}
	now, tenant := s.now(), s.tenant(k.Namespace)
	wait := max(x.earlier.Add(spacing).Sub(now), s.allowed(tenant, now))
	was := *x
	s.mu.Unlock()
	if wait > 0 {
		s.queue.Later(k, wait)
		return false, nil
	}
	var uid string
	err = s.requests.Do(ctx, func(ctx context.Context) (err error) {
		if uid, err = s.api.ServiceUID(ctx, k.Namespace, k.Name); err != nil || !was.exceeds && uid != was.uid {
			return err
		}
		o := policystatus.Object{Key: k, APIVersion: "v1", Record: evaluation.Record{UID: uid}}
		return s.api.Record(ctx, o, event(k, was, uid))
	})
	switch {
	case errors.Is(err, policystatus.ErrGone):
		s.mu.Lock()
		if x := s.services[k]; x != nil && !x.exceeds {
			s.forget(k)
		}
		s.mu.Unlock()
		s.later(k)
		return true, nil
	case errors.Is(err, policystatus.ErrRefused), errors.Is(err, policystatus.ErrChanged),
		errors.Is(err, policystatus.ErrNoStatus):
		s.log.Warn("cannot make an Event about a Service", "service", k.Namespace+"/"+k.Name, log.Err(err))
		s.later(k)
		return true, nil
	case err != nil:
		return true, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.take(tenant, now)
	if x := s.services[k]; x != nil {
		x.said, x.uid, x.earlier = was.exceeds, uid, now
		switch {
		case x.exceeds != x.said:
			s.queue.Soon(k) // it changed meanwhile
		case !x.exceeds:
			x.changes++
		}
	}
	return true, nil
}

// later tries a Service again, if it is still known.
func (s *Services) later(k evaluation.Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.services[k] != nil {
		s.queue.Later(k, again)
	}
}

// event returns the Event about a Service. Its name depends on the Service, the state and the number of changes only: a
// process that does not know whether it has made the Event makes it again, and the API server keeps the existing one.
func event(k evaluation.Key, x service, uid string) policystatus.Event {
	e := policystatus.Event{Reason: ReasonWithin, Note: "within the share of its tenant"}
	if x.exceeds {
		e.Reason, e.Warning = ReasonExceeds, true
		e.Note = fmt.Sprintf("beyond the share of its tenant on %d of %d nodes (%s): %s; `sluice shares` shows the share",
			x.nodes.Count, max(x.nodes.All, x.nodes.Count), x.nodes.Names, x.nodes.Reason)
		e.Note = subject.Shorten(strings.ToValidUTF8(e.Note, "?"), maxNote)
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %d", uid, e.Reason, x.changes))
	e.Name = fmt.Sprintf("%s.%x", k.Name, sum[:8])
	return e
}

// allowed returns how long the tenant has to wait for its next Event. Called with mu held.
func (s *Services) allowed(t shares.Tenant, now time.Time) time.Duration {
	l := s.events[t]
	if l == nil {
		return 0
	}
	missing := 1 - l.TokensAt(now)
	if missing <= 0 {
		return 0
	}
	// A little more than the exact time, so that rounding does not cause another wait.
	return time.Duration(missing*float64(refill)/maxEvents) + time.Millisecond
}

// take counts an Event. Called with mu held.
func (s *Services) take(t shares.Tenant, now time.Time) {
	l := s.events[t]
	if l == nil {
		l = rate.NewLimiter(rate.Every(refill/maxEvents), maxEvents)
		s.events[t] = l
	}
	l.AllowN(now, 1)
}

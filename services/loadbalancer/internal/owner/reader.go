// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/record"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/source"
)

// Listed is a service with its state.
type Listed struct {
	Service   *service.Service
	Source    string
	Origin    string
	Manager   string
	Ready     int // number of endpoints
	Endpoints int
	Revision  uint64
	Updated   time.Time
	Notes     []string
	Enforced  bool
	Frontends []*frontend.Frontend // if requested; only those that the service has
	// ExceedingFrontends and ExceedingBackends are the numbers of frontends and backends that exceed the share of the
	// service's tenant.
	ExceedingFrontends, ExceedingBackends int
}

// Filter selects services. Empty fields match all.
type Filter struct {
	Namespace, Name string
	Manager         *string    // of managed.SourceGRPC
	Address         netip.Addr // address of a frontend
	WithFrontends   bool
}

func (f *Filter) takes(j *joined, n *compile.Node) bool {
	x := j.object
	if f.Namespace != "" && f.Namespace != j.name.Namespace || f.Name != "" && f.Name != j.name.Name ||
		f.Manager != nil && (!source.Of(x.by.Source).Calls || x.by.Manager != *f.Manager) {
		return false
	}
	return !f.Address.IsValid() || n.HasAddress(x.service, f.Address)
}

// Reader answers queries about the services. It also collects the problems of the process for the status. Its methods
// may be called concurrently.
type Reader struct {
	loop        *loop.Loop
	index       *index
	places      *places
	sources     *sources
	subscribers *Subscribers
	journal     *record.Journal
	problems    *problem.Set
}

// List returns the services that match the filter, sorted, and the objects whose newest version was not accepted.
func (r *Reader) List(ctx context.Context, f Filter) (list []Listed, refused []Refused, revision uint64, err error) {
	err = r.loop.Do(ctx, opRead, func() {
		var found []*joined
		for j := range r.index.all() {
			if j.object != nil && f.takes(j, &r.index.node) {
				found = append(found, j)
			}
		}
		slices.SortFunc(found, func(a, b *joined) int { return a.name.Compare(b.name) })
		for _, j := range found {
			list = append(list, r.listed(j, f.WithFrontends))
		}
		refused, revision = r.refused(f), r.index.revision
	})
	return list, refused, revision, err
}

// Get returns one service with its frontends.
func (r *Reader) Get(ctx context.Context, name service.Name) (out Listed, revision uint64, err error) {
	out, err = loop.Ask(ctx, r.loop, opRead, func() (Listed, error) {
		j := r.index.service(name)
		if j == nil || j.object == nil {
			return Listed{}, fmt.Errorf("%w: there is no service %s", failure.ErrNotFound, name)
		}
		revision = r.index.revision
		return r.listed(j, true), nil
	})
	return out, revision, err
}

// Find is like Get, without frontends and without an error if the service does not exist.
func (r *Reader) Find(ctx context.Context, name service.Name) (out Listed, found bool, err error) {
	err = r.loop.Do(ctx, opRead, func() {
		if j := r.index.service(name); j != nil && j.object != nil {
			out, found = r.listed(j, false), true
		}
	})
	return out, found, err
}

// Watch returns the hub that announces changed services. A reader calls Find to get a service.
func (r *Reader) Watch() *watch.Hub[service.Name, uint64] { return r.subscribers.watch }

func (r *Reader) listed(j *joined, frontends bool) Listed {
	x := j.object
	out := Listed{
		Service: x.service, Source: x.by.Source, Origin: x.by.Origin, Manager: x.by.Manager, Revision: j.revision,
		Updated: time.Unix(0, j.updated),
		Notes:   r.notes(j), Enforced: r.subscribers.enforced(j.name, j.revision),
	}
	exceeding := r.places.exceeding(j)
	out.ExceedingFrontends, out.ExceedingBackends = exceeding.frontends, exceeding.backends
	out.Endpoints, out.Ready = compile.Count(j.whole().Slices)
	if !frontends {
		return out
	}
	out.Frontends = r.index.held(j)
	return out
}

// maxNotes bounds the notes of a service in an answer.
const maxNotes = 50

// notes returns the messages to the author of a service.
func (r *Reader) notes(j *joined) []string {
	notes := compile.Notes(slices.Clone(j.object.remarks.get().notes))
	r.index.node.Notes(j.view(), j.share, &notes)
	notes = append(notes, r.places.exceeding(j).notes...)
	for _, k := range r.index.keys(j) {
		if w := r.index.claims.winner(k); w != j {
			notes = append(notes, fmt.Sprintf("%s belongs to service %s, which is older", compile.KeyText(k), w.name))
		}
	}
	for _, s := range r.subscribers.sorted() {
		if !s.Refuses(j.name) {
			continue
		}
		p := s.Progress()
		for _, k := range slices.SortedFunc(maps.Keys(p.Refusals), compile.CompareKeys) {
			if x := p.Refusals[k]; x.Service == j.name {
				notes = append(notes, fmt.Sprintf("%s does not enforce %s: %s", s.Name, compile.KeyText(k), x.Reason))
			}
		}
	}
	for _, x := range j.slices {
		for _, note := range x.remarks.get().notes {
			notes = append(notes, fmt.Sprintf("%s: %s", x.key(), note))
		}
	}
	if n := len(notes); n > maxNotes {
		notes = append(notes[:maxNotes], fmt.Sprintf("%d more notes are left out", n-maxNotes))
	}
	return notes
}

// refused returns the objects and files whose newest version is not applied, and the slices whose service is missing.
func (r *Reader) refused(f Filter) []Refused {
	if f.Name != "" || f.Manager != nil || f.Address.IsValid() {
		return nil
	}
	out := r.sources.refusals(f.Namespace)
	for j := range r.index.all() {
		if j.object != nil || f.Namespace != "" && j.name.Namespace != f.Namespace {
			continue
		}
		for _, x := range j.slices {
			why := fmt.Sprintf("its service %s is missing", j.name)
			if j.name.Name == "" {
				why = "it has no service name"
			}
			out = append(out, Refused{Key: x.key(), Source: x.by.Source, Origin: x.by.Origin, Err: why})
		}
	}
	slices.SortFunc(out, compareRefused)
	return out
}

// Local is a service with a health check port, and its state on this node.
type Local struct {
	Name service.Name
	Port uint16
	// Ready are the ready addresses on this node, sorted.
	Ready []netip.Addr
	// Enforced is the state of the subscribers: whether they enforce the revision at which the service got its first
	// ready address on this node.
	Enforced Enforcement
}

// Locals returns the services with health check ports, sorted by name.
func (r *Reader) Locals(ctx context.Context) (out []Local, err error) {
	err = r.loop.Do(ctx, opRead, func() {
		for j := range r.index.withHealthChecks() {
			l := Local{
				Name: j.name, Port: j.object.service.HealthCheckNodePort, Ready: r.index.node.LocalReady(j.view()),
				Enforced: NotEnforced,
			}
			if j.localSince != 0 {
				l.Enforced = r.subscribers.enforcement(j.name, j.localSince)
			}
			out = append(out, l)
		}
	})
	slices.SortFunc(out, func(a, b Local) int { return a.Name.Compare(b.Name) })
	return out, err
}

// LocalsChanged has a token when Locals may have changed.
func (r *Reader) LocalsChanged() <-chan struct{} { return r.subscribers.local }

// Report records a problem of another part of the process: what is its name, and why the reason. nil clears the
// problem.
func (r *Reader) Report(ctx context.Context, what string, why error) error {
	return r.loop.Do(ctx, opOther, func() { r.problems.Note(what, why) })
}

// Usage returns the tenants' use of the limits that they share.
func (r *Reader) Usage(ctx context.Context) ([]shares.Usage, error) {
	return loop.Ask(ctx, r.loop, opRead, func() ([]shares.Usage, error) {
		return r.places.usage(), nil
	})
}

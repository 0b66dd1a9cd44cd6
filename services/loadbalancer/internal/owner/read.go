// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"errors"
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
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/source"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/stream"
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
	// Frontends and backends that exceed the share of the service's tenant.
	ExceedingFrontends, ExceedingBackends int
}

// Filter selects services. Empty fields match all.
type Filter struct {
	Namespace, Name string
	Manager         *string    // of managed.SourceGRPC
	Address         netip.Addr // of a frontend
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

// List returns the services that match the filter, sorted, and the objects whose last version was
// not accepted.
func (o *Owner) List(ctx context.Context, f Filter) (list []Listed, refused []Refused, revision uint64, err error) {
	err = o.loop.Do(ctx, opRead, func() {
		var found []*joined
		for j := range o.index.all() {
			if j.object != nil && f.takes(j, &o.index.node) {
				found = append(found, j)
			}
		}
		slices.SortFunc(found, func(a, b *joined) int { return a.name.Compare(b.name) })
		for _, j := range found {
			list = append(list, o.listed(j, f.WithFrontends))
		}
		refused, revision = o.refused(f), o.index.revision
	})
	return list, refused, revision, err
}

// Get returns one service with its frontends.
func (o *Owner) Get(ctx context.Context, name service.Name) (out Listed, revision uint64, err error) {
	out, err = loop.Ask(ctx, o.loop, opRead, func() (Listed, error) {
		j := o.index.service(name)
		if j == nil || j.object == nil {
			return Listed{}, fmt.Errorf("%w: there is no service %s", failure.ErrNotFound, name)
		}
		revision = o.index.revision
		return o.listed(j, true), nil
	})
	return out, revision, err
}

// Find is Get without frontends, for services that may have been removed.
func (o *Owner) Find(ctx context.Context, name service.Name) (out Listed, found bool, err error) {
	err = o.loop.Do(ctx, opRead, func() {
		if j := o.index.service(name); j != nil && j.object != nil {
			out, found = o.listed(j, false), true
		}
	})
	return out, found, err
}

// Watch returns the hub of services; readers call Find for their content.
func (o *Owner) Watch() *watch.Hub[service.Name, uint64] { return o.subscribers.watch }

func (o *Owner) listed(j *joined, frontends bool) Listed {
	x := j.object
	out := Listed{
		Service: x.service, Source: x.by.Source, Origin: x.by.Origin, Manager: x.by.Manager, Revision: j.revision,
		Updated: time.Unix(0, j.updated),
		Notes:   o.notes(j), Enforced: o.subscribers.enforced(j.name, j.revision),
	}
	exceeding := o.places.exceeding(j)
	out.ExceedingFrontends, out.ExceedingBackends = exceeding.frontends, exceeding.backends
	out.Endpoints, out.Ready = compile.Count(j.whole().Slices)
	if !frontends {
		return out
	}
	out.Frontends = o.index.held(j)
	return out
}

// maxNotes bounds the notes of a service in an answer.
const maxNotes = 50

// notes returns the messages to the author of a service.
func (o *Owner) notes(j *joined) []string {
	notes := compile.Notes(slices.Clone(j.object.remarks.get().notes))
	o.index.node.Notes(j.view(), j.share, &notes)
	notes = append(notes, o.places.exceeding(j).notes...)
	for _, k := range o.index.keys(j) {
		if w := o.index.claims.winner(k); w != j {
			notes = append(notes, fmt.Sprintf("%s belongs to service %s, which is older", compile.KeyText(k), w.name))
		}
	}
	for _, s := range o.subscribers.sorted() {
		if !s.Refuses(j.name) {
			continue
		}
		p := s.Progress()
		for _, k := range slices.SortedFunc(maps.Keys(p.Refusals), compile.CompareKeys) {
			if r := p.Refusals[k]; r.Service == j.name {
				notes = append(notes, fmt.Sprintf("%s does not enforce %s: %s", s.Name, compile.KeyText(k), r.Reason))
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

// refused returns the objects and files whose last version is not applied, and the slices that wait for their service.
func (o *Owner) refused(f Filter) []Refused {
	if f.Name != "" || f.Manager != nil || f.Address.IsValid() {
		return nil
	}
	out := o.sources.refusals(f.Namespace)
	for j := range o.index.all() {
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

// MaxProblems bounds the problems in a status.
const MaxProblems = 100

// ProblemKind is the area of a problem.
type ProblemKind uint8

// The kinds.
const (
	ProblemService ProblemKind = iota
	ProblemStorage
)

// Problem is one problem in a status.
type Problem struct {
	Kind ProblemKind
	Text string
}

// Status is a summary.
type Status struct {
	Revision     uint64
	Services     int
	Slices       int
	Orphans      int
	Frontends    int
	Backends     int
	Refused      int
	Sources      []SourceStatus
	Subscribers  []SubscriberStatus
	Problems     []Problem // at most MaxProblems
	ProblemCount int
	Journal      int64 // size in bytes
	Contested    int   // frontends that several services want
	HealthChecks int   // health check ports that services ask for
	Limits       []SharedLimit
	// SystemRefused is why frontends of the cluster's own services are not applied; empty if all are.
	SystemRefused string
}

// SubscriberStatus is the state of a subscriber.
type SubscriberStatus struct {
	Name                string
	Connected, Enforces bool
	Revision, Ended     uint64
	Refusals            []string // at most 100
	Omitted             int
	Waiting             int // keys that changed and are not sent
}

// Status returns a summary of the state.
func (o *Owner) Status(ctx context.Context) (Status, error) {
	return loop.Ask(ctx, o.loop, opRead, func() (Status, error) { return o.status(), nil })
}

func (o *Owner) status() Status {
	counts := o.index.counts()
	out := Status{
		Revision: o.index.revision, Services: counts.services, Slices: counts.slices, Orphans: counts.orphans,
		Frontends: counts.frontends, Backends: counts.backends, Contested: counts.contested,
		HealthChecks: counts.healthChecks, Journal: o.journal.Size(),
	}
	note := func(kind ProblemKind, format string, args ...any) {
		if out.ProblemCount++; out.ProblemCount <= MaxProblems {
			out.Problems = append(out.Problems, Problem{kind, fmt.Sprintf(format, args...)})
		}
	}
	for part, err := range o.problems.All() {
		kind := ProblemService
		if part == problem.Storage {
			kind = ProblemStorage
		}
		note(kind, "%s: %v", part, err)
	}
	objects := make(map[creator]int)
	o.index.objects(func(x *object) {
		objects[creator{x.by.Source, x.by.Manager}]++
	})
	out.Sources = o.sources.status(objects)
	for _, s := range out.Sources {
		if s.Error != "" {
			note(ProblemService, "source %s: %s", s.Name, s.Error)
		}
	}
	refused := o.sources.refusals("")
	out.Refused = len(refused)
	for _, r := range refused {
		note(ProblemService, "%s %s is refused: %s", r.Source, r.Origin, r.Err)
	}
	for _, subscriber := range o.subscribers.sorted() {
		s := subscriberStatus(subscriber)
		for _, r := range s.Refusals {
			note(ProblemService, "%s does not enforce %s", s.Name, r)
		}
		out.Subscribers = append(out.Subscribers, s)
	}
	if f, ok := o.config.Tenants.(interface{ Failure() error }); ok && !o.config.Tenants.Complete() && f.Failure() != nil {
		note(ProblemService, "shares of tenants are not computed, because the Namespaces could not be listed: %v",
			f.Failure())
	}
	out.Limits = o.places.sharedLimits()
	for _, l := range out.Limits {
		if l.Asked > l.Used {
			note(ProblemService, "%s: %d tenants ask for %d of %d %s (limits.%s), and %d are refused: "+
				"see `sluice service list`", ExceedsShare, l.Exceeding, l.Asked, l.Size, l.Name, l.Name, l.Asked-l.Used)
		}
	}
	if out.SystemRefused = o.systemRefused(); out.SystemRefused != "" {
		note(ProblemService, "%s", out.SystemRefused)
	}
	return out
}

func subscriberStatus(s *stream.Subscriber) SubscriberStatus {
	p := s.Progress()
	out := SubscriberStatus{
		Name: s.Name, Connected: s.Session != 0, Enforces: s.Enforces, Revision: p.Enforced, Ended: p.Ended,
		Omitted: p.Omitted, Waiting: s.Waiting(),
	}
	for i, k := range slices.SortedFunc(maps.Keys(p.Refusals), compile.CompareKeys) {
		if i == 100 {
			out.Omitted += len(p.Refusals) - i
			break
		}
		out.Refusals = append(out.Refusals, fmt.Sprintf("%s of service %s: %s", compile.KeyText(k), p.Refusals[k].Service,
			p.Refusals[k].Reason))
	}
	return out
}

// Local is a service with a health check port, and its state on this node.
type Local struct {
	Name service.Name
	Port uint16
	// Ready are the ready addresses on this node, sorted.
	Ready []netip.Addr
	// Enforced reports whether subscribers have the revision since which there are such addresses.
	Enforced Enforcement
}

// Locals returns the services with health check ports, sorted by name.
func (o *Owner) Locals(ctx context.Context) (out []Local, err error) {
	err = o.loop.Do(ctx, opRead, func() {
		for j := range o.index.withHealthChecks() {
			l := Local{
				Name: j.name, Port: j.object.service.HealthCheckNodePort, Ready: o.index.node.LocalReady(j.view()),
				Enforced: NotEnforced,
			}
			if j.localSince != 0 {
				l.Enforced = o.subscribers.enforcement(j.name, j.localSince)
			}
			out = append(out, l)
		}
	})
	slices.SortFunc(out, func(a, b Local) int { return a.Name.Compare(b.Name) })
	return out, err
}

// LocalsChanged has a token when Locals may have changed.
func (o *Owner) LocalsChanged() <-chan struct{} { return o.subscribers.local }

// Report records a problem of another part of the process; nil clears it.
func (o *Owner) Report(ctx context.Context, what string, why error) error {
	return o.loop.Do(ctx, opOther, func() { o.problems.Note(what, why) })
}

// Usage returns the tenants' use of the limits that they share.
func (o *Owner) Usage(ctx context.Context) ([]shares.Usage, error) {
	return loop.Ask(ctx, o.loop, opRead, func() ([]shares.Usage, error) {
		return o.places.usage(), nil
	})
}

// systemRefused returns why frontends of the cluster's own services are not applied; empty if all are.
func (o *Owner) systemRefused() string {
	for _, l := range o.places.sharedLimits() {
		if l.System {
			return fmt.Sprintf("services of the cluster itself exceed their share of the limit of %s, %d (limits.%s)", l.Name,
				l.Size, l.Name)
		}
	}
	for _, s := range o.subscribers.sorted() {
		if !s.Enforces {
			continue
		}
		for k, r := range s.Progress().Refusals {
			if o.index.tenant(r.Service) == shares.System {
				return fmt.Sprintf("%s does not enforce %s of service %s: %s", s.Name, compile.KeyText(k), r.Service, r.Reason)
			}
		}
	}
	return ""
}

// SystemRefused returns why frontends of the cluster's own services are not applied; nil if all are.
func (o *Owner) SystemRefused(ctx context.Context) error {
	text, err := loop.Ask(ctx, o.loop, opRead, func() (string, error) { return o.systemRefused(), nil })
	if err == nil && text != "" {
		err = errors.New(text)
	}
	return err
}

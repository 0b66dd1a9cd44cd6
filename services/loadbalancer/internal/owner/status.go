// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"errors"
	"fmt"

	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
)

// MaxProblems limits the number of problems in a status.
const MaxProblems = 100

// ProblemKind tells which part of the service a problem concerns.
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
	Contested    int   // frontends that several services claim
	HealthChecks int   // number of health check ports of services
	Limits       []SharedLimit
	// SystemRefused is why frontends of the cluster's own services are not applied; empty if all are.
	SystemRefused string
}

// Status returns a summary of the state.
func (r *Reader) Status(ctx context.Context) (Status, error) {
	return loop.Ask(ctx, r.loop, opRead, func() (Status, error) { return r.status(), nil })
}

func (r *Reader) status() Status {
	counts := r.index.counts()
	out := Status{
		Revision: r.index.revision, Services: counts.services, Slices: counts.slices, Orphans: counts.orphans,
		Frontends: counts.frontends, Backends: counts.backends, Contested: counts.contested,
		HealthChecks: counts.healthChecks, Journal: r.journal.Size(),
	}
	note := func(kind ProblemKind, format string, args ...any) {
		if out.ProblemCount++; out.ProblemCount <= MaxProblems {
			out.Problems = append(out.Problems, Problem{kind, fmt.Sprintf(format, args...)})
		}
	}
	for part, err := range r.problems.All() {
		kind := ProblemService
		if part == problem.Storage {
			kind = ProblemStorage
		}
		note(kind, "%s: %v", part, err)
	}
	objects := make(map[creator]int)
	r.index.objects(func(x *object) {
		objects[creator{x.by.Source, x.by.Manager}]++
	})
	out.Sources = r.sources.status(objects)
	for _, s := range out.Sources {
		if s.Error != "" {
			note(ProblemService, "source %s: %s", s.Name, s.Error)
		}
	}
	refused := r.sources.refusals("")
	out.Refused = len(refused)
	for _, x := range refused {
		note(ProblemService, "%s %s is refused: %s", x.Source, x.Origin, x.Err)
	}
	out.Subscribers = r.subscribers.status()
	for _, s := range out.Subscribers {
		for _, text := range s.Refusals {
			note(ProblemService, "%s does not enforce %s", s.Name, text)
		}
	}
	if f, ok := r.index.tenants.(interface{ Failure() error }); ok && !r.index.tenants.Complete() && f.Failure() != nil {
		note(ProblemService, "shares of tenants are not computed, because the Namespaces could not be listed: %v",
			f.Failure())
	}
	out.Limits = r.places.sharedLimits()
	for _, l := range out.Limits {
		if l.Asked > l.Used {
			note(ProblemService, "%s: %d tenants need %d of %d %s (limits.%s), and %d are refused: "+
				"see `sluice service list`", ExceedsShare, l.Exceeding, l.Asked, l.Size, l.Name, l.Name, l.Asked-l.Used)
		}
	}
	if out.SystemRefused = r.systemRefused(); out.SystemRefused != "" {
		note(ProblemService, "%s", out.SystemRefused)
	}
	return out
}

// systemRefused returns why frontends of the cluster's own services are not applied; empty if all are.
func (r *Reader) systemRefused() string {
	for _, l := range r.places.sharedLimits() {
		if l.System {
			return fmt.Sprintf("services of the cluster itself exceed their share of the limit of %s, %d (limits.%s)", l.Name,
				l.Size, l.Name)
		}
	}
	for _, s := range r.subscribers.sorted() {
		if !s.Enforces {
			continue
		}
		for k, x := range s.Progress().Refusals {
			if r.index.tenant(x.Service) == shares.System {
				return fmt.Sprintf("%s does not enforce %s of service %s: %s", s.Name, compile.KeyText(k), x.Service, x.Reason)
			}
		}
	}
	return ""
}

// SystemRefused returns why frontends of the cluster's own services are not applied; nil if all are.
func (r *Reader) SystemRefused(ctx context.Context) error {
	text, err := loop.Ask(ctx, r.loop, opRead, func() (string, error) { return r.systemRefused(), nil })
	if err == nil && text != "" {
		err = errors.New(text)
	}
	return err
}

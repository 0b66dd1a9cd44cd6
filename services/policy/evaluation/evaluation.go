// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package evaluation computes how the nodes of a cluster treat the policies of its Kubernetes API server.
//
// It uses the watch, the decoders and the tenant shares of sluice-policy, but has no endpoints. Therefore the status
// that sluice-controller writes for a policy agrees with `sluice policy list` on each node. Other processes import no
// other package of sluice-policy.
package evaluation

import (
	"context"
	"log/slog"
	"sync"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/kube/tenants"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/source/kubernetes"
)

// Types of the policy service.
type (
	// Key identifies an object.
	Key = policy.Key
	// Object is one version of an object, with its manifest.
	Object = policy.Written
	// Record contains data of an object in the API server that is not in its manifest.
	Record = policy.Record
	// Notes are remarks for the author of an accepted object.
	Notes = manifest.Notes
	// Note is one of the Notes.
	Note = manifest.Note
	// Outcome is the result of evaluating an object.
	Outcome = owner.Judged
	// Sink receives the objects of the API server.
	Sink = kubernetes.Sink
	// Kinds delivers the kinds of policy that one process has found in the API server for all processes.
	Kinds = kubernetes.Kinds
	// Discovery queries which kinds of policy an API server has.
	Discovery = kubernetes.Discovery
)

// The kinds of notes.
const (
	// NoteUnsupported: a field is not supported, and the rule or policy with the field allows less than written.
	NoteUnsupported = manifest.NoteUnsupported
	// NoteCanonical: a value was normalised to another spelling.
	NoteCanonical = manifest.NoteCanonical
	// NoteIsolates: the object could not be converted; Outcome.Broken has the reason.
	NoteIsolates = manifest.NoteIsolates
	// NoteSelectsNothing: no endpoint is selected.
	NoteSelectsNothing = manifest.NoteSelectsNothing
	// NoteNoDNSRule: the policy allows DNS names, and no DNS rule selects its endpoints.
	NoteNoDNSRule = manifest.NoteNoDNSRule
	// NoteNoEffect: a field is not supported, and no verdict depends on it.
	NoteNoEffect = manifest.NoteNoEffect
)

// NodeStorage is the key under which a node reports its disk among the policies.
var NodeStorage = policy.NodeStorage

// Resource returns the name of a kind in the paths of an API server.
func Resource(kind string) string { return kubernetes.Resource(kind) }

// NewDiscovery returns a Discovery for an API server.
func NewDiscovery(api *kube.Client) (*Discovery, error) { return kubernetes.NewDiscovery(api) }

// Evaluator evaluates the policies of an API server, and keeps the outcome of each. It implements Sink.
type Evaluator struct {
	owner   *owner.Owner
	objects *owner.Objects
	api     *kube.Client
	tenants *tenants.Set
	kinds   Kinds
	log     *slog.Logger
}

// Open loads the state of an earlier run from dir. kinds delivers the kinds of policy that other processes have found.
// If it is nil, the evaluator queries the API server itself.
func Open(s Settings, dir string, api *kube.Client, kinds Kinds, l *slog.Logger) (*Evaluator, error) {
	e := &Evaluator{api: api, kinds: kinds, log: l}
	e.tenants = tenants.New(s.Shares.Settings(), func() { e.owner.TenantsChanged() }) // while Run runs
	var err error
	e.owner, err = owner.New(s.owner(e.tenants, l), dir, []string{managed.SourceKubernetes})
	if err != nil {
		return nil, err
	}
	e.objects = e.owner.Objects(managed.SourceKubernetes)
	return e, nil
}

// Apply implements Sink. The methods of Sink must be called by one goroutine.
func (e *Evaluator) Apply(ctx context.Context, c watch.Changes[Key, Object]) error {
	return e.objects.Apply(ctx, c)
}

// Complete implements Sink.
func (e *Evaluator) Complete(ctx context.Context, listed map[Key]struct{}) error {
	return e.objects.Complete(ctx, listed)
}

// Failed implements Sink.
func (e *Evaluator) Failed(ctx context.Context, why error) error { return e.objects.Failed(ctx, why) }

// Held implements Sink.
func (e *Evaluator) Held(ctx context.Context) ([]Key, error) { return e.objects.Held(ctx) }

// Outcomes returns the outcomes of objects that were applied.
func (e *Evaluator) Outcomes(ctx context.Context, keys []Key) (map[Key]Outcome, error) {
	return e.objects.Judged(ctx, keys)
}

// Tenant returns the tenant of the objects in a namespace.
func (e *Evaluator) Tenant(namespace string) shares.Tenant { return e.tenants.Of(namespace) }

// Ready returns a channel that is closed once all policies have been listed, or immediately if the state of an earlier
// run was loaded.
func (e *Evaluator) Ready() <-chan struct{} { return e.owner.Ready() }

// Run passes the objects of the API server, with their records, to a sink until ctx ends. The sink must pass the
// objects on to the Evaluator.
func (e *Evaluator) Run(ctx context.Context, to Sink) error {
	source := kubernetes.New(e.api, to, e.log)
	source.Records, source.Kinds = true, e.kinds
	e.owner.OnAgain(source.Again)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var parts sync.WaitGroup
	failed := make(chan error, 3)
	for _, run := range []func(context.Context) error{
		e.owner.Run, source.Run, func(ctx context.Context) error { return e.tenants.Follow(ctx, e.api, e.log) },
	} {
		parts.Go(func() {
			failed <- run(ctx)
			stop()
		})
	}
	parts.Wait()
	for range cap(failed) {
		if err := <-failed; err != nil {
			return err
		}
	}
	return nil
}

// Close releases the state directory. Run must have returned.
func (e *Evaluator) Close() error { return e.owner.Close() }

var _ Sink = (*Evaluator)(nil)

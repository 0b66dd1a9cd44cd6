// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kubernetes is a source of services: the Services and EndpointSlices of a Kubernetes API
// server, and the zone of the node.
//
// Each kind is listed and watched separately. The source keeps no objects; the sink stores them. Objects of an earlier
// run that no longer exist in the API server are deleted once both kinds have been listed.
package kubernetes

import (
	"context"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-net/sluice/kit/source"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// Resource names in the paths of an API server.
const (
	kindServices = "services"
	kindSlices   = "endpointslices"
	kindNodes    = "nodes"
)

// ours selects the objects that kube-proxy handles by default. It excludes services of another proxy and slices of
// headless services, which have a label.
const ours = "!service.kubernetes.io/service-proxy-name,!" + corev1.IsHeadlessService

// Sink receives the objects.
type Sink = watch.Sink[service.ObjectKey, owner.Given]

// Source watches an API server. All fields except Node and SetZone are required.
type Source struct {
	Client *kube.Client
	Sink   Sink
	Log    *slog.Logger
	// Node is the name of the Node whose zone is passed to SetZone; empty: none.
	Node    string
	SetZone func(context.Context, string) error
}

// Run watches until ctx ends; it then returns nil.
func (s *Source) Run(ctx context.Context) error {
	core, err := s.Client.REST(corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return err
	}
	discovery, err := s.Client.REST(discoveryv1.SchemeGroupVersion, discoveryv1.AddToScheme)
	if err != nil {
		return err
	}
	kinds := []string{kindServices, kindSlices}
	if s.Node != "" {
		kinds = append(kinds, kindNodes)
	}
	joint := source.New(s.Sink, kinds, source.Options{
		RetryMin: 50 * time.Millisecond, RetryMax: retryMax, Refresh: 30 * time.Second,
		Log: s.Log.With("source", "kubernetes"),
	})
	all, ctx := errgroup.WithContext(ctx)
	all.Go(func() error { return joint.Run(ctx) })
	all.Go(func() error {
		return kube.Follow(ctx, s.Client, kube.Kind[owner.Given]{
			Client: core, Resource: kindServices, Labels: ours, Type: &corev1.Service{},
			Trim: func(o runtime.Object) owner.Given { return given(manifest.OfService(serviceOf(o.(*corev1.Service)))) },
		}, &handler{kindServices, service.KindService, joint}, s.Log)
	})
	all.Go(func() error {
		return kube.Follow(ctx, s.Client, kube.Kind[owner.Given]{
			Client: discovery, Resource: kindSlices, Labels: ours, Type: &discoveryv1.EndpointSlice{},
			Trim: func(o runtime.Object) owner.Given {
				return given(manifest.OfSlice(sliceOf(o.(*discoveryv1.EndpointSlice))))
			},
		}, &handler{kindSlices, service.KindSlice, joint}, s.Log)
	})
	if s.Node != "" {
		all.Go(func() error {
			return kube.Follow(ctx, s.Client, kube.Kind[string]{
				Client: core, Resource: kindNodes, Fields: "metadata.name=" + s.Node, Type: &corev1.Node{}, Last: true,
				Trim: func(o runtime.Object) string { return o.(*corev1.Node).Labels[corev1.LabelTopologyZone] },
			}, &zone{joint: joint, set: func(zone string) error { return s.SetZone(ctx, zone) }, done: ctx.Done()}, s.Log)
		})
	}
	return all.Wait()
}

// retryMax is the longest pause after a failure.
const retryMax = 5 * time.Second

func given(o manifest.Object, err error) owner.Given { return owner.Given{Object: o, Err: err} }

// handler passes the objects of one kind to the joint.
type handler struct {
	resource string
	kind     service.Kind
	joint    *source.Joint[service.ObjectKey, owner.Given]
}

func (h *handler) key(n types.NamespacedName) service.ObjectKey {
	return service.ObjectKey{Kind: h.kind, Name: service.Name(n)}
}

// Upsert implements kube.Handler.
func (h *handler) Upsert(n types.NamespacedName, g owner.Given) { h.joint.Upsert(h.key(n), g) }

// Delete implements kube.Handler.
func (h *handler) Delete(n types.NamespacedName) { h.joint.Delete(h.key(n)) }

// Complete implements kube.Handler.
func (h *handler) Complete() { h.joint.Complete(h.resource) }

// Failed implements kube.Handler.
func (h *handler) Failed(err error) { h.joint.Failed(h.resource, err) }

// zone passes the zone of the node on. If the Node is deleted, its zone is kept.
type zone struct {
	joint *source.Joint[service.ObjectKey, owner.Given]
	set   func(string) error
	done  <-chan struct{}
}

// Upsert implements kube.Handler. It blocks until the zone is stored. This delays no other object, because only one
// Node is watched.
func (z *zone) Upsert(_ types.NamespacedName, name string) {
	for err := z.set(name); err != nil; err = z.set(name) {
		z.joint.Failed(kindNodes, err)
		select {
		case <-time.After(retryMax):
		case <-z.done:
			return
		}
		z.joint.Failed(kindNodes, nil)
	}
}

// Delete implements kube.Handler.
func (*zone) Delete(types.NamespacedName) {}

// Complete implements kube.Handler.
func (z *zone) Complete() { z.joint.Complete(kindNodes) }

// Failed implements kube.Handler.
func (z *zone) Failed(err error) { z.joint.Failed(kindNodes, err) }

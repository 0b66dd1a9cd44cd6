// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kubernetes follows the Nodes of a Kubernetes API server by their
// metadata alone.
package kubernetes

import (
	"context"
	"log/slog"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/model/podrange"
	"github.com/sluice-net/sluice/services/policy/internal/departed"
	"github.com/sluice-net/sluice/services/policy/internal/shortage"
)

// requestTimeout is of one request.
const requestTimeout = 10 * time.Second

// API is a departed.API.
type API struct {
	api    *kube.Client
	client *rest.RESTClient
}

// New returns an API that a client reaches.
func New(api *kube.Client) (*API, error) {
	client, err := kube.MetadataClient(api.Config)
	if err != nil {
		return nil, err
	}
	return &API{api: api, client: client}, nil
}

// Exists implements departed.API. It lists, which the account may do anyway, from
// the newest state that the servers have.
func (a *API) Exists(ctx context.Context, name string) (bool, error) {
	var list metav1.PartialObjectMetadataList
	err := a.client.Get().Resource("nodes").Param("fieldSelector", "metadata.name="+name).Timeout(requestTimeout).
		Do(ctx).Into(&list)
	return len(list.Items) > 0, err
}

// Follow tells n and s of the Nodes until ctx ends.
func (a *API) Follow(ctx context.Context, n *departed.Nodes, s *shortage.Nodes, l *slog.Logger) error {
	return kube.Follow(ctx, a.api, kube.Kind[node]{
		Client: a.client, Resource: "nodes", Type: &metav1.PartialObjectMetadata{}, Trim: trim,
	}, handler{n, s}, l)
}

// node is what is kept of a Node.
type node struct{ uid, addresses string }

// trim implements kube.Kind.
func trim(o runtime.Object) node {
	m := o.(*metav1.PartialObjectMetadata)
	return node{uid: string(m.UID), addresses: m.Annotations[podrange.Annotation]}
}

type handler struct {
	*departed.Nodes
	shortage *shortage.Nodes
}

// Upsert implements kube.Handler.
func (h handler) Upsert(name types.NamespacedName, n node) {
	h.Nodes.Upsert(name.Name)
	h.shortage.Upsert(name.Name, n.uid, n.addresses)
}

// Delete implements kube.Handler.
func (h handler) Delete(name types.NamespacedName) {
	h.Nodes.Delete(name.Name)
	h.shortage.Delete(name.Name)
}

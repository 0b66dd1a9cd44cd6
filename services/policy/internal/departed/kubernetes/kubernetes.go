// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kubernetes follows the Nodes of a Kubernetes API server, and keeps of each its UID, an annotation and
// its podCIDRs.
package kubernetes

import (
	"context"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/model/podrange"
	"github.com/sluice-net/sluice/services/policy/internal/departed"
	"github.com/sluice-net/sluice/services/policy/internal/podcidrs"
	"github.com/sluice-net/sluice/services/policy/internal/shortage"
)

// requestTimeout is of one request.
const requestTimeout = 10 * time.Second

// API is a departed.API.
type API struct {
	api      *kube.Client
	metadata *rest.RESTClient
	client   *rest.RESTClient // of whole objects, encoded as protobuf
}

// New returns an API that a client reaches.
func New(api *kube.Client) (*API, error) {
	metadata, err := kube.MetadataClient(api.Config)
	if err != nil {
		return nil, err
	}
	client, err := api.REST(corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return nil, err
	}
	return &API{api: api, metadata: metadata, client: client}, nil
}

// Exists implements departed.API. It lists, which the account may do anyway, from
// the newest state that the servers have.
func (a *API) Exists(ctx context.Context, name string) (bool, error) {
	var list metav1.PartialObjectMetadataList
	err := a.metadata.Get().Resource("nodes").Param("fieldSelector", "metadata.name="+name).Timeout(requestTimeout).
		Do(ctx).Into(&list)
	return len(list.Items) > 0, err
}

// Follow tells n, s and p of the Nodes until ctx ends.
func (a *API) Follow(
	ctx context.Context, n *departed.Nodes, s *shortage.Nodes, p *podcidrs.Nodes, l *slog.Logger,
) error {
	return kube.Follow(ctx, a.api, kube.Kind[node]{
		Client: a.client, Resource: "nodes", Type: &corev1.Node{}, Trim: trim,
	}, handler{departed: n, shortage: s, podCIDRs: p}, l)
}

// node is what is kept of a Node.
type node struct {
	uid, addresses string
	podCIDRs       []string
}

// trim implements kube.Kind.
func trim(o runtime.Object) node {
	n := o.(*corev1.Node)
	kept := node{uid: string(n.UID), addresses: n.Annotations[podrange.Annotation], podCIDRs: n.Spec.PodCIDRs}
	if len(kept.podCIDRs) == 0 && n.Spec.PodCIDR != "" {
		kept.podCIDRs = []string{n.Spec.PodCIDR}
	}
	return kept
}

// handler implements kube.Handler.
type handler struct {
	departed *departed.Nodes
	shortage *shortage.Nodes
	podCIDRs *podcidrs.Nodes
}

func (h handler) Upsert(name types.NamespacedName, n node) {
	h.departed.Upsert(name.Name)
	h.shortage.Upsert(name.Name, n.uid, n.addresses)
	h.podCIDRs.Upsert(name.Name, n.podCIDRs)
}

func (h handler) Delete(name types.NamespacedName) {
	h.departed.Delete(name.Name)
	h.shortage.Delete(name.Name)
	h.podCIDRs.Delete(name.Name)
}

func (h handler) Complete() {
	h.departed.Complete()
	h.podCIDRs.Complete()
}

func (h handler) Failed(err error) {
	h.departed.Failed(err)
	h.podCIDRs.Failed(err)
}

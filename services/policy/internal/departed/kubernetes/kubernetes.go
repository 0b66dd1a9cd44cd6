// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kubernetes follows the Nodes of a Kubernetes API server by their
// metadata alone.
package kubernetes

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
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
type API struct{ client *rest.RESTClient }

// New returns an API of a client's configuration.
func New(config *rest.Config) (*API, error) {
	gv := schema.GroupVersion{Version: "v1"}
	s := runtime.NewScheme()
	if err := metav1.AddMetaToScheme(s); err != nil {
		return nil, err
	}
	metav1.AddToGroupVersion(s, gv)
	c := rest.CopyConfig(config)
	c.GroupVersion, c.APIPath = &gv, "/api"
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return metadata{next} })
	c.NegotiatedSerializer = serializer.NewCodecFactory(s).WithoutConversion()
	client, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, err
	}
	return &API{client: client}, nil
}

// metadata asks for the metadata of objects: of a list, or of each object of a watch.
// An API server refuses the one for the other.
type metadata struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (m metadata) RoundTrip(r *http.Request) (*http.Response, error) {
	kind := "PartialObjectMetadataList"
	if r.URL.Query().Get("watch") != "" {
		kind = "PartialObjectMetadata"
	}
	r = r.Clone(r.Context())
	r.Header.Set("Accept", "application/json;as="+kind+";g=meta.k8s.io;v=v1")
	return m.next.RoundTrip(r)
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
	return kube.Follow(ctx, kube.Kind[node]{
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

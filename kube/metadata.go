// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
)

// MetadataClient returns a client of the core group that fetches only the metadata of objects. A Kind that uses it
// has the type metav1.PartialObjectMetadata.
func MetadataClient(config *rest.Config) (*rest.RESTClient, error) {
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
	return rest.RESTClientFor(c)
}

// metadata requests the metadata of a list, or of each object of a watch. An API server rejects either media type for
// the other request.
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

// WrappedRoundTripper lets client-go close idle connections.
func (m metadata) WrappedRoundTripper() http.RoundTripper { return m.next }

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

// ObjectClient returns a client for one kind in one version, which decodes JSON into the types of object and list.
// Kinds of a CustomResourceDefinition have no other encoding. It sends its requests with client.
func ObjectClient(
	config *rest.Config, client *http.Client, kind schema.GroupVersionKind, object, list runtime.Object,
) (*rest.RESTClient, error) {
	gv := kind.GroupVersion()
	s := runtime.NewScheme()
	s.AddKnownTypeWithName(kind, object)
	s.AddKnownTypeWithName(gv.WithKind(kind.Kind+"List"), list)
	metav1.AddToGroupVersion(s, gv)
	c := rest.CopyConfig(config)
	c.APIPath, c.GroupVersion = "/apis", &gv
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	c.NegotiatedSerializer = serializer.NewCodecFactory(s).WithoutConversion()
	return rest.RESTClientForConfigAndClient(c, client)
}

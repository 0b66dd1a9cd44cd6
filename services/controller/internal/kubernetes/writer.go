// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kubernetes writes the status of policies, and Events, to a Kubernetes API server, and follows its Nodes.
package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/controller/internal/policystatus"
	"github.com/sluice-net/sluice/services/controller/internal/poolevents"
	"github.com/sluice-net/sluice/services/policy/evaluation"
)

// requestTimeout limits a single request.
const requestTimeout = 10 * time.Second

// Writer implements policystatus.API, poolevents.API and serviceevents.API. All its requests share one rate limit, so
// that a change of many objects does not overload the API server.
type Writer struct {
	client   *rest.RESTClient
	instance string
	log      *slog.Logger
}

// NewWriter returns a Writer for the API server of config. instance is the reporting instance of its Events.
func NewWriter(config *rest.Config, instance string, l *slog.Logger) (*Writer, error) {
	c := rest.CopyConfig(config)
	c.GroupVersion, c.APIPath = &schema.GroupVersion{}, "/apis"
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	c.NegotiatedSerializer = serializer.NewCodecFactory(runtime.NewScheme()).WithoutConversion()
	client, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, err
	}
	return &Writer{client: client, instance: instance, log: l}, nil
}

// SetConditions implements policystatus.API. It sends a merge patch of the whole list with a resource version.
// Server-side apply is not used: unless the schema has the list merged by type, it would replace the conditions of
// other controllers.
func (w *Writer) SetConditions(ctx context.Context, o policystatus.Object, conditions []byte) error {
	body, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": o.ResourceVersion, "uid": o.UID},
		"status":   map[string]any{"conditions": json.RawMessage(conditions)},
	})
	if err != nil {
		return err
	}
	gv, err := schema.ParseGroupVersion(o.APIVersion)
	if err != nil {
		return err
	}
	path := []string{"/apis", gv.Group, gv.Version}
	if o.Namespace != "" {
		path = append(path, "namespaces", o.Namespace)
	}
	path = append(path, evaluation.Resource(o.Kind), o.Name, "status")
	request := w.client.Patch(types.MergePatchType).AbsPath(path...).Timeout(requestTimeout).Body(body)
	return explained(request.Do(ctx).Error())
}

// Record implements policystatus.API.
func (w *Writer) Record(ctx context.Context, o policystatus.Object, e policystatus.Event) error {
	kind := corev1.EventTypeNormal
	if e.Warning {
		kind = corev1.EventTypeWarning
	}
	return explained(w.post(ctx, &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: o.Namespace, Name: e.Name},
		Type:       kind, Reason: e.Reason, Note: e.Note, Action: "Judge",
		Regarding: corev1.ObjectReference{
			APIVersion: o.APIVersion, Kind: o.Kind, Namespace: o.Namespace, Name: o.Name,
			UID: types.UID(o.UID), ResourceVersion: o.ResourceVersion,
		},
	}))
}

// ServiceUID implements serviceevents.API.
func (w *Writer) ServiceUID(ctx context.Context, namespace, name string) (string, error) {
	body, err := w.client.Get().AbsPath("/api/v1/namespaces", namespace, "services", name).Timeout(requestTimeout).
		Do(ctx).Raw()
	if err != nil {
		return "", explained(err)
	}
	var o metav1.PartialObjectMetadata
	if err := json.Unmarshal(body, &o); err != nil {
		return "", fmt.Errorf("service %s/%s: %w", namespace, name, err)
	}
	return string(o.UID), nil
}

// RecordOnNode implements poolevents.API. If the API server rejects an Event, the error is logged and not returned,
// because the API server would reject a retry, too.
func (w *Writer) RecordOnNode(ctx context.Context, e poolevents.Event) error {
	kind := corev1.EventTypeNormal
	if e.Warning {
		kind = corev1.EventTypeWarning
	}
	err := explained(w.post(ctx, &eventsv1.Event{
		// The API server requires this namespace for Events on cluster-wide objects.
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: e.Name},
		Type:       kind, Reason: e.Reason, Note: e.Note, Action: e.Action(),
		Regarding: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: e.Node, UID: types.UID(e.UID)},
	}))
	if errors.Is(err, policystatus.ErrRefused) {
		w.log.Warn("the API server rejected an Event on a Node", "node", e.Node, log.Err(err))
		return nil
	}
	return err
}

// post creates an Event. An existing Event of the same name is kept, without an error.
func (w *Writer) post(ctx context.Context, e *eventsv1.Event) error {
	e.TypeMeta = metav1.TypeMeta{APIVersion: eventsv1.SchemeGroupVersion.String(), Kind: "Event"}
	e.EventTime, e.ReportingController, e.ReportingInstance = metav1.NowMicro(), "sluice.io/status", w.instance
	body, err := json.Marshal(e)
	if err != nil {
		return err
	}
	path := []string{"/apis/events.k8s.io/v1/namespaces", e.Namespace, "events"}
	err = w.client.Post().AbsPath(path...).Timeout(requestTimeout).Body(body).Do(ctx).Error()
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// explained converts the response of an API server to an error of package policystatus.
func explained(err error) error {
	status, answered := err.(apierrors.APIStatus) //nolint:errorlint // client-go returns this type unwrapped
	if err == nil || !answered {
		return err
	}
	s := status.Status()
	var kind error
	switch {
	case s.Code == http.StatusNotFound && (s.Details == nil || s.Details.Kind == "" || s.Details.Name == ""):
		kind = policystatus.ErrNoStatus // for a missing object, the response names the object
	case s.Code == http.StatusNotFound:
		kind = policystatus.ErrGone
	case s.Code == http.StatusConflict:
		kind = policystatus.ErrChanged
	case s.Code == http.StatusTooManyRequests || s.Code >= http.StatusInternalServerError:
		return err
	default:
		kind = policystatus.ErrRefused
	}
	return fmt.Errorf("%w: %w", kind, err)
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/url"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kit/source"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// watched is one kind, and the kube.Handler of its objects.
type watched struct {
	kind, group, resource string
	records               bool

	joint   *source.Joint[policy.Key, policy.Written]
	missing func() // called if the API server does not know the watched version
	log     *slog.Logger

	version string // the watched version; empty: none
	stop    func() // ends the watch and waits for it
	absent  int    // number of consecutive queries that did not find the kind

	// keys contains the objects of this kind in the joint sink, and the objects that an earlier run has stored. While
	// a watch runs, only the goroutine of the watch uses keys.
	keys map[policy.Key]struct{}
	// listed contains the objects that were reported since the watch started; nil once the listing is complete.
	listed map[policy.Key]struct{}
}

// watch ends the current watch and starts to watch a version.
func (k *watched) watch(ctx context.Context, api *kube.Client, client *http.Client, version string) error {
	k.end()
	c, err := restFor(api.Config, client, version, k.kind)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	k.listed = make(map[policy.Key]struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Follow always returns nil.
		_ = kube.Follow(ctx, api, kube.Kind[policy.Written]{
			Client: c, Resource: k.resource, Type: &object{}, First: true,
			Trim: func(o runtime.Object) policy.Written {
				w := o.(*object).written(k.kind, version)
				if k.records {
					w.Record = o.(*object).record()
				}
				return w
			},
		}, k, k.log)
	}()
	k.version, k.stop = version, func() { cancel(); <-done }
	return nil
}

// end ends the watch.
func (k *watched) end() {
	if k.stop != nil {
		k.stop()
	}
	k.version, k.stop = "", nil
}

// gone removes all objects, because the API server no longer has the kind. It returns their number.
func (k *watched) gone() int {
	k.end()
	n := len(k.keys)
	k.listed = make(map[policy.Key]struct{})
	k.Complete()
	return n
}

// Upsert implements kube.Handler.
func (k *watched) Upsert(_ types.NamespacedName, w policy.Written) {
	k.keys[w.Key] = struct{}{}
	if k.listed != nil {
		k.listed[w.Key] = struct{}{}
	}
	k.joint.Upsert(w.Key, w)
}

// Delete implements kube.Handler.
func (k *watched) Delete(name types.NamespacedName) {
	k.remove(policy.Key{Kind: k.kind, Namespace: name.Namespace, Name: name.Name})
}

func (k *watched) remove(key policy.Key) {
	delete(k.keys, key)
	k.joint.Delete(key)
}

// Complete implements kube.Handler.
func (k *watched) Complete() {
	if k.listed != nil { // if listed is nil, each deletion was reported
		for key := range k.keys {
			if _, ok := k.listed[key]; !ok {
				k.remove(key)
			}
		}
		k.listed = nil
	}
	k.joint.Complete(k.resource)
}

// Failed implements kube.Handler.
func (k *watched) Failed(err error) {
	k.joint.Failed(k.resource, plain(err))
	if apierrors.IsNotFound(err) {
		k.missing()
	}
}

// plain removes the URL from an error. Each kind has another URL, so with it the same error would be reported once
// per kind.
func plain(err error) error {
	var restored *kube.RestoredError
	var u *url.Error
	if !errors.As(err, &restored) && errors.As(err, &u) {
		return u.Err
	}
	return err
}

func groupVersion(version string) schema.GroupVersion {
	gv, _ := schema.ParseGroupVersion(version) // the versions in this package have at most one slash
	return gv
}

// restFor returns a client for one kind in one version. Policies are stored as text, so it uses JSON.
func restFor(config *rest.Config, client *http.Client, version, kind string) (*rest.RESTClient, error) {
	return kube.ObjectClient(config, client, groupVersion(version).WithKind(kind), &object{}, &objects{})
}

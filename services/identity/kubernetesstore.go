// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/store"
)

// token reads the token by which this node enrols, which kubelet replaces.
func (c EtcdConfig) token() (string, error) {
	text, err := os.ReadFile(c.StoreToken)
	if err != nil {
		return "", fmt.Errorf("etcd.storeToken: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}

// followStore tells the Renewer what the store publishes in Kubernetes.
func followStore(p *process.Process, client *kube.Client, namespace string, r *store.Renewer) error {
	core, err := client.REST(corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return err
	}
	kind := kube.Kind[map[string]string]{
		Client: core, Resource: "configmaps", Namespace: namespace, Fields: "metadata.name=" + store.ObjectName,
		Type: &corev1.ConfigMap{}, Trim: func(o runtime.Object) map[string]string { return o.(*corev1.ConfigMap).Data },
		First: true,
	}
	p.Go("place of the store", func(ctx context.Context) error {
		return kube.Follow(ctx, client, kind, storePublisher{r, p.Log}, p.Log)
	})
	return nil
}

// storePublisher passes on what the store publishes. A deletion changes nothing: the store writes the ConfigMap again.
type storePublisher struct {
	*store.Renewer
	log *slog.Logger
}

// Upsert implements kube.Handler.
func (p storePublisher) Upsert(_ types.NamespacedName, data map[string]string) {
	at, err := store.ParsePublished(data)
	if err != nil {
		p.log.Error("the ConfigMap of the store cannot be read", "name", store.ObjectName, log.Err(err))
		return
	}
	p.Publish(at)
}

// Delete implements kube.Handler.
func (storePublisher) Delete(types.NamespacedName) {}

// Complete implements kube.Handler.
func (storePublisher) Complete() {}

// Failed implements kube.Handler.
func (storePublisher) Failed(error) {}

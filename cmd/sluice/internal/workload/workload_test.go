// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package workload

import (
	"testing"
)

func TestLabelsAreShortenedForPeople(t *testing.T) {
	for want, labels := range map[string][]string{
		"shop/app=web,tier": {"k8s:app=web", "k8s:io.kubernetes.pod.namespace=shop", "k8s:tier="},
		"shop/app=db": {
			"k8s:app=db", "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop",
			"k8s:io.kubernetes.pod.namespace=shop",
		},
		"cni:app=web":          {"cni:app=web"},
		"reserved:host":        {"reserved:host="},
		"shop/cni:a=b,tier=up": {"cni:a=b", "k8s:io.kubernetes.pod.namespace=shop", "k8s:tier=up"},
		"shop/app=web,io.cilium.k8s.policy.serviceaccount=till": {
			"k8s:app=web", "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop",
			"k8s:io.cilium.k8s.namespace.labels.team=a", "k8s:io.cilium.k8s.policy.cluster=default",
			"k8s:io.cilium.k8s.policy.serviceaccount=till", "k8s:io.kubernetes.pod.namespace=shop",
		},
		"io.cilium.k8s.policy.cluster=default": {"k8s:io.cilium.k8s.policy.cluster=default"},
		"":                                     nil,
	} {
		if got := Text(labels); got != want {
			t.Errorf("%q are shown as %q, want %q", labels, got, want)
		}
	}
}

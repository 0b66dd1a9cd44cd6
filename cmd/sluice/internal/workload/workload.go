// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package workload writes owners and labels of workloads as people read them.
package workload

import (
	"fmt"
	"slices"
	"strings"

	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Owner is who an endpoint or an allocation belongs to.
type Owner struct {
	ContainerID, Interface string
}

// OwnerOf shows an owner of the services.
func OwnerOf(o *workloadv1.Owner) Owner {
	return Owner{ContainerID: o.GetContainerId(), Interface: o.GetInterfaceName()}
}

// String shortens a container id as runtimes do.
func (o Owner) String() string {
	id := o.ContainerID
	if len(id) == 64 && strings.Trim(id, "0123456789abcdef") == "" {
		id = id[:13]
	}
	return id + "/" + o.Interface
}

// PodText is NAMESPACE/NAME of a pod of Kubernetes; empty without one.
func PodText(p *workloadv1.PodReference) string {
	if p == nil {
		return ""
	}
	return p.GetNamespace() + "/" + p.GetName()
}

// LabelTexts writes labels as SOURCE:KEY=VALUE, sorted.
func LabelTexts(labels []*workloadv1.Label) []string {
	texts := LabelTextsInOrder(labels)
	if texts == nil {
		return []string{}
	}
	slices.Sort(texts)
	return texts
}

// LabelTextsInOrder writes labels as SOURCE:KEY=VALUE; nil if there are none.
func LabelTextsInOrder(labels []*workloadv1.Label) []string {
	if len(labels) == 0 {
		return nil
	}
	texts := make([]string, len(labels))
	for i, l := range labels {
		sign := ""
		if l.GetValue() != "" {
			sign = "="
		}
		texts[i] = l.GetSource() + ":" + l.GetKey() + sign + l.GetValue()
	}
	return texts
}

// The labels that say the namespace of a pod of Kubernetes, those of the namespace itself, and those that a pod has
// unless something else is written.
const (
	namespaceLabel   = "k8s:io.kubernetes.pod.namespace="
	ofNamespace      = "k8s:io.cilium.k8s.namespace.labels."
	defaultCluster   = "k8s:io.cilium.k8s.policy.cluster=default"
	defaultOfAccount = "k8s:io.cilium.k8s.policy.serviceaccount=default"
)

// Text shortens labels for people: "shop/app=web,tier=front" are labels
// of Kubernetes in the namespace shop. What follows from the namespace, or is as for most pods, is left out. Labels of
// other sources are written out.
func Text(labels []string) string {
	namespace := ""
	for _, l := range labels {
		if value, ok := strings.CutPrefix(l, namespaceLabel); ok {
			namespace = value
		}
	}
	short := make([]string, 0, len(labels))
	for _, l := range labels {
		if namespace != "" && (l == namespaceLabel+namespace || strings.HasPrefix(l, ofNamespace) || l == defaultCluster ||
			l == defaultOfAccount) {
			continue
		}
		short = append(short, strings.TrimPrefix(strings.TrimSuffix(l, "="), "k8s:"))
	}
	text := strings.Join(short, ",")
	if namespace != "" {
		text = namespace + "/" + text
	}
	return text
}

// IdentityText is an identity with its labels, for people.
func IdentityText(identity uint32, labels []string) string {
	text := Text(labels)
	switch {
	case text == "" && identity == 0:
		return "unknown"
	case text == "":
		return fmt.Sprintf("identity %d", identity)
	case identity == 0:
		return text
	default:
		return fmt.Sprintf("%s (%d)", text, identity)
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package workload formats owners and labels of workloads for people.
package workload

import (
	"fmt"
	"slices"
	"strings"

	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Owner is the interface of a container to which an endpoint or an allocation belongs.
type Owner struct {
	ContainerID, Interface string
}

// OwnerOf converts an owner of the API.
func OwnerOf(o *workloadv1.Owner) Owner {
	return Owner{ContainerID: o.GetContainerId(), Interface: o.GetInterfaceName()}
}

// String returns CONTAINER/INTERFACE with a shortened container ID, as runtimes print it.
func (o Owner) String() string {
	id := o.ContainerID
	if len(id) == 64 && strings.Trim(id, "0123456789abcdef") == "" {
		id = id[:13]
	}
	return id + "/" + o.Interface
}

// PodText returns NAMESPACE/NAME, or an empty string for nil.
func PodText(p *workloadv1.PodReference) string {
	if p == nil {
		return ""
	}
	return p.GetNamespace() + "/" + p.GetName()
}

// LabelTexts returns the labels as SOURCE:KEY=VALUE, sorted.
func LabelTexts(labels []*workloadv1.Label) []string {
	texts := LabelTextsInOrder(labels)
	if texts == nil {
		return []string{}
	}
	slices.Sort(texts)
	return texts
}

// LabelTextsInOrder returns the labels as SOURCE:KEY=VALUE in the given order, or nil without labels.
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

// Labels of the namespace of a Kubernetes pod, and labels that pods have by default.
const (
	namespaceLabel   = "k8s:io.kubernetes.pod.namespace="
	ofNamespace      = "k8s:io.cilium.k8s.namespace.labels."
	defaultCluster   = "k8s:io.cilium.k8s.policy.cluster=default"
	defaultOfAccount = "k8s:io.cilium.k8s.policy.serviceaccount=default"
)

// Text shortens labels for people: "shop/app=web,tier=front" are Kubernetes labels in the namespace shop. Labels of the
// namespace and default labels are left out. Labels of other sources are shown with their source.
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

// IdentityText returns the labels of an identity with its number: "shop/app=web (30300)".
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

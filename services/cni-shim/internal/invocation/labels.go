// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"cmp"
	"slices"
	"strings"
	"unicode"
)

// AnnotationLabels is the pod annotation whose "key=value,key=value" become
// labels where a runtime passes annotations on.
const AnnotationLabels = "sluice.io/labels"

// The labels that every pod of Kubernetes gets from K8S_POD_NAMESPACE, under the
// keys that policies select by: the namespace, and of the namespace's own labels
// the one that the API server sets on each namespace.
const (
	LabelPodNamespace  = "io.kubernetes.pod.namespace"
	LabelNamespaceName = "io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name"
)

// derived are the prefixes of the keys that say what Kubernetes knows about a
// pod: its namespace, the labels of that namespace, its service account, its
// cluster. Policies trust them, so no pod and no runtime may write them.
var derived = []string{"io.kubernetes.", "io.cilium.k8s."}

// Sources of labels.
const (
	SourceKubernetes = "k8s"
	SourceCNI        = "cni"
)

// Label is one property of the workload.
type Label struct{ Source, Key, Value string }

const (
	maxLabelName  = 63
	maxLabelKey   = 317 // a DNS name, "/" and a name
	maxLabelValue = 4096
)

// workloadLabels joins the labels of every place they may come from, gives
// them their source and refuses what a caller may not say.
func workloadLabels(c Config, podNamespace string) ([]Label, error) {
	source := SourceCNI
	if podNamespace != "" {
		source = SourceKubernetes
	}
	set := map[string]string{} // key to value
	if podNamespace != "" {
		set[LabelPodNamespace] = podNamespace
		set[LabelNamespaceName] = podNamespace
	}
	add := func(place string, kv keyValue) error {
		if why := checkLabel(kv); why != "" {
			return Field(place, "%s", why)
		}
		if old, ok := set[kv.Key]; ok && old != kv.Value {
			return Field(place, "label %q is %q and %q", clip(kv.Key), clip(old), clip(kv.Value))
		}
		set[kv.Key] = kv.Value
		return nil
	}
	for _, kv := range c.runtimeLabels {
		if err := add("runtimeConfig.labels", kv); err != nil {
			return nil, err
		}
	}
	for _, kv := range c.argsLabels {
		if err := add("args.cni.labels", kv); err != nil {
			return nil, err
		}
	}
	place := "runtimeConfig." + capPodAnnotations + "." + AnnotationLabels
	for pair := range strings.SplitSeq(c.podLabels, ",") {
		pair = strings.TrimSpace(pair)
		if pair == "" {
			continue
		}
		key, value, found := strings.Cut(pair, "=")
		if !found {
			return nil, Field(place, "%q is not key=value", clip(pair))
		}
		if err := add(place, keyValue{strings.TrimSpace(key), strings.TrimSpace(value)}); err != nil {
			return nil, err
		}
	}
	if len(set) > maxRuntimeLabels {
		return nil, Field("labels", "%d labels; at most %d are taken", len(set), maxRuntimeLabels)
	}
	labels := make([]Label, 0, len(set))
	for key, value := range set {
		labels = append(labels, Label{Source: source, Key: key, Value: value})
	}
	slices.SortFunc(labels, func(a, b Label) int { return cmp.Compare(a.Key, b.Key) })
	return labels, nil
}

// checkLabel gives what is wrong with a label, or "". A key is as in
// Kubernetes: an optional DNS name and "/", then a name.
func checkLabel(kv keyValue) string {
	if source, _, found := strings.Cut(kv.Key, ":"); found {
		switch source {
		case "reserved", "generated":
			return "labels of the source \"" + source + "\" are given by the system only: " + clip(kv.Key)
		}
		return "a key has no source, it is given by where the label comes from: " + clip(kv.Key)
	}
	for _, prefix := range derived {
		if strings.HasPrefix(kv.Key, prefix) {
			return "label \"" + clip(kv.Key) + "\": keys that begin with \"" + prefix + "\" are derived from Kubernetes and cannot be set"
		}
	}
	name := kv.Key
	if i := strings.LastIndexByte(kv.Key, '/'); i >= 0 {
		if !isDNSName(kv.Key[:i], ".-", 253) {
			return "the part of key \"" + clip(kv.Key) + "\" before \"/\" is not a DNS name"
		}
		name = kv.Key[i+1:]
	}
	switch {
	case len(kv.Key) > maxLabelKey || len(name) > maxLabelName:
		return "key \"" + clip(kv.Key) + "\" is too long"
	case !isName(name) || !alphanumeric(name[len(name)-1]):
		return "key \"" + clip(kv.Key) + "\" is not a label key: want letters, digits, \"_\", \".\" and \"-\""
	case len(kv.Value) > maxLabelValue:
		return "the value of \"" + clip(kv.Key) + "\" is too long"
	case strings.IndexFunc(kv.Value, unicode.IsControl) >= 0:
		return "the value of \"" + clip(kv.Key) + "\" holds control characters"
	}
	return ""
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"maps"
	"slices"
	"strings"
	"unicode"

	"github.com/sluice-net/sluice/model/label"
)

// AnnotationLabels is the pod annotation with labels, "key=value,key=value", for runtimes that pass annotations to the
// plugin.
const AnnotationLabels = "sluice.io/labels"

// derived contains the prefixes of keys that neither pods nor runtimes may set.
var derived = []string{label.PrefixKubernetes, label.PrefixDerived}

// maxLabelName is the maximum length of the name in a key, in bytes.
const maxLabelName = 63

// workloadLabels combines the labels from all sources, sets their source, and refuses labels that a caller may not set.
// args are CNI_ARGS.
func workloadLabels(c Config, args map[string]string) ([]label.Label, error) {
	podNamespace := args[argPodNamespace]
	source := label.SourceCNI
	if podNamespace != "" {
		source = label.SourceKubernetes
	}
	set := map[string]string{} // key to value
	if podNamespace != "" {
		// Set the namespace, and of the namespace's own labels only the one that the API server sets.
		set[label.KeyNamespace] = podNamespace
		set[label.KeyNamespaceName] = podNamespace
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
	for _, key := range slices.Sorted(maps.Keys(c.argumentOf)) {
		// Refuse the call: without the label, no policy for it would select the container.
		argument := c.argumentOf[key]
		value := args[argument]
		if value == "" {
			return nil, environment(EnvArgs, "%q is missing, but %s.%s requires it for a label",
				clip(argument), keyLabelsFromArgs, clip(key))
		}
		if err := add(keyLabelsFromArgs, keyValue{key, value}); err != nil {
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
		return nil, Field("labels", "%d labels; at most %d are allowed", len(set), maxRuntimeLabels)
	}
	labels := make([]label.Label, 0, len(set))
	for key, value := range set {
		labels = append(labels, label.Label{Source: source, Key: key, Value: value})
	}
	slices.SortFunc(labels, label.Label.Compare)
	return labels, nil
}

// checkLabel returns the mistake in a label, or "". A key is as in Kubernetes: an optional DNS name and "/", then a
// name.
func checkLabel(kv keyValue) string {
	if source, _, found := strings.Cut(kv.Key, ":"); found {
		switch source {
		case label.SourceReserved, label.SourceGenerated:
			return "labels of the source \"" + source + "\" are given by the system only: " + clip(kv.Key)
		}
		return "a key must not contain a source, because the place of the label determines it: " + clip(kv.Key)
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
	case len(kv.Key) > label.MaxKey || len(name) > maxLabelName:
		return "key \"" + clip(kv.Key) + "\" is too long"
	case !isName(name) || !alphanumeric(name[len(name)-1]):
		return "key \"" + clip(kv.Key) + "\" is not a label key: want letters, digits, \"_\", \".\" and \"-\""
	case len(kv.Value) > label.MaxValue:
		return "the value of \"" + clip(kv.Key) + "\" is too long"
	case strings.IndexFunc(kv.Value, unicode.IsControl) >= 0:
		return "the value of \"" + clip(kv.Key) + "\" contains control characters"
	}
	return ""
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package labels decides which labels of a workload are part of its identity, and which labels a caller may set.
//
// It is pure: no store, no clock, no wire format.
package labels

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/label"
)

// systemSources are the sources that no caller may use: Sluice's own, the sources of addresses, names and nodes in
// policies, and the sources that selectors understand as "every source".
var systemSources = []string{
	label.SourceReserved, label.SourceGenerated, label.SourceCIDRGroup, label.SourceNode, "cidr", "fqdn", "any", "all", "unspec",
}

// CheckCaller checks labels from outside. Each label must be valid, and its source must not be reserved for the system.
// Keys that Sluice derives from Kubernetes need the source k8s, and the labels must name the namespace of the pod.
func CheckCaller(labels []label.Label) error {
	namespace := ""
	for _, l := range labels {
		if l.Source == label.SourceKubernetes && l.Key == label.KeyNamespace {
			namespace = l.Value
		}
	}
	var errs []error
	for i, l := range labels {
		if err := l.Check(i); err != nil {
			errs = append(errs, err)
			continue
		}
		bad := func(part, format string, args ...any) {
			errs = append(errs, &label.Error{Index: i, Part: part, Reason: fmt.Sprintf(format, args...)})
		}
		derived := strings.HasPrefix(l.Key, label.PrefixDerived)
		switch {
		case slices.Contains(systemSources, l.Source):
			bad("source", "%q is given by Sluice itself and refused in requests", l.Source)
		case (derived || strings.HasPrefix(l.Key, label.PrefixPod)) && l.Source != label.SourceKubernetes:
			bad("key", "%q is derived from Kubernetes, and the source is %q", l.Key, l.Source)
		case derived && namespace == "":
			bad("key", "%q is derived from Kubernetes, but no label %s names the pod's namespace", l.Key, label.KeyNamespace)
		case l.Key == label.KeyNamespaceName && l.Value != namespace:
			bad("value", "%q is not the namespace of the pod, %q", l.Value, namespace)
		}
	}
	return errors.Join(errs...)
}

// KeyCount is a label key and its number of different values.
type KeyCount struct {
	Key    string // "source:key"
	Values int
}

// TopKeys counts the different values of each label key over some label sets and returns the n keys with most, most
// first. Hidden and reserved labels are left out, because an operator cannot change them.
func TopKeys(sets func(yield func(label.Canonical) bool), n int) []KeyCount {
	values := map[string]map[string]struct{}{}
	for set := range sets {
		for _, l := range set.All() {
			if l.Source == label.SourceGenerated || l.Source == label.SourceReserved {
				continue
			}
			key := l.Name()
			if values[key] == nil {
				values[key] = map[string]struct{}{}
			}
			values[key][l.Value] = struct{}{}
		}
	}
	out := make([]KeyCount, 0, len(values))
	for k, v := range values {
		out = append(out, KeyCount{Key: k, Values: len(v)})
	}
	slices.SortFunc(out, func(a, b KeyCount) int {
		return cmp.Or(cmp.Compare(b.Values, a.Values), strings.Compare(a.Key, b.Key))
	})
	return out[:min(n, len(out))]
}

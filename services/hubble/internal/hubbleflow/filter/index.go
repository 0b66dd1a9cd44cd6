// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package filter

import (
	"slices"
	"strings"

	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
)

// Excludes reports whether no flow of a segment of the history can pass the filter.
func (f *Filter) Excludes(x history.Index) bool {
	return len(f.allow) > 0 && !slices.ContainsFunc(f.allow, func(c compiled) bool { return mayMatch(c.filter, x) })
}

// mayMatch reports whether a segment may have a flow that the filter matches.
func mayMatch(f *flow.FlowFilter, x history.Index) bool {
	return mayHave(f.GetVerdict(), x.Verdicts) && mayHave(f.GetDropReasonDesc(), x.Reasons) &&
		mayHavePod(f.GetSourcePod(), x) && mayHavePod(f.GetDestinationPod(), x)
}

func mayHave[T ~int32](wanted []T, have []int32) bool {
	return len(wanted) == 0 || slices.ContainsFunc(wanted, func(v T) bool { return slices.Contains(have, int32(v)) })
}

func mayHavePod(wanted []string, x history.Index) bool {
	return len(wanted) == 0 || x.Many || slices.ContainsFunc(wanted, func(text string) bool {
		namespace, prefix := split(text)
		if prefix == "" {
			_, ok := x.Namespaces[namespace]
			return ok || namespace == ""
		}
		if namespace != "" { // Pods is sorted
			i, _ := slices.BinarySearch(x.Pods, namespace+"/"+prefix)
			return i < len(x.Pods) && strings.HasPrefix(x.Pods[i], namespace+"/"+prefix)
		}
		return slices.ContainsFunc(x.Pods, func(pod string) bool {
			_, name, _ := strings.Cut(pod, "/")
			return strings.HasPrefix(name, prefix)
		})
	})
}

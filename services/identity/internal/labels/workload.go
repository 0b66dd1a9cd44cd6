// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package labels

import (
	"errors"
	"slices"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
)

// Workload returns the label set of a workload with the labels from its runtime: checked, filtered, and with the
// hidden label of its ports. If no label remains, it returns the label set for workloads without labels.
func Workload(f Filter, labels []label.Label, ports []workload.NamedPort) (label.Canonical, error) {
	if err := CheckCaller(labels); err != nil {
		return label.Canonical{}, err
	}
	kept := f.Apply(labels)
	port, ok, err := workload.NamedPortsLabel(ports)
	if err != nil {
		return label.Canonical{}, err
	}
	if ok {
		kept = append(kept, port)
	}
	if len(kept) == 0 {
		kept = append(kept, label.Label{Source: label.SourceGenerated, Key: label.KeyNoLabels})
	}
	set, err := label.Canonicalize(kept...)
	if lerr := (*label.Error)(nil); errors.As(err, &lerr) && lerr.Index >= 0 {
		// The error's index refers to the filtered list; convert it to the caller's.
		lerr.Index = slices.Index(labels, kept[lerr.Index])
	}
	return set, err
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rule

import (
	"slices"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
)

// Nodes returns selectors for nodes with certain labels. name is the reserved label that distinguishes the local node
// from other nodes. If the labels of a node are unknown (see peer.Identity.Node), deny rules with labels apply to it,
// and other rules do not. So unknown labels never allow traffic.
func Nodes(name string, labels []selector.Requirement, a policytable.Action) []selector.Selector {
	exists := selector.Requirement{Source: label.SourceReserved, Key: name, Op: selector.Exists}
	all := append(slices.Clone(labels), exists)
	if len(labels) == 0 {
		return []selector.Selector{selector.New(all...)}
	}
	unknown := UnknownNodes(name)
	if a == policytable.Deny {
		return []selector.Selector{selector.New(all...), unknown}
	}
	known := selector.Requirement{Source: label.SourceReserved, Key: peer.NameUnlabelledNode, Op: selector.DoesNotExist}
	return []selector.Selector{selector.New(append(all, known)...)}
}

// UnknownNodes selects the nodes whose labels are unknown.
func UnknownNodes(name string) selector.Selector {
	return selector.New(
		selector.Requirement{Source: label.SourceReserved, Key: name, Op: selector.Exists},
		selector.Requirement{Source: label.SourceReserved, Key: peer.NameUnlabelledNode, Op: selector.Exists},
	)
}

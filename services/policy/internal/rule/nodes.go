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

// Nodes are the selectors of nodes with such labels: of the local node or of others,
// by the name of its reserved label. The labels of a node may not be known, see
// peer.Identity.Node; then a deny by labels is for the node, and nothing else is. So
// what is not known opens nothing.
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

// UnknownNodes selects the nodes of which the labels are not known.
func UnknownNodes(name string) selector.Selector {
	return selector.New(
		selector.Requirement{Source: label.SourceReserved, Key: name, Op: selector.Exists},
		selector.Requirement{Source: label.SourceReserved, Key: peer.NameUnlabelledNode, Op: selector.Exists},
	)
}

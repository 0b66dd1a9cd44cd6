// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hubbleflow

import (
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// fromOutside is the prefix of the names of parts for connections that no pod opened.
const fromOutside = "from outside to "

// Parts assigns flows to parts of the history, one for each tenant, so that a tenant with many flows displaces its
// own flows first.
type Parts struct {
	// Settings define the tenants.
	Settings shares.Settings
}

// Of returns the name of the part to which a flow belongs: the part of the tenant whose pod opened the connection.
// Connections that no pod opened have a separate part for each receiving tenant. Otherwise an external client could
// displace the flows of connections that pods of the receiving tenant opened.
func (p Parts) Of(f *datapathv1.Flow) string {
	began, other := Initiator(f)
	if isPod(began) {
		return p.tenant(began.GetLabels()).String()
	}
	return fromOutside + p.tenant(other.GetLabels()).String()
}

// isPod reports whether an end is a workload, on any node.
func isPod(e *datapathv1.FlowEnd) bool {
	return e.GetEndpointIndex() != 0 || slices.ContainsFunc(e.GetLabels(), func(l *workloadv1.Label) bool {
		return l.GetSource() == label.SourceKubernetes || l.GetSource() == label.SourceCNI
	})
}

func (p Parts) tenant(labels []*workloadv1.Label) shares.Tenant {
	value := ""
	for _, l := range labels { // avoids composing the key, because this code runs for each event
		if key, ok := strings.CutPrefix(l.GetKey(), label.KeyNamespaceLabels); ok && key == p.Settings.Label() {
			value = l.GetValue()
			break
		}
	}
	return p.Settings.TenantOf(labelOf(labels, namespaceKey), value)
}

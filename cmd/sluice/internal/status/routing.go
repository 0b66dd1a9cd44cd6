// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package status

import datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"

// podRouting is how packets between pods of two nodes travel.
type podRouting struct {
	Mode    string `json:"mode"`
	ByStack bool   `json:"byStack"`
	Reason  string `json:"reason,omitempty"`
}

// routingOf is nil for a node whose pods reach none of another node.
func routingOf(m *datapathv1.PodRouting) *podRouting {
	if m == nil {
		return nil
	}
	return &podRouting{Mode: m.GetMode(), ByStack: m.GetByStack(), Reason: m.GetReason()}
}

// text names the mode and, where there is a choice, the path and its reason.
func (r *podRouting) text() string {
	if r.Reason == "" {
		return r.Mode
	}
	path := "past the host's stack"
	if r.ByStack {
		path = "by the host's stack"
	}
	return r.Mode + ", " + path + " (" + r.Reason + ")"
}

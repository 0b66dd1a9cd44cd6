// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package adminpolicy

import (
	"strconv"

	"github.com/sluice-net/sluice/services/policy/internal/manifest"
)

// Notes name the fields of a valid policy that are not supported.
func (p *Policy) Notes() manifest.Notes {
	var ns manifest.Notes
	for i, r := range p.Spec.Egress {
		for j, peer := range r.To {
			if len(peer.DomainNames) > 0 {
				ns.Unsupported("spec.egress["+strconv.Itoa(i)+"].to["+strconv.Itoa(j)+"].domainNames",
					"learning addresses from DNS answers; the rule allows the addresses that LearnNames was called with")
			}
		}
	}
	return ns
}

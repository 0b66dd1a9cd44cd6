// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package adminpolicy

import (
	"strconv"

	"github.com/sluice-net/sluice/services/policy/internal/manifest"
)

// Notes returns notes about the unsupported fields of a valid policy.
func (p *Policy) Notes() manifest.Notes {
	var ns manifest.Notes
	for i, r := range p.Spec.Egress {
		for j, peer := range r.To {
			domainNames(&ns, i, j, peer.DomainNames)
		}
	}
	return ns
}

// Notes returns notes about the unsupported fields of a valid policy.
func (p *OldPolicy) Notes() manifest.Notes {
	var ns manifest.Notes
	for i, r := range p.Spec.Egress {
		for j, peer := range r.To {
			domainNames(&ns, i, j, peer.DomainNames)
		}
	}
	return ns
}

func domainNames(ns *manifest.Notes, rule, peer int, names []string) {
	if len(names) > 0 {
		ns.Unsupported("spec.egress["+strconv.Itoa(rule)+"].to["+strconv.Itoa(peer)+"].domainNames",
			"learning addresses from DNS answers; the rule allows the addresses that LearnNames was called with")
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package adminpolicy

import (
	"strconv"

	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// Notes returns notes about the unsupported fields of a valid policy.
func (p *Policy) Notes(o rule.Options) manifest.Notes {
	var ns manifest.Notes
	for i, r := range p.Spec.Egress {
		for j, peer := range r.To {
			domainNames(&ns, i, j, peer.DomainNames, o)
		}
	}
	return ns
}

// Notes returns notes about the unsupported fields of a valid policy.
func (p *OldPolicy) Notes(o rule.Options) manifest.Notes {
	var ns manifest.Notes
	for i, r := range p.Spec.Egress {
		for j, peer := range r.To {
			domainNames(&ns, i, j, peer.DomainNames, o)
		}
	}
	return ns
}

func domainNames(ns *manifest.Notes, rule, peer int, names []string, o rule.Options) {
	if len(names) > 0 && o.WithoutDNSProxy {
		ns.Unsupported("spec.egress["+strconv.Itoa(rule)+"].to["+strconv.Itoa(peer)+"].domainNames",
			"learning addresses from DNS answers; the rule allows the addresses that LearnNames was called with")
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cilium

import (
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// Effects of unsupported parts on a rule.
const (
	allowsNothing  = "; the rule allows nothing"
	deniesEveryone = "; the rule denies all peers"
	isDropped      = "; packets that match are redirected to no proxy, and dropped"
	isRefused      = "; sluice-http refuses what matches"
	httpNothing    = "; the HTTP rule allows nothing"
)

// Notes returns notes about the unsupported fields of a valid policy, and their effect on the rules. The effects must
// agree with Rules.
func (p *NetworkPolicy) Notes(o rule.Options) manifest.Notes {
	var ns manifest.Notes
	if p.Spec != nil {
		p.Spec.notes("spec", o, &ns)
	}
	for i := range p.Specs {
		p.Specs[i].notes("specs["+strconv.Itoa(i)+"]", o, &ns)
	}
	return ns
}

func (r *Rule) notes(path string, o rule.Options, ns *manifest.Notes) {
	note := func(has bool, path, what, then string) {
		if has {
			ns.Unsupported(path, "%s%s", what, then)
		}
	}
	const (
		groups   = "groups of a cloud provider"
		services = "services as peers"
	)
	for i := range r.Ingress {
		in, p := &r.Ingress[i], path+".ingress["+strconv.Itoa(i)+"]"
		note(len(in.FromGroups) > 0, p+".fromGroups", groups, allowsNothing)
		note(in.Authentication.asked(), p+".authentication", "mutual authentication", allowsNothing)
		layer7Notes(p, in.ToPorts, o, false, ns)
	}
	for i := range r.IngressDeny {
		in, p := &r.IngressDeny[i], path+".ingressDeny["+strconv.Itoa(i)+"]"
		note(len(in.FromGroups) > 0, p+".fromGroups", groups, deniesEveryone)
	}
	for i := range r.Egress {
		eg, p := &r.Egress[i], path+".egress["+strconv.Itoa(i)+"]"
		note(len(eg.ToServices) > 0, p+".toServices", services, allowsNothing)
		note(len(eg.ToGroups) > 0, p+".toGroups", groups, allowsNothing)
		note(eg.Authentication.asked(), p+".authentication", "mutual authentication", allowsNothing)
		note(len(eg.ToFQDNs) > 0 && o.WithoutDNSProxy, p+".toFQDNs", "learning addresses from DNS answers",
			"; the rule allows the addresses that LearnNames was called with")
		layer7Notes(p, eg.ToPorts, o, o.HTTPProxy, ns)
	}
	for i := range r.EgressDeny {
		eg, p := &r.EgressDeny[i], path+".egressDeny["+strconv.Itoa(i)+"]"
		note(len(eg.ToServices) > 0, p+".toServices", services, deniesEveryone)
		note(len(eg.ToGroups) > 0, p+".toGroups", groups, deniesEveryone)
	}
	if r.Log.Value != "" {
		ns.Add(manifest.NoteNoEffect, path+".log", "has no effect: events of Sluice carry no texts of policies")
	}
}

// layer7Notes adds the notes about layer 7 rules. http is set if a proxy evaluates HTTP requests and TLS server names.
func layer7Notes(path string, rules []PortRule, o rule.Options, http bool, ns *manifest.Notes) {
	effect := isDropped
	if http {
		effect = isRefused
	}
	for i := range rules {
		r, p := &rules[i], path+".toPorts["+strconv.Itoa(i)+"]"
		if forwarded(r, o) && r.Listener == nil {
			ns.Add(manifest.NoteNoEffect, p+".rules.dns",
				"allows every name: DNS is forwarded without a proxy, and the addresses in the answers are not learned")
		}
		switch {
		case r.Listener != nil:
			ns.Unsupported(p+".listener", "proxies of the user%s", isDropped)
		case r.hasDNS() && !o.WithoutDNSProxy:
			if slices.ContainsFunc(r.Ports, PortProtocol.isSCTP) {
				ns.Unsupported(p+".rules.dns", "DNS rules for SCTP%s", isDropped)
			}
		case r.hasDNS() && !forwarded(r, o):
			ns.Unsupported(p+".rules.dns", "DNS rules%s", isDropped)
		case http && r.hasHTTP() && r.needsTermination():
			ns.Unsupported(p+".rules.http", "HTTP rules within TLS%s", isRefused)
		case r.hasHTTP():
			if !http {
				ns.Unsupported(p+".rules.http", "HTTP rules%s", isDropped)
			}
			for j := range r.Rules.HTTP {
				if field, why := r.Rules.HTTP[j].allowsNothing(); why != "" {
					ns.Unsupported(p+".rules.http["+strconv.Itoa(j)+"]."+field, "%s%s", why, httpNothing)
				}
			}
		case r.TerminatingTLS != nil:
			ns.Unsupported(p+".terminatingTLS", "TLS termination%s", effect)
		case r.OriginatingTLS != nil:
			ns.Unsupported(p+".originatingTLS", "TLS origination%s", effect)
		case len(r.ServerNames) > 0 && !http:
			ns.Unsupported(p+".serverNames", "TLS server names%s", isDropped)
		}
	}
}

// isSCTP reports whether the entry names SCTP, for which no proxy evaluates queries.
func (p PortProtocol) isSCTP() bool {
	return p.Protocol != nil && strings.EqualFold(*p.Protocol, "SCTP")
}

// asked reports whether the rule requires authentication. Mode "disabled" requires none.
func (a *Authentication) asked() bool { return a != nil && a.Mode != "disabled" }

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"slices"

	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
)

// dnsRule is an entry for spec.egress that notes recommend to users. It redirects the pods' queries to the cluster's
// DNS through the DNS proxy, which then learns names.
const dnsRule = `- {toEndpoints: [{matchLabels: {"k8s:io.kubernetes.pod.namespace": kube-system, ` +
	`k8s-app: kube-dns}}], toPorts: [{ports: [{port: "53", protocol: ANY}], rules: {dns: [{matchPattern: "*"}]}}]}`

// DNSRules contains the subjects of DNS rules. The zero DNSRules is empty.
type DNSRules struct {
	subjects map[string][]selector.Selector // by the namespace to which they are limited; empty: not limited to one
}

// UsesNames reports whether the object allows DNS names.
func (o *Object) UsesNames() bool {
	return slices.ContainsFunc(o.Specs, func(s rule.Spec) bool { return s.Names != "" })
}

// HasDNSRule reports whether the object has a DNS rule.
func (o *Object) HasDNSRule() bool {
	return slices.ContainsFunc(o.Specs, func(s rule.Spec) bool { return s.HasDNSRule })
}

// Add adds the DNS rules of an object.
func (d *DNSRules) Add(o *Object) {
	for i := range o.Specs {
		s := &o.Specs[i]
		if !s.HasDNSRule || s.Host || slices.Contains(d.subjects[s.Namespace], s.Subject) {
			continue
		}
		if d.subjects == nil {
			d.subjects = make(map[string][]selector.Selector)
		}
		d.subjects[s.Namespace] = append(d.subjects[s.Namespace], s.Subject)
	}
}

// selects reports whether one of the DNS rules selects all endpoints of a spec.
func (d *DNSRules) selects(s *rule.Spec) bool {
	return slices.ContainsFunc(d.subjects[""], s.Subject.Implies) ||
		s.Namespace != "" && slices.ContainsFunc(d.subjects[s.Namespace], s.Subject.Implies)
}

// WithNotes returns the notes of an object. It adds a note for each spec that allows DNS names for endpoints that no
// DNS rule selects. It does not change notes.
func (d *DNSRules) WithNotes(o *Object, notes manifest.Notes) manifest.Notes {
	out, cloned := notes, false
	for i := range o.Specs {
		if s := &o.Specs[i]; s.Names != "" && !d.selects(s) {
			if !cloned {
				out, cloned = slices.Clone(notes), true
			}
			out.Add(manifest.NoteNoDNSRule, s.Names,
				"no DNS rule selects these pods, so sluice-dns does not see their queries; add to egress: %s", dnsRule)
		}
	}
	return out
}

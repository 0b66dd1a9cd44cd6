// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/timestamppb"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
)

// PolicyPart describes the policies and the audit modes.
type PolicyPart struct {
	Tables   Tables
	Modes    *auditmode.Modes
	Report   *lifecycle.Report
	Required bool // ADD needs the policy service
	Audit    bool // the configuration puts every endpoint in audit mode
}

var (
	revisionDesc = desc("policy_revision", "Policy revision that the kernel enforces for all endpoints.")
	refusalsDesc = desc("policy_refusals", "Subjects that are isolated in a direction because their table does not fit, and "+
		"tables that lack rows or prefixes.")
	unknownDesc = desc("policy_waiting_identities",
		"Identities that stay unknown because no identity class is free.")
	auditedDesc = desc("audited_endpoints", "Endpoints in audit mode: packets that their policies deny are forwarded.")
	exceedsDesc = desc("exceeds_share", "Units that tenants need beyond their share of the limit; their tables are "+
		"not in the kernel, or not wholly.", "limit")
)

func (p *PolicyPart) report(r *report) error {
	st := p.Tables.Status()
	r.dependencies["policy"] = r.ready.policy
	r.PolicyRevision, r.PolicyRefusals = st.Revision, st.Refusals
	if st.Waiting > 0 {
		r.PolicyRefusals = append(r.PolicyRefusals,
			fmt.Sprintf("%d identities stay unknown, because they do not fit into the tables", st.Waiting))
	}
	if st.Held != "" && !p.Required {
		r.warn("policy: " + st.Held)
	}
	if st.Unsaved != "" {
		r.warn("policy: " + st.Unsaved)
	}
	r.AuditMode = p.mode()
	if p.Audit {
		r.warn("audit mode: packets that policies deny pass for every endpoint, because policy.audit is set")
	}
	return nil
}

// mode returns which endpoints are in audit mode.
func (p *PolicyPart) mode() *datapathv1.AuditMode {
	mode := &datapathv1.AuditMode{Configured: p.Audit, EndpointCount: uint32(p.audited())}
	if until := p.Modes.Node(); !until.IsZero() {
		mode.NodeExpireTime = timestamppb.New(until)
	}
	return mode
}

// audited counts the endpoints in audit mode.
func (p *PolicyPart) audited() (n int) {
	for _, e := range p.Report.List() {
		if e.Policy.Audit {
			n++
		}
	}
	return n
}

// Describe implements prometheus.Collector.
func (*PolicyPart) Describe(ch chan<- *prometheus.Desc) {
	describe(ch, revisionDesc, refusalsDesc, unknownDesc, auditedDesc, limitDesc, limitUsedDesc, exceedsDesc)
}

// Collect implements prometheus.Collector.
func (p *PolicyPart) Collect(ch chan<- prometheus.Metric) {
	st := p.Tables.Status()
	gauge(ch, revisionDesc, float64(st.Revision))
	gauge(ch, refusalsDesc, float64(len(st.Refusals)))
	gauge(ch, unknownDesc, float64(st.Waiting))
	gauge(ch, auditedDesc, float64(p.audited()))
	for _, u := range p.Tables.Shares() {
		gauge(ch, limitDesc, float64(u.Limit.Size), u.Limit.Name)
		gauge(ch, limitUsedDesc, float64(u.Used), u.Limit.Name)
		gauge(ch, exceedsDesc, float64(u.Asked-u.Used), u.Limit.Name)
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policy assembles the policy part of the datapath: it subscribes to sluice-policy, keeps the kernel's policy
// tables as sluice-policy sends them, and tracks which endpoints are in audit mode.
package policy

import (
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/record"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/learned"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policyhistory"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync"
)

// Options configure Open.
type Options struct {
	// Name of this subscriber in the status of sluice-policy.
	Name   string
	BootID string // of the running boot

	Kernel policysync.Kernel
	// Addresses of other nodes wait until the tables include their identity; nil: no other nodes.
	Addresses policysync.Addresses
	Service   policystream.Service
	// Names receives the learned addresses that connections use; nil: none are reported.
	Names  learned.Service
	Memory policystream.Memory // nil: the enforced state is not saved
	Audits auditmode.Store     // nil: no endpoint can be in audit mode
	// Records contain which endpoints were evaluated by policies before.
	Records endpoint.Records
	// Endpoints lists the node's endpoints.
	Endpoints func() []endpoint.Endpoint
	// Changed is called with the IDs of endpoints whose policy has changed.
	Changed func(slots []uint16)

	Wait    bool          // new endpoints wait for their tables
	Timeout time.Duration // of that wait; 0: policysync's default
	Audit   bool          // all endpoints are in audit mode
	Linger  time.Duration // of tables that no endpoint uses; 0: policysync's default
	Log     *slog.Logger
}

// Policy manages the policies of one node.
type Policy struct {
	Applier *policysync.Applier
	Modes   *auditmode.Modes // nil without Options.Audits
	learned *learned.Reporter
	wait    bool // new endpoints wait for their tables
	audit   bool // all endpoints are in audit mode
}

// Open adopts the tables in the kernel and the audit modes that have not expired. Enforcement does not change before
// the tasks run.
func Open(o Options) (*Policy, error) {
	p := &Policy{wait: o.Wait, audit: o.Audit, Applier: policysync.New(policysync.Config{
		Name: o.Name, Kernel: o.Kernel, Addresses: o.Addresses, Service: o.Service, Memory: o.Memory, Timeout: o.Timeout,
		Wait: o.Wait, Audit: o.Audit, Linger: o.Linger, Changed: o.Changed, Log: o.Log,
	})}
	if o.Names != nil {
		p.learned = learned.New(o.Names, o.Log)
	}
	evaluated, err := record.Evaluated(o.Records, o.BootID)
	if err != nil {
		return nil, err
	}
	var audited auditmode.Audited
	if o.Audits != nil {
		p.Modes = auditmode.New(auditmode.Config{
			Store: o.Audits, Log: o.Log, Endpoints: o.Endpoints, Apply: p.Applier.SetAudit,
		})
		was, err := record.Endpoints(o.Records, o.BootID)
		if err != nil {
			return nil, err
		}
		audited = p.Modes.Audited(was)
	}
	if err := p.Applier.Adopt(func(slot uint16) bool { return evaluated[slot] }, audited); err != nil {
		return nil, fmt.Errorf("adopt policies: %w", err)
	}
	return p, nil
}

// Remove removes policies from the kernel and from the records, so that no packet is evaluated any
// more.
func Remove(k policysync.Kernel, records endpoint.Records) error {
	if err := record.ForgetEvaluated(records); err != nil {
		return err
	}
	if err := policysync.Remove(k); err != nil {
		return fmt.Errorf("remove policies: %w", err)
	}
	return nil
}

// Wanted returns a function that a pass over the connections calls. That function returns the
// learned addresses to look for, and the function that takes the addresses found; see
// conntrack.CollectorOptions. Wanted returns nil if none are reported.
func (p *Policy) Wanted() func() (addresses map[netip.Addr]struct{}, passed func(inUse []netip.Addr)) {
	if p.learned == nil {
		return nil
	}
	return p.learned.Wanted
}

// Tasks returns the background work.
func (p *Policy) Tasks() []work.Task {
	tasks := []work.Task{{Name: "policy", Run: p.Applier.Run}}
	if p.Modes != nil {
		tasks = append(tasks, work.Task{Name: "audit modes", Run: p.Modes.Run})
	}
	if p.learned != nil {
		tasks = append(tasks, work.Task{Name: "learned addresses", Run: p.learned.Run})
	}
	return tasks
}

// Awaits returns the conditions of readiness: the policy tables, if new endpoints wait for theirs.
func (p *Policy) Awaits() []work.Await {
	if !p.wait {
		return nil
	}
	return []work.Await{{What: "the policy tables of sluice-policy", Done: p.Applier.Synced()}}
}

// Status describes the tables in the kernel and the stream of sluice-policy.
func (p *Policy) Status() policysync.Status { return p.Applier.Status() }

// Shares returns what tenants use of the tables' capacity.
func (p *Policy) Shares() []shares.Usage { return p.Applier.Shares() }

// History returns the policies of the endpoints' current and last epochs.
func (p *Policy) History() *policyhistory.History { return &p.Applier.History }

// AuditModes returns the audit modes; nil without Options.Audits.
func (p *Policy) AuditModes() *auditmode.Modes { return p.Modes }

// Required reports whether new endpoints wait for their tables.
func (p *Policy) Required() bool { return p.wait }

// AuditsAll reports whether the configuration puts every endpoint in audit mode.
func (p *Policy) AuditsAll() bool { return p.audit }

// Warnings name the endpoints in audit mode.
func (p *Policy) Warnings() []string {
	if p.Modes == nil {
		return nil
	}
	return p.Modes.Warnings()
}

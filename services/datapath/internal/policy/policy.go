// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policy is the subject of policies in the datapath: it follows sluice-policy, keeps
// the kernel's tables as that says, and knows which endpoints are in audit mode.
package policy

import (
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/record"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/learned"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync"
)

// Options are what policies need.
type Options struct {
	// Name of this subscriber, for the status of sluice-policy.
	Name   string
	BootID string // of the running boot

	Kernel policysync.Kernel
	// Addresses of other nodes wait for the tables to know their identity; nil: there
	// are none.
	Addresses policysync.Addresses
	Service   policystream.Service
	// Names are told which learned addresses connections use; nil: nobody is.
	Names  learned.Service
	Memory policystream.Memory // nil: nothing keeps what was enforced
	Audits auditmode.Store     // nil: no endpoint can be in audit mode
	// Records say what evaluated endpoints before.
	Records endpoint.Records
	// Endpoints lists those of the node.
	Endpoints func() []endpoint.Endpoint
	// Changed hears of the slots whose policy has changed.
	Changed func(slots []uint16)

	Wait    bool          // a new endpoint waits for its tables
	Timeout time.Duration // of that wait; 0: that of policysync
	Audit   bool          // all endpoints are in audit mode
	Linger  time.Duration // of tables that no endpoint uses; 0: that of policysync
	Log     *slog.Logger
}

// Policy is the policies of one node.
type Policy struct {
	Applier *policysync.Applier
	Modes   *auditmode.Modes // nil without Options.Audits
	learned *learned.Reporter
	wait    bool // for the tables
}

// Open takes over the tables that are in the kernel, and the audit modes that have not ended.
// Nothing is enforced that was not before, until the tasks run.
func Open(o Options) (*Policy, error) {
	p := &Policy{wait: o.Wait, Applier: policysync.New(policysync.Config{
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
		return nil, fmt.Errorf("take over policies: %w", err)
	}
	return p, nil
}

// Remove takes policies out of the kernel and out of the records: nothing shall evaluate
// packets any more.
func Remove(k policysync.Kernel, records endpoint.Records) error {
	if err := record.ForgetEvaluated(records); err != nil {
		return err
	}
	if err := policysync.Remove(k); err != nil {
		return fmt.Errorf("remove policies: %w", err)
	}
	return nil
}

// Wanted returns the learned addresses that a pass over the connections looks for, and what
// is told of those that it found; see conntrack.CollectorOptions. Nil: none are looked for.
func (p *Policy) Wanted() func() (addresses map[netip.Addr]struct{}, passed func(inUse []netip.Addr)) {
	if p.learned == nil {
		return nil
	}
	return p.learned.Wanted
}

// Tasks are the background work.
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

// Awaits are the tables, where a new endpoint waits for its own.
func (p *Policy) Awaits() []work.Await {
	if !p.wait {
		return nil
	}
	return []work.Await{{What: "the policy tables of sluice-policy", Done: p.Applier.Synced()}}
}

// Warnings name what is in audit mode.
func (p *Policy) Warnings() []string {
	if p.Modes == nil {
		return nil
	}
	return p.Modes.Warnings()
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policyhistory"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// flip switches endpoints to the tables that their subjects are bound to.
func (a *Applier) flip(w *work) error {
	for _, id := range slices.Sorted(maps.Keys(a.endpoints.subjects)) {
		s := a.endpoints.subjects[id]
		if !s.dirty {
			continue
		}
		s.dirty = false
		if err := a.flipSubject(w, id, s); err != nil {
			return err
		}
	}
	return nil
}

func (a *Applier) flipSubject(w *work, id uint32, s *subject) error {
	list := a.model.binds[id]
	if list == nil || !list[policytable.Egress].heard || !list[policytable.Ingress].heard {
		return nil
	}
	refusal, lacks := "", false
	var tables [2]nodetable.ID
	for d, b := range list {
		if b.table != nil && a.model.tables[b.id] != b.table {
			return nil // The table was retired, and the subject will be bound again or removed.
		}
		if b.table == nil || b.table.kernel != nil && !b.table.allowsTooMuch() {
			tables[d] = kernelID(b)
			s.rules[d], s.proxies[d] = b.table.named(b.rules), b.proxies()
			if b.table != nil && b.table.part != nil {
				lacks = true
				reason := refused(policytable.Direction(d), b) //nolint:gosec // 0 or 1
				w.nacks = append(w.nacks, policystream.Nack{Seq: b.seq, Subject: id, Table: b.id, Reason: reason})
			}
			continue
		}
		// The subject's old table may allow what the new one denies.
		tables[d] = nodetable.Pending
		s.rules[d], s.proxies[d] = nil, nil
		reason := refused(policytable.Direction(d), b) //nolint:gosec // 0 or 1
		w.nacks = append(w.nacks, policystream.Nack{Seq: b.seq, Subject: id, Table: b.id, Reason: reason})
		refusal = reason
	}
	switch {
	case refusal != "" && s.refusal != refusal:
		a.log.Warn("policy exceeds the capacity; its endpoints are isolated in that direction", "subject", id, "reason",
			refusal)
	case refusal == "" && s.refusal != "":
		a.log.Info("policy no longer exceeds the capacity and is enforced", "subject", id)
	}
	w.checks = true
	s.refusal, s.ready, s.lacks = refusal, refusal == "", lacks
	s.egress, s.ingress = tables[policytable.Egress], tables[policytable.Ingress]
	s.revision = max(list[policytable.Egress].revision, list[policytable.Ingress].revision)
	for _, n := range a.endpoints.slotsOf(id) {
		e := a.endpoints.slots[n]
		if e.Egress != s.egress || e.Ingress != s.ingress {
			if err := a.setPolicy(e, s); err != nil {
				return err
			}
			delete(w.bump, n)
			if err := faultFlip.Hit(w.ctx); err != nil {
				return err
			}
		}
	}
	a.refreshView(w, id)
	return nil
}

// setPolicy changes the tables of one endpoint.
func (a *Applier) setPolicy(e *slot, s *subject) error {
	return a.History.Flip(e.Slot, a.cfg.Now(), func() (p policyhistory.Policy, err error) {
		epoch, err := a.cfg.Kernel.SetPolicy(e.Slot, s.egress, s.ingress)
		if err != nil {
			return p, fmt.Errorf("set the policy of endpoint ID %d: %w", e.Slot, err)
		}
		e.Egress, e.Ingress, e.Epoch = s.egress, s.ingress, epoch
		return a.endpoints.policyOf(e.Slot), nil
	})
}

// isolate denies the traffic of the endpoints that a table evaluates, in its direction.
func (a *Applier) isolate(k *kernelTable) error {
	closed := func(t nodetable.ID) nodetable.ID {
		if t == k.id {
			return nodetable.Pending
		}
		return t
	}
	for _, s := range a.endpoints.subjects {
		s.egress, s.ingress = closed(s.egress), closed(s.ingress)
	}
	for _, n := range slices.Sorted(slices.Values(a.endpoints.evaluatedBy(k.id))) {
		e := a.endpoints.slots[n]
		if err := a.setPolicy(e, &subject{egress: closed(e.Egress), ingress: closed(e.Ingress)}); err != nil {
			return err
		}
		if err := faultFlip.Hit(context.Background()); err != nil {
			return err
		}
	}
	return nil
}

func kernelID(b binding) nodetable.ID {
	if b.table == nil {
		return nodetable.Allow
	}
	return b.table.kernel.id
}

// proxies returns the kinds of proxy of the rules that redirect, by rule number from 1.
func (b binding) proxies() (kinds map[uint16]uint16) {
	if b.table == nil {
		return nil
	}
	rules := b.table.content.Rules
	if b.table.part != nil {
		rules = b.table.kernel.content.Rules
	}
	for i, r := range rules {
		if r.Action == policytable.Redirect {
			if kinds == nil {
				kinds = make(map[uint16]uint16)
			}
			kinds[uint16(i+1)] = uint16(r.Proxy) //nolint:gosec // at most MaxRules
		}
	}
	return kinds
}

// maxRefusal bounds the length of a refusal; the API allows 1,024 characters.
const maxRefusal = 1000

// refused describes why a table is not in the kernel, and the policies that its rules come from.
func refused(d policytable.Direction, b binding) string {
	shares := map[string]int{}
	for _, sources := range b.rules {
		for _, src := range sources {
			shares[src.Policy()]++
		}
	}
	names := slices.SortedFunc(maps.Keys(shares), func(x, y string) int {
		return cmp.Or(cmp.Compare(shares[y], shares[x]), cmp.Compare(x, y))
	})
	text := fmt.Sprintf("%s: %v", d, b.table.err)
	const shown = 3
	for i, n := range names {
		switch {
		case i == 0:
			text += fmt.Sprintf("; most of its %d rules are from %s: %d", len(b.rules), n, shares[n])
		case i < shown:
			text += fmt.Sprintf(", %s %d", n, shares[n])
		}
	}
	if len(text) > maxRefusal {
		text = strings.ToValidUTF8(text[:maxRefusal], "") + "…"
	}
	return text
}

// refreshView updates the history with everything except tables: names, revision, refusal.
func (a *Applier) refreshView(w *work, id uint32) {
	for _, n := range a.endpoints.slotsOf(id) {
		a.History.Set(n, a.endpoints.policyOf(n), a.cfg.Now())
		w.flips = append(w.flips, n)
	}
}

// revise updates the summary after a message.
func (a *Applier) revise() {
	if a.pendingCapacity || len(a.model.missingRows) > 0 || a.model.unnumbered > 0 {
		a.left()
	}
	var refusals []string
	for _, id := range slices.Sorted(maps.Keys(a.endpoints.subjects)) {
		if s := a.endpoints.subjects[id]; s.refusal != "" {
			refusals = append(refusals, fmt.Sprintf("subject %d: %s", id, s.refusal))
		}
	}
	for _, t := range a.model.sortedTables() {
		if t.kernel != nil && t.err != nil {
			refusals = append(refusals, fmt.Sprintf("table %d: %v; %d rows and %d prefixes are missing", t.kernel.id, t.err, len(t.missing), len(t.missingPrefixes)))
		}
	}
	lost := a.highest.reach(a.model.revision, a.model.named, a.log)
	a.view.mu.Lock()
	defer a.view.mu.Unlock()
	if len(refusals) == 0 {
		a.view.revision = a.model.revision
	}
	if lost != "" {
		refusals = append(refusals, lost)
	}
	a.view.refusals, a.view.waiting = refusals, a.waiting
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// If a table exceeds its tenant's share, the kernel has the part with the rules that fit. The part denies all
// connections that the other rules decide, so it allows nothing that the whole table denies. Rows and prefixes with the
// same meaning as the default, or as the shorter prefix around them, are omitted.

// part describes the part of a table that is in the kernel.
type part struct {
	*nodetable.Part
	rules int // number of rules in the whole table
	// Rows and prefixes that the kernel's table does not need.
	rows     map[nodetable.IdentityClass]struct{}
	prefixes map[netip.Prefix]struct{}
}

// definition is a part that is ready to be written.
type definition struct {
	content nodetable.Content
	part    *part
	classes []uint16 // maps classes of the whole table to classes of the part
	size    nodetable.Size
}

var unbounded = nodetable.Size{
	math.MaxInt, math.MaxInt, math.MaxInt, math.MaxInt, math.MaxInt, math.MaxInt, math.MaxInt,
}

// limitOf returns the limit for a map's name.
func limitOf(name string) (nodetable.MapLimit, bool) {
	limit, ok := map[string]nodetable.MapLimit{
		"sl_table": nodetable.LimitTables, "sl_rule": nodetable.LimitRules,
		nodetable.PortMap: nodetable.LimitPortNodes,
		"sl_class":        nodetable.LimitPeerClasses, nodetable.PeerMap: nodetable.LimitPeerRows,
		"sl_cidr4": nodetable.LimitPrefixes4, "sl_cidr6": nodetable.LimitPrefixes6,
	}[name]
	return limit, ok
}

// within reports whether size is within all limits of most.
func within(size, most nodetable.Size) bool {
	for l, n := range size {
		if n > most[l] {
			return false
		}
	}
	return true
}

// partOf returns the definition of a part of a table.
func (m *model) partOf(t *serviceTable, p *nodetable.Part) *definition {
	c := &t.content
	d := &definition{content: p.Header(c), classes: make([]uint16, len(c.Classes))}
	d.part = &part{
		Part: p, rules: len(c.Rules),
		rows: make(map[nodetable.IdentityClass]struct{}), prefixes: make(map[netip.Prefix]struct{}),
	}
	known := make(map[policytable.Meaning]uint16)
	for i, ranges := range c.Classes {
		ranges = p.Ranges(uint16(i), ranges) //nolint:gosec // at most MaxClasses
		what := ranges.Meaning()
		at, ok := known[what]
		if !ok {
			at = uint16(len(d.content.Classes)) //nolint:gosec // at most MaxClasses
			d.content.Classes, known[what] = append(d.content.Classes, ranges), at
		}
		d.classes[i] = at
	}
	for kind, class := range c.DefaultClasses {
		d.content.DefaultClasses[kind] = d.classes[class]
	}
	d.content.AddressClasses = d.prefixClasses(c.AddressClasses)
	d.content.Peers = make(map[nodetable.IdentityClass]policytable.Class)
	for ic, class := range c.Peers {
		at, needed := d.classes[class], m.kinds[ic] == 0
		for kind := range d.content.DefaultClasses {
			needed = needed || m.kinds[ic]>>kind&1 != 0 && at != d.content.DefaultClasses[kind]
		}
		if needed {
			d.content.Peers[ic] = at
		} else {
			d.part.rows[ic] = struct{}{}
		}
	}
	d.content.Prefixes = make(map[netip.Prefix]policytable.PrefixClasses)
	var around []netip.Prefix // the prefixes that contain the next one, the widest first
	for _, p := range slices.SortedFunc(maps.Keys(c.Prefixes), netip.Prefix.Compare) {
		for n := len(around); n > 0 && !around[n-1].Contains(p.Addr()); n-- {
			around = around[:n-1]
		}
		outer := d.content.AddressClasses
		if n := len(around); n > 0 {
			outer = d.prefixClasses(c.Prefixes[around[n-1]])
		}
		if classes := d.prefixClasses(c.Prefixes[p]); classes != outer {
			d.content.Prefixes[p] = classes
		} else {
			d.part.prefixes[p] = struct{}{}
		}
		around = append(around, p)
	}
	return d
}

func (d *definition) prefixClasses(classes policytable.PrefixClasses) policytable.PrefixClasses {
	for i, class := range classes {
		classes[i] = d.classes[class]
	}
	return classes
}

// namespaces returns a function from the number of a table's rule to the namespace of its policy.
func (pl *placer) namespaces(t *serviceTable) func(rule int) string {
	var rules [][]policytable.Source
	if bind, ok := pl.expected[t.id]; ok {
		rules = bind.Rules
	} else if list := pl.model.binds[uint32(t.charge.subject)]; list != nil && list[t.charge.direction].table == t {
		rules = list[t.charge.direction].rules
	}
	return func(rule int) string {
		if rule > len(rules) || len(rules[rule-1]) == 0 {
			return ""
		}
		return rules[rule-1][0].Namespace
	}
}

// fitPart returns the largest part of a table that fits the shares of its tenants, charges it to a tenant, and requests
// space for the rest. If not even a part without rules fits, it returns nil and requests the whole table.
func (pl *placer) fitPart(t *serviceTable, most nodetable.Size) *definition {
	hosts := t.content.HostClasses(func(ic nodetable.IdentityClass) uint8 { return pl.model.kinds[ic] })
	pl.rooms.ledger.Delete(ask{t, true})
	try := func(list []uint16, n int) *definition {
		d := pl.model.partOf(t, t.content.Part(list[:n], hosts))
		if d.size = pl.kernel.SizeOf(d.content); within(d.size, most) && pl.rooms.fits(t, d.size) {
			return d
		}
		return nil
	}
	var best *definition
	for _, together := range []bool{true, false} {
		list, least := t.content.Order(together, pl.namespaces(t))
		if least >= len(list) && together {
			continue // every rule restricts
		}
		if best = try(list, least); best == nil {
			continue
		}
		for end := len(list); end-least > 1; { // the whole table does not fit
			middle := least + (end-least)/2
			if d := try(list, middle); d != nil {
				best, least = d, middle
			} else {
				end = middle
			}
		}
		break
	}
	whole := pl.kernel.SizeOf(t.content)
	if best == nil {
		pl.rooms.fits(t, whole)
		return nil
	}
	pl.rooms.fits(t, best.size)
	var lacks nodetable.Size
	for l := range lacks {
		lacks[l] = max(0, whole[l]-best.size[l])
	}
	pl.rooms.admits(ask{t, true}, t.charge.object(t.charge.payer, lacks, true))
	return best
}

// placePart writes the largest part of a table that fits. why is the reason why the whole table
// does not fit, and most bounds the part. If no part fits, the table is not in the kernel.
func (pl *placer) placePart(w *work, t *serviceTable, why error, most nodetable.Size) error {
	if written, err := pl.writePart(w, t, why, most); written || err != nil {
		return err
	}
	if t.kernel != nil {
		pl.withdraw(t)
	}
	pl.rooms.ledger.Restore(ask{table: t}, t.charge.object(t.charge.payers()[0], t.estimate(), false), false)
	t.err = why
	return nil
}

// writePart writes a part and charges it. If no part fits, it changes only the charge.
func (pl *placer) writePart(w *work, t *serviceTable, why error, most nodetable.Size) (bool, error) {
	for range nodetable.MapLimits {
		d := pl.fitPart(t, most)
		if d == nil {
			return false, nil
		}
		k, err := pl.tables.equal(d), error(nil)
		if k == nil {
			k, err = pl.tables.define(d.content)
		}
		if full, ok := errors.AsType[*nodetable.NoCapacityError](err); ok {
			limit, known := limitOf(full.Map)
			if !known {
				return false, nil
			}
			most[limit] = min(most[limit]-1, full.Free, full.Limit)
			continue
		}
		if errors.Is(err, nodetable.ErrNoCapacity) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("define a part of table %d: %w", t.id, err)
		}
		former := t.kernel
		pl.unplace(t)
		k.owner = t
		t.kernel, t.part, t.same, t.classes = k, d.part, false, d.classes
		t.err = fmt.Errorf("%w; %d of its %d rules are enforced; connections that the others decide are denied",
			why, d.part.Rules(), d.part.rules)
		pl.rooms.take(t, pl.kernel.TableSize(k.id))
		if _, used := pl.used()[former]; former != nil && former != k && !used {
			pl.discard(former.id)
		}
		w.checks = true
		return true, faultDefine.Hit(w.ctx)
	}
	return false, nil
}

// maxYields bounds the parts that are reduced for one table.
const maxYields = 4

// yield makes space for a table of the given size: it reduces parts of other tables of the tenant, the largest first,
// until the table fits or can get as much space as the largest part has. If the table fits, it charges it and returns
// true.
func (pl *placer) yield(w *work, t *serviceTable, size nodetable.Size) (bool, error) {
	var least nodetable.Size
	for range maxYields {
		limit, refused := pl.rooms.refused(t)
		if !refused {
			return false, nil
		}
		largest := pl.largestPart(t, limit)
		if largest == nil {
			return false, nil
		}
		if least == (nodetable.Size{}) {
			least = pl.kernel.SizeOf(pl.model.partOf(t, t.content.Part(nil, nil)).content)
		}
		most, former := unbounded, largest.charge.units
		most[limit] = former[limit] / 2
		if most[limit] < least[limit] {
			return false, nil
		}
		pl.rooms.fits(largest, pl.kernel.SizeOf(largest.content))
		written, err := pl.writePart(w, largest, pl.rooms.exceeds(largest, false), most)
		if err != nil {
			return false, err
		}
		if !written {
			pl.rooms.take(largest, former)
			return false, nil
		}
		pl.flipUsers(largest)
		if pl.rooms.fits(t, size) {
			return true, nil
		}
		if size[limit] >= former[limit] {
			return false, nil
		}
	}
	return false, nil
}

// largestPart returns the partial table of the same tenant that takes most of a limit; nil if the
// tenant has none.
func (pl *placer) largestPart(t *serviceTable, limit nodetable.MapLimit) (largest *serviceTable) {
	for _, o := range pl.model.sortedTables() {
		if o == t || o.part == nil || o.charge.payer != t.charge.payer {
			continue
		}
		if largest == nil || o.charge.units[limit] > largest.charge.units[limit] {
			largest = o
		}
	}
	return largest
}

// unplace separates a table from its kernel table, which stays until no endpoint uses it.
func (pl *placer) unplace(t *serviceTable) {
	if t.kernel != nil {
		t.kernel.owner = nil
	}
	t.kernel, t.part = nil, nil
	t.missing, t.missingPrefixes, t.unsafe = nil, nil, false
	delete(pl.model.missingRows, t)
}

// discard retires a table that was just written and that nothing uses.
func (pl *placer) discard(id nodetable.ID) {
	if err := pl.tables.retire(id); err != nil {
		pl.log.Error("table not retired", "table", id, log.Err(err)) // the next sweep tries again
		return
	}
	pl.draining()
}

// refit replaces the part of a table when the whole table fits, or a part with an eighth more
// rules. It also replaces a part that lacks rows or prefixes.
func (pl *placer) refit(w *work, t *serviceTable) error {
	before, units := t.kernel, t.charge.units
	pl.rooms.ledger.Delete(ask{t, true})
	if pl.rooms.fits(t, pl.kernel.SizeOf(t.content)) {
		old := *t
		pl.unplace(t)
		if err := pl.define(w, t, len(t.content.Peers)); err != nil || t.kernel != nil {
			pl.flipUsers(t)
			return err
		}
		// The maps have no capacity for it.
		*t = old
		before.owner = t
		pl.model.lacksAgain(t)
	}
	why := pl.rooms.exceeds(t, false)
	grown := t.part.Rules() + max(1, (t.part.rules-t.part.Rules())/8)
	lacks := len(t.missing)+len(t.missingPrefixes) > 0
	if d := pl.fitPart(t, unbounded); d == nil || !lacks && d.part.Rules() < grown {
		pl.rooms.take(t, units)
		return nil
	}
	err := pl.placePart(w, t, why, unbounded)
	pl.flipUsers(t)
	return err
}

// lacksAgain restores the missing rows of a table in the model.
func (m *model) lacksAgain(t *serviceTable) {
	if len(t.missing) > 0 {
		m.missingRows[t] = struct{}{}
	}
}

// spread writes the omitted prefixes inside p before p changes: they were omitted because they equalled p, which will
// no longer be true.
func (pl *placer) spread(w *work, t *serviceTable, p netip.Prefix) error {
	_, left := t.part.prefixes[p]
	delete(t.part.prefixes, p)
	if _, wanted := t.content.Prefixes[p]; left && !wanted {
		return nil // p has no effect on the prefixes inside it
	}
	for _, q := range slices.SortedFunc(maps.Keys(t.part.prefixes), netip.Prefix.Compare) {
		if _, left := t.part.prefixes[q]; !left || p.Bits() >= q.Bits() || !p.Contains(q.Addr()) {
			continue
		}
		if err := pl.prefix(w, t, q, false); err != nil {
			return err
		}
	}
	return nil
}

// unsafeRows reports whether peers of rows that a part omits may do more as unknown peers than with their rows. kinds
// are the kinds of peers that the part treats as unknown.
func (m *model) unsafeRows(t *serviceTable, kinds [identity.Kinds]bool) bool {
	if t.part == nil {
		return false
	}
	unknown := t.content.DefaultClasses[identity.KindUnknown]
	for ic := range t.part.rows {
		for kind, is := range kinds {
			if is && m.kinds[ic]>>kind&1 != 0 && !t.content.AtMost(unknown, t.content.Peers[ic]) {
				return true
			}
		}
	}
	return false
}

// named returns the sources of a table's rules, indexed by the kernel's rule numbers.
func (t *serviceTable) named(rules [][]policytable.Source) [][]policytable.Source {
	if t == nil || t.part == nil {
		return rules
	}
	out := make([][]policytable.Source, len(t.part.Former))
	for i, former := range t.part.Former {
		if former == 0 {
			out[i] = []policytable.Source{{Kind: "rules", Name: "beyond the share of the tenant"}}
		} else if int(former) <= len(rules) {
			out[i] = rules[former-1]
		}
	}
	return out
}

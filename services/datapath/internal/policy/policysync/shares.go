// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// Tables share the maps of the node, and each is charged to the tenant of its subject. If subjects of several tenants
// use a table, only one of these tenants pays for it. So a table counts once, and no tenant pays for a table that none
// of its subjects uses.

// divided returns how much of a map is divided among tenants. A fifth is kept free: for leaving tables, because of
// fragmentation, and for tables to grow.
func divided(size int) int { return size - size/5 }

// maxPayers bounds the tenants that are tried as payers of a table.
const maxPayers = 8

// charge is the space that a table takes in the maps, and the tenant that pays for it.
type charge struct {
	tenants map[shares.Tenant]int // of the subjects, with the number of their bindings
	payer   shares.Tenant
	// The lowest subject among the bindings, with its direction, orders the tables of a tenant.
	subject   identity.Numeric
	direction policytable.Direction
	units     nodetable.Size // as charged
}

// join records that a subject uses the table.
func (c *charge) join(st policytable.BindSubject) {
	if c.tenants == nil {
		c.tenants = make(map[shares.Tenant]int, 1)
	}
	c.tenants[st.Tenant]++
	if c.subject == 0 || st.Subject < c.subject {
		c.subject, c.direction = st.Subject, st.Direction
	}
}

func (c *charge) leave(t shares.Tenant) {
	if c.tenants[t]--; c.tenants[t] <= 0 {
		delete(c.tenants, t)
	}
}

// payers returns the possible payers: the current one, then the others.
func (c *charge) payers() []shares.Tenant {
	switch _, pays := c.tenants[c.payer]; {
	case len(c.tenants) == 0, len(c.tenants) == 1 && pays:
		return []shares.Tenant{c.payer}
	}
	all := slices.SortedFunc(maps.Keys(c.tenants), shares.Tenant.Compare)
	if i := slices.Index(all, c.payer); i >= 0 {
		all[0], all[i] = all[i], all[0]
	}
	return all[:min(len(all), maxPayers)]
}

// ask is a key of the ledger: the space that a table takes or, if more is set, the additional space that the table
// requests.
type ask struct {
	table *serviceTable
	more  bool
}

// rooms divides the maps among tenants.
type rooms struct {
	ledger     *shares.Ledger[ask]
	guarantees map[string]int // of tenants, in percent
}

// reset removes all tables.
func (r *rooms) reset(sizes nodetable.Size) {
	if r.guarantees == nil {
		r.guarantees = make(map[string]int)
	}
	limits := make([]shares.Limit, nodetable.MapLimits)
	for l := range nodetable.MapLimits {
		limits[l] = shares.Limit{Name: l.String(), Size: divided(sizes[l])}
	}
	r.ledger = shares.NewLedger[ask](shares.Settings{Guarantees: r.guarantees}, limits...)
}

// admits adds an object to the ledger, and reports whether it is admitted.
func (r *rooms) admits(k ask, o shares.Object) bool {
	return r.ledger.Put(k, o) // in place: the ledger is not a kernel map
}

// object returns the ledger's object for a table and its payer.
func (c *charge) object(payer shares.Tenant, units nodetable.Size, more bool) shares.Object {
	o := shares.Object{Tenant: payer, Units: slices.Clone(units[:])}
	o.Order.Name = fmt.Sprintf("%010d %d", c.subject, c.direction)
	if more {
		o.Order.Index = 1
	}
	return o
}

// take charges a table, even beyond the share.
func (r *rooms) take(t *serviceTable, units nodetable.Size) {
	c := &t.charge
	c.payer, c.units = c.payers()[0], units
	r.ledger.Restore(ask{table: t}, c.object(c.payer, units, false), true)
}

// fits charges a table, and reports whether it fits the share of one of its tenants. If not, it
// stays in the ledger as a request.
func (r *rooms) fits(t *serviceTable, units nodetable.Size) bool {
	c := &t.charge
	c.units = units
	for _, payer := range c.payers() {
		c.payer = payer
		if r.admits(ask{table: t}, c.object(payer, units, false)) {
			return true
		}
	}
	return false
}

// grows reports whether a table in the kernel may grow by the space by, and charges it to the table's tenant. If it is
// refused, the ledger keeps a request for wanted, all the space that the table lacks, so that a later division may
// grant it.
func (r *rooms) grows(t *serviceTable, by, wanted nodetable.Size) bool {
	more, payer := ask{t, true}, t.charge.payers()[0]
	for _, next := range []nodetable.Size{wanted, by} {
		if r.admits(more, t.charge.object(payer, next, true)) {
			r.ledger.Delete(more)
			for l := range next {
				next[l] += t.charge.units[l]
			}
			r.take(t, next)
			return true
		}
	}
	r.admits(more, t.charge.object(payer, wanted, true))
	return false
}

// forget removes a table from the ledger.
func (r *rooms) forget(t *serviceTable) {
	r.ledger.Delete(ask{table: t})
	r.ledger.Delete(ask{t, true})
}

// refused returns the limit that a table exceeds.
func (r *rooms) refused(t *serviceTable) (nodetable.MapLimit, bool) {
	limit, _, _, refused := r.ledger.Refused(ask{table: t})
	for l := range nodetable.MapLimits {
		if refused && limit.Name == l.String() {
			return l, true
		}
	}
	return 0, false
}

// exceeds describes why a table does not fit.
func (r *rooms) exceeds(t *serviceTable, more bool) error {
	limit, tenant, share, _ := r.ledger.Refused(ask{t, more})
	return fmt.Errorf("%w: it exceeds the share of %s of %s on this node (the tenant has %d of %d and asks for %d)",
		nodetable.ErrNoCapacity, tenant, limit.Name, share.Admitted, limit.Size, share.Asked)
}

// estimate returns the least space that a table needs.
func (t *serviceTable) estimate() nodetable.Size {
	c := &t.content
	size := nodetable.Size{
		nodetable.LimitTables: 1, nodetable.LimitRules: len(c.Rules), nodetable.LimitPeerClasses: len(c.Classes),
		nodetable.LimitPortNodes: t.charge.units[nodetable.LimitPortNodes], // of an earlier attempt
		nodetable.LimitPeerRows:  len(c.Peers),
	}
	for p := range c.Prefixes {
		size[prefixLimit(p.Addr().Is4())]++
	}
	return size
}

func prefixLimit(is4 bool) nodetable.MapLimit {
	if is4 {
		return nodetable.LimitPrefixes4
	}
	return nodetable.LimitPrefixes6
}

// admit charges a new table. It returns the number of rows that fit the shares of its tenants; ok
// is false if the rest of the table does not fit.
func (pl *placer) admit(t *serviceTable) (rows int, ok bool) {
	r, size := &pl.rooms, t.estimate()
	rows = size[nodetable.LimitPeerRows]
	r.ledger.Delete(ask{t, true})
	if r.fits(t, size) {
		return rows, true
	}
	limit, _, _, _ := r.ledger.Refused(ask{table: t})
	if limit.Name != nodetable.LimitPeerRows.String() {
		return 0, false
	}
	with := func(rows int) bool {
		less := size
		less[nodetable.LimitPeerRows] = rows
		return r.fits(t, less)
	}
	if !with(0) {
		r.fits(t, size)
		return 0, false
	}
	least, most := 0, rows-1
	for least < most {
		if middle := (least + most + 1) / 2; with(middle) {
			least = middle
		} else {
			most = middle - 1
		}
	}
	with(least)
	lacks := nodetable.Size{nodetable.LimitPeerRows: rows - least}
	r.admits(ask{t, true}, t.charge.object(t.charge.payer, lacks, true))
	return least, true
}

// needs records the space that a table needed when it did not fit the kernel's maps.
func (pl *placer) needs(t *serviceTable, full *nodetable.NoCapacityError) {
	if full != nil && full.Map == nodetable.PortMap {
		t.charge.units[nodetable.LimitPortNodes] = full.Need
	}
	pl.rooms.ledger.Restore(ask{table: t}, t.charge.object(t.charge.payer, t.estimate(), false), false)
}

// divide divides the maps again. It returns the tables in the kernel whose tenants exceed their
// share, and the requests that are admitted now.
func (pl *placer) divide() (short []*serviceTable, admitted []ask) {
	withdraw, admitted := pl.rooms.ledger.Level(pl.now())
	order := func(x, y ask) int { return int(x.table.charge.subject) - int(y.table.charge.subject) }
	slices.SortFunc(withdraw, order)
	slices.SortFunc(admitted, order)
	for _, k := range withdraw {
		if t := k.table; !k.more && t.kernel != nil && !pl.rooms.fits(t, t.charge.units) {
			short = append(short, t)
		}
	}
	return short, admitted
}

// shrink replaces a table whose tenant exceeds its share by the part that fits.
func (pl *placer) shrink(w *work, t *serviceTable) error {
	err := pl.placePart(w, t, pl.rooms.exceeds(t, false), unbounded)
	pl.flipUsers(t)
	return err
}

// level divides the maps again, if that is due, and applies the result.
func (pl *placer) level(w *work) error {
	if next := pl.rooms.ledger.Next(); next.IsZero() || pl.now().Before(next) {
		return nil
	}
	for _, t := range pl.model.sortedTables() {
		pl.recharge(t)
	}
	short, admitted := pl.divide()
	for _, t := range short {
		if err := pl.shrink(w, t); err != nil {
			return err
		}
	}
	if len(short) > 0 {
		if err := pl.subjects.flip(w); err != nil {
			return err
		}
		if err := pl.sweep(w); err != nil {
			return err
		}
	}
	for _, k := range admitted {
		if t := k.table; !k.more && t.kernel == nil && pl.model.tables[t.id] == t {
			if err := pl.place(w, t); err != nil {
				return err
			}
			pl.flipUsers(t)
		}
	}
	for _, t := range pl.model.sortedTables() {
		if t.part != nil && !slices.Contains(short, t) {
			if err := pl.refit(w, t); err != nil {
				return err
			}
		}
	}
	return pl.subjects.flip(w)
}

// recharge corrects the charge of a table in the kernel.
func (pl *placer) recharge(t *serviceTable) {
	if t.kernel == nil {
		return
	}
	_, pays := t.charge.tenants[t.charge.payer]
	if size := pl.kernel.TableSize(t.kernel.id); size != t.charge.units || !pays {
		pl.rooms.take(t, size)
	}
}

// withdraw takes a table from its subjects, which flip isolates.
func (pl *placer) withdraw(t *serviceTable) {
	t.err = pl.rooms.exceeds(t, false)
	pl.unplace(t)
	pl.rooms.ledger.Delete(ask{t, true})
	pl.flipUsers(t)
}

// expect records the bindings of tables that a message defines, and releases the charges of tables
// that it retires.
func (pl *placer) expect(m policytable.Message) {
	pl.expected = nil
	for _, st := range m.Steps {
		switch st := st.(type) {
		case policytable.BindSubject:
			if st.Guarantee > 0 {
				pl.rooms.guarantees[st.Tenant.Name()] = st.Guarantee
			} else if st.Tenant.HasLabel() {
				delete(pl.rooms.guarantees, st.Tenant.Name())
			}
			if st.Table != 0 {
				if pl.expected == nil {
					pl.expected = make(map[policytable.ID]policytable.BindSubject)
				}
				pl.expected[st.Table] = st
			}
		case policytable.RetireTable:
			if pl.model != nil && pl.model.tables[st.Table] != nil {
				pl.rooms.forget(pl.model.tables[st.Table])
			}
		}
	}
}

// Shares returns the tenants' use of the maps.
func (a *Applier) Shares() []shares.Usage {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rooms.ledger.Usage()
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
	"github.com/sluice-net/sluice/services/datapath/internal/service/idalloc"
	"github.com/sluice-net/sluice/services/datapath/internal/service/rendezvous"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap/vip"
)

// Apply applies a transaction. When it returns, every later packet and socket call sees the frontends of the
// transaction, except for refused ones. Earlier calls may still use what was removed: see Barrier.
//
// A frontend that does not fit is refused; the others are applied. If a refused frontend already exists, the backends
// and clients that it should no longer have are still removed. If it is new, connections to it are refused, if there is
// space for that: see close. If space is short and elements were removed, or lists were moved to make space, Apply
// waits for a grace period and tries again.
//
// The maps do not store which backends are draining. Therefore the first transaction that is not partial must contain
// every frontend with draining backends: backends of other frontends stop draining.
func (m *Maps) Apply(ctx context.Context, tx *frontendtx.Transaction) (frontendtx.Result, error) {
	res, again, err := m.apply(tx)
	if again == nil || err != nil {
		return res, err
	}
	if err := m.Barrier(ctx); err != nil {
		return res, err
	}
	second, _, err := m.apply(again)
	second.Changed += res.Changed
	for _, r := range res.Refused {
		if !again.Has(r.Key) {
			second.Refused = append(second.Refused, r)
		}
	}
	frontendtx.SortRefusals(second.Refused)
	return second, err
}

// apply applies a transaction and returns the changes to repeat after a grace period; nil: none.
func (m *Maps) apply(tx *frontendtx.Transaction) (_ frontendtx.Result, again *frontendtx.Transaction, err error) {
	if err := m.gate.Lock(); err != nil {
		return frontendtx.Result{}, nil, err
	}
	defer m.gate.Unlock()
	a := &application{s: m.store}
	m.store.pending = [families]int{}
	m.store.expect(tx)
	// existing frontends come first: they contain the affinity groups of their services
	var news []*frontend.Frontend
	set := func(f *frontend.Frontend) {
		err := a.set(f)
		if err == nil {
			return
		}
		if _, there := m.store.entries[f.Key]; there {
			a.reduce(f)
		} else {
			err = a.close(f, err)
		}
		a.refuse(f.Key, err)
	}
	for _, c := range tx.Changes() {
		if c.Frontend == nil {
			continue
		}
		if _, there := m.store.entries[c.Key]; there {
			set(c.Frontend)
		} else {
			news = append(news, c.Frontend)
		}
	}
	for _, f := range news {
		set(f)
	}
	a.insertAll()
	for _, c := range tx.Changes() {
		if c.Frontend == nil {
			a.remove(c.Key)
		}
	}
	if !tx.Partial {
		m.store.addresses.Disown()
	}
	a.settleAddresses()
	a.drainAll()
	if !tx.Partial {
		a.lost = append(a.lost, m.store.adopted...)
		m.store.adopted = nil
	}
	a.loseBackends()
	frontendtx.SortRefusals(a.res.Refused)
	a.gather()
	a.noteShort()
	if !m.store.left.empty() {
		again = a.short(tx)
	}
	return a.res, again, errors.Join(a.errs...)
}

// expect sizes the Go maps of an empty store for a transaction, because growing them step by step would take longer
// than everything else.
func (s *store) expect(tx *frontendtx.Transaction) {
	if len(s.entries) > 0 || tx.Partial {
		return
	}
	n := [families]int{}
	for _, c := range tx.Changes() {
		if f := c.Frontend; f != nil && f.Inside != nil {
			n[familyOf(f.Key.Addr)] += len(f.Inside.Backends)
		}
	}
	s.entries = make(map[frontend.Key]*entry, len(tx.Changes()))
	s.lists = make(map[uint64][]*list, len(tx.Changes()))
	for fam := range families {
		if len(s.backends[fam]) == 0 {
			s.backends[fam] = make(map[netip.AddrPort]*backend, min(n[fam], s.nBackends))
		}
	}
}

// short returns the changes that were refused for lack of capacity; nil: none.
func (a *application) short(tx *frontendtx.Transaction) (again *frontendtx.Transaction) {
	refused := map[frontend.Key]bool{}
	for _, r := range a.res.Refused {
		var room *frontendtx.NoRoomError
		refused[r.Key] = errors.As(r.Err, &room)
	}
	for _, c := range tx.Changes() {
		if !refused[c.Key] {
			continue
		}
		if again == nil {
			again = &frontendtx.Transaction{Partial: tx.Partial}
		}
		again.Upsert(c.Frontend)
	}
	return again
}

// application is a transaction in progress.
type application struct {
	s       *store
	res     frontendtx.Result
	errs    []error
	inserts [families][]*entry // entries whose keys are not in the maps yet
	lost    []*backend         // backends that lists or draining fronts have lost

	draining []draining
}

func (a *application) refuse(k frontend.Key, err error) {
	a.res.Refused = append(a.res.Refused, frontend.Refusal{Key: k, Err: err})
}

// part is one front of a frontend with its desired list.
type part struct {
	front *front // nil: to be created
	want  *frontend.List
	flags uint16

	sources []netip.Prefix // clients that may connect, with flagSources

	list     *list       // nil: to be created at span
	span     idalloc.Run // place of the new list
	backends []*backend  // nil elements: to be created
}

// gainsTable reports whether the part needs a table and the front has no table that it would replace.
func (p *part) gainsTable() bool {
	return wantedTable(p.want) > 0 && (p.front == nil || p.front.list.table == nil)
}

// plan returns the parts of a frontend, and whether its key must refer to other fronts than before.
func plan(e *entry, f *frontend.Frontend) (inside, outside *part, reshape bool) {
	in, out := f.Inside, f.Outside
	var flags uint16
	if len(f.SourceRanges) > 0 {
		flags = flagSources
	}
	sources := sourcesOf(f)
	newPart := func(l *frontend.List) *part {
		p := &part{want: l, flags: flags, sources: sources}
		if l.Drop {
			p.flags |= flagDrop
		}
		return p
	}
	if in != nil {
		inside = newPart(in)
	}
	// Every kind except ClusterIP may get a separate list for outside at any time. It has its own front for that, so that
	// the key never needs to change.
	shared := out == nil && f.Kind == frontend.ClusterIP
	if e != nil && (e.inside != nil) == (in != nil) {
		shared = out == nil && e.outside == e.inside
	}
	switch {
	case shared:
		outside = inside
	case out != nil:
		outside = newPart(out)
	default:
		outside = newPart(in)
	}
	if e != nil {
		if inside != nil {
			inside.front = e.inside
		}
		if outside != inside && e.outside != e.inside {
			outside.front = e.outside
		}
		reshape = (inside == nil) != (e.inside == nil) || (inside == outside) != (e.inside == e.outside)
	}
	return inside, outside, reshape
}

func parts(inside, outside *part) []*part {
	switch {
	case inside == nil || inside == outside:
		return []*part{outside}
	default:
		return []*part{inside, outside}
	}
}

// set changes a frontend to the desired state. It writes nothing if the frontend is already in that state, or does not
// fit.
func (a *application) set(f *frontend.Frontend) error {
	st := there
	if e := a.s.entries[f.Key]; e == nil || e.refused {
		st = newcomer
	}
	return a.setWith(f, st)
}

// setWith is set for a frontend that may use part of the reserve.
func (a *application) setWith(f *frontend.Frontend, st standing) error {
	if err := f.Validate(); err != nil {
		return err
	}
	s := a.s
	e := s.entries[f.Key]
	if f.Kind == 0 { // of frontendtx.Closed
		if e == nil {
			return nil
		}
		f = e.closed()
	}
	inside, outside, reshape := plan(e, f)
	ps := parts(inside, outside)
	timeout := uint32(f.Affinity / time.Second)
	group, err := s.groupFor(e, f.Service, timeout)
	if err != nil {
		return err
	}
	same := e != nil && !reshape && e.timeout == timeout && e.group == group
	for _, p := range ps {
		if p.front != nil && p.front.list.is(p.want) {
			p.list = p.front.list
		}
		same = same && p.list != nil && p.front.flags == p.flags && slices.Equal(p.front.sources, p.sources)
	}
	claim := vip.Of(f)
	if f.Kind == 0 && s.addresses.Has(f.Key.Addr) {
		claim = vip.Exclusive // as a previous process wrote it
	}
	if !same || claim != e.claim {
		keys := 0
		if e == nil {
			keys = 1
		}
		if s.addresses.NeedsKey(f) {
			keys++
		}
		if err := s.makeRoom(st, e, f, keys, ps); err != nil {
			s.freeUnused(group)
			return tableError(f, ps, err)
		}
		s.pending[familyOf(f.Key.Addr)] += keys
	}
	if e == nil {
		e = &entry{key: f.Key}
		s.entries[f.Key] = e
		fam := familyOf(f.Key.Addr)
		a.inserts[fam] = append(a.inserts[fam], e)
		reshape = false
	}
	e.service, e.kind, e.refused = f.Service, f.Kind, st == closing
	e.tenant = f.Tenant
	e.each(func(x *front) { s.own(x, f.Tenant) })
	s.claim(e, claim)
	s.reopen(f.Key)
	s.join(e, group)
	e.timeout = timeout
	a.draining = append(a.draining, draining{ps, familyOf(f.Key.Addr), !same})
	if same {
		return nil
	}
	a.res.Changed++
	for _, p := range ps {
		a.write(e, p)
	}
	was := *e
	e.inside, e.outside = nil, outside.front
	if inside != nil {
		e.inside = inside.front
	}
	if reshape {
		return a.reshape(e, &was)
	}
	return nil
}

// reshape makes a key refer to other fronts. Between deleting and inserting the key, packets find no frontend, because
// the value of a key is never replaced. This is only needed if a frontend gains or loses its use from inside, or if a
// ClusterIP gets a separate list for outside.
func (a *application) reshape(e, was *entry) error {
	s := a.s
	now := *e
	retire := func(of, but *entry) {
		of.each(func(f *front) {
			if f != but.inside && f != but.outside {
				a.retire(f)
			}
		})
	}
	if err := s.deleteKey(rawKeyOf(e.key)); err != nil {
		e.inside, e.outside = was.inside, was.outside
		retire(&now, was)
		return err
	}
	err := s.insertKey(numbered{e.key, e.fe()})
	retire(was, &now)
	if err != nil {
		s.nKeys[familyOf(e.key.Addr)]--
		a.dropClosed(e)
	}
	return err
}

// makeRoom finds existing lists for the parts of an entry (nil: a new entry), or allocates elements and backends for
// new ones. If something does not fit, it allocates nothing.
func (s *store) makeRoom(st standing, e *entry, f *frontend.Frontend, keys int, ps []*part) error {
	fam := familyOf(f.Key.Addr)
	fitsBeside := func(kept int, mapName string, need, total, free, size int) error {
		if free = max(free-kept, 0); need > free || total > quarter(size) {
			return &frontendtx.NoRoomError{Map: mapName, Need: need, Free: free, Limit: quarter(size)}
		}
		return nil
	}
	fits := func(mapName string, need, total, free, size int) error {
		return fitsBeside(st.kept(size), mapName, need, total, free, size)
	}
	fitsNumbers := func(kind int, mapName string, need, total, free, size int) error {
		if need == 0 {
			return fits(mapName, need, total, free, size)
		}
		leaves := s.removed[kind].leaves(f.Tenant, size)
		err := fitsBeside(st.kept(size)+leaves, mapName, need, total, free, size)
		if room, ok := errors.AsType[*frontendtx.NoRoomError](err); ok && leaves > 0 {
			room.Resting, room.Tenant = s.removed[kind].of[f.Tenant], f.Tenant.String()
		}
		return err
	}
	members, backends, fronts, largest, sources := 0, 0, 0, 0, 0
	longest, bits, gains := 0, 0, false // of the runs and of the tables
	for _, p := range ps {
		sources += p.missing()
		if p.front == nil {
			fronts++
		}
		if p.list == nil {
			p.list = s.find(fam, p.want)
		}
		if p.list != nil {
			continue
		}
		n := len(p.want.Backends)
		table := wantedTable(p.want)
		if table > 0 && n > rendezvous.MaxBackends {
			return fmt.Errorf("%d backends, at most %d have a table", n, rendezvous.MaxBackends)
		}
		length := runLength(n, table)
		members += length
		largest, longest, bits = max(largest, n), max(longest, length), max(bits, table)
		gains = gains || p.gainsTable()
		p.backends = make([]*backend, n)
		for i := range p.backends {
			if p.backends[i] = s.backends[fam][p.want.Backends[i].AddrPort]; p.backends[i] == nil {
				backends++
			}
		}
	}
	ownKeys, ownFronts := e.ofReserve()
	for _, err := range []error{
		fitsBeside(s.keptMembers(st, bits, gains), bpf.MapsMapSlMember, members, longest, s.members.Free(), s.nMembers),
		fitsNumbers(backendKind+fam, backendMap[fam], backends, largest, s.backendNumbers[fam].Free(), s.nBackends),
		fitsNumbers(frontKind, bpf.MapsMapSlFront, ownFronts+fronts, 0, ownFronts+s.frontNumbers.Free(), s.nFronts),
		s.sourceUse[fam].fit(f.Tenant, sources, sourceMap[fam]),
		fits(sourceMap[fam], sources, sources, s.sourceRoom(fam), int(s.sources[fam].MaxEntries())),
		fits(keyMap[fam], ownKeys+keys, 0, ownKeys+s.keyRoom(fam), int(s.keys[fam].MaxEntries())),
	} {
		if err != nil {
			return err
		}
	}
	if largest > maxCount {
		return &frontendtx.NoRoomError{Map: bpf.MapsMapSlMember, Need: largest, Free: s.members.Free(), Limit: maxCount}
	}
	free := s.members.Free()
	for i, p := range ps {
		if p.list != nil {
			continue
		}
		if ok := s.allocate(p, gains); !ok {
			for _, q := range ps[:i] {
				if q.list == nil {
					s.members.Give(q.span)
				}
			}
			e := &frontendtx.NoRoomError{
				Map: bpf.MapsMapSlMember, Need: longest, Free: free, Limit: quarter(s.nMembers), Run: members,
			}
			if table := wantedTable(p.want); table > 0 {
				e.Run, e.Aligned = max(longest, s.longest(table)), true
				if gains {
					e.Run *= 2 // Another run is needed, in which any table can be exchanged.
				}
			}
			return e
		}
	}
	return nil
}

// allocate allocates the run for the list of a part. With spare, it also requires another free run, in which any table
// can be exchanged.
func (s *store) allocate(p *part, spare bool) (ok bool) {
	bits := wantedTable(p.want)
	if bits == 0 {
		p.span, ok = s.members.Take(len(p.backends))
		return ok
	}
	if p.span, ok = s.members.TakeLast(runLength(len(p.backends), bits)); !ok || !spare {
		return ok
	}
	other, ok := s.members.TakeLast(s.longest(bits))
	if ok {
		s.members.Give(other)
	} else {
		s.members.Give(p.span)
	}
	return ok
}

// tableError adds the service to the error if the refused frontend needs a table that does not fit.
func tableError(f *frontend.Frontend, ps []*part, err error) error {
	if room, ok := errors.AsType[*frontendtx.NoRoomError](err); ok && room.Map != bpf.MapsMapSlMember {
		return err
	}
	for _, p := range ps {
		if slots := rendezvous.Slots(wantedTable(p.want)); slots > 0 && p.list == nil {
			return fmt.Errorf("service %s needs a table of %d slots: %w", f.Service, slots, err)
		}
	}
	return err
}

// keyRoom returns the number of free keys of a family.
func (s *store) keyRoom(fam int) int {
	return int(s.keys[fam].MaxEntries()) - s.nKeys[fam] - s.pending[fam]
}

// sourceRoom returns the number of free source ranges of a family.
func (s *store) sourceRoom(fam int) int { return int(s.sources[fam].MaxEntries()) - s.nSources[fam] }

// write sets the list of a front, and creates both if they do not exist.
func (a *application) write(e *entry, p *part) {
	s := a.s
	if p.list == nil {
		// two parts may need equal lists
		if p.list = s.find(familyOf(e.key.Addr), p.want); p.list != nil {
			s.members.Give(p.span)
		} else {
			p.list = a.makeList(e, p)
		}
	}
	if p.front == nil {
		number, _ := s.frontNumbers.Take()
		p.front = &front{
			number: number, key: e.key, list: p.list, flags: p.flags, timeout: e.timeout, group: e.group,
			tenant: e.tenant,
		}
		p.list.fronts++
		s.fronts[number] = p.front
		a.allow(p.front, p.sources)
		p.front.sources = p.sources
		s.storeFront(number, p.front.packed())
		return
	}
	f := p.front
	if f.timeout != e.timeout || f.group != e.group {
		f.timeout, f.group = e.timeout, e.group
		s.storeFrontWord(f.number, groupWord, f.groupWord())
	}
	// New prefixes are inserted before the flag takes effect, and old ones are deleted after it has been cleared.
	a.allow(f, p.sources)
	defer a.restrict(f, p.sources)
	if f.list == p.list && f.flags == p.flags {
		return
	}
	old := f.list
	f.list, f.flags = p.list, p.flags
	p.list.fronts++
	s.storeFrontWord(f.number, listWord, f.listWord())
	a.release(old)
}

// draining are the parts of one frontend, whose fronts may have draining backends.
type draining struct {
	parts   []*part
	family  int
	changed bool // already counted as changed
}

// drainAll sets the draining backends of the fronts, after all lists are written.
func (a *application) drainAll() {
	for _, d := range a.draining {
		for _, p := range d.parts {
			if p.front.list == nil { // the front was dropped, because its key could not be inserted
				continue
			}
			if a.drain(p.front, a.s.known(d.family, p.want.Draining)) && !d.changed {
				d.changed = true
				a.res.Changed++
			}
		}
	}
}

// drain sets the draining backends of a front, and reports whether a backend stopped draining.
func (a *application) drain(f *front, bs []*backend) (fewer bool) {
	old := f.draining
	f.draining = bs
	for _, b := range bs {
		b.drains++
	}
	for _, b := range old {
		b.drains--
		for len(bs) > 0 && bs[0].addr.Compare(b.addr) < 0 {
			bs = bs[1:]
		}
		fewer = fewer || len(bs) == 0 || bs[0] != b
	}
	a.lost = append(a.lost, old...)
	return fewer
}

// makeList writes the backends and members of a list.
func (a *application) makeList(e *entry, p *part) *list {
	s, fam := a.s, familyOf(e.key.Addr)
	l := &list{family: fam, span: p.span, backends: p.backends}
	var fresh []backend // allocated in blocks, as there may be many
	for i, b := range l.backends {
		if b == nil { // unknown when makeRoom ran
			b = s.backends[fam][p.want.Backends[i].AddrPort]
		}
		switch {
		case b == nil:
			number, _ := s.backendNumbers[fam].Take()
			if len(fresh) == 0 {
				fresh = make([]backend, min(len(l.backends)-i, 64))
			}
			b, fresh = &fresh[0], fresh[1:]
			addr := p.want.Backends[i].AddrPort
			*b = backend{family: fam, number: number, addr: addr, salt: Salt(addr), gen: s.gens[fam][number], tenant: e.tenant}
			s.backends[fam][b.addr] = b
			s.storeBackend(fam, number, b.raw())
		case b.gone:
			s.removed[backendKind+fam].add(b.tenant, -1)
			b.gone, b.left, b.tenant = false, nil, e.tenant
			s.storeBackend(fam, b.number, b.raw())
		}
		l.backends[i] = b
	}
	if bits := wantedTable(p.want); bits > 0 {
		var before *rendezvous.Table
		if p.front != nil {
			before = p.front.list.table
		}
		l.table = before.Change(bits, l.addresses())
	}
	for i := range l.span.N {
		s.storeMember(l.span.Base+i, l.element(i))
	}
	s.keep(l)
	return l
}

// release removes a front's reference to a list.
func (a *application) release(l *list) {
	if l.fronts--; l.fronts > 0 || l == a.s.empty {
		return
	}
	a.lost = append(a.lost, a.s.forget(l)...)
	a.s.left.spans = append(a.s.left.spans, l.span)
}

// retire removes a front that no key refers to from its list.
func (a *application) retire(f *front) {
	l := f.list
	f.list, f.flags = nil, flagGone
	a.s.storeFrontWord(f.number, listWord, f.listWord())
	a.release(l)
	a.restrict(f, nil)
	a.drain(f, nil)
	a.s.removed[frontKind].add(f.tenant, 1)
	a.s.left.fronts = append(a.s.left.fronts, f)
}

func (a *application) remove(k frontend.Key) {
	s := a.s
	s.reopen(k)
	e := s.entries[k]
	if e == nil {
		return
	}
	if err := s.deleteKey(rawKeyOf(k)); err != nil {
		a.errs = append(a.errs, fmt.Errorf("remove frontend %v: %w", k, err))
		return
	}
	s.nKeys[familyOf(k.Addr)]--
	a.drop(e)
	a.res.Changed++
}

// drop removes an entry and its elements of sl_front. The key of the entry must already be removed from the maps.
func (a *application) drop(e *entry) {
	delete(a.s.entries, e.key)
	a.s.claim(e, vip.Nothing)
	a.s.join(e, 0)
	e.each(a.retire)
}

// insertBatch is the minimum number of keys that are inserted with one system call.
const insertBatch = 8

// maxInsertBatch is the maximum number of keys of one system call.
const maxInsertBatch = 4096

// insertAll inserts the keys of new frontends. Frontends for which the kernel lacks memory are refused.
func (a *application) insertAll() {
	s := a.s
	for fam, es := range a.inserts {
		ns := make([]numbered, len(es))
		for i, e := range es {
			ns[i] = numbered{e.key, e.fe()}
		}
		s.insertEach(fam, ns, func(i int, err error) {
			if err != nil {
				a.refuse(es[i].key, err)
				a.res.Changed--
				a.dropClosed(es[i])
				return
			}
			s.nKeys[fam]++
		})
	}
}

// insertEach inserts keys of one family, many with one system call, and passes each result to done.
func (s *store) insertEach(fam int, ns []numbered, done func(i int, err error)) {
	for first := 0; first < len(ns); first += maxInsertBatch {
		chunk := ns[first:min(first+maxInsertBatch, len(ns))]
		n := 0
		if len(chunk) >= insertBatch {
			// keys that the batch left out are inserted one by one
			n, _ = s.insertKeys(fam, chunk)
		}
		for i := range chunk {
			var err error
			if i >= n {
				err = s.insertKey(chunk[i])
			}
			done(first+i, err)
		}
	}
}

// loseBackends marks backends that are in no list and not draining. Programs and sockets with the ID and generation
// notice this at once.
func (a *application) loseBackends() {
	for _, b := range a.lost {
		if b.used() || b.gone {
			continue
		}
		a.s.lose(b)
		a.s.storeBackendWord(b.family, b.number, b.raw().packed(b.family))
	}
}

// lose marks a backend as removed.
func (s *store) lose(b *backend) {
	b.gone = true
	b.gen++
	s.gens[b.family][b.number] = b.gen
	b.left = s.left
	s.removed[backendKind+b.family].add(b.tenant, 1)
	s.left.backends = append(s.left.backends, b)
}

// groupFor returns the affinity group of a frontend with a timeout.
func (s *store) groupFor(e *entry, service string, timeout uint32) (uint16, error) {
	if timeout == 0 {
		return 0, nil
	}
	if g, ok := s.groups[service]; ok {
		return g, nil
	}
	if e != nil && e.group != 0 && s.named[e.group] == "" {
		s.groups[service], s.named[e.group] = e.group, service
		return e.group, nil
	}
	g, ok := s.groupNumbers.Take()
	if !ok {
		return 0, fmt.Errorf("%d services have affinity, no group ID is left", s.groupNumbers.Used())
	}
	s.groups[service], s.named[uint16(g)] = uint16(g), service
	return uint16(g), nil
}

// claim records what an entry claims about its address.
func (s *store) claim(e *entry, c vip.Claim) {
	s.addresses.Claim(e.key.Addr, e.claim, c)
	e.claim = c
}

// join sets the affinity group of an entry, 0: none, and frees the previous group if no other entry has it.
func (s *store) join(e *entry, g uint16) {
	old := e.group
	if old == g {
		return
	}
	if e.group = g; g != 0 {
		s.groupUses[g]++
	}
	if old != 0 {
		s.groupUses[old]--
		s.freeUnused(old)
	}
}

// freeUnused frees an affinity group that no entry has.
func (s *store) freeUnused(g uint16) {
	if g == 0 || s.groupUses[g] > 0 {
		return
	}
	delete(s.groupUses, g)
	delete(s.groups, s.named[g])
	delete(s.named, g)
	s.groupNumbers.Give(uint32(g))
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/record"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/source"
)

// object is an applied service or slice. It is immutable except for named, share and cut. There may be a hundred
// thousand.
type object struct {
	by       *managed.By
	remarks  *remarks // nil: there are none
	revision uint64
	updated  int64 // nanoseconds since 1970
	created  int64 // likewise: by its author, or when it was first accepted
	service  *service.Service
	slice    *service.Slice

	named bool // by its manager in this run
	// share is the number of the slice's backends within the share of its tenant; only valid with
	// cut.
	share int
	cut   bool // some backends exceed the share
}

// remarks are messages to the author of an object.
type remarks struct {
	notes   []string
	dropped []string
}

func newRemarks(notes, dropped []string) *remarks {
	if len(notes)+len(dropped) == 0 {
		return nil
	}
	return &remarks{notes, dropped}
}

func (r *remarks) get() remarks {
	if r == nil {
		return remarks{}
	}
	return *r
}

// key returns the object's key.
func (x *object) key() service.ObjectKey {
	if x.slice != nil {
		return service.ObjectKey{Kind: service.KindSlice, Name: x.slice.Name}
	}
	return service.ObjectKey{Kind: service.KindService, Name: x.service.Name}
}

// of returns the service that the object is, or belongs to.
func (x *object) of() service.Name {
	if x.slice != nil {
		return x.slice.Of()
	}
	return x.service.Name
}

// createdByAuthor returns the creation time in the object, in nanoseconds since 1970; 0: none.
func (x *object) createdByAuthor() int64 {
	if x.slice != nil {
		return x.slice.Created
	}
	return x.service.Created
}

// says reports whether two objects have the same content.
func (x *object) says(y *object) bool {
	switch {
	case x.service != nil && y.service != nil:
		return x.service.Equal(y.service)
	case x.slice != nil && y.slice != nil:
		return x.slice.Equal(y.slice)
	}
	return false
}

func (x *object) record() record.Record {
	return record.Record{
		Key: x.key(), Source: x.by.Source, Origin: x.by.Origin, Manager: x.by.Manager, Revision: x.revision,
		Updated: x.updated, Created: x.created,
		Notes: x.remarks.get().notes, Dropped: x.remarks.get().dropped, Service: x.service, Slice: x.slice,
	}
}

// joined is a service with its slices. Either may be missing.
type joined struct {
	name     service.Name
	object   *object   // nil: the slices wait
	slices   []*object // sorted by name
	revision uint64    // of its last change, or of one of its slices
	updated  int64
	// localSince is the revision since which the node has ready endpoints of the service; 0: it has
	// none. Only for services with a health check port.
	localSince uint64
	// share bounds the service's frontends, because some exceed the share of its tenant; nil: all
	// are within it.
	share *int
}

// checked reports whether the service has a health check port.
func (j *joined) checked() bool {
	return j.object != nil && j.object.service.HasFrontends() && j.object.service.HealthCheckNodePort != 0
}

// whole returns the service with all its slices.
func (j *joined) whole() compile.View {
	v := compile.View{}
	if j.object == nil {
		return v
	}
	v.Service = j.object.service
	v.Slices = make([]*service.Slice, len(j.slices))
	for i, x := range j.slices {
		v.Slices[i] = x.slice
	}
	return v
}

// view returns the service with the backends that are within the share.
func (j *joined) view() compile.View {
	v := j.whole()
	if !slices.ContainsFunc(j.slices, func(x *object) bool { return x.cut }) || v.Service == nil {
		return v
	}
	ports := compile.PortsOf(v.Service)
	v.Slices = v.Slices[:0]
	for _, x := range j.slices {
		if x.cut {
			v.Slices = append(v.Slices, ports.Cut(x.slice, x.share)...)
		} else {
			v.Slices = append(v.Slices, x.slice)
		}
	}
	return v
}

// keys returns the keys of the frontends that the kernel needs.
func (o *Owner) keys(j *joined) []frontend.Key {
	if j.object == nil {
		return nil
	}
	return o.config.Node.KeysWithin(j.object.service, j.share)
}

// frontends returns the frontends of a service within its share. They include frontends that an older service owns;
// callers check o.winners.
func (o *Owner) frontends(j *joined, notes *compile.Notes) []*frontend.Frontend {
	fs := o.config.Node.Within(j.view(), j.share, notes)
	tenant := o.places.tenant(j.name)
	for _, f := range fs {
		f.Tenant = tenant
	}
	return fs
}

// older orders services that want the same frontend: the first one gets it.
func older(a, b *joined) int {
	return cmp.Or(cmp.Compare(a.object.created, b.object.created), a.name.Compare(b.name))
}

// backends counts the services of each address and port. It stores only 64-bit hashes, which takes
// a third of the memory. A collision, which would make the count of distinct backends too low, is
// extremely unlikely.
type backends struct {
	seed maphash.Seed
	once hashes            // hashes with at least one service
	more map[uint64]uint32 // the number of further services, where there are several
}

func newBackends() backends {
	return backends{seed: maphash.MakeSeed(), more: make(map[uint64]uint32)}
}

func (b *backends) hash(at netip.AddrPort) uint64 {
	var text [18]byte
	addr := at.Addr().As16()
	copy(text[:], addr[:])
	binary.BigEndian.PutUint16(text[16:], at.Port())
	return maphash.Bytes(b.seed, text[:])
}

// of returns the number of services of a hash.
func (b *backends) of(h uint64) int {
	if !b.once.has(h) {
		return 0
	}
	return 1 + int(b.more[h])
}

func (b *backends) add(at netip.AddrPort) {
	h := b.hash(at)
	if b.of(h) == 0 {
		b.once.add(h)
		return
	}
	b.more[h]++
}

func (b *backends) remove(at netip.AddrPort) {
	switch h := b.hash(at); b.of(h) {
	case 0:
	case 1:
		b.once.remove(h)
	case 2:
		delete(b.more, h)
	default:
		b.more[h]--
	}
}

// object returns the object with a key, or nil.
func (o *Owner) object(k service.ObjectKey) *object {
	if k.Kind == service.KindSlice {
		return o.slices[k.Name]
	}
	if j := o.services[k.Name]; j != nil {
		return j.object
	}
	return nil
}

// objects calls f for every object.
func (o *Owner) objects(f func(*object)) {
	for _, j := range o.services {
		if j.object != nil {
			f(j.object)
		}
	}
	for _, x := range o.slices {
		f(x)
	}
}

func byName(a, b *object) int { return a.slice.Name.Compare(b.slice.Name) }

// joinedOf returns the service of that name, and creates it if it is missing.
func (o *Owner) joinedOf(name service.Name) *joined {
	j := o.services[name]
	if j == nil {
		j = &joined{name: name}
		o.services[name] = j
	}
	return j
}

// put sets an object.
func (o *Owner) put(x *object) {
	if old := o.object(x.key()); old != nil {
		o.drop(old)
	}
	j := o.joinedOf(x.of())
	if x.service != nil {
		j.object = x
	} else {
		o.slices[x.slice.Name] = x
		at, _ := slices.BinarySearchFunc(j.slices, x, byName)
		j.slices = slices.Insert(j.slices, at, x)
	}
	if x.revision > j.revision {
		j.revision, j.updated = x.revision, x.updated
	}
}

// drop removes an existing object. Empty services stay until dropEmpty.
func (o *Owner) drop(x *object) {
	j := o.services[x.of()]
	if x.service != nil {
		j.object = nil
		return
	}
	delete(o.slices, x.slice.Name)
	if at, ok := slices.BinarySearchFunc(j.slices, x, byName); ok {
		j.slices = slices.Delete(j.slices, at, at+1)
	}
}

// edit is a change of objects.
type edit struct {
	Outcome
	puts  []*object // new or changed
	gone  []service.ObjectKey
	named []service.ObjectKey // named by the caller, changed or not
	dry   bool                // only validated
	// completes: the manager or the source has named everything.
	completes bool
	listed    []string // sources to record as listed in this state
	zone      *string  // of the node; nil: unchanged
	levels    *levels  // of the shares; nil: unchanged
	// waits are API server objects in gone that no longer fit their share, and wait.
	waits []waiting

	content bool // the content of objects changes, and with it the revision
	touched map[service.Name]struct{}
	// after are the services of puts and gone as they will be; nil after they were applied.
	after map[service.Name]*joined
}

// writes reports whether there is something to write.
func (e *edit) writes() bool {
	return len(e.puts)+len(e.gone)+len(e.listed) > 0 || e.zone != nil || e.levels != nil
}

func (e *edit) record() record.Change {
	c := record.Change{State: record.StateRecords(e.listed, e.zone)}
	if e.content {
		c.Revision = e.Revision + 1
	}
	c.Puts = make([]record.Record, len(e.puts))
	for i, x := range e.puts {
		c.Puts[i] = x.record()
	}
	for _, k := range e.gone {
		c.Deletes = append(c.Deletes, record.Key(k))
	}
	return c
}

// changed returns the services of an edit as they will be.
func (o *Owner) changed(e *edit) map[service.Name]*joined {
	out := make(map[service.Name]*joined, len(e.gone)+len(e.puts)/2)
	of := func(name service.Name) *joined {
		j := out[name]
		if j == nil {
			j = &joined{name: name}
			if now := o.services[name]; now != nil {
				*j = *now
				j.slices = slices.Clone(now.slices)
			}
			out[name] = j
		}
		return j
	}
	without := func(x *object) {
		j := of(x.of())
		if x.service != nil {
			j.object = nil
		} else if at, ok := slices.BinarySearchFunc(j.slices, x, byName); ok {
			j.slices = slices.Delete(j.slices, at, at+1)
		}
	}
	for _, k := range e.gone {
		without(o.object(k))
	}
	for _, x := range e.puts {
		if old := o.object(x.key()); old != nil {
			without(old)
		}
		j := of(x.of())
		if x.service != nil {
			j.object = x
			continue
		}
		at, _ := slices.BinarySearchFunc(j.slices, x, byName)
		j.slices = slices.Insert(j.slices, at, x)
	}
	return out
}

// plan assigns revisions to what an edit changes, and checks the limits.
func (o *Owner) plan(e *edit) error {
	now := o.config.Now().UnixNano()
	services, count := o.count, len(o.slices)
	for _, k := range e.gone {
		e.content = true
		if k.Kind == service.KindService {
			if !o.object(k).refuses() {
				services--
			}
		} else {
			count--
		}
	}
	for _, x := range e.puts {
		old := o.object(x.key())
		switch {
		case old == nil && x.service != nil:
			services++
		case old == nil:
			count++
		}
		x.revision, x.updated, x.created = o.state.Revision+1, now, cmp.Or(o.places.waiting[x.key()].created, now)
		if old != nil {
			x.created = old.created
		}
		if at := x.createdByAuthor(); at != 0 {
			x.created = at
		}
		if old != nil && old.says(x) {
			x.revision, x.updated = old.revision, old.updated // only its source or its notes have changed
			continue
		}
		e.content = true
	}
	after := o.changed(e)
	e.after = after
	e.touched = make(map[service.Name]struct{}, len(after))
	for name := range after {
		e.touched[name] = struct{}{}
	}
	if e.levels != nil {
		for name := range e.levels.touched {
			e.touched[name] = struct{}{}
		}
		e.content = true
	}
	if e.zone != nil {
		o.hinted(e)
	}
	if len(e.puts) == 0 || source.Of(e.puts[0].by.Source).Waits {
		return nil // objects that exceed a share are left out instead
	}
	l := o.config.Limits
	switch {
	case services > l.Services:
		return fmt.Errorf("%w: there would be %d services with %s, the limit is %d (limits.services)", failure.ErrLimit,
			services, last(e, service.KindService), l.Services)
	case count > l.Slices:
		return fmt.Errorf("%w: there would be %d endpoint slices with %s, the limit is %d (limits.endpointSlices)",
			failure.ErrLimit, count, last(e, service.KindSlice), l.Slices)
	}
	if err := o.tryCount(e); err != nil || !source.Of(e.puts[0].by.Source).Calls {
		return err
	}
	if err := o.findRoom(after); err != nil {
		return err
	}
	return o.findShare(after)
}

// last returns the last object of a kind that an edit adds, for a message.
func last(e *edit, kind service.Kind) service.ObjectKey {
	for _, x := range slices.Backward(e.puts) {
		if k := x.key(); k.Kind == kind {
			return k
		}
	}
	return service.ObjectKey{}
}

// enter adds the frontends and backends of a service.
func (o *Owner) enter(j *joined) {
	for _, k := range o.keys(j) {
		first := o.winners[k]
		if first == nil {
			o.winners[k] = j
			continue
		}
		all := o.contested[k]
		if all == nil {
			all = []*joined{first}
		}
		all = append(all, j)
		slices.SortFunc(all, older)
		o.contested[k], o.winners[k] = all, all[0]
	}
	for _, at := range o.config.Node.Backends(j.view()) {
		o.backends.add(at)
	}
}

// leave is the inverse of enter.
func (o *Owner) leave(j *joined) {
	for _, k := range o.keys(j) {
		all := o.contested[k]
		if all == nil {
			delete(o.winners, k)
			continue
		}
		all = slices.DeleteFunc(slices.Clone(all), func(x *joined) bool { return x == j })
		o.winners[k], o.contested[k] = all[0], all
		if len(all) == 1 {
			delete(o.contested, k)
		}
	}
	for _, at := range o.config.Node.Backends(j.view()) {
		o.backends.remove(at)
	}
}

// held is a frontend as subscribers know it.
type held struct {
	by       service.Name
	frontend *frontend.Frontend // only of a touched service
}

// held returns which service has each of the keys, with its frontend if the service is one of the given ones.
func (o *Owner) held(keys map[frontend.Key]struct{}, touched []service.Name) map[frontend.Key]held {
	of := make(map[frontend.Key]*frontend.Frontend, len(keys))
	for _, name := range touched {
		j := o.services[name]
		if j == nil {
			continue
		}
		for _, f := range o.frontends(j, nil) {
			if o.winners[f.Key] == j {
				of[f.Key] = f
			}
		}
	}
	out := make(map[frontend.Key]held, len(keys))
	for k := range keys {
		if w := o.winners[k]; w != nil {
			out[k] = held{w.name, of[k]}
		}
	}
	return out
}

// same reports whether the kernel would get the same frontend for both.
func (h held) same(o held) bool {
	if h.by != o.by || (h.frontend == nil) != (o.frontend == nil) {
		return false
	}
	return h.frontend == nil || h.frontend.Equal(o.frontend)
}

// apply applies an edit, and marks the changed frontends for the subscribers.
func (o *Owner) apply(e *edit) {
	touched := sorted(e.touched, service.Name.Compare)
	keys := make(map[frontend.Key]struct{})
	for _, name := range touched {
		if j := o.services[name]; j != nil {
			for _, k := range o.keys(j) {
				keys[k] = struct{}{}
			}
		}
	}
	before := o.held(keys, touched)
	had := make(map[service.Name]bool)
	for _, h := range before {
		had[h.by] = true
	}
	// Services leave with the keys with which they entered, because an admission may change their
	// shares, and so their keys.
	for _, name := range touched {
		if j := o.services[name]; j != nil {
			o.leave(j)
			o.tally(j, -1)
		}
	}
	admitted := o.admit(e)
	for _, name := range touched {
		j := admitted.after[name]
		if j == nil {
			continue
		}
		for _, k := range o.keys(j) {
			if _, ok := keys[k]; ok {
				continue
			}
			keys[k] = struct{}{}
			if w := o.winners[k]; w != nil {
				before[k] = held{by: w.name}
			}
		}
	}
	if e.content {
		o.state.Revision++
		e.Revision = o.state.Revision
	}
	now := o.config.Now().UnixNano()
	if e.zone != nil {
		o.config.Node.Zone = *e.zone
	}
	if e.zone != nil || e.levels != nil {
		for _, name := range touched {
			if j := o.services[name]; j != nil {
				j.revision, j.updated = o.state.Revision, now
			}
		}
	}
	for _, k := range e.gone {
		x := o.object(k)
		j := o.services[x.of()]
		o.drop(x)
		j.revision, j.updated = o.state.Revision, now
	}
	for _, x := range e.puts {
		if old := o.object(x.key()); old != nil && old.of() != x.of() { // a slice that moved to another service
			j := o.services[old.of()]
			j.revision, j.updated = o.state.Revision, now
		}
		o.put(x)
	}
	admitted.set(o)
	o.recount(e)
	for _, name := range touched {
		if j := o.services[name]; j != nil {
			o.enter(j)
			o.tally(j, 1)
		}
	}
	// Only frontends that a service had before and after are compared.
	existing := slices.DeleteFunc(slices.Clone(touched), func(name service.Name) bool { return !had[name] })
	changed := make([]frontend.Key, 0, len(keys))
	after := o.held(keys, existing)
	for k := range keys {
		if !before[k].same(after[k]) {
			changed = append(changed, k)
		}
	}
	o.dropEmpty(touched)
	o.changes = 1
	if e.content {
		o.mark(changed)
	}
}

// dropEmpty drops empty services, and notifies the watchers.
func (o *Owner) dropEmpty(touched []service.Name) {
	for _, name := range touched {
		j := o.services[name]
		if j == nil {
			continue
		}
		if j.object == nil && len(j.slices) == 0 {
			delete(o.services, name)
		}
		if j.object == nil {
			o.watch.Delete(name)
			delete(o.unsettle, name)
		} else {
			o.watch.Upsert(name, j.revision)
			o.unsettle[name] = struct{}{}
		}
	}
	o.localChanged()
}

// tally adds a service to the counts of limits and status, or subtracts it.
func (o *Owner) tally(j *joined, by int) {
	if j.object != nil {
		if j.object.refuses() {
			o.refusing += by
		} else {
			o.count += by
		}
	} else {
		o.orphans += by * len(j.slices)
	}
	switch {
	case !j.checked():
	case by < 0:
		delete(o.checked, j.name)
	default:
		o.checked[j.name] = j
		if len(o.config.Node.LocalReady(j.view())) == 0 {
			j.localSince = 0
		} else if j.localSince == 0 {
			j.localSince = j.revision
		}
	}
}

// newObject returns the object of a decoded manifest.
func newObject(m *manifest.Object, by *managed.By) *object {
	x := &object{by: by, remarks: newRemarks(m.Notes, m.Dropped)}
	if m.Service != nil {
		x.service = m.Service.Clone()
	} else {
		x.slice = m.Slice.Clone()
	}
	return x
}

// refusing returns the object in the form that applies if it exceeds limits.services.
func (x *object) refusing() *object {
	why := ExceedsShare + ": it exceeds the tenant's share of limits.services: cluster IPs, load balancer addresses " +
		"and node ports refuse connections; external addresses are not served"
	r := x.remarks.get()
	notes := append(slices.Clone(r.notes), why)
	return &object{by: x.by, remarks: newRemarks(notes, r.dropped), service: x.service.Refusing()}
}

// refuses reports whether the object is a service that exceeds limits.services.
func (x *object) refuses() bool { return x.service != nil && x.service.ExceedsShare }

// same reports whether replacing x by y would change nothing.
func (x *object) same(y *object) bool {
	a, b := x.remarks.get(), y.remarks.get()
	return x.says(y) && *x.by == *y.by && slices.Equal(a.notes, b.notes) && slices.Equal(a.dropped, b.dropped)
}

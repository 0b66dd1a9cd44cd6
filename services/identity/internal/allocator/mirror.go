// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
)

// mirror is this node's copy of the cluster's identities, with the changes that are not in the cache yet. byText
// contains the last known number of a label set, and known contains that number with the same label set. living counts
// the label sets in known by namespace; it has no zero entries. An earlier revision never replaces a later one. The
// caller must hold the lock; only receiving from dirty needs no lock.
type mirror struct {
	known    map[identity.Numeric]knownEntry
	byText   map[string]identity.Numeric // by canonical text
	living   map[string]int
	revision int64     // revision of the store up to which known is complete
	heard    time.Time // time at which known was complete; zero: never

	unsaved    map[identity.Numeric]struct{} // changed since take
	heardSaved time.Time                     // value of heard at the last take
	dirty      chan struct{}                 // contains a token when the cache must be written; capacity 1
}

type knownEntry struct {
	labels   label.Canonical
	revision int64     // 0 if it came from the cache
	gone     bool      // no longer in the store; kept because it is held
	since    time.Time // when it was created, if this process followed the store; zero: earlier
}

// newMirror returns an empty mirror. heard is the time stored in the cache.
func newMirror(heard time.Time) mirror {
	return mirror{
		known: map[identity.Numeric]knownEntry{}, byText: map[string]identity.Numeric{}, living: map[string]int{},
		heard: heard, unsaved: map[identity.Numeric]struct{}{}, heardSaved: heard, dirty: make(chan struct{}, 1),
	}
}

// save requests a write of the cache.
func (m *mirror) save() {
	select {
	case m.dirty <- struct{}{}:
	default:
	}
}

// count adds by, 1 or -1, to the counts of a label set of known.
func (m *mirror) count(labels label.Canonical, by int) {
	ns := namespaceOf(labels)
	if m.living[ns] += by; m.living[ns] == 0 {
		delete(m.living, ns)
	}
}

// learn records an identity that the store had at a revision. taken is false if the mirror has a later revision.
// changed is true if the number had no label set or a different one. since is stored only if changed is true.
func (m *mirror) learn(id identity.Identity, revision int64, since time.Time) (taken, changed bool) {
	text := id.Labels.Text()
	e, ok := m.known[id.Number]
	if ok && e.revision > revision {
		return false, false
	}
	changed = !ok || e.labels.Text() != text
	if changed {
		m.remove(id.Number)
		m.count(id.Labels, 1)
		m.unsaved[id.Number] = struct{}{}
		m.save()
		e.since = since
	}
	m.known[id.Number] = knownEntry{labels: id.Labels, revision: revision, since: e.since}
	m.byText[text] = id.Number
	return true, changed
}

// remove removes a number and its label set.
func (m *mirror) remove(n identity.Numeric) {
	e, ok := m.known[n]
	if !ok {
		return
	}
	delete(m.known, n)
	if m.byText[e.labels.Text()] == n {
		delete(m.byText, e.labels.Text())
	}
	m.count(e.labels, -1)
	m.unsaved[n] = struct{}{}
	m.save()
}

// keep marks a number as removed from the store. The mirror keeps it because it is held, so that the next call for its
// label set gets the same number.
func (m *mirror) keep(n identity.Numeric) {
	e := m.known[n]
	m.known[n] = knownEntry{labels: e.labels, gone: true, since: e.since}
}

// change returns the changes in an update, without deletions of held numbers.
func (m *mirror) change(u Update, held func(identity.Numeric) bool) (c KnownChange) {
	for _, e := range u.Upserts {
		have, ok := m.known[e.Identity.Number]
		if !ok || have.revision <= e.Revision && have.labels.Text() != e.Identity.Labels.Text() {
			c.Put = append(c.Put, e.Identity)
		}
	}
	for _, d := range u.Deletes {
		if have, ok := m.known[d.Number]; ok && have.revision < d.Revision && !held(d.Number) {
			c.Drop = append(c.Drop, d.Number)
		}
	}
	return c
}

// unlisted returns the numbers that are missing from a complete listing and are not newer than it. If Reset is set, all
// numbers count as older, because their revisions belong to another history of the store.
func (m *mirror) unlisted(u Update, listed map[identity.Numeric]struct{}) (out []identity.Numeric) {
	for n, e := range m.known {
		if u.Reset {
			e.revision = 0
			m.known[n] = e
		}
		if _, ok := listed[n]; !ok && e.revision <= u.Revision {
			out = append(out, n)
		}
	}
	return out
}

// reach records that the mirror is complete at a revision and at a time. The time in the cache may be older by lag.
func (m *mirror) reach(revision int64, heard, now time.Time, lag time.Duration) {
	m.revision = revision
	if heard.After(m.heard) || m.heard.After(now) {
		m.heard = heard
		if m.heard.Sub(m.heardSaved) > lag {
			m.save()
		}
	}
}

// age returns the time since the last contact with the store. ok is false if there was none, or if its time is in the
// future, because the clock was set back.
func (m *mirror) age(now time.Time) (age time.Duration, ok bool) {
	if m.heard.IsZero() {
		return 0, false
	}
	// The monotonic clock stops while the machine sleeps, and the wall clock may be set: use the longer age. A time
	// that was read from a file has no monotonic reading.
	age = max(now.Sub(m.heard), now.Round(0).Sub(m.heard.Round(0)))
	return age, age >= 0
}

// take returns the changes that are not in the cache yet, in any order, and the value of heard in the cache. If the
// cache could not be written, putBack restores them.
func (m *mirror) take() (c KnownChange, saved time.Time) {
	saved = m.heardSaved
	m.heardSaved = m.heard
	c.Heard = m.heard
	for n := range m.unsaved {
		if e, ok := m.known[n]; ok {
			c.Put = append(c.Put, identity.Identity{Number: n, Labels: e.labels})
		} else {
			c.Drop = append(c.Drop, n)
		}
	}
	clear(m.unsaved)
	return c, saved
}

func (m *mirror) putBack(c KnownChange, saved time.Time) {
	m.heardSaved = saved
	for _, id := range c.Put {
		m.unsaved[id.Number] = struct{}{}
	}
	for _, n := range c.Drop {
		m.unsaved[n] = struct{}{}
	}
}

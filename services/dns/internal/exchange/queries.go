// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package exchange

import (
	"bytes"
	"hash/maphash"
	"net/netip"
	"slices"
	"time"
	"unsafe"
)

// key identifies a query, together with its name.
type key struct {
	client, server  netip.AddrPort
	tcp             bool
	id, kind, class uint16
	name            uint64 // hash
}

// asked is a query that was forwarded.
type asked struct {
	key
	text  []byte // name
	until time.Time
}

// pod contains the unanswered queries of one pod, and the number of its held answers. It reuses the memory of old
// queries.
type pod struct {
	open  map[key]*asked
	order []*asked // from head, oldest first; answered queries stay until they are the oldest, or too many
	head  int
	free  []*asked
	held  int
}

// view returns b as a string that is valid until b changes.
func view(b []byte) string {
	return unsafe.String(unsafe.SliceData(b), len(b)) //nolint:gosec // avoids copying each name
}

func (x *Exchange) key(c Connection, id, kind, class uint16, name []byte) key {
	return key{c.Client, c.Server, c.TCP, id, kind, class, maphash.Bytes(x.seed, name)}
}

// note records a query that is forwarded.
func (x *Exchange) note(c Connection, id, kind, class uint16, name []byte) {
	k, now := x.key(c, id, kind, class, name), x.o.Now()
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.pods[c.Endpoint]
	if p == nil {
		p = &pod{open: make(map[key]*asked)}
		x.pods[c.Endpoint] = p
	}
	p.trim(now)
	// Only unanswered queries count, so that later answered queries do not displace a slow query.
	if _, again := p.open[k]; !again && len(p.open) >= MaxQueries {
		p.drop()
		p.trim(now)
	}
	p.add(k, name, now.Add(queryTime))
}

func (p *pod) add(k key, name []byte, until time.Time) {
	if len(p.order)-p.head >= 2*MaxQueries { // at least half of the queries are answered, so this is rare
		p.order = slices.DeleteFunc(p.order[p.head:], func(q *asked) bool {
			if p.open[q.key] == q {
				return false
			}
			p.free = append(p.free, q)
			return true
		})
		p.head = 0
	}
	if len(p.order) == cap(p.order) && p.head > 0 {
		n := copy(p.order, p.order[p.head:])
		clear(p.order[n:])
		p.order, p.head = p.order[:n], 0
	}
	var q *asked
	if n := len(p.free); n > 0 {
		q, p.free = p.free[n-1], p.free[:n-1]
	} else {
		q = &asked{}
	}
	q.key, q.text, q.until = k, append(q.text[:0], name...), until
	p.open[k] = q
	p.order = append(p.order, q)
}

// trim removes queries at the front that are answered or too old.
func (p *pod) trim(now time.Time) {
	for p.head < len(p.order) {
		if q := p.order[p.head]; p.open[q.key] == q && now.Before(q.until) {
			return
		}
		p.drop()
	}
}

// drop removes the oldest query.
func (p *pod) drop() {
	q := p.order[p.head]
	if p.open[q.key] == q {
		delete(p.open, q.key)
	}
	p.order[p.head] = nil
	p.head++
	p.free = append(p.free, q)
	if p.head == len(p.order) {
		p.order, p.head = p.order[:0], 0
	}
}

// answered reports whether a pod waits for this answer, and removes the query.
func (x *Exchange) answered(c Connection, id, kind, class uint16, name []byte) bool {
	k, now := x.key(c, id, kind, class, name), x.o.Now()
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.pods[c.Endpoint]
	if p == nil {
		return false
	}
	p.trim(now)
	q := p.open[k]
	if q == nil || !bytes.Equal(q.text, name) {
		return false
	}
	delete(p.open, k)
	return true
}

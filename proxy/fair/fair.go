// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package fair divides a limit among pods. When the limit is used up, the pod that uses most of it loses its oldest
// item. So a pod that uses much takes nothing from other pods.
package fair

// Limit is a limit that pods share. It is not safe for concurrent use.
type Limit struct {
	max, perPod int

	total int
	pods  map[uint16]*pod // the pods with items
}

type pod struct {
	used           int
	oldest, newest *Item
}

// Item is a part of a limit that a pod uses.
type Item struct {
	endpoint       uint16
	size           int
	drop           func()
	older, younger *Item
	gone           bool
}

// New returns a limit of most units for all pods together, and of perPod units for each pod.
func New(most, perPod int) *Limit {
	return &Limit{max: most, perPod: perPod, pods: make(map[uint16]*pod)}
}

// Add adds an item of a pod. To free capacity, it may remove older items from the limit, and calls drop of each. drop
// may remove other items. Add returns nil if the item is larger than the limit of a pod, or if no other pod uses more
// than this pod.
func (l *Limit) Add(endpoint uint16, size int, drop func()) *Item {
	if size > l.perPod {
		return nil
	}
	for p := l.pods[endpoint]; p != nil && p.used+size > l.perPod; p = l.pods[endpoint] {
		l.dropOldest(p)
	}
	for l.total+size > l.max {
		p := l.largest(endpoint, size)
		if p == nil {
			return nil
		}
		l.dropOldest(p)
	}
	item := &Item{endpoint: endpoint, size: size, drop: drop}
	l.insert(item)
	return item
}

func (l *Limit) insert(item *Item) {
	p := l.pods[item.endpoint]
	if p == nil {
		p = &pod{}
		l.pods[item.endpoint] = p
	}
	p.used += item.size
	l.total += item.size
	if item.older = p.newest; item.older != nil {
		item.older.younger = item
	} else {
		p.oldest = item
	}
	p.newest = item
}

// largest returns the pod that would use most of the limit if an item were added to an endpoint. It returns nil if
// that is the endpoint itself and it has no item.
func (l *Limit) largest(endpoint uint16, size int) (most *pod) {
	used := size
	if own := l.pods[endpoint]; own != nil {
		used, most = own.used+size, own
	}
	for e, p := range l.pods {
		if e != endpoint && p.used > used {
			used, most = p.used, p
		}
	}
	return most
}

func (l *Limit) dropOldest(p *pod) {
	item := p.oldest
	l.remove(item)
	item.drop()
}

func (l *Limit) remove(item *Item) {
	p := l.pods[item.endpoint]
	item.gone = true
	p.used -= item.size
	l.total -= item.size
	if item.older != nil {
		item.older.younger = item.younger
	} else {
		p.oldest = item.younger
	}
	if item.younger != nil {
		item.younger.older = item.older
	} else {
		p.newest = item.older
	}
	item.older, item.younger = nil, nil
	if p.oldest == nil {
		delete(l.pods, item.endpoint)
	}
}

// Remove removes an item. It returns false if the item was already dropped or removed.
func (l *Limit) Remove(item *Item) bool {
	if item.gone {
		return false
	}
	l.remove(item)
	return true
}

// Used returns the used part of the limit.
func (l *Limit) Used() int { return l.total }

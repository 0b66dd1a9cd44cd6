// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pods

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
)

// rate limits label changes: burst changes at once, then one in each interval of length every.
type rate struct {
	every time.Duration
	burst int
}

// Each label change of a pod uses the rate of the pod and the rate of its controller. A change to a label set without
// an identity also uses the rate of the node, which the waiting tenants share.
var (
	podRate        = rate{10 * time.Second, 5}
	controllerRate = rate{time.Second, 256}
	nodeRate       = rate{time.Second, 256}
)

// bucket is a token bucket. The zero value is full.
type bucket struct {
	used float64 // tokens that were taken and have not come back, as of at
	at   time.Time
}

// fill adds the tokens of the elapsed time to the bucket.
func (b *bucket) fill(r rate, now time.Time) {
	b.used = max(0, b.used-float64(now.Sub(b.at))/float64(r.every))
	b.at = now
}

// wait returns how long it takes until the bucket has a token; 0: now.
func (b *bucket) wait(r rate, now time.Time) time.Duration {
	b.fill(r, now)
	missing := b.used + 1 - float64(r.burst)
	if missing <= 0 {
		return 0
	}
	return max(1, time.Duration(math.Ceil(missing*float64(r.every))))
}

// want is an endpoint whose labels differ from its pod's.
type want struct {
	holder allocator.Holder
	labels Labels
	fresh  bool // the label set has no identity yet
}

// owner is the key of a controller's rate.
type owner struct{ namespace, controller string }

// turns selects the pod whose label change comes next. Groups of tenants take turns, then the tenants of a group, then
// the pods of a tenant: a pod waits for at most one change of each other tenant, however many pods that tenant has.
type turns struct {
	now func() time.Time

	node        bucket
	pods        map[allocator.Holder]*bucket
	controllers map[owner]*bucket

	tenants *shares.Turns
	last    map[allocator.Holder]uint64 // by endpoint; a number of turns
}

func newTurns(now func() time.Time) *turns {
	return &turns{
		now: now, pods: map[allocator.Holder]*bucket{}, controllers: map[owner]*bucket{},
		tenants: shares.NewTurns(), last: map[allocator.Holder]uint64{},
	}
}

// take returns the changes that the rates allow now, in the order of turns, and the time at which the next waiting
// change may come; zero if none waits.
func (t *turns) take(all []want) (now []want, next time.Time) {
	at := t.now()
	t.forget(at, all)
	waiting := map[shares.Tenant][]want{}
	for _, w := range all {
		waiting[w.labels.Tenant] = append(waiting[w.labels.Tenant], w)
		t.tenants.Join(w.labels.Tenant)
		if _, ok := t.last[w.holder]; !ok { // new pods queue behind the waiting ones
			t.last[w.holder] = t.tenants.Served()
		}
	}
	var order []shares.Tenant
	for tenant, of := range waiting {
		order = append(order, tenant)
		slices.SortFunc(of, func(a, b want) int {
			return cmp.Or(cmp.Compare(t.last[a.holder], t.last[b.holder]), cmp.Compare(a.holder, b.holder))
		})
	}
	later := func(d time.Duration) {
		if when := at.Add(d); next.IsZero() || when.Before(next) {
			next = when
		}
	}
	for len(order) > 0 {
		i := 0
		for j := range order {
			if t.tenants.Compare(order[j], order[i]) < 0 {
				i = j
			}
		}
		tenant := order[i]
		// Select the pod of the tenant whose turn it is and that may change now.
		taken := false
		of := waiting[tenant]
		for k, w := range of {
			if wait := t.wait(w, at); wait > 0 {
				later(wait)
				continue
			}
			t.use(w)
			now = append(now, w)
			waiting[tenant] = slices.Concat(of[k+1:]) // the earlier ones wait for their own rate
			taken = true
			break
		}
		if !taken || len(waiting[tenant]) == 0 {
			order = slices.Delete(order, i, i+1)
		}
	}
	return now, next
}

// wait returns how long a change must wait for its rates; 0: it is allowed now.
func (t *turns) wait(w want, now time.Time) time.Duration {
	pod, controller := t.buckets(w)
	d := pod.wait(podRate, now)
	if controller != nil {
		d = max(d, controller.wait(controllerRate, now))
	}
	if w.fresh {
		d = max(d, t.node.wait(nodeRate, now))
	}
	return d
}

// use takes the tokens for a change that is allowed now.
func (t *turns) use(w want) {
	pod, controller := t.buckets(w)
	pod.used++
	if controller != nil {
		controller.used++
	}
	if w.fresh {
		t.node.used++
	}
	t.last[w.holder] = t.tenants.Serve(w.labels.Tenant)
}

// giveBack returns the node's token of a change that created no number.
func (t *turns) giveBack(w want) {
	if w.fresh {
		t.node.used = max(0, t.node.used-1)
	}
}

func (t *turns) buckets(w want) (pod, controller *bucket) {
	if pod = t.pods[w.holder]; pod == nil {
		pod = &bucket{}
		t.pods[w.holder] = pod
	}
	if w.labels.Controller == "" {
		return pod, nil
	}
	// The author of a pod chooses its controller reference, so the rate applies within the namespace.
	ns, _ := w.labels.Set.Set().Value(label.SourceKubernetes, label.KeyNamespace)
	key := owner{ns, w.labels.Controller}
	if controller = t.controllers[key]; controller == nil {
		controller = &bucket{}
		t.controllers[key] = controller
	}
	return pod, controller
}

// forgetLength is the number of buckets above which full buckets are removed.
const forgetLength = 1024

// forget removes entries that are equal to a missing entry. It keeps the turns of waiting pods and tenants: otherwise a
// pod that was just served, or whose name sorts first, would repeatedly come before them.
func (t *turns) forget(now time.Time, waiting []want) {
	if len(t.pods)+len(t.controllers)+t.tenants.Len() < forgetLength {
		return
	}
	holders, tenants := map[allocator.Holder]bool{}, map[shares.Tenant]bool{}
	for _, w := range waiting {
		holders[w.holder], tenants[w.labels.Tenant] = true, true
	}
	for holder, b := range t.pods {
		if b.fill(podRate, now); b.used == 0 {
			delete(t.pods, holder)
		}
	}
	maps.DeleteFunc(t.last, func(holder allocator.Holder, _ uint64) bool {
		return !holders[holder] && t.pods[holder] == nil
	})
	for key, b := range t.controllers {
		if b.fill(controllerRate, now); b.used == 0 {
			delete(t.controllers, key)
		}
	}
	if t.tenants.Len() > forgetLength/2 {
		t.tenants.Keep(func(tenant shares.Tenant) bool { return tenants[tenant] })
	}
}

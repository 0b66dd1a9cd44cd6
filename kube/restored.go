// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kit/log"
)

// An API server accepts a watch at a future revision and sends nothing on it. A client of a server whose store was
// restored from an older backup, or that now belongs to another cluster, therefore gets neither events nor errors. A
// monitor compares the revision of the store and the UID of kube-system with the values that this process has seen,
// and makes Follow list everything again. A restored store may already have passed the highest revision that this
// process has seen. After watches ended early, the monitor therefore also reads the objects that changed most
// recently before.
//
// Timing of a monitor. With four processes on each of 5,000 nodes, the checks are 74 requests per second, and 300 for
// 200 s after all watches of the cluster ended at once. Listings of up to 12 kinds on each node are 240 requests per
// second; each kind with Last adds 5.
const (
	checkEvery   = 5 * time.Minute // the longest time between two checks
	checkTimeout = 10 * time.Second
	countEvery   = time.Hour       // interval between two counts of the Nodes
	minSpread    = 5 * time.Second // for checks after a watch ended, and for listings after a restore
	firstFor     = 10 * time.Second
	// unknownNodes is assumed until the Nodes are counted. Until then nothing was listed, so a late check does no
	// harm.
	unknownNodes = 5000
	// lastSpreads multiplies the delay for kinds with Last, such as the addresses of the API servers: a stale address
	// costs only a failed attempt.
	lastSpreads = 4
)

// checkSpread is the period over which all processes distribute their checks after watches ended, and the shortest
// interval between two checks of one process.
func checkSpread(nodes int) time.Duration {
	return max(minSpread, time.Duration(nodes)*time.Second/25)
}

// listSpread is the period over which all processes distribute their listings after a restore.
func listSpread(nodes int) time.Duration {
	return max(minSpread, time.Duration(nodes)*time.Second/20)
}

// RestoredError reports that the API server's store went back to an earlier state or was replaced, and that the kind
// was not listed again yet. It wraps the failure of that listing.
type RestoredError struct {
	why    string
	within time.Duration
	cause  error
}

// Error implements error.
func (e *RestoredError) Error() string {
	text := fmt.Sprintf("%s: everything is listed again within %s; until then the former objects are kept",
		e.why, e.within)
	if e.cause != nil {
		text += ": " + e.cause.Error()
	}
	return text
}

// Unwrap returns why the kind could not be listed again so far; nil if no listing failed.
func (e *RestoredError) Unwrap() error { return e.cause }

// because returns the error with the cause of a failed listing.
func (e *RestoredError) because(cause error) *RestoredError {
	return &RestoredError{why: e.why, within: e.within, cause: cause}
}

// origin distinguishes states of a store.
type origin struct {
	revision uint64    // of the store at the time of the request
	uid      types.UID // of the Namespace kube-system
}

// prober reads the state of the API server.
type prober interface {
	// origin returns the state of the store, not of a server's cache.
	origin(ctx context.Context) (origin, error)
	// nodes returns the number of Nodes.
	nodes(ctx context.Context) (int, error)
}

// monitor detects that the API server's store went back to an earlier state or was replaced.
type monitor struct {
	prober prober
	log    *slog.Logger
	wake   chan struct{} // has a token after due was moved

	mu        sync.Mutex
	seen      origin                 // guarded by mu; found by the last check
	count     int                    // guarded by mu; number of Nodes, 0: unknown
	due, last time.Time              // guarded by mu; times of the next and the last check
	hurried   bool                   // guarded by mu; due was moved since the last check
	followers map[*follower]struct{} // guarded by mu
	suspects  []suspect              // guarded by mu; the next successful check reads these
	listing   *RestoredError         // guarded by mu; why followers must list again; nil: they need not
	changed   chan struct{}          // guarded by mu; closed when a follower has listed again or must
}

func newMonitor(p prober, l *slog.Logger) *monitor {
	return &monitor{
		prober: p, log: l, wake: make(chan struct{}, 1), followers: map[*follower]struct{}{}, changed: make(chan struct{}),
	}
}

type follower struct {
	kind     string
	monitor  *monitor
	first    bool
	last     bool
	restored func(*RestoredError) // reports to the handler; nil: the kind was listed again
	relist   chan struct{}        // has a token when the kind has to be listed again

	revision uint64 // guarded by monitor.mu; the highest since the last listing started
	old      bool   // guarded by monitor.mu; its objects predate the restore
	begun    bool   // guarded by monitor.mu; it has started to list again after the restore
	ahead    bool   // guarded by monitor.mu; it was ahead of the store at the last check
	failing  bool   // guarded by monitor.mu; the kind cannot be listed or watched

	// find reads the revision of an object from the store; 0 means that it does not exist.
	find    func(context.Context, types.NamespacedName) (uint64, error)
	witness witness // guarded by monitor.mu; the last change of an object
	apart   bool    // guarded by monitor.mu; the kind has a separate store
}

// witness is the change of an object that a watch or a listing reported.
type witness struct {
	name     types.NamespacedName
	revision uint64 // of the change; 0: no change seen
	deleted  bool
}

// witnesses records a change of an object.
func (f *follower) witnesses(name types.NamespacedName, o runtime.Object, deleted bool) {
	m, err := meta.Accessor(o)
	if err != nil {
		return
	}
	revision, err := strconv.ParseUint(m.GetResourceVersion(), 10, 64)
	if err != nil {
		return
	}
	f.monitor.mu.Lock()
	defer f.monitor.mu.Unlock()
	f.monitor.suspects = slices.DeleteFunc(f.monitor.suspects, func(x suspect) bool {
		return x.f == f && x.name == name // the watch works on the present store
	})
	if revision >= f.witness.revision {
		f.witness = witness{name, revision, deleted}
	}
}

// fails records whether the kind can be listed and watched.
func (f *follower) fails(yes bool) {
	f.monitor.mu.Lock()
	defer f.monitor.mu.Unlock()
	f.failing = yes
}

// follow registers a kind. The caller must call leave.
func (m *monitor) follow(f *follower) {
	f.monitor, f.relist = m, make(chan struct{}, 1)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.followers[f] = struct{}{}
}

func (f *follower) leave() {
	f.monitor.mu.Lock()
	defer f.monitor.mu.Unlock()
	delete(f.monitor.followers, f)
	f.monitor.suspects = slices.DeleteFunc(f.monitor.suspects, func(x suspect) bool { return x.f == f })
	f.monitor.notify()
}

// begin records that the kind is being listed from now on.
func (f *follower) begin() {
	f.monitor.mu.Lock()
	defer f.monitor.mu.Unlock()
	f.revision, f.begun, f.witness = 0, true, witness{}
}

// sees records the revision of an event or a listing.
func (f *follower) sees(resourceVersion string) {
	revision, err := strconv.ParseUint(resourceVersion, 10, 64)
	if err != nil {
		return
	}
	f.monitor.mu.Lock()
	defer f.monitor.mu.Unlock()
	f.revision = max(f.revision, revision)
}

// listed records that the kind was listed. If the listing started after a restore, it also reports to the handler
// that the kind is up to date.
func (f *follower) listed() {
	f.monitor.mu.Lock()
	defer f.monitor.mu.Unlock()
	if f.old && f.begun {
		f.old = false
		f.restored(nil)
		f.monitor.notify()
	}
}

// disturbed schedules a check soon, because a watch ended early or none can be opened.
func (m *monitor) disturbed() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.suspect()
	m.soon(time.Now())
}

// suspect is the last change of a kind before watches ended. A store that was restored to an earlier state does not
// contain it.
type suspect struct {
	f *follower
	witness
	missing bool // the last check did not find the object
}

// maxSuspects limits the requests per check.
const maxSuspects = 2

// suspect records the last changes of all kinds, unless recorded changes are still to be read. Called with mu held.
func (m *monitor) suspect() {
	if len(m.suspects) > 0 || m.listing != nil {
		return
	}
	for f := range m.followers {
		if !f.apart && f.find != nil && f.witness.revision > 0 {
			m.suspects = append(m.suspects, suspect{f: f, witness: f.witness})
		}
	}
	slices.SortFunc(m.suspects, func(a, b suspect) int { return cmp.Compare(b.revision, a.revision) })
	m.suspects = m.suspects[:min(len(m.suspects), maxSuspects)]
}

// confirm reads the objects that changed last before watches ended. It is called after the server has answered, and
// reports whether a round of listings must be started.
//
// An object whose revision is lower than its recorded one belongs to an earlier state. A missing object may simply
// have been deleted; in that case its watch reports the deletion before the next check.
func (m *monitor) confirm(ctx context.Context) (restored bool) {
	m.mu.Lock()
	suspects := slices.Clone(m.suspects)
	m.mu.Unlock()
	for _, x := range suspects {
		ask, cancel := context.WithTimeout(ctx, checkTimeout)
		revision, err := x.f.find(ask, x.name)
		cancel()
		m.mu.Lock()
		i := slices.IndexFunc(m.suspects, func(y suspect) bool { return y.f == x.f && y.witness == x.witness })
		switch {
		case i < 0: // its watch has reported a newer state
		case err != nil, x.f.failing:
			m.soon(time.Now())
		case revision == 0 && !x.deleted && !x.missing:
			m.suspects[i].missing = true
			m.soon(time.Now())
		case revision == 0 && x.deleted, revision >= x.revision:
			m.suspects = slices.Delete(m.suspects, i, i+1)
		default:
			has := "does not exist"
			if revision > 0 {
				has = fmt.Sprintf("has the revision %d", revision)
			}
			restored = m.restored(fmt.Sprintf("the Kubernetes API was restored to an older state: %s %s %s, and had %d",
				x.f.kind, x.name, has, x.revision))
		}
		m.mu.Unlock()
		if restored {
			break
		}
	}
	return restored
}

// soon schedules a check at a random moment of the next spread, but at least 1.1 spreads after the last check,
// because watches may end continually. Called with mu held.
func (m *monitor) soon(now time.Time) {
	spread := checkSpread(m.size())
	due := now.Add(rand.N(spread))
	if next := m.last.Add(spread + spread/10); due.Before(next) {
		due = next
	}
	if due.Before(m.due) {
		m.due, m.hurried = due, true
		select {
		case m.wake <- struct{}{}:
		default:
		}
	}
}

// size returns the number of nodes. Called with mu held.
func (m *monitor) size() int {
	if m.count == 0 {
		return unknownNodes
	}
	return m.count
}

// run checks periodically until ctx ends.
func (m *monitor) run(ctx context.Context) {
	var parts sync.WaitGroup
	defer parts.Wait()
	var counted time.Time
	var said string
	for ctx.Err() == nil {
		hurried, restored, err := m.check(ctx)
		if err == nil && !restored {
			restored = m.confirm(ctx)
		}
		if ctx.Err() != nil {
			break
		}
		switch text := fmt.Sprint(err); {
		case err == nil:
			said = ""
		case text == said:
		case apierrors.IsForbidden(err): // other failures affect every kind, which reports them
			m.log.Warn("cannot detect a restore of the Kubernetes API", log.Err(err))
			said = text
		default:
			m.log.Info("cannot read the revision of the Kubernetes API, trying again", log.Err(err))
			said = text
		}
		if restored {
			parts.Go(func() { m.listAgain(ctx) })
		}
		// Not while all processes check at once.
		if err == nil && (counted.IsZero() || !hurried && time.Since(counted) > countEvery) && m.recount(ctx) == nil {
			counted = time.Now()
		}
		m.wait(ctx)
	}
}

func (m *monitor) recount(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	n, err := m.prober.nodes(ctx)
	if err == nil {
		m.mu.Lock()
		m.count = max(n, 1)
		m.mu.Unlock()
	}
	return err
}

func (m *monitor) wait(ctx context.Context) {
	for {
		m.mu.Lock()
		left := time.Until(m.due)
		m.mu.Unlock()
		if left <= 0 {
			return
		}
		timer := time.NewTimer(left)
		select {
		case <-timer.C:
		case <-m.wake:
		case <-ctx.Done():
			timer.Stop()
			return
		}
		timer.Stop()
	}
}

// check compares the state of the store once. hurried reports whether ended watches caused the check. restored
// reports whether everything must be listed again and no such round is running.
func (m *monitor) check(ctx context.Context) (hurried, restored bool, _ error) {
	m.mu.Lock()
	m.last = time.Now()
	m.due = m.last.Add(checkEvery) // a watch that ends meanwhile moves it forward
	hurried, m.hurried = m.hurried, false
	former := m.seen
	highest := make(map[*follower]uint64, len(m.followers)) // read before the request: later events may be newer
	for f := range m.followers {
		if !f.old && !f.apart {
			highest[f] = f.revision
		}
	}
	m.mu.Unlock()

	ask, cancel := context.WithTimeout(ctx, checkTimeout)
	now, err := m.prober.origin(ask)
	cancel()

	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		m.soon(time.Now())
		return hurried, false, err
	}
	pause := checkEvery - rand.N(checkEvery/5)
	if former == (origin{}) { // random, so that processes that start together do not check together
		pause = rand.N(checkEvery)
	}
	if due := m.last.Add(pause); due.Before(m.due) {
		m.due = due
	}
	m.seen = now
	switch {
	case former.uid != "" && now.uid != former.uid:
		return hurried, m.restored(fmt.Sprintf("the Kubernetes API belongs to another cluster: "+
			"the Namespace kube-system has the UID %q, and had %q", now.uid, former.uid)), nil
	case now.revision < former.revision:
		return hurried, m.restored(wentBack(now.revision, former.revision)), nil
	}
	var most uint64
	for f, revision := range highest {
		ahead := revision > now.revision
		if ahead && f.ahead {
			// It is ahead although it was listed again: its revisions come from another store.
			f.apart, ahead = true, false
			m.log.Info("a kind of the Kubernetes API has a separate store from Namespaces; "+
				"a restore of only that store cannot be detected", "kind", f.kind)
		}
		f.ahead = ahead
		if ahead {
			most = max(most, revision)
		}
	}
	return hurried, most > 0 && m.restored(wentBack(now.revision, most)), nil
}

func wentBack(now, before uint64) string {
	return fmt.Sprintf("the Kubernetes API was restored to an older state: its revision is %d, and was %d", now, before)
}

// restored reports the restore to every handler. It returns whether a round of listings must be started. Called with
// mu held.
func (m *monitor) restored(why string) bool {
	under := m.listing != nil
	m.suspects = nil
	m.listing = &RestoredError{why: why, within: listSpread(m.size())}
	m.log.Warn("every kind of the Kubernetes API is listed again", log.Err(m.listing))
	for f := range m.followers {
		f.old, f.begun, f.revision = true, false, 0
		f.restored(m.listing)
	}
	m.notify()
	return !under
}

// notify wakes listAgain. Called with mu held.
func (m *monitor) notify() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// listAgain makes every follower list at a random moment: kinds with First, then the others, and much later kinds
// with Last. It returns when no follower holds objects from before the restore.
func (m *monitor) listAgain(ctx context.Context) {
	for {
		m.mu.Lock()
		err := m.listing
		m.mu.Unlock()
		if !sleep(ctx, rand.N(err.within)) {
			return
		}
		firsts := func(f *follower) bool { return f.first }
		m.order(firsts)
		limit, cancel := context.WithTimeout(ctx, firstFor)
		m.listedOf(limit, err, firsts)
		cancel()
		m.order(func(f *follower) bool { return !f.first && !f.last })
		if !sleep(ctx, rand.N(lastSpreads*err.within)) {
			return
		}
		m.order(func(*follower) bool { return true })
		m.listedOf(ctx, err, func(*follower) bool { return true })
		if ctx.Err() != nil {
			return
		}
		m.mu.Lock()
		if m.listing == err {
			m.listing = nil
			m.mu.Unlock()
			m.log.Info("every kind of the Kubernetes API was listed again")
			return
		}
		m.mu.Unlock() // there was another restore
	}
}

// order triggers the listing of all selected followers that have not started one.
func (m *monitor) order(which func(*follower) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for f := range m.followers {
		if f.old && !f.begun && which(f) {
			select {
			case f.relist <- struct{}{}:
			default:
			}
		}
	}
}

// listedOf waits until the selected followers have listed again, another restore is detected, or ctx ends.
func (m *monitor) listedOf(ctx context.Context, err *RestoredError, which func(*follower) bool) {
	for {
		m.mu.Lock()
		changed, left := m.changed, false
		for f := range m.followers {
			left = left || f.old && which(f)
		}
		again := m.listing != err
		m.mu.Unlock()
		if !left || again {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// apiProber implements prober with a client of the core group.
type apiProber struct{ client *rest.RESTClient }

// origin implements prober. The server answers a list without resourceVersion from the newest revision of the store,
// and the list carries that revision.
func (p apiProber) origin(ctx context.Context) (o origin, err error) {
	var list struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
		Items []struct {
			Metadata struct {
				UID types.UID `json:"uid"`
			} `json:"metadata"`
		} `json:"items"`
	}
	if err := p.list(ctx, "namespaces", "fieldSelector", "metadata.name=kube-system", &list); err != nil {
		return o, err
	}
	if o.revision, err = strconv.ParseUint(list.Metadata.ResourceVersion, 10, 64); err != nil {
		return o, fmt.Errorf("list namespaces: the resourceVersion is not a number: %w", err)
	}
	for i := range list.Items {
		o.uid = list.Items[i].Metadata.UID
	}
	return o, nil
}

// nodes implements prober. It lists a single Node; the list also states how many more there are.
func (p apiProber) nodes(ctx context.Context) (int, error) {
	var list struct {
		Metadata struct {
			Continue           string `json:"continue"`
			RemainingItemCount *int   `json:"remainingItemCount"`
		} `json:"metadata"`
		Items []json.RawMessage `json:"items"`
	}
	if err := p.list(ctx, "nodes", "limit", "1", &list); err != nil {
		return 0, err
	}
	n := len(list.Items)
	switch {
	case list.Metadata.RemainingItemCount != nil:
		n += *list.Metadata.RemainingItemCount
	case list.Metadata.Continue != "":
		return 0, errors.New("list nodes: the server does not report how many there are")
	}
	return n, nil
}

// list reads only the metadata of a list of the core group.
func (p apiProber) list(ctx context.Context, resource, parameter, value string, into any) error {
	body, err := p.client.Get().Resource(resource).Param(parameter, value).
		SetHeader("Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json").Do(ctx).Raw()
	if err == nil {
		err = json.Unmarshal(body, into)
	}
	if err != nil {
		return fmt.Errorf("list %s: %w", resource, err)
	}
	return nil
}

// sleep waits for d. It returns false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

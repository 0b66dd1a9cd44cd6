// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package podrange

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
)

// The places between the steps of a change.
var (
	faultAddEntry    = fault.Register("datapath/ranges/add-entry")
	faultAddNode     = fault.Register("datapath/ranges/add-node")
	faultClose       = fault.Register("datapath/ranges/close")
	faultRemoveNode  = fault.Register("datapath/ranges/remove-node")
	faultRemoveEntry = fault.Register("datapath/ranges/remove-entry")
)

// Range is what the source says of a range.
type Range struct {
	Node    netip.Addr // the node's own address in it
	Primary bool       // that address is the node's overlay address
}

// Source has the ranges.
type Source = watch.Source[netip.Prefix, Range]

// Entries are the ranges in the ipcache.
type Entries interface {
	AddRange(p netip.Prefix) error
	DropRange(p netip.Prefix) error
}

// Host is what the node has for its ranges.
type Host interface {
	// Repair makes what the node is to have for the ranges of the set.
	Repair() error
	// RemoveRange takes away what it has for a range that is none of the set's.
	RemoveRange(p netip.Prefix) error
	// AddrIn finds an address of the node's devices in a range, but for its own
	// one there, and says which device has it.
	AddrIn(p netip.Prefix) (a netip.Addr, device string, err error)
}

// Endpoints live in the ranges.
type Endpoints interface {
	// CloseRange closes a range unless an endpoint has an address of it.
	CloseRange(p netip.Prefix) bool
}

// Options of a Keeper.
type Options struct {
	Set       *Set // with the ranges that the ipcache has
	Source    Source
	Entries   Entries
	Host      Host
	Endpoints Endpoints
	Log       *slog.Logger
}

// Keeper keeps the set equal to a source. A range that the source has not any
// more stays while an endpoint lives in it.
type Keeper struct {
	Options
	known   chan struct{} // closed when there is a range
	overlay chan struct{} // closed when there are overlay addresses

	mu      sync.Mutex
	here    map[netip.Prefix]struct{} // guarded by mu; of which the kernel may have something
	wanted  map[netip.Prefix]Range    // guarded by mu; what the source has
	going   map[netip.Prefix]struct{} // guarded by mu; what it has not any more
	refused map[netip.Prefix]error    // guarded by mu; of wanted
	away    error                     // guarded by mu; why the source is
}

// New returns a Keeper that does nothing before Run.
func New(o Options) *Keeper {
	k := &Keeper{
		Options: o, known: make(chan struct{}), overlay: make(chan struct{}),
		here: map[netip.Prefix]struct{}{}, wanted: map[netip.Prefix]Range{},
		going: map[netip.Prefix]struct{}{}, refused: map[netip.Prefix]error{},
	}
	for _, p := range o.Set.All() {
		k.here[p] = struct{}{}
	}
	if len(k.here) > 0 {
		close(k.known)
	}
	return k
}

// Known is closed when the node has, or has had, a pod range.
func (k *Keeper) Known() <-chan struct{} { return k.known }

// Overlay is closed when the node has overlay addresses: those that the source has said, or
// those that an earlier process used.
func (k *Keeper) Overlay() <-chan struct{} {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.noteOverlay()
	return k.overlay
}

// noteOverlay closes overlay when there are overlay addresses. mu is held.
func (k *Keeper) noteOverlay() {
	select {
	case <-k.overlay:
		return
	default:
	}
	if addrs, _ := k.Set.OverlayAddrs(); len(addrs) > 0 {
		close(k.overlay)
	}
}

// Limits of Run.
const (
	maxRanges  = 256 // more than sluice-ipam ever has
	retryEvery = time.Second
)

// Run follows the source until ctx ends.
func (k *Keeper) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for t := time.NewTicker(retryEvery); ; {
			select {
			case <-ctx.Done():
				t.Stop()
				return
			case <-t.C:
				k.retry(ctx)
			}
		}
	})
	o := watch.FollowOptions{Max: maxRanges, RetryMin: 50 * time.Millisecond, RetryMax: 2 * time.Second, Log: k.Log}
	return watch.Follow(ctx, k.Source, k, o)
}

// Apply implements watch.Sink.
func (k *Keeper) Apply(ctx context.Context, c watch.Changes[netip.Prefix, Range]) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	var errs []error
	for p := range c.Deletes {
		errs = append(errs, k.goes(ctx, p))
	}
	moved := false
	for _, p := range slices.SortedFunc(maps.Keys(c.Upserts), netip.Prefix.Compare) {
		k.wanted[p] = c.Upserts[p]
		if k.wanted[p].Primary {
			moved = k.Set.setPrimary(p) || moved
		}
		errs = append(errs, k.comes(ctx, p))
	}
	if moved {
		errs = append(errs, k.Host.Repair())
	}
	k.noteOverlay()
	return errors.Join(errs...)
}

// Complete implements watch.Sink.
func (k *Keeper) Complete(ctx context.Context, listed map[netip.Prefix]struct{}) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	var errs []error
	for _, p := range slices.Concat(slices.Collect(maps.Keys(k.here)), slices.Collect(maps.Keys(k.wanted))) {
		if _, ok := listed[p]; !ok {
			errs = append(errs, k.goes(ctx, p))
		}
	}
	if k.Set.listed() {
		errs = append(errs, k.Host.Repair())
	}
	k.noteOverlay()
	return errors.Join(append(errs, k.reconsider(ctx))...)
}

// Failed implements watch.Sink.
func (k *Keeper) Failed(_ context.Context, why error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.away = why
	return nil
}

// retry does what had to wait.
func (k *Keeper) retry(ctx context.Context) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var errs []error
	for p := range k.going {
		errs = append(errs, k.goes(ctx, p))
	}
	if err := errors.Join(append(errs, k.reconsider(ctx))...); err != nil && ctx.Err() == nil {
		k.Log.Error("change of the pod ranges incomplete, trying again", log.Err(err))
	}
}

// reconsider adds the ranges that were refused if nothing is in their way any more.
func (k *Keeper) reconsider(ctx context.Context) error {
	var errs []error
	for p := range k.refused {
		errs = append(errs, k.comes(ctx, p))
	}
	return errors.Join(errs...)
}

// comes makes a range one of the node's: first its entry, which drops what has
// no endpoint, then what the node has for it, then it is open. mu is held.
func (k *Keeper) comes(ctx context.Context, p netip.Prefix) error {
	delete(k.going, p)
	if k.Set.isOpen(p) {
		return nil
	}
	if why := k.check(p); why != nil {
		if old := k.refused[p]; old == nil || old.Error() != why.Error() {
			k.Log.Error("pod range refused", "range", p, log.Err(why))
		}
		k.refused[p] = why
		return nil
	}
	delete(k.refused, p)
	k.here[p] = struct{}{}
	if err := errors.Join(k.Entries.AddRange(p), faultAddEntry.Hit(ctx)); err != nil {
		return k.postpone(p, fmt.Errorf("entry of pod range %v: %w", p, err))
	}
	k.Set.add(p)
	if err := errors.Join(k.Host.Repair(), faultAddNode.Hit(ctx)); err != nil {
		return k.postpone(p, fmt.Errorf("rules and routes of pod range %v: %w", p, err))
	}
	k.Set.opened(p)
	select {
	case <-k.known:
	default:
		close(k.known)
	}
	k.noteOverlay()
	k.Log.Info("pod range added", "range", p)
	return nil
}

// postpone makes reconsider try again.
func (k *Keeper) postpone(p netip.Prefix, err error) error {
	k.refused[p] = err
	return err
}

// special are ranges that no pod can have.
var special = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/3"), netip.MustParsePrefix("::/96"), netip.MustParsePrefix("::ffff:0:0/96"),
	netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8"),
}

// Check says why a prefix can be the range of no node's pods.
func Check(p netip.Prefix) error {
	if !p.IsValid() || p != p.Masked() || p.Bits() > p.Addr().BitLen()-2 {
		return fmt.Errorf("%v is not a masked prefix with room for a pod", p)
	}
	for _, q := range special {
		if p.Overlaps(q) {
			return fmt.Errorf("%v overlaps %v, which no pod can have", p, q)
		}
	}
	return nil
}

// check says why a range cannot be the node's. This process has rights that the
// source has not: a range cuts off whoever has an address of it and is no pod.
func (k *Keeper) check(p netip.Prefix) error {
	if err := Check(p); err != nil {
		return err
	}
	if own := k.wanted[p].Node; own != NodeAddr(p) {
		return fmt.Errorf("%v: the node's own address in it is %v there, and %v here", p, own, NodeAddr(p))
	}
	for _, q := range k.Set.All() {
		if p != q && p.Overlaps(q) {
			return fmt.Errorf("%v overlaps the pod range %v", p, q)
		}
	}
	a, device, err := k.Host.AddrIn(p)
	if err == nil && a.IsValid() {
		err = fmt.Errorf("%v holds %v, an address of %s", p, a, device)
	}
	return err
}

// goes takes a range away, unless an endpoint lives in it: first it is closed, then
// what the node has for it goes, then its entry. mu is held.
func (k *Keeper) goes(ctx context.Context, p netip.Prefix) error {
	delete(k.wanted, p)
	delete(k.refused, p)
	if _, ok := k.here[p]; !ok {
		return nil
	}
	k.going[p] = struct{}{}
	if !k.Endpoints.CloseRange(p) {
		return nil
	}
	if err := faultClose.Hit(ctx); err != nil {
		return err
	}
	k.Set.remove(p)
	if err := errors.Join(k.Host.RemoveRange(p), faultRemoveNode.Hit(ctx)); err != nil {
		return fmt.Errorf("rules and routes of the former pod range %v: %w", p, err)
	}
	if err := errors.Join(k.Entries.DropRange(p), faultRemoveEntry.Hit(ctx)); err != nil {
		return fmt.Errorf("entry of the former pod range %v: %w", p, err)
	}
	delete(k.going, p)
	delete(k.here, p)
	k.Log.Info("pod range removed", "range", p)
	return nil
}

// Problems say what an ADD that needs the ranges waits for.
func (k *Keeper) Problems() (texts []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.Set.All()) == 0 {
		text := "no pod range is known: sluice-ipam announces none"
		if k.away != nil {
			text = fmt.Sprintf("no pod range is known: %v", k.away)
		}
		texts = append(texts, text)
	}
	for _, p := range slices.SortedFunc(maps.Keys(k.refused), netip.Prefix.Compare) {
		texts = append(texts, fmt.Sprintf("pod range refused: %v", k.refused[p]))
	}
	return texts
}

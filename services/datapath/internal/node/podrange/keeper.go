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

// Fault points between the steps of a change.
var (
	faultAddEntry    = fault.Register("datapath/ranges/add-entry")
	faultAddNode     = fault.Register("datapath/ranges/add-node")
	faultClose       = fault.Register("datapath/ranges/close")
	faultRemoveNode  = fault.Register("datapath/ranges/remove-node")
	faultRemoveEntry = fault.Register("datapath/ranges/remove-entry")
)

// Range is the source's information about a range.
type Range struct {
	Node    netip.Addr // the node's own address in the range
	Primary bool       // Node is the node's overlay address
}

// Source provides the ranges.
type Source = watch.Source[netip.Prefix, Range]

// Entries are the ranges in the ipcache.
type Entries interface {
	AddRange(p netip.Prefix) error
	DropRange(p netip.Prefix) error
}

// Host manages the node's rules, routes and addresses of its ranges.
type Host interface {
	// Repair creates what is missing for the ranges of the set.
	Repair() error
	// RemoveRange removes what the node has for a range that is no longer in the set.
	RemoveRange(p netip.Prefix) error
	// AddrIn looks for an address of the node's devices in a range, other than the node's own address of the range, and
	// returns it with its device.
	AddrIn(p netip.Prefix) (a netip.Addr, device string, err error)
}

// Endpoints are the endpoints with addresses in the ranges.
type Endpoints interface {
	// CloseRange closes a range unless an endpoint has an address in it.
	CloseRange(p netip.Prefix) bool
}

// Options of a Keeper.
type Options struct {
	Set       *Set // with the ranges in the ipcache
	Source    Source
	Entries   Entries
	Host      Host
	Endpoints Endpoints
	Log       *slog.Logger
}

// Keeper keeps the set equal to a source. A range that the source removed stays until no endpoint has an address in it.
type Keeper struct {
	Options
	known   chan struct{} // closed when there is a range
	overlay chan struct{} // closed when there are overlay addresses

	mu      sync.Mutex
	here    map[netip.Prefix]struct{} // guarded by mu; ranges for which the kernel may have entries, rules or routes
	wanted  map[netip.Prefix]Range    // guarded by mu; ranges of the source
	going   map[netip.Prefix]struct{} // guarded by mu; ranges that the source removed
	refused map[netip.Prefix]error    // guarded by mu; rejected ranges of wanted
	away    error                     // guarded by mu; last error of the source
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

// Known is closed once the node has, or had, a pod range.
func (k *Keeper) Known() <-chan struct{} { return k.known }

// Overlay is closed once the node has overlay addresses, from the source or from a previous process.
func (k *Keeper) Overlay() <-chan struct{} {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.noteOverlay()
	return k.overlay
}

// noteOverlay closes overlay if there are overlay addresses. Called with mu held.
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
	o := watch.FollowOptions{
		Max: maxRanges, RetryMin: 50 * time.Millisecond, RetryMax: 2 * time.Second,
		Log: k.Log.With("source", "pod ranges"),
	}
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

// retry repeats postponed work.
func (k *Keeper) retry(ctx context.Context) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var errs []error
	for p := range k.going {
		errs = append(errs, k.goes(ctx, p))
	}
	if err := errors.Join(append(errs, k.reconsider(ctx))...); err != nil && ctx.Err() == nil {
		k.Log.Error("cannot apply the new pod ranges completely; retrying", log.Err(err))
	}
}

// reconsider adds ranges that were rejected if the reason no longer exists.
func (k *Keeper) reconsider(ctx context.Context) error {
	var errs []error
	for p := range k.refused {
		errs = append(errs, k.comes(ctx, p))
	}
	return errors.Join(errs...)
}

// comes adds a range: first its ipcache entry, which drops packets to unassigned addresses, then the node's rules and
// routes; then endpoints can use it. Called with mu held.
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

// postpone schedules another attempt.
func (k *Keeper) postpone(p netip.Prefix, err error) error {
	k.refused[p] = err
	return err
}

// special are ranges that pods cannot use.
var special = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/3"), netip.MustParsePrefix("::/96"), netip.MustParsePrefix("::ffff:0:0/96"),
	netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8"),
}

// Check returns an error if a prefix cannot be a pod range on any node.
func Check(p netip.Prefix) error {
	if !p.IsValid() || p != p.Masked() || p.Bits() > p.Addr().BitLen()-2 {
		return fmt.Errorf("%v is not a masked prefix that can hold a pod", p)
	}
	for _, q := range special {
		if p.Overlaps(q) {
			return fmt.Errorf("%v overlaps %v, which pods cannot use", p, q)
		}
	}
	return nil
}

// check returns an error if a range cannot be used on this node. This process has more privileges than the source and
// validates its data: any host that is not a pod becomes unreachable if its address is in a pod range.
func (k *Keeper) check(p netip.Prefix) error {
	if err := Check(p); err != nil {
		return err
	}
	if own := k.wanted[p].Node; own != NodeAddr(p) {
		return fmt.Errorf("%v: the source gives the node the address %v in it, but the node uses %v", p, own, NodeAddr(p))
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

// goes removes a range unless an endpoint has an address in it: it closes the range, then removes the node's rules and
// routes, then the ipcache entry. Called with mu held.
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

// Problems lists the reasons why an ADD that needs the ranges has to wait.
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

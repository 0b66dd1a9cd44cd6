// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package cluster makes sure that the ranges of this node and of the other nodes do not overlap. It registers ipam's
// ranges, and closes ranges that belong to another node. In mode pool, it also claims blocks of the cluster's pool and
// returns them.
//
// This node allocates from the ranges in ipam's state file, even while the cluster does not answer. A block is written
// to the cluster's registry before it is written to the file, and removed from the file before it is removed from the
// registry. After a crash, the registry may therefore contain a block that the file does not, but never the reverse.
// The next claim or registration removes the difference.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/pool"
)

// Errors that callers branch on.
var (
	// ErrPoolFull: the cluster's pool has no free block.
	ErrPoolFull = errors.New("the cluster's pool has no free block")
	// ErrMaxBlocks: the node has its maximum number of blocks.
	ErrMaxBlocks = errors.New("the node has its maximum number of blocks")
	// ErrAway: the registry did not answer a request for a block.
	ErrAway = errors.New("the cluster's pool is unreachable")
)

// Fault points.
var (
	faultAsked    = fault.Register("ipam/claim/before-ask")
	faultClaimed  = fault.Register("ipam/claim/answered")
	faultServed   = fault.Register("ipam/claim/stored")
	faultRetired  = fault.Register("ipam/return/stored")
	faultReturned = fault.Register("ipam/return/answered")
)

// Mode determines the source of the node's ranges.
type Mode string

// The modes.
const (
	Static     Mode = "static"
	Kubernetes Mode = "kubernetes"
	Pool       Mode = "pool"
)

// Settings must be the same on all nodes of a cluster.
type Settings struct {
	Mode                 Mode
	Prefixes             []netip.Prefix // of the pool
	IPv4Block, IPv6Block int            // lengths of the prefixes of its blocks
	MaxBlocks            int            // maximum number of blocks of one family on one node
}

// Families returns the families of the pool.
func (s Settings) Families() (families []ipam.Family) {
	for _, f := range []ipam.Family{ipam.IPv4, ipam.IPv6} {
		of := func(p netip.Prefix) bool { return ipam.FamilyOf(p.Addr()) == f }
		if s.Mode == Pool && slices.ContainsFunc(s.Prefixes, of) {
			families = append(families, f)
		}
	}
	return families
}

// name returns the name of a family's pool.
func (s Settings) name(f ipam.Family) string {
	var prefixes []string
	for _, p := range s.Prefixes {
		if ipam.FamilyOf(p.Addr()) == f {
			prefixes = append(prefixes, p.String())
		}
	}
	return "cluster pool " + strings.Join(prefixes, " and ")
}

// Answer is the registry's answer to a registration of this node.
type Answer struct {
	Registered bool // the cluster has accepted all registered ranges
	Connected  bool // this node is connected to the cluster's store
	Refused    []ipam.Refusal
	Taken      []netip.Prefix // the refused ranges, which belong to another node
}

// Registry is the cluster's registry of ranges and addresses.
type Registry interface {
	// Register registers the ranges of this node.
	Register(ctx context.Context, ranges []netip.Prefix) (Answer, error)
	// Claim claims a block that is not in known for this node. It returns ErrPoolFull if the pool has no free
	// block.
	Claim(ctx context.Context, f ipam.Family, known []netip.Prefix) (netip.Prefix, error)
	// Return returns a block to the pool. The call may be repeated.
	Return(ctx context.Context, p netip.Prefix) error
	// CheckReuse returns which released addresses may be allocated again. If addresses are scarce, the cluster tries
	// to free them early.
	CheckReuse(ctx context.Context, addresses []netip.Addr, scarce bool) (Reuse, error)
}

// Reuse is the answer of CheckReuse.
type Reuse struct {
	// Asks means that other nodes map addresses to endpoints, or that it is not known yet whether they do. Then
	// only the addresses in Free may be reused. Without Asks, all addresses may be reused.
	Asks bool
	// Unknown means that the datapath has not registered its routing mode yet. Asks is then an assumption, and the
	// agent soon checks again.
	Unknown bool
	Free    []netip.Addr
	Why     string // why the first address that is not in Free cannot be reused
}

// Ranges gives the agent access to ipam's ranges.
type Ranges interface {
	Summary() *ipam.Summary
	SetRanges(ctx context.Context, ranges []netip.Prefix) error
	SetRefused(ctx context.Context, list []ipam.Refusal) error
	Retire(ctx context.Context, p netip.Prefix) (bool, error)
	SetReuse(ctx context.Context, asks bool, free []netip.Addr, why string) error
	Hub() *watch.Hub[netip.Prefix, ipam.Range]
}

// Options of an Agent.
type Options struct {
	Settings Settings
	Registry Registry
	Ranges   Ranges
	// Report is called with the reason for which the cluster prevents this node from allocating new addresses, and
	// with nil when it no longer does.
	Report func(error)
	Log    *slog.Logger

	Every   time.Duration // pause between two registrations; 2 s if 0
	Retry   time.Duration // pause after a failed registration; 200 ms if 0
	Patient time.Duration // how long the start waits for the registry's first answer; 3 s if 0
}

// Agent keeps the ranges of this node in agreement with the cluster's registry.
type Agent struct {
	Options
	wake  chan struct{} // capacity 1: a caller waits for a block
	began time.Time

	mu      sync.Mutex
	checked bool   // guarded by mu; the ranges may be used
	answer  Answer // guarded by mu; the last answer
	// guarded by mu; why the registry does not answer, or why no block could be claimed
	problem error
	grown   map[ipam.Family]error   // guarded by mu; result of the last claim of a block
	step    chan struct{}           // guarded by mu; closed at the end of the next step that begins
	wanted  map[ipam.Family]bool    // guarded by mu; families for which callers wait for a block
	logged  map[string]string       // used by the loop only; the last logged texts
	spares  map[netip.Prefix]bool   // used by the loop only; blocks that were empty at the last check
	pause   map[ipam.Family]backoff // of the loop
	// used by the loop only; blocks that were removed from the file and perhaps not returned
	owed map[netip.Prefix]bool
	// used by the loop only; the registry's last answer whether addresses have to wait; nil: none yet
	said *bool
}

// New returns an Agent, which does nothing until Run is called.
func New(o Options) *Agent {
	if o.Every == 0 {
		o.Every, o.Retry, o.Patient = 2*time.Second, 200*time.Millisecond, 3*time.Second
	}
	return &Agent{
		Options: o, wake: make(chan struct{}, 1), began: time.Now(), step: make(chan struct{}),
		grown: map[ipam.Family]error{}, wanted: map[ipam.Family]bool{}, logged: map[string]string{},
		spares: map[netip.Prefix]bool{}, owed: map[netip.Prefix]bool{},
		pause: map[ipam.Family]backoff{},
	}
}

// Run keeps the ranges in agreement with the cluster until ctx ends.
func (a *Agent) Run(ctx context.Context) error {
	for {
		ranges := a.Ranges.Hub().Changed()
		a.mu.Lock()
		done, wanted := a.step, a.wanted
		a.step, a.wanted = make(chan struct{}), map[ipam.Family]bool{}
		a.mu.Unlock()
		wait := a.Every
		if !a.once(ctx, wanted) {
			wait = a.Retry
		}
		close(done)
		if ctx.Err() != nil {
			return nil
		}
		timer := time.NewTimer(wait)
		select {
		case <-a.wake:
		case <-ranges:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// Checked returns an error until the node's ranges have been compared with the cluster's since the start. Until then,
// no new address may be allocated.
func (a *Agent) Checked() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.checked {
		return nil
	}
	return fmt.Errorf("%w yet: its ranges are being compared with the cluster's", ipam.ErrNoRange)
}

// Problems returns the problems that the status shows to operators.
func (a *Agent) Problems() []error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var all []error
	if a.problem != nil {
		all = append(all, a.problem)
	}
	for _, f := range []ipam.Family{ipam.IPv4, ipam.IPv6} {
		if err := a.grown[f]; err != nil {
			all = append(all, err)
		}
	}
	return all
}

// Registered reports whether the cluster has the ranges of this node.
func (a *Agent) Registered() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.answer.Registered && a.problem == nil
}

// Note is called after addresses were allocated. It checks whether a family needs another block.
func (a *Agent) Note() {
	if a.Settings.Mode != Pool {
		return
	}
	sum := a.Ranges.Summary()
	for _, f := range a.Settings.Families() {
		b := blocksOf(sum, f)
		a.mu.Lock()
		failed := a.grown[f] != nil
		a.mu.Unlock()
		if b.full() && len(b.all) < a.Settings.MaxBlocks && !failed { // after a failure the loop retries by itself
			a.kick()
		}
	}
}

func (a *Agent) kick() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// Grow waits until the agent has tried to claim a block for every family without a free address. It returns nil if
// another attempt to allocate an address may succeed.
func (a *Agent) Grow(ctx context.Context) error {
	if a.Settings.Mode != Pool {
		return errors.ErrUnsupported
	}
	a.mu.Lock()
	done := a.step
	for _, f := range a.Settings.Families() {
		a.wanted[f] = true
	}
	a.mu.Unlock()
	a.kick()
	select {
	case <-done:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	sum := a.Ranges.Summary()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range a.Settings.Families() {
		if b := blocksOf(sum, f); b.free == 0 && a.grown[f] != nil {
			return a.grown[f]
		}
	}
	return nil
}

// once does all pending work, and reports whether it succeeded.
func (a *Agent) once(ctx context.Context, wanted map[ipam.Family]bool) (well bool) {
	ranges := a.known()
	answer, err := a.Registry.Register(ctx, ranges)
	if err == nil && answer.Registered {
		err = a.Ranges.SetRefused(ctx, answer.Refused)
		clear(a.owed) // the registration has also returned blocks that the file does not have
	}
	if err == nil && answer.Registered && a.Settings.Mode == Pool {
		err = a.letGo(ctx, answer.Taken)
	}
	a.mu.Lock()
	if err == nil && answer.Connected && !a.answer.Connected {
		clear(a.pause)
	}
	a.problem = err
	if err == nil {
		a.answer = answer
	}
	first := !a.checked
	a.checked = a.checked || err == nil && (answer.Registered || !answer.Connected) || time.Since(a.began) > a.Patient
	checked := a.checked
	a.mu.Unlock()
	a.complain("registration", err)
	known, rerr := a.reuse(ctx)
	a.complain("reuse of addresses", rerr)
	if first && checked && (err != nil || !answer.Connected) {
		if len(ranges) > 0 {
			a.Log.Warn("the cluster does not answer; the ranges of this node serve as they did last", log.Err(err))
		} else {
			a.Log.Warn("the cluster does not answer, and this node has no range yet", log.Err(err))
		}
	}
	well = err == nil && answer.Registered && checked && known
	if a.Settings.Mode == Pool {
		for _, f := range a.Settings.Families() {
			a.grow(ctx, f, wanted[f], answer, err)
		}
		a.shrink(ctx)
	}
	a.report()
	return well
}

// mostAsked is the maximum number of addresses in one call of CheckReuse.
const mostAsked = 4096

// reuse asks the registry which of the released addresses may be allocated again. It asks even without released
// addresses, because the routing mode may change. known is false while the routing mode is unknown.
func (a *Agent) reuse(ctx context.Context) (known bool, _ error) {
	sum := a.Ranges.Summary()
	waiting := sum.Waiting[:min(len(sum.Waiting), mostAsked)]
	r, err := a.Registry.CheckReuse(ctx, waiting, scarce(sum))
	if err != nil {
		r = Reuse{Asks: a.said == nil || *a.said, Why: err.Error()}
	}
	same := a.said != nil && *a.said == r.Asks
	if same && len(r.Free) == 0 && (!r.Asks || len(waiting) == 0 || r.Why == sum.Why) {
		return !r.Unknown, nil
	}
	if err == nil {
		a.said = &r.Asks
	}
	return !r.Unknown, a.Ranges.SetReuse(ctx, r.Asks, r.Free, r.Why)
}

// scarce reports whether fewer than a quarter of the addresses of a family are free.
func scarce(sum *ipam.Summary) bool {
	for _, f := range []ipam.Family{ipam.IPv4, ipam.IPv6} {
		if b := blocksOf(sum, f); b.usable > 0 && b.free < b.usable/4 {
			return true
		}
	}
	return false
}

// AwaitStep waits until the agent has done another step, in which it asks the cluster again.
func (a *Agent) AwaitStep(ctx context.Context) error {
	a.mu.Lock()
	done := a.step
	a.mu.Unlock()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// known returns the ranges of this node, serving ranges first.
func (a *Agent) known() (ranges []netip.Prefix) {
	for _, f := range a.Ranges.Summary().Pools {
		if len(ranges) < pool.MaxPools {
			ranges = append(ranges, f.Prefix)
		}
	}
	return ranges
}

// report calls Report with the reasons why new addresses cannot be allocated.
func (a *Agent) report() {
	why := a.Checked()
	sum := a.Ranges.Summary()
	for _, f := range sum.Pools {
		if f.Refused != "" && !f.Draining && !serves(sum, ipam.FamilyOf(f.Prefix.Addr())) {
			why = errors.Join(why, fmt.Errorf("%s: %s", f.Prefix, f.Refused))
		}
	}
	for _, f := range a.Settings.Families() {
		if !serves(sum, f) {
			a.mu.Lock()
			why = errors.Join(why, fmt.Errorf("no block of %s: %w", a.Settings.name(f), cmpErr(a.grown[f], a.problem)))
			a.mu.Unlock()
		}
	}
	a.Report(why)
}

func cmpErr(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return errors.New("it is being claimed")
}

func serves(sum *ipam.Summary, f ipam.Family) bool {
	return slices.ContainsFunc(sum.Pools, func(p ipam.Figures) bool {
		return p.Serves() && ipam.FamilyOf(p.Prefix.Addr()) == f
	})
}

// complain logs an error about a subject, unless the same error was logged last.
func (a *Agent) complain(subject string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != a.logged[subject] && text != "" {
		a.Log.Warn("cannot reconcile the ranges of this node with the cluster", "subject", subject, log.Err(err))
	}
	a.logged[subject] = text
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policystream

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/policytable"
)

// Past is the policy state that this or an earlier process has enforced. A service with an older state has lost
// policies, and its state is not adopted without confirmation. The methods may be called concurrently.
type Past struct {
	memory Memory
	log    *slog.Logger
	due    chan struct{} // enforced has to be saved
	saving sync.Mutex    // held while enforced is read and saved, so that saves are in order

	mu       sync.Mutex
	enforced Enforced // guarded by mu
	unknown  error    // guarded by mu; why the enforced state is unknown
	unsaved  string   // guarded by mu; why the state is not on stable storage
}

// NewPast returns a Past in which nothing was enforced: call Recall. Without a memory, a service
// that lost its state is trusted.
func NewPast(m Memory, l *slog.Logger) *Past {
	return &Past{memory: m, log: l, due: make(chan struct{}, 1)}
}

// Recall loads the state that an earlier process enforced.
func (p *Past) Recall() {
	if p.memory == nil {
		return
	}
	enforced, err := p.memory.Load()
	if err != nil {
		p.log.Error("cannot read which policy revision was enforced before; the policy tables stay until the policies are confirmed", log.Err(err))
		enforced = Enforced{}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.enforced, p.unknown = enforced, err
}

// Revision returns the enforced policy revision; 0 if it is unknown.
func (p *Past) Revision() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.enforced.Revision
}

// Unsaved returns why the state is not on stable storage; empty if it is.
func (p *Past) Unsaved() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.unsaved
}

// Before returns the state that the service must not be older than; nil: any state is accepted.
func (p *Past) Before() *Enforced {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.before()
}

// before is like Before, but with mu held.
func (p *Past) before() *Enforced {
	if p.unknown == nil && (p.enforced.State == "" || len(p.enforced.Sources) == 0) {
		return nil
	}
	e := p.enforced
	e.Sources = slices.Clone(e.Sources)
	return &e
}

// Lags returns why the service's state at a barrier is not adopted; empty if it is. A service that has lost policies
// must not remove them from the node.
func (p *Past) Lags(b policytable.Barrier) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.before()
	if e == nil || b.State == "" || len(b.Incomplete) == 0 {
		return ""
	}
	what := "the policy service began another state"
	switch {
	case p.unknown != nil:
		what = fmt.Sprintf("the record of that revision cannot be read (%v)", p.unknown)
	case e.State == b.State && b.PolicyRevision >= e.Revision:
		return ""
	case e.State == b.State:
		what = "the policy service went back to an older revision"
	}
	revision := "what it enforced before"
	if p.unknown == nil {
		revision = fmt.Sprintf("revision %d", e.Revision)
	}
	return fmt.Sprintf("the kernel goes on enforcing %s: %s and is at revision %d; incomplete: %s. "+
		"Apply the policies again, then run `sluice policy confirm`",
		revision, what, b.PolicyRevision, strings.Join(b.Incomplete, ", "))
}

// Note records the state that is enforced from now on. A new state is saved before its tables are written: if the
// process is killed in between, the next process accepts the service's state without another proof that it is complete.
// A new revision of the same state is saved later by Save.
func (p *Past) Note(b policytable.Barrier) {
	if p.memory == nil || b.State == "" {
		return
	}
	e := Enforced{State: b.State, Revision: b.PolicyRevision, Sources: slices.Clone(b.Sources)}
	p.mu.Lock()
	same := p.unknown == nil && p.enforced.Equal(e)
	other := p.unknown != nil || p.enforced.State != e.State
	p.enforced, p.unknown = e, nil
	p.mu.Unlock()
	switch {
	case same:
	case other:
		p.save()
	default:
		select {
		case p.due <- struct{}{}:
		default:
		}
	}
}

// saveAgain is the pause after a failed save: a full disk may have space again.
const saveAgain = 2 * time.Second

// Save writes the recorded states until ctx ends, and a pending one at the end. It retries failed
// writes.
func (p *Past) Save(ctx context.Context) {
	for done := false; !done; {
		var again <-chan time.Time
		if p.Unsaved() != "" {
			again = time.After(saveAgain)
		}
		select {
		case <-p.due:
		case <-again:
		case <-ctx.Done():
			select {
			case <-p.due:
				done = true
			default:
				return
			}
		}
		p.save()
	}
}

// save writes the current state, and records an error.
func (p *Past) save() {
	p.saving.Lock()
	defer p.saving.Unlock()
	p.mu.Lock()
	e := p.enforced
	p.mu.Unlock()
	text := ""
	if err := p.memory.Save(e); err != nil {
		if p.Unsaved() == "" {
			p.log.Error("cannot save the enforced policy revision; retrying", log.Err(err))
		}
		text = fmt.Sprintf("the enforced policy revision could not be saved: %v", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unsaved = text
}

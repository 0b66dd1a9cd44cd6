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

// Past is the policy state that is enforced, also by earlier processes: what the
// service may not fall behind without a reason. Its methods may be called
// concurrently.
type Past struct {
	memory Memory
	log    *slog.Logger
	due    chan struct{} // enforced has to be saved
	saving sync.Mutex    // held while enforced is read and saved: a later save has a later state

	mu       sync.Mutex
	enforced Enforced // guarded by mu
	unknown  error    // guarded by mu; why it is not known what was enforced
	unsaved  string   // guarded by mu; why it is not on stable storage
}

// NewPast returns a past in which nothing was enforced: call Recall. Without a
// memory a service that lost its state is believed.
func NewPast(m Memory, l *slog.Logger) *Past {
	return &Past{memory: m, log: l, due: make(chan struct{}, 1)}
}

// Recall loads what was enforced before this process began.
func (p *Past) Recall() {
	if p.memory == nil {
		return
	}
	enforced, err := p.memory.Load()
	if err != nil {
		p.log.Error("what was enforced before is not known: the tables stay until the policies are confirmed", log.Err(err))
		enforced = Enforced{}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.enforced, p.unknown = enforced, err
}

// Revision is the revision of the policies that is enforced, as far as it is known.
func (p *Past) Revision() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.enforced.Revision
}

// Unsaved says why the state is not on stable storage; empty: it is.
func (p *Past) Unsaved() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.unsaved
}

// Before is what the service has to be no older than; nil: it may say anything.
func (p *Past) Before() *Enforced {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.before()
}

// before is Before; mu is held.
func (p *Past) before() *Enforced {
	if p.unknown == nil && (p.enforced.State == "" || len(p.enforced.Sources) == 0) {
		return nil
	}
	e := p.enforced
	e.Sources = slices.Clone(e.Sources)
	return &e
}

// Lags says why the service's state is not taken over at a barrier; empty: it is.
// A state that lost its policies would open what they closed.
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
		what = fmt.Sprintf("which revision that is cannot be read (%v)", p.unknown)
	case e.State == b.State && b.PolicyRevision >= e.Revision:
		return ""
	case e.State == b.State:
		what = "the policy service went back"
	}
	revision := "what it enforced before"
	if p.unknown == nil {
		revision = fmt.Sprintf("revision %d", e.Revision)
	}
	return fmt.Sprintf("the kernel goes on enforcing %s: %s and is at revision %d; incomplete: %s. "+
		"Apply the policies again, then run `sluice policy confirm`",
		revision, what, b.PolicyRevision, strings.Join(b.Incomplete, ", "))
}

// Note notes the state that is enforced from here on. Another state is saved
// before its tables are written: a kill in between must not make the service
// prove again what it proved. A revision is saved by Save, beside everything else.
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

// saveAgain is the pause after a save that failed: a disk that was full has space again.
const saveAgain = 2 * time.Second

// Save saves what Note noted, until ctx ends; then once more. What could not be saved is
// tried again.
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

// save saves what is enforced now, and reports a state that was not saved.
func (p *Past) save() {
	p.saving.Lock()
	defer p.saving.Unlock()
	p.mu.Lock()
	e := p.enforced
	p.mu.Unlock()
	text := ""
	if err := p.memory.Save(e); err != nil {
		if p.Unsaved() == "" {
			p.log.Error("enforced policy revision not saved; it is tried again", log.Err(err))
		}
		text = fmt.Sprintf("the enforced policy revision is not on stable storage: %v", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unsaved = text
}

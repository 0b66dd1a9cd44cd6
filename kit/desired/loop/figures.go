// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package loop

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/looptime"
)

// Figures are the durations of one operation's turns.
type Figures struct {
	looptime.Figures
	// Most is the largest increase of Options.Done in one turn.
	Most int
	// Processor has the CPU times of the turns; empty if they are not measured. If a turn lasted longer than its
	// CPU time, the loop waited for the disk or for a CPU.
	Processor looptime.Figures
}

// moment is the start of a turn or of a part of a turn.
type moment struct {
	at   time.Time
	used time.Duration // CPU time
}

// record collects figures. Its zero value is ready.
type record struct {
	mu   sync.Mutex
	by   map[string]*Figures // by operation; guarded by mu
	done int                 // Options.Done after the previous turn; owned by the loop
}

func (l *Loop) begin() moment {
	m := moment{at: time.Now()}
	if l.options.Processor != nil {
		m.used = l.options.Processor()
	}
	return m
}

// end records the duration of a turn.
func (l *Loop) end(operation string, began moment) {
	if l.options.Done == nil {
		l.add(operation, began, 0)
		return
	}
	done := l.options.Done()
	l.add(operation, began, done-l.figures.done)
	l.figures.done = done
}

func (l *Loop) add(operation string, began moment, done int) {
	d, used := time.Since(began.at), time.Duration(0)
	if l.options.Processor != nil {
		used = l.options.Processor() - began.used
	}
	r := &l.figures
	r.mu.Lock()
	defer r.mu.Unlock()
	f := r.by[operation]
	if f == nil {
		if r.by == nil {
			r.by = make(map[string]*Figures)
		}
		f = &Figures{Figures: looptime.Figures{Operation: operation}}
		r.by[operation] = f
	}
	f.Add(d)
	f.Most = max(f.Most, done)
	if l.options.Processor != nil {
		f.Processor.Add(used)
	}
}

// Part starts to measure a part of the current turn as an operation of its own, and returns the function that ends the
// measurement. It must be called within a turn.
func (l *Loop) Part(operation string) (end func()) {
	began := l.begin()
	return func() { l.add(operation, began, 0) }
}

// Figures returns a copy of the figures, sorted by operation. It is safe for concurrent use and
// does not wait for a turn.
func (l *Loop) Figures() []Figures {
	l.figures.mu.Lock()
	defer l.figures.mu.Unlock()
	out := make([]Figures, 0, len(l.figures.by))
	for _, operation := range slices.Sorted(maps.Keys(l.figures.by)) {
		out = append(out, *l.figures.by[operation])
	}
	return out
}

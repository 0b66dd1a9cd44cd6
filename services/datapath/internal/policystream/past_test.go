// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policystream

import (
	"context"
	"runtime"
	"sync"
	"testing"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/datapath/internal/policytable"
)

// disk keeps what was saved last. The save of revision 2 takes until it is freed.
type disk struct {
	began, free chan struct{}

	mu   sync.Mutex
	last Enforced // guarded by mu
}

func (d *disk) Load() (Enforced, error) { return Enforced{}, nil }

func (d *disk) Save(e Enforced) error {
	if e.Revision == 2 {
		close(d.began)
		<-d.free
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.last = e
	return nil
}

func TestAnotherStateIsSavedBehindTheRevisionThatIsBeingSaved(t *testing.T) {
	d := &disk{began: make(chan struct{}), free: make(chan struct{})}
	p := NewPast(d, log.Discard())
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	work.Go(func() { p.Save(ctx) })
	note := func(state string, revision uint64) {
		p.Note(policytable.Barrier{State: state, PolicyRevision: revision, Sources: []string{"grpc"}})
	}
	note("a", 1)
	note("a", 2)
	<-d.began
	work.Go(func() { note("b", 3) })
	for p.Revision() != 3 {
		runtime.Gosched()
	}
	for range 1000 { // a save that does not wait comes first now
		runtime.Gosched()
	}
	close(d.free)
	cancel()
	work.Wait()
	if d.last.State != "b" || d.last.Revision != 3 {
		t.Errorf("saved last is %+v, want revision 3 of state b", d.last)
	}
}

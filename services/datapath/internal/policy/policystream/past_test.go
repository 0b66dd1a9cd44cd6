// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policystream

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/policytable"
)

// disk keeps the last saved state. Saving revision 2 blocks until free is closed.
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
	for range 1000 { // a save that does not wait would come first now
		runtime.Gosched()
	}
	close(d.free)
	cancel()
	work.Wait()
	if d.last.State != "b" || d.last.Revision != 3 {
		t.Errorf("saved last is %+v, want revision 3 of state b", d.last)
	}
}

// fullDisk fails until it has space.
type fullDisk struct {
	space time.Time
	saves int
}

func (d *fullDisk) Load() (Enforced, error) { return Enforced{}, nil }

func (d *fullDisk) Save(Enforced) error {
	if d.saves++; time.Now().Before(d.space) {
		return errors.New("no space left on device")
	}
	return nil
}

// TestWhatCouldNotBeSavedIsTriedAgain: otherwise the status would report a full disk until the next change of policies,
// perhaps a day later.
func TestWhatCouldNotBeSavedIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &fullDisk{space: time.Now().Add(time.Minute)}
		p := NewPast(d, log.Discard())
		ctx, cancel := context.WithCancel(t.Context())
		var work sync.WaitGroup
		work.Go(func() { p.Save(ctx) })
		for revision := range uint64(2) {
			p.Note(policytable.Barrier{State: "a", PolicyRevision: revision, Sources: []string{"grpc"}})
		}
		time.Sleep(time.Minute - time.Second) // fake clock
		if p.Unsaved() == "" {
			t.Error("saved on a full disk")
		}
		time.Sleep(time.Second + saveAgain) // fake clock
		synctest.Wait()
		saves := d.saves
		if p.Unsaved() != "" || saves > 35 {
			t.Errorf("with space again: %q after %d saves", p.Unsaved(), saves)
		}
		time.Sleep(time.Minute) // fake clock
		if synctest.Wait(); d.saves != saves {
			t.Errorf("%d saves of a saved state", d.saves-saves)
		}
		cancel()
		work.Wait()
	})
}

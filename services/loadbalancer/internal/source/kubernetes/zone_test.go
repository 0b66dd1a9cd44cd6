// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/source"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// failures is a sink that stores the last failure.
type failures struct{ last atomic.Value }

func (*failures) Apply(context.Context, watch.Changes[service.ObjectKey, owner.Given]) error {
	return nil
}

func (*failures) Complete(context.Context, map[service.ObjectKey]struct{}) error { return nil }

func (f *failures) Failed(_ context.Context, why error) error {
	text := ""
	if why != nil {
		text = why.Error()
	}
	f.last.Store(text)
	return nil
}

func TestZoneIsTriedAgainAndItsFailureTakenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := &failures{}
		joint := source.New[service.ObjectKey, owner.Given](sink, []string{kindNodes}, source.Options{
			RetryMin: time.Millisecond, RetryMax: time.Second, Refresh: time.Minute, Log: log.Discard(),
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- joint.Run(ctx) }()
		tries, got := 0, ""
		z := &zone{joint: joint, done: ctx.Done(), set: func(name string) error {
			if tries++; tries < 3 {
				return errors.New("the disk is full")
			}
			got = name
			return nil
		}}
		z.Complete()
		go func() {
			time.Sleep(time.Second)
			if last := sink.last.Load(); last != "nodes: the disk is full" {
				t.Errorf("meanwhile the sink has %q", last)
			}
		}()
		z.Upsert(types.NamespacedName{Name: "n1"}, "east")
		synctest.Wait()
		if last := sink.last.Load(); tries != 3 || got != "east" || last != "" {
			t.Errorf("after %d tries the zone is %q, and the sink has %q", tries, got, last)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

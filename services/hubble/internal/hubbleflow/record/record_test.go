// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/log"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
)

// kept contains a history and metrics that keep what they receive.
type kept struct {
	entries []history.Entry
	flows   int
	lost    uint64
}

func (k *kept) Append(e history.Entry)                         { k.entries = append(k.entries, e) }
func (k *kept) Count(string, *flow.Flow)                       { k.flows++ }
func (k *kept) CountLost(_ flow.LostEventSource, count uint64) { k.lost += count }

// losses returns the counts of the records about losses.
func (k *kept) losses(t *testing.T) (counts []uint64) {
	t.Helper()
	for _, e := range k.entries {
		if !e.Loss {
			continue
		}
		l := &flow.LostEvent{}
		if err := proto.Unmarshal(e.Data, l); err != nil {
			t.Fatal(err)
		}
		counts = append(counts, l.GetNumEventsLost())
	}
	return counts
}

// TestLossesOfASecondAreOneRecord: the datapath reports a loss before each event. The losses within a second become
// one record with the sum of their counts.
func TestLossesOfASecondAreOneRecord(t *testing.T) {
	k, now := &kept{}, time.Unix(1_800_000_000, 0)
	r := New(Options{History: k, Metrics: k, Now: func() time.Time { return now }, Log: log.Discard()})
	event := func() {
		r.Flow(&datapathv1.Flow{
			Time: timestamppb.New(now), NodeName: "node-1",
			Source: &datapathv1.FlowEnd{
				EndpointIndex: 1, Pod: &workloadv1.PodReference{Namespace: "shop", Name: "web"},
				Labels: []*workloadv1.Label{{Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: "shop"}},
			},
		})
	}
	for range 10 {
		event()
		r.Lost(datapathv1.LossSource_LOSS_SOURCE_KERNEL, 2)
		now = now.Add(300 * time.Millisecond)
	}
	now = now.Add(time.Second)
	event()
	if got := k.losses(t); !slices.Equal(got, []uint64{2, 6, 8, 4}) || k.lost != 20 || k.flows != 11 {
		t.Errorf("records about losses: %v; %d lost and %d flows are counted", got, k.lost, k.flows)
	}
	if e := k.entries[0]; e.Part != "namespace shop" || !slices.Equal(e.Facts.Pods, []string{"shop/web"}) {
		t.Errorf("the first entry is %+v", e)
	}
	facts, err := Describe(k.entries[0].Data)
	if err != nil || !slices.Equal(facts.Pods, []string{"shop/web"}) {
		t.Errorf("facts from the stored flow: %+v, %v", facts, err)
	}
	if r.NodeName() != "node-1" || r.Rate() != 11.0/60 {
		t.Errorf("node %q, %v flows/s", r.NodeName(), r.Rate())
	}
}

// TestLossIsRecordedWithoutAFurtherEvent: a loss is recorded even if no further event follows, also when the process
// stops.
func TestLossIsRecordedWithoutAFurtherEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &kept{}
		r := New(Options{History: k, Metrics: k, Now: time.Now, Log: log.Discard()})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- r.Run(ctx) }()
		r.Lost(datapathv1.LossSource_LOSS_SOURCE_KERNEL, 2)
		r.Lost(datapathv1.LossSource_LOSS_SOURCE_KERNEL, 3)
		time.Sleep(2 * lossInterval)
		synctest.Wait()
		if got := k.losses(t); !slices.Equal(got, []uint64{2, 3}) {
			t.Errorf("records about losses: %v", got)
		}
		r.Lost(datapathv1.LossSource_LOSS_SOURCE_KERNEL, 4)
		r.Lost(datapathv1.LossSource_LOSS_SOURCE_KERNEL, 5)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if got := k.losses(t); !slices.Equal(got, []uint64{2, 3, 4, 5}) {
			t.Errorf("records about losses after the end: %v", got)
		}
	})
}

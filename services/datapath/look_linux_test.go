// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/flow"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/kernelmaps"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync"
)

// await returns the first event that matches.
func (w *world) await(reader *observe.Reader, wanted func(flow.Event) bool) flow.Event {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	for {
		e, _, _, err := reader.Next(ctx, true)
		if err != nil {
			w.t.Fatalf("no such event: %v", err)
		}
		if wanted(e) {
			return e
		}
	}
}

func TestKernelObserversSeeRepairs(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	a := w.pod("a")
	reader := w.node.Observation.Ring.Tail()
	w.deleteClsact(a)
	e := w.await(reader, func(e flow.Event) bool { return e.Type == flow.Repair })
	if e.From.Owner != a.owner || e.From.Slot != a.ep.Slot || e.SourceIdentity != a.ep.Identity.Number ||
		e.Repair.Subject != endpoint.SubjectQdisc && e.Repair.Subject != endpoint.SubjectFilter || e.Repair.Device == "" || e.Repair.Err != "" {
		t.Errorf("event %+v", e)
	}
}

// TestKernelLossIsToldThoughNoEventFollows ends a flood with lost events. The loss must be reported although no later
// event triggers the report.
func TestKernelLossIsToldThoughNoEventFollows(t *testing.T) {
	w := newWorld(t)
	w.events = 1
	w.start(false)
	a, b := w.pod("a"), w.pod("b")
	reader := w.node.Observation.Ring.Read(time.Time{})
	before := w.counted(event.SpoofedIP)
	for range 50 {
		a.sendFrom(netip.MustParseAddr("10.99.0.77"), netip.AddrPortFrom(b.spec.Addrs[0], 9))
	}
	sent := w.counted(event.SpoofedIP) - before
	seen, lost := uint64(0), uint64(0)
	w.await(reader, func(e flow.Event) bool {
		if e.Reason == uint32(event.SpoofedIP) {
			seen++
		}
		lost += uint64(e.KernelLost)
		total, err := w.node.Kernel.Events.Lost()
		return err == nil && lost == total && seen+lost >= sent
	})
	if lost == 0 {
		t.Errorf("%d packets, %d events, no loss reported", sent, seen)
	}
}

func TestKernelConnectionIsReportedTrackedAndExplained(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	a, b := w.pod("a"), w.pod("b")
	for _, to := range b.spec.Addrs {
		reader := w.node.Observation.Ring.Tail()
		addr := b.echo(to)
		if err := talk(a.ns, addr, patience); err != nil {
			t.Fatal(err)
		}
		e := w.await(reader, func(e flow.Event) bool { return e.Type == flow.PolicyVerdict && e.Destination == addr })
		if e.From.Owner != a.owner || e.To.Owner != b.owner || e.Verdict != flow.Forwarded || e.Reply ||
			e.Sender.Slot != a.ep.Slot || e.Receiver.Slot != b.ep.Slot || e.Sender.By == 0 ||
			e.Receiver.Verdict != flow.Forwarded {
			t.Errorf("event %+v", e)
		}
		x, err := w.node.Observation.Explainer.Explain(conntrack.Tuple{Initiator: e.Source, Responder: addr, Protocol: e.Protocol})
		if err != nil || x.Reason != event.ForwardedToPod || !x.Tracked || x.Next.Evaluated || x.Next.Reason != event.ForwardedToPod || x.Connection.Initiator != e.Source {
			t.Errorf("explained: %+v, %v", x, err)
		}
		p, err := w.node.Collector.Collect(t.Context())
		if err != nil || p.Live[0]+p.Live[1] == 0 || p.Orphaned != 0 {
			t.Errorf("collected: %+v, %v", p, err)
		}
	}
	if _, err := w.delete(b.owner); err != nil {
		t.Fatal(err)
	}
	if p, err := w.node.Collector.Collect(t.Context()); err != nil || p.Orphaned == 0 {
		t.Errorf("after the endpoint is deleted: %+v, %v", p, err)
	}
}

// pinned opens a map through its pin, bypassing the datapath.
func (w *world) pinned(name string) *ebpf.Map {
	w.t.Helper()
	pins, err := filepath.Glob(filepath.Join(w.dir, "bpf", "sluice", name+"_v*"))
	if err != nil || len(pins) != 1 {
		w.t.Fatalf("pins of %s: %v, %v", name, pins, err)
	}
	m, err := ebpf.LoadPinnedMap(pins[0], nil)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = m.Close() })
	return m
}

// findings returns the audit findings with a subject; "": all.
func (w *world) findings(repair bool, subject string) (found []endpoint.Finding) {
	w.t.Helper()
	err := w.node.Endpoints.Reconciler.Audit(w.t.Context(), repair, func(f endpoint.Finding) error {
		if subject == "" || f.Subject == subject {
			found = append(found, f)
		}
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return found
}

func TestKernelAuditPutsPolicyTablesRight(t *testing.T) {
	w := newWorld(t)
	w.start(false)
	if found := w.findings(false, kernelmaps.SubjectTable); len(found) > 0 {
		t.Fatalf("before: %+v", found)
	}
	if err := w.pinned("sl_id").Put(uint32(300), uint32(1<<31|7)); err != nil {
		t.Fatal(err)
	}
	if found := w.findings(false, kernelmaps.SubjectTable); len(found) != 1 || !strings.Contains(found[0].Key, "300") || found[0].Repaired {
		t.Errorf("an entry that was never written: %+v", found)
	}
	if found := w.findings(true, kernelmaps.SubjectTable); len(found) != 1 || !found[0].Repaired || found[0].Err != nil {
		t.Errorf("repaired: %+v", found)
	}
	if found := w.findings(false, kernelmaps.SubjectTable); len(found) > 0 {
		t.Errorf("afterwards: %+v", found)
	}
}

// nobody is a policy service that does not answer.
type nobody struct{}

func (nobody) Subscribe(context.Context, policystream.Subscription) (policystream.Stream, error) {
	return nil, errors.New("nobody is there")
}

func TestKernelAuditPutsPolicyWordsRight(t *testing.T) {
	w := newWorld(t)
	w.policies = nobody{}
	w.start(false)
	a := w.pod("a")
	if found := w.findings(true, policysync.SubjectEndpoint); len(found) > 0 {
		t.Fatalf("before: %+v", found)
	}
	if _, err := w.node.Kernel.Endpoints.SetPolicy(a.ep.Slot, nodetable.Allow, nodetable.Allow); err != nil {
		t.Fatal(err)
	}
	want := endpoint.Difference{Subject: policysync.SubjectEndpoint, Key: "1", Want: "egress table 2 ingress table 2", Have: "egress table 1 ingress table 1"}
	for _, repair := range []bool{false, true} {
		found := w.findings(repair, policysync.SubjectEndpoint)
		if len(found) != 1 || found[0].Difference != want || found[0].Repaired != repair {
			t.Errorf("repair %v: %+v, want %+v", repair, found, want)
		}
	}
	if e, err := w.node.Kernel.Endpoints.Lookup(a.ep.Slot); err != nil || e.Policy.Egress != nodetable.Pending || e.Policy.Ingress != nodetable.Pending {
		t.Errorf("afterwards %+v, %v", e.Policy, err)
	}
}

// TestKernelWhatWasAllowedWithoutPoliciesEvaluatesNobodyNew proves INV-52: tables that a node wrote in policy mode none
// are not used when policies are enabled again.
func TestKernelWhatWasAllowedWithoutPoliciesEvaluatesNobodyNew(t *testing.T) {
	w := newWorld(t)
	w.policies = nobody{}
	w.start(false)
	a := w.pod("a")
	identity := a.ep.Identity.Number
	w.stop()
	w.policies = nil
	w.start(false)
	if e, err := w.node.Kernel.Endpoints.Lookup(a.ep.Slot); err != nil || e.Policy.Egress != nodetable.Allow {
		t.Fatalf("without policies: %+v, %v", e.Policy, err)
	}
	w.stop()
	w.policies, w.required, w.wait = nobody{}, true, time.Millisecond
	w.start(false)
	if err := w.node.Policy.Applier.Await(t.Context(), identity); !errors.Is(err, policysync.ErrUnavailable) {
		t.Errorf("a new endpoint would start with tables that come from no policy: %v", err)
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"slices"
	"testing"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

func TestStateHasOneName(t *testing.T) {
	p := newPublisher(stream.Defaults())
	name := p.nameState()
	if name == "" || p.nameState() != "" {
		t.Fatalf("the name of a new state is %q, and a second call returned a name, too", name)
	}
	next := newPublisher(stream.Defaults())
	if err := next.takeState(name); err != nil || next.stateID != p.stateID || next.nameState() != "" {
		t.Errorf("the next run has the state %v of %q, %v", next.stateID, name, err)
	}
	for _, bad := range []string{"", "no hexadecimal", name + "00"} {
		if err := newPublisher(stream.Defaults()).takeState(bad); err == nil {
			t.Errorf("%q is accepted as the name of a state", bad)
		}
	}
}

func TestSubscribersAreToldWhichSourcesAStateHas(t *testing.T) {
	d, s := newDesk(t, 10), someSources(t, t.TempDir())
	p := newPublisher(stream.Defaults())
	p.publish(d.policySet, s)
	if st := p.barrier.State; st == nil || len(st.Sources)+len(st.Complete) > 0 || st.Confirmed {
		t.Fatalf("of nothing: %+v", st)
	}
	applied := d.make(managed.SourceGRPC, "shop", 1)
	applied.Manager = "argo"
	d.replace([]*Policy{applied, d.make(managed.SourceFile, "shop", 2)}, nil)
	p.barrier.Policy++
	s.managerCompleted("argo")
	s.completed(source.Identity)
	p.publish(d.policySet, s)
	st := p.barrier.State
	if !slices.Equal(st.Sources, []string{"file", "grpc/argo"}) || !slices.Equal(st.Complete, []string{"grpc/argo", "identity"}) {
		t.Errorf("policies of %q, complete are %q", st.Sources, st.Complete)
	}
	if p.publish(d.policySet, s); p.barrier.State != st {
		t.Error("the state differs although nothing has changed")
	}
	p.confirm()
	if p.publish(d.policySet, s); !p.barrier.State.Confirmed {
		t.Error("subscribers do not see that an operator has confirmed the state")
	}
	undo := d.replace(nil, []policy.Key{applied.Key})
	p.barrier.Policy++
	if p.publish(d.policySet, s); !slices.Equal(p.barrier.State.Sources, []string{"file"}) {
		t.Errorf("policies of %q after the only policy of argo was removed", p.barrier.State.Sources)
	}
	undo()
	other := d.make(managed.SourceFile, "shop", 1)
	d.replace([]*Policy{other}, nil)
	p.barrier.Policy++
	if p.publish(d.policySet, s); !slices.Equal(p.barrier.State.Sources, []string{"file"}) {
		t.Errorf("policies of %q after a file took over the only policy of argo", p.barrier.State.Sources)
	}
}

func TestStepsArePublishedOnce(t *testing.T) {
	d, s := newDesk(t, 10), someSources(t, t.TempDir())
	p := newPublisher(stream.Defaults())
	p.publish(d.policySet, s)
	session, _ := p.stream.Subscribe(stream.Subscriber{Name: "viewer", Watches: true}, p.barrier,
		func() []policytable.Step { return nil })
	defer session.Close()
	if _, err := session.Next(t.Context()); err != nil { // the snapshot
		t.Fatal(err)
	}
	for _, table := range []policytable.ID{7, 8} {
		p.step(policytable.RetireTable{Table: table})
		p.publish(d.policySet, s)
		p.publish(d.policySet, s) // no steps
		m, err := session.Next(t.Context())
		if err != nil || len(p.pending) > 0 {
			t.Fatalf("%d steps wait, %v", len(p.pending), err)
		}
		if i := slices.Index(m.Steps, policytable.Step(policytable.RetireTable{Table: table})); i < 0 {
			t.Errorf("message %d has %v, want the step of table %d", m.Seq, m.Steps, table)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package stream

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/kit/desired/desiredtest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
)

func TestStreamKeepsTheContractOfDesiredState(t *testing.T) {
	desiredtest.Run(t, func(*testing.T) desiredtest.Service {
		// Use small limits, so that a few changes exceed them.
		return &contract{
			log:    NewLog(Limits{Message: 150, Resume: 1500, Behind: 2000, Unacked: 100}),
			tables: make(map[identity.Numeric]policytable.ID),
		}
	})
}

// contract adapts the log to the contract test, with tables of the engine. An object is a subject, and its value is
// its ingress table.
type contract struct {
	log      *Log
	tables   map[identity.Numeric]policytable.ID
	revision uint64
}

func bind(object identity.Numeric, table policytable.ID) policytable.Step {
	if table == 0 {
		return policytable.RemoveSubject{Subject: object}
	}
	return policytable.BindSubject{Subject: object, Direction: policytable.Ingress, Table: table}
}

func (c *contract) Change(steps ...desiredtest.Step) uint64 {
	c.revision++
	var out []policytable.Step
	for _, s := range steps {
		object, table := identity.Numeric(s.Object), policytable.ID(s.Value)
		if c.tables[object] = table; table == 0 {
			delete(c.tables, object)
		}
		out = append(out, bind(object, table))
	}
	c.log.Append(out, Barrier{Policy: c.revision})
	return c.revision
}

func (c *contract) snapshot() (all []policytable.Step) {
	for object, table := range c.tables {
		all = append(all, bind(object, table))
	}
	return all
}

func (c *contract) Subscribe(name string, behind desiredtest.Position) (desiredtest.Session, bool) {
	who := Subscriber{Name: name, Seq: behind.Seq}
	copy(who.Incarnation[:], behind.Incarnation)
	s, resumed := c.log.Subscribe(who, Barrier{Policy: c.revision}, c.snapshot)
	return contractSession{s}, resumed
}

func (c *contract) Incarnation() string {
	in := c.log.Incarnation()
	return string(in[:])
}

func (c *contract) Restart() { c.log = NewLog(c.log.limits) }

func (c *contract) State(name string) (out desiredtest.State) {
	states, _ := c.log.States()
	for _, s := range states {
		if s.Name != name {
			continue
		}
		out.Enforced, out.Held = s.Enforced.Policy, s.Hold != nil
		for r := range s.Refusals {
			out.Refused = append(out.Refused, int(r.Subject))
		}
		slices.Sort(out.Refused)
	}
	return out
}

func (c *contract) Retained(string) int { return c.log.Figures().Messages }
func (c *contract) Overflow() int       { return 100 }

type contractSession struct{ *Session }

func (s contractSession) Next() (m desiredtest.Message, ok bool, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // Next returns pending messages
	in, err := s.Session.Next(ctx)
	if errors.Is(err, context.Canceled) {
		return m, false, nil
	}
	if err != nil {
		return m, false, err
	}
	m = desiredtest.Message{Seq: in.Seq, SnapshotComplete: in.Complete}
	if in.Barrier != nil {
		m.Barrier, m.Revision = true, in.Barrier.Policy
	}
	for _, st := range in.Steps {
		switch x := st.(type) {
		case policytable.BindSubject:
			m.Steps = append(m.Steps, desiredtest.Step{Object: int(x.Subject), Value: int(x.Table)})
		case policytable.RemoveSubject:
			m.Steps = append(m.Steps, desiredtest.Step{Object: int(x.Subject)})
		}
	}
	return m, true, nil
}

func (s contractSession) Refuse(object int) error {
	s.Session.Refuse(
		Refused{identity.Numeric(object), policytable.Ingress},
		Refusal{Revision: s.Session.pos.at.Policy, Reason: "no capacity"},
	)
	return s.Err()
}

func (s contractSession) Hold(seq uint64) error { return s.Session.Hold(seq, Hold{Reason: "limits"}) }

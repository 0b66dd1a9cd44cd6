// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package stream

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/desiredtest"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

func TestStreamKeepsTheContractOfDesiredState(t *testing.T) {
	desiredtest.Run(t, func(*testing.T) desiredtest.Service {
		return &contract{table: &table{has: make(map[frontend.Key]int)}, subscribers: make(map[string]*Subscriber)}
	})
}

// contract adapts the subscribers of the owner to the contract test. An object is the frontend of key(object), and
// its value is the frontend's version in the table.
type contract struct {
	table       *table
	run         int
	subscribers map[string]*Subscriber
	sessions    []*contractSession
	session     uint64
}

func (c *contract) Change(steps ...desiredtest.Step) uint64 {
	c.table.revision++
	keys := make(map[frontend.Key]struct{})
	for _, s := range steps {
		k := key(s.Object)
		keys[k] = struct{}{}
		if c.table.has[k] = s.Value; s.Value == 0 {
			delete(c.table.has, k)
		}
	}
	for name, s := range c.subscribers {
		if err := s.Mark(slices.Collect(maps.Keys(keys))); err != nil {
			for _, x := range c.sessions {
				if x.Name == name && x.number == s.Session {
					x.err = err
				}
			}
		}
	}
	return c.table.revision
}

func (c *contract) Subscribe(name string, behind desiredtest.Position) (desiredtest.Session, bool) {
	s := c.subscribers[name]
	if s == nil {
		s = New(name)
		c.subscribers[name] = s
	}
	seq := behind.Seq
	if behind.Incarnation != c.Incarnation() { // as the owner does
		seq = 0
	}
	c.session++
	resumed := s.Connect(c.session, seq, c.table)
	x := &contractSession{Subscriber: s, c: c, number: c.session}
	c.sessions = append(c.sessions, x)
	return x, resumed
}

func (c *contract) Incarnation() string { return fmt.Sprint("run ", c.run) }

func (c *contract) Restart() {
	c.run++
	c.table.seq = 0
	clear(c.subscribers)
	c.sessions = nil
}

func (c *contract) State(name string) desiredtest.State {
	s := c.subscribers[name]
	if s == nil {
		return desiredtest.State{}
	}
	p := s.Progress()
	out := desiredtest.State{Enforced: p.Enforced}
	for k := range p.Refusals {
		a := k.Addr.As4()
		out.Refused = append(out.Refused, int(a[1])<<16|int(a[2])<<8|int(a[3]))
	}
	slices.Sort(out.Refused)
	return out
}

func (c *contract) Retained(name string) int { return c.subscribers[name].Waiting() }
func (c *contract) Overflow() int            { return maxKeys + 1 }

type contractSession struct {
	*Subscriber
	c      *contract
	number uint64
	err    error
}

func (x *contractSession) Next() (m desiredtest.Message, ok bool, err error) {
	if x.err != nil {
		return m, false, x.err
	}
	steps := x.Subscriber.Next(x.c.table)
	for _, s := range steps {
		switch {
		case s.Barrier != nil:
			m.Barrier, m.Seq, m.Revision = true, s.Barrier.Seq, s.Barrier.Revision
			m.SnapshotComplete = s.Barrier.SnapshotComplete
		case s.Upsert != nil:
			a := s.Upsert.Key.Addr.As4()
			version, err := strconv.Atoi(s.Upsert.Service)
			if err != nil {
				return m, false, err
			}
			m.Steps = append(m.Steps, desiredtest.Step{Object: int(a[1])<<16 | int(a[2])<<8 | int(a[3]), Value: version})
		default:
			a := s.Remove.Addr.As4()
			m.Steps = append(m.Steps, desiredtest.Step{Object: int(a[1])<<16 | int(a[2])<<8 | int(a[3])})
		}
	}
	return m, len(steps) > 0, nil
}

func (x *contractSession) Ack(seq uint64) error {
	if x.err != nil {
		return x.err
	}
	return x.Subscriber.Ack(seq, 0)
}

func (x *contractSession) Refuse(object int) error {
	x.Subscriber.Refuse(key(object), service.Name{Namespace: "shop", Name: "web"}, "no capacity")
	return nil
}

func (x *contractSession) Close() { x.Disconnect(time.Time{}) }

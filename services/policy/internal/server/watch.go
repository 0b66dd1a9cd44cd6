// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/desired/answer"
	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	words "github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/proto/wire/policywire"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// maxSources limits the weight of the source locations in one BindSubject, so that the message does not exceed the
// limit of clients. Further locations are omitted.
const maxSources = 3 << 20

// errFormat means that a subscriber understands no format that the service sends.
var errFormat = errors.New("no common table format")

type tables = grpc.BidiStreamingServer[policyv1.WatchPolicyTablesRequest, policyv1.WatchPolicyTablesResponse]

// WatchPolicyTables implements the service.
func (s *Server) WatchPolicyTables(conn tables) error {
	first, err := conn.Recv()
	if err != nil {
		return err
	}
	sub := first.GetSubscribe()
	if sub == nil {
		return statusOf(answer.ErrNoSubscribe)
	}
	if !slices.Contains(sub.GetFormats(), policywire.Format) {
		return statusOf(fmt.Errorf("%w: the subscriber understands %v, this service sends %v: both must be of one release",
			errFormat, sub.GetFormats(), policywire.Format))
	}
	var in stream.Incarnation
	if b := sub.GetIncarnation(); len(b) == len(in) {
		copy(in[:], b)
	}
	places, err := locations("subscribe.locations", sub.GetLocations())
	if err != nil {
		return statusOf(err)
	}
	session, err := s.Owner.Subscribers().Subscribe(conn.Context(), owner.Subscription{
		Name: sub.GetName(), Role: role(sub.GetRole()), Incarnation: in, Seq: sub.GetSeq(),
		Interest: owner.Interest{Subjects: numbers(sub.GetSubjects()), Locations: places},
	})
	if err != nil {
		return statusOf(err)
	}
	defer s.Owner.Subscribers().Unsubscribe(sub.GetName(), session)
	return answer.Serve(conn, answer.Session[policyv1.WatchPolicyTablesRequest, policyv1.WatchPolicyTablesResponse]{
		Next: func(ctx context.Context) (*policyv1.WatchPolicyTablesResponse, error) {
			m, err := session.Next(ctx)
			if err != nil {
				return nil, err
			}
			return s.message(m, sub.GetEnforced()), nil
		},
		Take: func(ctx context.Context, m *policyv1.WatchPolicyTablesRequest) error {
			return s.take(ctx, m, sub.GetName(), session)
		},
		Ended: session.Ended(), Err: session.Err, Check: session.Check,
	}, &answers)
}

// message converts a message. enforced is the state that the subscriber enforced before it connected; nil if the
// subscriber has not sent one.
func (s *Server) message(m stream.Message, enforced *policyv1.EnforcedState) *policyv1.WatchPolicyTablesResponse {
	incarnation := s.Owner.Incarnation()
	out := &policyv1.WatchPolicyTablesResponse{
		Incarnation: incarnation[:], Seq: m.Seq, Format: policywire.Format,
		Steps: make([]*policyv1.Step, 0, len(m.Steps)+2),
	}
	for _, ev := range m.Steps {
		out.Steps = append(out.Steps, step(ev, m.Revision))
	}
	if m.Complete {
		out.Steps = append(out.Steps, policywire.Step(policytable.SnapshotComplete{}))
	}
	if b := m.Barrier; b != nil {
		out.Steps = append(out.Steps, barrier(b, enforced))
	}
	return out
}

func barrier(b *stream.Barrier, enforced *policyv1.EnforcedState) *policyv1.Step {
	end := policytable.Barrier{
		PolicyRevision: b.Policy, IdentityRevision: b.Identity, AddressRevision: b.Address,
		State: string(b.State.ID[:]), Sources: b.State.Sources,
	}
	if enforced != nil {
		end.Incomplete = b.State.Incomplete(enforced.GetSources())
	}
	st := policywire.Step(end)
	m := st.GetBarrier()
	m.IdentityServiceIncarnation, m.IdentityServiceRevision = []byte(b.IdentityService.Incarnation), b.IdentityService.Number
	m.StoreRevision = storeRevision(b.IdentityService.Store)
	return st
}

func storeRevision(r peer.StoreRevision) *identityv1.StoreRevision {
	if r == (peer.StoreRevision{}) {
		return nil
	}
	return &identityv1.StoreRevision{ClusterId: r.Cluster, Revision: r.Revision}
}

// step converts a step. revision is the revision of the policies to which a binding belongs. If the rules of a binding
// have too many source locations, it omits the last ones.
func step(st policytable.Step, revision uint64) *policyv1.Step {
	if b, ok := st.(policytable.BindSubject); ok {
		b.Revision = revision
		if stream.Weight(b) > maxSources {
			b.Rules = firstSources(b.Rules)
		}
		st = b
	}
	return policywire.Step(st)
}

// firstSources returns the source locations of the first rules, as many as fit into a message.
func firstSources(all [][]policytable.Source) [][]policytable.Source {
	weight := 0
	for i := range all {
		if weight += stream.Weight(policytable.BindSubject{Rules: all[i : i+1]}); weight > maxSources {
			return all[:i]
		}
	}
	return all
}

func (s *Server) take(ctx context.Context, m *policyv1.WatchPolicyTablesRequest, name string, session *stream.Session) error {
	switch x := m.GetMessage().(type) {
	case *policyv1.WatchPolicyTablesRequest_Ack:
		return session.Ack(x.Ack.GetSeq())
	case *policyv1.WatchPolicyTablesRequest_Hold:
		return session.Hold(x.Hold.GetSeq(), stream.Hold{Revision: x.Hold.GetRevision(), Reason: x.Hold.GetReason()})
	case *policyv1.WatchPolicyTablesRequest_Nack:
		if x.Nack.GetSubject() == 0 {
			return session.RefuseMessage(x.Nack.GetSeq(), x.Nack.GetReason())
		}
		return s.Owner.Subscribers().Refuse(ctx, session, identity.Numeric(x.Nack.GetSubject()), policytable.ID(x.Nack.GetTable()), x.Nack.GetReason())
	case *policyv1.WatchPolicyTablesRequest_Subjects:
		return s.Owner.Subscribers().Change(ctx, name, session,
			owner.Interest{Subjects: numbers(x.Subjects.GetAdd())}, owner.Interest{Subjects: numbers(x.Subjects.GetRemove())})
	case *policyv1.WatchPolicyTablesRequest_Locate:
		add, err := locations("locate.add", x.Locate.GetAdd())
		if err != nil {
			return err
		}
		var remove owner.Interest
		for i, text := range x.Locate.GetRemove() {
			a, err := words.AddressOf(text)
			if err != nil {
				return &failure.FieldError{Field: fmt.Sprintf("locate.remove[%d]", i), Err: err}
			}
			remove.Locations = append(remove.Locations, engine.Location{Addr: a})
		}
		return s.Owner.Subscribers().Change(ctx, name, session, owner.Interest{Locations: add}, remove)
	}
	return answer.ErrSubscribed
}

func role(r policyv1.SubscriberRole) owner.Role {
	switch r {
	case policyv1.SubscriberRole_SUBSCRIBER_ROLE_ENFORCES:
		return owner.RoleEnforces
	case policyv1.SubscriberRole_SUBSCRIBER_ROLE_WATCHES:
		return owner.RoleWatches
	}
	return owner.RoleUnknown
}

func locations(field string, in []*policyv1.Location) ([]engine.Location, error) {
	out := make([]engine.Location, 0, len(in))
	for i, l := range in {
		a, err := words.AddressOf(l.GetAddress())
		if err != nil {
			return nil, &failure.FieldError{Field: fmt.Sprintf("%s[%d].address", field, i), Err: err}
		}
		out = append(out, engine.Location{Addr: a, Identity: identity.Numeric(l.GetIdentity())})
	}
	return out, nil
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/model/policytable"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/proto/wire/policywire"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/learned"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// Policy implements policystream.Service.
type Policy struct {
	Health
	client policyv1.PolicyServiceClient
}

// NewPolicy returns a client that uses cc, a connection to policy's socket.
func NewPolicy(cc grpc.ClientConnInterface) *Policy {
	return &Policy{Health: Health{Name: "policy"}, client: policyv1.NewPolicyServiceClient(cc)}
}

// Ping reports whether the service answers and sends tables. It returns policystream.ErrWaits if the service still
// waits for policies.
func (p *Policy) Ping(ctx context.Context) error {
	st, err := p.client.GetStatus(ctx, &policyv1.GetStatusRequest{})
	if err != nil {
		return p.translate(err)
	}
	if why := st.GetWaitingFor(); len(why) > 0 {
		return fmt.Errorf("policy: %w: %s", policystream.ErrWaits, strings.Join(why, "; "))
	}
	return nil
}

// HoldAddresses implements learned.Service.
func (p *Policy) HoldAddresses(ctx context.Context, inUse []netip.Addr) ([]netip.Addr, error) {
	out, err := p.client.HoldAddresses(ctx, &policyv1.HoldAddressesRequest{InUse: wire.Addresses(inUse)})
	if status.Code(err) == codes.Unimplemented {
		return nil, learned.ErrUnsupported
	}
	if err := p.translate(err); err != nil {
		return nil, err
	}
	expiring := make([]netip.Addr, 0, len(out.GetExpiring()))
	for i, text := range out.GetExpiring() {
		a, err := wire.AddressOf(text)
		if err != nil {
			return nil, policytable.Invalid("expiring[%d]: %v", i, err)
		}
		expiring = append(expiring, a)
	}
	return expiring, nil
}

// Subscribe implements policystream.Service.
func (p *Policy) Subscribe(ctx context.Context, s policystream.Subscription) (policystream.Stream, error) {
	stream, err := p.client.WatchPolicyTables(ctx)
	if err != nil {
		return nil, p.translate(err)
	}
	st := &policyStream{stream: stream, health: &p.Health}
	err = st.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subscribe{Subscribe: &policyv1.Subscribe{
		Name: s.Name, Incarnation: []byte(s.Incarnation), Seq: s.Seq, Subjects: s.Subjects, Locations: locations(s.Locations),
		Role: policyv1.SubscriberRole_SUBSCRIBER_ROLE_ENFORCES, Enforced: enforced(s.Enforced), Formats: []policyv1.TableFormat{policywire.Format},
	}}})
	if err != nil {
		return nil, err
	}
	return st, nil
}

// policyStream implements policystream.Stream.
type policyStream struct {
	stream grpc.BidiStreamingClient[policyv1.WatchPolicyTablesRequest, policyv1.WatchPolicyTablesResponse]
	health *Health
}

// Recv implements policystream.Stream.
func (s *policyStream) Recv() (policytable.Message, error) {
	m, err := s.stream.Recv()
	if err != nil {
		if terr := s.health.translate(err); terr != nil {
			err = terr
		}
		return policytable.Message{}, fmt.Errorf("policy tables: %w", err)
	}
	s.health.note(nil)
	return policywire.MessageOf(m)
}

// send reports only that sending failed. The reason why the stream ended is returned by Recv.
func (s *policyStream) send(m *policyv1.WatchPolicyTablesRequest) error {
	if err := s.stream.Send(m); err != nil {
		return fmt.Errorf("policy tables: send: %w", err)
	}
	return nil
}

// Subjects implements policystream.Stream.
func (s *policyStream) Subjects(add, remove []uint32) error {
	return s.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subjects{
		Subjects: &policyv1.SubjectChange{Add: add, Remove: remove},
	}})
}

// Locate implements policystream.Stream.
func (s *policyStream) Locate(add map[netip.Addr]uint32, remove []netip.Addr) error {
	m := &policyv1.Locate{Add: locations(add), Remove: wire.Addresses(remove)}
	return s.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Locate{Locate: m}})
}

// Ack implements policystream.Stream.
func (s *policyStream) Ack(seq uint64) error {
	return s.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Ack{Ack: &policyv1.Ack{Seq: seq}}})
}

// Hold implements policystream.Stream.
func (s *policyStream) Hold(h policystream.Hold) error {
	return s.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Hold{Hold: &policyv1.Hold{
		Seq: h.Seq, Revision: h.Revision, Reason: clip(h.Reason),
	}}})
}

// maxReason is the maximum length of a reason, in bytes.
const maxReason = 1024

func clip(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= maxReason {
		return s
	}
	return strings.ToValidUTF8(s[:maxReason], "")
}

func enforced(e *policystream.Enforced) *policyv1.EnforcedState {
	if e == nil {
		return nil
	}
	return &policyv1.EnforcedState{State: []byte(e.State), Revision: e.Revision, Sources: e.Sources}
}

// Nack implements policystream.Stream.
func (s *policyStream) Nack(n policystream.Nack) error {
	return s.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Nack{Nack: &policyv1.Nack{
		Seq: n.Seq, Subject: n.Subject, Table: uint64(n.Table), Reason: n.Reason,
	}}})
}

func locations(m map[netip.Addr]uint32) []*policyv1.Location {
	var out []*policyv1.Location
	for _, a := range slices.SortedFunc(maps.Keys(m), netip.Addr.Compare) {
		out = append(out, &policyv1.Location{Address: a.String(), Identity: m[a]})
	}
	return out
}

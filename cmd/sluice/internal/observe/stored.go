// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// longest is the greatest age of the events that sluice-hubble keeps.
const longest = 7 * 24 * time.Hour

// Question asks for the latest verdict on a connection up to a time.
type Question struct {
	From, To         string // in the forms of --from and --to
	Protocol         uint32
	SourcePort, Port uint32 // 0: any; ports of other protocols than TCP, UDP and SCTP are ignored
	At               time.Time
}

// TimeOf parses a duration before now, or a time, as --since does.
func TimeOf(flag, text string, now time.Time) (time.Time, error) { return timeOf(flag, text, now) }

// LastVerdict returns the latest stored verdict on a connection, and the time until which events are missing in the
// history; zero if none are. It returns nil without a verdict.
func LastVerdict(
	ctx context.Context, inv *invocation.Invocation, q Question,
) (found *datapathv1.Flow, missing time.Time, err error) {
	if keeper(inv) != hubble {
		return nil, missing, errors.New("sluice-hubble does not run on this node, and only it keeps events; " +
			"see docs/hubble.md")
	}
	r := &datapathv1.ObserveRequest{
		Since: timestamppb.New(q.At.Add(-longest)), Until: timestamppb.New(q.At), Last: 1,
		Types:     []datapathv1.FlowType{datapathv1.FlowType_FLOW_TYPE_DROP, datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT},
		Protocols: []netv1.Protocol{netv1.Protocol(q.Protocol)},
		Source:    &datapathv1.FlowEndCriteria{}, Destination: &datapathv1.FlowEndCriteria{},
	}
	n := &names{note: inv.Note, list: func() ([]*datapathv1.Endpoint, error) { return endpoint.List(ctx, inv) }}
	if err := addEnd(r.GetSource(), "--from", q.From, n); err != nil {
		return nil, missing, err
	}
	if err := addEnd(r.GetDestination(), "--to", q.To, n); err != nil {
		return nil, missing, err
	}
	if ports.HasPorts(q.Protocol) {
		if q.SourcePort != 0 {
			r.Source.Ports = []uint32{q.SourcePort}
		}
		if q.Port != 0 {
			r.Destination.Ports = []uint32{q.Port}
		}
	}
	err = invocation.Stream(ctx, inv, invocation.Stored, datapathv1.ObserverServiceClient.Observe, r,
		func(m *datapathv1.ObserveResponse) error {
			if f := m.GetFlow(); f != nil {
				found = f
			}
			if l := m.GetLost(); l.GetSource() == datapathv1.LossSource_LOSS_SOURCE_HISTORY && l.GetLastTime() != nil {
				missing = l.GetLastTime().AsTime()
			}
			return nil
		})
	if err != nil {
		return nil, missing, fmt.Errorf("sluice-hubble: %w", err)
	}
	return found, missing, nil
}

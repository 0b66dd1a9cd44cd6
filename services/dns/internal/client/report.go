// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/dns/internal/report"
)

// Observers is a client of sluice-datapath. It implements report.Sender.
type Observers struct {
	client datapathv1.DNSReportServiceClient
}

// NewObservers returns the client of a connection.
func NewObservers(conn grpc.ClientConnInterface) *Observers {
	return &Observers{datapathv1.NewDNSReportServiceClient(conn)}
}

// Send implements report.Sender.
func (o *Observers) Send(ctx context.Context, messages []report.Message, lost uint64) error {
	req := &datapathv1.ReportDNSMessagesRequest{LostCount: lost}
	for i := range messages {
		m := &messages[i]
		out := &datapathv1.ReportedDNSMessage{
			Time: timestamppb.New(m.Time), ClientAddress: m.Client.Addr().Unmap().String(),
			ClientPort: uint32(m.Client.Port()), ServerAddress: m.Server.Addr().Unmap().String(),
			ServerPort: uint32(m.Server.Port()), Protocol: netv1.Protocol_PROTOCOL_UDP, Dropped: m.Dropped,
			Message: &datapathv1.DNSMessage{
				Response: m.Response, Name: m.Name, QueryType: uint32(m.Type), ResponseCode: uint32(m.Code),
				CnameTargets: m.Chain, TtlSeconds: uint32(m.TTL.Seconds()), Redacted: m.Redacted,
			},
		}
		if m.TCP {
			out.Protocol = netv1.Protocol_PROTOCOL_TCP
		}
		for _, a := range m.Addresses {
			out.Message.Addresses = append(out.Message.Addresses, a.String())
		}
		req.Messages = append(req.Messages, out)
	}
	_, err := o.client.ReportDNSMessages(ctx, req)
	return err
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package server implements StoreService on the socket of a member's machine.
package server

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	storev1 "github.com/sluice-net/sluice/proto/gen/sluice/store/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/store/internal/access"
	"github.com/sluice-net/sluice/services/store/internal/enrol"
	"github.com/sluice-net/sluice/services/store/internal/member"
	"github.com/sluice-net/sluice/store"
)

// Options of a Server.
type Options struct {
	Version    string
	Started    time.Time
	Member     *member.Member
	Access     *access.Access
	ClientPort int
	EnrolPort  int
	Process    wire.Process
}

// Server implements StoreService.
type Server struct {
	storev1.UnimplementedStoreServiceServer
	o       Options
	reasons rpcerr.Table
}

// errNoAddress is returned while other machines cannot reach the store.
var errNoAddress = errors.New("only this machine reaches the store: set the setting address to an IP address of this " +
	"machine and restart sluice-store")

// New returns a Server.
func New(o Options) *Server {
	return &Server{o: o, reasons: Reasons()}
}

// Register adds the service.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	storev1.RegisterStoreServiceServer(r, s)
	statusv1.RegisterProcessServiceServer(r, s.o.Process)
}

// Methods returns who may call which method.
func Methods() rpc.Methods {
	// In a pod of the store every command runs as the store's user, who can read the database anyway.
	own := rpc.RootAnd(instance.StoreID)
	few, many := rpc.Limit{InFlight: 4, Waiting: 32}, rpc.Limit{InFlight: 16, Waiting: 128}
	return rpc.Methods{
		statusv1.ProcessService_GetConfig_FullMethodName:    {Access: rpc.Group()},
		statusv1.ProcessService_SetLogLevel_FullMethodName:  {Access: rpc.Root()},
		storev1.StoreService_GetStatus_FullMethodName:       {Access: rpc.Group(), Limit: many},
		storev1.StoreService_CreateJoinToken_FullMethodName: {Access: rpc.Root(), Limit: few},
		storev1.StoreService_RevokeNode_FullMethodName:      {Access: rpc.Root(), Limit: few},
		storev1.StoreService_RemoveMember_FullMethodName:    {Access: rpc.Root(), Limit: few},
		storev1.StoreService_SaveSnapshot_FullMethodName:    {Access: own, Limit: rpc.Limit{InFlight: 1, Waiting: 4}},
	}
}

// GetStatus implements the service.
func (s *Server) GetStatus(ctx context.Context, _ *storev1.GetStatusRequest) (*storev1.GetStatusResponse, error) {
	size, used, limit := s.o.Member.Sizes()
	out := &storev1.GetStatusResponse{
		Service: &statusv1.ServiceStatus{Version: s.o.Version, StartTime: timestamppb.New(s.o.Started)},
		Name:    s.o.Member.Name(), Epoch: s.o.Member.Epoch(), ClusterId: fmt.Sprintf("%x", s.o.Member.ClusterID()),
		DatabaseBytes: uint64(size), DatabaseUsedBytes: uint64(used), DatabaseLimitBytes: uint64(limit),
	}
	if a := s.o.Member.Address(); a != "" {
		out.ClientAddress = net.JoinHostPort(a, strconv.Itoa(s.o.ClientPort))
	}
	problem := func(text string) {
		out.Service.Problems = append(out.Service.Problems, &statusv1.Problem{
			Reason: statusv1.ProblemReason_PROBLEM_REASON_SERVICE, Text: text,
		})
	}
	voting := 0
	for _, p := range s.o.Member.Peers() {
		if p.Voting {
			voting++
		}
		out.Members = append(out.Members, &storev1.Member{
			Name: p.Name, Address: p.PeerAddress, Leader: p.Leader, Voting: p.Voting, Self: p.Self,
		})
	}
	if !s.o.Member.Leads() {
		problem(fmt.Sprintf("no leader: more than half of the %d members with a vote do not answer; start them, or restore "+
			"a snapshot", voting))
	}
	if voting == 2 {
		problem("two members have a vote, so the store needs both: add or remove one")
	}
	if s.o.Member.Full() {
		problem(fmt.Sprintf("a database has its largest size (%d bytes), and the store refuses writes: "+
			"raise the setting quota", limit))
	}
	nodes, err := s.o.Access.Nodes(ctx)
	if err != nil {
		problem(err.Error())
	}
	for _, n := range nodes {
		node := &storev1.Node{Name: n.Name}
		if n.Enrolment != "" {
			node.IssuedTime, node.ExpiryTime = timestamppb.New(n.Issued), timestamppb.New(n.Expires)
		}
		out.Nodes = append(out.Nodes, node)
	}
	return out, nil
}

// bounded is the timeout of a request to etcd that an operator waits for.
const bounded = 10 * time.Second

// CreateJoinToken implements the service.
func (s *Server) CreateJoinToken(
	ctx context.Context, r *storev1.CreateJoinTokenRequest,
) (*storev1.CreateJoinTokenResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, bounded)
	defer cancel()
	addresses := enrol.Members(s.o.Member, s.o.EnrolPort).GetEnrolAddresses()
	if s.o.Member.Address() == "" || len(addresses) == 0 {
		return nil, s.reasons.Status(errNoAddress)
	}
	valid := time.Hour
	if d := r.GetValidFor(); d != nil {
		valid = d.AsDuration()
	}
	secret, expires, err := s.o.Access.NewToken(ctx, r.GetNode(), r.GetMember(), valid)
	if err != nil {
		return nil, s.reasons.Status(err)
	}
	t := store.Token{Addresses: addresses, CA: s.o.Member.Authority.Hash(), Secret: secret, Member: r.GetMember()}
	return &storev1.CreateJoinTokenResponse{Token: t.String(), ExpiryTime: timestamppb.New(expires)}, nil
}

// RevokeNode implements the service.
func (s *Server) RevokeNode(
	ctx context.Context, r *storev1.RevokeNodeRequest,
) (*storev1.RevokeNodeResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, bounded)
	defer cancel()
	revoked, err := s.o.Access.Revoke(ctx, r.GetNode(), r.GetValidateOnly())
	if err != nil {
		return nil, s.reasons.Status(err)
	}
	return &storev1.RevokeNodeResponse{Revoked: revoked}, nil
}

// RemoveMember implements the service.
func (s *Server) RemoveMember(
	ctx context.Context, r *storev1.RemoveMemberRequest,
) (*storev1.RemoveMemberResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, bounded)
	defer cancel()
	if err := s.o.Member.Remove(ctx, r.GetName(), r.GetValidateOnly()); err != nil {
		return nil, s.reasons.Status(err)
	}
	return &storev1.RemoveMemberResponse{}, nil
}

// partSize is the maximum number of bytes in a message of a snapshot.
const partSize = 64 << 10

// SaveSnapshot implements the service.
func (s *Server) SaveSnapshot(
	_ *storev1.SaveSnapshotRequest, stream grpc.ServerStreamingServer[storev1.SaveSnapshotResponse],
) error {
	w := bufio.NewWriterSize(parts{stream}, partSize)
	// The wrapper type hides ReadFrom, so that no part is larger than the buffer.
	if err := s.o.Member.Snapshot(struct{ io.Writer }{w}); err != nil {
		return err
	}
	return w.Flush()
}

// parts sends the bytes that are written to it in messages.
type parts struct {
	stream grpc.ServerStreamingServer[storev1.SaveSnapshotResponse]
}

func (p parts) Write(b []byte) (sent int, err error) {
	for len(b) > 0 {
		n := min(len(b), partSize)
		if err := p.stream.Send(&storev1.SaveSnapshotResponse{Data: b[:n]}); err != nil {
			return sent, err
		}
		sent, b = sent+n, b[n:]
	}
	return sent, nil
}

func metric(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("sluice_store_"+name, help, labels, nil)
}

var (
	sizeMetric = metric("database_bytes", "Size of the database file of this member.")
	usedMetric = metric("database_used_bytes", "Bytes of the database that are in use.")
	leadMetric = metric("has_leader",
		"1 while this member knows a leader, else 0: more than half of the members do not answer.")
	membersMetric = metric("members", "Members, by whether they have a vote.", "voting")
	epochMetric   = metric("epoch", "Epoch of the store: one more after each restored snapshot.")
)

// Collector returns the Prometheus collector of the member.
func (s *Server) Collector() prometheus.Collector { return collector{s} }

type collector struct{ *Server }

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{sizeMetric, usedMetric, leadMetric, membersMetric, epochMetric} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	size, used, _ := c.o.Member.Sizes()
	gauge(sizeMetric, float64(size))
	gauge(usedMetric, float64(used))
	gauge(epochMetric, float64(c.o.Member.Epoch()))
	leads := 0.0
	if c.o.Member.Leads() {
		leads = 1
	}
	gauge(leadMetric, leads)
	count := map[bool]int{}
	for _, p := range c.o.Member.Peers() {
		count[p.Voting]++
	}
	for _, voting := range []bool{false, true} {
		gauge(membersMetric, float64(count[voting]), strconv.FormatBool(voting))
	}
}

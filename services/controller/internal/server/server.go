// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package server implements sluice.controller.v1.
package server

import (
	"context"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/rpc"
	controllerv1 "github.com/sluice-net/sluice/proto/gen/sluice/controller/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/controller/internal/election"
	"github.com/sluice-net/sluice/services/controller/internal/subject"
)

// Subject is a task that the process performs while it is elected.
type Subject interface{ Status() subject.Status }

// Options holds the state that a Server reports.
type Options struct {
	Version  string
	Started  time.Time
	Election func() election.Status
	// Answers returns an error if the evaluation of policies does not respond.
	Answers  func(context.Context) error
	Subjects []Subject
	// Process describes the settings of this process.
	Process wire.Process
}

// Server implements controllerv1.ControllerServiceServer.
type Server struct {
	controllerv1.UnimplementedControllerServiceServer
	o Options
}

// New returns a Server.
func New(o Options) *Server { return &Server{o: o} }

// Register adds the service.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	controllerv1.RegisterControllerServiceServer(r, s)
	statusv1.RegisterProcessServiceServer(r, s.o.Process)
}

// Methods returns who may call which method: the group may read.
func Methods() rpc.Methods {
	return rpc.Methods{
		statusv1.ProcessService_GetConfig_FullMethodName:   {Access: rpc.Group()},
		statusv1.ProcessService_SetLogLevel_FullMethodName: {Access: rpc.Root()},
		controllerv1.ControllerService_GetStatus_FullMethodName: {
			Access: rpc.Group(),
			Limit:  rpc.Limit{InFlight: 16, Waiting: 128},
		},
	}
}

// subjects returns the status of each subject, sorted by name.
func (s *Server) subjects() []subject.Status {
	var all []subject.Status
	for _, x := range s.o.Subjects {
		all = append(all, x.Status())
	}
	slices.SortFunc(all, func(a, b subject.Status) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// GetStatus implements the service.
func (s *Server) GetStatus(
	ctx context.Context, _ *controllerv1.GetStatusRequest,
) (*controllerv1.GetStatusResponse, error) {
	if err := s.o.Answers(ctx); err != nil {
		return nil, status.FromContextError(err).Err()
	}
	e := s.o.Election()
	out := &controllerv1.GetStatusResponse{
		Service: &statusv1.ServiceStatus{Version: s.o.Version, StartTime: timestamppb.New(s.o.Started)},
		Election: &controllerv1.Election{
			Namespace: e.Namespace, Lease: e.Lease, Identity: e.Identity, Leading: e.Leading, Holder: e.Holder, Error: e.Problem,
		},
	}
	if e.Leading {
		out.Election.ElectedTime = timestamppb.New(e.Elected)
	}
	problem := func(text string) {
		out.Service.Problems = append(out.Service.Problems, &statusv1.Problem{
			Reason: statusv1.ProblemReason_PROBLEM_REASON_SERVICE, Text: text,
		})
	}
	if e.Problem != "" {
		problem("cannot read or write the Lease: " + e.Problem)
	}
	for _, x := range s.subjects() {
		out.Subjects = append(out.Subjects, &controllerv1.Subject{
			Name: x.Name, Pending: uint32(x.Pending), Requests: x.Done, FailedRequests: x.Failed, Error: x.Problem,
		})
		if x.Problem != "" && e.Leading {
			problem(x.Name + ": " + x.Problem)
		}
	}
	return out, nil
}

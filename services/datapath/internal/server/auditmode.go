// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/types/known/timestamppb"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
)

// errNoPolicies is returned in policy mode none.
var errNoPolicies = errors.New("no policies are enforced: policy.mode is none")

// SetAuditMode implements the API.
func (s *Server) SetAuditMode(
	ctx context.Context, r *datapathv1.SetAuditModeRequest,
) (*datapathv1.SetAuditModeResponse, error) {
	if s.policy == nil {
		return nil, statusOf(errNoPolicies)
	}
	lasts := r.GetDuration().AsDuration()
	if err := auditmode.CheckDuration(lasts); err != nil {
		return nil, statusOf(err)
	}
	var of *endpoint.Endpoint
	switch {
	case r.GetOwner() != nil:
		e, err := s.endpoints.Report.Get(wire.OwnerOf(r.GetOwner()))
		if err == nil && (e.Slot == 0 || e.Created.IsZero()) {
			err = fmt.Errorf("%s: %w that is published", e.Spec.Owner, endpoint.ErrNotFound)
		}
		if err != nil {
			return nil, statusOf(err)
		}
		of = &e
	case !r.GetNode():
		return nil, statusOf(&endpoint.FieldError{Field: "target", Reason: "is neither an owner nor the node"})
	}
	var err error
	switch {
	case r.GetValidateOnly():
	case of == nil:
		err = s.policy.Modes.SetNode(ctx, r.GetEnabled(), lasts)
	default:
		err = s.policy.Modes.Set(ctx, *of, r.GetEnabled(), lasts)
	}
	if err != nil {
		return nil, statusOf(err)
	}
	answer := &datapathv1.SetAuditModeResponse{Mode: s.policy.mode()}
	if of != nil {
		now, err := s.endpoints.Report.Get(of.Spec.Owner)
		if err != nil {
			return nil, statusOf(err) // deleted meanwhile, together with its audit mode
		}
		answer.Endpoint = s.endpoint(now)
	}
	return answer, nil
}

// endpoint converts an endpoint, including its audit mode.
func (s *Server) endpoint(e endpoint.Endpoint) *datapathv1.Endpoint {
	p := protoEndpoint(e)
	if s.policy == nil || p.GetPolicy() == nil || !e.Policy.Audit || s.policy.Audit {
		return p
	}
	if until := s.policy.Modes.Until(e); !until.IsZero() {
		p.Policy.AuditExpireTime = timestamppb.New(until)
	}
	return p
}

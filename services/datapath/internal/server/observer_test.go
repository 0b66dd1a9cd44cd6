// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

func TestObserveRefusesAReasonThatNoEventHas(t *testing.T) {
	s := &Server{Reasons: []string{"spoofed-ip", "no-route"}}
	if f, err := s.filterOf(&datapathv1.ObserveRequest{Reasons: []string{"no-route"}}); err != nil || !f.Reasons["no-route"] {
		t.Errorf("a reason that exists: %+v, %v", f, err)
	}
	_, err := s.filterOf(&datapathv1.ObserveRequest{Reasons: []string{"no-route", "spoofed"}})
	st := status.Convert(statusOf(err))
	if st.Code() != codes.InvalidArgument || !strings.Contains(st.Message(), "reasons[1]") || !strings.Contains(st.Message(), "spoofed-ip") {
		t.Errorf("a reason that does not: %v", st)
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"testing"

	"google.golang.org/grpc/codes"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/proto/wire/policywire"
)

func TestSubscriberWithoutACommonFormatIsRefused(t *testing.T) {
	s := serve(t)
	s.know(town)
	for name, formats := range map[string][]policyv1.TableFormat{
		"before":  {},
		"earlier": {1},
		"later":   {77},
	} {
		sub := subscribe(name, 301)
		sub.Formats = formats
		f := s.watch(sub)
		<-f.ended
		wantCode(t, f.err, codes.FailedPrecondition, "this service sends TABLE_FORMAT_RANGES: both must be of one release")
	}
	sub := subscribe("both", 301)
	sub.Formats = []policyv1.TableFormat{77, policywire.Format}
	s.watch(sub).snapshot()
}

// TestCallersAreToldOfARefusedMessage: a subscriber refuses a message. Calls then do not wait for this subscriber,
// and the status shows the refusal.
func TestCallersAreToldOfARefusedMessage(t *testing.T) {
	s := serve(t)
	s.know(town)
	f := s.watch(subscribe("datapath", 300, 301), func(f *follower, m *policyv1.WatchPolicyTablesResponse) bool {
		if m.GetFormat() != policywire.Format {
			t.Errorf("message %d has the format %v", m.GetSeq(), m.GetFormat())
		}
		f.Send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Nack{Nack: &policyv1.Nack{ //nolint:errcheck // Recv returns the error
			Seq: m.GetSeq(), Reason: "step 40 is not known",
		}}})
		return false
	}).snapshot()
	revision := s.apply(allowWeb).GetRevision()
	_, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: revision})
	wantCode(t, err, codes.FailedPrecondition, "step 40 is not known")
	s.eventually("refused", func(st *policyv1.GetStatusResponse) bool {
		sub := st.GetSubscribers()[0]
		return sub.GetConnected() && sub.GetHeld() == "step 40 is not known"
	})
	f.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Nack{Nack: &policyv1.Nack{Seq: 1 << 50}}})
	<-f.ended
	wantCode(t, f.err, codes.InvalidArgument, "")
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/policy/internal/record"
)

func TestFullDiskIsAnsweredWithItsReason(t *testing.T) {
	s := prepare(t)
	disk := disktest.New(t, s.dir)
	s.runs = func(f func()) { disk.Run(t, f) }
	s.start()
	t.Cleanup(func() { s.stop() })
	s.apply(allowWeb)
	disk.Fail(func(o disktest.Op) error {
		if o.Kind == disktest.Write || o.Kind == disktest.Truncate {
			return unix.ENOSPC
		}
		return nil
	})
	_, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(named("second", allowWeb))})
	wantCode(t, err, codes.Unavailable, record.File)
	if !rpcerr.Is(err, policyv1.ErrorReason_ERROR_REASON_STORAGE_FAILED) {
		t.Errorf("%v has another reason", err)
	}
	if all := s.list(); len(all) != 1 {
		t.Errorf("%d policies, want the first alone", len(all))
	}
	disk.Fail(nil)
}

func TestCallWhileTheOwnerEndsIsAnsweredWithItsReason(t *testing.T) {
	s := serve(t)
	s.end()
	_, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(allowWeb)})
	wantCode(t, err, codes.Unavailable, "the service is stopping")
	if !rpcerr.Is(err, policyv1.ErrorReason_ERROR_REASON_STOPPING) {
		t.Errorf("%v has another reason", err)
	}
}

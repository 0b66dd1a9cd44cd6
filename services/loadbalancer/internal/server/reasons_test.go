// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
)

// elsewhere lists the reasons that TestServerGivesEveryReason cannot cause, with the tests that cover them.
var elsewhere = map[lbv1.ErrorReason]string{
	lbv1.ErrorReason_ERROR_REASON_UNSPECIFIED:    "never sent",
	lbv1.ErrorReason_ERROR_REASON_TOKEN_EXPIRED:  "never sent",
	lbv1.ErrorReason_ERROR_REASON_INTERNAL:       "a bug",
	lbv1.ErrorReason_ERROR_REASON_STORAGE_FAILED: "main_linux_test.go fills the disk of a process",
}

// TestServerGivesEveryReason provokes each reason of the API by calls. Testing single errors would not be enough: an
// error of the core may wrap several errors, and the status must have the right reason.
func TestServerGivesEveryReason(t *testing.T) {
	seen := map[lbv1.ErrorReason]bool{}
	dir := stateDir(t)
	want := func(t *testing.T, err error, code codes.Code, reason lbv1.ErrorReason) {
		t.Helper()
		seen[reason] = true
		if status.Code(err) != code || !rpcerr.Is(err, reason) {
			t.Errorf("%v, want %s %s", err, code, reason)
		}
	}
	t.Run("calls", func(t *testing.T) {
		r := serveIn(t, dir)
		apply := func(manager, text string) error {
			_, err := r.UpsertServices(r.ctx(), &lbv1.UpsertServicesRequest{Manifests: []byte(text), Manager: manager})
			return err
		}
		if err := apply("a", web); err != nil {
			t.Fatal(err)
		}
		want(t, apply("a", "kind: Pod"), codes.InvalidArgument, lbv1.ErrorReason_ERROR_REASON_INVALID_MANIFEST)
		want(t, apply("b", web), codes.AlreadyExists, lbv1.ErrorReason_ERROR_REASON_OBJECT_OWNED)
		var many strings.Builder
		for i := range 101 {
			fmt.Fprintf(&many, "---\napiVersion: v1\nkind: Service\nmetadata: {name: s%d, namespace: many}\n"+
				"spec: {clusterIP: 10.97.0.%d, ports: [{port: 80}]}\n", i, i+1)
		}
		want(t, apply("a", many.String()), codes.ResourceExhausted, lbv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED)
		keys := []*lbv1.ObjectKey{{Kind: "Service", Namespace: "shop", Name: "web"}}
		_, err := r.DeleteServices(r.ctx(), &lbv1.DeleteServicesRequest{Keys: keys, Manager: "b"})
		want(t, err, codes.FailedPrecondition, lbv1.ErrorReason_ERROR_REASON_OBJECT_FOREIGN)
		other := uint64(77)
		_, err = r.DeleteServices(r.ctx(), &lbv1.DeleteServicesRequest{Keys: keys, Manager: "a", IfRevision: &other})
		want(t, err, codes.Aborted, lbv1.ErrorReason_ERROR_REASON_STATE_CHANGED)
		_, err = r.GetService(r.ctx(), &lbv1.GetServiceRequest{Namespace: "shop", Name: "none"})
		want(t, err, codes.NotFound, lbv1.ErrorReason_ERROR_REASON_SERVICE_NOT_FOUND)
		_, err = r.WaitForRevision(r.ctx(), &lbv1.WaitForRevisionRequest{Revision: 77})
		want(t, err, codes.OutOfRange, lbv1.ErrorReason_ERROR_REASON_UNKNOWN_REVISION)
	})
	t.Run("streams", func(t *testing.T) {
		r := serveIn(t, dir)
		ack := &lbv1.WatchFrontendsRequest{Message: &lbv1.WatchFrontendsRequest_Ack{Ack: &lbv1.Ack{Enforced: 77}}}
		open := func(messages ...*lbv1.WatchFrontendsRequest) lbv1.LoadBalancerService_WatchFrontendsClient {
			t.Helper()
			w, err := r.WatchFrontends(r.ctx())
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range messages {
				if err := w.Send(m); err != nil {
					t.Fatal(err)
				}
			}
			return w
		}
		// key returns the key of the first frontend sent.
		key := func(w lbv1.LoadBalancerService_WatchFrontendsClient) *lbv1.FrontendKey {
			t.Helper()
			for {
				m, err := w.Recv()
				if err != nil {
					t.Fatal(err)
				}
				for _, s := range m.GetSteps() {
					if f := s.GetUpsert(); f != nil {
						return f.GetKey()
					}
				}
			}
		}
		end := func(w lbv1.LoadBalancerService_WatchFrontendsClient) (err error) {
			for err == nil {
				_, err = w.Recv()
			}
			return err
		}
		subscribe := &lbv1.WatchFrontendsRequest{Message: &lbv1.WatchFrontendsRequest_Subscribe{Subscribe: &lbv1.Subscribe{
			Name: "datapath", Role: lbv1.SubscriberRole_SUBSCRIBER_ROLE_ENFORCES,
		}}}
		want(t, end(open(ack)), codes.InvalidArgument, lbv1.ErrorReason_ERROR_REASON_INVALID_REQUEST)
		want(t, end(open(subscribe, ack)), codes.InvalidArgument, lbv1.ErrorReason_ERROR_REASON_UNKNOWN_ACK)
		first := open(subscribe)
		key(first)
		second := open(subscribe)
		want(t, end(first), codes.Aborted, lbv1.ErrorReason_ERROR_REASON_SUBSCRIBER_REPLACED)
		refused := &lbv1.Refused{Key: key(second), Reason: "no capacity"}
		message := &lbv1.WatchFrontendsRequest_Refused{Refused: refused}
		if err := second.Send(&lbv1.WatchFrontendsRequest{Message: message}); err != nil {
			t.Fatal(err)
		}
		_, err := r.WaitForRevision(r.ctx(), &lbv1.WaitForRevisionRequest{Revision: 1})
		want(t, err, codes.FailedPrecondition, lbv1.ErrorReason_ERROR_REASON_REFUSED_BY_SUBSCRIBER)
	})
	t.Run("another run", func(t *testing.T) {
		r := serveIn(t, dir)
		const service = "apiVersion: v1\nkind: Service\nmetadata: {name: x, namespace: b}\n" +
			"spec: {clusterIP: 10.96.0.9, ports: [{port: 80}]}\n"
		out := r.apply(service) // without a manager; the answer has the incarnation of this run
		_, err := r.CompleteSource(r.ctx(), &lbv1.CompleteSourceRequest{Manager: "a", Incarnation: out.GetIncarnation()})
		want(t, err, codes.FailedPrecondition, lbv1.ErrorReason_ERROR_REASON_SET_EMPTY)
		r.stop()
		_, err = r.UpsertServices(r.ctx(), &lbv1.UpsertServicesRequest{Manifests: []byte(service)})
		want(t, err, codes.Unavailable, lbv1.ErrorReason_ERROR_REASON_STOPPING)
	})
	for n, name := range lbv1.ErrorReason_name {
		if reason := lbv1.ErrorReason(n); !seen[reason] && elsewhere[reason] == "" {
			t.Errorf("no call of this test is answered with %s", name)
		}
	}
}

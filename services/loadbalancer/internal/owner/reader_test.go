// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"strings"
	"testing"
	"time"
)

func TestLocalsFollowEndpointsAndAcknowledgements(t *testing.T) {
	o := start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), t.TempDir())
	lb := strings.Replace(web, "clusterIP: 10.96.0.1",
		"clusterIP: 10.96.0.1, type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 30001", 1)
	want := func(what string, ready int, enforced Enforcement) {
		t.Helper()
		all, err := o.Reader().Locals(t.Context())
		if err != nil || len(all) != 1 || all[0].Port != 30001 || len(all[0].Ready) != ready || all[0].Enforced != enforced {
			t.Errorf("%s: %+v, %v; want %d ready, enforcement %d", what, all, err, ready, enforced)
		}
	}
	o.apply(lb)
	want("without endpoints", 0, NotEnforced)
	o.apply(end)
	want("without a datapath", 1, EnforcementUnknown)
	x := o.subscribe("datapath", [16]byte{}, 0)
	x.until(2)
	want("before the acknowledgement", 1, EnforcementUnknown)
	if err := x.Ack(t.Context(), x.barrier.Seq, 0); err != nil {
		t.Fatal(err)
	}
	want("acknowledged", 1, Enforced)
	o.apply(strings.Replace(end, "endpoints: [", "endpoints: [{addresses: [10.0.0.9], nodeName: here}, ", 1))
	want("one more, not acknowledged yet", 2, Enforced)
	o.apply(strings.Replace(end, "nodeName: here", "nodeName: there", 1))
	want("none here", 0, NotEnforced)
	o.apply(end)
	want("here again", 1, NotEnforced)
	x.until(5)
	if err := x.Ack(t.Context(), x.barrier.Seq, 0); err != nil {
		t.Fatal(err)
	}
	want("acknowledged again", 1, Enforced)
	x.Close()
	want("the datapath is disconnected", 1, EnforcementUnknown)
	x = o.subscribe("datapath", [16]byte{}, 0)
	want("a datapath with a new stream", 1, EnforcementUnknown)
	x.until(5)
	if err := x.Ack(t.Context(), x.barrier.Seq, 0); err != nil {
		t.Fatal(err)
	}
	want("acknowledged by the new one", 1, Enforced)
	o.apply(web)
	if all, err := o.Reader().Locals(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("without the port: %+v, %v", all, err)
	}
}

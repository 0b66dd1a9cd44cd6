// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-net/sluice/devnode"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// auditing reports whether a fault point belongs to a change of audit mode.
func auditing(point string) bool { return strings.HasPrefix(point, "datapath/audit-mode/") }

// deniedPort is a port that no policy of the test allows.
const deniedPort = 9999

// TestFaultKillDatapathWhileAuditModeChanges proves INV-108: the datapath is killed between the steps that start and
// end audit mode. The restarted datapath reports the mode that the endpoint's packets have, and after audit mode has
// ended no denied packet passes.
func TestFaultKillDatapathWhileAuditModeChanges(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	policies := n.policies(t)
	points := slices.DeleteFunc(n.faultPoints(t, devnode.Datapath), func(p string) bool { return !auditing(p) })
	if len(points) == 0 {
		t.Fatal("the datapath has no fault points in changes of audit mode")
	}
	pods := n.addPods(t, "web", "client")
	web, client := pods[0], pods[1]
	serve(t, web, talkPort, deniedPort)
	enforce(t, policies, webAndClient(talkPort))
	set := func(ctx context.Context, on bool) (*datapathv1.SetAuditModeResponse, error) {
		return n.datapath.SetAuditMode(ctx, &datapathv1.SetAuditModeRequest{
			Target: &datapathv1.SetAuditModeRequest_Node{Node: true}, Enabled: on,
		})
	}
	must := func(on bool) {
		t.Helper()
		ctx, cancel := deadline(t)
		defer cancel()
		if _, err := set(ctx, on); err != nil {
			t.Fatalf("audit mode %t: %v", on, err)
		}
	}
	for _, point := range points {
		for _, on := range []bool{true, false} {
			must(!on)
			if err := n.Kill(t.Context(), devnode.Datapath); err != nil {
				t.Fatal(err)
			}
			controller, files := newController(t)
			if err := n.Start(t.Context(), devnode.Datapath, files...); err != nil {
				t.Fatal(err)
			}
			controller.Started()
			n.waitConnected(t, policies)
			controller.KillAt(point, 0)
			hits, cancelHits := context.WithTimeout(t.Context(), patience)
			var call sync.WaitGroup
			call.Go(func() { _, _ = set(hits, on) }) // the call gets no answer
			if err := controller.WaitHits(hits, point, 1); err != nil {
				t.Error(err)
			}
			cancelHits()
			call.Wait()
			if err := n.Kill(t.Context(), devnode.Datapath); err != nil {
				t.Fatal(err)
			}
			if err := n.Start(t.Context(), devnode.Datapath); err != nil {
				t.Fatal(err)
			}
			n.waitConnected(t, policies)
			// The record is written before audit mode begins and after it ends.
			n.wantAudited(t, web, true)
			wantAllowed(t, client, web, deniedPort)
			must(false)
			n.wantAudited(t, web, false)
			flows := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})
			n.wantDenied(t, flows, client, web, deniedPort)
			wantAllowed(t, client, web, talkPort)
		}
	}
}

func (n *testNode) wantAudited(t *testing.T, p pod.Pod, want bool) {
	t.Helper()
	ctx, cancel := deadline(t)
	defer cancel()
	answer, err := n.datapath.GetEndpoint(ctx, &datapathv1.GetEndpointRequest{
		Owner: &workloadv1.Owner{ContainerId: p.Name, InterfaceName: "eth0"},
	})
	if got := answer.GetEndpoint().GetPolicy().GetAudit(); err != nil || got != want {
		t.Errorf("audit mode of %s: %t, %v, want %t", p.Name, got, err, want)
	}
}

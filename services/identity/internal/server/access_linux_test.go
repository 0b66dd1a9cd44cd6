// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// childSocket makes this test binary act as a caller, and contains the socket of the server.
const childSocket = "SLUICE_TEST_CALL"

// calls calls every method once and returns the codes.
func calls(socket string) (map[string]codes.Code, error) {
	conn, err := client.Dial(socket, client.Options{})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	c := identityv1.NewIdentityServiceClient(conn)
	ctx, cancel := context.WithTimeout(context.Background(), servicetest.Patience)
	defer cancel()
	labels := []*workloadv1.Label{{Source: "cni", Key: "app", Value: "web"}}
	o := &workloadv1.Owner{ContainerId: "c1", InterfaceName: "eth0"}
	got := map[string]codes.Code{}
	note := func(method string, err error) { got[method] = status.Code(err) }

	_, err = c.AllocateIdentity(ctx, &identityv1.AllocateIdentityRequest{Reference: "r", Labels: labels})
	note("AllocateIdentity", err)
	_, err = c.ResolveEndpoint(ctx, &identityv1.ResolveEndpointRequest{Owner: o, Labels: labels})
	note("ResolveEndpoint", err)
	_, err = c.ConfirmEndpoint(ctx, &identityv1.ConfirmEndpointRequest{Owner: o, Number: 256})
	note("ConfirmEndpoint", err)
	endpoints, err := c.WatchEndpoints(ctx, &identityv1.WatchEndpointsRequest{})
	if err == nil {
		_, err = endpoints.Recv()
	}
	note("WatchEndpoints", err)
	_, err = c.ReleaseIdentity(ctx,
		&identityv1.ReleaseIdentityRequest{Holder: &identityv1.ReleaseIdentityRequest_Owner{Owner: o}})
	note("ReleaseIdentity", err)
	_, err = c.GetIdentity(ctx, &identityv1.GetIdentityRequest{Number: 1})
	note("GetIdentity", err)
	waiting, err := c.WatchWaitingLabels(ctx, &identityv1.WatchWaitingLabelsRequest{})
	if err == nil {
		_, err = waiting.Recv()
	}
	note("WatchWaitingLabels", err)
	_, err = c.AdmitLabels(ctx, &identityv1.AdmitLabelsRequest{Change: 1})
	note("AdmitLabels", err)
	_, err = c.GetStatus(ctx, &identityv1.GetStatusRequest{})
	note("GetStatus", err)
	list, err := c.ListIdentities(ctx, &identityv1.ListIdentitiesRequest{})
	if err == nil {
		_, err = list.Recv()
	}
	note("ListIdentities", err)
	watch, err := c.WatchIdentities(ctx, &identityv1.WatchIdentitiesRequest{})
	if err == nil {
		_, err = watch.Recv()
	}
	note("WatchIdentities", err)

	cluster := identityv1.NewClusterServiceClient(conn)
	_, err = cluster.RegisterNode(ctx, &identityv1.RegisterNodeRequest{PodRanges: &identityv1.PodRanges{}})
	note("RegisterNode", err)
	_, err = cluster.RegisterNode(ctx, &identityv1.RegisterNodeRequest{Underlay: &identityv1.Underlay{}})
	note("RegisterNode underlay", err)
	_, err = cluster.ClaimRange(ctx, &identityv1.ClaimRangeRequest{Settings: pool(2)})
	note("ClaimRange", err)
	_, err = cluster.ReturnRange(ctx, &identityv1.ReturnRangeRequest{Range: "10.9.9.0/24"})
	note("ReturnRange", err)
	_, err = cluster.CheckReuse(ctx, &identityv1.CheckReuseRequest{Addresses: []string{"10.9.9.1"}})
	note("CheckReuse", err)
	_, err = cluster.ConfirmMappings(ctx, &identityv1.ConfirmMappingsRequest{})
	note("ConfirmMappings", err)
	_, err = cluster.ReportRefusals(ctx, &identityv1.ReportRefusalsRequest{})
	note("ReportRefusals", err)
	_, err = cluster.ReportRefusals(ctx, &identityv1.ReportRefusalsRequest{
		Subject: identityv1.RefusalSubject_REFUSAL_SUBJECT_SERVICES,
	})
	note("ReportRefusals of Services", err)
	refused, err := cluster.WatchRefusals(ctx, &identityv1.WatchRefusalsRequest{})
	if err == nil {
		_, err = refused.Recv()
	}
	note("WatchRefusals", err)
	_, err = cluster.GetIPMapping(ctx, &identityv1.GetIPMappingRequest{Address: "192.0.2.1"})
	note("GetIPMapping", err)
	_, err = cluster.WaitForPublication(ctx, &identityv1.WaitForPublicationRequest{Owner: o})
	note("WaitForPublication", err)
	_, err = cluster.ForgetNode(ctx, &identityv1.ForgetNodeRequest{Name: "absent", ValidateOnly: true})
	note("ForgetNode", err)
	_, err = cluster.ForgetNode(ctx, &identityv1.ForgetNodeRequest{Name: "absent", Force: true, ValidateOnly: true})
	note("ForgetNode force", err)
	_, err = cluster.PublishKinds(ctx, &identityv1.PublishKindsRequest{Kinds: []string{"group/v1/kinds"}})
	note("PublishKinds", err)
	_, err = cluster.PublishPodCIDRs(ctx, &identityv1.PublishPodCIDRsRequest{})
	note("PublishPodCIDRs", err)
	published, err := cluster.WatchKinds(ctx, &identityv1.WatchKindsRequest{})
	if err == nil {
		_, err = published.Recv()
	}
	note("WatchKinds", err)
	all, err := cluster.ListNodes(ctx, &identityv1.ListNodesRequest{})
	if err == nil {
		if _, err = all.Recv(); errors.Is(err, io.EOF) {
			err = nil
		}
	}
	note("ListNodes", err)
	mapped, err := cluster.ListIPMappings(ctx, &identityv1.ListIPMappingsRequest{})
	if err == nil {
		if _, err = mapped.Recv(); errors.Is(err, io.EOF) {
			err = nil
		}
	}
	note("ListIPMappings", err)
	changes, err := cluster.WatchCluster(ctx, &identityv1.WatchClusterRequest{})
	if err == nil {
		_, err = changes.Recv()
	}
	note("WatchCluster", err)
	return got, nil
}

func childCalls(socket string) int {
	got, err := calls(socket)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(got)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func TestKernelRootAndTheDatapathChangeAndTheGroupReads(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("needs root: it calls as several users")
	}
	s := serve(t, func(_ *allocator.Config, o *rpc.Options) { o.AlsoRoot = nil })
	s.reg.Observe(registry.Update{Complete: true})
	// The server has no node and no address: NotFound proves that the call was let in.
	reads := map[string]codes.Code{
		"GetIdentity": codes.OK, "GetStatus": codes.OK, "ListIdentities": codes.OK, "WatchEndpoints": codes.OK,
		"WatchIdentities": codes.OK, "WatchCluster": codes.OK, "ListNodes": codes.OK, "GetIPMapping": codes.NotFound,
		"ListIPMappings": codes.OK, "WatchKinds": codes.OK, "GetLabelFilter": codes.OK,
	}
	changes := []string{
		"AllocateIdentity", "ConfirmEndpoint", "ResolveEndpoint", "ReleaseIdentity", "RegisterNode", "WaitForPublication",
		"ForgetNode", "ClaimRange", "ReturnRange", "PublishKinds", "PublishPodCIDRs", "CheckReuse",
		"ReportRefusals", "WatchRefusals", "WatchWaitingLabels", "AdmitLabels", "ConfirmMappings",
	}
	methods := 0
	for _, s := range []grpc.ServiceDesc{
		identityv1.IdentityService_ServiceDesc,
		identityv1.ClusterService_ServiceDesc,
	} {
		methods += len(s.Methods) + len(s.Streams)
	}
	if n := methods; n != len(reads)+len(changes) {
		t.Fatalf("the service has %d methods, this test knows %d", n, len(reads)+len(changes))
	}
	const denied = codes.PermissionDenied
	for _, c := range []struct {
		name      string
		uid, gid  uint32
		allocates codes.Code
		endpoints codes.Code // code of the calls about endpoints
		underlay  codes.Code // of RegisterNode
		ranges    codes.Code // code of RegisterNode, ClaimRange and ReturnRange
		forgets   codes.Code
	}{
		{"root", 0, 0, codes.OK, codes.OK, codes.OK, codes.OK, codes.NotFound},
		{"datapath", 65706, 65700, denied, codes.OK, codes.OK, denied, denied},
		{"ipam", 65702, 65700, denied, denied, denied, codes.OK, denied},
		{"the policy service", 65703, 65700, denied, denied, denied, denied, denied},
		{"the load balancer", 65704, 65700, denied, denied, denied, denied, denied},
		{"itself", 65701, 65700, denied, denied, denied, denied, denied},
		{"the writer of status", 65707, 65700, denied, denied, denied, denied, codes.NotFound},
		{"a reader", 65799, 65700, denied, denied, denied, denied, denied},
	} {
		exe, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		// The binary is in a directory that only root may enter.
		self, err := os.Open(exe)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("/proc/self/fd/3")
		cmd.ExtraFiles = []*os.File{self}
		cmd.Env = append(os.Environ(), childSocket+"="+s.socket)
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: c.uid, Gid: c.gid}}
		out, err := cmd.Output()
		self.Close()
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		var got map[string]codes.Code
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatalf("%s: %v in %q", c.name, err, out)
		}
		for _, m := range changes {
			want := c.endpoints
			switch m {
			case "AllocateIdentity":
				want = c.allocates
			case "RegisterNode", "ClaimRange", "ReturnRange", "CheckReuse":
				want = c.ranges
			case "ForgetNode":
				want = c.forgets
			case "ReportRefusals", "WatchWaitingLabels", "AdmitLabels":
				if want = denied; c.uid == 0 || c.uid == 65703 {
					want = codes.OK
				}
			case "PublishKinds", "WatchRefusals":
				if want = c.forgets; want == codes.NotFound {
					want = codes.OK
				}
			case "PublishPodCIDRs": // no sluice-ipam has registered the mode
				if want = c.forgets; want == codes.NotFound {
					want = codes.Unavailable
				}
			}
			if got[m] != want {
				t.Errorf("%s calls %s: %s, want %s", c.name, m, got[m], want)
			}
		}
		forces := c.forgets
		if c.uid != 0 {
			forces = denied
		}
		if got := got["ForgetNode force"]; got != forces {
			t.Errorf("%s forgets by force: %s, want %s", c.name, got, forces)
		}
		services := denied
		if c.uid == 0 || c.uid == 65704 {
			services = codes.OK
		}
		if got := got["ReportRefusals of Services"]; got != services {
			t.Errorf("%s reports Services: %s, want %s", c.name, got, services)
		}
		if got := got["RegisterNode underlay"]; got != c.underlay {
			t.Errorf("%s registers an underlay: %s, want %s", c.name, got, c.underlay)
		}
		for m, want := range reads {
			if got[m] != want {
				t.Errorf("%s calls %s: %s, want %s", c.name, m, got[m], want)
			}
		}
	}
}

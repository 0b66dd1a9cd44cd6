// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
)

// childSocket tells this test binary to be a caller, and where the server is.
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
	reads := []string{"GetIdentity", "GetStatus", "ListIdentities", "WatchEndpoints", "WatchIdentities"}
	changes := []string{"AllocateIdentity", "ConfirmEndpoint", "ResolveEndpoint", "ReleaseIdentity"}
	if n := len(identityv1.IdentityService_ServiceDesc.Methods) + len(identityv1.IdentityService_ServiceDesc.Streams); n != len(reads)+len(changes) {
		t.Fatalf("the service has %d methods, this test knows %d", n, len(reads)+len(changes))
	}
	for _, c := range []struct {
		name      string
		uid, gid  uint32
		allocates codes.Code
		endpoints codes.Code // of those about endpoints
	}{
		{"root", 0, 0, codes.OK, codes.OK},
		{"datapath", 65706, 65700, codes.PermissionDenied, codes.OK},
		{"ipam", 65702, 65700, codes.PermissionDenied, codes.PermissionDenied},
		{"itself", 65701, 65700, codes.PermissionDenied, codes.PermissionDenied},
		{"a reader", 65799, 65700, codes.PermissionDenied, codes.PermissionDenied},
	} {
		exe, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		// The binary lies in a directory that only root may enter.
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
			if m == "AllocateIdentity" {
				want = c.allocates
			}
			if got[m] != want {
				t.Errorf("%s calls %s: %s, want %s", c.name, m, got[m], want)
			}
		}
		for _, m := range reads {
			if got[m] != codes.OK {
				t.Errorf("%s calls %s: %s, want OK", c.name, m, got[m])
			}
		}
	}
}

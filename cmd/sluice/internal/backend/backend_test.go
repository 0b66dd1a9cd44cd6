// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package backend

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/service"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// TestBackendsAreListedOnce: a backend of several services and frontends has one row. The same port of another
// protocol is another backend.
func TestBackendsAreListedOnce(t *testing.T) {
	n := nodetest.New(t, Command, service.Command)
	n.Want(t, 0, "service", "apply", "-f", nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebService))
	frontend := func(address string, protocol netv1.Protocol, terminating bool) *lbv1.Frontend {
		return &lbv1.Frontend{
			Key: &lbv1.FrontendKey{Address: address, Port: 80, Protocol: protocol},
			Inside: &lbv1.BackendList{Backends: []*lbv1.Backend{
				{Address: "10.244.0.10", Port: 8080}, {Address: "10.244.0.2", Port: 8080, Terminating: terminating},
			}},
			Outside: &lbv1.BackendList{Backends: []*lbv1.Backend{{Address: "10.244.0.10", Port: 8080}}},
		}
	}
	n.Balancer.Extra = []*lbv1.Service{{Namespace: "shop", Name: "door", Frontends: []*lbv1.Frontend{
		frontend("192.0.2.1", netv1.Protocol_PROTOCOL_TCP, true), frontend("192.0.2.1", netv1.Protocol_PROTOCOL_UDP, true),
	}}}
	n.Connections = []*datapathv1.BackendConnections{
		{Address: "10.244.0.2", Port: 8080, Protocol: netv1.Protocol_PROTOCOL_UDP, ConnectionCount: 3},
		{Address: "10.244.0.10", Port: 8080, Protocol: netv1.Protocol_PROTOCOL_TCP, ConnectionCount: 70000},
		{Address: "10.244.0.11", Port: 8080, Protocol: netv1.Protocol_PROTOCOL_TCP, ConnectionCount: 9}, // of no service
	}
	out, _ := n.Want(t, 0, "backend", "list")
	nodetest.WantLines(t, out, "BACKEND STATE CONNECTIONS SERVICES FRONTENDS",
		"10.244.0.2:8080/TCP ready 0 shop/web, shop/door", "10.96.0.10:80/TCP, 192.0.2.1:80/TCP",
		"10.244.0.2:8080/UDP terminating 3 shop/door 192.0.2.1:80/UDP",
		"10.244.0.3:8080/TCP ready 0 shop/web 10.96.0.10:80/TCP",
		"10.244.0.10:8080/TCP ready 70000 shop/door 192.0.2.1:80/TCP",
		"10.244.0.10:8080/UDP ready 0 shop/door 192.0.2.1:80/UDP")
	if strings.Contains(out, "10.244.0.11") {
		t.Errorf("a backend of no service is listed:\n%s", out)
	}
	out, _ = n.Want(t, 0, "backend", "list", "--service", "shop/web", "-o", "json")
	var all []struct {
		Address   string
		Frontends []string
	}
	if err := nodetest.UnmarshalItems(out, &all); err != nil || len(all) != 2 || all[1].Address != "10.244.0.3" ||
		all[1].Frontends[0] != "10.96.0.10:80/TCP" {
		t.Errorf("--service -o json: %v, %s", err, out)
	}
	_, errOut := n.Want(t, invocation.ExitFailed, "backend", "list", "--service", "web")
	nodetest.WantLines(t, errOut, "sluice: no service default/web; see `sluice service list --all`")
	n.Want(t, invocation.ExitUsage, "backend", "list", "--service", "a/b/c")
}

// TestBackendsAreListedWithoutTheDatapath: without the datapath, the number of connections is unknown and not 0.
// Unexpected errors are also reported.
func TestBackendsAreListedWithoutTheDatapath(t *testing.T) {
	n := nodetest.New(t, Command, service.Command)
	n.Want(t, 0, "service", "apply", "-f", nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebService))
	unknown := func(code int) (errOut string) {
		t.Helper()
		out, errOut := n.Want(t, code, "backend", "list")
		nodetest.WantLines(t, out, "10.244.0.2:8080/TCP ready - shop/web 10.96.0.10:80/TCP")
		out, _ = n.Want(t, code, "backend", "list", "-o", "json")
		var all []struct{ ConnectionCount *int }
		if err := nodetest.UnmarshalItems(out, &all); err != nil || len(all) != 2 || all[0].ConnectionCount != nil {
			t.Errorf("-o json: %v, %s", err, out)
		}
		return errOut
	}
	n.ConnectionsError = status.Error(codes.FailedPrecondition, "services are not translated")
	unknown(0)
	n.ConnectionsError = status.Error(codes.Unimplemented, "unknown method")
	unknown(0)
	n.ConnectionsError = status.Error(codes.Internal, "the map is gone")
	if errOut := unknown(invocation.ExitFailed); !strings.Contains(errOut, "cannot count the connections of backends") ||
		!strings.Contains(errOut, "the map is gone") {
		t.Errorf("standard error: %s", errOut)
	}
	n.Stop("datapath")
	unknown(0)
}

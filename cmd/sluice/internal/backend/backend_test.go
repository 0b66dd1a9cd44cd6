// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package backend

import (
	"encoding/json"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/service"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// TestBackendsAreListedOnce: one that several services and frontends lead to has
// one row, and a port of another protocol is another backend.
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
	out, _ := n.Want(t, 0, "backend", "list")
	nodetest.WantLines(t, out, "BACKEND STATE SERVICES FRONTENDS",
		"10.244.0.2:8080/TCP ready shop/web, shop/door 10.96.0.10:80/TCP, 192.0.2.1:80/TCP",
		"10.244.0.2:8080/UDP terminating shop/door 192.0.2.1:80/UDP",
		"10.244.0.3:8080/TCP ready shop/web 10.96.0.10:80/TCP",
		"10.244.0.10:8080/TCP ready shop/door 192.0.2.1:80/TCP", "10.244.0.10:8080/UDP ready shop/door 192.0.2.1:80/UDP")
	out, _ = n.Want(t, 0, "backend", "list", "--service", "shop/web", "-o", "json")
	var all []backend
	if err := json.Unmarshal([]byte(out), &all); err != nil || len(all) != 2 || all[1].Address != "10.244.0.3" ||
		all[1].Frontends[0] != "10.96.0.10:80/TCP" {
		t.Errorf("--service -o json: %v, %s", err, out)
	}
	_, errOut := n.Want(t, invocation.ExitFailed, "backend", "list", "--service", "web")
	nodetest.WantLines(t, errOut, "sluice: there is no service default/web; see `sluice service list --all`")
	n.Want(t, invocation.ExitUsage, "backend", "list", "--service", "a/b/c")
}

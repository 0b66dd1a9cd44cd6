// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// TestKernelAddressesAreOfServicesAloneWhileTheirFrontendsSaySo makes changes one by one, each followed by a restart.
func TestKernelAddressesAreOfServicesAloneWhileTheirFrontendsSaySo(t *testing.T) {
	at := netip.MustParseAddr("10.96.0.1")
	made := func(port uint16, kind frontend.Kind, inside *frontend.List) *frontend.Frontend {
		return &frontend.Frontend{
			Key:  frontend.Key{Addr: at, Port: port, Protocol: frontend.TCP},
			Kind: kind, Service: "shop/web:http", Inside: inside, Outside: listOf(false, 1),
		}
	}
	list := listOf(false, 1)
	dir := kerneltest.NewBPFFS(t)
	i := start(t, dir, small)
	now := state{}
	for _, step := range []struct {
		what string
		next []*frontend.Frontend
		want bool
	}{
		{"an external address", []*frontend.Frontend{made(80, frontend.ExternalIP, list)}, false},
		{"a cluster IP", []*frontend.Frontend{made(80, frontend.ClusterIP, list)}, true},
		{
			"with a second port",
			[]*frontend.Frontend{made(80, frontend.ClusterIP, list), made(81, frontend.ClusterIP, list)},
			true,
		},
		{"with only the second port", []*frontend.Frontend{made(81, frontend.ClusterIP, list)}, true},
		{"no port is left", nil, false},
		{"a load balancer's", []*frontend.Frontend{made(80, frontend.LoadBalancer, list)}, true},
		{"which has become a proxy's", []*frontend.Frontend{made(80, frontend.LoadBalancer, nil)}, false},
		{
			"a proxy's at one port",
			[]*frontend.Frontend{made(80, frontend.LoadBalancer, nil), made(81, frontend.LoadBalancer, list)},
			false,
		},
		{"the proxy has gone", []*frontend.Frontend{made(81, frontend.LoadBalancer, list)}, true},
		{"an external address again", []*frontend.Frontend{made(81, frontend.ExternalIP, list)}, false},
	} {
		next := state{}
		for _, f := range step.next {
			next[f.Key] = f
		}
		i.apply(t, now.to(next))
		now = next
		for _, restarted := range []bool{false, true} {
			if restarted {
				i.close(t)
				i = start(t, dir, small)
			}
			if got, err := i.IsOfServices(at); err != nil || got != step.want {
				t.Errorf("%s, restarted %t: %t, %v", step.what, restarted, got, err)
			}
			i.sound(t)
			now.check(t, i)
		}
		i.apply(t, now.all())
		now.check(t, i)
	}
	// Its frontends were removed while no process ran.
	f := made(80, frontend.ClusterIP, list)
	i.apply(t, now.to(state{f.Key: f}))
	i.close(t)
	i = start(t, dir, small)
	g := service(7, false, list)
	i.apply(t, &frontendtx.Transaction{Partial: true})
	if got, err := i.IsOfServices(at); err != nil || !got {
		t.Errorf("before all frontends are listed: %t, %v", got, err)
	}
	i.apply(t, state{f.Key: f}.to(state{g.Key: g}))
	state{g.Key: g}.check(t, i)
	i.sound(t)
}

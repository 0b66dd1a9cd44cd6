// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// TestServicesBeyondTheShareRefuseConnections applies more Services than limits.services allows. Cluster IPs, load
// balancer addresses and node ports of the excess Services refuse connections, also after a restart and a change.
// Packets to external addresses are forwarded unchanged.
func TestServicesBeyondTheShareRefuseConnections(t *testing.T) {
	c := &clock{now: time.Unix(1e9, 0)}
	config, dir := testConfig(c), t.TempDir()
	config.Limits = Limits{Services: 10, Slices: 100, Frontends: 1000, Backends: 1000, BackendsPerService: 500}
	config.Node.ExternalIPs = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}
	first := start(t, config, dir, managed.SourceKubernetes)
	o := &apiSource{running: first, Objects: first.Objects(managed.SourceKubernetes), clock: c}
	wide := func(port int) string {
		text := strings.Replace(serviceText("evil", "wide", "10.96.2.1", 3), "spec:\n",
			"spec:\n  type: LoadBalancer\n  externalIPs: [198.51.100.1]\n", 1) +
			"status: {loadBalancer: {ingress: [{ip: 203.0.113.1}]}}\n"
		for i := range 3 {
			text = strings.Replace(text, fmt.Sprintf("port: %d}", 80+i), fmt.Sprintf("port: %d, nodePort: %d}", 80+i, port+i), 1)
		}
		return text
	}
	for i := range 9 {
		o.give(serviceText("evil", fmt.Sprint("s", i), fmt.Sprint("10.96.1.", i+1), 1))
	}
	o.complete()
	o.give(wide(30080), sliceText("evil", "wide", 3, "10.244.9.1"))
	at := func(addr string, port uint16) string {
		a := netip.MustParseAddr(addr)
		return o.allFrontends()[frontend.Key{Addr: a, Port: port, Protocol: frontend.TCP, Node: a.IsUnspecified()}]
	}
	const nodePort = "0.0.0.0:%d/tcp of evil/wide:p%d exceeds the share inside reject"
	want := func(when string, first uint16) {
		t.Helper()
		for _, c := range []struct {
			addr string
			port uint16
			want string
		}{
			{"10.96.2.1", 80, "10.96.2.1:80/tcp of evil/wide:p0 exceeds the share inside reject"},
			{"203.0.113.1", 80, "203.0.113.1:80/tcp of evil/wide:p0 exceeds the share inside reject"},
			{"0.0.0.0", first, fmt.Sprintf(nodePort, first, 0)},
			{"0.0.0.0", first + 2, fmt.Sprintf(nodePort, first+2, 2)},
			{"198.51.100.1", 80, ""},
		} {
			if got := at(c.addr, c.port); got != c.want {
				t.Errorf("%s: %s port %d: %q, want %q", when, c.addr, c.port, got, c.want)
			}
		}
	}
	want("new", 30080)
	o.give(wide(30180))
	want("changed", 30180)
	if got := at("0.0.0.0", 30080); got != "" {
		t.Errorf("the former node port: %q", got)
	}
	found, _, err := o.Reader().Find(t.Context(), service.Name{Namespace: "evil", Name: "wide"})
	if err != nil || !strings.Contains(strings.Join(found.Notes, ""), "limits.services") {
		t.Errorf("the notes: %q %v", found.Notes, err)
	}
	o.stop()
	o.running = start(t, config, dir, managed.SourceKubernetes)
	o.Objects = o.running.Objects(managed.SourceKubernetes)
	want("after a restart", 30180)
	o.give(wide(30180))
	want("listed again", 30180)
	o.remove(keyOf(service.KindService, "evil", "s0"))
	o.level()
	if got := at("10.96.2.1", 81); !strings.Contains(got, "inside 10.244.9.1") {
		t.Errorf("within the share again: %q", got)
	}
}

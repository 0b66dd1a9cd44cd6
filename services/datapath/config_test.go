// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/process"
)

func TestSettingsAreThoseOfTheDocumentation(t *testing.T) {
	want, err := process.Reference(service, func(p instance.Paths) Config {
		c := defaults(p)
		c.Node = "the host's name"
		return c
	})
	if err != nil {
		t.Fatal(err)
	}
	const file = "../../docs/reference/datapath.md"
	doc, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	// Settings common to all services are documented elsewhere.
	_, own, ok := strings.Cut(want, "\n| `node`")
	own = "| `node` " + strings.TrimSpace(own)
	if ok && strings.Contains(string(doc), own) {
		return
	}
	t.Errorf("docs/reference/datapath.md does not have these rows:\n%s", own)
}

func TestConfigurationProblemsNameTheirKey(t *testing.T) {
	paths, err := instance.New("")
	if err != nil {
		t.Fatal(err)
	}
	good := defaults(paths)
	if err := good.Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
	for key, change := range map[string]func(*Config){
		"stateDir":      func(c *Config) { c.StateDir = "here" },
		"bpfDir":        func(c *Config) { c.BPFDir = "" },
		"services.ipam": func(c *Config) { c.Services.IPAM = "ipam.sock" },
		"netnsDirs":     func(c *Config) { c.NetnsDirs = []string{"/"} },
		"podCIDRs two": func(c *Config) {
			c.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("10.9.1.0/24")}
		},
		"podCIDRs bits":        func(c *Config) { c.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.9.0.1/24")} },
		"podCIDRs tiny":        func(c *Config) { c.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.9.0.0/31")} },
		"loadBalancing.cgroup": func(c *Config) { c.LoadBalancing.Cgroup = "unified" },
		"mtu":                  func(c *Config) { c.MTU = 1000 },
		"routing.tunnelPort": func(c *Config) {
			c.Routing = RoutingConfig{Mode: "native", TunnelPort: 4789}
		},
		"routing.tunnelPort none": func(c *Config) { c.Routing.TunnelPort = 4789 },
		"routing.copyDSCP":        func(c *Config) { c.Routing.CopyDSCP = true },
		"tunnelPorts of the tunnel": func(c *Config) {
			c.TunnelPorts, c.Routing = []uint16{1, 2, 3, 4}, RoutingConfig{Mode: "overlay"}
		},
		"tunnelPorts":       func(c *Config) { c.TunnelPorts = []uint16{1, 2, 3, 4, 5} },
		"routing.probePort": func(c *Config) { c.Routing.Mode, c.Routing.ProbePort = "overlay", 4789 },
		"serviceDevices":    func(c *Config) { c.ServiceDevices = []string{"kube-["} },

		"serviceDevices lo":  func(c *Config) { c.ServiceDevices = []string{"lo"} },
		"serviceDevices all": func(c *Config) { c.ServiceDevices = []string{"*"} },

		"masquerade.except off": func(c *Config) {
			c.Masquerade.Except = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
		},
		"masquerade.except many": func(c *Config) {
			c.Masquerade = MasqueradeConfig{true, make([]netip.Prefix, maxExcept+1)}
		},
		"masquerade.except[0]": func(c *Config) {
			c.Masquerade = MasqueradeConfig{true, []netip.Prefix{netip.MustParsePrefix("10.0.0.1/8")}}
		},

		"policy.linger":  func(c *Config) { c.Policy.Linger = 0 },
		"audit.interval": func(c *Config) { c.Audit.Interval = 0 },

		"connections.icmp":        func(c *Config) { c.Connections.ICMP = time.Millisecond },
		"connections.tcpClosing":  func(c *Config) { c.Connections.TCPClosing = 365 * 24 * time.Hour },
		"connections.maxInterval": func(c *Config) { c.Connections.MaxInterval = 500 * time.Millisecond },
		"services.timeout":        func(c *Config) { c.Services.Timeout = 0 },
	} {
		c := defaults(paths)
		change(&c)
		want, _, _ := strings.Cut(key, " ")
		all := config.All(c.Validate())
		if len(all) != 1 || !strings.HasPrefix(all[0].Error(), want) {
			t.Errorf("%s: %v", key, all)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package attachment

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/services/cni-shim/internal/cni"
	"github.com/sluice-net/sluice/services/cni-shim/internal/message"
)

// result converts an endpoint to a CNI result, and appends it to the results of the chain's earlier plugins.
func (p *Plugin) result(e *message.Endpoint) (*cni.Result, error) {
	if e == nil {
		return nil, errors.New("no endpoint")
	}
	r := &cni.Result{DNS: p.in.Config.DNS}
	if prev := p.in.Config.PrevResult; prev != nil {
		r.Interfaces = slices.Clone(prev.Interfaces)
		r.IPs = slices.Clone(prev.IPs)
		r.Routes = slices.Clone(prev.Routes)
		r.DNS = mergeDNS(prev.DNS, r.DNS)
	}

	host, err := device(e.HostInterface, "host_interface")
	if err != nil {
		return nil, err
	}
	inside, err := device(e.ContainerInterface, "container_interface")
	if err != nil {
		return nil, err
	}
	// The result contains the path that the runtime passed, not the path that the datapath opened.
	inside.Sandbox = p.in.Netns
	if p.in.Config.CNIVersion == "1.1.0" {
		host.MTU, inside.MTU = int(e.MTU), int(e.MTU)
	}
	r.Interfaces = append(r.Interfaces, host, inside)
	index := len(r.Interfaces) - 1

	gateways := map[bool]netip.Addr{} // gateways by family; true: IPv4
	for _, text := range e.Gateways {
		g, err := address(text)
		if err != nil {
			return nil, fmt.Errorf("gateways: %w", err)
		}
		gateways[g.Is4()] = g
	}
	if len(e.Addresses) == 0 {
		return nil, errors.New("addresses: none")
	}
	for _, text := range e.Addresses {
		a, err := address(text)
		if err != nil {
			return nil, fmt.Errorf("addresses: %w", err)
		}
		ip := &cni.IP{Interface: &index, Address: netip.PrefixFrom(a, a.BitLen())}
		g, ok := gateways[a.Is4()]
		if !ok {
			return nil, fmt.Errorf("gateways: none for %s", a)
		}
		ip.Gateway = cni.Gateway{Addr: g}
		r.IPs = append(r.IPs, ip)

		// A source-routed prefix uses the interface's own routing table and is not a default route.
		if !slices.Contains(e.SourceRouted, text) {
			r.Routes = append(r.Routes, &cni.Route{Dst: everything(a), GW: cni.Gateway{Addr: g}})
		}
	}
	return r, nil
}

// address parses an address. It refuses addresses that the API does not accept: with a zone, and IPv4 in IPv6 form.
func address(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" || a.Is4In6() {
		return netip.Addr{}, fmt.Errorf("%q is not an address", text)
	}
	return a, nil
}

func device(d message.Interface, field string) (*cni.Interface, error) {
	if d.Name == "" {
		return nil, fmt.Errorf("%s: it has no name", field)
	}
	if _, _, ok := cni.ParseMAC(d.MAC); !ok {
		return nil, fmt.Errorf("%s: %q is not a MAC address", field, d.MAC)
	}
	return &cni.Interface{Name: d.Name, MAC: d.MAC}, nil
}

func everything(a netip.Addr) netip.Prefix {
	if a.Is4() {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

// mergeDNS combines two configurations; fields that this plugin's own one sets take precedence.
func mergeDNS(prev, own cni.DNS) cni.DNS {
	if own.IsZero() {
		return prev
	}
	return own
}

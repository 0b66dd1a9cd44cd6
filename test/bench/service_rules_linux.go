// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/test/internal/pod"
)

// routedPath is a path between two pods over a node that routes.
type routedPath struct {
	path
	node string // network namespace of the node
}

// routedPair makes two pods and a node without Sluice between them.
func routedPair(prefix string) (r routedPath, remove func() error, err error) {
	r = routedPath{node: pod.NetnsPath(prefix + "-n"), path: path{
		from: pod.Pod{Name: prefix + "-a", Netns: pod.NetnsPath(prefix + "-a"), IPv4: netip.MustParseAddr("10.8.1.2")},
		to:   pod.Pod{Name: prefix + "-b", Netns: pod.NetnsPath(prefix + "-b"), IPv4: netip.MustParseAddr("10.8.2.2")},
	}}
	ends := []pod.Pod{r.from, r.to}
	remove = func() error {
		return errors.Join(pod.DeleteNetns(r.from.Netns), pod.DeleteNetns(r.to.Netns), pod.DeleteNetns(r.node))
	}
	for _, ns := range []string{r.node, r.from.Netns, r.to.Netns} {
		if err := pod.NewNetns(ns); err != nil {
			return r, nil, errors.Join(err, remove())
		}
	}
	err = forward(r.node)
	for i, end := range ends {
		gateway := end.IPv4.Prev()
		err = errors.Join(err, pod.In(r.node, func() error {
			port := fmt.Sprintf("pod%d", i)
			if _, err := hostEnd(port, end.Netns, nil); err != nil {
				return err
			}
			_, err := addressed(port, netip.PrefixFrom(gateway, 24))
			return err
		}), pod.In(end.Netns, func() error {
			if _, err := addressed("eth0", netip.PrefixFrom(end.IPv4, 24)); err != nil {
				return err
			}
			return netlink.RouteAdd(&netlink.Route{Gw: gateway.AsSlice()})
		}))
	}
	if err != nil {
		return r, nil, errors.Join(fmt.Errorf("make a node without Sluice: %w", err), remove())
	}
	return r, remove, nil
}

// load runs a program in the node that reads rules from its standard input.
func (r routedPath) load(ctx context.Context, rules, program string, args ...string) error {
	return pod.In(r.node, func() error {
		cmd := exec.CommandContext(ctx, program, args...)
		cmd.Stdin = strings.NewReader(rules)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%s: %w: %s", program, err, bytes.TrimSpace(out.Bytes()))
		}
		return nil
	})
}

// nftablesRules returns services as kube-proxy's nftables mode writes them: a map from address, protocol and port to
// the service's chain, which selects one of its endpoints' chains. Other rules of kube-proxy, such as marks for
// masquerade, are left out.
func nftablesRules(services int, of backendsOf) string {
	var b strings.Builder
	b.WriteString("table ip bench {\n")
	for i := range services {
		var choices []string
		backends := of(i, 0)
		for k, backend := range backends {
			fmt.Fprintf(&b, "chain endpoint-%d-%d {\n meta l4proto tcp dnat to %s\n}\n", i, k, backend)
			choices = append(choices, fmt.Sprintf("%d : goto endpoint-%d-%d", k, i, k))
		}
		fmt.Fprintf(&b, "chain service-%d {\n numgen random mod %d vmap { %s }\n}\n", i, len(backends),
			strings.Join(choices, ", "))
	}
	b.WriteString("map service-ips {\n type ipv4_addr . inet_proto . inet_service : verdict\n elements = {\n")
	for i := range services {
		fmt.Fprintf(&b, "%s . tcp . %d : goto service-%d,\n", clusterIP(i), clusterPort, i)
	}
	b.WriteString("}\n}\nchain services {\n ip daddr . meta l4proto . th dport vmap @service-ips\n}\n" +
		"chain nat-prerouting {\n type nat hook prerouting priority dstnat; policy accept;\n jump services\n}\n}\n")
	return b.String()
}

// nftablesNodePorts returns the benchmark's node ports as kube-proxy's nftables mode writes them. With policy Local
// there are only the node ports. With policy Cluster their packets are also marked and masqueraded. kube-proxy's
// filter chains, which every packet traverses, are left out.
func nftablesNodePorts(node, backend netip.Addr, masquerade bool) string {
	var b, ports strings.Builder
	fmt.Fprintf(&b, "table ip bench {\nset nodeport-ips {\n type ipv4_addr\n elements = { %s }\n}\n", node)
	b.WriteString("chain mark-for-masquerade {\n meta mark set meta mark or 0x4000\n}\n")
	for _, p := range []struct {
		protocol     string
		at, answered int
	}{{"tcp", echoAt, echoPort}, {"udp", echoAt, echoPort}, {"tcp", connectAt, connectPort}} {
		name := fmt.Sprintf("%s-%d", p.protocol, p.at)
		fmt.Fprintf(&b, "chain endpoint-%s {\n ip saddr %s jump mark-for-masquerade\n meta l4proto %s dnat to %s:%d\n}\n",
			name, backend, p.protocol, backend, p.answered)
		fmt.Fprintf(&b, "chain service-%s {\n numgen random mod 1 vmap { 0 : goto endpoint-%s }\n}\n", name, name)
		fmt.Fprintf(&b, "chain external-%s {\n", name)
		if masquerade {
			b.WriteString(" jump mark-for-masquerade\n")
		}
		fmt.Fprintf(&b, " goto service-%s\n}\n", name)
		fmt.Fprintf(&ports, "%s . %d : goto external-%s,\n", p.protocol, p.at, name)
	}
	b.WriteString("map service-nodeports {\n type inet_proto . inet_service : verdict\n elements = {\n" + ports.String() +
		"}\n}\nchain services {\n ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports\n}\n" +
		"chain nat-prerouting {\n type nat hook prerouting priority dstnat; policy accept;\n jump services\n}\n" +
		"chain masquerading {\n meta mark and 0x4000 == 0 return\n meta mark set meta mark xor 0x4000\n" +
		" masquerade fully-random\n}\n" +
		"chain nat-postrouting {\n type nat hook postrouting priority srcnat; policy accept;\n jump masquerading\n}\n}\n")
	return b.String()
}

// iptablesRules returns services as kube-proxy's iptables mode writes them: one chain with a rule for each service,
// and a chain for each service and endpoint.
func iptablesRules(services int, of backendsOf) string {
	var chains, rules strings.Builder
	for i := range services {
		fmt.Fprintf(&chains, ":KUBE-SVC-%d - [0:0]\n", i)
		fmt.Fprintf(&rules, "-A KUBE-SERVICES -d %s/32 -p tcp -m tcp --dport %d -j KUBE-SVC-%d\n", clusterIP(i),
			clusterPort, i)
		backends := of(i, 0)
		for k, backend := range backends {
			choice := ""
			if left := len(backends) - k; left > 1 {
				choice = fmt.Sprintf(" -m statistic --mode random --probability %.10f", 1/float64(left))
			}
			fmt.Fprintf(&chains, ":KUBE-SEP-%d-%d - [0:0]\n", i, k)
			fmt.Fprintf(&rules, "-A KUBE-SVC-%d%s -j KUBE-SEP-%d-%d\n", i, choice, i, k)
			fmt.Fprintf(&rules, "-A KUBE-SEP-%d-%d -p tcp -m tcp -j DNAT --to-destination %s\n", i, k, backend)
		}
	}
	return "*nat\n:KUBE-SERVICES - [0:0]\n" + chains.String() + "-A PREROUTING -j KUBE-SERVICES\n" + rules.String() +
		"COMMIT\n"
}

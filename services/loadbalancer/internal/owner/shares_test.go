// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/services/loadbalancer/internal/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// givenOf are the objects of texts, as a source gives them.
func givenOf(t testing.TB, texts ...string) map[service.ObjectKey]Given {
	t.Helper()
	out := make(map[service.ObjectKey]Given)
	for _, text := range texts {
		all, err := manifest.Options{}.Decode([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range all {
			out[x.Key] = Given{Object: x}
		}
	}
	return out
}

// serviceText is a Service with ports from 80 on.
func serviceText(namespace, name, ip string, ports int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: v1\nkind: Service\nmetadata: {name: %s, namespace: %s}\n"+
		"spec:\n  clusterIP: %q\n  ports:\n", name, namespace, ip)
	for i := range ports {
		fmt.Fprintf(&b, "  - {name: p%d, port: %d}\n", i, 80+i)
	}
	return b.String()
}

// sliceText is a slice of a Service, with ports from 8080 on.
func sliceText(namespace, name string, ports int, addresses ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n"+
		"metadata: {name: %s-x, namespace: %s, labels: {kubernetes.io/service-name: %s}}\nports:\n", name, namespace, name)
	for i := range ports {
		fmt.Fprintf(&b, "- {name: p%d, port: %d}\n", i, 8080+i)
	}
	b.WriteString("endpoints:\n")
	for _, a := range addresses {
		fmt.Fprintf(&b, "- {addresses: [%s]}\n", a)
	}
	return b.String()
}

// frontendOf is what the node has at port 80 of a cluster IP.
func (r *running) frontendOf(ip string) string {
	r.t.Helper()
	x := r.subscribe("frontendOf", [16]byte{}, 0)
	defer x.Close()
	st, err := r.Status(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	x.until(st.Revision)
	addr := netip.MustParseAddr(ip)
	return x.has[frontend.Key{Addr: addr, Port: 80, Protocol: service.TCP, IPv6: addr.Is6()}]
}

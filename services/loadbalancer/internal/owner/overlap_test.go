// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// TestOverlappingServicesNameEachOther: two services claim the same frontend. The notes of the later service name the
// service that has it, whatever the types of the two services are.
func TestOverlappingServicesNameEachOther(t *testing.T) {
	cluster := func(port string) string { return `spec: {clusterIP: 10.96.0.1, ports: [{port: ` + port + `}]}` }
	node := func(ip, port string) string {
		return `spec: {type: NodePort, clusterIP: '` + ip + `', ports: [{port: 80, nodePort: ` + port + `}]}`
	}
	external := func(ip string) string {
		return `spec: {clusterIP: ` + ip + `, externalIPs: [10.96.0.1], ports: [{port: 80}]}`
	}
	balanced := func(ip string) string {
		return `spec: {type: LoadBalancer, clusterIP: ` + ip + `, ports: [{port: 80}]}, ` +
			`status: {loadBalancer: {ingress: [{ip: 10.96.0.1}]}}`
	}
	const address, port = "10.96.0.1:80/TCP", "port 30080/TCP of the IPv4 node addresses"
	for name, c := range map[string]struct{ first, second, want string }{
		"cluster IPs":                    {cluster("80"), cluster("80"), address},
		"cluster IP, then external IP":   {cluster("80"), external("10.96.0.3"), address},
		"external IP, then cluster IP":   {external("10.96.0.2"), cluster("80"), address},
		"external IP, then balancer":     {external("10.96.0.2"), balanced("10.96.0.3"), address},
		"balancers":                      {balanced("10.96.0.2"), balanced("10.96.0.3"), address},
		"another protocol":               {cluster("80"), cluster("80, protocol: UDP"), ""},
		"another port":                   {cluster("80"), cluster("81"), ""},
		"node ports":                     {node("10.96.0.2", "30080"), node("10.96.0.3", "30080"), port},
		"node ports of another protocol": {node("10.96.0.2", "30080"), node("10.96.0.3", "30080, protocol: UDP"), ""},
		"node ports of another family":   {node("10.96.0.2", "30080"), node("fd96::3", "30080"), ""},
	} {
		config := testConfig(&clock{now: time.Unix(1e9, 0)})
		config.Node.ExternalIPs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
		o := start(t, config, t.TempDir())
		object := func(name, body string) string {
			return fmt.Sprintf("---\n{apiVersion: v1, kind: Service, metadata: {name: %s}, %s}\n", name, body)
		}
		o.apply(object("first", c.first))
		out := o.apply(object("second", c.second))
		notes := slices.DeleteFunc(out.Changes[0].Notes, func(n string) bool { return !strings.Contains(n, "default/first") })
		switch {
		case c.want == "" && len(notes) != 0:
			t.Errorf("%s: notes %q, want none", name, notes)
		case c.want != "" && (len(notes) != 1 || !strings.Contains(notes[0], c.want)):
			t.Errorf("%s: notes %q, want %s", name, out.Changes[0].Notes, c.want)
		}
		all, _, _, err := o.Reader().List(t.Context(), Filter{WithFrontends: true})
		if err != nil {
			t.Fatal(err)
		}
		has := map[string]service.Name{}
		for _, x := range all {
			for _, f := range x.Frontends {
				if by, twice := has[compile.KeyText(f.Key)]; twice {
					t.Errorf("%s: %s and %s have %s", name, by, f.Service, f.Key)
				}
				has[compile.KeyText(f.Key)] = x.Service.Name
			}
		}
		if by := has[c.want]; c.want != "" && by.Name != "first" {
			t.Errorf("%s: %s is of %q", name, c.want, by)
		}
		o.stop()
	}
}

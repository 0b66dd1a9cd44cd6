// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// addTo connects a pod of a namespace with the label app=<prefix>.
func (n *testNode) addTo(t *testing.T, namespace, prefix string) pod.Pod {
	t.Helper()
	p := newPod(t, prefix)
	ctx, cancel := deadline(t)
	defer cancel()
	result, err := cni.Run(ctx, cni.Call{
		Plugin: n.Plugin(), Command: "ADD", ContainerID: p.Name, Netns: p.Netns, IfName: "eth0",
		Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=" + namespace + ";K8S_POD_NAME=" + p.Name, Path: filepath.Dir(n.Plugin()),
		Config: n.config(t, "1.0.0", labels("app", prefix)),
	})
	if err != nil {
		t.Fatalf("ADD %s: %v", p.Name, err)
	}
	return withAddresses(t, p, result)
}

// resolve returns the address that a server answers for a name, by the family of the server.
func resolve(t *testing.T, from pod.Pod, server netip.AddrPort, name string) netip.Addr {
	t.Helper()
	kind := dnsmessage.TypeA
	if server.Addr().Is6() {
		kind = dnsmessage.TypeAAAA
	}
	_, addresses, err := newResolver(t, from, server).ask(name, kind, 5)
	if err != nil || len(addresses) != 1 {
		t.Fatalf("%s resolves %s by %s: %v, %v", from.Name, name, server, addresses, err)
	}
	return addresses[0]
}

// wantOpen fails the test unless a pod can connect to an address of a name.
func wantOpen(t *testing.T, from pod.Pod, a netip.Addr) {
	t.Helper()
	ctx, cancel := deadline(t)
	defer cancel()
	if err := talk(ctx, from, netip.AddrPortFrom(a, servedPort)); err != nil {
		t.Errorf("%s connects to %s: %v", from.Name, a, err)
	}
}

// wantClosed fails the test if a pod can connect to an address.
func wantClosed(t *testing.T, from pod.Pod, a netip.Addr) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if err := talk(ctx, from, netip.AddrPortFrom(a, servedPort)); err == nil {
		t.Errorf("%s connects to %s, which its lookups have not opened", from.Name, a)
	}
}

// TestTenantTeachesNothingToOthers: the pods of a tenant ask their own server for a name that the policies of another
// tenant select, and the policies of the first tenant select it, too. That opens the answered address for the first
// tenant alone.
func TestTenantTeachesNothingToOthers(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	hostile, server, victim := n.addTo(t, "hostile", "client"), n.addTo(t, "hostile", "dns"), n.addTo(t, "bank", "client")
	s := n.nameServer(t)
	s.listen(t, server, netip.AddrPortFrom(server.IPv4, 53))
	const names = `
  - toFQDNs: [{matchPattern: "*.service.example"}]
    toPorts: [{ports: [{protocol: TCP, port: "7003"}]}]
`
	enforce(t, n.policies(t), `
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client, namespace: hostile}
spec:
  endpointSelector: {matchLabels: {app: client}}
  egress:
  - toEndpoints: [{matchLabels: {app: dns}}]
    toPorts: [{ports: [{protocol: UDP, port: "53"}], rules: {dns: [{matchPattern: "*"}]}}]`+names+`
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client, namespace: bank}
spec:
  endpointSelector: {matchLabels: {app: client}}
  egress:
  - toCIDR: [203.0.113.2/32]
    toPorts: [{ports: [{protocol: UDP, port: "53"}], rules: {dns: [{matchPattern: "**.example"}]}}]`+names)
	taught := resolve(t, hostile, netip.AddrPortFrom(server.IPv4, 53), "api.service.example.")
	wantOpen(t, hostile, taught)
	wantClosed(t, victim, taught)
	own := resolve(t, victim, netip.AddrPortFrom(s.world.IPv4, 53), "api.service.example.")
	wantOpen(t, victim, own)
	wantClosed(t, victim, taught)
	wantClosed(t, hostile, own)
}

// TestPodTeachesOnlyNamesOfItsRules: a pod may ask for every name, and its policies select none. Its lookups open
// nothing for a pod of its namespace whose policies select the name.
func TestPodTeachesOnlyNamesOfItsRules(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "asker")
	client, asker := pods[0], pods[1]
	s := n.nameServer(t)
	enforce(t, n.policies(t), namesPolicy+`
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: asker}
spec:
  endpointSelector: {matchLabels: {app: asker}}
  egress:
  - toCIDR: [203.0.113.2/32]
    toPorts: [{ports: [{protocol: UDP, port: "53"}], rules: {dns: [{matchPattern: "*"}]}}]
  - toEntities: [world]
    toPorts: [{ports: [{protocol: TCP, port: "7003"}]}]
`)
	server := netip.AddrPortFrom(s.world.IPv4, 53)
	taught := resolve(t, asker, server, "api.service.example.")
	wantOpen(t, asker, taught)
	wantClosed(t, client, taught)
	wantOpen(t, client, resolve(t, client, server, "api.service.example."))
}

// TestImplicitDNSRuleTeaches: with dns.implicit, sluice-dns learns the addresses for toFQDNs if a plain rule allows
// port 53. No DNS rule is needed.
func TestImplicitDNSRuleTeaches(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(o *devnode.Options) { o.Args = map[string][]string{devnode.Policy: {"--dns-implicit"}} })
	client := n.addPods(t, "client")[0]
	s := n.nameServer(t)
	enforce(t, n.policies(t), `
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client}
spec:
  endpointSelector: {matchLabels: {app: client}}
  egress:
  - toCIDR: [203.0.113.2/32, "2001:db8:ffff::2/128"]
    toPorts: [{ports: [{port: "53"}]}]
  - toFQDNs: [{matchPattern: "*.service.example"}]
    toPorts: [{ports: [{protocol: TCP, port: "7003"}]}]
`)
	for _, address := range s.world.Addresses() {
		server := netip.AddrPortFrom(address, 53)
		wantOpen(t, client, resolve(t, client, server, "api.service.example."))
		wantClosed(t, client, resolve(t, client, server, "other.example."))
	}
	x, err := n.policies(t).Explain(t.Context(), &policyv1.ExplainRequest{
		From: &policyv1.Peer{Identity: n.identityOf(t, client)}, To: &policyv1.Peer{Address: s.world.IPv4.String()},
		Protocol: 17, Port: 53, DnsName: "api.service.example",
	})
	if err != nil || x.GetDns().GetOutcome() != policyv1.QueryOutcome_QUERY_OUTCOME_ALLOWED ||
		len(x.GetDns().GetAddresses()) != 2 || !slices.Equal(x.GetDns().GetAddresses()[0].GetPorts(), []string{"TCP/7003"}) {
		t.Errorf("explained: %v, %v", x, err)
	}
}

// TestDNSMessagesAreObserved: in the events of the datapath and in the flows of Hubble.
func TestDNSMessagesAreObserved(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(o *devnode.Options) { o.Hubble = true })
	client := n.addPods(t, "client")[0]
	s := n.nameServer(t)
	enforce(t, n.policies(t), streamPolicy)
	events := n.observe(t, &datapathv1.ObserveRequest{Types: []datapathv1.FlowType{datapathv1.FlowType_FLOW_TYPE_DNS}})
	server := netip.AddrPortFrom(s.world.IPv4, 53)
	s.listenTCP(t, s.world, server)
	r := newResolver(t, client, server)
	for name, code := range map[string]dnsmessage.RCode{
		"api.service.example.": 0, "blocked.test.": dnsmessage.RCodeRefused,
	} {
		if got, _, err := r.ask(name, dnsmessage.TypeA, 3); err != nil || got != code {
			t.Fatalf("%s: %v, %v", name, got, err)
		}
	}
	if _, _, err := askByTCP(dialDNS(t, client, server), "stream.service.example.", dnsmessage.TypeA); err != nil {
		t.Fatal(err)
	}
	for what, match := range map[string]func(f *datapathv1.Flow) bool{
		"the query over TCP": func(f *datapathv1.Flow) bool {
			return f.GetDns().GetName() == "stream.service.example." && !f.GetReply() &&
				f.GetProtocol() == netv1.Protocol_PROTOCOL_TCP
		},
		"its answer over TCP": func(f *datapathv1.Flow) bool {
			return f.GetDns().GetName() == "stream.service.example." && f.GetReply() &&
				f.GetProtocol() == netv1.Protocol_PROTOCOL_TCP
		},
		"the allowed query": func(f *datapathv1.Flow) bool {
			return f.GetDns().GetName() == "api.service.example." && !f.GetReply() &&
				f.GetProtocol() == netv1.Protocol_PROTOCOL_UDP &&
				f.GetVerdict() == datapathv1.Verdict_VERDICT_FORWARDED && f.GetDestination().GetPort() == 53 &&
				f.GetSource().GetPod().GetName() == client.Name && f.GetDestination().GetIdentity() != 0
		},
		"its answer": func(f *datapathv1.Flow) bool {
			return f.GetDns().GetName() == "api.service.example." && f.GetReply() && len(f.GetDns().GetAddresses()) == 1 &&
				f.GetDestination().GetPod().GetName() == client.Name && f.GetDns().GetTtlSeconds() == 5
		},
		"the refused query": func(f *datapathv1.Flow) bool {
			return f.GetDns().GetName() == "blocked.test." && f.GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED &&
				f.GetDns().GetResponseCode() == uint32(dnsmessage.RCodeRefused)
		},
	} {
		events.waitFrom(t, 0, what, match)
	}
	servicetest.EventuallyNil(t, "Hubble has the messages", func() error {
		text, err := n.hubbleJSON(t, "GetFlows", `{"whitelist": [{"dns_query": ["^api[.]service"], "protocol": ["dns"]}]}`)
		if err != nil {
			return err
		}
		out := string(text)
		for _, want := range []string{
			`"observationSource": "sluice-dns"`, `"type": "REQUEST"`, `"type": "RESPONSE"`, `"query": "api.service.example."`,
		} {
			if !strings.Contains(out, want) {
				return fmt.Errorf("%s is missing in %s", want, out)
			}
		}
		text, err = n.hubbleJSON(t, "GetFlows", `{"whitelist": [{"dns_query": ["^stream[.]"], "protocol": ["tcp"]}]}`)
		if err != nil || !strings.Contains(string(text), `"TCP": {`) {
			return fmt.Errorf("flows over TCP: %s, %w", text, err)
		}
		if strings.Contains(out, "blocked.test") {
			return fmt.Errorf("the filter passes %s", out)
		}
		return nil
	})
}

// TestNamesOfMessagesAreRedacted: with the setting events: redacted, sluice-dns reports no names to observers.
func TestNamesOfMessagesAreRedacted(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(o *devnode.Options) { o.Args = map[string][]string{devnode.DNS: {"--events=redacted"}} })
	client := n.addPods(t, "client")[0]
	s := n.nameServer(t)
	enforce(t, n.policies(t), namesPolicy)
	events := n.observe(t, &datapathv1.ObserveRequest{Types: []datapathv1.FlowType{datapathv1.FlowType_FLOW_TYPE_DNS}})
	resolve(t, client, netip.AddrPortFrom(s.world.IPv4, 53), "api.service.example.")
	events.waitFrom(t, 0, "the answer", func(f *datapathv1.Flow) bool { return f.GetReply() })
	for _, f := range events.since(0) {
		text, err := json.Marshal(f)
		if err != nil {
			t.Fatal(err)
		}
		if m := f.GetDns(); !m.GetRedacted() || strings.Contains(string(text), "service.example") ||
			len(m.GetAddresses()) > 0 {
			t.Errorf("an event of a message has %s", text)
		}
	}
}

// TestIPv6OnlyPodsResolveNames: on a node without IPv4.
func TestIPv6OnlyPodsResolveNames(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(o *devnode.Options) { o.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("fd00:244:77::/64")} })
	client := n.addPods(t, "client")[0]
	if client.IPv4.IsValid() {
		t.Fatalf("the pod has the address %s", client.IPv4)
	}
	s := n.nameServer(t)
	enforce(t, n.policies(t), namesPolicy)
	server := netip.AddrPortFrom(s.world.IPv6, 53)
	for i := range 5 {
		wantOpen(t, client, resolve(t, client, server, fmt.Sprintf("n%d.service.example.", i)))
	}
	code, _, err := newResolver(t, client, server).ask("blocked.test.", dnsmessage.TypeAAAA, 3)
	if err != nil || code != dnsmessage.RCodeRefused {
		t.Errorf("blocked.test: %v, %v", code, err)
	}
}

// TestSeveralServersTeach: a resolver queries its servers one after the other, because the first does not answer, and
// each of the others teaches. The answer of a server that the resolver did not query is dropped.
func TestSeveralServersTeach(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "dns", "dns", "dns")
	client, silent, servers := pods[0], pods[1], pods[2:]
	s := n.nameServer(t)
	for _, p := range servers {
		s.listen(t, p, netip.AddrPortFrom(p.IPv4, 53))
	}
	enforce(t, n.policies(t), `
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client}
spec:
  endpointSelector: {matchLabels: {app: client}}
  egress:
  - toEndpoints: [{matchLabels: {app: dns}}]
    toPorts: [{ports: [{protocol: UDP, port: "53"}], rules: {dns: [{matchPattern: "*.service.example"}]}}]
  - toFQDNs: [{matchPattern: "*.service.example"}]
    toPorts: [{ports: [{protocol: TCP, port: "7003"}]}]
`)
	if _, _, err := newResolver(t, client, netip.AddrPortFrom(silent.IPv4, 53)).
		ask("api.service.example.", dnsmessage.TypeA, 1); err == nil {
		t.Error("a server that does not exist has answered")
	}
	for _, p := range servers {
		wantOpen(t, client, resolve(t, client, netip.AddrPortFrom(p.IPv4, 53), "api.service.example."))
	}
}

// TestStubInAPodTeaches: a stub resolver such as systemd-resolved runs in the pod and listens at 127.0.0.53. It sends
// each query to its server from a new port. Addresses are learned from the answers.
func TestStubInAPodTeaches(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	client := n.addPods(t, "client")[0]
	s := n.nameServer(t)
	enforce(t, n.policies(t), namesPolicy)
	stub := netip.MustParseAddrPort("127.0.0.53:53")
	forward(t, client, stub, netip.AddrPortFrom(s.world.IPv4, 53))
	r := newResolver(t, client, stub)
	for i := range 10 {
		name := fmt.Sprintf("n%d.service.example.", i)
		code, addresses, err := r.ask(name, dnsmessage.TypeA, 3)
		if err != nil || code != dnsmessage.RCodeSuccess || len(addresses) != 1 {
			t.Fatalf("%s: %v, %v, %v", name, code, addresses, err)
		}
		wantOpen(t, client, addresses[0])
	}
	if code, _, err := r.ask("blocked.test.", dnsmessage.TypeA, 3); err != nil || code != dnsmessage.RCodeRefused {
		t.Errorf("blocked.test: %v, %v", code, err)
	}
}

// forward passes queries to an address of a pod on to a server, each from another port, and with EDNS.
func forward(t *testing.T, in pod.Pod, at, to netip.AddrPort) {
	t.Helper()
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	socket, err := in.ListenPacket(at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.Close() })
	wg.Go(func() {
		buf := make([]byte, 2048)
		for {
			size, client, err := socket.ReadFromUDPAddrPort(buf)
			if err != nil {
				return // the socket was closed
			}
			if answer, err := askOnce(in, to, buf[:size]); err == nil {
				_, _ = socket.WriteToUDPAddrPort(answer, client)
			}
		}
	})
}

// askOnce asks a server as a stub resolver does.
func askOnce(from pod.Pod, server netip.AddrPort, message []byte) ([]byte, error) {
	var m dnsmessage.Message
	if err := m.Unpack(message); err != nil {
		return nil, err
	}
	var h dnsmessage.ResourceHeader
	if err := h.SetEDNS0(1232, dnsmessage.RCodeSuccess, true); err != nil {
		return nil, err
	}
	m.Additionals = []dnsmessage.Resource{{Header: h, Body: &dnsmessage.OPTResource{}}}
	query, err := m.Pack()
	if err != nil {
		return nil, err
	}
	var c *net.UDPConn
	if c, err = from.DialUDP(server); err != nil {
		return nil, err
	}
	defer c.Close()
	buf := make([]byte, 2048)
	for range 3 {
		if _, err = c.Write(query); err != nil {
			return nil, err
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Second))
		var size int
		if size, err = c.Read(buf); err == nil {
			return buf[:size], nil
		}
	}
	return nil, err
}

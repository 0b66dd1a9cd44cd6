// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// Ports of the flood: two that policies allow alternately, one that is always allowed and one that never is.
const (
	evenPort   = 7001
	oddPort    = 7002
	openPort   = 7003
	closedPort = 7004
)

func portAfter(flip int) int {
	if flip%2 == 0 {
		return evenPort
	}
	return oddPort
}

// TestKernelVerdictsWhilePoliciesFlipAreOldOrNew: the policies of both sides change at least a thousand times under a
// flood, and more often if the rate limit passes too few events. Every packet is evaluated by the revision before or
// after a change: no packet passes that both revisions deny, none is dropped that both allow, and every reported
// verdict agrees with its revision.
func TestKernelVerdictsWhilePoliciesFlipAreOldOrNew(t *testing.T) {
	const flips, atLeast, atMost = 1000, 500, 100_000
	n := newNode(t)
	policies := n.policies(t)
	pods := n.addPods(t, "web", "client")
	web, client := pods[0], pods[1]
	revisions := []uint64{enforce(t, policies, webAndClient(portAfter(0), openPort))}
	flows := n.observe(t, &datapathv1.ObserveRequest{
		Protocols: []netv1.Protocol{17}, Ports: []uint32{evenPort, oddPort, openPort, closedPort},
		Types: []datapathv1.FlowType{datapathv1.FlowType_FLOW_TYPE_DROP, datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT},
	})

	// The latest flip that is known to be enforced, and the latest one that has begun.
	var enforced, begun atomic.Int64
	flood := newFlood(t, client, web, &enforced, &begun)
	flip := 1
	for ; flip <= flips || flip <= atMost && evaluatedSides(flows) < atLeast; flip++ {
		begun.Store(int64(flip))
		revisions = append(revisions, enforce(t, policies, webAndClient(portAfter(flip), openPort)))
		enforced.Store(int64(flip))
		if t.Failed() {
			break
		}
	}
	sent, received := flood.end(t)
	t.Logf("%d flips; sent %v, received %v by port", flip-1, sent, received)
	if sent[openPort] != received[openPort] {
		t.Errorf("%d of %d datagrams arrived at the port that both revisions always allowed", received[openPort],
			sent[openPort])
	}
	if received[closedPort] > 0 {
		t.Errorf("%d datagrams arrived at the port that no revision allowed", received[closedPort])
	}
	if received[evenPort] == 0 || received[oddPort] == 0 {
		t.Errorf("nothing arrived at a port that was open half of the time: %v", received)
	}

	// Every verdict agrees with its revision.
	evaluated := 0
	for _, f := range flows.since(0) {
		for name, side := range map[string]*datapathv1.SideVerdict{"egress": f.GetEgress(), "ingress": f.GetIngress()} {
			if side.GetRevision() == 0 {
				continue // not evaluated, or by an older generation of the table
			}
			flip, ok := slices.BinarySearch(revisions, side.GetRevision())
			if !ok {
				t.Fatalf("%s evaluated by revision %d, which no flip made", name, side.GetRevision())
			}
			allowed := int(f.GetDestination().GetPort()) == openPort || int(f.GetDestination().GetPort()) == portAfter(flip)
			if passed := side.GetVerdict() == datapathv1.Verdict_VERDICT_FORWARDED; passed != allowed {
				t.Fatalf("%s to port %d: %v by revision %d (flip %d), which allows port %d", name, f.GetDestination().GetPort(),
					side.GetVerdict(), side.GetRevision(), flip, portAfter(flip))
			}
			evaluated++
		}
	}
	if evaluated < atLeast {
		t.Errorf("%d verdicts of sides were reported during %d flips", evaluated, flip-1)
	}
}

// evaluatedSides returns the number of verdicts with the revision of a policy table.
func evaluatedSides(flows *flowLog) (n int) {
	for _, f := range flows.since(0) {
		for _, side := range []*datapathv1.SideVerdict{f.GetEgress(), f.GetIngress()} {
			if side.GetRevision() != 0 {
				n++
			}
		}
	}
	return n
}

// flood sends numbered datagrams from one pod to another, over both families and to each of the four ports in turn.
type flood struct {
	stop      context.CancelFunc
	sender    sync.WaitGroup
	receivers sync.WaitGroup
	sent      map[int]*atomic.Uint64
	received  map[int]*atomic.Uint64
	sockets   []*net.UDPConn
	mu        sync.Mutex
	errs      []error
}

// window is the maximum number of datagrams in flight to the allowed port, so that no socket buffer overflows.
const window = 32

func newFlood(t *testing.T, from, to pod.Pod, enforced, begun *atomic.Int64) *flood {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	f := &flood{stop: stop, sent: make(map[int]*atomic.Uint64), received: make(map[int]*atomic.Uint64)}
	t.Cleanup(f.close)
	ports := []int{evenPort, oddPort, openPort, closedPort}
	listen := func(p pod.Pod, port int) *net.UDPConn {
		socket, err := p.ListenPacket(netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(port)))
		if err != nil {
			t.Fatal(err)
		}
		f.sockets = append(f.sockets, socket)
		return socket
	}
	for _, port := range ports {
		f.sent[port], f.received[port] = new(atomic.Uint64), new(atomic.Uint64)
	}
	for _, port := range ports {
		socket := listen(to, port)
		f.receivers.Go(func() { f.receive(socket, port, begun) })
	}
	out := listen(from, 0)
	f.sender.Go(func() {
		stamp := make([]byte, 8)
		for i := 0; ctx.Err() == nil; i++ {
			address := to.Addresses()[i/len(ports)%2]
			port := ports[i%len(ports)]
			if port == openPort && f.sent[port].Load()-f.received[port].Load() >= window {
				continue
			}
			binary.BigEndian.PutUint64(stamp, uint64(enforced.Load()))
			if _, err := out.WriteToUDPAddrPort(stamp, netip.AddrPortFrom(address, uint16(port))); err != nil {
				f.fail(fmt.Errorf("send: %w", err))
				return
			}
			f.sent[port].Add(1)
		}
	})
	return f
}

// receive checks that a datagram is allowed by some revision between the one that was enforced when it was sent and
// the latest one.
func (f *flood) receive(socket *net.UDPConn, port int, begun *atomic.Int64) {
	stamp := make([]byte, 8)
	for {
		if _, err := socket.Read(stamp); err != nil {
			return // closed
		}
		f.received[port].Add(1)
		first, last := int64(binary.BigEndian.Uint64(stamp)), begun.Load()
		if port == openPort || last > first {
			continue
		}
		if portAfter(int(first)) != port {
			f.fail(fmt.Errorf("a datagram came to port %d that was sent when flip %d was enforced, which allows port %d", port,
				first, portAfter(int(first))))
		}
	}
}

func (f *flood) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.errs) < 10 {
		f.errs = append(f.errs, err)
	}
}

func (f *flood) close() {
	f.stop()
	f.sender.Wait()
	for _, s := range f.sockets {
		_ = s.Close()
	}
	f.receivers.Wait()
}

// end stops sending, waits for the datagrams in flight and returns the counts.
func (f *flood) end(t *testing.T) (sent, received map[int]uint64) {
	t.Helper()
	f.stop()
	f.sender.Wait()
	servicetest.EventuallyNil(t, "all datagrams to the open port have arrived", func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if len(f.errs) > 0 {
			return nil
		}
		if got, want := f.received[openPort].Load(), f.sent[openPort].Load(); got != want {
			return fmt.Errorf("%d of %d", got, want)
		}
		return nil
	})
	f.close()
	for _, err := range f.errs {
		t.Error(err)
	}
	sent, received = make(map[int]uint64), make(map[int]uint64)
	for port := range f.sent {
		sent[port], received[port] = f.sent[port].Load(), f.received[port].Load()
	}
	return sent, received
}

// TestKernelNewPodIsEvaluatedFromItsFirstPacket: before the device of a new pod exists, the new pod and another pod
// begin to send to each other. No denied packet passes in either direction.
func TestKernelNewPodIsEvaluatedFromItsFirstPacket(t *testing.T) {
	const rounds = 10
	n := newNode(t)
	policies := n.policies(t)
	client := n.addPods(t, "client")[0]
	enforce(t, policies, `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: late}
spec:
  podSelector: {matchLabels: {app: late}}
  policyTypes: [Ingress, Egress]
  ingress: [{from: [{podSelector: {matchLabels: {app: client}}}], ports: [{protocol: UDP, port: 7003}]}]
  egress: [{to: [{podSelector: {matchLabels: {app: client}}}], ports: [{protocol: UDP, port: 7003}]}]
`)
	for round := range rounds {
		late := newPod(t, "late")
		var addresses []string
		for _, cidr := range n.PodCIDRs() {
			a := cidr.Addr()
			for range 100 + round {
				a = a.Next()
			}
			late = late.WithAddresses(append(late.Addresses(), a))
			addresses = append(addresses, netip.PrefixFrom(a, cidr.Bits()).String())
		}
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		var got [2]map[int]*atomic.Uint64
		var sockets []*net.UDPConn
		for i, way := range []struct{ from, to pod.Pod }{{client, late}, {late, client}} {
			got[i] = make(map[int]*atomic.Uint64)
			for _, port := range []int{openPort, closedPort} {
				count := new(atomic.Uint64)
				got[i][port] = count
				receiver, err := way.to.ListenPacket(netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(port)))
				if err != nil {
					t.Fatal(err)
				}
				sender, err := way.from.ListenPacket(netip.AddrPortFrom(netip.IPv6Unspecified(), 0))
				if err != nil {
					t.Fatal(err)
				}
				sockets = append(sockets, receiver, sender)
				wg.Go(func() {
					buf := make([]byte, 16)
					for {
						if _, err := receiver.Read(buf); err != nil {
							return // closed
						}
						count.Add(1)
					}
				})
				wg.Go(func() {
					for ctx.Err() == nil {
						for _, a := range way.to.Addresses() {
							// Sending fails at once without a route, and is retried.
							_, _ = sender.WriteToUDPAddrPort([]byte("hammer"), netip.AddrPortFrom(a, uint16(port)))
						}
					}
				})
			}
		}
		extra := labels("app", "late")
		extra["runtimeConfig"].(map[string]any)["ips"] = addresses
		n.add(t, late, n.config(t, "1.0.0", extra))
		servicetest.EventuallyNil(t, "the allowed datagrams arrive in both directions", func() error {
			for i := range got {
				if got[i][openPort].Load() == 0 {
					return fmt.Errorf("direction %d: nothing yet", i)
				}
			}
			return nil
		})
		stop()
		for _, s := range sockets {
			_ = s.Close()
		}
		wg.Wait()
		for i, direction := range []string{"into", "out of"} {
			if c := got[i][closedPort].Load(); c > 0 {
				t.Errorf("round %d: %d denied datagrams %s the new pod got through", round, c, direction)
			}
		}
		n.del(t, late)
	}
}

// TestKernelLearnedAddressIsOpenWhenTheAnswerComes: once LearnNames has returned, the next packet to the address
// passes.
func TestKernelLearnedAddressIsOpenWhenTheAnswerComes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	policies := n.policies(t)
	client := n.addPods(t, "client")[0]
	world := n.outside(t)
	serve(t, world, 7003)
	flows := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})
	wantAllowed(t, client, world, 7003)
	enforce(t, policies, `
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client}
spec:
  endpointSelector: {matchLabels: {app: client}}
  egress:
  - toFQDNs: [{matchPattern: "*.service.example"}]
    toPorts: [{ports: [{protocol: UDP, port: "7003"}, {protocol: TCP, port: "7003"}]}]
`)
	n.wantDenied(t, flows, client, world, 7003)
	for _, address := range world.Addresses() {
		ctx, cancel := deadline(t)
		answer, err := policies.LearnNames(ctx, &policyv1.LearnNamesRequest{
			Name: "api.service.example", Addresses: []string{address.String()}, Ttl: durationpb.New(3600e9),
		})
		if err != nil || !answer.GetUsed() {
			t.Fatalf("LearnNames: %v, %v, want the name used", answer, err)
		}
		mark := flows.mark()
		// One datagram, not retransmitted.
		sender, err := client.ListenPacket(netip.AddrPortFrom(netip.IPv6Unspecified(), 0))
		if err != nil {
			t.Fatal(err)
		}
		when, _ := ctx.Deadline()
		_ = sender.SetDeadline(when)
		if _, err := sender.WriteToUDPAddrPort([]byte("first"), netip.AddrPortFrom(address, 7003)); err != nil {
			t.Fatal(err)
		}
		if _, err := sender.Read(make([]byte, 16)); err != nil {
			t.Errorf("the first datagram to %s after the answer: %v; drops: %v", address, err, flows.since(mark))
		}
		_ = sender.Close()
		cancel()
	}
	wantAllowed(t, client, world, 7003)
	// Another address still belongs to no name.
	other := world
	other.IPv4, other.IPv6 = world.IPv4.Next(), world.IPv6.Next()
	n.wantDenied(t, flows, client, other, 7003)
	n.forgetLearnedAddress(t, policies, flows, client, world)
}

// forgetLearnedAddress checks that after ForgetNames the next packet of a connection to a learned address is dropped,
// and a new connection, too.
func (n *testNode) forgetLearnedAddress(
	t *testing.T, policies policyv1.PolicyServiceClient, flows *flowLog, client, world pod.Pod,
) {
	t.Helper()
	var open []*net.UDPConn
	for _, address := range world.Addresses() {
		socket, err := client.DialUDP(netip.AddrPortFrom(address, 7003))
		if err != nil {
			t.Fatal(err)
		}
		defer socket.Close()
		if _, err := socket.Write([]byte("open")); err != nil {
			t.Fatal(err)
		}
		if _, err := socket.Read(make([]byte, 16)); err != nil {
			t.Fatalf("to %s before it is forgotten: %v", address, err)
		}
		open = append(open, socket)
	}
	ctx, cancel := deadline(t)
	defer cancel()
	answer, err := policies.ForgetNames(ctx, &policyv1.ForgetNamesRequest{Pattern: "*.service.example"})
	if err != nil || answer.GetNameCount() != 1 || int(answer.GetAddressCount()) != len(open) {
		t.Fatalf("ForgetNames: %v, %v, want 1 name with %d addresses", answer, err, len(open))
	}
	for i, socket := range open {
		address, mark := world.Addresses()[i], flows.mark()
		if _, err := socket.Write([]byte("more")); err != nil && !errors.Is(err, syscall.EPERM) {
			t.Fatal(err)
		}
		flows.waitFrom(t, mark, "the next datagram to "+address.String()+" is dropped", func(f *datapathv1.Flow) bool {
			return f.GetDestination().GetAddress() == address.String()
		})
	}
	n.wantDenied(t, flows, client, world, 7003)
}

// TestKernelReusedAddressInheritsNothing: a new pod that gets the address of a removed pod inherits none of its
// connections.
func TestKernelReusedAddressInheritsNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, noRest)
	policies := n.policies(t)
	pods := n.addPods(t, "web", "client")
	web, client := pods[0], pods[1]
	serve(t, web, 7003)
	enforce(t, policies, webAndClient(7003))
	flows := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})
	const sourcePort = 4242
	exchangeFrom := func(p pod.Pod, to netip.Addr) error {
		local, _ := sameFamily(p, to)
		socket, err := p.ListenPacket(netip.AddrPortFrom(local, sourcePort))
		if err != nil {
			return err
		}
		defer socket.Close()
		ctx, cancel := deadline(t)
		defer cancel()
		when, _ := ctx.Deadline()
		_ = socket.SetDeadline(when)
		if _, err := socket.WriteToUDPAddrPort([]byte("hello"), netip.AddrPortFrom(to, 7003)); err != nil {
			return err
		}
		_, err = socket.Read(make([]byte, 16))
		return err
	}
	var addresses []string
	for i, a := range web.Addresses() {
		if err := exchangeFrom(client, a); err != nil {
			t.Fatalf("a datagram that is allowed: %v", err)
		}
		local, _ := sameFamily(client, a)
		addresses = append(addresses, netip.PrefixFrom(local, n.PodCIDRs()[i].Bits()).String())
	}
	n.del(t, client)
	// DEL returns before the address is released.
	servicetest.EventuallyNil(t, "the address is free", func() error {
		held, err := n.holdings(t.Context())
		if err != nil {
			return err
		}
		for _, h := range held {
			if strings.HasSuffix(h, " of "+client.Name) {
				return errors.New(h)
			}
		}
		return nil
	})
	heir := newPod(t, "heir")
	extra := labels("app", "stranger")
	extra["runtimeConfig"].(map[string]any)["ips"] = addresses
	heir = n.add(t, heir, n.config(t, "1.0.0", extra))
	if !slices.Equal(heir.Addresses(), client.Addresses()) {
		t.Fatalf("the heir has %v, want %v", heir.Addresses(), client.Addresses())
	}
	for _, a := range web.Addresses() {
		mark := flows.mark()
		local, _ := sameFamily(heir, a)
		socket, err := heir.ListenPacket(netip.AddrPortFrom(local, sourcePort))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := socket.WriteToUDPAddrPort([]byte("hello"), netip.AddrPortFrom(a, 7003)); err != nil {
			t.Error(err)
		}
		flows.waitFrom(t, mark, "the heir's datagram is dropped",
			func(f *datapathv1.Flow) bool { return isFlow(f, local, a, 7003) })
		_ = socket.Close()
	}
}

// prefixPolicy is webAndClient, and lets prefixes of the world connect to a port of the web.
func prefixPolicy(blocks int, ports ...int) string {
	var b strings.Builder
	b.WriteString(webAndClient(ports...))
	b.WriteString(`
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: blocks}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Ingress]
  ingress:
  - ports: [{protocol: TCP, port: 9000}]
    from:
`)
	for i := range blocks {
		fmt.Fprintf(&b, "    - ipBlock: {cidr: 198.51.100.%d/32}\n    - ipBlock: {cidr: \"2001:db8::%x/128\"}\n", i, i)
	}
	return b.String()
}

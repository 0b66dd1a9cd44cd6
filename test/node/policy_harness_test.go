// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

const policyDenied = datapathv1.Reason_REASON_POLICY_DENIED

// policies returns a client of the node's policy service.
func (n *testNode) policies(t *testing.T) policyv1.PolicyServiceClient {
	t.Helper()
	return policyv1.NewPolicyServiceClient(dial(t, n.Node, devnode.Policy))
}

// enforce applies manifests and returns when the kernel enforces them.
func enforce(t testing.TB, policies policyv1.PolicyServiceClient, manifests string) (revision uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	answer, err := policies.UpsertPolicies(ctx, &policyv1.UpsertPoliciesRequest{
		Manifests:        []byte(manifests),
		DefaultNamespace: "test",
	})
	if err != nil {
		t.Fatalf("apply %s: %v", manifests, err)
	}
	awaitRevision(t, policies, answer.GetRevision())
	return answer.GetRevision()
}

// awaitRevision returns when the kernel enforces the revision.
func awaitRevision(t testing.TB, policies policyv1.PolicyServiceClient, revision uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	answer, err := policies.WaitForRevision(ctx, &policyv1.WaitForRevisionRequest{Revision: revision})
	if err != nil {
		t.Fatalf("wait for revision %d: %v", revision, err)
	}
	if gone := answer.GetDisconnected(); len(gone) > 0 {
		t.Fatalf("revision %d: %v are not connected and do not enforce it", revision, gone)
	}
}

// withdraw deletes policies, each as "Kind/name", and returns when the kernel enforces the deletion.
func withdraw(t testing.TB, policies policyv1.PolicyServiceClient, keys ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	request := &policyv1.DeletePoliciesRequest{}
	for _, key := range keys {
		kind, name, _ := strings.Cut(key, "/")
		request.Keys = append(request.Keys, &policyv1.PolicyKey{Kind: kind, Namespace: "test", Name: name})
	}
	answer, err := policies.DeletePolicies(ctx, request)
	if err != nil {
		t.Fatalf("delete %v: %v", keys, err)
	}
	awaitRevision(t, policies, answer.GetRevision())
}

// identityOf returns the identity of a connected pod.
func (n *testNode) identityOf(t testing.TB, p pod.Pod) uint32 {
	t.Helper()
	return n.endpoint(t, p).GetIdentity()
}

func (n *testNode) endpoint(t testing.TB, p pod.Pod) *datapathv1.Endpoint {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	answer, err := n.datapath.GetEndpoint(ctx, &datapathv1.GetEndpointRequest{Owner: owner(p.Name)})
	if err != nil {
		t.Fatalf("endpoint of %s: %v", p.Name, err)
	}
	return answer.GetEndpoint()
}

// serve returns received data on a TCP and a UDP port of a pod, in both families, until the test ends.
func serve(t *testing.T, p pod.Pod, ports ...uint16) {
	t.Helper()
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	for _, port := range ports {
		l, err := p.Listen(netip.AddrPortFrom(netip.IPv6Unspecified(), port))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		wg.Go(func() {
			for {
				c, err := l.AcceptTCP()
				if err != nil {
					return // the listener was closed
				}
				t.Cleanup(func() { _ = c.Close() })
				wg.Go(func() {
					_, _ = io.Copy(c, c)
					_ = c.Close()
				})
			}
		})
		u, err := p.ListenPacket(netip.AddrPortFrom(netip.IPv6Unspecified(), port))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = u.Close() })
		wg.Go(func() {
			buf := make([]byte, 2048)
			for {
				size, sender, err := u.ReadFromUDPAddrPort(buf)
				if err != nil {
					return // the socket was closed
				}
				_, _ = u.WriteToUDPAddrPort(buf[:size], sender)
			}
		})
	}
}

// talk opens a connection, sends a message and requires the same message as the answer.
func talk(ctx context.Context, from pod.Pod, to netip.AddrPort) error {
	c, err := from.Dial(ctx, to)
	if err != nil {
		return err
	}
	defer c.Close()
	return say(ctx, c, "hello")
}

// say sends a message over a connection and requires the same message as the answer.
func say(ctx context.Context, c *net.TCPConn, message string) error {
	if deadline, ok := ctx.Deadline(); ok {
		_ = c.SetDeadline(deadline)
	}
	if _, err := io.WriteString(c, message); err != nil {
		return err
	}
	answer := make([]byte, len(message))
	if _, err := io.ReadFull(c, answer); err != nil {
		return err
	}
	if string(answer) != message {
		return fmt.Errorf("sent %q, got %q back", message, answer)
	}
	return nil
}

// wantAllowed connects to a port of a pod in every family.
func wantAllowed(t *testing.T, from, to pod.Pod, port uint16) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, address := range to.Addresses() {
		if err := talk(ctx, from, netip.AddrPortFrom(address, port)); err != nil {
			t.Errorf("%s to %s port %d: %v, want it allowed", from.Name, to.Name, port, err)
		}
	}
}

// wantDenied tries to connect in every family until the datapath reports the dropped packet, and returns the reports.
// An established connection fails the test.
func (n *testNode) wantDenied(t *testing.T, flows *flowLog, from, to pod.Pod, port uint16) []*datapathv1.Flow {
	t.Helper()
	var all []*datapathv1.Flow
	for _, address := range to.Addresses() {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		mark := flows.mark()
		connected := make(chan error, 1)
		go func() { connected <- talk(ctx, from, netip.AddrPortFrom(address, port)) }()
		source, _ := sameFamily(from, address)
		flow := flows.waitFrom(t, mark, fmt.Sprintf("a packet of %s to %s port %d is dropped", from.Name, address, port),
			func(f *datapathv1.Flow) bool {
				return f.GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED && isFlow(f, source, address, port)
			})
		cancel()
		if err := <-connected; err == nil {
			t.Errorf("%s talked to %s port %d, want it denied", from.Name, address, port)
		}
		if flow != nil {
			all = append(all, flow)
		}
	}
	return all
}

// sameFamily returns the pod's address in the family of another address.
func sameFamily(p pod.Pod, other netip.Addr) (netip.Addr, bool) {
	if other.Is4() {
		return p.IPv4, p.IPv4.IsValid()
	}
	return p.IPv6, p.IPv6.IsValid()
}

func isFlow(f *datapathv1.Flow, source, destination netip.Addr, port uint16) bool {
	from, _ := netip.ParseAddr(f.GetSource().GetAddress())
	to, _ := netip.ParseAddr(f.GetDestination().GetAddress())
	return from == source && to == destination && f.GetDestination().GetPort() == uint32(port)
}

// flowLog collects the events of Observe from its creation on.
type flowLog struct {
	mu    sync.Mutex
	flows []*datapathv1.Flow
	lost  uint64
	err   error
}

// observe collects events until the end of the test.
func (n *testNode) observe(t *testing.T, request *datapathv1.ObserveRequest) *flowLog {
	t.Helper()
	// The server stores events that happen between now and its first response.
	request.Follow, request.Since = true, timestamppb.Now()
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := n.observer.Observe(ctx, request)
	if err != nil {
		cancel()
		t.Fatalf("observe: %v", err)
	}
	log := new(flowLog)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			answer, err := stream.Recv()
			log.mu.Lock()
			switch {
			case err != nil:
				log.err = err
			case answer.GetFlow() != nil:
				log.flows = append(log.flows, answer.GetFlow())
			default:
				log.lost += answer.GetLost().GetCount()
			}
			log.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return log
}

// mark returns a position in the log. Later events are after it.
func (l *flowLog) mark() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.flows)
}

// since returns the events after a mark.
func (l *flowLog) since(mark int) []*datapathv1.Flow {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.flows[mark:])
}

// waitFrom waits for an event after a mark.
func (l *flowLog) waitFrom(t *testing.T, mark int, what string,
	match func(*datapathv1.Flow) bool,
) (found *datapathv1.Flow) {
	t.Helper()
	servicetest.EventuallyNil(t, what, func() error {
		flows := l.since(mark)
		if i := slices.IndexFunc(flows, match); i >= 0 {
			found = flows[i]
			return nil
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		return fmt.Errorf("%d other events, %d lost, stream: %w", len(flows), l.lost, errors.Join(l.err))
	})
	return found
}

func tcpInfo(t testing.TB, c *net.TCPConn) *unix.TCPInfo {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var info *unix.TCPInfo
	if cerr := raw.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	}); cerr != nil {
		t.Fatal(cerr)
	}
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// unacknowledged returns the number of segments of a connection in flight.
func unacknowledged(t testing.TB, c *net.TCPConn) uint32 {
	t.Helper()
	return tcpInfo(t, c).Unacked
}

// connections returns the datapath's counts of tracked connections.
func (n *testNode) connections(t testing.TB) *datapathv1.ConnectionCounts {
	t.Helper()
	return n.datapathStatus(t).GetConnections()
}

func (n *testNode) datapathStatus(t testing.TB) *datapathv1.GetStatusResponse {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	status, err := n.datapath.GetStatus(ctx, &datapathv1.GetStatusRequest{})
	if err != nil {
		t.Fatalf("status of the datapath: %v", err)
	}
	return status
}

// tableMaps are the maps that contain policy tables.
var tableMaps = []string{"sl_table", "sl_class", "sl_rule", "sl_ports", "sl_peer", "sl_cidr4", "sl_cidr6"}

// tableUsage returns the number of policy table entries in each map.
func (n *testNode) tableUsage(t testing.TB) map[string]int64 {
	t.Helper()
	usage := make(map[string]int64)
	for _, m := range n.datapathStatus(t).GetMaps() {
		if slices.Contains(tableMaps, m.GetName()) {
			usage[m.GetName()] = m.GetEntries()
		}
	}
	if len(usage) != len(tableMaps) {
		t.Fatalf("status counts the maps %v, want all of %v", usage, tableMaps)
	}
	return usage
}

// dumpMap returns the contents of a map as text.
func (n *testNode) dumpMap(t testing.TB, name string) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	stream, err := n.datapath.DumpMap(ctx, &datapathv1.DumpMapRequest{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	entries, err := receiveAll(stream)
	if err != nil {
		t.Fatalf("dump %s: %v", name, err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.GetKey()+" = "+e.GetValue())
	}
	slices.Sort(all)
	return all
}

// deadline returns a context that ends after the tests' patience.
func deadline(t testing.TB) (context.Context, context.CancelFunc) {
	return context.WithDeadline(t.Context(), time.Now().Add(patience))
}

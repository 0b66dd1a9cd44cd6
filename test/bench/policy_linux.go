// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// podNamespace is the Kubernetes namespace of the benchmark's pods and policies.
const podNamespace = "bench"

// policies changes the policies of the node.
type policies struct{ client policyv1.PolicyServiceClient }

// change is how long a change of policies took.
type change struct {
	answered time.Duration // until it was compiled and on disk
	enforced time.Duration // until the kernel enforced it for every endpoint
}

// upsert applies manifests and waits until the kernel enforces them.
func (p policies) upsert(ctx context.Context, manifests string) (change, error) {
	start := time.Now()
	answer, err := p.client.UpsertPolicies(ctx, &policyv1.UpsertPoliciesRequest{Manifests: []byte(manifests), DefaultNamespace: podNamespace})
	if err != nil {
		return change{}, fmt.Errorf("apply policies: %w", err)
	}
	c := change{answered: time.Since(start)}
	waited, err := p.client.WaitForRevision(ctx, &policyv1.WaitForRevisionRequest{Revision: answer.GetRevision()})
	if err != nil {
		return change{}, fmt.Errorf("wait for revision %d: %w", answer.GetRevision(), err)
	}
	if gone := waited.GetDisconnected(); len(gone) > 0 {
		return change{}, fmt.Errorf("revision %d is enforced, but not by %v, which left", answer.GetRevision(), gone)
	}
	c.enforced = time.Since(start)
	return c, nil
}

// remove deletes NetworkPolicies.
func (p policies) remove(ctx context.Context, names ...string) error {
	request := &policyv1.DeletePoliciesRequest{}
	for _, name := range names {
		request.Keys = append(request.Keys, &policyv1.PolicyKey{Kind: "NetworkPolicy", Namespace: podNamespace, Name: name})
	}
	_, err := p.client.DeletePolicies(ctx, request)
	return err
}

// serverPolicy lets the peers reach pods with part=changes on one UDP port.
func serverPolicy(port int, peers string) string {
	return fmt.Sprintf(`
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: bench-changes, namespace: %s}
spec:
  podSelector: {matchLabels: {part: changes}}
  policyTypes: [Ingress]
  ingress:
  - from: [{podSelector: {matchLabels: {role: probe}}}%s]
    ports: [{protocol: UDP, port: %d}]
`, podNamespace, peers, port)
}

// changes measures from the call that changes a policy to its enforcement, and
// proves by packets that it was enforced when the service said so.
func (b *bench) changes(ctx context.Context) (err error) {
	const few, peers, blocks = 1, 10_000, 5_000
	many := b.sizes.endpoints
	names := []string{"bench-changes"}
	defer func() { err = errors.Join(err, b.policies.remove(context.WithoutCancel(ctx), names...)) }()

	probe, err := b.labelled("sluice", "role", "probe")
	if err != nil {
		return err
	}
	from, err := probe.connect(ctx, b.prefix+"-probe")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, probe.disconnect(context.WithoutCancel(ctx), from)) }()

	var pods []pod.Pod
	var disconnect []func() error
	defer func() {
		for _, d := range disconnect {
			err = errors.Join(err, d())
		}
	}()
	connectUpTo := func(n int) error {
		for i := len(pods); i < n; i++ {
			// Each is a subject of its own.
			to, err := b.labelled("sluice", "part", "changes", "subject", fmt.Sprint(i))
			if err != nil {
				return err
			}
			p, err := to.connect(ctx, fmt.Sprintf("%s-c-%d", b.prefix, i))
			if err != nil {
				return err
			}
			disconnect = append(disconnect, func() error { return to.disconnect(context.WithoutCancel(ctx), p) })
			pods = append(pods, p)
		}
		return nil
	}

	fmt.Fprintf(b.out, "From the call of UpsertPolicies until WaitForRevision answers: compiled, on stable storage, and enforced by the kernel for every endpoint, each of which is a subject of its own. %d changes each; after each of them two packets prove the old port closed and the new one open.\n\n", b.sizes.changes)
	fmt.Fprintln(b.out, "| what changes | endpoints | stored p50 | enforced p50 | p99 | worst |")
	fmt.Fprintln(b.out, "|---|---|---|---|---|---|")
	measure := func(what string, manifest func(turn int) string) (samples, error) {
		var stored, enforced samples
		if _, err := b.policies.upsert(ctx, manifest(0)); err != nil {
			return nil, err
		}
		for turn := 1; turn <= b.sizes.changes; turn++ {
			c, err := b.policies.upsert(ctx, manifest(turn))
			if err != nil {
				return nil, fmt.Errorf("%s: %w", what, err)
			}
			stored, enforced = append(stored, c.answered), append(enforced, c.enforced)
			if err := onlyOnePortOpen(from, pods[turn%len(pods)], portOf(turn-1), portOf(turn)); err != nil {
				return nil, fmt.Errorf("%s, change %d: %w", what, turn, err)
			}
		}
		fmt.Fprintf(b.out, "| %s | %d | %s | %s | %s | %s |\n", what, len(pods), milliseconds(stored.quantile(0.5)),
			milliseconds(enforced.quantile(0.5)), milliseconds(enforced.quantile(0.99)), milliseconds(enforced.worst()))
		return enforced, nil
	}
	port := func(turn int) string { return serverPolicy(portOf(turn), "") }

	if err := connectUpTo(few); err != nil {
		return err
	}
	one, err := measure("a port", port)
	if err != nil {
		return err
	}
	if err := connectUpTo(many); err != nil {
		return err
	}
	hundred, err := measure("a port", port)
	if err != nil {
		return err
	}

	release, err := b.makeIdentities(ctx, peers)
	defer func() { err = errors.Join(err, release()) }()
	if err != nil {
		return err
	}
	selectAll := `, {podSelector: {matchLabels: {crowd: "yes"}}}`
	crowd, err := measure(fmt.Sprintf("a port, with %d identities allowed", peers), func(turn int) string {
		return serverPolicy(portOf(turn), selectAll)
	})
	if err != nil {
		return err
	}
	if _, err := measure(fmt.Sprintf("a port, and which half of %d identities", peers), func(turn int) string {
		return serverPolicy(portOf(turn), fmt.Sprintf(`, {podSelector: {matchLabels: {half: "%d"}}}`, turn%2))
	}); err != nil {
		return err
	}
	list := blockList(blocks)
	cidrs, err := measure(fmt.Sprintf("a port, with %d blocks allowed", blocks), func(turn int) string {
		return serverPolicy(portOf(turn), list)
	})
	if err != nil {
		return err
	}
	if _, err := measure(fmt.Sprintf("a port, and one of %d blocks", blocks), func(turn int) string {
		return serverPolicy(portOf(turn), list+fmt.Sprintf(`, {ipBlock: {cidr: 100.64.%d.0/24}}`, turn%2))
	}); err != nil {
		return err
	}
	fmt.Fprintln(b.out)
	b.wantTime("policy change enforced, p50, 1 endpoint", 2*time.Millisecond, one.quantile(0.5))
	b.wantTime(fmt.Sprintf("policy change enforced, p50, %d endpoints", many), 5*time.Millisecond, hundred.quantile(0.5))
	b.wantTime(fmt.Sprintf("policy change enforced, p50, %d endpoints, %d identities", many, peers), 5*time.Millisecond, crowd.quantile(0.5))
	b.wantTime(fmt.Sprintf("policy change enforced, p50, %d endpoints, %d blocks", many, blocks), 5*time.Millisecond, cidrs.quantile(0.5))
	return nil
}

// portOf is the open port after a change.
func portOf(turn int) int { return 7000 + turn%2 }

// blockList is n disjoint blocks of addresses as peers of a NetworkPolicy.
func blockList(n int) string {
	var s strings.Builder
	for i := range n {
		fmt.Fprintf(&s, ", {ipBlock: {cidr: 20.%d.%d.0/25}}", i>>8, i&0xff)
	}
	return s.String()
}

// makeIdentities makes the label sets of n pods of other nodes: crowd=yes, and
// half=0 or half=1. The function that it returns releases them.
func (b *bench) makeIdentities(ctx context.Context, n int) (release func() error, err error) {
	reference := func(i int) string { return fmt.Sprintf("%s-%d", b.prefix, i) }
	each := func(ctx context.Context, call func(ctx context.Context, i int) error) error {
		group, ctx := errgroup.WithContext(ctx)
		group.SetLimit(16)
		for i := range n {
			group.Go(func() error { return call(ctx, i) })
		}
		return group.Wait()
	}
	release = func() error {
		return each(context.WithoutCancel(ctx), func(ctx context.Context, i int) error {
			_, err := b.identity.ReleaseIdentity(ctx, &identityv1.ReleaseIdentityRequest{
				Holder: &identityv1.ReleaseIdentityRequest_Reference{Reference: reference(i)},
			})
			return err
		})
	}
	err = each(ctx, func(ctx context.Context, i int) error {
		var labels []*workloadv1.Label
		for _, l := range [][2]string{
			{"io.kubernetes.pod.namespace", podNamespace}, {"crowd", "yes"}, {"half", fmt.Sprint(i % 2)}, {"number", fmt.Sprint(i)},
		} {
			labels = append(labels, &workloadv1.Label{Source: "k8s", Key: l[0], Value: l[1]})
		}
		_, err := b.identity.AllocateIdentity(ctx, &identityv1.AllocateIdentityRequest{Labels: labels, Reference: reference(i)})
		return err
	})
	if err != nil {
		return release, fmt.Errorf("make %d identities: %w", n, err)
	}
	// Until the policy service knows them.
	for {
		status, err := b.policies.client.GetStatus(ctx, &policyv1.GetStatusRequest{})
		if err != nil {
			return release, err
		}
		if int(status.GetIdentities()) >= n {
			return release, nil
		}
		select {
		case <-ctx.Done():
			return release, ctx.Err()
		case <-time.After(10 * time.Millisecond): // between two looks
		}
	}
}

// onlyOnePortOpen sends a datagram to the closed port, then one to the open
// port, from new sockets. Both take the same way, so if the second arrived and
// the first did not, the first was dropped.
func onlyOnePortOpen(from, to pod.Pod, closed, open int) error {
	sender, err := datagramSocketIn(from)
	if err != nil {
		return err
	}
	defer unix.Close(sender)
	var receivers []unix.PollFd
	defer func() {
		for _, r := range receivers {
			unix.Close(int(r.Fd))
		}
	}()
	for _, port := range []int{closed, open} {
		fd := -1
		err := pod.In(to.Netns, func() (err error) {
			if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
				return err
			}
			return unix.Bind(fd, &unix.SockaddrInet4{Port: port, Addr: to.IPv4.As4()})
		})
		receivers = append(receivers, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
		if err != nil {
			return fmt.Errorf("listen at port %d: %w", port, err)
		}
	}
	for _, port := range []int{closed, open} {
		if err := unix.Sendto(sender, []byte{1}, 0, sockaddr(netip.AddrPortFrom(to.IPv4, uint16(port)))); err != nil {
			return fmt.Errorf("send to port %d: %w", port, err)
		}
	}
	const patience = 5000 // milliseconds
	switch n, err := poll(receivers[1:], patience); {
	case err != nil:
		return fmt.Errorf("wait for a packet to port %d: %w", open, err)
	case n == 0:
		return fmt.Errorf("no packet came to port %d, although its opening was said to be enforced", open)
	}
	switch n, err := poll(receivers[:1], 0); {
	case err != nil:
		return fmt.Errorf("look for a packet to port %d: %w", closed, err)
	case n != 0:
		return fmt.Errorf("a packet came to port %d, although its closing was said to be enforced", closed)
	}
	return nil
}

// poll is poll(2) that signals do not end.
func poll(fds []unix.PollFd, milliseconds int) (int, error) {
	for {
		n, err := unix.Poll(fds, milliseconds)
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// podNamespace is the Kubernetes namespace of the benchmark's pods and policies.
const podNamespace = "bench"

// policies changes the policies of the node.
type policies struct{ client policyv1.PolicyServiceClient }

// change is the duration of a policy change.
type change struct {
	answered time.Duration // until compiled and on stable storage
	enforced time.Duration // until the kernel enforced it for every endpoint
}

// upsert applies manifests and waits until the kernel enforces them.
func (p policies) upsert(ctx context.Context, manifests string) (change, error) {
	start := time.Now()
	answer, err := p.client.UpsertPolicies(ctx, &policyv1.UpsertPoliciesRequest{
		Manifests:        []byte(manifests),
		DefaultNamespace: podNamespace,
	})
	if err != nil {
		return change{}, fmt.Errorf("apply policies: %w", err)
	}
	c := change{answered: time.Since(start)}
	waited, err := p.client.WaitForRevision(ctx, &policyv1.WaitForRevisionRequest{Revision: answer.GetRevision()})
	if err != nil {
		return change{}, fmt.Errorf("wait for revision %d: %w", answer.GetRevision(), err)
	}
	if gone := waited.GetDisconnected(); len(gone) > 0 {
		return change{}, fmt.Errorf("disconnected subscribers do not enforce revision %d: %v", answer.GetRevision(), gone)
	}
	c.enforced = time.Since(start)
	return c, nil
}

// remove deletes NetworkPolicies.
func (p policies) remove(ctx context.Context, names ...string) error {
	_, err := p.delete(ctx, names)
	return err
}

// removeAndWait deletes NetworkPolicies and waits until the kernel enforces the deletion.
func (p policies) removeAndWait(ctx context.Context, names ...string) error {
	revision, err := p.delete(ctx, names)
	if err == nil {
		_, err = p.client.WaitForRevision(ctx, &policyv1.WaitForRevisionRequest{Revision: revision})
	}
	return err
}

func (p policies) delete(ctx context.Context, names []string) (revision uint64, err error) {
	request := &policyv1.DeletePoliciesRequest{}
	for _, name := range names {
		request.Keys = append(request.Keys, &policyv1.PolicyKey{Kind: "NetworkPolicy", Namespace: podNamespace, Name: name})
	}
	answer, err := p.client.DeletePolicies(ctx, request)
	if err != nil {
		return 0, fmt.Errorf("delete policies %v: %w", names, err)
	}
	return answer.GetRevision(), nil
}

// serverPolicy returns a policy that lets the peers reach pods with part=changes on one UDP port.
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

// situation is the state of the cluster in which a policy changes.
type situation struct {
	what      string
	endpoints int
	peers     int    // identities of other nodes
	beside    string // policies that do not change
	manifest  func(turn int) string
	wanted    time.Duration // 0: nothing is
	first     bool          // every change replaces no policy by a first one
}

// situations returns the situations, sorted by growing identities and policies.
func situations(most int) []situation {
	const crowd = `, {podSelector: {matchLabels: {crowd: "yes"}}}`
	port := func(turn int) string { return serverPolicy(portOf(turn), "") }
	crowded := func(turn int) string { return serverPolicy(portOf(turn), crowd) }
	half, few := min(50, most), min(2, most)
	return []situation{
		{what: "a port", endpoints: 1, manifest: port},
		{what: "the first policy", endpoints: 1, manifest: port, wanted: 2 * time.Millisecond, first: true},
		{what: "a port", endpoints: few, manifest: port, wanted: 2 * time.Millisecond},
		{what: "a port", endpoints: half, manifest: port, wanted: 5 * time.Millisecond},
		{what: "the first policy", endpoints: half, manifest: port, wanted: 5 * time.Millisecond, first: true},
		{
			what: "a port; 1,000 identities are allowed, and 500 blocks by another policy", endpoints: half, peers: 1000,
			beside: blockPolicy(7100, 500), manifest: crowded, wanted: 5 * time.Millisecond,
		},
		{what: "a port", endpoints: most, peers: 1000, manifest: port},
		{what: "a port; 10,000 identities are allowed", endpoints: most, peers: 10_000, manifest: crowded},
		{
			what: "a port, and which half of 10,000 identities is allowed", endpoints: most, peers: 10_000,
			manifest: func(turn int) string {
				return serverPolicy(portOf(turn), fmt.Sprintf(`, {podSelector: {matchLabels: {half: "%d"}}}`, turn%2))
			},
		},
		{
			what: "a port; 5,000 blocks are allowed by another policy", endpoints: most, peers: 10_000,
			beside: blockPolicy(7100, 5000), manifest: port,
		},
		{what: "the port of a policy with 5,000 blocks", endpoints: most, peers: 10_000, manifest: func(turn int) string {
			return serverPolicy(portOf(turn), blockList(5000))
		}},
	}
}

// changes measures the time from the call that changes a policy to its enforcement. Packets prove that the policy is
// enforced when the service reports it.
func (b *bench) changes(ctx context.Context) (err error) {
	defer func() {
		err = errors.Join(err, b.policies.remove(context.WithoutCancel(ctx), "bench-changes", "bench-blocks"))
	}()
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
	peers := 0
	defer func() { err = errors.Join(err, b.releaseIdentities(context.WithoutCancel(ctx), peers)) }()

	fmt.Fprintf(b.out,
		"Stored: UpsertPolicies has returned (the policy is compiled and on stable storage). Enforced: "+
			"WaitForRevision has returned (the kernel enforces it for every endpoint). Each endpoint is a separate "+
			"subject. %d changes each. After each change, two packets prove that the old port is closed and the new "+
			"one is open.\n\n",
		b.sizes.changes)
	fmt.Fprintln(b.out, "| what changes | endpoints | stored p50 | enforced p50 | p99 | worst | maps |")
	fmt.Fprintln(b.out, "|---|---|---|---|---|---|---|")
	for _, s := range situations(b.sizes.endpoints) {
		for i := len(pods); i < s.endpoints; i++ {
			// Each pod is a separate subject.
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
		if s.peers > peers {
			before := peers
			peers = s.peers
			if err := b.makeIdentities(ctx, before, s.peers); err != nil {
				return err
			}
		}
		enforced, err := b.changeOften(ctx, s, from, pods)
		if err != nil {
			return fmt.Errorf("%s, %d endpoints: %w", s.what, len(pods), err)
		}
		if s.wanted > 0 {
			b.wantTime(fmt.Sprintf("change enforced, p50, %d endpoints: %s", len(pods), s.what), s.wanted,
				enforced.quantile(0.5))
		}
		if s.wanted > 0 && !s.first {
			if enforced, err = b.changeFileOften(ctx, s, from, pods); err != nil {
				return fmt.Errorf("%s by file, %d endpoints: %w", s.what, len(pods), err)
			}
			b.wantTime(fmt.Sprintf("change enforced, p50, %d endpoints: %s, by file", len(pods), s.what), s.wanted,
				enforced.quantile(0.5))
		}
	}
	fmt.Fprintln(b.out)
	return nil
}

// changeOften changes a policy repeatedly in a situation.
func (b *bench) changeOften(ctx context.Context, s situation, from pod.Pod, pods []pod.Pod) (samples, error) {
	if s.beside != "" {
		if _, err := b.policies.upsert(ctx, s.beside); err != nil {
			return nil, err
		}
	}
	if _, err := b.policies.upsert(ctx, s.manifest(0)); err != nil {
		return nil, err
	}
	var stored, enforced samples
	for turn := 1; turn <= b.sizes.changes; turn++ {
		if s.first {
			if err := b.policies.removeAndWait(ctx, "bench-changes"); err != nil {
				return nil, err
			}
		}
		c, err := b.policies.upsert(ctx, s.manifest(turn))
		if err != nil {
			return nil, err
		}
		stored, enforced = append(stored, c.answered), append(enforced, c.enforced)
		if err := onlyOnePortOpen(from, pods[turn%len(pods)], portOf(turn-1), portOf(turn)); err != nil {
			return nil, fmt.Errorf("change %d: %w", turn, err)
		}
	}
	if err := b.printChanges(ctx, s.what, len(pods), milliseconds(stored.quantile(0.5)), enforced); err != nil {
		return nil, err
	}
	return enforced, b.policies.removeAndWait(ctx, "bench-changes", "bench-blocks")
}

// changeFileOften makes the same changes by a file. Finally it writes a policy without subject pods to the file: an
// empty directory would keep all policies for a while.
func (b *bench) changeFileOften(ctx context.Context, s situation, from pod.Pod, pods []pod.Pod) (samples, error) {
	const name = "bench-filed"
	if s.beside != "" {
		if _, err := b.policies.upsert(ctx, s.beside); err != nil {
			return nil, err
		}
	}
	var enforced samples
	for turn := range b.sizes.fileChanges + 1 {
		took, err := b.files().change(ctx, name, strings.ReplaceAll(s.manifest(turn), "bench-changes", name))
		if err != nil {
			return nil, err
		}
		if turn == 0 {
			continue
		}
		enforced = append(enforced, took)
		if err := onlyOnePortOpen(from, pods[turn%len(pods)], portOf(turn-1), portOf(turn)); err != nil {
			return nil, fmt.Errorf("change %d: %w", turn, err)
		}
	}
	if err := b.printChanges(ctx, s.what+", by file", len(pods), "–", enforced); err != nil {
		return nil, err
	}
	unused := strings.ReplaceAll(serverPolicy(portOf(0), ""), "part: changes", "part: beside")
	if _, err := b.files().change(ctx, name, strings.ReplaceAll(unused, "bench-changes", name)); err != nil {
		return nil, err
	}
	return enforced, b.policies.removeAndWait(ctx, "bench-blocks")
}

// printChanges prints a table row, including the memory of the maps.
func (b *bench) printChanges(ctx context.Context, what string, endpoints int, stored string, enforced samples) error {
	status, err := b.datapath.GetStatus(ctx, &datapathv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	var bytes uint64
	for _, m := range status.GetMaps() {
		bytes += m.GetBytes()
	}
	fmt.Fprintf(b.out, "| %s | %d | %s | %s | %s | %s | %.1f MiB |\n", what, endpoints, stored,
		milliseconds(enforced.quantile(0.5)), milliseconds(enforced.quantile(0.99)), milliseconds(enforced.worst()),
		float64(bytes)/(1<<20))
	return nil
}

// portOf is the open port after a change.
func portOf(turn int) int { return 7000 + turn%2 }

// blockPolicy returns a policy that lets n prefixes reach pods with part=changes.
func blockPolicy(port, n int) string {
	return strings.ReplaceAll(serverPolicy(port, blockList(n)), "bench-changes", "bench-blocks")
}

// blockList returns n disjoint prefixes as peers of a NetworkPolicy.
func blockList(n int) string {
	var s strings.Builder
	for i := range n {
		fmt.Fprintf(&s, ", {ipBlock: {cidr: 20.%d.%d.0/25}}", i>>8, i&0xff)
	}
	return s.String()
}

// reference returns the owner of the benchmark's i-th identity.
func (b *bench) reference(i int) string { return fmt.Sprintf("%s-%d", b.prefix, i) }

// makeIdentities makes identities of pods on other nodes, from a number up to another: crowd=yes, and half=0 or
// half=1. It returns when the policy service has them.
func (b *bench) makeIdentities(ctx context.Context, from, until int) error {
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(16)
	for i := from; i < until; i++ {
		group.Go(func() error {
			var labels []*workloadv1.Label
			for _, l := range [][2]string{
				{"io.kubernetes.pod.namespace", podNamespace},
				{"crowd", "yes"},
				{"half", fmt.Sprint(i % 2)},
				{"number", fmt.Sprint(i)},
			} {
				labels = append(labels, &workloadv1.Label{Source: "k8s", Key: l[0], Value: l[1]})
			}
			// With a busy etcd, a call may exceed its deadline; retrying is safe.
			for tries := 0; ; tries++ {
				_, err := b.identity.AllocateIdentity(groupCtx, &identityv1.AllocateIdentityRequest{
					Labels:    labels,
					Reference: b.reference(i),
				})
				if status.Code(err) != codes.Unavailable || tries == 10 {
					return err
				}
			}
		})
	}
	if err := group.Wait(); err != nil {
		return fmt.Errorf("make identities %d to %d: %w", from, until, err)
	}
	for {
		known, err := b.policies.client.GetStatus(ctx, &policyv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		if int(known.GetIdentities()) >= until {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond): // poll interval
		}
	}
}

// releaseIdentities releases the first n identities.
func (b *bench) releaseIdentities(ctx context.Context, n int) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(16)
	for i := range n {
		group.Go(func() error {
			_, err := b.identity.ReleaseIdentity(ctx, &identityv1.ReleaseIdentityRequest{
				Holder: &identityv1.ReleaseIdentityRequest_Reference{Reference: b.reference(i)},
			})
			return err
		})
	}
	return group.Wait()
}

// onlyOnePortOpen sends a datagram to the closed port, then one to the open port, from new sockets. Both take the
// same path, so if only the second one arrives, the first one was dropped.
func onlyOnePortOpen(from, to pod.Pod, closed, open int) error {
	sender, err := datagramSocketIn(from, 0)
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
		return fmt.Errorf("no packet reached port %d, although the policy that allows it was reported as enforced", open)
	}
	switch n, err := poll(receivers[:1], 0); {
	case err != nil:
		return fmt.Errorf("check for a packet to port %d: %w", closed, err)
	case n != 0:
		return fmt.Errorf("a packet reached port %d, although the policy that closes it was reported as enforced", closed)
	}
	return nil
}

// poll is poll(2), restarted after signals.
func poll(fds []unix.PollFd, milliseconds int) (int, error) {
	for {
		n, err := unix.Poll(fds, milliseconds)
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

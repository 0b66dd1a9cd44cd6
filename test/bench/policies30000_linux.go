// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/devnode"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// clusterSize is the size of the cluster of Cilium's test of 1,000 nodes: 6,000 identities, 30,000 pods and 30,000
// policies.
type clusterSize struct{ nodes, identities, pods, policies int }

const (
	policiesPerFile = 100
	teams           = 50 // namespaces of the cluster, named by `simulate -load`
	// memoryRest is the time from the last change to the reading of the memory.
	memoryRest = time.Minute
	// filePause is the time between two changes of files. A scan of so many policies takes longer than a scan of few,
	// and the source pauses for three times that.
	filePause = 300 * time.Millisecond
)

// largeCluster is a node of a cluster with many pods and policies.
type largeCluster struct {
	bench    *bench
	size     clusterSize
	node     *devnode.Node
	policies policies
	files    policyFiles
	probe    pod.Pod
	pods     []pod.Pod // subjects
	apps     []int     // numbers of the apps of the subjects
}

// manyPolicies measures a node of a large cluster: the time until the policies of files are enforced, changes of
// single policies, and memory.
func (b *bench) manyPolicies(ctx context.Context) (err error) {
	args := withProfiles()
	// Earlier versions, with which this one is compared, accept fewer by default.
	args[devnode.Policy] = append(args[devnode.Policy], "--limits-policies=40000")
	node, err := devnode.Up(ctx, devnode.Options{Instance: b.prefix + "p", BinDir: b.binDir, Args: args})
	if err != nil {
		return err
	}
	var made undo
	defer func() { err = errors.Join(err, made.all()) }()
	made.add(func() error { return node.Down(context.WithoutCancel(ctx)) })
	conn, err := b.dialTo(node, devnode.Policy)
	if err != nil {
		return err
	}
	p := policies{policyv1.NewPolicyServiceClient(conn)}
	c := &largeCluster{
		bench: b, size: b.sizes.cluster, node: node, policies: p,
		files: policyFiles{node: node, policies: p, pause: filePause},
	}
	if err := c.load(ctx); err != nil {
		return err
	}
	if err := c.connect(ctx, &made); err != nil {
		return err
	}
	fmt.Fprintf(b.out, "A node with %d pods in a cluster of %d nodes, %d identities, %d pods and %d NetworkPolicies in "+
		"%d files:\n\n", len(c.pods)+1, c.size.nodes, c.size.identities, c.size.pods, c.size.policies,
		c.size.policies/policiesPerFile)
	for _, step := range []func(context.Context) error{c.fill, c.change, c.memory, c.restart} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// withProfiles returns the arguments that let memory collect the garbage of each service.
func withProfiles() map[string][]string {
	args := map[string][]string{}
	for _, service := range devnode.Services() {
		if service != devnode.Etcd {
			args[service] = []string{"--metrics-pprof=true"}
		}
	}
	return args
}

// load writes the nodes, identities and addresses of the cluster into the etcd of the node, and waits until the policy
// service knows the identities.
func (c *largeCluster) load(ctx context.Context) error {
	own, err := os.Executable()
	if err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, filepath.Join(filepath.Dir(own), "simulate"),
		"-load=unix://"+c.node.Socket(devnode.Etcd), fmt.Sprint("-nodes=", c.size.nodes),
		fmt.Sprint("-addresses=", c.size.pods), fmt.Sprint("-identities=", c.size.identities)).CombinedOutput()
	if err != nil {
		return fmt.Errorf("write the cluster into etcd: %w: %s", err, out)
	}
	return c.policies.wait(ctx, fmt.Sprintf("the policy service has %d identities", c.size.identities),
		func(s *policyv1.GetStatusResponse) bool { return int(s.GetIdentities()) >= c.size.identities })
}

// connect makes a pod for each node's share of the apps, and a pod that sends to them. All are in namespace team-0.
func (c *largeCluster) connect(ctx context.Context, made *undo) error {
	add := func(name, key, value string) (pod.Pod, error) {
		network, err := labelledOn(c.node, "sluice", key, value)
		if err != nil {
			return pod.Pod{}, err
		}
		network.args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=team-0"
		p, err := network.connect(ctx, name)
		if err == nil {
			made.add(func() error { return network.disconnect(context.WithoutCancel(ctx), p) })
		}
		return p, err
	}
	var err error
	if c.probe, err = add(c.bench.prefix+"-policies-probe", "role", "probe"); err != nil {
		return err
	}
	ofTeam := c.size.identities / teams
	n := min(c.size.pods/c.size.nodes, ofTeam)
	for i := range n {
		app := ofTeam / n * teams * i
		p, err := add(fmt.Sprintf("%s-policies-%d", c.bench.prefix, app), "app", fmt.Sprint("app-", app))
		if err != nil {
			return err
		}
		c.pods, c.apps = append(c.pods, p), append(c.apps, app)
	}
	return nil
}

// manifest returns the i-th policy. Each app is the subject of equally many policies, and each policy has one peer.
// With a port other than 0, the policy also lets the probe send datagrams to that port.
func (c *largeCluster) manifest(i, port int) string {
	n := c.size.identities
	subject, turn := i%n, i/n
	peer := (subject*7 + turn*911 + 13) % n
	text := fmt.Sprintf(`apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: p%d, namespace: team-%d}
spec:
  podSelector: {matchLabels: {app: app-%d}}
  ingress:
  - from:
    - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: team-%d}}
      podSelector: {matchLabels: {app: app-%d}}
    ports: [{protocol: TCP, port: %d}]
`, i, subject%teams, subject, peer%teams, peer, 8000+turn)
	if port != 0 {
		text += fmt.Sprintf("  - from: [{podSelector: {matchLabels: {role: probe}}}]\n"+
			"    ports: [{protocol: UDP, port: %d}]\n", port)
	}
	return text
}

// file returns the file that has the i-th policy, with a port for this policy.
func (c *largeCluster) file(i, port int) (name, content string) {
	number := i / policiesPerFile
	var all []string
	for k := number * policiesPerFile; k < (number+1)*policiesPerFile; k++ {
		if k == i {
			all = append(all, c.manifest(k, port))
			continue
		}
		all = append(all, c.manifest(k, 0))
	}
	return fmt.Sprintf("f%03d", number), strings.Join(all, "---\n")
}

// fill measures the time until all policies are enforced, from the rename of the first file.
func (c *largeCluster) fill(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp(c.node.Paths().RunDir, "policies")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	var names []string
	for i := 0; i < c.size.policies; i += policiesPerFile {
		name, content := c.file(i, 0)
		names = append(names, name+".yaml")
		path := filepath.Join(dir, name+".yaml")
		if err := errors.Join(os.WriteFile(path, []byte(content), 0o644), os.Chmod(path, 0o644)); err != nil {
			return err
		}
	}
	before, err := servicesCPU(c.node)
	if err != nil {
		return err
	}
	begin := time.Now()
	for _, name := range names {
		if err := os.Rename(filepath.Join(dir, name), filepath.Join(c.node.PolicyDir(), name)); err != nil {
			return err
		}
	}
	if err := c.enforced(ctx); err != nil {
		return err
	}
	took := time.Since(begin)
	after, err := servicesCPU(c.node)
	if err != nil {
		return err
	}
	fmt.Fprintf(c.bench.out, "All policies are enforced %.2f s after the first file appeared. Processor time: "+
		"policy %.2f s, datapath %.2f s.\n\n", took.Seconds(), (after[devnode.Policy] - before[devnode.Policy]).Seconds(),
		(after[devnode.Datapath] - before[devnode.Datapath]).Seconds())
	return nil
}

// enforced waits until all sources are complete and the kernel enforces all of their policies.
func (c *largeCluster) enforced(ctx context.Context) error {
	var failed error
	err := c.policies.wait(ctx, fmt.Sprintf("%d policies are enforced", c.size.policies),
		func(s *policyv1.GetStatusResponse) bool {
			if int(s.GetPolicies()) < c.size.policies || int(s.GetIdentities()) < c.size.identities ||
				slices.ContainsFunc(s.GetSources(), func(s *policyv1.SourceStatus) bool { return !s.GetSynced() }) {
				return false
			}
			var waited *policyv1.WaitForRevisionResponse
			waited, failed = c.policies.client.WaitForRevision(ctx,
				&policyv1.WaitForRevisionRequest{Revision: s.GetRevision()})
			// After a restart, the datapath has to connect again.
			return failed == nil && len(waited.GetDisconnected()) == 0
		})
	if err != nil {
		return errors.Join(err, failed)
	}
	return nil
}

// wait polls the status of the policy service until a condition holds.
func (p policies) wait(ctx context.Context, what string, holds func(*policyv1.GetStatusResponse) bool) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		s, err := p.client.GetStatus(ctx, &policyv1.GetStatusRequest{})
		if err != nil {
			return fmt.Errorf("wait until %s: %w", what, err)
		}
		if holds(s) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w; there are %d identities and %d policies", what, ctx.Err(),
				s.GetIdentities(), s.GetPolicies())
		case <-time.After(10 * time.Millisecond): // poll interval
		}
	}
}

// change measures changes of a policy of a local pod, in a file of many policies and by a call. After each change,
// packets prove that the kernel enforces it.
func (c *largeCluster) change(ctx context.Context) error {
	out := c.bench.out
	fmt.Fprintln(out, "| change of one policy, until enforced | p50 | p99 | worst |")
	fmt.Fprintln(out, "|---|---|---|---|")
	turns := c.bench.sizes.changes
	row := func(what string, ports int, one func(subject, port int) (time.Duration, error)) (samples, error) {
		var all samples
		for turn := range turns + len(c.pods) {
			subject := turn % len(c.pods)
			closed, open := ports+portOf(turn/len(c.pods)-1), ports+portOf(turn/len(c.pods))
			took, err := one(subject, open)
			if err != nil {
				return nil, fmt.Errorf("%s, change %d: %w", what, turn, err)
			}
			if turn < len(c.pods) {
				continue // the first change of each subject adds a rule
			}
			all = append(all, took)
			if err := onlyOnePortOpen(c.probe, c.pods[subject], closed, open); err != nil {
				return nil, fmt.Errorf("%s, change %d: %w", what, turn, err)
			}
		}
		fmt.Fprintf(out, "| %s | %s | %s | %s |\n", what, milliseconds(all.quantile(0.5)),
			milliseconds(all.quantile(0.99)), milliseconds(all.worst()))
		return all, nil
	}
	filed, err := row(fmt.Sprintf("in a file of %d policies", policiesPerFile), 100,
		func(subject, port int) (time.Duration, error) {
			name, content := c.file(c.apps[subject], port)
			return c.files.change(ctx, name, content)
		})
	if err != nil {
		return err
	}
	called, err := row("by a call", 0, func(subject, port int) (time.Duration, error) {
		took, err := c.policies.upsert(ctx, c.called(subject, port))
		return took.enforced, err
	})
	if err != nil {
		return err
	}
	fmt.Fprintln(out)
	for _, r := range []struct {
		what string
		of   samples
	}{{"in a file", filed}, {"by a call", called}} {
		what := fmt.Sprintf("one change %s among %d policies enforced", r.what, c.size.policies)
		c.bench.wantTime(what+", p50", 10*time.Millisecond, r.of.quantile(0.5))
		c.bench.wantTime(what+", p99", 50*time.Millisecond, r.of.quantile(0.99))
	}
	return nil
}

// called returns the policy called-N for the row "by a call": a copy of policy pN that lets the probe send to a port.
func (c *largeCluster) called(subject, port int) string {
	app := c.apps[subject]
	return strings.Replace(c.manifest(app, port), fmt.Sprintf("name: p%d,", app), fmt.Sprintf("name: called-%d,", app), 1)
}

// memory prints the memory of each process of the node when nothing has changed for memoryRest, and the largest memory
// so far. By then, each process has collected its garbage after the changes and returned the free memory.
func (c *largeCluster) memory(ctx context.Context) error {
	out := c.bench.out
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(memoryRest):
	}
	fmt.Fprintf(out, "Memory in MiB, %.0f s after the last change:\n\n", memoryRest.Seconds())
	fmt.Fprintln(out, "| process | resident | anonymous | live heap | largest resident |")
	fmt.Fprintln(out, "|---|---|---|---|---|")
	var sum usage
	for _, service := range c.node.Services() {
		if service == devnode.Etcd {
			continue // runs on other machines in such a cluster
		}
		u, err := memoryOf(c.node, service)
		if err != nil {
			return err
		}
		// Last, because writing the profile makes pages of the program resident.
		heap, err := collect(ctx, c.node, service)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "| sluice-%s | %.1f | %.1f | %.1f | %.1f |\n", service, u.resident, u.anonymous, heap, u.largest)
		sum.resident += u.resident
		sum.anonymous += u.anonymous
		sum.largest += u.largest
	}
	fmt.Fprintf(out, "| all | %.1f | %.1f | | %.1f |\n\n", sum.resident, sum.anonymous, sum.largest)
	c.bench.wantMemory(fmt.Sprintf("resident, all processes, %d policies", c.size.policies), 250, sum.resident)
	return nil
}

// collect lets a service collect its garbage, and returns the size of its heap in MiB.
func collect(ctx context.Context, node *devnode.Node, service string) (heap float64, err error) {
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", node.Paths().MetricsSocket(service))
		},
	}}
	get := func(path string) ([]byte, error) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+service+path, nil)
		if err != nil {
			return nil, err
		}
		answer, err := client.Do(request)
		if err != nil {
			return nil, err
		}
		defer answer.Body.Close()
		content, err := io.ReadAll(answer.Body)
		if err == nil && answer.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s of %s: %s: %s", path, service, answer.Status, content)
		}
		return content, err
	}
	if _, err := get("/debug/pprof/heap?gc=1"); err != nil {
		return 0, err
	}
	text, err := get("/metrics")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if _, err := fmt.Sscanf(line, "go_memstats_heap_alloc_bytes %g", &heap); err == nil {
			return heap / (1 << 20), nil
		}
	}
	return 0, fmt.Errorf("the metrics of %s have no go_memstats_heap_alloc_bytes", service)
}

// restart measures the time until all policies are enforced after a restart of the policy service.
func (c *largeCluster) restart(ctx context.Context) error {
	var serving, all samples
	for range c.bench.sizes.restarts {
		begin := time.Now()
		if err := c.node.Restart(ctx, devnode.Policy); err != nil {
			return err
		}
		serving = append(serving, time.Since(begin))
		if err := c.enforced(ctx); err != nil {
			return err
		}
		all = append(all, time.Since(begin))
	}
	fmt.Fprintf(c.bench.out, "A restart of sluice-policy takes %.2f s until it serves, and %.2f s until the datapath has "+
		"confirmed all policies (p50 of %d).\n", serving.quantile(0.5).Seconds(), all.quantile(0.5).Seconds(), len(all))
	return nil
}

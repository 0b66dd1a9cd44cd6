// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/test/k8s/cluster"
)

// BenchmarkCluster measures delays that a user of a cluster sees. It reports in its log and needs only one iteration.
func BenchmarkCluster(b *testing.B) {
	for _, mode := range []string{"overlay", "native"} {
		b.Run("two nodes "+mode, func(b *testing.B) {
			n := sluiceNode{b, startSluiceAs(b, mode, cluster.Options{Nodes: 2, Mounts: []string{programs()}}), 0}
			n.changes("node2", "node1")
			n.scaling()
		})
	}
	b.Run("thousands", func(b *testing.B) {
		thousands(sluiceNode{b, startSluice(b, cluster.Options{Mounts: []string{programs()}}), 0})
	})
	b.Run("sluice", func(b *testing.B) {
		n := sluiceNode{b, startSluice(b, cluster.Options{Mounts: []string{programs()}}), 0}
		n.countRequests()
		n.memory("idle")
		n.requests("after a start")
		for _, pods := range []int{50, 100} {
			n.burst(pods)
			n.logAdds()
			if pods == 100 {
				n.memory("with 100 pods")
			}
			n.deleteBurst()
			n.requests(fmt.Sprintf("after two bursts of %d pods", pods))
		}
		n.changes("node1", "node1")
		n.policies(1000)
	})
	b.Run("ptp", func(b *testing.B) {
		n := sluiceNode{b, start(b, cluster.Options{}), 0}
		for _, pods := range []int{50, 100} {
			n.burst(pods)
			n.deleteBurst()
		}
	})
}

// burst starts pods at once, twice, and counts the failed attempts.
func (n sluiceNode) burst(pods int) {
	n.Helper()
	var times []string
	for round := range 2 {
		if round > 0 {
			n.deleteBurst()
		}
		begin := time.Now()
		n.apply(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: burst, namespace: default}
spec:
  replicas: %d
  selector: {matchLabels: {app: burst}}
  template:
    metadata: {labels: {app: burst}}
    spec:
      terminationGracePeriodSeconds: 0
      containers: [{name: pause, image: "registry.k8s.io/pause:3.10.2"}]
`, pods)
		n.kubectl("rollout", "status", "--timeout=10m", "deployment/burst")
		times = append(times, fmt.Sprintf("%.1f s", time.Since(begin).Seconds()))
	}
	events := n.kubectl("get", "events", "--field-selector=reason=FailedCreatePodSandBox", "--output=name")
	n.Logf("%d pods at once: all Ready after %s; %d sandboxes refused so far", pods, strings.Join(times, ", "),
		strings.Count(events, "\n"))
}

// deleteBurst deletes the pods of a burst, and waits until they are gone.
func (n sluiceNode) deleteBurst() {
	n.Helper()
	n.kubectl("delete", "deployment", "burst", "--cascade=foreground")
	n.eventually("no pod of the burst is left", func() error {
		if out := n.kubectl("get", "pods", "--selector=app=burst", "--output=name"); out != "" {
			return fmt.Errorf("%d are", strings.Count(out, "\n"))
		}
		return nil
	})
}

// logAdds logs how long the ADDs in the plugin's log took, and empties that log.
func (n sluiceNode) logAdds() {
	n.Helper()
	var durations []time.Duration
	phases := map[string][]time.Duration{}
	failed := 0
	for line := range strings.Lines(n.look("cat", "/var/log/sluice/cni.log")) {
		var entry struct {
			Level, Command, Duration string
			PhasesMS                 map[string]float64 `json:"phases_ms"`
		}
		n.must(json.Unmarshal([]byte(line), &entry))
		if entry.Command != "ADD" {
			continue
		}
		if entry.Level != "INFO" {
			failed++
		}
		d, err := time.ParseDuration(entry.Duration)
		n.must(err)
		durations = append(durations, d)
		for phase, ms := range entry.PhasesMS {
			phases[phase] = append(phases[phase], time.Duration(ms*float64(time.Millisecond)))
		}
	}
	var parts []string
	for phase, all := range phases {
		parts = append(parts, phase+" "+percentiles(all))
	}
	slices.Sort(parts)
	n.Logf("%d ADDs, %d refused: %s; %s", len(durations), failed, percentiles(durations), strings.Join(parts, "; "))
	n.look("truncate", "--size=0", "/var/log/sluice/cni.log")
}

func percentiles(all []time.Duration) string {
	slices.Sort(all)
	at := func(p int) time.Duration { return all[(len(all)-1)*p/100].Round(10 * time.Microsecond) }
	return fmt.Sprintf("p50 %s p99 %s", at(50), at(99))
}

// memory logs the resident memory of each container of Sluice, and the part that is not its program.
func (n sluiceNode) memory(when string) {
	n.Helper()
	var all []string
	for _, c := range n.sluicePod().Status.ContainerStatuses {
		_, id, _ := strings.Cut(c.ContainerID, "://")
		var rss, anonymous int
		for line := range strings.Lines(n.look("cat", fmt.Sprintf("/proc/%d/status", n.task(id)))) {
			_, _ = fmt.Sscanf(line, "VmRSS: %d kB", &rss)
			_, _ = fmt.Sscanf(line, "RssAnon: %d kB", &anonymous)
		}
		all = append(all, fmt.Sprintf("%s %d (%d)", c.Name, rss/1024, anonymous/1024))
	}
	n.Logf("MiB resident (anonymous) %s: %s", when, strings.Join(all, ", "))
}

// policies logs the memory with many policies, each for its own pods.
func (n sluiceNode) policies(count int) {
	n.Helper()
	var all strings.Builder
	for i := range count {
		fmt.Fprintf(&all, `---
{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: policy-%[1]d, namespace: default}, spec: {
  podSelector: {matchLabels: {app: app-%[1]d}}, policyTypes: [Ingress],
  ingress: [{from: [{podSelector: {matchLabels: {app: client-%[1]d}}}], ports: [{port: 80}]}]}}
`, i)
	}
	n.apply("%s", all.String())
	n.eventually("the policies are there", func() error {
		_, err := n.sluice("policy", "get", "netpol", fmt.Sprintf("default/policy-%d", count-1))
		return err
	})
	n.memory(fmt.Sprintf("with %d policies", count))
	n.requests("after the policies")
}

// countRequests restarts the API server, which then counts Sluice's requests.
func (n sluiceNode) countRequests() {
	n.Helper()
	n.apply(`
apiVersion: flowcontrol.apiserver.k8s.io/v1
kind: FlowSchema
metadata: {name: sluice}
spec:
  priorityLevelConfiguration: {name: workload-low}
  matchingPrecedence: 1000
  rules:
  - subjects: [{kind: ServiceAccount, serviceAccount: {name: sluice, namespace: sluice-system}}]
    resourceRules: [{verbs: ["*"], apiGroups: ["*"], resources: ["*"], clusterScope: true, namespaces: ["*"]}]
    nonResourceRules: [{verbs: ["*"], nonResourceURLs: ["*"]}]
`)
	n.kubectl("--namespace=sluice-system", "rollout", "restart", "daemonset/sluice")
	n.kubectl("--namespace=sluice-system", "rollout", "status", "--timeout=3m", "daemonset/sluice")
}

// requests logs the number of requests.
func (n sluiceNode) requests(when string) {
	n.Helper()
	n.Logf("requests to the API server %s: %d", when, n.requestCount())
}

func (n sluiceNode) requestCount() (total int) {
	n.Helper()
	for line := range strings.Lines(n.kubectl("get", "--raw=/metrics")) {
		const counter = "apiserver_flowcontrol_dispatched_requests_total{"
		if labels, count, ok := strings.Cut(line, "} "); ok && strings.HasPrefix(labels, counter) &&
			strings.Contains(labels, `flow_schema="sluice"`) {
			some, err := strconv.Atoi(strings.TrimSpace(count))
			n.must(err)
			total += some
		}
	}
	return total
}

// apiClient calls the API without starting a process for each call.
type apiClient struct {
	n     sluiceNode
	http  *http.Client
	token string
}

func (n sluiceNode) client(account string) apiClient {
	n.Helper()
	n.kubectl("--namespace=kube-system", "create", "serviceaccount", account)
	n.kubectl("create", "clusterrolebinding", account, "--clusterrole=cluster-admin",
		"--serviceaccount=kube-system:"+account)
	token := n.kubectl("--namespace=kube-system", "create", "token", account)
	pid, err := n.c.NodePID(0)
	n.must(err)
	dial := func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = inNetns(fmt.Sprintf("/proc/%d/ns/net", pid), func() error {
			conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}
	// The certificate belongs to a cluster of this test.
	insecure := &tls.Config{InsecureSkipVerify: true} //nolint:gosec // as said
	transport := &http.Transport{DialContext: dial, TLSClientConfig: insecure}
	c := apiClient{n, &http.Client{Transport: transport}, strings.TrimSpace(token)}
	n.Cleanup(c.http.CloseIdleConnections)
	return c
}

func (c apiClient) call(method, kind, path, body string) {
	c.n.Helper()
	c.n.must(c.try(method, kind, path, body))
}

func (c apiClient) try(method, kind, path, body string) error {
	r, err := http.NewRequestWithContext(c.n.Context(), method, "https://10.200.0.1:6443"+path, strings.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Authorization", "Bearer "+c.token)
	r.Header.Set("Content-Type", kind)
	answer, err := c.http.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	content, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode >= 300 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, answer.Status, content)
	}
	return err
}

// probe records datagrams that arrive at a pod.
type probe struct {
	mu   sync.Mutex
	last time.Time // time of the last datagram, guarded by mu
}

// probe sends a datagram every 200 µs from one pod to another.
func (n sluiceNode) probe(from, to kubePod) *probe {
	n.Helper()
	p := n.receive(to)
	var sender net.Conn
	n.must(inNetns(n.netns(from), func() (err error) {
		sender, err = net.Dial("udp", net.JoinHostPort(to.address(), probePort))
		return err
	}))
	var wait sync.WaitGroup
	n.Cleanup(func() {
		_ = sender.Close()
		wait.Wait()
	})
	wait.Go(func() {
		for ; ; time.Sleep(200 * time.Microsecond) {
			if _, err := sender.Write([]byte("probe")); err != nil && strings.Contains(err.Error(), "closed") {
				return
			}
		}
	})
	return p
}

// probePort is the destination port of the datagrams.
const probePort = "9000"

// receive records when datagrams arrive at a pod.
func (n sluiceNode) receive(at kubePod) *probe {
	n.Helper()
	var receiver net.PacketConn
	n.must(inNetns(n.netns(at), func() (err error) {
		receiver, err = net.ListenPacket("udp", net.JoinHostPort(at.address(), probePort))
		return err
	}))
	p := &probe{}
	var wait sync.WaitGroup
	n.Cleanup(func() {
		_ = receiver.Close()
		wait.Wait()
	})
	wait.Go(func() {
		for buffer := make([]byte, 16); ; {
			if _, _, err := receiver.ReadFrom(buffer); err != nil {
				return
			}
			p.mu.Lock()
			p.last = time.Now()
			p.mu.Unlock()
		}
	})
	return p
}

// arrives returns the time of the first datagram seen after begin.
func (p *probe) arrives(begin time.Time) time.Time {
	for ; ; time.Sleep(100 * time.Microsecond) {
		p.mu.Lock()
		last := p.last
		p.mu.Unlock()
		if last.After(begin) {
			return last
		}
	}
}

// ends returns the time of the last datagram before a pause.
func (p *probe) ends() time.Time {
	for ; ; time.Sleep(10 * time.Millisecond) {
		p.mu.Lock()
		last := p.last
		p.mu.Unlock()
		if time.Since(last) > 300*time.Millisecond {
			return last
		}
	}
}

// rounds of each change.
const rounds = 50

// changes logs the time from a write to the API until the first packet is evaluated by the new policy. The packets go
// from a pod on one node to a pod on the same or another node. The server's node evaluates the packets.
func (n sluiceNode) changes(client, server string) {
	n.Helper()
	n.namespace("changes")
	n.serverOn(server, "changes", "web")
	n.serverOn(client, "changes", "client")
	web, from := n.ready("changes", "web"), n.ready("changes", "client")
	c, p := n.client("changes"), n.probe(from, web)
	const (
		merge = "application/merge-patch+json"
		write = "application/json"
		pods  = "/api/v1/namespaces/changes/pods/client"
		space = "/api/v1/namespaces/changes"
		rules = "/apis/networking.k8s.io/v1/namespaces/changes/networkpolicies"
	)
	policy := func(name, from string) string {
		return fmt.Sprintf(`{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":%q},
"spec":{"podSelector":{},"policyTypes":["Ingress"],"ingress":[%s]}}`, name, from)
	}
	label := func(value string) string { return fmt.Sprintf(`{"metadata":{"labels":{"may":%q}}}`, value) }
	measure := func(what string, allow, deny func()) {
		n.Helper()
		p.measure(n, what+": allowed, denied", allow, deny)
	}
	c.call("POST", write, rules, policy("isolate", ""))
	measure("NetworkPolicy created and deleted",
		func() { c.call("POST", write, rules, policy("allow", `{"from":[{"podSelector":{}}]}`)) },
		func() { c.call("DELETE", write, rules+"/allow", "") })
	c.call("POST", write, rules, policy("by-label", `{"from":[{"podSelector":{"matchLabels":{"may":"yes"}}}]}`))
	measure("label of a pod",
		func() { c.call("PATCH", merge, pods, label("yes")) }, func() { c.call("PATCH", merge, pods, label("no")) })
	c.call("POST", write, rules, policy("by-namespace", `{"from":[{"namespaceSelector":{"matchLabels":{"may":"yes"}}}]}`))
	measure("label of a namespace",
		func() { c.call("PATCH", merge, space, label("yes")) }, func() { c.call("PATCH", merge, space, label("no")) })
}

// measure logs the time from a call that allows datagrams until the first arrives, and from a call that denies them
// until the last arrives.
func (p *probe) measure(n sluiceNode, what string, begins, ends func()) {
	n.Helper()
	var first, last []time.Duration
	p.ends()
	for range rounds {
		begin := time.Now()
		begins()
		first = append(first, p.arrives(begin).Sub(begin))
		begin = time.Now()
		ends()
		last = append(last, max(0, p.ends().Sub(begin)))
	}
	n.Logf("%s, from the call to the packet: %s; %s", what, percentiles(first), percentiles(last))
}

// scaling logs the time from a write of a Service's endpoints until a new endpoint gets its first datagram, and a
// removed one its last. The pods are on the second node, the client on the first.
func (n sluiceNode) scaling() {
	n.Helper()
	n.namespace("scaling")
	n.serverOn("node1", "scaling", "client")
	n.serverOn("node2", "scaling", "stays")
	n.serverOn("node2", "scaling", "comes")
	from, stays, comes := n.ready("scaling", "client"), n.ready("scaling", "stays"), n.ready("scaling", "comes")
	n.apply(`
apiVersion: v1
kind: Service
metadata: {name: scaled, namespace: scaling}
spec: {ports: [{port: %s, protocol: UDP}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: scaled, namespace: scaling, labels: {kubernetes.io/service-name: scaled}}
addressType: IPv4
ports: [{port: %[1]s, protocol: UDP}]
endpoints: [{addresses: ["%s"]}]
`, probePort, stays.address())
	service := n.kubectl("--namespace=scaling", "get", "service", "scaled", "--output=jsonpath={.spec.clusterIP}")
	there, p := n.receive(stays), n.receive(comes)
	n.flows(from, net.JoinHostPort(service, probePort))
	there.arrives(time.Now())
	c := n.client("scaling")
	endpoints := func(pods ...kubePod) func() {
		var all []string
		for _, pod := range pods {
			all = append(all, fmt.Sprintf(`{"addresses":[%q]}`, pod.address()))
		}
		return func() {
			c.call("PATCH", "application/merge-patch+json", "/apis/discovery.k8s.io/v1/namespaces/scaling/endpointslices/scaled",
				`{"endpoints":[`+strings.Join(all, ",")+`]}`)
		}
	}
	p.measure(n, "endpoint of a service: added, removed", endpoints(stays, comes), endpoints(stays))
}

// flows sends datagrams from a pod, four from each socket, because the backend of a socket does not change.
func (n sluiceNode) flows(from kubePod, to string) {
	n.Helper()
	path := n.netns(from)
	stop, done := make(chan struct{}), make(chan error, 1)
	n.Cleanup(func() {
		close(stop)
		if err := <-done; err != nil {
			n.Error(err)
		}
	})
	go func() {
		done <- inNetns(path, func() error {
			for {
				conn, err := net.Dial("udp", to)
				if err != nil {
					return err
				}
				for range 4 {
					_, _ = conn.Write([]byte("probe"))
					time.Sleep(500 * time.Microsecond) // the rate of datagrams
				}
				if err := conn.Close(); err != nil {
					return err
				}
				select {
				case <-stop:
					return nil
				default:
				}
			}
		})
	}()
}

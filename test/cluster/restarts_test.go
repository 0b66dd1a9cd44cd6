// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/probetest"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// restartTimes returns the number of restarts and kills of each process: SLUICE_TEST_RESTARTS, or one.
func restartTimes(t *testing.T) int {
	text := os.Getenv("SLUICE_TEST_RESTARTS")
	if text == "" {
		return 1
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("SLUICE_TEST_RESTARTS: %v", err)
	}
	return n
}

// attemptEvery returns the interval between attempts at one target. There are some fifty targets. Without a setting it
// is so long that the pod stays within its share of the translations, however slow the restarts are.
func attemptEvery(t *testing.T) time.Duration {
	text := os.Getenv("SLUICE_TEST_ATTEMPTS")
	if text == "" {
		return 60 * time.Millisecond
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("SLUICE_TEST_ATTEMPTS: %v", err)
	}
	return d
}

// Ports that receive attempts while processes restart.
const (
	hostPort   = 9095
	healthPort = 30095
	firstPort  = 30100 // node ports
)

// Names of disturbances.
const (
	killed    = " killed"
	allKilled = "all killed at once"
)

// healthTimeout is the timeout of requests to health check ports.
const healthTimeout = 5 * time.Second

// askedService is a Service with one backend. Each has a different backend port, because two connections from one
// client port to two addresses with the same backend port would conflict.
type askedService struct {
	name   string
	number int // determines its addresses and ports
	far    bool
	local  bool // with a health check port
}

func (s askedService) nodePort() uint16 { return uint16(firstPort + s.number) }

func (s askedService) backendPort() uint16 { return uint16(webPort + s.number) }

func (s askedService) at(pattern4, pattern6 string) []netip.Addr {
	return []netip.Addr{
		netip.MustParseAddr(fmt.Sprintf(pattern4, s.number)), netip.MustParseAddr(fmt.Sprintf(pattern6, s.number)),
	}
}

func (s askedService) clusterIPs() []netip.Addr { return s.at("10.96.9.%d", "fd00:96:9::%d") }
func (s askedService) externals() []netip.Addr  { return s.at("203.0.113.%d", "2001:db8:8::%d") }
func (s askedService) balancers() []netip.Addr  { return s.at("198.51.100.%d", "2001:db8:7::%d") }

// manifest returns the manifests of the service, with its backend on a node.
func (s askedService) manifest(node string, backend pod.Pod) string {
	var b strings.Builder
	local := ""
	if s.local {
		local = fmt.Sprintf("\n  externalTrafficPolicy: Local\n  healthCheckNodePort: %d", healthPort)
	}
	fmt.Fprintf(&b, `apiVersion: v1
kind: Service
metadata: {name: %[1]s, namespace: test}
spec:
  type: LoadBalancer%[2]s
  clusterIP: "10.96.9.%[3]d"
  clusterIPs: ["10.96.9.%[3]d", "fd00:96:9::%[3]d"]
  externalIPs: ["203.0.113.%[3]d", "2001:db8:8::%[3]d"]
  ipFamilies: [IPv4, IPv6]
  ipFamilyPolicy: RequireDualStack
  selector: {app: web}
  ports:
    - {name: tcp, protocol: TCP, port: %[4]d, targetPort: %[5]d, nodePort: %[6]d}
    - {name: udp, protocol: UDP, port: %[4]d, targetPort: %[5]d, nodePort: %[6]d}
status: {loadBalancer: {ingress: [{ip: "198.51.100.%[3]d"}, {ip: "2001:db8:7::%[3]d"}]}}
---
`, s.name, local, s.number, outsidePort, s.backendPort(), s.nodePort())
	for i, family := range []string{"IPv4", "IPv6"} {
		fmt.Fprintf(&b, `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %s-%s, namespace: test, labels: {kubernetes.io/service-name: %[1]s}}
addressType: %[3]s
ports: [{name: tcp, protocol: TCP, port: %[4]d}, {name: udp, protocol: UDP, port: %[4]d}]
endpoints: [{addresses: [%[5]q], nodeName: %[6]q, conditions: {ready: true}}]
---
`, s.name, strings.ToLower(family), family, s.backendPort(), backend.Addresses()[i], node)
	}
	return b.String()
}

// serveAnswers accepts connections, closes each when its client does, and returns datagrams.
func serveAnswers(t *testing.T, p pod.Pod, port uint16) {
	t.Helper()
	serve(t, p, port, func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) },
		func(b []byte, _ netip.AddrPort) []byte { return b })
}

// restarted is a cluster in which every kind of traffic reaches the first node while its processes restart.
type restarted struct {
	*testCluster
	here, there *node
	args        []string // arguments of the datapaths
	targets     []probetest.Target
	looked      atomic.Int32 // calls of entries
	// forgets means that the previous version of the processes does not keep health check ports:
	// sluice-loadbalancer wrote no file, so that the next one answers 503 until the datapath has subscribed, and
	// the datapath kept no listener.
	forgets bool
}

// newRestarted starts the cluster, with the programs in a directory or, by default, the programs of this build. With
// packets, the socket hooks of pods and of the node do not translate services, and the datapath translates each
// packet.
func newRestarted(t *testing.T, mode string, packets bool, bin string) *restarted {
	t.Helper()
	args := []string{"--masquerade-enabled=true"}
	if packets {
		args = append(args, "--load-balancing-cgroup="+emptyCgroup(t))
	}
	c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: mode, Options: devnode.Options{
		BinDir: bin,
		Args: map[string][]string{
			devnode.Datapath: args, devnode.LoadBalancer: {"--external-ips-allow=203.0.113.0/24,2001:db8:8::/64"},
		},
	}})
	r := &restarted{testCluster: c, here: c.nodes[0], there: c.nodes[1], args: args}
	near, far, client := r.here.addWithHostPort(t), r.there.add(t, "web"), r.here.add(t, "client")
	outside := c.plug(t)
	for _, p := range []pod.Pod{near, far, outside} {
		serveAnswers(t, p, webPort)
	}
	host := r.here.host()
	r.target(outside, "outside to host port", r.here.Addresses(), hostPort)
	r.target(host, "host to near pod", near.Addresses(), webPort)
	r.target(host, "host to far pod", far.Addresses(), webPort)
	r.target(client, "pod to near pod", near.Addresses(), webPort)
	r.target(client, "pod to far pod", far.Addresses(), webPort)
	r.target(client, "pod to outside", outside.Addresses(), webPort)
	direct := askedService{number: 1} // uses a port of its own
	serveAnswers(t, near, direct.backendPort())
	r.target(outside, "outside to pod", near.Addresses(), direct.backendPort())

	manifest, number := "", direct.number
	for name, ask := range map[string]func(s askedService){
		"node-port":     func(s askedService) { r.target(outside, "outside to "+s.name, r.here.Addresses(), s.nodePort()) },
		"external":      func(s askedService) { r.target(outside, "outside to "+s.name, s.externals(), outsidePort) },
		"load-balancer": func(s askedService) { r.target(outside, "outside to "+s.name, s.balancers(), outsidePort) },
		"cluster-ip":    func(s askedService) { r.target(client, "pod to "+s.name, s.clusterIPs(), outsidePort) },
		"for-host": func(s askedService) {
			if !packets { // the node reaches cluster IPs only through its socket hooks
				r.target(host, "host to "+s.name, s.clusterIPs(), outsidePort)
			}
		},
		"health": func(s askedService) { r.target(outside, "outside to "+s.name, r.here.Addresses(), s.nodePort()) },
	} {
		for _, s := range []askedService{{name: name + "-near"}, {name: name + "-far", far: true}} {
			if s.local = name == "health"; s.local && s.far {
				continue
			}
			number++
			s.number = number
			at, backend := r.here, near
			if s.far {
				at, backend = r.there, far
			}
			serveAnswers(t, backend, s.backendPort())
			manifest += s.manifest(at.Name(), backend)
			c.route(t, outside, s.externals(), s.balancers())
			ask(s)
		}
	}
	c.route(t, outside, near.Addresses())
	path := filepath.Join(c.Hub().ServiceDir(), "services.yaml")
	if err := os.WriteFile(path, []byte(manifest), 0o644); err != nil { //nolint:gosec // the service reads the file
		t.Fatal(err)
	}
	c.enforced(t, restartPolicies)
	return r
}

// restartPolicies allow the tested traffic. With them, each packet of a pod is evaluated.
const restartPolicies = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: test}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress:
  - from:
    - podSelector: {matchLabels: {app: client}}
    - ipBlock: {cidr: 0.0.0.0/0}
    - ipBlock: {cidr: "::/0"}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: client, namespace: test}
spec:
  podSelector: {matchLabels: {app: client}}
  policyTypes: [Egress]
  egress:
  - to: [{podSelector: {matchLabels: {app: web}}}]
  - to: [{ipBlock: {cidr: 10.245.0.0/16}}, {ipBlock: {cidr: "fd00:245::/32"}}]
`

// addWithHostPort adds a pod with host ports.
func (n *node) addWithHostPort(t *testing.T) pod.Pod {
	t.Helper()
	p := newPod(t)
	var ports []map[string]any
	for _, protocol := range []string{"TCP", "UDP"} {
		ports = append(ports, map[string]any{"hostPort": hostPort, "containerPort": webPort, "protocol": protocol})
	}
	config, err := cni.PluginConfig(n.CNIConflist(), "1.0.0", map[string]any{"runtimeConfig": map[string]any{
		"labels": []map[string]string{{"key": "app", "value": "web"}}, "portMappings": ports,
	}})
	if err != nil {
		t.Fatal(err)
	}
	result, err := cni.Run(t.Context(), cni.Call{
		Plugin: n.Plugin(), Command: "ADD", ContainerID: p.Name, Netns: p.Netns, IfName: "eth0",
		Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=test;K8S_POD_NAME=" + p.Name, Path: filepath.Dir(n.Plugin()), Config: config,
	})
	if err != nil {
		t.Fatal(err)
	}
	addresses, err := cni.Addresses(result)
	if err != nil {
		t.Fatal(err)
	}
	return p.WithAddresses(addresses)
}

// target adds a target of each protocol and family.
func (r *restarted) target(from pod.Pod, name string, to []netip.Addr, port uint16) {
	for _, a := range to {
		for _, udp := range []bool{false, true} {
			family, protocol := "IPv4", "TCP"
			if a.Is6() {
				family = "IPv6"
			}
			if udp {
				protocol = "UDP"
			}
			r.targets = append(r.targets, probetest.Target{
				Name: fmt.Sprintf("%s by %s %s", name, protocol, family), Netns: from.Netns, UDP: udp,
				To: []netip.AddrPort{netip.AddrPortFrom(a, port)}, Late: r.entries,
			})
		}
	}
}

// entries returns the map entries of both nodes for a client's port on which the client waits for an answer.
func (r *restarted) entries(port uint16) string {
	if r.looked.Add(1) > 3 {
		return ""
	}
	var b strings.Builder
	of := strconv.Itoa(int(port))
	for _, n := range []*node{r.here, r.there} {
		for _, args := range [][]string{
			{"conntrack", "list", "--port", of},
			{"map", "dump", "sl_xl4"},
			{"map", "dump", "sl_xl6"},
			{"map", "dump", "sl_answers4"},
			{"map", "dump", "sl_answers6"},
			{"map", "dump", "sl_pod_answers4"},
			{"map", "dump", "sl_pod_answers6"},
			{"map", "dump", "sl_metrics"},
		} {
			out, err := n.run(context.Background(), args...)
			fmt.Fprintf(&b, "%s of %s, %v:\n", strings.Join(args, " "), n.Name(), err)
			for line := range strings.Lines(string(out)) {
				if args[len(args)-1] == "sl_metrics" || strings.Contains(line, of) {
					b.WriteString("  " + line)
				}
			}
		}
	}
	return b.String()
}

// route adds routes to addresses via the first node, for pairs of an IPv4 and an IPv6 address.
func (c *testCluster) route(t *testing.T, from pod.Pod, to ...[]netip.Addr) {
	t.Helper()
	err := pod.In(from.Netns, func() (err error) {
		for _, pair := range to {
			for family, a := range pair {
				err = errors.Join(err, netlink.RouteReplace(&netlink.Route{
					Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())},
					Gw:  c.nodes[0].Addresses()[family].AsSlice(),
				}))
			}
		}
		return err
	})
	if err != nil {
		t.Fatalf("routes of %s: %v", from.Name, err)
	}
}

// emptyCgroup returns a cgroup without processes.
func emptyCgroup(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	if err := unix.Mount("cgroup2", root, "cgroup2", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(root, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	dir, err := os.MkdirTemp(root, "sluice-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	for at := dir; at != os.TempDir() && at != "/"; at = filepath.Dir(at) {
		if err := os.Chmod(at, 0o755); err != nil { //nolint:gosec // the datapath's user opens the cgroup
			t.Fatal(err)
		}
	}
	return dir
}

// reach waits until every target answers.
func (r *restarted) reach(t *testing.T) {
	t.Helper()
	servicetest.EventuallyNil(t, "every target answers", func() error {
		return probetest.Reach(t.Context(), r.targets...)
	})
}

// during makes connection attempts to every target before, while and after do runs. No attempt may fail.
func (r *restarted) during(t *testing.T, what string, do func() error) {
	t.Helper()
	p, err := probetest.Start(attemptEvery(t), probetest.Patience, r.targets...)
	if err != nil {
		t.Fatal(err)
	}
	p.Wait(t.Context(), 4)
	drops := r.here.drops(t)
	stop := r.health(t)
	if err := do(); err != nil {
		t.Errorf("%s: %v", what, err)
	}
	p.Wait(t.Context(), 4)
	statuses, errs := stop()
	loadBalancer := strings.HasPrefix(what, devnode.LoadBalancer)
	if len(statuses) > 0 && !(loadBalancer && r.forgets) {
		t.Errorf("%s: the health check port answers with %v", what, statuses)
	}
	if loadBalancer && r.forgets {
		errs = nil
	}
	resets := 0
	errs = slices.DeleteFunc(errs, func(err error) bool {
		reset := errors.Is(err, unix.ECONNRESET) || errors.Is(err, io.EOF)
		if what == allKilled {
			// No process keeps the listener: connections that it has not accepted yet are reset, further ones refused.
			return reset || errors.Is(err, unix.ECONNREFUSED)
		}
		if what == devnode.LoadBalancer+killed && reset {
			resets++
			return resets == 1 // the one that the killed process had accepted and not answered
		}
		return false
	})
	if len(errs) > 0 {
		t.Errorf("%s: the health check port does not answer: %v", what, errs)
	}
	tried, listed := 0, false
	for _, result := range p.Stop() {
		tried += result.Tried
		if n := len(result.Failed); n > 0 {
			first := result.Failed[0]
			t.Errorf("%s: %s: %d of %d failed, the first %v", what, result.Name, n, result.Tried, first)
			if port := strconv.Itoa(int(first.From)); !listed {
				out, err := r.here.run(t.Context(), "conntrack", "list", "--port", port)
				t.Logf("the connections with port %s, %v:\n%s", port, err, out)
				listed = true
			}
		}
	}
	t.Logf("%s: %d attempts", what, tried)
	if t.Failed() {
		out, err := r.here.run(t.Context(), "observe", "--verdict", "dropped", "--last", "20")
		t.Logf("dropped before: %v, and now: %v; the last ones, %v:\n%s", drops, r.here.drops(t), err, out)
		out, err = r.here.run(t.Context(), "shares")
		t.Logf("shares of the endpoints, %v:\n%s", err, out)
		t.FailNow()
	}
}

// health sends requests to the health check port until stop is called. stop returns the statuses other than 200, and
// the errors.
func (r *restarted) health(t *testing.T) (stop func() (statuses []string, errs []error)) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	client := &http.Client{Timeout: patience, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			return r.here.host().Dial(ctx, netip.MustParseAddrPort(addr))
		},
	}}
	url := "http://" + netip.AddrPortFrom(r.here.Addresses()[0], healthPort).String()
	var statuses []string
	var errs []error
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			begun := time.Now()
			resp, err := client.Get(url)
			if err != nil {
				// The server closes a connection on which no request has come for a while.
				if !errors.Is(err, io.EOF) || time.Since(begun) < healthTimeout {
					errs = append(errs, err)
				}
			} else {
				if resp.StatusCode != http.StatusOK {
					statuses = append(statuses, resp.Status)
				}
				_ = resp.Body.Close()
			}
			select {
			case <-time.After(5 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	}()
	return func() ([]string, []error) { cancel(); <-done; return statuses, errs }
}

// TestNewConnectionsSucceedWhileProcessesRestart connects through the first node in every way that its programs
// handle, while it restarts and kills each process. It also kills all processes at once, the datapath while the other
// processes are stopped, and starts the datapath with other programs.
func TestNewConnectionsSucceedWhileProcessesRestart(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		mode    string
		packets bool
	}{{"overlay", false}, {"native", true}, {"overlay", true}, {"native", false}} {
		if restartTimes(t) == 1 && (c.mode == "overlay") == c.packets {
			continue // the short form
		}
		t.Run(fmt.Sprintf("%s, by packets %t", c.mode, c.packets), func(t *testing.T) {
			t.Parallel()
			r := newRestarted(t, c.mode, c.packets, "")
			r.reach(t)
			for range restartTimes(t) {
				r.disturb(t)
			}
		})
	}
}

// disturb restarts and kills each process of the first node while the prober connects to every target.
func (r *restarted) disturb(t *testing.T) {
	t.Helper()
	ctx, n := t.Context(), r.here
	log, err := os.ReadFile(n.Log(devnode.Datapath))
	if err != nil {
		t.Fatal(err)
	}
	for _, service := range n.Services() {
		r.during(t, service+" restarted", func() error { return n.Restart(ctx, service) })
		r.during(t, service+killed, func() error { return errors.Join(n.Kill(ctx, service), n.Start(ctx, service)) })
	}
	r.during(t, allKilled, func() error {
		var errs []error
		for _, service := range n.Services() {
			errs = append(errs, n.Kill(ctx, service))
		}
		for _, service := range n.Services() {
			errs = append(errs, n.Start(ctx, service))
		}
		return errors.Join(errs...)
	})
	r.during(t, "datapath killed while no other process answers", func() error { return r.alone(t) })
	servicetest.EventuallyNil(t, "the datapath serves", func() error { return n.Serving(ctx, devnode.Datapath) })
	now, err := os.ReadFile(n.Log(devnode.Datapath))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(now[len(log):]) {
		if bytes.Contains(line, []byte("difference repaired")) {
			t.Errorf("the datapath found a difference at its start, although no other program changed anything: %s", line)
		}
	}
	r.during(t, "datapath with other programs", func() error {
		other := append(slices.Clone(r.args), "--events-per-second=65")
		return errors.Join(
			n.SetArgs(devnode.Datapath, other...), n.Restart(ctx, devnode.Datapath),
			n.SetArgs(devnode.Datapath, r.args...), n.Restart(ctx, devnode.Datapath),
		)
	})
	r.during(t, "the other node's datapath killed", func() error {
		return errors.Join(r.there.Kill(ctx, devnode.Datapath), r.there.Start(ctx, devnode.Datapath))
	})
}

// alone kills the datapath and starts it again while its node's other processes are stopped.
func (r *restarted) alone(t *testing.T) (err error) {
	n := r.here
	for _, service := range n.Services() {
		if service == devnode.Datapath {
			continue
		}
		pid, err := n.PID(service)
		if err != nil {
			return err
		}
		if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, unix.Kill(pid, unix.SIGCONT)) }()
	}
	if err := n.Kill(t.Context(), devnode.Datapath); err != nil {
		return err
	}
	// The datapath does not serve before the others answer, but within this time it completes the steps that need no
	// other process.
	const alone = 2 * time.Second
	ctx, cancel := context.WithTimeout(t.Context(), alone)
	defer cancel()
	if err := n.Start(ctx, devnode.Datapath); !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("the start while no other process answers: %w", err)
	}
	return nil
}

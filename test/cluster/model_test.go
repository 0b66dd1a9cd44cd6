// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	loadbalancerv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
	"github.com/sluice-net/sluice/test/model"
)

// modelManager owns the policies and Services of the model.
const modelManager = "model"

// Sizes of a run.
const (
	questionsOfRound = 240 // in two batches
	asked            = 48  // concurrent questions
	mostMismatches   = 10  // a run ends after the round that exceeds it
	// shortQuestions is the default, for `make test`.
	shortQuestions = 2 * questionsOfRound
)

// outsiderMTU is the MTU of the outsider's routes. Its packets fit into the tunnel, so path MTU discovery drops none.
const outsiderMTU = 1400

// Timeouts of questions: must be denied or either, must pass, and must pass at the second try.
const (
	deniedTime = 300 * time.Millisecond
	passTime   = 5 * time.Second
	againTime  = 10 * time.Second
)

// modelOptions are the settings of `make test-model`.
type modelOptions struct {
	seed, round uint64
	questions   int
	question    string // ID of the only question to ask; empty: all
	modes       []string
	long        bool
}

func readModelOptions(t *testing.T) modelOptions {
	t.Helper()
	number := func(name string, unset uint64) uint64 {
		text := os.Getenv(name)
		if text == "" {
			return unset
		}
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return n
	}
	o := modelOptions{
		questions: int(number("SLUICE_TEST_MODEL_QUESTIONS", shortQuestions)),
		seed:      number("SLUICE_TEST_MODEL_SEED", 1), round: number("SLUICE_TEST_MODEL_ROUND", 0), modes: modes,
		question: os.Getenv("SLUICE_TEST_MODEL_QUESTION"), long: os.Getenv("SLUICE_TEST_MODEL_QUESTIONS") != "",
	}
	if o.long && os.Getenv("SLUICE_TEST_MODEL_SEED") == "" {
		o.seed = uint64(rand.Uint32())
	}
	if mode := os.Getenv("SLUICE_TEST_MODEL_MODE"); mode != "" {
		o.modes = []string{mode}
	}
	return o
}

// modelRun compares a cluster with the model, in one mode.
type modelRun struct {
	*testCluster
	t      *testing.T
	mode   string
	o      modelOptions
	world  *model.World
	agents map[string]*agent
	macs   map[string]net.HardwareAddr // uplink by node
	heard  heard
	events *auditedEvents

	serviceKeys map[string]*loadbalancerv1.ObjectKey
	round       uint64
	away        map[string]bool // nodes without a running datapath
	counts      map[model.Kind]*kindCounts
	denied      []*given // questions of the round that have not passed
	late        int
	reported    int
	mismatches  []string
}

// kindCounts counts the questions of a kind by expectation.
type kindCounts struct{ asked, passed, denied, either int }

// newModelRun starts a cluster of two nodes, and plans six pods and an outsider.
func newModelRun(t *testing.T, mode string, o modelOptions) *modelRun {
	t.Helper()
	masquerade := o.seed%2 == 1
	c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: mode, Options: devnode.Options{
		Args: map[string][]string{
			devnode.Datapath: {
				fmt.Sprintf("--masquerade-enabled=%t", masquerade), "--events-per-second=2000",
			},
			devnode.LoadBalancer: {"--external-ips-allow=203.0.113.0/24,2001:db8:8::/64"},
		},
	}})
	r := &modelRun{
		testCluster: c, t: t, mode: mode, o: o, agents: map[string]*agent{}, macs: map[string]net.HardwareAddr{},
		heard:       heard{all: map[string][]reply{}},
		events:      &auditedEvents{seen: map[string]bool{}, drops: map[netip.AddrPort][]string{}},
		serviceKeys: map[string]*loadbalancerv1.ObjectKey{}, counts: map[model.Kind]*kindCounts{},
		world: &model.World{Native: mode == "native", Masquerade: masquerade},
	}
	for _, n := range c.nodes {
		r.addNode(n)
	}
	r.world.Pods = modelPods(o.seed, r.world.Nodes)
	r.world.Outsider = r.addOutsider()
	return r
}

// modelPods generates six pods. Two have host ports. None has an address yet.
func modelPods(seed uint64, nodes []*model.Node) (pods []*model.Pod) {
	g := model.NewGenerator(seed, 1<<40)
	for i := range 6 {
		p := &model.Pod{
			Name: fmt.Sprintf("pod-%d", i), Namespace: model.Namespaces[i/2%2], Labels: g.Labels(), Ports: g.NamedPorts(),
			Node: nodes[i%2],
		}
		if i < 2 {
			p.HostPorts = []model.HostPort{
				{Host: uint16(9100 + i), Container: 8080}, {Host: uint16(9200 + i), Container: 9090},
			}
		}
		pods = append(pods, p)
	}
	return pods
}

func (r *modelRun) nodeOf(n *model.Node) *node {
	i := slices.IndexFunc(r.nodes, func(have *node) bool { return have.Name() == n.Name })
	return r.nodes[i]
}

func pairOf(all []netip.Addr) model.Pair {
	return model.Pair{addressOf(all, netip.IPv4Unspecified()), addressOf(all, netip.IPv6Unspecified())}
}

// addNode adds a node to the model, and starts the agent of its host.
func (r *modelRun) addNode(n *node) *model.Node {
	m := &model.Node{Name: n.Name(), Addresses: pairOf(n.Addresses()), Inside: pairOf(n.overlay())}
	for _, p := range n.PodCIDRs() {
		if p.Addr().Is4() {
			m.Range[model.IPv4] = p
		} else {
			m.Range[model.IPv6] = p
		}
	}
	a := &agent{Pod: n.host(), name: n.Name()}
	a.serveQuestions(r.t, &r.heard)
	r.agents[m.Name] = a
	r.macs[m.Name], _ = hardware(r.t, n.Netns(), "eth0")
	r.world.Nodes = append(r.world.Nodes, m)
	r.events.follow(r.t, n)
	return m
}

// addOutsider adds a machine with three addresses of each family to the link of the nodes. Its routes to Service
// addresses lead to the first node, and its routes to pod CIDRs to the node of the CIDR.
func (r *modelRun) addOutsider() model.Outsider {
	p := r.plug(r.t)
	o := model.Outsider{Name: "outsider", Addresses: []model.Pair{{p.IPv4, p.IPv6}}}
	err := pod.In(p.Netns, func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		for _, last := range []byte{201, 202} {
			var pair model.Pair
			for f, a := range []netip.Addr{p.IPv4, p.IPv6} {
				b, bits := a.AsSlice(), []int{24, 64}[f]
				b[len(b)-1] = last
				pair[f], _ = netip.AddrFromSlice(b)
				err = errors.Join(err, netlink.AddrAdd(link, &netlink.Addr{
					IPNet: &net.IPNet{IP: b, Mask: net.CIDRMask(bits, a.BitLen())}, Flags: 2, // IFA_F_NODAD
				}))
			}
			o.Addresses = append(o.Addresses, pair)
		}
		routes, failed := netlink.RouteList(link, netlink.FAMILY_ALL)
		err = errors.Join(err, failed)
		for _, route := range routes {
			if route.MTU = outsiderMTU; !route.Dst.IP.IsLinkLocalUnicast() {
				err = errors.Join(err, netlink.RouteReplace(&route))
			}
		}
		return err
	})
	if err != nil {
		r.t.Fatal(err)
	}
	for f, prefixes := range [][]string{
		{"10.96.9.0/24", "203.0.113.0/24", "198.51.100.0/24"}, {"fd00:96:9::/64", "2001:db8:8::/64", "2001:db8:7::/64"},
	} {
		for _, prefix := range prefixes {
			r.routeTo(p, netip.MustParsePrefix(prefix), r.world.Nodes[0].Addresses[f])
		}
		for _, n := range r.world.Nodes {
			r.routeTo(p, n.Range[f], n.Addresses[f])
		}
	}
	a := &agent{Pod: p, name: o.Name, wire: newWire(r.t, p.Netns)}
	var all []netip.Addr
	for _, pair := range o.Addresses {
		all = append(all, pair[:]...)
	}
	a.serveQuestions(r.t, &r.heard, all...)
	r.agents[o.Name] = a
	return o
}

// routeTo adds a route to the namespace of the outsider.
func (r *modelRun) routeTo(p pod.Pod, prefix netip.Prefix, gateway netip.Addr) {
	r.t.Helper()
	err := pod.In(p.Netns, func() error {
		return netlink.RouteReplace(&netlink.Route{
			Dst: &net.IPNet{
				IP: prefix.Masked().Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen()),
			},
			Gw: gateway.AsSlice(), MTU: outsiderMTU,
		})
	})
	if err != nil {
		r.t.Fatalf("route to %s: %v", prefix, err)
	}
}

// addContainer runs CNI ADD for a pod of the model.
func (n *node) addContainer(ctx context.Context, live pod.Pod, p *model.Pod) ([]netip.Addr, error) {
	var labels []map[string]string
	for _, k := range slices.Sorted(maps.Keys(p.Labels)) {
		labels = append(labels, map[string]string{"key": k, "value": p.Labels[k]})
	}
	runtime := map[string]any{"labels": labels}
	var ports []map[string]any
	for _, h := range p.HostPorts {
		for _, protocol := range []string{"TCP", "UDP"} {
			ports = append(ports, map[string]any{"hostPort": h.Host, "containerPort": h.Container, "protocol": protocol})
		}
	}
	if len(ports) > 0 {
		runtime["portMappings"] = ports
	}
	config, err := cni.PluginConfig(n.CNIConflist(), "1.0.0", map[string]any{"runtimeConfig": runtime})
	if err != nil {
		return nil, err
	}
	result, err := cni.Run(ctx, cni.Call{
		Plugin: n.Plugin(), Command: "ADD", ContainerID: live.Name, Netns: live.Netns, IfName: "eth0",
		Args: fmt.Sprintf("IgnoreUnknown=1;K8S_POD_NAMESPACE=%s;K8S_POD_NAME=%s", p.Namespace, p.Name),
		Path: filepath.Dir(n.Plugin()), Config: config,
	})
	if err != nil {
		return nil, fmt.Errorf("ADD %s at %s: %w", p.Name, n.Name(), err)
	}
	return cni.Addresses(result)
}

// apply replaces the policies and Services of all nodes, and waits until the nodes enforce them.
func (r *modelRun) apply() {
	r.t.Helper()
	policies, err := r.world.Policies.YAML()
	if err != nil {
		r.t.Fatal(err)
	}
	r.applyPolicies(policies)
	r.applyServices()
}

func (r *modelRun) applyPolicies(manifests []byte) {
	r.t.Helper()
	for _, n := range r.nodes {
		ctx, cancel := context.WithTimeout(r.t.Context(), patience)
		service := policyv1.NewPolicyServiceClient(dial(r.t, n.Node, devnode.Policy))
		answer, err := service.ReplacePolicies(ctx, &policyv1.ReplacePoliciesRequest{
			Manifests: manifests, Manager: modelManager, AllowEmpty: true,
		})
		cancel()
		if err != nil {
			r.t.Fatalf("policies of %s: %v\n%s", n.Name(), err, manifests)
		}
		servicetest.EventuallyNil(r.t, n.Name()+" enforces the policies", func() error {
			ctx, cancel := context.WithTimeout(r.t.Context(), patience)
			defer cancel()
			got, err := service.WaitForRevision(ctx, &policyv1.WaitForRevisionRequest{Revision: answer.GetRevision()})
			if err == nil && (len(got.GetDisconnected()) > 0 || len(got.GetEnforcing()) == 0) {
				err = fmt.Errorf("%v", got)
			}
			return err
		})
	}
}

func (r *modelRun) applyServices() {
	r.t.Helper()
	manifests, err := r.world.ServicesYAML()
	if err != nil {
		r.t.Fatal(err)
	}
	have := map[string]*loadbalancerv1.ObjectKey{}
	add := func(kind, name string) {
		have[kind+" "+name] = &loadbalancerv1.ObjectKey{Kind: kind, Namespace: model.ServiceNamespace, Name: name}
	}
	for _, s := range r.world.Services {
		add("Service", s.Name)
		for _, f := range s.Families {
			add("EndpointSlice", s.SliceName(f))
		}
	}
	var gone []*loadbalancerv1.ObjectKey
	for name, key := range r.serviceKeys {
		if have[name] == nil {
			gone = append(gone, key)
		}
	}
	r.serviceKeys = have
	for _, n := range r.nodes {
		r.applyServicesTo(n, manifests, gone)
	}
}

func (r *modelRun) applyServicesTo(n *node, manifests []byte, gone []*loadbalancerv1.ObjectKey) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	service := loadbalancerv1.NewLoadBalancerServiceClient(dial(r.t, n.Node, devnode.LoadBalancer))
	if len(gone) > 0 {
		if _, err := service.DeleteServices(ctx, &loadbalancerv1.DeleteServicesRequest{
			Keys: gone, Manager: modelManager,
		}); err != nil {
			r.t.Fatalf("delete Services of %s: %v", n.Name(), err)
		}
	}
	answer, err := service.UpsertServices(ctx, &loadbalancerv1.UpsertServicesRequest{
		Manifests: manifests, Manager: modelManager,
	})
	if err != nil {
		r.t.Fatalf("Services of %s: %v\n%s", n.Name(), err, manifests)
	}
	servicetest.EventuallyNil(r.t, n.Name()+" enforces the Services", func() error {
		ctx, cancel := context.WithTimeout(r.t.Context(), patience)
		defer cancel()
		got, err := service.WaitForRevision(ctx, &loadbalancerv1.WaitForRevisionRequest{
			Revision: answer.GetRevision(), Ended: true,
		})
		if err == nil && (len(got.GetDisconnected()) > 0 || len(got.GetEnforcing()) == 0) {
			err = fmt.Errorf("%v", got)
		}
		return err
	})
}

// auditedEvents collects the events of audit mode and of drops from all nodes.
type auditedEvents struct {
	mu   sync.Mutex
	seen map[string]bool
	// drops describes drop events by source. Later fragments have port 0.
	drops map[netip.AddrPort][]string
	lost  uint64
}

func auditedKey(protocol string, from, to netip.AddrPort) string {
	return fmt.Sprintf("%s %s %s", protocol, from, to)
}

// follow observes a node until the test ends, across restarts of the datapath.
func (e *auditedEvents) follow(t *testing.T, n *node) {
	t.Helper()
	observer := datapathv1.NewObserverServiceClient(dial(t, n.Node, devnode.Datapath))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			stream, err := observer.Observe(ctx, &datapathv1.ObserveRequest{
				Follow: true, Verdicts: []datapathv1.Verdict{
					datapathv1.Verdict_VERDICT_AUDITED, datapathv1.Verdict_VERDICT_DROPPED,
				},
			})
			for err == nil {
				var answer *datapathv1.ObserveResponse
				if answer, err = stream.Recv(); err == nil {
					e.add(answer)
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
}

func (e *auditedEvents) add(answer *datapathv1.ObserveResponse) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lost += answer.GetLost().GetCount()
	f := answer.GetFlow()
	if f == nil {
		return
	}
	end := func(of *datapathv1.FlowEnd) netip.AddrPort {
		a, _ := netip.ParseAddr(of.GetAddress())
		return netip.AddrPortFrom(a, uint16(of.GetPort()))
	}
	protocol := strings.TrimPrefix(f.GetProtocol().String(), "PROTOCOL_")
	if f.GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED {
		from := end(f.GetSource())
		e.drops[from] = append(e.drops[from], fmt.Sprintf("%s drops %s %s to %s (%s)", f.GetNodeName(), protocol,
			end(f.GetSource()), end(f.GetDestination()), f.GetReason()))
		return
	}
	e.seen[auditedKey(protocol, end(f.GetSource()), end(f.GetDestination()))] = true
}

// dropsOf returns the drops from a source, with later fragments from its address if fragments is set.
func (e *auditedEvents) dropsOf(from netip.AddrPort, fragments bool) []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := slices.Clone(e.drops[from])
	if fragments {
		all = append(all, e.drops[netip.AddrPortFrom(from.Addr(), 0)]...)
	}
	return all
}

func (e *auditedEvents) has(q *model.Question, report model.Report) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.seen[auditedKey(string(q.Proto), report.From, report.To)]
}

// TestClusterDoesWhatTheModelSays compares connections in a cluster with the predictions of package model, under random
// policies and Services, while labels, audit mode, endpoints, processes and nodes change.
func TestClusterDoesWhatTheModelSays(t *testing.T) {
	t.Parallel()
	o := readModelOptions(t)
	for _, mode := range o.modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			r := newModelRun(t, mode, o)
			r.play()
		})
	}
}

// play runs rounds until the number of questions of the options is reached.
func (r *modelRun) play() {
	r.t.Logf("seed %d, %s, masquerade %t", r.o.seed, r.mode, r.world.Masquerade)
	for r.round = range r.o.round {
		r.skip(r.plan())
	}
	for _, p := range r.world.Pods {
		r.addForModel(p)
		if p.Audited {
			r.audit(p)
		}
	}
	begun := time.Now()
	total := 0
	for r.round = r.o.round; total < r.o.questions && len(r.mismatches) < mostMismatches; r.round++ {
		total += r.playRound(r.plan())
		if r.o.long && r.round%5 == 4 {
			r.t.Logf("round %d: %d questions after %s, %d mismatches", r.round, total, time.Since(begun).Round(time.Second),
				len(r.mismatches))
		}
	}
	r.summary(total, begun)
}

func (r *modelRun) summary(total int, begun time.Time) {
	var lines strings.Builder
	decided := 0
	for _, k := range slices.Sorted(maps.Keys(r.counts)) {
		c := r.counts[k]
		decided += c.passed + c.denied
		fmt.Fprintf(&lines, "\n  %-14s %6d asked, %6d have to pass, %6d have to be denied, %5d either", k, c.asked, c.passed,
			c.denied, c.either)
	}
	r.t.Logf("%s, seed %d: %d questions in %d rounds and %s, %d with exactly one right answer; %d mismatches; "+
		"%d were answered at the second try; %d reports of audit mode, %d events lost%s",
		r.mode, r.o.seed, total, r.round-r.o.round, time.Since(begun).Round(time.Second), decided, len(r.mismatches), r.late,
		r.reported, r.events.lost, &lines)
}

// given is a question with the prediction and the result.
type given struct {
	*model.Question
	expected model.Expectation
	answer   reply
	err      error
}

// batch generates questions, asks them and reports mismatches.
func (r *modelRun) batch(g *model.Generator, n int) {
	var all []*given
	for range n {
		q := g.NewQuestion(r.world)
		if r.o.question == "" || r.o.question == q.ID {
			all = append(all, &given{Question: q, expected: r.world.Expect(q)})
		}
	}
	for _, m := range r.ask(all) {
		r.mismatch(m.ID, m.why)
	}
	for _, q := range all {
		if q.expected.MustDeny && len(r.heard.of(q.ID)) == 0 {
			r.denied = append(r.denied, q)
		}
	}
}

// passedLate reports denied questions of the round that have passed after their timeout.
func (r *modelRun) passedLate() {
	for _, q := range r.denied {
		if len(r.heard.of(q.ID)) > 0 {
			r.mismatch(q.ID, r.tell(q, "PASSED late although it is denied"))
		}
	}
	r.denied = nil
}

// wrong is a mismatch.
type wrong struct{ ID, why string }

// tell describes the result of a question.
func (r *modelRun) tell(q *given, why string) string {
	return fmt.Sprintf("%s\n  question %s: %s\n  model: it %s\n  cluster: %s%s", why, q.ID, q, q.expected,
		describe(q.answer, q.err), r.arrived(q))
}

// ask asks questions concurrently, and returns the mismatches.
func (r *modelRun) ask(all []*given) (mismatches []wrong) {
	var wg sync.WaitGroup
	places := make(chan struct{}, asked)
	for _, q := range all {
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			r.askOne(q, passTime)
		})
	}
	wg.Wait()
	for _, q := range all {
		r.count(q)
		why := r.judge(q)
		if why != "" && q.expected.MustPass && r.dropped(q) {
			why = r.again(q, why)
		}
		if why == "" {
			why = r.reports(q)
		}
		if why != "" {
			mismatches = append(mismatches, wrong{q.ID, r.tell(q, why)})
		}
	}
	return mismatches
}

func (r *modelRun) arrived(q *given) string {
	var b strings.Builder
	for _, h := range r.heard.of(q.ID) {
		fmt.Fprintf(&b, "; %s has received it from %s", h.Server, h.Source)
	}
	from := q.Source
	if q.Way.Spoofed.IsValid() {
		from = netip.AddrPortFrom(q.Way.Spoofed, from.Port())
	}
	for _, drop := range r.events.dropsOf(from, q.Way.Fragments > 1 || q.Way.Size > 1000) {
		b.WriteString("; " + drop)
	}
	return b.String()
}

func (r *modelRun) count(q *given) {
	c := r.counts[q.Kind]
	if c == nil {
		c = &kindCounts{}
		r.counts[q.Kind] = c
	}
	c.asked++
	switch {
	case q.expected.MustPass:
		c.passed++
	case q.expected.MustDeny:
		c.denied++
	default:
		c.either++
	}
}

// askOne asks a question, and waits for its arrival at a server if the answer does not prove it.
func (r *modelRun) askOne(q *given, timeout time.Duration) {
	if !q.expected.MustPass {
		timeout = deniedTime
	}
	q.answer, q.err = r.agentOf(q.Question).ask(q.Question, timeout)
	// There is no answer to a forged source, and the kernel answers echo requests before the server records them.
	if !q.expected.NoAnswer && (!model.IsEcho(q.Proto) || q.err != nil) {
		return
	}
	for until := time.Now().Add(timeout); time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
		if len(r.heard.of(q.ID)) > 0 {
			return
		}
	}
}

// dropped reports whether a question has not arrived or has no answer.
func (r *modelRun) dropped(q *given) bool {
	return len(r.heard.of(q.ID)) == 0 || !q.expected.NoAnswer && q.err != nil
}

// judge compares the answer and the record of the servers with the prediction. It returns "" if they agree.
func (r *modelRun) judge(q *given) string {
	all := r.heard.of(q.ID)
	if q.err == nil && len(all) == 0 {
		return "ANSWERED, but no server has received the question"
	}
	for _, h := range all {
		i := slices.IndexFunc(q.expected.Servers, func(s model.Server) bool { return s.Name == h.Server })
		switch {
		case q.expected.MustDeny:
			return "PASSED although it is denied"
		case i < 0:
			return "PASSED to the wrong server"
		case !slices.Contains(q.expected.Servers[i].Sources, h.Source):
			return "WRONG source at the server"
		}
	}
	if q.err == nil && q.answer.from.IsValid() && q.answer.from != q.To && !mayAnswer(q) {
		return "WRONG source of the answer"
	}
	if q.expected.MustPass && r.dropped(q) {
		return "DROPPED although it is allowed"
	}
	return ""
}

// mayAnswer reports whether the model allows the server to answer from this other address.
func mayAnswer(q *given) bool {
	return q.answer.from.Port() == q.To.Port() && slices.ContainsFunc(q.expected.Servers, func(s model.Server) bool {
		return s.Name == q.answer.Server && slices.Contains(s.Answers, q.answer.from.Addr())
	})
}

// again repeats a dropped question with a longer timeout, because the machine may be busy.
func (r *modelRun) again(q *given, why string) string {
	time.Sleep(100 * time.Millisecond) // for the events
	repeated := *q.Question
	repeated.ID += "-again"
	repeated.Source = netip.AddrPortFrom(q.Source.Addr(), q.Source.Port()^1)
	second := &given{Question: &repeated, expected: r.world.Expect(&repeated)}
	r.askOne(second, againTime)
	if also := r.judge(second); also != "" {
		return fmt.Sprintf("%s, twice: first %s; then %s", also, describe(q.answer, q.err),
			describe(second.answer, second.err))
	}
	r.late++
	r.t.Logf("round %d: answered at the second try: %s: %s: %s%s", r.round, why, q, describe(q.answer, q.err),
		r.arrived(q))
	return ""
}

// reports compares the events of audit mode with the prediction. It returns "" if they agree.
func (r *modelRun) reports(q *given) string {
	all := r.heard.of(q.ID)
	if len(all) == 0 {
		return ""
	}
	i := slices.IndexFunc(q.expected.Servers, func(s model.Server) bool { return s.Name == all[0].Server })
	if i < 0 {
		return ""
	}
	for _, report := range q.expected.Servers[i].Audited {
		if !report.From.IsValid() || r.away[report.Pod.Node.Name] {
			continue
		}
		r.reported++
		for until := time.Now().Add(patience / 6); !r.events.has(q.Question, report); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(until) {
				return fmt.Sprintf("%s has not reported the connection in audit mode", report.Pod.Name)
			}
		}
	}
	return ""
}

// mismatch reports an error with the objects of the round and the command that repeats the question.
func (r *modelRun) mismatch(id, what string) {
	r.t.Helper()
	r.mismatches = append(r.mismatches, what)
	policies, err := r.world.Policies.YAML()
	if err != nil {
		r.t.Error(err)
	}
	services, err := r.world.ServicesYAML()
	if err != nil {
		r.t.Error(err)
	}
	var pods strings.Builder
	for _, p := range r.world.Pods {
		fmt.Fprintf(&pods, "  %s/%s at %s, %v, %v, %v, audited %t\n", p.Namespace, p.Name, p.Node.Name, p.Addresses,
			p.Labels, p.Ports, p.Audited)
	}
	r.t.Errorf("seed %d, round %d, %s: %s\nrepeat the round: make test-model SEED=%d MODE=%s ROUND=%d QUESTIONS=%d; "+
		"only this question: QUESTION=%s\npods:\n%spolicies:\n%s\nServices:\n%s", r.o.seed, r.round, r.mode, what,
		r.o.seed, r.mode, r.round, questionsOfRound, id, &pods, policies, services)
}

// relabel changes a label of a pod, and waits until all nodes have its new identity.
func (r *modelRun) relabel(p *model.Pod, key, value string) {
	r.t.Helper()
	n := r.nodeOf(p.Node)
	live := r.agents[p.Name].Pod
	datapath := datapathv1.NewDatapathServiceClient(dial(r.t, n.Node, devnode.Datapath))
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	got, err := datapath.GetEndpoint(ctx, &datapathv1.GetEndpointRequest{Owner: ownerOf(live)})
	if err != nil {
		r.t.Fatal(err)
	}
	e := got.GetEndpoint()
	labels := slices.Clone(e.GetGivenLabels())
	for i, l := range labels {
		if l.GetKey() == key {
			labels[i] = &workloadv1.Label{Source: l.GetSource(), Key: key, Value: value}
		}
	}
	answer, err := datapath.UpdateEndpoint(ctx, &datapathv1.UpdateEndpointRequest{
		Owner: e.GetOwner(), Manager: e.GetManager(), Labels: &datapathv1.GivenLabels{Labels: labels},
	})
	if err != nil {
		r.t.Fatalf("label %s=%s of %s: %v", key, value, p.Name, err)
	}
	r.known(p, answer.GetEndpoint().GetIdentity())
}

// namePorts sets the named ports of a pod, and returns its new identity.
func (r *modelRun) namePorts(p *model.Pod) (identity uint32) {
	r.t.Helper()
	datapath := datapathv1.NewDatapathServiceClient(dial(r.t, r.nodeOf(p.Node).Node, devnode.Datapath))
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	ports := &datapathv1.GivenPorts{}
	for _, n := range p.Ports {
		ports.NamedPorts = append(ports.NamedPorts, &workloadv1.NamedPort{
			Name: n.Name, Port: uint32(n.Port),
			Protocol: netv1.Protocol(netv1.Protocol_value["PROTOCOL_"+string(n.Protocol)]),
		})
	}
	owner := ownerOf(r.agents[p.Name].Pod)
	got, err := datapath.GetEndpoint(ctx, &datapathv1.GetEndpointRequest{Owner: owner})
	if err != nil {
		r.t.Fatal(err)
	}
	answer, err := datapath.UpdateEndpoint(ctx, &datapathv1.UpdateEndpointRequest{
		Owner: owner, Manager: got.GetEndpoint().GetManager(), NamedPorts: ports,
	})
	if err != nil {
		r.t.Fatalf("named ports of %s: %v", p.Name, err)
	}
	return answer.GetEndpoint().GetIdentity()
}

func ownerOf(p pod.Pod) *workloadv1.Owner {
	return &workloadv1.Owner{ContainerId: p.Name, InterfaceName: "eth0"}
}

// audit sets the audit mode of a pod.
func (r *modelRun) audit(p *model.Pod) {
	r.t.Helper()
	datapath := datapathv1.NewDatapathServiceClient(dial(r.t, r.nodeOf(p.Node).Node, devnode.Datapath))
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	_, err := datapath.SetAuditMode(ctx, &datapathv1.SetAuditModeRequest{
		Target: &datapathv1.SetAuditModeRequest_Owner{Owner: ownerOf(r.agents[p.Name].Pod)}, Enabled: p.Audited,
	})
	if err != nil {
		r.t.Fatalf("audit mode of %s: %v", p.Name, err)
	}
}

// forget stops a node and removes it from the cluster.
func (r *modelRun) forget(n *node) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	if err := n.Down(ctx); err != nil {
		r.t.Fatal(err)
	}
	r.nodes = slices.DeleteFunc(r.nodes, func(have *node) bool { return have == n })
	_, err := r.nodes[0].cluster.ForgetNode(ctx, &identityv1.ForgetNodeRequest{Name: n.Name(), Force: true})
	if err != nil {
		r.t.Fatalf("forget %s: %v", n.Name(), err)
	}
}

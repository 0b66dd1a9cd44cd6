// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/internal/failures"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// failure is one row: the component that is down, and the expected effects.
type failure struct {
	away string
	take func(t *testing.T, n *testNode) // away it goes
	give func(t *testing.T, n *testNode) // and comes back
	// refill uses the space in a full store that a deletion has freed in the meantime; nil if no deletion frees
	// space.
	refill func(t *testing.T, n *testNode)

	// Expected values of the columns, in the order of columns.
	connections, begun, enforced, apply, known, fresh, state, check, del, status, later, gc, shown, unready string
	// Expected parts of the error of an ADD with new labels, if it fails.
	says []string
	// Expected parts of the output of `sluice status`.
	prints []string
	// Expected parts of the /readyz answer of a process that is not ready.
	probes []string
}

// columns are the columns of the first table.
var columns = []string{
	"unavailable", "connections", "new connections", "enforced policies", "`policy apply`", "ADD, known labels",
	"ADD, new labels", "`endpoint events` of the container", "CHECK", "DEL", "STATUS", "STATUS after 60 s", "GC",
	"`sluice status`", "`/readyz` is 503 of",
}

func (f *failure) row() failures.Row {
	return failures.Row{Cells: []string{
		f.away, f.connections, f.begun, f.enforced, f.apply, f.known, f.fresh, f.state, f.check, f.del, f.status, f.later,
		f.gc, f.shown, f.unready,
	}, Says: [][]string{f.says, f.prints, f.probes}}
}

// killed returns functions that kill a process and start it again.
func killed(service string) (take, give func(*testing.T, *testNode)) {
	take = func(t *testing.T, n *testNode) {
		ctx, cancel := deadline(t)
		defer cancel()
		if err := n.Kill(ctx, service); err != nil {
			t.Fatal(err)
		}
	}
	give = func(t *testing.T, n *testNode) {
		ctx, cancel := deadline(t)
		defer cancel()
		if err := n.Start(ctx, service); err != nil {
			t.Fatal(err)
		}
	}
	return take, give
}

// filled returns functions that fill the file system of a service's state until a change fails, because a store has
// free pages of its own, and that free the space again.
func filled(service string, change, back func(ctx context.Context, n *testNode, i int) error,
) (take, refill, give func(*testing.T, *testNode)) {
	changed := 0
	refill = func(t *testing.T, n *testNode) {
		ctx, cancel := deadline(t)
		defer cancel()
		for change != nil && change(ctx, n, changed) == nil {
			if changed++; changed == 2000 {
				t.Fatal("2,000 changes succeeded on a full disk")
			}
		}
	}
	take = func(t *testing.T, n *testNode) {
		n.smallDisk(t, service)()
		refill(t, n)
	}
	give = func(t *testing.T, n *testNode) {
		ctx, cancel := deadline(t)
		defer cancel()
		if err := os.Remove(filepath.Join(n.Paths().ServiceStateDir(service), "filler")); err != nil {
			t.Fatal(err)
		}
		for i := range changed + 1 { // the last change was refused, but may have been stored
			if back == nil {
				break
			}
			servicetest.EventuallyNil(t, "the change is reverted", func() error { return back(ctx, n, i) })
		}
	}
	return take, refill, give
}

// fullOwner returns the owner with a number, for filling the stores.
func fullOwner(i int) *workloadv1.Owner {
	return &workloadv1.Owner{ContainerId: fmt.Sprintf("%0100d", i), InterfaceName: "eth0"}
}

// fills are functions that make and revert a change of each service's state.
var fills = map[string][2]func(ctx context.Context, n *testNode, i int) error{
	devnode.IPAM: {
		func(ctx context.Context, n *testNode, i int) error { return n.confirmed(ctx, fullOwner(i)) },
		func(ctx context.Context, n *testNode, i int) error {
			_, err := n.ipam.Release(ctx, &ipamv1.ReleaseRequest{Owner: fullOwner(i)})
			return err
		},
	},
	devnode.Identity: {
		func(ctx context.Context, n *testNode, i int) error {
			_, err := n.identity.AllocateIdentity(ctx, &identityv1.AllocateIdentityRequest{
				Labels: []*workloadv1.Label{{Source: "k8s", Key: "app", Value: "full"}}, Reference: fmt.Sprintf("%0250d", i),
				Scope: identityv1.Scope_SCOPE_NODE_LOCAL,
			})
			return err
		},
		func(ctx context.Context, n *testNode, i int) error {
			_, err := n.identity.ReleaseIdentity(ctx, &identityv1.ReleaseIdentityRequest{
				Holder: &identityv1.ReleaseIdentityRequest_Reference{Reference: fmt.Sprintf("%0250d", i)},
			})
			return err
		},
	},
	devnode.Policy: {
		func(ctx context.Context, n *testNode, i int) error {
			_, err := n.policy.UpsertPolicies(ctx, &policyv1.UpsertPoliciesRequest{
				Manifests: fmt.Appendf(nil, "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\n"+
					"metadata: {name: full%d, annotations: {a: %s}}\nspec: {podSelector: {matchLabels: {app: full}}}\n", i,
					strings.Repeat("x", 2000)),
				DefaultNamespace: "test",
			})
			return err
		},
		func(ctx context.Context, n *testNode, i int) error {
			_, err := n.policy.DeletePolicies(ctx, &policyv1.DeletePoliciesRequest{
				Keys: []*policyv1.PolicyKey{{Kind: "NetworkPolicy", Namespace: "test", Name: fmt.Sprintf("full%d", i)}},
			})
			return err
		},
	},
	devnode.Datapath: {nil, nil}, // each record is a separate file
}

// rows returns the rows of the tables in docs/failures.md.
func rows() []failure {
	gone := func(service string, f failure) failure {
		f.take, f.give = killed(service)
		return f
	}
	full := func(service string, f failure) failure {
		f.take, f.refill, f.give = filled(service, fills[service][0], fills[service][1])
		return f
	}
	return []failure{
		gone(devnode.Etcd, failure{
			away: "etcd", connections: "go on", begun: "work", enforced: "enforced",
			apply: "0", known: "0", fresh: "11", state: "waiting-for-identity",
			check: "0", del: "0", status: "0", later: "0", gc: "0",
			shown: "3, ready for known labels", unready: "sluice-datapath",
			says: []string{
				"is not known on this node and etcd (",
				") does not answer: ",
				"connect: connection refused",
				"STORE_UNAVAILABLE",
			},
			prints: []string{
				"containers with new labels cannot be connected: etcd is unavailable: ", "Meanwhile: without etcd: ",
			},
			probes: []string{"identity: new label sets get no identity now; "},
		}),
		gone(devnode.Identity, failure{
			away: "sluice-identity", connections: "go on", begun: "work", enforced: "enforced",
			apply: "0", known: "0", fresh: "11", state: "waiting-for-identity",
			check: "0", del: "0", status: "0", later: "0", gc: "0",
			shown: "3, ready for known labels", unready: "sluice-datapath",
			says:   []string{"resolve the identity: identity: unavailable: dial unix ", "SERVICE_UNAVAILABLE"},
			prints: []string{"Problem: sluice-identity: dial unix ", "Meanwhile: without sluice-identity: "},
			probes: []string{"identity: unavailable: dial unix "},
		}),
		gone(devnode.IPAM, failure{
			away: "sluice-ipam", connections: "go on", begun: "work", enforced: "enforced",
			apply: "0", known: "11", fresh: "11", state: "–",
			check: "0", del: "0", status: "0", later: "50", gc: "0",
			shown: "3, not ready", unready: "sluice-datapath",
			says:   []string{"allocate addresses: no answer on ", "ipam.sock"},
			prints: []string{"Problem: sluice-ipam: dial unix ", "Meanwhile: without sluice-ipam: "},
			probes: []string{"ipam: unavailable: dial unix "},
		}),
		gone(devnode.Policy, failure{
			away: "sluice-policy", connections: "go on", begun: "work", enforced: "enforced",
			apply: "1", known: "0", fresh: "11", state: "waiting-for-policy",
			check: "0", del: "0", status: "0", later: "0", gc: "0",
			shown: "3, ready for known labels", unready: "sluice-datapath",
			says: []string{
				"await the policy: unavailable: ",
				"the service is unreachable: policy: unavailable: dial unix ",
				"POLICY_UNAVAILABLE",
			},
			prints: []string{"Problem: sluice-policy: dial unix ", "Meanwhile: without sluice-policy: "},
			probes: []string{"policy: unavailable: dial unix "},
		}),
		gone(devnode.LoadBalancer, failure{
			away: "sluice-loadbalancer", connections: "go on", begun: "work", enforced: "enforced",
			apply: "0", known: "0", fresh: "0", state: "ready",
			check: "0", del: "0", status: "0", later: "0", gc: "0",
			shown: "3, ready", unready: "–",
			prints: []string{
				"Warning: sluice-loadbalancer: services cannot be changed: ", "Meanwhile: without sluice-loadbalancer: ",
			},
		}),
		gone(devnode.Datapath, failure{
			away: "sluice-datapath", connections: "go on", begun: "work", enforced: "enforced",
			apply: "3", known: "11", fresh: "11", state: "no answer",
			check: "11", del: "0", status: "0", later: "50", gc: "11",
			shown: "3, not ready", unready: "–",
			says:   []string{"create the endpoint: no answer on ", "datapath.sock"},
			prints: []string{"Problem: sluice-datapath: dial unix ", "Meanwhile: without sluice-datapath: "},
		}),
		gone(devnode.DNS, failure{
			away: "sluice-dns", connections: "go on", begun: "work", enforced: "enforced",
			apply: "0", known: "0", fresh: "0", state: "ready",
			check: "0", del: "0", status: "0", later: "0", gc: "0",
			shown: "3, ready", unready: "–",
			prints: []string{
				"Warning: sluice-dns: addresses are not learned from DNS answers: ", "Meanwhile: without sluice-dns: ",
			},
		}),
		full(devnode.Identity, failure{
			away: "disk of sluice-identity full", connections: "go on", begun: "work", enforced: "enforced",
			apply: "0", known: "0", fresh: "11", state: "waiting-for-identity",
			check: "0", del: "0", status: "0", later: "0", gc: "0",
			shown: "3, ready for known labels", unready: "sluice-datapath",
			says: []string{
				"resolve the identity: identity: unavailable: state was not written: ",
				"no space left on device",
			},
			prints: []string{"sluice-identity: containers with new labels cannot be connected: ", "no space left on device"},
			probes: []string{"identity: new label sets get no identity now; "},
		}),
		full(devnode.IPAM, failure{
			away: "disk of sluice-ipam full", connections: "go on", begun: "work", enforced: "enforced",
			apply: "0", known: "11", fresh: "11", state: "–",
			check: "0", del: "0", status: "0", later: "50", gc: "0",
			shown: "3, not ready", unready: "sluice-datapath",
			says:   []string{"no space left on device", "STORAGE_FAILED"},
			prints: []string{"sluice-ipam: no container can be connected now: ", "no space left on device"},
			probes: []string{"ipam: ", "no space left on device"},
		}),
		full(devnode.Policy, failure{
			away: "disk of sluice-policy full", connections: "go on", begun: "work", enforced: "enforced",
			apply: "1", known: "0", fresh: "0", state: "ready",
			check: "0", del: "0", status: "0", later: "0", gc: "0",
			shown: "3, ready", unready: "–",
			prints: []string{"Warning: sluice-policy: ", "no space left on device"},
		}),
		full(devnode.Datapath, failure{
			away: "disk of sluice-datapath full", connections: "go on", begun: "work", enforced: "enforced",
			// A little space may be left for the first record.
			apply: "0", known: "11", fresh: "11", state: "– or waiting-for-identity",
			check: "0", del: "11", status: "0", later: "50", gc: "11",
			shown: "3, not ready", unready: "sluice-datapath",
			says:   []string{"no space left on device"},
			prints: []string{"sluice-datapath: no container can be connected now: ", "no space left on device"},
			probes: []string{"no space left on device"},
		}),
	}
}

// tables returns the tables of the document.
func tables() failures.Tables {
	s := failures.Tables{
		Place: "failures of a node", Columns: columns,
		Says: []string{"ADD with new labels says", "`sluice status` says", "`/readyz` says"},
	}
	for _, f := range rows() {
		s.Rows = append(s.Rows, f.row())
	}
	return s
}

// TestFailuresAreThoseOfTheDocument: the tables in the document equal the expectations of TestKernelFailuresOfANode.
func TestFailuresAreThoseOfTheDocument(t *testing.T) { tables().Compare(t) }

// TestFailuresNameTestsThatExist checks that the tests that the document cites exist.
func TestFailuresNameTestsThatExist(t *testing.T) {
	content, err := os.ReadFile(failures.Document)
	if err != nil {
		t.Fatal(err)
	}
	missing := map[string]bool{}
	parts := map[string][]string{} // names in the list of subtests, by test
	named := regexp.MustCompile("`(Test[A-Za-z]+)([^`]*/([A-Za-z]+))?")
	for _, name := range named.FindAllStringSubmatch(string(content), -1) {
		if missing[name[1]] = true; name[3] != "" {
			parts[name[1]] = append(parts[name[1]], name[3])
		}
	}
	if len(missing) == 0 {
		t.Errorf("%d tests are named", len(missing))
	}
	err = filepath.WalkDir("../..", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for name := range missing {
			if strings.Contains(string(source), "\nfunc "+name+"(") {
				delete(missing, name)
				for _, part := range parts[name] {
					if !listed(t, filepath.Dir(path), part) {
						t.Errorf("%s has no part %s", name, part)
					}
				}
			}
		}
		return err
	})
	if err != nil || len(missing) > 0 {
		t.Errorf("%v; there are no tests of these names: %v", err, slices.Sorted(maps.Keys(missing)))
	}
}

// listed reports whether a test in a directory has a part of this name in a list.
func listed(t *testing.T, dir, part string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	must(t, err)
	return slices.ContainsFunc(files, func(file string) bool {
		source, err := os.ReadFile(file)
		must(t, err)
		return strings.Contains(string(source), `{"`+part+`", `)
	})
}

// TestKernelFailuresOfANode makes one component fail at a time, checks every column of the table, and repairs the
// component. Then the node must have its earlier state again.
func TestKernelFailuresOfANode(t *testing.T) {
	t.Parallel()
	for _, f := range rows() {
		t.Run(f.away, func(t *testing.T) {
			t.Parallel()
			b := newFailing(t)
			f.take(t, b.testNode)
			tables().Want(t, f.row(), b.look(t, f))
			f.give(t, b.testNode)
			b.wantAsBefore(t)
		})
	}
}

// failing is a node with pods under a policy, and its state before the failure.
type failing struct {
	*testNode
	web, client, denied, checked, gone pod.Pod
	kept                               []pod.Pod
	result                             []byte // result of the ADD of checked
	old                                connected
}

const (
	allowedPort = 8080 // port of web that the policy allows to the client
	laterPort   = 8081 // port that a change of the policy allows
)

func policyOfPorts(ports ...int) string {
	var list []string
	for _, port := range ports {
		list = append(list, fmt.Sprintf("{protocol: TCP, port: %d}", port))
	}
	return fmt.Sprintf(`apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: test}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress:
  - from: [{podSelector: {matchLabels: {app: client}}}]
    ports: [%s]
`, strings.Join(list, ", "))
}

func newFailing(t *testing.T) *failing {
	b := &failing{testNode: newNode(t, func(o *devnode.Options) {
		o.Args = map[string][]string{}
		for _, service := range probed {
			o.Args[service] = servicetest.ProbeFlags
		}
	})}
	pods := b.addPods(t, "web", "client", "denied", "gone")
	b.web, b.client, b.denied, b.gone = pods[0], pods[1], pods[2], pods[3]
	b.checked = newPod(t, "checked")
	ctx, cancel := deadline(t)
	defer cancel()
	var err error
	if b.result, err = b.call(ctx, "ADD", b.checked, b.config(t, "1.1.0", labels("app", "client"))); err != nil {
		t.Fatal(err)
	}
	b.kept = []pod.Pod{b.web, b.client, b.denied, b.checked}
	enforce(t, b.policies(t), policyOfPorts(allowedPort))
	b.old = connect(t, b.client, b.web, b.web.IPv4, allowedPort)
	push(t, b.old.client, b.old.server, "before")
	return b
}

// look observes the effects of a failure, and returns them in the order of columns.
func (b *failing) look(t *testing.T, f failure) []string {
	t.Helper()
	seen := []string{f.away, "go on", "work", "enforced"}
	push(t, b.old.client, b.old.server, "there")
	push(t, b.old.server, b.old.client, "and back")
	if err := b.reaches(t, b.client, allowedPort); err != nil {
		seen[2] = err.Error()
	}
	if b.reaches(t, b.denied, allowedPort) == nil {
		seen[3] = "not enforced"
	}
	full := func() {
		if f.refill != nil {
			f.refill(t, b.testNode)
		}
	}
	full()
	seen = append(seen, b.apply(t, policyOfPorts(allowedPort, laterPort)))

	known, fresh := newPod(t, "known"), newPod(t, "fresh")
	events := b.events(t)
	short := func(extra map[string]any) map[string]any { extra["timeout"] = "4s"; return extra }
	full()
	code, _ := b.verb(t, "ADD", known, b.config(t, "1.0.0", short(labels("app", "client"))))
	seen = append(seen, code)
	full()
	code, text := b.verb(t, "ADD", fresh, b.config(t, "1.0.0", short(labels("app", "fresh"))))
	if seen = append(seen, code); code != "0" {
		wantAll(t, "ADD", text, f.says...)
	}
	seen = append(seen, events.stateOf(t, fresh, f.state))
	prev := short(labels("app", "client"))
	prev["prevResult"] = json.RawMessage(b.result)
	code, _ = b.verb(t, "CHECK", b.checked, b.config(t, "1.1.0", prev))
	seen = append(seen, code)
	code, text = b.verb(t, "DEL", b.gone, b.config(t, "1.0.0", short(map[string]any{})))
	if seen = append(seen, code); code != "0" {
		wantAll(t, "DEL", text, "no space left on device")
	}
	for _, p := range []pod.Pod{known, fresh} { // as a runtime does after any ADD
		if code, text := b.verb(t, "DEL", p, b.config(t, "1.0.0", short(map[string]any{}))); code != "0" {
			t.Errorf("DEL %s: %s %s", p.Name, code, text)
		}
	}
	for range 2 {
		code, _ = b.verb(t, "STATUS", pod.Pod{}, b.config(t, "1.1.0", short(map[string]any{})))
		seen = append(seen, code)
		failures.AgeUnable(t, b.Paths().RunDir)
	}
	var valid []map[string]string
	for _, p := range b.kept {
		valid = append(valid, map[string]string{"containerID": p.Name, "ifname": "eth0"})
	}
	code, _ = b.verb(t, "GC", pod.Pod{}, b.config(t, "1.1.0", short(map[string]any{"cni.dev/valid-attachments": valid})))
	seen = append(seen, code)

	var shown, printed string
	servicetest.EventuallyNil(t, "the expected status", func() error {
		full()
		exit, out := b.command(t, "status")
		shown, printed = failures.Shown(exit, out), out
		for _, part := range f.prints {
			if !strings.Contains(out, part) {
				return fmt.Errorf("it does not say %q:\n%s", part, out)
			}
		}
		if shown != f.shown {
			return fmt.Errorf("%s:\n%s", shown, out)
		}
		return nil
	})
	wantAll(t, "sluice status", printed, f.prints...)
	return append(seen, shown, b.unready(t, f, full))
}

// probed are the processes with probes.
var probed = []string{
	devnode.Identity, devnode.IPAM, devnode.Policy, devnode.LoadBalancer, devnode.Datapath, devnode.DNS,
}

// unready returns the processes whose /readyz answers 503, and checks that /livez of each running process succeeds.
func (b *failing) unready(t *testing.T, f failure, before func()) (seen string) {
	t.Helper()
	servicetest.EventuallyNil(t, "the expected probes", func() error {
		before()
		var names, texts []string
		for _, service := range probed {
			if "sluice-"+service == f.away {
				continue
			}
			if code, text, err := b.probe(t, service, "/livez"); err != nil || code != http.StatusOK {
				t.Fatalf("/livez of %s: %d %q %v", service, code, text, err)
			}
			code, text, err := b.probe(t, service, "/readyz")
			switch {
			case err != nil:
				return err
			case code == http.StatusServiceUnavailable:
				names, texts = append(names, "sluice-"+service), append(texts, text)
			case code != http.StatusOK:
				return fmt.Errorf("/readyz of %s: %d %q", service, code, text)
			}
		}
		seen = cmp.Or(strings.Join(names, ", "), "–")
		if missing := failures.Lacks(strings.Join(texts, "\n"), f.probes); seen != f.unready || len(missing) > 0 {
			return fmt.Errorf("%s, want %s; it does not say %q: %q", seen, f.unready, missing, texts)
		}
		return nil
	})
	return seen
}

// probe sends a request to a process as kubelet does, to the address in the log of its last start.
func (b *failing) probe(t *testing.T, service, path string) (code int, text string, err error) {
	t.Helper()
	content, err := os.ReadFile(b.Log(service))
	if err != nil {
		return 0, "", err
	}
	var address string
	for line := range strings.Lines(string(content)) {
		var l struct{ Msg, Address string }
		if json.Unmarshal([]byte(line), &l) == nil && l.Msg == "health" {
			address = l.Address
		}
	}
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return 0, "", fmt.Errorf("the log of %s says no address of health: %w", service, err)
	}
	pid, err := b.PID(service)
	if err != nil {
		return 0, "", err
	}
	in := pod.Pod{Name: service, Netns: fmt.Sprintf("/proc/%d/ns/net", pid)} // some are in their own namespace
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return in.Dial(ctx, to) },
	}
	r, err := (&http.Client{Transport: transport, Timeout: patience}).Get("http://" + address + path)
	if err != nil {
		return 0, "", err
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	return r.StatusCode, string(body), err
}

// eventLog collects the output of `sluice endpoint events` until the test ends.
type eventLog struct {
	mu    sync.Mutex
	text  strings.Builder // guarded by mu
	ended chan struct{}
}

func (e *eventLog) Write(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.text.Write(p)
}

func (e *eventLog) String() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.text.String()
}

// events begins to watch endpoints, and returns after the existing endpoints were printed, or the command has ended.
func (b *failing) events(t *testing.T) *eventLog {
	t.Helper()
	e := &eventLog{ended: make(chan struct{})}
	cmd := exec.CommandContext(t.Context(), filepath.Join(binDir(), "sluice"), //nolint:gosec // ours
		"--instance", b.Instance(), "endpoint", "events", "--existing")
	cmd.Stdout, cmd.Stderr = e, e
	must(t, cmd.Start())
	go func() {
		defer close(e.ended)
		_ = cmd.Wait() // killed by the end of the test
	}()
	t.Cleanup(func() { <-e.ended })
	servicetest.Eventually(t, "endpoint events shows what exists", func() bool {
		select {
		case <-e.ended:
			return true
		default:
			return strings.Contains(e.String(), b.denied.Name)
		}
	})
	return e
}

// stateOf returns the furthest state of an endpoint that was created after the log began. A repeated ADD begins at the
// first state again. want may name several states, separated by "or", and is returned if the state is one of them.
func (e *eventLog) stateOf(t *testing.T, p pod.Pod, want string) (state string) {
	t.Helper()
	select {
	case <-e.ended:
		return "no answer"
	default:
	}
	servicetest.EventuallyNil(t, "the expected events", func() error {
		states := []string{"–", "waiting-for-identity", "waiting-for-policy", "ready"}
		furthest := 0
		for line := range strings.Lines(e.String()) {
			words := strings.Fields(line)
			if len(words) < 4 || !strings.HasPrefix(words[2], p.Name) {
				continue
			}
			for i, s := range states {
				if words[1] == "created" && words[3] == s || strings.Contains(line, "-> "+s) {
					furthest = max(furthest, i)
				}
			}
		}
		if state = states[furthest]; slices.Contains(strings.Split(want, " or "), state) {
			state = want
		} else {
			return fmt.Errorf("%s, want %s:\n%s", state, want, e)
		}
		return nil
	})
	return state
}

// reaches connects to web. A denied client gets no answer and times out.
func (b *failing) reaches(t *testing.T, from pod.Pod, port uint16) error {
	t.Helper()
	var l *net.TCPListener
	servicetest.EventuallyNil(t, "the port of the last connection is free", func() (err error) {
		l, err = b.web.Listen(netip.AddrPortFrom(b.web.IPv4, port))
		return err
	})
	defer l.Close()
	limit := patience
	if from.Name == b.denied.Name {
		limit = 300 * time.Millisecond
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	c, err := from.Dial(ctx, netip.AddrPortFrom(b.web.IPv4, port))
	if err != nil {
		return err
	}
	return c.Close()
}

// command runs sluice against the node, and returns its exit code and output.
func (n *testNode) command(t *testing.T, args ...string) (exit int, out string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return failures.Command(ctx, t, filepath.Join(binDir(), "sluice"), n.Instance(), args...)
}

// apply returns the exit code of `policy apply`. If it is 0, apply checks that the change is enforced.
func (b *failing) apply(t *testing.T, manifest string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	exit, out := b.command(t, "policy", "apply", "-f", file, "--wait=2s")
	if exit == 0 {
		if err := b.reaches(t, b.client, laterPort); err != nil {
			t.Errorf("applied with exit code 0, and not enforced: %v\n%s", err, out)
		}
	}
	return fmt.Sprint(exit)
}

// verb executes the plugin, and returns its CNI error code, 0 for success, and its output.
func (b *failing) verb(t *testing.T, command string, p pod.Pod, config []byte) (code, text string) {
	t.Helper()
	ctx, cancel := deadline(t)
	defer cancel()
	_, err := b.call(ctx, command, p, config)
	if code, text, err = failures.Code(err); err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	return code, text
}

// wantAsBefore requires a working node without state of objects that were deleted during the failure.
func (b *failing) wantAsBefore(t *testing.T) {
	t.Helper()
	servicetest.EventuallyNil(t, "the status shows a healthy node", func() error {
		if exit, out := b.command(t, "status"); exit != 0 {
			return errors.New(out)
		}
		return nil
	})
	if code, text := b.verb(t, "STATUS", pod.Pod{}, b.config(t, "1.1.0", map[string]any{})); code != "0" {
		t.Errorf("STATUS afterwards: %s %s", code, text)
	}
	push(t, b.old.client, b.old.server, "after")
	fresh := b.add(t, newPod(t, "after"), b.config(t, "1.0.0", labels("app", "after")))
	b.del(t, fresh)
	if got := b.apply(t, policyOfPorts(allowedPort, laterPort)); got != "0" {
		t.Errorf("policy apply ends with %s", got)
	}
	b.del(t, b.gone) // a runtime repeats a failed DEL
	if exit, out := b.command(t, "check"); exit != 0 {
		t.Errorf("audit: %s", out)
	}
	for _, p := range b.kept {
		b.del(t, p)
	}
	b.old.client.Close()
	b.wantNothingHeld(t)
}

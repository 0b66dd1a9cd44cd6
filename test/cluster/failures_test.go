// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/failures"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// failure is one row: what is down on the first node. The other nodes run normally.
type failure struct {
	away      string
	processes []string
	etcd      int  // number of etcd members that are down
	link      bool // the first node's port between the nodes is down

	// Expected values of the columns, in the order of failureColumns.
	connections, begun, enforced, apply, known, fresh, elsewhere, learns, learned, check, del, status, later, gc,
	shown, shownElsewhere string
	// Expected parts of the error of an ADD with new labels, if it fails.
	says []string
	// Expected parts of the output of `sluice status`, on the first and on the second node.
	prints, printsElsewhere []string
}

var failureColumns = []string{
	"unavailable", "connections", "new connections", "policies about other nodes' pods", "`policy apply`",
	"ADD, known labels",
	"ADD, new labels", "ADD, new labels, on another node", "new pods of other nodes reached from this node",
	"new pods of this node reached from other nodes", "CHECK", "DEL", "STATUS", "STATUS after 60 s", "GC",
	"`sluice status`", "`sluice status` of another node",
}

func (f *failure) row() failures.Row {
	return failures.Row{Cells: []string{
		f.away, f.connections, f.begun, f.enforced, f.apply, f.known, f.fresh, f.elsewhere, f.learns, f.learned, f.check,
		f.del, f.status, f.later, f.gc, f.shown, f.shownElsewhere,
	}, Says: [][]string{f.says, f.prints, f.printsElsewhere}}
}

// Values of the cells.
const (
	goOn, standStill  = "go on", "wait"
	work, fail        = "work", "fail"
	holds, none       = "enforced", "–" // not applicable
	meanwhile, after  = "meanwhile", "afterwards"
	ready, knownReady = "3, ready", "3, ready for known labels"
	notReady, well    = "3, not ready", "0, ready"
)

// as fills unset columns with the values of a healthy cluster.
func (f failure) as() failure {
	for _, cell := range []struct {
		cell  *string
		value string
	}{
		{&f.connections, goOn},
		{&f.begun, work},
		{&f.enforced, holds},
		{&f.apply, "0"},
		{&f.known, "0"},
		{&f.fresh, "0"},
		{&f.elsewhere, "0"},
		{&f.learns, meanwhile},
		{&f.learned, meanwhile},
		{&f.check, "0"},
		{&f.del, "0"},
		{&f.status, "0"},
		{&f.later, "0"},
		{&f.gc, "0"},
		{&f.shown, well},
		{&f.shownElsewhere, well},
	} {
		if *cell.cell == "" {
			*cell.cell = cell.value
		}
	}
	return f
}

// silent are parts of the warning in a node's status about an unreachable node.
var silent = []string{"Warning: sluice-datapath: node sluice-", ": no answer to "}

// failureGroup is a sequence of rows that are tested on one cluster.
type failureGroup struct {
	name    string
	options devnode.ClusterOptions
	rows    []failure
}

// failureGroups returns the rows of the tables in docs/failures.md, in their order. Unset columns have the values of
// a healthy cluster.
func failureGroups() []failureGroup {
	everything := []string{
		devnode.Identity, devnode.IPAM, devnode.Policy, devnode.LoadBalancer, devnode.Datapath, devnode.DNS,
	}
	all := []failureGroup{
		{name: "etcd", options: devnode.ClusterOptions{Nodes: 2, EtcdMembers: 3}, rows: []failure{
			{
				away: "etcd, all 3 members", etcd: 3,
				fresh: "11", elsewhere: "11", learns: after, learned: after,
				shown: knownReady, shownElsewhere: knownReady,
				says: []string{"is not known on this node and etcd (", ") does not answer: ", "STORE_UNAVAILABLE"},
				prints: []string{
					"containers with new labels cannot be connected: etcd is unavailable: ", "Meanwhile: without etcd: ",
				},
				printsElsewhere: []string{"Meanwhile: without etcd: "},
			},
			{
				away: "etcd, one of 3 members", etcd: 1,
			},
		}},
		{name: "control", options: devnode.ClusterOptions{Nodes: 2}, rows: []failure{
			{
				away: "sluice-identity of a node", processes: []string{devnode.Identity},
				fresh: "11", learns: after, learned: after, shown: knownReady,
				says:   []string{"resolve the identity: identity: unavailable: dial unix ", "SERVICE_UNAVAILABLE"},
				prints: []string{"Problem: sluice-identity: dial unix ", "Meanwhile: without sluice-identity: "},
			},
			{
				away: "sluice-ipam of a node", processes: []string{devnode.IPAM},
				known: "11", fresh: "11", learned: none, later: "50", shown: notReady,
				says:   []string{"allocate addresses: no answer on ", "ipam.sock"},
				prints: []string{"Problem: sluice-ipam: dial unix ", "Meanwhile: without sluice-ipam: "},
			},
			{
				away: "sluice-policy of a node", processes: []string{devnode.Policy},
				apply: "1", fresh: "11", shown: knownReady,
				says:   []string{"await the policy: unavailable: ", "POLICY_UNAVAILABLE"},
				prints: []string{"Problem: sluice-policy: dial unix ", "Meanwhile: without sluice-policy: "},
			},
		}},
		{name: "kernel", options: devnode.ClusterOptions{Nodes: 2}, rows: []failure{
			{
				away: "sluice-loadbalancer of a node", processes: []string{devnode.LoadBalancer},
				shown: ready,
				prints: []string{
					"Warning: sluice-loadbalancer: services cannot be changed: ", "Meanwhile: without sluice-loadbalancer: ",
				},
			},
			{
				away: "sluice-datapath of a node", processes: []string{devnode.Datapath},
				apply: "3", known: "11", fresh: "11", learns: after, learned: none, check: "11", gc: "11",
				later: "50", shown: notReady, shownElsewhere: ready,
				says:            []string{"create the endpoint: no answer on ", "datapath.sock"},
				prints:          []string{"Problem: sluice-datapath: dial unix ", "Meanwhile: without sluice-datapath: "},
				printsElsewhere: silent,
			},
			{
				away: "every process of a node", processes: everything,
				apply: "1", known: "11", fresh: "11", learns: after, learned: none, check: "11", gc: "11",
				later: "50", shown: notReady, shownElsewhere: ready,
				says: []string{"allocate addresses: no answer on ", "ipam.sock"},
				prints: []string{
					"Problem: sluice-datapath: dial unix ", "Meanwhile: without sluice-identity, sluice-ipam, ",
				},
				printsElsewhere: silent,
			},
		}},
		{name: "network", options: devnode.ClusterOptions{Nodes: 3}, rows: []failure{
			{
				away: "a node: its processes and its link to other nodes", link: true, processes: everything,
				connections: standStill, begun: fail, enforced: none,
				apply: "1", known: "11", fresh: "11", learns: after, learned: none, check: "11", gc: "11",
				later: "50", shown: notReady, shownElsewhere: ready,
				says: []string{"allocate addresses: no answer on ", "ipam.sock"},
				prints: []string{
					"Problem: sluice-datapath: dial unix ", "Meanwhile: without sluice-identity, sluice-ipam, ",
				},
				printsElsewhere: silent,
			},
			{
				away: "the link of a node to other nodes, etcd reachable", link: true,
				connections: standStill, begun: fail, enforced: none, learns: after, learned: after,
				shown: ready, shownElsewhere: ready,
				prints: silent, printsElsewhere: silent,
			},
		}},
	}
	for _, g := range all {
		for i := range g.rows {
			g.rows[i] = g.rows[i].as()
		}
	}
	return all
}

// failureTables returns the tables of the document.
func failureTables() failures.Tables {
	s := failures.Tables{
		Place: "failures of a cluster", Columns: failureColumns,
		Says: []string{"ADD with new labels says", "`sluice status` says", "`sluice status` of another node says"},
	}
	for _, g := range failureGroups() {
		for _, f := range g.rows {
			s.Rows = append(s.Rows, f.row())
		}
	}
	return s
}

// TestFailuresOfAClusterAreThoseOfTheDocument: the tables in the document equal the expectations of
// TestFailuresOfACluster.
func TestFailuresOfAClusterAreThoseOfTheDocument(t *testing.T) { failureTables().Compare(t) }

// TestFailuresOfACluster makes one component fail, checks every column of the table, and repairs the component. Then
// the cluster must be consistent again, and pods created meanwhile must be reachable.
func TestFailuresOfACluster(t *testing.T) {
	t.Parallel()
	for _, g := range failureGroups() {
		t.Run(g.name, func(t *testing.T) {
			t.Parallel()
			b := newFailing(t, g.options)
			for _, f := range g.rows {
				if !t.Run(f.away, func(t *testing.T) {
					b.begin(t, f)
					b.take(t)
					failureTables().Want(t, f.row(), b.look(t))
					b.give(t)
					b.wantAsBefore(t)
				}) {
					break // the failure would affect the next row
				}
			}
		})
	}
}

// Ports of the pods.
const (
	openPort  = 8080 // allowed to the clients by a policy
	laterPort = 8081 // allowed to the clients by a change of the policies
)

// failurePolicies allow clients to connect to web, and readers to connect to pages only.
const failurePolicies = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: test}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress:
  - from: [{podSelector: {matchLabels: {app: client}}}]
    ports: [{protocol: TCP, port: 8080}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: reader, namespace: test}
spec:
  podSelector: {matchLabels: {app: reader}}
  policyTypes: [Egress]
  egress:
  - to: [{podSelector: {matchLabels: {app: page}}}]
`

// laterPolicy allows clients to connect to the second port of web.
const laterPolicy = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: later, namespace: test}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress:
  - from: [{podSelector: {matchLabels: {app: client}}}]
    ports: [{protocol: TCP, port: 8081}]
`

// failing is a cluster in which a component of the first node is down.
type failing struct {
	*testCluster
	want        failure
	here, there *node
	at          map[*node]map[string]pod.Pod // by label; each pod listens on both ports
	result      []byte                       // result of the ADD of the client here
	flows       []*dialogue                  // between the first node and other nodes
	others      []*dialogue                  // between others
	// Pods of the current row: created meanwhile here and there, and removed meanwhile.
	ours, theirs, gone pod.Pod
}

// failingApps are the labels of the pods that each node has before the first failure.
var failingApps = []string{"web", "client", "denied", "reader", "page"}

func newFailing(t *testing.T, o devnode.ClusterOptions) *failing {
	b := &failing{testCluster: newCluster(t, o), at: map[*node]map[string]pod.Pod{}}
	b.here, b.there = b.nodes[0], b.nodes[1]
	b.enforced(t, failurePolicies)
	var group errgroup.Group
	var mu sync.Mutex
	for _, n := range b.nodes {
		b.at[n] = map[string]pod.Pod{}
		for _, app := range failingApps {
			p := newPod(t)
			group.Go(func() error {
				p, did, err := b.added(t.Context(), n, p, app, "0")
				if err == nil && did.code != "0" {
					err = fmt.Errorf("ADD of app=%s at %s: %s %s", app, n.Name(), did.code, did.text)
				}
				mu.Lock()
				defer mu.Unlock()
				if b.at[n][app] = p; n == b.here && app == "client" {
					b.result = did.result
				}
				return err
			})
		}
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	for _, n := range b.nodes {
		var all []entry
		for _, on := range b.nodes {
			for _, p := range b.at[on] {
				if on != n {
					all = append(all, entries(p, n.identityOf(t, p, on), on)...)
				}
			}
		}
		n.kernelHas(t, all...)
		for _, p := range b.at[n] {
			echo(t, p)
		}
	}
	for i, n := range b.nodes {
		for _, other := range b.nodes[i+1:] {
			for _, ends := range [][2]*node{{n, other}, {other, n}} {
				servicetest.EventuallyNil(t, "the policies are enforced", func() error {
					passes, leaks := b.dial(t, ends[0], ends[1], patience)
					return errors.Join(passes, leaks)
				})
				d := converse(t, b.at[ends[0]]["client"], b.at[ends[1]]["web"])
				if n == b.here {
					b.flows = append(b.flows, d...)
				} else {
					b.others = append(b.others, d...)
				}
			}
		}
	}
	return b
}

// begin prepares a row.
func (b *failing) begin(t *testing.T, f failure) {
	t.Helper()
	b.want, b.ours, b.theirs = f, pod.Pod{}, pod.Pod{}
	b.gone = b.here.add(t, "page")
	b.there.identityOf(t, b.gone, b.here)
}

// echo makes a pod return received bytes on both ports.
func echo(t *testing.T, p pod.Pod) {
	t.Helper()
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	for _, port := range []uint16{openPort, laterPort} {
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
				go func() { // ends when the other end closes the connection
					defer c.Close()
					_, _ = io.Copy(c, c)
				}()
			}
		})
	}
}

// dialogue is a connection to a pod that returns what it receives.
type dialogue struct {
	*net.TCPConn
	owed int // number of bytes that have not returned
}

// converse opens a connection to each address.
func converse(t *testing.T, from, to pod.Pod) (all []*dialogue) {
	t.Helper()
	ctx := servicetest.Context(t)
	for _, a := range to.Addresses() {
		c, err := from.Dial(ctx, netip.AddrPortFrom(a, openPort))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		all = append(all, &dialogue{TCPConn: c})
	}
	return all
}

// speak sends a byte, and requires all sent bytes back within a limit.
func (d *dialogue) speak(limit time.Duration) error {
	d.owed++
	if err := d.SetDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	if _, err := d.Write([]byte{1}); err != nil {
		return err
	}
	n, err := io.ReadFull(d, make([]byte, d.owed))
	d.owed -= n
	return err
}

// moment is the time that the test waits for a packet that must not arrive. On a slow machine, a packet that is
// wrongly delivered may arrive later, so that the test misses it. But the test never fails without such a packet.
const moment = 300 * time.Millisecond

// speak reports whether connections continue.
func speak(flows []*dialogue, want string) string {
	limit := patience
	if want == standStill {
		limit = moment
	}
	for _, d := range flows {
		switch err := d.speak(limit); {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return standStill
		case err != nil:
			return err.Error()
		case want == standStill:
			return goOn
		}
	}
	return goOn
}

// reaches connects to each address of a pod, and returns the first error.
func reaches(t *testing.T, from, to pod.Pod, port uint16, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	var group errgroup.Group
	for _, a := range to.Addresses() {
		group.Go(func() error {
			c, err := from.Dial(ctx, netip.AddrPortFrom(a, port))
			if err != nil {
				return err
			}
			return c.Close()
		})
	}
	return group.Wait()
}

// dial opens connections between the pods of two nodes: connections that the policies allow, within a limit, and
// connections that they deny.
func (b *failing) dial(t *testing.T, from, to *node, limit time.Duration) (passes, leaks error) {
	var group errgroup.Group
	for _, allowed := range [][2]string{{"client", "web"}, {"reader", "page"}} {
		group.Go(func() error {
			return reaches(t, b.at[from][allowed[0]], b.at[to][allowed[1]], openPort, limit)
		})
	}
	var denied errgroup.Group
	for _, d := range [][2]string{{"denied", "web"}, {"reader", "denied"}} {
		for _, a := range b.at[to][d[1]].Addresses() {
			denied.Go(func() error {
				if reaches(t, b.at[from][d[0]], pod.Pod{}.WithAddresses([]netip.Addr{a}), openPort, moment) == nil {
					return fmt.Errorf("%s reaches %s", d[0], d[1])
				}
				return nil
			})
		}
	}
	return group.Wait(), denied.Wait()
}

// take makes the components of the row fail.
func (b *failing) take(t *testing.T) {
	t.Helper()
	for _, member := range b.Hub().Services()[:b.want.etcd] {
		if err := b.Hub().Kill(t.Context(), member); err != nil {
			t.Fatal(err)
		}
	}
	for _, service := range b.want.processes {
		b.here.kill(t, service)
	}
	if b.want.link {
		b.port(t, netlink.LinkSetDown)
	}
}

// port changes the first node's port on the bridge between the nodes.
func (b *failing) port(t *testing.T, do func(netlink.Link) error) {
	t.Helper()
	if err := pod.In(b.Hub().Netns(), func() error {
		link, err := netlink.LinkByName("node1")
		if err != nil {
			return err
		}
		return do(link)
	}); err != nil {
		t.Fatal(err)
	}
}

func (b *failing) give(t *testing.T) {
	t.Helper()
	if b.want.link {
		b.port(t, netlink.LinkSetUp)
	}
	var group errgroup.Group
	for _, member := range b.Hub().Services()[:b.want.etcd] {
		group.Go(func() error { return b.Hub().Start(t.Context(), member) })
	}
	for _, service := range b.want.processes {
		group.Go(func() error { return b.here.Start(t.Context(), service) })
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
}

// look determines the columns.
func (b *failing) look(t *testing.T) []string {
	t.Helper()
	f, seen := b.want, failure{away: b.want.away, begun: work, enforced: holds}
	limit := patience
	if f.begun == fail {
		limit = moment
	} else {
		seen.connections = speak(b.flows, f.connections)
	}
	if got := speak(b.others, goOn); got != goOn {
		t.Errorf("connections between other nodes: %s", got)
	}
	for _, ends := range [][2]*node{{b.here, b.there}, {b.there, b.here}} {
		passes, leaks := b.dial(t, ends[0], ends[1], limit)
		switch {
		case passes != nil && f.begun == fail:
			seen.begun, seen.enforced = fail, none
		case passes != nil:
			seen.begun = passes.Error()
		}
		if leaks != nil {
			seen.enforced = leaks.Error()
		}
	}
	seen.apply = b.apply(t)
	b.adds(t, &seen)
	b.verbs(t, &seen)
	seen.shown = b.shown(t, b.here, f.shown, f.prints)
	seen.shownElsewhere = b.shown(t, b.there, f.shownElsewhere, f.printsElsewhere)
	seen.learns = b.reached(t, b.here, b.theirs, f.learns)
	seen.learned = none
	if seen.known == "0" {
		seen.learned = b.reached(t, b.there, b.ours, f.learned)
	}
	if f.begun == fail {
		// Send this last: TCP retransmits it soon after the link is restored.
		seen.connections = speak(b.flows, f.connections)
	}
	return seen.row().Cells
}

// reached returns when the reader on a node reaches a page that was created on another node meanwhile.
func (b *failing) reached(t *testing.T, n *node, p pod.Pod, want string) string {
	t.Helper()
	if want != meanwhile {
		if reaches(t, b.at[n]["reader"], p, openPort, moment) == nil {
			return meanwhile
		}
		return after // wantAsBefore checks this later
	}
	servicetest.EventuallyNil(t, "a pod created meanwhile is reached from "+n.Name(), func() error {
		return reaches(t, b.at[n]["reader"], p, openPort, time.Second)
	})
	return meanwhile
}

// adds connects pods here and there, with labels that the node knows and with new ones.
func (b *failing) adds(t *testing.T, seen *failure) {
	t.Helper()
	var group errgroup.Group
	var text string
	fresh, freshThere := newPod(t), newPod(t)
	for _, a := range []struct {
		on        *node
		p         pod.Pod
		app, want string
		seen      *string
		text      *string
		added     *pod.Pod
	}{
		{b.here, newPod(t), "page", b.want.known, &seen.known, new(string), &b.ours},
		{b.here, fresh, "here-" + fresh.Name, b.want.fresh, &seen.fresh, &text, &fresh},
		{b.there, newPod(t), "page", "0", new(string), new(string), &b.theirs},
		{b.there, freshThere, "there-" + freshThere.Name, b.want.elsewhere, &seen.elsewhere, new(string), &freshThere},
	} {
		group.Go(func() error {
			p, did, err := b.added(t.Context(), a.on, a.p, a.app, a.want)
			*a.added, *a.seen, *a.text = p, did.code, did.text
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if missing := failures.Lacks(text, b.want.says); seen.fresh != "0" && len(missing) > 0 {
		t.Errorf("ADD does not say %q:\n%s", missing, text)
	}
	if len(b.theirs.Addresses()) == 0 {
		t.Fatal("ADD of known labels at another node has failed")
	}
	echo(t, b.theirs)
	if len(b.ours.Addresses()) > 0 {
		echo(t, b.ours)
	}
	// As a runtime does after an ADD, call DEL whether the ADD succeeded or not.
	for n, p := range map[*node]pod.Pod{b.here: fresh, b.there: freshThere} {
		b.deleted(t, n, p)
	}
	if seen.known != "0" {
		b.deleted(t, b.here, b.ours)
	}
}

func (b *failing) deleted(t *testing.T, n *node, p pod.Pod) {
	t.Helper()
	if did, err := b.verb(t.Context(), n, "DEL", p, "0", map[string]any{}); err != nil || did.code != "0" {
		t.Errorf("DEL %s at %s: %s %s %v", p.Name, n.Name(), did.code, did.text, err)
	}
}

// verbs executes the other CNI commands here.
func (b *failing) verbs(t *testing.T, seen *failure) {
	t.Helper()
	var valid []map[string]string
	for _, p := range b.at[b.here] {
		valid = append(valid, map[string]string{"containerID": p.Name, "ifname": "eth0"})
	}
	valid = append(valid, map[string]string{"containerID": b.ours.Name, "ifname": "eth0"})
	prev := labelsOf("client")
	prev["prevResult"] = json.RawMessage(b.result)
	for _, v := range []struct {
		command string
		p       pod.Pod
		extra   map[string]any
		want    string
		seen    *string
	}{
		{"CHECK", b.at[b.here]["client"], prev, b.want.check, &seen.check},
		{"DEL", b.gone, map[string]any{}, b.want.del, &seen.del},
		{"STATUS", pod.Pod{}, map[string]any{}, b.want.status, &seen.status},
		{"STATUS", pod.Pod{}, map[string]any{}, b.want.later, &seen.later},
		{"GC", pod.Pod{}, map[string]any{"cni.dev/valid-attachments": valid}, b.want.gc, &seen.gc},
	} {
		did, err := b.verb(t.Context(), b.here, v.command, v.p, v.want, v.extra)
		if err != nil {
			t.Fatalf("%s: %v", v.command, err)
		}
		if *v.seen = did.code; v.command == "STATUS" {
			failures.AgeUnable(t, b.here.Paths().RunDir)
		}
	}
}

// answer is the result of a call of the plugin.
type answer struct {
	code, text string
	result     []byte
}

func labelsOf(app string) map[string]any {
	return map[string]any{"runtimeConfig": map[string]any{"labels": []map[string]string{{"key": "app", "value": app}}}}
}

// added executes an ADD. If it succeeds, added returns the pod with its addresses.
func (b *failing) added(ctx context.Context, n *node, p pod.Pod, app, want string) (pod.Pod, answer, error) {
	did, err := b.verb(ctx, n, "ADD", p, want, labelsOf(app))
	if err != nil || did.code != "0" {
		return p, did, err
	}
	addresses, err := cni.Addresses(did.result)
	return p.WithAddresses(addresses), did, err
}

// verb executes the plugin, with a short timeout if the plugin is expected to time out.
func (b *failing) verb(ctx context.Context, n *node, command string, p pod.Pod, want string, extra map[string]any) (
	did answer, err error,
) {
	extra["timeout"] = "4s"
	if want == "0" {
		extra["timeout"] = patience.String()
	}
	config, err := cni.PluginConfig(n.CNIConflist(), "1.1.0", extra)
	if err != nil {
		return did, err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	did.result, err = cni.Run(ctx, cni.Call{
		Plugin: n.Plugin(), Command: command, ContainerID: p.Name, Netns: p.Netns, IfName: "eth0",
		Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=test;K8S_POD_NAME=" + p.Name, Path: filepath.Dir(n.Plugin()), Config: config,
	})
	did.code, did.text, err = failures.Code(err)
	return did, err
}

// text runs sluice against a node, and returns its exit code and output.
func (n *node) text(t *testing.T, args ...string) (exit int, out string) {
	t.Helper()
	return failures.Command(servicetest.Context(t), t, filepath.Join(binDir(), "sluice"), n.Instance(), args...)
}

// shown waits for the expected status.
func (b *failing) shown(t *testing.T, n *node, want string, parts []string) (shown string) {
	t.Helper()
	servicetest.EventuallyNil(t, "the status of "+n.Name()+" that is wanted", func() error {
		exit, out := n.text(t, "status")
		shown = failures.Shown(exit, out)
		if missing := failures.Lacks(out, parts); shown != want || len(missing) > 0 {
			return fmt.Errorf("%s, want %s; it does not say %q:\n%s", shown, want, missing, out)
		}
		return nil
	})
	return shown
}

// apply returns the exit code of `policy apply` here. If it is 0, apply checks that the change is enforced for
// clients on the other node.
func (b *failing) apply(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte(laterPolicy), 0o600); err != nil {
		t.Fatal(err)
	}
	wait := "--wait=2s"
	if b.want.apply == "0" {
		wait = "--wait=" + patience.String()
	}
	exit, out := b.here.text(t, "policy", "apply", "-f", file, wait)
	if exit == 0 && b.want.begun == work {
		if err := reaches(t, b.at[b.there]["client"], b.at[b.here]["web"], laterPort, patience); err != nil {
			t.Errorf("applied with exit code 0, and not enforced: %v\n%s", err, out)
		}
	}
	return fmt.Sprint(exit)
}

// wantAsBefore requires that the cluster works and is consistent.
func (b *failing) wantAsBefore(t *testing.T) {
	t.Helper()
	for _, n := range b.nodes {
		b.shown(t, n, well, nil)
	}
	did, err := b.verb(t.Context(), b.here, "STATUS", pod.Pod{}, "0", map[string]any{})
	if err != nil || did.code != "0" {
		t.Errorf("STATUS afterwards: %s %s %v", did.code, did.text, err)
	}
	if got := speak(append(b.flows, b.others...), goOn); got != goOn {
		t.Errorf("connections afterwards: %s", got)
	}
	b.reached(t, b.here, b.theirs, meanwhile)
	if b.want.known == "0" {
		b.reached(t, b.there, b.ours, meanwhile)
	}
	b.want.apply, b.want.begun = "0", work
	if got := b.apply(t); got != "0" {
		t.Errorf("policy apply ends with %s", got)
	}
	for _, ends := range [][2]*node{{b.here, b.there}, {b.there, b.here}} {
		passes, leaks := b.dial(t, ends[0], ends[1], patience)
		if err := errors.Join(passes, leaks); err != nil {
			t.Errorf("new connections afterwards: %v", err)
		}
	}
	fresh := b.here.add(t, "after-"+b.gone.Name)
	b.there.identityOf(t, fresh, b.here)
	b.deleted(t, b.here, b.gone)
	b.there.forgets(t, b.gone)
	if exit, out := b.here.text(t, "policy", "delete", "NetworkPolicy", "test/later"); exit != 0 {
		t.Errorf("policy delete: %s", out)
	}
	b.deleted(t, b.here, fresh)
	b.deleted(t, b.there, b.theirs)
	if b.want.known == "0" {
		b.deleted(t, b.here, b.ours)
	}
	for _, n := range b.nodes {
		if exit, out := n.text(t, "check"); exit != 0 {
			t.Errorf("audit of %s: %s", n.Name(), out)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bufio"
	"fmt"
	"net/netip"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/proto/wire/policywire"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/test/synthetic"
)

// measure returns the results of one part.
func measure(part string, s synthetic.Shape, rounds int) ([]line, error) {
	switch part {
	case "time":
		return measureTime(s, rounds)
	case "memory":
		return measureMemory(s, rounds)
	case "owner":
		return measureOwner(s)
	case "prefixes":
		return measurePrefixes()
	case "ports":
		return measurePorts()
	}
	return nil, fmt.Errorf("no such part")
}

var options = rule.Options{Cluster: synthetic.Name, LocalClusterOnly: true}

func decode(text string) (policy.Object, error) {
	docs, err := manifest.Parse([]byte(text))
	if err != nil {
		return policy.Object{}, err
	}
	return policy.Decode(docs[0], options)
}

// stream encodes events as the server does.
type stream struct {
	steps, bytes int
	err          error
}

func (s *stream) take(ev policytable.Step) {
	b, err := proto.Marshal(policywire.Step(ev))
	if err != nil && s.err == nil {
		s.err = err
	}
	s.steps++
	s.bytes += len(b)
}

func config(out *stream) engine.Config {
	return engine.Config{Cluster: synthetic.Name, AllowHost: true, Events: out.take}
}

func load(s synthetic.Shape) (engine.Change, time.Duration, error) {
	c, err := synthetic.Make(s)
	if err != nil {
		return engine.Change{}, 0, err
	}
	change := engine.Change{AddIdentities: c.Identities, AddSubjects: c.Subjects}
	start := time.Now()
	for i, m := range c.Manifests {
		o, err := decode(m)
		if err != nil {
			return engine.Change{}, 0, err
		}
		change.UpsertPolicies = append(change.UpsertPolicies, o)
		c.Manifests[i] = ""
	}
	return change, time.Since(start), nil
}

// The policies that are changed; PORT is replaced by one of two numbers.
const (
	ofOne = `{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, metadata: {name: changed, namespace: ns-001},
spec: {endpointSelector: {matchLabels: {app: app-01}}, ingress: [{fromEndpoints: [{matchLabels: {app: app-02}}], toPorts: [{ports: [{port: "PORT", protocol: TCP}]}]}]}}`
	ofTen = `{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, metadata: {name: changed, namespace: ns-001},
spec: {endpointSelector: {matchExpressions: [{key: app, operator: In, values: [app-00, app-01, app-02, app-03, app-04, app-05, app-06, app-07, app-08, app-09]}]},
 ingress: [{fromEndpoints: [{matchLabels: {app: app-02}}], toPorts: [{ports: [{port: "PORT", protocol: TCP}]}]}]}}`
	ofAll = `{apiVersion: cilium.io/v2, kind: CiliumClusterwideNetworkPolicy, metadata: {name: changed},
spec: {endpointSelector: {}, ingress: [{fromEndpoints: [{matchLabels: {app: app-02}}], toPorts: [{ports: [{port: "PORT", protocol: TCP}]}]}]}}`
)

type bench struct {
	e   *engine.Engine
	out *stream
	s   synthetic.Shape
}

// applied applies a change and returns the duration.
func (r *bench) applied(c engine.Change) (time.Duration, error) {
	start := time.Now()
	err := r.e.Apply(c)
	return time.Since(start), err
}

func percentiles(times []time.Duration) string {
	slices.Sort(times)
	at := func(percent int) time.Duration { return times[min(len(times)*percent/100, len(times)-1)] }
	return fmt.Sprintf("p50 %s, p99 %s, worst %s", short(at(50)), short(at(99)), short(times[len(times)-1]))
}

func short(d time.Duration) string {
	switch {
	case d < 10*time.Microsecond:
		return fmt.Sprintf("%.1f µs", float64(d.Nanoseconds())/1e3)
	case d < time.Millisecond:
		return fmt.Sprintf("%d µs", d.Microseconds())
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1e3)
	}
	return fmt.Sprintf("%d ms", d.Milliseconds())
}

// churn adds and removes identities with labels that are already in use. Each addition and removal must cause exactly
// one write.
func (r *bench) churn(rounds int) (add, remove []time.Duration, err error) {
	for i := range rounds {
		id, err := synthetic.Identity(r.s, i%r.s.Namespaces, i/r.s.Namespaces%r.s.Apps)
		if err != nil {
			return nil, nil, err
		}
		id.Number = identity.Numeric(40000 + i%20000)
		before := r.e.Counters()
		d, err := r.applied(engine.Change{AddIdentities: []peer.Identity{id}})
		if err != nil {
			return nil, nil, err
		}
		add = append(add, d)
		if d, err = r.applied(engine.Change{RemoveIdentities: []identity.Numeric{id.Number}}); err != nil {
			return nil, nil, err
		}
		remove = append(remove, d)
		after := r.e.Counters()
		after.Evaluations, after.IdentityRows = before.Evaluations, after.IdentityRows-2
		if after != before {
			return nil, nil, fmt.Errorf("identity %d: more than one write each: counters went from %+v to %+v", id.Number, before, after)
		}
	}
	return add, remove, nil
}

// change switches several times between two versions of a policy, and then removes it.
func (r *bench) change(spec string, times int) (string, error) {
	var took []time.Duration
	var versions []policy.Object
	for _, p := range []string{"80", "81"} {
		o, err := decode(strings.ReplaceAll(spec, "PORT", p))
		if err != nil {
			return "", err
		}
		versions = append(versions, o)
	}
	before, steps, size := r.e.Counters(), r.out.steps, r.out.bytes
	for i := range times {
		d, err := r.applied(engine.Change{UpsertPolicies: versions[i%2 : i%2+1]})
		if err != nil {
			return "", err
		}
		took = append(took, d)
	}
	after := r.e.Counters()
	text := fmt.Sprintf("%s; %d tables, %d bindings, %d steps, %s of messages each", percentiles(took), (after.Tables-before.Tables)/times,
		(after.Binds-before.Binds)/times, (r.out.steps-steps)/times, kilobytes((r.out.bytes-size)/times))
	_, err := r.applied(engine.Change{DeletePolicies: []policy.Key{versions[0].Key}})
	return text, err
}

func kilobytes(n int) string {
	if n < 1<<20 {
		return fmt.Sprintf("%.1f kB", float64(n)/1e3)
	}
	return fmt.Sprintf("%.1f MB", float64(n)/1e6)
}

func measureTime(s synthetic.Shape, rounds int) (out []line, err error) {
	say := func(what, format string, args ...any) { out = append(out, line{what, fmt.Sprintf(format, args...)}) }
	change, decoding, err := load(s)
	if err != nil {
		return nil, err
	}
	say("manifests decoded and validated", "%s", short(decoding))
	var plain, streamed []time.Duration
	var r *bench
	for range 7 {
		e := engine.New(engine.Config{Cluster: synthetic.Name, AllowHost: true})
		start := time.Now()
		if err := e.Apply(change); err != nil {
			return nil, err
		}
		plain = append(plain, time.Since(start))
		r = &bench{out: new(stream), s: s}
		r.e = engine.New(config(r.out))
		d, err := r.applied(change)
		if err != nil {
			return nil, err
		}
		streamed = append(streamed, d)
	}
	size := r.e.Size()
	say("from scratch, decoded policies to tables", "%s", percentiles(plain))
	say("from scratch, decoded policies to bytes of the stream", "%s; %d steps, %s", percentiles(streamed), r.out.steps, kilobytes(r.out.bytes))
	say("tables; identity classes; peer rows; classes; intervals; prefixes; rules", "%d; %d; %d; %d; %d; %d; %d",
		size.Tables, size.IdentityClasses, size.PeerRows, size.Classes, size.Intervals, size.Prefixes, size.Rules)
	add, remove, err := r.churn(rounds)
	if err != nil {
		return nil, err
	}
	say("add an identity of a known kind: 1 write, 0 tables", "%s", percentiles(add))
	say("remove it: 1 write, 0 tables", "%s", percentiles(remove))
	for _, p := range []struct {
		what, spec string
		times      int
	}{{"change a policy of 1 subject", ofOne, 200}, {"change a policy of 10 subjects", ofTen, 200}, {"change a policy of all subjects", ofAll, 20}} {
		text, err := r.change(p.spec, p.times)
		if err != nil {
			return nil, err
		}
		say(p.what, "%s", text)
	}
	return out, r.out.err
}

// resident returns the memory of this process in kB: the present and the peak value.
func resident() (now, peak int, err error) { return residentOf(os.Getpid()) }

func residentOf(pid int) (now, peak int, err error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		key, value, _ := strings.Cut(sc.Text(), ":")
		n, _ := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
		switch key {
		case "VmRSS":
			now = n
		case "VmHWM":
			peak = n
		}
	}
	if now == 0 || peak == 0 {
		return 0, 0, fmt.Errorf("/proc/%d/status has no VmRSS and VmHWM", pid)
	}
	return now, peak, nil
}

func measureMemory(s synthetic.Shape, rounds int) (out []line, err error) {
	say := func(what string) error {
		at, peak, err := resident()
		if err != nil {
			return err
		}
		debug.FreeOSMemory()
		after, _, err := resident()
		out = append(out, line{"resident " + what, fmt.Sprintf("%d MB, %d MB after freeing, peak %d MB", at>>10, after>>10, peak>>10)})
		return err
	}
	r := &bench{out: new(stream), s: s}
	change, _, err := load(s)
	if err != nil {
		return nil, err
	}
	r.e = engine.New(config(r.out))
	if err := r.e.Apply(change); err != nil {
		return nil, err
	}
	change.UpsertPolicies = nil
	if err := say("with everything loaded"); err != nil {
		return nil, err
	}
	if _, _, err := r.churn(5 * rounds); err != nil {
		return nil, err
	}
	if err := say(fmt.Sprintf("after adding and removing %d identities", 5*rounds)); err != nil {
		return nil, err
	}
	if _, err := r.change(ofOne, 100); err != nil {
		return nil, err
	}
	if err := say("after 100 changes of a policy of 1 subject"); err != nil {
		return nil, err
	}
	if _, err := r.change(ofAll, 20); err != nil {
		return nil, err
	}
	if err := say("after 20 changes of a policy of all subjects"); err != nil {
		return nil, err
	}
	return out, r.out.err
}

func single(manifests string, others []peer.Identity) ([]line, error) {
	o, err := decode(manifests)
	if err != nil {
		return nil, err
	}
	id, err := synthetic.Identity(synthetic.Shape{Namespaces: 200, Apps: 50}, 1, 1)
	if err != nil {
		return nil, err
	}
	id.Number = 60001
	var took []time.Duration
	var r *bench
	for range 20 {
		r = &bench{out: new(stream)}
		r.e = engine.New(config(r.out))
		if err := r.e.Apply(engine.Change{AddIdentities: append([]peer.Identity{id}, others...), AddSubjects: []identity.Numeric{id.Number}}); err != nil {
			return nil, err
		}
		r.out.steps, r.out.bytes = 0, 0
		d, err := r.applied(engine.Change{UpsertPolicies: []policy.Object{o}})
		if err != nil {
			return nil, err
		}
		took = append(took, d)
	}
	size := r.e.Size()
	return []line{
		{"policy to bytes of the stream", fmt.Sprintf("%s; %d steps, %s", percentiles(took), r.out.steps, kilobytes(r.out.bytes))},
		{"identities; identity classes; peer rows; classes; nodes; intervals; prefixes", fmt.Sprintf("%d; %d; %d; %d; %d; %d; %d",
			size.Identities, size.IdentityClasses, size.PeerRows, size.Classes, size.Nodes, size.Intervals, size.Prefixes)},
	}, r.out.err
}

func measurePrefixes() ([]line, error) {
	var list []string
	for i := range 5000 {
		block := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i / 250), byte(i % 250), 0}), 24)
		hole := netip.AddrFrom4([4]byte{10, byte(i / 250), byte(i % 250), byte(1 + i%200)})
		list = append(list, fmt.Sprintf("{cidr: %s, except: [%s/32]}", block, hole))
	}
	return single(`{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, metadata: {name: blocks, namespace: ns-001},
spec: {endpointSelector: {}, egress: [{toCIDRSet: [`+strings.Join(list, ",")+`]}]}}`, nil)
}

func measurePorts() ([]line, error) {
	var others []peer.Identity
	for i := range 10000 {
		id, err := peer.New(identity.MinCluster+identity.Numeric(i), label.NewSet(
			label.Kubernetes(label.KeyNamespace, "ns-002"), label.Kubernetes(label.KeyCluster, synthetic.Name),
			label.Kubernetes("pod", fmt.Sprint(i)), label.Kubernetes("half", fmt.Sprint(i%2)),
		))
		if err != nil {
			return nil, err
		}
		others = append(others, id)
	}
	var list []string
	for i := range 40 {
		list = append(list, fmt.Sprintf(`{port: "%d", protocol: TCP}`, 1000+2*i))
	}
	return single(`{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, metadata: {name: ports, namespace: ns-001},
spec: {endpointSelector: {}, ingress: [{fromEndpoints: [{matchLabels: {"k8s:io.kubernetes.pod.namespace": ns-002, half: "0"}}],
toPorts: [{ports: [`+strings.Join(list, ",")+`]}]}]}}`, others)
}

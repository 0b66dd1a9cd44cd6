// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package vectors runs the policy vectors: cases with verdicts that engines outside of this project computed. The
// format is described next to the data, in testdata/policy-vectors/README.md.
//
// A World is the cluster of one case. It also simulates the identity service and assigns numbers to label sets. It
// keeps one engine per node, with the data that the node has about other nodes.
package vectors

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// Case is one line of a file.
type Case struct {
	Name       string          `json:"name"`
	Kind       string          `json:"kind"`
	Suite      string          `json:"suite"`
	Tags       []string        `json:"tags"`
	Config     Config          `json:"config"`
	Cluster    Cluster         `json:"cluster"`
	Steps      []Step          `json:"steps"`
	Manifest   json.RawMessage `json:"manifest"`
	Validation *Validation     `json:"validation"`
}

// Tagged reports whether the case has a tag.
func (c *Case) Tagged(tag string) bool { return slices.Contains(c.Tags, tag) }

// Config is the configuration of the cluster; missing fields have defaults.
type Config struct {
	ClusterName              *string `json:"clusterName"`
	AllowLocalhost           *string `json:"allowLocalhost"`
	EnforcementMode          *string `json:"enforcementMode"`
	HostFirewall             bool    `json:"hostFirewall"`
	IPv6                     *bool   `json:"ipv6"`
	PolicyCIDRMatchMode      string  `json:"policyCIDRMatchMode"`
	PolicyDefaultLocal       *bool   `json:"policyDefaultLocalCluster"`
	EnableNodeSelectorLabels bool    `json:"enableNodeSelectorLabels"`
}

// Cluster is the state before the first step.
type Cluster struct {
	Namespaces []Namespace `json:"namespaces"`
	Pods       []Pod       `json:"pods"`
	Nodes      []Node      `json:"nodes"`
	Externals  []External  `json:"externals"`
}

// Namespace is a namespace.
type Namespace struct {
	Name   string            `json:"name"`
	Labels map[string]string `json:"labels"`
}

// Pod is a pod.
type Pod struct {
	Namespace      string            `json:"namespace"`
	Name           string            `json:"name"`
	Labels         map[string]string `json:"labels"`
	ServiceAccount string            `json:"serviceAccount"`
	IPs            []netip.Addr      `json:"ips"`
	Node           string            `json:"node"`
	Ports          []ContainerPort   `json:"ports"`
	Cluster        string            `json:"cluster"`
	State          string            `json:"state"`
}

// ContainerPort is a named port.
type ContainerPort struct {
	Name  string `json:"name"`
	Port  uint16 `json:"port"`
	Proto string `json:"proto"`
}

// Node is a node.
type Node struct {
	Name          string            `json:"name"`
	Labels        map[string]string `json:"labels"`
	IPs           []netip.Addr      `json:"ips"`
	HealthIP      netip.Addr        `json:"healthIP"`
	IngressIP     netip.Addr        `json:"ingressIP"`
	KubeAPIServer bool              `json:"kubeApiserver"`
}

// External is an address outside the cluster.
type External struct {
	Name          string     `json:"name"`
	IP            netip.Addr `json:"ip"`
	KubeAPIServer bool       `json:"kubeApiserver"`
}

// Step changes the cluster, and then sends probes.
type Step struct {
	CreateNamespaces []Namespace       `json:"createNamespaces"`
	CreatePods       []Pod             `json:"createPods"`
	Relabel          []Relabel         `json:"relabel"`
	Delete           []Reference       `json:"delete"`
	Apply            []json.RawMessage `json:"apply"`
	DeletePods       []PodReference    `json:"deletePods"`
	DeleteNamespaces []string          `json:"deleteNamespaces"`
	DNS              []DNS             `json:"dns"`
	Rejected         map[string]string `json:"rejected"`
	Probes           []Probe           `json:"probes"`
}

// Relabel replaces the labels of an object.
type Relabel struct {
	Kind      string            `json:"kind"`
	Namespace string            `json:"namespace"`
	Name      string            `json:"name"`
	Labels    map[string]string `json:"labels"`
}

// Reference identifies a policy object.
type Reference struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// PodReference identifies a pod.
type PodReference struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// DNS is an observed DNS answer.
type DNS struct {
	Name string       `json:"name"`
	IPs  []netip.Addr `json:"ips"`
}

// Probe is a query with the expected answer of each side.
type Probe struct {
	From     string `json:"from"`
	To       string `json:"to"`
	Proto    string `json:"proto"`
	Port     uint16 `json:"port"`
	Egress   string `json:"egress"`
	Ingress  string `json:"ingress"`
	Expect   string `json:"expect"`
	Loopback bool   `json:"loopback"`
}

// Validation is the expected validation of a manifest.
type Validation struct {
	Overall string `json:"overall"`
}

// Read calls f for each case of a gzipped file of JSON lines.
func Read(path string, f func(*Case) error) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	z, err := gzip.NewReader(file)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	r := bufio.NewReaderSize(z, 1<<20)
	for n := 1; ; n++ {
		line, err := r.ReadBytes('\n')
		if len(strings.TrimSpace(string(line))) > 0 {
			c := new(Case)
			if err := json.Unmarshal(line, c); err != nil {
				return fmt.Errorf("%s:%d: %w", path, n, err)
			}
			if err := f(c); err != nil {
				return fmt.Errorf("%s:%d: %w", path, n, err)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
}

// World is the cluster of a case at one moment.
type World struct {
	options    rule.Options
	engine     engine.Config
	host       bool // nodes are subjects, too
	nodeLabels bool
	dual       bool

	namespaces map[string]map[string]string
	pods       map[string]*Pod // by probe name, without "pod:"
	nodes      map[string]*Node
	externals  map[netip.Addr]*External
	names      map[string][]netip.Addr
	objects    map[policy.Key]policy.Object

	numbers map[string]identity.Numeric
	pod     identity.Numeric // last number given to a pod's labels
	local   identity.Numeric // last number given to labels that stay on a node
	views   map[string]*view
	ends    map[endKey]*end // the ends of probes in the present state
}

type endKey struct {
	name string
	v6   bool
}

// view is one node's engine and its inputs.
type view struct {
	engine     *engine.Engine
	identities map[identity.Numeric]peer.Identity
	subjects   map[identity.Numeric]bool
	objects    map[policy.Key]policy.Object
	names      map[string][]netip.Addr
	located    map[netip.Addr]identity.Numeric
}

// NewWorld creates the cluster of a case.
func NewWorld(c *Case) *World {
	w := &World{
		options: rule.Options{
			Cluster: "default", LocalClusterOnly: true,
			CIDRSelectsNodes: c.Config.PolicyCIDRMatchMode == "nodes", NodeLabels: c.Config.EnableNodeSelectorLabels,
			HostRules: true,
		},
		engine: engine.Config{AllowHost: true},
		host:   c.Config.HostFirewall, nodeLabels: c.Config.EnableNodeSelectorLabels, dual: true,
		namespaces: make(map[string]map[string]string),
		pods:       make(map[string]*Pod), nodes: make(map[string]*Node), externals: make(map[netip.Addr]*External),
		names: make(map[string][]netip.Addr), objects: make(map[policy.Key]policy.Object),
		numbers: make(map[string]identity.Numeric), pod: identity.MinCluster - 1, local: identity.MinNodeLocal - 1,
		views: make(map[string]*view), ends: make(map[endKey]*end),
	}
	if s := c.Config.ClusterName; s != nil {
		w.options.Cluster = *s
	}
	w.engine.Cluster = w.options.Cluster
	if b := c.Config.PolicyDefaultLocal; b != nil {
		w.options.LocalClusterOnly = *b
	}
	if s := c.Config.AllowLocalhost; s != nil {
		w.engine.AllowHost = *s != "policy"
	}
	if b := c.Config.IPv6; b != nil {
		w.dual = *b
	}
	if s := c.Config.EnforcementMode; s != nil {
		switch *s {
		case "always":
			w.engine.Enforcement = engine.EnforceAlways
		case "never":
			w.engine.Enforcement = engine.EnforceNever
		}
	}
	for _, n := range c.Cluster.Namespaces {
		w.namespaces[n.Name] = n.Labels
	}
	for i := range c.Cluster.Pods {
		w.pods[c.Cluster.Pods[i].key()] = &c.Cluster.Pods[i]
	}
	for i := range c.Cluster.Nodes {
		w.nodes[c.Cluster.Nodes[i].Name] = &c.Cluster.Nodes[i]
	}
	for i := range c.Cluster.Externals {
		w.externals[c.Cluster.Externals[i].IP] = &c.Cluster.Externals[i]
	}
	return w
}

func (p *Pod) key() string {
	if p.Cluster != "" {
		return p.Cluster + ":" + p.Namespace + "/" + p.Name
	}
	return p.Namespace + "/" + p.Name
}

// Step applies everything except the probes. It returns an error if the cluster accepts a manifest that must be
// rejected, or rejects one that must be accepted. If tolerant is set, Step accepts a manifest that only the schema
// rejects, and counts it in refused.
func (w *World) Step(s *Step, tolerant bool) (refused int, err error) {
	for _, n := range s.CreateNamespaces {
		w.namespaces[n.Name] = n.Labels
	}
	for i := range s.CreatePods {
		w.pods[s.CreatePods[i].key()] = &s.CreatePods[i]
	}
	for _, r := range s.Relabel {
		switch r.Kind {
		case "Pod":
			old := w.pods[r.Namespace+"/"+r.Name]
			if old == nil {
				return 0, fmt.Errorf("relabel: no pod %s/%s", r.Namespace, r.Name)
			}
			p := *old
			p.Labels = r.Labels
			w.pods[p.key()] = &p
		case "Namespace":
			w.namespaces[r.Name] = r.Labels
		case "Node":
			old := w.nodes[r.Name]
			if old == nil {
				return 0, fmt.Errorf("relabel: no node %s", r.Name)
			}
			n := *old
			n.Labels = r.Labels
			w.nodes[r.Name] = &n
		default:
			return 0, fmt.Errorf("relabel of a %s", r.Kind)
		}
	}
	for _, r := range s.Delete {
		delete(w.objects, policy.Key{Kind: r.Kind, Namespace: r.Namespace, Name: r.Name})
	}
	for _, raw := range s.Apply {
		docs, err := manifest.Parse(raw)
		if err != nil || len(docs) != 1 {
			return 0, fmt.Errorf("apply: %d documents: %w", len(docs), err)
		}
		o, err := policy.Decode(docs[0], w.options)
		name := o.Key.Kind + "/" + o.Key.Namespace + "/" + o.Key.Name
		_, mustFail := s.Rejected[name]
		var problems manifest.Problems
		if tolerant && !mustFail && errors.As(err, &problems) && problems.SchemaOnly() {
			refused++
			err = nil
		}
		switch {
		case mustFail && err == nil:
			return 0, fmt.Errorf("apply %s: the manifest must be rejected, but is accepted", name)
		case mustFail:
			refused++
			continue
		case err != nil:
			return 0, fmt.Errorf("apply %s: %w", name, err)
		}
		w.objects[o.Key] = o
	}
	for _, p := range s.DeletePods {
		delete(w.pods, p.Namespace+"/"+p.Name)
	}
	for _, n := range s.DeleteNamespaces {
		delete(w.namespaces, n)
		maps.DeleteFunc(w.pods, func(_ string, p *Pod) bool { return p.Cluster == "" && p.Namespace == n })
		maps.DeleteFunc(w.objects, func(k policy.Key, _ policy.Object) bool { return k.Namespace == n })
	}
	for _, d := range s.DNS {
		w.names[d.Name] = append(w.names[d.Name], d.IPs...)
	}
	return refused, nil
}

// Rules that decide which labels belong to an identity: the defaults of the identity service. A rule is the prefix of
// a key, or with "*." the suffix of its domain. The longest matching rule decides; a label that no rule matches is
// kept.
var (
	keptLabels = []string{
		"io.kubernetes.pod.namespace", "io.cilium.k8s.namespace.labels.", "io.cilium.k8s.policy.", "app.kubernetes.io/",
	}
	droppedLabels = []string{
		"io.kubernetes.", "io.cilium.k8s.", "kubernetes.io/", "*.kubernetes.io/", "k8s.io/", "*.k8s.io/", "pod-template-generation",
		"pod-template-hash", "controller-revision-hash", "controller-uid", "job-name", "annotation.",
	}
)

// relevant reports whether a label is part of an identity.
func relevant(key string) bool {
	longest := func(rules []string) int {
		most := -1
		for _, r := range rules {
			if domain, ok := strings.CutPrefix(r, "*"); ok {
				have, _, slash := strings.Cut(key, "/")
				if domain = strings.TrimSuffix(domain, "/"); slash && strings.HasSuffix(have, domain) {
					most = max(most, len(domain))
				}
			} else if strings.HasPrefix(key, r) {
				most = max(most, len(r))
			}
		}
		return most
	}
	// No rule is in both lists, so the lengths differ unless no rule matches.
	return longest(keptLabels) >= longest(droppedLabels)
}

func (w *World) podLabels(p *Pod) label.Set {
	switch p.State {
	case "init":
		return label.NewSet(label.Reserved(identity.NameInit))
	case "unmanaged":
		return label.NewSet(label.Reserved(identity.NameUnmanaged))
	}
	cluster := w.options.Cluster
	if p.Cluster != "" {
		cluster = p.Cluster
	}
	ls := []label.Label{
		label.Kubernetes(label.KeyNamespace, p.Namespace),
		label.Kubernetes(label.KeyCluster, cluster),
	}
	if p.ServiceAccount != "" {
		ls = append(ls, label.Kubernetes(label.KeyServiceAccount, p.ServiceAccount))
	}
	for k, v := range p.Labels {
		if relevant(k) {
			ls = append(ls, label.Kubernetes(k, v))
		}
	}
	for k, v := range w.namespaces[p.Namespace] {
		ls = append(ls, label.Kubernetes(label.KeyNamespaceLabels+k, v))
	}
	var ports []workload.NamedPort
	for _, cp := range p.Ports {
		if proto, ok := port.ParseProtocol(cp.Proto); ok && cp.Name != "" {
			ports = append(ports, workload.NamedPort{Name: cp.Name, Protocol: workload.Protocol(proto), Port: cp.Port})
		}
	}
	if len(ports) > 0 {
		ls = append(ls, label.Label{Source: label.SourceGenerated, Key: workload.KeyNamedPorts, Value: workload.NamedPortsText(ports)})
	}
	return label.NewSet(ls...)
}

func (w *World) nodeSet(n *Node, view string) label.Set {
	ls := []label.Label{label.Reserved(identity.NameRemoteNode)}
	if n.Name == view {
		ls[0] = label.Reserved(identity.NameHost)
		for k, v := range n.Labels {
			if relevant(k) {
				ls = append(ls, label.Kubernetes(k, v))
			}
		}
	}
	if n.KubeAPIServer {
		ls = append(ls, label.Reserved(identity.NameKubeAPIServer))
	}
	if w.nodeLabels {
		for k, v := range n.Labels {
			ls = append(ls, label.Label{Source: label.SourceNode, Key: k, Value: v})
		}
	}
	return label.NewSet(ls...)
}

func (w *World) worldSet(a netip.Addr, apiServer bool) label.Set {
	name := identity.NameWorldIPv4
	switch {
	case !w.dual:
		name = identity.NameWorld
	case !a.Is4():
		name = identity.NameWorldIPv6
	}
	ls := []label.Label{label.Reserved(name)}
	if apiServer {
		ls = append(ls, label.Reserved(identity.NameKubeAPIServer))
	}
	return label.NewSet(ls...)
}

var fixed = map[string]identity.Numeric{
	identity.NameHost: identity.Host, identity.NameWorld: identity.World, identity.NameUnmanaged: identity.Unmanaged,
	identity.NameHealth: identity.Health, identity.NameInit: identity.Init, identity.NameRemoteNode: identity.RemoteNode,
	identity.NameIngress: identity.Ingress, identity.NameWorldIPv4: identity.WorldIPv4, identity.NameWorldIPv6: identity.WorldIPv6,
}

// number assigns a number to each label set: reserved numbers to reserved sets, cluster numbers to pods, and
// node-local numbers to the rest.
func (w *World) number(labels label.Set) identity.Numeric {
	text := labels.String()
	if n, ok := w.numbers[text]; ok {
		return n
	}
	all := labels.All()
	n, ok := identity.Numeric(0), false
	if len(all) == 1 && all[0].Source == label.SourceReserved {
		n, ok = fixed[all[0].Key]
	}
	if !ok {
		if _, pod := labels.Value(label.SourceKubernetes, label.KeyNamespace); pod {
			w.pod++
			n = w.pod
		} else {
			w.local++
			n = w.local
		}
	}
	w.numbers[text] = n
	return n
}

// end is one end of a probe: its address, and the labels that a node assigns to it.
type end struct {
	labels  func(view string) label.Set
	addr    netip.Addr
	node    string // the node on which the end is a subject; empty: on no node
	numbers map[string]identity.Numeric
}

// number returns the identity that a node assigns to an end.
func (e *end) number(w *World, view string) identity.Numeric {
	n, ok := e.numbers[view]
	if !ok {
		n = w.number(e.labels(view))
		e.numbers[view] = n
	}
	return n
}

// find returns an end of a probe.
func (w *World) find(name string, v6 bool) (*end, error) {
	key := endKey{name, v6}
	if e := w.ends[key]; e != nil {
		return e, nil
	}
	e, err := w.end(name, v6)
	if err != nil {
		return nil, err
	}
	e.numbers = make(map[string]identity.Numeric)
	w.ends[key] = &e
	return &e, nil
}

func pick(addrs []netip.Addr, v6 bool) (netip.Addr, error) {
	for _, a := range addrs {
		if a.Is6() == v6 {
			return a, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("no address of the family (IPv6 %t)", v6)
}

func (w *World) end(name string, v6 bool) (e end, err error) {
	kind, rest, _ := strings.Cut(name, ":")
	constant := func(s label.Set) func(string) label.Set { return func(string) label.Set { return s } }
	node := func() (*Node, error) {
		if n := w.nodes[rest]; n != nil {
			return n, nil
		}
		return nil, fmt.Errorf("%s: no such node", name)
	}
	switch kind {
	case "pod":
		p := w.pods[rest]
		if p == nil {
			return e, fmt.Errorf("%s: no such pod", name)
		}
		e.labels = constant(w.podLabels(p))
		if p.Cluster == "" && p.State != "unmanaged" {
			e.node = p.Node
		}
		e.addr, err = pick(p.IPs, v6)
	case "node":
		n, nerr := node()
		if nerr != nil {
			return e, nerr
		}
		e.labels = func(view string) label.Set { return w.nodeSet(n, view) }
		if w.host {
			e.node = n.Name
		}
		e.addr, err = pick(n.IPs, v6)
	case "health":
		n, nerr := node()
		if nerr != nil {
			return e, nerr
		}
		e.labels, e.addr = constant(label.NewSet(label.Reserved(identity.NameHealth))), n.HealthIP
	case "ingress":
		n, nerr := node()
		if nerr != nil {
			return e, nerr
		}
		e.labels, e.addr = constant(label.NewSet(label.Reserved(identity.NameIngress))), n.IngressIP
	case "ip":
		if e.addr, err = netip.ParseAddr(rest); err != nil {
			return e, fmt.Errorf("%s: %w", name, err)
		}
		x := w.externals[e.addr]
		e.labels = constant(w.worldSet(e.addr, x != nil && x.KubeAPIServer))
	default:
		err = fmt.Errorf("what is %s?", kind)
	}
	if err != nil {
		return e, fmt.Errorf("%s: %w", name, err)
	}
	return e, nil
}

// desired returns the input that the engine of a node should have now.
func (w *World) desired(node string) *view {
	v := &view{
		identities: make(map[identity.Numeric]peer.Identity), subjects: make(map[identity.Numeric]bool),
		objects: maps.Clone(w.objects), names: make(map[string][]netip.Addr), located: make(map[netip.Addr]identity.Numeric),
	}
	for n, a := range w.names {
		v.names[n] = slices.Clone(a)
	}
	add := func(labels label.Set) identity.Numeric {
		n := w.number(labels)
		id, err := peer.New(n, labels)
		if err != nil {
			panic(err) // the labels were made above
		}
		v.identities[n] = id
		return n
	}
	for _, p := range w.pods {
		n := add(w.podLabels(p))
		for _, a := range p.IPs {
			v.located[a] = n
		}
		if p.Cluster == "" && p.State != "unmanaged" && p.Node == node {
			v.subjects[n] = true
		}
	}
	for _, nd := range w.nodes {
		n := add(w.nodeSet(nd, node))
		if w.host && nd.Name == node {
			v.subjects[n] = true
		}
	}
	for _, x := range w.externals {
		add(w.worldSet(x.IP, x.KubeAPIServer))
	}
	for _, s := range []string{identity.NameHealth, identity.NameIngress} {
		add(label.NewSet(label.Reserved(s)))
	}
	add(w.worldSet(netip.IPv4Unspecified(), false))
	add(w.worldSet(netip.IPv6Unspecified(), false))
	return v
}

// Settle updates the engine of every node with the difference to its previous input.
func (w *World) Settle() error {
	clear(w.ends)
	for name := range w.nodes {
		have := w.views[name]
		if have == nil {
			have = &view{engine: engine.New(w.engine)}
		}
		want := w.desired(name)
		want.engine = have.engine
		if err := want.engine.Apply(difference(have, want)); err != nil {
			return fmt.Errorf("node %s: %w", name, err)
		}
		w.views[name] = want
	}
	return nil
}

// Reset discards the engines, so that Settle compiles from scratch.
func (w *World) Reset() { clear(w.views) }

func difference(have, want *view) engine.Change {
	var c engine.Change
	for k := range have.objects {
		if _, ok := want.objects[k]; !ok {
			c.DeletePolicies = append(c.DeletePolicies, k)
		}
	}
	for k, o := range want.objects {
		old, ok := have.objects[k]
		if !ok || !sameObject(old, o) {
			c.UpsertPolicies = append(c.UpsertPolicies, o)
		}
	}
	for n := range have.identities {
		if _, ok := want.identities[n]; !ok {
			c.RemoveIdentities = append(c.RemoveIdentities, n)
		}
	}
	for n, id := range want.identities {
		if _, ok := have.identities[n]; !ok {
			c.AddIdentities = append(c.AddIdentities, id)
		}
	}
	slices.SortFunc(c.AddIdentities, func(a, b peer.Identity) int { return cmp.Compare(a.Number, b.Number) })
	for n := range have.subjects {
		if !want.subjects[n] {
			c.RemoveSubjects = append(c.RemoveSubjects, n)
		}
	}
	for n := range want.subjects {
		if !have.subjects[n] {
			c.AddSubjects = append(c.AddSubjects, n)
		}
	}
	for n, a := range want.names {
		if !slices.Equal(have.names[n], a) {
			c.Learn = append(c.Learn, engine.Name{Name: dnsname.ForAll(n), Addrs: a})
		}
	}
	for a := range have.located {
		if _, ok := want.located[a]; !ok {
			c.Vacate = append(c.Vacate, a)
		}
	}
	for a, n := range want.located {
		if have.located[a] != n {
			c.Locate = append(c.Locate, engine.Location{Addr: a, Identity: n})
		}
	}
	return c
}

// sameObject reports whether a and b are copies of one decoded object.
func sameObject(a, b policy.Object) bool {
	if a.Group != nil || b.Group != nil {
		return a.Group == b.Group
	}
	return len(a.Specs) == len(b.Specs) && len(a.Specs) > 0 && &a.Specs[0] == &b.Specs[0]
}

// Answer is the result of a probe. A side without a subject is empty.
type Answer struct {
	Egress, Ingress, Overall string
	EgressWhy, IngressWhy    table.Verdict
}

// Side is the result of one side of a probe on the node that evaluates it.
type Side struct {
	Node        string
	Direction   policytable.Direction
	Subject     identity.Numeric
	SubjectAddr netip.Addr
	Pod         bool // the subject is a pod, and not the node itself
	Peer        identity.Numeric
	PeerAddr    netip.Addr
	Point       port.Point
	Enforced    bool // the subject has a table in this direction
	Verdict     table.Verdict
}

// Sides evaluates each side of a probe that has a subject.
func (w *World) Sides(p *Probe) ([]Side, error) {
	proto, ok := port.ParseProtocol(p.Proto)
	if !ok {
		return nil, fmt.Errorf("unknown protocol %s", p.Proto)
	}
	v6 := proto == port.ICMPv6
	for _, s := range []string{p.From, p.To} {
		if a, err := netip.ParseAddr(strings.TrimPrefix(s, "ip:")); err == nil && a.Is6() {
			v6 = true
		}
	}
	from, err := w.find(p.From, v6)
	if err != nil {
		return nil, err
	}
	to, err := w.find(p.To, v6)
	if err != nil {
		return nil, err
	}
	q := port.At(proto, p.Port)
	switch {
	case proto == port.ICMP || proto == port.ICMPv6:
		q = port.AtICMP(proto, uint8(p.Port), 0)
	case !proto.HasPorts():
		q = port.At(proto, 0)
	}
	var out []Side
	for _, ends := range []struct {
		d             policytable.Direction
		subject, peer *end
	}{{policytable.Egress, from, to}, {policytable.Ingress, to, from}} {
		node := ends.subject.node
		if node == "" {
			continue
		}
		v := w.views[node]
		s := Side{
			Node: node, Direction: ends.d, Point: q,
			Subject: ends.subject.number(w, node), SubjectAddr: ends.subject.addr,
			Peer: ends.peer.number(w, node), PeerAddr: ends.peer.addr,
		}
		if _, ok := v.identities[s.Peer]; !ok {
			return nil, fmt.Errorf("peer %s is unknown to node %s", ends.peer.labels(node), node)
		}
		if s.Verdict, err = v.engine.Lookup(s.Subject, s.Direction, s.Peer, s.PeerAddr, q); err != nil {
			return nil, err
		}
		bound, _ := v.engine.Bound(s.Subject, s.Direction)
		s.Enforced = bound.Table != nil
		s.Pod = v.identities[s.Subject].Kind != identity.KindHost
		out = append(out, s)
	}
	return out, nil
}

// Engine returns a node's engine; nil before the first Settle.
func (w *World) Engine(node string) *engine.Engine {
	if v := w.views[node]; v != nil {
		return v.engine
	}
	return nil
}

// Ask evaluates a probe.
func (w *World) Ask(p *Probe) (Answer, error) {
	sides, err := w.Sides(p)
	if err != nil {
		return Answer{}, err
	}
	return Combine(p, sides), nil
}

// Combine returns the result of a probe: the strictest of its sides.
func Combine(p *Probe, sides []Side) Answer {
	a := Answer{Overall: "allow"}
	for _, s := range sides {
		text := s.Verdict.Action.String()
		if s.Direction == policytable.Egress {
			a.Egress, a.EgressWhy = text, s.Verdict
		} else {
			a.Ingress, a.IngressWhy = text, s.Verdict
		}
		if text == "deny" || text == "redirect" && a.Overall == "allow" {
			a.Overall = text
		}
	}
	if p.Loopback {
		a.Overall = "allow"
	}
	return a
}

// Wants reports whether an answer equals the expected one. Cases of the network-policy-api-conformance suite expect
// only the overall result.
func (c *Case) Wants(p *Probe, a Answer) bool {
	if c.Suite == "network-policy-api-conformance" {
		return a.Overall == p.Expect
	}
	return a.Egress == p.Egress && a.Ingress == p.Ingress && a.Overall == p.Expect
}

// Asks reports whether the case tests connections, and not the validity of a manifest, a name or a DNS query.
func (c *Case) Asks() bool {
	return !slices.Contains([]string{"Validation", "FQDNMatch", "DNSQuery"}, c.Kind)
}

// Describe lists the identities that a node knows, with their labels, and which of them are subjects.
func (w *World) Describe(node string) string {
	v := w.views[node]
	if v == nil {
		return ""
	}
	var b strings.Builder
	for _, n := range slices.Sorted(maps.Keys(v.identities)) {
		subject := ""
		if v.subjects[n] {
			subject = " subject"
		}
		fmt.Fprintf(&b, "identity %d%s {%s}\n", n, subject, v.identities[n].Labels)
	}
	return b.String()
}

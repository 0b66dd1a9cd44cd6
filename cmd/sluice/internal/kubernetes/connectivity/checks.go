// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package connectivity

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
	"github.com/sluice-net/sluice/cmd/sluice/internal/probe"
)

// check is a connection attempt with its expected result.
type check struct {
	name   string
	from   string // a pod of the test, or "" for the client's node
	target string // HOST:PORT, or a DNS name
	kind   kind
	denied bool // the connection must fail
	// server is the name of the pod that must answer; empty: any.
	server string
	// addresses are the addresses to which the name must resolve.
	addresses []string
	// after names a check that must have passed before this one; otherwise this one is skipped.
	after string
}

type kind int

const (
	answers  kind = iota // the server answers with its name
	accepts              // the server accepts a connection
	resolves             // the name resolves
)

// environment contains the pods, nodes and addresses that the checks use.
type environment struct {
	namespace string
	nodes     []kubectl.Node // one or two nodes with pods
	all       []kubectl.Node // nodes whose node port is tested
	addresses map[string][]string
	clusterIP []string
	nodePort  int
	hostPort  int
	api       []string // addresses of the API server's Service
	apiPort   int
	external  string
}

// family returns the family of an address.
func family(address string) string {
	if a, err := netip.ParseAddr(address); err == nil && a.Is6() {
		return "IPv6"
	}
	return "IPv4"
}

func (e environment) several() bool { return len(e.nodes) > 1 }

// farthest returns the pod that is the Service's backend: on the other node if there is one.
func (e environment) farthest() string {
	if e.several() {
		return far
	}
	return near
}

func at(address string, port int) string { return net.JoinHostPort(address, strconv.Itoa(port)) }

// connections returns the checks that run without a policy, for the address families that both ends have.
func (e environment) connections() []check {
	var all []check
	pods := func(what, from, to string) {
		for _, address := range e.addresses[to] {
			all = append(all, check{
				name: what + ", " + family(address), from: from, target: at(address, port), server: to,
			})
		}
	}
	pods(podToNear, client, near)
	if e.several() {
		pods(podToFar, client, far)
		pods("pod to pod on another node, the other way", far, client)
	}
	pods("node to pod on the same node", "", near)
	if e.several() {
		pods("node to pod on another node", "", far)
	}
	pods(podToFriend, client, friend)
	has := func(address string) bool {
		return slices.ContainsFunc(e.addresses[client], func(mine string) bool { return family(mine) == family(address) })
	}
	for _, address := range e.clusterIP {
		if has(address) {
			all = append(all, check{
				name: podToService + ", " + family(address), from: client, target: at(address, 80), server: e.farthest(),
			})
		}
	}
	families := map[string]bool{}
	for _, address := range e.clusterIP {
		families[family(address)] = true
	}
	for _, n := range e.all {
		for _, address := range n.Addresses {
			if e.nodePort != 0 && has(address) && families[family(address)] {
				all = append(all, check{
					name: "pod to NodePort of " + n.Name + ", " + family(address), from: client, target: at(address, e.nodePort),
					server: e.farthest(),
				})
			}
		}
	}
	last := e.nodes[len(e.nodes)-1]
	for _, address := range last.Addresses {
		if len(e.addresses[hostPort]) > 0 && has(address) {
			all = append(all, check{
				name: "pod to hostPort of " + last.Name + ", " + family(address), from: client, target: at(address, e.hostPort),
				server: hostPort,
			})
		}
	}
	own := e.nodes[0]
	for _, address := range own.Addresses {
		if own.Kubelet != 0 && has(address) {
			all = append(all, check{
				name: "pod to its own node, " + family(address), from: client, target: at(address, own.Kubelet), kind: accepts,
			})
		}
	}
	if len(e.clusterIP) > 0 {
		all = append(all, check{
			name: "DNS of the cluster", from: client, target: service + "." + e.namespace + ".svc", kind: resolves,
			addresses: e.clusterIP,
		})
	}
	for _, address := range e.api {
		if has(address) {
			all = append(all, check{
				name: "pod to the API server, " + family(address), from: client, target: at(address, e.apiPort), kind: accepts,
			})
		}
	}
	if e.external != "" {
		all = append(all, check{name: "pod to the outside", from: client, target: e.external, kind: accepts})
	}
	return slices.DeleteFunc(all, func(c check) bool { return c.from != "" && len(e.addresses[c.from]) == 0 })
}

// Names of checks that other checks refer to.
const (
	podToNear    = "pod to pod on the same node"
	podToFar     = "pod to pod on another node"
	podToFriend  = "pod to another pod on the same node"
	podToService = "pod to Service"
)

// stage is a policy with the checks that run while it is enforced, and the checks that run after its deletion.
type stage struct {
	policy     object
	with, then []check
}

// stages returns the policies with their checks.
func (e environment) stages() []stage {
	var ingress, egress stage
	add := func(to *[]check, denied bool, what, from, target, after string) {
		for _, address := range e.addresses[target] {
			if len(e.addresses[from]) > 0 {
				c := check{
					name: what + ", " + family(address), from: from, target: at(address, port), server: target, denied: denied,
				}
				if after != "" {
					c.after = after + ", " + family(address)
				}
				*to = append(*to, c)
			}
		}
	}
	ingress.policy = policyOf(e.namespace, "ingress-by-label", object{"role": "server"}, "ingress", "from",
		object{"access": "granted"})
	add(&ingress.with, true, "ingress denied on the same node", client, near, podToNear)
	add(&ingress.with, true, "ingress denied from another node", client, far, podToFar)
	add(&ingress.with, false, "ingress allowed by label on the same node", friend, near, "")
	add(&ingress.with, false, "ingress allowed by label from another node", friend, far, "")
	add(&ingress.then, false, "ingress after the policy was deleted", client, e.farthest(), "")

	egress.policy = policyOf(e.namespace, "egress-by-label", object{"app": client}, "egress", "to",
		object{"access": "granted", "role": "server"})
	add(&egress.with, true, "egress denied on the same node", client, friend, podToFriend)
	add(&egress.with, true, "egress denied to another node", client, far, podToFar)
	add(&egress.with, false, "egress allowed by label", client, near, "")
	for _, c := range e.connections() {
		// With one node, the backend of the Service is a pod that the policy allows, so this check must
		// succeed.
		if e.several() && strings.HasPrefix(c.name, podToService+", ") {
			c.name, c.denied, c.after = "egress denied through the Service, "+family(host(c.target)), true, c.name
			egress.with = append(egress.with, c)
		}
	}
	add(&egress.then, false, "egress after the policy was deleted", client, friend, "")
	return []stage{ingress, egress}
}

// host returns HOST of HOST:PORT.
func host(target string) string {
	h, _, err := net.SplitHostPort(target)
	if err != nil {
		return target
	}
	return h
}

// expected describes the expected result in words.
func (c check) expected() string {
	switch {
	case c.denied:
		return "no answer: a policy denies it"
	case c.kind == resolves:
		return strings.Join(c.addresses, ", ")
	case c.server != "":
		return "an answer of " + c.server
	}
	return "a connection"
}

// met reports whether an attempt had the expected result.
func (c check) met(a probe.Attempt) bool {
	switch {
	case c.denied:
		return a.Outcome == probe.TimedOut
	case c.kind == resolves:
		return a.Outcome == probe.Resolved && !slices.ContainsFunc(c.addresses, func(want string) bool {
			return !slices.Contains(a.Addresses, want)
		})
	}
	return a.Outcome == probe.Connected && (c.server == "" || c.server == a.Server)
}

// got describes the result of an attempt in words.
func got(a probe.Attempt) string {
	text := a.Outcome
	switch {
	case a.Outcome == probe.Resolved:
		text += ": " + strings.Join(a.Addresses, ", ")
	case a.Server != "":
		text += fmt.Sprintf(": %s answers, and sees %s", a.Server, a.Client)
	case a.Error != "":
		text += ": " + a.Error
	}
	return text
}

// args returns the arguments of the command that makes the attempt.
func (c check) args() []string {
	args := []string{"probe", "connect", c.target}
	switch c.kind {
	case accepts:
		args = append(args, "--tcp")
	case resolves:
		args = []string{"probe", "resolve", c.target}
	case answers:
	}
	return append(args, "--output=json", "--timeout="+attempt.String())
}

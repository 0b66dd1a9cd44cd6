// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/test/k8s/cluster"
)

// firstNodeLocal is the lowest node-local identity.
const firstNodeLocal = 0xff0000

// programs returns the directory with the contents of Sluice's image.
func programs() string {
	return filepath.Join(os.Getenv("SLUICE_BIN"), "images", runtime.GOARCH)
}

// sluiceNode is a node of a cluster with Sluice, in one test.
type sluiceNode struct {
	testing.TB
	c     *cluster.Cluster
	index int // from 0
}

// name returns the name of the Node.
func (n sluiceNode) name() string { return fmt.Sprintf("node%d", n.index+1) }

// of returns the node of a pod.
func (n sluiceNode) of(p kubePod) sluiceNode {
	n.Helper()
	number, err := strconv.Atoi(strings.TrimPrefix(p.Spec.NodeName, "node"))
	n.must(err)
	n.index = number - 1
	return n
}

// must ends the test if there is an error.
func (n sluiceNode) must(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

func (n sluiceNode) kubectl(args ...string) string {
	n.Helper()
	out, err := n.c.Kubectl(n.Context(), args...)
	n.must(err)
	return string(out)
}

func (n sluiceNode) apply(manifest string, args ...any) {
	n.Helper()
	n.must(n.c.Apply(n.Context(), fmt.Appendf(nil, manifest, args...)))
}

// eventually waits for a condition, at most three minutes.
func (n sluiceNode) eventually(what string, try func() error) {
	n.Helper()
	n.must(n.c.Eventually(within(n.TB, 3*time.Minute), what, try))
}

// run runs a command on the node as root. It works while the API is down.
func (n sluiceNode) run(args ...string) (string, error) {
	out, err := n.c.InNode(n.Context(), n.index, args...)
	return string(out), err
}

// sluice runs the program sluice on the node as root.
func (n sluiceNode) sluice(args ...string) (string, error) {
	return n.run(append([]string{filepath.Join(programs(), "sluice")}, args...)...)
}

// write runs a command on the node with input.
func (n sluiceNode) write(input string, args ...string) error {
	cmd, err := n.c.NodeCommand(n.Context(), n.index, args...)
	if err != nil {
		return err
	}
	cmd.Stdin = strings.NewReader(input)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w: %s", args, err, out)
	}
	return nil
}

// policy applies a NetworkPolicy, which is removed with its namespace, and waits until the kernel enforces it.
func (n sluiceNode) policy(namespace, name, spec string) {
	n.Helper()
	n.apply(`{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: %s, namespace: %s}, spec: %s}`,
		name, namespace, spec)
	n.eventually("the kernel enforces the policy", func() error {
		if out, err := n.sluice("policy", "get", "netpol", namespace+"/"+name); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		// The command fails while the kernel does not enforce the latest revision.
		out, err := n.sluice("status")
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
}

// kubePod contains the used fields of a Pod.
type kubePod struct {
	Metadata struct {
		Namespace, Name, UID string
		CreationTimestamp    time.Time
		DeletionTimestamp    *time.Time
	}
	Spec struct {
		HostNetwork bool
		NodeName    string
	}
	Status struct {
		Phase             string
		PodIPs            []struct{ IP string }
		Conditions        []podCondition
		ContainerStatuses []struct {
			Name, ContainerID string
			RestartCount      int
			Ready             bool
		}
	}
}

type podCondition struct {
	Type, Status       string
	LastTransitionTime time.Time
}

// times returns the age of the pod in seconds at which each of its conditions became true. A pod waits for the
// scheduler (PodScheduled), for kubelet and its network (PodReadyToStartContainers), and for its containers.
func (p kubePod) times() string {
	var said []string
	for _, c := range p.Status.Conditions {
		if c.Status == "True" {
			after := c.LastTransitionTime.Sub(p.Metadata.CreationTimestamp)
			said = append(said, fmt.Sprintf("%s %.0f s", c.Type, after.Seconds()))
		}
	}
	return strings.Join(said, ", ")
}

func (p kubePod) String() string { return p.Metadata.Namespace + "/" + p.Metadata.Name }

func (p kubePod) address() string {
	if len(p.Status.PodIPs) == 0 {
		return ""
	}
	return p.Status.PodIPs[0].IP
}

func (n sluiceNode) pod(namespace, name string) kubePod {
	n.Helper()
	var p kubePod
	n.must(n.c.Get(n.Context(), &p, "pod", "--namespace="+namespace, name))
	return p
}

// ready waits until a pod is Ready, and returns it.
func (n sluiceNode) ready(namespace, name string) kubePod {
	n.Helper()
	n.kubectl("--namespace="+namespace, "wait", "--for=condition=Ready", "--timeout=3m", "pod/"+name)
	return n.pod(namespace, name)
}

// endpoint contains the used fields of the output of `sluice endpoint list`.
type endpoint struct {
	Owner         struct{ ContainerID, InterfaceName string }
	Pod           struct{ Namespace, Name string }
	Identity      uint64
	State         string
	Addresses     []string
	HostInterface struct {
		Name string
	}
	NetworkNamespace string
}

func (n sluiceNode) list(v any, args ...string) error {
	out, err := n.sluice(append(args, "-o", "json")...)
	if err != nil {
		return err
	}
	if reflect.TypeOf(v).Elem().Kind() == reflect.Slice {
		v = &struct {
			Items any `json:"items"`
		}{v}
	}
	return json.Unmarshal([]byte(out), v)
}

// endpointOf returns the endpoint of a pod.
func (n sluiceNode) endpointOf(p kubePod) endpoint {
	n.Helper()
	var all []endpoint
	n.must(n.list(&all, "endpoint", "list"))
	for _, e := range all {
		if e.Pod.Namespace == p.Metadata.Namespace && e.Pod.Name == p.Metadata.Name {
			return e
		}
	}
	n.Fatalf("%s has no endpoint among %+v", p, all)
	return endpoint{}
}

// exact waits until the node's state exactly matches the pods in the API. Every scenario ends with it.
func (n sluiceNode) exact() {
	n.Helper()
	n.eventually("the node has what the API says, and no more", n.differences)
}

// differences compares endpoints, addresses, devices, routes, network namespaces, identities and map entries with the
// pods in the API.
func (n sluiceNode) differences() error {
	var pods struct{ Items []kubePod }
	if err := n.c.Get(n.Context(), &pods, "pods", "--all-namespaces",
		"--field-selector=spec.nodeName="+n.name()); err != nil {
		return err
	}
	addresses := map[string]string{} // → pod
	connected := 0
	for _, p := range pods.Items {
		if p.Spec.HostNetwork || p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed" {
			continue
		}
		if p.Status.Phase != "Running" || len(p.Status.PodIPs) == 0 || p.Metadata.DeletionTimestamp != nil {
			return fmt.Errorf("%s is %s with the addresses %v", p, p.Status.Phase, p.Status.PodIPs)
		}
		connected++
		for _, a := range p.Status.PodIPs {
			addresses[a.IP] = p.String()
		}
	}
	return errors.Join(n.exactEndpoints(addresses, connected), n.exactNode())
}

// exactEndpoints compares endpoints with pods, and addresses, devices and
// identities with endpoints.
func (n sluiceNode) exactEndpoints(pods map[string]string, connected int) error {
	var endpoints []endpoint
	var leases []struct {
		Owner     struct{ ContainerID, InterfaceName string }
		State     string
		Addresses []struct{ Address string }
	}
	var pools []struct {
		Prefix                      string
		LeasedCount, ConfirmedCount uint64
	}
	var identities []struct {
		Identity       struct{ Number uint64 }
		ReferenceCount int
	}
	if err := errors.Join(n.list(&endpoints, "endpoint", "list"), n.list(&leases, "ipam", "list"),
		n.list(&pools, "ipam", "pools"), n.list(&identities, "identity", "list")); err != nil {
		return err
	}
	var errs []error
	have, devices, owners, used := map[string]string{}, map[string]bool{}, map[string]string{}, map[uint64]int{}
	for _, e := range endpoints {
		if e.State != "ready" {
			errs = append(errs, fmt.Errorf("the endpoint %+v is not ready", e))
		}
		for _, a := range e.Addresses {
			if pods[a] != "" { // only the cluster's families
				have[a] = e.Pod.Namespace + "/" + e.Pod.Name
			}
		}
		devices[e.HostInterface.Name] = true
		owners[fmt.Sprint(e.Owner)] = fmt.Sprint(e.Addresses)
		used[e.Identity]++
	}
	if !maps.Equal(have, pods) || len(endpoints) != connected {
		errs = append(errs, fmt.Errorf("%d endpoints with the addresses %v, want %d with %v",
			len(endpoints), have, connected, pods))
	}
	leased := map[string]string{}
	for _, l := range leases {
		if l.State == "confirmed" || l.State == "leased" {
			addresses := make([]string, len(l.Addresses))
			for i, a := range l.Addresses {
				addresses[i] = a.Address
			}
			leased[fmt.Sprint(l.Owner)] = fmt.Sprint(addresses)
		}
	}
	if !maps.Equal(leased, owners) {
		errs = append(errs, fmt.Errorf("addresses %v are leased, endpoints have %v", leased, owners))
	}
	for _, p := range pools {
		if p.LeasedCount != 0 || p.ConfirmedCount != uint64(len(endpoints)) {
			errs = append(errs, fmt.Errorf("the pool %+v, want %d confirmed", p, len(endpoints)))
		}
	}
	held := map[uint64]int{}
	for _, i := range identities {
		if i.Identity.Number >= firstNodeLocal && i.ReferenceCount == 1 {
			continue // an API server's identity, whose address is not a node's
		}
		if i.ReferenceCount > 0 {
			held[i.Identity.Number] = i.ReferenceCount
		}
	}
	if !maps.Equal(held, used) {
		errs = append(errs, fmt.Errorf("identities are referred to %v times, endpoints have them %v times", held, used))
	}
	return errors.Join(append(errs, n.exactDevices(devices))...)
}

// endpointDevice reports whether a device belongs to an endpoint, and is neither the tunnel nor a device for proxies.
func endpointDevice(name string) bool {
	return strings.HasPrefix(name, "sl") && !strings.HasPrefix(name, "slt") && !strings.HasPrefix(name, "slp")
}

// exactDevices compares devices, routes and network namespaces with the endpoints.
func (n sluiceNode) exactDevices(want map[string]bool) error {
	var links []struct{ IfName string }
	var routes []struct{ Dst, Dev, Protocol string }
	for what, v := range map[string]any{"link": &links, "-4 route": &routes} {
		out, err := n.run(append([]string{"ip", "-json"}, strings.Fields(what)...)...)
		if err == nil {
			err = json.Unmarshal([]byte(out), v)
		}
		if err != nil {
			return err
		}
	}
	have, routed := map[string]bool{}, map[string]bool{}
	for _, l := range links {
		if endpointDevice(l.IfName) {
			have[l.IfName] = true
		}
	}
	for _, r := range routes {
		if endpointDevice(r.Dev) {
			routed[r.Dev] = true
		}
	}
	var errs []error
	if !maps.Equal(have, want) || !maps.Equal(routed, want) {
		errs = append(errs, fmt.Errorf("the devices %v and routes over %v, endpoints have %v",
			slices.Sorted(maps.Keys(have)), slices.Sorted(maps.Keys(routed)), slices.Sorted(maps.Keys(want))))
	}
	namespaces, err := n.run("ls", "/run/netns")
	if count := len(strings.Fields(namespaces)); err != nil || count != len(want) {
		errs = append(errs, fmt.Errorf("%d network namespaces, %v, want %d", count, err, len(want)))
	}
	return errors.Join(errs...)
}

// exactNode requires that Sluice's own checks find no differences: the entries of every map, and pending deletions.
func (n sluiceNode) exactNode() error {
	var errs []error
	if out, err := n.sluice("check"); err != nil {
		errs = append(errs, fmt.Errorf("audit: %w\n%s", err, out))
	}
	if out, err := n.sluice("status"); err != nil {
		errs = append(errs, fmt.Errorf("status: %w\n%s", err, out))
	}
	for _, dir := range []string{"/var/lib/sluice/cni/deletes", "/run/sluice/netns"} {
		if out, err := n.run("ls", dir); err != nil || len(bytes.TrimSpace([]byte(out))) > 0 {
			errs = append(errs, fmt.Errorf("%s has %q, %v", dir, out, err))
		}
	}
	return errors.Join(errs...)
}

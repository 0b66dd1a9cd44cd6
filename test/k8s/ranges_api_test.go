// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/k8s/apitest"
)

// ownNode is the Node whose ranges the test's ipam serves.
const ownNode = "node-a"

// nodeAPI is a Kubernetes API, and a sluice-ipam with the rights of the manifests.
type nodeAPI struct {
	*apiServer
	t     *testing.T
	dir   string
	flags []string

	process *servicetest.Process // nil: none
	ipam    ipamv1.IPAMServiceClient
}

func newNodeAPI(t *testing.T) *nodeAPI {
	t.Helper()
	dir, err := os.MkdirTemp("", "ipam-") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	a := &nodeAPI{apiServer: newAPI(t), t: t, dir: dir}
	for _, file := range []string{"namespace", "serviceaccount", "clusterrole", "clusterrolebinding"} {
		a.kubectl("apply", "--namespace=sluice-system", "--filename=../../deploy/kubernetes/base/"+file+".yaml")
	}
	token := filepath.Join(dir, "token")
	secret := a.kubectl("create", "token", "sluice", "--namespace=sluice-system")
	if err := os.WriteFile(token, []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	a.flags = []string{
		"--mode=kubernetes", "--kubernetes-api=" + a.ready.Server, "--kubernetes-token=" + token,
		"--kubernetes-ca=" + filepath.Join(a.apiServer.dir, "ca.crt"), "--kubernetes-node=" + ownNode, "--quarantine=0s",
		"--state-dir=" + filepath.Join(dir, "state"), "--socket-path=" + a.socket(), "--socket-group=-1",
		"--socket-also-root=" + strconv.Itoa(os.Getuid()), "--metrics-address=off", "--health-address=127.0.0.1:0",
	}
	return a
}

func (a *nodeAPI) socket() string { return filepath.Join(a.dir, "run", "ipam.sock") }

// start starts ipam.
func (a *nodeAPI) start() {
	a.t.Helper()
	cmd := exec.Command(program("sluice-ipam"), a.flags...)
	a.process = servicetest.Start(a.t, cmd, a.socket(), client.Options{WaitForReady: true})
	a.ipam = ipamv1.NewIPAMServiceClient(a.process.Conn)
	a.t.Cleanup(a.stop)
}

func (a *nodeAPI) stop() {
	if a.process != nil {
		if code := a.process.Stop(); code != 0 {
			a.t.Errorf("ipam ended with %d", code)
		}
		a.process = nil
	}
}

const nodePath = "/api/v1/nodes/" + ownNode

// node makes the Node with these pod CIDRs, none if there are none.
func (a *nodeAPI) node(podCIDRs ...string) {
	a.t.Helper()
	a.do(http.MethodPost, "/api/v1/nodes", object{
		"apiVersion": "v1", "kind": "Node", "metadata": object{"name": ownNode, "labels": object{"kept": "yes"}},
		"spec": object{"taints": []object{
			{"key": "other", "effect": "NoSchedule"}, {"key": "node.sluice.io/not-ready", "effect": "NoSchedule"},
		}},
	})
	a.do(http.MethodPatch, nodePath+"/status", object{"status": object{"conditions": []object{
		{"type": "NetworkUnavailable", "status": "True", "reason": "NoRoute"}, {"type": "Ready", "status": "True"},
	}}})
	if len(podCIDRs) > 0 {
		a.assign(podCIDRs...)
	}
}

// assign is what the controller manager does.
func (a *nodeAPI) assign(podCIDRs ...string) {
	a.t.Helper()
	a.do(http.MethodPatch, nodePath, object{"spec": object{"podCIDR": podCIDRs[0], "podCIDRs": podCIDRs}})
}

// remove deletes the Node.
func (a *nodeAPI) remove() {
	a.t.Helper()
	a.do(http.MethodDelete, nodePath, nil)
}

// want waits until ipam has these ranges, "PREFIX" or "PREFIX draining", and the
// Node says so.
func (a *nodeAPI) want(ranges ...string) {
	a.t.Helper()
	slices.Sort(ranges)
	servicetest.EventuallyNil(a.t, fmt.Sprint("ranges ", ranges), func() error {
		resp, err := a.ipam.ListPools(servicetest.Context(a.t), &ipamv1.ListPoolsRequest{})
		if err != nil {
			return err
		}
		have := []string{}
		for _, p := range resp.GetPools() {
			text := p.GetPrefix()
			if p.GetState() == ipamv1.RangeState_RANGE_STATE_DRAINING {
				text += " draining"
			}
			have = append(have, text)
		}
		slices.Sort(have)
		if !slices.Equal(have, ranges) {
			return fmt.Errorf("ipam has %q", have)
		}
		return nil
	})
}

// noted waits until the Node says so.
func (a *nodeAPI) noted(serving, draining, networkUnavailable string) {
	a.t.Helper()
	servicetest.EventuallyNil(a.t, "the notes on the Node", func() error {
		var n struct {
			Metadata struct {
				Annotations, Labels map[string]string
			}
			Spec   struct{ Taints []struct{ Key string } }
			Status struct {
				Conditions []struct{ Type, Status string }
			}
		}
		if err := json.Unmarshal(a.do(http.MethodGet, nodePath, nil), &n); err != nil {
			return err
		}
		got := fmt.Sprintf("%s; %s; kept=%s;", n.Metadata.Annotations["node.sluice.io/pod-ranges"],
			n.Metadata.Annotations["node.sluice.io/draining-pod-ranges"], n.Metadata.Labels["kept"])
		for _, c := range n.Status.Conditions {
			got += " " + c.Type + "=" + c.Status
		}
		for _, taint := range n.Spec.Taints {
			got += " " + taint.Key
		}
		want := fmt.Sprintf("%s; %s; kept=yes; NetworkUnavailable=%s Ready=True", serving, draining, networkUnavailable)
		// The API adds a taint of its own to a Node that is new.
		if !strings.HasPrefix(got, want) || !strings.Contains(got, " other") ||
			strings.Contains(got, "node.sluice.io/not-ready") != (networkUnavailable == "True") {
			return fmt.Errorf("the Node has %q, want %q", got, want)
		}
		return nil
	})
}

func (a *nodeAPI) allocate(id string) ([]string, error) {
	a.t.Helper()
	owner := &workloadv1.Owner{ContainerId: id, InterfaceName: "eth0"}
	resp, err := a.ipam.Allocate(servicetest.Context(a.t), &ipamv1.AllocateRequest{Owner: owner})
	if err != nil {
		return nil, err
	}
	var all []string
	for _, x := range resp.GetAllocation().GetAddresses() {
		all = append(all, x.GetAddress())
	}
	confirm := &ipamv1.ConfirmAllocationRequest{Owner: owner, Addresses: all}
	_, err = a.ipam.ConfirmAllocation(servicetest.Context(a.t), confirm)
	return all, err
}

func (a *nodeAPI) wantAllocated(id string, want ...string) {
	a.t.Helper()
	if got, err := a.allocate(id); err != nil || !slices.Equal(got, want) {
		a.t.Errorf("%s has %q, %v; want %q", id, got, err, want)
	}
}

func (a *nodeAPI) release(id string) {
	a.t.Helper()
	owner := &workloadv1.Owner{ContainerId: id, InterfaceName: "eth0"}
	if _, err := a.ipam.Release(servicetest.Context(a.t), &ipamv1.ReleaseRequest{Owner: owner}); err != nil {
		a.t.Fatal(err)
	}
}

// wantNone checks that ipam is not ready, and that it says why.
func (a *nodeAPI) wantNone(text string) {
	a.t.Helper()
	a.process.WantProbes(503, text)
	if _, err := a.allocate("nobody"); status.Code(err) != codes.Unavailable {
		a.t.Errorf("an allocation without a range: %v", err)
	}
	st, err := a.ipam.GetStatus(servicetest.Context(a.t), &ipamv1.GetStatusRequest{})
	if err != nil || !strings.Contains(fmt.Sprint(st.GetService().GetProblems()), text) {
		a.t.Errorf("the status says %v, %v; want %q", st.GetService().GetProblems(), err, text)
	}
}

// TestAPIRangesAreThoseOfTheNode proves INV-16 with the Kubernetes API: podCIDRs
// come late; the Node is deleted and made again with others; ipam is killed at the
// points of that change; and the API is away.
func TestAPIRangesAreThoseOfTheNode(t *testing.T) {
	a := newNodeAPI(t)
	a.start()
	a.wantNone("Node node-a does not exist")
	a.node()
	a.wantNone("Node node-a has no spec.podCIDRs")
	a.noted("", "", "True")

	a.assign("10.11.0.0/24", "fd00:11::/64")
	a.want("10.11.0.0/24", "fd00:11::/64")
	a.process.WantProbes(200, "ok")
	a.noted("10.11.0.0/24,fd00:11::/64", "", "False")
	a.wantAllocated("old", "10.11.0.2", "fd00:11::2")

	// Another Node of the name. What nobody holds is not the machine's any more.
	a.remove()
	a.want("10.11.0.0/24 draining", "fd00:11::/64 draining")
	a.wantNone("Node node-a does not exist")
	a.node("10.12.0.0/24")
	a.want("10.12.0.0/24", "10.11.0.0/24 draining", "fd00:11::/64 draining")
	a.noted("10.12.0.0/24", "10.11.0.0/24,fd00:11::/64", "False")
	a.wantAllocated("new", "10.12.0.2")
	a.wantAllocated("old", "10.11.0.2", "fd00:11::2")
	a.release("old")
	a.want("10.12.0.0/24")
	a.noted("10.12.0.0/24", "", "False")

	// A range that overlaps one in use is refused by name until that is free.
	a.remove()
	a.node("10.12.0.0/16")
	a.wantNone("spec.podCIDRs[0]: 10.12.0.0/16 overlaps 10.12.0.0/24")
	a.release("new")
	a.want("10.12.0.0/16")
	a.wantAllocated("last", "10.12.0.2")

	// The API is away: what was served is served, also after a restart.
	a.ask(apitest.Kill)
	a.wantAllocated("without", "10.12.0.3")
	a.stop()
	a.start()
	a.process.WantProbes(200, "ok")
	a.want("10.12.0.0/16")
	a.wantAllocated("last", "10.12.0.2")
	a.wantAllocated("restarted", "10.12.0.4")

	// It comes back with other ranges than before.
	a.ask(apitest.Start)
	a.remove()
	a.node("10.13.0.0/24")
	a.want("10.13.0.0/24", "10.12.0.0/16 draining")
	a.noted("10.13.0.0/24", "10.12.0.0/16", "False")
}

// TestAPIKillWhileRangesChange kills ipam on either side of the write: the next
// process has the ranges of the Node, and what was given is held.
func TestAPIKillWhileRangesChange(t *testing.T) {
	a := newNodeAPI(t)
	a.node("10.21.0.0/24")
	for i, place := range []string{"before-commit", "after-commit"} {
		a.start()
		former := fmt.Sprintf("10.2%d.0.0/24", i+1)
		a.want(former)
		id := fmt.Sprint("held-", i)
		a.wantAllocated(id, fmt.Sprintf("10.2%d.0.2", i+1))
		a.process.Faults.KillAt("ipam/ranges/"+place, 1) // the deletion passes
		a.remove()
		a.want(former + " draining")
		next := fmt.Sprintf("10.2%d.0.0/24", i+2)
		a.node(next)
		a.process.Killed()
		a.process = nil
		a.start()
		a.want(next, former+" draining")
		a.wantAllocated(id, fmt.Sprintf("10.2%d.0.2", i+1))
		a.release(id)
		a.want(next)
		a.stop()
	}
}

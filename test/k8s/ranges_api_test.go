// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/k8s/apitest"
)

// ownNode is the name of the Node whose ranges the test's ipam serves.
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
	return nodeAPIOf(t, newAPI(t))
}

// nodeAPIOf starts a sluice-ipam with an existing API.
func nodeAPIOf(t *testing.T, api *apiServer) *nodeAPI {
	t.Helper()
	dir, err := os.MkdirTemp("", "ipam-") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	a := &nodeAPI{apiServer: api, t: t, dir: dir}
	a.account()
	token := filepath.Join(dir, "token")
	if err := os.WriteFile(token, []byte(a.tokenOn(ownNode)), 0o600); err != nil {
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

// account creates Sluice's account, with the rights of the manifests.
func (a *apiServer) account() {
	a.t.Helper()
	for _, file := range []string{
		"namespace", "serviceaccount", "clusterrole", "clusterrolebinding", "node-restriction", "node-restriction-binding",
	} {
		a.kubectl("apply", "--namespace=sluice-system", "--filename=../../deploy/kubernetes/base/"+file+".yaml")
	}
}

// tokenOn returns a token of the account for a pod on a node.
func (a *apiServer) tokenOn(node string) string {
	a.t.Helper()
	a.do(http.MethodPost, "/api/v1/namespaces/sluice-system/pods", object{
		"metadata": object{"name": "sluice-" + node},
		"spec": object{
			"nodeName": node, "serviceAccountName": "sluice", "containers": []object{{"name": "c", "image": "none"}},
		},
	})
	return strings.TrimSpace(a.kubectl("create", "token", "sluice", "--namespace=sluice-system",
		"--bound-object-kind=Pod", "--bound-object-name=sluice-"+node))
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

// node creates the Node with these pod CIDRs, or without any.
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

// assign sets the pod CIDRs, as the controller manager does.
func (a *nodeAPI) assign(podCIDRs ...string) {
	a.t.Helper()
	a.do(http.MethodPatch, nodePath, object{"spec": object{"podCIDR": podCIDRs[0], "podCIDRs": podCIDRs}})
}

// remove deletes the Node.
func (a *nodeAPI) remove() {
	a.t.Helper()
	a.do(http.MethodDelete, nodePath, nil)
}

// want waits until ipam has these ranges, "PREFIX" or "PREFIX draining", and the Node's annotations agree.
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

// noted waits until the Node reports this state.
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
		// The API server adds a taint to a new Node.
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

// wantNone checks that ipam is not ready, and reports the reason.
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

// TestAPIRangesAreThoseOfTheNode proves INV-16 with the Kubernetes API: podCIDRs are assigned late, the Node is deleted
// and created again with other podCIDRs, ipam is killed at each step of that change, and the API is unavailable.
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

	// Another Node with the same name. Unused ranges are no longer the machine's.
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

	// A range that overlaps one in use is refused until the addresses of the other are released. The message names both.
	a.remove()
	a.node("10.12.0.0/16")
	a.wantNone("spec.podCIDRs[0]: 10.12.0.0/16 overlaps 10.12.0.0/24")
	a.release("new")
	a.want("10.12.0.0/16")
	a.wantAllocated("last", "10.12.0.2")

	// While the API is down, the ranges stay served, even after a restart.
	a.ask(apitest.Kill)
	a.wantAllocated("without", "10.12.0.3")
	a.stop()
	a.start()
	a.process.WantProbes(200, "ok")
	a.want("10.12.0.0/16")
	a.wantAllocated("last", "10.12.0.2")
	a.wantAllocated("restarted", "10.12.0.4")

	// The API returns with other ranges than before.
	a.ask(apitest.Start)
	a.remove()
	a.node("10.13.0.0/24")
	a.want("10.13.0.0/24", "10.12.0.0/16 draining")
	a.noted("10.13.0.0/24", "10.12.0.0/16", "False")
}

// TestAPIKillWhileRangesChange kills ipam before and after the write. The next process has the ranges of the Node and
// keeps allocated addresses.
func TestAPIKillWhileRangesChange(t *testing.T) {
	a := newNodeAPI(t)
	a.node("10.21.0.0/24")
	for i, place := range []string{"before-commit", "after-commit"} {
		a.start()
		former := fmt.Sprintf("10.2%d.0.0/24", i+1)
		a.want(former)
		id := fmt.Sprint("held-", i)
		a.wantAllocated(id, fmt.Sprintf("10.2%d.0.2", i+1))
		a.process.Faults.KillAt("ipam/ranges/"+place, 1) // the deletion passes this point
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

// addressEvent is an Event about the addresses of a Node.
type addressEvent struct{ Type, Reason, Note, Regarding string }

// addressEvents returns the address Events of all Nodes, ordered by time.
func (a *apiServer) addressEvents() (all []addressEvent) {
	a.t.Helper()
	type event struct {
		EventTime          time.Time
		Type, Reason, Note string
		Regarding          struct{ Kind, Name, UID string }
	}
	var list struct{ Items []event }
	answer := a.do(http.MethodGet, "/apis/events.k8s.io/v1/namespaces/default/events", nil)
	if err := json.Unmarshal(answer, &list); err != nil {
		a.t.Fatal(err)
	}
	slices.SortFunc(list.Items, func(x, y event) int { return x.EventTime.Compare(y.EventTime) })
	for _, e := range list.Items {
		if r := e.Regarding; strings.HasPrefix(e.Reason, "PodRange") {
			all = append(all, addressEvent{e.Type, e.Reason, e.Note, r.Kind + " " + r.Name + " " + r.UID})
		}
	}
	return all
}

// metricsOf returns the metrics that a process serves on a unix socket.
func metricsOf(ctx context.Context, socket string) (string, error) {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}
	transport := &http.Transport{DisableKeepAlives: true, DialContext: dial}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://x/metrics", nil)
	if err != nil {
		return "", err
	}
	answer, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return string(text), err
}

// TestAPINodeWithoutAddressesSaysSo allocates all addresses of a /29: the Node gets an Event when a pod is refused, and
// another when an address is free again, even if a process is killed meanwhile. The accounts have the rights of the
// manifests.
func TestAPINodeWithoutAddressesSaysSo(t *testing.T) {
	s := newStatusAPI(t)
	a := nodeAPIOf(t, s.apiServer)
	metrics := filepath.Join(a.dir, "metrics.sock")
	a.flags = append(a.flags, "--metrics-address="+metrics)
	w := s.writer()
	a.node("10.11.0.0/29")
	a.start()
	a.want("10.11.0.0/29")
	for i := range 5 {
		a.wantAllocated(fmt.Sprint("held-", i), fmt.Sprintf("10.11.0.%d", i+2))
	}
	exhausted := func(want string) {
		t.Helper()
		servicetest.EventuallyNil(t, "the metric", func() error {
			text, err := metricsOf(t.Context(), metrics)
			if err == nil && !strings.Contains(text, "\nsluice_ipam_exhausted "+want+"\n") {
				err = fmt.Errorf("sluice_ipam_exhausted is not %s in\n%s", want, text)
			}
			return err
		})
	}
	exhausted("0")
	if got := a.addressEvents(); len(got) != 0 {
		t.Errorf("a full node that has refused no pod has %q", got)
	}
	refused := func() {
		t.Helper()
		if _, err := a.allocate("refused"); status.Code(err) != codes.ResourceExhausted {
			t.Fatalf("an allocation of a full range: %v", err)
		}
	}
	refused()
	exhausted("1")
	var of struct{ Metadata struct{ UID string } }
	if err := json.Unmarshal(a.do(http.MethodGet, nodePath, nil), &of); err != nil {
		t.Fatal(err)
	}
	regarding := "Node " + ownNode + " " + of.Metadata.UID
	want := []addressEvent{{
		"Warning", "PodRangeExhausted",
		"no IPv4 address is left for new pods: 10.11.0.0/29 has 5 of 8 addresses in use, " +
			"0 leased, 0 in quarantine and 3 reserved; run fewer pods here, or give nodes larger ranges (docs/ipam.md, " +
			`"A node without free addresses")`, regarding,
	}}
	said := func(what string) {
		t.Helper()
		servicetest.EventuallyNil(t, what, func() error {
			if got := a.addressEvents(); !slices.Equal(got, want) {
				return fmt.Errorf("the Events are %q, want %q", got, want)
			}
			return nil
		})
	}
	said("an Event of the refusal")
	// kubectl describe shows the Events.
	described := a.kubectl("describe", "node", ownNode)
	if strings.Count(described, "PodRangeExhausted") != 1 ||
		!strings.Contains(described, "node.sluice.io/pod-addresses:") {
		t.Errorf("kubectl describes the node as\n%s", described)
	}

	// Further refusals and restarted processes create no new Events.
	refused()
	a.process.Kill()
	a.process = nil
	w.end(syscall.SIGKILL)
	a.start()
	exhausted("1") // a new process has the state from the Node
	refused()
	w = s.writer()
	servicetest.EventuallyNil(t, "another writer leads", func() error {
		if w.said("elected") == 0 {
			return errors.New("it does not yet")
		}
		return nil
	})
	said("no other Event")

	// An address is free for a minute.
	a.release("held-3")
	want = append(want, addressEvent{
		"Normal", "PodRangeAvailable",
		"addresses for new pods are available again: 10.11.0.0/29 has 1 of 8 addresses free", regarding,
	})
	late := time.Now().Add(3 * time.Minute)
	for len(a.addressEvents()) < 2 && time.Now().Before(late) {
		time.Sleep(time.Second) // poll interval
	}
	said("an Event of the end")
	exhausted("0")
	a.wantAllocated("next", "10.11.0.5")
}

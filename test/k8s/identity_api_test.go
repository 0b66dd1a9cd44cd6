// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/k8s/apitest"
)

// identities is a node with an identity service that follows the API.
type identities struct {
	identityv1.IdentityServiceClient
	*policyNode
	a       *apiServer
	cluster identityv1.ClusterServiceClient
	etcd    string // its URL

	mu   sync.Mutex
	have map[string]*identityv1.EndpointIdentity // guarded by mu; state of WatchEndpoints by container
}

func newIdentities(t testing.TB, a *apiServer, access ...string) *identities {
	t.Helper()
	return newIdentitiesOf(t, a, "unix://"+filepath.Join(a.dir, "etcd.sock"), access...)
}

// newIdentitiesOf is newIdentities with another etcd.
func newIdentitiesOf(t testing.TB, a *apiServer, etcd string, access ...string) *identities {
	t.Helper()
	dir, err := os.MkdirTemp("", "sluice-node") // a short path, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if access == nil {
		access = []string{"--kubernetes-kubeconfig=" + a.ready.Kubeconfig}
	}
	s := &identities{policyNode: &policyNode{t: t, dir: dir, api: access}, a: a, etcd: etcd}
	conn := s.dial("identity")
	s.IdentityServiceClient = identityv1.NewIdentityServiceClient(conn)
	s.cluster = identityv1.NewClusterServiceClient(conn)
	s.start()
	t.Cleanup(func() { s.end(syscall.SIGTERM) })
	a.do(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{
		"name": "shop", "labels": object{"team": "red"},
	}})
	for _, account := range []string{"default", "robot"} {
		a.do(http.MethodPost, "/api/v1/namespaces/shop/serviceaccounts", object{"metadata": object{"name": account}})
	}
	return s
}

func (s *identities) start() {
	s.t.Helper()
	s.process, s.ended = s.run("identity", append([]string{
		"--node=n1", "--etcd-endpoints=" + s.etcd,
	}, s.api...)...)
}

func (s *identities) end(signal syscall.Signal) {
	s.t.Helper()
	if err := errors.Join(s.process.Process.Signal(signal), <-s.ended); err != nil && signal == syscall.SIGTERM {
		s.t.Errorf("the service ended with %s", err)
	}
}

// add creates a pod on the node and returns its UID.
func (s *identities) add(name string, labels, annotations object) (uid string) {
	s.t.Helper()
	answer := s.a.do(http.MethodPost, "/api/v1/namespaces/shop/pods", object{
		"metadata": object{"name": name, "labels": labels, "annotations": annotations},
		"spec": object{
			"nodeName": "n1", "serviceAccountName": "robot",
			"containers": []object{{
				"name": "c", "image": "none", "ports": []object{{"name": "web", "containerPort": 80}, {"containerPort": 81}},
			}},
			"initContainers": []object{{
				"name": "i", "image": "none", "restartPolicy": "Always",
				"ports": []object{{"name": "dns", "containerPort": 53, "protocol": "UDP"}},
			}},
		},
	})
	var pod struct {
		Metadata struct {
			UID string `json:"uid"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(answer, &pod); err != nil || pod.Metadata.UID == "" {
		s.t.Fatalf("no UID in %s: %v", answer, err)
	}
	return pod.Metadata.UID
}

// resolve calls ResolveEndpoint for a container of the named pod, as the datapath does in ADD.
func (s *identities) resolve(container, pod, uid string, within time.Duration,
) (*identityv1.ResolveEndpointResponse, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), within)
	defer cancel()
	return s.ResolveEndpoint(ctx, &identityv1.ResolveEndpointRequest{
		Owner: &workloadv1.Owner{ContainerId: container, InterfaceName: "eth0"},
		Pod:   &workloadv1.PodReference{Namespace: "shop", Name: pod, Uid: uid},
	})
}

// labels returns the labels of the identity of a pod in the namespace, as one line.
func labels(id *identityv1.Identity) string {
	var all []string
	for _, l := range id.GetLabels() {
		all = append(all, l.GetSource()+":"+l.GetKey()+"="+l.GetValue())
	}
	return strings.Join(all, " ")
}

const shop = "io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop"

func wantLabels(app, team string) string {
	return "generated:named-ports=dns.UDP.53_web.TCP.80 k8s:app=" + app + " k8s:" + shop +
		" k8s:io.cilium.k8s.namespace.labels.team=" + team + " k8s:io.cilium.k8s.policy.cluster=default" +
		" k8s:io.cilium.k8s.policy.serviceaccount=robot k8s:io.kubernetes.pod.namespace=shop"
}

// watch records what WatchEndpoints sends, and confirms it as the datapath does.
func (s *identities) watch() {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			s.watchOnce(ctx)
		}
	}()
	s.t.Cleanup(func() { cancel(); <-ended })
}

func (s *identities) watchOnce(ctx context.Context) {
	stream, err := s.WatchEndpoints(ctx, &identityv1.WatchEndpointsRequest{})
	if err != nil {
		return
	}
	s.mu.Lock()
	s.have = map[string]*identityv1.EndpointIdentity{}
	s.mu.Unlock()
	for {
		m, err := stream.Recv()
		if err != nil {
			return
		}
		s.mu.Lock()
		if u := m.GetUpsert(); u != nil {
			s.have[u.GetOwner().GetContainerId()] = u
		} else {
			delete(s.have, m.GetDelete().GetContainerId())
		}
		s.mu.Unlock()
		if u := m.GetUpsert(); u.GetConfirm() {
			confirm := &identityv1.ConfirmEndpointRequest{Owner: u.GetOwner(), Number: u.GetIdentity().GetNumber()}
			if _, err := s.ConfirmEndpoint(ctx, confirm); err != nil {
				return
			}
		}
	}
}

// sees waits until WatchEndpoints has sent labels of containers.
func (s *identities) sees(what, want string, containers ...string) {
	s.t.Helper()
	eventually(s.t, what, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, c := range containers {
			if e := s.have[c]; labels(e.GetIdentity()) != want || e.GetConfirm() || !e.GetFromPod() {
				return fmt.Errorf("%s has %s (to confirm: %t, of a pod: %t), want %s",
					c, labels(e.GetIdentity()), e.GetConfirm(), e.GetFromPod(), want)
			}
		}
		return nil
	})
}

// anyHas returns nil if WatchEndpoints has sent any endpoint with these labels.
func (s *identities) anyHas(want string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.have {
		if labels(e.GetIdentity()) == want {
			return nil
		}
	}
	return fmt.Errorf("none of %d endpoints has %s", len(s.have), want)
}

// problem waits until the status reports a problem of Kubernetes or, with "", none.
func (s *identities) problem(want string) {
	s.t.Helper()
	eventually(s.t, "the problem "+want, func() error {
		answer, err := s.GetStatus(s.t.Context(), &identityv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		var all []string
		for _, p := range answer.GetService().GetProblems() {
			all = append(all, p.GetText())
		}
		if text := strings.Join(all, "; "); (want == "") != (text == "") || !strings.Contains(text, want) {
			return fmt.Errorf("the status says %q", text)
		}
		return nil
	})
}

func (s *identities) label(path string, labels object) {
	s.t.Helper()
	s.a.do(http.MethodPatch, path, object{"metadata": object{"labels": labels}})
}

func TestAPIIdentityTakesLabelsAndPortsOfPods(t *testing.T) {
	a := newAPI(t)
	s := newIdentities(t, a)
	s.watch()
	uid := s.add("web-0", object{"app": "web", "io.kubernetes.pod.namespace": "kube-system"}, nil)
	first, err := s.resolve("c0", "web-0", uid, patience)
	if err != nil {
		t.Fatal(err)
	}
	if labels(first.GetIdentity()) != wantLabels("web", "red") || !first.GetFromPod() || len(first.GetNamedPorts()) != 2 {
		t.Errorf("%v, want %s of a pod with two named ports", first, wantLabels("web", "red"))
	}
	s.sees("the endpoint", wantLabels("web", "red"), "c0")

	// kubelet can be faster: the UID is known before the service sees the pod.
	uid = s.add("web-1", object{"app": "web"}, nil)
	if got, err := s.resolve("c1", "web-1", uid, patience); err != nil ||
		got.GetIdentity().GetNumber() != first.GetIdentity().GetNumber() {
		t.Errorf("a pod that was created at the time of ADD: %v, %v", got, err)
	}
	if _, err := s.resolve("c2", "web-1", "of another pod", 2*time.Second); status.Code(err) != codes.Unavailable ||
		!strings.Contains(err.Error(), "shop/web-1") {
		t.Errorf("a missing pod: %v, want UNAVAILABLE", err)
	}
	s.add("static-n1", object{"app": "static"}, object{"kubernetes.io/config.hash": "0123456789abcdef"})
	if got, err := s.resolve("c3", "static-n1", "0123456789abcdef", patience); err != nil ||
		labels(got.GetIdentity()) != wantLabels("static", "red") {
		t.Errorf("a static pod by kubelet's UID: %v, %v", got, err)
	}

	s.label("/api/v1/namespaces/shop/pods/web-1", object{"app": "db"})
	s.sees("labels of the pod", wantLabels("db", "red"), "c1")
	s.sees("another pod", wantLabels("web", "red"), "c0")
	s.problem("")
}

func TestAPINamespaceMovesItsHundredPods(t *testing.T) {
	a := newAPI(t)
	s := newIdentities(t, a)
	s.watch()
	var all []string
	for i := range 100 {
		name := fmt.Sprint("web-", i)
		if _, err := s.resolve(name, name, s.add(name, object{"app": "web"}, nil), patience); err != nil {
			t.Fatal(err)
		}
		all = append(all, name)
	}
	begin := time.Now()
	s.label("/api/v1/namespaces/shop", object{"team": "blue"})
	s.sees("labels of the namespace", wantLabels("web", "blue"), all...)
	moved := time.Since(begin).Seconds()
	t.Logf("100 endpoints were moved and confirmed after %.2f s; the service has %d kB resident", moved, s.resident())
	eventually(t, "one identity is held", func() error {
		answer, err := s.GetStatus(t.Context(), &identityv1.GetStatusRequest{})
		if err == nil && answer.GetHeldIdentities() != 1 {
			err = fmt.Errorf("%d are held", answer.GetHeldIdentities())
		}
		return err
	})
}

// TestAPIKilledIdentityFinishesEveryMove: a killed identity service completes every move that it had begun. No endpoint
// keeps former labels, and no identity is kept without an endpoint.
func TestAPIKilledIdentityFinishesEveryMove(t *testing.T) {
	a := newAPI(t)
	s := newIdentities(t, a)
	s.watch()
	var all []string
	for i := range 30 {
		name := fmt.Sprint("web-", i)
		if _, err := s.resolve(name, name, s.add(name, object{"app": "web"}, nil), patience); err != nil {
			t.Fatal(err)
		}
		all = append(all, name)
	}
	const rounds = 8
	for round := range rounds {
		team := fmt.Sprint("t", round)
		s.label("/api/v1/namespaces/shop", object{"team": team})
		// Kill it in the middle: with the first announced move.
		eventually(t, "the first move", func() error { return s.anyHas(wantLabels("web", team)) })
		s.end(syscall.SIGKILL)
		s.start()
	}
	s.sees("the last labels", wantLabels("web", fmt.Sprint("t", rounds-1)), all...)
	eventually(t, "one identity is held", func() error {
		answer, err := s.GetStatus(t.Context(), &identityv1.GetStatusRequest{})
		if err == nil && (answer.GetHeldIdentities() != 1 || answer.GetPendingStoreWrites() != 0) {
			err = fmt.Errorf("%d identities, %d writes are pending", answer.GetHeldIdentities(), answer.GetPendingStoreWrites())
		}
		return err
	})
}

func TestAPIIdentityLivesWithoutTheAPI(t *testing.T) {
	a := newAPI(t)
	s := newIdentities(t, a)
	s.watch()
	uids := map[string]string{}
	for _, name := range []string{"stays", "changes", "goes"} {
		uids[name] = s.add(name, object{"app": name}, nil)
		if _, err := s.resolve("c-"+name, name, uids[name], patience); err != nil {
			t.Fatal(err)
		}
	}
	a.ask(apitest.Kill)
	s.problem("pods: ")
	if _, err := s.resolve("again", "stays", uids["stays"], patience); err != nil {
		t.Errorf("a known pod without API: %v", err)
	}
	for range 2 {
		_, err := s.resolve("new", "new", "u", 2*time.Second)
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "connection refused") {
			t.Errorf("a pod that is not known without API: %v, want UNAVAILABLE and why", err)
		}
		// A service that starts without the API knows the identities of its endpoints.
		s.end(syscall.SIGKILL)
		s.start()
		s.problem("pods: ")
		got, err := s.resolve("after", "changes", uids["changes"], patience)
		if err != nil || labels(got.GetIdentity()) != wantLabels("changes", "red") {
			t.Errorf("a pod with an endpoint, after a start without API: %v, %v", got, err)
		}
	}

	// Changes while the service is stopped.
	a.ask(apitest.Start)
	s.problem("")
	a.ask(apitest.Kill)
	s.problem("pods: ")
	if err := s.process.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	a.ask(apitest.Start)
	a.kubectl("delete", "pod", "-n", "shop", "goes", "--grace-period=0", "--force")
	s.label("/api/v1/namespaces/shop/pods/changes", object{"app": "changed"})
	if err := s.process.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	s.problem("")
	s.sees("the changed pod", wantLabels("changed", "red"), "c-changes", "after")
	s.sees("the other one", wantLabels("stays", "red"), "c-stays")
	s.sees("the endpoint of the deleted pod, until DEL", wantLabels("goes", "red"), "c-goes")
	if _, err := s.resolve("late", "goes", uids["goes"], 2*time.Second); status.Code(err) != codes.Unavailable {
		t.Errorf("a pod that was deleted meanwhile: %v, want UNAVAILABLE", err)
	}
}

func TestAPIIdentityNamesTheRightsItLacks(t *testing.T) {
	a := newAPI(t)
	token, authority := filepath.Join(a.dir, "token"), filepath.Join(a.dir, "ca.crt")
	a.kubectl("create", "namespace", "system")
	a.kubectl("create", "serviceaccount", "-n", "system", "sluice")
	secret := strings.TrimSpace(a.kubectl("create", "token", "-n", "system", "sluice"))
	if err := os.WriteFile(token, []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	s := newIdentities(t, a, "--kubernetes-api=https://127.0.0.1:1,"+a.ready.Server,
		"--kubernetes-token="+token, "--kubernetes-ca="+authority)
	s.problem("pods is forbidden")
	s.problem("namespaces is forbidden")
	uid := s.add("web-0", object{"app": "web"}, nil)
	if _, err := s.resolve("c0", "web-0", uid, 2*time.Second); status.Code(err) != codes.Unavailable ||
		!strings.Contains(err.Error(), "forbidden") {
		t.Errorf("without rights: %v, want UNAVAILABLE and why", err)
	}
	a.kubectl("create", "clusterrole", "sluice", "--verb=list,watch", "--resource=pods,namespaces,endpointslices")
	a.kubectl("create", "clusterrolebinding", "sluice", "--clusterrole=sluice", "--serviceaccount=system:sluice")
	s.problem("")
	if got, err := s.resolve("c0", "web-0", uid, patience); err != nil ||
		labels(got.GetIdentity()) != wantLabels("web", "red") {
		t.Errorf("with rights: %v, %v", got, err)
	}

	a.servedAt("kubernetes", servedAt)
	eventually(t, "the addresses are kept", func() error {
		content, err := os.ReadFile(filepath.Join(s.dir, "identity", "kubernetes-api.json"))
		if err == nil && !slices.Contains(strings.Split(string(content), `"`), "https://192.0.2.7:6443") {
			err = fmt.Errorf("the file has %s", content)
		}
		return err
	})
}

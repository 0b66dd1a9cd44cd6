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
	"strconv"
	"strings"
	"syscall"
	"testing"

	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/test/k8s/apitest"
)

// ownEtcd starts an etcd only for Sluice, so that a restore of the API's etcd does not affect it. It returns the URL.
func ownEtcd(t testing.TB) string {
	t.Helper()
	dir := shortDir(t)
	url := "unix://" + filepath.Join(dir, "etcd.sock")
	command := exec.Command(program("sluice-devetcd"), "--data-dir="+filepath.Join(dir, "data"), "--listen="+url)
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := command.Process.Kill(); err != nil {
			t.Error(err)
		}
		_ = command.Wait()
	})
	return url
}

// state returns the API's revision and the UID of kube-system.
func (a *apiServer) state() (revision int, uid string) {
	a.t.Helper()
	var list struct {
		Metadata struct{ ResourceVersion string }
		Items    []struct{ Metadata struct{ UID string } }
	}
	path := "/api/v1/namespaces?fieldSelector=metadata.name%3Dkube-system"
	if err := json.Unmarshal(a.do(http.MethodGet, path, nil), &list); err != nil {
		a.t.Fatal(err)
	}
	revision, err := strconv.Atoi(list.Metadata.ResourceVersion)
	if err != nil || len(list.Items) != 1 {
		a.t.Fatalf("revision %q of %d Namespaces: %v", list.Metadata.ResourceVersion, len(list.Items), err)
	}
	return revision, list.Items[0].Metadata.UID
}

// config writes a ConfigMap again, and returns its revision.
func (a *apiServer) config(value string) (revision int) {
	a.t.Helper()
	var written struct {
		Metadata struct{ ResourceVersion string }
	}
	answer := a.do(http.MethodPatch, "/api/v1/namespaces/shop/configmaps/any", object{"data": object{"v": value}})
	if err := json.Unmarshal(answer, &written); err != nil {
		a.t.Fatal(err)
	}
	revision, err := strconv.Atoi(written.Metadata.ResourceVersion)
	if err != nil {
		a.t.Fatal(err)
	}
	return revision
}

// follower is a node with every process that follows the API.
type follower struct {
	*identities
	a         *apiServer
	policy    *policyNode
	lb        *balancer
	ipam      ipamv1.IPAMServiceClient
	writerDir string
}

// files returns the logs of all processes that follow the API.
func (f *follower) files() (all map[string]string) {
	return map[string]string{
		"identity": filepath.Join(f.identities.dir, "identity.log"), "policy": filepath.Join(f.policy.dir, "policy.log"),
		"ipam": filepath.Join(f.identities.dir, "ipam.log"), "loadbalancer": filepath.Join(f.lb.dir, "loadbalancer.log"),
		"writer": filepath.Join(f.writerDir, "controller.log"),
	}
}

// notices waits until every process has logged this number of warnings, has listed all objects again, and reports no
// problem.
func (f *follower) notices(times int, why string) {
	f.a.t.Helper()
	for name, file := range f.files() {
		eventually(f.a.t, name+" notices: "+why, func() error {
			content, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			warned := strings.Count(string(content), "every kind of the Kubernetes API is listed again")
			if done := strings.Count(string(content), "every kind of the Kubernetes API was listed again"); warned < times ||
				done != warned || !strings.Contains(string(content), why) {
				return fmt.Errorf("it warned %d times, and listed everything again %d times, want %d", warned, done, times)
			}
			return nil
		})
	}
	f.identities.problem("")
	f.policy.source("the source of policies", true)
	f.lb.source("the source of services", true, "")
}

// labelled waits until identity assigns labels to a pod.
func (f *follower) labelled(what, pod, uid, app string) {
	f.a.t.Helper()
	eventually(f.a.t, what, func() error {
		answer, err := f.resolve(pod, pod, uid, patience)
		if err != nil {
			return err
		}
		if got := labels(answer.GetIdentity()); !strings.Contains(got, "k8s:app="+app+" ") {
			return fmt.Errorf("the labels are %s, want app=%s", got, app)
		}
		return nil
	})
}

// ranges waits until the node's pods get addresses from one range only.
func (f *follower) ranges(what, want string) {
	f.a.t.Helper()
	eventually(f.a.t, what, func() error {
		answer, err := f.ipam.GetStatus(f.a.t.Context(), &ipamv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		var got []string
		for _, p := range answer.GetPools() {
			if p.GetState() == ipamv1.RangeState_RANGE_STATE_SERVING {
				got = append(got, p.GetPrefix())
			}
		}
		if strings.Join(got, ",") != want {
			return fmt.Errorf("the ranges are %q, want %q", got, want)
		}
		return nil
	})
}

func TestAPIRestoredServerIsFollowedAsItIsNow(t *testing.T) {
	a := newAPI(t)
	a.crds()
	etcd := ownEtcd(t)
	a.do(http.MethodPost, "/api/v1/nodes", object{
		"metadata": object{"name": "n1"}, "spec": object{"podCIDRs": []string{"10.0.1.0/24"}},
	})
	s := newIdentitiesOf(t, a, etcd)
	f := &follower{identities: s, a: a}
	ipam, _ := s.run("ipam", "--mode=kubernetes", "--kubernetes-kubeconfig="+a.ready.Kubeconfig,
		"--kubernetes-node=n1", "--identity="+filepath.Join(s.dir, "identity.sock"))
	t.Cleanup(func() { stop(t, ipam) })
	f.ipam = ipamv1.NewIPAMServiceClient(s.dial("ipam"))
	f.policy = &policyNode{t: t, dir: s.dir, api: []string{"--kubernetes-kubeconfig=" + a.ready.Kubeconfig}}
	f.policy.PolicyServiceClient = policyv1.NewPolicyServiceClient(s.dial("policy"))
	f.policy.start()
	t.Cleanup(func() { f.policy.end(syscall.SIGTERM) })
	f.lb = newBalancer(t, a)
	a.do(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": system}})
	f.writerDir = shortDir(t)
	w := &policyNode{t: t, dir: f.writerDir}
	writer, _ := w.run("controller", "--kubernetes-kubeconfig="+a.ready.Kubeconfig,
		"--identity="+filepath.Join(s.dir, "identity.sock"))
	t.Cleanup(func() { stop(t, writer) })

	a.do(http.MethodPost, "/api/v1/namespaces/shop/configmaps", object{"metadata": object{"name": "any"}})
	a.do(http.MethodPost, networking, networkPolicy("old", 80))
	a.do(http.MethodPost, cilium, cnp("both", `{"endpointSelector":{},"ingress":[{}]}`))
	a.service("old", "10.96.1.1", nil)
	a.do(http.MethodPost, sliceObjects, slice("old-1", "old", nil, "10.0.9.1"))
	pod := s.add("web", object{"app": "before"}, nil)
	f.policy.has("before the copy", "NetworkPolicy shop/old", "CiliumNetworkPolicy shop/both")
	f.lb.has("before the copy", "old 10.96.1.1 1/1 1")
	f.labelled("before the copy", "web", pod, "before")
	f.ranges("before the copy", "10.0.1.0/24")
	a.ask(apitest.Save)
	saved, _ := a.state()

	// More writes than the server makes itself at its start. Then change an object that each process follows: a
	// bookmark would take a minute.
	for i := range 200 {
		a.config(fmt.Sprint(i))
	}
	a.do(http.MethodDelete, networking+"/old", nil)
	a.do(http.MethodPost, networking, networkPolicy("new", 80))
	a.do(http.MethodDelete, "/api/v1/namespaces/shop/services/old", nil)
	a.do(http.MethodDelete, sliceObjects+"/old-1", nil)
	a.service("late", "10.96.1.2", nil)
	s.label("/api/v1/namespaces/shop/pods/web", object{"app": "after"})
	a.do(http.MethodDelete, "/api/v1/nodes/n1", nil)
	a.do(http.MethodPost, "/api/v1/nodes", object{
		"metadata": object{"name": "n1"}, "spec": object{"podCIDRs": []string{"10.0.2.0/24"}},
	})
	f.policy.has("after the copy", "NetworkPolicy shop/new", "CiliumNetworkPolicy shop/both")
	f.lb.has("after the copy", "late 10.96.1.2 0/0 0")
	f.labelled("after the copy", "web", pod, "after")
	f.ranges("after the copy", "10.0.2.0/24")

	// The list of Namespaces has the revision of the store, not the revision of the Namespace.
	last := a.config("last")
	revision, uid := a.state()
	if revision < last {
		t.Errorf("a list of Namespaces has the revision %d, after a ConfigMap was written at %d", revision, last)
	}

	a.ask(apitest.Restore)
	if now, again := a.state(); now >= last || now < saved || again != uid {
		t.Fatalf("the API has revision %d and UID %s, want a revision from %d to %d and %s", now, again, saved, last, uid)
	}
	f.notices(1, "was restored to an older state")
	restored := func(what string, more ...string) {
		t.Helper()
		f.policy.has(what, append(more, "NetworkPolicy shop/old", "CiliumNetworkPolicy shop/both")...)
		f.lb.has(what, "old 10.96.1.1 1/1 1")
		f.labelled(what, "web", pod, "before")
		f.ranges(what, "10.0.1.0/24")
	}
	restored("after the restore")
	for i := 0; a.config(fmt.Sprint("again-", i)) <= last+10; i++ {
	}
	a.do(http.MethodPost, networking, networkPolicy("third", 80))
	restored("the former revision was passed", "NetworkPolicy shop/third")
	f.notices(1, "was restored to an older state")

	a.ask(apitest.Empty)
	eventually(t, "kube-system is made", func() error {
		if status, answer := a.call(http.MethodGet, "/api/v1/namespaces/kube-system", nil); status != http.StatusOK {
			return fmt.Errorf("%d: %s", status, answer)
		}
		return nil
	})
	if now, other := a.state(); now >= last || other == uid {
		t.Fatalf("an empty store has the revision %d, and kube-system the UID %s", now, other)
	}
	f.notices(2, "belongs to another cluster")
	f.ranges("another cluster", "")
	f.policy.has("another cluster")
	f.lb.has("another cluster")
	if _, err := f.resolve("other", "web", pod, patience); err == nil {
		t.Error("a pod of the former cluster is resolved")
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	"github.com/sluice-net/sluice/test/k8s/apitest"
)

// Paths of the API.
const (
	serviceObjects = "/api/v1/namespaces/shop/services"
	sliceObjects   = "/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices"
)

// balancer is a node that follows the Services of an API.
type balancer struct {
	lbv1.LoadBalancerServiceClient
	*policyNode
}

func newBalancer(t testing.TB, a *apiServer) *balancer {
	t.Helper()
	dir, err := os.MkdirTemp("", "sluice-node") // a short path, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	access := []string{"--kubernetes-kubeconfig=" + a.ready.Kubeconfig}
	b := &balancer{policyNode: &policyNode{t: t, dir: dir, api: access}}
	b.LoadBalancerServiceClient = lbv1.NewLoadBalancerServiceClient(b.dial("loadbalancer"))
	b.start()
	t.Cleanup(func() { b.end(syscall.SIGTERM) })
	return b
}

func (b *balancer) start() {
	b.t.Helper()
	flags := []string{"--node-name=n1", "--health-checks-address=off"}
	b.process, b.ended = b.run("loadbalancer", append(flags, b.api...)...)
}

// list returns the services of namespace shop as lines: name, addresses, ready and all endpoints, and the number of
// backends for connections from the node.
func (b *balancer) list() (all []string) {
	b.t.Helper()
	stream, err := b.ListServices(b.t.Context(), &lbv1.ListServicesRequest{WithFrontends: true})
	if err != nil {
		b.t.Fatal(err)
	}
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			slices.Sort(all)
			return all
		}
		if err != nil {
			b.t.Fatal(err)
		}
		s := answer.GetService()
		if s.GetNamespace() != "shop" {
			continue
		}
		text := fmt.Sprintf("%s %s %d/%d", s.GetName(), strings.Join(s.GetAddresses(), ","), s.GetReady(), s.GetEndpoints())
		for _, f := range s.GetFrontends() {
			text += fmt.Sprintf(" %d", len(f.GetInside().GetBackends()))
		}
		if s.GetSource() != "kubernetes" {
			text += " of " + s.GetSource()
		}
		all = append(all, text)
	}
}

func (b *balancer) has(what string, want ...string) {
	b.t.Helper()
	slices.Sort(want)
	eventually(b.t, what, func() error {
		if got := b.list(); !slices.Equal(got, want) {
			return fmt.Errorf("the services are %q, want %q", got, want)
		}
		return nil
	})
}

// source waits until the source is complete or not, and reports an expected problem.
func (b *balancer) source(what string, synced bool, wrong string) {
	b.t.Helper()
	eventually(b.t, what, func() error {
		st, err := b.GetStatus(b.t.Context(), &lbv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		i := slices.IndexFunc(st.GetSources(), func(s *lbv1.SourceStatus) bool { return s.GetName() == "kubernetes" })
		if i < 0 {
			return errors.New("there is no source kubernetes")
		}
		s := st.GetSources()[i]
		if s.GetSynced() != synced || (wrong == "") != (s.GetError() == "") || !strings.Contains(s.GetError(), wrong) {
			return fmt.Errorf("the source is complete: %t, want %t; it says %q, want %q", s.GetSynced(), synced,
				s.GetError(), wrong)
		}
		return nil
	})
}

// service creates a Service with port 80 at an address.
func (a *apiServer) service(name, clusterIP string, labels object) {
	a.t.Helper()
	a.do(http.MethodPost, serviceObjects, object{
		"metadata": object{"name": name, "labels": labels},
		"spec":     object{"clusterIP": clusterIP, "ports": []object{{"name": "http", "port": 80}}},
	})
}

func slice(name, of string, labels object, addresses ...string) object {
	endpoints := []object{}
	for _, address := range addresses {
		endpoints = append(endpoints, object{
			"addresses": []string{address}, "conditions": object{"ready": true}, "nodeName": "n1",
		})
	}
	all := object{"kubernetes.io/service-name": of}
	for k, v := range labels {
		all[k] = v
	}
	return object{
		"metadata": object{"name": name, "labels": all}, "addressType": "IPv4", "endpoints": endpoints,
		"ports": []object{{"name": "http", "port": 8080, "protocol": "TCP"}},
	}
}

func TestAPIServicesAreThoseOfTheAPI(t *testing.T) {
	a := newAPI(t)
	a.do(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": "shop"}})
	// A slice may be created before its service. Services of other implementations are not listed.
	a.do(http.MethodPost, sliceObjects, slice("web-1", "web", nil, "10.1.0.1", "10.1.0.2"))
	lists, watches := a.requests("services") // its own
	b := newBalancer(t, a)
	a.service("other", "10.96.0.9", object{"service.kubernetes.io/service-proxy-name": "other"})
	a.service("headless", "None", object{"service.kubernetes.io/headless": ""})
	a.service("web", "10.96.0.10", nil)
	b.has("a service with its slice", "web 10.96.0.10 2/2 2")
	b.source("both kinds were listed", true, "")
	a.do(http.MethodPost, sliceObjects, slice("web-2", "web", nil, "10.1.0.3"))
	b.has("another slice", "web 10.96.0.10 3/3 3")
	a.do(http.MethodPatch, sliceObjects+"/web-2", object{"endpoints": []object{
		{"addresses": []string{"10.1.0.3"}, "conditions": object{"ready": false, "serving": true, "terminating": true}},
	}})
	b.has("an endpoint that goes", "web 10.96.0.10 2/3 2")
	a.do(http.MethodDelete, sliceObjects+"/web-2", nil)
	b.has("a slice that is gone", "web 10.96.0.10 2/2 2")
	a.do(http.MethodPatch, serviceObjects+"/web", object{"metadata": object{"labels": object{
		"service.kubernetes.io/service-proxy-name": "other",
	}}})
	b.has("another proxy takes it over")
	a.do(http.MethodPatch, serviceObjects+"/web", object{"metadata": object{"labels": object{
		"service.kubernetes.io/service-proxy-name": nil,
	}}})
	b.has("and gives it back", "web 10.96.0.10 2/2 2")
	allLists, allWatches := a.requests("services")
	if lists, watches = allLists-lists, allWatches-watches; lists > 1 || watches > 2 {
		t.Errorf("the API server served %d listings and %d watches of services, want <= 1 and 2", lists, watches)
	}
}

func TestAPIZoneOfTheNodeDecidesByHints(t *testing.T) {
	a := newAPI(t)
	a.do(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": "shop"}})
	const nodes, zone = "/api/v1/nodes", "topology.kubernetes.io/zone"
	for _, name := range []string{"n1", "n2"} {
		a.do(http.MethodPost, nodes, object{"metadata": object{"name": name}})
	}
	hinted := slice("web-1", "web", nil, "10.1.0.1", "10.1.0.2", "10.1.0.3")
	for i, of := range []string{"east", "west", "west"} {
		hinted["endpoints"].([]object)[i]["hints"] = object{"forZones": []object{{"name": of}}}
	}
	a.do(http.MethodPost, sliceObjects, hinted)
	a.service("web", "10.96.0.10", nil)
	b := newBalancer(t, a)
	label := func(node string, to any) {
		t.Helper()
		a.do(http.MethodPatch, nodes+"/"+node, object{"metadata": object{"labels": object{zone: to}}})
	}
	b.has("a node without a zone", "web 10.96.0.10 3/3 3")
	b.source("all kinds were listed", true, "")
	label("n2", "east")
	label("n1", "west")
	b.has("a node of the west", "web 10.96.0.10 3/3 2")
	label("n1", "east")
	b.has("a node of the east", "web 10.96.0.10 3/3 1")
	// The state is kept by a process without access to the API, and when the Node is deleted.
	a.ask(apitest.Kill)
	b.end(syscall.SIGKILL)
	b.start()
	b.source("the API is unavailable", false, "connection refused")
	b.has("the API is unavailable", "web 10.96.0.10 3/3 1")
	a.ask(apitest.Start)
	b.source("the API is back", true, "")
	a.do(http.MethodDelete, nodes+"/n1", nil)
	a.do(http.MethodDelete, sliceObjects+"/web-1", nil)
	b.has("without endpoints", "web 10.96.0.10 0/0 0")
	a.do(http.MethodPost, sliceObjects, hinted)
	b.has("the Node is gone", "web 10.96.0.10 3/3 1")
	a.do(http.MethodPost, nodes, object{"metadata": object{"name": "n1"}})
	b.has("a Node without a zone", "web 10.96.0.10 3/3 3")
}

func TestAPIServicesThatWereDeletedMeanwhileGo(t *testing.T) {
	a := newAPI(t)
	a.do(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": "shop"}})
	for i, name := range []string{"stays", "goes"} {
		a.service(name, fmt.Sprintf("10.96.0.%d", 10+i), nil)
		a.do(http.MethodPost, sliceObjects, slice(name+"-1", name, nil, "10.1.0.1"))
	}
	b := newBalancer(t, a)
	all := []string{"stays 10.96.0.10 1/1 1", "goes 10.96.0.11 1/1 1"}
	b.has("before", all...)

	// The API is killed, then the process: the last known state stays.
	a.ask(apitest.Kill)
	b.source("the API is unavailable", true, "connection refused")
	b.has("the API is unavailable", all...)
	b.end(syscall.SIGKILL)
	b.start()
	b.source("the API is still unavailable", false, "connection refused")
	b.has("the API is still unavailable", all...)
	a.ask(apitest.Start)
	b.source("the API is back", true, "")
	b.has("the API is back", all...)

	// The API restarts, with deletions, while the process is down.
	if err := b.process.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	a.do(http.MethodDelete, sliceObjects+"/goes-1", nil)
	a.do(http.MethodDelete, serviceObjects+"/goes", nil)
	a.ask(apitest.Kill)
	a.ask(apitest.Start)
	if err := b.process.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	b.has("deletions meanwhile", "stays 10.96.0.10 1/1 1")
	b.end(syscall.SIGKILL)
	a.do(http.MethodDelete, sliceObjects+"/stays-1", nil)
	b.start()
	b.has("a deletion while the process was down", "stays 10.96.0.10 0/0 0")
}

// TestAPIBurstOfServicesIsTakenByOneWatch: one watch receives a burst of Services. Objects that Sluice does not
// understand are refused individually, by name.
func TestAPIBurstOfServicesIsTakenByOneWatch(t *testing.T) {
	const burst = 1000
	a := newAPI(t)
	a.do(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": "shop"}})
	own := map[string][2]int{} // lists and watches of the API server itself
	for _, resource := range []string{"services", "endpointslices"} {
		lists, watches := a.requests(resource)
		own[resource] = [2]int{lists, watches}
	}
	b := newBalancer(t, a)
	b.source("before", true, "")
	before := b.resident()
	began := time.Now()
	done := make(chan error, 8)
	for w := range cap(done) {
		go func() {
			for i := w; i < burst; i += cap(done) {
				name := fmt.Sprint("s", i)
				ends := slice(name, name, nil, fmt.Sprintf("10.1.%d.%d", i/250, 1+i%250))
				status, answer := a.call(http.MethodPost, sliceObjects, ends)
				if status == http.StatusCreated {
					status, answer = a.call(http.MethodPost, serviceObjects, object{
						"metadata": object{"name": name}, "spec": object{"ports": []object{{"name": "http", "port": 80}}},
					})
				}
				if status != http.StatusCreated {
					done <- fmt.Errorf("%d: %s", status, answer)
					return
				}
			}
			done <- nil
		}()
	}
	var failed []error
	for range cap(done) {
		failed = append(failed, <-done)
	}
	if err := errors.Join(failed...); err != nil {
		t.Fatal(err)
	}
	made := time.Since(began)
	eventually(t, "all services", func() error {
		got := b.list()
		if len(got) != burst {
			return fmt.Errorf("there are %d services, want %d", len(got), burst)
		}
		for _, line := range got {
			if !strings.HasSuffix(line, " 1/1 1") {
				return errors.New(line)
			}
		}
		return nil
	})
	t.Logf("%d services were made in %s and taken over %s later; resident before %d kB, after %d kB", burst,
		made.Round(time.Millisecond), (time.Since(began) - made).Round(time.Millisecond), before, b.resident())
	// The API server's addresses use a separate watch of slices, which begins with a list where the server does not
	// stream lists (before Kubernetes 1.34).
	for resource, most := range map[string]int{"services": 1, "endpointslices": 2} {
		lists, watches := a.requests(resource)
		if lists, watches = lists-own[resource][0], watches-own[resource][1]; lists > most || watches > 4 {
			t.Errorf("the API server served %d listings and %d watches of %s, want <= %d and 4", lists, watches,
				resource, most)
		}
	}
}

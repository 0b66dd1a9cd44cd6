// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
)

const balancerPools = "/apis/cilium.io/v2/ciliumloadbalancerippools"

// balanced is a Service of type LoadBalancer with its status.
type balanced struct {
	Status struct {
		LoadBalancer struct {
			Ingress []struct{ IP, IPMode string }
		}
		Conditions []condition
	}
}

// balance creates a Service of type LoadBalancer.
func (a *apiServer) balance(namespace, name string, annotations object, more object) {
	a.t.Helper()
	spec := object{
		"type": "LoadBalancer", "selector": object{"app": name}, "ports": []object{{"port": 80, "protocol": "TCP"}},
	}
	for k, v := range more {
		spec[k] = v
	}
	a.do(http.MethodPost, "/api/v1/namespaces/"+namespace+"/services", object{
		"metadata": object{"name": name, "annotations": annotations}, "spec": spec,
	})
}

// balancedWants waits until a Service has addresses and a reason of its condition. An empty reason means no condition.
func (a *apiServer) balancedWants(namespace, name, reason string, addresses ...string) {
	a.t.Helper()
	path := "/api/v1/namespaces/" + namespace + "/services/" + name
	eventually(a.t, "the addresses of "+namespace+"/"+name, func() error {
		var s balanced
		if err := json.Unmarshal(a.do(http.MethodGet, path, nil), &s); err != nil {
			return err
		}
		var got []string
		for _, in := range s.Status.LoadBalancer.Ingress {
			if in.IPMode != "VIP" {
				return fmt.Errorf("%s has the mode %q", in.IP, in.IPMode)
			}
			got = append(got, in.IP)
		}
		said := ""
		for _, c := range s.Status.Conditions {
			if c.Type == "cilium.io/IPAMRequestSatisfied" {
				if said = c.Reason; (c.Status == "True") != (said == "satisfied") {
					return fmt.Errorf("the condition is %+v", c)
				}
			}
		}
		if said != reason || !slices.Equal(got, addresses) {
			return fmt.Errorf("%s has %q, %s; want %q, %s", name, got, said, addresses, reason)
		}
		return nil
	})
}

// TestAPIServicesGetAddressesOfPools: Services get addresses of pools, and keep them when the process that assigned
// them is killed. sluice-controller has the rights of deploy/kubernetes/base only. A node accepts connections to the
// addresses.
func TestAPIServicesGetAddressesOfPools(t *testing.T) {
	a := newStatusAPI(t)
	a.do(http.MethodPost, "/api/v1/nodes", object{"metadata": object{"name": "node"}})
	status, answer := a.call(http.MethodPatch, "/api/v1/nodes/node/status", object{
		"status": object{"addresses": []object{{"type": "InternalIP", "address": "192.0.2.1"}}},
	})
	if status != http.StatusOK {
		t.Fatalf("%d %s", status, answer)
	}
	first := a.writer()
	second := a.writer()
	node := newBalancer(t, a.apiServer)

	a.balance("shop", "early", nil, nil)
	a.do(http.MethodPost, balancerPools, object{
		"apiVersion": "cilium.io/v2", "kind": "CiliumLoadBalancerIPPool", "metadata": object{"name": "blue"},
		"spec": object{"blocks": []object{{"start": "192.0.2.1", "stop": "192.0.2.4"}, {"cidr": "2001:db8::/126"}}},
	})
	a.balancedWants("shop", "early", "satisfied", "192.0.2.2") // .1 belongs to the node
	a.balance("shop", "node", object{"lbipam.cilium.io/ips": "192.0.2.1"}, nil)
	a.balancedWants("shop", "node", "address_in_use")
	a.balance("shop", "taken", nil, object{"loadBalancerIP": "192.0.2.2"})
	a.balancedWants("shop", "taken", "already_allocated")
	a.balance("shop", "asks", object{"lbipam.cilium.io/ips": "192.0.2.4"}, nil)
	a.balancedWants("shop", "asks", "satisfied", "192.0.2.4")
	a.balance("shop", "other", nil, object{"loadBalancerClass": "example.com/other"})
	a.balancedWants("shop", "other", "")
	eventually(t, "the node forwards the addresses", func() error {
		all := strings.Join(node.list(), "\n")
		for _, want := range []string{"early ", ",192.0.2.2 ", "asks ", ",192.0.2.4 "} {
			if !strings.Contains(all, want) {
				return fmt.Errorf("the node has %q, without %q", all, want)
			}
		}
		return nil
	})

	first.end(syscall.SIGKILL)
	second.end(syscall.SIGKILL)
	a.do(http.MethodDelete, "/api/v1/namespaces/shop/services/early", nil)
	a.writer()
	a.balance("shop", "late", nil, nil)
	a.balancedWants("shop", "taken", "satisfied", "192.0.2.2")
	a.balancedWants("shop", "late", "satisfied", "192.0.2.3")
	a.balancedWants("shop", "asks", "satisfied", "192.0.2.4")

	a.do(http.MethodPost, balancerPools, object{
		"apiVersion": "cilium.io/v2", "kind": "CiliumLoadBalancerIPPool", "metadata": object{"name": "green"},
		"spec": object{"blocks": []object{{"cidr": "192.0.2.0/29"}, {"cidr": "10.0.0.1/8"}}},
	})
	eventually(t, "the conditions of the pools", func() error {
		for pool, want := range map[string]string{
			"blue":  "PoolConflict=False  IPsTotal=Unknown 8 IPsAvailable=Unknown 5 IPsUsed=Unknown 3",
			"green": "PoolConflict=True spec.blocks[1]: cidr: 10.0.0.1/8 is not the first address of a prefix; use 10.0.0.0/8",
		} {
			var p struct {
				Status struct{ Conditions []condition }
			}
			if err := json.Unmarshal(a.do(http.MethodGet, balancerPools+"/"+pool, nil), &p); err != nil {
				return err
			}
			var got []string
			for _, c := range p.Status.Conditions {
				got = append(got, fmt.Sprintf("%s=%s %s", strings.TrimPrefix(c.Type, "cilium.io/"), c.Status, c.Message))
			}
			if got := strings.Join(got, " "); !strings.HasPrefix(got, want) {
				return fmt.Errorf("%s says %s, want %s", pool, got, want)
			}
		}
		return nil
	})

	// A Service that is no longer balanced loses its address, which is then free.
	status, answer = a.call(http.MethodPatch, "/api/v1/namespaces/shop/services/asks", object{
		"spec": object{"type": "ClusterIP"},
	})
	if status != http.StatusOK {
		t.Fatalf("%d %s", status, answer)
	}
	a.balancedWants("shop", "asks", "")
	a.balance("shop", "again", object{"lbipam.cilium.io/ips": "192.0.2.4"}, nil)
	a.balancedWants("shop", "again", "satisfied", "192.0.2.4")
}

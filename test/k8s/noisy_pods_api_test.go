// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// TestAPITenantKeepsItsPodsBesideANoisyOne is TestAPITenantKeepsWhatItHasBesideANoisyOne for the limits that pods
// exhaust when they start and stop: host ports of the node, and addresses in quarantine.
func TestAPITenantKeepsItsPodsBesideANoisyOne(t *testing.T) {
	a := newAPI(t)
	a.crds()
	n := newTenantNode(t, a, map[string]string{"SLUICE_IPAM_QUARANTINE": "15m"})
	n.namespace("victim", object{"sluice.io/tenant": "victim"})
	a.do(http.MethodPost, "/apis/cilium.io/v2/ciliumclusterwidenetworkpolicies", manifest("cilium.io/v2",
		"CiliumClusterwideNetworkPolicy", "", "quarantine",
		`{"endpointSelector": {"matchLabels": {"quarantine": "true"}}, "ingressDeny": [{"fromEntities": ["all"]}]}`))
	for i := range 10 {
		n.namespace(fmt.Sprint("noisy-", i), nil)
	}

	t.Log("round 1: host ports")
	ports := func(namespace, name string, first, count int) error {
		var all []object
		for i := range count {
			all = append(all, object{"hostPort": first + i, "containerPort": 8080, "protocol": "tcp"})
		}
		n.ports = all
		defer func() { n.ports = nil }()
		_, err := n.add(namespace, name, object{"app": "ports"})
		return err
	}
	var err error
	next := 10_000
	for i := 0; i < 40 && err == nil; i++ {
		err = ports(fmt.Sprint("noisy-", i%10), fmt.Sprint("ports-", i), next, 250)
		next += 250
	}
	if err == nil || !strings.Contains(err.Error(), "host ports") {
		t.Fatalf("the noisy tenant has not exhausted the host ports: %v", err)
	}
	if err := ports("victim", "ports", next, 4); err != nil {
		t.Errorf("host ports of the other tenant: %v", err)
	}
	n.victim(0)
	for key := range n.pods {
		n.remove(key)
	}

	t.Log("round 2: addresses in quarantine")
	for i := range 300 { // more than the addresses of the node
		if _, err = n.add("noisy-0", fmt.Sprint("short-", i), object{"app": "short"}); err != nil {
			break
		}
		n.remove(fmt.Sprint("noisy-0/short-", i))
	}
	if err == nil || !strings.Contains(err.Error(), "reserved for other namespaces") {
		t.Fatalf("the noisy tenant has not exhausted the addresses: %v", err)
	}
	n.victim(1)
}

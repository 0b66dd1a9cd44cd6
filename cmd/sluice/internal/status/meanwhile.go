// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package status

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
)

// works lists, for each service, the functions of the node that continue to work while the service is unavailable.
// docs/failures.md contains the same as a table; a test with whole nodes checks both.
var works = map[string]string{
	"etcd": "traffic, services, policies and their changes, DEL, and ADD of containers whose label set this node " +
		"knows continue to work. No restart is needed: the node reconnects by itself when etcd is back",
	"identity": "traffic, services, policies and their changes, DEL, and ADD of containers with the same labels as a " +
		"container on this node continue to work. Label changes of running containers are not applied",
	"ipam": "traffic, services, policies and their changes, and DEL, whose addresses are released later, continue to " +
		"work. No ADD",
	"policy": "traffic under the policies in the kernel, services, DEL, and ADD of containers with the same labels " +
		"as a container on this node continue to work. Policies cannot be changed",
	"loadbalancer": "traffic, policies and their changes, ADD, DEL, and the present services continue to work. " +
		"Services cannot be changed",
	"dns": "traffic, services, policies and their changes, ADD, and DEL continue to work. Addresses are not learned " +
		"from DNS answers, and queries under DNS rules that restrict names are dropped",
	"http": "traffic, services, policies and their changes, ADD, and DEL continue to work. Connections that rules for " +
		"HTTP or server names are about end, and new ones are dropped",
	"datapath": "traffic under the policies and services in the kernel continues, and DEL is recorded and executed " +
		"later. No ADD; changes of policies and services are stored and enforced when it is back",
}

// meanwhile describes which functions work while etcd or services are unavailable, and where the logs of these services
// are.
func (s *Node) meanwhile(inv *invocation.Invocation) []string {
	all := []string{}
	if i := s.Identity.Message; i != nil && !i.GetStoreConnected() {
		all = append(all, "without etcd: "+works["etcd"])
	}
	var away []string
	for _, service := range s.Services {
		if service.away && !service.denied {
			away = append(away, service.Name)
		}
	}
	switch len(away) {
	case 0:
	case 1:
		all = append(all, fmt.Sprintf("without sluice-%s: %s. %s", away[0], works[away[0]], whereToLook(inv, away[0])))
	default:
		// The texts in works assume that all other services run, so several missing services need their own
		// text.
		all = append(all, fmt.Sprintf("without sluice-%s: traffic under the policies and services in the kernel continues, "+
			"and DEL is recorded and executed later. %s", strings.Join(away, ", sluice-"), whereToLook(inv, away[0])))
	}
	return all
}

// whereToLook returns the location of a service's log and, for a development node, how to start the service.
func whereToLook(inv *invocation.Invocation, service string) string {
	if socket, err := inv.Socket(service); err == nil {
		file := filepath.Join(filepath.Dir(filepath.Dir(socket)), "log", service+".log")
		if _, err := os.Stat(file); err == nil { // a node for development
			return fmt.Sprintf("Its log is %s; `sluice dev restart %s --instance %s` starts it", file, service,
				inv.Instance)
		}
	}
	return fmt.Sprintf("`journalctl -u sluice-%s`, or in Kubernetes the log of the container %s, has the reason", service,
		service)
}

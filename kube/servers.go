// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"net"
	"strconv"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// apiServers selects the EndpointSlice that the API servers write. Other slices with the label of the Service
// "kubernetes" are ignored: a user who may create slices in the namespace could otherwise give any address the
// identity of an API server.
func (c *Client) apiServers() (Kind[[]string], error) {
	client, err := c.REST(discoveryv1.SchemeGroupVersion, discoveryv1.AddToScheme)
	return Kind[[]string]{
		Client: client, Resource: "endpointslices", Namespace: "default",
		Fields: "metadata.name=kubernetes",
		Type:   &discoveryv1.EndpointSlice{}, Trim: slice, Last: true,
	}, err
}

// slice returns the addresses of a slice's ready endpoints.
func slice(object runtime.Object) (all []string) {
	s := object.(*discoveryv1.EndpointSlice)
	for _, port := range s.Ports {
		if port.Port == nil || port.Name == nil || *port.Name != "https" {
			continue
		}
		for _, e := range s.Endpoints {
			if e.Conditions.Ready != nil && !*e.Conditions.Ready {
				continue
			}
			for _, address := range e.Addresses {
				if net.ParseIP(address) != nil {
					all = append(all, "https://"+net.JoinHostPort(address, strconv.Itoa(int(*port.Port))))
				}
			}
		}
	}
	return all
}

// servers passes on the addresses of all slices once the list is complete.
type servers struct {
	addresses *addresses
	slices    map[types.NamespacedName][]string
	complete  bool
}

// Upsert implements Handler.
func (s *servers) Upsert(name types.NamespacedName, addresses []string) {
	if s.slices == nil {
		s.slices = map[types.NamespacedName][]string{}
	}
	s.slices[name] = addresses
	s.learn()
}

// Delete implements Handler.
func (s *servers) Delete(name types.NamespacedName) {
	delete(s.slices, name)
	s.learn()
}

// Complete implements Handler.
func (s *servers) Complete() {
	s.complete = true
	s.learn()
}

// Failed implements Handler.
func (s *servers) Failed(error) {}

func (s *servers) learn() {
	if !s.complete {
		return
	}
	var all []string
	for _, addresses := range s.slices {
		all = append(all, addresses...)
	}
	s.addresses.learn(all)
}

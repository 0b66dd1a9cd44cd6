// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package frontendwire converts frontends and their steps to the messages of
// sluice.loadbalancer.v1 and back.
package frontendwire

import (
	"fmt"
	"time"

	"github.com/sluice-net/sluice/model/frontend"
	loadbalancerv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/proto/wire"
)

// Step writes a step. It panics if given a step without a message: an empty one, or a
// Refuse.
func Step(st frontend.Step) *loadbalancerv1.FrontendStep {
	switch {
	case st.Upsert != nil:
		return &loadbalancerv1.FrontendStep{Step: &loadbalancerv1.FrontendStep_Upsert{Upsert: Frontend(st.Upsert)}}
	case st.Remove != nil:
		return &loadbalancerv1.FrontendStep{Step: &loadbalancerv1.FrontendStep_Remove{Remove: Key(*st.Remove)}}
	case st.Barrier != nil:
		return &loadbalancerv1.FrontendStep{Step: &loadbalancerv1.FrontendStep_Barrier{Barrier: barrier(st.Barrier)}}
	}
	panic(fmt.Sprintf("step %+v has no message", st))
}

func barrier(b *frontend.Barrier) *loadbalancerv1.Barrier {
	return &loadbalancerv1.Barrier{
		Incarnation: []byte(b.Incarnation), Seq: b.Seq, Revision: b.Revision, SnapshotComplete: b.SnapshotComplete,
		State: []byte(b.State), SourcesComplete: b.SourcesComplete,
	}
}

// Key writes a key.
func Key(k frontend.Key) *loadbalancerv1.FrontendKey {
	out := &loadbalancerv1.FrontendKey{Port: uint32(k.Port), Protocol: netv1.Protocol(k.Protocol)}
	switch {
	case !k.Node:
		out.Address = k.Addr.String()
	case k.Addr.Is4():
		out.Family = loadbalancerv1.IPFamily_IP_FAMILY_IPV4
	default:
		out.Family = loadbalancerv1.IPFamily_IP_FAMILY_IPV6
	}
	return out
}

// kinds has every kind that the load balancer sends: a HostPort belongs to no Service.
var kinds = map[frontend.Kind]loadbalancerv1.FrontendKind{
	frontend.ClusterIP:    loadbalancerv1.FrontendKind_FRONTEND_KIND_CLUSTER_IP,
	frontend.NodePort:     loadbalancerv1.FrontendKind_FRONTEND_KIND_NODE_PORT,
	frontend.ExternalIP:   loadbalancerv1.FrontendKind_FRONTEND_KIND_EXTERNAL_IP,
	frontend.LoadBalancer: loadbalancerv1.FrontendKind_FRONTEND_KIND_LOAD_BALANCER,
}

// Frontend writes a frontend.
func Frontend(f *frontend.Frontend) *loadbalancerv1.Frontend {
	namespace, name, port := frontend.SplitServicePort(f.Service)
	out := &loadbalancerv1.Frontend{
		Key: Key(f.Key), Kind: kinds[f.Kind], Namespace: namespace, Name: name, PortName: port,
		Inside: list(f.Inside), Outside: list(f.Outside), AffinitySeconds: uint32(f.Affinity / time.Second),
		Tenant: wire.Tenant(f.Tenant, 0), ExceedsShare: f.ExceedsShare,
	}
	for _, r := range f.SourceRanges {
		out.SourceRanges = append(out.SourceRanges, r.String())
	}
	return out
}

func list(l *frontend.List) *loadbalancerv1.BackendList {
	if l == nil {
		return nil
	}
	out := &loadbalancerv1.BackendList{
		WhenEmpty: loadbalancerv1.EmptyAction_EMPTY_ACTION_REJECT,
		Backends:  backends(l.Backends), Draining: backends(l.Draining), Algorithm: Algorithm(l.Table),
	}
	if l.Drop {
		out.WhenEmpty = loadbalancerv1.EmptyAction_EMPTY_ACTION_DROP
	}
	return out
}

// Algorithm writes how a list chooses a backend: by a rendezvous table, or by default.
func Algorithm(table bool) loadbalancerv1.Algorithm {
	if table {
		return loadbalancerv1.Algorithm_ALGORITHM_TABLE
	}
	return loadbalancerv1.Algorithm_ALGORITHM_UNSPECIFIED
}

// backends writes backends. There may be a hundred thousand in a row of messages, so the messages of one list are in
// one block of memory, and their addresses in one text.
func backends(all []frontend.Backend) []*loadbalancerv1.Backend {
	out, block := make([]*loadbalancerv1.Backend, len(all)), make([]loadbalancerv1.Backend, len(all))
	const usual = len("10.244.100.100")
	text, ends := make([]byte, 0, usual*len(all)), make([]int, len(all))
	for i, b := range all {
		text = b.Addr().AppendTo(text)
		ends[i] = len(text)
	}
	addresses, begin := string(text), 0
	for i, b := range all {
		out[i] = &block[i]
		out[i].Address, out[i].Port, out[i].Terminating = addresses[begin:ends[i]], uint32(b.Port()), b.Terminating
		begin = ends[i]
	}
	return out
}

// Capacity writes a capacity; nil if it is unknown.
func Capacity(c frontend.Capacity) *loadbalancerv1.Capacity {
	if c == (frontend.Capacity{}) {
		return nil
	}
	return &loadbalancerv1.Capacity{
		Frontends: uint32(c.Frontends), Backends: uint32(c.Backends), Members: uint32(c.Members),
		BackendsPerList: uint32(c.BackendsPerList),
	}
}

// Refusal writes that a subscriber refuses a frontend, and why.
func Refusal(k frontend.Key, reason string) *loadbalancerv1.Refused {
	return &loadbalancerv1.Refused{Key: Key(k), Reason: reason}
}

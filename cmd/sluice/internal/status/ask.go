// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package status

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

// ask fills in what one service says. What it does not say is part of the
// answer; only a mistake of the caller is an error.
func ask(ctx context.Context, inv *invocation.Invocation, service *serviceStatus, s *Node) error {
	conn, err := inv.Dial(service.Name)
	if err != nil {
		return err
	}
	defer conn.Close()
	health, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	if err == nil {
		service.Serving = health.GetStatus() == grpc_health_v1.HealthCheckResponse_SERVING
		switch service.Name {
		case "identity":
			err = s.askIdentity(ctx, service, identityv1.NewIdentityServiceClient(conn))
		case "ipam":
			err = s.askIPAM(ctx, service, ipamv1.NewIPAMServiceClient(conn))
			service.askNode(ctx, conn)
		case "policy":
			err = s.askPolicy(ctx, service, policyv1.NewPolicyServiceClient(conn))
		case "loadbalancer":
			err = s.askLoadBalancer(ctx, service, lbv1.NewLoadBalancerServiceClient(conn))
			service.askNode(ctx, conn)
		case "datapath":
			err = s.askDatapath(ctx, service, datapathv1.NewDatapathServiceClient(conn))
		}
	}
	if err == nil {
		return nil
	}
	service.Error, service.denied, service.away = status.Convert(err).Message(), errors.Is(err, syscall.EACCES), true
	if ctx.Err() != nil {
		// It is connected, or is not: the process accepts and does not read.
		service.Error = fmt.Sprintf("no answer within %s; it may hang, or have been stopped", inv.Timeout)
	}
	return nil
}

// askNode reads which node the settings of a service name; what cannot be read names none. In ipam the name counts in
// one mode alone.
func (s *serviceStatus) askNode(ctx context.Context, conn grpc.ClientConnInterface) {
	r, err := statusv1.NewProcessServiceClient(conn).GetConfig(ctx, &statusv1.GetConfigRequest{})
	if err != nil {
		return
	}
	settings := map[string]string{}
	for _, x := range r.GetSettings() {
		settings[x.GetKey()] = x.GetValue()
	}
	switch {
	case s.Name == "loadbalancer":
		s.node, s.nodeKey = settings["node.name"], "node.name"
	case settings["mode"] == "kubernetes":
		s.node, s.nodeKey = settings["kubernetes.node"], "kubernetes.node"
	}
}

// about takes what every service says of itself.
func (s *serviceStatus) about(said *statusv1.ServiceStatus) {
	s.Version, s.Started = said.GetVersion(), output.When(said.GetStartTime())
}

// textsOf are the problems of a service, as it words them.
func textsOf(said *statusv1.ServiceStatus) []string {
	var texts []string
	for _, p := range said.GetProblems() {
		texts = append(texts, p.GetText())
	}
	return texts
}

func (s *Node) askIdentity(ctx context.Context, service *serviceStatus,
	client identityv1.IdentityServiceClient,
) error {
	r, err := client.GetStatus(ctx, &identityv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	service.about(r.GetService())
	s.Identity = &identityStatus{
		Node: r.GetNodeName(), StoreReached: r.GetStoreConnected(), StoreError: r.GetStoreError(),
		Cluster: r.GetClusterIdentities(), Held: r.GetHeldIdentities(), PendingWrites: r.GetPendingStoreWrites(),
	}
	switch {
	case !s.Identity.StoreReached:
		service.Error, service.known = "new label sets cannot be connected: etcd is away: "+s.Identity.StoreError, true
	case s.Identity.StoreError != "":
		service.Error, service.known = "new label sets cannot be connected: "+s.Identity.StoreError, true
	}
	if c := r.GetCluster(); c != nil { // nil from a service of an older version
		s.Cluster = &clusterStatus{
			Registered: c.GetRegistered(), Nodes: c.GetNodes(), Mappings: c.GetMappings(),
			RefusedMappings: c.GetRefusedMappings(), RefusedRanges: c.GetRefusedRanges(),
			Pending: c.GetPendingPublications(), PublicationError: c.GetPublicationError(),
		}
	}
	for _, p := range r.GetService().GetProblems() {
		switch p.GetReason() {
		case statusv1.ProblemReason_PROBLEM_REASON_STORE: // which is an error of the service already
		case statusv1.ProblemReason_PROBLEM_REASON_STORAGE:
			service.Error, service.known = "new label sets cannot be connected: "+p.GetText(), true
		default:
			s.Identity.problems = append(s.Identity.problems, p.GetText())
		}
	}
	for _, k := range r.GetTopLabelKeys() {
		s.Identity.TopLabelKeys = append(s.Identity.TopLabelKeys, fmt.Sprintf("%s (%d values)", k.GetKey(),
			k.GetDistinctValues()))
	}
	return nil
}

func (s *Node) askIPAM(ctx context.Context, service *serviceStatus, client ipamv1.IPAMServiceClient) error {
	r, err := client.GetStatus(ctx, &ipamv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	service.about(r.GetService())
	s.Pools = r.GetPools()
	var problems []string
	for _, p := range r.GetService().GetProblems() {
		if p.GetReason() == statusv1.ProblemReason_PROBLEM_REASON_STORE {
			// What the cluster has of the ranges changes; addresses are given out of those that there are.
			s.poolProblems = append(s.poolProblems, p.GetText())
			continue
		}
		problems = append(problems, p.GetText())
	}
	if len(problems) > 0 {
		service.Error = "no container can be connected now: " + strings.Join(problems, "; ")
	}
	return nil
}

func (s *Node) askPolicy(ctx context.Context, service *serviceStatus, client policyv1.PolicyServiceClient) error {
	r, err := client.GetStatus(ctx, &policyv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	service.about(r.GetService())
	p := &policyStatus{
		Revision: r.GetRevision(), Policies: r.GetPolicies(), Refused: r.GetRefused(), Identities: r.GetIdentities(),
		WaitingIdentities: r.GetWaitingIdentities(), Subjects: r.GetSubjects(), Tables: r.GetTables(),
		Sources: []policySource{}, Subscribers: []policySubscriber{}, Unsupported: r.GetPoliciesWithUnsupportedFields(),
		WaitingFor: r.GetWaitingFor(), Skipped: r.GetSkippedDocuments(),
	}
	for _, source := range r.GetSources() {
		p.Sources = append(p.Sources, policySource{
			source.GetName(), source.GetManager(), source.GetSynced(), source.GetError(), source.GetPolicies(),
		})
	}
	for _, sub := range r.GetSubscribers() {
		p.Subscribers = append(p.Subscribers, policySubscriber{
			sub.GetName(), sub.GetConnected(), sub.GetEnforces(),
			sub.GetRevision(), sub.GetBehind(), sub.GetRefusals(),
		})
	}
	p.problems = textsOf(r.GetService())
	s.Policy = p
	return nil
}

func (s *Node) askLoadBalancer(ctx context.Context, service *serviceStatus,
	client lbv1.LoadBalancerServiceClient,
) error {
	r, err := client.GetStatus(ctx, &lbv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	service.about(r.GetService())
	s.LoadBalancer = loadBalancerOf(r)
	return nil
}

func (s *Node) askDatapath(ctx context.Context, service *serviceStatus,
	client datapathv1.DatapathServiceClient,
) error {
	r, err := client.GetStatus(ctx, &datapathv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	service.about(r.GetService())
	d := &datapathStatus{
		AddReady: r.GetAddReady(), KnownAddReady: r.GetAddReady() || r.GetKnownAddReady(),
		PolicyMode: output.Enum(r.GetPolicyMode(), "POLICY_MODE_"), Kernel: r.GetKernelRelease(),
		PodCIDRs: r.GetPodPrefixes(), NodeAddresses: r.GetNodeAddresses(),
		Endpoints: map[string]uint32{}, PendingReleases: r.GetPendingReleases(),
		AttachmentRepair: r.GetAttachmentRepairs(), EventsLost: r.GetEventsLost(), Packets: []packets{},
	}
	for _, e := range r.GetEndpoints() {
		if e.GetCount() > 0 {
			d.Endpoints[output.Enum(e.GetState(), "ENDPOINT_STATE_")] = e.GetCount()
		}
	}
	for _, p := range r.GetPacketCounters() {
		if p.GetPackets() > 0 {
			d.Packets = append(d.Packets, packets{
				output.Enum(p.GetReason(), "REASON_"), output.Enum(p.GetDirection(), "DIRECTION_"), p.GetDropped(),
				p.GetPackets(), p.GetBytes(),
			})
		}
	}
	d.PolicyRevision, d.PolicyRefusals, d.Maps = r.GetPolicyRevision(), append([]string{}, r.GetPolicyRefusals()...),
		r.GetMaps()
	d.Warnings, d.DeviceRepairs, d.NodeRepairs = append([]string{}, r.GetWarnings()...), r.GetDeviceRepairs(),
		r.GetNodeRepairs()
	if n := r.GetConnections(); n != nil {
		d.Connections = &connectionCounts{
			n.GetLive(), n.GetCreated(), n.GetRevoked(), n.GetExpired(), n.GetEvicted(),
			n.GetPickedUp(),
		}
	}
	if i := r.GetIdentityStream(); i != nil {
		d.IdentityStream = &identityStream{i.GetComplete(), i.GetError(), i.GetChanged(), i.GetPending()}
	}
	d.Frontends = frontendsOf(r.GetFrontendStream())
	d.NodeProbes, d.PodRouting = probesOf(r.GetNodeProbes()), routingOf(r.GetPodRouting())
	s.Datapath = d
	switch why := strings.Join(textsOf(r.GetService()), "; "); {
	case d.AddReady:
	case r.GetKnownAddReady():
		service.Error, service.known = "containers with new labels cannot be connected now: "+why, true
	default:
		service.Error = "no container can be connected now: " + why
	}
	return nil
}

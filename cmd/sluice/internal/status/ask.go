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

// ask adds the status of one service. If the service does not answer, the status contains its error; ask returns an
// error only if the caller made a mistake.
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
		case "dns", "http":
			err = service.askProcess(ctx, conn)
		}
	}
	if err == nil {
		return nil
	}
	service.Error, service.denied, service.away = status.Convert(err).Message(), errors.Is(err, syscall.EACCES), true
	if ctx.Err() != nil {
		// The connection may be established although the process does not read from it.
		service.Error = fmt.Sprintf("no answer within %s; it may hang or be stopped", inv.Timeout)
	}
	return nil
}

// askNode reads the name of the node from the settings of a service; empty on errors. ipam uses the name only in the
// mode kubernetes.
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

// askProcess asks a service that has no GetStatus.
func (s *serviceStatus) askProcess(ctx context.Context, conn grpc.ClientConnInterface) error {
	r, err := statusv1.NewProcessServiceClient(conn).GetConfig(ctx, &statusv1.GetConfigRequest{})
	if err == nil {
		s.Version, s.Started = r.GetVersion(), output.When(r.GetStartTime())
	}
	return err
}

// about sets version and start time.
func (s *serviceStatus) about(said *statusv1.ServiceStatus) {
	s.Version, s.Started = said.GetVersion(), output.When(said.GetStartTime())
}

// textsOf returns the texts of a service's problems.
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
	s.Identity.Message = r
	switch {
	case !r.GetStoreConnected():
		service.Error = "containers with new labels cannot be connected: etcd is unavailable: " + r.GetStoreError()
		service.known = true
	case r.GetStoreError() != "":
		service.Error, service.known = "containers with new labels cannot be connected: "+r.GetStoreError(), true
	}
	for _, p := range r.GetService().GetProblems() {
		if p.GetReason() == statusv1.ProblemReason_PROBLEM_REASON_STORAGE {
			service.Error, service.known = "containers with new labels cannot be connected: "+p.GetText(), true
		}
	}
	return nil
}

func (s *Node) askIPAM(ctx context.Context, service *serviceStatus, client ipamv1.IPAMServiceClient) error {
	r, err := client.GetStatus(ctx, &ipamv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	service.about(r.GetService())
	s.IPAM.Message = r
	var problems []string
	for _, p := range r.GetService().GetProblems() {
		// Problems of the store delay only changes of the pod CIDRs; ipam can still allocate from the CIDRs
		// that it has.
		if p.GetReason() != statusv1.ProblemReason_PROBLEM_REASON_STORE {
			problems = append(problems, p.GetText())
		}
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
	s.Policy.Message = r
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
	s.LoadBalancer.Message = r
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
	s.Datapath.Message = r
	switch why := strings.Join(textsOf(r.GetService()), "; "); {
	case r.GetAddReady():
	case r.GetKnownAddReady():
		service.Error, service.known = "containers with new labels cannot be connected now: "+why, true
	default:
		service.Error = "no container can be connected now: " + why
	}
	return nil
}

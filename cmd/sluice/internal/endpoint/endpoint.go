// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package endpoint shows the connected containers, and finds the one that a person means.
package endpoint

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Command is `endpoint`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("endpoint", "Show, check, change and delete the connections of containers",
		&cobra.Command{
			Use: "list", Short: "List every endpoint of the node", Args: invocation.Args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return printList(cmd.Context(), inv) },
		},
		&cobra.Command{
			Use: "get CONTAINER[/INTERFACE]", Short: "Show one endpoint; the start of the container's id is enough",
			Args: invocation.Args(1, "a container's id"),
			RunE: func(cmd *cobra.Command, a []string) error { return printOne(cmd.Context(), inv, a[0]) },
		},
		labelCommand(inv),
		auditModeCommand(inv),
		checkCommand(inv),
		deleteCommand(inv),
		eventsCommand(inv),
	)
}

// endpoint is what is shown of one.
type endpoint struct {
	Owner     workload.Owner `json:"owner"`
	Manager   string         `json:"manager,omitempty"`
	Network   string         `json:"network,omitempty"`
	Pod       *podRef        `json:"pod,omitempty"`
	ID        uint32         `json:"endpointId"`
	State     string         `json:"state"`
	Identity  uint32         `json:"identity"`
	Labels    []string       `json:"labels"`
	Addresses []string       `json:"addresses"`
	Gateways  []string       `json:"gateways,omitempty"`
	Host      device         `json:"hostInterface"`
	Container device         `json:"containerInterface"`
	Namespace string         `json:"networkNamespace"`
	MTU       uint32         `json:"mtu"`
	// SourceRouted are addresses whose family has its default routes by another
	// interface of the container.
	SourceRouted []string `json:"sourceRouted,omitempty"`
	// Given are the labels as they were given last, unfiltered, and FromPod says
	// that the identity comes from the Kubernetes pod instead.
	Given      []string `json:"givenLabels,omitempty"`
	FromPod    bool     `json:"labelsFromPod,omitempty"`
	NamedPorts []string `json:"namedPorts,omitempty"`
	// HostPorts are ports of the node that lead to the container, and LeaveSockets says
	// that the calls of its sockets are left as they are.
	HostPorts    []string   `json:"hostPorts,omitempty"`
	LeaveSockets bool       `json:"leaveSockets,omitempty"`
	Created      *time.Time `json:"createTime,omitempty"`
	// Policy is what evaluates its packets; nil from a datapath that knows none.
	Policy *policy `json:"policy,omitempty"`
}

type podRef struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
}

type policy struct {
	Revision     uint64 `json:"revision"`
	EgressTable  uint32 `json:"egressTable"`
	IngressTable uint32 `json:"ingressTable"`
	Epoch        uint32 `json:"epoch"`
	Refusal      string `json:"refusal,omitempty"`
	// Audit says that what the policy denies passes, and AuditUntil when that ends by
	// itself.
	Audit      bool       `json:"audit,omitempty"`
	AuditUntil *time.Time `json:"auditExpireTime,omitempty"`
}

// text is the state of an endpoint's policy, for a table.
func (p *policy) text() string {
	switch {
	case p == nil:
		return ""
	case p.Refusal != "" && p.Audit:
		return fmt.Sprintf("revision %d, newer refused, audit only", p.Revision)
	case p.Refusal != "":
		return fmt.Sprintf("revision %d, newer refused", p.Revision)
	case p.Audit:
		return fmt.Sprintf("revision %d, audit only", p.Revision)
	case p.EgressTable == verdict.TableWaiting || p.IngressTable == verdict.TableWaiting:
		return "waits for a policy"
	case p.EgressTable == verdict.TableAllow && p.IngressTable == verdict.TableAllow:
		return "none, all is allowed"
	default:
		return fmt.Sprintf("revision %d", p.Revision)
	}
}

type device struct {
	Name  string `json:"name"`
	Index uint32 `json:"index"`
	MAC   string `json:"mac"`
}

func shown(e *datapathv1.Endpoint) endpoint {
	dev := func(d *datapathv1.Interface) device {
		return device{Name: d.GetName(), Index: d.GetIndex(), MAC: d.GetMac()}
	}
	shown := endpoint{
		Owner: workload.OwnerOf(e.GetOwner()), Manager: e.GetManager(), Network: e.GetNetwork(),
		ID:    e.GetEndpointIndex(),
		State: output.Enum(e.GetState(), "ENDPOINT_STATE_"), Identity: e.GetIdentity(),
		Labels: workload.LabelTexts(e.GetLabels()), Addresses: e.GetAddresses(),
		Gateways: e.GetGateways(),
		Host:     dev(e.GetHostInterface()), Container: dev(e.GetContainerInterface()),
		SourceRouted: e.GetSourceRouted(), Given: workload.LabelTexts(e.GetGivenLabels()), FromPod: e.GetLabelsFromPod(),
		Namespace: e.GetNetworkNamespace(), MTU: e.GetMtu(), Created: output.When(e.GetCreateTime()),
	}
	if p := e.GetPod(); p != nil {
		shown.Pod = &podRef{p.GetNamespace(), p.GetName(), p.GetUid()}
	}
	if p := e.GetPolicy(); p != nil {
		shown.Policy = &policy{
			Revision: p.GetRevision(), EgressTable: p.GetEgressTable(), IngressTable: p.GetIngressTable(),
			Epoch: p.GetEpoch(), Refusal: p.GetRefusal(), Audit: p.GetAudit(), AuditUntil: output.When(p.GetAuditExpireTime()),
		}
	}
	for _, p := range e.GetNamedPorts() {
		shown.NamedPorts = append(shown.NamedPorts, namedPort(p))
	}
	for _, m := range e.GetPortMappings() {
		shown.HostPorts = append(shown.HostPorts, hostPort(m))
	}
	shown.LeaveSockets = e.GetLeaveSockets()
	return shown
}

// List asks the datapath for every endpoint.
func List(ctx context.Context, inv *invocation.Invocation) ([]*datapathv1.Endpoint, error) {
	var all []*datapathv1.Endpoint
	err := invocation.Each(ctx, inv, invocation.Datapath, datapathv1.DatapathServiceClient.ListEndpoints,
		&datapathv1.ListEndpointsRequest{},
		func(m *datapathv1.ListEndpointsResponse) { all = append(all, m.GetEndpoint()) })
	if err != nil {
		return nil, err
	}
	return all, nil
}

func printList(ctx context.Context, inv *invocation.Invocation) error {
	found, err := List(ctx, inv)
	if err != nil {
		return err
	}
	all := make([]endpoint, 0, len(found))
	for _, e := range found {
		all = append(all, shown(e))
	}
	return inv.Show(all, func(w io.Writer) {
		output.Row(w, "CONTAINER", "ID", "STATE", "IDENTITY", "ADDRESSES", "DEVICE", "POLICY", "LABELS")
		for _, e := range all {
			output.Row(w, e.Owner, e.ID, e.State, e.Identity, strings.Join(e.Addresses, ","), e.Host.Name, e.Policy.text(),
				strings.Join(e.Labels, ","))
		}
	})
}

// Find finds an endpoint by CONTAINER[/INTERFACE], of which the start of
// the container's id is enough.
func Find(ctx context.Context, inv *invocation.Invocation, name string) (*datapathv1.Endpoint, error) {
	all, err := List(ctx, inv)
	if err != nil {
		return nil, err
	}
	found, err := Match(all, name)
	if err == nil && found == nil {
		err = NotFound(name)
	}
	return found, err
}

// Match gives nil if no endpoint has the name.
func Match(all []*datapathv1.Endpoint, name string) (*datapathv1.Endpoint, error) {
	id, ifname, _ := strings.Cut(name, "/")
	if id == "" {
		return nil, invocation.Usagef("%q is not CONTAINER or CONTAINER/INTERFACE", name)
	}
	matches := func(exact bool) []*datapathv1.Endpoint {
		return slices.DeleteFunc(slices.Clone(all), func(e *datapathv1.Endpoint) bool {
			o := workload.OwnerOf(e.GetOwner())
			same := o.ContainerID == id || !exact && strings.HasPrefix(o.ContainerID, id)
			return !same || ifname != "" && o.Interface != ifname
		})
	}
	found := matches(true)
	if len(found) == 0 {
		found = matches(false)
	}
	switch len(found) {
	case 0:
		return nil, nil
	case 1:
		return found[0], nil
	}
	names := make([]string, 0, len(found))
	for _, e := range found {
		o := workload.OwnerOf(e.GetOwner())
		names = append(names, o.ContainerID+"/"+o.Interface)
	}
	return nil, invocation.Usagef("%q could be %s", name, strings.Join(names, " or "))
}

func printOne(ctx context.Context, inv *invocation.Invocation, name string) error {
	found, err := Find(ctx, inv, name)
	if err != nil {
		return err
	}
	e := shown(found)
	return inv.Show(e, func(w io.Writer) {
		output.Row(w, "Container", e.Owner.ContainerID)
		output.Row(w, "Interface", e.Owner.Interface+" "+e.Container.MAC)
		output.Row(w, "Manager", e.Manager)
		output.Row(w, "Network", e.Network)
		if e.Pod != nil {
			output.Row(w, "Pod", e.Pod.Namespace+"/"+e.Pod.Name+" "+e.Pod.UID)
		}
		output.Row(w, "State", e.State)
		output.Row(w, "Identity", e.Identity)
		output.Row(w, "Labels", strings.Join(e.Labels, " "))
		if e.FromPod {
			output.Row(w, "Labels from", "the Kubernetes pod")
		}
		output.Row(w, "Addresses", strings.Join(e.Addresses, " "))
		output.Row(w, "Gateways", strings.Join(e.Gateways, " "))
		if len(e.SourceRouted) > 0 {
			output.Row(w, "Source-routed", strings.Join(e.SourceRouted, " "))
		}
		output.Row(w, "Device", e.Host.Name+" "+e.Host.MAC)
		output.Row(w, "MTU", e.MTU)
		output.Row(w, "Namespace", e.Namespace)
		output.Row(w, "Named ports", strings.Join(e.NamedPorts, " "))
		if len(e.HostPorts) > 0 {
			output.Row(w, "Host ports", strings.Join(e.HostPorts, " "))
		}
		if e.LeaveSockets {
			output.Row(w, "Sockets", "left as they are; packets are led to services")
		}
		output.Row(w, "Endpoint ID", e.ID)
		if p := e.Policy; p != nil {
			output.Row(w, "Policy", p.text())
			if p.AuditUntil != nil {
				output.Row(w, "Audit mode", "until "+output.Moment(*p.AuditUntil))
			}
			output.Row(w, "Egress table", verdict.TableText(p.EgressTable))
			output.Row(w, "Ingress table", verdict.TableText(p.IngressTable))
			output.Row(w, "Epoch", p.Epoch)
			if p.Refusal != "" {
				output.Row(w, "Refused", p.Refusal)
			}
		}
		output.Row(w, "Age", output.Since(e.Created))
	})
}

// hostPort is "8080=80/tcp", "192.0.2.1:8080=80/tcp".
func hostPort(m *datapathv1.PortMapping) string {
	asked := portText(m.GetHostPort())
	if m.GetHostIp() != "" {
		asked = net.JoinHostPort(output.Printable(m.GetHostIp()), asked)
	}
	return asked + "=" + portText(m.GetContainerPort()) + "/" + output.Enum(m.GetProtocol(), "PROTOCOL_")
}

func namedPort(p *workloadv1.NamedPort) string {
	return p.GetName() + "=" + portText(p.GetPort()) + "/" + output.Enum(p.GetProtocol(), "PROTOCOL_")
}

func portText(p uint32) string { return strconv.FormatUint(uint64(p), 10) }

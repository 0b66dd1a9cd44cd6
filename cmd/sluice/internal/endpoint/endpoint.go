// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package endpoint shows, changes and deletes endpoints, and finds an endpoint by a name on the command line.
package endpoint

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Command is `endpoint`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.WithAlias("ep", invocation.Group("endpoint",
		"Show, check, change and delete endpoints: the network attachments of containers",
		&cobra.Command{
			Use: "list", Short: "List the endpoints of this node", Args: invocation.Args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return printList(cmd.Context(), inv) },
		},
		&cobra.Command{
			Use: "get CONTAINER|POD", Short: "Show an endpoint", Long: "Show an endpoint.\n\n" + NameHelp,
			Args: invocation.Args(1, NameForms),
			RunE: func(cmd *cobra.Command, a []string) error { return printOne(cmd.Context(), inv, a[0]) },
		},
		labelCommand(inv),
		auditModeCommand(inv),
		checkCommand(inv),
		deleteCommand(inv),
		eventsCommand(inv),
		historyCommand(inv),
	))
}

// columns are the columns of `endpoint list`.
var columns = []output.Column[*datapathv1.Endpoint]{
	{Header: "CONTAINER", Cell: func(e *datapathv1.Endpoint) any { return workload.OwnerOf(e.GetOwner()) }},
	{Header: "POD", Cell: func(e *datapathv1.Endpoint) any { return PodText(e.GetPod()) }},
	{Header: "STATE", Cell: func(e *datapathv1.Endpoint) any { return stateText(e) }},
	{Header: "ADDRESSES", Cell: func(e *datapathv1.Endpoint) any { return strings.Join(e.GetAddresses(), ",") }},
	{Header: "POLICY", Cell: func(e *datapathv1.Endpoint) any { return policyText(e.GetPolicy()) }},
	{Header: "IDENTITY", Cell: func(e *datapathv1.Endpoint) any { return identityText(e) }},
	{Header: "ID", Wide: true, Cell: func(e *datapathv1.Endpoint) any { return e.GetEndpointIndex() }},
	{Header: "DEVICE", Wide: true, Cell: func(e *datapathv1.Endpoint) any { return e.GetHostInterface().GetName() }},
	{Header: "LABELS", Wide: true, Cell: func(e *datapathv1.Endpoint) any {
		return strings.Join(workload.LabelTexts(e.GetLabels()), ",")
	}},
}

// PodText returns NAMESPACE/NAME of a pod for a column POD, only the name if the runtime reported no namespace, and an
// empty string for nil.
func PodText(p *workloadv1.PodReference) string {
	if p.GetNamespace() == "" {
		return p.GetName()
	}
	return workload.PodText(p)
}

// Pods returns the pods of the endpoints by owner. Endpoints without a pod are missing.
func Pods(endpoints []*datapathv1.Endpoint) map[workload.Owner]*workloadv1.PodReference {
	pods := map[workload.Owner]*workloadv1.PodReference{}
	for _, e := range endpoints {
		if e.GetPod() != nil {
			pods[workload.OwnerOf(e.GetOwner())] = e.GetPod()
		}
	}
	return pods
}

func stateText(e *datapathv1.Endpoint) string { return output.Enum(e.GetState(), "ENDPOINT_STATE_") }

func identityText(e *datapathv1.Endpoint) string {
	return workload.IdentityText(e.GetIdentity(), workload.LabelTexts(e.GetLabels()))
}

// policyText describes the policy of an endpoint; empty if the datapath does not report one.
func policyText(p *datapathv1.EndpointPolicy) string {
	egress, ingress := p.GetEgressTable(), p.GetIngressTable()
	switch {
	case p == nil:
		return ""
	case p.GetRefusal() != "" && p.GetAudit():
		return fmt.Sprintf("revision %d, newer refused, audit only", p.GetRevision())
	case p.GetRefusal() != "":
		return fmt.Sprintf("revision %d, newer refused", p.GetRevision())
	case p.GetAudit():
		return fmt.Sprintf("revision %d, audit only", p.GetRevision())
	case egress == verdict.TableWaiting || ingress == verdict.TableWaiting:
		return "waiting for a policy"
	case egress == verdict.TableAllow && ingress == verdict.TableAllow:
		return "none, all is allowed"
	default:
		return fmt.Sprintf("revision %d", p.GetRevision())
	}
}

// List returns all endpoints of the node.
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
	all, err := List(ctx, inv)
	if err != nil {
		return err
	}
	return inv.Show(message.List(all), func(w io.Writer) {
		output.FoldedTable(w, inv.Wide(), columns, all)
	})
}

// Find asks the datapath for the endpoint of a container or a pod, in the forms of Name.
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

func printOne(ctx context.Context, inv *invocation.Invocation, name string) error {
	e, err := Find(ctx, inv, name)
	if err != nil {
		return err
	}
	policies := ""
	if inv.Format != "json" {
		policies = selecting(ctx, inv, e)
	}
	return inv.Show(message.Of(e), func(w io.Writer) { describe(w, e, policies, inv.Wide()) })
}

// selectingTimeout limits the wait for the policy service, whose answer is optional.
const selectingTimeout = 3 * time.Second

// selecting returns the policies that select an endpoint.
func selecting(ctx context.Context, inv *invocation.Invocation, e *datapathv1.Endpoint) string {
	if e.GetIdentity() == 0 {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, selectingTimeout)
	defer cancel()
	var names []string
	err := invocation.Each(ctx, inv, invocation.Policy, policyv1.PolicyServiceClient.ListPolicies,
		&policyv1.ListPoliciesRequest{Subject: e.GetIdentity()}, func(m *policyv1.ListPoliciesResponse) {
			if k := m.GetPolicy().GetKey(); k.GetName() != "" {
				names = append(names, policykind.KeyText(k))
			}
		})
	if err != nil {
		return "unknown: sluice-policy does not answer"
	}
	return strings.Join(names, ", ")
}

func describe(w io.Writer, e *datapathv1.Endpoint, policies string, wide bool) {
	host := e.GetHostInterface()
	output.Row(w, "Container", e.GetOwner().GetContainerId())
	output.Row(w, "Interface", e.GetOwner().GetInterfaceName()+" "+e.GetContainerInterface().GetMac())
	output.Row(w, "Manager", e.GetManager())
	output.Row(w, "Network", e.GetNetwork())
	if p := e.GetPod(); p != nil {
		output.Row(w, "Pod", workload.PodText(p)+" "+p.GetUid())
	}
	output.Row(w, "State", stateText(e))
	output.Row(w, "Identity", e.GetIdentity())
	labels := workload.LabelTexts(e.GetLabels())
	if wide {
		output.Row(w, "Labels", strings.Join(labels, " "))
	} else {
		output.Row(w, "Labels", workload.Text(labels))
	}
	if e.GetLabelsFromPod() {
		output.Row(w, "Labels from", "the Kubernetes pod")
	}
	output.Row(w, "Addresses", strings.Join(e.GetAddresses(), " "))
	output.Row(w, "Gateways", strings.Join(e.GetGateways(), " "))
	if len(e.GetSourceRouted()) > 0 {
		output.Row(w, "Source-routed", strings.Join(e.GetSourceRouted(), " "))
	}
	output.Row(w, "Device", host.GetName()+" "+host.GetMac())
	output.Row(w, "MTU", e.GetMtu())
	output.Row(w, "Namespace", e.GetNetworkNamespace())
	output.Row(w, "Named ports", portsText(e))
	if all := e.GetPortMappings(); len(all) > 0 {
		texts := make([]string, len(all))
		for i, m := range all {
			texts[i] = hostPort(m)
		}
		output.Row(w, "Host ports", strings.Join(texts, " "))
	}
	if e.GetLeaveSockets() {
		output.Row(w, "Sockets", "not translated; packets to services are translated instead")
	}
	output.Row(w, "Endpoint ID", e.GetEndpointIndex())
	if p := e.GetPolicy(); p != nil {
		output.Row(w, "Policy", policyText(p))
		output.Row(w, "Policies", policies)
		if p.GetAuditExpireTime() != nil {
			output.Row(w, "Audit mode", "until "+output.Moment(p.GetAuditExpireTime().AsTime()))
		}
		output.Row(w, "Egress table", verdict.TableText(p.GetEgressTable()))
		output.Row(w, "Ingress table", verdict.TableText(p.GetIngressTable()))
		output.Row(w, "Epoch", p.GetEpoch())
		if p.GetRefusal() != "" {
			output.Row(w, "Refused", p.GetRefusal())
		}
	}
	output.Row(w, "Age", output.Since(output.When(e.GetCreateTime())))
}

// hostPort returns "8080=80/tcp" or "192.0.2.1:8080=80/tcp".
func hostPort(m *datapathv1.PortMapping) string {
	asked := portText(m.GetHostPort())
	if m.GetHostIp() != "" {
		asked = net.JoinHostPort(output.Printable(m.GetHostIp()), asked)
	}
	return asked + "=" + portText(m.GetContainerPort()) + "/" + output.Enum(m.GetProtocol(), "PROTOCOL_")
}

// portsText returns "http=80/tcp dns=53/udp".
func portsText(e *datapathv1.Endpoint) string {
	texts := make([]string, len(e.GetNamedPorts()))
	for i, p := range e.GetNamedPorts() {
		texts[i] = p.GetName() + "=" + portText(p.GetPort()) + "/" + output.Enum(p.GetProtocol(), "PROTOCOL_")
	}
	return strings.Join(texts, " ")
}

func portText(p uint32) string { return strconv.FormatUint(uint64(p), 10) }

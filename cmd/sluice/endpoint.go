// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func (c *command) endpointCommand() *cobra.Command {
	return group("endpoint", "Show the connected containers",
		&cobra.Command{
			Use: "list", Short: "List every endpoint of the node", Args: args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return c.endpointList(cmd.Context()) },
		},
		&cobra.Command{
			Use: "get CONTAINER[/INTERFACE]", Short: "Show one endpoint; the start of the container's id is enough", Args: args(1, "a container's id"),
			RunE: func(cmd *cobra.Command, a []string) error { return c.endpointGet(cmd.Context(), a[0]) },
		},
	)
}

// endpoint is what is shown of one.
type endpoint struct {
	Owner     owner    `json:"owner"`
	Manager   string   `json:"manager,omitempty"`
	Network   string   `json:"network,omitempty"`
	Pod       *podRef  `json:"pod,omitempty"`
	Slot      uint32   `json:"slot"`
	State     string   `json:"state"`
	Identity  uint32   `json:"identity"`
	Labels    []string `json:"labels"`
	Addresses []string `json:"addresses"`
	Gateways  []string `json:"gateways,omitempty"`
	Host      device   `json:"hostInterface"`
	Container device   `json:"containerInterface"`
	Namespace string   `json:"networkNamespace"`
	MTU       uint32   `json:"mtu"`
	// SourceRouted are addresses whose family has its default routes by another
	// interface of the container.
	SourceRouted []string   `json:"sourceRouted,omitempty"`
	NamedPorts   []string   `json:"namedPorts,omitempty"`
	Created      *time.Time `json:"createTime,omitempty"`
	// Policy is what judges its packets; nil from a datapath that knows none.
	Policy *endpointPolicy `json:"policy,omitempty"`
}

type podRef struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
}

type endpointPolicy struct {
	Revision     uint64 `json:"revision"`
	EgressTable  uint32 `json:"egressTable"`
	IngressTable uint32 `json:"ingressTable"`
	Generation   uint32 `json:"generation"`
	Refusal      string `json:"refusal,omitempty"`
	Audit        bool   `json:"audit,omitempty"`
}

// text is the state of an endpoint's policy, for a table.
func (p *endpointPolicy) text() string {
	switch {
	case p == nil:
		return ""
	case p.Refusal != "":
		return fmt.Sprintf("revision %d, newer refused", p.Revision)
	case p.Audit:
		return fmt.Sprintf("revision %d, audit only", p.Revision)
	case p.EgressTable == tableWaiting || p.IngressTable == tableWaiting:
		return "waits for a policy"
	case p.EgressTable == tableAllow && p.IngressTable == tableAllow:
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

func endpointOf(e *datapathv1.Endpoint) endpoint {
	dev := func(d *datapathv1.Interface) device {
		return device{Name: d.GetName(), Index: d.GetIndex(), MAC: macText(d.GetMac())}
	}
	shown := endpoint{
		Owner: ownerOf(e.GetOwner()), Manager: e.GetManager(), Network: e.GetNetwork(), Slot: e.GetSlot(), State: enum(e.GetState(), "ENDPOINT_STATE_"), Identity: e.GetIdentity(),
		Labels: labelTexts(e.GetLabels()), Addresses: addressTexts(e.GetAddresses()), Gateways: addressTexts(e.GetGateways()),
		Host: dev(e.GetHostInterface()), Container: dev(e.GetContainerInterface()),
		SourceRouted: addressTexts(e.GetSourceRouted()),
		Namespace:    e.GetNetworkNamespace(), MTU: e.GetMtu(), Created: when(e.GetCreateTime()),
	}
	if p := e.GetPod(); p != nil {
		shown.Pod = &podRef{p.GetNamespace(), p.GetName(), p.GetUid()}
	}
	if p := e.GetPolicy(); p != nil {
		shown.Policy = &endpointPolicy{
			Revision: p.GetRevision(), EgressTable: p.GetEgressTable(), IngressTable: p.GetIngressTable(),
			Generation: p.GetGeneration(), Refusal: p.GetRefusal(), Audit: p.GetAudit(),
		}
	}
	for _, p := range e.GetNamedPorts() {
		shown.NamedPorts = append(shown.NamedPorts, namedPort(p))
	}
	return shown
}

func (c *command) endpoints(ctx context.Context) ([]*datapathv1.Endpoint, error) {
	conn, err := c.dial("datapath")
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	stream, err := datapathv1.NewDatapathServiceClient(conn).ListEndpoints(ctx, &datapathv1.ListEndpointsRequest{})
	if err != nil {
		return nil, err
	}
	var all []*datapathv1.Endpoint
	if err := each(stream, func(m *datapathv1.ListEndpointsResponse) { all = append(all, m.GetEndpoint()) }); err != nil {
		return nil, err
	}
	return all, nil
}

func (c *command) endpointList(ctx context.Context) error {
	found, err := c.endpoints(ctx)
	if err != nil {
		return err
	}
	all := make([]endpoint, 0, len(found))
	for _, e := range found {
		all = append(all, endpointOf(e))
	}
	return c.show(all, func(w io.Writer) {
		row(w, "CONTAINER", "SLOT", "STATE", "IDENTITY", "ADDRESSES", "DEVICE", "POLICY", "LABELS")
		for _, e := range all {
			row(w, e.Owner, e.Slot, e.State, e.Identity, strings.Join(e.Addresses, ","), e.Host.Name, e.Policy.text(), strings.Join(e.Labels, ","))
		}
	})
}

// findEndpoint finds an endpoint by CONTAINER[/INTERFACE], of which the start of
// the container's id is enough.
func (c *command) findEndpoint(ctx context.Context, name string) (*datapathv1.Endpoint, error) {
	all, err := c.endpoints(ctx)
	if err != nil {
		return nil, err
	}
	found, err := matchEndpoint(all, name)
	if err == nil && found == nil {
		err = errors.New("no endpoint of container " + printable(name) + "; see `sluice endpoint list`")
	}
	return found, err
}

// matchEndpoint gives nil if no endpoint has the name.
func matchEndpoint(all []*datapathv1.Endpoint, name string) (*datapathv1.Endpoint, error) {
	id, ifname, _ := strings.Cut(name, "/")
	if id == "" {
		return nil, usagef("%q is not CONTAINER or CONTAINER/INTERFACE", name)
	}
	matches := func(exact bool) []*datapathv1.Endpoint {
		return slices.DeleteFunc(slices.Clone(all), func(e *datapathv1.Endpoint) bool {
			o := ownerOf(e.GetOwner())
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
		o := ownerOf(e.GetOwner())
		names = append(names, o.ContainerID+"/"+o.Interface)
	}
	return nil, usagef("%q could be %s", name, strings.Join(names, " or "))
}

func (c *command) endpointGet(ctx context.Context, name string) error {
	found, err := c.findEndpoint(ctx, name)
	if err != nil {
		return err
	}
	e := endpointOf(found)
	return c.show(e, func(w io.Writer) {
		row(w, "Container", e.Owner.ContainerID)
		row(w, "Interface", e.Owner.Interface+" "+e.Container.MAC)
		row(w, "Manager", orDash(e.Manager))
		row(w, "Network", orDash(e.Network))
		if e.Pod != nil {
			row(w, "Pod", e.Pod.Namespace+"/"+e.Pod.Name+" "+e.Pod.UID)
		}
		row(w, "State", e.State)
		row(w, "Identity", e.Identity)
		row(w, "Labels", strings.Join(e.Labels, " "))
		row(w, "Addresses", strings.Join(e.Addresses, " "))
		row(w, "Gateways", strings.Join(e.Gateways, " "))
		if len(e.SourceRouted) > 0 {
			row(w, "Source-routed", strings.Join(e.SourceRouted, " "))
		}
		row(w, "Device", e.Host.Name+" "+e.Host.MAC)
		row(w, "MTU", e.MTU)
		row(w, "Namespace", e.Namespace)
		row(w, "Named ports", strings.Join(e.NamedPorts, " "))
		row(w, "Slot", e.Slot)
		if p := e.Policy; p != nil {
			row(w, "Policy", p.text())
			row(w, "Egress table", tableText(p.EgressTable))
			row(w, "Ingress table", tableText(p.IngressTable))
			row(w, "Generation", p.Generation)
			if p.Refusal != "" {
				row(w, "Refused", p.Refusal)
			}
		}
		row(w, "Age", since(e.Created))
	})
}

func namedPort(p *workloadv1.NamedPort) string {
	return p.GetName() + "=" + portText(p.GetPort()) + "/" + enum(p.GetProtocol(), "PROTOCOL_")
}

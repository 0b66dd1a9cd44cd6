// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func checkCommand(inv *invocation.Invocation) *cobra.Command {
	settle := 2 * time.Second
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Compare allocated addresses with live endpoints and with the cluster",
		Long: `Compare the addresses that ipam has allocated with the endpoints of the datapath and, if the
node is registered in the cluster, with the published addresses. Because containers start
and end during the comparison, the command compares twice and shows only differences that
remain. The exit code is 1 if there are differences. Nothing is changed.

  leaked       allocated to an owner without an endpoint
  missing      an endpoint uses it, but it is not allocated
  held-twice   two owners have it
  unpublished  an endpoint uses it, but the cluster does not have it
  published    the cluster has it for this node, but no endpoint uses it`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error { return check(cmd.Context(), inv, settle) },
	}
	cmd.Flags().DurationVar(&settle, "settle", settle, "how long to wait before differences are checked again")
	return cmd
}

// finding describes a difference between the services about one address.
type finding struct {
	Kind    string                                `json:"kind"`
	Address string                                `json:"address"`
	Owner   message.One[*workloadv1.Owner]        `json:"owner,omitzero"`
	Pod     message.One[*workloadv1.PodReference] `json:"pod,omitzero"` // of the owner's endpoint
	Text    string                                `json:"text"`
}

func (f finding) ofWhom() string {
	if f.Owner.IsZero() {
		return ""
	}
	return workload.OwnerOf(f.Owner.Message).String()
}

// columns are the columns of the findings.
var columns = []output.Column[finding]{
	{Header: "FINDING", Cell: func(f finding) any { return f.Kind }},
	{Header: "ADDRESS", Cell: func(f finding) any { return f.Address }},
	{Header: "CONTAINER", Cell: func(f finding) any { return f.ofWhom() }},
	{Header: "POD", Cell: func(f finding) any { return endpoint.PodText(f.Pod.Message) }},
	{Header: "WHAT", Cell: func(f finding) any { return f.Text }},
}

// Kinds of findings.
const (
	leaked      = "leaked"
	missing     = "missing"
	heldTwice   = "held-twice"
	unpublished = "unpublished"
	published   = "published"
)

// seen contains the answers of the services.
type seen struct {
	allocations []*ipamv1.Allocation
	endpoints   []*datapathv1.Endpoint
	cluster     *clusterView // nil if the node is not registered in a cluster
}

// clusterView contains the cluster's mappings of addresses to nodes.
type clusterView struct {
	node     string
	mappings map[string]string // address → node that has it; for the addresses of this node and of its endpoints
}

// report is the output of `ipam check -o json`.
type report struct {
	Allocations int       `json:"allocations"`
	Endpoints   int       `json:"endpoints"`
	Cluster     bool      `json:"comparedWithCluster"`
	Findings    []finding `json:"findings"`
}

func check(ctx context.Context, inv *invocation.Invocation, settle time.Duration) error {
	if settle < 0 {
		return invocation.Usagef("--settle: %s is negative", settle)
	}
	s, err := listAll(ctx, inv)
	if err != nil {
		return err
	}
	found := s.compare()
	if len(found) > 0 {
		select {
		case <-time.After(settle):
		case <-ctx.Done():
			return ctx.Err()
		}
		if s, err = listAll(ctx, inv); err != nil {
			return err
		}
		found = lasting(found, s.compare())
	}
	r := report{len(s.allocations), len(s.endpoints), s.cluster != nil, found}
	if err := inv.Show(r, func(w io.Writer) { r.table(w, inv.Wide()) }); err != nil {
		return err
	}
	if len(found) > 0 {
		return invocation.ErrReported
	}
	return nil
}

// lasting returns the findings that both comparisons have. The other differences were temporary.
func lasting(first, second []finding) []finding {
	same := func(a, b finding) bool {
		return a.Kind == b.Kind && a.Address == b.Address && proto.Equal(a.Owner.Message, b.Owner.Message)
	}
	return slices.DeleteFunc(second, func(b finding) bool {
		return !slices.ContainsFunc(first, func(a finding) bool { return same(a, b) })
	})
}

func (r report) table(w io.Writer, wide bool) {
	if len(r.Findings) > 0 {
		output.FoldedTable(w, wide, columns, r.Findings)
		fmt.Fprintln(w)
	}
	with := ""
	if !r.Cluster {
		with = "; the cluster was not asked, because the node is not registered or etcd is unavailable"
	}
	fmt.Fprintf(w, "Compared %s and %s%s. Findings: %d.\n", output.Plural(r.Allocations, "allocation", "allocations"),
		output.Plural(r.Endpoints, "endpoint", "endpoints"), with, len(r.Findings))
}

// listAll asks ipam before the datapath. The datapath records an endpoint before it confirms the endpoint's addresses.
// So if ipam lists an owner with confirmed addresses and the later list of endpoints lacks this owner, the addresses
// have leaked, or the endpoint has just been deleted.
func listAll(ctx context.Context, inv *invocation.Invocation) (s seen, err error) {
	if s.allocations, err = allocations(ctx, inv); err != nil {
		return s, err
	}
	if s.endpoints, err = endpoint.List(ctx, inv); err != nil {
		return s, err
	}
	s.cluster, err = s.askCluster(ctx, inv)
	return s, err
}

func allocations(ctx context.Context, inv *invocation.Invocation) (all []*ipamv1.Allocation, err error) {
	err = invocation.Each(ctx, inv, invocation.IPAM, ipamv1.IPAMServiceClient.ListAllocations,
		&ipamv1.ListAllocationsRequest{}, func(m *ipamv1.ListAllocationsResponse) { all = append(all, m.GetAllocation()) })
	return all, err
}

// askCluster returns the cluster's mappings of all addresses; nil if this node is not registered.
func (s *seen) askCluster(ctx context.Context, inv *invocation.Invocation) (*clusterView, error) {
	c := &clusterView{mappings: map[string]string{}}
	err := invocation.Each(ctx, inv, invocation.Cluster, identityv1.ClusterServiceClient.ListNodes,
		&identityv1.ListNodesRequest{}, func(m *identityv1.ListNodesResponse) {
			if m.GetLocal() && m.GetState() != identityv1.NodeState_NODE_STATE_UNSPECIFIED {
				c.node = m.GetNode().GetName()
			}
		})
	if err != nil || c.node == "" {
		return nil, err
	}
	err = invocation.Each(ctx, inv, invocation.Cluster, identityv1.ClusterServiceClient.ListIPMappings,
		&identityv1.ListIPMappingsRequest{Node: c.node}, func(m *identityv1.ListIPMappingsResponse) {
			for _, x := range m.GetMappings() {
				if p, err := netip.ParsePrefix(x.GetPrefix()); err == nil {
					c.mappings[p.Addr().String()] = x.GetNode()
				}
			}
		})
	if err != nil {
		return nil, err
	}
	conn, client, err := invocation.Connect(inv, invocation.Cluster)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ask := func(address string) error {
		if _, asked := c.mappings[address]; asked {
			return nil
		}
		r, err := client.GetIPMapping(ctx, &identityv1.GetIPMappingRequest{Address: address})
		if err != nil && status.Code(err) != codes.NotFound {
			return err
		}
		c.mappings[address] = r.GetMapping().GetNode()
		return nil
	}
	for _, a := range s.allocations {
		for _, x := range a.GetAddresses() {
			if err := ask(x.GetAddress()); err != nil {
				return nil, err
			}
		}
	}
	for _, e := range s.endpoints {
		for _, x := range e.GetAddresses() {
			if err := ask(x); err != nil {
				return nil, err
			}
		}
	}
	return c, nil
}

// compare returns the differences, sorted by kind and address.
func (s *seen) compare() []finding {
	found, pods := []finding{}, endpoint.Pods(s.endpoints)
	add := func(kind, address string, owner *workloadv1.Owner, format string, args ...any) {
		found = append(found, finding{
			Kind: kind, Address: address, Owner: message.One[*workloadv1.Owner]{Message: owner},
			Pod:  message.One[*workloadv1.PodReference]{Message: pods[workload.OwnerOf(owner)]},
			Text: fmt.Sprintf(format, args...),
		})
	}
	live := map[workload.Owner]bool{}
	user := map[string]workload.Owner{} // address → owner of the endpoint that uses it
	for _, e := range s.endpoints {
		o := workload.OwnerOf(e.GetOwner())
		live[o] = true
		for _, a := range e.GetAddresses() {
			if other, ok := user[a]; ok && other != o {
				add(heldTwice, a, e.GetOwner(), "the endpoint %s also uses it", other)
			}
			user[a] = o
		}
	}
	holder := map[string]workload.Owner{} // address → owner that it is allocated to
	for _, a := range s.allocations {
		o := workload.OwnerOf(a.GetOwner())
		confirmed := a.GetState() == ipamv1.AllocationState_ALLOCATION_STATE_CONFIRMED
		for _, x := range a.GetAddresses() {
			address := x.GetAddress()
			holder[address] = o
			switch who, used := user[address]; {
			case used && who != o:
				add(heldTwice, address, a.GetOwner(), "allocated to this container, but the endpoint %s uses it", who)
			case confirmed && a.GetManager() == "" && !live[o]:
				add(leaked, address, a.GetOwner(), "confirmed, but no endpoint uses it; `sluice ipam release %s` releases it",
					address)
			}
		}
	}
	for _, e := range s.endpoints {
		for _, a := range e.GetAddresses() {
			if _, held := holder[a]; !held {
				add(missing, a, e.GetOwner(), "the endpoint uses it, but it is not allocated; "+
					"the datapath allocates it again after a restart of sluice-ipam")
			}
		}
	}
	if s.cluster != nil {
		s.comparePublished(user, add)
	}
	slices.SortStableFunc(found, func(a, b finding) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), compareAddresses(a.Address, b.Address),
			cmp.Compare(a.ofWhom(), b.ofWhom()))
	})
	return found
}

func (s *seen) comparePublished(
	user map[string]workload.Owner, add func(kind, address string, owner *workloadv1.Owner, format string, args ...any),
) {
	c := s.cluster
	for _, e := range s.endpoints {
		for _, a := range e.GetAddresses() {
			switch node := c.mappings[a]; {
			case node == "" && e.GetState() == datapathv1.EndpointState_ENDPOINT_STATE_READY:
				add(unpublished, a, e.GetOwner(), "other nodes do not know its identity; see `sluice ip get %s`", a)
			case node != "" && node != c.node:
				add(heldTwice, a, e.GetOwner(), "in the cluster it belongs to node %s", node)
			}
		}
	}
	for a, node := range c.mappings {
		if _, used := user[a]; node == c.node && !used {
			add(published, a, nil, "the cluster has it for this node, but no endpoint uses it")
		}
	}
}

// compareAddresses compares addresses numerically.
func compareAddresses(a, b string) int {
	x, errX := netip.ParseAddr(a)
	y, errY := netip.ParseAddr(b)
	if errX != nil || errY != nil {
		return strings.Compare(a, b)
	}
	return x.Compare(y)
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package shares shows how much of the shared limits each tenant uses.
package shares

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
)

// Command is `shares`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var exceeded bool
	cmd := &cobra.Command{
		Use:   "shares [TENANT]",
		Short: "Show how tenants and endpoints share the limits of the node",
		Long: `Show the demand and the share of each tenant for each shared limit. A second table shows
how much of the limits of the eBPF programs each endpoint of the node uses.

A tenant is a namespace, or all namespaces with the same value of the tenant label. TENANT
is this value, or the name of a namespace without the label. If the
demand exceeds the share, the newest objects of the tenant are not accepted as written.
MAY USE is the amount that the tenant could use when shares were last computed, at most
10 s ago; "-" means that a source was never listed completely.

The second table lists endpoints, and senders outside of the node, that use connections,
translations, fragments, affinity, events or answers, or that were refused some. MAY USE is
the amount that the endpoint may use now; "-" means that there is no limit. REFUSED counts
packets, events and answers above the share since the endpoint was created. With TENANT, the
table lists the pods of the tenant.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &sharesv1.ListSharesRequest{}
			if len(args) > 0 {
				req.Tenant = args[0]
			}
			return list(cmd.Context(), inv, req, exceeded)
		},
	}
	cmd.Flags().BoolVar(&exceeded, "exceeded", false,
		"only tenants that exceed their share, and endpoints with refused packets, events or answers")
	return cmd
}

// Limit is a limit of a process with the shares of its tenants or endpoints.
type Limit struct {
	Process string
	*sharesv1.ListSharesResponse
}

// MarshalJSON implements json.Marshaler.
func (l *Limit) MarshalJSON() ([]byte, error) {
	return message.Of(l.ListSharesResponse, message.Fact{Key: "process", Value: l.Process}).MarshalJSON()
}

// UnmarshalJSON implements json.Unmarshaler.
func (l *Limit) UnmarshalJSON(data []byte) error {
	var of struct{ Process string }
	if err := json.Unmarshal(data, &of); err != nil {
		return err
	}
	l.Process, l.ListSharesResponse = of.Process, &sharesv1.ListSharesResponse{}
	return message.Unmarshal(data, l.ListSharesResponse)
}

func list(ctx context.Context, inv *invocation.Invocation, req *sharesv1.ListSharesRequest, exceeded bool) error {
	var all []*Limit
	var errs []error
	for _, process := range invocation.Shares {
		var last *Limit
		err := invocation.Each(ctx, inv, process, sharesv1.SharesServiceClient.ListShares, req,
			func(m *sharesv1.ListSharesResponse) {
				if exceeded {
					m.Tenants = slices.DeleteFunc(m.GetTenants(), func(t *sharesv1.TenantShare) bool {
						return t.GetAdmitted() >= t.GetAsked()
					})
					m.Endpoints = slices.DeleteFunc(m.GetEndpoints(), func(e *sharesv1.EndpointShare) bool {
						return e.GetRefused() == 0
					})
				}
				if last != nil && last.GetLimit().GetName() == m.GetLimit().GetName() {
					last.Tenants = append(last.Tenants, m.GetTenants()...)
					last.Endpoints = append(last.Endpoints, m.GetEndpoints()...)
					return
				}
				last = &Limit{process.Name(), m}
				all = append(all, last)
			})
		switch status.Code(err) {
		case codes.OK:
		case codes.Unimplemented:
			errs = append(errs, fmt.Errorf("sluice-%s is of a version without shares", process.Name()))
		default:
			errs = append(errs, err)
		}
	}
	if len(all) == 0 && len(errs) > 0 {
		return errors.Join(errs...)
	}
	return errors.Join(append([]error{inv.Show(all, func(w io.Writer) { table(w, all) })}, errs...)...)
}

// Columns are the headers of Rows.
var Columns = []any{"LIMIT", "SIZE", "TENANT", "ASKS FOR", "HAS", "GUARANTEED", "MAY USE"}

func table(w io.Writer, limits []*Limit) {
	output.Row(w, Columns...)
	for _, x := range limits {
		for _, row := range x.Rows() {
			output.Row(w, row...)
		}
	}
	some := false
	for _, x := range limits {
		for _, row := range x.EndpointRows() {
			if !some {
				fmt.Fprintln(w)
				output.Row(w, EndpointColumns...)
				some = true
			}
			output.Row(w, row...)
		}
	}
}

// EndpointColumns are the headers of EndpointRows.
var EndpointColumns = []any{"LIMIT", "SIZE", "ENDPOINT", "HAS", "GUARANTEED", "MAY USE", "REFUSED"}

// EndpointRows returns the endpoints of the limit as rows of a table.
func (l *Limit) EndpointRows() (rows [][]any) {
	for _, e := range l.GetEndpoints() {
		rows = append(rows, []any{
			l.Process + "/" + l.GetLimit().GetName(), number(l.GetLimit().GetSize()), endpointText(e),
			number(e.GetUsed()), unlessNone(e.GetGuarantee()),
			unlessNone(e.GetMost()), number(e.GetRefused()),
		})
	}
	return rows
}

func endpointText(e *sharesv1.EndpointShare) string {
	switch {
	case e.GetPod() != nil:
		return "pod " + workload.PodText(e.GetPod())
	case e.GetOwner() != nil:
		return "container " + workload.OwnerOf(e.GetOwner()).String()
	}
	return output.Enum(e.GetKind(), "ENDPOINT_KIND_")
}

func unlessNone(n uint64) string {
	if n == 0 {
		return ""
	}
	return number(n)
}

// Rows returns the limit and its tenants as rows of a table.
func (l *Limit) Rows() [][]any {
	if l.GetLimit().GetByEndpoint() {
		return nil
	}
	name, size := l.Process+"/"+l.GetLimit().GetName(), number(l.GetLimit().GetSize())
	rows := [][]any{{name, size, "all", number(l.GetLimit().GetAsked()), number(l.GetLimit().GetUsed()), "", ""}}
	for _, t := range l.GetTenants() {
		rows = append(rows, []any{
			name, size, tenantText(t), number(t.GetAsked()), number(t.GetAdmitted()), number(t.GetGuarantee()),
			unlessNone(t.GetAllotment()),
		})
	}
	return rows
}

func tenantText(t *sharesv1.TenantShare) string {
	switch t.GetKind() {
	case sharesv1.TenantKind_TENANT_KIND_LABELLED:
		return t.GetName()
	case sharesv1.TenantKind_TENANT_KIND_NAMESPACE:
		return "namespace " + t.GetName()
	case sharesv1.TenantKind_TENANT_KIND_UNLABELLED:
		return "namespaces without a tenant"
	}
	return output.Enum(t.GetKind(), "TENANT_KIND_")
}

func number(n uint64) string { return strconv.FormatUint(n, 10) }

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package shares shows what tenants use of the limits that they share.
package shares

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
)

// Command is `shares`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var exceeded bool
	cmd := &cobra.Command{
		Use:   "shares [TENANT]",
		Short: "Show what tenants ask for and have of the limits that they share",
		Long: `Show what tenants ask for and have of the limits that they share.

A tenant is a namespace, or all namespaces with one value of the tenant label. TENANT is that value, or
the name of a namespace without the label. A tenant that has less than it asks for exceeds its share:
its newest objects are not in force as they were written. MAY USE is what the tenant could use when the
levels were last computed, at most 10 s ago; "-" means that a source was never complete.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &sharesv1.ListSharesRequest{}
			if len(args) > 0 {
				req.Tenant = args[0]
			}
			return list(cmd.Context(), inv, req, exceeded)
		},
	}
	cmd.Flags().BoolVar(&exceeded, "exceeded", false, "only tenants that ask for more than they have")
	return cmd
}

// Limits is what `shares -o json` prints.
type Limits struct {
	Items []*Limit `json:"items"`
}

// Limit is one limit of a process.
type Limit struct {
	Process string  `json:"process"`
	Name    string  `json:"limit"`
	Size    uint64  `json:"size"`
	Asked   uint64  `json:"asked"`
	Used    uint64  `json:"used"`
	Tenants []Share `json:"tenants"`
}

// Share is what a tenant has of a limit.
type Share struct {
	Kind      string `json:"kind"` // system, labelled, namespace or unlabelled
	Name      string `json:"name"`
	Asked     uint64 `json:"asked"`
	Admitted  uint64 `json:"admitted"`
	Guarantee uint64 `json:"guarantee"`
	Allotment uint64 `json:"allotment"`
}

func list(ctx context.Context, inv *invocation.Invocation, req *sharesv1.ListSharesRequest, exceeded bool) error {
	all := Limits{Items: []*Limit{}}
	var errs []error
	for _, process := range invocation.Shares {
		var last *Limit
		err := invocation.Each(ctx, inv, process, sharesv1.SharesServiceClient.ListShares, req,
			func(m *sharesv1.ListSharesResponse) {
				l := m.GetLimit()
				if last == nil || last.Name != l.GetName() {
					last = &Limit{
						Process: process.Name(), Name: l.GetName(), Size: l.GetSize(), Asked: l.GetAsked(), Used: l.GetUsed(),
						Tenants: []Share{},
					}
					all.Items = append(all.Items, last)
				}
				for _, t := range m.GetTenants() {
					if exceeded && t.GetAdmitted() >= t.GetAsked() {
						continue
					}
					last.Tenants = append(last.Tenants, Share{
						Kind: output.Enum(t.GetKind(), "TENANT_KIND_"), Name: t.GetName(), Asked: t.GetAsked(),
						Admitted: t.GetAdmitted(), Guarantee: t.GetGuarantee(), Allotment: t.GetAllotment(),
					})
				}
			})
		switch status.Code(err) {
		case codes.OK:
		case codes.Unimplemented:
			errs = append(errs, fmt.Errorf("sluice-%s is of a version that does not divide limits", process.Name()))
		default:
			errs = append(errs, err)
		}
	}
	if len(all.Items) == 0 && len(errs) > 0 {
		return errors.Join(errs...)
	}
	return errors.Join(append([]error{inv.Show(all, all.table)}, errs...)...)
}

// Columns are the names of the columns of Rows.
var Columns = []any{"LIMIT", "SIZE", "TENANT", "ASKS FOR", "HAS", "GUARANTEED", "MAY USE"}

func (l Limits) table(w io.Writer) {
	output.Row(w, Columns...)
	for _, x := range l.Items {
		for _, row := range x.Rows() {
			output.Row(w, row...)
		}
	}
}

// Rows are the limit and its tenants as rows of a table.
func (l *Limit) Rows() [][]any {
	name := l.Process + "/" + l.Name
	rows := [][]any{{name, number(l.Size), "all", number(l.Asked), number(l.Used), "", ""}}
	for _, t := range l.Tenants {
		allotment := ""
		if t.Allotment > 0 {
			allotment = number(t.Allotment)
		}
		rows = append(rows, []any{
			name, number(l.Size), t.text(), number(t.Asked), number(t.Admitted), number(t.Guarantee), allotment,
		})
	}
	return rows
}

func (s Share) text() string {
	switch s.Kind {
	case "labelled":
		return s.Name
	case "namespace":
		return "namespace " + s.Name
	case "unlabelled":
		return "namespaces without a tenant"
	}
	return s.Kind
}

func number(n uint64) string { return strconv.FormatUint(n, 10) }

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

// limits is what `shares -o json` prints.
type limits struct {
	Items []*limit `json:"items"`
}

// limit is one limit of a process.
type limit struct {
	Process string  `json:"process"`
	Name    string  `json:"limit"`
	Size    uint64  `json:"size"`
	Asked   uint64  `json:"asked"`
	Used    uint64  `json:"used"`
	Tenants []share `json:"tenants"`
}

// share is what a tenant has of a limit.
type share struct {
	Kind      string `json:"kind"` // system, labelled, namespace or unlabelled
	Name      string `json:"name"`
	Asked     uint64 `json:"asked"`
	Admitted  uint64 `json:"admitted"`
	Guarantee uint64 `json:"guarantee"`
	Allotment uint64 `json:"allotment"`
}

func list(ctx context.Context, inv *invocation.Invocation, req *sharesv1.ListSharesRequest, exceeded bool) error {
	all := limits{Items: []*limit{}}
	var errs []error
	for _, process := range invocation.Shares {
		var last *limit
		err := invocation.Each(ctx, inv, process, sharesv1.SharesServiceClient.ListShares, req,
			func(m *sharesv1.ListSharesResponse) {
				l := m.GetLimit()
				if last == nil || last.Name != l.GetName() {
					last = &limit{
						Process: process.Name(), Name: l.GetName(), Size: l.GetSize(), Asked: l.GetAsked(), Used: l.GetUsed(),
						Tenants: []share{},
					}
					all.Items = append(all.Items, last)
				}
				for _, t := range m.GetTenants() {
					if exceeded && t.GetAdmitted() >= t.GetAsked() {
						continue
					}
					last.Tenants = append(last.Tenants, share{
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

func (l limits) table(w io.Writer) {
	output.Row(w, "LIMIT", "SIZE", "TENANT", "ASKS FOR", "HAS", "GUARANTEED", "MAY USE")
	for _, x := range l.Items {
		name := x.Process + "/" + x.Name
		output.Row(w, name, number(x.Size), "all", number(x.Asked), number(x.Used), "", "")
		for _, t := range x.Tenants {
			allotment := ""
			if t.Allotment > 0 {
				allotment = number(t.Allotment)
			}
			output.Row(w, name, number(x.Size), t.text(), number(t.Asked), number(t.Admitted), number(t.Guarantee), allotment)
		}
	}
}

func (s share) text() string {
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

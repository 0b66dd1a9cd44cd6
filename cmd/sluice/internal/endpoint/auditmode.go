// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

func auditModeCommand(inv *invocation.Invocation) *cobra.Command {
	var node, validate bool
	lasts := time.Hour
	cmd := &cobra.Command{
		Use:   "audit-mode CONTAINER|POD on|off, or --node on|off",
		Short: "Forward and report packets that policies deny, for a limited time",
		Long: `Forward and report packets that policy would deny, for one container or, with --node, for
all containers of this node. This includes packets that layer 7 and DNS rules redirect:
they bypass the proxy, so no name is refused or learned. Packets that are dropped for other
reasons, such as spoofed addresses, are still dropped. The mode ends after --for; it survives
a restart of the datapath. "sluice observe --verdict audited" shows what would have been denied.

` + NameHelp,
		Example: "  sluice endpoint audit-mode shop/web on --for 10m\n  sluice endpoint audit-mode --node off",
		RunE: func(cmd *cobra.Command, a []string) error {
			name := ""
			if !node && len(a) > 0 {
				name, a = a[0], a[1:]
			}
			if len(a) != 1 || a[0] != "on" && a[0] != "off" || !node && name == "" {
				return invocation.Usagef("%s takes a container or a pod, or --node, and on or off", cmd.CommandPath())
			}
			on := a[0] == "on"
			if !on && cmd.Flags().Changed("for") {
				return invocation.Usagef("--for is only valid with on")
			}
			if lasts < time.Second {
				return invocation.Usagef("--for: %s is less than a second", lasts)
			}
			return setAuditMode(cmd.Context(), inv, name, on, lasts, validate)
		},
	}
	cmd.Flags().BoolVar(&node, "node", false, "all containers of this node, including new ones")
	cmd.Flags().DurationVar(&lasts, "for", lasts, "duration of the audit mode, at most 720h")
	invocation.ValidateFlag(cmd, &validate, "check the request; change nothing")
	return cmd
}

func setAuditMode(
	ctx context.Context, inv *invocation.Invocation, name string, on bool, lasts time.Duration, validate bool,
) error {
	req := &datapathv1.SetAuditModeRequest{
		Target: &datapathv1.SetAuditModeRequest_Node{Node: true}, Enabled: on, ValidateOnly: validate,
	}
	if on {
		req.Duration = durationpb.New(lasts)
	}
	if name != "" {
		e, err := Find(ctx, inv, name)
		if err != nil {
			return err
		}
		req.Target = &datapathv1.SetAuditModeRequest_Owner{Owner: e.GetOwner()}
	}
	resp, err := invocation.Ask(ctx, inv, invocation.Datapath, datapathv1.DatapathServiceClient.SetAuditMode, req)
	if err != nil {
		return err
	}
	return inv.Show(message.Of(resp), func(w io.Writer) {
		if validate {
			fmt.Fprint(w, "Nothing was changed: --dry-run. ")
		}
		auditLines(w, resp.GetMode(), resp.GetEndpoint())
	})
}

// auditLines writes the audit mode of the node and of the endpoint e, which may be nil.
func auditLines(w io.Writer, m *datapathv1.AuditMode, e *datapathv1.Endpoint) {
	const passes, denies = "packets that policies deny are forwarded and reported", "policies are enforced"
	node := m.GetNodeExpireTime()
	owner, policy := output.Printable(workload.OwnerOf(e.GetOwner()).String()), e.GetPolicy()
	switch {
	case e == nil && node != nil:
		fmt.Fprintf(w, "The node is in audit mode until %s: %s.\n", output.Moment(node.AsTime()), passes)
	case e == nil:
		fmt.Fprintf(w, "The node is not in audit mode: %s, with the exceptions below.\n", denies)
	case !policy.GetAudit():
		fmt.Fprintf(w, "%s is not in audit mode: its %s.\n", owner, denies)
	case policy.GetAuditExpireTime() != nil:
		fmt.Fprintf(w, "%s is in audit mode until %s: %s.\n", owner,
			output.Moment(policy.GetAuditExpireTime().AsTime()), passes)
	default:
		fmt.Fprintf(w, "%s is in audit mode: %s.\n", owner, passes)
	}
	if m.GetConfigured() {
		fmt.Fprintln(w, "The setting policy.audit puts all containers in audit mode permanently.")
	}
	if e != nil && node != nil {
		fmt.Fprintf(w, "The node is in audit mode until %s.\n", output.Moment(node.AsTime()))
	}
	fmt.Fprintf(w, "Containers in audit mode: %d.\n", m.GetEndpointCount())
}

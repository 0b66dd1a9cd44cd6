// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package controller shows the status of sluice-controller.
package controller

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	controllerv1 "github.com/sluice-net/sluice/proto/gen/sluice/controller/v1"
)

// Command is `controller`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("controller", "Show the status of sluice-controller", statusCommand(inv))
}

func statusCommand(inv *invocation.Invocation) *cobra.Command {
	ready := false
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show which sluice-controller is elected, and its pending work",
		Long: `Show whether this sluice-controller is elected, and the pending and failed requests of each
of its tasks. sluice-controller does not run on every node: run the command in its pod, with
--run-dir. The exit code is 0 if the process answers, so that a liveness probe does not
restart a controller that waits for the API server. With --ready, the exit code is 1 until
the process has listed every kind of policy.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if ready {
				if err := serves(cmd.Context(), inv); err != nil {
					return err
				}
			}
			r, err := invocation.Ask(cmd.Context(), inv, invocation.Controller,
				controllerv1.ControllerServiceClient.GetStatus, &controllerv1.GetStatusRequest{})
			if err != nil {
				return err
			}
			return inv.Show(message.Of(r), func(w io.Writer) { write(w, r) })
		},
	}
	cmd.Flags().BoolVar(&ready, "ready", false, "fail while the process is not ready")
	return cmd
}

// serves returns an error while the process is not ready.
func serves(ctx context.Context, inv *invocation.Invocation) error {
	r, err := invocation.Ask(ctx, inv, invocation.ControllerHealth, grpc_health_v1.HealthClient.Check,
		&grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		return err
	}
	if r.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
		return errors.New("sluice-controller is not ready: it has not listed every kind of policy; its log has the reason")
	}
	return nil
}

func write(w io.Writer, r *controllerv1.GetStatusResponse) {
	e := r.GetElection()
	switch {
	case e.GetLeading():
		output.Row(w, "Elected", "yes, for "+output.Since(output.When(e.GetElectedTime())))
	case e.GetHolder() != "":
		output.Row(w, "Elected", "no, "+e.GetHolder()+" is")
	default:
		output.Row(w, "Elected", "no")
	}
	output.Row(w, "Lease", e.GetNamespace()+"/"+e.GetLease())
	output.Row(w, "Identity", e.GetIdentity())
	output.Row(w, "Version", r.GetService().GetVersion())
	for _, p := range r.GetService().GetProblems() {
		output.Row(w, "Problem", p.GetText())
	}
	fmt.Fprintln(w)
	output.Table(w, []output.Column[*controllerv1.Subject]{
		{Header: "SUBJECT", Cell: func(s *controllerv1.Subject) any { return s.GetName() }},
		{Header: "PENDING", Cell: func(s *controllerv1.Subject) any { return s.GetPending() }},
		{Header: "REQUESTS", Cell: func(s *controllerv1.Subject) any { return s.GetRequests() }},
		{Header: "FAILED", Cell: func(s *controllerv1.Subject) any { return s.GetFailedRequests() }},
		{Header: "LAST ERROR", Cell: func(s *controllerv1.Subject) any { return s.GetError() }},
	}, r.GetSubjects())
}

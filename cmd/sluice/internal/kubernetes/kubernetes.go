// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kubernetes contains the commands that act on all nodes of a Kubernetes cluster. They run kubectl, which
// executes `sluice` in the pod of each node. The plugin `kubectl sluice` has the same commands.
package kubernetes

import (
	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/bugreport"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/capture"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/connectivity"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/explain"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/flows"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/overview"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/usage"
)

// PluginName is the name of the program as a plugin of kubectl.
const PluginName = "kubectl-sluice"

const long = `Show, observe and test all nodes of a Kubernetes cluster with Sluice. The commands use
kubectl and its credentials to execute ` + "`sluice`" + ` in the pod of each node. Nodes are asked in
parallel; nodes that do not answer within --timeout plus 10 s are reported. If a link named
` + PluginName + ` to this program is in PATH, kubectl has the same commands:
` + "`kubectl sluice status`" + `.`

// Command is `kubernetes`.
func Command(inv *invocation.Invocation) *cobra.Command {
	cmd := invocation.Group("kubernetes", "Show, observe and test all nodes of a Kubernetes cluster through kubectl")
	cmd.Long = long
	add(inv, cmd)
	return cmd
}

// Plugin returns the root command of the kubectl plugin.
func Plugin(inv *invocation.Invocation) *cobra.Command {
	cmd := inv.Bare(PluginName)
	cmd.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl sluice"}
	cmd.Short, cmd.Long = "Show, observe and test all nodes of a Kubernetes cluster with Sluice", long
	add(inv, cmd)
	return cmd
}

func add(inv *invocation.Invocation, cmd *cobra.Command) {
	client := &kubectl.Client{}
	client.Flags(cmd.PersistentFlags(), inv)
	for _, sub := range []*cobra.Command{
		overview.Command(inv, client), flows.Command(inv, client), bugreport.Command(inv, client),
		connectivity.Command(inv, client), capture.Command(inv, client), explain.Command(inv, client),
		usage.Command(inv, client),
	} {
		cmd.AddCommand(checked(sub, client))
	}
}

// checked validates the shared flags before the command runs.
func checked(cmd *cobra.Command, client *kubectl.Client) *cobra.Command {
	for _, sub := range cmd.Commands() {
		checked(sub, client)
	}
	if run := cmd.RunE; run != nil && !cmd.HasSubCommands() {
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			for _, name := range []string{"instance", "run-dir"} {
				if f := cmd.Flags().Lookup(name); f != nil && f.Changed {
					return invocation.Usagef("--%s: %s asks the pods of a cluster, not the sockets of this machine", name,
						cmd.CommandPath())
				}
			}
			if err := client.Check(); err != nil {
				return err
			}
			return run(cmd, args)
		}
	}
	return cmd
}

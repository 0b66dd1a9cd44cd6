// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Sluice shows the state of a node's services, changes it, and runs a whole node for development. It keeps no state
// of its own: it asks the services over their sockets.
package main

import (
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/backend"
	"github.com/sluice-net/sluice/cmd/sluice/internal/bpfmap"
	"github.com/sluice-net/sluice/cmd/sluice/internal/bugreport"
	"github.com/sluice-net/sluice/cmd/sluice/internal/capture"
	"github.com/sluice-net/sluice/cmd/sluice/internal/check"
	"github.com/sluice-net/sluice/cmd/sluice/internal/completion"
	"github.com/sluice-net/sluice/cmd/sluice/internal/config"
	"github.com/sluice-net/sluice/cmd/sluice/internal/conntrack"
	"github.com/sluice-net/sluice/cmd/sluice/internal/controller"
	"github.com/sluice-net/sluice/cmd/sluice/internal/dev"
	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/explain"
	"github.com/sluice-net/sluice/cmd/sluice/internal/fqdn"
	"github.com/sluice-net/sluice/cmd/sluice/internal/hubble"
	"github.com/sluice-net/sluice/cmd/sluice/internal/identity"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ip"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ipam"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes"
	"github.com/sluice-net/sluice/cmd/sluice/internal/migrate"
	"github.com/sluice-net/sluice/cmd/sluice/internal/node"
	"github.com/sluice-net/sluice/cmd/sluice/internal/observe"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policy"
	"github.com/sluice-net/sluice/cmd/sluice/internal/prepare"
	"github.com/sluice-net/sluice/cmd/sluice/internal/probe"
	"github.com/sluice-net/sluice/cmd/sluice/internal/proxy"
	"github.com/sluice-net/sluice/cmd/sluice/internal/service"
	"github.com/sluice-net/sluice/cmd/sluice/internal/shares"
	"github.com/sluice-net/sluice/cmd/sluice/internal/status"
	"github.com/sluice-net/sluice/cmd/sluice/internal/store"
)

// commands create the subcommands of the program.
var commands = []func(*invocation.Invocation) *cobra.Command{
	status.Command, endpoint.Command, identity.Command, ip.Command, ipam.Command,
	policy.Command, fqdn.Command, proxy.Command, explain.Command, observe.Command, hubble.Command, capture.Command,
	conntrack.Command, bpfmap.Command, check.Command, invocation.RenamedCommand("audit", check.Command),
	prepare.Command, node.Command, service.Command, backend.Command, shares.Command,
	controller.Command, store.Command, migrate.Command, dev.Command,
	kubernetes.Command, probe.Command, config.Command, config.LogLevelCommand, bugreport.Command,
	invocation.VersionCommand,
}

func main() { os.Exit(run(os.Args)) }

// run executes the program. kubectl calls its plugin under the name kubernetes.PluginName.
func run(args []string) int {
	if filepath.Base(args[0]) == kubernetes.PluginName {
		return invocation.RunRoot(args[1:], os.Stdout, os.Stderr, kubernetes.Plugin)
	}
	return invocation.RunRoot(args[1:], os.Stdout, os.Stderr, rootOf)
}

// rootOf returns the root command with shell completion.
func rootOf(inv *invocation.Invocation) *cobra.Command {
	root := inv.Root(commands...)
	completion.Add(inv, root)
	return root
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package node installs and removes the parts of Sluice that must be on the machine itself, outside of the containers
// of a pod: directories, the bpffs, the CNI plugin and its configuration.
package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/cluster"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/health"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/mountinfo"
	"github.com/sluice-net/sluice/kit/nodefiles"
)

// options are the flags of the commands.
type options struct {
	plugins    string
	directory  string
	name       string
	mountBPFFS string
	health     string
	state      bool
	stay       bool
	dryRun     bool
}

// Command is `node`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var o options
	directories := func(cmd *cobra.Command) *cobra.Command {
		cmd.Args = invocation.Args(0, "")
		cmd.Flags().StringVar(&o.plugins, "plugin-directory", "/opt/cni/bin",
			"directory of the container runtime's CNI plugins")
		if cmd.Name() != "install" {
			cmd.Flags().StringVar(&o.directory, "cni-directory", "/etc/cni/net.d",
				"directory of the container runtime's CNI configurations")
			cmd.Flags().StringVar(&o.name, "cni-file", "05-sluice.conflist",
				"name of the configuration file; the runtime takes the first name in the directory")
		}
		return cmd
	}
	installing := directories(&cobra.Command{
		Use:   "install",
		Short: "Create the directories, mount the bpffs and install the CNI plugin",
		Long: `Run "prepare", and copy the CNI plugin from the directory of this program into the
directory of the container runtime. Run it as root before the services, for example in an
init container with /run/sluice mounted with propagation Bidirectional. Running it again
changes nothing.`,
		RunE: func(*cobra.Command, []string) error {
			if o.dryRun {
				return try(inv, func(p instance.Paths) ([]string, error) { return planInstall(p, o) })
			}
			return report(inv, func(p instance.Paths) ([]string, error) { return install(p, o) })
		},
	})
	invocation.ValidateFlag(installing, &o.dryRun, "show what would be changed; change nothing")
	installing.Flags().StringVar(&o.mountBPFFS, "mount-bpffs", "auto",
		"auto: mount the bpffs if it is not mounted; never: fail instead")
	uninstalling := directories(&cobra.Command{
		Use:   "uninstall",
		Short: "Remove the CNI configuration and plugin, devices, rules and pins of Sluice",
		Long: `Remove everything that install, cni and the services have created on the machine: the CNI
configuration and the plugin, the devices, rules, routes and firewall table of
sluice-datapath, and the bpffs with its pins. Connected containers lose their network.
Objects of other programs stay. /var/lib/sluice also stays, unless --state is given. Run the
command as root, after the services have ended.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.dryRun {
				return try(inv, func(p instance.Paths) ([]string, error) { return planUninstall(p, o) })
			}
			err := report(inv, func(p instance.Paths) ([]string, error) { return uninstall(cmd, p, o) })
			if err == nil && o.stay {
				return stay(cmd.Context(), inv, o.health)
			}
			return err
		},
	})
	uninstalling.Flags().BoolVar(&o.state, "state", false,
		"also remove the directories of state, sockets and logs, with the stored addresses, identities and policies")
	uninstalling.Flags().BoolVar(&o.stay, "stay", false,
		"do not exit afterwards; for a DaemonSet, which would restart the container")
	uninstalling.Flags().StringVar(&o.health, "health-address", "off",
		"with --stay, loopback ip:port that serves /livez and /readyz over HTTP once everything is removed, or off")
	invocation.ValidateFlag(uninstalling, &o.dryRun, "show what would be removed; remove nothing")
	writing := directories(&cobra.Command{
		Use:   "cni",
		Short: "Keep the CNI configuration in place while this runs",
		Long: `Write the CNI configuration as soon as containers can be connected, and write it again if it
is removed or changed. The file stays when the command ends. Files of other networks are
never changed. If the file of another network has a name that the runtime prefers, the log
and /readyz report an error.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := paths(inv)
			if err != nil {
				return err
			}
			return serve(cmd.Context(), inv, o.configuration(p), o.health)
		},
	})
	writing.Flags().StringVar(&o.health, "health-address", "off",
		"loopback ip:port that serves /livez and /readyz over HTTP, or off")
	looking := directories(&cobra.Command{
		Use:   "status",
		Short: "Show which parts of Sluice are installed on the machine",
		Long:  `Show which parts of Sluice are installed on the machine; the exit code is 3 if one is missing.`,
		RunE: func(*cobra.Command, []string) error {
			p, err := paths(inv)
			if err != nil {
				return err
			}
			return show(inv, checkParts(p, o))
		},
	})
	return invocation.Group("node", "Show the nodes of the cluster; install Sluice on a machine, and remove it",
		append(cluster.Commands(inv), installing, uninstalling, looking, writing)...)
}

func (o options) configuration(p instance.Paths) configuration {
	return configuration{directory: o.directory, name: o.name, plugins: o.plugins, paths: p}
}

func paths(inv *invocation.Invocation) (instance.Paths, error) {
	p, err := instance.New(inv.Instance)
	if err != nil {
		return p, invocation.Usagef("--instance: %w", err)
	}
	return p, nil
}

// report runs do as root and prints the changes, one per line.
func report(inv *invocation.Invocation, do func(instance.Paths) ([]string, error)) error {
	p, err := pathsOfRoot(inv)
	if err != nil {
		return err
	}
	changes, err := do(p)
	return inv.ShowChanges(changes, err)
}

// pathsOfRoot returns the paths of the instance. It returns an error to other users than root.
func pathsOfRoot(inv *invocation.Invocation) (instance.Paths, error) {
	p, err := paths(inv)
	if err != nil {
		return p, err
	}
	if inv.RunDir != "" {
		return p, invocation.Usagef("--run-dir: not valid here; choose the directories with --instance")
	}
	return p, nodefiles.Root()
}

// programPath returns the path of a program: in the directory of this program, or else in PATH.
func programPath(program string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	path := filepath.Join(filepath.Dir(self), program)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	found, err := exec.LookPath(program)
	if err != nil {
		return "", fmt.Errorf("%s is neither at %s nor in PATH", program, path)
	}
	return found, nil
}

// services returns the services for which the directories are prepared.
func (o options) services(p instance.Paths) ([]nodefiles.Service, error) {
	services := nodefiles.Services()
	switch o.mountBPFFS {
	case "auto":
		return services, reachesTheMachine(p)
	case "never":
		for i := range services {
			services[i].Mounted = true
		}
		return services, nil
	}
	return nil, invocation.Usagef("--mount-bpffs: %q is neither auto nor never", o.mountBPFFS)
}

func install(p instance.Paths, o options) (changes []string, err error) {
	services, err := o.services(p)
	if err != nil {
		return nil, err
	}
	if changes, err = nodefiles.Prepare(p, services...); err != nil {
		return changes, err
	}
	target, content, err := o.newPlugin()
	if err != nil || content == nil {
		return changes, err
	}
	// The directory may not exist before a runtime is installed.
	if err := os.MkdirAll(o.plugins, 0o755); err != nil { //nolint:gosec // the runtime's user reads it
		return changes, err
	}
	// The runtime may execute the plugin at any time, so it is replaced atomically.
	if err := durable.WriteFile(target, content, 0o755, durable.SyncAll); err != nil {
		return changes, err
	}
	return append(changes, "wrote "+target), nil
}

// newPlugin returns the path of the CNI plugin and the content to write there. content is nil if the plugin is already
// installed.
func (o options) newPlugin() (target string, content []byte, err error) {
	target = filepath.Join(o.plugins, plugin)
	source, err := programPath(plugin)
	if err != nil {
		return target, nil, err
	}
	if content, err = os.ReadFile(source); err != nil {
		return target, nil, err
	}
	have, err := os.ReadFile(target)
	switch {
	case err == nil && slices.Equal(have, content):
		return target, nil, nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return target, nil, err
	}
	return target, content, nil
}

// reachesTheMachine returns an error if the run directory is a container's mount that does not propagate to the
// machine: a bpffs in it, with its pins, would disappear with the container.
func reachesTheMachine(p instance.Paths) error {
	m, err := mountinfo.Of(p.RunDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if m.Point == p.RunDir && !m.Shared {
		return fmt.Errorf("a bpffs mounted at %s would not be seen outside of this container: "+
			"mount the machine's %s with mountPropagation Bidirectional, "+
			"or mount the bpffs on the machine and use --mount-bpffs=never", p.BPFDir, p.RunDir)
	}
	return nil
}

func uninstall(cmd *cobra.Command, p instance.Paths, o options) (changes []string, err error) {
	// Remove the configuration first, because it makes the runtime call the plugin.
	c := o.configuration(p)
	removed, err := c.remove()
	if removed {
		changes = append(changes, "removed "+c.path())
	}
	if err != nil && !errors.Is(err, errForeign) {
		return changes, err
	}
	datapath, err := programPath("sluice-datapath")
	if err != nil {
		return changes, err
	}
	args := []string{"--uninstall"}
	if p.Name != "" {
		args = append(args, "--instance", p.Name)
	}
	run := exec.CommandContext(cmd.Context(), datapath, args...) //nolint:gosec // the program that was built with this one
	if out, err := run.CombinedOutput(); err != nil {
		return changes, fmt.Errorf("%s %v: %w: %s", datapath, args, err, failure(out))
	}
	changes = append(changes, "removed devices, rules, routes and firewall table of "+filepath.Base(p.RunDir))
	removed, err = nodefiles.RemoveBPFFS(p)
	if removed {
		changes = append(changes, "removed "+p.BPFDir+" and its pins")
	}
	if err != nil {
		return changes, err
	}
	target := filepath.Join(o.plugins, plugin)
	removed, err = durable.Remove(target, durable.SyncAll)
	if removed {
		changes = append(changes, "removed "+target)
	}
	if err != nil || !o.state {
		return changes, err
	}
	state, err := nodefiles.RemoveState(p)
	return append(changes, state...), err
}

// stay serves probes until ctx ends.
func stay(ctx context.Context, inv *invocation.Invocation, address string) error {
	if address != "off" {
		l, err := health.Listen(address)
		if err != nil {
			return invocation.Usagef("--health-address: %w", err)
		}
		logger := log.New(inv.ErrOut, log.Level(slog.LevelInfo)).With(log.KeyService, "uninstall")
		defer health.Serve(l, func() error { return nil }, logger)()
	}
	<-ctx.Done()
	return nil
}

// failure returns the errors in the log of a service. If the log contains no errors, it returns the end of the log.
func failure(out []byte) string {
	var all []string
	for line := range bytes.Lines(out) {
		var entry struct{ Level, Msg, Error string }
		if json.Unmarshal(line, &entry) == nil && entry.Level == "ERROR" {
			all = append(all, entry.Msg+": "+entry.Error)
		}
	}
	if len(all) > 0 {
		return strings.Join(all, "; ")
	}
	const most = 1000
	return string(bytes.TrimSpace(out[max(0, len(out)-most):]))
}

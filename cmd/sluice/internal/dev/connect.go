// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package dev

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/devnode"
)

// netnsDir is where `ip netns add` creates network namespaces.
const netnsDir = "/run/netns"

func connectCommand(inv *invocation.Invocation) *cobra.Command {
	number := 0
	cmd := &cobra.Command{
		Use:   "connect NETNS [NAMESPACE/]NAME [KEY=VALUE...]",
		Short: "Connect a network namespace to the node as a pod",
		Long: `Connect a network namespace to the node as the pod NAME with the labels KEY=VALUE, as a
container runtime does: the command executes the CNI plugin of the node with ADD. NETNS is
the name of a network namespace of "ip netns", or a path. The default NAMESPACE is default.
"dev disconnect" undoes it.`,
		Example: `  ip netns add web
  sluice dev connect web shop/web app=web
  sluice dev disconnect web shop/web`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, a []string) error {
			if len(a) < 2 {
				return invocation.Usagef("%s takes a network namespace and the name of a pod", cmd.CommandPath())
			}
			p, err := podOf(a[0], a[1], a[2:])
			if err != nil {
				return err
			}
			node, err := find(inv, number, devnode.Datapath)
			if err != nil {
				return err
			}
			return p.connect(cmd.Context(), inv, node.Plugin(), node.PluginConfig())
		},
	}
	cmd.Flags().IntVar(&number, "node", 0, "number of the node, if there are several")
	return cmd
}

func disconnectCommand(inv *invocation.Invocation) *cobra.Command {
	number := 0
	cmd := &cobra.Command{
		Use:   "disconnect NETNS [NAMESPACE/]NAME",
		Short: "Disconnect a network namespace that `dev connect` connected",
		Args:  invocation.Args(2, "a network namespace and the name of a pod"),
		RunE: func(cmd *cobra.Command, a []string) error {
			p, err := podOf(a[0], a[1], nil)
			if err != nil {
				return err
			}
			node, err := find(inv, number, devnode.Datapath)
			if err != nil {
				return err
			}
			if _, err := p.call(cmd.Context(), "DEL", node.Plugin(), node.PluginConfig()); err != nil {
				return err
			}
			_, err = fmt.Fprintf(inv.ErrOut, "The pod %s/%s is disconnected.\n", p.Namespace, p.Name)
			return err
		},
	}
	cmd.Flags().IntVar(&number, "node", 0, "number of the node, if there are several")
	return cmd
}

// pod is a network namespace that is connected as a pod. It is also the output of `dev connect -o json`.
type pod struct {
	Namespace string   `json:"namespace"`
	Name      string   `json:"name"`
	Container string   `json:"containerId"`
	Netns     string   `json:"netns"`
	Addresses []string `json:"addresses"`

	labels []cniLabel
}

type cniLabel struct {
	Key   string `json:"key"`
	Value string `json:"value"`
}

// podOf parses the arguments of `dev connect`.
func podOf(netns, name string, labels []string) (pod, error) {
	p := pod{Namespace: "default", Name: name, Container: name, Netns: netns, Addresses: []string{}}
	if namespace, rest, found := strings.Cut(name, "/"); found {
		p.Namespace, p.Name, p.Container = namespace, rest, namespace+"-"+rest
	}
	if p.Namespace == "" || p.Name == "" || strings.ContainsAny(p.Name, "/;=") || strings.ContainsAny(p.Namespace, ";=") {
		return p, invocation.Usagef("%q is not [NAMESPACE/]NAME of a pod", name)
	}
	if !strings.Contains(netns, "/") {
		p.Netns = filepath.Join(netnsDir, netns)
	}
	for _, text := range labels {
		key, value, found := strings.Cut(text, "=")
		if !found || key == "" {
			return p, invocation.Usagef("%q is not a label: want KEY=VALUE", text)
		}
		if !endpoint.IsLabelValue(value) {
			return p, invocation.Usagef("%q: %q is not a label value, so no policy could select it", text, value)
		}
		p.labels = append(p.labels, cniLabel{key, value})
	}
	return p, nil
}

// connect connects the pod, and prints its addresses.
func (p pod) connect(ctx context.Context, inv *invocation.Invocation, plugin, config string) error {
	if _, err := os.Stat(p.Netns); err != nil {
		return fmt.Errorf("network namespace %s: %w; create it with `ip netns add`", p.Netns, err)
	}
	out, err := p.call(ctx, "ADD", plugin, config)
	if err != nil {
		return err
	}
	var result struct {
		IPs []struct {
			Address string `json:"address"`
		} `json:"ips"`
	}
	if err := json.Unmarshal(out, &result); err != nil {
		return fmt.Errorf("the result of %s: %w", plugin, err)
	}
	for _, ip := range result.IPs {
		address, _, _ := strings.Cut(ip.Address, "/")
		p.Addresses = append(p.Addresses, address)
	}
	return inv.Show(p, func(w io.Writer) {
		fmt.Fprintln(w, output.Printable(fmt.Sprintf("%s is connected as the pod %s/%s with %s.", p.Netns, p.Namespace,
			p.Name, strings.Join(p.Addresses, " and "))))
	})
}

// call executes the CNI plugin, and returns its result.
func (p pod) call(ctx context.Context, command, plugin, config string) ([]byte, error) {
	text, err := os.ReadFile(config)
	if err != nil {
		return nil, err
	}
	var settings map[string]any
	if err := json.Unmarshal(text, &settings); err != nil {
		return nil, fmt.Errorf("%s: %w", config, err)
	}
	if len(p.labels) > 0 {
		settings["args"] = map[string]any{"cni": map[string]any{"labels": p.labels}}
	}
	if text, err = json.Marshal(settings); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, plugin)
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+command, "CNI_CONTAINERID="+p.Container, "CNI_IFNAME=eth0",
		"CNI_NETNS="+p.Netns, "CNI_PATH="+filepath.Dir(plugin),
		"CNI_ARGS=K8S_POD_NAMESPACE="+p.Namespace+";K8S_POD_NAME="+p.Name)
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(text), &out, &errOut
	if err := cmd.Run(); err != nil {
		// The plugin prints its error as JSON on standard output.
		var failure struct {
			Msg     string `json:"msg"`
			Details string `json:"details"`
		}
		if json.Unmarshal(out.Bytes(), &failure) == nil && failure.Msg != "" {
			return nil, fmt.Errorf("CNI %s: %s", command, strings.Trim(failure.Msg+": "+failure.Details, ": "))
		}
		return nil, errors.Join(fmt.Errorf("%s: %w", plugin, err), errors.New(strings.TrimSpace(errOut.String())))
	}
	return out.Bytes(), nil
}

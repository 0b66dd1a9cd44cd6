// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/devnode"
)

// devInstance is the instance of `dev` if no other is named.
const devInstance = "dev"

func (c *command) devCommand() *cobra.Command {
	var (
		podCIDRs []string
		o        devnode.Options
	)
	up := &cobra.Command{
		Use:   "up",
		Short: "Start a node: its own network namespace, etcd and every service",
		Long: `Start a whole node under the directories of one instance: a network namespace of
its own, joined to the caller's by a veth pair, an embedded etcd, sluice-identity,
sluice-ipam, sluice-policy and sluice-datapath, each as its own user. It returns when all of them
serve. Of the caller's namespace, nothing changes but one device with its two
addresses and one route for each pod range; ` + "`dev down`" + ` removes them.`,
		Args: args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !slices.Contains(policyModes, o.PolicyMode) {
				return usagef("--policy-mode: %q is not one of %s", o.PolicyMode, strings.Join(policyModes, ", "))
			}
			return c.devUp(cmd.Context(), podCIDRs, o)
		},
	}
	up.Flags().StringSliceVar(&podCIDRs, "pod-cidr", nil, "range of pod addresses, one per family (default: the first 10.244.N.0/24 and fd00:244:N::/64 without a route)")
	up.Flags().StringVar(&o.BinDir, "bin-dir", "", "directory of the services' programs (default: that of this program)")
	up.Flags().DurationVar(&o.StartTimeout, "start-timeout", 30*time.Second, "how long the services may take to serve")
	up.Flags().StringVar(&o.PolicyMode, "policy-mode", devnode.DefaultPolicyMode, "required: a container is connected when its policy is enforced; init: at once, with ingress from the own node only until then; none: no policy is enforced")
	up.Flags().StringVar(&o.PolicyDir, "policy-dir", "", "directory of manifests that are in force besides what is applied (default: an empty one below the run directory)")
	cmd := group("dev", "Run a whole node for development and tests", up,
		&cobra.Command{
			Use: "down", Short: "End a node and remove everything that `dev up` made", Args: args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return c.devDown(cmd.Context()) },
		},
		&cobra.Command{
			Use: "restart SERVICE", Short: "End one service of the node and start it again", Args: args(1, "one of "+strings.Join(devnode.Services(), ", ")),
			ValidArgs: devnode.Services(),
			RunE:      func(cmd *cobra.Command, a []string) error { return c.devRestart(cmd.Context(), a[0]) },
		},
		&cobra.Command{
			Use: "status", Short: "Show the processes of the node", Args: args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return c.devStatus(cmd.Context()) },
		},
	)
	cmd.PersistentPreRunE = func(cmd *cobra.Command, a []string) error {
		if err := cmd.Root().PersistentPreRunE(cmd, a); err != nil {
			return err
		}
		if c.runDir != "" {
			return usagef("--run-dir: a development node is named by --instance")
		}
		if c.instance == "" {
			c.instance = devInstance
		}
		if os.Geteuid() != 0 {
			return errors.New("dev must run as root: it makes network namespaces and starts the datapath")
		}
		return nil
	}
	return cmd
}

// policyModes are those of the datapath.
var policyModes = []string{"required", "init", "none"}

func (c *command) devUp(ctx context.Context, podCIDRs []string, o devnode.Options) error {
	o.Instance = c.instance
	for _, s := range podCIDRs {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return usagef("--pod-cidr: %q is not a range of addresses", s)
		}
		if p != p.Masked() {
			return usagef("--pod-cidr: %q is an address within the range %s", s, p.Masked())
		}
		if slices.ContainsFunc(o.PodCIDRs, func(q netip.Prefix) bool { return q.Addr().Is4() == p.Addr().Is4() }) {
			return usagef("--pod-cidr: %s is the second one of its family", p)
		}
		o.PodCIDRs = append(o.PodCIDRs, p)
	}
	if o.BinDir == "" {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		o.BinDir = filepath.Dir(self)
	}
	began := time.Now()
	node, err := devnode.Up(ctx, o)
	if errors.Is(err, devnode.ErrRunning) {
		return fmt.Errorf("%w; see `sluice dev status --instance %s`, end it with `sluice dev down --instance %s`", err, c.instance, c.instance)
	}
	if err != nil {
		return err
	}
	return c.show(c.describe(ctx, node), func(w io.Writer) { c.welcome(w, node, time.Since(began)) })
}

// devNode is what `dev up -o json` and `dev status -o json` print.
type devNode struct {
	Instance   string       `json:"instance"`
	RunDir     string       `json:"runDir"`
	StateDir   string       `json:"stateDir"`
	Netns      string       `json:"netns"`
	PodCIDRs   []string     `json:"podCidrs"`
	PolicyMode string       `json:"policyMode"`
	PolicyDir  string       `json:"policyDir"`
	Plugin     string       `json:"plugin"`
	CNIConfDir string       `json:"cniConfDir"`
	Services   []devService `json:"services"`
}

type devService struct {
	Name    string `json:"name"`
	PID     int    `json:"pid,omitempty"` // 0 if it does not run
	Serving bool   `json:"serving"`
	Error   string `json:"error,omitempty"`
	Socket  string `json:"socket"`
	Log     string `json:"log"`
}

func (c *command) describe(ctx context.Context, node *devnode.Node) devNode {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	d := devNode{
		Instance: node.Instance(), RunDir: node.Paths().RunDir, StateDir: node.Paths().StateDir, Netns: node.Netns(),
		Plugin: node.Plugin(), CNIConfDir: node.CNIConfDir(), PolicyMode: node.PolicyMode(), PolicyDir: node.PolicyDir(),
	}
	for _, p := range node.PodCIDRs() {
		d.PodCIDRs = append(d.PodCIDRs, p.String())
	}
	for _, name := range devnode.Services() {
		s := devService{Name: name, Socket: node.Socket(name), Log: node.Log(name)}
		var err error
		if s.PID, err = node.PID(name); err == nil {
			err = node.Serving(ctx, name)
		}
		if s.Serving = err == nil; err != nil {
			s.Error = err.Error()
			if st, ok := status.FromError(err); ok {
				s.Error = reason(st)
			}
		}
		d.Services = append(d.Services, s)
	}
	return d
}

func (c *command) welcome(w io.Writer, node *devnode.Node, took time.Duration) {
	fmt.Fprintf(w, "Node %s is up after %.1f s.\n\n", node.Instance(), took.Seconds())
	row(w, "SERVICE", "PID", "SOCKET")
	for _, name := range devnode.Services() {
		pid, err := node.PID(name)
		if err != nil {
			continue // it ended just now; dev status says so
		}
		row(w, name, pid, node.Socket(name))
	}
	fmt.Fprintf(w, `
Pods            %s
Node's netns    %s
CNI conflist    %s
Policies        %s, enforcement: %s
Logs            %s

Look at it:
  sluice status --instance %[7]s
  sluice endpoint list --instance %[7]s
  sluice policy list --instance %[7]s
  sluice observe --follow --instance %[7]s

Connect a network namespace by hand, as a container runtime would:
  ip netns add pod1
  CNI_COMMAND=ADD CNI_CONTAINERID=pod1 CNI_IFNAME=eth0 CNI_NETNS=/run/netns/pod1 CNI_PATH=%[8]s \
    %[9]s < %[10]s

End it:
  sluice dev down --instance %[7]s
`, strings.Join(prefixTexts(node.PodCIDRs()), ", "), node.Netns(), node.CNIConfDir(), node.PolicyDir(), node.PolicyMode(), filepath.Dir(node.Log("ipam")),
		node.Instance(), filepath.Dir(node.Plugin()), node.Plugin(), node.PluginConfig())
}

func prefixTexts(prefixes []netip.Prefix) []string {
	texts := make([]string, 0, len(prefixes))
	for _, p := range prefixes {
		texts = append(texts, p.String())
	}
	return texts
}

func (c *command) devDown(ctx context.Context) error {
	if err := devnode.Down(ctx, c.instance); err != nil {
		return err
	}
	_, err := fmt.Fprintf(c.errOut, "Node %s is down.\n", c.instance)
	return err
}

func (c *command) devRestart(ctx context.Context, service string) error {
	if !slices.Contains(devnode.Services(), service) {
		return usagef("%q is not one of %s", service, strings.Join(devnode.Services(), ", "))
	}
	node, err := devnode.Open(c.instance)
	if err != nil {
		return err
	}
	began := time.Now()
	if err := node.Restart(ctx, service); err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.errOut, "%s serves again after %.2f s.\n", service, time.Since(began).Seconds())
	return err
}

func (c *command) devStatus(ctx context.Context) error {
	node, err := devnode.Open(c.instance)
	if err != nil {
		return err
	}
	d := c.describe(ctx, node)
	if err := c.show(d, func(w io.Writer) {
		row(w, "SERVICE", "PID", "SERVING", "SOCKET", "LOG")
		for _, s := range d.Services {
			pid, serving := "-", "yes"
			if s.PID != 0 {
				pid = fmt.Sprint(s.PID)
			}
			if !s.Serving {
				serving = "no: " + s.Error
			}
			row(w, s.Name, pid, serving, s.Socket, s.Log)
		}
	}); err != nil {
		return err
	}
	if slices.ContainsFunc(d.Services, func(s devService) bool { return !s.Serving }) {
		return errNotReady
	}
	return nil
}

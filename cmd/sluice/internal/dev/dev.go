// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package dev runs one or several whole nodes for development. It creates network namespaces and devices, which no
// other package of the command line does.
package dev

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/devnode"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// defaultInstance is the default instance of `dev`.
const defaultInstance = "dev"

// Command is `dev`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var (
		podCIDRs []string
		o        devnode.ClusterOptions
	)
	up := &cobra.Command{
		Use:   "up",
		Short: "Start one or several nodes, with network namespaces, etcd and all services",
		Long: `Start a whole node in the directories of one instance: a network namespace that a veth pair
connects to the caller's, an embedded etcd, sluice-identity, sluice-ipam, sluice-policy,
sluice-loadbalancer, sluice-datapath and sluice-dns, each as its own user. The command returns
when all of them serve. In the caller's network namespace it adds only one device with two addresses
and one route per pod CIDR; ` + "`dev down`" + ` removes them.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !slices.Contains(policyModes, o.PolicyMode) {
				return invocation.NotOneOf("--policy-mode", o.PolicyMode, policyModes)
			}
			return up(cmd.Context(), inv, podCIDRs, o)
		},
	}
	up.Flags().StringSliceVar(&podCIDRs, "pod-cidr", nil,
		"pod CIDR, one per family (default: the first 10.244.N.0/24 and fd00:244:N::/64 without a route)")
	up.Flags().StringVar(&o.BinDir, "bin-dir", "",
		"directory of the services' programs (default: the directory of this program)")
	up.Flags().DurationVar(&o.StartTimeout, "start-timeout", 30*time.Second, "how long the services may take to serve")
	up.Flags().StringVar(&o.PolicyMode, "policy-mode", devnode.DefaultPolicyMode,
		"required: connect a container once its policy is enforced; init: connect it at once, with ingress only "+
			"from its own node until the policy is enforced; none: enforce no policies")
	up.Flags().StringVar(&o.PolicyDir, "policy-dir", "",
		"directory of policy manifests, enforced in addition to applied ones (default: an empty one in the run directory)")
	up.Flags().StringVar(&o.ServiceDir, "service-dir", "",
		"directory of manifests of Services and EndpointSlices, used in addition to applied ones (default: an "+
			"empty one in the run directory)")
	up.Flags().BoolVar(&o.NoLoadBalancer, "no-loadbalancer", false,
		"do not start sluice-loadbalancer; services are not translated")
	up.Flags().BoolVar(&o.HTTP, "http", false,
		"also start sluice-http, which evaluates rules for HTTP and TLS server names")
	up.Flags().BoolVar(&o.Hubble, "hubble", false, "also start sluice-hubble, which serves the API of Hubble")
	up.Flags().BoolVar(&o.Store, "store", false, "run sluice-store in place of the embedded etcd; one node only")
	up.Flags().IntVar(&o.Nodes, "nodes", 1, fmt.Sprintf("number of nodes, at most %d", devnode.MaxNodes))
	up.Flags().IntVar(&o.EtcdMembers, "etcd-members", 1, "number of etcd members, 1 or 3; 3 requires several nodes")
	up.Flags().StringVar(&o.Routing, "routing", devnode.DefaultRouting,
		"routing between pods of several nodes: overlay, native or none")
	cmd := invocation.Group("dev", "Run a whole node for development and tests", up,
		&cobra.Command{
			Use: "down", Short: "Stop the nodes and remove everything that `dev up` created", Args: invocation.Args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return down(cmd.Context(), inv) },
		},
		connectCommand(inv), disconnectCommand(inv), restartCommand(inv),
		&cobra.Command{
			Use: "status", Short: "Show the processes of the nodes", Args: invocation.Args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return printStatus(cmd.Context(), inv) },
		},
	)
	cmd.PersistentPreRunE = func(cmd *cobra.Command, a []string) error {
		if err := cmd.Root().PersistentPreRunE(cmd, a); err != nil {
			return err
		}
		if inv.RunDir != "" {
			return invocation.Usagef("--run-dir: not valid here; choose a development node with --instance")
		}
		inv.Instance = cmp.Or(inv.Instance, defaultInstance)
		switch {
		case os.Geteuid() == 0:
		case cmd.Name() == "status":
			return errors.New("dev status must run as root, which owns the node's files; `sluice status` also works for the " +
				"group")
		default:
			return errors.New("dev must run as root: it creates network namespaces and starts the datapath")
		}
		return nil
	}
	return cmd
}

// restartable are the services that a node can have.
var restartable = append(devnode.Services(), devnode.HTTP, devnode.Hubble, devnode.Store)

// policyModes and routings are the values of --policy-mode and --routing.
var (
	policyModes = []string{"required", "init", "none"}
	routings    = []string{"overlay", "native", "none"}
)

func restartCommand(inv *invocation.Invocation) *cobra.Command {
	node := 0
	cmd := &cobra.Command{
		Use: "restart COMPONENT", Short: "Restart one component of a node",
		Args:      invocation.Args(1, "one of "+strings.Join(restartable, ", ")),
		ValidArgs: restartable,
		RunE:      func(cmd *cobra.Command, a []string) error { return restart(cmd.Context(), inv, node, a[0]) },
	}
	cmd.Flags().IntVar(&node, "node", 0, "number of the node, if there are several")
	return cmd
}

func up(ctx context.Context, inv *invocation.Invocation, podCIDRs []string, o devnode.ClusterOptions) error {
	o.Instance = inv.Instance
	switch {
	case o.Nodes < 1 || o.Nodes > devnode.MaxNodes:
		return invocation.Usagef("--nodes: %d is not 1 to %d", o.Nodes, devnode.MaxNodes)
	case o.EtcdMembers != 1 && o.EtcdMembers != 3:
		return invocation.Usagef("--etcd-members: %d is neither 1 nor 3", o.EtcdMembers)
	case o.Nodes == 1 && o.EtcdMembers > 1:
		return invocation.Usagef("--etcd-members: one node has one etcd member; see --nodes")
	case o.Nodes > 1 && o.Store:
		return invocation.Usagef("--store: not valid with several nodes, which share an etcd")
	case !slices.Contains(routings, o.Routing):
		return invocation.NotOneOf("--routing", o.Routing, routings)
	case o.Nodes > 1 && len(podCIDRs) > 0:
		return invocation.Usagef("--pod-cidr: not valid with several nodes, which get their pod CIDRs automatically")
	}
	for _, s := range podCIDRs {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return invocation.Usagef("--pod-cidr: %q is not a CIDR", s)
		}
		if p != p.Masked() {
			return invocation.Usagef("--pod-cidr: %q has host bits; the CIDR is %s", s, p.Masked())
		}
		if slices.ContainsFunc(o.PodCIDRs, func(q netip.Prefix) bool { return q.Addr().Is4() == p.Addr().Is4() }) {
			return invocation.Usagef("--pod-cidr: %s is the second CIDR of its family", p)
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
	done := sync.OnceFunc(inv.Progress(func() string { return "starting " + inv.Instance }))
	defer done()
	if o.Nodes > 1 {
		c, err := devnode.UpCluster(ctx, o)
		done()
		if err != nil {
			return running(inv, err)
		}
		d, err := describeCluster(ctx, inv, c)
		if err != nil {
			return err
		}
		return inv.Show(d, func(w io.Writer) { d.welcome(w, time.Since(began)) })
	}
	o.Waits = func(ctx context.Context, socket string) bool { return len(waitingFor(ctx, socket)) > 0 }
	node, err := devnode.Up(ctx, o.Options)
	done()
	if err != nil {
		return running(inv, err)
	}
	for _, why := range waitingFor(ctx, node.Socket(devnode.Policy)) {
		fmt.Fprintln(inv.ErrOut, output.Printable("warning: containers cannot be connected yet: "+why))
	}
	return inv.Show(describe(ctx, inv, node), func(w io.Writer) { welcome(inv, w, node, time.Since(began)) })
}

// waitingFor returns the reasons for which the policy service at a socket does not send tables yet; nil if it sends
// them or does not answer.
func waitingFor(ctx context.Context, socket string) []string {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	st, err := policyv1.NewPolicyServiceClient(conn).GetStatus(ctx, &policyv1.GetStatusRequest{})
	if err != nil {
		return nil
	}
	return st.GetWaitingFor()
}

// running adds a hint about the next step to the error ErrRunning.
func running(inv *invocation.Invocation, err error) error {
	if errors.Is(err, devnode.ErrRunning) {
		if missing := ended(inv.Instance); len(missing) > 0 {
			return fmt.Errorf("%w; %s has exited: start it again with `sluice dev restart %s --instance %s`", err,
				strings.Join(missing, ", "), missing[0], inv.Instance)
		}
		return fmt.Errorf("%w; see `sluice dev status --instance %s`, or stop it with `sluice dev down --instance %s`", err,
			inv.Instance, inv.Instance)
	}
	return err
}

// ended returns the names of an instance's services that do not run.
func ended(instance string) (names []string) {
	node, err := devnode.Open(instance)
	if err != nil {
		return nil
	}
	for _, name := range node.Services() {
		if _, err := node.PID(name); err != nil {
			names = append(names, name)
		}
	}
	return names
}

// shownNode is the output of `dev up -o json` and `dev status -o json`.
type shownNode struct {
	Instance   string         `json:"instance"`
	RunDir     string         `json:"runDir"`
	StateDir   string         `json:"stateDir"`
	Netns      string         `json:"netns"`
	PodCIDRs   []string       `json:"podCidrs"`
	PolicyMode string         `json:"policyMode"`
	PolicyDir  string         `json:"policyDir"`
	ServiceDir string         `json:"serviceDir,omitempty"` // none without sluice-loadbalancer
	Plugin     string         `json:"plugin"`
	CNIConfDir string         `json:"cniConfDir"`
	Services   []shownService `json:"services"`
}

type shownService struct {
	Name    string `json:"name"`
	PID     int    `json:"pid,omitempty"` // 0 if it does not run
	Serving bool   `json:"serving"`
	Error   string `json:"error,omitempty"`
	Socket  string `json:"socket"`
	Log     string `json:"log"`
}

func describe(ctx context.Context, inv *invocation.Invocation, node *devnode.Node) shownNode {
	ctx, cancel := context.WithTimeout(ctx, inv.Timeout)
	defer cancel()
	d := shownNode{
		Instance: node.Instance(), RunDir: node.Paths().RunDir, StateDir: node.Paths().StateDir, Netns: node.Netns(),
		Plugin: node.Plugin(), CNIConfDir: node.CNIConfDir(), PolicyMode: node.PolicyMode(), PolicyDir: node.PolicyDir(),
	}
	if slices.Contains(node.Services(), devnode.LoadBalancer) {
		d.ServiceDir = node.ServiceDir()
	}
	for _, p := range node.PodCIDRs() {
		d.PodCIDRs = append(d.PodCIDRs, p.String())
	}
	d.Services = describeServices(ctx, node)
	return d
}

func describeServices(ctx context.Context, node *devnode.Node) (all []shownService) {
	for _, name := range node.Services() {
		s := shownService{Name: name, Socket: node.Socket(name), Log: node.Log(name)}
		var err error
		if s.PID, err = node.PID(name); err == nil {
			err = node.Serving(ctx, name)
		}
		if s.Serving = err == nil; err != nil {
			s.Error = err.Error()
			if st, ok := status.FromError(err); ok {
				s.Error = st.Message()
			}
		}
		all = append(all, s)
	}
	return all
}

func welcome(inv *invocation.Invocation, w io.Writer, node *devnode.Node, took time.Duration) {
	fmt.Fprintf(w, "Node %s is up after %.1f s.\n\n", node.Instance(), took.Seconds())
	output.Row(w, "COMPONENT", "PID", "SOCKET")
	for _, name := range node.Services() {
		pid, err := node.PID(name)
		if err != nil {
			continue // it has just exited; dev status shows it
		}
		output.Row(w, name, pid, node.Socket(name))
	}
	fmt.Fprintf(w, `
Pods            %s
Node's netns    %s
CNI conflist    %s
Policies        %s, enforcement: %s
Services        %s
Logs            %s

Look at it:
  %[9]s status --instance %[8]s
  %[9]s endpoint list --instance %[8]s
  %[9]s policy list --instance %[8]s
  %[9]s service list --instance %[8]s
  %[9]s observe --follow --instance %[8]s

Connect a network namespace as the pod default/pod1 with the label app=pod1:
  ip netns add pod1
  %[9]s dev connect pod1 pod1 app=pod1 --instance %[8]s

Stop it:
  %[9]s dev down --instance %[8]s
`, strings.Join(prefixTexts(node.PodCIDRs()), ", "), node.Netns(), node.CNIConfDir(), node.PolicyDir(),
		node.PolicyMode(),
		servicesText(node), filepath.Dir(node.Log("ipam")),
		node.Instance(), program())
}

// program returns the command to call this program again: its name if it is in PATH, else os.Args[0].
func program() string {
	const name = "sluice"
	if _, err := exec.LookPath(name); err == nil || len(os.Args) == 0 || strings.ContainsAny(os.Args[0], " \t\"'") {
		return name
	}
	return os.Args[0]
}

// servicesText returns the directory for manifests of services.
func servicesText(node *devnode.Node) string {
	if !slices.Contains(node.Services(), devnode.LoadBalancer) {
		return "not translated: --no-loadbalancer"
	}
	return node.ServiceDir()
}

func prefixTexts(prefixes []netip.Prefix) []string {
	texts := make([]string, 0, len(prefixes))
	for _, p := range prefixes {
		texts = append(texts, p.String())
	}
	return texts
}

func down(ctx context.Context, inv *invocation.Invocation) error {
	what := "Node " + inv.Instance + " is down."
	if _, err := devnode.OpenCluster(inv.Instance); err == nil {
		what = "The nodes of " + inv.Instance + " are down."
	} else if _, err := devnode.Open(inv.Instance); errors.Is(err, devnode.ErrNotRunning) {
		// Down also removes what an interrupted start has left behind.
		what = fmt.Sprintf("Node %s was not up; there is nothing left of it.", inv.Instance)
		if others := inv.OtherNodes(); others != "" {
			what += "\n" + strings.TrimSuffix(others, "\n")
		}
	}
	if err := devnode.Down(ctx, inv.Instance); err != nil {
		return err
	}
	_, err := fmt.Fprintln(inv.ErrOut, what)
	return err
}

// find returns the node that runs a service: the node with the given number if there are several, or the hub for etcd.
func find(inv *invocation.Invocation, number int, service string) (*devnode.Node, error) {
	c, err := devnode.OpenCluster(inv.Instance)
	switch {
	case errors.Is(err, devnode.ErrNotRunning) && number == 0:
		return devnode.Open(inv.Instance)
	case errors.Is(err, devnode.ErrNotRunning):
		return nil, invocation.Usagef("--node: instance %s has only one node", inv.Instance)
	case err != nil:
		return nil, err
	case number != 0:
		return c.Node(number)
	case slices.Contains(c.Hub().Services(), service):
		return c.Hub(), nil
	}
	return nil, invocation.Usagef("instance %s has several nodes: choose one with --node", inv.Instance)
}

func restart(ctx context.Context, inv *invocation.Invocation, number int, service string) error {
	node, err := find(inv, number, service)
	if err != nil {
		return err
	}
	if !slices.Contains(node.Services(), service) {
		return invocation.NotOneOf("", service, node.Services())
	}
	began := time.Now()
	done := inv.Progress(func() string { return "restarting " + service })
	err = node.Restart(ctx, service)
	done()
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(inv.ErrOut, "%s serves again after %.2f s.\n", service, time.Since(began).Seconds())
	return err
}

func printStatus(ctx context.Context, inv *invocation.Invocation) error {
	if c, err := devnode.OpenCluster(inv.Instance); err == nil {
		return printCluster(ctx, inv, c)
	}
	node, err := devnode.Open(inv.Instance)
	if err != nil {
		return err
	}
	d := describe(ctx, inv, node)
	if err := inv.Show(d, func(w io.Writer) { table(w, inv.Wide(), processes("", d.Services)) }); err != nil {
		return err
	}
	if slices.ContainsFunc(d.Services, shownService.away) {
		return invocation.ErrNotReady
	}
	return nil
}

func (s shownService) away() bool { return !s.Serving }

// process is a service of an instance.
type process struct {
	instance string // empty: the only one
	shownService
}

func processes(instance string, services []shownService) (all []process) {
	for _, s := range services {
		all = append(all, process{instance, s})
	}
	return all
}

// columns are the columns of `dev status`. Without -o wide, the table fits in output.Width.
var columns = []output.Column[process]{
	{Header: "COMPONENT", Cell: func(p process) any { return p.Name }},
	{Header: "PID", Cell: func(p process) any {
		if p.PID == 0 {
			return ""
		}
		return p.PID
	}},
	{Header: "SERVING", Cell: func(p process) any {
		if p.Serving {
			return "yes"
		}
		return "no"
	}},
	{Header: "SOCKET", Cell: func(p process) any { return p.Socket }},
	{Header: "LOG", Wide: true, Cell: func(p process) any { return p.Log }},
}

// table writes the table of processes, and the reasons for which some of them do not serve.
func table(w io.Writer, wide bool, all []process) {
	shown := output.Shown(columns, wide)
	if slices.ContainsFunc(all, func(p process) bool { return p.instance != "" }) {
		instance := output.Column[process]{Header: "INSTANCE", Cell: func(p process) any { return p.instance }}
		shown = slices.Insert(shown, 0, instance)
	}
	output.Table(w, shown, all)
	for _, p := range all {
		if p.away() {
			line := output.Printable(strings.TrimSpace(p.instance+" "+p.Name) + ": " + p.Error + "; log: " + p.Log)
			if !wide {
				line = output.Fold(line)
			}
			fmt.Fprint(w, "\n", line, "\n")
		}
	}
}
